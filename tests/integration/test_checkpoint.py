"""The checkpointer: what is saved comes back bit by bit; a step commits whole or not at all."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog.retention import orphans
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt, attempt_lives, here
from hpstore.checkpoint.format.checkpoint_manifest import (
    Manifest,
    manifest_key,
    segment_key,
    sort_out,
)
from hpstore.checkpoint.format.segment_plan import chunks_of, place
from hpstore.checkpoint.state.state_tree import CollectedTensors, Decoding, decode_tree, encode_tree
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import (
    CheckpointError,
    CheckpointMismatch,
    FormatTooNew,
    IntegrityError,
    TooFewDevices,
    VersionConflict,
)
from hpstore.testing.memory_pool import Harness
from tests.thorough import crash_points


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 300),
        torch.nn.BatchNorm1d(300),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(300, 5),
    )


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(16, 40)
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_a_resumed_run_is_bit_identical(pool: hpstore.Pool) -> None:
    """Model, fresh AdamW with its moments, BatchNorm statistics and RNG: the same losses follow."""
    net = model(1)
    optimizer = torch.optim.AdamW(net.parameters())
    with pool, Checkpointer(pool, "run") as ckpt:
        for _ in range(3):
            step(net, optimizer)
        report = ckpt.save(3, {"model": net, "optimizer": optimizer, "epoch": 1}).result()
        assert report.losses_tolerated == 2
        wanted = [step(net, optimizer) for _ in range(4)]
        other = model(2)
        fresh = torch.optim.AdamW(other.parameters())
        state: dict[str, Any] = {"model": other, "optimizer": fresh, "epoch": 0}
        assert ckpt.restore(state) == 3
        assert state["epoch"] == 1
        assert [step(other, fresh) for _ in range(4)] == wanted


def test_save_returns_before_the_tensors_may_change(pool: hpstore.Pool) -> None:
    """What is saved is the state at the call, whatever happens to the tensors afterwards."""
    weights = torch.arange(2_000_000, dtype=torch.float32)
    before = weights.clone()
    with pool, Checkpointer(pool, "run") as ckpt:
        handle = ckpt.save(1, {"w": weights})
        weights.fill_(-1.0)
        handle.result()
        assert torch.equal(ckpt.load(1)["w"], before)


VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "int": 2**70,
    "float": 0.1 + 0.2,
    "inf": float("inf"),
    "nan": float("nan"),
    "text": "ü\n",
    "bytes": b"\0\xff",
    "complex": 1 - 2j,
    "list": [1, [2.5, "x"], (3, None)],
    "intkeys": {1: "a", (2, 3): "b"},
    "tag": {"$": 1},
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "npint": np.int16(-3),
    "npfloat": np.float32(0.1),
    "array": np.arange(6).reshape(2, 3),
    "empty": np.zeros((0, 4)),
    "scalar": np.array(7.5),
    "python": random.Random(1).getstate(),
}
TENSORS: dict[str, torch.Tensor] = {
    "f32": torch.randn(3, 4),
    "bf16": torch.randn(5).bfloat16(),
    "f16": torch.randn(5).half(),
    "fp8": torch.randn(8).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "int8": torch.arange(5, dtype=torch.int8),
    "zero_d": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "view": torch.randn(6, 6)[::2, 1:],
    "transposed": torch.randn(4, 5).t(),
    "big": torch.randn(300, 300),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_values_of_every_type_come_back(name: str) -> None:
    """encode and decode are inverse, types included; no pickle anywhere."""
    found = CollectedTensors()
    tree = encode_tree(VALUES[name], name, found)
    back = decode_tree(tree, Decoding(tensor=found.tensors.__getitem__))
    assert type(back) is type(VALUES[name])
    if isinstance(back, np.ndarray):
        np.testing.assert_array_equal(back, VALUES[name], strict=True)
    elif name == "nan":
        assert back != back
    else:
        assert back == VALUES[name]


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit by bit, NaNs and negative zeros included."""
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*flat)


def test_tensors_of_every_kind_come_back(pool: hpstore.Pool) -> None:
    """All dtypes, views, transposed, empty and 0-d tensors, bit by bit; arrays too."""
    with pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(0, {"t": dict(TENSORS), "v": dict(VALUES)}).result()
        loaded = ckpt.load(0, keys=["t"])
        assert set(loaded) == {f"t/{name}" for name in TENSORS}
        for name, tensor in TENSORS.items():
            back = loaded[f"t/{name}"]
            assert back.dtype == tensor.dtype
            assert back.shape == tensor.shape
            assert same_bytes(back, tensor)


