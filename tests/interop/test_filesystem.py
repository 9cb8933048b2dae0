"""The file system's promises beyond fsspec's own suites."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.callbacks import Callback

import hpstore
from hpstore.errors import (
    ConfigError,
    InvalidKey,
    ObjectNotFound,
    SomeFailed,
    TooManyErasures,
    VersionConflict,
)
from hpstore.interop import PoolFileSystem
from hpstore.testing.memory_pool import Harness

Tree = dict[str, bytes]
CHECKPOINT: Tree = {"s/.metadata": b"m", "s/__0_0.distcp": b"0" * 200_000, "s/__1_0.distcp": b"1"}


def fill(fs: PoolFileSystem, name: str, tree: Tree = CHECKPOINT) -> None:
    for key, data in tree.items():
        fs.pipe_file(f"{name}/{key}", data)


def test_urls_and_paths_name_the_same(fs: PoolFileSystem, name: str, pool: hpstore.Pool) -> None:
    """Every operation takes the URL as well as the path; listings give paths."""
    url = f"hpstore://{name}/d/a"
    fs.pipe_file(url, b"12345")
    assert pool.get("d/a") == fs.cat_file(f"{name}/d/a") == b"12345"
    assert (fs.exists(url), fs.isfile(url), fs.isdir(f"hpstore://{name}/d")) == (True,) * 3
    assert fs.ls(f"hpstore://{name}/d", detail=False) == [f"{name}/d/a"]
    assert fs.ls(f"hpstore://{name}", detail=False) == [f"{name}/d"]
    assert fs.ls("", detail=False) == [name]
    assert fs.unstrip_protocol(f"{name}/d/a") == url
    with fsspec.open(url, "rb") as stream:
        assert stream.read() == b"12345"


def test_info_has_the_facts(fs: PoolFileSystem, name: str, pool: hpstore.Pool) -> None:
    """name, size, type, created and version, the same in ls; the version changes with a put."""
    put = pool.put("d/a", b"x" * 7, {"run": 1})
    facts = fs.info(f"{name}/d/a")
    assert facts == {
        "name": f"{name}/d/a",
        "size": 7,
        "type": "file",
        "created": put.created,
        "mtime": put.created,
        "version": put.version,
        "metadata": {"run": 1},
    }
    assert fs.ls(f"{name}/d", detail=True) == [facts]
    assert fs.find(f"{name}/d", detail=True) == {f"{name}/d/a": facts}
    assert fs.created(f"{name}/d/a").timestamp() == pytest.approx(put.created)
    before = fs.ukey(f"{name}/d/a")
    fs.pipe_file(f"{name}/d/a", b"x" * 7)
    assert fs.ukey(f"{name}/d/a") != before


def test_listings_are_never_stale(fs: PoolFileSystem, name: str, pool: hpstore.Pool) -> None:
    """What others put and delete shows at once."""
    pool.put("d/a", b"")
    assert fs.ls(f"{name}/d", detail=False) == [f"{name}/d/a"]
    pool.put("d/b", b"")
    pool.delete("d/a")
    assert fs.ls(f"{name}/d", detail=False) == [f"{name}/d/b"]
    pool.delete("d/b")
    assert not fs.exists(f"{name}/d")
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{name}/d")


def test_a_key_is_object_and_directory_at_once(fs: PoolFileSystem, name: str) -> None:
    """PROTOCOL 13: both are found, moved and removed; the object counts first."""
    fill(fs, name, {"a": b"1", "a/b": b"2"})
    assert fs.isfile(f"{name}/a")
    assert [e["type"] for e in fs.ls(name)] == ["directory", "file"]
    assert fs.ls(f"{name}/a", detail=False) == [f"{name}/a", f"{name}/a/b"]
    assert fs.find(name) == [f"{name}/a", f"{name}/a/b"]
    assert fs.find(f"{name}/a") == [f"{name}/a", f"{name}/a/b"]
    assert list(fs.find(f"{name}/a/b", detail=True)) == [f"{name}/a/b"]
    fs.mv(f"{name}/a", f"{name}/c", recursive=True)
    assert fs.cat(name, recursive=True) == {f"{name}/c": b"1", f"{name}/c/b": b"2"}
    fs.rm(f"{name}/c")
    assert fs.find(name) == [f"{name}/c/b"]
    fill(fs, name, {"c": b"1"})
    fs.rm(f"{name}/c", recursive=True)
    assert fs.find(name) == []


def test_made_directories_are_there_until_removed(fs: PoolFileSystem, name: str) -> None:
    """mkdir makes exists and isdir true for every instance of the process, also with parents."""
    fs.makedirs(f"hpstore://{name}/x/y", exist_ok=False)
    other = PoolFileSystem(skip_instance_cache=True)
    for path in (f"{name}/x/y", f"{name}/x"):
        assert fs.exists(path)
        assert other.isdir(path)
    assert fs.ls(f"{name}/x", detail=False) == [f"{name}/x/y"]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: fsspec.filesystem("hpstore").isdir(f"{name}/x/y")).result()
    fs.makedirs(f"{name}/x/y", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs(f"{name}/x/y")
    with pytest.raises(FileNotFoundError):
        fs.mkdir(f"{name}/p/q", create_parents=False)
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir(f"{name}/x")
    fs.rmdir(f"{name}/x/y")
    with pytest.raises(FileNotFoundError):
        fs.rmdir(f"{name}/x/y")
    fill(fs, name, {"file": b""})
    with pytest.raises(FileExistsError):
        fs.makedirs(f"{name}/file", exist_ok=True)


def test_ranges_come_in_order_with_their_errors(fs: PoolFileSystem, name: str) -> None:
    """cat_ranges equals slicing, over several objects, with a missing one among them."""
    trees = {f"o{i}": np.random.default_rng(i).bytes(150_000 + i) for i in range(3)}
    fill(fs, name, trees)
    rng = np.random.default_rng(9)
    asked = [(f"o{i % 3}", *sorted(rng.integers(-9, 160_000, 2).tolist())) for i in range(60)]
    paths = [f"{name}/{key}" for key, _, _ in asked]
    starts, ends = [a[1] for a in asked], [a[2] for a in asked]
    want = [trees[key][start:end] for key, start, end in asked]
    assert fs.cat_ranges(paths, starts, ends) == want
    for key, start, end in asked[:5]:
        assert fs.cat_file(f"{name}/{key}", start, end) == trees[key][start:end]
    mixed = fs.cat_ranges([paths[0], f"{name}/none"], 0, 3)
    assert mixed[0] == trees["o0"][:3]
    assert isinstance(mixed[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([paths[0], f"{name}/none"], 0, 3, on_error="raise")


def test_missing_is_missing_and_unclear_is_an_error(
    fs: PoolFileSystem, name: str, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FileNotFoundError and False only for what is known to be absent."""
    acts: list[Any] = [fs.cat_file, fs.info, fs.rm, fs.open, fs.ls, fs.created]
    for act in acts:
        with pytest.raises(FileNotFoundError):
            act(f"{name}/none")
    asks: list[Any] = [fs.exists, fs.isdir, fs.isfile]
    for ask in asks:
        assert not ask(f"{name}/none")
        assert not ask(f"{name}/a//b")
    with pytest.raises(InvalidKey):
        fs.pipe_file(f"{name}/../b", b"")

    def unclear(*_: object) -> None:
        raise TooManyErasures("cannot tell")

    monkeypatch.setattr(hpstore.Pool, "stat", unclear)
    for act in [*asks, fs.info]:
        with pytest.raises(TooManyErasures, match="cannot tell"):
            act(f"{name}/x")


