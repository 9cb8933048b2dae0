"""Older versions by name: what there is, and reading one that no read without a name chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import ConfigError, ObjectNotFound, TooManyErasures
from hpstore.objects.version_listing import VersionStanding
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.integration.test_torn_or_short import torn_put

OLD = np.random.default_rng(1).bytes(300_001)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """4+2 over six devices: nowhere else to go."""
    return Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())


def test_an_older_version_is_read_by_name_while_the_newest_is_unclear(harness: Harness) -> None:
    with harness.open() as pool:
        old = pool.put("k", OLD).version
    torn = torn_put(harness, 3)
    away = sorted(set(harness.urls) - torn)[:2]
    with harness.open() as pool:  # one more goes while it is open: the new one may be whole
        harness.lose(away)
        assert [v.standing for v in pool.versions("k")][-1] is VersionStanding.READABLE
        new, found = pool.versions("k")
        assert (found.version, found.columns, found.needed) == (old, 4, 4)
        assert new.version > old
        assert new.columns == 3
        assert pool.get("k", version=old) == OLD
        assert pool.get("k", 10, 20, version=old) == OLD[10:20]
        assert pool.stat("k", version=old).size == len(OLD)
        buffer = bytearray(100)
        assert pool.read_into("k", buffer, 7, version=old) == 100
        assert buffer == OLD[7:107]
        with pool.open("k", version=old) as reader:
            assert reader.version == old
            assert reader.read_into(buffer, 50) == 100
        with pytest.raises(ObjectNotFound, match=r"no version 0+-0+ of object"):
            pool.get("k", version=f"{0:016x}-{0:016x}")
        with pytest.raises((ObjectNotFound, TooManyErasures)):
            pool.get("k", version=new.version)


def test_one_version_is_current_and_a_deleted_key_has_its_tombstone(harness: Harness) -> None:
    with harness.open() as pool:
        written = pool.put("k", OLD)
        (only,) = pool.versions("k")
        assert (only.version, only.current, only.standing) == (
            written.version,
            True,
            VersionStanding.READABLE,
        )
        assert only.written == pytest.approx(written.created, abs=60)
        pool.delete("k")
        (tombstone,) = pool.versions("k")
        assert (tombstone.standing, tombstone.current) == (VersionStanding.DELETED, True)
        assert pool.versions("never") == []
        with pytest.raises(ConfigError, match="is not a version of an object"):
            pool.get("k", version="newest")


def test_a_reader_of_a_version_does_not_go_on_with_its_successor(harness: Harness) -> None:
    with harness.open() as pool:
        old = pool.put("k", OLD).version
        with pool.open("k", version=old) as reader:
            pool.put("k", b"new" * 100_000)
            buffer = bytearray(len(OLD))
            try:  # its open files may still serve
                reader.read_into(buffer)
                assert buffer == OLD
            except ObjectNotFound:
                pass
        with pytest.raises(ObjectNotFound, match="removed when a newer one was whole"):
            pool.open("k", version=old)


def test_what_may_be_there_is_not_called_absent(harness: Harness) -> None:
    with harness.open() as pool:
        pool.put("k", OLD)
        harness.lose(harness.urls[:3])
        with pytest.raises(TooManyErasures):
            pool.versions("elsewhere")