def test_shared_tensors_are_written_once() -> None:
    """Tied weights share one place in the segment."""
    weight = torch.randn(100, 100)
    tensors = {"a": weight, "b": weight, "c": weight.clone()}
    [piece] = place([chunk for name, t in tensors.items() for chunk in chunks_of(name, t)])
    assert piece.items[0].offset == piece.items[1].offset != piece.items[2].offset
    assert piece.size < 3 * 40_000


@pytest.mark.parametrize("bad", [object(), iter([]), lambda: None, torch.eye(3).to_sparse()])
def test_what_cannot_be_saved_is_named(pool: hpstore.Pool, bad: object) -> None:
    """An object of another type is refused with its path; nothing is written."""
    with pool, Checkpointer(pool, "run") as ckpt:
        with pytest.raises(CheckpointError, match="outer/inner"):
            ckpt.save(1, {"outer": {"inner": bad}})
        assert pool.list("run") == []


def test_objects_with_state_dict_take_part(pool: hpstore.Pool) -> None:
    """Anything with state_dict and load_state_dict is saved and restored by them."""

    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    with pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(5, {"loader": Counter(7), "nested": {"c": Counter(8)}}).result()
        state = {"loader": Counter(0), "nested": {"c": Counter(0)}}
        assert ckpt.restore(state) == 5
        assert state["loader"].value == 7  # type: ignore[attr-defined]
        assert state["nested"]["c"].value == 8  # type: ignore[index]


def test_mismatches_are_errors_unless_not_strict(pool: hpstore.Pool) -> None:
    """Recorded and not taken, wanted and not recorded, wrong shapes: named, nothing half-filled."""
    with pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"model": model(1), "extra": 3}).result()
        net = model(2)
        before = {k: v.clone() for k, v in net.state_dict().items()}
        with pytest.raises(CheckpointMismatch, match="extra"):
            ckpt.restore({"model": net})
        with pytest.raises(CheckpointMismatch, match="more"):
            ckpt.restore({"model": net, "extra": 0, "more": 1})
        assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
        assert ckpt.restore({"model": net}, strict=False) == 1
        assert not torch.equal(before["0.weight"], net.state_dict()["0.weight"])
        with pytest.raises(CheckpointMismatch):
            ckpt.restore({"model": torch.nn.Linear(2, 2), "extra": 0})


@pytest.mark.usefixtures("segments_apart")
def test_steps_are_listed_found_and_dropped(pool: hpstore.Pool) -> None:
    """keep_last and keep_every; delete; a step that is not there; nothing to restore."""
    with pool, Checkpointer(pool, "run", keep_last=2, keep_every=4) as ckpt:
        assert ckpt.restore({"x": torch.zeros(1)}) is None
        assert ckpt.latest_valid() is None
        for number in range(1, 8):
            ckpt.save(number, {"x": torch.full((50_000,), float(number))}).result()
        ckpt.wait()
        assert ckpt.steps() == [4, 6, 7]
        assert ckpt.latest_valid() == 7
        assert len([key for key in pool.list("run") if "segment" in key]) == 3
        ckpt.delete(6)
        assert ckpt.steps() == [4, 7]
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 6.*\[4, 7\]"):
            ckpt.load(6)


@pytest.mark.usefixtures("segments_apart")
def test_committing_a_step_twice_needs_to_be_asked_for(pool: hpstore.Pool) -> None:
    """The first save stays untouched unless overwrite=True."""
    with pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"x": torch.ones(9)}).result()
        with pytest.raises(VersionConflict, match="committed already"):
            ckpt.save(1, {"x": torch.zeros(9)})
        assert torch.equal(ckpt.load(1)["x"], torch.ones(9))
        ckpt.save(1, {"x": torch.zeros(9)}, overwrite=True).result()
        assert torch.equal(ckpt.load(1)["x"], torch.zeros(9))
        ckpt.steps.collect_garbage()
        assert len([key for key in pool.list("run") if "segment" in key]) == 1


def test_a_step_that_is_there_is_refused_before_anything_is_staged(pool: hpstore.Pool) -> None:
    """Known to the run from its start, its own saves or its last look: save() itself raises, and
    the next save is not burdened with it."""
    with pool:
        with Checkpointer(pool, "run") as first:
            first.save(1, {"x": torch.ones(9)}).result()
        with Checkpointer(pool, "run") as ckpt:
            ckpt.save(2, {"x": torch.ones(9)}).result()
            for step in (1, 2):
                with pytest.raises(VersionConflict, match=f"step {step} under 'run' is committed"):
                    ckpt.save(step, {"x": torch.zeros(9)})
            ckpt.delete(1)
            Checkpointer(pool, "run", group="alone").delete(2)  # by somebody else
            ckpt.save(1, {"x": torch.full((9,), 3.0)}).result()
            ckpt.save(2, {"x": torch.full((9,), 3.0)}).result()
            assert torch.equal(ckpt.load(2)["x"], torch.full((9,), 3.0))


