"""What works while hosts, wires and etcd fail, and that nothing acknowledged is lost by it.

The table of docs/hosts.md: each fault x put, conditional put, get, save, restore, rebuild, an epoch
of the loader. Hosts are network namespaces (root); `python -m pytest -s` prints the seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

pytest.importorskip("httptools", reason="needs the extra hosts")

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.errors import HpstoreError, RegistersUnavailable, TooFewDevices, TooManyErasures
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.pool.pool import Pool
from hpstore.testing.host_cluster import PORT, HostCluster
from hpstore.units import MIB
from tests.fault.common import payload, within
from tests.hosts.clusters import cluster_or_skip, short
from tests.thorough import LONG

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]
LIMIT = 240.0  # seconds; what hangs is found, what is slow is not judged
SAMPLES = 64
Errors = tuple[type[HpstoreError], ...]


@dataclass
class Work:
    """A pool over three hosts, what was acknowledged in it, and what each operation does."""

    cluster: HostCluster
    pool: Pool
    acknowledged: dict[str, bytes] = field(default_factory=dict)
    saved: int = 0

    def put(self) -> None:
        """A large object and a small one, new and over older ones."""
        for size in (3 * MIB + 1, 700):
            for key in (f"old/{size}", f"new/{size}/{len(self.acknowledged)}"):
                self.store(key, payload(f"{key}{time.monotonic_ns()}", size))

    def store(self, key: str, data: bytes, **condition: object) -> None:
        """Put, and note what is acknowledged. One that fails may be visible from then on."""
        before = self.acknowledged.pop(key, None)
        try:
            self.pool.put(key, data, **condition)  # type: ignore[arg-type]  # of conditional_put
        except HpstoreError as error:
            if before is not None and not error.maybe_visible:
                self.acknowledged[key] = before
            raise
        self.acknowledged[key] = data

    def conditional_put(self) -> None:
        """A new key, and the next version of one."""
        self.store(f"once/{len(self.acknowledged)}", b"x", if_absent=True)
        self.store("cas", b"cas", if_version=self.pool.stat("cas").version)

    def get(self) -> None:
        """All that was acknowledged, byte for byte."""
        for key, data in self.acknowledged.items():
            assert bytes(self.pool.get(key)) == data, key

    def save(self) -> None:
        """The next step of a checkpoint."""
        with Checkpointer(self.pool, "run", rng=False) as checkpointer:
            checkpointer.save(self.saved + 1, state_of(self.saved + 1)).result()
        self.saved += 1

    def restore(self) -> None:
        """The step that was saved last."""
        state = state_of(-1)
        with Checkpointer(self.pool, "run", rng=False) as checkpointer:
            assert checkpointer.restore(state) == self.saved
        assert torch.equal(state["w"], state_of(self.saved)["w"])

    def epoch(self) -> None:
        """Every sample once."""
        loader = DataLoader(Dataset(self.pool, "set"), batch_size=16, shuffle=True, cache="0")
        try:
            found = np.concatenate([np.asarray(batch["x"]) for batch in loader])
        finally:
            loader.close()
        assert sorted(found[:, 0].tolist()) == list(range(SAMPLES))
        assert (found == found[:, :1]).all()

    def forget(self) -> None:
        """Delete what this fault has added: beside a host that hangs a rebuild waits a deadline an
        object."""
        for key in [key for key in self.acknowledged if key.startswith(("new/", "once/"))]:
            self.pool.delete(key)
            del self.acknowledged[key]

    def rebuild(self) -> None:
        """All that can be made up for; nothing that was acknowledged is unreadable."""
        found = self.pool.rebuild()
        if found.unreadable or not found.objects:
            raise TooManyErasures(f"rebuild is not whole: {found}")

    def open(self) -> None:
        """The pool, by another process' ways."""
        with hpstore.open(self.cluster.settings_file()) as pool:
            for key, data in list(self.acknowledged.items())[:2]:
                assert bytes(pool.get(key)) == data


