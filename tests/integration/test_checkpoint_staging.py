"""Staging while training goes on, and what the checkpointer promises about keeping and reading.

Order is made by events: a copy or a write stands still until the test lets it go.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save import staging_memory
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.copy_samples import Samples
from hpstore.config import Settings
from hpstore.errors import CheckpointError, DeviceFull
from hpstore.testing.fake_accelerator import FakeAccelerator
from hpstore.testing.memory_pool import Harness
from hpstore.units import MIB
from tests.integration.nets import Net, adamw, backward, level, same, train, values

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    harness = Harness(
        tmp_path, data=2, parity=1, devices=3, settings=Settings(memory_bytes=32 * MIB)
    )
    with harness.open() as opened:
        yield opened


class Gate:
    """Deferred copies stand before it until go() is called; `names` says which have passed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.bytes = 0
        original = staging_memory._plain_copy

        def gated(target: torch.Tensor, source: torch.Tensor, passing: CopyGate) -> None:
            if not self._open.wait(20):
                raise TimeoutError("the test forgot to open the gate")
            original(target, source, passing)
            self.bytes += source.nbytes

        patch.setattr(staging_memory, "_plain_copy", gated)

    def go(self, *_: object) -> None:
        """Let copies pass from now on."""
        self._open.set()

    def close(self) -> None:
        """Let copies stand again."""
        self._open.clear()
        self.bytes = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def slow_disk(
    pool: hpstore.Pool, segments_apart: None, monkeypatch: pytest.MonkeyPatch
) -> threading.Event:
    """Segments are written once this is set."""
    event, original = threading.Event(), pool.put

    def put(key: str, *args: Any, **options: Any) -> Any:
        if "segment" in key and not event.wait(20):
            raise TimeoutError("the test forgot to let the write go on")
        return original(key, *args, **options)

    monkeypatch.setattr(pool, "put", put)
    return event


# --- overlap --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["fused", "foreach", "plain"])
def test_overlap_saves_the_state_at_the_call(pool: hpstore.Pool, gate: Gate, variant: str) -> None:
    """Copies that are made during backwards and a step hold what was there at save()."""
    net = Net(1)
    optimizer = adamw(net, variant)
    optimizer.register_step_pre_hook(gate.go)  # before ours: the copies begin when the step does
    train(net, optimizer)
    gate.close()
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        for number in (1, 2):
            wanted = values(net, optimizer)
            handle = ckpt.save(number, {"model": net, "optimizer": optimizer})
            assert gate.bytes == 0
            backward(net)  # statistics move on, embeddings are clipped
            backward(net)
            assert not same(wanted[0], net.state_dict())
            assert not handle.done()
            train(net, optimizer)
            # the head and its moments, the embedding's moments, not the embedding itself
            assert gate.bytes == 3 * net.head.weight.nbytes + 2 * net.embedding.weight.nbytes
            handle.result()
            gate.close()
            assert handle.visible_stall_seconds >= handle.staged_seconds > 0
            assert not same(wanted, values(net, optimizer))
            other = Net(2)
            fresh = adamw(other, variant)
            assert ckpt.restore({"model": other, "optimizer": fresh}) == number
            assert same(wanted, values(other, fresh))


def test_overlap_waits_for_each_optimizer_in_the_backward(pool: hpstore.Pool, gate: Gate) -> None:
    """One optimizer a parameter, stepped by its gradient's hook: each step waits for the copies."""

    def built(seed: int) -> tuple[Net, dict[str, torch.optim.Optimizer]]:
        net = Net(seed)
        return net, {n: torch.optim.AdamW([p]) for n, p in net.named_parameters()}

    net, optimizers = built(1)
    by_parameter: dict[torch.Tensor, torch.optim.Optimizer] = {}
    by_parameter.update((p, optimizers[name]) for name, p in net.named_parameters())

    def update(parameter: torch.Tensor) -> None:
        by_parameter[parameter].step()
        by_parameter[parameter].zero_grad()

    for parameter, optimizer in by_parameter.items():
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        optimizer.register_step_pre_hook(gate.go)
    backward(net)
    gate.close()
    wanted = values(net, *optimizers.values())
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizers": optimizers})
        seen: list[int] = []
        for optimizer in optimizers.values():  # after ours: what is copied when an update begins
            optimizer.register_step_pre_hook(lambda *_: seen.append(gate.bytes))
        assert gate.bytes == 0
        backward(net)
        assert seen == [3 * net.head.weight.nbytes + 2 * net.embedding.weight.nbytes] * 5
        handle.result()
        other, fresh = built(2)
        ckpt.restore({"model": other, "optimizers": fresh})
        assert same(wanted, values(other, *fresh.values()))


