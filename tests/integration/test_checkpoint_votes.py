"""What rank 0 makes of the other ranks' votes: nothing that one of them wrote is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hpstore
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.checkpoint.format.items import Item, ItemColumns, whole
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.save.job_options import Earlier, JobOptions
from hpstore.checkpoint.save.rank_vote import RankVote
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.checkpoint.state.state_tree import tensor_names
from hpstore.errors import CheckpointError

TENSOR = {"$": "tensor", "item": "x"}


class Two(Ranks):
    """Rank 0 of two; the other one says what `other` gives."""

    def __init__(self, other: Callable[[], RankVote]) -> None:
        super().__init__(1.0, alone=True)
        self.world, self._other = 2, other

    def all_gather(self, mine: bytes, channel: RankChannel) -> list[bytes]:
        return [mine, self._other().encode() if b'"tree"' in mine else mine]

    def broadcast(self, message: bytes, channel: RankChannel) -> bytes:
        return message


def job(pool: hpstore.Pool, tree: Any, other: RankVote) -> SaveJob:
    """A save of rank 0, which holds no tensors."""
    options = JobOptions(
        step=1,
        tree=tree,
        names=tuple(tensor_names(tree)),
        session="s",
        overwrite=False,
        extra={},
        codec="",
        rate_bytes_per_second=None,
        began=0.0,
    )
    made = SaveJob(StepCatalog(pool, "run"), Two(lambda: other), options, Earlier())
    made.begin(fence=True)
    return made


def written(pool: hpstore.Pool, tree: Any, tolerated: int) -> RankVote:
    """A vote of a rank that has put one tensor."""
    info = pool.put("run/step-000000000001/segment-ab-r00001", bytes(8))
    columns = ItemColumns()
    columns.add([Item(name="x", dtype="float32", shape=(2,), box=whole((2,)), offset=0, length=8)])
    return RankVote(
        segments=[Segment(key=info.key, size=8, version=info.version)],
        columns=columns,
        tree=tree,
        tolerated=tolerated,
    )


def test_the_report_counts_the_debts_of_all_ranks(pool: hpstore.Pool) -> None:
    """Retention goes by it: a step whose segments on one rank have a debt is not called whole."""
    with pool:
        save = job(pool, {"x": TENSOR}, written(pool, {"x": TENSOR}, tolerated=1))
        assert save.commit().losses_tolerated == 1
        save.close()


@pytest.mark.parametrize("mine", [None, {"$": "tuple", "v": []}, []])
def test_a_tensor_that_the_merged_state_does_not_name_is_not_committed(
    pool: hpstore.Pool, mine: Any
) -> None:
    """Rank 0 has None, or a shorter list, where another rank has a tensor: that rank's is kept."""
    with pool:
        save = job(pool, {"x": mine}, written(pool, {"x": TENSOR}, tolerated=2))
        with pytest.raises(CheckpointError, match="do not fit together: 'x'"):
            save.commit()
        save.close()
        assert not pool.exists(manifest_key("run", 1))
