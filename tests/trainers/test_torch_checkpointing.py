"""PoolStorage: the Storage contract beside the package's own, crashes, and real saves and loads."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import CheckpointError, InvalidKey, VersionConflict
from hpstore.pool.pool import Pool
from hpstore.trainers.rename_plan import TOP, EntryMove, RenamePlan, next_root, parse_move

package = pytest.importorskip("torch_checkpointing")
from torch_checkpointing.storage.base_storage import ReadArgs, Storage  # noqa: E402
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: E402

from hpstore.trainers.torch_checkpointing import PoolStorage, PoolStorageConfig  # noqa: E402
from tests.thorough import crash_points  # noqa: E402


@pytest.fixture(params=["pool", "the package's own"])
def storage(request: pytest.FixtureRequest, pool: Pool) -> Storage:
    """Ours and the package's local one: the contract below holds for both."""
    if request.param == "pool":
        return PoolStorageConfig(pool, "tc").create_storage()
    return LocalFileSystemStorageConfig(use_direct_io=False).create_storage()


def tree(storage: Storage, path: Path) -> Any:
    """Everything at a path: bytes of a file, a dict of a directory, None."""
    if storage.isdir(path):
        return {name: tree(storage, path / name) for name in storage.ls(path)}
    return storage.read(path) if storage.exists(path) else None


def grow(storage: Storage, path: Path, content: Any) -> None:
    """Make what tree() shows."""
    if isinstance(content, dict):
        storage.mkdir(path)
        for name, child in content.items():
            grow(storage, path / name, child)
    elif content is not None:
        storage.write(path, content)


FULL = {"a.pt": b"one", "sub": {"b.pt": b"two"}}


@pytest.mark.parametrize(
    ("source", "target", "after"),
    [
        (FULL, None, FULL),
        (FULL, {}, FULL),
        ({}, None, {}),
        (FULL, {"old.pt": b"old"}, None),
        (FULL, {"sub": {}}, None),
        (FULL, b"file", None),
        (b"new", None, b"new"),
        (b"new", b"old", b"new"),
        (b"new", {}, None),
        (b"new", {"old.pt": b"old"}, None),
    ],
    ids=[
        "directory to nothing",
        "onto an empty directory",
        "empty directory to nothing",
        "onto a full directory",
        "onto a directory of directories",
        "directory onto a file",
        "file to nothing",
        "file onto a file",
        "file onto an empty directory",
        "file onto a full directory",
    ],
)
def test_rename_contract(
    storage: Storage, tmp_path: Path, source: Any, target: Any, after: Any
) -> None:
    """Every row: at the target itself, never nested, never merged; an OSError changes nothing."""
    here = tmp_path / "w"
    storage.mkdir(here)
    grow(storage, here / "from", source)
    grow(storage, here / "to", target)
    if after is None:
        with pytest.raises(OSError):
            storage.rename(here / "from", here / "to", is_directory=isinstance(source, dict))
        assert tree(storage, here) == {"from": source, "to": target}
    else:
        storage.rename(here / "from", here / "to", is_directory=isinstance(source, dict))
        assert tree(storage, here) == {"to": after}


def test_the_rest_of_the_contract(storage: Storage, tmp_path: Path) -> None:
    """Files, directories, sizes, globs and the errors for what is not there."""
    here = tmp_path / "w"
    storage.mkdir(here / "one" / "two")
    assert (storage.exists(here / "one"), storage.isdir(here / "one" / "two")) == (True, True)
    storage.write(here / "one" / "f.json", b"{}")
    storage.write(here / "one" / "empty", b"")
    with storage.stream_write(here / "one" / "g.pt") as stream:
        stream.write(b"abc")
        stream.write(memoryview(b"def"))
    assert storage.read(here / "one" / "g.pt") == b"abcdef"
    assert storage.read(here / "one" / "empty") == b""
    assert storage.getsize(here / "one" / "g.pt") == 6
    assert sorted(storage.ls(here / "one")) == ["empty", "f.json", "g.pt", "two"]
    assert storage.glob(str(here / "one" / "*.pt")) == [str(here / "one" / "g.pt")]
    assert not storage.isdir(here / "one" / "g.pt")
    storage.delete(here / "one" / "g.pt")
    assert not storage.exists(here / "one" / "g.pt")
    with pytest.raises(FileExistsError):
        storage.mkdir(here / "one", recursive=False)
    with pytest.raises(FileNotFoundError):
        storage.mkdir(here / "no" / "parent", recursive=False)
    storage.rmdir(here / "one")
    assert not storage.exists(here / "one")
    for action in (storage.read, storage.getsize, storage.ls, storage.delete, storage.rmdir):
        with pytest.raises(FileNotFoundError):
            action(here / "one")
    with pytest.raises(OSError):
        storage.rename(here / "one", here / "x")


