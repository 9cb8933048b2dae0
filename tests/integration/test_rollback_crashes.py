"""A crash before any change of a device, in a rollback, its undo and the removal."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.catalog import rollback
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import CheckpointError, HpstoreError
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.integration import rolled_back
from tests.integration.rolled_back import EVERY, RUN, checkpointer, held, save
from tests.integration.test_checkpoint_crashes import open_crashing
from tests.thorough import crash_points

run = rolled_back.run  # a fixture
between = rolled_back.between  # a fixture


LINES = [dict(list(EVERY.items())[:count]) for count in (2, 3, 4)]  # each ends at a later step


def crash_everywhere(
    tmp_path: Path,
    before: Callable[[Checkpointer], object],
    act: Callable[[Checkpointer], object],
    check: Callable[[Checkpointer, bool], None],
) -> None:
    """`act` with a crash before change 0, 1, 2, ... of a device until it runs through; then what
    the next process finds."""
    logging.getLogger("hpstore").setLevel(logging.CRITICAL)
    harness = Harness(tmp_path, data=2, parity=1, devices=4, unit_bytes=16 * KIB)
    with harness.open() as pool, checkpointer(pool) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        before(ckpt)
    start = {url: (d.files, d._durable_names) for url, d in harness.devices.items()}
    for crash_at in crash_points():
        for url, device in harness.devices.items():
            device.files, device._durable_names = copy.deepcopy(start[url])
        pool, changes = open_crashing(harness, crash_at)
        try:
            act(checkpointer(pool))
        except SimulatedCrash:
            assert changes[0] > crash_at
        finished = changes[0] <= crash_at
        (harness.power_cut if crash_at % 2 else harness.restart)()
        with harness.open() as pool, checkpointer(pool) as ckpt:
            check(ckpt, finished)
        if finished:
            assert crash_at > 20
            return


def all_back(ckpt: Checkpointer) -> None:
    """Take back whatever can be."""
    while True:
        try:
            ckpt.steps.undo_rollback()
        except CheckpointError:
            return


@pytest.mark.usefixtures("segments_apart")
def test_a_crash_in_a_rollback_leaves_a_line_that_ends_later(tmp_path: Path) -> None:
    """Rule 24: called again it is done; all can be taken back, nothing is lost."""

    def check(ckpt: Checkpointer, finished: bool) -> None:
        assert held(ckpt) in (LINES[:1] if finished else LINES)
        ckpt.rollback(2)
        assert held(ckpt) == LINES[0]
        assert ckpt.steps.collect_garbage() == 0
        all_back(ckpt)
        assert held(ckpt) == EVERY

    crash_everywhere(tmp_path, lambda _: None, lambda ckpt: ckpt.rollback(2), check)


@pytest.mark.usefixtures("segments_apart")
def test_a_crash_while_it_is_taken_back_leaves_a_line_too(tmp_path: Path) -> None:
    """Called again, or not needed any more, all is back."""

    def check(ckpt: Checkpointer, finished: bool) -> None:
        assert held(ckpt) in (LINES[-1:] if finished else LINES)
        all_back(ckpt)
        assert held(ckpt) == EVERY
        assert ckpt.steps.collect_garbage() == 0

    crash_everywhere(
        tmp_path,
        lambda ckpt: ckpt.rollback(2),
        lambda ckpt: ckpt.steps.undo_rollback(),
        check,
    )


@pytest.mark.usefixtures("segments_apart")
def test_a_crash_in_the_removal_leaves_all_or_nothing_to_take_back(tmp_path: Path) -> None:
    """What is over is removed by the next process."""

    def check(ckpt: Checkpointer, finished: bool) -> None:
        del finished
        assert held(ckpt) == LINES[0]
        ckpt.steps.collect_garbage()
        keys = ckpt.pool.list(RUN)
        named = {s.key for step in ckpt.steps() for s in ckpt.steps.manifest(step).objects}
        assert {key for key in keys if "/segment-" in key} == named
        assert not [key for key in keys if "/rolled-back/" in key]
        all_back(ckpt)
        assert held(ckpt) == LINES[0]

    crash_everywhere(
        tmp_path,
        lambda ckpt: ckpt.rollback(2, grace_seconds=0),
        lambda ckpt: ckpt.steps.collect_garbage(),
        check,
    )


def test_a_rollback_that_devices_stop_says_what_is_hidden(
    tmp_path: Path, between: Callable[..., None]
) -> None:
    """What they say is of one object, that nothing was changed: a step is hidden already."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4, unit_bytes=16 * KIB)
    with harness.open() as pool, checkpointer(pool) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        between("_remove_original", 3, lambda: harness.lose(harness.urls[:2]))
        with pytest.raises(HpstoreError, match=r"\[3, 4\] are hidden in part: .*undo_rollback"):
            ckpt.rollback(2)
        harness.bring_back()
        pool.admin.refresh()
        assert ckpt.steps() == [1, 2, 3]
        assert ckpt.rollback(2).hidden == (3,)
        all_back(ckpt)
        assert held(ckpt) == EVERY


def test_an_undo_that_devices_stop_says_that_it_is_done_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, data=2, parity=1, devices=4, unit_bytes=16 * KIB)
    with harness.open() as pool, checkpointer(pool) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        ckpt.rollback(2)
        put = vars(rollback)["put_manifest"]

        def losing(steps: StepCatalog, step: int, *args: Any, **options: Any) -> Any:
            if step == 4:
                harness.lose(harness.urls[:2])
            return put(steps, step, *args, **options)

        monkeypatch.setattr(rollback, "put_manifest", losing)
        with pytest.raises(HpstoreError, match=r"\[3, 4\] are taken back in part") as said:
            ckpt.steps.undo_rollback()
        assert "Nothing was changed" not in str(said.value)
        monkeypatch.undo()
        harness.bring_back()
        pool.admin.refresh()
        assert ckpt.steps() == [1, 2, 3]
        ckpt.steps.undo_rollback()
        assert held(ckpt) == EVERY
