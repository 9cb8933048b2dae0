"""`hpstore bench remote`: a device and a pool on S3 against obstore alone, in the same run.

The server is the one of AWS_ENDPOINT_URL, with the keys of the environment; the buckets are those
of HPSTORE_BENCH_BUCKETS (names with commas). Everything lies below `hpstore-bench-` and is removed.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hpstore
from hpstore.benchmarks.harness.measure import Options, interleave, rates, ratio, seconds
from hpstore.codec.galois import Bytes
from hpstore.config import Settings
from hpstore.devices.object_store import ObjectStoreDevice
from hpstore.devices.remote_opener import open_remote
from hpstore.errors import ConfigError
from hpstore.format.store_settings import StoreSettings
from hpstore.runtime.buffers import aligned_array
from hpstore.units import MIB

READ_BYTES = 4 * MIB  # a call of the pool on a device
LANES = 2  # workers_per_device
DATA, PARITY = 4, 2
_BUCKETS = "HPSTORE_BENCH_BUCKETS"


def bench_remote(options: Options) -> dict[str, object]:
    """One device, then a pool of 4+2 where six buckets are named. Raises ConfigError."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    buckets = [name for name in os.environ.get(_BUCKETS, "").split(",") if name]
    if not endpoint or not buckets:
        raise ConfigError(
            f"set AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and {_BUCKETS}, names "
            "of buckets with commas between them; six for a pool"
        )
    stores = {"bench": StoreSettings(endpoint=endpoint, credentials="env:AWS")}
    prefix = f"hpstore-bench-{secrets.token_hex(4)}"
    device = open_remote(f"s3://bench@{buckets[0]}/{prefix}", stores, deadline_seconds=60.0)
    if not isinstance(device, ObjectStoreDevice):
        raise ConfigError("bench remote needs obstore: pip install 'hpstore[s3]'")
    found: dict[str, object] = {"device": _bench_device(device, options)}
    if len(buckets) >= DATA + PARITY:
        found["pool"] = _bench_pool(device, stores, buckets, prefix, options)
    return found


def _source(nbytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def _bench_device(device: ObjectStoreDevice, options: Options) -> dict[str, object]:
    """Columns of 8 MiB, one after the other, as a pool writes and reads them."""
    import obstore

    nbytes, count = 8 * MIB, max(1, options.size_bytes // (8 * MIB))
    source, target, raw = _source(nbytes), aligned_array(nbytes), device.client.store
    names = [f"objects/column-{number}" for number in range(count)]

    def put(name: str) -> None:
        handle = device.create(nbytes)
        for start in range(0, nbytes, READ_BYTES):
            handle.write(start, [source[start : start + READ_BYTES]])
        handle.sync()
        handle.publish(f"{name}/@1")

    def get(threads: ThreadPoolExecutor, name: str) -> None:
        handle = device.open(f"{name}/@1")
        parts = [target[start : start + READ_BYTES] for start in range(0, nbytes, READ_BYTES)]
        list(threads.map(handle.read_into, range(0, nbytes, READ_BYTES), parts))

    with ThreadPoolExecutor(LANES) as threads:
        times = interleave(
            {
                "obstore put": _each(names, lambda name: obstore.put(raw, f"raw/{name}", source)),
                "device put": _each(names, put),
                "obstore get": _each(names, lambda name: obstore.get(raw, f"raw/{name}").bytes()),
                "device get": _each(names, partial(get, threads)),
            },
            options.repeats,
        )
    if not np.array_equal(source, target):
        raise AssertionError("the device returned other bytes")
    for name in names:
        device.delete(f"{name}/@1")
        obstore.delete(raw, f"raw/{name}")
    return {
        "column_bytes": nbytes,
        "rates": rates(times, dict.fromkeys(times, nbytes * count)),
        "put_to_obstore": ratio(times["device put"], times["obstore put"]),
        "get_to_obstore": ratio(times["device get"], times["obstore get"]),
    }


def _bench_pool(
    device: ObjectStoreDevice,
    stores: Mapping[str, StoreSettings],
    buckets: list[str],
    prefix: str,
    options: Options,
) -> dict[str, object]:
    """One object of the given size, against as many bytes in six files side by side."""
    import obstore

    size = max(options.size_bytes, DATA * MIB) // (DATA * MIB) * DATA * MIB
    source, target = _source(size), aligned_array(size)
    part = size // DATA
    clients = [
        _client(open_remote(f"s3://bench@{name}/x", stores, deadline_seconds=60.0))
        for name in buckets[: DATA + PARITY]
    ]
    raw = f"{prefix}-raw"
    with (
        tempfile.TemporaryDirectory() as place,
        ThreadPoolExecutor(DATA + PARITY) as threads,
        hpstore.create(
            [f"s3://bench@{name}/{prefix}-pool" for name in buckets[: DATA + PARITY]],
            data=DATA,
            parity=PARITY,
            config=Path(place) / "pool.toml",
            settings=Settings(run_directory=f"{place}/run", device_deadline_seconds=120.0),
            stores={"bench": {"endpoint": stores["bench"].endpoint, "credentials": "env:AWS"}},
        ) as pool,
    ):
        times = interleave(
            {
                "obstore put": lambda: _together(
                    threads, clients, lambda c: obstore.put(c, raw, source[:part])
                ),
                "pool put": lambda: seconds(lambda: pool.put("object", source)),
                "obstore get": lambda: _together(
                    threads, clients[:DATA], lambda c: obstore.get(c, raw).bytes()
                ),
                "pool get": lambda: seconds(lambda: pool.read_into("object", target.data)),
            },
            options.repeats,
        )
        if not np.array_equal(source, target):
            raise AssertionError("the pool returned other bytes")
        pool.delete("object")
    for client in clients:
        for page in obstore.list(client, f"{prefix}-pool"):
            obstore.delete(client, [row["path"] for row in page])
        obstore.delete(client, raw)
    return {
        "object_bytes": size,
        "rates": rates(times, dict.fromkeys(times, size)),
        "put_to_obstore": ratio(times["pool put"], times["obstore put"]),
        "get_to_obstore": ratio(times["pool get"], times["obstore get"]),
    }


def _client(device: object) -> Any:
    assert isinstance(device, ObjectStoreDevice)
    return device.client.store


def _each(names: list[str], act: Callable[[str], object]) -> Callable[[], float]:
    return lambda: seconds(lambda: [act(name) for name in names])


def _together(
    threads: ThreadPoolExecutor, clients: list[Any], act: Callable[[Any], object]
) -> float:
    return seconds(lambda: list(threads.map(act, clients)))
