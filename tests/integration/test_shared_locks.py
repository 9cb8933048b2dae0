"""Processes that share nothing but the devices exclude each other (r05; PROTOCOL 6, 14-16).

Each has a temporary directory of its own, as jobs, containers and units with PrivateTmp have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

import hpstore
from hpstore.agreement.registers import REPAIR
from hpstore.config import Settings
from hpstore.errors import LockTimeout, VersionConflict
from hpstore.units import MIB

KEYS = 60
RACE = """
import sys, hpstore
from hpstore.errors import VersionConflict
with hpstore.open("pool.toml") as pool:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(sys.argv[2])):
        try:
            pool.put(f"race/{number:03d}", sys.argv[1].encode(), if_absent=True)
            print(number, flush=True)
        except VersionConflict:
            pass
"""
EVICT = """
import sys, hpstore
from hpstore.errors import HpstoreError
with hpstore.open("pool.toml") as pool:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        pool.evict(sys.argv[1])
        print("evicted", flush=True)
    except HpstoreError as error:
        print(type(error).__name__, error, flush=True)
"""
STOPPED = """
import os, signal, sys, threading, hpstore
from hpstore.devices.local import LocalDevice
plain, lock, seen = LocalDevice.rename_into_place, threading.Lock(), [0]
def rename(self, old, new):
    if "/k/" in new:
        with lock:
            seen[0] += 1
            if seen[0] == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGSTOP)
    plain(self, old, new)
with hpstore.open("pool.toml") as pool:
    LocalDevice.rename_into_place = rename
    try:
        pool.put("k", b"a" * 700_000, if_absent=True)
        print("acknowledged", flush=True)
    except hpstore.errors.HpstoreError as error:
        print(type(error).__name__, flush=True)
"""
HOLD = """
import sys, hpstore
with hpstore.open("pool.toml") as pool, pool.admin.registers.hold("repair", "a long rebuild"):
    print("held", flush=True)
    sys.stdin.readline()
"""
FORK = """
import os, signal, sys, hpstore
with hpstore.open("pool.toml") as pool, pool.admin.registers.hold("repair", "a long rebuild"):
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a new pool of 2+1 on four directories; no run directory is set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    settings = Settings(memory_bytes=32 * MIB, claim_seconds=0.3)
    hpstore.create(
        [f"d{i}" for i in range(4)], data=2, parity=1, config="pool.toml", settings=settings
    ).close()
    return tmp_path


def child(place: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process with a temporary directory of its own."""
    own = place / f"tmp-{len(list(place.iterdir()))}"
    own.mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(own)},
    )


def together(children: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Let them go at once; what each has said."""
    for one in children:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in children:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    return [one.communicate()[0] for one in children]


def test_of_two_processes_one_wins_every_key_r05(place: Path) -> None:
    """60 keys, `if_absent`: each is acknowledged to one of two jobs."""
    a, b = together([child(place, RACE, name, str(KEYS)) for name in "AB"])
    won = {"A": set(map(int, a.split())), "B": set(map(int, b.split()))}
    assert won["A"].isdisjoint(won["B"])
    assert won["A"] | won["B"] == set(range(KEYS))
    with hpstore.open("pool.toml") as pool:
        for name, numbers in won.items():
            assert all(pool.get(f"race/{n:03d}") == name.encode() for n in numbers)


def test_of_two_evictions_at_once_one_is_refused_where_both_would_lose_an_object_r05(
    place: Path,
) -> None:
    """2+1 with columns on three of the four: the second eviction would leave one."""
    with hpstore.open("pool.toml") as pool:
        pool.put("k", bytes(700_000))
    holding = [f"d{i}" for i in range(4) if list((place / f"d{i}/objects").rglob("@*"))]
    said = together([child(place, EVICT, url) for url in holding[:2]])
    assert sorted(text.split()[0] for text in said) == ["MembershipError", "evicted"]
    with hpstore.open("pool.toml") as pool:
        assert pool.get("k") == bytes(700_000)
        assert len(pool.admin.record.members) == 3


@pytest.mark.parametrize("rename", [1, 2, 3])
def test_a_process_that_was_stopped_before_a_rename_is_not_acknowledged_beside_its_successor_r05(
    place: Path, rename: int
) -> None:
    """SIGSTOP in the midst of a conditional put; this process takes its claim over."""
    one = child(place, STOPPED, str(rename))
    os.waitid(os.P_PID, one.pid, os.WSTOPPED | os.WNOWAIT)
    with hpstore.open("pool.toml") as pool:
        try:
            pool.put("k", b"b" * 700_000, if_absent=True)
            mine = True
        except VersionConflict:
            mine = False
        one.send_signal(signal.SIGCONT)
        theirs = one.communicate()[0].strip()
        assert (mine, theirs) in ((True, "VersionConflict"), (False, "acknowledged"))
        assert pool.get("k")[:1] == (b"b" if mine else b"a")


def test_what_a_killed_process_held_is_free_and_meanwhile_it_is_named_rule_15(place: Path) -> None:
    """Another job cannot rebuild beside it, and reads who does; after SIGKILL it can."""
    one = child(place, HOLD)
    assert one.stdout is not None
    assert one.stdout.readline() == "held\n"
    with hpstore.open("pool.toml") as pool:
        named = rf"process {one.pid} on .*\(a long rebuild\)"
        with (
            pytest.raises(LockTimeout, match=named),
            pool.admin.registers.hold(REPAIR, "rebuild", deadline_seconds=0.1),
        ):
            pass
        one.kill()
        one.communicate()
        pool.rebuild()


def test_a_forked_child_does_not_keep_what_its_parent_held_rule_22(place: Path) -> None:
    """The parent's lock ends with its hold, and with its death, though a child lives on."""
    one = child(place, FORK)
    assert one.stdout is not None
    orphan = int(one.stdout.readline())
    try:
        one.kill()
        one.wait()
        with hpstore.open("pool.toml") as pool:
            pool.rebuild()
    finally:
        os.kill(orphan, signal.SIGKILL)
        one.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_two_users_of_a_shared_pool_exclude_each_other(tmp_path: Path) -> None:
    """Writable for both by its settings: they lock the same files."""
    import pwd

    user = pwd.getpwnam("nobody")
    place = Path("/tmp") / f"hpstore-shared-{os.getpid()}-{time.monotonic_ns()}"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    settings = Settings(memory_bytes=32 * MIB, file_mode=0o666, directory_mode=0o777)
    before = os.umask(0)
    try:
        pool = hpstore.create(
            [place / f"d{i}" for i in range(3)],
            data=2,
            parity=1,
            config=place / "pool.toml",
            settings=settings,
        )
        pool.put("k", b"x", if_absent=True)
        (place / "pool.toml").chmod(0o666)
        pid = os.fork()
        if not pid:  # the other user
            code = 1
            try:
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
                os.umask(0)
                with hpstore.open(place / "pool.toml") as theirs:
                    try:
                        theirs.put("k", b"y", if_absent=True)
                    except VersionConflict:
                        theirs.put("other", b"y", if_absent=True)
                        code = 0
            except BaseException:  # noqa: BLE001 (shown; the exit code says the rest)
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        pool.close()
    finally:
        os.umask(before)
        subprocess.run(["rm", "-rf", str(place)], check=True)
