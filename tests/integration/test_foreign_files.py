"""Files of others that are unlike what their usual writer makes: compressed, with tensors that
repeat themselves, with rare dtypes, with a .metadata that asks for memory."""

from __future__ import annotations

import json
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import hpstore
from hpstore.checkpoint import Checkpointer, StorageWriter, dcp_to_torch_save, torch_save_to_dcp
from hpstore.checkpoint.convert.export import export_checkpoint
from hpstore.checkpoint.convert.import_files import import_checkpoint
from hpstore.checkpoint.convert.metadata_pickle import read_metadata_pickle
from hpstore.errors import CheckpointError, MalformedFile
from hpstore.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no_dist=True
WIDE = 1 << 40  # elements of a tensor whose steps are 0


def repacked(path: Path) -> Path:
    """A torch.save file as an archiver writes it again."""
    target = path.with_name(f"packed-{path.name}")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    return target


def loaded(pool: hpstore.Pool, name: str) -> torch.Tensor:
    with Checkpointer(pool, "run", rng=False) as ckpt:
        return ckpt.load(1)[name]


# --- torch.save -----------------------------------------------------------------------------------


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_compressed_torch_file_is_imported_as_it_was_saved(
    pool: hpstore.Pool, tmp_path: Path, *, allow_pickle: bool
) -> None:
    """torch maps such a file as if its members were not compressed: what it gave was noise."""
    wanted = torch.arange(50_000, dtype=torch.float32)
    torch.save({"w": wanted}, tmp_path / "a.pt")
    packed = repacked(tmp_path / "a.pt")
    assert packed.stat().st_size < (tmp_path / "a.pt").stat().st_size
    import_checkpoint(pool, "run", 1, packed, format="torch", allow_pickle=allow_pickle)
    assert torch.equal(loaded(pool, "w"), wanted)
    torch_save_to_dcp(packed, tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "back.pt")
    assert torch.equal(torch.load(tmp_path / "back.pt")["w"], wanted)


