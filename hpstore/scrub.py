"""Read and verify every block of every column, mend what is damaged, sweep what is past its time.

The position is kept on the devices, so that a scrub that was stopped goes on where it was.
"""

from __future__ import annotations

from hpstore.devices.base import Device
from hpstore.errors import HpstoreError, IntegrityError
from hpstore.keys import Kind
from hpstore.objects.catalog import walk
from hpstore.objects.remove import remove_files
from hpstore.objects.repair import repair_object
from hpstore.objects.store import Store
from hpstore.objects.survey import Survey, Verdict, judge, stable_survey, unknown_devices
from hpstore.rebuild import (
    Pace,
    Progress,
    ProgressCallback,
    RateLimit,
    RebuildReport,
    Tally,
    pay_debts,
)
from hpstore.records import FORMAT, seal, unseal

CURSOR_FILE = "scrub.json"
_CURSOR_SECONDS = 60.0  # between two notes of the position
_MAX_CURSOR_BYTES = 64 << 10


def read_cursor(store: Store) -> str:
    """The key after which an unfinished scrub goes on; "" for the beginning."""

    def read(_: str, device: Device) -> tuple[int, str]:
        try:
            data = device.read_small(CURSOR_FILE, _MAX_CURSOR_BYTES)
            body = unseal(data, where=CURSOR_FILE)
            return int(str(body["at_ms"])), str(body["after"])
        except (FileNotFoundError, IntegrityError, KeyError, ValueError):
            return (0, "")

    results = store.each(store.view.devices, read)
    return max((r for r in results.values() if isinstance(r, tuple)), default=(0, ""))[1]


def write_cursor(store: Store, after: str) -> None:
    """Note the position on every device; "" for a scrub that is done.

    The time tells it from what a device that was away still says.
    """
    data = seal({"format": FORMAT, "after": after, "at_ms": store.clock.wall_ms()})
    store.each(store.view.devices, lambda _, device: device.write_small(CURSOR_FILE, data))


def scrub_all(
    store: Store,
    *,
    prefix: str = "",
    progress: ProgressCallback | None = None,
    rate_bytes_per_second: float | None = None,
    resume: bool = True,
    pace: Pace | None = None,
) -> RebuildReport:
    """Verify every block of every object under `prefix`, and repair as new column files.

    With a `pace` the rate is not looked at; stopped by it, the position is kept. An object with
    more damage than parity is reported and left as it is.
    """
    tally, pace = Tally(store.clock), pace or RateLimit(rate_bytes_per_second, store.clock)
    catalog = walk(store, prefix)
    after = read_cursor(store) if resume and not prefix else ""
    keys = sorted(key for key in catalog.surveys if key > after)
    noted = store.clock.monotonic()
    for number, key in enumerate(keys, 1):
        if not pace.go_on():
            if not prefix and not store.read_only and number > 1:
                write_cursor(store, keys[number - 2])
            tally.stopped = True
            return tally.report()
        try:
            repair = repair_object(store, key, verify=True, throttle=pace)
            tally.swept += sweep_key(store, key)
            tally.add(repair)
        except (HpstoreError, OSError) as error:
            tally.fail(key, error)
        if progress is not None:
            progress(Progress(done=number, total=len(keys), bytes=tally.bytes, key=key))
        now = store.clock.monotonic()
        if not prefix and not store.read_only and now - noted >= _CURSOR_SECONDS:
            noted = now
            write_cursor(store, key)
    if not prefix:
        write_cursor(store, "")
        store.each(store.view.devices, lambda _, device: device.sweep())
        pay_debts(store)
    return tally.report()


def sweep_key(store: Store, key: str) -> int:
    """Remove tombstones and torn puts that are past the horizon. PROTOCOL 12.

    Only with every member answering, and none evicted within the horizon: a device that is away may
    still hold what they stand for.
    """
    with store.key_lock(key):  # a re-layout under way must not look torn
        return _sweep_locked(store, key)


def _sweep_locked(store: Store, key: str) -> int:
    survey = stable_survey(store, key)
    if survey.unknown:
        return 0
    horizon = store.clock.wall_ms() - int(store.settings.tombstone_seconds * 1000)
    layouts = survey.layouts()
    if not layouts:
        return 0
    newest = layouts[0]
    if newest.kind is Kind.TOMBSTONE and newest.version.counter < horizon:
        if len(layouts) > 1:
            return 0  # repair_object removes what it stands for first
        if any(member.since_ms >= horizon for member in store.view.record.evicted):
            return 0  # were that one to return, what nobody contradicts would be believed
        return remove_files(store, key, newest.files)
    return _sweep_torn(store, survey, horizon)


def _sweep_torn(store: Store, survey: Survey, horizon: int) -> int:
    """Remove layouts that were certainly never acknowledged and whose writer is long gone."""
    swept = 0
    for layout in survey.layouts():
        verdict = judge(
            layout,
            valid=len(layout.columns),
            corrupt=0,
            unknown_devices=unknown_devices(store.view, survey),
        )
        if verdict is Verdict.TORN and layout.version.counter < horizon:
            swept += remove_files(store, survey.key, layout.files)
    return swept


__all__ = ["read_cursor", "scrub_all", "sweep_key", "write_cursor"]
