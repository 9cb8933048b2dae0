"""Device commands: add, evict, drain, readmit, sit out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Annotated

import typer

import hpstore
from hpstore.cli import agent_requests
from hpstore.cli.confirm import agree
from hpstore.cli.options import AllowRootDisk, DeviceName, Force, Json, PoolName, Rate, Yes
from hpstore.cli.output import UNMENDED_EXIT_CODE, say, write_err
from hpstore.cli.progress_bar import progress_bar
from hpstore.config import Settings
from hpstore.errors import ConfigError, HpstoreError, without_promise
from hpstore.health.policy.operator_commands import Command
from hpstore.membership.device_places import sharing_note
from hpstore.membership.host_names import DOMAIN, HOST


def add(
    pool: PoolName,
    device: Annotated[str, typer.Argument(help="directory or URL")],
    domain: Annotated[str | None, typer.Option(help="failure domain")] = None,
    force: Force = False,
    allow_root_disk: AllowRootDisk = False,
    as_json: Json = False,
) -> None:
    """Add a device; `rebuild` then widens objects over it.

    hpstore add pool.toml /mnt/g
    """
    with hpstore.open(pool) as opened:
        found = opened.admin.devices.find(
            opened.add_device(device, domain, force=force, allow_root_disk=allow_root_disk)
        )
        note_shared_disks(opened.admin.devices.answering_places())
    facts = {"device": found.device_id, "url": found.url, "domain": found.domain, "state": "online"}
    say(facts, f"{device} is device {found.device_id[:8]}", as_json=as_json)


def evict(
    pool: PoolName,
    device: DeviceName,
    force: Force = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove a device, or a whole host, at once; what it held counts as lost.

    hpstore evict pool.toml /mnt/b

    `host:b` is all devices of host b, `domain:rack1` those of a failure domain: they leave
    together. `drain` moves what a device holds first.
    """
    with hpstore.open(pool) as opened:
        named = opened.admin.devices.named(device)
        several = device.startswith((HOST, DOMAIN))
        what = f"{device}, {len(named)} devices" if several else named[0].url
        unsafe = ", also what no other device can replace" if force else ""
        agree(f"evict {what}: what it holds counts as lost{unsafe}", yes=yes, named=True)
        opened.evict(device if several else named[0].device_id, force=force)
    rows = [{"device": m.device_id, "url": m.url, "state": "evicted"} for m in named]
    say(
        {"name": device, "devices": rows} if several else dict(rows[0]),
        f"{what} is evicted; `hpstore rebuild` heals what it held",
        as_json=as_json,
    )


def drain(pool: PoolName, device: DeviceName, rate: Rate = None, as_json: Json = False) -> None:
    """Move everything off a device, then evict it.

    hpstore drain pool.toml /mnt/b --rate 200MB
    """
    with hpstore.open(pool) as opened, progress_bar("drain") as bar:
        found = opened.admin.devices.find(device)
        moved = opened.drain(found.device_id, progress=bar.objects, rate_bytes_per_second=rate)
    say(
        {"device": found.device_id, "url": found.url, "state": "evicted", "objects_moved": moved},
        f"{device} is drained and evicted; {moved} objects moved",
        as_json=as_json,
    )


def readmit(pool: PoolName, device: DeviceName, as_json: Json = False) -> None:
    """Take back a device that was evicted, drained, released or sitting out.

    hpstore readmit pool.toml /mnt/b
    """
    with hpstore.open(pool) as opened:
        found = opened.admin.devices.find(device, returning=True)
        files = opened.readmit(found.device_id)
        looked_after = agent_requests.looked_after(opened)
    given: agent_requests.RequestOutcome | None = None
    unheard = ""
    if looked_after:
        try:
            given = agent_requests.order(pool, found.device_id, Command.READMIT)
        except (HpstoreError, OSError) as error:  # the pool has changed: that is no failure
            unheard = without_promise(error)
    detail = (
        ""
        if files is None
        else (
            f": {files.kept} files kept, {files.removed} removed, {files.quarantined} in quarantine"
        )
    )
    facts = {
        "device": found.device_id,
        "url": found.url,
        "state": "online",
        "files": None if files is None else asdict(files),
        "agent": ("unheard" if unheard else None) if given is None else given.outcome,
    }
    if unheard:
        write_err(f"hpstore: note: the agent here did not take the order: {unheard}\n")
    say(
        facts,
        ("" if given is None else f"{given}\n") + f"{device} is online{detail}",
        as_json=as_json,
    )


