"""What must be in the pool after each kill: objects and checkpoints that were acknowledged."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import HpstoreError, ObjectNotFound
from hpstore.pool.pool import Pool
from tests.fault.common import value

ABSENT = "absent"
PREFIX = "runs/kills"
KEEP_LAST = 2
TENSOR_ITEMS = 60_000
ONCE_KEPT = 120  # objects that are put once; above it half of them are deleted


def data_of(tag: str, size: int) -> bytes:
    """Bytes that no other operation puts."""
    return tag.encode().ljust(64) + random.Random(tag).randbytes(size)


def digest(data: bytes | None) -> str:
    """What is compared and sent through the pipe."""
    return ABSENT if data is None else hashlib.blake2b(data, digest_size=12).hexdigest()


def state_of(step: int) -> dict[str, torch.Tensor]:
    """The state that a trainer has after so many steps."""
    drawn = torch.Generator().manual_seed(step)
    return {
        "weights": torch.randn(TENSOR_ITEMS, generator=drawn),
        "step": torch.tensor([step]),
    }


@dataclass
class Objects:
    """The value that each key must have, and in `flying` those that it may have.

    A write that its process did not finish may be visible or not, and may become either, until a
    reader settles it or a newer write is acknowledged.
    """

    acknowledged: dict[str, str] = field(default_factory=dict)
    flying: dict[str, set[str]] = field(default_factory=dict)
    not_found: list[str] = field(default_factory=list)  # by deletes, though they must be there
    operations: int = 0
    rolled_forward: int = 0

    def read(self, lines: Iterable[str]) -> set[str]:
        """Take the lines of one life, `begin key digest`, `done key digest` and `none key absent`
        (of a delete that found nothing, so that it has put no tombstone); its keys."""
        touched, before = set(), {ABSENT}
        for line in lines:
            word, key, what = line.split()
            touched.add(key)
            if word == "begin":
                before = {self.acknowledged.get(key, ABSENT), *self.flying.get(key, ())}
                self.flying.setdefault(key, set()).add(what)
            elif word == "done":
                self.acknowledged[key] = what
                self.flying.pop(key, None)
                self.operations += 1
            elif ABSENT not in before:
                self.not_found.append(f"a delete did not find {key}, which holds {before}")
        return touched

    def check(self, pool: Pool, keys: Iterable[str], *, settles: bool) -> list[str]:
        """What is wrong: a key must hold what was acknowledged, or all of what was under way.

        `settles`: all devices are there and the pool can be written, so that what was under way is
        brought to its end, and stays (protocol.md, rule 8).
        """
        wrong, self.not_found = self.not_found, []
        for key in keys:
            expected, under_way = self.acknowledged.get(key, ABSENT), self.flying.get(key, set())
            try:
                if under_way and settles:
                    with suppress(ObjectNotFound):
                        pool.admin.settle(key)
                found = digest(value(pool, key))
            except HpstoreError as error:
                wrong.append(f"{key} cannot be read: {type(error).__name__}: {error}")
                continue
            if found not in {expected, *under_way}:
                wrong.append(f"{key} holds {found}, not {expected} (under way: {under_way})")
            elif under_way and settles:
                self.rolled_forward += found != expected
                self.acknowledged[key] = found
                del self.flying[key]
        return wrong

    def check_list(self, pool: Pool) -> list[str]:
        """The listing has every key that is there, and none that was deleted."""
        expected = {key for key, what in self.acknowledged.items() if what != ABSENT}
        expected -= self.flying.keys()
        found = {key for key in pool.list() if not key.startswith(f"{PREFIX}/")}
        found -= self.flying.keys()
        lost, back = sorted(expected - found), sorted(found - expected)
        wrong = [f"the listing lacks {lost[:5]}"] if lost else []
        return wrong + ([f"the listing has {back[:5]}, which were deleted"] if back else [])

    def trim(self, pool: Pool, rng: random.Random) -> None:
        """Delete half of the objects that are put once when there are too many."""
        once = [
            key
            for key, what in self.acknowledged.items()
            if key.startswith("once/") and what != ABSENT
        ]
        if len(once) > ONCE_KEPT:
            for key in rng.sample(once, len(once) // 2):
                pool.delete(key)
                self.acknowledged[key] = ABSENT
                self.flying.pop(key, None)


@dataclass
class Steps:
    """Checkpoints: the newest acknowledged step, and those that may have been committed since."""

    acknowledged: int = 0
    flying: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # removed by retention
    seen: set[int] = field(default_factory=set)
    operations: int = 0
    rolled_forward: int = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take the lines of one life, `begin step` and `done step`."""
        for line in lines:
            word, step = line.split()
            if word == "begin":
                self.flying.add(int(step))
            else:
                self.acknowledged, self.flying = int(step), set()
                self.operations += 1

    def check(self, pool: Pool) -> list[str]:
        """What is wrong: the newest step is the acknowledged one or one under way, whole."""
        wrong = []
        with Checkpointer(pool, PREFIX, rng=False, save=SaveOptions(warm=False)) as checkpointer:
            steps = set(checkpointer.steps())
            newest = max(steps, default=0)
            if newest not in {self.acknowledged, *self.flying}:
                wrong.append(f"the newest step is {newest}, not {self.acknowledged}")
            for step in steps:
                wrong += self._check_step(checkpointer, step)
            if steps and (valid := checkpointer.latest_valid()) != newest:
                wrong.append(f"the newest valid step is {valid}, not {newest}")
        if back := sorted(steps & self.gone):
            wrong.append(f"steps {back} are back")
        self.gone |= self.seen - steps
        self.seen |= {step for step in steps if step <= self.acknowledged}
        self.rolled_forward += newest > self.acknowledged
        return wrong

    def _check_step(self, checkpointer: Checkpointer, step: int) -> list[str]:
        try:
            found = checkpointer.load(step)
        except HpstoreError as error:
            return [f"step {step}: {type(error).__name__}: {error}"]
        expected = state_of(step)
        if set(found) != set(expected) or any(
            not torch.equal(found[name], expected[name]) for name in expected
        ):
            return [f"step {step} holds wrong bytes"]
        return []
