"""What keys there are: one walk over every device. A listing, never a source of truth."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hpstore.devices.base import Device
from hpstore.keys import (
    OBJECTS,
    Kind,
    check_key,
    is_component,
    object_directory,
    parse_column_name,
    unescape,
)
from hpstore.objects.store import Store
from hpstore.objects.survey import Found, Layout, Survey, newest_by_name

_log = logging.getLogger(__name__)
WALK_SECONDS = 600.0  # deadline for walking one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Surveys of many keys, made at one time, and the devices that did not answer."""

    surveys: dict[str, Survey]
    unknown: frozenset[str]


def walk(store: Store, prefix: str = "") -> Catalog:
    """List all keys that begin with `prefix`, with their files on every device."""

    parent = prefix.rpartition("/")[0]
    if parent:  # what is looked into, by name: ".." would lead out
        check_key(parent)
    devices = store.view.devices
    answers = store.each(devices, store.generation_on)  # so that a hung one costs its deadline only
    silent = {d for d, answer in answers.items() if isinstance(answer, Exception)}
    results = store.scheduler.gather(
        {
            d: lambda d=d: list(_walk_device(d, devices[d], prefix))  # type: ignore[misc]
            for d in devices
            if d not in silent
        },
        WALK_SECONDS,
    )
    files: defaultdict[str, list[Found]] = defaultdict(list)
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
                if not is_component(entry.name, folding=device.folds_names):
                    _log.warning("%s: %s/%s is no key; left alone", device.url, directory,
                                 entry.name.encode(errors="replace"))  # fmt: skip
                    continue
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
