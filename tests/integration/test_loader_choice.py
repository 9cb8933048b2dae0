"""Filters, parts in mixtures, weights that change and packed sequences, over real pools."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, SequentialSampler, Subset, TensorDataset

import hpstore
from hpstore.errors import ConfigError
from hpstore.loaders import (
    DataLoader,
    Dataset,
    DatasetWriter,
    Field,
    LoaderMemory,
    Mixture,
    Packing,
)
from hpstore.loaders.batching.dataset_orders import source_order

FIELDS = {
    "tokens": Field("uint16", (None,)),
    "mask": Field("uint8", (None,)),
    "label": Field("int64"),
    "score": Field("bfloat16"),
    "pair": Field("int32", (2,)),
    "image": Field("uint8", (96,)),
}
EOS = 7


class Written:
    """A dataset, and what was written into it."""

    def __init__(self, pool: hpstore.Pool, name: str, count: int, base: int) -> None:
        rng = np.random.default_rng(base)
        self.tokens, self.labels = [], []
        with DatasetWriter(pool, name, FIELDS, shard_bytes="64KiB") as writer:
            for n in range(count):
                size = int(rng.integers(0, 60)) if n % 37 else int(rng.integers(300, 900))
                made = rng.integers(base, base + 1000, size).astype(np.uint16)
                self.tokens.append(made.tolist())
                self.labels.append(n % 5)
                writer.write(
                    {
                        "tokens": made,
                        "mask": (made % 2).astype(np.uint8),
                        "label": n % 5,
                        "score": torch.tensor(n / count, dtype=torch.bfloat16),
                        "pair": np.array([n, -n], np.int32),
                        "image": np.full(96, n % 256, np.uint8),
                    }
                )
        self.data = Dataset(pool, name)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Written]]:
    path: Path = tmp_path_factory.mktemp("choice")
    places = [path / f"d{i}" for i in range(4)]
    with hpstore.create(places, data=2, parity=1, config=path / "pool.toml") as pool:
        yield [Written(pool, "a", 900, 1000), Written(pool, "b", 350, 20_000)]


def labels(loader: Any) -> list[int]:
    """Of an epoch."""
    return [int(one) for batch in loader for one in batch["label"]]


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


# --- packing -----------------------------------------------------------------------------------


def stream(written: Written, order: Any, epoch: int) -> list[int]:
    """All tokens of an epoch."""
    found: list[int] = []
    for number in order.indices(epoch, 0, order.length).tolist():
        found += [*written.tokens[number], EOS]
    return found


PACKING = Packing(field="tokens", length=128, separator=EOS, beside=("mask",))


@pytest.mark.parametrize("shuffle", [False, True, "window"])
@pytest.mark.parametrize("cache", ["auto", 0])
def test_no_token_is_lost_on_any_ranks(sets: list[Written], shuffle: Any, cache: Any) -> None:
    """Two ranks, cut, then three with another batch size, over two epochs: every token in the
    order's sequence, with its mask."""
    a = sets[0]

    def loader(size: int, rank: int, world: int) -> Any:
        return DataLoader(
            a.data,
            size,
            shuffle=shuffle,
            seed=5,
            rank=rank,
            world_size=world,
            tail="uneven",
            cache=cache,
            packing=PACKING,
        )

    order = loader(1, 0, 1).order.documents
    wanted = []
    for epoch in range(2):
        tokens = stream(a, order, epoch)
        wanted += tokens + [0] * (-len(tokens) % 128)
    parts: list[list[Any]] = []
    state: dict[str, Any] = {}
    for rank in range(2):
        one = loader(3, rank, 2)
        batches = iter(one)
        parts.append([next(batches) for _ in range(5)])
        state = json.loads(json.dumps(one.state_dict()))
        one.close()
    steps = [b for step in zip(*parts, strict=True) for b in step]
    parts = []
    for rank in range(3):
        one = loader(4, rank, 3)
        one.load_state_dict(state)
        parts.append([list(one) for _ in range(2)])
        one.close()
    for epoch in range(2):
        count = max(len(mine[epoch]) for mine in parts)
        steps += [mine[epoch][n] for n in range(count) for mine in parts if n < len(mine[epoch])]
    got = torch.cat([batch["tokens"] for batch in steps])
    assert got.dtype is torch.int64
    assert got.flatten().tolist() == wanted
    masks = torch.cat([batch["mask"] for batch in steps]).flatten()
    own = (got.flatten() % 2) * (got.flatten() >= 1000)
    assert (masks == own).all()
    ids = torch.cat([batch["document_ids"] for batch in steps])
    assert ((ids == -1) == (got == 0)).all()


