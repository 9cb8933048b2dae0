"""Keys of an exported torch file are of types that torch.load(weights_only=True) takes."""

from __future__ import annotations

import datetime
import enum
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.errors import CheckpointError
from tests.integration.exported_runs import export, save


class Part(enum.Enum):
    BODY = 1


class Level(enum.IntEnum):
    LOW = 3


class Role(enum.StrEnum):
    BODY = "body"


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


@dataclass(frozen=True)
class At:
    row: int


KEYS: dict[str, tuple[Any, Any]] = {
    "number of numpy": (np.int64(3), 3),
    "float of numpy": (np.float32(0.5), 0.5),
    "text of numpy": (np.str_("a"), "a"),
    "bool of numpy": (np.bool_(True), True),
    "bytes": (b"a", b"a"),
    "enum": (Part.BODY, "Part.BODY"),
    "enum of numbers": (Level.LOW, 3),
    "enum of texts": (Role.BODY, "body"),
    "flag": (Bits.ONE | Bits.TWO, 3),
    "tuple": ((1, np.int64(2), Part.BODY), (1, 2, "Part.BODY")),
    "set": (frozenset({1}), (1,)),
    "path": (Path("a/b"), "a/b"),
    "date": (datetime.date(2026, 1, 1), "2026-01-01"),
    "object": (At(1), "At(row=1)"),
    "device": (torch.device("cpu"), torch.device("cpu")),
    "None": (None, None),
    "nan": (float("inf"), float("inf")),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_of_an_exported_file_are_plain_as_values_are(
    pool: hpstore.Pool, tmp_path: Path, case: str
) -> None:
    """torch.load(weights_only=True) refused such a key, and an enum that is a number."""
    key, wanted = KEYS[case]
    save(pool, 1, {"m": {key: torch.ones(2), "x": key}, "c": Counter({key: 2})})
    export(pool, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["c"] == {wanted: 2}
    assert [type(name) for name in found["c"]] == [type(wanted)]
    assert list(found["m"]) == [wanted, "x"]
    assert found["m"][wanted].tolist() == [1, 1]
    if case != "object":  # a dict, as a value
        assert (found["m"]["x"], type(found["m"]["x"])) == (wanted, type(wanted))


def test_keys_that_become_one_in_an_export_are_refused(pool: hpstore.Pool, tmp_path: Path) -> None:
    save(pool, 1, {"m": {Part.BODY: 1, "Part.BODY": 2}, "t": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"two keys that are 'Part\.BODY'"):
        export(pool, tmp_path / "x.pt")