def test_overlap_waits_for_an_optimizer_that_is_not_in_the_state(
    pool: hpstore.Pool, gate: Gate
) -> None:
    """A fused one moves no version counter: its change would be saved, half of it perhaps."""
    net = Net(1)
    saved, other = adamw(net), adamw(net, "fused")
    seen: list[int] = []
    opens = register_optimizer_step_pre_hook(gate.go)
    other.register_step_pre_hook(lambda *_: seen.append(gate.bytes))
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        wanted = values(net)
        handle = ckpt.save(1, {"model": net, "optimizer": saved})
        train(net, other)
        opens.remove()
        handle.result()
        assert seen == [gate.bytes]
        assert gate.bytes > 0
        restored = Net(2)
        ckpt.restore({"model": restored}, strict=False)
        assert same(wanted, values(restored))


def test_a_change_before_the_copy_fails_the_save_alone(pool: hpstore.Pool, gate: Gate) -> None:
    """The save names the tensor, the step before stays, training and later saves go on."""
    net = Net(1)
    optimizer = adamw(net)
    state = {"model": net, "optimizer": optimizer}
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        gate.go()
        wanted = values(net, optimizer)
        ckpt.save(1, state).result()
        gate.close()
        handle = ckpt.save(2, state)
        with torch.no_grad():
            net.head.weight.mul_(2)
        gate.go()
        with pytest.raises(
            CheckpointError, match=r"'model/head.weight' was changed.*before_update"
        ):
            handle.result()
        train(net, optimizer)
        assert ckpt.steps() == [1]
        other = Net(2)
        fresh = adamw(other)
        assert ckpt.restore({"model": other, "optimizer": fresh}) == 1
        assert same(wanted, values(other, fresh))
        after = values(net, optimizer)
        ckpt.save(3, state).result()
        ckpt.restore({"model": other, "optimizer": fresh})
        assert same(after, values(other, fresh))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_change_that_moves_no_counter_fails_the_save_by_a_sample(
    pool: hpstore.Pool, gate: Gate, transposed: bool
) -> None:
    """x_post_step: weights clamped through `.data` after the step were saved as later values."""
    net = Net(1)
    if transposed:  # strided, as weights in channels_last are
        net.head.weight.data = net.head.weight.data.t().contiguous().t()
    optimizer = adamw(net)
    state = {"model": net, "optimizer": optimizer}
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        gate.go()
        ckpt.save(1, state).result()
        gate.close()
        handle = ckpt.save(2, state)
        net.head.weight.data.clamp_(-1e-3, 1e-3)
        gate.go()
        with pytest.raises(CheckpointError, match=r"'model/head.weight' was changed.*of the hooks"):
            handle.result()
        assert ckpt.steps() == [1]
        ckpt.save(3, state).result()


def test_a_change_on_a_device_shows_in_a_sample_of_it(pool: hpstore.Pool) -> None:
    """x_post_step on a GPU: a write through `.data`, made before the copy on another stream."""
    net = Net(1)
    optimizer = adamw(net)
    device = FakeAccelerator()
    device.take([*net.parameters()])
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap", accelerator=device)) as ckpt:
        original, arrivals = device.copy, device.arrivals

        def late(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
            arrival = original(pairs)
            if len(arrivals) > 1:  # not what was waited for in save()
                net.head.weight.data.neg_()
            return arrival

        device.copy = late  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"'model/head.weight' was changed"):
            ckpt.save(1, {"model": net, "optimizer": optimizer}).result()


def test_a_sample_takes_turns_where_there_are_many_tensors() -> None:
    """Of 200 tensors at most 64 are looked at; each is within four saves."""
    sources = [torch.arange(100.0) + n for n in range(200)]
    pairs = [(torch.empty(100), source) for source in sources]
    seen = set()
    for turn in range(4):
        samples = Samples(pairs, turn)
        for target, source in pairs:
            target.copy_(source)
        assert samples.changed(None) is None
        for number, (target, _) in enumerate(pairs):
            target.neg_()
            if samples.changed(None) == number:
                seen.add(number)
            target.neg_()
    assert seen == set(range(200))


