"""dcp_to_torch_save and torch_save_to_dcp: folders and URLs on either side, beside torch's own."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import hpstore
from hpstore.checkpoint import (
    StorageWriter,
    dcp_to_torch_save,
    torch_load,
    torch_save,
    torch_save_to_dcp,
)
from hpstore.checkpoint.convert import dcp_objects
from hpstore.checkpoint.convert.metadata_pickle import read_metadata_pickle
from hpstore.errors import (
    CheckpointError,
    ConfigError,
    IntegrityError,
    MalformedFile,
    RedundancyError,
    RedundancyWarning,
    TooFewDevices,
    VersionConflict,
)
from hpstore.pool.pool import Pool
from tests.interop.named_pool import make_named_pool
from tests.interop.test_torch_objects import same, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no_dist=True


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the objects of a pool of a name are."""
    make_named_pool(tmp_path, monkeypatch)
    return "hpstore://dcps"


def training() -> dict[str, Any]:
    """More kinds of values than `state()`: lists of tensors and of dicts, a tuple of tensors."""
    return {
        **state(),
        "list": [torch.ones(2), {"x": torch.zeros(3, dtype=torch.bfloat16)}, 7],
        "pair": (torch.arange(3), 2.5),
        "scalar": torch.tensor(3.0),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
    }


def save(where: str, saved: dict[str, Any]) -> None:
    """As stock torch does."""
    save_dcp(saved, checkpoint_id=where, no_dist=True)


def stock(folder: Path, target: Path) -> Any:
    """What torch's own function writes."""
    format_utils.dcp_to_torch_save(folder, target)
    return torch.load(target, weights_only=True)


def place(kind: str, tmp_path: Path, url: str, name: str) -> str:
    return f"{url}/{name}" if kind == "url" else str(tmp_path / name)


@pytest.mark.parametrize("source", ["folder", "url", "native"])
@pytest.mark.parametrize("target", ["folder", "url"])
def test_a_dcp_checkpoint_becomes_the_file_that_torch_makes_of_it(
    source: str, target: str, tmp_path: Path, url: str
) -> None:
    """Value by value, in the same order, from stock's files and from a StorageWriter's."""
    saved = training()
    save(str(tmp_path / "stock"), saved)
    wanted = stock(tmp_path / "stock", tmp_path / "stock.pt")
    if source == "native":
        with hpstore.open(tmp_path / "pool.toml") as pool:
            save_dcp(saved, storage_writer=StorageWriter(pool, "ckpt"), no_dist=True)
    else:
        save(place(source, tmp_path, url, "ckpt"), saved)
    out = place(target, tmp_path, url, "all.pt")
    for _ in range(2):  # the second replaces the first
        dcp_to_torch_save(
            place("url" if source == "native" else source, tmp_path, url, "ckpt"), out
        )
        found = torch_load(out) if target == "url" else torch.load(out, weights_only=True)
        assert same(found, wanted)
        assert list(found) == list(wanted)
    if target == "folder":
        with zipfile.ZipFile(out) as archive:
            assert archive.testzip() is None


@pytest.mark.parametrize("source", ["folder", "url"])
@pytest.mark.parametrize("target", ["folder", "url"])
def test_a_torch_file_becomes_a_checkpoint_that_dcp_loads(
    source: str, target: str, tmp_path: Path, url: str
) -> None:
    """By stock dcp.load, from the folder and by URL, and back to the file it came from."""
    saved = training()
    file = place(source, tmp_path, url, "all.pt")
    torch_save(saved, file) if source == "url" else torch.save(saved, file)
    torch.save(saved, tmp_path / "again.pt")
    out = place(target, tmp_path, url, "ckpt")
    for _ in range(2):  # the second replaces the first
        torch_save_to_dcp(file, out)
    into: dict[str, Any] = {"model": {n: torch.zeros_like(t) for n, t in saved["model"].items()}}
    into["turned"], into["epoch"] = torch.zeros(4, 3), 0
    load_dcp(into, checkpoint_id=out, no_dist=True)
    format_utils.torch_save_to_dcp(tmp_path / "again.pt", tmp_path / "stock")
    assert same(into["model"], saved["model"])
    assert torch.equal(into["turned"], saved["turned"])
    assert into["epoch"] == 3
    dcp_to_torch_save(out, tmp_path / "back.pt")
    wanted = stock(tmp_path / "stock", tmp_path / "stock.pt")
    assert same(torch.load(tmp_path / "back.pt", weights_only=True), wanted)


