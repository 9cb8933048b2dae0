"""Deletes of the versions that were seen, by processes that are stopped at any moment (PROTOCOL 6,
19)."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from hpstore.agreement.registers import key_register
from hpstore.errors import LockTimeout, SomeFailed
from hpstore.objects.object_info import ObjectInfo
from hpstore.objects.write import conditional_put
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.integration.test_conditional_puts import closing_all
from tests.thorough import LONG
from tests.turns import TurnProcess

RUN = [f"run/step-{step:012d}/manifest" for step in range(3)]  # under one claim
OTHERS = ["one", "two"]


def fresh(path: Path) -> Harness:
    return Harness(path, data=2, parity=1, devices=4, clock=FakeClock())


def test_what_was_put_again_or_is_not_there_stays_as_it_is(tmp_path: Path) -> None:
    assert len({key_register(key) for key in RUN}) == 1
    with fresh(tmp_path).open() as pool:
        keys = [*RUN, *OTHERS]
        versions = {key: pool.put(key, key.encode()).version for key in keys}
        pool.put(RUN[1], b"again")
        pool.put(OTHERS[0], b"again")
        pool.delete(RUN[2])
        pool.admin.remove_versions(versions)
        assert pool.list() == [OTHERS[0], RUN[1]]
        assert pool.get(RUN[1]) == pool.get(OTHERS[0]) == b"again"
        pool.admin.remove_versions({})
        pool.put(RUN[2], b"later", if_absent=True)


def test_they_share_claims_and_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None falls back to a claim of its own."""
    with fresh(tmp_path).open() as pool:
        versions = {key: pool.put(key, b"x").version for key in RUN}
        monkeypatch.setattr(conditional_put, "bar_puts", None)
        pool.admin.remove_versions(versions)
        assert not pool.list()


def test_where_it_is_not_decided_it_says_of_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh(tmp_path).open() as pool:
        versions = {key: pool.put(key, b"x").version for key in [*RUN, *OTHERS]}
        take = pool._session.claims.take

        def refused(key: str) -> object:
            if key in RUN:
                raise LockTimeout("another process has it")
            return take(key)

        monkeypatch.setattr(pool._session.claims, "take", refused)
        with pytest.raises(SomeFailed, match="another process has it") as said:
            pool.admin.remove_versions(versions)
        assert sorted(said.value.failed) == RUN
        assert pool.list() == RUN


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_put_that_was_acknowledged_meanwhile_stays_wherever_it_was_stopped_rule_19(
    tmp_path: Path, *, several: bool
) -> None:
    """A is stopped before each of its device operations in turn; others replace one of the
    versions, or find it gone and put it anew, or find a lock held."""
    keys = RUN if several else RUN[:1]
    replaced = created = 0
    for step in count(1, 1 if LONG else 3):
        (tmp_path / str(step)).mkdir()
        harness = fresh(tmp_path / str(step))
        with harness.open() as pool:
            versions = {key: pool.put(key, b"old").version for key in keys}
        a, b, c = (TurnProcess(harness) for _ in range(3))
        with closing_all(a, b, c):
            a.start(lambda pool, seen=versions: pool.admin.remove_versions(seen))  # type: ignore[misc]
            a.run(step)
            stopped = a.running
            b.start(lambda pool, v=versions: pool.put(keys[0], b"new", if_version=v[keys[0]]))  # type: ignore[misc]
            b.run()
            c.start(lambda pool: pool.put(keys[0], b"made", if_absent=True))
            c.run()
            a.run()
        answers = [(b.outcome, b"new"), (c.outcome, b"made")]
        put = [data for answer, data in answers if isinstance(answer, ObjectInfo)]
        replaced, created = replaced + (b"new" in put), created + (b"made" in put)
        with harness.open() as pool:
            there = {key: pool.get(key) for key in pool.list()}
        assert there.get(keys[0]) == (put[0] if put else None), f"A was stopped before {step}"
        assert there.keys() <= {keys[0]}, f"A was stopped before {step}"
        if not stopped:
            break
    assert replaced > 2
    assert created > 0