def test_before_update_makes_an_unseen_change_safe(pool: hpstore.Pool, gate: Gate) -> None:
    """A write through .data moves no version; after before_update() it harms nothing."""
    net = Net(1)
    optimizer = adamw(net)
    train(net, optimizer)
    wanted = values(net, optimizer)
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        handle = ckpt.save(1, {"model": net, "optimizer": optimizer})
        threading.Thread(target=gate.go).start()
        ckpt.before_update()
        assert gate.bytes == 3 * net.head.weight.nbytes + 2 * net.embedding.weight.nbytes
        net.head.weight.data.add_(1)
        handle.result()
        other = Net(2)
        fresh = adamw(other)
        ckpt.restore({"model": other, "optimizer": fresh})
        assert same(wanted, values(other, fresh))


def test_overlap_without_an_optimizer_is_a_counted_copy(
    pool: hpstore.Pool, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A bare state_dict is copied before save() returns; a counter and one log line say so."""
    net = Net(1)
    wanted = values(net)[0]
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(staging="overlap")) as ckpt:
        for number in (1, 2):
            ckpt.save(number, {"model": net.state_dict()})
            with torch.no_grad():
                net.head.weight.zero_()
            ckpt.wait()
            net.load_state_dict(wanted)
        assert ckpt.counters["overlap_without_optimizer_total"] == 2
        assert caplog.text.count("no optimizer in the state") == 1
        loaded = ckpt.load(1)
        assert same(wanted, {name.removeprefix("model/"): t for name, t in loaded.items()})


def test_hooks_of_the_optimizer_are_not_run_by_save_and_restore(pool: hpstore.Pool) -> None:
    """Neither makes a step to find or build the optimizer's state; close() removes our hook."""
    net = Net(1)
    optimizer = adamw(net)
    train(net, optimizer)
    calls: list[int] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: calls.append(1))
    state = {"model": net, "optimizer": optimizer}
    there = len(optimizer._optimizer_step_pre_hooks)
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        ckpt.save(1, state).result()
        ckpt.save(2, state).result()
        assert len(optimizer._optimizer_step_pre_hooks) == there + 1
        ckpt.restore(state)
    assert calls == []
    assert len(optimizer._optimizer_step_pre_hooks) == there


# --- the arena and the writer ---------------------------------------------------------------------


