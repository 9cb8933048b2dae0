"""What the checkpointer writes, refers to and keeps, and how it comes back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import hpstore
from hpstore.checkpoint import Best, Checkpointer, SaveOptions
from hpstore.checkpoint.format.segment_codecs import CODECS
from hpstore.errors import CheckpointError, ConfigError, VersionConflict
from tests.integration.nets import Net, adamw, level, same, train, values

Tensors = dict[str, torch.Tensor]


# --- what is written, and what can be read of it --------------------------------------------------


def test_frozen_weights_are_referenced_not_written(pool: hpstore.Pool) -> None:
    """Three saves write them once; the first step's deletion leaves the segment that holds them.

    A tied weight that is trained lies behind the frozen one: closing the gap keeps its bytes.
    """
    frozen, tied = torch.randn(300_000), torch.randn(500_000)
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt:
        reports = []
        for number in (1, 2, 3):
            tied += 1
            state = {"base": frozen, "in": tied, "out": tied, "n": torch.tensor(number)}
            reports.append(ckpt.save(number, state).result())
        assert [r.referenced_bytes for r in reports] == [0, frozen.nbytes, frozen.nbytes]
        assert all(r.bytes < frozen.nbytes + tied.nbytes for r in reports[1:])
        shared = ckpt.steps.manifest(1).segments[0]
        assert shared in ckpt.steps.manifest(3).segments
        ckpt.delete(1)
        ckpt.delete(2)
        assert ckpt.steps.collect_garbage() == 0
        assert pool.exists(shared.key)
        assert ckpt.verify(3).ok
        assert same(ckpt.load(3), {**state, "n": torch.tensor(3)})
        ckpt.delete(3)
        assert not [key for key in pool.list("run") if "segment" in key]


def test_a_conjugated_view_is_saved_as_what_it_shows(pool: hpstore.Pool) -> None:
    """Lazy conjugation shares memory with its base; both come back as they looked."""
    base = torch.randn(30_000, dtype=torch.complex64)
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"a": base, "b": base.conj(), "c": base.conj().imag}).result()
        wanted = {"a": base, "b": base.conj().resolve_conj(), "c": -base.imag}
        assert same(ckpt.load(1, keys=["a", "b", "c"]), wanted)


@pytest.mark.parametrize("codec", CODECS)
def test_a_compressed_step_can_be_read_in_part(pool: hpstore.Pool, codec: str) -> None:
    """Frames of 1 MiB survive: whole, by rows, by columns, and referenced by the next step."""
    smooth = torch.arange(900_000).div(64, rounding_mode="floor").float().reshape(1500, 600)
    noise = torch.randn(400, 1000, dtype=torch.float64)
    state: dict[str, Any] = {"smooth": smooth, "noise": noise, "n": torch.tensor(1)}
    with Checkpointer(
        pool, "run", rng=False, save=SaveOptions(compression=codec, warm=False)
    ) as ckpt:
        first = ckpt.save(1, state).result()
        assert first.bytes < smooth.nbytes + noise.nbytes
        second = ckpt.save(2, {**state, "n": torch.tensor(2)}).result()
        assert second.bytes < 1000 < second.referenced_bytes
        ckpt.delete(1)
        saved = ckpt.read(2)
        assert torch.equal(saved["smooth"][700:900], smooth[700:900])
        assert torch.equal(saved["noise"][..., 17:900:3], noise[..., 17:900:3])
        assert torch.equal(saved["smooth"][-1], smooth[-1])
        assert same(ckpt.load(2), {**state, "n": torch.tensor(2)})
        assert ckpt.verify(2).ok


def test_the_best_steps_stay(pool: hpstore.Pool) -> None:
    """keep_best by a metric of save(); metrics are in the manifest."""
    two = Best(metric="loss", mode="max", count=2)
    for best, kept in (("min:loss", [2, 5]), ("max:loss", [4, 5]), (two, [1, 4, 5])):
        prefix = f"run{kept}"
        with Checkpointer(pool, prefix, keep_last=1, keep_best=best, rng=False) as ckpt:
            for number, loss in enumerate((7.0, 1.0, 3.0, 9.0, 2.0), 1):
                ckpt.save(number, {"n": torch.tensor(number)}, metrics={"loss": loss}).result()
            ckpt.wait()
            assert ckpt.steps() == kept
            assert ckpt.steps.manifest(5).metrics == {"loss": 2.0}


def test_a_protected_step_stays(pool: hpstore.Pool) -> None:
    """protect keeps a step from retention and delete; unprotect and force give it up."""
    with Checkpointer(pool, "run", keep_last=1, rng=False) as ckpt:
        for number in (1, 2, 3):
            ckpt.save(number, {"n": torch.tensor(number)}).result()
            ckpt.wait()
            if number == 1:
                ckpt.steps.protect(1, "release")
        assert ckpt.steps() == [1, 3]
        assert ckpt.steps.protected() == {"release": 1}
        with pytest.raises(CheckpointError, match="step 1 is protected as 'release'"):
            ckpt.delete(1)
        with pytest.raises(CheckpointError, match="nothing under 'run' is protected as 'other'"):
            ckpt.steps.unprotect("other")
        with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
            ckpt.steps.protect(2, "gone")
        with pytest.raises(ConfigError, match="is not a name"):
            ckpt.steps.protect(3, "a/b")
        ckpt.steps.protect(3, "release2")
        ckpt.delete(3, force=True)
        ckpt.steps.unprotect("release")
        ckpt.delete(1)
        assert ckpt.steps() == []


def test_the_older_of_two_writers_is_fenced_off(pool: hpstore.Pool) -> None:
    """Its next save fails and changes nothing; the newer one's steps are whole and go on."""
    with Checkpointer(pool, "run") as old, Checkpointer(pool, "run") as new:
        old.save(1, {"w": torch.full((90_000,), 1.0)}).result()
        new.save(2, {"w": torch.full((90_000,), 2.0)}).result()
        with pytest.raises(VersionConflict, match="another checkpointer"):
            old.save(3, {"w": torch.full((90_000,), 3.0)}).result()
        old.wait()
        new.save(4, {"w": torch.full((90_000,), 4.0)}).result()
        assert new.steps() == [1, 2, 4]
        assert [level(new.load(n)["w"]) for n in new.steps()] == [1.0, 2.0, 4.0]
        assert len([key for key in pool.list("run/step-") if key.endswith("/manifest")]) == 3


