"""The part of the device contract about counters that only rise, and names that they guard."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from hpstore.devices.base import TMP, Device
from hpstore.devices.horizon_guard import (
    HORIZON,
    MARK,
    HorizonGuard,
    HorizonPassed,
    RecordReplaced,
    encode_counter,
)
from hpstore.errors import IntegrityError, NotAuthentic
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import POOL_FILE
from hpstore.testing import PAGE, all_files, fetch, in_threads, pattern, store

_PATH = "objects/a/b/@guarded"


class CounterContract(ABC):
    """Part of DeviceContract."""

    @abstractmethod
    def raw_write(self, device: Device, path: str, data: bytes) -> None:
        """Replace the bytes of an existing file in place, not by the device."""

    def test_a_counter_only_rises(self, device: Device) -> None:
        """Each by itself; a lower value changes nothing, and the answer is what holds."""
        assert device.counter(HORIZON) == 0
        assert [device.raise_counter(HORIZON, value) for value in (5, 3, 7, 7)] == [5, 5, 7, 7]
        assert device.raise_counter(MARK, 2) == 2
        assert (device.counter(HORIZON), device.counter(MARK)) == (7, 2)

    def test_the_highest_of_many_threads_holds(self, device: Device) -> None:
        """Raised by eight threads at once."""
        if device.mode == "remote":
            pytest.skip("a store has no lock: best effort")
        in_threads(
            8, lambda number: [device.raise_counter(HORIZON, v) for v in range(number, 80, 8)]
        )
        assert device.counter(HORIZON) == 79

    def test_a_damaged_counter_is_an_error_until_it_is_raised(self, device: Device) -> None:
        """It never passes for a low one."""
        device.raise_counter(HORIZON, 5)
        self.raw_write(device, HORIZON, b"x" * 100)
        with pytest.raises(IntegrityError):
            device.counter(HORIZON)
        handle = device.create(PAGE)
        with pytest.raises(IntegrityError):
            handle.publish(_PATH, HorizonGuard(counter=9))
        handle.abort()
        assert device.raise_counter(HORIZON, 6) == 6
        assert device.counter(HORIZON) == 6

    def test_a_counter_of_a_keyed_pool_carries_its_mac(self, device: Device) -> None:
        """Without it, or with that of another counter or key, it is damaged; 0 claims nothing."""
        key, other = PoolKey(b"k" * 32), PoolKey(b"o" * 32)
        device.raise_counter(HORIZON, 0)
        assert device.counter(HORIZON, key) == 0
        assert device.raise_counter(HORIZON, 5, key) == 5
        assert device.raise_counter(HORIZON, 4, key) == device.counter(HORIZON, key) == 5
        genuine = encode_counter(HORIZON, 9, key)
        assert device.raise_counter(MARK, 3, key) == 3
        for name, data in (
            (HORIZON, encode_counter(HORIZON, 9)),
            (HORIZON, encode_counter(HORIZON, 9, other)),
            (MARK, genuine),
        ):
            self.raw_write(device, name, data)
            with pytest.raises(NotAuthentic, match="counter 9"):
                device.counter(name, key)
            self.raw_write(device, HORIZON, encode_counter(HORIZON, 9))
            handle = device.create(PAGE)
            with pytest.raises(NotAuthentic):
                handle.publish(_PATH, HorizonGuard(counter=10, pool_key=key))
            handle.abort()
            assert device.raise_counter(name, 6, key) == device.counter(name, key) == 6
        self.raw_write(device, HORIZON, genuine)
        assert device.counter(HORIZON, key) == device.counter(HORIZON, PoolKey(b"")) == 9

    @pytest.mark.parametrize(
        ("guard", "allowed"),
        [
            (HorizonGuard(counter=8), True),
            (HorizonGuard(counter=7), False),
            (HorizonGuard(counter=1), False),
            (HorizonGuard(counter=1, seen=7), True),
            (HorizonGuard(counter=1, seen=6), False),
            (HorizonGuard(counter=8, seen=6), True),
            (HorizonGuard(counter=1, seen=-1), False),
        ],
    )
    def test_a_name_is_given_where_the_horizon_allows_it(
        self, device: Device, guard: HorizonGuard, allowed: bool
    ) -> None:
        """To a counter above it, or where it is what it was; else the file never has the name."""
        device.raise_counter(HORIZON, 7)
        handle = device.create(PAGE)
        handle.write(0, [pattern(PAGE)])
        handle.sync()
        if allowed:
            handle.publish(_PATH, guard)
            assert fetch(device, _PATH) == pattern(PAGE).tobytes()
        else:
            with pytest.raises(HorizonPassed) as caught:
                handle.publish(_PATH, guard)
            assert caught.value.horizon == 7
            with pytest.raises(FileNotFoundError):
                device.open(_PATH)
        handle.abort()
        assert all_files(device, TMP) == []

    def test_a_name_is_not_given_on_another_membership(self, device: Device) -> None:
        """The record was replaced after the writer looked: it must look again."""
        if device.mode == "remote":
            pytest.skip("a store compares nothing in one step")
        device.write_small(POOL_FILE, b"one")
        seen = device.stamp(POOL_FILE)
        device.write_small(POOL_FILE, b"two")
        handle = device.create(PAGE)
        handle.write(0, [pattern(PAGE)])
        handle.sync()
        with pytest.raises(RecordReplaced):
            handle.publish(_PATH, HorizonGuard(counter=1, record=seen))
        assert all_files(device, "objects") == []
        handle.publish(_PATH, HorizonGuard(counter=1, record=device.stamp(POOL_FILE)))
        assert fetch(device, _PATH) == pattern(PAGE).tobytes()

    def test_removals_can_be_synced(self, device: Device) -> None:
        """What was removed stays so, everything else is there."""
        store(device, _PATH, pattern(PAGE))
        store(device, f"{_PATH}2", pattern(PAGE))
        device.delete(_PATH)
        device.sync_removals()
        assert all_files(device, "objects") == [f"{_PATH}2"]

    def test_without_a_guard_the_horizon_is_not_asked(self, device: Device) -> None:
        """As for files that are no columns."""
        device.raise_counter(HORIZON, 7)
        store(device, _PATH, pattern(PAGE))
        assert fetch(device, _PATH) == pattern(PAGE).tobytes()
