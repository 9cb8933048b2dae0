"""Packed sequences over real pools: no token lost, whole documents, mixtures, refusals."""

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
from torch.utils.data import Subset

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
from tests.integration.chosen_sets import EOS, Written, written_sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Written]]:
    with written_sets(tmp_path_factory.mktemp("choice")) as made:
        yield made


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
