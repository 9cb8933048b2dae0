"""Checkpoints by name: old or new at every crash, no removal before the newer is durable."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
import hpstore.trainers
from hpstore.checkpoint.state.state_tree import MAX_DEPTH
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import CheckpointError, ConfigError, IntegrityError, TooFewDevices
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.admin import PoolAdmin
from hpstore.pool.pool import Pool
from hpstore.trainers.named_checkpoints import Named, NamedCheckpoints
from hpstore.trainers.refused_states import refuse_states
from tests.thorough import crash_points


def state(number: int) -> dict[str, Any]:
    return {"n": number, "t": torch.full((100,), float(number))}


def numbers(named: NamedCheckpoints) -> dict[str, int]:
    """What every name means, read back."""
    found = {}
    for name in named.names():
        loaded = named.load(name)
        assert torch.equal(loaded["t"], state(loaded["n"])["t"])
        found[name] = loaded["n"]
    return found


def test_a_save_is_old_or_new_at_every_crash_point(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crash before each change of the pool in a save with overwriting, retention and removal.

    Whatever is named can be loaded, never less than before, and the next run leaves no rubbish.
    """
    put, delete, bar, remove = Pool.put, Pool.delete, PoolAdmin.bar, PoolAdmin.remove_versions
    for crash_at in crash_points():
        prefix = f"run{crash_at}"
        with NamedCheckpoints(pool, prefix) as first:
            for number, name in enumerate(("a", "b", "c")):
                first.save(name, state(number))
        left = [crash_at]

        def counted(kind: Any, left: list[int] = left) -> Any:
            def change(self: Any, *args: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise SimulatedCrash
                return kind(self, *args, **options)

            return change

        named = NamedCheckpoints(pool, prefix, keep_last=3)
        monkeypatch.setattr(Pool, "put", counted(put))
        monkeypatch.setattr(Pool, "delete", counted(delete))
        monkeypatch.setattr(PoolAdmin, "bar", counted(bar))
        monkeypatch.setattr(PoolAdmin, "remove_versions", counted(remove))
        with contextlib.suppress(SimulatedCrash):
            named.save("b", state(7))
            named.wait()
            named.remove("c")
            named.save("d", state(8))
            named.close()
        monkeypatch.undo()
        named._end_worker()
        with NamedCheckpoints(pool, prefix) as again:
            found = numbers(again)
            assert found in (
                {"a": 0, "b": 1, "c": 2},
                {"a": 0, "b": 7, "c": 2},
                {"a": 0, "b": 7},
                {"a": 0, "b": 7, "d": 8},
            )
            again.save("next", state(9))
            again.wait()
            assert numbers(again) == {**found, "next": 9}
            assert len(again._checkpoints.steps()) == len(found) + 1
            assert pool.list(f"{prefix}/doubtful/") == []
        if left[0] >= 0:
            assert crash_at > 15
            assert found == {"a": 0, "b": 7, "d": 8}
            return


def test_removals_wait_while_a_save_is_in_debt(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that survives fewer losses than parity removes nothing; the next whole one does."""
    put = Pool.put

    def poor(self: Pool, key: str, *args: Any, **options: Any) -> ObjectInfo:
        return replace(put(self, key, *args, **options), spare_columns=1)

    told: list[str] = []
    with NamedCheckpoints(pool, "run", keep_last=2) as named:
        for number, name in enumerate(("a", "b", "x")):
            named.save(name, state(number))
        named.wait()
        assert numbers(named) == {"b": 1, "x": 2}
        monkeypatch.setattr(Pool, "put", poor)
        named.save("c", state(3))
        named.remove("b", removed=lambda: told.append("b"))
        named.remove("x", removed=lambda: told.append("x"))
        named.wait()
        assert numbers(named) == {"b": 1, "x": 2, "c": 3}
        assert "survives 1 losses" in caplog.text
        monkeypatch.undo()
        named.save("x", state(4))  # saved again: the removal was of the one before
        named.wait()
        assert numbers(named) == {"c": 3, "x": 4}
        assert told == ["b"]


def test_several_failures_are_all_raised(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed save and a failing read in the removal after it: both are told."""
    named = NamedCheckpoints(pool, "run")

    def failing(self: Pool, key: str, *args: Any, **options: Any) -> Any:
        raise TooFewDevices(key)

    def forget(name: str, removed: object) -> None:
        raise TooFewDevices(name)

    named.save("a", state(1))
    named.wait()
    monkeypatch.setattr(named, "_publish", lambda *_: failing(pool, "one"))
    monkeypatch.setattr(named, "_remove", forget)
    named.save("b", state(2))
    named.remove("a")
    with pytest.raises(BaseExceptionGroup) as raised:
        named.close()
    assert [str(error) for error in raised.value.exceptions] == ["one", "a"]
    with pytest.raises(CheckpointError, match="closed"):
        named.save("c", state(3))
    with pytest.raises(CheckpointError, match="closed"):
        named.remove("c")
    named.close()


def test_what_is_about_to_go_is_no_answer(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """latest() waits for a removal that was asked for: a launcher of Lightning saves, loads and
    removes a checkpoint of its own after fit(), and a restart had its name (pl_spawn).
    """
    forget, waited_for = NamedCheckpoints._forget, threading.Event()

    def slow(self: NamedCheckpoints, name: str) -> None:
        assert waited_for.wait(60)
        forget(self, name)

    monkeypatch.setattr(NamedCheckpoints, "_forget", slow)
    with NamedCheckpoints(pool, "run") as named:
        wait = named._await_pending

        def let_go() -> list[BaseException]:
            waited_for.set()
            return wait()

        monkeypatch.setattr(named, "_await_pending", let_go)
        named.save("kept", state(1))
        named.save("gone", state(2))
        named.remove("gone")
        assert named.latest() == "kept"


def test_no_thread_stays_when_all_is_durable(pool: Pool) -> None:
    """wait() ends the background thread, which Lightning's tests count as one left behind; the
    next removal has one again."""

    def threads() -> int:
        return sum(t.name.startswith("hpstore-names") for t in threading.enumerate())

    with NamedCheckpoints(pool, "run") as named:
        named.save("a", state(1))
        named.save("b", state(2))
        assert threads() == 1
        named.wait()
        assert threads() == 0
        named.remove("a")
        named.wait()
        assert (threads(), named.names()) == (0, ["b"])
        named.save("c", state(3))
    assert threads() == 0


@pytest.mark.usefixtures("segments_apart")
def test_the_latest_that_can_be_read_is_found(pool: Pool) -> None:
    """Nothing yet, then the newest, then the one before when its segment is gone."""
    with NamedCheckpoints(pool, "run") as named:
        assert named.latest() is None
        named.save("z", state(1))
        named.save("a", state(2))
        named.wait()
        assert (named.latest(), named.names()) == ("a", ["z", "a"])
        newest = named._checkpoints.steps()[-1]
        pool.delete(named._checkpoints.steps.manifest(newest).segments[0].key)
        assert named.latest() == "z"
        pool.put("run/names/z", Named(name="z", number=newest).encode() + b"x")
        with pytest.raises(IntegrityError):
            named.load("z")
        with pytest.raises(ConfigError, match="keep_last"):
            NamedCheckpoints(pool, "run", keep_last=0)


def test_a_name_that_means_another_checkpoint_is_not_loaded(pool: Pool) -> None:
    """A record put in another's place: the checkpoint knows its own name."""
    with NamedCheckpoints(pool, "run") as named:
        named.save("a", state(1))
        named.wait()
        pool.put("run/names/b", Named(name="b", number=0).encode())
        with pytest.raises(IntegrityError, match="is not 'b'"):
            named.load("b")


def test_objects_that_would_come_back_as_their_state_are_refused(pool: Pool) -> None:
    """By where they are; other types are taken, or refused, by the Checkpointer."""
    refuse_states(
        {
            "a": [1, 2.5, None, True, "s", b"b", 1j, (torch.ones(1), np.ones(1), np.float32(1))],
            3: {(1, 2): torch.float16},
            "c": collections.OrderedDict(x=torch.Size([1])),
        },
        "x",
    )
    model = torch.nn.Linear(1, 1)
    for wrong in (model, torch.optim.SGD(model.parameters(), 0.1)):
        for value in ([wrong], (wrong,), collections.deque([wrong])):
            with pytest.raises(CheckpointError, match=r"x\['k'\]\[0\] is a "):
                refuse_states({"k": value}, "x")
    with NamedCheckpoints(pool, "run") as named:
        named.save("a", {"k": [Path("/x"), {1, 2}]})
        assert named.load("a") == {"k": [Path("/x"), {1, 2}]}
        for unknown in (object(), print):
            with pytest.raises(CheckpointError, match="k/0' is a "):
                named.save("b", {"k": [unknown]})
        assert named.names() == ["a"]
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(CheckpointError, match="deeper"):
        refuse_states(deep, "x")


@pytest.mark.parametrize("kind", [torch.nn.ReLU, torch.optim.SGD])
def test_a_class_is_no_object_with_a_state(pool: Pool, kind: type) -> None:
    """`activation=nn.ReLU` among the hyper-parameters: refused by its key, and a pickle where these
    are allowed; it was refused as an object whose state would come back, either way."""
    with (
        NamedCheckpoints(pool, "run") as named,
        pytest.raises(CheckpointError, match=r"state 'checkpoint/k' is a class torch\."),
    ):
        named.save("a", {"k": kind})
    with NamedCheckpoints(pool, "run", allow_pickle=True) as named:
        named.save("a", {"k": kind})
        assert named.load("a") == {"k": kind}


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("PoolCheckpointIO", "lightning.pytorch.plugins.io", "lightning"),
        ("PoolTrainerCallback", "transformers", "huggingface"),
        ("PoolAccelerate", "accelerate", "huggingface"),
        ("PoolStorage", "torch_checkpointing.storage.base_storage", "torch-checkpointing"),
    ],
)
def test_a_missing_trainer_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    """Without the package: an ImportError with the command that brings it; others still import."""
    pytest.importorskip(package)  # whole: one that is stopped half way cannot be imported again
    for module in ("lightning", "huggingface", "accelerate_states", "torch_checkpointing"):
        monkeypatch.delitem(sys.modules, f"hpstore.trainers.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    wanted = rf"cannot be imported \(import of {package} halted.*pip install 'hpstore\[{extra}\]'"
    with pytest.raises(ImportError, match=wanted):
        getattr(hpstore.trainers, name)
    with pytest.raises(AttributeError):
        hpstore.trainers.PoolNothing  # noqa: B018


def test_every_adapter_is_where_it_is_listed() -> None:
    """The lazy names are the modules' own."""
    assert set(hpstore.trainers.__all__) == set(hpstore.trainers._HOMES)
    for name in hpstore.trainers.__all__:
        assert getattr(hpstore.trainers, name).__name__ == name


def test_a_name_that_cannot_be_read_holds_no_other_removal_up(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record is damaged: it stays and is said, the next one goes, and so does what is old."""
    told: list[str] = []
    with NamedCheckpoints(pool, "run", keep_last=None) as named:
        for number, name in enumerate(("a", "b", "c")):
            named.save(name, state(number))
        named.wait()
        pool.put(named._pointer_key("a"), b"nonsense")
        named.remove("a", removed=lambda: told.append("a"))
        named.remove("b", removed=lambda: told.append("b"))
        named.wait()
        assert told == ["b"]
        assert "'a' under 'run' is not removed" in caplog.text
