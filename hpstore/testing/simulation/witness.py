"""What lies on the devices, looked at past the code under test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from hpstore.devices.memory import MemoryDevice
from hpstore.format.keys import ColumnName, Kind, Version, object_directory, parse_column_name
from hpstore.format.records import PoolRecord
from hpstore.objects.object_info import ObjectInfo, version_token
from hpstore.testing.simulation.forgeries import is_forged, read_record

Devices = Mapping[str, MemoryDevice]
LayoutKey = tuple[str, tuple[Version, Kind, int, int]]  # directory of the key, layout


def columns_on(devices: Devices, *, durable: bool = False) -> Iterator[tuple[str, str, ColumnName]]:
    """Device, directory and name of every column; `durable`: of those that survive a power cut."""
    for url, device in devices.items():
        names = device._durable_names if durable else device.files
        for path, file in names.items():
            directory, _, name = path.rpartition("/")
            found = parse_column_name(name) if path.startswith("objects/") else None
            if found is not None and is_forged(found):
                continue
            if found is not None and (file.durable is not None or not durable):
                yield url, directory, found


def newest_record(devices: Devices) -> PoolRecord | None:
    """The newest membership, where it is certain: m + 1 devices have it."""
    records = [record for device in devices.values() if (record := read_record(device))]
    newest = max(records, key=lambda record: record.order, default=None)
    return newest if newest is not None and records.count(newest) > newest.parity else None


def members_by_record(devices: Devices) -> set[str] | None:
    """The members of the newest record, where it is certain."""
    record = newest_record(devices)
    return None if record is None else {member.url for member in record.members}


def weight(devices: Devices, urls: Collection[str]) -> int:
    """How many columns of an object can be on these devices: by failure domain as far as the newest
    record bounds that, one each for what is no member."""
    record = newest_record(devices)
    if record is None:
        return len(urls)
    of_urls: defaultdict[str, list[str]] = defaultdict(list)  # two where a wiped one was added
    for member in record.members:
        of_urls[member.url].append(member.device_id)
    for member in record.evicted:
        of_urls.setdefault(member.url, [member.device_id])
    known = [device for url in urls for device in of_urls.get(url, ())]
    return record.weight(known) + sum(url not in of_urls for url in urls)


def unreadable(devices: Devices, *, without: Collection[str], before: Collection[str]) -> bool:
    """Whether a version that can be read without the devices `before` cannot be `without` those."""
    columns: defaultdict[LayoutKey, dict[int, set[str]]] = defaultdict(dict)
    for url, directory, found in columns_on(devices):
        columns[directory, found.layout].setdefault(found.column, set()).add(url)
    for (_, layout), held in columns.items():
        needed = layout[2]  # its k
        now = sum(bool(places.difference(before)) for places in held.values())
        if now >= needed > sum(bool(places.difference(without)) for places in held.values()):
            return True
    return False


def newest_readable(devices: Devices, *, torn_deletes: bool = True) -> dict[str, Version]:
    """By directory of a key, the newest version of which members have enough columns.

    `torn_deletes`: also tombstones on fewer devices than an acknowledged delete has.
    """
    members = members_by_record(devices)
    columns: defaultdict[LayoutKey, set[int]] = defaultdict(set)
    for url, directory, found in columns_on(devices):
        if members is not None and url in members:
            columns[directory, found.layout].add(found.column)
    newest: dict[str, Version] = {}
    for (directory, (version, kind, data, parity)), held in columns.items():
        torn = kind is Kind.TOMBSTONE and len(held) <= parity
        if torn and not torn_deletes:
            continue
        if len(held) >= data and (directory not in newest or newest[directory] < version):
            newest[directory] = version
    return newest


def not_durable(devices: Devices, lost: Collection[str], key: str, info: ObjectInfo) -> str:
    """What is wrong with a put that was acknowledged just now, "" where nothing is: members must
    have durable columns for the losses that it is said to tolerate. `lost`: since it began."""
    members = members_by_record(devices)
    if members is None:
        return ""
    columns: defaultdict[tuple[Version, Kind, int, int], set[tuple[int, str]]] = defaultdict(set)
    newest, wanted = "", object_directory(key)
    for url, directory, found in columns_on(devices, durable=True):
        if directory != wanted:
            continue
        token = version_token(*found.version.content)
        newest = max(newest, token)
        if token == info.version and url in members and url not in lost:
            columns[found.layout].add((found.column, url))
    if newest > info.version:
        return ""  # overtaken already
    best = -1
    for (_, kind, data, _), held in columns.items():
        needed = data if kind is Kind.COLUMN else 1
        best = max(best, min(len({c for c, _ in held}), len({u for _, u in held})) - needed)
    if best < info.losses_tolerated - len(lost):
        return f"{info.losses_tolerated} losses are tolerated, it is said; by its files {best}"
    return ""
