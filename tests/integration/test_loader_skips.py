"""on_error="skip": samples that `transform` fails for are left out, counted and said once; all
others come, in the same batches, with threads and with processes. (Case r8_small.)"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.loaders import DataLoader, Dataset
from hpstore.loaders.batching.transforms import MOST_FAILURES
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import PLAIN, labels, write

COUNT = 40
BAD = {0, 5, 6, 39}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dataset]:
    with make_pool(Path(tmp_path_factory.mktemp("pool"))) as pool:
        yield write(pool, "a", PLAIN, COUNT)


def decoded(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) in BAD:
        raise ValueError("this image does not decode")
    return {"label": sample["label"]}


@pytest.mark.parametrize("context", [None, "fork"])
@pytest.mark.parametrize("batch_size", [10, 1, None])
def test_samples_that_do_not_decode_are_left_out(
    data: Dataset, batch_size: int | None, context: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Stats count them, one line of the log names the first."""
    with caplog.at_level(logging.WARNING):
        loader = DataLoader(
            data,
            batch_size,
            transform=decoded,
            on_error="skip",
            num_workers=1,
            multiprocessing_context=context,
        )
        found = list(loader)
    if batch_size is None:
        assert [int(one["label"]) for one in found] == sorted(set(range(COUNT)) - BAD)
    else:
        of = [
            [i for i in range(n, n + batch_size) if i not in BAD]
            for n in range(0, COUNT, batch_size)
        ]
        assert [labels(batch) for batch in found] == [batch for batch in of if batch]
    stats = loader.stats()
    assert (stats["skipped_samples"], stats["samples"]) == (len(BAD), COUNT - len(BAD))
    said = [r.getMessage() for r in caplog.records if "transform failed" in r.getMessage()]
    assert len(said) == 1
    assert "ValueError: this image does not decode" in said[0]
    assert "of sample 0 " in said[0]
    loader.close()


def test_a_run_with_skipped_samples_is_resumed_exactly(data: Dataset) -> None:
    """Positions count what was read, not what was left of it."""

    def made() -> DataLoader:
        return DataLoader(data, 7, shuffle=True, seed=2, transform=decoded, on_error="skip")

    whole = [labels(batch) for batch in made()]
    for cut in range(len(whole)):
        first = made()
        run = iter(first)
        found = [labels(next(run)) for _ in range(cut)]
        second = made()
        second.load_state_dict(first.state_dict())
        assert found + [labels(batch) for batch in second] == whole


@pytest.mark.parametrize("batch_size", [1, 2, 10, None])
def test_a_transform_that_never_works_is_an_error(data: Dataset, batch_size: int | None) -> None:
    """The function is at fault, not the samples: nothing would be trained on without a word."""
    tried: list[int] = []

    def broken(sample: dict[str, Any]) -> Any:
        tried.append(int(sample["label"]))
        raise KeyError("no such field")

    with pytest.raises(KeyError, match="no such field"):
        list(DataLoader(data, batch_size, transform=broken, on_error="skip", num_workers=1))
    assert len(tried) >= MOST_FAILURES  # other threads were at theirs


def test_a_batch_of_nothing_but_bad_samples_is_left_out(data: Dataset) -> None:
    """Samples 5 and 6 are neighbours."""
    sampler = [[1, 2], [5, 6], [3, 4]]
    loader = DataLoader(data, batch_sampler=sampler, transform=decoded, on_error="skip")
    assert [labels(batch) for batch in loader] == [[1, 2], [3, 4]]
    assert loader.stats()["skipped_samples"] == 2


def test_without_it_the_first_one_stops_the_run(data: Dataset) -> None:
    loader = DataLoader(data, 10, transform=decoded)
    with pytest.raises(ValueError, match="does not decode") as caught:
        list(loader)
    assert any("of sample 0 " in note for note in caught.value.__notes__)


def test_a_transform_that_returns_none_is_told_what_to_do(data: Dataset) -> None:
    loader = DataLoader(data, 10, transform=lambda s: None if s["label"] == 5 else s)
    with pytest.raises(TypeError) as caught:
        list(loader)
    assert any('give on_error="skip"' in note for note in caught.value.__notes__)
    kept = DataLoader(data, 10, transform=lambda s: None, collate_fn=len)
    assert list(kept) == [10] * 4
    assert torch.is_tensor(next(iter(DataLoader(data, 10)))["label"])
