"""The record that is fence and index of a run: its bytes, what counts, how small it stays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.agreement.registers import key_register
from hpstore.checkpoint.catalog.fence_record import FenceRecord
from hpstore.checkpoint.format.checkpoint_manifest import MAX_STEP, manifest_key
from hpstore.checkpoint.format.step_ranges import StepRanges
from hpstore.errors import IntegrityError
from hpstore.format.records import FORMAT, seal
from hpstore.objects.object_info import version_token

BELOW, ABOVE = version_token(99, 7), version_token(101, 7)


@given(st.sets(st.integers(0, 60) | st.integers(0, MAX_STEP), max_size=60))
def test_ranges_hold_the_steps_that_they_were_made_of_and_no_others(steps: set[int]) -> None:
    made = StepRanges.of(steps)
    again = StepRanges.parse(made.text())
    assert again == made
    near = steps | {step + by for step in steps for by in (-1, 1, 2)}
    assert {step for step in near if step in again} == steps


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3, 12, 20, 30, 40], "1-3,12,20-40/10"),
        ([5, 9], "5,9"),
        (range(0, 10_000_000, 1000), "0-9999000/1000"),
    ],
)
def test_steps_at_even_distances_are_one_range(steps: list[int], text: str) -> None:
    assert StepRanges.of(steps).text() == text


@pytest.mark.parametrize(
    "text", ["x", "1-", "2-1", "1-5/0", "5,4", "1-9,9", ",", "1" * 13, "1-2-3", "-1", "٣"]
)
def test_what_is_no_ranges_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="range"):
        StepRanges.parse(text)


def test_ranges_of_a_stranger_take_no_memory() -> None:
    assert MAX_STEP in StepRanges.parse(f"0-{MAX_STEP}")


def test_ten_thousand_kept_steps_are_a_small_record() -> None:
    """Every hundredth of a long run, with some protected between; and the worst: at random."""
    even = [*range(0, 1_000_000, 100), 17, 4711, 123_456]
    record = FenceRecord(session="s" * 16, epoch=1, steps=StepRanges.of(even))
    assert len(record.encode()) < 400
    chance = random.Random(7)
    worst = StepRanges.of(chance.sample(range(10_000_000), 10_000))
    assert len(FenceRecord(session="s" * 16, epoch=1, steps=worst).encode()) < 90_000


def test_a_manifest_counts_if_it_is_above_the_epoch_or_its_step_is_named_rule_18() -> None:
    record = FenceRecord(session="s", epoch=100, steps=StepRanges.of([1, 2]))
    assert record.counts(3, ABOVE)
    assert record.counts(2, BELOW)
    assert not record.counts(3, BELOW)
    assert record.committed({1: BELOW, 3: BELOW, 4: ABOVE}) == {1: BELOW, 4: ABOVE}
    again = FenceRecord.decode(record.encode(), where="k")
    assert again == record


def test_in_a_record_of_an_older_hpstore_every_manifest_counts() -> None:
    old = {"session": "s", "host": "h", "boot": "b", "pid": 7, "since_ms": 5}
    found = FenceRecord.decode(seal({"format": FORMAT, **old}), where="k")
    assert found == FenceRecord(session="s", host="h", boot="b", pid=7, since_ms=5)
    assert found.counts(1, BELOW)
    assert b"epoch" not in found.encode()


@pytest.mark.parametrize("change", [{"epoch": "x"}, {"epoch": -1}, {"steps": "2-1"}, {"pid": "p"}])
def test_a_malformed_record_is_refused(change: dict[str, object]) -> None:
    good = {"format": FORMAT, "session": "s", "pid": 7, "since_ms": 5, "epoch": 1, "steps": "1"}
    FenceRecord.decode(seal(dict(good)), where="k")
    with pytest.raises(IntegrityError):
        FenceRecord.decode(seal({**good, **change}), where="k")


def test_the_commits_of_a_run_share_the_claim_of_its_fence_rule_6() -> None:
    fence = key_register("runs/a/writer")
    assert {key_register(manifest_key("runs/a", step)) for step in range(50)} == {fence}
    assert key_register(manifest_key("runs/b", 1)) != fence
    assert len({key_register(f"runs/a/step-{step}/manifest") for step in range(50)}) > 9
    assert len({key_register(f"runs/a/step-{step:012d}/x") for step in range(50)}) > 9
