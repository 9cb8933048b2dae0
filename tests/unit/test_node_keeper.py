"""A keeper's arithmetic: who reads which page, what is taken for complete, what leaves and when."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from hpstore.node_memory import keeper as keeper_module
from hpstore.node_memory.keeper import Keeper, KeptSegment, Refused
from hpstore.node_memory.segment_shape import SegmentShape
from hpstore.units import GIB, MIB

SHAPE = SegmentShape(pages=4, page_bytes=1 * MIB)


class Hands:
    """A clock that tests move."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def keeper(clock: Hands, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    monkeypatch.setattr(keeper_module, "available_bytes", lambda: 64 * GIB)
    return Keeper(clock)


def attach(keeper: Keeper, session: int, key: str = "k", **options: Any) -> KeptSegment:
    asked: dict[str, Any] = {"bound_bytes": 64 * MIB, "keep_seconds": 60.0, "shape": SHAPE}
    return keeper.attach(session, 1000 + session, key=key, name=key, pool="p", **asked | options)


def claim(keeper: Keeper, session: int, segment: KeptSegment, *pages: int) -> list[int]:
    found: list[int] = keeper.claim(session, segment.number, np.array(pages, np.int64)).tolist()
    return found


def publish(keeper: Keeper, session: int, segment: KeptSegment, *pages: int) -> None:
    keeper.publish(session, segment.number, np.array(pages, np.int64))


def fill(segment: KeptSegment) -> None:
    os.posix_fallocate(segment.descriptor, segment.shape.table_bytes, segment.shape.needed_bytes)


def test_a_page_is_read_by_one_session_at_a_time(keeper: Keeper) -> None:
    one = attach(keeper, 1)
    assert attach(keeper, 2) is one
    assert claim(keeper, 1, one, 0, 1) == [0, 1]
    assert claim(keeper, 2, one, 0, 1, 2) == [-1, -1, 2]
    keeper.release(1, one.number, np.array([1]))
    assert claim(keeper, 2, one, 1) == [1]


def test_only_who_has_claimed_a_page_can_say_that_it_is_complete(keeper: Keeper) -> None:
    one = attach(keeper, 1)
    attach(keeper, 2)
    claim(keeper, 1, one, 0)
    publish(keeper, 2, one, 0, 3)
    assert one.table.tolist() == [0, 0, 0, 0]
    publish(keeper, 1, one, 0)
    assert one.table.tolist() == [1, 0, 0, 0]
    assert claim(keeper, 2, one, 0) == [-1]


def test_a_slot_that_a_killed_process_claimed_is_never_used_again(keeper: Keeper) -> None:
    one = attach(keeper, 1)
    attach(keeper, 2)
    claim(keeper, 1, one, 0, 1)
    publish(keeper, 1, one, 1)
    keeper.leave(1)
    assert claim(keeper, 2, one, 0) == [4]
    publish(keeper, 2, one, 0)
    assert one.table.tolist() == [5, 2, 0, 0]


def test_a_segment_without_slots_left_is_replaced(keeper: Keeper) -> None:
    one = attach(keeper, 9)
    for session in range(1, 5):
        assert attach(keeper, session) is one
        claim(keeper, session, one, 0)
        keeper.leave(session)
    assert attach(keeper, 10) is not one
    assert claim(keeper, 9, one, 0) == [7]  # who uses it goes on
    keeper.leave(9)
    assert len(keeper.listing()) == 1


def test_pages_that_do_not_exist_and_segments_of_others_are_refused(keeper: Keeper) -> None:
    one = attach(keeper, 1)
    for session, pages in ((1, [-1]), (1, [4]), (2, [0])):
        with pytest.raises(Refused):
            claim(keeper, session, one, *pages)


def test_who_uses_a_segment_cannot_cut_it_short(keeper: Keeper) -> None:
    """Others map it: they would die by SIGBUS."""
    one = attach(keeper, 1)
    for size in (0, one.shape.file_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(one.descriptor, size)


def test_the_dataset_that_was_used_last_stays_longest(keeper: Keeper, clock: Hands) -> None:
    for number, key in enumerate(["a", "b", "c"]):
        fill(attach(keeper, number, key))
        clock.now += 1
    for number in (1, 0, 2):  # unused in this order: b, a, c
        clock.now += 1
        keeper.leave(number)
    attach(keeper, 5, "d", bound_bytes=13 * MIB)
    assert [found["dataset"] for found in keeper.listing()] == ["a", "c", "d"]


def test_a_dataset_in_use_is_not_freed_for_another(keeper: Keeper) -> None:
    attach(keeper, 1, "a")
    with pytest.raises(Refused, match="above the bound"):
        attach(keeper, 2, "b", bound_bytes=7 * MIB)
    assert [found["dataset"] for found in keeper.listing()] == ["a"]


def test_nothing_is_freed_for_what_has_no_room_all_the_same(keeper: Keeper) -> None:
    """A dataset above the bound would only take the others away."""
    attach(keeper, 1)
    keeper.leave(1)
    with pytest.raises(Refused, match="above the bound"):
        attach(keeper, 2, "large", bound_bytes=SHAPE.needed_bytes - 1)
    assert [found["key"] for found in keeper.listing()] == ["k"]


def test_another_shape_is_another_segment(keeper: Keeper) -> None:
    other = SegmentShape(pages=4, page_bytes=2 * MIB)
    assert attach(keeper, 1) is not attach(keeper, 2, shape=other)


def test_datasets_leave_when_nothing_has_used_them_for_a_while(
    keeper: Keeper, clock: Hands
) -> None:
    attach(keeper, 1)
    clock.now += 1000
    keeper.tick()
    assert not keeper.empty
    keeper.leave(1)
    clock.now += 59
    keeper.tick()
    assert not keeper.empty
    clock.now += 2
    keeper.tick()
    assert keeper.empty


def test_unused_datasets_leave_when_memory_is_short(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(keeper, 1, "used")
    attach(keeper, 2, "unused")
    keeper.leave(2)
    keeper.tick()
    assert len(keeper.listing()) == 2
    monkeypatch.setattr(keeper_module, "available_bytes", lambda: 3 * GIB)
    keeper.tick()
    assert [found["dataset"] for found in keeper.listing()] == ["used"]


def test_freeing_hands_a_dataset_out_no_more_and_leaves_it_to_its_users(keeper: Keeper) -> None:
    used, unused = attach(keeper, 1, "used"), attach(keeper, 2, "unused")
    fill(used)
    fill(unused)
    keeper.leave(2)
    assert keeper.free("other") == (0, 0)
    assert keeper.free(None) == (4 * MIB, 4 * MIB)
    assert claim(keeper, 1, used, 0) == [0]
    assert attach(keeper, 3, "used") is not used
    keeper.leave(1)
    keeper.leave(3)
    assert keeper.free(None) == (0, 0)
    assert keeper.empty


def test_shapes_that_no_file_has_are_not_sane() -> None:
    for pages, nbytes in ((0, 1), (1, 0), (1 << 40, 1), (1 << 31, 1 << 20), (-1, 5)):
        assert not SegmentShape(pages=pages, page_bytes=nbytes).is_sane()
    assert SHAPE.is_sane()
