"""Fault plans do what their letters say; the other wrappers count, wait and die as they promise."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest

from hpstore.devices.memory import MemoryDevice
from hpstore.devices.wrappers import (
    Bandwidth,
    CrashCounter,
    FaultyDevice,
    SimulatedCrash,
    ThrottledDevice,
)
from hpstore.errors import DeviceError, DeviceFull, DeviceMissing, DeviceReadOnly
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE, ManualClock, fetch, pattern, store
from hpstore.testing.device_contract import PATH

LIMIT_SECONDS = 20.0


def faulty(plan: str) -> FaultyDevice:
    """A device with one file, written before the plan begins."""
    device = FaultyDevice(MemoryDevice())
    store(device, PATH, pattern(4 * PAGE))
    device.operations, device.plan = 0, plan
    return device


@pytest.mark.parametrize(
    ("letter", "kind", "number"),
    [
        ("E", DeviceError, errno.EIO),
        ("N", DeviceFull, errno.ENOSPC),
        ("O", DeviceReadOnly, errno.EROFS),
        ("D", DeviceMissing, errno.ENODEV),
    ],
)
def test_error_letters_fail_the_next_operation_once(
    letter: str, kind: type[DeviceError], number: int
) -> None:
    """With the class of that errno; the operation after it works again."""
    device = faulty(letter)
    with pytest.raises(kind) as caught:
        device.entries("objects")
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == number
    assert len(device.entries("objects")) == 1
    assert device.operations == 2


OPERATIONS: list[tuple[str, Callable[[FaultyDevice], object]]] = [
    ("R", lambda d: fetch(d, PATH)),
    ("W", lambda d: d.create(PAGE).write(0, [pattern(PAGE)])),
    ("Y", lambda d: d.create(PAGE).sync()),
    ("P", lambda d: d.create(PAGE).publish("objects/x/@1")),
    ("L", lambda d: d.entries("objects")),
    ("C", lambda d: d.create(PAGE)),
]


@pytest.mark.parametrize(("letter", "act"), OPERATIONS, ids=[row[0] for row in OPERATIONS])
def test_pass_letters_wait_for_their_own_operation(
    letter: str, act: Callable[[FaultyDevice], object]
) -> None:
    """Everything else passes uncounted by the plan; after the named one the error strikes."""
    device = faulty(letter + "E")
    for _ in range(3):
        device.stamp(PATH)
        device.probe(write=True)
    assert device.plan == letter + "E"
    act(device)
    assert device.plan == "E"
    with pytest.raises(DeviceError):
        device.stamp(PATH)


def test_a_plan_is_read_letter_by_letter() -> None:
    """ "RRWE": two reads, a write, then an I/O error, and nothing after it."""
    device = faulty("RRWE")
    fetch(device, PATH)
    handle = device.create(PAGE)
    fetch(device, PATH)
    handle.write(0, [pattern(PAGE)])
    with pytest.raises(DeviceError):
        handle.sync()
    handle.sync()
    handle.publish("objects/x/@1")
    assert fetch(device, "objects/x/@1") == pattern(PAGE).tobytes()


def test_a_dot_lets_any_operation_pass() -> None:
    """ "..E": the third operation fails, whatever it is."""
    device = faulty("..E")
    device.stamp(PATH)
    device.entries("objects")
    with pytest.raises(DeviceError):
        device.delete(PATH)
    device.delete(PATH)


def test_a_failed_operation_is_not_carried_out() -> None:
    """The error comes instead of the operation."""
    device = faulty("E")
    with pytest.raises(DeviceError):
        device.delete(PATH)
    assert fetch(device, PATH) == pattern(4 * PAGE).tobytes()


def test_f_flips_one_bit_of_the_next_read_only() -> None:
    """Other operations pass; the file itself is unharmed."""
    device = faulty("F")
    device.stamp(PATH)
    device.read_small(PATH, 1 << 20)
    good, bad = pattern(4 * PAGE), fetch(device, PATH)
    wrong = [i for i in range(4 * PAGE) if bad[i] != good[i]]
    assert len(wrong) == 1
    assert (bad[wrong[0]] ^ int(good[wrong[0]])).bit_count() == 1
    assert fetch(device, PATH) == good.tobytes()


def test_a_star_repeats_the_last_letter_for_ever() -> None:
    """ "RE*": one read passes, then nothing works; "F*": every read lies."""
    device = faulty("RE*")
    fetch(device, PATH)
    for _ in range(10):
        with pytest.raises(DeviceError):
            device.stamp(PATH)
    lying = faulty("F*")
    for _ in range(5):
        assert fetch(lying, PATH) != pattern(4 * PAGE).tobytes()


def test_x_is_a_crash_that_no_handler_sees_and_that_lasts() -> None:
    """Not an Exception; all later operations die too."""
    device = faulty(".X")
    device.stamp(PATH)
    for act in (lambda: device.stamp(PATH), lambda: device.create(PAGE), lambda: device.sweep()):
        with pytest.raises(SimulatedCrash):
            act()
    assert not issubclass(SimulatedCrash, Exception)


def test_h_hangs_until_released() -> None:
    """The call is carried out when the device comes back; a second call is not held."""
    device, found = faulty("H"), threading.Event()

    def work() -> None:
        assert fetch(device, PATH) == pattern(4 * PAGE).tobytes()
        found.set()

    thread = threading.Thread(target=work)
    thread.start()
    pause = threading.Event()
    while device.plan:  # until the hang has begun
        pause.wait(0.001)
    assert device.stamp(PATH) is not None
    assert not found.is_set()
    device.released.set()
    thread.join(LIMIT_SECONDS)
    assert found.is_set()


def test_operations_counts_all_that_came_through() -> None:
    """Also failed ones."""
    device = faulty("E")
    with pytest.raises(DeviceError):
        device.stamp(PATH)
    fetch(device, PATH)
    assert device.operations == 3  # stamp, open, read


def test_devices_of_a_crash_counter_die_together() -> None:
    """The countdown is shared: what one device did counts for the other."""
    count = [0]
    one, two = (CrashCounter(MemoryDevice(), count, crash_at=3) for _ in range(2))
    one.stamp("x")
    two.stamp("x")
    one.entries("objects")
    for device in (two, one):
        with pytest.raises(SimulatedCrash):
            device.stamp("x")


@pytest.mark.parametrize("crash_at", range(7))
def test_a_crash_at_n_lets_exactly_n_operations_pass(crash_at: int) -> None:
    """create, write, sync, publish, sync_directory: nothing of the n-th one happens."""
    inner, count = MemoryDevice(), [0]
    device = CrashCounter(inner, count, crash_at)
    try:
        store(device, PATH, pattern(PAGE))
    except SimulatedCrash:
        assert crash_at < 5
    else:
        assert crash_at >= 5
    assert (PATH in inner.files) == (crash_at > 3)
    assert count[0] == min(crash_at + 1, 5)


def test_devices_can_share_a_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 pages each at the same moment, at 1 page a second together: 4 s and 8 s."""
    clock = ManualClock()
    waits: list[float] = []
    monkeypatch.setattr(clock, "wait", waits.append)
    link = Bandwidth(PAGE, clock)
    for device in [ThrottledDevice(MemoryDevice(), link) for _ in range(2)]:
        device.create(4 * PAGE).write(0, [pattern(4 * PAGE)])
    assert waits == pytest.approx([4.0, 8.0])


def test_a_throttle_spreads_bytes_over_time() -> None:
    """10 pages at 1 page a second take 10 s; calls without bytes take none; idle time is lost."""
    clock = ManualClock()
    device = ThrottledDevice(MemoryDevice(), PAGE, clock)
    handle = device.create(10 * PAGE)
    for i in range(10):
        handle.write(i * PAGE, [pattern(PAGE)])
    assert clock.monotonic() == pytest.approx(10.0)
    handle.sync()
    handle.publish(PATH)
    device.entries("objects")
    assert clock.monotonic() == pytest.approx(10.0)
    clock.advance(100.0)
    reader = device.open(PATH)
    reader.read_into(0, aligned_array(10 * PAGE))
    assert clock.monotonic() == pytest.approx(120.0)
