"""The parts of PipelineHooks by themselves: votes, places, plans, merged stages, gates."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpstore.checkpoint.state.module_state import module_state
from hpstore.errors import CheckpointError, ConfigError
from hpstore.trainers.pipelining.consumed_samples import Ledger, Vote, agreed
from hpstore.trainers.pipelining.gradients import share_overflow
from hpstore.trainers.pipelining.rank_coordinates import (
    RankPlace,
    RankStanding,
    placed,
    require_told,
)
from hpstore.trainers.pipelining.schedule_plan import ScheduledWork
from hpstore.trainers.pipelining.stages import (
    Buffers,
    HeldStages,
    counted_elsewhere,
    merged,
    require_free_names,
    require_own_names,
)
from hpstore.trainers.pipelining.tied_tensors import Tied, marks_of
from hpstore.trainers.pipelining.torch_internals import plan_of

LEDGER = Ledger(samples=8, digest=77)
VOTES = [
    Vote(stages=(0,), step=4, weights=4, microbatches=2, ledger=LEDGER, loader={"epoch": 0}),
    Vote(stages=(1,), step=4, weights=4, microbatches=2),
    Vote(stages=(2,), step=4, weights=4, microbatches=2, ledger=LEDGER, loader={"epoch": 0}),
]


# --- votes --------------------------------------------------------------------------------------


def test_ranks_that_agree_share_what_the_fed_ones_know() -> None:
    """A rank without data gets the loader's state and the ledger from those that read."""
    assert agreed(VOTES) == VOTES[0]
    assert agreed(VOTES[1:2]) == VOTES[1]
    assert [Vote.from_dict(vote.to_dict()) for vote in VOTES] == VOTES


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"step": 5}, "step differs"),
        ({"weights": 3}, "version of the weights differs"),
        ({"microbatches": 4}, "number of micro-batches differs"),
        ({"loader": {"epoch": 1}}, "position in the data differs"),
        ({"ledger": Ledger(samples=8, digest=78)}, "ledger of samples differs"),
    ],
)
def test_a_rank_that_stands_elsewhere_stops_the_commit(change: dict[str, Any], what: str) -> None:
    """Any difference between the stages, named with both sides; nothing is saved."""
    votes = [*VOTES[:2], replace(VOTES[2], **change)]
    with pytest.raises(CheckpointError, match=what) as raised:
        agreed(votes)
    assert "stages [2]" in str(raised.value)
    assert "untouched" in str(raised.value)


def test_a_ledger_that_is_none_is_refused() -> None:
    """With what was found."""
    with pytest.raises(CheckpointError, match="not a ledger"):
        Ledger.from_dict({"samples": "many"})


# --- places -------------------------------------------------------------------------------------


def standing(stages: tuple[int, ...], count: int, group: tuple[int, ...] = ()) -> RankStanding:
    return RankStanding(stages=stages, num_stages=count, group=group)


