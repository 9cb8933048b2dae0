"""torch.distributed.checkpoint on the pool: real dcp.save, load and async_save."""

from __future__ import annotations

import io
import pickle
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import hpstore
from hpstore.checkpoint import Checkpointer, SafeLoadPlanner, Stager, StorageReader, StorageWriter
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.config import Settings
from hpstore.errors import CheckpointError, IntegrityError, TooFewDevices
from hpstore.testing.memory_pool import Harness
from hpstore.units import MIB

PATH = "runs/gpt/step-100"
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


class Opaque:
    """Of a type that weights_only refuses."""


@pytest.fixture
def pool(tmp_path: Path) -> hpstore.Pool:
    return hpstore.create(
        [tmp_path / f"d{i}" for i in range(6)],
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        settings=Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run")),
    )


def state(seed: int) -> dict[str, Any]:
    """Tensors of many kinds and values that are none."""
    g = torch.Generator().manual_seed(seed)
    big = torch.randn(300, 700, generator=g)
    return {
        "model": {
            "w": big,
            "tied": big,
            "view": torch.randn(50, 60, generator=g).t(),
            "bf16": torch.randn(4000, generator=g).bfloat16(),
            "fp8": torch.randn(64, generator=g).to(torch.float8_e4m3fn),
            "complex": torch.randn(9, generator=g, dtype=torch.complex64),
            "bool": torch.tensor([True, False]),
            "step": torch.tensor(3.0 + seed),
            "empty": torch.empty(0, 4),
        },
        "list": [torch.arange(5) + seed, 7 + seed],
        "lr": 0.25 * seed,
        "name": f"seed {seed}",
    }


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for n, c in value.items() for k, v in flat(c, f"{path}/{n}").items()}
    if isinstance(value, list):
        return {k: v for n, c in enumerate(value) for k, v in flat(c, f"{path}/{n}").items()}
    return {path: value}


def assert_same(left: Any, right: Any) -> None:
    a, b = flat(left), flat(right)
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[name].dtype, name
            assert torch.equal(
                value.contiguous().reshape(-1).view(torch.uint8),
                b[name].contiguous().reshape(-1).view(torch.uint8),
            ), name
        else:
            assert value == b[name], name


def load(pool: hpstore.Pool, path: str = PATH, **options: Any) -> dict[str, Any]:
    target = state(99)
    dcp_load(target, storage_reader=StorageReader(pool, path), no_dist=True, **options)
    return target


def test_what_dcp_saves_it_loads(pool: hpstore.Pool) -> None:
    """All dtypes, views, tied, 0-d and empty tensors, and values that are none, bit by bit."""
    with pool:
        dcp_save(state(1), storage_writer=StorageWriter(pool, PATH), no_dist=True)
        assert_same(load(pool), state(1))
        assert_same(load(pool, planner=SafeLoadPlanner()), state(1))
        assert pool.exists(f"{PATH}/.metadata")
        assert not [key for key in pool.list(PATH) if "attempts" in key]


def test_two_lost_devices_do_not_matter(pool: hpstore.Pool, tmp_path: Path) -> None:
    """m devices deleted: every byte is there, decoded."""
    with pool:
        dcp_save(state(1), storage_writer=StorageWriter(pool, PATH), no_dist=True)
    for n in (0, 3):
        shutil.rmtree(tmp_path / f"d{n}")
    with hpstore.open(tmp_path / "pool.toml") as again:
        assert_same(load(again), state(1))


def test_saving_a_path_again_replaces_it_whole(pool: hpstore.Pool) -> None:
    """Until the new manifest is put the old checkpoint is there; then its segments go."""
    with pool:
        dcp_save(state(1), storage_writer=StorageWriter(pool, PATH), no_dist=True)

        class Dies(StorageWriter):
            def finish(self, metadata: Any, results: Any) -> None:
                raise RuntimeError("died between write_data and finish")

        with pytest.raises((RuntimeError, CheckpointException)):
            dcp_save(state(2), storage_writer=Dies(pool, PATH), no_dist=True)
        assert_same(load(pool), state(1))
        dcp_save(state(3), storage_writer=StorageWriter(pool, PATH), no_dist=True)
        assert_same(load(pool), state(3))
        named = {s.key for s in Manifest.decode(pool.get(f"{PATH}/manifest"), where="x").segments}
        left = {key for key in pool.list(PATH) if "/segment-" in key}
        # the dead save's note is this living process': its segments stay until the process ends
        assert named <= left
        assert len(left - named) <= 2


