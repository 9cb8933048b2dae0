"""Buffers: page-aligned, reused, within the budget."""

from __future__ import annotations

import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from hpstore.codec.galois import Bytes
from hpstore.errors import BudgetExceeded
from hpstore.runtime import buffers
from hpstore.runtime.budget import ByteBudget
from hpstore.runtime.buffers import BufferPool, aligned_array, touch
from hpstore.units import KIB, MIB


@pytest.mark.parametrize("populate", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 5 * KIB, MIB, 2 * MIB, 2 * MIB + 1])
def test_arrays_are_page_aligned_zeroed_and_writable(nbytes: int, populate: bool) -> None:
    """Of the very length asked for, fit for O_DIRECT."""
    array = aligned_array(nbytes, populate=populate)
    assert array.shape == (nbytes,)
    assert array.dtype == np.uint8
    assert not array.any()
    if nbytes:
        assert array.ctypes.data % mmap.PAGESIZE == 0
        array[:] = 255
        assert int(array.sum(dtype=np.uint64)) == 255 * nbytes


def test_an_array_lives_as_long_as_its_last_view() -> None:
    """A slice keeps the mapping; the bytes are still there when the array's name is gone."""
    view = aligned_array(3 * MIB)[MIB : MIB + 4]
    view[:] = 7
    gc.collect()
    assert view.tolist() == [7, 7, 7, 7]


