"""Filters, parts in mixtures and weights that change, over real pools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, SequentialSampler, Subset, TensorDataset

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, Mixture, Packing
from hpstore.loaders.batching.dataset_orders import source_order
from hpstore.loaders.dataset.row_filter import filter_mask
from tests.integration.chosen_sets import Written, written_sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Written]]:
    with written_sets(tmp_path_factory.mktemp("choice")) as made:
        yield made


# --- filter ------------------------------------------------------------------------------------


def test_a_filter_keeps_what_a_list_would(sets: list[Written]) -> None:
    """By function and by comparisons, of columns, of those that were not opened, and of lengths;
    shuffled and not, of a Subset too."""
    a = sets[0]
    wanted = [n for n in range(900) if a.labels[n] in (1, 3) and len(a.tokens[n]) >= 20]
    conditions: list[Any] = [
        lambda c: np.isin(c["label"], [1, 3]) & (c.lengths("tokens") >= 20),
        [("label", "in", {1, 3}), ("len(tokens)", ">=", 20)],
        [("label", "not in", (0, 2, 4)), ("len(tokens)", ">", 19)],
    ]
    narrow = Dataset(a.data.pool, "a", fields=["pair"])
    for condition in conditions:
        for shuffle in (False, True, "window"):
            loader = DataLoader(narrow, 16, shuffle=shuffle, filter=condition)
            got = [int(n) for batch in loader for n in batch["pair"][:, 0]]
            loader.close()
            assert sorted(got) == wanted
            assert shuffle or got == wanted
            assert len(loader) == -(-len(wanted) // 16)
    some = Subset(narrow, range(100, 500))
    loader = DataLoader(some, 16, filter=conditions[0])
    assert [int(n) for b in loader for n in b["pair"][:, 0]] == [
        n for n in wanted if 100 <= n < 500
    ]
    loader.close()


def test_a_filter_reads_no_records(sets: list[Written], monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the loader touches columns and tables; no record."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a record is read")

    monkeypatch.setattr(Dataset, "reader", fail)
    monkeypatch.setattr("hpstore.loaders.dataset.record_reader.StoredData.reader", fail)
    loader = DataLoader(
        sets[0].data, 8, filter=lambda c: (c["label"] == 2) & (c.lengths("tokens") > 3)
    )
    assert len(loader) > 0
    loader.close()


def test_bfloat16_columns_compare_as_numbers(sets: list[Written]) -> None:
    """Not as the bits that are stored."""
    loader = DataLoader(sets[0].data, 900, filter=[("score", "<", 0.5)])
    (batch,) = loader
    loader.close()
    assert batch["pair"][:, 0].max() < 460
    assert len(batch["pair"]) > 440


EXACT: list[tuple[Any, list[int]]] = [
    (("i", "in", [2**60 + 1, 2**63]), [1]),
    (("u", "in", [2**63 + 1, -1]), [1]),
    (("i", "not in", [0.5, 2**60]), [1, 2, 3]),
    (("i", "==", float(2**60)), [0]),
    (("i", "!=", 2.0**60 + 0.5), [1, 2, 3]),
    (("u8", "!=", 1.5), [0, 1, 2, 3]),
    (("u8", "==", 1.5), []),
    (("u8", "<", 1.5), [0, 1]),
    (("u8", "<=", np.float32(1.5)), [0, 1]),
    (("u8", ">", 1.5), [2, 3]),
    (("u8", ">=", 1.5), [2, 3]),
    (("u8", "<", float("inf")), [0, 1, 2, 3]),
    (("u8", "in", [256, 1, -255]), [1]),
    (("f", "==", 0.1), [1]),
    (("f", "in", {0.1, 10**400}), [1]),
    (("f", "<", 10**400), [0, 1, 2, 3]),
    (("b", "in", [2, 1]), [1, 2, 3]),
]


def test_comparisons_are_exact(sets: list[Written]) -> None:
    """As Python compares ints with ints and floats; a float is that of the column's dtype, with
    `in` too. numpy had rounded both sides."""
    dtypes = {"i": "int64", "u": "uint64", "u8": "uint8", "f": "float32", "b": "bool"}
    pool = sets[0].data.pool
    with DatasetWriter(pool, "exact", {n: Field(dtype) for n, dtype in dtypes.items()}) as writer:
        for n in range(4):
            writer.write({"i": 2**60 + n, "u": 2**63 + n, "u8": n, "f": n / 10, "b": n > 0})
    with Dataset(pool, "exact") as found:
        for condition, wanted in EXACT:
            assert np.flatnonzero(filter_mask(found, [condition])).tolist() == wanted, condition


ABSENT: list[tuple[Any, list[int]]] = [  # of the values None, 0, None, 3, 4
    ([("score", "==", 0)], [1]),
    ([("score", "<", 1)], [1]),
    ([("score", "!=", 3)], [1, 4]),
    ([("score", "in", [0, 4])], [1, 4]),
    ([("score", "not in", [4])], [1, 3]),
    ([("score", "==", None)], [0, 2]),
    ([("score", "!=", None)], [1, 3, 4]),
    ([("score", "!=", None), ("number", ">", 1)], [3, 4]),
    ([("len(text)", "==", 0)], [1]),
    ([("len(text)", "<", 9)], [1, 3, 4]),
    ([("text_mask", "==", False)], [0, 2]),
    ([("len(text)", "==", None)], [0, 2]),
    ([("number", "!=", None)], [0, 1, 2, 3, 4]),
    ([("number", "==", None)], []),
    (lambda c: (c["score"] == 0) & c["score_mask"], [1]),
]


def test_none_is_kept_by_no_comparison(sets: list[Written]) -> None:
    """What stands in its place is 0 and no text: neither is a value of that sample."""
    pool = sets[0].data.pool
    fields = {
        "number": Field("int64"),
        "score": Field("float32", optional=True),
        "text": Field("str", optional=True),
    }
    with DatasetWriter(pool, "absent", fields) as writer:
        for n in range(5):
            value = None if n in (0, 2) else n if n > 1 else 0
            text = None if value is None else "x" * value
            writer.write({"number": n, "score": value, "text": text})
    for some in (None, ["number"]):
        with Dataset(pool, "absent", fields=some) as found:
            for condition, wanted in ABSENT:
                assert np.flatnonzero(filter_mask(found, condition)).tolist() == wanted, condition


def test_a_filter_goes_with_ranks_and_resume(sets: list[Written]) -> None:
    """Three ranks, then two: each sample that is kept comes once; another filter is refused."""
    keep: Any = [("label", "==", 4)]

    def loader(rank: int, world: int, condition: Any = keep) -> Any:
        return DataLoader(
            sets[0].data,
            5,
            shuffle=True,
            seed=3,
            tail="uneven",
            rank=rank,
            world_size=world,
            filter=condition,
        )

    got: list[int] = []
    state: dict[str, Any] = {}
    for rank in range(3):
        one = loader(rank, 3)
        batches = iter(one)
        for _ in range(4):
            got += next(batches)["pair"][:, 0].tolist()
        state = json.loads(json.dumps(one.state_dict()))
        one.close()
    for rank in range(2):
        one = loader(rank, 2)
        one.load_state_dict(state)
        got += [n for batch in one for n in batch["pair"][:, 0].tolist()]
        one.close()
    assert sorted(got) == list(range(4, 900, 5))
    for other in ([("label", "==", 3)], None):
        with pytest.raises(ConfigError, match="another run"):
            loader(0, 1, other).load_state_dict(state)


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ([("label", "==", 99)], "keeps none of the 900 samples"),
        ([("tokens", "==", 1)], r"lies in the records; its length is len\(tokens\)"),
        ([("image", "==", 1)], "lies in the records"),
        ([("nothing", "==", 1)], "is no field"),
        ([("len(label)", ">", 1)], "is no field|without a ragged field"),
        ([("label", "=", 1)], "none of =="),
        ([("label", "==", "x")], "hold numbers"),
        ([("label", "in", 3)], "list of numbers"),
        ([("label", "<", None)], "hold numbers"),
        ([("label", "in", [None])], "hold numbers"),
        ([("nothing", "==", None)], "is no field"),
        ([("label", "==")], "no comparison"),
        ([("pair", "==", 1)], r"bool of shape \(900, 2\)"),
        ([], "give a function"),
        ("label == 3", "give a function"),
        (7, "give a function"),
        (lambda c: c["label"], "int64 of shape"),
        (lambda c: np.ones(3, bool), r"shape \(3,\)"),
    ],
)
def test_wrong_filters_are_refused(sets: list[Written], condition: Any, says: str) -> None:
    """As the loader is made."""
    with pytest.raises(ValueError, match=says):
        DataLoader(sets[0].data, filter=condition)


def test_errors_of_a_filter_name_the_dataset(sets: list[Written]) -> None:
    """They keep their type."""

    def broken(columns: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        DataLoader(sets[0].data, filter=broken)
    assert "in filter, of data set 'a'" in caught.value.__notes__[0]


def test_filters_and_packing_are_for_datasets_of_hpstore(sets: list[Written]) -> None:
    """Others are refused, as are what excludes each other."""
    other = TensorDataset(torch.zeros(9))
    with pytest.raises(ConfigError, match="filter: for data sets of hpstore"):
        DataLoader(other, filter=[("x", "==", 1)])
    with pytest.raises(ConfigError, match="packing: for data sets of hpstore"):
        DataLoader(other, packing=Packing(field="tokens", length=8))
    data = sets[0].data
    with pytest.raises(ConfigError, match="packing with a sampler"):
        DataLoader(data, sampler=SequentialSampler(data), packing=Packing(field="tokens", length=8))
    with pytest.raises(ConfigError, match=r"give a Packing"):
        DataLoader(data, packing={"field": "tokens"})  # type: ignore[arg-type]
    order = source_order((data,), None, "none", 0, window_bytes=1)
    with pytest.raises(ConfigError, match="has every document once"):
        DataLoader(data, shuffle=order, packing=Packing(field="tokens", length=8))


# --- mixtures ----------------------------------------------------------------------------------


def numbers_of(batch: Any) -> list[tuple[int, int]]:
    """(source, number of the sample as it was written) of each row."""
    return list(zip(batch["from"].tolist(), batch["pair"][:, 0].tolist(), strict=True))


@pytest.mark.parametrize("shuffle", ["none", "global"])
def test_parts_and_joined_sets_are_mixed_each_by_itself(sets: list[Written], shuffle: str) -> None:
    """A Subset, the rest of the same dataset, and a ConcatDataset of parts: each source goes
    through its own samples, once before any comes twice."""
    a, b = (one.data for one in sets)
    few, rest = Subset(a, range(60)), Subset(a, range(60, 900))
    joined: Any = ConcatDataset([Subset(b, [5, 3, 1]), a])
    mixture = Mixture([few, rest, joined], [1, 2, 1], source_field="from", length=2000)
    loader = DataLoader(mixture, 50, shuffle=shuffle, seed=1)
    got = [one for batch in loader for one in numbers_of(batch)]
    stands: Any = loader.engine().stats()["mode"]
    loader.close()
    assert stands == "mixture"
    mine = [[n for source, n in got if source == wanted] for wanted in range(3)]
    assert [len(one) for one in mine] == [500, 1000, 500]
    assert set(mine[0]) == set(range(60))
    assert sorted(mine[0][:60]) == list(range(60))
    assert sorted(mine[1][:840]) == list(range(60, 900))
    if shuffle == "none":
        assert mine[2] == [5, 3, 1, *range(497)]
        assert mine[1][:5] == [60, 61, 62, 63, 64]


@pytest.mark.parametrize("cache", ["auto", 0])
def test_windows_in_a_mixture_lose_nothing_anywhere(sets: list[Written], cache: Any) -> None:
    """Read by windows, from memory or not; cut and gone on with on other ranks: as the order says,
    and every source is gone through."""
    mixture = Mixture([one.data for one in sets], [2, 1], source_field="from", length=1500)

    def loader(**where: Any) -> Any:
        return DataLoader(mixture, 30, shuffle="window", seed=2, cache=cache, **where)

    whole = loader()
    wanted = [one for _ in range(2) for batch in whole for one in numbers_of(batch)]
    order = whole.order
    assert order is not None
    told = mixture.split(np.concatenate([order.indices(e, 0, 1500) for e in range(2)]))
    assert wanted == list(zip(told.source.tolist(), told.sample.tolist(), strict=True))
    whole.close()
    assert len(set(wanted)) == 900 + 350
    first = loader()
    batches = iter(first)
    got = [one for _ in range(7) for one in numbers_of(next(batches))]
    state = first.state_dict()
    first.close()
    parts = []
    for rank in range(3):
        one = loader(rank=rank, world_size=3)
        one.load_state_dict(state)
        parts.append([numbers_of(batch) for batch in one])
        one.close()
    got += [row for step in zip(*parts, strict=True) for rows in step for row in rows]
    assert got[:1500] == wanted[:1500]


def test_an_epoch_ends_with_the_first_or_with_all(sets: list[Written]) -> None:
    """1 to 1 of 900 and 350: none comes twice, or all are there."""
    data = [one.data for one in sets]
    for stop, length in (("first", 700), ("all", 1800)):
        mixture = Mixture(data, [1, 1], source_field="from", stop=stop)  # type: ignore[arg-type]
        assert len(mixture) == length
        loader = DataLoader(mixture, 50, shuffle=True)
        got = [one for batch in loader for one in numbers_of(batch)]
        loader.close()
        assert len(got) == length
        if stop == "first":
            assert len(set(got)) == length
        else:
            assert len(set(got)) == 1250


def test_weights_change_at_their_step_whatever_batches_a_run_has(sets: list[Written]) -> None:
    """None of the second source before step 10 of 32, half from there on, in the next epoch too;
    a run that is cut and has other batches gets the same samples."""
    data = [one.data for one in sets]
    mixture = Mixture(
        data,
        [(0, [1, 0]), (10, [1, 1])],
        step_samples=32,
        source_field="from",
        length=640,
    )
    whole = DataLoader(mixture, 32, shuffle=True)
    sources = [batch["from"].tolist() for _ in range(2) for batch in whole]
    assert sum(map(sum, sources[:10])) == 0
    assert sum(map(sum, sources[10:20])) == 160
    assert sum(map(sum, sources[20:])) == 320
    whole.close()
    whole = DataLoader(mixture, 32, shuffle=True)
    wanted = [one for batch in whole for one in numbers_of(batch)]
    whole.close()
    first = DataLoader(mixture, 20, shuffle=True)
    batches = iter(first)
    got = [one for _ in range(9) for one in numbers_of(next(batches))]
    later = DataLoader(mixture, 7, shuffle=True, tail="uneven")
    later.load_state_dict(first.state_dict())
    got += [one for batch in later for one in numbers_of(batch)]
    assert got == wanted
    other = DataLoader(Mixture(data, [1, 1], source_field="from", length=640), 7, shuffle=True)
    with pytest.raises(ConfigError, match="another run"):
        other.load_state_dict(first.state_dict())
    first.close()
    later.close()


def test_a_filter_is_for_each_source_of_a_mixture(sets: list[Written]) -> None:
    """Weights stay; a source that has nothing left is named."""
    data = [sets[0].data, Subset(sets[1].data, range(200))]
    mixture: Any = Mixture(data, [1, 1], source_field="from", length=400)
    loader = DataLoader(mixture, 40, shuffle=True, filter=[("label", "==", 2)])
    got = [one for batch in loader for one in numbers_of(batch)]
    loader.close()
    assert sum(source for source, _ in got) == 200
    assert all(number % 5 == 2 for _, number in got)
    assert max(number for source, number in got if source) < 200
    with pytest.raises(ConfigError, match="none of the 200 samples of source 1"):
        DataLoader(
            mixture, filter=lambda c: c["pair"][:, 0] >= (0 if len(c["pair"]) == 900 else 300)
        )
    with pytest.raises(ConfigError, match="filter of a part of a mixture"):
        DataLoader(Subset(mixture, range(9)), filter=[("label", "==", 2)])
