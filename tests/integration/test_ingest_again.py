"""Two ingests of one name, one of which begins again from nothing while the other one publishes:
what is acknowledged keeps its objects (rule 25)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import TooManyErasures, VersionConflict
from hpstore.loaders import (
    Dataset,
    ingest,
    ingest_parts,
    list_versions,
    unfinished_ingests,
    verify_dataset,
)
from hpstore.loaders.dataset import dataset_versions, publish_dataset
from hpstore.loaders.dataset.dataset_manifest import manifest_key, nonce_of
from hpstore.loaders.dataset.dataset_versions import read_manifest
from hpstore.loaders.ingestion import part_committer
from hpstore.loaders.ingestion.ingest_journal import Journal
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import (
    SHARD,
    cut_short,
    images,
    keys_left,
    make_pool,
    rows,
    wanted_rows,
)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


class Beside:
    """An ingest that begins again right before another one puts its manifest: it has looked at what
    is published before the put, and removes what is not after the other one has ended."""

    def __init__(
        self, patch: pytest.MonkeyPatch, again: Callable[[], object], *, look: int = 2
    ) -> None:
        self._ingest = again
        self._looks, self._wanted = 0, look  # the first one is before its journal is saved
        self._looked, self.ended = threading.Event(), threading.Event()
        self._put, self._published = publish_dataset.publish_over, part_committer._published
        self.thread = threading.Thread(target=self._again)
        self.failed: list[Exception] = []
        patch.setattr(publish_dataset, "publish_over", self._putting)
        patch.setattr(dataset_versions, "publish_over", self._putting)
        patch.setattr(part_committer, "_published", self._looking)

    def _again(self) -> None:
        try:
            self._ingest()
        except Exception as error:  # noqa: BLE001 (looked at by the test)
            self.failed.append(error)

    def _putting(self, *args: Any) -> Any:
        if not self.thread.ident:
            self.thread.start()
            assert self._looked.wait(60)
        return self._put(*args)

    def _looking(self, pool: Pool, name: str) -> set[str]:
        found = self._published(pool, name)
        if threading.current_thread() is self.thread and not self._looked.is_set():
            self._looks += 1
            if self._looks == self._wanted:
                self._looked.set()
                assert self.ended.wait(60)
        return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_ingest_that_another_begins_again_while_it_publishes_is_not_acknowledged_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, overwrite: bool
) -> None:
    """Its objects were removed after it had said that it was done. What it was to replace is there
    again."""
    root = images(tmp_path / "in")
    before: list[tuple[bytes, int]] = []
    if overwrite:
        ingest(pool, "train", images(tmp_path / "old", 20), **SHARD)
        before = rows(pool, "train")
    again = partial(ingest, pool, "train", root, resume=False, overwrite=overwrite, **SHARD)
    beside = Beside(monkeypatch, again)
    with pytest.raises(VersionConflict, match="began its ingest anew"):
        ingest(pool, "train", root, overwrite=overwrite, **SHARD)
    if overwrite:
        assert rows(pool, "train") == before
    beside.ended.set()
    beside.thread.join()
    if beside.failed:  # what it was to replace was put again meanwhile
        assert overwrite
        assert rows(pool, "train") == before
        ingest(pool, "train", root, overwrite=True, **SHARD)
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))
    assert verify_dataset(pool, "train").clean


def test_an_append_that_another_begins_again_while_it_publishes_is_not_acknowledged_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has appended is taken off; what was there stays, and so does what the other makes."""
    first, second = images(tmp_path / "a", 40), images(tmp_path / "b", 30, size=5000)
    ingest(pool, "train", first, **SHARD)
    again = partial(ingest, pool, "train", second, resume=False, append=True, **SHARD)
    beside = Beside(monkeypatch, again)
    with pytest.raises(VersionConflict, match="began its ingest anew"):
        ingest(pool, "train", second, append=True, **SHARD)
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(first))
    beside.ended.set()
    beside.thread.join()
    assert beside.failed == []
    assert sorted(rows(pool, "train")) == sorted([*wanted_rows(first), *wanted_rows(second)])
    for version in list_versions(pool, "train"):
        assert verify_dataset(pool, "train", version=version.name).clean, version


def test_parts_that_another_removes_while_they_are_published_are_not_acknowledged_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their notes go first: who publishes looks for them once the manifest is there."""
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_text("".join(f'{{"x": {100 * number + row}}}\n' for row in range(50)))
    beside = Beside(monkeypatch, partial(ingest_parts, pool, "train", paths, resume=False), look=1)
    with pytest.raises(VersionConflict, match="began its ingest anew"):
        ingest_parts(pool, "train", paths)
    beside.ended.set()
    beside.thread.join()
    assert beside.failed == []
    with Dataset(pool, "train") as found:
        assert [int(found[n]["x"]) for n in (0, 50, 149)] == [0, 100, 249]
    assert verify_dataset(pool, "train").clean


def meanwhile(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do this when the next ingest has put its manifest, and looks into the journal."""
    removes = Journal.removes

    def looking(journal: Journal, nonces: set[str]) -> bool:
        patch.setattr(Journal, "removes", removes)
        act()
        return removes(journal, nonces)

    patch.setattr(Journal, "removes", looking)