class _NoAdvice(mmap.mmap):
    """A kernel without huge pages."""

    def madvise(self, *_: object) -> None:
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("nbytes", [4096, 4 * MIB])
def test_advice_that_the_kernel_refuses_is_no_error(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Huge pages and MADV_POPULATE_WRITE make it faster; memory is given without them too."""
    monkeypatch.setattr(mmap, "mmap", _NoAdvice)
    monkeypatch.setattr(buffers, "_madvise", lambda *_: -1)
    array = aligned_array(nbytes, populate=True)
    assert array.shape == (nbytes,)
    assert not array.any()


def address(array: Bytes) -> int:
    return array.ctypes.data


def test_a_returned_buffer_is_used_again() -> None:
    """The second lease of a size class is the memory of the first."""
    pool = BufferPool(ByteBudget(10 * MIB))
    first = pool.lease(100 * KIB)
    where = address(first.array)
    first.release()
    second = pool.lease(120 * KIB)
    assert address(second.array) == where
    second.release()


def test_buffers_on_loan_never_overlap() -> None:
    """What one holder writes no other one sees."""
    pool = BufferPool(ByteBudget(64 * MIB))
    leases = [pool.lease(64 * KIB) for _ in range(8)]
    for i, lease in enumerate(leases):
        lease.array[:] = i
    assert [int(lease.array.max()) for lease in leases] == list(range(8))
    assert [int(lease.array.min()) for lease in leases] == list(range(8))


@pytest.mark.parametrize(
    ("asked", "given"),
    [(0, 4096), (1, 4096), (4097, 8192), (MIB, MIB), (MIB + 1, 2 * MIB), (5 * MIB, 5 * MIB)],
)
def test_a_lease_is_at_least_what_was_asked(asked: int, given: int) -> None:
    """Few size classes: powers of two up to 1 MiB, then whole MiB; all of it is charged."""
    pool = BufferPool(ByteBudget(64 * MIB))
    lease = pool.lease(asked)
    assert len(lease.array) == lease.nbytes == given
    assert pool.budget.used_bytes == given
    lease.release()
    assert pool.budget.used_bytes == 0


def test_release_is_idempotent() -> None:
    """A second release neither frees bytes that others hold nor lends the buffer twice."""
    pool = BufferPool(ByteBudget(10 * MIB))
    lease = pool.lease(MIB)
    other = pool.lease(MIB)
    lease.release()
    lease.release()
    assert pool.budget.used_bytes == MIB
    taken = [pool.lease(MIB), pool.lease(MIB)]
    assert len({address(x.array) for x in (*taken, other)}) == 3


def test_leases_stay_within_the_budget() -> None:
    """What does not fit is refused, and possible again after a release."""
    pool = BufferPool(ByteBudget(4 * MIB))
    held = [pool.lease(MIB, 0.0) for _ in range(4)]
    with pytest.raises(BudgetExceeded):
        pool.lease(1, 0.0)
    held[0].release()
    pool.lease(MIB, 0.0)


def collect_after(act: Callable[[], list[weakref.ref[Bytes]]]) -> list[bool]:
    """Which of the arrays behind the references that `act` returns are alive afterwards."""
    references = act()
    gc.collect()
    return [reference() is not None for reference in references]


def test_kept_buffers_make_room_for_other_sizes() -> None:
    """Buffers kept for reuse and buffers on loan together stay within the budget."""
    pool = BufferPool(ByteBudget(4 * MIB))

    def fill() -> list[weakref.ref[Bytes]]:
        leases = [pool.lease(MIB) for _ in range(4)]
        references = [weakref.ref(lease.array) for lease in leases]
        for lease in leases:
            lease.release()
        return references

    references = fill()
    assert all(collect_after(lambda: references))
    large = pool.lease(3 * MIB)
    assert sum(collect_after(lambda: references)) <= 1
    large.release()


def test_a_buffer_above_the_budget_is_not_kept() -> None:
    """The one request that was admitted alone must not hold its memory for ever."""
    pool = BufferPool(ByteBudget(4 * MIB))

    def lend() -> list[weakref.ref[Bytes]]:
        lease = pool.lease(16 * MIB)
        reference = weakref.ref(lease.array)
        lease.release()
        return [reference]

    assert collect_after(lend) == [False]


def test_a_buffer_for_once_is_not_kept() -> None:
    """Its size may never be asked for again; one that was kept before serves it and stays."""
    pool = BufferPool(ByteBudget(64 * MIB))

    def lend(nbytes: int) -> list[weakref.ref[Bytes]]:
        lease = pool.lease(nbytes, keep=False)
        reference = weakref.ref(lease.array)
        lease.release()
        return [reference]

    assert collect_after(lambda: lend(3 * MIB)) == [False]
    assert pool.budget.used_bytes == 0
    kept = pool.lease(5 * MIB)
    where = address(kept.array)
    kept.release()
    assert collect_after(lambda: lend(5 * MIB)) == [True]
    assert address(pool.lease(5 * MIB).array) == where


def test_clear_drops_kept_buffers() -> None:
    """A pool that closes gives its memory back."""
    pool = BufferPool(ByteBudget(4 * MIB))

    def lend() -> list[weakref.ref[Bytes]]:
        lease = pool.lease(MIB)
        reference = weakref.ref(lease.array)
        lease.release()
        pool.clear()
        return [reference]

    assert collect_after(lend) == [False]


def test_threads_share_a_pool_without_sharing_buffers() -> None:
    """8 threads lease, sign and check a buffer 100 times; nobody sees another's mark."""
    pool, wrong = BufferPool(ByteBudget(2 * MIB)), []

    def work(mark: int) -> None:
        for _ in range(100):
            lease = pool.lease(64 * KIB)
            lease.array[:] = mark
            if not (lease.array == mark).all():
                wrong.append(mark)
            lease.release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.budget.used_bytes == 0


@pytest.mark.parametrize("old_kernel", [False, True])
def test_touched_memory_is_there_and_what_lies_beside_it_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, old_kernel: bool
) -> None:
    """Any part of a mapping, whether it begins on a page or not; also without MADV_POPULATE_WRITE.
    Neither bytes before it nor behind it change."""
    if old_kernel:
        monkeypatch.setattr(buffers, "_madvise", lambda *_: -1)
    memory = aligned_array(64 * mmap.PAGESIZE)
    memory[: 10 * mmap.PAGESIZE + 100] = 7
    memory[20 * mmap.PAGESIZE + 5 :] = 9
    touch(memory[10 * mmap.PAGESIZE + 100 : 20 * mmap.PAGESIZE + 5])
    assert all(_is_resident(memory, page) for page in range(10, 21))
    assert (memory[: 10 * mmap.PAGESIZE + 100] == 7).all()
    assert (memory[20 * mmap.PAGESIZE + 5 :] == 9).all()
    touch(memory[:0])


def test_others_run_while_memory_is_touched() -> None:
    """A training loop goes on while 256 MiB are cleared for it."""
    memory, ticks, done = aligned_array(256 * MIB), [0.0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            time.sleep(0.001)
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    touch(memory)
    ended = time.monotonic()
    done.set()
    thread.join()
    assert sum(began < at < ended for at in ticks) > 5


def _is_resident(memory: Bytes, page: int) -> bool:
    """By the kernel's table of this process's pages."""
    number = memory.ctypes.data // mmap.PAGESIZE + page
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(8 * number)
        return bool(int.from_bytes(table.read(8), "little") >> 63)
