"""Read and verify every block of every column, mend what is damaged, sweep what is past its time.

The position is kept on the devices, so that a scrub that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hpstore.devices.base import Device
from hpstore.devices.reserve import shortage
from hpstore.errors import DeviceFull, IntegrityError
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.maintenance.rebuild import (
    Progress,
    ProgressCallback,
    RebuildReport,
    RepairTally,
    WorkPace,
    domains_of,
    is_deleted,
    pay_debts,
)
from hpstore.maintenance.repair_runner import RepairJob, RepairRunner, RepairsHere
from hpstore.maintenance.sweep import sweep_surveyed
from hpstore.objects.context import PoolContext
from hpstore.objects.key_listing import walk
from hpstore.runtime.rate_limit import RateLimit

CURSOR_FILE = "scrub.json"
CURSOR_SECONDS = 60.0  # between two notes of the position
MAX_CURSOR_BYTES = 64 << 10


def last_scrub_ms(store: PoolContext) -> int:
    """When a scrub of all objects has ended, whoever it was of; 0 where none has, or the last one
    is not finished."""
    at_ms, after = read_cursor(store)
    return 0 if after else at_ms


def read_cursor(store: PoolContext) -> tuple[int, str]:
    """When the newest position was noted, and the key after which an unfinished scrub goes on; ""
    for the beginning."""

    def read(_: str, device: Device) -> tuple[int, str]:
        try:
            return decode_cursor(device.read_small(CURSOR_FILE, MAX_CURSOR_BYTES))
        except (FileNotFoundError, IntegrityError):
            return (0, "")

    results = store.each(store.view.devices, read)
    return max((r for r in results.values() if isinstance(r, tuple)), default=(0, ""))


def decode_cursor(data: bytes) -> tuple[int, str]:
    """When a position was noted, and the key that it is. Raises IntegrityError."""
    with parsing(CURSOR_FILE):
        body = unseal(data, where=CURSOR_FILE)
        return int(str(body["at_ms"])), str(body["after"])


def write_cursor(store: PoolContext, after: str) -> None:
    """Note the position on every device; "" for a scrub that is done.

    The time tells it from what a device that was away still says.
    """
    at_ms = store.clock.wall_ms()
    store.each(
        store.view.devices,
        lambda _, device: note_position(device, CURSOR_FILE, after=after, at_ms=at_ms),
    )


def note_position(device: Device, name: str, *, after: str, at_ms: int) -> None:
    """Note a position on one device; "" for a scrub that is done, at that time.

    An end is also noted where room is short, or an older position would count for good.
    """
    data = seal({"format": FORMAT, "after": after, "at_ms": at_ms})
    if not after:
        try:
            device.write_small(name, data)
        except DeviceFull:
            device.delete(name)
    elif not shortage(device.usage()):  # what is kept for deletes is not for this
        device.write_small(name, data)


def scrub_all(
    store: PoolContext,
    *,
    prefix: str = "",
    progress: ProgressCallback | None = None,
    rate_bytes_per_second: float | None = None,
    resume: bool = True,
    pace: WorkPace | None = None,
    repairs: RepairRunner | None = None,
) -> RebuildReport:
    """Verify every block of every object under `prefix`, and repair as new column files.

    With a `pace` the rate is not looked at; stopped by it, the position is kept. An object with
    more damage than parity is reported and left as it is. `repairs`: who does the work, by default
    this thread.
    """
    tally, pace = RepairTally(store.clock), pace or RateLimit(rate_bytes_per_second, store.clock)
    catalog = walk(store, prefix)
    tally.listed(store, catalog)
    after = read_cursor(store)[1] if resume and not prefix else ""
    keys = sorted(key for key in catalog.surveys if key > after)
    noted = store.clock.monotonic()

    def chosen() -> Iterator[str]:
        for key in keys:
            if not pace.go_on():
                tally.stopped = True
                return
            yield key

    job = RepairJob(
        domains=partial(domains_of, store.view, catalog),
        verify=True,
        rate_bytes_per_second=rate_bytes_per_second,
    )
    done = 0
    for done, (key, outcome) in enumerate((repairs or RepairsHere(store, pace))(chosen(), job), 1):
        tally.note(key, outcome, deleted=is_deleted(store.view, catalog.surveys[key]))
        if progress is not None:
            progress(Progress(done=done, total=len(keys), bytes=tally.bytes, key=key))
        now = store.clock.monotonic()
        if not prefix and not store.read_only and now - noted >= CURSOR_SECONDS:
            noted = now
            write_cursor(store, key)
    if tally.stopped:
        if not prefix and not store.read_only and done:
            write_cursor(store, keys[done - 1])
        tally.swept += sweep_surveyed(store, {key: catalog.surveys[key] for key in keys[:done]})
        return tally.report()
    tally.swept += sweep_surveyed(store, {key: catalog.surveys[key] for key in keys})
    if not prefix:
        write_cursor(store, "")
        store.each(store.view.devices, lambda _, device: device.sweep())
        pay_debts(store)
    return tally.report()
