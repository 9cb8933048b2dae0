"""Two ingests of one name, one of which begins again from nothing while the other one publishes:
what is acknowledged keeps its objects (rule 25)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import TooManyErasures, VersionConflict
from hpstore.loaders import ingest, list_versions, unfinished_ingests, verify_dataset
from hpstore.loaders.dataset import dataset_versions, publish_dataset
from hpstore.loaders.dataset.dataset_manifest import manifest_key, nonce_of
from hpstore.loaders.dataset.dataset_versions import read_manifest
from hpstore.loaders.ingestion import part_committer
from hpstore.objects.object_info import ObjectInfo
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

    def __init__(self, pool: Pool, root: Path, patch: pytest.MonkeyPatch, **options: Any) -> None:
        self._pool, self._root, self._options = pool, root, options
        self._looked, self.ended = threading.Event(), threading.Event()
        self._put, self._published = publish_dataset.publish_over, part_committer._published
        self.thread = threading.Thread(target=self._again)
        self.failed: list[Exception] = []
        patch.setattr(publish_dataset, "publish_over", self._putting)
        patch.setattr(dataset_versions, "publish_over", self._putting)
        patch.setattr(part_committer, "_published", self._looking)

    def _again(self) -> None:
        try:
            ingest(self._pool, "train", self._root, resume=False, **SHARD, **self._options)
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
    beside = Beside(pool, root, monkeypatch, overwrite=overwrite)
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
    beside = Beside(pool, second, monkeypatch, append=True)
    with pytest.raises(VersionConflict, match="began its ingest anew"):
        ingest(pool, "train", second, append=True, **SHARD)
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(first))
    beside.ended.set()
    beside.thread.join()
    assert beside.failed == []
    assert sorted(rows(pool, "train")) == sorted([*wanted_rows(first), *wanted_rows(second)])
    for version in list_versions(pool, "train"):
        assert verify_dataset(pool, "train", version=version.name).clean, version


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

    def looking(pool: Pool, name: str) -> set[str]:
        found = published(pool, name)
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
    root, put, stat = images(tmp_path / "in"), publish_dataset.publish_over, Pool.stat

    def away(self: Pool, key: str, **options: Any) -> ObjectInfo:
        if key.endswith("/journal"):
            raise TooManyErasures("4 of 6 devices are away")
        return stat(self, key, **options)

    def putting(*args: Any) -> Any:
        made = put(*args)
        monkeypatch.setattr(Pool, "stat", away)
        return made

    monkeypatch.setattr(publish_dataset, "publish_over", putting)
    with pytest.raises(TooManyErasures, match="is not certain: look at its number") as found:
        ingest(pool, "train", root, **SHARD)
    assert found.value.maybe_visible
    monkeypatch.undo()
    assert sorted(rows(pool, "train")) == sorted(wanted_rows(root))
    assert verify_dataset(pool, "train").clean
