"""Loops over datasets of others in which something happens that their user passes over: the dataset
grows, a batch fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpstore.loaders import DataLoader

COUNT = 40


class Growing(torch.utils.data.Dataset[int]):
    """Samples are their numbers; some cannot be read."""

    def __init__(self, *bad: int) -> None:
        self.count, self.bad = COUNT, set(bad)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError("not a number")
        return index


def taken(found: Any, seen: list[int]) -> None:
    """All that is left of a loop; who fails is passed over."""
    while True:
        try:
            seen += next(found).tolist()
        except StopIteration:
            return
        except ValueError:
            continue


@pytest.mark.parametrize("asked", ["loader", "sampler"])
def test_a_dataset_that_grows_in_a_loop_changes_the_next_one(asked: str) -> None:
    """Its length is asked for, as a progress bar does: this epoch has each sample once, and a state
    of its middle goes on with those that were to come."""
    data = Growing()
    loader = DataLoader(data, 8, shuffle=True, seed=4)
    whole = torch.cat(list(DataLoader(Growing(), 8, shuffle=True, seed=4))).tolist()
    seen: list[int] = []
    for number, batch in enumerate(loader):
        data.count += 1
        seen += batch.tolist()
        assert len(loader) == 5 if asked == "loader" else len(loader.sampler) == COUNT  # type: ignore[arg-type]
        if number == 1:
            state = loader.state_dict()
    assert seen == whole
    again = DataLoader(Growing(), 8, shuffle=True, seed=4)
    again.load_state_dict(state)
    assert [*seen[:16], *torch.cat(list(again)).tolist()] == whole
    assert len(loader) == 6
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(COUNT + 5))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_behind_batches_that_failed_repeats_none(workers: int) -> None:
    """Two batches fail and are passed over: what was handed out before the state comes no more, and
    all else comes."""
    order = torch.cat(list(DataLoader(Growing(), 4, shuffle=True, seed=1))).tolist()
    bad = order[5], order[14]
    loader = DataLoader(Growing(*bad), 4, shuffle=True, seed=1, num_workers=workers)
    found, seen = iter(loader), list[int]()
    for _ in range(6):
        try:
            seen += next(found).tolist()
        except ValueError:
            continue
    state = loader.state_dict()
    del found
    again = DataLoader(Growing(*bad), 4, shuffle=True, seed=1, num_workers=workers)
    again.load_state_dict(state)
    taken(iter(again), seen)
    assert seen == [*order[:4], *order[8:12], *order[16:]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_right_behind_a_failure_begins_with_that_batch(workers: int) -> None:
    """Its samples are not lost to who restarts because of it."""
    order = torch.cat(list(DataLoader(Growing(), 4, shuffle=True, seed=1))).tolist()
    loader = DataLoader(Growing(order[5]), 4, shuffle=True, seed=1, num_workers=workers)
    with pytest.raises(ValueError, match="not a number"):
        list(loader)
    again = DataLoader(Growing(), 4, shuffle=True, seed=1, num_workers=workers)
    again.load_state_dict(loader.state_dict())
    assert torch.cat(list(again)).tolist() == order[4:]