def test_a_small_file_of_a_huge_tensor_is_refused(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Of one element that is repeated. A tensor that is tied, or repeated a little, is none."""
    torch.save({"w": torch.ones(1).expand(WIDE)}, tmp_path / "wide.pt")
    with pytest.raises(MalformedFile, match="bytes and tensors of"):
        import_checkpoint(pool, "run", 1, tmp_path / "wide.pt")
    assert pool.list("run/") == []
    tied = torch.ones(3)
    torch.save({"w": torch.ones(1).expand(1000), "a": tied, "b": tied}, tmp_path / "good.pt")
    import_checkpoint(pool, "run", 1, tmp_path / "good.pt")
    assert loaded(pool, "w").sum() == 1000


def folded(levels: int) -> list[Any]:
    """Lists of two entries that are one list: as many entries as 2 to the levels, a few bytes."""
    found: list[Any] = [1]
    for _ in range(levels):
        found = [found, found]
    return found


def test_lists_that_hold_one_another_without_end_are_refused(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """In seconds. A list that is there twice, as a scheduler's is, is none of them."""
    itself: list[Any] = []
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    refused = {
        "folded": folded(60),
        "within": ({"a": folded(40)},),
        "tensors": [torch.ones(1), folded(30)],
        "itself": itself,
        "deep": deep,
    }
    for name, state in refused.items():
        path = tmp_path / f"{name}.pt"
        torch.save({"x": state}, path)
        with pytest.raises(MalformedFile, match=r"again and again|nested deeper"):
            import_checkpoint(pool, "run", 1, path)
        with pytest.raises(MalformedFile, match=r"again and again|nested deeper"):
            torch_save_to_dcp(path, tmp_path / "dcp")
        assert not (tmp_path / "dcp").exists()
    assert pool.list("run/") == []
    torch.save({"x": folded(3), "y": [[1, 2]] * 5}, tmp_path / "good.pt")
    import_checkpoint(pool, "run", 1, tmp_path / "good.pt")
    with Checkpointer(pool, "run", rng=False) as ckpt:
        assert ckpt.read(1).tree()["y"] == [[1, 2]] * 5


def test_paths_that_dcp_gives_one_name_are_refused(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins keys by dots. Nothing is written, in a folder or in a pool."""
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    (tmp_path / "names.toml").write_text(f'here = "{tmp_path / "pool.toml"}"\n')
    state = {"a.b": torch.ones(3), "a": {"b": torch.zeros(3)}}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
    with pytest.raises(CheckpointError, match=r"duplicated flatten key a\.b.*joins the keys"):
        export_checkpoint(pool, "run", 1, tmp_path / "out", format="dcp")
    torch.save(state, tmp_path / "x.pt")
    for target in (tmp_path / "out", "hpstore://here/dcp/x"):
        with pytest.raises(CheckpointError, match="joins the keys"):
            torch_save_to_dcp(tmp_path / "x.pt", target)
    assert not (tmp_path / "out").exists()
    assert pool.list("dcp/") == []


@pytest.mark.parametrize("kind", ["of torch", "of a StorageWriter"])
def test_a_value_of_dcp_with_a_huge_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a tensor in a tuple, which DCP saves as a value."""
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    places = [tmp_path / f"d{n}" for n in range(5)]
    state = {"pair": (torch.ones(1).expand(WIDE), 1)}
    with hpstore.create(
        places, data=3, parity=2, config=tmp_path / "pool.toml", name="dcps"
    ) as pool:
        source: str | Path = tmp_path / "dcp"
        if kind == "of torch":
            save_dcp(state, checkpoint_id=source, no_dist=True)
        else:
            save_dcp(state, storage_writer=StorageWriter(pool, "native"), no_dist=True)
            source = "hpstore://dcps/native"
        with pytest.raises(MalformedFile, match="bytes and tensors of"):
            import_checkpoint(pool, "run", 1, source, format="dcp")
        with pytest.raises(MalformedFile, match="bytes and tensors of"):
            dcp_to_torch_save(source, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


# --- .metadata ------------------------------------------------------------------------------------

_NAMES = b"\x80\x04cpathlib\nPosixPath\n\x94ctorch\nSize\n\x94"  # memo 0 and 1


def _joined() -> bytes:
    """Each path is twice the one before: 1 KiB, 17 times."""
    text = b"x" * 1024
    steps = [_NAMES, b"X", len(text).to_bytes(4, "little"), text, b"\x94"]
    for last in range(2, 19):
        steps.append(b"h\x00h%ch%c\x86R\x94" % (last, last))
    return b"".join(steps) + b"."


def _sizes() -> bytes:
    """One list as 400 sizes."""
    steps = [_NAMES, b"](", b"K\x01" * 40_000, b"e\x94"]
    steps += [b"h\x01h\x02\x85R"] * 400
    return b"".join(steps) + b"."


def _states() -> bytes:
    """One dict as the state of 400 records."""
    record = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n\x94"  # memo 2
    entries = [b"X\x04\x00\x00\x00%04xK\x01" % number for number in range(10_000)]
    steps = [_NAMES, record, b"}(", *entries, b"u\x94"]  # memo 3
    steps += [b"h\x02)\x81h\x03b"] * 400
    return b"".join(steps) + b"."


def _parts() -> bytes:
    """One list of 5,000 empty parts as that of 100 tensors."""
    none = torch.Size([0])
    part = ChunkStorageMetadata(offsets=none, sizes=none)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), none, [part] * 5000)
    names = [f"t{number}" for number in range(100)]
    metadata = Metadata(
        dict.fromkeys(names, entry),
        storage_data={MetadataIndex(name, none): _StorageInfo("x", 0, 0) for name in names},
    )
    return pickle.dumps(metadata, protocol=4)


@pytest.mark.parametrize("bomb", [_joined, _sizes, _states, _parts])
def test_a_metadata_takes_no_more_memory_than_it_describes(bomb: Callable[[], bytes]) -> None:
    """Rules 2 and 5 of docs/hostile.md: what it says once and names often is there once."""
    data = bomb()
    assert len(data) < MIB
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile):
            read_metadata_pickle(data, "it")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 24 * MIB


# --- safetensors ----------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch has no such dtype")
def test_scales_of_microscaling_formats_go_in_and_out(pool: hpstore.Pool, tmp_path: Path) -> None:
    """F8_E8M0, which was said to be no dtype of torch."""
    entry = {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"scales": entry}).encode()
    raw = bytes([0, 1, 127, 254])
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    import_checkpoint(pool, "run", 1, tmp_path / "a.safetensors")
    found: Any = loaded(pool, "scales")
    assert found.dtype is torch.float8_e8m0fnu
    assert found.view(torch.uint8).tolist() == list(raw)
    export_checkpoint(pool, "run", 1, tmp_path / "b.safetensors")
    written = (tmp_path / "b.safetensors").read_bytes()
    assert b'"dtype":"F8_E8M0"' in written
    assert written.endswith(raw)


def test_a_dtype_that_is_not_known_is_said_to_be_so(pool: hpstore.Pool, tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"four")
    with pytest.raises(MalformedFile, match="'w' is of dtype 'F4', of which hpstore knows nothing"):
        import_checkpoint(pool, "run", 1, tmp_path / "a.safetensors")