def test_a_step_that_another_job_has_committed_since_fails_in_result(pool: hpstore.Pool) -> None:
    """What save() cannot know: the handle says it, and the next save is made."""
    with pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"x": torch.ones(9)}).result()
        ckpt.wait()
        pool.put(manifest_key("run", 2), b"of another job")
        handle = ckpt.save(2, {"x": torch.ones(9)})
        with pytest.raises(VersionConflict, match="step 2 under 'run' is committed"):
            handle.result()
        ckpt.save(3, {"x": torch.ones(9)}).result()


@pytest.mark.usefixtures("segments_apart")
def test_background_errors_surface(pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails in the background raises at the next wait, once; the step is absent."""
    with pool, Checkpointer(pool, "run") as ckpt:

        def broken(*_: object, **__: object) -> None:
            raise CheckpointError("disk on fire")

        monkeypatch.setattr("hpstore.checkpoint.save.commit.require_safe", broken)
        ckpt.save(1, {"x": torch.ones(9)})
        with pytest.raises(CheckpointError, match="on fire"):
            ckpt.wait()
        ckpt.wait()
        assert ckpt.steps() == []
        assert pool.list("run") == ["run/writer"]


@pytest.mark.usefixtures("segments_apart")
def test_damage_is_found_by_verify_and_passed_over_by_restore(tmp_path: Path) -> None:
    """A step with more damage than parity: verify and restore(step) raise, restore() walks back."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool, Checkpointer(pool, "run", save=SaveOptions(warm=False)) as ckpt:
        for number in (1, 2):
            ckpt.save(number, {"x": torch.full((90_000,), float(number))}).result()
        assert ckpt.verify(2).ok
        segment = ckpt.steps.manifest(2).segments[0].key
        for url, path in harness.columns(segment)[:2]:
            harness.flip(url, path, 70_000)
        state = {"x": torch.zeros(90_000)}
        assert ckpt.restore(state) == 1
        assert state["x"][0] == 1
        with pytest.raises(Exception, match=r"intact|readable"):
            ckpt.restore(state, step=2)


@pytest.mark.usefixtures("segments_apart")
def test_other_bytes_under_a_segments_key_are_noticed(pool: hpstore.Pool) -> None:
    """Item hashes bind a manifest to its bytes, also when the stored object itself is intact."""
    with pool, Checkpointer(pool, "run", save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, {"x": torch.ones(9_000)}).result()
        segment = ckpt.steps.manifest(1).segments[0]
        pool.put(segment.key, bytes(segment.size))
        assert ckpt.verify(1).damaged
        with pytest.raises(IntegrityError, match="the manifest names version"):
            ckpt.restore({"x": torch.zeros(9_000)}, step=1)


@pytest.mark.parametrize("power", [False, True])
def test_a_commit_is_old_or_new_at_every_crash_point(tmp_path: Path, power: bool) -> None:
    """PROTOCOL 18, 19: crash before each device operation of a save, by process death and power
    cut; a restart finds the old step or the new one whole, and garbage is collected."""
    for crash_at in crash_points():
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness = Harness(directory, data=2, parity=1, devices=4)
        with harness.open() as pool, Checkpointer(pool, "run", rng=False) as ckpt:
            ckpt.save(1, {"x": torch.full((70_000,), 1.0)}).result()
        pool, _ = harness.open_crashing(crash_at)
        try:
            ckpt = Checkpointer(pool, "run", rng=False)
            ckpt.save(2, {"x": torch.full((70_000,), 2.0)}).result()
            finished = True
        except SimulatedCrash:
            finished = False
        if power:
            harness.power_cut()
        else:
            harness.restart()
        for lost in harness.urls:
            harness.lose([lost])
            with harness.open(read_only=True) as again, Checkpointer(again, "run") as found:
                state = {"x": torch.zeros(70_000)}
                step_found = found.restore(state)
                assert step_found in ((2,) if finished else (1, 2))
                assert torch.equal(state["x"], torch.full((70_000,), float(step_found or 0)))
            harness.bring_back()
        if finished:
            assert crash_at > 50
            return


@pytest.mark.usefixtures("segments_apart")
def test_orphans_of_dead_saves_are_collected(pool: hpstore.Pool) -> None:
    """PROTOCOL 18: segments of dead attempts go, those of living ones and of manifests stay."""
    host, boot, space = here()
    with pool:
        with Checkpointer(pool, "run") as ckpt:
            ckpt.save(1, {"x": torch.ones(9)}).result()
        dead = SaveAttempt(
            step=2, nonce="aa", host=host, boot=boot, pid=2**22 + 1, namespace=space, started_ms=0
        )
        alive = SaveAttempt(
            step=2, nonce="bb", host=host, boot=boot, pid=1, namespace=space, started_ms=0
        )
        pool.put("run/attempts/000000000002-aa", dead.encode())
        pool.put("run/attempts/000000000002-bb", alive.encode())
        for nonce in ("aa", "bb", "cc"):
            pool.put(segment_key("run", 2, nonce), b"x")
        with Checkpointer(pool, "run") as ckpt:
            left = [key for key in pool.list("run") if "segment" in key]
            assert segment_key("run", 2, "bb") in left
            assert len(left) == 2
            assert ckpt.verify(1).ok
        assert not attempt_lives(dead, 10**15)
        assert attempt_lives(alive, 10**15)


@pytest.mark.usefixtures("segments_apart")
def test_garbage_collection_leaves_a_save_under_way_alone(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 18: a collector that runs between segment and manifest removes neither."""
    from hpstore.checkpoint.catalog import segment_safety
    from hpstore.checkpoint.save import commit

    original, removed = segment_safety.require_safe, []

    def collect_first(where: hpstore.Pool, key: str, **options: Any) -> int:
        with Checkpointer(where, "run") as other:
            removed.append(other.steps.collect_garbage())
        return original(where, key, **options)

    monkeypatch.setattr(commit, "require_safe", collect_first)
    with pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"x": torch.ones(90_000)}).result()
        assert removed == [0]
        assert ckpt.verify(1).ok


def test_what_no_manifest_names_belongs_to_a_living_save_or_to_no_one() -> None:
    """Pure: by the nonces of attempts that live."""
    listing = sort_out("p", ["p/step-000000000001/segment-ab-r00000", "p/other"])
    assert orphans(listing, set(), set()) == ["p/step-000000000001/segment-ab-r00000"]
    assert orphans(listing, set(), {"ab"}) == []


def test_a_run_that_was_rolled_back_keeps_what_it_commits(pool: hpstore.Pool) -> None:
    """PROTOCOL 19: retention after step 51 leaves 51 and the later steps alone."""
    with pool, Checkpointer(pool, "run", keep_last=1) as ckpt:
        for number in (50, 60, 70):
            pool_step = Checkpointer(pool, "run")
            pool_step.save(number, {"x": torch.full((9,), float(number))}).result()
            pool_step.close()
        assert ckpt.restore({"x": torch.zeros(9)}, step=50) == 50
        ckpt.save(51, {"x": torch.full((9,), 51.0)}).result()
        ckpt.wait()
        assert ckpt.steps() == [51, 60, 70]


def test_a_manifest_that_may_have_become_visible_keeps_its_segment(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 8: a put that raised may roll forward; what it names is not removed on a guess."""
    original = pool.put

    def put(key: str, *args: object, **options: object) -> object:
        info = original(key, *args, **options)  # type: ignore[arg-type]
        if key.endswith("manifest"):
            raise OSError("the answer was lost")
        return info

    with pool, Checkpointer(pool, "run") as ckpt:
        monkeypatch.setattr(pool, "put", put)
        with pytest.raises(OSError, match="lost"):
            ckpt.save(7, {"x": torch.ones(90_000)}).result()
        monkeypatch.undo()
        assert ckpt.restore({"x": torch.zeros(90_000)}) == 7


def test_a_flipped_manifest_is_an_integrity_error() -> None:
    """The manifest's digest covers all of it."""
    manifest = Manifest(step=1, created_ms=2, segments=(), items=(), tree={"a": 1})
    data = manifest.encode()
    assert Manifest.decode(data, where="x") == manifest
    for at in range(0, len(data), 7):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            assert Manifest.decode(flipped, where="x") == manifest  # white space only
        except (IntegrityError, FormatTooNew):
            continue


def test_what_comes_after_a_commit_fails_no_save(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look for later steps fails: the save is committed, wait() raises nothing."""
    original = pool.admin.versions_under

    def broken(prefix: str) -> dict[str, str]:
        if threading.current_thread().name == "hpstore-save":
            raise TooFewDevices("3 of 5 devices do not answer")
        return original(prefix)

    with pool, Checkpointer(pool, "run") as ckpt:
        monkeypatch.setattr(pool.admin, "versions_under", broken)
        ckpt.save(1, {"x": torch.ones(9)}).result()
        ckpt.wait()
        monkeypatch.undo()
        assert ckpt.steps() == [1]