def test_windows_hold_batches_of_many_short_documents(sets: list[Written]) -> None:
    """Thousands of documents of one token beside long ones, small windows, nothing in memory: a
    batch that has far more documents than most waits for no page that has no room."""
    pool = sets[0].data.pool
    fields = {"tokens": Field("uint16", (None,)), "blob": Field("uint8", (500,))}
    blob = np.zeros(500, np.uint8)
    with DatasetWriter(pool, "short", fields, unit_bytes="16KiB") as writer:
        for n in range(9000):
            writer.write({"tokens": np.full(1, 1 + n % 999, np.uint16), "blob": blob})
        for _ in range(700):
            writer.write({"tokens": np.full(400, 5, np.uint16), "blob": blob})
    data = Dataset(pool, "short")
    loader = DataLoader(
        data,
        64,
        shuffle="window",
        cache=0,
        memory=LoaderMemory(window_bytes="64KiB"),
        timeout=30,
        packing=Packing(field="tokens", length=128),
    )
    total = sum(int((batch["document_ids"] >= 0).sum()) for batch in loader)
    mode = loader.stats()["mode"]
    loader.close()
    assert mode == "window"
    assert total == 9000 + 280_000


def test_sequences_of_a_mixture_have_exact_shares_of_tokens(sets: list[Written]) -> None:
    """3 to 1 in sequences, so in tokens, whatever the documents' lengths; an epoch of so many."""
    data = [sets[0].data, Subset(sets[1].data, range(100))]
    mixture = Mixture(data, [3, 1], source_field="from", tokens=64 * 400 - 5)
    packing = Packing(field="tokens", length=64)

    def loader(size: int = 8, **where: Any) -> Any:
        return DataLoader(mixture, size, shuffle=True, packing=packing, **where)

    one = loader()
    assert len(one) == 50
    batches = list(one)
    one.close()
    sources = torch.cat([batch["from"] for batch in batches])
    tokens = torch.cat([batch["tokens"] for batch in batches])
    assert sources.sum() == 100
    real = tokens[tokens > 0]
    assert ((tokens >= 20_000).any(1) == (sources == 1)).all()
    assert len(real) > 0.98 * tokens.numel()
    again = loader(3, rank=1, world_size=2)
    first = loader()
    taken = iter(first)
    for _ in range(7):
        next(taken)
    again.load_state_dict(first.state_dict())
    got = next(iter(again))
    assert (got["tokens"] == tokens[56 + 3 : 56 + 6]).all()
    first.close()
    again.close()
    with pytest.raises(ConfigError, match='use "global" or "none"'):
        DataLoader(mixture, shuffle="window", packing=packing)


@pytest.mark.parametrize("mixed", [False, True])
def test_whole_documents_come_once_and_resume(sets: list[Written], mixed: bool) -> None:
    """Best fit: documents that fit are in one row; a run that is cut goes on with other batches as
    it would have; a window shuffle is refused."""
    a = sets[0]
    data: Any = a.data
    if mixed:
        data = Mixture([a.data, Subset(sets[1].data, range(50))], [1, 1], stop="all")
    packing = Packing(field="tokens", length=64, separator=EOS, split=False)

    def loader(size: int) -> Any:
        return DataLoader(data, size, shuffle=True, packing=packing)

    whole = loader(8)
    batches = list(whole)
    tokens = torch.cat([batch["tokens"] for batch in batches])
    whole.close()
    found = set()
    for batch in batches:
        for row, ids in zip(batch["tokens"], batch["document_ids"], strict=True):
            found |= {tuple(row[ids == number].tolist()) for number in range(int(ids.max()) + 1)}
    short = {(*one, EOS) for one in a.tokens if len(one) < 64}
    assert short <= found
    first = loader(3)
    taken = iter(first)
    head = torch.cat([next(taken)["tokens"] for _ in range(5)])
    again = loader(7)
    again.load_state_dict(first.state_dict())
    rest = torch.cat([batch["tokens"] for batch in again])
    assert (torch.cat([head, rest]) == tokens).all()
    first.close()
    again.close()
    with pytest.raises(ConfigError, match="split=False"):
        DataLoader(data, shuffle="window", packing=packing)


