"""Parsers of what lies on devices, in run directories and in settings files."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpstore.agent.operator_requests import ORDERS_FILE, read_orders
from hpstore.agent.saved_state import AgentState
from hpstore.agreement import claims
from hpstore.agreement.register_slots import (
    COPY_BYTES,
    SLOT_BYTES,
    SlotEntry,
    decode_entry,
    encode_entry,
    merge,
)
from hpstore.agreement.registers import Register
from hpstore.codec import compression
from hpstore.config import load_config
from hpstore.devices.base import recycled_bytes
from hpstore.devices.horizon_guard import HORIZON, decode_counter, encode_counter, risen
from hpstore.errors import HpstoreError
from hpstore.format.checksum import digest128
from hpstore.format.column_header import (
    HEADER_BYTES,
    MAGIC,
    ColumnHeader,
    decode_header,
    decode_table,
    encode_header,
    encode_table,
)
from hpstore.format.geometry import Code, Geometry
from hpstore.format.keys import Kind, NameTags, Version, component_of, parse_column_name
from hpstore.format.pool_key import PoolKey, Use
from hpstore.format.records import Debt, Identity, Member, PoolRecord, seal, unseal
from hpstore.health.policy.states import DeviceHealth, PolicyState
from hpstore.maintenance.deferred_repair import Expiry
from hpstore.maintenance.scrub import decode_cursor
from hpstore.membership import lasting_holds
from hpstore.membership.agent_observations import STATUS_FILE, observed_devices
from hpstore.membership.run_registers import decode_place, decode_register
from hpstore.pool.pool_names import read_table
from tests.fuzz.engine import Target

FOLDER = Path(tempfile.gettempdir())


def scratch(name: str, data: bytes) -> Path:
    """A file of this process with these bytes, in memory where that can be."""
    shm = Path("/dev/shm")
    folder = (shm if os.access(shm, os.W_OK) else FOLDER) / f"hpstore-fuzz-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(data)
    return path


def unsealed(data: bytes) -> list[bytes]:
    """The body of a sealed record."""
    body = json.loads(data)
    body.pop("digest", None)
    return [json.dumps(body).encode()]


def sealed(parts: Sequence[bytes]) -> bytes:
    """A record with the digest that fits."""
    return seal(json.loads(parts[0]))


def record(
    name: str, seeds: Callable[[], Sequence[bytes]], run: Callable[[bytes], object]
) -> Target:
    """A target of sealed records."""
    return Target(name=name, run=run, seeds=seeds, take_apart=unsealed, put_together=sealed)


VERSION = Version(1_700_000_000_000, 0x0123456789ABCDEF, 1)


def header(kind: Kind = Kind.COLUMN, size: int = 300_000) -> ColumnHeader:
    copies = kind is not Kind.COLUMN
    geometry = Geometry(
        data=1 if copies else 4,
        parity=2,
        unit_bytes=65536,
        size=size,
        code=Code.COPIES if copies else Code.RS_CAUCHY,
    )
    return ColumnHeader(
        pool_id="p" * 16,
        key="runs/a/step-1",
        version=VERSION,
        kind=kind,
        column=1,
        geometry=geometry,
        devices=("d0", "d1", "d2", "d3", "d4", "d5")[: geometry.width],
        generation=3,
        created_ms=1_700_000_000_000,
        metadata={"note": "x", "n": 1},
    )


def header_body(data: bytes) -> list[bytes]:
    length = int.from_bytes(data[12:16], "little")
    return [data[16 : 16 + length], data[HEADER_BYTES:]]


def header_page(parts: Sequence[bytes]) -> bytes:
    body = parts[0][: HEADER_BYTES - 32]
    page = MAGIC + (1).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body
    page = page.ljust(HEADER_BYTES - 16, b"\0")
    return page + digest128(page) + b"".join(parts[1:])


def take_header(data: bytes) -> None:
    found = decode_header(data[:HEADER_BYTES], where="x")
    assert found.file_bytes >= HEADER_BYTES
    str(found.name), found.seed, found.geometry.stripe_count, found.geometry.fewest_to_acknowledge()
    if found.table_bytes <= 1 << 20:
        decode_table(found, data[HEADER_BYTES:], where="x")


KEY = PoolKey(bytes(range(32)))


def keyed_page(parts: Sequence[bytes]) -> bytes:
    """With the MAC of the pool's key, so that mutations get behind it."""
    body = parts[0][: HEADER_BYTES - 48]
    page = MAGIC + (2).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body
    page = page.ljust(HEADER_BYTES - 32, b"\0") + KEY.mac(Use.HEADER, page)
    return page + digest128(page) + b"".join(parts[1:])


def take_keyed_header(data: bytes) -> None:
    found = decode_header(data[:HEADER_BYTES], where="x", pool_key=KEY)
    checks = found.checks(KEY)
    assert NameTags(KEY, found.pool_id, found.key).tagged(found.name).tag
    if found.table_bytes <= 1 << 20:
        decode_table(found, data[HEADER_BYTES:], where="x", checks=checks)