def test_exclusive_puts_are_refused_over_an_object(
    fs: PoolFileSystem, name: str, tmp_path: Path
) -> None:
    """pipe_file and put_file with mode "create"; the object stays."""
    fs.pipe_file(f"{name}/a", b"1", mode="create")
    (tmp_path / "f").write_bytes(b"2")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{name}/a", b"2", mode="create")
    with pytest.raises(FileExistsError):
        fs.put_file(str(tmp_path / "f"), f"{name}/a", mode="create")
    assert fs.cat_file(f"{name}/a") == b"1"


def test_trees_go_in_and_out_with_progress(fs: PoolFileSystem, name: str, tmp_path: Path) -> None:
    """put and get of a directory; the callback sees every file."""
    source = tmp_path / "src"
    for path in ("a", "sub/b", "sub/deep/c"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(path.encode() * 30_000)
    seen = Callback()
    fs.put(str(source), f"{name}/in", recursive=True, callback=seen)
    assert seen.value == seen.size
    fs.get(f"{name}/in", str(tmp_path / "out"), recursive=True)
    for path in ("a", "sub/b", "sub/deep/c"):
        assert (tmp_path / "out" / path).read_bytes() == path.encode() * 30_000


def test_a_transaction_shows_at_its_end_or_never(
    fs: PoolFileSystem, name: str, tmp_path: Path
) -> None:
    """Streams, pipes, puts and copies wait; an exception drops all of them."""
    (tmp_path / "f").write_bytes(b"file")
    fill(fs, name, {"old": b"old"})
    with fs.transaction:
        with fs.open(f"{name}/t/a", "wb") as stream:
            stream.write(b"a")
        fs.pipe_file(f"{name}/t/b", b"b")
        fs.put_file(str(tmp_path / "f"), f"{name}/t/c")
        fs.cp_file(f"{name}/old", f"{name}/t/d")
        assert not fs.exists(f"{name}/t")
    want = {"a": b"a", "b": b"b", "c": b"file", "d": b"old"}
    for key, data in want.items():
        assert fs.cat_file(f"{name}/t/{key}") == data
    assert len(fs.find(f"{name}/t")) == len(want)

    def stop_in_a_transaction() -> None:
        with fs.transaction:
            fs.pipe_file(f"{name}/u", b"u")
            raise KeyError

    with pytest.raises(KeyError):
        stop_in_a_transaction()
    assert not fs.exists(f"{name}/u")
    fs.pipe_file(f"{name}/u", b"u")
    assert fs.exists(f"{name}/u")
    assert fs.mounts.budget.used_bytes == 0


def test_moving_keeps_bytes_and_metadata(fs: PoolFileSystem, name: str, pool: hpstore.Pool) -> None:
    """The copy has what the source had; it replaces another object; onto itself is nothing."""
    pool.put("a", b"1" * 400_000, {"step": 3})
    pool.put("b", b"old")
    fs.mv(f"hpstore://{name}/a", f"{name}/a")
    assert fs.cat_file(f"{name}/a") == b"1" * 400_000
    fs.rename(f"hpstore://{name}/a", f"{name}/b")
    assert (pool.get("b"), pool.stat("b").metadata) == (b"1" * 400_000, {"step": 3})
    assert pool.list() == ["b"]
    fs.makedirs(f"{name}/dir")
    fs.mv(f"{name}/b", f"{name}/dir")
    assert pool.list() == ["dir/b"]
    fs.mv([f"{name}/dir/b"], [f"{name}/c"])
    assert pool.list() == ["c"]
    with pytest.raises(FileNotFoundError):
        fs.mv(f"{name}/none", f"{name}/c")


def test_a_directory_moves_only_recursively(fs: PoolFileSystem, name: str) -> None:
    """Without recursive=True nothing is touched, where the base class would delete it."""
    fill(fs, name)
    with pytest.raises(IsADirectoryError):
        fs.mv(f"{name}/s", f"{name}/t")
    with pytest.raises(IsADirectoryError):
        fs.rm(f"{name}/s")
    fs.mv(f"{name}/s", f"{name}/t", recursive=True)
    assert fs.find(name) == [f"{name}/t/{key[2:]}" for key in sorted(CHECKPOINT)]
    assert not fs.exists(f"{name}/s")


def test_a_crash_in_a_move_leaves_one_whole_checkpoint(
    fs: PoolFileSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at every put and delete: a `.metadata` never stands without all its data."""
    moves = 0
    while True:
        fill(fs, name)
        left = [moves]

        def stopping(act: Any, left: list[int] = left) -> Any:
            def call(*args: object, **kwargs: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError("killed")
                return act(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(hpstore.Pool, "put", stopping(hpstore.Pool.put))
            patch.setattr(hpstore.Pool, "delete", stopping(hpstore.Pool.delete))
            try:
                fs.mv(f"{name}/s", f"{name}/t", recursive=True)
            except OSError:
                pass
            else:
                break
        whole = [d for d in "st" if fs.exists(f"{name}/{d}/.metadata")]
        assert whole
        for directory in whole:
            for key, data in CHECKPOINT.items():
                assert fs.cat_file(f"{name}/{directory}{key[1:]}") == data
        fs.rm(name, recursive=True)
        moves += 1
    assert moves == 6


def test_a_source_replaced_during_the_move_stays(
    fs: PoolFileSystem, name: str, pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer version is nobody's to delete."""
    pool.put("a", b"1")
    put = hpstore.Pool.put

    def race(self: hpstore.Pool, key: str, *args: object, **kwargs: object) -> object:
        done = put(self, key, *args, **kwargs)  # type: ignore[arg-type]
        if key == "b":
            put(self, "a", b"2")
        return done

    monkeypatch.setattr(hpstore.Pool, "put", race)
    with pytest.raises(VersionConflict, match="while it was moved"):
        fs.mv(f"{name}/a", f"{name}/b")
    assert (pool.get("a"), pool.get("b")) == (b"2", b"1")


def test_a_source_replaced_during_the_copy_is_not_copied(
    fs: PoolFileSystem, name: str, pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of one version never go with the metadata of another."""
    pool.put("a", b"1", {"step": 1})
    stat = hpstore.Pool.stat

    def race(self: hpstore.Pool, key: str) -> hpstore.ObjectInfo:
        if key == "a" and len(calls) == 1:
            pool.put("a", b"2", {"step": 2})
        calls.append(key)
        return stat(self, key)

    calls: list[str] = []
    monkeypatch.setattr(hpstore.Pool, "stat", race)
    with pytest.raises(VersionConflict, match="while it was copied"):
        fs.cp_file(f"{name}/a", f"{name}/b")
    assert pool.list() == ["a"]


def test_delete_takes_metadata_first(
    fs: PoolFileSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that sees `.metadata` takes the step for whole."""
    fill(fs, name)
    order: list[list[str]] = []
    delete_many = hpstore.Pool.delete_many

    def note(self: hpstore.Pool, keys: list[str], *, missing_ok: bool) -> None:
        order.append(keys)
        delete_many(self, keys, missing_ok=missing_ok)

    monkeypatch.setattr(hpstore.Pool, "delete_many", note)
    fs.rm(f"{name}/s", recursive=True)
    assert order == [["s/.metadata"], ["s/__0_0.distcp", "s/__1_0.distcp"]]
    assert not fs.exists(f"{name}/s")


def test_patterns_are_matched(fs: PoolFileSystem, name: str) -> None:
    """glob, and rm of a pattern; all pools together are not removed."""
    fill(fs, name)
    assert fs.glob(f"{name}/*/__*") == [f"{name}/s/__0_0.distcp", f"{name}/s/__1_0.distcp"]
    assert fs.glob(f"hpstore://{name}/**/.meta*") == [f"{name}/s/.metadata"]
    assert fs.glob(f"{name}/s/*", detail=True)[f"{name}/s/.metadata"]["size"] == 1
    fs.rm(f"{name}/s/__*")
    assert fs.find(name) == [f"{name}/s/.metadata"]
    with pytest.raises(ValueError, match="all pools"):
        fs.rm("", recursive=True)


def test_a_bound_file_system_refuses_urls_of_other_pools(pool: hpstore.Pool, name: str) -> None:
    """Its paths are bare keys; a URL must name this pool, or the bytes would go astray."""
    one = PoolFileSystem(pool=pool)
    one.pipe_file("d/a", b"1")
    assert one.cat_file(f"hpstore://{name}/d/a") == b"1"
    assert (one.ls("", detail=False), one.ls("/d", detail=False)) == (["d"], ["d/a"])
    assert one.unstrip_protocol("d/a") == f"hpstore://{name}/d/a"
    with pytest.raises(ConfigError, match="names the pool 'other'"):
        one.pipe_file("hpstore://other/d/a", b"2")
    with pytest.raises(IsADirectoryError):
        one.open("", "wb")


def test_two_pools_of_one_name_are_not_mistaken(tmp_path: Path, home: Path) -> None:
    """fsspec compares arguments by their text, and two pools can look the same."""
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    with (
        Harness(tmp_path / "x", data=1, parity=1, devices=2).open() as first,
        Harness(tmp_path / "y", data=1, parity=1, devices=2).open() as second,
    ):
        assert repr(first) == repr(second)
        one, two = (fsspec.filesystem("hpstore", pool=p) for p in (first, second))
        one.pipe_file("a", b"1")
        assert not two.exists("a")
        assert one != two


def test_a_relative_path_stays_the_pool_it_was(
    disk_pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After chdir, and in other processes, `disk.toml` is the file that it was."""
    monkeypatch.chdir(tmp_path)
    one = fsspec.filesystem("hpstore", pool="disk.toml")
    monkeypatch.chdir("/")
    one.pipe_file("a", b"1")
    assert disk_pool.get("a") == b"1"
    assert one.storage_options["pool"] == str(tmp_path / "disk.toml")
    by_name = fsspec.filesystem("hpstore", pool="disk")
    assert by_name.cat_file("a") == b"1"
    assert len(PoolFileSystem.mounts._mounts) == 1


def test_read_only_writes_nothing(disk_pool: hpstore.Pool) -> None:
    """The pool is opened read-only; its errors go through."""
    disk_pool.put("a", b"1")
    one = fsspec.filesystem("hpstore", pool="disk", read_only=True)
    assert one.cat_file("a") == b"1"
    with pytest.raises(OSError, match="read-only"):
        one.pipe_file("b", b"")
    with pytest.raises(OSError, match="read-only"):
        one.rm("a")


def test_not_found_keeps_its_class(fs: PoolFileSystem, name: str) -> None:
    """Callers may catch either."""
    with pytest.raises(ObjectNotFound) as caught:
        fs.cat_file(f"{name}/none")
    assert isinstance(caught.value, FileNotFoundError)
    assert os.path.basename(f"{name}/none") in str(caught.value)


def test_a_directory_is_put_and_removed_by_a_few_calls(
    fs: PoolFileSystem,
    name: str,
    pool: hpstore.Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`put` and `rm` of a directory of 5,000 files took 34 and 31 s: small files go together, large
    ones by themselves, all of them where fsspec puts them; `pipe` of a dict, `rm` of a list too."""
    sizes = {
        "a": 0,
        "b/c": 1000,
        "b/.d": 5,
        "b/e/large": 300_000,
        **{f"n/{n}": n for n in range(90)},
    }
    for key, size in sizes.items():
        (tmp_path / "src" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / key).write_bytes(os.urandom(size))
    (tmp_path / "src" / "empty").mkdir()
    single: list[str] = []
    for call in ("put", "delete"):
        plain = getattr(hpstore.Pool, call)

        def noted(
            pool: hpstore.Pool, key: str, *rest: Any, plain: Any = plain, **named: Any
        ) -> Any:
            single.append(key)
            return plain(pool, key, *rest, **named)

        monkeypatch.setattr(hpstore.Pool, call, noted)
    told = Callback()
    fs.put(str(tmp_path / "src"), f"{name}/made", recursive=True, callback=told)
    assert single == ["made/b/e/large"]
    assert told.size == told.value == 94 + 5  # files and directories
    assert pool.list("made/") == sorted(f"made/{key}" for key in sizes)
    for key in sizes:
        assert pool.get(f"made/{key}") == (tmp_path / "src" / key).read_bytes()
    assert fs.isdir(f"{name}/made/empty")
    fs.pipe({f"hpstore://{name}/p/{n}": bytes([n]) for n in range(90)})
    assert fs.cat_file(f"{name}/p/7") == b"\x07"
    fs.rm(fs.find(f"{name}/p"))
    fs.rm(f"{name}/made", recursive=True)
    assert pool.list() == []
    assert not fs.exists(f"{name}/made")
    assert single == ["made/b/e/large"]


def test_what_another_process_deletes_meanwhile_is_an_error_without_recursive(
    fs: PoolFileSystem, name: str, pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a list of files one goes between the look and the delete: the others are deleted, and the
    error says which is not; with `recursive` it is none."""
    delete_many = hpstore.Pool.delete_many

    def raced(self: hpstore.Pool, keys: list[str], *, missing_ok: bool) -> None:
        if "s/__0_0.distcp" in keys:
            self.delete("s/__0_0.distcp")
        delete_many(self, keys, missing_ok=missing_ok)

    monkeypatch.setattr(hpstore.Pool, "delete_many", raced)
    fill(fs, name)
    with pytest.raises(SomeFailed, match="1 of 2 objects are not deleted") as caught:
        fs.rm([f"{name}/{key}" for key in CHECKPOINT])
    assert list(caught.value.failed) == ["s/__0_0.distcp"]
    assert pool.list() == []
    fill(fs, name)
    fs.rm(f"{name}/s", recursive=True)
    assert pool.list() == []
    with pytest.raises(FileNotFoundError):
        fs.rm([f"{name}/s/.metadata", f"{name}/s/__1_0.distcp"])
