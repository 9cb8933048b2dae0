"""Pools whose processes agree through a real etcd: hosts that share nothing else (PROTOCOL 6, 15).

A "host" is a process with a run directory and a temporary directory of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.errors import MembershipError, RegistersForeign, RegistersUnavailable, VersionConflict
from hpstore.pool.pool import Pool
from hpstore.testing.etcd_cluster import EtcdCluster
from hpstore.testing.histories import Observed, is_linearizable
from hpstore.units import MIB
from tests.integration.cli_cases import Cli
from tests.register_servers import certificates_or_skip, etcd_or_skip
from tests.thorough import LONG

_LONG = pytest.mark.skipif(not LONG, reason="with HPSTORE_LONG_TESTS")
KEYS = 2000 if LONG else 200
_FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
RACE = """
import sys, hpstore
from hpstore.errors import VersionConflict
with hpstore.open(sys.argv[1]) as pool:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[3])):
        try:
            pool.put(f"race/{number:04d}", sys.argv[2].encode(), if_absent=True)
            print(number, flush=True)
        except VersionConflict:
            pass
"""
STOPPED = """
import os, signal, sys, threading, hpstore
from hpstore.devices.local import LocalDevice
plain, lock, seen = LocalDevice.rename_into_place, threading.Lock(), [0]
def rename(self, old, new):
    if "/k/" in new:
        with lock:
            seen[0] += 1
            if seen[0] == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGSTOP)
    plain(self, old, new)
with hpstore.open(sys.argv[1]) as pool:
    LocalDevice.rename_into_place = rename
    try:
        pool.put("k", b"a" * int(sys.argv[3]), if_absent=True)
        print("acknowledged", flush=True)
    except hpstore.errors.HpstoreError as error:
        print(type(error).__name__, flush=True)
"""
CHAIN = """
import json, sys, time, hpstore
from hpstore.errors import HpstoreError, VersionConflict
with hpstore.open(sys.argv[1]) as pool:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[3])):
        found = pool.stat("chain").version
        begin = time.monotonic()
        try:
            made, fate = pool.put("chain", sys.argv[2].encode(), if_version=found).version, "done"
        except VersionConflict:
            made, fate = None, "refused"
        print(json.dumps([begin, time.monotonic(), found, made, fate]), flush=True)
