"""The parts of PipelineHooks by themselves: votes, places, feeds, gates, merged stages."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.data
from torch import nn

from hpstore.checkpoint.gates import CopyGate
from hpstore.errors import CheckpointError, ConfigError
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining.events import Recorder
from hpstore.trainers.pipelining.feed import Feed, as_arguments, joined, picked
from hpstore.trainers.pipelining.ledger import Ledger, Span, Vote, agreed
from hpstore.trainers.pipelining.places import Standing, placed
from hpstore.trainers.pipelining.probes import Lazily, not_lazy
from hpstore.trainers.pipelining.stages import Buffers, merged, require_own_names
from hpstore.trainers.pipelining.supply import Supply

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


def standing(stages: tuple[int, ...], count: int, group: tuple[int, ...] = ()) -> Standing:
    return Standing(stages=stages, num_stages=count, group=group)


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
def test_ranks_that_are_no_pipeline_are_refused(said: list[Standing]) -> None:
    """A stage twice or missing, replicas without a group, groups that contradict each other."""
    with pytest.raises(ConfigError, match="each stage once"):
        placed(said, 0)


# --- data ---------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[Any]):
    """Sample n is n, in two fields; `broken` raises."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError("this sample is gone")
        return {"x": torch.tensor([float(index)]), "y": torch.tensor([-float(index)])}


def loader_of(broken: int = -1) -> DataLoader:
    return DataLoader(Numbers(broken), batch_size=3, drop_last=True)


def test_a_feed_reads_on_over_epochs_and_knows_where_each_batch_ends() -> None:
    """Three whole micro-batches an epoch: positions, and the state behind each, without a gap."""
    with Feed(loader_of(), ahead=2) as feed:
        found = [feed.look(n)[0] for n in range(4)]
        spans = [fed.span for fed in found]
        assert spans[:3] == [Span(epoch=0, start=n, stop=n + 3) for n in (0, 3, 6)]
        assert spans[3] == Span(epoch=1, start=0, stop=3)
        assert [(fed.after["epoch"], fed.after["samples"]) for fed in found] == [
            (0, 3), (0, 6), (1, 0), (1, 3),
        ]  # fmt: skip
        feed.drop(3)
        assert feed.look(0)[0] is found[3]


def test_a_feed_keeps_its_limit() -> None:
    """No more than `ahead` lie ready, and what is asked for beyond is still fetched."""
    made = threading.Semaphore(0)

    class Counting(Numbers):
        def __getitem__(self, index: int) -> Any:
            made.release()
            return super().__getitem__(index)

    with Feed(DataLoader(Counting(), batch_size=1), ahead=2) as feed:
        feed.look(1)
        for _ in range(3):  # two that lie ready and one in the hand of the thread
            assert made.acquire(timeout=60)
        assert not made.acquire(blocking=False)
        assert feed.look(4)[0].span.start == 4


def test_what_the_loader_raises_is_raised_where_the_data_are_needed() -> None:
    """The micro-batches before it are good; nobody waits for ever."""
    with Feed(loader_of(broken=4), ahead=4) as feed:
        assert feed.look(0)[0].batch["x"].shape == (3, 1)
        with pytest.raises(OSError, match="gone"):
            feed.look(1)
    with pytest.raises(ConfigError, match="closed"):
        feed.look(0)
    with (
        Feed(DataLoader(Numbers(), batch_size=11, drop_last=True), ahead=1) as empty,
        pytest.raises(ConfigError, match="no whole micro-batch"),
    ):
        empty.look(0)


def supply(**options: Any) -> Supply:
    given: dict[str, Any] = {"first": True, "last": True, "inputs": "x", "target": "y"} | options
    return Supply(loader_of(), **given)


