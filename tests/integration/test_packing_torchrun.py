"""Packing under torchrun: ranks come from torch.distributed, and a state fits another number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpstore.loaders import DataLoader, Packing
from tests.integration import packing_rank
from tests.integration.chosen_sets import EOS, written_sets
from tests.thorough import LONG

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(240)


def torchrun(config: Path, ranks: int, steps: int, size: int) -> list[list[list[int]]]:
    """Sequences of tokens of a launch, as steps of all ranks lay them in line."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *command, packing_rank.__file__, str(config), str(steps), str(size)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = [config.parent / f"tokens-{ranks}-{rank}.json" for rank in range(ranks)]
    by_rank = [json.loads(file.read_text()) for file in files]
    return [
        batches[step]
        for step in range(max(map(len, by_rank)))
        for batches in by_rank
        if step < len(batches)
    ]


@pytest.mark.skipif(not LONG, reason="two starts of torchrun: HPSTORE_LONG_TESTS=1")
def test_an_epoch_on_two_ranks_and_then_on_three_has_every_token_once(tmp_path: Path) -> None:
    """Five steps on two ranks, the rest with another batch size on three: the documents of the
    order, end to end, each with its separator, cut every 128 tokens."""
    with written_sets(tmp_path) as (a, _):
        packing = Packing(field="tokens", length=packing_rank.LENGTH, separator=EOS)
        with closing(DataLoader(a.data, 1, shuffle=True, seed=5, packing=packing)) as loader:
            order: Any = loader.order
        numbers = order.documents.indices(0, 0, order.documents.length).tolist()
    wanted = [token for number in numbers for token in [*a.tokens[number], EOS]]
    batches = torchrun(tmp_path / "pool.toml", 2, 5, 3)
    assert [len(batch) for batch in batches] == [3] * 10
    batches += torchrun(tmp_path / "pool.toml", 3, 0, 4)
    got = [token for batch in batches for row in batch for token in row]
    assert got[: len(wanted)] == wanted
    assert len(got) == len(wanted) + -len(wanted) % packing_rank.LENGTH