"""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    cluster = etcd_or_skip(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def _all_go_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Members that a test has stopped go on after it."""
    yield
    if "etcd" in request.fixturenames:
        cluster: EtcdCluster = request.getfixturevalue("etcd")
        for number in range(len(cluster.ports)):
            cluster.go_on(number)
        cluster.wait()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A pool of 2+1 on four directories."""
    settings = Settings(
        memory_bytes=32 * MIB,
        claim_seconds=0.3,
        registers_deadline_seconds=2.0,
        run_directory=str(tmp_path / "run-main"),
    )
    disks = [str(tmp_path / f"d{number}") for number in range(4)]
    hpstore.create(disks, scheme="2+1", config=tmp_path / "pool.toml", settings=settings).close()
    return tmp_path


def grow(place: Path, url: str) -> Pool:
    """The pool, with its registers there."""
    pool = hpstore.open(place / "pool.toml")
    pool.admin.move_registers(url)
    return pool


def host(place: Path, code: str, *arguments: str, shift: str = "") -> subprocess.Popen[str]:
    """A process with its own settings file, run directory and temporary directory. `shift`: of its
    wall clock, such as "+1h"."""
    own = place / f"host-{len(list(place.iterdir()))}"
    (own / "tmp").mkdir(parents=True)
    text = (place / "pool.toml").read_text(encoding="utf-8")
    text = text.replace(str(place / "run-main"), str(own / "run"))
    (own / "pool.toml").write_text(text, encoding="utf-8")
    (own / "pool.toml").chmod(0o600)
    shifted = (
        {"LD_PRELOAD": str(_FAKETIME), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        if shift
        else {}
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(own / "pool.toml"), *arguments],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(own / "tmp"), **shifted},
    )


def release(hosts: Sequence[subprocess.Popen[str]]) -> None:
    """Let them go at once."""
    for one in hosts:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in hosts:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()


def said(one: subprocess.Popen[str]) -> list[str]:
    """What a host has said until its end."""
    output, _ = one.communicate(timeout=240)
    assert one.returncode == 0
    return output.split("\n")[:-1]


@pytest.mark.parametrize("grows", [pytest.param(False, marks=_LONG), True])
def test_two_hosts_never_both_create_a_key_also_while_the_pool_grows_rule_6(
    place: Path, etcd: EtcdCluster, grows: bool
) -> None:
    """Two run directories over the same disks; of 200 keys 103 were acknowledged twice by locks in
    them (t_hosts). While they put, the registers move from the disks to etcd."""
    if not grows:
        grow(place, etcd.url).close()
    hosts = [host(place, RACE, name, str(KEYS)) for name in ("a", "b")]
    release(hosts)
    with hpstore.open(place / "pool.toml") as pool:
        if grows:
            pool.admin.move_registers(etcd.url)
        won = [{int(line) for line in said(one)} for one in hosts]
        assert not won[0] & won[1]
        assert won[0] | won[1] == set(range(KEYS))
        for number in range(0, KEYS, 7):
            assert pool.get(f"race/{number:04d}") == (b"a" if number in won[0] else b"b")


def test_conditional_puts_of_hosts_are_linearizable_rule_6(place: Path, etcd: EtcdCluster) -> None:
    """Three hosts replace one object by what they have seen; one is stopped for a while amid."""
    pool = grow(place, etcd.url)
    first = pool.put("chain", b"first").version
    turns = 100 if LONG else 12
    hosts = [host(place, CHAIN, name, str(turns)) for name in ("a", "b", "c")]
    release(hosts)
    hosts[0].send_signal(signal.SIGSTOP)
    time.sleep(0.6)  # longer than a claim lasts
    hosts[0].send_signal(signal.SIGCONT)
    history = []
    for one in hosts:
        for line in said(one):
            begin, end, seen, made, fate = json.loads(line)
            if fate == "done":  # a refused one may have been seen, and overtaken
                history.append(Observed(begin=begin, end=end, seen=seen, written=made))
    assert len(history) >= turns
    assert is_linearizable(history, first)
    last = max(history, key=lambda one: one.end).written
    assert pool.stat("chain").version == last
    pool.close()


@pytest.mark.parametrize("shift", ["", "+1h", "-1h"])
@pytest.mark.parametrize(("renames", "size"), [(1, 700_000), (2, 700_000), (2, 1000)])
def test_a_host_that_was_stopped_within_its_put_is_not_acknowledged_beside_another_rule_6(
    place: Path, etcd: EtcdCluster, renames: int, size: int, shift: str
) -> None:
    """Before a chosen rename; its clock is right, ahead or behind. One of the two has put."""
    if shift and not _FAKETIME.exists():
        pytest.skip("needs libfaketime (Debian: apt-get install faketime)")
    if not LONG and (renames, size, shift) != (2, 700_000, "+1h"):
        pytest.skip("with HPSTORE_LONG_TESTS")
    pool = grow(place, etcd.url)
    one = host(place, STOPPED, str(renames), str(size), shift=shift)
    _, status = os.waitpid(one.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    try:
        pool.put("k", b"b" * size, if_absent=True)
        mine = True
    except VersionConflict:
        mine = False
    one.send_signal(signal.SIGCONT)
    theirs = said(one) == ["acknowledged"]
    assert mine != theirs
    assert pool.get("k") == (b"b" if mine else b"a") * size
    pool.close()


@_LONG
def test_two_hosts_that_evict_at_once_make_one_change_each_or_are_refused_rule_14(
    place: Path, etcd: EtcdCluster
) -> None:
    """Of 2+1 on four disks one may go (t_hosts2)."""
    pool = grow(place, etcd.url)
    for number in range(8):
        pool.put(f"k/{number}", bytes([number]) * 300_000)
    code = """
import sys, hpstore
from hpstore.errors import HpstoreError
with hpstore.open(sys.argv[1]) as pool:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        pool.evict(sys.argv[2])
        print("evicted", flush=True)
        pool.rebuild()
    except HpstoreError as error:
        print(type(error).__name__, flush=True)
