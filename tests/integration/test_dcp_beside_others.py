"""Saves through torch.distributed.checkpoint while others collect, read and die."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpstore.checkpoint import StorageReader, StorageWriter
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """4+2 over eight devices."""
    return Harness(tmp_path, data=4, parity=2, devices=8)


class AsRank(StorageWriter):
    """One rank of a save without collectives."""

    rank = 0

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None:
        super().set_up_storage_writer(is_coordinator, rank=self.rank, use_collectives=False)


class FromRank(StorageReader):
    """The reader of rank 1."""

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return super().read_metadata(rank=1)


def save_as(pool: Pool, rank: int, value: float) -> None:
    writer = AsRank(pool, "c")
    writer.rank = rank
    dcp_save({"w": torch.full((200_000,), value)}, storage_writer=writer, no_dist=True)


def collect_dead(pool: Pool) -> None:
    """As another rank's clean-up, by a judge who takes every save for dead."""
    writer = AsRank(pool, "c")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpstore.checkpoint.dcp.storage_writer.attempt_lives", lambda *_: False)
        writer._remove_dead_notes(set())


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("again", [False, True])
def test_a_dcp_save_whose_note_is_gone_puts_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """PROTOCOL 18, as of a Checkpointer: taken for dead before its manifest is put."""
    with harness.open() as pool:
        if again:
            save_as(pool, 1, 1.0)
        encode = Manifest.encode

        def between(manifest: Manifest, *args: object) -> bytes:
            collect_dead(pool)
            return encode(manifest, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Manifest, "encode", between)
        with pytest.raises(BaseException, match="took this save for dead"):
            save_as(pool, 1, 2.0)
        monkeypatch.undo()
        assert ("c/manifest-r00001" in pool.list()) is again
        if again:
            found = {"w": torch.zeros(200_000)}
            load(found, storage_reader=FromRank(pool, "c"), no_dist=True)
            assert (found["w"] == 1.0).all()


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_segments_of_a_manifest_that_cannot_be_listed_stay(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """r18: m + 1 devices silent for a moment hid another rank's manifest from the clean-up."""
    with harness.open() as pool:
        save_as(pool, 1, 1.0)
        hidden = [url for url, _ in harness.columns("c/manifest-r00001")]
        clean_up = StorageWriter._clean_up

        def silent(writer: StorageWriter, *args: object) -> None:
            harness.lose(hidden)
            clean_up(writer, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(StorageWriter, "_clean_up", silent)
        save_as(pool, 0, 2.0)
        assert pool.metrics.value("cleanup_postponed_total") == 1
    harness.bring_back()
    with harness.open() as pool:
        found = {"w": torch.zeros(200_000)}
        load(found, storage_reader=FromRank(pool, "c"), no_dist=True)
        assert (found["w"] == 1.0).all()
