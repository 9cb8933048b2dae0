"""What trainers do with a folder, done to `hpstore://`: stock DCP, torchtitan, Lightning."""

from __future__ import annotations

import os
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import hpstore
from hpstore.errors import TooFewDevices
from hpstore.interop import PoolFileSystem

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]
ROOT = Path(__file__).resolve().parents[2]
State = dict[str, object]


def state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.randn(257, 129, generator=generator), "b": seed * torch.arange(6)},
        "step": seed,
    }


def empty() -> State:
    return {
        "model": {"w": torch.zeros(257, 129), "b": torch.zeros(6, dtype=torch.int64)},
        "step": 0,
    }


def same(one: State, other: State) -> bool:
    (a, b) = (one["model"], other["model"])
    assert isinstance(a, dict)
    assert isinstance(b, dict)
    return one["step"] == other["step"] and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """os.sync() writes out the whole machine's caches."""

    def sync() -> None:
        raise AssertionError("os.sync was called")

    monkeypatch.setattr(os, "sync", sync)


@pytest.mark.usefixtures("no_sync")
def test_dcp_saves_and_loads_by_url(fs: PoolFileSystem, name: str) -> None:
    """Plain dcp.save and dcp.load; `.metadata` is a file; os.sync is never called."""
    url = f"hpstore://{name}/runs/x/step-1"
    save(state(1), checkpoint_id=url)
    assert fs.isfile(f"{url}/.metadata")
    assert fs.ls(url, detail=False) == [
        f"{name}/runs/x/step-1/.metadata",
        f"{name}/runs/x/step-1/__0_0.distcp",
    ]
    loaded = empty()
    load(loaded, checkpoint_id=url)
    assert same(loaded, state(1))


@pytest.mark.usefixtures("no_sync")
def test_dcp_saves_in_the_background_by_url(fs: PoolFileSystem, name: str) -> None:
    """async_save uses a new thread each time; the pool stays one."""
    for step in (1, 2, 3):
        future = async_save(state(step), checkpoint_id=f"hpstore://{name}/r/step-{step}")
        future.result()  # type: ignore[union-attr]  # a Future without a stager of its own
    for step in (1, 2, 3):
        loaded = empty()
        load(loaded, checkpoint_id=f"hpstore://{name}/r/step-{step}")
        assert same(loaded, state(step))
    assert len(fs.mounts._mounts) == 1


@pytest.mark.usefixtures("no_sync")
def test_dcp_saves_with_several_threads(name: str) -> None:
    """FsspecWriter with its own options; each thread has its stream."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    url = f"hpstore://{name}/r/threads"
    save(state(4), storage_writer=FsspecWriter(url, thread_count=3, single_file_per_rank=False))
    loaded = empty()
    load(loaded, storage_reader=FsspecReader(url))
    assert same(loaded, state(4))


def test_dcp_overwrites_an_id_or_refuses(name: str) -> None:
    """Saving again replaces the values; overwrite=False raises and leaves them."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    url = f"hpstore://{name}/r/step-1"
    for seed in (1, 2):
        save(state(seed), checkpoint_id=url)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        save(state(3), storage_writer=FsspecWriter(url, overwrite=False))
    loaded = empty()
    load(loaded, checkpoint_id=url)
    assert same(loaded, state(2))


def test_a_failing_put_is_an_error_and_no_checkpoint(
    fs: PoolFileSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's reason reaches the caller of save; a new id has no `.metadata`."""

    def fail(*_: object, **__: object) -> None:
        raise TooFewDevices("three devices are gone")

    with monkeypatch.context() as patch:
        patch.setattr(hpstore.Pool, "put", fail)
        with pytest.raises(CheckpointException, match="TooFewDevices: three devices are gone"):
            save(state(1), checkpoint_id=f"hpstore://{name}/r/step-1")
    assert fs.find(f"{name}/r") == []


def test_a_torchtitan_folder_works(fs: PoolFileSystem, name: str) -> None:
    """Steps are found by their `.metadata`, the oldest is removed, the newest loaded."""
    folder = f"hpstore://{name}/outputs/checkpoint"
    found, _ = fsspec.core.url_to_fs(folder)
    assert not found.isdir(folder)
    found.makedirs(folder, exist_ok=True)
    assert found.isdir(folder)
    assert found.listdir(folder) == []

    def steps() -> list[int]:
        names = [str(entry["name"]).rsplit("/", 1)[-1] for entry in found.listdir(folder)]
        numbers = [int(name.removeprefix("step-")) for name in names if name.startswith("step-")]
        return sorted(n for n in numbers if found.isfile(f"{folder}/step-{n}/.metadata"))

    for step in (1, 2, 10):
        save(state(step % 6), checkpoint_id=os.path.join(folder, f"step-{step}"))
    found.pipe_file(f"{folder}/step-11/__0_0.distcp", b"unfinished")
    assert steps() == [1, 2, 10]
    assert found.isdir(f"{folder}/step-11")
    found.rm(f"{folder}/step-1", recursive=True)
    assert steps() == [2, 10]
    assert not found.exists(f"{folder}/step-1")
    loaded = empty()
    load(loaded, checkpoint_id=f"{folder}/step-{steps()[-1]}")
    assert same(loaded, state(4))


def test_lightnings_helpers_work(fs: PoolFileSystem, name: str) -> None:
    """fabric's cloud_io: get_filesystem, _atomic_save, _load, _is_dir; a checkpoint file by URL."""
    cloud_io = pytest.importorskip(
        "lightning.fabric.utilities.cloud_io", reason="lightning is not installed"
    )
    url = f"hpstore://{name}/logs/version_0/checkpoints/epoch=0-step=5.ckpt"
    found = cloud_io.get_filesystem(url)
    assert isinstance(found, PoolFileSystem)
    found.makedirs(os.path.dirname(url), exist_ok=True)
    assert cloud_io._is_dir(found, os.path.dirname(url), strict=True)
    cloud_io._atomic_save(state(3), url)
    assert same(cloud_io._load(url, map_location="cpu", weights_only=True), state(3))
    assert found.exists(url)
    found.rm(url)
    assert not found.exists(url)


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_save_and_load_through_streams(fs: PoolFileSystem, name: str, legacy: bool) -> None:
    """Zip and legacy files; the legacy writer goes past the stream to its descriptor."""
    with fs.open(f"{name}/f.pt", "wb") as stream:
        torch.save(state(2), stream, _use_new_zipfile_serialization=not legacy)
    with fs.open(f"{name}/f.pt", "rb") as stream:
        assert same(torch.load(stream, weights_only=True), state(2))


def test_the_package_tells_fsspec_where_to_look() -> None:
    """The entry point names the class, so that no import of hpstore is needed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, attribute = project["entry-points"]["fsspec.specs"]["hpstore"].partition(":")
    assert getattr(import_module(module), attribute) is PoolFileSystem
    installed = entry_points(group="fsspec.specs", name="hpstore")
    if not installed:
        pytest.skip("hpstore is on the path but not installed")
    assert next(iter(installed)).load() is PoolFileSystem