OPERATIONS = ("get", "put", "conditional_put", "save", "restore", "epoch", "rebuild", "open")


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Values that tell the step that they belong to."""
    return {"w": torch.full((200_000,), float(step))}


@dataclass(frozen=True)
class HostFault:
    """How it begins and ends; which operations are refused, by what, while it lasts."""

    name: str
    begin: Callable[[HostCluster], object]
    end: Callable[[HostCluster], object]
    refused: dict[str, Errors] = field(default_factory=dict)
    always: bool = False  # also where tests are short

    def __str__(self) -> str:
        return self.name


def kill(*names: str) -> Callable[[HostCluster], None]:
    def act(cluster: HostCluster) -> None:
        for name in names:
            cluster.kill(name)

    return act


def start(*names: str) -> Callable[[HostCluster], None]:
    def act(cluster: HostCluster) -> None:
        for name in names:
            cluster.start(name)

    return act


def heal(cluster: HostCluster) -> None:
    cluster.network.heal()


def from_all(cluster: HostCluster) -> None:
    for name in cluster.hosts:
        cluster.network.cut("outside", name)


def restart_with_clock(seconds: int) -> Callable[[HostCluster], None]:
    def restart(cluster: HostCluster) -> None:
        cluster.kill("b")
        cluster.skew("b", seconds)
        cluster.start("b")

    return restart


def without_etcd(*numbers: int) -> Callable[[HostCluster], None]:
    def stop(cluster: HostCluster) -> None:
        assert cluster.etcd is not None
        for number in numbers:
            cluster.etcd.stop(number)

    return stop


def with_etcd(cluster: HostCluster) -> None:
    assert cluster.etcd is not None
    for number in range(3):
        cluster.etcd.go_on(number)
    cluster.etcd.wait()


UNAVAILABLE: dict[str, Errors] = {
    "conditional_put": (RegistersUnavailable,),
    "save": (RegistersUnavailable,),
}
TOO_FEW: dict[str, Errors] = {
    "get": (TooManyErasures,),
    "put": (TooFewDevices, TooManyErasures),
    "conditional_put": (RegistersUnavailable, TooFewDevices, TooManyErasures),
    "save": (HpstoreError,),
    "restore": (HpstoreError,),
    "epoch": (HpstoreError,),
    "rebuild": (HpstoreError,),
    "open": (TooFewDevices, HpstoreError),
}
FAULTS = [
    HostFault("killed", kill("b"), start("b"), always=True),
    HostFault("stopped", lambda c: c.stop("b"), lambda c: c.go_on("b"), always=True),
    HostFault("cut off", lambda c: c.network.cut("b"), heal),
    HostFault("cut from here", lambda c: c.network.cut("b", "outside"), heal),
    HostFault("does not hear", lambda c: c.network.cut("outside", "b", one_way=True), heal),
    HostFault("is not heard", lambda c: c.network.cut("b", "outside", one_way=True), heal),
    HostFault("port cut", lambda c: c.network.cut("outside", "b", one_way=True, port=PORT), heal),
    HostFault("service killed", lambda c: c.kill_service("b"), start("b")),
    HostFault("clock 1 h behind", restart_with_clock(-3600), restart_with_clock(0)),
    HostFault("clock 1 h ahead", restart_with_clock(3600), restart_with_clock(0)),
    HostFault("etcd member stopped", without_etcd(0), with_etcd),
    HostFault("etcd majority stopped", without_etcd(0, 1), with_etcd, UNAVAILABLE, always=True),
    HostFault("two hosts killed", kill("b", "c"), start("b", "c"), TOO_FEW),
    HostFault(
        "client cut off",
        from_all,
        heal,
        TOO_FEW,
    ),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    """A cluster with etcd, a pool of 4+2 over its six disks, with something of everything."""
    with cluster_or_skip(tmp_path_factory.mktemp("hosts"), etcd=True, clocks=True) as cluster:
        cluster.up()
        with cluster.create(data=4, parity=2, settings=short()) as pool:
            fields = {"x": Field("float32", (256,))}
            with DatasetWriter(pool, "set", fields) as writer:
                rows = np.arange(SAMPLES, dtype=np.float32)[:, None]
                writer.write_batch({"x": np.broadcast_to(rows, (SAMPLES, 256)).copy()})
            made = Work(cluster, pool)
            made.store("cas", b"first")
            made.put()
            made.save()
            yield made


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_goes_on_goes_on_and_nothing_is_lost(work: Work, fault: HostFault) -> None:
    """Each operation ends well or by its error; afterwards a rebuild makes everything whole, and
    with another host gone all that was acknowledged reads back."""
    if not LONG and not fault.always:
        pytest.skip("with HPSTORE_LONG_TESTS")
    taken = []
    fault.begin(work.cluster)
    try:
        for name in OPERATIONS if LONG else OPERATIONS[:-2]:
            began = time.monotonic()
            expected = fault.refused.get(name)
            if expected is None:
                within(LIMIT, getattr(work, name))
            else:
                with pytest.raises(expected):
                    within(LIMIT, getattr(work, name))
            taken.append(f"{name} {time.monotonic() - began:.2f}")
    finally:
        fault.end(work.cluster)
    print(f"\n{fault}: {', '.join(taken)} s")
    work.rebuild()
    for name in ("put", "conditional_put", "save", "get", "restore", "epoch"):
        within(LIMIT, getattr(work, name))
    work.rebuild()
    assert work.pool.status().losses_tolerated == 2
    if LONG:
        work.cluster.kill("c")
        work.get()
        work.restore()
        work.cluster.start("c")
        work.rebuild()
    work.forget()


@pytest.mark.parametrize("host", ["b", "c"])
def test_a_host_that_dies_within_a_put_takes_nothing_acknowledged_along(
    work: Work, host: str
) -> None:
    """In mid-stripe, with all that runs on it; then it is back and another one is gone."""
    if not LONG and host != "b":
        pytest.skip("with HPSTORE_LONG_TESTS")
    data, seen = payload("dies", 24 * MIB), [0]

    def die(nbytes: int) -> None:
        before, seen[0] = seen[0], seen[0] + nbytes
        if before < len(data) // 2 <= seen[0]:
            work.cluster.kill(host)

    work.pool.put("dies", data, progress=die)
    assert bytes(work.pool.get("dies")) == data
    work.cluster.start(host)
    work.rebuild()
    work.cluster.kill("a")
    assert bytes(work.pool.get("dies")) == data
    work.get()
    work.cluster.start("a")
    work.rebuild()
    work.pool.delete("dies")
