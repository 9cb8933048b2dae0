"""A host's service beside raw TCP, over the loopback: gets and puts of 8 MiB, and small calls; then
pools over hosts (host_pool_bench.py).

Raw TCP sends a file with sendfile and receives into memory: what no server can do with less. The
service reads and writes files of the given directory; put it into memory to see the path alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np

from hpstore.benchmarks.harness.measure import Options, interleave, rates, ratio
from hpstore.benchmarks.host_pool_bench import bench_host_pools
from hpstore.config import Settings
from hpstore.devices.host_device import HostDevice
from hpstore.devices.local import LocalDevice
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.running_service import run_until_ended, serving
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE
from hpstore.units import MIB

_REQUEST_BYTES = 8 * MIB
_SMALL_CALLS = 500
_GET, _PUT = b"g", b"p"
_PATH = "objects/bench/@file"
BAR = 0.8


def serve_disk(answer: Connection, directory: str) -> None:
    """A process: the service of one disk."""
    settings = Settings(tls="plain")
    with serving("127.0.0.1", 0, [directory], settings, HostLimits()) as service:
        run_until_ended(lambda: answer.send(service.address[1]))


def serve_raw(answer: Connection, file: str) -> None:
    """A process: sends a file for each 'g', takes as many bytes after each 'p'."""
    listener = socket.create_server(("127.0.0.1", 0))
    answer.send(listener.getsockname()[1])
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = aligned_array(_REQUEST_BYTES, populate=True).data
    source = os.open(file, os.O_RDONLY)
    while word := sock.recv(1):
        if word == _GET:
            sent = 0
            while sent < _REQUEST_BYTES:
                sent += os.sendfile(sock.fileno(), source, sent, _REQUEST_BYTES - sent)
        else:
            _fill(sock, memory)
            sock.sendall(word)


def _fill(sock: socket.socket, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = sock.recv_into(memory[done:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("the raw server ended")
        done += count


@contextlib.contextmanager
def _process(
    run: Callable[[Connection, str], None], argument: str
) -> Iterator[tuple[SpawnProcess, int]]:
    """A server of its own, and its port."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    started = processes.Process(target=run, args=(theirs, argument), daemon=True)
    started.start()
    theirs.close()
    try:
        yield started, int(ours.recv())
    finally:
        started.kill()
        started.join()


def _cpu_seconds(pid: int | None) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bench_hosts(options: Options) -> dict[str, object]:
    """`hpstore bench hosts`."""
    with contextlib.ExitStack() as stack:
        base = Path(options.directory or stack.enter_context(tempfile.TemporaryDirectory()))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        (place / "disk").mkdir()
        local = LocalDevice(str(place / "disk"))
        local.prepare()
        stack.callback(local.close)
        (place / "raw").write_bytes(np.random.default_rng(0).bytes(_REQUEST_BYTES))
        service, port = stack.enter_context(_process(serve_disk, str(place / "disk")))
        raw, raw_port = stack.enter_context(_process(serve_raw, str(place / "raw")))
        device = HostDevice(f"hpd://127.0.0.1:{port}/0", seconds=60.0)
        stack.callback(device.close)
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", raw_port)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        count = max(1, options.size_bytes // _REQUEST_BYTES)
        pids = {"hpstore": service.pid, "raw": raw.pid}
        found: dict[str, object] = {"request_bytes": _REQUEST_BYTES, "requests": count}
        for name, contenders in _paths(device, sock, count).items():
            found[name] = _measured(contenders, pids, count, options.repeats)
        found["call_us"] = _small_calls(device, local, options.repeats)
        options.keep(found)
    with contextlib.ExitStack() as stack:
        base = Path(options.directory or stack.enter_context(tempfile.TemporaryDirectory()))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=base)))
        bench_host_pools(place, options, found)
    return found


def _paths(
    device: HostDevice, sock: socket.socket, count: int
) -> dict[str, dict[str, Callable[[], None]]]:
    memory = aligned_array(_REQUEST_BYTES, populate=True)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    target = aligned_array(_REQUEST_BYTES, populate=True)
    writer = device.create(_REQUEST_BYTES)
    writer.write(0, [memory])
    writer.sync()
    writer.publish(_PATH)
    reader = device.open(_PATH)
    sink = device.create(_REQUEST_BYTES)

    def get() -> None:
        for _ in range(count):
            reader.read_into(0, target)

    def put() -> None:
        for _ in range(count):
            sink.write(0, [memory])

    def raw_get() -> None:
        for _ in range(count):
            sock.sendall(_GET)
            _fill(sock, target.data)

    def raw_put() -> None:
        for _ in range(count):
            sock.sendall(_PUT)
            sock.sendall(memory.data)
            sock.recv(1)

    return {
        "get": {"hpstore": get, "raw": raw_get},
        "put": {"hpstore": put, "raw": raw_put},
    }


def _measured(
    contenders: dict[str, Callable[[], None]],
    pids: dict[str, int | None],
    count: int,
    repeats: int,
) -> dict[str, object]:
    """Rates, the ratio, and processor seconds per GB of both sides together."""
    spent = dict.fromkeys(contenders, 0.0)

    def timed(name: str) -> float:
        before, began = _cpu_seconds(pids[name]) + time.process_time(), time.perf_counter()
        contenders[name]()
        taken = time.perf_counter() - began
        spent[name] += _cpu_seconds(pids[name]) + time.process_time() - before
        return taken

    def run(name: str) -> Callable[[], float]:
        return lambda: timed(name)

    times = interleave({name: run(name) for name in contenders}, repeats)
    nbytes = count * _REQUEST_BYTES
    gigabytes = (repeats + 1) * nbytes / 1e9  # with the unmeasured round
    beside = ratio(times["hpstore"], times["raw"])
    return {
        "rates": rates(times, dict.fromkeys(times, nbytes)),
        "ratio_to_raw": beside,
        "bar": BAR,
        "met": beside["median"] >= BAR,
        "cpu_seconds_per_gb": {name: round(spent[name] / gigabytes, 2) for name in spent},
    }


def _small_calls(device: HostDevice, local: LocalDevice, repeats: int) -> dict[str, object]:
    """Microseconds of one call, here and over the loopback."""

    def stamps(of: HostDevice | LocalDevice) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            for _ in range(_SMALL_CALLS):
                of.stamp(_PATH)
            return time.perf_counter() - began

        return run

    def pages(of: HostDevice | LocalDevice) -> Callable[[], float]:
        target = aligned_array(PAGE)

        def run() -> float:
            began = time.perf_counter()
            for _ in range(_SMALL_CALLS):
                handle = of.open(_PATH)
                handle.read_into(0, target)
                handle.close()
            return time.perf_counter() - began

        return run

    times = interleave(
        {
            "stamp": stamps(device),
            "stamp_local": stamps(local),
            "open_read_close": pages(device),
            "open_read_close_local": pages(local),
        },
        repeats,
    )
    return {
        name: round(1e6 * sorted(values)[len(values) // 2] / _SMALL_CALLS, 1)
        for name, values in times.items()
    }