def test_reads_by_ranges(storage: Storage, tmp_path: Path) -> None:
    """Seek and readinto from every side, without reading the file whole."""
    storage.mkdir(tmp_path / "w")
    data = os.urandom(300_001)
    storage.write(tmp_path / "w" / "x", data)
    args = ReadArgs(pre_read_full_file=False)
    with storage.stream_read(tmp_path / "w" / "x", args) as stream:
        buffer = bytearray(1000)
        assert stream.seek(70_000) == 70_000
        assert stream.readinto(buffer) == 1000
        assert buffer == data[70_000:71_000]
        assert stream.seek(-5, io.SEEK_END) == 299_996
        assert stream.read() == data[-5:]
        assert stream.readinto(buffer) == 0
        stream.seek(0)
        assert stream.read(10) == data[:10]


# --- beyond the contract --------------------------------------------------------------------------


def test_a_renamed_away_directory_begins_anew(pool: Pool) -> None:
    """The same temporary name again and again: what is written never lands in what was moved."""
    ours = PoolStorage(pool, "tc")
    for step in range(3):
        grow(ours, Path("/c/tmp"), {"f": b"%d" % step})
        ours.rename(Path("/c/tmp"), Path(f"/c/step-{step}"), is_directory=True)
        assert not ours.exists(Path("/c/tmp"))
    grow(ours, Path("/c/tmp"), {"g": b"new"})
    ours.rmdir(Path("/c/step-0"))
    ours.rename(Path("/c/step-1"), Path("/d/moved"))
    assert tree(ours, Path("/")) == {
        "c": {"step-2": {"f": b"2"}, "tmp": {"g": b"new"}},
        "d": {"moved": {"f": b"1"}},
    }
    ours.rename(Path("/c"), Path("/e"))
    assert tree(ours, Path("/e")) == {"step-2": {"f": b"2"}, "tmp": {"g": b"new"}}
    ours.rmdir(Path("/e"))
    ours.rmdir(Path("/d"))
    assert tree(ours, Path("/")) == {}
    assert [key for key in pool.list("tc/") if "/moves/" not in key] == []