def test_save_waits_for_the_one_before(
    pool: hpstore.Pool, slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """on_busy="wait": the arena is not touched before the first save is written."""
    weights = torch.full((300_000,), 1.0)
    with Checkpointer(pool, "run") as ckpt:
        first = ckpt.save(1, {"w": weights})
        weights.fill_(2.0)
        original, waited = ckpt.saver.wait, []

        def wait() -> None:
            waited.append(first.done())
            slow_disk.set()
            original()

        monkeypatch.setattr(ckpt.saver, "wait", wait)
        ckpt.save(2, {"w": weights}).result()
        assert waited == [False]
        assert [level(ckpt.load(n)["w"]) for n in (1, 2)] == [1.0, 2.0]


def test_a_skipped_save_says_so(pool: hpstore.Pool, slow_disk: threading.Event) -> None:
    """on_busy="skip": nothing is staged, the handle is done and its result() an error."""
    weights = torch.full((300_000,), 1.0)
    with Checkpointer(pool, "run", save=SaveOptions(on_busy="skip")) as ckpt:
        first = ckpt.save(1, {"w": weights})
        weights.fill_(2.0)
        second = ckpt.save(2, {"w": weights})
        assert (first.skipped, second.skipped) == (False, True)
        assert second.done()
        with pytest.raises(CheckpointError, match="step 2 was skipped"):
            second.result(timeout=0)
        slow_disk.set()
        first.result()
        assert ckpt.counters["saves_skipped_total"] == 1
        ckpt.wait()
        assert not ckpt.save(3, {"w": weights}).skipped
        ckpt.wait()
        assert ckpt.steps() == [1, 3]
        assert level(ckpt.load(1)["w"]) == 1.0


def test_a_busy_save_can_be_an_error(pool: hpstore.Pool, slow_disk: threading.Event) -> None:
    """on_busy="error": the second save raises, the first one is committed."""
    with Checkpointer(pool, "run", save=SaveOptions(on_busy="error")) as ckpt:
        first = ckpt.save(1, {"w": torch.ones(300_000)})
        with pytest.raises(CheckpointError, match="still under way"):
            ckpt.save(2, {"w": torch.zeros(300_000)})
        slow_disk.set()
        first.result()
        assert ckpt.steps() == [1]


def test_a_stall_over_the_limit_is_counted(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """max_stall_seconds: a counter and a log line, no error; without a limit neither."""
    for limit, count in ((None, 0), (0.0, 1), (1e9, 0)):
        with Checkpointer(
            pool, f"run{count}{limit}", save=SaveOptions(max_stall_seconds=limit)
        ) as ckpt:
            ckpt.save(1, {"w": torch.ones(9)}).result()
            assert ckpt.counters["stalls_over_limit_total"] == count
    assert caplog.text.count("kept the trainer") == 1


def test_a_state_larger_than_staging_is_saved_in_slices(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Several segments of one step through a small arena; the bytes are those at the call."""
    state = {f"t{n}": torch.randn(70_000) for n in range(5)} | {"small": torch.randn(3)}
    wanted = {name: t.clone() for name, t in state.items()}
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(memory=600_000)) as ckpt:
        handle = ckpt.save(1, state)
        for tensor in state.values():
            tensor.zero_()
        handle.result()
        assert ckpt.counters["sliced_saves_total"] == 1
        assert len(ckpt.steps.manifest(1).segments) == 3
        assert ckpt.saver._stage.arena.capacity_bytes <= MIB
        caplog.clear()
        ckpt.restore(state)
        assert same(state, wanted)
        assert "memory does not serve" not in caplog.text  # it was known to be overwritten
        assert ckpt.verify(1).ok


def test_the_arena_is_made_once(pool: hpstore.Pool) -> None:
    """Saves of the same state reuse it, a larger state grows it, an example makes it early."""
    state = {"w": torch.ones(400_000)}
    with Checkpointer(pool, "run", example=state) as ckpt:
        arena = ckpt.saver._stage.arena
        assert arena.grown_total == 1
        assert arena.capacity_bytes >= 1_600_000
        for number in (1, 2):
            ckpt.save(number, state).result()
        assert arena.grown_total == 1
        ckpt.save(3, {"w": torch.ones(4_000_000)}).result()
        assert arena.grown_total == 2
    assert arena.capacity_bytes == 0


@pytest.mark.usefixtures("segments_apart")
def test_memory_that_was_scribbled_over_does_not_serve(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """A restore from the arena compares hashes; what differs is read from the pool, and logged."""
    weights, narrow = torch.randn(200_000), torch.randn(300, 300)
    state = {"w": weights.clone(), "rows": narrow.clone()[:, ::2]}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
        state["w"].zero_()
        ckpt.restore(state)
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.read_bytes == 0
        arena = ckpt.saver._stage.arena
        arena.view(arena.capacity_bytes)[4096::4096] ^= 1
        ckpt.restore(state)
        assert ckpt.last_restore.read_bytes > 0
        assert "read from the pool, memory does not serve" in caplog.text
        assert same(state, {"w": weights, "rows": narrow[:, ::2]})


@pytest.mark.usefixtures("segments_apart")
def test_a_save_that_cannot_begin_leaves_the_next_one_whole(
    pool: hpstore.Pool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deferred copies of a failed save are over before the arena is used again."""
    net = Net(1)
    optimizer = adamw(net)
    state = {"model": net, "optimizer": optimizer}
    original, failed = pool.put, threading.Event()

    def put(key: str, *args: Any, **options: Any) -> Any:
        if "/attempts/" in key and not failed.is_set():
            failed.set()
            raise DeviceFull("no room for the note")
        return original(key, *args, **options)

    monkeypatch.setattr(pool, "put", put)
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap")) as ckpt:
        handle = ckpt.save(1, state)
        assert not ckpt.saver.wait_at_most(
            0.05
        )  # its copies are still to come: the arena is theirs
        assert not failed.is_set()  # nor has it begun to compute beside the training
        gate.go()
        with pytest.raises(DeviceFull):
            handle.result(60)
        ckpt.wait()
        assert gate.bytes == net.head.weight.nbytes
        wanted = values(net, optimizer)
        ckpt.save(2, state).result()
        other = Net(2)
        fresh = adamw(other)
        assert ckpt.restore({"model": other, "optimizer": fresh}) == 2
        assert same(wanted, values(other, fresh))


def test_unknown_ways_of_staging_are_refused(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped option is an error when the checkpointer is made."""
    caplog.set_level(logging.WARNING)
