"""A power cut at any point of a change leaves the version before, or the new one, whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import HpstoreError, TooFewDevices
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    Field,
    add_field,
    delete_rows,
    delete_version,
    list_versions,
    remove_orphans,
    verify_dataset,
)
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.integration.data_sets import make_pool

FIELDS = {"x": Field("uint8", (3000,)), "y": Field("int64")}


def write(pool: Pool, first: int, count: int, *, append: bool) -> None:
    numbers = np.arange(first, first + count)
    small = {} if append else {"unit_bytes": 4 * KIB}
    with DatasetWriter(
        pool,
        "a",
        FIELDS,
        shard_bytes=30 * KIB,
        append=append,
        **small,  # type: ignore[arg-type]
    ) as writer:
        wide = np.repeat(numbers[:, None] % 256, 3000, axis=1).astype("u1")
        writer.write_batch({"x": wide, "y": numbers})


CHANGES: dict[str, tuple[Callable[[Pool], object], list[int]]] = {
    "append": (lambda pool: write(pool, 20, 5, append=True), list(range(25))),
    "rows": (lambda pool: delete_rows(pool, "a", range(1, 20, 2)), list(range(0, 20, 2))),
    "column": (lambda pool: add_field(pool, "a", "z", Field("int8"), [1] * 20), list(range(20))),
    "field": (lambda pool: add_field(pool, "a", "z", Field("str"), ["z"] * 20), list(range(20))),
}


def labels(pool: Pool, version: str | None = None) -> list[int]:
    data = Dataset(pool, "a", version=version)
    samples = data.__getitems__(range(len(data)))
    found = [int(sample["y"]) for sample in samples]
    assert [int(sample["x"][0]) for sample in samples] == found
    return found


@pytest.mark.parametrize("kind", CHANGES)
def test_a_power_cut_leaves_one_version_or_the_other_whole(tmp_path: Path, kind: str) -> None:
    """PROTOCOL 25: all of the change or nothing; the version before is read either way."""
    change, after = CHANGES[kind]
    seen, crash_at, finished = set(), 3, False
    while not finished:
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness = Harness(directory, data=2, parity=1, devices=3)
        with harness.open() as pool:
            write(pool, 0, 20, append=False)
        pool, operations = harness.open_crashing(crash_at)
        try:
            change(pool)
            finished = operations[0] <= crash_at
        except (SimulatedCrash, HpstoreError):
            pass
        harness.power_cut()
        with harness.open() as again:
            found = labels(again)
            changed = Dataset(again, "a").version == "v2"
            assert found == (after if changed else list(range(20)))
            assert changed or not finished
            assert labels(again, "v1") == list(range(20))
            assert verify_dataset(again, "a").clean
            remove_orphans(again, "a")
            assert labels(again) == found
            assert labels(again, "v1") == list(range(20))
            seen.add(changed)
        crash_at += 19
    assert seen == {False, True}


def test_a_power_cut_while_a_version_goes_takes_nothing_else(tmp_path: Path) -> None:
    """The newest version is whole; what stays of the old one goes with the orphans."""
    crash_at, finished = 3, False
    while not finished:
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness = Harness(directory, data=2, parity=1, devices=3)
        with harness.open() as pool:
            write(pool, 0, 20, append=False)
            delete_rows(pool, "a", [0])
        pool, operations = harness.open_crashing(crash_at)
        try:
            delete_version(pool, "a", "v1")
            finished = operations[0] <= crash_at
        except (SimulatedCrash, HpstoreError):
            pass
        harness.power_cut()
        with harness.open() as again:
            assert labels(again) == list(range(1, 20))
            kept = [version.name for version in list_versions(again, "a")]
            if kept == ["v1", "v2"]:
                assert labels(again, "v1") == list(range(20))
            remove_orphans(again, "a")
            assert verify_dataset(again, "a").clean
        crash_at += 13


def test_a_change_of_unclear_fate_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 8, 25: an unacknowledged put may be visible; then its samples must be there."""
    put = Pool.put

    def fails_late(self: Pool, key: str, *args: object, **options: object) -> object:
        done = put(self, key, *args, **options)  # type: ignore[arg-type]
        if key.endswith("/manifest"):
            raise TooFewDevices("no acknowledgement")
        return done

    with make_pool(tmp_path) as pool:
        write(pool, 0, 20, append=False)
        changes: list[Callable[[Pool], object]] = [
            lambda pool: write(pool, 20, 5, append=True),
            lambda pool: delete_rows(pool, "a", [1]),
            lambda pool: add_field(pool, "a", "z", Field("int8"), [1] * 24),
            lambda pool: add_field(pool, "a", "t", Field("str"), ["t"] * 24),
        ]
        for number, change in enumerate(changes, 2):
            with monkeypatch.context() as patched:
                patched.setattr(Pool, "put", fails_late)
                with pytest.raises(TooFewDevices):
                    change(pool)
            assert Dataset(pool, "a").version == f"v{number}"
            assert verify_dataset(pool, "a").clean