def test_entries_of_old_removals_are_dropped(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many checkpoints made and removed: entries stay few, but those still needed stay."""
    monkeypatch.setattr("hpstore.trainers.rename_plan.OLD", 12)
    ours = PoolStorage(pool, "tc")
    ours.write(Path("c/f"), b"first")
    ours.rmdir(Path("c"))
    ours.write(Path("c/f"), b"second")  # its root is found only while the first's is taken
    for number in range(10):  # three entries each
        ours.write(Path(f"t{number}/f"), b"x")
        ours.rename(Path(f"t{number}"), Path(f"c{number}"))
        ours.rmdir(Path(f"c{number}"))
    assert len(pool.list("tc/moves/")) <= 6
    assert tree(ours, Path()) == {"c": {"f": b"second"}}


def test_a_crash_leaves_the_rename_made_or_not(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash before each change of the pool in rename and removal: whole at one place, or gone."""
    put, delete = Pool.put, Pool.delete
    whole = {"a": b"1", "b": {"c": b"2"}}
    for crash_at in crash_points():
        ours = PoolStorage(pool, f"tc{crash_at}")
        grow(ours, Path("tmp"), whole)
        grow(ours, Path("old"), {"x": b"3"})
        left = [crash_at]

        def counted(kind: Any, left: list[int] = left) -> Any:
            def change(self: Pool, *args: Any, **options: Any) -> Any:
                if not left[0]:
                    raise SimulatedCrash
                left[0] -= 1
                return kind(self, *args, **options)

            return change

        monkeypatch.setattr(Pool, "put", counted(put))
        monkeypatch.setattr(Pool, "delete", counted(delete))
        finished = True
        try:
            ours.rename(Path("tmp"), Path("new"), is_directory=True)
            ours.rmdir(Path("old"))
        except SimulatedCrash:
            finished = False
        monkeypatch.undo()
        again = PoolStorage(pool, f"tc{crash_at}")
        found = tree(again, Path())
        assert found in (
            {"tmp": whole, "old": {"x": b"3"}},
            {"new": whole, "old": {"x": b"3"}},
            {"new": whole},
        )
        grow(again, Path("tmp"), {"n": b"4"})  # a resumed run writes on
        if "new" in found:
            again.rename(Path("tmp"), Path("next"))
            assert tree(again, Path("new")) == whole
            assert tree(again, Path("next")) == {"n": b"4"}
        if finished:
            assert crash_at > 3
            assert found == {"new": whole}
            return


def test_a_file_appears_only_when_it_is_whole(pool: Pool) -> None:
    """A stream left by an exception, or forgotten, leaves no file; an old one stays."""
    ours = PoolStorage(pool, "tc")
    ours.write(Path("x"), b"old")

    def interrupted() -> None:
        with ours.stream_write(Path("x")) as stream:
            stream.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    forgotten = ours.stream_write(Path("y"))
    forgotten.write(b"half")
    del forgotten
    assert tree(ours, Path()) == {"x": b"old"}


def test_a_directory_in_danger_is_not_committed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that would not survive one more loss: the rename raises, everything is as it was."""
    ours = PoolStorage(pool, "tc")
    grow(ours, Path("tmp"), FULL)

    def endangered(pool: Pool, key: str) -> int:
        if key.endswith("sub/b.pt"):
            raise CheckpointError("no spare device")
        return 1

    monkeypatch.setattr("hpstore.trainers.torch_checkpointing.require_safe", endangered)
    with pytest.raises(CheckpointError, match="spare"):
        ours.rename(Path("tmp"), Path("new"), is_directory=True)
    assert tree(ours, Path()) == {"tmp": FULL}


def test_what_cannot_be_is_refused(pool: Pool) -> None:
    """Into itself, the top, below a file, a file over a directory, "..", a wrong known size."""
    ours = PoolStorage(pool, "tc")
    grow(ours, Path("d"), FULL)
    with pytest.raises(OSError, match="into itself"):
        ours.rename(Path("d"), Path("d/e"))
    with pytest.raises(FileExistsError):
        ours.rename(Path("d"), Path("/"))
    with pytest.raises(FileNotFoundError):
        ours.rmdir(Path("/"))
    for action in (ours.mkdir, lambda path: ours.write(path, b""), ours.stream_write):
        with pytest.raises(NotADirectoryError):
            action(Path("d/a.pt/x"))
    with pytest.raises(IsADirectoryError):
        ours.write(Path("d"), b"")
    with pytest.raises(IsADirectoryError):
        ours.delete(Path("d"))
    with pytest.raises(NotADirectoryError):
        ours.ls(Path("d/a.pt"))
    with pytest.raises(FileExistsError):
        ours.mkdir(Path("d/a.pt"))
    with pytest.raises(InvalidKey):
        ours.read(Path("d/../x"))
    with pytest.raises(OSError, match="3 bytes, not 4"):
        ours.stream_read(Path("d/a.pt"), ReadArgs(known_size_bytes=4))
    ours.rename(Path("d"), Path("d"))
    ours.rename(Path("d/a.pt"), Path("d/a.pt"))
    assert tree(ours, Path("d")) == FULL
    assert ours.remap_path(Path("/d/a.pt")) == f"hpstore://{pool.config.name}/tc/tree/d/a.pt"


def test_moves_are_read_back_from_their_names() -> None:
    """Every kind of entry; other texts are nobody's."""
    for move in (
        EntryMove(sequence=3, root="tree/a", place="tree/b/c"),
        EntryMove(sequence=3, root="again/1/tree/a", place=None),
        EntryMove(sequence=3, root="tree/a", place=None, swept=True),
    ):
        assert parse_move(str(move)) == move
    for text in ("", "x", "000000000003-9/tree/a", "000000000003-1s/tree/a/b", "3-1/tree"):
        assert parse_move(text) is None
    assert RenamePlan([]).find(("a", "b")) == ("tree/a/b", "tree/a/b")
    assert RenamePlan([]).find(()) == (TOP, TOP)
    assert next_root("tree/a") == "again/1/tree/a"
    assert next_root("again/9/tree/a") == "again/10/tree/a"


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 2))


