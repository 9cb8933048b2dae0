"""The memory device tells apart what a power cut and what the death of processes leaves."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hpstore.devices.base import TMP, DirectoryEntry
from hpstore.devices.memory import MemoryDevice
from hpstore.devices.reserve import SPARE_BYTES, SPARES_LEAST
from hpstore.errors import DeviceFull, DeviceMissing
from hpstore.testing import PAGE, all_files, fetch, pattern, store
from hpstore.testing.device_contract import PATH
from hpstore.units import MIB


def test_a_power_cut_keeps_what_was_synced() -> None:
    """Bytes and name durable: the file is as it was."""
    device = MemoryDevice()
    store(device, PATH, pattern(PAGE))
    device.write_small("pool.json", b"x")
    device.crash()
    assert fetch(device, PATH) == pattern(PAGE).tobytes()
    assert device.read_small("pool.json", 10) == b"x"


def test_a_power_cut_takes_names_that_were_not_synced() -> None:
    """Published without sync_directory: the name is gone."""
    device = MemoryDevice()
    handle = device.create(PAGE)
    handle.write(0, [pattern(PAGE)])
    handle.sync()
    handle.publish(PATH)
    device.crash()
    assert all_files(device, "objects") == []


def test_a_power_cut_brings_back_the_name_that_was_replaced() -> None:
    """Replaced without sync_directory: the old file is there again."""
    device = MemoryDevice()
    store(device, PATH, pattern(PAGE, 1))
    handle = device.create(PAGE)
    handle.write(0, [pattern(PAGE, 2)])
    handle.sync()
    handle.publish(PATH)
    device.crash()
    assert fetch(device, PATH) == pattern(PAGE, 1).tobytes()


def test_a_power_cut_zeroes_bytes_that_were_not_synced() -> None:
    """Named and not synced: ext4 was seen to publish zeros."""
    device = MemoryDevice()
    handle = device.create(PAGE)
    handle.write(0, [pattern(PAGE)])
    handle.publish(PATH)
    device.sync_directory(PATH)
    device.crash()
    assert fetch(device, PATH) == bytes(PAGE)


def test_a_power_cut_undoes_deletes_that_were_not_synced() -> None:
    """`delete` is not synced: without sync_directory the file may come back."""
    device = MemoryDevice()
    store(device, PATH, pattern(PAGE))
    device.delete(PATH)
    device.crash()
    assert fetch(device, PATH) == pattern(PAGE).tobytes()
    device.delete(PATH)
    device.sync_directory(PATH)
    device.crash()
    assert all_files(device, "objects") == []


def test_a_restart_keeps_everything_and_frees_locks() -> None:
    """Processes died, the machine did not: unsynced files are there, orphans can be swept."""
    device = MemoryDevice()
    handle = device.create(PAGE)
    handle.write(0, [pattern(PAGE)])
    handle.publish(PATH)
    device.create(PAGE)
    assert device.sweep() == 0
    device.restart()
    assert fetch(device, PATH) == pattern(PAGE).tobytes()
    assert device.sweep() == 1
    assert all_files(device, TMP) == []


def test_a_full_device_says_so_before_anything_is_written() -> None:
    """create and, past what is kept, write_small raise DeviceFull; what is there can be read."""
    device = MemoryDevice(capacity_bytes=3 * PAGE)
    store(device, PATH, pattern(2 * PAGE))
    with pytest.raises(DeviceFull):
        device.create(2 * PAGE)
    with pytest.raises(DeviceFull):
        device.write_small("x.json", bytes(PAGE + SPARES_LEAST * SPARE_BYTES + 1))
    assert device.usage().free == PAGE
    assert fetch(device, PATH) == pattern(2 * PAGE).tobytes()


def test_a_missing_device_answers_nothing() -> None:
    """Every call is DeviceMissing, none is "absent" or "empty"; open handles fail too."""
    device = MemoryDevice()
    store(device, PATH, pattern(PAGE))
    reader, writer = device.open(PATH), device.create(PAGE)
    device.missing = True
    for call in (
        lambda: device.open(PATH),
        lambda: device.entries("objects"),
        lambda: device.stamp(PATH),
        lambda: device.read_small(PATH, 1),
        lambda: device.delete(PATH),
        lambda: device.sweep(),
        lambda: device.probe(write=False),
        lambda: device.create(1),
        lambda: device.write_small("x", b""),
        lambda: device.retire(PATH),
        lambda: device.quarantine(PATH),
        lambda: device.sync_directory(PATH),
        lambda: reader.read_into(0, np.zeros(PAGE, np.uint8)),
        lambda: writer.sync(),
        lambda: writer.write(0, [pattern(PAGE)]),
        lambda: writer.publish(PATH),
    ):
        with pytest.raises(DeviceMissing):
            call()
    writer.abort()
    device.missing = False
    assert fetch(device, PATH) == pattern(PAGE).tobytes()


def test_folding_device_folds() -> None:
    """With folds_names, `A` and `a` are one file: what the escape must keep apart."""
    device = MemoryDevice(folds_names=True)
    store(device, "objects/A/@1", pattern(PAGE, 1))
    store(device, "objects/a/@1", pattern(PAGE, 2))
    assert device.entries("objects") == [DirectoryEntry("a", True)]
    assert fetch(device, "objects/A/@1") == pattern(PAGE, 2).tobytes()


def test_retired_files_are_bounded() -> None:
    """recycle/ never holds more than recycle_bytes; small files are not kept."""
    device = MemoryDevice(recycle_bytes=3 * MIB)
    for i in range(5):
        store(device, f"objects/{i}/@1", pattern(MIB))
    store(device, "objects/s/@1", pattern(PAGE))
    for i in [*range(5), "s"]:
        device.retire(f"objects/{i}/@1")
    assert len(device.entries("recycle")) == 3
    store(device, PATH, pattern(MIB, 7))
    assert len(device.entries("recycle")) == 2


def test_a_memory_device_does_not_travel() -> None:
    """Pickling it would make a second, empty device out of one."""
    with pytest.raises(TypeError, match="one process"):
        pickle.dumps(MemoryDevice())
