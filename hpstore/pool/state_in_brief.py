"""A pool's state in one line, for the messages of what failed: cheap, where status() walks all
keys."""

from __future__ import annotations

from hpstore.devices.base import Device, Usage
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.units import format_bytes


def state_in_brief(store: PoolContext, name: str) -> str:
    """Devices that answer now, room, and the losses that the pool still bears. Asks each device,
    with a deadline."""

    def look(device_id: str, device: Device) -> Usage:
        store.generation_on(device_id, device)
        return device.usage()

    answers = store.each(store.view.devices, look, patience=PATIENCE)
    found = [answer for answer in answers.values() if isinstance(answer, Usage)]
    free = [usage.free for usage in found if usage.known]
    silent = {device for device, answer in answers.items() if not isinstance(answer, Usage)}
    room = f"{format_bytes(min(free))} free on the fullest, " if free else ""
    return (
        f"pool {name!r}: {len(found)} of {len(store.view.record.members)} devices answer, {room}"
        f"{store.view.may_leave(silent)} further losses tolerated"
    )