def header_seeds(pool_key: PoolKey | None = None) -> list[bytes]:
    made = []
    for kind, size in ((Kind.COLUMN, 300_000), (Kind.COPY, 100), (Kind.TOMBSTONE, 0)):
        one = header(kind, size)
        table = np.arange(one.geometry.block_count, dtype=np.uint64)
        checks = one.checks(pool_key)
        made.append(encode_header(one, pool_key) + encode_table(one, table, checks))
    return made


def take_name(data: bytes) -> None:
    name = os.fsdecode(data)
    found = parse_column_name(name)
    if found is not None:
        assert str(found) == name
    for folding in (False, True):
        component_of(name, folding=folding)
    recycled_bytes(name)
    text = data.decode(errors="replace")
    if "\0" not in text:
        try:
            Version.parse(text)
        except ValueError:
            return


def pool_record() -> PoolRecord:
    members = tuple(
        Member(device_id=f"d{i}", url=f"/mnt/{i}", domain=f"host{i % 3}", since_ms=i)
        for i in range(6)
    )
    return PoolRecord(
        pool_id="p" * 16,
        generation=4,
        nonce="n",
        parent="",
        data=4,
        parity=2,
        unit_bytes=1 << 20,
        members=members,
        evicted=members[:1],
        spread=2,
    )


def sealed_with_key(parts: Sequence[bytes]) -> bytes:
    """A membership with the MAC and the digest that fit."""
    body = json.loads(parts[0])
    body.pop("mac", None)
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return seal({**body, "mac": KEY.mac(Use.RECORD, text.encode(errors="surrogatepass")).hex()})


def take_keyed_record(data: bytes) -> None:
    found = PoolRecord.decode(data, where="pool.json", pool_key=KEY)
    assert PoolRecord.decode(found.encode(KEY), where="x", pool_key=KEY) == found


def take_pool_record(data: bytes) -> None:
    found = PoolRecord.decode(data, where="pool.json")
    found.quorum(), found.unhealed(), found.weight(["d0", "d1"]), found.opens_without(["d0"])
    found.reached_by(["d0", "d1"])
    assert PoolRecord.decode(found.encode(), where="x") == found


def take_identity(data: bytes) -> None:
    found = Identity.decode(data, where="hpstore.json")
    assert Identity.decode(found.encode(), where="x") == found


def take_debt(data: bytes) -> None:
    found = Debt.decode(data, where="debt")
    assert "/" not in found.name


def take_counter(data: bytes) -> None:
    risen(HORIZON, data, 5, KEY)
    decode_counter(HORIZON, data, where=HORIZON, pool_key=KEY)


def register_seeds() -> list[bytes]:
    values = [
        claims._State(counter=5, nonce="ab", owner="me").encode(),
        b"{}",
        None,
        b'{"pid": 1, "host": "h", "what": "repair"}',
    ]
    made = []
    for value in values:
        slot = bytearray(SLOT_BYTES)
        for copy in (0, 1):
            at, raw = encode_entry(
                SlotEntry(promised=3, order=(2, 7 + copy), value=value, copy=1 - copy)
            )
            slot[at : at + COPY_BYTES] = raw
        made.append(bytes(slot))
    return [*made, b"".join(made)]


def slot_bodies(data: bytes) -> list[bytes]:
    return [data[at : at + COPY_BYTES - 16] for at in range(0, len(data), COPY_BYTES)]


def slot_sealed(parts: Sequence[bytes]) -> bytes:
    bodies = [part[: COPY_BYTES - 16].ljust(COPY_BYTES - 16, b"\0") for part in parts]
    return b"".join(body + digest128(body) for body in bodies)


