"""Manifests and frames made by somebody else: an error that says so, no crash, no other values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.format.checkpoint_manifest import MAGIC, Manifest, manifest_key
from hpstore.checkpoint.format.items import FRAME_BYTES
from hpstore.checkpoint.format.segment_codecs import decode
from hpstore.codec.compression import encoder
from hpstore.config import Settings
from hpstore.errors import IntegrityError
from hpstore.format.checksum import digest128
from hpstore.units import MIB

pytestmark = pytest.mark.usefixtures("segments_apart")


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    """With step 1: "w", two frames compressed, and a dict with a number for a key."""
    settings = Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run"))
    paths = [tmp_path / f"d{i}" for i in range(5)]
    with (
        hpstore.create(paths, data=3, parity=2, config=tmp_path / "p", settings=settings) as pool,
        Checkpointer(pool, "run", rng=False, save=SaveOptions(compression="lz4")) as made,
    ):
        made.save(1, {"w": torch.zeros(400_000), "d": {1: 2}}).result()
        yield made


def sealed(text: bytes) -> bytes:
    """A manifest of any text, its digest right."""
    return MAGIC + f"2 {digest128(text).hex()}\n".encode() + text


@pytest.mark.parametrize(
    "text", [b"{", b"\xff\xfe", b"[]", b"[" * 10**5, b'{"step":' + b"9" * 5000 + b"}"]
)
def test_a_manifest_that_is_no_manifest_is_an_integrity_error(text: bytes) -> None:
    """latest_valid and restore pass over it to the step before; another error would end them."""
    with pytest.raises(IntegrityError):
        Manifest.decode(sealed(text), where="here")


CHANGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a frame of nothing": (("items", "frames", "0", 1), [0, 0]),
    "a frame less": (("items", "frames", "0", 1), [100]),
    "a name that is a list": (("items", "names", 0), [1]),
    "a codec that is a list": (("items", "frames", "0", 0), [1]),
    "a longer shape": (("items", "shapes", 0), [10**12]),
    "an offset that is no whole number": (("items", "offsets", 0), 1.5),
    "a state that is none": (("tree",), "x"),
    "a kind without a value": (("tree", "d"), {"$": "tuple"}),
    "another dtype in a scalar": (("tree", "d"), {"$": "scalar", "dtype": "Tensor", "v": ""}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_manifest_with_a_wrong_entry_is_an_integrity_error(ckpt: Checkpointer, case: str) -> None:
    """Also where a restore would have come back without having filled a tensor."""
    path, value = CHANGES[case]
    key = manifest_key("run", 1)
    body = json.loads(ckpt.pool.get(key).partition(b"\n")[2])
    place = body
    for name in path[:-1]:
        place = place[name]
    assert path[-1] in place or type(place) is list
    place[path[-1]] = value
    ckpt.pool.put(key, sealed(json.dumps(body).encode()))
    with pytest.raises(IntegrityError):
        ckpt.restore({"w": torch.ones(400_000), "d": {1: 0}}, 1)


@pytest.mark.parametrize("codec", ["lz4", "shuffle-lz4"])
@pytest.mark.parametrize("at", [0, 4, 12])
def test_a_frame_whose_header_lies_is_an_integrity_error(codec: str, at: int) -> None:
    """Blosc would read past its end, LZ4 would ask for as much memory as it says."""
    stored = bytearray(encoder(codec)(np.zeros(FRAME_BYTES, np.uint8), 4))
    stored[at : at + 4] = b"\xf0\xff\xff\x7f"
    with pytest.raises(IntegrityError):
        decode(codec, np.frombuffer(bytes(stored), np.uint8), np.empty(FRAME_BYTES, np.uint8))


def within(body: dict[str, Any], rest: bytes, *, length: int | None = None) -> bytes:
    """A manifest of format 3, its digest right, with `rest` after its JSON."""
    text = json.dumps(body).encode()
    line = f"3 {digest128(text).hex()} {len(text) if length is None else length}\n".encode()
    return MAGIC + line + text + rest


BODY = {"step": 1, "created_ms": 1, "segments": [["", 8, ""]], "items": [], "tree": {}}


@pytest.mark.parametrize(
    "data",
    [
        within(BODY, b""),
        within(BODY, bytes(7)),
        within(BODY, bytes(9)),
        within(BODY, bytes(8), length=0),
        within(BODY, bytes(8), length=-1),
        within(BODY, bytes(8), length=10**30),
        within({**BODY, "segments": [["", 4, ""], ["", 4, ""]]}, bytes(8)),
        within({**BODY, "segments": [["", -8, ""], ["", 16, ""]]}, bytes(8)),
        within({**BODY, "segments": [["", 10**18, ""]]}, bytes(8)),
        within({**BODY, "segments": []}, bytes(8)),
        within(BODY, bytes(8)).replace(b" ", b"  ", 3),
        MAGIC + b"3 \n",
        MAGIC + b"3 00",
        MAGIC,
    ],
)
def test_bytes_within_a_manifest_are_those_of_its_segment(data: bytes) -> None:
    """Lengths that do not fit are damage, found before anything is read or allocated by them."""
    with pytest.raises(IntegrityError):
        Manifest.decode(data, where="here")
