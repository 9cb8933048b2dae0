"""The devices' horizons: a repair reads them before it looks, a sweep raises them (PROTOCOL 12)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from hpstore.devices.base import Device
from hpstore.devices.horizon_guard import HORIZON
from hpstore.errors import IntegrityError, MembershipError
from hpstore.objects.context import PoolContext

_log = logging.getLogger(__name__)
Ask = Callable[[Callable[[], int]], int]  # makes a call on a device that is no member, in time


def read_horizons(store: PoolContext) -> dict[str, int]:
    """The horizon of every device that answers."""
    answers = _ask_horizons(store)
    return {d: answer for d, answer in answers.items() if not isinstance(answer, Exception)}


def raise_horizons(store: PoolContext, counter: int) -> bool:
    """Raise the horizon of every member to `counter` at least; False unless all of them did.

    From then on no version up to the counter gets a name on any of them, unless a repair looks
    after this. One that was raised without the others costs a put another try, no more.
    """
    value = max(counter, *read_horizons(store).values(), 0)  # above one that is damaged, too
    results = _raise_on(store, store.view.devices, value)
    failed = {d: r for d, r in results.items() if isinstance(r, Exception)}
    if failed and store.metrics.count("horizon_error_total") == 1:
        _log.warning("nothing is swept for now: %s", next(iter(failed.values())))
    return not failed and results.keys() >= {m.device_id for m in store.view.record.members}


def mend_horizons(store: PoolContext) -> None:
    """Give a device whose horizon is damaged that of the others: sweeps raise it on all."""
    answers = _ask_horizons(store)
    damaged = [d for d, answer in answers.items() if isinstance(answer, IntegrityError)]
    if damaged:
        value = max((a for a in answers.values() if isinstance(a, int)), default=0)
        store.metrics.count("horizon_damaged_total", len(damaged))
        _log.warning("the horizon of %d devices is damaged: it is written again", len(damaged))
        _raise_on(store, damaged, value)


def _ask_horizons(store: PoolContext) -> dict[str, int | Exception]:
    key = store.pool_key
    return store.each(store.view.devices, lambda _, device: device.counter(HORIZON, key))


def _raise_on(store: PoolContext, devices: Iterable[str], value: int) -> dict[str, int | Exception]:
    key = store.pool_key
    return store.each(devices, lambda _, device: device.raise_counter(HORIZON, value, key))


def _own(store: PoolContext, device: Device) -> int:
    """The horizon of a device that comes back; damaged, it is taken for one that missed all
    sweeps, and written again with the members'."""
    try:
        return device.counter(HORIZON, store.pool_key)
    except IntegrityError as error:
        store.metrics.count("horizon_damaged_total")
        _log.warning("%s: the device is judged as one that saw no sweep", error)
        return 0


def come_back_below(store: PoolContext, device: Device, ask: Ask) -> int:
    """Before a returning device is judged: the members' horizon, when a sweep was there since it
    left, else 0. Up to it a tombstone may be gone that would speak against a file.

    A repair that was stopped before the device left must not publish there any more, so its horizon
    rises by one at once; by no more, as a readmit that is cut short must find it behind again.
    """
    own = ask(lambda: _own(store, device))
    members = max(read_horizons(store).values(), default=0)
    if own >= members:
        return 0
    if own + 1 == members:
        members += 1
        if not raise_horizons(store, members):
            raise MembershipError(
                f"the horizon of deletes cannot be raised on all members now, which the return of "
                f"{device.url} needs. It stays out, nothing was changed; readmit it later."
            )
    ask(lambda: device.raise_counter(HORIZON, own + 1, store.pool_key))
    return members


def come_back_at(store: PoolContext, device: Device, ask: Ask, swept: int | None) -> None:
    """Before a device becomes a member: give it the members' horizon. `swept`: what it was judged
    by; raises MembershipError when there was a sweep since."""
    members = max(read_horizons(store).values(), default=0)
    if swept is not None and members > max(swept, ask(lambda: _own(store, device))):
        raise MembershipError(
            f"tombstones were swept while {device.url} was judged. It stays out; readmit it again."
        )
    ask(lambda: device.raise_counter(HORIZON, members, store.pool_key))
