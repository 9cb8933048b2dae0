"""A crash before any change of a device, while a step is copied into another pool (rule 26)."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest

import hpstore
from hpstore.checkpoint.catalog import step_catalog
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.tiers.copy_step import copy_step
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.integration.rolled_back import RUN, checkpointer, held, save
from tests.integration.test_checkpoint_crashes import open_crashing
from tests.thorough import crash_points


@pytest.mark.usefixtures("segments_apart")
def test_a_crash_in_a_copy_leaves_all_of_it_or_nothing(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Step 2 refers to what the copy of step 1 holds; a second copy ends what the first began."""
    logging.getLogger("hpstore").setLevel(logging.CRITICAL)
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2)
    source = StepCatalog(pool, RUN)
    directory = tmp_path / "tier"
    directory.mkdir()
    harness = Harness(directory, data=2, parity=1, devices=4, unit_bytes=16 * KIB)
    with harness.open() as target:
        copy_step(source, 1, StepCatalog(target, RUN))
    start = {url: (d.files, d._durable_names) for url, d in harness.devices.items()}
    seen = set()
    for crash_at in crash_points():
        for url, device in harness.devices.items():
            device.files, device._durable_names = copy.deepcopy(start[url])
        crashing, changes = open_crashing(harness, crash_at)
        try:
            copy_step(source, 2, StepCatalog(crashing, RUN))
        except SimulatedCrash:
            assert changes[0] > crash_at
        finished = changes[0] <= crash_at
        (harness.power_cut if crash_at % 2 else harness.restart)()
        with harness.open() as target, checkpointer(target) as ckpt:
            found = held(ckpt)
            assert found in ([{1: 1.0, 2: 2.0}] if finished else [{1: 1.0}, {1: 1.0, 2: 2.0}])
            seen.add(len(found))
            copy_step(source, 2, StepCatalog(target, RUN))
            with pytest.MonkeyPatch.context() as patch:  # who was copying is dead: not this process
                patch.setattr(step_catalog, "attempt_lives", lambda *_: False)
                ckpt.steps.collect_garbage()
            assert held(ckpt) == {1: 1.0, 2: 2.0}
            objects = {key for step in (1, 2) for key in ckpt.steps.manifest(step).segment_keys}
            assert {key for key in target.list(RUN) if "segment" in key} == objects
        if finished:
            break
    assert seen == {1, 2}
