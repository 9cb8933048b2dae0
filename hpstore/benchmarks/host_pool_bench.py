"""A pool over hosts beside the same pool on local directories; and with one of the hosts gone.

4+2 over three hosts of two disks each, whose services are processes of this machine: client and
services share its processors and its disk.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

import hpstore
from hpstore.agreement.claims import Claims
from hpstore.benchmarks.harness.measure import Options, interleave, rates, ratio, seconds
from hpstore.benchmarks.host_processes import BenchHost, bench_hosts_of, bench_network
from hpstore.config import Settings
from hpstore.units import KIB, MIB

_SMALL_BYTES, _SMALL_COUNT = 4 * KIB, 40
_MOST_OBJECT_BYTES = 64 * MIB
_CLAIMS = 100
_DEADLINE_SECONDS = 10.0
PUT_BAR, GET_BAR, SMALL_BAR = 0.6, 0.65, 2.0
KILLED_BAR, PAUSED_FIRST_BAR_SECONDS, PAUSED_BAR = 0.7, 0.5, 2.0
CLAIM_BAR_MS, OPEN_BAR_SECONDS = 10.0, 1.0
Row = dict[str, object]


def bench_host_pools(place: Path, options: Options, found: Row) -> None:
    """Add the rows of `hpstore bench hosts` that are about pools to what was `found`."""
    size = min(max(options.size_bytes, 4 * MIB), _MOST_OBJECT_BYTES)
    data = np.random.default_rng(2).bytes(size)
    with (
        bench_network(3) as network,
        bench_hosts_of(network, place, 3, 2) as hosts,
        _pool(place, "remote", [url for host in hosts for url in host.urls], "abc") as pool,
        _pool(place, "local", [str(place / f"local{n}") for n in range(6)], "abc") as local,
    ):
        found["network"] = network.kind
        found["pool"] = _beside_local(pool, local, data, options.repeats)
        options.keep(found)
        found["one_of_three"] = _without_one(pool, hosts[2], data, options.repeats)
        found["claim"] = _claims(pool, hosts[0])
    options.keep(found)
    found["open"] = _open_many(place, options.repeats)


@contextlib.contextmanager
def _pool(
    place: Path, name: str, urls: list[str], hosts: str, deadline_seconds: float = _DEADLINE_SECONDS
) -> Iterator[hpstore.Pool]:
    settings = Settings(
        tls="plain",
        run_directory=str(place / f"{name}-run"),
        device_deadline_seconds=deadline_seconds,
    )
    share = len(urls) // len(hosts)
    with hpstore.create(
        urls,
        data=4,
        parity=2,
        config=place / f"{name}.toml",
        domains=[host for host in hosts for _ in range(share)],
        settings=settings,
        allow_root_disk=True,
    ) as pool:
        yield pool


def _beside_local(pool: hpstore.Pool, local: hpstore.Pool, data: bytes, repeats: int) -> Row:
    target = bytearray(len(data))
    small = data[:_SMALL_BYTES]

    def put(of: hpstore.Pool) -> Callable[[], float]:
        return lambda: seconds(lambda: of.put("object", data))

    def get(of: hpstore.Pool) -> Callable[[], float]:
        return lambda: seconds(lambda: of.read_into("object", target))

    def small_put(of: hpstore.Pool) -> Callable[[], float]:
        return lambda: seconds(lambda: [of.put(f"small{n}", small) for n in range(_SMALL_COUNT)])

    def small_get(of: hpstore.Pool) -> Callable[[], float]:
        return lambda: seconds(lambda: [of.get(f"small{n}") for n in range(_SMALL_COUNT)])

    found: Row = {"object_bytes": len(data), "small_bytes": _SMALL_BYTES}
    for name, act, bar in (("put", put, PUT_BAR), ("get", get, GET_BAR)):
        times = interleave({"hosts": act(pool), "local": act(local)}, repeats)
        beside = ratio(times["hosts"], times["local"])
        found[name] = {
            "rates": rates(times, dict.fromkeys(times, len(data))),
            "ratio_to_local": beside,
            "bar": bar,
            "met": beside["median"] >= bar,
        }
    if bytes(target) != data:
        raise AssertionError("the pool returned other bytes")
    for name, act in (("small_put", small_put), ("small_get", small_get)):
        times = interleave({"hosts": act(pool), "local": act(local)}, repeats)
        longer = 1 / ratio(times["hosts"], times["local"])["median"]
        found[name] = {
            "ms": {who: _ms(values, _SMALL_COUNT) for who, values in times.items()},
            "times_local": round(longer, 2),
            "bar": SMALL_BAR,
            "met": longer <= SMALL_BAR,
        }
    return found


def _ms(values: list[float], count: int) -> float:
    return round(1000 * statistics.median(values) / count, 2)


def _without_one(pool: hpstore.Pool, host: BenchHost, data: bytes, repeats: int) -> Row:
    """Reads and puts while a host is paused, and while it is killed, beside those when it is well.

    Of a paused one the first read and the first put are reported by themselves.
    """
    target = bytearray(len(data))

    def get() -> float:
        return seconds(lambda: pool.read_into("object", target))

    def put() -> float:
        return seconds(lambda: pool.put("other", data))

    well = {"get": _median(get, repeats), "put": _median(put, repeats)}
    found: Row = {"well_seconds": {name: round(value, 3) for name, value in well.items()}}
    host.send(signal.SIGSTOP)
    first = {"get": get(), "put": put()}
    later = {"get": _median(get, repeats), "put": _median(put, repeats)}
    host.send(signal.SIGCONT)
    found["paused"] = {
        "first_get_seconds": round(first["get"], 3),
        "first_get_bar": PAUSED_FIRST_BAR_SECONDS,
        "first_get_met": first["get"] < PAUSED_FIRST_BAR_SECONDS,
        "first_put_seconds": round(first["put"], 3),
        "first_put_met": first["put"] < _DEADLINE_SECONDS + well["put"],
        "later_get_times_well": round(later["get"] / well["get"], 2),
        "later_get_bar": PAUSED_BAR,
        "later_get_met": later["get"] < PAUSED_BAR * well["get"],
        "later_put_times_well": round(later["put"] / well["put"], 2),
    }
    pool.rebuild()
    host.kill()
    get()
    put()
    killed = {"get": _median(get, repeats), "put": _median(put, repeats)}
    host.start()
    pool.rebuild()
    rate = well["get"] / killed["get"]
    found["killed"] = {
        "get_to_well": round(rate, 2),
        "bar": KILLED_BAR,
        "met": rate >= KILLED_BAR,
        "put_to_well": round(well["put"] / killed["put"], 2),
    }
    if bytes(target) != data:
        raise AssertionError("the pool returned other bytes")
    return found


def _median(run: Callable[[], float], repeats: int) -> float:
    return statistics.median(run() for _ in range(repeats))


def _claims(pool: hpstore.Pool, host: BenchHost) -> Row:
    """A claim taken and given back, with the registers on the devices and at a host."""
    found: Row = {}
    for name, url in (("devices", ""), ("host", f"host://{host.address}:{host.port}")):
        if url:
            pool.admin.move_registers(url)
        times = sorted(
            seconds(partial(_claim, pool._session.claims, f"claim{n}")) for n in range(_CLAIMS)
        )
        p50, p99 = 1000 * times[len(times) // 2], 1000 * times[-2]
        found[name] = {
            "p50_ms": round(p50, 2),
            "p99_ms": round(p99, 2),
            "bar": CLAIM_BAR_MS,
            "met": p50 <= CLAIM_BAR_MS,
        }
    return found


def _claim(claims: Claims, key: str) -> None:
    claims.take(key).give_back()


def _open_many(place: Path, repeats: int) -> Row:
    """A pool over 64 disks of eight hosts, one of which is dead."""
    with (
        bench_network(8) as network,
        contextlib.ExitStack() as stack,
    ):
        (place / "many").mkdir()
        hosts = stack.enter_context(bench_hosts_of(network, place / "many", 8, 8))
        urls = [url for host in hosts for url in host.urls]
        with _pool(place, "many", urls, "abcdefgh"):
            pass
        hosts[3].kill()

        def open_it() -> None:
            hpstore.open(place / "many.toml").close()

        open_it()
        taken = _median(lambda: seconds(open_it), repeats)
    return {
        "devices": 64,
        "hosts": 8,
        "dead": 1,
        "seconds": round(taken, 3),
        "bar": OPEN_BAR_SECONDS,
        "met": taken < OPEN_BAR_SECONDS,
    }