def test_a_step_that_failed_is_fed_the_same_again() -> None:
    """finish() consumes; without it the next step gets the same micro-batches."""
    with_both = supply()
    with_both.begin(2)
    first = with_both.whole()
    with_both.begin(2)
    again = with_both.whole()
    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[1], again[1])
    assert first[0][0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    used = with_both.finish()
    assert [span.start for span in used.spans] == [0, 3]
    assert used.after is not None
    assert used.after["samples"] == 6
    with_both.begin(2)
    assert with_both.whole()[1].flatten().tolist() == [-6, -7, -8, 0, -1, -2]
    with_both.close()


def test_a_supply_goes_on_at_a_saved_position() -> None:
    """What was fetched ahead is forgotten and read again."""
    one = supply(last=False)
    one.begin(1)
    assert one.whole()[1] is None
    state = one.finish().after
    one.begin(1)
    one.whole()
    one.go_to(state)
    one.begin(1)
    assert one.whole()[0][0].flatten().tolist() == [3, 4, 5]
    one.close()


def test_a_rank_in_the_middle_reads_nothing() -> None:
    """Neither arguments nor targets, and no loader is needed."""
    middle = Supply(None, first=False, last=False, inputs="x", target="y")
    middle.begin(4)
    assert middle.whole() == ((), None)
    assert middle.lazily() == (None, None)
    assert middle.finish().after is None
    with pytest.raises(ConfigError, match="need a loader"):
        Supply(None, first=False, last=True, inputs="x", target="y")


def test_lazily_made_lists_make_each_entry_once_when_asked() -> None:
    """In any order; entries stay for the step; negative indices; no slices."""
    asked: list[int] = []

    def make(index: int) -> int:
        asked.append(index)
        return 10 * index

    lazily = Lazily(4, make)
    assert (len(lazily), isinstance(lazily, list)) == (4, True)
    assert (lazily[2], lazily[2], lazily[-1], lazily[0]) == (20, 20, 30, 0)
    assert asked == [2, 3, 0]
    with pytest.raises(TypeError):
        lazily[1:]
    with pytest.raises(IndexError):
        lazily[4]


def test_a_schedule_of_another_torch_is_said_not_to_be_lazy() -> None:
    """What is missing is named; the installed ones are in tests/contract."""

    class Old:
        pass

    class Other:
        def _step_microbatches(self, chunks: list[Any]) -> None: ...

    class Almost:
        def _step_microbatches(
            self, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any
        ) -> None: ...

    assert "no _step_microbatches" in not_lazy(Old())
    assert "arg_mbs" in not_lazy(Other())
    assert "backward" in not_lazy(Almost())


def test_parts_of_batches_by_name_by_number_and_by_function() -> None:
    """And joined as torch's schedule cuts them again."""
    batch = {"x": torch.ones(2, 1), "y": torch.zeros(2, 1)}
    assert picked(batch, "x") is batch["x"]
    assert picked((1, 2), 1) == 2
    assert picked(batch, ("x", "y")) == (batch["x"], batch["y"])
    assert picked(batch, lambda found: found["y"] + 1).tolist() == [[1], [1]]
    assert as_arguments(3) == (3,)
    pair = joined([(batch["x"], batch["y"])] * 2, "inputs")
    assert [part.shape for part in pair] == [(4, 1), (4, 1)]
    with pytest.raises(ConfigError, match="lazy=True"):
        joined(["text"], "inputs")
    with pytest.raises(ConfigError, match="drop_last=True"):
        joined([torch.ones(2, 1), torch.ones(1, 1)], "inputs")


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


def test_names_that_two_stages_have_are_refused() -> None:
    """On one rank when it holds both, on all when others do; tied names and replicas may."""
    with pytest.raises(ConfigError, match=r"layers\.0\.(weight|bias)"):
        merged([Piece(0), Piece(0)])
    require_own_names([((0,), ["a"]), ((1,), ["b"]), ((0,), ["a"])], ())
    with pytest.raises(ConfigError, match="'a'"):
        require_own_names([((0,), ["a"]), ((1,), ["a"])], ())
    require_own_names([((0,), ["a"]), ((1,), ["a"])], ("a",))


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


# --- gates --------------------------------------------------------------------------------------


def test_a_shut_gate_holds_a_copy_until_it_is_opened() -> None:
    """And counts by when a piece began; one that does not block only counts."""
    gate, passed = CopyGate(blocks=True), threading.Event()
    gate.shut()

    def copy() -> None:
        gate.enter()
        gate.copied(5)
        passed.set()

    thread = threading.Thread(target=copy)
    thread.start()
    assert not passed.is_set()
    assert gate.idle_bytes == gate.busy_bytes == 0
    gate.open()
    thread.join(60)
    assert (gate.idle_bytes, gate.busy_bytes) == (5, 0)
    free = CopyGate(blocks=False)
    free.shut()
    free.enter()
    free.copied(3)
    assert (free.idle_bytes, free.busy_bytes) == (0, 3)


def test_a_recorder_opens_the_gate_whatever_happens() -> None:
    """Shut in a call, open between calls and behind a step that broke off; events outside a step
    are counted, not kept."""
    gate = CopyGate(blocks=True)
    recorder = Recorder(gate)
    recorder.end(0, "F", 0, recorder.begin())
    assert recorder.events_outside == 1
    recorder.begin_step()
    began = recorder.begin()
    assert not gate._open.is_set()
    recorder.end(1, "I", 3, began)
    assert gate._open.is_set()
    recorder.begin()
    (event,) = recorder.end_step()
    assert gate._open.is_set()
    assert (event.stage, event.kind, event.microbatch) == (1, "I", 3)
    assert event.begin <= event.end
    assert recorder.hook_seconds > 0
