"""What keys there are: one walk over every device. A listing, never a source of truth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hpstore.devices.base import Device
from hpstore.keys import OBJECTS, Kind, object_directory, parse_column_name, unescape
from hpstore.objects.store import Store
from hpstore.objects.survey import Found, Layout, Survey, newest_by_name

WALK_SECONDS = 600.0  # deadline for walking one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Surveys of many keys, made at one time, and the devices that did not answer."""

    surveys: dict[str, Survey]
    unknown: frozenset[str]


def walk(store: Store, prefix: str = "") -> Catalog:
    """List all keys that begin with `prefix`, with their files on every device."""

    def look(device_id: str, device: Device) -> list[tuple[str, Found]]:
        store.generation_on(device_id, device)
        return list(_walk_device(device_id, device, prefix))

    devices = store.view.devices
    results = store.scheduler.gather(
        {d: lambda d=d: look(d, devices[d]) for d in devices},  # type: ignore[misc]
        WALK_SECONDS,
    )
    files: defaultdict[str, list[Found]] = defaultdict(list)
    silent = set()
    for device_id, found in results.items():
        if isinstance(found, Exception):
            silent.add(device_id)
            continue
        for key, file in found:
            files[key].append(file)
    unknown = frozenset(silent) | store.view.missing
    surveys = {
        key: Survey(key=key, files=tuple(found), unknown=unknown) for key, found in files.items()
    }
    return Catalog(surveys=surveys, unknown=unknown)


def _walk_device(device_id: str, device: Device, prefix: str) -> Iterator[tuple[str, Found]]:
    parent = prefix.rpartition("/")[0]
    start = object_directory(parent, folding=device.folds_names) if parent else OBJECTS
    pending = [(start, parent)]
    while pending:
        directory, key = pending.pop()
        for entry in device.entries(directory):
            if entry.is_directory:
                child = f"{key}/{unescape(entry.name)}" if key else unescape(entry.name)
                if child.startswith(prefix) or prefix.startswith(f"{child}/"):
                    pending.append((f"{directory}/{entry.name}", child))
                continue
            name = parse_column_name(entry.name)
            if name is not None and key.startswith(prefix):
                yield key, Found(device_id, name)


def live_layout(store: Store, survey: Survey) -> Layout | None:
    """The layout that a read would choose by names; None for deleted keys and torn puts."""
    layout = newest_by_name(store.view, survey)
    return None if layout is None or layout.kind is Kind.TOMBSTONE else layout


__all__ = ["Catalog", "live_layout", "walk"]