def replace(
    pool: PoolName,
    old: DeviceName,
    new: Annotated[str, typer.Argument(help="directory or URL of the new device")],
    domain: Annotated[str | None, typer.Option(help="failure domain; else the old one's")] = None,
    rate: Rate = None,
    allow_root_disk: AllowRootDisk = False,
    as_json: Json = False,
) -> None:
    """Put a new disk in the place of an old one, dead or alive.

    hpstore replace pool.toml /mnt/b /mnt/g

    The old one is drained if it answers, else evicted and rebuilt. If this command is killed,
    run it again.
    """
    from hpstore.pool.replace_device import replace_device

    with hpstore.open(pool) as opened, progress_bar("replace") as bar:
        done = replace_device(
            opened,
            old,
            new,
            domain=domain,
            rate_bytes_per_second=rate,
            progress=bar.objects,
            allow_root_disk=allow_root_disk,
        )
        note_shared_disks(opened.admin.devices.answering_places())
    facts = {
        "old": done.old.device_id,
        "new": done.new,
        "url": done.old.url,
        "moved": done.moved,
        "disk": done.location.disk,
        "serial": done.location.serial,
        "by_id": done.location.by_id,
        "report": None if done.report is None else done.report.as_dict(),
    }
    made = (
        f"{done.moved} objects moved"
        if done.report is None
        else (f"it did not answer, {done.report.rebuilt + done.report.relaid} objects rebuilt")
    )
    say(
        facts,
        f"{new} is device {done.new[:8]} in the place of {done.old.device_id[:8]}: {made}\n"
        f"the old disk: {done.location}\n"
        f"`hpstore release` says when it can be taken out",
        as_json=as_json,
    )
    if done.report is not None and done.report.unmended:
        raise typer.Exit(UNMENDED_EXIT_CODE)


def release(
    pool: PoolName,
    device: DeviceName,
    wait: Annotated[
        float, typer.Option(min=0.0, help="seconds that processes have to let it go")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Close a disk that is evicted or in maintenance; name the disk and who has it open.

    hpstore release pool.toml /mnt/b
    """
    from hpstore.devices.disk_location import locate
    from hpstore.pool.replace_device import wait_released

    with hpstore.open(pool, read_only=True) as opened:
        member = opened.admin.devices.find(device, returning=True)
        if not member.left and agent_requests.in_maintenance(opened, member.device_id):
            with hpstore.open(pool) as writer:
                writer.admin.devices.begin_release(member.device_id)
        holders, location = wait_released(opened, member, wait), locate(member.url)
    facts = {
        "device": member.device_id,
        "url": member.url,
        "free": not holders,
        "disk": location.disk,
        "serial": location.serial,
        "by_id": location.by_id,
        "open_in": [{"pid": h.pid, "command": h.command, "files": h.files} for h in holders],
    }
    left = "has left the pool" if member.left else "is released, until `hpstore readmit`"
    lines = [f"{member.url} {left}: {location}"]
    lines += [f"process {h.pid} ({h.command}) has {h.files} files open there" for h in holders]
    lines.append(
        "end these or let them close their readers, then unmount it"
        if holders
        else "nothing that this user may see has it open: unmount it"
    )
    say(facts, "\n".join(lines), as_json=as_json)
    if holders:
        raise typer.Exit(UNMENDED_EXIT_CODE)


def sit_out(pool: PoolName, device: DeviceName, as_json: Json = False) -> None:
    """Make the agent avoid a device until readmit.

    hpstore sit-out pool.toml /mnt/b
    """
    agent_requests.tell(pool, device, Command.SIT_OUT, as_json=as_json)


def note_shared_disks(urls: Collection[str]) -> None:
    """Say it once, where devices share a disk."""
    if note := sharing_note(urls):
        write_err(f"hpstore: note: {note}\n")


def sharing(group: str, mode: str | None) -> Settings:
    """Settings of a new pool for users of a `group`. Raises ConfigError for a mode that is none."""
    if not group and mode is None:
        return Settings()
    try:
        directory = int(mode or "0770", 8)
    except ValueError as error:
        raise ConfigError(f"--mode {mode!r} is not an octal mode, such as 0770") from error
    if group and not directory & 0o070:
        raise ConfigError(f"--mode {mode} gives the group {group} no rights; 0770 gives it all")
    return Settings(group=group, directory_mode=directory, file_mode=directory & 0o666)
