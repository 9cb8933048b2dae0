"""The part of the device contract that is about registers: what is held, by whom, and what it is.

Needs pytest.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hpstore.devices.base import REGISTERS_BYTES, Device
from hpstore.errors import DeviceError
from hpstore.format.records import POOL_FILE


class RegisterContract:
    """Inherited by DeviceContract."""

    holds_registers = True  # the device can exclude other processes

    @pytest.fixture
    def registers(self, device: Device) -> Device:
        """The device under test, where it has registers."""
        if not self.holds_registers:
            with pytest.raises(DeviceError, match="locks"):
                device.hold(0, 512)
            pytest.skip("a store without locks: it says so")
        return device

    def test_a_range_is_held_by_one_at_a_time(self, registers: Device) -> None:
        """Another hold of a byte of it is not taken until the first is released."""
        first = registers.hold(512, 1024)
        assert first.taken
        for offset, nbytes in ((512, 512), (1024, 512), (0, 513), (0, 4096)):
            assert not registers.hold(offset, nbytes).taken
        for offset, nbytes in ((0, 512), (1536, 512)):
            free = registers.hold(offset, nbytes)
            assert free.taken
            free.release()
        first.release()
        first.release()
        again = registers.hold(512, 1024)
        assert again.taken
        again.release()

    def test_what_is_written_is_read_by_the_next_and_by_those_who_wait(
        self, registers: Device
    ) -> None:
        """Blank at first; also a hold that was not taken reads what is there."""
        hold = registers.hold(512, 512)
        assert hold.content == bytes(512)
        hold.write(100, b"abc")
        assert registers.hold(512, 512).content[98:104] == b"\0\0abc\0"
        hold.release()
        again = registers.hold(0, 1024)
        assert again.content[612:615] == b"abc"
        again.release()

    def test_the_ends_can_be_held(self, registers: Device) -> None:
        """The last record, and what is beyond them all and only locked."""
        last, beyond = registers.hold(REGISTERS_BYTES - 512, 512), registers.hold(1 << 24, 1)
        assert last.taken
        assert beyond.taken
        assert not registers.hold(1 << 24, 1).taken
        last.write(511, b"x")
        last.release()
        beyond.release()
        found = registers.hold(REGISTERS_BYTES - 512, 512)
        assert found.content[-1:] == b"x"
        found.release()

    def test_a_hold_knows_the_record_of_membership(self, registers: Device) -> None:
        """Its stamp after the lock, also where another one has the lock; None without a record."""
        first = registers.hold(0, 512)
        assert first.taken
        assert first.record is None
        registers.write_small(POOL_FILE, b"{}")
        second = registers.hold(0, 512)
        assert not second.taken
        assert second.record is not None
        assert second.record == registers.stamp(POOL_FILE)
        first.release()

    def test_a_hold_that_is_finished_is_free(self, registers: Device) -> None:
        """With its last write there."""
        hold = registers.hold(512, 512)
        hold.finish(256, b"last")
        assert not hold.taken
        after = registers.hold(512, 512)
        assert after.taken
        assert after.content[256:260] == b"last"
        after.release()

    def test_of_many_threads_one_holds_a_range(self, registers: Device) -> None:
        """Sixteen try at once; each that has it adds one to a number there."""

        def add(_: int) -> None:
            while not (hold := registers.hold(0, 8)).taken:
                pass
            number = int.from_bytes(hold.content[:8], "little")
            hold.write(0, (number + 1).to_bytes(8, "little"))
            hold.release()

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(add, range(64)))
        hold = registers.hold(0, 8)
        assert int.from_bytes(hold.content, "little") == 64
        hold.release()
