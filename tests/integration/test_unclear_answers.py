"""Errors of objects that an earlier attempt has written never say that nothing was changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpstore.errors import HpstoreError, LockTimeout, RegistersUnavailable, SomeFailed
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.integration.test_conditional_puts import BODIES, closing_all
from tests.turns import TurnProcess

RUN = [f"run/step-{step:012d}/manifest" for step in range(3)]  # under one claim
DENIALS = ("Nothing was changed", "untouched", "is unchanged")


def fresh(path: Path) -> Harness:
    return Harness(path, data=2, parity=1, devices=4, clock=FakeClock())


def cut_off(harness: Harness, job: Callable[[Pool], object]) -> HpstoreError:
    """The error of a job whose devices stop answering after its last write, before it gives its
    claim back."""
    process = TurnProcess(harness)
    with closing_all(process):
        process.start(job)
        process.run_to("publish")
        process.run_to("lock")
        harness.lose(harness.urls[:3])
        process.run()
        harness.bring_back()
        assert isinstance(process.outcome, HpstoreError), process.outcome
        return process.outcome


def refuse_claims(pool: Pool, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has every claim, after so many that this one has got."""
    taken = list[str]()
    plain = pool._session.claims.take

    def take(key: str) -> object:
        taken.append(key)
        if len(taken) > after:
            raise LockTimeout(f"another process has {key!r}. Nothing was changed; try again later.")
        return plain(key)

    monkeypatch.setattr(pool._session.claims, "take", take)


def test_a_put_that_is_read_is_not_denied_when_it_gets_no_other_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written, its claim was taken over meanwhile, and it waits in vain for a second one. A
    caller that took it for refused would remove what it names."""
    harness = fresh(tmp_path)
    a, b = TurnProcess(harness), TurnProcess(harness)
    with closing_all(a, b):
        refuse_claims(a.pool, 1, monkeypatch)
        a.start(lambda pool: pool.put(RUN[0], BODIES["A"], if_absent=True))
        a.run_to("publish")
        b.start(lambda pool: pool.put(RUN[1], BODIES["B"], if_absent=True))
        b.run()
        a.run()
        assert isinstance(a.outcome, LockTimeout)
        assert a.outcome.maybe_visible
        assert "may have been stored" in str(a.outcome)
        assert not [text for text in DENIALS if text in str(a.outcome)]
    with harness.open() as pool:
        assert pool.get(RUN[0]) == BODIES["A"]


def test_a_put_without_its_acknowledgement_does_not_say_that_objects_are_untouched(
    tmp_path: Path,
) -> None:
    harness = fresh(tmp_path)
    error = cut_off(harness, lambda pool: pool.put("k", BODIES["A"], if_absent=True))
    assert isinstance(error, RegistersUnavailable)
    assert error.maybe_visible
    assert not [text for text in DENIALS if text in str(error)]
    with harness.open() as pool:
        assert pool.get("k") == BODIES["A"]


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_delete_without_its_acknowledgement_does_not_say_that_nothing_was_changed(
    tmp_path: Path, *, several: bool
) -> None:
    """The tombstones are there: the objects are gone."""
    harness, keys = fresh(tmp_path), RUN if several else RUN[:1]
    with harness.open() as pool:
        versions = {key: pool.put(key, b"x").version for key in keys}
    error = cut_off(harness, lambda pool: pool.admin.remove_versions(versions))
    assert isinstance(error, SomeFailed)
    assert error.maybe_visible
    assert "not deleted for certain" in str(error)
    said = [str(error), *map(str, error.failed.values())]
    assert not [text for text in DENIALS for one in said if text in one]
    with harness.open() as pool:
        assert not pool.list()


def test_a_delete_that_began_together_is_not_denied_when_it_gets_no_other_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim was taken over after the tombstones were written."""
    harness = fresh(tmp_path)
    with harness.open() as pool:
        versions = {key: pool.put(key, b"x").version for key in RUN[:2]}
    a, b = TurnProcess(harness), TurnProcess(harness)
    with closing_all(a, b):
        refuse_claims(a.pool, 1, monkeypatch)
        a.start(lambda pool: pool.admin.remove_versions(versions))
        a.run_to("publish")
        b.start(lambda pool: pool.put(RUN[2], b"new", if_absent=True))
        b.run()
        a.run()
        assert isinstance(a.outcome, SomeFailed)
        assert a.outcome.maybe_visible
        said = [str(a.outcome), *map(str, a.outcome.failed.values())]
        assert not [text for text in DENIALS for one in said if text in one]
    with harness.open() as pool:
        assert pool.list() == [RUN[2]]