def test_all_stages_of_a_replica_have_its_number() -> None:
    """Two replicas of two ranks, interleaved over the job; V-shaped stages; one pipeline alone."""
    said = [standing((n // 2,), 2, (n % 2, n % 2 + 2)) for n in range(4)]
    assert [placed(said, rank).replica for rank in range(4)] == [0, 1, 0, 1]
    assert placed(said, 3).replicas == 2
    assert placed(said, 3).members == (1, 3)
    assert placed([standing((0, 3), 4), standing((1, 2), 4)], 1).replicas == 1


@pytest.mark.parametrize(
    "said",
    [
        [standing((0,), 2), standing((0,), 2)],
        [standing((0,), 3), standing((1,), 3)],
        [standing((0,), 1), standing((0,), 1)],
        [standing((0,), 2, (0, 1)), standing((1,), 2, (1,))],
        [standing((0,), 2), standing((1,), 3)],
    ],
)
def test_ranks_that_are_no_pipeline_are_refused(said: list[RankStanding]) -> None:
    """A stage twice or missing, replicas without a group, groups that contradict each other."""
    with pytest.raises(ConfigError, match="each stage once"):
        placed(said, 0)


def tensor_parallel(
    data: tuple[int, int] | None, reads: tuple[int, int] | None
) -> list[RankStanding]:
    """2 stages x 2 tensor-parallel ranks; `reads`: what loaders of the first stage were told."""
    return [
        RankStanding(
            stages=(n // 2,),
            num_stages=2,
            group=(n % 2, n % 2 + 2),
            data=data,
            reads=reads if n < 2 else None,
        )
        for n in range(4)
    ]


@pytest.mark.parametrize(
    ("data", "reads"), [((0, 1), None), (None, (0, 1)), ((0, 1), (0, 1))], ids=str
)
def test_pipelines_with_one_data_parallel_rank_are_one_replica(
    data: tuple[int, int] | None, reads: tuple[int, int] | None
) -> None:
    """u_pp_tp: as the mesh has it, or the loaders; the other stages need not have one."""
    place = placed(tensor_parallel(data, reads), 3)
    assert (place.replica, place.replicas, place.members, place.told) == (0, 1, (1, 3), True)


def test_data_and_tensor_parallel_pipelines_are_told_apart() -> None:
    """Three dimensions: pp 2, dp 2, tp 2. Replicas are the data-parallel ranks."""
    said = [
        RankStanding(stages=(n // 4,), num_stages=2, group=(n % 4, n % 4 + 4), data=(n // 2 % 2, 2))
        for n in range(8)
    ]
    assert [placed(said, n).replica for n in range(8)] == [0, 0, 1, 1] * 2
    assert {placed(said, n).replicas for n in range(8)} == {2}
    assert placed(said, 3).members == (3, 7)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (tensor_parallel((0, 1), (1, 2)), "give the loader the same mesh"),
        ([*tensor_parallel((0, 1), None)[:3], standing((1,), 2, (1, 3))], ""),
        ([*tensor_parallel((0, 2), None)], "as many pipelines"),
        (
            [
                RankStanding(stages=(0,), num_stages=2, data=(0, 2)),
                RankStanding(stages=(1,), num_stages=2, data=(1, 2)),
            ],
            "different samples",
        ),
        (
            [
                RankStanding(stages=(0,), num_stages=1, group=(0,), data=(0, 1)),
                standing((0,), 1, (1,)),
            ],
            "does not know",
        ),
        ([RankStanding(stages=(0,), num_stages=1, hungry=True)], "need a loader"),
    ],
)
def test_ranks_that_would_read_other_samples_are_refused(
    said: list[RankStanding], text: str
) -> None:
    """u_pp_tp, torchtitan#596: on all ranks alike, and with what to do."""
    if not text:
        assert placed(said, 0).told  # one rank of a pipeline is enough
        return
    for rank in range(len(said)):
        with pytest.raises(ConfigError, match=text):
            placed(said, rank)


def test_what_ranks_say_of_themselves_arrives() -> None:
    """As JSON and back."""
    one = RankStanding(stages=(0, 3), num_stages=4, group=(1, 2), data=(1, 2), reads=None)
    assert RankStanding.of_json(one.to_json()) == one
    held = HeldStages(stages=(0,), names=("a", "b"), split=True, fault="why")
    assert HeldStages.of_json(held.to_json()) == held


def test_split_tensors_need_a_mesh_where_there_are_several_pipelines() -> None:
    """u_pp_tp without a mesh: silently other samples before. One pipeline, or a told one, may."""
    two = RankPlace(replica=0, replicas=2, members=(0, 1))
    with pytest.raises(ConfigError, match="mesh="):
        require_told(two, [False, True])
    require_told(two, [False, False])
    require_told(RankPlace(replica=0, replicas=2, members=(0,), told=True), [True])
    require_told(RankPlace(replica=0, replicas=1, members=(0, 1)), [True])


def test_a_tied_tensor_counts_on_its_first_rank() -> None:
    """c_tied_clip: the norm had it twice."""
    held = [HeldStages(stages=(n,), names=("emb", f"layer{n}")) for n in range(3)]
    tied = Tied(names=("emb",))
    assert counted_elsewhere((2, 0, 1), 2, held, tied) == frozenset()
    assert counted_elsewhere((2, 0, 1), 1, held, tied) == {"emb"}
    assert counted_elsewhere((0, 1), 1, held, Tied()) == frozenset()
    two = Tied.of([("layer0", "layer2")])  # w_two_names: one tensor by two names
    assert counted_elsewhere((0, 1, 2), 2, held, two) == {"layer2"}
    assert counted_elsewhere((0, 1, 2), 0, held, two) == frozenset()


def test_names_of_one_tensor_are_found_where_one_rank_or_two_have_them() -> None:
    """w_two_names: the moments of a tied head were looked for under its other name."""
    tied = Tied.of(["wte", "head"])
    weight = torch.ones(3, 2)
    whole = marks_of(tied, {"wte": weight, "head": weight, "b": torch.ones(1)})
    assert tied.with_found([whole], [(0,)]).groups == (("wte", "head"),)
    split = [marks_of(tied, {"wte": weight}), {}, marks_of(tied, {"head": weight.clone()})]
    found = tied.with_found(split, [(0,), (1,), (2,)])
    assert found.groups == (("wte", "head"),)
    assert found.first_names() == {"head": "wte"}
    shared = marks_of(tied, {"wte": weight, "head": torch.zeros(3, 2)})
    assert tied.with_found([shared, shared], [(0,), (1,)]).groups == ()  # two, by one name each
    assert tied.with_found([shared], [(0, 3)]).groups == ()
    other = [split[0], marks_of(tied, {"head": torch.zeros(3, 2)})]
    with pytest.raises(ConfigError, match=r"tied=\[\('wte', 'head'\)\]"):
        tied.with_found(other, [(0,), (1,)])
    with pytest.raises(ConfigError, match="the same Parameter"):
        Tied.of([("wte", "head")]).require_one({"wte": weight, "head": weight.clone()})


# --- plans, gradients -----------------------------------------------------------------------------


class OldKind(Enum):
    """As torch had the kinds of work before they were strings."""

    FORWARD = 1
    FULL_BACKWARD = 4

    def __str__(self) -> str:
        return {1: "F", 4: "B"}[self.value]


def schedule_with(*actions: Any) -> Any:
    """A schedule of one stage that announces these."""
    return SimpleNamespace(pipeline_order={0: list(actions)})


def test_plans_of_older_torch_are_read_and_those_of_a_newer_one_are_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Numbers for kinds and no shared actions; then actions without any name that is known: no
    plan, one line in the log, and no error in a step."""
    old = [
        SimpleNamespace(stage_index=0, computation_type=kind, microbatch_index=0)
        for kind in OldKind
    ]
    plan = plan_of(schedule_with(*old, None), 1)
    assert plan is not None
    assert plan.orders == {0: (ScheduledWork(0, "F", 0), ScheduledWork(0, "B", 0))}
    assert plan_of(SimpleNamespace(), 1) is None
    assert caplog.text == ""
    for strange in (schedule_with(SimpleNamespace(verb="forward")), schedule_with(old[1])):
        caplog.clear()
        assert plan_of(strange, 1) is None
        assert caplog.text.count("is not understood") == 1


def test_an_overflow_elsewhere_is_seen_in_gradients_of_any_layout() -> None:
    """Strided, a scalar, behind one without elements: an infinity is in the gradient itself."""
    for gradient in (torch.ones(4, 6).t(), torch.ones(()), torch.ones(2, 3, 4, 5)[:, 1:2]):
        parameters = [nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(gradient.shape))]
        parameters[0].grad = torch.ones(0)
        parameters[1].grad = gradient
        elsewhere = patch("torch.distributed.all_reduce", lambda found, **_: found.fill_(1.0))
        with elsewhere, patch("torch.distributed.is_initialized", lambda: True):
            assert share_overflow([parameters], torch.device("cpu"))
        assert torch.isinf(gradient).sum() == 1


class Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts values that Python asks a device for, each of which waits for it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_an_overflow_is_looked_for_at_once_in_all_gradients() -> None:
    """A wait for each parameter was that many round trips to the device."""
    for finite in (True, False):
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(50)]
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        if not finite:
            parameters[30].grad[0] = float("nan")  # type: ignore[index]
        with Looks() as looks:  # type: ignore[no-untyped-call]
            assert share_overflow([parameters[:20], parameters[20:]], torch.device("cpu")) != finite
        assert looks.count <= 3
        infinite = [torch.isinf(p.grad).any().item() for p in parameters if p.grad is not None]
        assert [infinite[0], infinite[20]] == [not finite] * 2  # each optimizer's scaler sees it


# --- modules ------------------------------------------------------------------------------------


class Piece(nn.Module):
    """Layers by their numbers, and perhaps a head."""

    def __init__(self, *numbers: int, head: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(2, 2) for n in numbers})
        if head:
            self.head = nn.BatchNorm1d(2)


def test_stages_of_one_rank_are_one_module_with_the_names_of_all() -> None:
    """The very same parameters, under the names that the whole model gives them."""
    pieces = [Piece(0, 1), Piece(4, head=True)]
    whole = merged(pieces)
    wanted = Piece(0, 1, 4, head=True)
    assert sorted(whole.state_dict()) == sorted(wanted.state_dict())
    assert whole.get_parameter("layers.4.weight") is pieces[1].layers["4"].weight
    assert merged(pieces[:1]) is pieces[0]


class Extra(Piece):
    """With a state that is no tensor."""

    seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def test_the_extra_state_of_a_stage_is_the_whole_modules() -> None:
    """It was dropped when the stages of a rank were put together."""
    one, other = Extra(0), Piece(1)
    one.seen = 7
    whole = merged([one, other])
    state = whole.state_dict()
    assert state["_extra_state"] == 7
    whole.load_state_dict({**state, "_extra_state": 9})
    assert one.seen == 9
    assert set(module_state(whole)) == {
        "_extra_state",
        *(f"layers.{n}.{part}" for n in (0, 1) for part in ("weight", "bias")),
    }
    with pytest.raises(ConfigError, match="_extra_state"):
        merged([Extra(0), Extra(1)])
    hooked = Piece(2)
    layers: Any = hooked.layers
    layers.register_state_dict_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="'layers', which saves or loads"):
        merged([hooked, Piece(3)])


def test_names_that_two_stages_have_are_refused() -> None:
    """On one rank when it holds both, on all when others do; tied names and replicas may."""
    with pytest.raises(ConfigError, match=r"layers\.0\.(weight|bias)"):
        merged([Piece(0), Piece(0)])

    def held(stage: int, *names: str) -> HeldStages:
        return HeldStages(stages=(stage,), names=names)

    require_own_names([held(0, "a"), held(1, "b"), held(0, "a")], Tied())
    with pytest.raises(ConfigError, match="'a'"):
        require_own_names([held(0, "a"), held(1, "a")], Tied())
    require_own_names([held(0, "a"), held(1, "a")], Tied(names=("a",)))


def test_two_stages_of_a_rank_may_share_the_very_same_layer() -> None:
    """As an embedding that is the head, too, of a V shape: it is there once, and no other tensor
    may have its name."""
    first, last = Piece(0, head=True), Piece(4)
    last.head = first.head
    whole = merged([first, last])
    assert sorted(whole.state_dict()) == sorted(Piece(0, 4, head=True).state_dict())
    assert whole.head is first.head
    last.layers["0"] = nn.Linear(2, 2)
    last.layers["0"].weight = first.layers["0"].weight
    with pytest.raises(ConfigError, match=r"layers\.0\.bias"):
        merged([first, last])


def test_buffers_are_put_back_behind_a_trial_run() -> None:
    """A batch norm that has seen nonsense is as it was."""
    norm = nn.BatchNorm1d(2)
    kept = Buffers([norm])
    norm(torch.full((3, 2), float("nan")))
    kept.put_back()
    assert kept.changed == 3
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [0, 0]
    assert int(norm.num_batches_tracked or 0) == 0


@pytest.mark.parametrize("name", ["lr_scheduler", "grad_scaler", "model", "pipeline"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    """m_more_names: lr_scheduler= was saved, and never stepped."""
    with pytest.raises(ConfigError, match=name):
        require_free_names([name, "ema"], "loader")
    with pytest.raises(ConfigError, match="data="):
        require_free_names(["data"], "data")
    require_free_names(["ema", "mine", "data"], "loader")
