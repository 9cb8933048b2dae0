"""How PipelineHooks reads: micro-batches before they are due, and what of them was consumed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining.consumed_samples import Span
from hpstore.trainers.pipelining.micro_batch_feed import Feed, as_arguments, joined, picked
from hpstore.trainers.pipelining.stage_inputs import Supply
from hpstore.trainers.pipelining.torch_internals import Lazily, not_lazy


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
            (0, 3),
            (0, 6),
            (1, 0),
            (1, 3),
        ]
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


def test_a_feed_goes_on_behind_the_rest_of_an_epoch() -> None:
    """Resumed with larger micro-batches than were read before: what is left of the epoch is less
    than one of them, and the next epoch begins."""
    loader = DataLoader(Numbers(), batch_size=6, drop_last=True)
    begun = loader_of()
    state = begun.state_dict() | {"samples": 6}
    loader.load_state_dict(state)
    with Feed(loader, ahead=1) as feed:
        assert feed.look(0)[0].span == Span(epoch=1, start=0, stop=6)


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
    first = with_both.given(lazy=False)
    with_both.begin(2)
    again = with_both.given(lazy=False)
    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[1], again[1])
    assert first[0][0].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    used = with_both.finish()
    assert [span.start for span in used.spans] == [0, 3]
    assert used.after is not None
    assert used.after["samples"] == 6
    with_both.begin(2)
    assert with_both.given(lazy=False)[1].flatten().tolist() == [-6, -7, -8, 0, -1, -2]
    with_both.close()


def test_the_next_step_is_read_while_one_runs() -> None:
    """Two micro-batches are in use; those of the next step lie ready before they are consumed."""
    asked: list[int] = []
    enough = threading.Event()

    class Watched(Numbers):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            if index == 7:
                enough.set()
            return super().__getitem__(index)

    both = Supply(
        DataLoader(Watched(), batch_size=2, drop_last=True),
        first=True,
        last=True,
        inputs="x",
        target="y",
    )
    both.begin(2)
    assert both.given(lazy=False)[0][0].flatten().tolist() == [0, 1, 2, 3]
    assert enough.wait(60), asked
    both.close()


def test_a_loader_that_is_given_back_stands_behind_what_was_consumed() -> None:
    """Not behind what was read ahead; another step would go on there."""
    both = supply()
    both.begin(1)
    both.given(lazy=False)
    both.finish()
    both.begin(1)
    both.given(lazy=False)
    both.close()
    assert both._loader is not None
    assert both._loader.state_dict()["samples"] == 3
    both.begin(1)
    assert both.given(lazy=False)[1].flatten().tolist() == [-3, -4, -5]
    both.close()


@pytest.mark.parametrize(
    ("batch_size", "tail", "rows"),
    [(1, "pad", 0), (1, "drop", 0), (1, "uneven", 1), (2, "pad", 0), (2, "drop", 3)],
)
def test_a_padded_or_dropped_last_micro_batch_may_be_a_whole_one(
    batch_size: int, tail: Any, rows: int
) -> None:
    """Ten samples over three replicas; `rows` of the last micro-batch, where it is too small."""
    loader = DataLoader(Numbers(), batch_size, tail=tail, rank=0, world_size=3)
    supply = Supply(loader, first=True, last=True, inputs="x", target="y")
    if not rows:
        supply.require_even()
        assert {len(batch["x"]) for batch in loader} == {batch_size}
        return
    with pytest.raises(ConfigError, match=f"would have {rows} of {3 * batch_size} samples"):
        supply.require_even()


def test_a_loader_that_has_raised_is_asked_again_by_the_next_step() -> None:
    """The same micro-batches, none lost and none twice, once the sample can be read."""
    data = Numbers(broken=4)
    both = Supply(
        DataLoader(data, batch_size=3, drop_last=True),
        first=True,
        last=True,
        inputs="x",
        target="y",
    )
    both.begin(1)
    assert both.given(lazy=False)[0][0].flatten().tolist() == [0, 1, 2]
    both.finish()
    for _ in range(2):
        both.begin(1)
        with pytest.raises(OSError, match="gone"):
            both.given(lazy=False)
    data.broken = -1
    both.begin(1)
    assert both.given(lazy=False)[0][0].flatten().tolist() == [3, 4, 5]
    used = both.finish()
    assert used.spans == (Span(epoch=0, start=3, stop=6),)
    both.close()


def test_a_loader_that_hangs_is_not_read_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is left behind, and would take micro-batches that nobody sees."""
    answer = threading.Event()

    class Hanging(Numbers):
        def __getitem__(self, index: int) -> Any:
            answer.wait(60)
            return super().__getitem__(index)

    monkeypatch.setattr("hpstore.trainers.pipelining.micro_batch_feed.CLOSE_SECONDS", 0.01)
    loader = DataLoader(Hanging(), batch_size=1)
    state = loader.state_dict()
    both = Supply(loader, first=True, last=True, inputs="x", target="y")
    both.begin(1)
    thread = both._feed._thread if both._feed is not None else None
    both.close()
    with pytest.raises(ConfigError, match="hangs"):
        both.begin(1)
    with pytest.raises(ConfigError, match="hangs"):
        both.go_to(state)
    answer.set()
    assert thread is not None
    thread.join(60)


def test_a_supply_goes_on_at_a_saved_position() -> None:
    """What was fetched ahead is forgotten and read again."""
    one = supply(last=False)
    one.begin(1)
    assert one.given(lazy=False)[1] is None
    state = one.finish().after
    one.begin(1)
    one.given(lazy=False)
    one.go_to(state)
    one.begin(1)
    assert one.given(lazy=False)[0][0].flatten().tolist() == [3, 4, 5]
    one.close()


def test_a_rank_in_the_middle_reads_nothing() -> None:
    """Neither arguments nor targets, and no loader is needed."""
    middle = Supply(None, first=False, last=False, inputs="x", target="y")
    middle.begin(4)
    assert middle.given(lazy=False)[:2] == ((), None)
    assert middle.given(lazy=True)[:2] == (None, None)
    assert middle.finish().after is None


def test_a_micro_batch_that_cannot_be_had_is_stood_in_for_once_the_schedule_runs() -> None:
    """a_void_step, lazy-input: peers wait for what comes of it. The first must be there; the
    next step has the same ones."""
    one = supply(last=False)
    look: Any = one._look
    hiccup = [True]

    def looked(index: int) -> Any:
        if index == 1 and hiccup:
            hiccup.clear()
            raise OSError("once")
        return look(index)

    setattr(one, "_look", looked)  # noqa: B010 (mypy)
    one.begin(2)
    lazily = one.given(lazy=True).arguments
    assert one.fault is None
    assert lazily[1] == lazily[0]
    assert isinstance(one.fault, OSError)
    one.begin(2)
    lazily = one.given(lazy=True).arguments
    assert one.fault is None
    assert lazily[1][0].flatten().tolist() == [3, 4, 5]
    one.close()


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
    assert [*lazily, *enumerate(lazily)][:5] == [0, 10, 20, 30, (0, 0)]
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
