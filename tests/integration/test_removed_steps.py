"""A step that retention of another process removes while it is read (rule 19), and manifests that
cannot be read beside a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.convert.export import export_checkpoint
from hpstore.checkpoint.format.checkpoint_manifest import Manifest, manifest_key, step_prefix
from hpstore.checkpoint.tiers.copy_step import copy_step
from hpstore.errors import CheckpointError, ObjectNotFound
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.rolled_back import RUN, checkpointer, held, save

cold, run = rolled_back.cold, rolled_back.run  # fixtures
GONE = r"step 2 under 'run' was removed or saved again while it was read.*\[1, 3, 4\]"
pytestmark = pytest.mark.usefixtures("segments_apart")


@pytest.fixture
def removed_once_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes step 2 right after its manifest was read, once."""
    read, done = StepCatalog.manifest, list[int]()

    def manifest(self: StepCatalog, step: int) -> Manifest:
        found = read(self, step)
        if step == 2 and not done:
            done.append(step)
            StepCatalog(self.pool, self.prefix).delete(2)
        return found

    monkeypatch.setattr(StepCatalog, "manifest", manifest)


def test_what_was_opened_and_is_removed_says_so(run: Pool) -> None:
    """One index, tensors and the tree of a step that was there when it was opened."""
    with checkpointer(run) as ckpt:
        step = ckpt.read(2)
        tensor = step["free"]
        StepCatalog(run, RUN).delete(2)
        reads: list[Callable[[], object]] = [tensor.tensor, step.tensors, step.tree]
        for read in reads:
            with pytest.raises(CheckpointError, match=GONE):
                read()


@pytest.mark.usefixtures("removed_once_read")
@pytest.mark.parametrize("what", ["verify", "load", "diff", "diff to it", "export"])
def test_a_step_that_goes_while_it_is_read_says_so(run: Pool, tmp_path: Path, what: str) -> None:
    """Not that some segment is no object, which says nothing to an evaluator."""
    target = tmp_path / "out.safetensors"
    with checkpointer(run) as ckpt:
        reads: dict[str, Callable[[], object]] = {
            "verify": lambda: ckpt.verify(2),
            "load": lambda: ckpt.load(2),
            "diff": lambda: ckpt.steps.diff(2, 3, norms=True),
            "diff to it": lambda: ckpt.steps.diff(1, 2, norms=True),
            "export": lambda: export_checkpoint(run, RUN, 2, target),
        }
        with pytest.raises(CheckpointError, match=GONE):
            reads[what]()
        assert held(ckpt) == {1: 1.0, 3: 3.0, 4: 4.0}
    assert not target.exists()


def test_a_step_that_is_saved_again_while_it_is_read_says_so(run: Pool) -> None:
    with checkpointer(run) as ckpt:
        step = ckpt.read(4)
        StepCatalog(run, RUN).delete(4)
        save(ckpt, 4, shift=0.5)
        with pytest.raises(CheckpointError, match=r"step 4 under 'run' was removed or saved again"):
            step.tensors(["free"])


def test_a_segment_that_is_lost_is_no_step_that_was_removed(run: Pool) -> None:
    """Then the step is listed, and its segment is what has to be looked for."""
    with checkpointer(run) as ckpt:
        step = ckpt.read(4)
        lost = next(s.key for s in step.manifest.objects if s.key.startswith(step_prefix(RUN, 4)))
        run.delete(lost)
        with pytest.raises(ObjectNotFound, match="segment"):
            step.tensors(["free"])


def test_a_step_that_goes_while_it_is_copied_says_so(
    run: Pool, cold: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = StepCatalog(run, RUN), StepCatalog(cold, RUN)
    listed = target.all

    def removed_first() -> list[int]:
        if 2 in source.all():
            source.delete(2)
        return listed()

    monkeypatch.setattr(target, "all", removed_first)
    with pytest.raises(CheckpointError, match=GONE):
        copy_step(source, 2, target)
    assert StepCatalog(cold, RUN).all() == []


def test_one_damaged_manifest_in_a_tier_stops_no_copy(run: Pool, cold: Pool) -> None:
    """What it names is not referred to; the others go on (rules 18 and 26). All copies into a pool
    failed as long as one of its manifests could not be read."""
    source, target = StepCatalog(run, RUN), StepCatalog(cold, RUN)
    copy_step(source, 1, target)
    copy_step(source, 2, target)
    cold.put(manifest_key(RUN, 1), b"no manifest")
    report = copy_step(source, 3, StepCatalog(cold, RUN))
    assert report.referenced_bytes > 0  # by the step that can be read
    assert StepCatalog(cold, RUN).all() == [1, 2, 3]
    with checkpointer(cold) as ckpt:
        assert ckpt.verify(3).ok
        assert float(ckpt.load(3)["free"][0]) == 3.0