def test_pickles_need_to_be_allowed_on_both_sides(pool: hpstore.Pool) -> None:
    """Refused at save and at restore, unless allow_pickle says that the pool is trusted."""
    words = re.compile("a+")
    state: dict[str, Any] = {"words": words, "w": torch.ones(3)}
    with Checkpointer(pool, "run", allow_pickle=True) as ckpt:
        ckpt.save(1, state).result()
        state["words"] = None
        ckpt.restore(state)
        assert state["words"] == words
        assert ckpt.read(1).tree()["words"] == words
    with Checkpointer(pool, "run") as careful:
        with pytest.raises(CheckpointError, match="they run code"):
            careful.restore(state)
        with pytest.raises(CheckpointError, match=r"'words' is a re\.Pattern"):
            careful.save(2, state)
        assert torch.equal(careful.load(1)["w"], torch.ones(3))


# --- restoring ------------------------------------------------------------------------------------


def test_a_value_of_each_rank_comes_back(pool: hpstore.Pool) -> None:
    """per_rank(): plain values, tensors and nested state are given back through `.value`."""
    with Checkpointer(pool, "run") as ckpt:
        position = ckpt.per_rank({"at": 7, "seen": torch.arange(5)})
        ckpt.save(1, {"loader": position}).result()
        other = ckpt.per_rank({"at": 0, "seen": torch.zeros(5, dtype=torch.int64)})
        ckpt.restore({"loader": other})
        assert same(other.value, position.value)


def test_moments_keep_their_dtype(pool: hpstore.Pool) -> None:
    """fp32 moments of bf16 parameters are restored as they were, not by way of bf16."""

    def built(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = torch.nn.Linear(200, 200).bfloat16()
        return net, torch.optim.AdamW(net.parameters())

    net, optimizer = built(1)
    net(torch.randn(4, 200).bfloat16()).sum().backward()
    optimizer.step()
    for slots in optimizer.state.values():
        slots["exp_avg"] = torch.randn(slots["exp_avg"].shape)
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result()
        for warm in (True, False):
            ckpt.saver.options = replace(ckpt.saver.options, warm=warm)
            other, fresh = built(2)
            ckpt.restore({"model": other, "optimizer": fresh})
            assert same(values(net, optimizer), values(other, fresh))
            assert fresh.state[next(other.parameters())]["exp_avg"].dtype == torch.float32


WRAPS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "plain": lambda net: net,
    "parallel": torch.nn.DataParallel,
    "compiled": torch.compile,
}


def test_names_do_not_depend_on_the_wrapper(pool: hpstore.Pool) -> None:
    """Plain, DataParallel and compiled models have torch's names, and restore into each other."""
    net = Net(1)
    optimizer = adamw(net)
    train(net, optimizer)
    wanted = {f"model/{name}" for name in get_model_state_dict(net)}
    of_torch: Any = get_optimizer_state_dict(net, optimizer)["state"]
    for name, slots in of_torch.items():
        wanted |= {f"optimizer/state/{name}/{slot}" for slot in slots}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        for number, wrap in enumerate(WRAPS.values()):
            ckpt.save(number, {"model": wrap(net), "optimizer": optimizer}).result()
            assert set(ckpt.read(number)) == wanted
            for other_wrap in WRAPS.values():
                other = Net(2)
                fresh = adamw(other)
                ckpt.restore({"model": other_wrap(other), "optimizer": fresh}, step=number)
                assert same(values(net, optimizer), values(other, fresh))


class Counted:
    """An object with a tensor in its state."""

    def __init__(self) -> None:
        self.seen = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_what_did_not_fit_is_listed(pool: hpstore.Pool) -> None:
    """strict=False: tensors that were wanted or recorded in vain; what was taken is not listed."""
    with Checkpointer(pool, "run") as ckpt:
        state: dict[str, Any] = {
            "model": torch.nn.Linear(3, 3),
            "counted": Counted(),
            "old": {"x": torch.ones(2)},
            "pair": (torch.ones(2), 1),
            "mine": ckpt.per_rank({"t": torch.ones(1)}),
            "alone": adamw(Net(1)),  # its model is not in the state
        }
        for parameter in state["alone"].param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        state["alone"].step()
        ckpt.save(1, state).result()
        ckpt.restore(state)
        assert ckpt.last_restore is not None
        assert (ckpt.last_restore.missing, ckpt.last_restore.unexpected) == ((), ())
        wider = torch.nn.Sequential()
        wider.weight = torch.nn.Parameter(torch.zeros(3, 3))
        wider.extra = torch.nn.Parameter(torch.zeros(4))
        del state["old"]
        ckpt.restore({**state, "model": wider}, strict=False)
        assert ckpt.last_restore.missing == ("model/extra",)
        assert ckpt.last_restore.unexpected == ("model/bias", "old/x")
        assert torch.equal(wider.weight, state["model"].weight)