"""
    hosts = [host(place, code, str(place / f"d{number}")) for number in (0, 1)]
    release(hosts)
    outcomes = [said(one) for one in hosts]
    assert ["evicted"] in outcomes
    pool.admin.refresh()
    evicted = sum("evicted" in outcome for outcome in outcomes)
    assert len(pool.admin.record.evicted) == evicted
    pool.rebuild()
    for number in range(8):
        assert pool.get(f"k/{number}") == bytes([number]) * 300_000
    pool.close()


@_LONG
def test_a_leader_that_is_paused_holds_commits_up_for_an_election(
    place: Path, etcd: EtcdCluster
) -> None:
    """Within 5 s they go on, at the first try of a user."""
    pool = grow(place, etcd.url)
    pool.put("before", b"x", if_absent=True)
    etcd.stop(etcd.leader())
    began = time.monotonic()
    while True:
        try:
            pool.put("after", b"x", if_absent=True)
            break
        except (RegistersUnavailable, VersionConflict):
            assert time.monotonic() - began < 5.0
    assert time.monotonic() - began < 5.0
    pool.close()


def test_without_a_majority_of_etcd_conditional_puts_are_refused_in_time_and_all_else_goes_on(
    place: Path, etcd: EtcdCluster
) -> None:
    """Two of three members are stopped: their connections stay, and nothing is answered."""
    pool = grow(place, etcd.url)
    pool.put("k", b"x", if_absent=True)
    for number in (0, 1):
        etcd.stop(number)
    began = time.monotonic()
    with pytest.raises(RegistersUnavailable, match="Nothing was changed"):
        pool.put("new", b"x", if_absent=True)
    assert time.monotonic() - began < 4.0  # the setting is 2 s
    began = time.monotonic()
    pool.put("plain", b"x")
    assert pool.get("k") == b"x"
    pool.delete("plain")
    assert list(pool.list()) == ["k"]
    assert time.monotonic() - began < 2.0
    with pytest.raises(MembershipError, match="does not answer"):
        pool.evict(str(place / "d0"))
    for number in (0, 1):
        etcd.go_on(number)
    etcd.wait()
    pool.put("new", b"x", if_absent=True)
    pool.close()


def test_etcd_that_lost_its_data_is_noticed_and_reset_by_command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One member of its own; its data is gone, and it answers as a new cluster."""
    (tmp_path / "etcd").mkdir()
    cluster = etcd_or_skip(tmp_path / "etcd", 1)
    cli = Cli(place, capsys)
    try:
        assert "moved to etcd://" in cli.run("registers", "set", cli.pool, cluster.url)
        with hpstore.open(cli.pool) as pool:
            pool.put("k", b"x", if_absent=True)
            reset = ("registers", "reset", cli.pool, "--yes")
            assert "Nothing was changed" in cli.run(*reset, code=MembershipError.exit_code)
            cluster.lose_data()
            with pytest.raises(RegistersForeign, match="registers reset"):
                pool.put("k2", b"x", if_absent=True)
            assert pool.get("k") == b"x"
            assert "do not answer" in cli.run("registers", "show", cli.pool)
            found = json.loads(cli.run(*reset, "--json"))
            assert (found["url"], found["answers"]) == (cluster.url, True)
            pool.put("k2", b"x", if_absent=True)
            with pytest.raises(VersionConflict):
                pool.put("k", b"x", if_absent=True)
    finally:
        cluster.close()


def test_etcd_over_tls_takes_clients_with_a_certificate_alone(tmp_path: Path, place: Path) -> None:
    """Files by reference, in pool.toml; without them nothing is stored and the reason is said."""
    (tmp_path / "tls").mkdir()
    (tmp_path / "etcd").mkdir()
    files = certificates_or_skip(tmp_path / "tls")
    cluster = etcd_or_skip(tmp_path / "etcd", 1, files)
    try:
        with hpstore.open(place / "pool.toml") as pool:
            generation = pool.admin.record.generation
            with pytest.raises(RegistersUnavailable, match=r"(?i)certificate|ssl"):
                pool.admin.move_registers(cluster.url)
            assert pool.admin.record.generation == generation
        with (place / "pool.toml").open("a", encoding="utf-8") as out:
            out.write(f'registers_ca_file = "{files}/ca.crt"\n')
            out.write(f'registers_certificate_file = "{files}/client.crt"\n')
            out.write(f'registers_key_file = "{files}/client.key"\n')
        with grow(place, cluster.url) as pool:
            pool.put("k", b"x", if_absent=True)
            with pytest.raises(VersionConflict):
                pool.put("k", b"x", if_absent=True)
        (files / "client.key").unlink()
        with hpstore.open(place / "pool.toml") as pool:
            assert pool.get("k") == b"x"
            pool.put("plain", b"x")
            with pytest.raises(RegistersForeign, match="registers_certificate_file"):
                pool.put("k2", b"x", if_absent=True)
    finally:
        cluster.close()
