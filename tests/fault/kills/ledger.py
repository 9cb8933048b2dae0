"""What must be in the pool after each kill: objects and checkpoints that were acknowledged."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from hpstore.checkpoint import Checkpointer
from hpstore.errors import HpstoreError
from hpstore.pool import Pool
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
    """What every key must hold. `flying`: what was under way when its process was killed."""

    acknowledged: dict[str, str] = field(default_factory=dict)
    flying: dict[str, str] = field(default_factory=dict)
    operations: int = 0
    rolled_forward: int = 0

    def read(self, lines: Iterable[str]) -> set[str]:
        """Take the lines of one life, `begin key digest` and `done key digest`; its keys."""
        touched = set()
        for line in lines:
            word, key, what = line.split()
            touched.add(key)
            if word == "begin":
                self.flying[key] = what
            else:
                self.acknowledged[key] = what
                self.flying.pop(key, None)
                self.operations += 1
        return touched

    def check(self, pool: Pool, keys: Iterable[str]) -> list[str]:
        """What is wrong: a key must hold what was acknowledged, or all of what was under way."""
        wrong = []
        for key in keys:
            expected, under_way = self.acknowledged.get(key, ABSENT), self.flying.get(key)
            try:
                found = digest(value(pool, key))
            except HpstoreError as error:
                wrong.append(f"{key} cannot be read: {type(error).__name__}: {error}")
                continue
            if found not in (expected, under_way):
                wrong.append(f"{key} holds {found}, not {expected} (under way: {under_way})")
            elif under_way is not None:
                self.rolled_forward += found != expected
                self.acknowledged[key] = found
                del self.flying[key]
        return wrong

    def check_list(self, pool: Pool) -> list[str]:
        """The listing has every key that is there, and none that was deleted."""
        expected = {key for key, what in self.acknowledged.items() if what != ABSENT}
        found = {key for key in pool.list() if not key.startswith(f"{PREFIX}/")}
        lost, back = sorted(expected - found), sorted(found - expected)
        wrong = [f"the listing lacks {lost[:5]}"] if lost else []
        return wrong + ([f"the listing has {back[:5]}, which were deleted"] if back else [])

    def trim(self, pool: Pool, rng: random.Random) -> None:
        """Delete half of the objects that are put once when there are too many."""
        once = [
            key for key, what in self.acknowledged.items()
            if key.startswith("once/") and what != ABSENT
        ]  # fmt: skip
        if len(once) > ONCE_KEPT:
            for key in rng.sample(once, len(once) // 2):
                pool.delete(key)
                self.acknowledged[key] = ABSENT


@dataclass
class Steps:
    """Checkpoints: the newest acknowledged step, and one that may have been committed."""

    acknowledged: int = 0
    flying: int | None = None
    gone: set[int] = field(default_factory=set)  # removed by retention
    seen: set[int] = field(default_factory=set)
    operations: int = 0
    rolled_forward: int = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take the lines of one life, `begin step` and `done step`."""
        for line in lines:
            word, step = line.split()
            if word == "begin":
                self.flying = int(step)
            else:
                self.acknowledged, self.flying = int(step), None
                self.operations += 1

    def check(self, pool: Pool) -> list[str]:
        """What is wrong: the newest step is the acknowledged one or the one under way, whole."""
        wrong = []
        with Checkpointer(pool, PREFIX, rng=False, warm=False) as checkpointer:
            steps = set(checkpointer.steps())
            newest = max(steps, default=0)
            if newest not in (self.acknowledged, self.flying):
                wrong.append(f"the newest step is {newest}, not {self.acknowledged}")
            for step in steps:
                try:
                    found = checkpointer.load(step)
                except HpstoreError as error:
                    wrong.append(f"step {step}: {type(error).__name__}: {error}")
                    continue
                expected = state_of(step)
                if set(found) != set(expected) or any(
                    not torch.equal(found[name], expected[name]) for name in expected
                ):
                    wrong.append(f"step {step} holds wrong bytes")
            if steps and (valid := checkpointer.latest_valid()) != newest:
                wrong.append(f"the newest valid step is {valid}, not {newest}")
        if back := sorted(steps & self.gone):
            wrong.append(f"steps {back} are back")
        self.seen |= steps
        self.gone |= self.seen - steps
        self.rolled_forward += newest == self.flying
        self.acknowledged, self.flying = max(self.acknowledged, newest), None
        return wrong


__all__ = ["ABSENT", "KEEP_LAST", "PREFIX", "Objects", "Steps", "data_of", "digest", "state_of"]