def test_overwrite_can_be_forbidden(pool: hpstore.Pool) -> None:
    """overwrite=False: torch's own words, and nothing changes."""
    with pool:
        dcp_save(state(1), storage_writer=StorageWriter(pool, PATH), no_dist=True)
        with pytest.raises((RuntimeError, CheckpointException), match="Checkpoint already exists"):
            dcp_save(
                state(2), storage_writer=StorageWriter(pool, PATH, overwrite=False), no_dist=True
            )
        assert_same(load(pool), state(1))


def test_a_lost_result_is_not_committed(pool: hpstore.Pool) -> None:
    """An item that nobody wrote fails the save; stock DCP commits it."""

    class Loses(StorageWriter):
        def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
            results = super().write_data(plan, planner).wait()
            future: Future[list[WriteResult]] = Future()
            future.set_result(results[1:])
            return future

    with pool:
        with pytest.raises((CheckpointError, CheckpointException), match="were not written"):
            dcp_save(state(1), storage_writer=Loses(pool, PATH), no_dist=True)
        assert not pool.exists(f"{PATH}/manifest")


def test_plan_caching_saves_what_is_there_now(pool: hpstore.Pool) -> None:
    """Three saves with one caching planner: values and dtype of each, at paths of their own."""
    with pool:
        planner = DefaultSavePlanner(enable_plan_caching=True)
        for number in (1, 2, 3):
            content = {"w": torch.full((500, 100), float(number)), "n": number}
            if number == 3:
                content["w"] = torch.full((500, 100), 3.0, dtype=torch.bfloat16)
            writer = StorageWriter(pool, f"runs/s-{number}")
            dcp_save(content, storage_writer=writer, planner=planner, no_dist=True)
        for number in (1, 2, 3):
            dtype = torch.bfloat16 if number == 3 else torch.float32
            found = {"w": torch.zeros(500, 100, dtype=dtype), "n": 0}
            reader = StorageReader(pool, f"runs/s-{number}")
            dcp_load(found, storage_reader=reader, no_dist=True)
            assert found["n"] == number
            assert torch.equal(found["w"], torch.full((500, 100), float(number), dtype=dtype))  # type: ignore[arg-type]
            entry = StorageReader(pool, f"runs/s-{number}").read_metadata()
            assert entry.state_dict_metadata["w"].properties.dtype == dtype  # type: ignore[union-attr]


def test_without_collectives_every_rank_has_its_own_manifest(pool: hpstore.Pool) -> None:
    """use_collectives=False: the rank's manifest is written and found."""
    with pool:
        writer = StorageWriter(pool, PATH)
        dcp_save(state(1), storage_writer=writer, no_dist=True, use_collectives=False)
        assert pool.exists(f"{PATH}/manifest-r00000")
        assert not pool.exists(f"{PATH}/manifest")
        assert StorageReader(pool, PATH).read_metadata(rank=0).state_dict_metadata


def test_a_path_that_is_empty_says_so(pool: hpstore.Pool) -> None:
    """Nothing saved there: the error names the path."""
    with pool, pytest.raises((CheckpointError, CheckpointException), match="no checkpoint is at"):
        load(pool, "runs/nothing")


def test_a_damaged_manifest_is_an_integrity_error(pool: hpstore.Pool) -> None:
    """Bytes that are no manifest are not unpickled."""
    with pool:
        pool.put(f"{PATH}/manifest", b"\x80\x04cos\nsystem\n")
        with pytest.raises(IntegrityError):
            StorageReader(pool, PATH).read_metadata()


def test_the_safe_planner_runs_no_code(pool: hpstore.Pool) -> None:
    """A payload that would need unpickling is refused by SafeLoadPlanner."""

    with pool:
        content = {"x": Opaque}
        dcp_save(content, storage_writer=StorageWriter(pool, PATH), no_dist=True)
        with pytest.raises(CheckpointException, match="Weights only load failed"):
            dcp_load(
                {"x": None},
                storage_reader=StorageReader(pool, PATH),
                planner=SafeLoadPlanner(),
                no_dist=True,
            )


