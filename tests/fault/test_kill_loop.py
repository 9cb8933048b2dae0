"""Processes that are killed in the middle of puts, hundreds of times.

The child tells over a pipe what it begins and what was acknowledged. After each kill every key
must hold what was acknowledged last, or the whole of what was under way. The children are forked
from this process, which has everything imported, so that a kill costs a fraction of a second.
"""

from __future__ import annotations

import glob
import hashlib
import os
import random
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from hpstore.errors import ObjectNotFound
from hpstore.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, value

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]
KILLS = 200 if os.environ.get("HPSTORE_LONG_TESTS") else 60  # all of them: make test-fault
SEED = 20261117
SIZES = (1 * KIB, 200 * KIB, 3 * MIB)
SLOTS = 6  # keys that are overwritten and deleted; all others are put once
PATIENCE = 30.0
ABSENT = "absent"


def data_of(tag: str, size: int) -> bytes:
    """Bytes that no other operation puts."""
    return tag.encode().ljust(64) + random.Random(tag).randbytes(size)


def digest(data: bytes | None) -> str:
    """What is compared and sent through the pipe."""
    return ABSENT if data is None else hashlib.blake2b(data, digest_size=12).hexdigest()


def work(pool: Pool, pipe: int, life: int) -> None:
    """Put, overwrite and delete until killed. Lines: `begin key digest`, `done key digest`."""
    rng = random.Random(SEED * 1000 + life)

    def say(word: str, key: str, what: str) -> None:
        os.write(pipe, f"{word} {key} {what}\n".encode())

    for turn in range(10_000):
        size = rng.choice(SIZES)
        tag = f"{life}.{turn}"
        kind = rng.random()
        key = f"once/{life}/{turn}" if kind < 0.3 else f"slot/{size}/{rng.randrange(SLOTS)}"
        if 0.3 <= kind < 0.45:
            say("begin", key, ABSENT)
            with suppress(ObjectNotFound):
                pool.delete(key)
            say("done", key, ABSENT)
            continue
        data = data_of(tag, size)
        say("begin", key, digest(data))
        pool.put(key, data)
        say("done", key, digest(data))


@dataclass
class Ledger:
    """What every key must hold."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    flying: tuple[str, str] | None = None  # the operation that was under way
    operations: int = 0
    rolled_forward: int = 0

    def read(self, lines: list[str]) -> set[str]:
        """Take a life's lines; returns the keys it touched."""
        touched, self.flying = set(), None
        for line in lines:
            word, key, what = line.split()
            touched.add(key)
            if word == "begin":
                self.flying = (key, what)
            else:
                self.acknowledged[key], self.flying = what, None
                self.operations += 1
        return touched

    def check(self, pool: Pool, key: str) -> None:
        """The key holds what was acknowledged, or the whole of what was under way."""
        found = digest(value(pool, key))
        expected = self.acknowledged.get(key, ABSENT)
        if self.flying is not None and key == self.flying[0]:
            assert found in (expected, self.flying[1]), f"{key} is torn or lost"
            self.rolled_forward += found != expected
            self.acknowledged[key] = found
        else:
            assert found == expected, f"{key} lost what was acknowledged"


def live_and_die(bench: Bench, shared: Pool, life: int, rng: random.Random) -> list[str]:
    """Start a child, kill it 30-150 ms after its first acknowledgement; its lines."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            pool = shared if life % 2 else bench.open()
            work(pool, writing, life)
        except BaseException as error:  # noqa: BLE001 (the child must end here)
            os.write(writing, f"error {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    os.close(writing)
    received, kill_at = bytearray(), None
    give_up = time.monotonic() + PATIENCE
    try:
        while kill_at is None or time.monotonic() < kill_at:
            until = give_up if kill_at is None else kill_at
            ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
            part = os.read(reading, 65536) if ready else b""
            received += part
            assert b"error" not in received, received.decode()
            assert time.monotonic() < give_up, "the child acknowledges nothing"
            if kill_at is None and b"done" in received:
                kill_at = time.monotonic() + rng.uniform(0.030, 0.150)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while part := os.read(reading, 65536):
            received += part
        os.close(reading)
    assert b"error" not in received, received.decode()
    return received.decode().splitlines()


def orphans(bench: Bench) -> list[str]:
    """Files that killed writers left in tmp/."""
    return [name for path in bench.paths for name in glob.glob(f"{path}/tmp/*")]


def test_killed_writers_tear_nothing_and_lose_nothing_acknowledged(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill a writer 200 times; each time all it touched is whole, at the end everything is.

    Then a rebuild and a scrub leave nothing to mend, and old orphans in tmp/ are swept.
    """
    rng, ledger = random.Random(SEED), Ledger()
    with bench.create(4, data=2, parity=1) as pool:
        for life in range(KILLS):
            touched = ledger.read(live_and_die(bench, pool, life, rng))
            if life % 10 == 0:
                with bench.open() as fresh:
                    for key in touched:
                        ledger.check(fresh, key)
            else:
                for key in touched:
                    ledger.check(pool, key)
        ledger.flying = None
        for key in sorted(ledger.acknowledged):
            ledger.check(pool, key)
        keys = sorted(k for k, what in ledger.acknowledged.items() if what != ABSENT)
        assert pool.list() == keys
        assert not pool.rebuild().unreadable
        assert pool.scrub().clean
        for key in keys:
            ledger.check(pool, key)
    left = orphans(bench)
    for name in left:
        os.utime(name, (1, 1))
    bench.open().close()
    assert orphans(bench) == []
    with capsys.disabled():
        print(
            f"\n{KILLS} kills, {ledger.operations} operations acknowledged, "
            f"{ledger.rolled_forward} under way became visible, {len(left)} orphans swept; "
            f"seed {SEED}"
        )
    assert ledger.operations >= KILLS  # each kill follows an acknowledgement
    assert ledger.rolled_forward > 0
    assert left
