"""What checkpoint tools refuse: pickles, broken files, lying indexes, what a format cannot hold."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import hpstore
from hpstore.checkpoint import import_checkpoint
from hpstore.checkpoint.convert.safetensors_files import read_safetensors
from hpstore.errors import CheckpointError, ConfigError
from tests.integration.exported_runs import RUN, export, save


class Evil:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def test_pickles_are_run_only_on_request(pool: hpstore.Pool, tmp_path: Path) -> None:
    """A torch.save file with an object, a DCP value that is one, and an object as .metadata."""
    torch.save({"a": Evil(tmp_path / "ran")}, tmp_path / "evil.pt")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save({"a": Evil(tmp_path / "ran")}, checkpoint_id=tmp_path / "value", no_dist=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    for name in ("evil.pt", "value", "d"):
        with pytest.raises(CheckpointError, match="--allow-pickle"):
            import_checkpoint(pool, RUN, 1, tmp_path / name)
    assert not (tmp_path / "ran").exists()
    assert pool.list() == []
    import_checkpoint(pool, RUN, 1, tmp_path / "evil.pt", allow_pickle=True)
    assert (tmp_path / "ran").exists()


def broken_safetensors() -> dict[str, bytes]:
    """Files that are no safetensors, each in its own way."""
    good = safetensors.torch.save({"a": torch.arange(4.0), "b": torch.arange(2.0)})
    length = int.from_bytes(good[:8], "little")
    text = good[8 : 8 + length]

    def changed(old: bytes, new: bytes) -> bytes:
        made = text.replace(old, new)
        assert made != text
        return len(made).to_bytes(8, "little") + made + good[8 + length :]

    return {
        "empty": b"",
        "short": b"abc",
        "cut": good[:-1],
        "longer": good + b"x",
        "header": (1 << 60).to_bytes(8, "little") + good[8:],
        "json": good[:8] + b"}" + good[9:],
        "dtype": changed(b"F32", b"F33"),
        "shape": changed(b"[4]", b"[5]"),
        "negative": changed(b"[4]", b"[-4]"),
        "overlap": changed(b"[16,24]", b"[12,20]"),
        "into": changed(b'[2],"data_offsets":[16,24]', b'[3],"data_offsets":[12,24]'),
        "list": (2).to_bytes(8, "little") + b"[]",
        "infinite": changed(b"[4]", b"[Infinity]"),
        "huge": changed(b"[4]", b"[%d]" % 10**30),
        "deep": (9000).to_bytes(8, "little") + 9000 * b"[",
        "empty and huge": (69).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[0,%d,4],"data_offsets":[0,0]}}' % 2**62,
        "surrogate": (59).to_bytes(8, "little")
        + b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
    }


@pytest.mark.parametrize("name", broken_safetensors())
def test_a_broken_safetensors_file_is_refused(tmp_path: Path, name: str) -> None:
    """Header, ranges, dtypes and the file's length are checked before a tensor is made."""
    (tmp_path / "x.safetensors").write_bytes(broken_safetensors()[name])
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_safetensors(tmp_path / "x.safetensors")


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    """A tensor that its file lacks, and a path out of the folder."""
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for where, said in ({"b": "m.safetensors"}, "holds no"), ({"a": "../m.safetensors"}, "outside"):
        index.write_text(json.dumps({"weight_map": where}))
        with pytest.raises(CheckpointError, match=said):
            read_safetensors(tmp_path)


def test_what_a_format_cannot_hold_is_refused(pool: hpstore.Pool, tmp_path: Path) -> None:
    """complex128 for safetensors, two names that become one, parts that are not there."""
    save(
        pool,
        1,
        {
            "a": {"b.c": torch.zeros(1), "b": {"c": torch.ones(1)}},
            "z": torch.zeros(1, dtype=torch.complex128),
            "n": 1,
        },
    )
    with pytest.raises(CheckpointError, match="complex128"):
        export(pool, tmp_path / "out", keys=["z"])
    with pytest.raises(CheckpointError, match="both be called"):
        export(pool, tmp_path / "out", keys=["a"])
    with pytest.raises(CheckpointError, match=r"\['q'\]"):
        export(pool, tmp_path / "out", keys=["a/b", "q"])
    with pytest.raises(CheckpointError, match="is a tensor"):
        export(pool, tmp_path / "out", keys=["n"])
    with pytest.raises(CheckpointError, match="stripped"):
        export(pool, tmp_path / "out", strip="a")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["a\0b", "a\ud800", "n" * 256, "", 7, b"a"], ids=repr)
def test_a_path_that_no_file_can_have_is_refused(pool: hpstore.Pool, path: Any) -> None:
    """They were errors of Python's own."""
    save(pool, 1, {"model": {"w": torch.ones(3)}})
    for call in (lambda: export(pool, path), lambda: import_checkpoint(pool, "new", 1, path)):
        with pytest.raises(ConfigError, match=r"(target|source) .*(cannot be used|must be a path)"):
            call()


def test_a_name_as_long_as_names_can_be_is_written(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Its neighbour, into which it is written first, had a longer one."""
    save(pool, 1, {"model": {"w": torch.ones(3)}})
    for name in ("n" * 251 + ".pt", "d" * 255):
        export(pool, tmp_path / name)
        assert (tmp_path / name).exists()