@pytest.fixture
def group(tmp_path: Path) -> Any:
    store = torch._C._distributed_c10d.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_async_saves_in_a_row_hold_what_was_staged(
    pool: hpstore.Pool, group: None, mode: AsyncCheckpointerType
) -> None:
    """Two async saves through one Stager, the tensors changed after each return: bytes compared."""
    shared = mode is AsyncCheckpointerType.PROCESS
    stager = Stager(shared=shared)
    with pool:
        weights = state(1)
        futures = []
        for number in (1, 2):
            for name, tensor in flat(state(number)).items():
                place = flat(weights)[name]
                if isinstance(place, torch.Tensor):
                    place.copy_(tensor)
            weights.update({"lr": 0.25 * number, "name": f"seed {number}"})
            weights["list"][1] = 7 + number
            future = dcp_async_save(
                weights,
                storage_writer=StorageWriter(pool, f"runs/s-{number}"),
                async_stager=stager,
                async_checkpointer_type=mode,
            )
            for tensor in flat(weights).values():
                if isinstance(tensor, torch.Tensor):
                    tensor.zero_()
            futures.append(future)
            future.result()  # type: ignore[union-attr]
        for number in (1, 2):
            found = state(99)
            dcp_load(found, storage_reader=StorageReader(pool, f"runs/s-{number}"))
            assert_same(found, state(number))
        stager.close()


def test_a_state_in_use_is_not_staged_over(pool: hpstore.Pool) -> None:
    """stage() while an earlier state is alive takes another buffer; then the first is reused."""
    stager = Stager()
    first = stager.stage({"x": torch.ones(200_000)})
    second = stager.stage({"x": torch.zeros(200_000)})
    assert stager.buffers_total == 2
    assert torch.equal(first["x"], torch.ones(200_000))
    assert torch.equal(second["x"], torch.zeros(200_000))
    del first, second
    stager.stage({"x": torch.zeros(200_000)})
    assert stager.buffers_total == 2


