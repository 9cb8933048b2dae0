"""Removing files of versions that are durably superseded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from hpstore.devices.host_disks import begin_retire, host_disk
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.survey import ColumnFile, path_on
from hpstore.runtime.deadline_wait import Patience
from hpstore.runtime.split_calls import SplitCall


def remove_files(store: PoolContext, key: str, files: Iterable[ColumnFile]) -> int:
    """As remove_all of one key."""
    return remove_all(store, {key: files})


def remove_all(store: PoolContext, files: Mapping[str, Iterable[ColumnFile]]) -> int:
    """Retire files of older versions by key, best effort; returns how many were asked for.

    The caller knows that a newer version or a tombstone is durable and without debt (PROTOCOL 8,
    11). What fails is met again by the next put, delete, repair or sweep of the key.
    """
    by_device: defaultdict[str, list[tuple[str, ColumnFile]]] = defaultdict(list)
    for key, found in files.items():
        for file in found:
            by_device[file.device].append((key, file))

    devices = store.view.devices  # as they are now: some may leave meanwhile

    def retire(device_id: str) -> Callable[[], None]:
        device = devices[device_id]
        paths = [path_on(device, key, file.name) for key, file in by_device[device_id]]

        def run() -> None:
            for path in paths:
                device.retire(path)

        if len(paths) > 1 or host_disk(device) is None:
            return run
        return SplitCall(partial(begin_retire, device, paths[0]), run)

    count = sum(len(found) for found in by_device.values())
    if not count:
        return 0
    present = [d for d in by_device if d in devices]
    results = store.scheduler.gather(
        {d: retire(d) for d in present},
        store.settings.device_deadline_seconds,
        patience=Patience(PATIENCE, lambda _: True),
        brief=f"retire {count.bit_length()}",
    )
    failed = sum(isinstance(result, Exception) for result in results.values())
    if failed:
        store.metrics.count("remove_error_total", failed)
    return count
