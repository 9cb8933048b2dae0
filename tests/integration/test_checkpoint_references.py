"""Segments of earlier steps: none that a save refers to goes, and none that nobody names stays."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from tests.integration.nets import same

pytestmark = pytest.mark.usefixtures("segments_apart")

FROZEN = {"frozen": torch.randn(300_000)}


def segments(pool: hpstore.Pool) -> list[str]:
    return [key for key in pool.list("run") if "segment" in key]


@pytest.mark.parametrize("begun_when", ["segments are looked for", "they are about to go"])
def test_a_save_beside_a_delete_refers_to_nothing_that_goes(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, begun_when: str
) -> None:
    """PROTOCOL 18: the step that it would refer to is deleted by another process meanwhile."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, FROZEN).result()
        looked = StepCatalog.still_named

        def still_named(
            steps: StepCatalog, found: set[str], going: Collection[int] = ()
        ) -> set[str]:
            monkeypatch.setattr(StepCatalog, "still_named", looked)
            named = looked(steps, found, going) if begun_when == "they are about to go" else None
            ckpt.save(2, FROZEN).result()
            ckpt.wait()  # its note names what it looked at; while it is there, all of that stays
            return looked(steps, found, going) if named is None else named

        monkeypatch.setattr(StepCatalog, "still_named", still_named)
        StepCatalog(pool, "run").delete(1)
        assert same(ckpt.load(2), FROZEN)
        assert ckpt.steps() == [2]
        assert ckpt.steps.collect_garbage() == 0
        assert same(ckpt.load(2), FROZEN)


def test_a_save_refers_to_the_step_that_was_saved_or_restored_last(pool: hpstore.Pool) -> None:
    with Checkpointer(pool, "run", rng=False) as ckpt:
        first = ckpt.save(1, FROZEN).result()
        assert ckpt.save(2, FROZEN).result().referenced_bytes == first.bytes
        ckpt.restore({"frozen": torch.empty(300_000)}, 1)
        assert ckpt.save(3, FROZEN).result().referenced_bytes == first.bytes


def twice(ckpt: Checkpointer) -> None:
    """The second time with other values."""
    for value in (1.0, 2.0):
        ckpt.save(5, {"x": torch.full((300_000,), value)}, overwrite=True).result()


def referred_to(ckpt: Checkpointer) -> None:
    """Overwritten by one that refers to the same values."""
    twice(ckpt)
    ckpt.save(5, {"x": torch.full((300_000,), 2.0), "n": 1}, overwrite=True).result()


@pytest.mark.parametrize("act", [twice, referred_to])
def test_what_an_overwritten_step_alone_named_goes_with_it(
    pool: hpstore.Pool, act: Callable[[Checkpointer], None]
) -> None:
    """A run that saves one step again and again takes no more room than two of it."""
    with Checkpointer(pool, "run", rng=False, keep_last=1) as ckpt:
        act(ckpt)
        ckpt.wait()
        assert sorted(segments(pool)) == sorted(s.key for s in ckpt.steps.manifest(5).segments)
        assert same(ckpt.load(5), {"x": torch.full((300_000,), 2.0)})


def test_what_an_overwritten_step_shared_with_another_stays(pool: hpstore.Pool) -> None:
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, FROZEN).result()
        ckpt.save(2, FROZEN).result()
        ckpt.save(1, {"frozen": torch.zeros(300_000)}, overwrite=True).result()
        ckpt.wait()
        assert same(ckpt.load(2), FROZEN)
        assert same(ckpt.load(1), {"frozen": torch.zeros(300_000)})
