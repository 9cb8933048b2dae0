"""The device contract: what devices/base.py promises, as tests that every device inherits.

    class TestMyDevice(DeviceContract):
        def make_device(self, tmp_path: Path) -> Device: ...
        def raw_read(self, device: Device, path: str) -> bytes: ...
        def raw_write(self, device: Device, path: str, data: bytes) -> None: ...

`raw_read` and `raw_write` bypass the code under test. The device is new and prepared, and keeps
at least 64 MiB of retired files when it recycles at all. Needs pytest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hpstore.devices.base import DIRECTORIES, QUARANTINE, TMP, Device, DirectoryEntry
from hpstore.errors import DeviceError
from hpstore.format.keys import object_directory
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE, all_files, fetch, in_threads, pattern, store
from hpstore.testing.counter_contract import CounterContract
from hpstore.testing.listing_contract import ListingContract
from hpstore.testing.register_contract import RegisterContract
from hpstore.testing.room_contract import RoomContract
from hpstore.units import KIB, MIB, round_up

PATH = "objects/a/b/@file"


class DeviceContract(CounterContract, ListingContract, RegisterContract, RoomContract):
    """Inherit, name the class Test..., fill in three methods."""

    holds_readers = True  # an open reader keeps its bytes when the file is replaced or retired
    prunes_directories = True  # a directory that became empty is not listed any more

    @abstractmethod
    def make_device(self, tmp_path: Path) -> Device:
        """A new, empty, prepared device; `tmp_path` is the test's own directory."""

    @abstractmethod
    def raw_read(self, device: Device, path: str) -> bytes:
        """A file's bytes, not by the device."""

    @abstractmethod
    def raw_write(self, device: Device, path: str, data: bytes) -> None:
        """Replace the bytes of an existing file in place, not by the device."""

    @pytest.fixture
    def device(self, tmp_path: Path) -> Iterator[Device]:
        """The device under test, closed at the end."""
        made = self.make_device(tmp_path)
        yield made
        made.close()

    # --- writing and reading ---------------------------------------------------------------------

    def test_what_is_published_is_read_back(self, device: Device) -> None:
        """Create, write, sync, publish, open, read: the same bytes, also beside the device."""
        data = pattern(3 * PAGE)
        store(device, PATH, data)
        assert fetch(device, PATH) == data.tobytes()
        assert self.raw_read(device, PATH) == data.tobytes()

    @pytest.mark.parametrize("nbytes", [PAGE, 64 * KIB, MIB + PAGE, 5 * MIB])
    def test_sizes_are_kept(self, device: Device, nbytes: int) -> None:
        """The opened file has the size that was created."""
        store(device, PATH, pattern(nbytes))
        handle = device.open(PATH)
        assert handle.size_bytes == nbytes
        handle.close()
        assert fetch(device, PATH) == pattern(nbytes).tobytes()

    def test_many_buffers_of_one_write_lie_back_to_back(self, device: Device) -> None:
        """1,500 buffers of one or two pages: more than the kernel takes in one call."""
        rows = [pattern((1 + i % 2) * PAGE, i) for i in range(1500)]
        total = sum(len(row) for row in rows)
        handle = device.create(PAGE + total)
        handle.write(0, [pattern(PAGE, 1)])
        handle.write(PAGE, rows)
        handle.sync()
        handle.publish(PATH)
        expected = pattern(PAGE, 1).tobytes() + b"".join(row.tobytes() for row in rows)
        assert fetch(device, PATH) == expected

    def test_memory_need_not_be_aligned(self, device: Device) -> None:
        """Buffers at odd addresses, mixed with aligned ones; they are only read."""
        memory = pattern(20 * PAGE + 13)
        kept = memory.tobytes()
        rows = [
            memory[1 : 1 + PAGE],
            memory[PAGE * 4 : PAGE * 6],
            memory[PAGE * 7 + 13 :][: 8 * PAGE],
        ]
        handle = device.create(11 * PAGE)
        handle.write(0, rows)
        handle.sync()
        handle.publish(PATH)
        assert fetch(device, PATH) == b"".join(row.tobytes() for row in rows)
        assert memory.tobytes() == kept

    def test_read_only_memory_can_be_written(self, device: Device) -> None:
        """A view of `bytes`, as a caller's data often is."""
        data = pattern(4 * PAGE).tobytes()
        handle = device.create(len(data))
        handle.write(0, [np.frombuffer(data, np.uint8)])
        handle.sync()
        handle.publish(PATH)
        assert self.raw_read(device, PATH) == data

    def test_parts_are_written_in_any_order(self, device: Device) -> None:
        """The table and the header come after the units."""
        rows = [pattern(2 * PAGE, i) for i in range(4)]
        handle = device.create(8 * PAGE)
        for i in (2, 0, 3, 1):
            handle.write(2 * i * PAGE, [rows[i]])
        handle.sync()
        handle.publish(PATH)
        assert fetch(device, PATH) == b"".join(row.tobytes() for row in rows)

    def test_any_aligned_range_is_read(self, device: Device) -> None:
        """From the middle, to the end, and into part of a larger buffer."""
        data = pattern(16 * PAGE)
        store(device, PATH, data)
        handle = device.open(PATH)
        for first, last in [(0, 1), (3, 9), (15, 16), (0, 16)]:
            target = aligned_array(18 * PAGE)
            handle.read_into(first * PAGE, target[PAGE : (1 + last - first) * PAGE])
            part = data[first * PAGE : last * PAGE].tobytes()
            assert target[PAGE : (1 + last - first) * PAGE].tobytes() == part
            assert not target[:PAGE].any()
            assert not target[(1 + last - first) * PAGE :].any()
        handle.close()

    def test_a_read_past_the_end_is_an_error(self, device: Device) -> None:
        """DeviceError when the file ends before the target is full; never short, never zeros."""
        store(device, PATH, pattern(2 * PAGE))
        handle = device.open(PATH)
        for offset, nbytes in [(0, 3 * PAGE), (PAGE, 2 * PAGE), (2 * PAGE, PAGE), (9 * PAGE, PAGE)]:
            with pytest.raises(DeviceError):
                handle.read_into(offset, aligned_array(nbytes))
        handle.close()
        handle.close()

    def test_a_file_that_was_cut_is_an_error(self, device: Device) -> None:
        """Truncated beside the device, also in the middle of a page."""
        for nbytes in (3 * PAGE, 2 * PAGE + 100, 0):
            store(device, PATH, pattern(4 * PAGE))
            self.raw_write(device, PATH, pattern(4 * PAGE).tobytes()[:nbytes])
            handle = device.open(PATH)
            assert handle.size_bytes == nbytes
            with pytest.raises(DeviceError):
                handle.read_into(0, aligned_array(4 * PAGE))
            handle.close()

    def test_damage_is_read_as_it_is(self, device: Device) -> None:
        """A bit flipped beside the device reaches the caller: nothing is served from a cache."""
        data = pattern(4 * PAGE)
        store(device, PATH, data)
        assert fetch(device, PATH) == data.tobytes()
        data[2 * PAGE + 5] ^= 1
        self.raw_write(device, PATH, data.tobytes())
        assert fetch(device, PATH) == data.tobytes()

    # --- names -----------------------------------------------------------------------------------

    def test_nothing_is_visible_before_publish(self, device: Device) -> None:
        """Written and synced is not yet named."""
        handle = device.create(PAGE)
        handle.write(0, [pattern(PAGE)])
        handle.sync()
        assert all_files(device, "objects") == []
        with pytest.raises(FileNotFoundError):
            device.open(PATH)
        handle.publish(PATH)
        assert all_files(device, "objects") == [PATH]

    def test_publish_replaces_what_is_there(self, device: Device) -> None:
        """A larger, then a smaller file under one name: no rest of the old one shows."""
        for i, pages in enumerate((2, 5, 1)):
            store(device, PATH, pattern(pages * PAGE, i))
            assert fetch(device, PATH) == pattern(pages * PAGE, i).tobytes()
        assert all_files(device, "objects") == [PATH]
        assert all_files(device, TMP) == []

    def test_abort_leaves_nothing(self, device: Device) -> None:
        """No name, no temporary file; the old file under the name that was meant stays."""
        store(device, PATH, pattern(PAGE, 1))
        handle = device.create(2 * MIB)
        handle.write(0, [pattern(2 * MIB, 2)])
        handle.abort()
        handle.abort()
        assert all_files(device, TMP) == []
        assert fetch(device, PATH) == pattern(PAGE, 1).tobytes()

    def test_abort_after_publish_keeps_the_file(self, device: Device) -> None:
        """A clean-up that comes too late takes nothing away."""
        handle = device.create(PAGE)
        handle.write(0, [pattern(PAGE)])
        handle.publish(PATH)
        handle.abort()
        assert fetch(device, PATH) == pattern(PAGE).tobytes()

    def test_what_is_absent_is_file_not_found(self, device: Device) -> None:
        """Absent is an answer, not a failure of the device."""
        store(device, "objects/a/@other", pattern(PAGE))
        for path in (PATH, "objects/a/@none", "objects/none/@x", "none.json"):
            with pytest.raises(FileNotFoundError):
                device.open(path)
            with pytest.raises(FileNotFoundError):
                device.read_small(path, 100)
            with pytest.raises(FileNotFoundError):
                device.quarantine(path)
            assert device.stamp(path) is None
            device.delete(path)
            device.retire(path)

    def test_names_come_back_as_they_were(self, device: Device) -> None:
        """Unicode, spaces, percent signs, dots, long names, deep paths."""
        keys = ["ä 日本/🎉", "100%/@x", ".hidden/a.b", "x" * 255, "/".join("abcdefghij" * 5), "a b"]
        for i, key in enumerate(keys):
            store(device, f"{object_directory(key)}/@{i}", pattern(PAGE, i))
        expected = sorted(f"{object_directory(key)}/@{i}" for i, key in enumerate(keys))
        assert all_files(device, "objects") == expected
        for i, key in enumerate(keys):
            path = f"{object_directory(key)}/@{i}"
            assert fetch(device, path) == pattern(PAGE, i).tobytes()

    # --- small files -----------------------------------------------------------------------------

    def test_small_files_are_replaced_whole(self, device: Device) -> None:
        """Of any length, the empty one too; in a directory that has to be made."""
        for data in (b"one", b"", b"three" * 1000, b"4"):
            device.write_small("pool.json", data)
            device.write_small("debts/x.json", data)
            assert device.read_small("pool.json", 10_000) == data
            assert self.raw_read(device, "debts/x.json") == data
        assert all_files(device, TMP) == []

    def test_a_small_file_is_read_up_to_its_limit(self, device: Device) -> None:
        """One byte more is a DeviceError: a record that grew wild is not loaded."""
        device.write_small("pool.json", b"x" * 100)
        assert len(device.read_small("pool.json", 100)) == 100
        with pytest.raises(DeviceError, match="larger than 99"):
            device.read_small("pool.json", 99)

    def test_a_stamp_changes_with_every_replacement(self, device: Device) -> None:
        """By write_small with the same bytes and by publish; and only then."""
        seen = []
        for _ in range(20):
            device.write_small("pool.json", b"same")
            seen.append(device.stamp("pool.json"))
            assert device.stamp("pool.json") == seen[-1]
        for _ in range(20):
            store(device, PATH, pattern(PAGE))
            seen.append(device.stamp(PATH))
        assert None not in seen
        assert len(set(seen)) == len(seen)

    # --- removing --------------------------------------------------------------------------------

    def test_delete_removes_the_file_and_empty_directories(self, device: Device) -> None:
        """Up to the first directory that still holds something."""
        store(device, "objects/a/b/c/@1", pattern(PAGE))
        store(device, "objects/a/@2", pattern(PAGE))
        device.delete("objects/a/b/c/@1")
        assert all_files(device, "objects") == ["objects/a/@2"]
        if self.prunes_directories:
            assert device.entries("objects/a") == [DirectoryEntry("@2", False)]
        device.delete("objects/a/@2")
        assert all_files(device, "objects") == []
        if self.prunes_directories:
            assert device.entries("objects") == []
        store(device, PATH, pattern(PAGE))
        assert fetch(device, PATH) == pattern(PAGE).tobytes()

    @pytest.mark.parametrize("nbytes", [PAGE, 2 * MIB])
    def test_retire_removes_the_file(self, device: Device, nbytes: int) -> None:
        """Its name is gone, whether its blocks are kept or not."""
        store(device, PATH, pattern(nbytes))
        device.retire(PATH)
        assert all_files(device, "objects") == []
        with pytest.raises(FileNotFoundError):
            device.open(PATH)
        device.retire(PATH)

    @pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4)])
    def test_a_recycled_file_holds_only_the_new_bytes(
        self, device: Device, sizes: tuple[int, int]
    ) -> None:
        """Equal, smaller and larger than the retired one: size and content are the new ones."""
        store(device, PATH, pattern(sizes[0] * MIB, 1))
        device.retire(PATH)
        store(device, "objects/new/@1", pattern(sizes[1] * MIB, 2))
        assert fetch(device, "objects/new/@1") == pattern(sizes[1] * MIB, 2).tobytes()
        assert len(self.raw_read(device, "objects/new/@1")) == sizes[1] * MIB

    def test_the_header_of_a_new_file_is_blank_until_written(self, device: Device) -> None:
        """A recycled file is never taken for the object that it once was."""
        store(device, PATH, pattern(2 * MIB, 1))
        device.retire(PATH)
        handle = device.create(2 * MIB)
        handle.write(PAGE, [pattern(PAGE, 2)])
        handle.sync()
        handle.publish("objects/new/@1")
        assert self.raw_read(device, "objects/new/@1")[:PAGE] == bytes(PAGE)

    @pytest.mark.parametrize("nbytes", [PAGE, 2 * MIB])
    @pytest.mark.parametrize("how", ["retire", "delete", "publish"])
    def test_an_open_reader_keeps_its_bytes(self, device: Device, nbytes: int, how: str) -> None:
        """PROTOCOL 11: gone or replaced under a reader, and its blocks not overwritten."""
        store(device, PATH, pattern(nbytes, 1))
        handle = device.open(PATH)
        if how == "publish":
            store(device, PATH, pattern(nbytes, 2))
        else:
            getattr(device, how)(PATH)
        for i in range(4):
            store(device, f"objects/new/@{i}", pattern(nbytes, 10 + i))
        target = aligned_array(nbytes)
        if self.holds_readers:
            handle.read_into(0, target)
            assert target.tobytes() == pattern(nbytes, 1).tobytes()
        elif how == "publish":
            handle.read_into(0, target)  # a store without locks: wholly the new one
            assert target.tobytes() == pattern(nbytes, 2).tobytes()
        else:
            with pytest.raises((FileNotFoundError, DeviceError)):
                handle.read_into(0, target)
        handle.close()
        for i in range(4):
            assert fetch(device, f"objects/new/@{i}") == pattern(nbytes, 10 + i).tobytes()

    def test_quarantine_hides_a_file_and_keeps_its_bytes(self, device: Device) -> None:
        """Out of objects/, whole under quarantine/; two of one name do not collide."""
        for i in range(2):
            store(device, PATH, pattern(PAGE, i))
            device.quarantine(PATH)
            assert all_files(device, "objects") == []
        kept = all_files(device, QUARANTINE)
        assert len(kept) == 2
        expected = {pattern(PAGE, i).tobytes() for i in range(2)}
        assert {self.raw_read(device, path) for path in kept} == expected

    # --- the device itself -----------------------------------------------------------------------

    def test_sweep_keeps_what_living_writers_hold(self, device: Device) -> None:
        """An unpublished file under a lock is not an orphan."""
        handle = device.create(PAGE)
        handle.write(0, [pattern(PAGE)])
        assert device.sweep() == 0
        handle.sync()
        handle.publish(PATH)
        assert fetch(device, PATH) == pattern(PAGE).tobytes()
        assert device.sweep() == 0

    def test_usage_is_sane(self, device: Device) -> None:
        """0 <= free <= total; a store may not know either of them, and says so."""
        store(device, PATH, pattern(MIB))
        usage = device.usage()
        assert 0 <= usage.free <= usage.total
        assert usage.known or device.mode == "remote"

    @pytest.mark.parametrize("write", [True, False])
    def test_a_probe_of_a_well_device_passes_and_leaves_nothing(
        self, device: Device, write: bool
    ) -> None:
        """With and without writing."""
        device.probe(write=write)
        assert all_files(device, TMP) == []

    def test_a_device_says_what_it_is(self, device: Device) -> None:
        """URL, mode and alignment for status and for the write path."""
        assert device.url
        assert device.mode in ("direct", "buffered", "memory", "remote")
        assert 1 <= device.memory_alignment <= PAGE
        assert PAGE % device.memory_alignment == 0
        assert device.folds_names in (True, False)

    def test_syncing_a_directory_again_is_fine(self, device: Device) -> None:
        """Also of a small file in the root."""
        store(device, PATH, pattern(PAGE))
        device.write_small("pool.json", b"x")
        for path in (PATH, PATH, "pool.json"):
            device.sync_directory(path)

    def test_close_is_idempotent(self, device: Device) -> None:
        """Twice, and once more by the fixture."""
        device.close()
        device.close()

    # --- many threads ----------------------------------------------------------------------------

    def test_many_threads_use_one_device(self, device: Device) -> None:
        """Eight threads write, read, replace, list and remove their own files."""

        def work(number: int) -> None:
            path = f"objects/t{number}/@1"
            for i in range(5):
                data = pattern((1 + i) * PAGE, 100 * number + i)
                store(device, path, data)
                device.write_small(f"debts/{number}.json", b"%d" % i)
                assert fetch(device, path) == data.tobytes()
                assert device.read_small(f"debts/{number}.json", 10) == b"%d" % i
                assert device.entries(f"objects/t{number}") == [DirectoryEntry("@1", False)]
            device.retire(path)
            device.delete(f"debts/{number}.json")

        in_threads(8, work)
        for directory in DIRECTORIES:
            if directory != "recycle":
                assert all_files(device, directory) == []

    def test_many_threads_read_one_handle(self, device: Device) -> None:
        """Each gets its own range."""
        data = pattern(16 * PAGE)
        store(device, PATH, data)
        handle = device.open(PATH)

        def work(number: int) -> None:
            for _ in range(20):
                target = aligned_array(2 * PAGE)
                handle.read_into(2 * number * PAGE, target)
                assert target.tobytes() == data[2 * number * PAGE :][: 2 * PAGE].tobytes()

        in_threads(8, work)
        handle.close()

    def test_publishing_races_with_pruning(self, device: Device) -> None:
        """Writers into a directory that others keep emptying always reach their name."""

        def work(number: int) -> None:
            path = f"objects/x/y/@{number}"
            for i in range(25):
                handle = device.create(PAGE)
                handle.write(0, [pattern(PAGE, i)])
                handle.publish(path)
                assert fetch(device, path) == pattern(PAGE, i).tobytes()
                device.delete(path)

        in_threads(4, work)
        assert all_files(device, "objects") == []

    def test_replacing_is_atomic_for_readers(self, device: Device) -> None:
        """While one thread replaces a small file, readers see wholly one version."""
        versions = [b"a" * 3000, b"b" * 5000]
        device.write_small("pool.json", versions[0])

        def work(number: int) -> Sequence[bytes]:
            if number:
                return [device.read_small("pool.json", 10_000) for _ in range(40)]
            for i in range(40):
                device.write_small("pool.json", versions[i % 2])
            return []

        for found in in_threads(4, work):
            assert set(found) <= set(versions)

    def test_recycling_under_threads_never_mixes_files(self, device: Device) -> None:
        """Four threads retire and create files of 1 MiB and more; each reads its own bytes."""

        def work(number: int) -> None:
            for i in range(6):
                path = f"objects/k{number}/@{i}"
                data = pattern(round_up(MIB + number * 50_000 * i, PAGE), 10 * number + i)
                store(device, path, data)
                assert fetch(device, path) == data.tobytes()
                device.retire(path)

        in_threads(4, work)
        assert all_files(device, "objects") == []
