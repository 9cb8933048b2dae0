"""How many further losses a write must survive to be taken: `min_losses_tolerated`."""

from __future__ import annotations

from hpstore.errors import ConfigError, TooFewDevices
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.object_info import ObjectInfo


def wanted_losses(store: PoolContext, asked: int | None) -> int:
    """What a write is asked to survive: by the caller, else by the settings. Raises ConfigError for
    what no object of the pool can."""
    wanted = store.settings.min_losses_tolerated if asked is None else asked
    if not 0 <= wanted <= store.view.record.parity:
        raise ConfigError(
            f"min_losses_tolerated must be from 0 to {store.view.record.parity}, the parity of "
            f"this pool, not {wanted}"
        )
    return wanted


def require_tolerance(store: PoolContext, wanted: int, what: str) -> None:
    """Before a write that must survive so many further losses. 0 asks no device.

    Raises TooFewDevices, and nothing is written, where it could not now.
    """
    if not wanted:
        return
    answers = store.each(store.view.devices, store.generation_on, patience=PATIENCE)
    silent = {device for device, answer in answers.items() if isinstance(answer, Exception)}
    possible = store.view.may_leave(silent)
    if possible < wanted:
        raise TooFewDevices(
            f"{what} would survive {possible} further losses, min_losses_tolerated asks for "
            f"{wanted}: {len(silent | store.view.missing)} devices do not answer or are counted as "
            "lost until a rebuild. Nothing was written. Bring devices back, rebuild, or ask for "
            "less."
        )


def require_stored(info: ObjectInfo, wanted: int) -> None:
    """After a write. Raises TooFewDevices where devices failed meanwhile: the object is there, and
    survives less than was asked."""
    if info.losses_tolerated < wanted:
        error = TooFewDevices(
            f"{info.key!r} is stored, and survives {info.losses_tolerated} further losses, where "
            f"min_losses_tolerated asks for {wanted}: devices failed while it was written. It can "
            "be read and may be written again; a rebuild brings it to its full stripe.",
            key=info.key,
        )
        error.maybe_visible = True
        raise error
