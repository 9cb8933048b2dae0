"""With tiers a step is protected and deleted in all pools that have it, or errors say where."""

from __future__ import annotations

from typing import Any

import pytest

from hpstore.checkpoint import Tier
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.errors import CheckpointError, TooFewDevices
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.rolled_back import RUN, checkpointer, save_all, steps_in

cold = rolled_back.cold  # a fixture


def test_protection_and_deletion_reach_all_that_have_a_step(pool: Pool, cold: Pool) -> None:
    with checkpointer(pool, keep_last=1, tiers=[Tier(pool=cold, keep_last=1)]) as ckpt:
        save_all(ckpt, 1)
        ckpt.steps.protect(1, "best")
        save_all(ckpt, 2)
        assert steps_in(cold) == [1, 2]
        assert ckpt.steps.protected() == {"best": 1}
        ckpt.steps.unprotect("best")
        ckpt.delete(1)
        assert ckpt.steps() == [2]
        ckpt.delete(2)
        assert (ckpt.steps(), steps_in(cold)) == ([], [])


def test_a_step_that_one_pool_protects_is_deleted_in_none(pool: Pool, cold: Pool) -> None:
    """Another process, which has no tiers, protected it in the first pool alone."""
    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1)
        StepCatalog(pool, RUN).protect(1, "best")
        with pytest.raises(CheckpointError, match=r"protected as .best. in .* Nothing was deleted"):
            ckpt.steps.delete(1)
        assert steps_in(pool) == steps_in(cold) == [1]
        ckpt.steps.delete(1, force=True)
        assert steps_in(pool) == steps_in(cold) == []


def test_a_deletion_that_fails_names_the_pools_that_have_let_the_step_go(
    pool: Pool, cold: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = Pool.delete

    def refusing(there: Pool, *args: Any, **options: Any) -> Any:
        if there is pool:
            raise TooFewDevices("1 of 5 devices can be written. Nothing was changed")
        return delete(there, *args, **options)

    with checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt:
        save_all(ckpt, 1)
        monkeypatch.setattr(Pool, "delete", refusing)
        with pytest.raises(TooFewDevices, match="is deleted in cold, not in ") as caught:
            ckpt.steps.delete(1)
        assert "Nothing was changed" not in str(caught.value)
        assert (steps_in(pool), steps_in(cold)) == ([1], [])
        monkeypatch.setattr(Pool, "delete", delete)
        ckpt.steps.delete(1)
        assert steps_in(pool) == []