def take_register(data: bytes) -> None:
    image = data.ljust(-(-len(data) // SLOT_BYTES) * SLOT_BYTES, b"\0")[: 4 * SLOT_BYTES]
    for at in range(0, len(image), SLOT_BYTES):
        slot = image[at : at + SLOT_BYTES]
        entry = decode_entry(slot)
        lasting_holds._holder(_Held(slot))  # type: ignore[arg-type]
        with contextlib.suppress(HpstoreError):  # not all hold claims
            claims._State.of(Register(order=entry.order, value=entry.value))
    for lacking in merge({"a": image, "b": image[::-1], "c": bytes(len(image))}).values():
        for entry in lacking.values():
            encode_entry(entry)


class _Held:
    """As a Hold that was taken, as far as kept_holds looks at it."""

    def __init__(self, content: bytes) -> None:
        self.content = content


def state_seed() -> PolicyState:
    return PolicyState(
        devices={"d0": DeviceHealth(), "d1": DeviceHealth(score=2.0)}, now_seconds=9.0
    )


def take_orders(data: bytes) -> None:
    read_orders(scratch(ORDERS_FILE, data).parent)


def take_status(data: bytes) -> None:
    observed_devices(scratch(STATUS_FILE, data).parent, 1000)


def take_toml(data: bytes) -> None:
    load_config(scratch("pool.toml", data))


def take_names(data: bytes) -> None:
    read_table(scratch("pools.toml", data))


TOML = b"""name = "main"
devices = ["/mnt/a", "/mnt/b", "s3://bucket/x"]
[settings]
memory_bytes = "2GiB"
direct = false
[agent]
interval_seconds = 5.0
"""


def take_expiry(data: bytes) -> None:
    Expiry.decode(data, key="runs/a/expiring")


def expiry_seeds() -> list[bytes]:
    return [
        Expiry(
            reason="r",
            sizes={"runs/a/x": 5},
            instead=("runs/b",),
            expected_ms=1_700_000_000_000,
            limit_ms=1_700_000_100_000,
        ).encode()
    ]


def frame_seeds() -> list[bytes]:
    raw = np.tile(np.arange(256, dtype=np.uint8), 16)
    return [bytes([n]) + compression.encoder(name)(raw, 4) for n, name in enumerate(_CODECS)]


_CODECS = ("lz4", "zstd", "blosc", "shuffle-lz4")


def take_frame(data: bytes) -> None:
    if len(data) > 1:
        out = np.empty(4096, np.uint8)
        compression.decode(_CODECS[data[0] % 4], np.frombuffer(data[1:], np.uint8), out)


def take_record(data: bytes) -> None:
    unseal(data, where="x")
    unseal(data, where="x", users=True)


POOL_TARGETS = [
    Target(
        name="column-header",
        run=take_header,
        seeds=header_seeds,
        take_apart=header_body,
        put_together=header_page,
    ),
    Target(
        name="column-name",
        run=take_name,
        seeds=lambda: [
            str(header().name).encode(),
            b"%40a%2fb",
            b"4096-00ff",
            str(VERSION).encode(),
        ],
    ),
    Target(
        name="keyed-header",
        run=take_keyed_header,
        seeds=lambda: header_seeds(KEY),
        take_apart=header_body,
        put_together=keyed_page,
    ),
    Target(
        name="keyed-record",
        run=take_keyed_record,
        take_apart=unsealed,
        put_together=sealed_with_key,
        seeds=lambda: [replace(pool_record(), key_id=KEY.fingerprint("p" * 16)).encode(KEY)],
    ),
    record("pool-record", lambda: [pool_record().encode()], take_pool_record),
    record(
        "identity",
        lambda: [Identity(pool_id="p", device_id="d", domain="h").encode()],
        take_identity,
    ),
    record("debt", lambda: [Debt(key="a/b", version=VERSION, missing=(1, 4)).encode()], take_debt),
    record(
        "counter",
        lambda: [encode_counter(HORIZON, 5, KEY), encode_counter(HORIZON, 0), b""],
        take_counter,
    ),
    Target(
        name="register",
        run=take_register,
        seeds=register_seeds,
        take_apart=slot_bodies,
        put_together=slot_sealed,
    ),
    record(
        "scrub-cursor",
        lambda: [seal({"format": 1, "after": "a/b", "at_ms": 5})],
        lambda data: decode_cursor(data),
    ),
    record(
        "run-token",
        lambda: [
            seal({"format": 1, "token": "t", "machine": "m", "boot": "b", "directory": "/run/x"})
        ],
        lambda data: decode_place(data, where="x"),
    ),
    record(
        "run-register",
        lambda: [seal({"format": 1, "sequence": 4, "value": "{}"})],
        lambda data: decode_register(data, where="x"),
    ),
    record("expiry", expiry_seeds, take_expiry),
    record(
        "health-states",
        lambda: [state_seed().encode()],
        lambda data: PolicyState.decode(data, where="x"),
    ),
    record(
        "agent-memory",
        lambda: [AgentState(policy=state_seed(), orders_done=4).encode()],
        lambda data: AgentState.decode(data, where="x"),
    ),
    record(
        "agent-orders",
        lambda: [
            seal(
                {
                    "format": 1,
                    "orders": [{"number": 1, "at_ms": 5, "word": "readmit", "device": "d0"}],
                }
            )
        ],
        take_orders,
    ),
    Target(
        name="agent-status",
        seeds=lambda: [
            b'{"at_ms": 1000, "process": 4, "devices": [{"device": "d", "present": true}]}'
        ],
        run=take_status,
    ),
    record("record", lambda: [seal({"format": 1, "x": [1, 2.5, "a"]})], take_record),
    Target(name="pool-toml", run=take_toml, seeds=lambda: [TOML]),
    Target(name="names-toml", run=take_names, seeds=lambda: [b'main = "/etc/pool.toml"\n']),
    Target(name="frame", run=take_frame, seeds=frame_seeds),
]