def test_the_same_append_may_be_told_by_another_that_it_is_done_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler makes the call again while the first one stands: both are acknowledged, and the
    samples are there once."""
    first, second = images(tmp_path / "a", 40), images(tmp_path / "b", 30, size=5000)
    ingest(pool, "train", first, **SHARD)
    again = partial(ingest, pool, "train", second, append=True, **SHARD)
    meanwhile(monkeypatch, again)
    again()
    assert sorted(rows(pool, "train")) == sorted([*wanted_rows(first), *wanted_rows(second)])
    assert verify_dataset(pool, "train").clean
    assert unfinished_ingests(pool) == {}


@pytest.mark.parametrize("appended", [False, True])
def test_what_comes_behind_an_ingest_that_stands_denies_it_not_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, appended: bool
) -> None:
    """Other files are appended before it has looked: both are there, and acknowledged."""
    roots = [images(tmp_path / str(n), 20 + n, size=3000 + n) for n in range(3)]
    if appended:
        ingest(pool, "train", roots[2], **SHARD)
    meanwhile(monkeypatch, partial(ingest, pool, "train", roots[1], append=True, **SHARD))
    ingest(pool, "train", roots[0], append=appended, **SHARD)
    wanted = [row for root in roots[: 3 if appended else 2] for row in wanted_rows(root)]
    assert sorted(rows(pool, "train")) == sorted(wanted)
    assert verify_dataset(pool, "train").clean
    assert unfinished_ingests(pool) == {}


def test_an_ingest_behind_one_that_stands_keeps_its_journal_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one removes its own journal alone, once it goes on."""
    roots = [images(tmp_path / str(n), 60, size=3000 + n) for n in range(2)]
    meanwhile(monkeypatch, lambda: cut_short(pool, "train", roots[1], 30, append=True))
    ingest(pool, "train", roots[0], **SHARD)
    assert unfinished_ingests(pool)["train"].rows > 0
    report = ingest(pool, "train", roots[1], append=True, **SHARD)
    assert report.resumed_samples > 0
    assert sorted(rows(pool, "train")) == sorted([*wanted_rows(roots[0]), *wanted_rows(roots[1])])


def test_what_an_ingest_replaced_before_it_was_killed_is_there_again_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who removes its parts puts the dataset back that it had replaced."""
    old, root = images(tmp_path / "old", 20), images(tmp_path / "in")
    ingest(pool, "train", old, **SHARD)
    before, base = rows(pool, "train"), read_manifest(pool, "train")
    cut_short(pool, "train", root, 30, overwrite=True)
    parts = unfinished_ingests(pool)["train"].parts
    published = part_committer._published
    seen: list[int] = []

    def looking(pool: Pool, name: str) -> set[str]:
        found = published(pool, name)
        seen.append(1)
        if len(seen) == 2:  # the look after the journal is saved
            manifest, version = replace(base, parts=parts), pool.stat(manifest_key(name)).version
            publish_dataset.publish_over(pool, manifest_key(name), manifest, base, version)
        return found

    monkeypatch.setattr(part_committer, "_published", looking)
    with pytest.raises(VersionConflict):  # what is there is not what it was to replace
        ingest(pool, "train", root, resume=False, overwrite=True, **SHARD)
    monkeypatch.setattr(part_committer, "_published", published)
    assert rows(pool, "train") == before
    assert verify_dataset(pool, "train").clean
    ingest(pool, "train", root, overwrite=True, **SHARD)
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))


@pytest.mark.parametrize("appended", [False, True])
def test_what_was_published_before_a_kill_goes_with_its_objects_rule_25(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, appended: bool
) -> None:
    """Killed right after the put of its manifest, so that it never looks for the other one."""
    root, first = images(tmp_path / "in"), images(tmp_path / "a", 40)
    if appended:
        ingest(pool, "train", first, **SHARD)
    else:
        ingest(pool, "like", first, **SHARD)
    base = read_manifest(pool, "train" if appended else "like")
    cut_short(pool, "train", root, 30, append=appended)
    parts = unfinished_ingests(pool)["train"].parts
    assert parts
    published = part_committer._published
    seen: list[int] = []

    def looking(pool: Pool, name: str) -> set[str]:
        found = published(pool, name)
        seen.append(1)
        if len(seen) < 2:  # the look before the journal is saved
            return found
        monkeypatch.setattr(part_committer, "_published", published)
        if appended:
            dataset_versions.change_dataset(
                pool, name, lambda now: replace(now, parts=(*now.parts, *parts))
            )
        else:
            manifest = replace(base, parts=parts)
            publish_dataset.publish_over(pool, manifest_key(name), manifest, None, None)
        return found

    monkeypatch.setattr(part_committer, "_published", looking)
    ingest(pool, "train", root, resume=False, append=appended, **SHARD)
    wanted = [*(wanted_rows(first) if appended else []), *wanted_rows(root)]
    assert sorted(rows(pool, "train")) == sorted(wanted)
    for version in list_versions(pool, "train"):
        assert verify_dataset(pool, "train", version=version.name).clean, version
    gone = {nonce for part in parts for nonce in part.nonces}
    assert not gone & {nonce_of("train", key) for key in keys_left(pool, "train")}


def test_where_the_journal_cannot_be_asked_the_error_does_not_deny_what_is_published(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that go between the put of the manifest and the look."""
    root = images(tmp_path / "in")

    def away(journal: Journal, nonces: set[str]) -> bool:
        raise TooManyErasures("4 of 6 devices are away")

    monkeypatch.setattr(Journal, "removes", away)
    with pytest.raises(TooManyErasures, match="is not certain: look at its number") as found:
        ingest(pool, "train", root, **SHARD)
    assert found.value.maybe_visible
    monkeypatch.undo()
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))
    assert verify_dataset(pool, "train").clean