def test_a_staged_block_is_written_where_it_lies(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What our Stager staged is not copied again by the writer."""
    stager = Stager()
    with pool:
        monkeypatch.setattr("hpstore.checkpoint.dcp.storage_writer.place", None)  # the copying way
        staged = stager.stage(state(1))
        dcp_save(staged, storage_writer=StorageWriter(pool, PATH), no_dist=True)
        monkeypatch.undo()
        assert_same(load(pool), state(1))


def test_memory_devices_are_refused_across_processes(tmp_path: Path) -> None:
    """The writer pickles as config and path; a pool that exists in this process only does not."""
    with (
        Harness(tmp_path, data=2, parity=1, devices=3).open() as pool,
        pytest.raises(CheckpointError, match="memory devices"),
    ):
        StorageWriter(pool, PATH).__getstate__()


def test_a_thread_staged_state_is_refused_by_the_process_executor() -> None:
    """A private buffer would be moved by pickling: later saves would be lost silently."""
    staged = Stager().stage({"x": torch.ones(9)})
    with pytest.raises(CheckpointError, match="shared=True"):
        torch.save(staged, io.BytesIO())


def test_the_first_error_leaves_nothing_behind(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that fails: the save raises, the segments and the note are gone."""
    original = pool.put

    def put(key: str, *args: Any, **options: Any) -> Any:
        if "-p9999" in key:
            raise OSError(28, "No space left on device")
        return original(key, *args, **options)

    with pool:
        monkeypatch.setattr(pool, "put", put)
        with pytest.raises((OSError, CheckpointException), match="No space"):
            dcp_save(state(1), storage_writer=StorageWriter(pool, PATH), no_dist=True)
        assert pool.list(PATH) == []


def test_a_save_by_rank_leaves_a_checkpoint_of_all_ranks_alone(pool: hpstore.Pool) -> None:
    """It would take its segments for garbage, and a load would still find its manifest first."""
    with pool:
        dcp_save(state(1), storage_writer=StorageWriter(pool, PATH), no_dist=True)
        with pytest.raises(
            (CheckpointError, CheckpointException), match="use_collectives=False to another path"
        ):
            dcp_save(
                state(2),
                storage_writer=StorageWriter(pool, PATH),
                no_dist=True,
                use_collectives=False,
            )
        assert_same(load(pool), state(1))


def notes(pool: hpstore.Pool) -> list[str]:
    """Keys of notes of saves under way."""
    return [key for key in pool.list(PATH) if "/attempts/" in key]


def beat_of(pool: hpstore.Pool, key: str) -> int:
    """When a note was last renewed, in ms."""
    return SaveAttempt.decode(pool.get(key), where=key).beat_ms


def test_the_note_of_a_rank_is_renewed_until_it_is_removed(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: a long save on another host stays alive; the commit ends every rank's note, also
    a rank's that hears nothing of it; a renewal that became visible though it failed ends none."""
    monkeypatch.setattr("hpstore.checkpoint.catalog.writer_fence.BEAT_SECONDS", 0.01)
    end = time.monotonic() + 60
    with pool:
        writer = StorageWriter(pool, PATH)
        writer.set_up_storage_writer(False, rank=1)
        writer.write_data(SavePlan([]), DefaultSavePlanner())
        (key,) = notes(pool)
        for _ in range(2):
            first = beat_of(pool, key)
            while beat_of(pool, key) <= first:
                assert time.monotonic() < end, "the note is not renewed"
            pool.put(key, pool.get(key))  # another version of the same
        beating = writer._heartbeat
        assert beating is not None
        while beating._thread.is_alive():
            assert time.monotonic() < end, "the note is renewed though it was removed"
            for left in notes(pool):
                pool.delete(left)
        writer.set_up_storage_writer(False, rank=1)
        writer.write_data(SavePlan([]), DefaultSavePlanner())
        assert len(notes(pool)) == 1
        writer.set_up_storage_writer(False, rank=1)  # the save before has come to nothing
        assert notes(pool) == []


def test_a_reader_where_a_checkpointer_saved_says_what_reads_it(pool: hpstore.Pool) -> None:
    """At the run's prefix, at a step's place, and at a mistyped path of its own kind."""
    with pool, Checkpointer(pool, "runs/a") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result()
        dcp_save(
            {"w": torch.ones(3)}, storage_writer=StorageWriter(pool, "dcp/step-1"), no_dist=True
        )
        for path, said in (
            ("runs/a", r"Checkpointer\(pool, 'runs/a'\)\.restore\(state\).*--format dcp"),
            ("runs/a/step-000000000001", r"Checkpointer\(pool, 'runs/a'\)\.restore\(state\)"),
            ("dcp/step-2", r"no checkpoint is at 'dcp/step-2'; there are some at 'dcp/step-1'"),
        ):
            with pytest.raises(CheckpointException, match=said):
                dcp_load(
                    {"w": torch.ones(3)}, storage_reader=StorageReader(pool, path), no_dist=True
                )


def test_planners_see_the_ids_of_writer_and_reader(pool: hpstore.Pool) -> None:
    """As with torch's file system: a planner, the metadata and the loaded metadata name the save
    as `writer.save_id` does, and the load as `reader.load_id` does; `reset()` renews both."""
    seen: list[StorageMeta | None] = []

    class Saves(DefaultSavePlanner):
        def set_up_planner(
            self,
            state_dict: dict[str, Any],
            storage_meta: StorageMeta | None = None,
            is_coordinator: bool = False,
        ) -> None:
            seen.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    with pool:
        writer, reader = StorageWriter(pool, PATH), StorageReader(pool, PATH)
        saved = dcp_save(state(1), storage_writer=writer, planner=Saves(), no_dist=True)
        wanted = StorageMeta(checkpoint_id=PATH, save_id=writer.save_id)
        assert seen == [wanted]
        assert saved.storage_meta == wanted
        loaded = reader.read_metadata().storage_meta
        assert loaded == replace(wanted, load_id=reader.load_id)
        assert pickle.loads(pickle.dumps(writer)).save_id == writer.save_id
        before = writer.save_id, reader.load_id
        writer.reset(PATH)
        reader.reset(PATH)
        assert writer.save_id != before[0]
        assert reader.load_id != before[1]


def test_a_checkpoint_whose_marker_is_not_put_is_said_to_be_committed(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is there, and what was there before is not."""
    put = hpstore.Pool.put

    def full(there: hpstore.Pool, key: str, *args: Any, **options: Any) -> Any:
        if key.endswith("/.metadata"):
            raise TooFewDevices("no room; the version before it is unchanged.")
        return put(there, key, *args, **options)

    monkeypatch.setattr(hpstore.Pool, "put", full)
    state = {"w": torch.arange(10.0)}
    with pytest.raises(CheckpointException) as said:
        dcp_save(state, storage_writer=StorageWriter(pool, "c"))
    assert "is committed and can be loaded" in str(said.value)
    assert "unchanged. Save" not in str(said.value)
    monkeypatch.undo()
    found = {"w": torch.zeros(10)}
    dcp_load(found, storage_reader=StorageReader(pool, "c"))
    assert torch.equal(found["w"], state["w"])


def test_a_planner_sees_the_version_of_torchs_metadata(pool: hpstore.Pool) -> None:
    """As with torch's file system: what save() returns and what a load's planner gets name it."""
    with pool:
        saved = dcp_save(state(1), storage_writer=StorageWriter(pool, PATH), no_dist=True)
        planner = DefaultLoadPlanner()
        reader = StorageReader(pool, PATH)
        dcp_load(state(2), storage_reader=reader, planner=planner, no_dist=True)
        assert isinstance(saved, Metadata)
        assert planner.metadata is not None
        wanted = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.6 has none
        assert saved.version == planner.metadata.version == wanted