def test_parts_that_several_ranks_saved_are_put_together(tmp_path: Path) -> None:
    """A grid of shards of one tensor, in the files of four ranks, as FSDP with TP leaves them."""
    whole = torch.arange(48.0).reshape(6, 8)
    save(str(tmp_path / "ckpt"), {"w": whole})
    path = tmp_path / "ckpt" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entry: TensorStorageMetadata = metadata.state_dict_metadata["w"]
    (index, info), entry.chunks = next(iter(metadata.storage_data.items())), []
    metadata.storage_data = {}
    for number, (top, left) in enumerate([(0, 0), (0, 5), (4, 0), (4, 5)]):
        part = whole[top : 4 if top == 0 else 6, left : 5 if left == 0 else 8].clone()
        at = torch.Size((top, left))
        entry.chunks.append(ChunkStorageMetadata(offsets=at, sizes=part.shape))
        torch.save(part, tmp_path / "ckpt" / f"__{number}_0.distcp")
        length = os.path.getsize(tmp_path / "ckpt" / f"__{number}_0.distcp")
        place_ = type(info)(f"__{number}_0.distcp", 0, length)
        metadata.storage_data[type(index)("w", at)] = place_
    path.write_bytes(pickle.dumps(metadata))
    dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "w.pt")
    assert torch.equal(torch.load(tmp_path / "w.pt")["w"], whole)
    entry.chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(MalformedFile, match="do not cover it exactly once"):
        dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "w.pt")
    assert torch.equal(torch.load(tmp_path / "w.pt")["w"], whole)


class _Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.witness),)


def test_no_code_in_a_checkpoint_runs(tmp_path: Path, url: str) -> None:
    """Not that of a .metadata, of an entry, or of a torch.save file; nothing is written either."""
    witness, target = tmp_path / "witness", tmp_path / "out.pt"
    save(str(tmp_path / "ckpt"), {"a": 1})
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(_Evil(witness)))
    with pytest.raises(MalformedFile, match=r"names posix\.mkdir, which no DCP checkpoint needs"):
        dcp_to_torch_save(tmp_path / "evil", target)
    data = io.BytesIO()
    torch.save(_Evil(witness), data)
    metadata = pickle.loads((tmp_path / "ckpt" / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    moved = type(info)(info.relative_path, 0, len(data.getvalue()))
    metadata.storage_data = dict.fromkeys(metadata.storage_data, moved)
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "ckpt" / info.relative_path).write_bytes(data.getvalue())
    with pytest.raises(CheckpointError, match="without running code"):
        dcp_to_torch_save(tmp_path / "ckpt", target)
    torch_save({"a": _Evil(witness)}, f"{url}/evil.pt")
    torch.save({"a": _Evil(witness)}, tmp_path / "evil.pt")
    for file in (f"{url}/evil.pt", tmp_path / "evil.pt"):
        for out in (f"{url}/out", tmp_path / "out"):
            with pytest.raises(MalformedFile, match="which runs code that its writer chose"):
                torch_save_to_dcp(file, out)
    assert not witness.exists()
    assert not target.exists()
    assert not (tmp_path / "out").exists()
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert pool.list("out") == []


def test_every_damaged_metadata_is_malformed(tmp_path: Path) -> None:
    """Cut anywhere, and with each byte changed: an IntegrityError or what the bytes now say."""
    save(str(tmp_path / "ckpt"), {"a": [torch.ones(2), {"b": 1}]})
    data = (tmp_path / "ckpt" / ".metadata").read_bytes()
    assert read_metadata_pickle(data, "it").names == ("a.0", "a.1.b")
    for at in range(len(data)):
        with pytest.raises(IntegrityError):
            read_metadata_pickle(data[:at], "it")
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(data)
            changed[at] ^= flip
            try:
                read_metadata_pickle(bytes(changed), "it")
            except IntegrityError as error:
                assert str(error).startswith("it is malformed: ")  # noqa: PT017


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.planner_data.update(w=("l", 10**9)), "a list of 1000000001 entries"),
        (lambda m: m.planner_data.update(w=("l", -1)), "names and numbers"),
        (lambda m: m.planner_data.update(w=("n",)), "two entries are at"),
        (lambda m: m.planner_data.update(w=("n", "w")), "a _Leaf where a dict belongs"),
        (lambda m: m.planner_data.update(w=()), "without a path"),
        (lambda m: _info(m, relative_path="../x"), "is no name of a file"),
        (lambda m: _info(m, relative_path="/etc/passwd"), "is no name of a file"),
        (lambda m: _info(m, offset=10**6), "bytes, and"),
        (lambda m: _info(m, length=3), "3 bytes hold no"),
        (lambda m: _info(m, transform_descriptors=["zstd"]), "transformed by an extension"),
        (lambda m: _sizes(m, 1 << 50), "hold no"),
        (lambda m: m.storage_data.clear(), "KeyError"),
    ],
)
def test_what_a_metadata_may_not_say(change: Any, said: str, tmp_path: Path) -> None:
    """Lists without end, files elsewhere, tensors larger than their bytes, extensions."""
    save(str(tmp_path / "ckpt"), {"n": 1, "w": torch.ones(3)})
    path = tmp_path / "ckpt" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(IntegrityError, match=said):
        dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "out.pt")
    assert not any("out.pt" in path.name for path in tmp_path.iterdir())


