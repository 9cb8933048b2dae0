"""What keys there are: one walk over every device. A listing, never a source of truth."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpstore.devices.base import Device
from hpstore.errors import DeviceTimeout, InvalidKey, TooFewDevices
from hpstore.format.keys import (
    OBJECTS,
    Kind,
    Version,
    check_key,
    component_of,
    object_directory,
    parse_column_name,
)
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.survey import (
    ColumnFile,
    Layout,
    Survey,
    make_survey,
    newest_by_name,
    with_debts,
    with_tombstones,
)
from hpstore.runtime.deadline_wait import wait_awake
from hpstore.runtime.lacks import blamed, lacks_total
from hpstore.runtime.scheduler import outcome

_log = logging.getLogger(__name__)
_Rows = list[tuple[str, ColumnFile]]
_BATCH = 64  # directories that a device may list at once
_LOOK_SECONDS = 0.5  # between two looks at whether walks go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Surveys of many keys, made at one time, and the devices that did not answer."""

    surveys: dict[str, Survey]
    unknown: frozenset[str]


def walk(store: PoolContext, prefix: str = "") -> Catalog:
    """List all keys that begin with `prefix`, with their files on every device."""

    if not isinstance(prefix, str):
        raise InvalidKey(f"a prefix of keys is a str, not {type(prefix).__name__}")
    parent = prefix.rpartition("/")[0]
    if parent:  # what is looked into, by name: ".." would lead out
        check_key(parent)
    results, silent = _walk_all(store, prefix)
    files: defaultdict[str, list[ColumnFile]] = defaultdict(list)
    for device_id, found in results.items():
        if isinstance(found, Exception):
            silent.add(device_id)
            continue
        for key, file in found:
            files[key].append(file)
    unknown = frozenset(silent) | store.view.missing
    surveys = {key: make_survey(store, key, found, unknown) for key, found in files.items()}
    surveys = with_debts(store, with_tombstones(store, surveys))
    return Catalog(surveys=surveys, unknown=unknown)


class _Walk:
    """The walk over one device, on its lane. `steps` rises with every directory that was listed."""

    def __init__(self, device_id: str, device: Device, prefix: str) -> None:
        self._device_id, self._device, self._prefix = device_id, device, prefix
        self.steps = 0
        self.given_up = False  # set by the thread that waits

    def run(self) -> _Rows:
        return list(_walk_device(self._device_id, self._device, self._prefix, self._step))

    def _step(self) -> None:
        self.steps += 1
        if self.given_up:
            raise DeviceTimeout(
                f"the listing of device {self._device.url} was given up after {self.steps} "
                "directories",
                device=self._device_id,
            )


def _walk_all(store: PoolContext, prefix: str) -> tuple[dict[str, _Rows | Exception], set[str]]:
    """Rows of all devices, and which devices are silent before anything is listed.

    A walk may take as long as it makes progress: a device is given up when it has not listed one
    more directory within the device deadline. A listing that ends before its time would pass for a
    complete one.
    """
    devices, scheduler = store.view.devices, store.scheduler
    # so that a hung one costs little
    answers = store.each(devices, store.generation_on, patience=PATIENCE, brief="generation")
    silent = {d for d, answer in answers.items() if isinstance(answer, Exception)}
    walks = {d: _Walk(d, devices[d], prefix) for d in devices if d not in silent}
    futures = {d: scheduler.submit(d, walk.run) for d, walk in walks.items()}
    deadline = store.settings.device_deadline_seconds
    still = dict.fromkeys(walks, 0.0)  # seconds without progress
    seen = dict.fromkeys(walks, -1)
    while left := [d for d, future in futures.items() if not future.done() and d not in silent]:
        waited = wait_awake([futures[d] for d in left], _LOOK_SECONDS)
        for device in left:
            steps = walks[device].steps
            still[device] = 0.0 if steps != seen[device] else still[device] + waited
            seen[device] = steps
            if still[device] >= deadline and not futures[device].done():
                walks[device].given_up = True
                silent.add(device)
                _log.warning(
                    "the listing of device %s stopped after %d directories: what only it "
                    "holds is unknown",
                    devices[device].url,
                    steps,
                )
    found: dict[str, _Rows | Exception] = {}
    for device, future in futures.items():
        if device not in silent:
            rows = outcome(future, device, deadline)
            found[device] = rows
    return found, silent


def _walk_device(
    device_id: str, device: Device, prefix: str, step: Callable[[], None]
) -> Iterator[tuple[str, ColumnFile]]:
    parent = prefix.rpartition("/")[0]
    start = object_directory(parent, folding=device.folds_names) if parent else OBJECTS
    pending = [(start, parent)]
    folding = device.folds_names
    while pending:
        step()
        batch = pending[: -_BATCH - 1 : -1]
        listings = device.listings([directory for directory, _ in batch])
        del pending[-len(listings) :]
        for (directory, key), entries in zip(batch, listings, strict=False):
            wanted = key.startswith(prefix)
            for file, is_directory in entries:
                if not is_directory:
                    if wanted and (name := parse_column_name(file)) is not None:
                        yield key, ColumnFile(device_id, name)
                    continue
                part = component_of(file, folding=folding)
                if part is None:
                    _log.warning(
                        "%s: %s/%s is not a key and is left alone",
                        device.url,
                        directory,
                        file.encode(errors="replace"),
                    )
                    continue
                child = f"{key}/{part}" if key else part
                if child.startswith(prefix) or prefix.startswith(f"{child}/"):
                    pending.append((f"{directory}/{file}", child))


def live_layout(store: PoolContext, survey: Survey) -> Layout | None:
    """The layout that a read would choose by names; None for deleted keys and torn puts."""
    layout = newest_by_name(store.view, survey)
    return None if layout is None or layout.kind is Kind.TOMBSTONE else layout


def live_versions(store: PoolContext, prefix: str = "", *, certain: bool) -> dict[str, Version]:
    """Keys that begin with `prefix`, with the version that a read would choose by names.

    `certain`: raises TooFewDevices where keys may be there unseen.
    """
    before, lacked = store.view, lacks_total()
    found = walk(store, prefix)
    view = store.view
    unknown = found.unknown | view.record.unhealed()
    if certain and not view.record.opens_without(unknown):
        if store.look_again(before):
            return live_versions(store, prefix, certain=True)
        error = TooFewDevices(
            f"{len(unknown)} devices do not answer or were evicted since the last rebuild, "
            f"parity covers {view.record.parity}: objects under {prefix!r} may be there "
            "unseen. Nothing was changed. Bring devices back, or rebuild if they are gone."
        )
        raise blamed(error, lacked)
    layouts = {key: live_layout(store, survey) for key, survey in found.surveys.items()}
    return {key: layout.version for key, layout in layouts.items() if layout is not None}
