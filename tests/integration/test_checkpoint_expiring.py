"""What a checkpointer says of the steps that its next save removes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import Best, Checkpointer, SaveOptions
from hpstore.errors import ObjectNotFound
from hpstore.maintenance.deferred_repair import Expiry, note_key
from hpstore.pool.pool import Pool

pytestmark = pytest.mark.usefixtures("segments_apart")

WEIGHTS = torch.arange(50_000, dtype=torch.float32)


def note(pool: Pool, prefix: str = "run") -> Expiry | None:
    """The one under a prefix."""
    key = note_key(prefix)
    try:
        return Expiry.decode(pool.get(key), key=key)
    except ObjectNotFound:
        return None


def steps_of(found: Expiry) -> set[int]:
    """Whose objects a note names."""
    return {int(key.split("/")[1].removeprefix("step-")) for key in found.sizes}


def saved(pool: Pool, steps: int, **words: object) -> None:
    """So many steps of one run, each of other tensors."""
    with Checkpointer(pool, "run", **words) as ckpt:  # type: ignore[arg-type]  # by name
        for step in range(1, steps + 1):
            state = {"w": WEIGHTS + step, "loss": float(step)}
            ckpt.save(step, state, metrics={"loss": 1.0 / step if step < 3 else 9.0}).result()


def test_a_note_names_what_the_next_save_removes(pool: Pool) -> None:
    """Its manifest and segments, with their bytes; the newest step takes its place."""
    saved(pool, 3, keep_last=2)
    found = note(pool)
    assert found is not None
    assert steps_of(found) == {2}
    assert max(found.sizes.values()) >= WEIGHTS.nbytes
    assert {key.split("/")[1] for key in found.instead} == {f"step-{3:012d}"}
    assert "step 2 of 'run'" in found.reason
    assert found.expected_ms < found.limit_ms
    assert set(found.sizes) <= set(pool.list("run/"))


def test_steps_that_stay_are_not_named(pool: Pool) -> None:
    """Every second one, the best, a protected one, the newest."""
    saved(pool, 6, keep_last=2, keep_every=4)
    found = note(pool)
    assert found is not None
    assert steps_of(found) == {5}
    with Checkpointer(pool, "run") as ckpt:
        assert ckpt.steps() == [4, 5, 6]


def test_the_best_step_is_not_named(pool: Pool) -> None:
    """Step 2 has the least loss: it is kept beyond the last two, and so is not said to go."""
    saved(pool, 4, keep_last=2, keep_best=Best(metric="loss", mode="min"))
    found = note(pool)
    assert found is not None
    assert steps_of(found) == {3}


@pytest.mark.parametrize(
    "words", [{}, {"keep_last": 1}, {"keep_last": 1, "keep_every": 2}, {"keep_last": 5}]
)
def test_without_anything_that_goes_there_is_no_note(pool: Pool, words: dict[str, int]) -> None:
    """All are kept; the only one is never said to go; not enough of them yet."""
    saved(pool, 3, **words)
    assert note(pool) is None


def test_protecting_a_step_withdraws_the_note(pool: Pool) -> None:
    """Its healing is not put off any more; the next save's note leaves it out."""
    saved(pool, 3, keep_last=2)
    with Checkpointer(pool, "run", keep_last=2) as ckpt:
        ckpt.steps.protect(2, "good")
        assert note(pool) is None
        ckpt.save(4, {"w": WEIGHTS, "loss": 0.0}).result()
    found = note(pool)
    assert found is not None
    assert steps_of(found) == {3}


def test_what_a_later_step_refers_to_is_not_named(pool: Pool) -> None:
    """Unchanged tensors are referred to: the segment of the older step stays with the newer."""
    with Checkpointer(pool, "run", keep_last=2, save=SaveOptions(reuse=True)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"same": WEIGHTS, "other": WEIGHTS + step}).result()
    found = note(pool)
    assert found is not None
    with Checkpointer(pool, "run") as ckpt:
        kept = {s.key for s in ckpt.steps.manifest(3).segments}
    assert not kept & found.sizes.keys()
    assert steps_of(found) == {2}


def test_a_lost_device_is_made_up_for_in_the_step_that_stays(pool: Pool, tmp_path: Path) -> None:
    """The one that goes has its place in the report; it is read as ever, and healed with --all."""
    saved(pool, 3, keep_last=2)
    (tmp_path / "d0").rename(tmp_path / "away")
    with hpstore.open(pool.config.path) as opened:
        opened.evict(str(tmp_path / "d0"))
        report = opened.rebuild()
        with Checkpointer(opened, "run") as ckpt:
            spare = {
                step: min(
                    opened.stat(s.key).spare_columns for s in ckpt.steps.manifest(step).segments
                )
                for step in (2, 3)
            }
            assert ckpt.verify(2).ok
        assert spare == {2: 1, 3: 2}
        assert report.put_off
        assert opened.rebuild(everything=True).whole
