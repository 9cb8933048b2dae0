"""The pool against a dict: put, kill, flip, lose, add, drain, scrub, restart, in any order."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import MembershipError, ObjectNotFound, TooFewDevices
from hpstore.testing.memory_pool import FakeClock, Harness

KEYS = st.sampled_from(["a", "a/b", "run/x", "run/y"])
SIZES = st.sampled_from([0, 1, 5000, 131_072, 131_073, 300_000, 700_001])
PARITY = 2


class PoolMachine(RuleBasedStateMachine):
    """At most m devices are lost or damaged at a time; what was acknowledged must read back."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hpstore-model-"))
        self.clock = FakeClock()
        self.harness = Harness(
            self.directory,
            data=2,
            parity=PARITY,
            devices=6,
            clock=self.clock,
            recycle_bytes=1 << 30,
        )
        self.pool = self.harness.open()
        self.model: dict[str, bytes] = {}
        self.hurt: set[str] = set()  # devices that are lost or damaged since the last healing
        self.added = 0
        self.seed = 0

    def value(self, size: int) -> bytes:
        self.seed += 1
        return np.random.default_rng(self.seed).bytes(size)

    @rule(key=KEYS, size=SIZES)
    def put(self, key: str, size: int) -> None:
        data = self.value(size)
        try:
            self.pool.put(key, data)
        except TooFewDevices:
            return
        self.model[key] = data

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        try:
            self.pool.delete(key)
        except ObjectNotFound:
            assert key not in self.model
        except TooFewDevices:
            return
        else:
            del self.model[key]

    @rule(key=KEYS, size=SIZES, crash_at=st.integers(0, 120), power=st.booleans())
    def crash(self, key: str, size: int, crash_at: int, power: bool) -> None:
        data = self.value(size)
        pool, _ = self.harness.open_crashing(crash_at)
        allowed = [self.model.get(key)]
        try:
            pool.put(key, data)
            allowed = [data]
        except SimulatedCrash:
            allowed.append(data)
        except TooFewDevices:
            pass
        if power:
            self.harness.power_cut()
        else:
            self.harness.restart()
        self.pool = self.harness.open()
        self.heal()
        try:
            found = self.pool.get(key)
        except ObjectNotFound:
            found = None
        assert found in allowed
        if found is None:
            self.model.pop(key, None)
        else:
            self.model[key] = found

    @precondition(lambda self: len(self.hurt) < PARITY)
    @rule(number=st.integers(0, 20))
    def lose(self, number: int) -> None:
        urls = sorted(set(self.members()) - self.hurt)
        url = urls[number % len(urls)]
        self.hurt.add(url)
        self.harness.lose([url])

    @precondition(lambda self: len(self.hurt) < PARITY)
    @rule(number=st.integers(0, 20), offset=st.integers(0, 10**6))
    def flip(self, number: int, offset: int) -> None:
        urls = sorted(set(self.members()) - self.hurt)
        url = urls[number % len(urls)]
        self.hurt.add(url)
        for key in self.model:
            for place, path in self.harness.columns(key):
                if place == url:
                    self.harness.flip(url, path, offset)

    def members(self) -> list[str]:
        return [m.url for m in self.pool._store.view.record.members]

    @rule()
    def heal(self) -> None:
        """Lost devices return, damage is mended: then m more may be hurt."""
        self.harness.bring_back()
        self.pool = self.harness.open()
        assert not self.pool.rebuild().unreadable
        assert not self.pool.scrub().unreadable
        assert self.pool.scrub().clean
        self.hurt = set()

    @precondition(lambda self: not self.hurt and self.added < 3)
    @rule()
    def add(self) -> None:
        self.added += 1
        self.pool.add_device(f"memory://new{self.added}")

    @precondition(lambda self: not self.hurt and len(self.members()) > 4)
    @rule(number=st.integers(0, 20), drain=st.booleans())
    def leave(self, number: int, drain: bool) -> None:
        url = self.members()[number % len(self.members())]
        try:
            if drain:
                self.pool.drain(url)
            else:
                self.pool.evict(url)
        except MembershipError:
            return
        self.harness.wipe(url)
        self.pool.rebuild()

    @rule()
    def pass_time(self) -> None:
        self.clock.advance(5000)

    @rule()
    def reopen(self) -> None:
        self.pool.close()
        self.pool = self.harness.open()

    @invariant()
    def reads_what_was_acknowledged(self) -> None:
        if not hasattr(self, "pool"):
            return
        for key, data in self.model.items():
            assert self.pool.get(key) == data
        assert set(self.pool.list()) >= set(self.model)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        try:
            self.heal()
            assert {k: self.pool.get(k) for k in self.pool.list()} == self.model
            self.pool.close()
        finally:
            shutil.rmtree(self.directory)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=25, deadline=None)
