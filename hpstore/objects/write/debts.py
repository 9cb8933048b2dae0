"""Debts: durable notes of puts that were acknowledged short of their full stripe (PROTOCOL 5)."""

from __future__ import annotations

from collections.abc import Collection

from hpstore.devices.base import DEBTS, Device
from hpstore.errors import IntegrityError, TooFewDevices
from hpstore.format.records import Debt
from hpstore.objects.context import PATIENCE, PoolContext

_MAX_DEBT_BYTES = 64 << 10
_MAX_DEBTS = 100_000  # read at most so many from a device


def record_debt(store: PoolContext, debt: Debt, *, leaving: Collection[str] = ()) -> None:
    """Make a debt durable on m + 1 devices. Raises TooFewDevices; then nothing is acknowledged.

    Not on devices that are `leaving`.
    """
    path, data = f"{DEBTS}/{debt.name}", debt.encode()
    needed = store.view.record.parity + 1
    staying = [device_id for device_id in store.view.devices if device_id not in leaving]
    results = store.each(
        staying, lambda _, device: device.write_small(path, data), patience=PATIENCE
    )
    holders = [d for d, result in results.items() if not isinstance(result, Exception)]
    held = store.view.record.weight(holders)
    if held < needed:
        raise TooFewDevices(
            f"put of {debt.key!r}: the debt of {len(debt.missing)} columns is durable on {held} of "
            f"the {needed} devices (or failure domains) needed; the put is not acknowledged",
            key=debt.key,
        )


def keep_debts(store: PoolContext, leaving: Collection[str]) -> None:
    """Before devices leave: every debt is on m + 1 others. What has no debt on any of them is
    taken for never acknowledged short (PROTOCOL 7). Raises TooFewDevices."""
    for debt in read_debts(store):
        record_debt(store, debt, leaving=leaving)


def read_debts(store: PoolContext) -> list[Debt]:
    """Every debt that any device knows. Damaged records are counted and left alone."""

    def read(_: str, device: Device) -> list[Debt]:
        found = []
        for entry in device.entries(DEBTS)[:_MAX_DEBTS]:
            path = f"{DEBTS}/{entry.name}"
            try:
                data = device.read_small(path, _MAX_DEBT_BYTES)
                found.append(Debt.decode(data, where=f"{device.url}/{path}"))
            except FileNotFoundError:
                continue  # paid meanwhile
            except IntegrityError:
                store.metrics.count("debt_damaged_total")
        return found

    results = store.each(store.view.devices, read, patience=PATIENCE)
    debts = {d.name: d for r in results.values() if not isinstance(r, Exception) for d in r}
    return list(debts.values())


def clear_debt(store: PoolContext, debt: Debt) -> None:
    """Forget a debt that is paid or whose version is gone."""
    path = f"{DEBTS}/{debt.name}"
    store.each(store.view.devices, lambda _, device: device.delete(path), patience=PATIENCE)