@pytest.mark.parametrize(("mode", "use_mmap"), [("sync", True), ("sync", False), ("async", True)])
def test_the_package_saves_and_loads(pool: Pool, mode: str, use_mmap: bool, tmp_path: Path) -> None:
    """CheckpointManager over the pool, in this process and from its own; a committed id stays."""
    net, other = model(), model()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    config = getattr(package.CheckpointManager.Config, f"with_{mode}_save")()
    config.storage_config = PoolStorageConfig(tmp_path / "pool.toml", "tc")
    config.load.use_mmap = use_mmap
    manager = config.build()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": {"n": 7}}
    for step in (1, 2):
        future = manager.save(f"/ckpt/step-{step}", state)
        if future is not None:
            future.result()
    ours = PoolStorage(pool, "tc")
    assert ours.ls(Path("/ckpt")) == ["step-1", "step-2"]
    loaded = manager.load(
        "/ckpt/step-2", {"model": other.state_dict(), "optimizer": None, "step": None}, strict=True
    )
    for name, value in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
        assert torch.equal(loaded["model"][name], value)
    assert loaded["step"] == {"n": 7}
    assert torch.equal(
        loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    before = tree(ours, Path("/ckpt/step-2"))

    def save_again() -> None:
        future = manager.save("/ckpt/step-2", {**state, "step": {"n": 8}})
        if future is not None:
            future.result()

    with pytest.raises(Exception, match="occupied"):  # the async saver wraps it in its own
        save_again()
    assert tree(ours, Path("/ckpt/step-2")) == before
    if mode == "sync":
        manager.close()
    else:
        with pytest.raises(Exception, match="occupied"):
            manager.close()


def test_a_stream_and_a_rename_never_mix_versions(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes the file in between: an error, and no byte of the new one; a rename
    does not delete what it has not copied."""
    storage = PoolStorageConfig(pool, "tc").create_storage()
    path = Path("/a")
    storage.write(path, b"1" * 300_000)
    with storage.stream_read(path, ReadArgs(pre_read_full_file=False)) as stream:
        assert stream.read(10) == b"1" * 10
        storage.write(path, b"2" * 400_000)
        rest = b"1"
        with contextlib.suppress(VersionConflict):
            rest = stream.read()
        assert set(rest) == set(b"1")
    put, key = Pool.put, storage._key(path)

    def overtaken(self: Pool, to: str, *given: Any, **named: Any) -> Any:
        found = put(self, to, *given, **named)
        if to.endswith("/b"):
            put(self, key, b"3")
        return found

    monkeypatch.setattr(Pool, "put", overtaken)
    with pytest.raises(VersionConflict, match="was replaced while it was renamed"):
        storage.rename(path, Path("/b"))
    assert storage.read(path) == b"3"
    assert storage.read(Path("/b")) == b"2" * 400_000