def test_packing_goes_with_filters_functions_and_single_samples(sets: list[Written]) -> None:
    """Documents are chosen first; functions get sequences; without a batch size one by one."""
    a = sets[0]
    keep: Any = [("label", "==", 1), ("len(tokens)", ">", 0)]
    packing = Packing(field="tokens", length=50, remainder="drop", dtype=None)
    loader = DataLoader(a.data, None, packing=packing, filter=keep)
    got = [sample["tokens"] for sample in loader]
    loader.close()
    wanted = [t for n in range(900) if a.labels[n] == 1 for t in a.tokens[n]]
    assert all(one.shape == (50,) and one.dtype is torch.uint16 for one in got)
    flat = torch.cat([one.to(torch.int64) for one in got]).tolist()
    assert flat == wanted[: len(wanted) // 50 * 50]
    called = DataLoader(
        a.data,
        4,
        packing=packing,
        filter=keep,
        transform=lambda sample: {"sum": sample["tokens"].to(torch.int64).sum()},
    )
    sums = [int(one) for batch in called for one in batch["sum"]]
    called.close()
    assert sums == [sum(flat[n : n + 50]) for n in range(0, len(flat), 50)]


def test_lengths_that_differ_beside_are_refused(sets: list[Written], tmp_path: Path) -> None:
    """By the sample."""
    pool = sets[0].data.pool
    fields = {"tokens": Field("int32", (None,)), "mask": Field("uint8", (None,))}
    with DatasetWriter(pool, "odd", fields) as writer:
        for n in range(5):
            size = n + (n == 3)
            writer.write({"tokens": np.zeros(n, np.int32), "mask": np.zeros(size, np.uint8)})
    with pytest.raises(ConfigError, match="sample 3 of data set 'odd' has other lengths"):
        DataLoader(
            Dataset(pool, "odd"), packing=Packing(field="tokens", length=4, beside=("mask",))
        )
    with pytest.raises(ConfigError, match="make no sequence"):
        DataLoader(
            Dataset(pool, "odd"), packing=Packing(field="tokens", length=99, remainder="drop")
        )


def test_a_packed_run_is_refused_where_sequences_differ(sets: list[Written]) -> None:
    """Another length, separator or remainder; another batch or dtype is none of that."""
    loader = DataLoader(sets[0].data, 4, shuffle=True, packing=PACKING)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    for change in ({"length": 64}, {"separator": 5}, {"separator": None}, {"remainder": "drop"}):
        given: dict[str, Any] = {"field": "tokens", "length": 128, "separator": EOS, **change}
        other = DataLoader(sets[0].data, 4, shuffle=True, packing=Packing(**given))
        with pytest.raises(ConfigError, match="another run"):
            other.load_state_dict(state)
    same = DataLoader(
        sets[0].data,
        9,
        shuffle=True,
        packing=Packing(field="tokens", length=128, separator=EOS, dtype="int32", pad=3),
    )
    same.load_state_dict(state)


def test_a_damaged_document_costs_its_sequences(
    sets: list[Written], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """on_error="skip": sequences that have tokens of it are left out and counted, others come."""
    from hpstore.errors import IntegrityError
    from hpstore.loaders.batching.assembler import Assembler

    a = sets[0]
    bad = next(n for n in range(400, 900) if 20 < len(a.tokens[n]) < 60)
    plain = Assembler.batch

    def damaged(self: Any, indices: Any, **options: Any) -> Any:
        if bad in np.asarray(indices).tolist():
            raise IntegrityError(f"sample {bad} is damaged")
        return plain(self, indices, **options)

    monkeypatch.setattr(Assembler, "batch", damaged)
    packing = Packing(field="tokens", length=32)
    loader = DataLoader(a.data, 8, packing=packing, on_error="skip")
    with caplog.at_level(logging.WARNING):
        rows = sum(len(batch["tokens"]) for batch in loader)
    skipped = loader.stats()["skipped_samples"]
    loader.close()
    before = sum(map(len, a.tokens[:bad]))
    touched = (before + len(a.tokens[bad]) - 1) // 32 - before // 32 + 1
    assert skipped == touched
    assert rows + skipped == -(-sum(map(len, a.tokens)) // 32)
    assert "is skipped" in caplog.text


def test_the_examples_of_the_docs_run(sets: list[Written]) -> None:
    """What docs/data.md shows of filters, mixtures and packing, over two datasets."""
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    text = text[text.index("## Choose samples") : text.index("## Resume")]
    names: dict[str, Any] = {"web": sets[0].data, "books": sets[1].data}
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == 3
    for code in found:
        exec(code, names)
        assert len(next(iter(names["loader"]))) > 2
        names["loader"].close()
    assert names["mask"].shape == (len(names["tokens"]), 1, 128, 128)
    assert names["offsets"][-1] == names["tokens"].numel()
    assert len(DataLoader(names["curriculum"], 16)) == 79