def _info(metadata: Any, **changes: Any) -> None:
    """Another place for the tensor."""
    for index, info in metadata.storage_data.items():
        if index.fqn == "w":
            vars(info).update(changes)


def _sizes(metadata: Any, size: int) -> None:
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size([size])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))]


def test_files_that_are_no_source_or_target(tmp_path: Path, url: str) -> None:
    """Nothing there, other things there, no dict, a tensor that repeats one element without end,
    a compressed archive."""
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "absent", f"{url}/absent"):
        with pytest.raises(CheckpointError, match="is no DCP checkpoint"):
            dcp_to_torch_save(nothing, tmp_path / "out.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "empty" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds other files \(thesis\.tex\)"):
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "empty")
    with hpstore.open(tmp_path / "pool.toml") as pool:
        pool.put("kept/thesis.tex", b"x")
        save_dcp({"a": 1}, storage_writer=StorageWriter(pool, "native"), no_dist=True)
    for taken in ("kept", "native"):
        with pytest.raises(ConfigError, match="choose a path of its own"):
            torch_save_to_dcp(tmp_path / "a.pt", f"{url}/{taken}")
    torch_save([torch.ones(1)], f"{url}/list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        torch_save_to_dcp(f"{url}/list.pt", tmp_path / "out")
    torch_save({"a": torch.ones(1).expand(1 << 40)}, f"{url}/wide.pt")
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "wide.pt")
    for wide in (f"{url}/wide.pt", tmp_path / "wide.pt"):
        with pytest.raises(MalformedFile, match="bytes and tensors of"):
            torch_save_to_dcp(wide, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, hpstore.open(tmp_path / "pool.toml") as pool:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
            for member in old.infolist():
                new.writestr(member.filename, old.read(member))
        pool.put("packed.pt", packed.getvalue())
    with pytest.raises(MalformedFile, match="is compressed"):
        torch_save_to_dcp(f"{url}/packed.pt", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, hpstore.open(tmp_path / "pool.toml") as pool:
        strided = io.BytesIO()
        with zipfile.ZipFile(strided, "w") as new:
            for member in old.infolist():
                data = old.read(member)
                if member.filename.endswith("data.pkl"):
                    one = b"K\x01\x85q\t\x89"  # a step of 1, and requires_grad=False
                    assert data.count(one) == 1
                    data = data.replace(one, b"J\xff\xff\xff\x7f\x85q\t\x89")
                new.writestr(member.filename, data)
        pool.put("strided.pt", strided.getvalue())
    with pytest.raises(MalformedFile, match="behind its end"):
        torch_save_to_dcp(f"{url}/strided.pt", tmp_path / "out")
    torch_save({"a": torch.eye(2).to_sparse()}, f"{url}/sparse.pt")
    with pytest.raises(CheckpointError, match="sparse or quantized"):
        torch_save_to_dcp(f"{url}/sparse.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_leaves_the_checkpoint_that_was_there(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the put of .metadata the old one counts; its files go afterwards, the new one's with
    an error."""
    monkeypatch.setattr(dcp_objects, "FILE_BYTES", 1000)
    torch_save({"a": torch.zeros(300), "b": torch.zeros(300)}, f"{url}/old.pt")
    torch_save({"a": torch.ones(300), "b": torch.ones(300)}, f"{url}/new.pt")
    torch_save_to_dcp(f"{url}/old.pt", f"{url}/ckpt")
    with hpstore.open(tmp_path / "pool.toml") as pool:
        before = pool.list("ckpt")
        assert len(before) == 3

        def broken(place: Any, metadata: Any, version: str | None) -> None:
            dcp_to_torch_save(f"{url}/ckpt", tmp_path / "meanwhile.pt")
            raise TooFewDevices("no more")

        with monkeypatch.context() as patched:
            patched.setattr(dcp_objects, "_commit", broken)
            with pytest.raises(TooFewDevices, match="no more"):
                torch_save_to_dcp(f"{url}/new.pt", f"{url}/ckpt")
        assert torch.load(tmp_path / "meanwhile.pt")["a"].sum() == 0
        assert pool.list("ckpt") == before
        torch_save_to_dcp(f"{url}/new.pt", f"{url}/ckpt")
        assert len(pool.list("ckpt")) == 3
        assert not set(pool.list("ckpt")) & set(before) - {"ckpt/.metadata"}
    dcp_to_torch_save(f"{url}/ckpt", tmp_path / "after.pt")
    assert torch.load(tmp_path / "after.pt")["b"].sum() == 300


@pytest.mark.parametrize("error", [KeyboardInterrupt, RedundancyError])
def test_a_commit_of_unclear_fate_leaves_what_it_may_name(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The put of .metadata has stored it and raises: its data files were removed, and the old
    checkpoint was gone, too. What is left over goes with the next one."""
    torch_save({"a": torch.zeros(3)}, f"{url}/a.pt")
    torch_save({"a": torch.ones(3)}, f"{url}/b.pt")
    torch_save_to_dcp(f"{url}/a.pt", f"{url}/ckpt")
    commit = dcp_objects._commit

    def unclear(place: Any, metadata: Any, version: str | None) -> None:
        commit(place, metadata, version)
        raise error("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(dcp_objects, "_commit", unclear)
        with pytest.raises(error, match="interrupted"):
            torch_save_to_dcp(f"{url}/b.pt", f"{url}/ckpt")
    dcp_to_torch_save(f"{url}/ckpt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["a"].sum() == 3
    torch_save_to_dcp(f"{url}/a.pt", f"{url}/ckpt")
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert len(pool.list("ckpt")) == 2


def test_of_two_writers_at_once_one_wins_and_the_other_learns_of_it(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that commits second leaves nothing, and removes nothing of the first."""
    torch_save({"a": torch.zeros(3)}, f"{url}/a.pt")
    torch_save({"a": torch.ones(3)}, f"{url}/b.pt")
    torch_save_to_dcp(f"{url}/a.pt", f"{url}/ckpt")
    commit = dcp_objects._commit

    def overtaken(place: Any, metadata: Any, version: str | None) -> None:
        monkeypatch.setattr(dcp_objects, "_commit", commit)
        torch_save_to_dcp(f"{url}/b.pt", f"{url}/ckpt")
        commit(place, metadata, version)

    monkeypatch.setattr(dcp_objects, "_commit", overtaken)
    with pytest.raises(VersionConflict):
        torch_save_to_dcp(f"{url}/a.pt", f"{url}/ckpt")
    dcp_to_torch_save(f"{url}/ckpt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["a"].sum() == 3
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert len(pool.list("ckpt")) == 2


def test_one_tensor_at_a_time_is_read(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 MB in a pool no call asks for more than a tensor's 4 MB, and none is kept."""
    torch_save({str(n): torch.full((1 << 20,), float(n)) for n in range(10)}, f"{url}/big.pt")
    monkeypatch.setattr(dcp_objects, "FILE_BYTES", 1 << 20)
    put, sizes = Pool.put, []

    def seen(pool: Pool, key: str, data: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(data) if hasattr(data, "__len__") else 0)
        return put(pool, key, data, *args, **options)

    monkeypatch.setattr(Pool, "put", seen)
    torch_save_to_dcp(f"{url}/big.pt", f"{url}/ckpt")
    assert len(sizes) == 11
    assert max(sizes) < 5 << 20
    shutil.rmtree(tmp_path / "d1")
    with pytest.warns(RedundancyWarning):
        dcp_to_torch_save(f"{url}/ckpt", f"{url}/back.pt")
    assert same(torch_load(f"{url}/back.pt"), torch_load(f"{url}/big.pt"))
