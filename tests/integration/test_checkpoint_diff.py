"""`ckpt.steps.diff`, `hpstore checkpoint diff` and the tree of sizes, against known states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, StepDiff
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.diff import difference_norms, step_diff
from hpstore.checkpoint.diff.difference_norms import DifferenceNorms, slabs
from hpstore.checkpoint.diff.step_diff import Change, diff_steps, same_by_hash
from hpstore.checkpoint.format.items import Box
from hpstore.errors import CheckpointError, IntegrityError
from tests.integration.cli_cases import PoolCommands

RUN = "runs/a"
BEFORE: dict[str, Any] = {
    "model": {
        "same": torch.arange(6.0),
        "moved": torch.tensor([3.0, 4.0, 0.0]),
        "shape": torch.zeros(2, 3),
        "dtype": torch.tensor([1.0, 2.0]),
        "gone": torch.ones(2),
        "zero": torch.zeros(2),
        "kind": torch.ones(2),
    },
    "epoch": 1,
    "kept": "text",
    "left": None,
}
AFTER: dict[str, Any] = {
    "model": {
        "same": torch.arange(6.0),
        "moved": torch.tensor([3.0, 1.0, 4.0]),
        "shape": torch.zeros(3, 2),
        "dtype": torch.tensor([1.0, 2.5], dtype=torch.float64),
        "new": torch.ones(4),
        "zero": torch.ones(2),
        "kind": np.ones(2, np.float32),
    },
    "epoch": 2,
    "kept": "text",
}


@pytest.fixture
def ckpt(pool: hpstore.Pool) -> Iterator[Checkpointer]:
    with Checkpointer(pool, RUN, rng=False) as made:
        made.save(1, BEFORE).result()
        made.save(2, AFTER).result()
        yield made


def changes(found: StepDiff) -> dict[str, str]:
    return {change.name: change.change.value for change in found.tensors}


def norms_of(found: StepDiff, name: str) -> DifferenceNorms:
    (norms,) = (change.norms for change in found.tensors if change.name == name)
    assert norms is not None
    return norms


def test_each_kind_of_change_is_named_without_a_read(ckpt: Checkpointer) -> None:
    """By what the manifests record alone; sorted; values beside tensors."""
    found = ckpt.steps.diff(1, 2)
    assert changes(found) == {
        "model/dtype": "retyped",
        "model/gone": "removed",
        "model/kind": "retyped",
        "model/moved": "changed",
        "model/new": "added",
        "model/shape": "reshaped",
        "model/zero": "changed",
    }
    assert list(changes(found)) == sorted(changes(found))
    assert (found.equal_tensors, found.equal_values, found.read_bytes) == (1, 1, 0)
    assert [(v.name, v.change.value, v.before, v.after) for v in found.values] == [
        ("epoch", "changed", "1", "2"),
        ("left", "removed", "None", ""),
    ]
    assert not found.same
    assert found.summary == (
        "step 1 to 2: tensors: 1 added, 1 removed, 1 reshaped, 2 retyped, 2 changed, 1 equal; "
        "values: 2 differ, 1 equal"
    )


def test_a_step_and_itself_are_the_same(ckpt: Checkpointer) -> None:
    found = ckpt.steps.diff(2, 2, norms=True)
    assert found.same
    assert (found.equal_tensors, found.read_bytes) == (7, 0)


def test_norms_are_those_of_the_difference(ckpt: Checkpointer) -> None:
    """Where both have one shape, across dtypes too. By a norm of 0 nothing is relative."""
    found = ckpt.steps.diff(1, 2, norms=True)
    assert norms_of(found, "model/moved") == DifferenceNorms(
        l2=5.0, max_abs=4.0, relative=1.0, differing=2
    )
    assert norms_of(found, "model/dtype") == DifferenceNorms(
        l2=0.5, max_abs=0.5, relative=0.5 / math.sqrt(5), differing=1
    )
    assert norms_of(found, "model/zero") == DifferenceNorms(
        l2=math.sqrt(2), max_abs=1.0, relative=None, differing=2
    )
    assert all(c.norms is None for c in found.tensors if c.change is Change.RESHAPED)
    assert changes(found)["model/kind"] == "retyped"  # other bytes it has not


def test_keys_choose_parts(ckpt: Checkpointer) -> None:
    """Whole names; a part that one step lacks is added or removed, one that none has an error."""
    assert changes(ckpt.steps.diff(1, 2, keys=["model/new", "model/gone"])) == {
        "model/gone": "removed",
        "model/new": "added",
    }
    assert ckpt.steps.diff(1, 2, keys=["kept"]).same
    with pytest.raises(CheckpointError, match="neither step 1 nor step 2 holds anything"):
        ckpt.steps.diff(1, 2, keys=["mod"])


def test_values_that_became_tensors_are_told(pool: hpstore.Pool) -> None:
    with Checkpointer(pool, RUN, rng=False) as ckpt:
        ckpt.save(1, {"a": 1, "own": ckpt.per_rank(3)}).result()
        ckpt.save(2, {"a": torch.ones(2), "own": ckpt.per_rank(4)}).result()
        found = ckpt.steps.diff(1, 2)
    assert not found.tensors
    assert [(v.name, v.before, v.after) for v in found.values] == [
        ("a", "1", "tensor float32 [2]"),
        ("own@0", "3", "4"),
    ]
    assert changes(found) == {}


@pytest.mark.parametrize("norms", [False, True])
def test_other_boxes_are_compared_by_their_bytes(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch, norms: bool
) -> None:
    """Hashes of boxes that were cut in another way tell nothing: what is equal is not reported."""
    monkeypatch.setattr(step_diff, "same_by_hash", lambda *_: None)
    seen: list[tuple[int, int]] = []
    found = ckpt.steps.diff(1, 2, norms=norms, progress=lambda *step: seen.append(step))
    assert set(changes(found)) >= {"model/moved", "model/zero"}
    assert "model/same" not in changes(found)
    assert found.equal_tensors == 1
    assert found.read_bytes > 0
    assert seen[-1] == (found.read_bytes,) * 2


def test_hashes_tell_only_of_equal_boxes(ckpt: Checkpointer) -> None:
    items = [i for i in ckpt.steps.manifest(1).items if i.name == "model/same"]
    other = [replace(items[0], box=Box(offsets=(0,), sizes=(3,)))]
    assert same_by_hash(items, items) is True
    assert same_by_hash(items, [replace(items[0], digest="0" * 32)]) is False
    assert same_by_hash(items, other) is None
    assert same_by_hash(items, [replace(items[0], digest="")]) is None


def test_large_tensors_are_read_by_slabs(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never more at once than the limit, with the same norms as of the whole; without norms the
    read ends at the first difference."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"wide": (2, 700), "tall": (500, 3), "flat": (900,), "small": (5,), "none": (0, 4)}
    before = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    after = {n: t + torch.randn(t.shape, generator=generator) for n, t in before.items()}
    after["none"] = before["none"]
    before["part"] = torch.randn(500, generator=generator)
    after["part"] = before["part"].clone()
    after["part"][499] += 1.0  # the slabs before it are equal
    reads: list[int] = []
    wide = difference_norms._wide

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        reads.append(tensor.numel())
        return wide(tensor)

    with Checkpointer(pool, RUN, rng=False) as ckpt:
        ckpt.save(1, before).result()
        ckpt.save(2, after).result()
        monkeypatch.setattr(difference_norms, "SLAB_ELEMENTS", 100)
        monkeypatch.setattr(slabs, "__defaults__", (100,))
        monkeypatch.setattr(difference_norms, "GROUP_ELEMENTS", 100)
        monkeypatch.setattr(difference_norms, "_wide", counted)
        found = ckpt.steps.diff(1, 2, norms=True)
        assert max(reads) <= 100
        for name in ("wide", "tall", "flat", "small"):
            distance = (after[name].double() - before[name].double()).flatten()
            norms = norms_of(found, name)
            assert norms.l2 == pytest.approx(float(distance.norm()))
            assert norms.max_abs == float(distance.abs().max())
            assert norms.relative == pytest.approx(
                float(distance.norm() / before[name].double().norm())
            )
            assert norms.differing == distance.numel()
        part = norms_of(found, "part")
        assert part.differing == 1
        assert part.relative == pytest.approx(part.l2 / float(before["part"].double().norm()))
        assert found.equal_tensors == 1
        monkeypatch.setattr(step_diff, "same_by_hash", lambda *_: None)
        assert ckpt.steps.diff(1, 2).read_bytes < found.read_bytes


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 1, 9), (1, 40), (4, 0, 2)])
@pytest.mark.parametrize("limit", [1, 4, 6, 100])
def test_slabs_make_the_whole_once(shape: tuple[int, ...], limit: int) -> None:
    count = np.zeros(shape, int)
    for slab in slabs(shape, limit):
        part = count[slab]
        assert part.size <= limit
        count[slab] += 1
    assert (count == 1).all()
    assert count.size == prod(shape)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64],
)
def test_dtypes_of_all_kinds_have_norms(pool: hpstore.Pool, dtype: torch.dtype) -> None:
    with Checkpointer(pool, RUN, rng=False) as ckpt:
        ckpt.save(1, {"a": torch.tensor([0.0, 1.0]).to(dtype), "s": torch.tensor(0).to(dtype)})
        ckpt.save(2, {"a": torch.tensor([1.0, 1.0]).to(dtype), "s": torch.tensor(1).to(dtype)})
        ckpt.wait()
        found = ckpt.steps.diff(1, 2, norms=True)
    expected = DifferenceNorms(l2=1.0, max_abs=1.0, relative=1.0, differing=1)
    assert norms_of(found, "a") == expected
    assert norms_of(found, "s") == replace(expected, relative=None)


def test_nan_is_said_and_equal_nans_are_equal(pool: hpstore.Pool) -> None:
    """Bytes decide what is equal; a norm over NaN is NaN."""
    with Checkpointer(pool, RUN, rng=False) as ckpt:
        ckpt.save(1, {"a": torch.tensor([math.nan, 1.0]), "b": torch.tensor([math.nan, 1.0])})
        ckpt.save(2, {"a": torch.tensor([math.nan, 1.0]), "b": torch.tensor([math.nan, 2.0])})
        ckpt.wait()
        found = ckpt.steps.diff(1, 2, norms=True)
    assert list(changes(found)) == ["b"]
    assert math.isnan(norms_of(found, "b").l2)
    assert math.isnan(norms_of(found, "b").max_abs)
    assert norms_of(found, "b").differing == 1


@pytest.mark.usefixtures("segments_apart")
def test_bytes_that_cannot_be_read_are_an_error(pool: hpstore.Pool) -> None:
    """Never a wrong norm; what hashes tell is told all the same."""
    with Checkpointer(pool, RUN, rng=False) as ckpt:
        ckpt.save(1, {"a": torch.zeros(9)}).result()
        ckpt.save(2, {"a": torch.ones(9)}).result()
        (segment,) = ckpt.steps.manifest(2).segments
        pool.put(segment.key, bytes(segment.size))
        assert changes(ckpt.steps.diff(1, 2)) == {"a": "changed"}
        with pytest.raises(IntegrityError):
            ckpt.steps.diff(1, 2, norms=True)


def test_a_manifest_without_an_item_is_an_error(ckpt: Checkpointer, pool: hpstore.Pool) -> None:
    first, second = ckpt.steps.manifest(1), ckpt.steps.manifest(2)
    with pytest.raises(CheckpointError, match="holds no such item"):
        diff_steps(StepCatalog(pool, RUN), first, replace(second, items=second.items[1:]))


@pytest.fixture
def cli(ckpt: Checkpointer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PoolCommands:
    del ckpt  # its steps are there
    return PoolCommands(tmp_path, capsys, "checkpoint")


def test_diff_as_one_types_it(cli: PoolCommands) -> None:
    """The summary line first; JSON with the same; a step that is not there is one line."""
    text = cli("diff", RUN, 1, "latest", "--norms")
    assert text.startswith("step 1 to 2: tensors: 1 added")
    assert "float32 [2, 3]" in text
    row = next(line for line in text.splitlines() if "model/moved" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][4:] == ["5", "4", "1", "2"]
    assert "epoch" in text
    found = cli.json("diff", RUN, 1, 2, "--keys", "model/moved")
    assert (found["same"], len(found["tensors"])) == (False, 1)
    assert found["tensors"][0]["change"] == "changed"
    assert found["tensors"][0]["before"] == {"dtype": "float32", "shape": [3], "bytes": 12}
    assert cli("diff", RUN, 2, 2).count("\n") == 1
    assert "no checkpoint of step 9" in cli("diff", RUN, 1, 9, code=CheckpointError.exit_code)


def test_the_tree_sums_sizes_at_each_level(cli: PoolCommands, pool: hpstore.Pool) -> None:
    """Depth cuts what is shown, sums stay; keys choose parts."""
    state = {
        "model": {"a": {"w": torch.zeros(100), "b": torch.zeros(50)}, "c": {"w": torch.zeros(25)}},
        "extra": torch.zeros(10, dtype=torch.uint8),
        "n": 3,
    }
    with Checkpointer(pool, "runs/tree", rng=False) as ckpt:
        ckpt.save(1, state).result()
    found = cli.json("inspect", "runs/tree", "--tree")
    assert (found["bytes"], found["tensors"], found["values"]) == (710, 4, 1)
    model = {child["name"]: child for child in found["children"]}["model"]
    assert (model["bytes"], model["tensors"], model["values"]) == (700, 3, 0)
    assert {c["name"]: c["bytes"] for c in model["children"]} == {"a": 600, "c": 100}
    assert "float32 [50]" in cli("inspect", "runs/tree", "--tree")
    text = cli("inspect", "runs/tree", "--depth", 1)
    assert "model  700 B  (3 tensors)" in text
    assert "step 1  710 B  (4 tensors, 1 values)" in text
    assert "[50]" not in text
    assert cli.json("inspect", "runs/tree", "--depth", 0)["children"] == []
    assert cli.json("inspect", "runs/tree", "--tree", "--keys", "model/a")["bytes"] == 600
