"""Does a shuffled epoch look shuffled? Label statistics of every mode on data sorted by label.

Seeds are fixed: a test fails for a change of the code and not by chance. Limits are five standard
deviations on both sides, as an order that is too even is none either.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hpstore.loaders.sampling.feistel import ROUNDS, Feistel
from hpstore.loaders.sampling.order import PERMUTATION_SAMPLES, GlobalOrder, SequentialOrder
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.window_shuffle import WindowOrder, design_effect

CLASSES, BATCH = 10, 256
SAMPLES, STRIPE = 204_800, 320
NETWORK = 2_000_003
assert SAMPLES <= PERMUTATION_SAMPLES < NETWORK


def spread(labels: Indices, samples: int) -> float:
    """Chi-square of the class counts of batches, mean over batches, in units of what a random
    permutation of `samples` samples of equally frequent classes gives."""
    rows = labels[: len(labels) // BATCH * BATCH].reshape(-1, BATCH)
    expected = BATCH / CLASSES
    total = sum(
        (((rows == c).sum(axis=1) - expected) ** 2).sum() / expected for c in range(CLASSES)
    )
    return float(total) / len(rows) / ((CLASSES - 1) * (samples - BATCH) / (samples - 1))


def spread_limit(batches: int) -> float:
    """Five standard deviations of `spread` for a random permutation."""
    return 5 * math.sqrt(2 / (CLASSES - 1) / batches)


def run_statistic(labels: Indices) -> float:
    """Chi-square of the lengths of label runs (1, 2, 3, 4 and more): 3 degrees of freedom."""
    starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    runs = np.minimum(np.diff(np.append(starts, len(labels))), 4)
    found = np.bincount(runs, minlength=5)[1:]
    again = 1 / CLASSES
    share = np.array([(1 - again) * again**n for n in range(3)] + [again**3])
    return float((((found - share * len(runs)) ** 2) / (share * len(runs))).sum())


RUN_LIMIT = 3 + 5 * math.sqrt(2 * 3)


def sorted_labels(indices: Indices, samples: int) -> Indices:
    """Labels of samples that lie sorted by class."""
    return indices * CLASSES // samples


@pytest.mark.parametrize(
    ("samples", "table_samples"),
    [(SAMPLES, SAMPLES), (NETWORK, PERMUTATION_SAMPLES), (SAMPLES, 0), (20_000, 0)],
    ids=["table", "network", "small network", "tiny network"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_global_shuffle_of_sorted_data_looks_shuffled(
    samples: int, table_samples: int, seed: int
) -> None:
    """Classes in batches, and runs of a class, are those of a random permutation."""
    order = GlobalOrder(samples, seed, table_samples=table_samples)
    labels = sorted_labels(order.indices(2, 0, samples), samples)
    assert abs(spread(labels, samples) - 1) < spread_limit(samples // BATCH)
    assert run_statistic(labels) < RUN_LIMIT


def test_sorted_data_in_their_own_order_do_not_look_shuffled() -> None:
    """The statistics tell: one class a batch, ten runs."""
    labels = sorted_labels(SequentialOrder(SAMPLES).indices(0, 0, SAMPLES), SAMPLES)
    assert spread(labels, SAMPLES) > 100
    assert run_statistic(labels) > 1000 * RUN_LIMIT or len(np.flatnonzero(np.diff(labels))) == 9


@pytest.mark.parametrize("stripes", [16, 64])
def test_a_window_shuffle_of_sorted_data_is_as_uneven_as_it_says(stripes: int) -> None:
    """Not shuffled: the variance of class shares is `design_effect` times that of a global
    shuffle, since a batch comes from the stripes of one window. Mean of 20 epochs, within 10 %."""
    bounds = np.arange(0, SAMPLES + 1, STRIPE)
    order = WindowOrder(bounds, 5, window_stripes=stripes, first=stripes)
    epochs = [sorted_labels(order.indices(e, 0, SAMPLES), SAMPLES) for e in range(20)]
    found = np.mean([spread(labels, SAMPLES) for labels in epochs])
    said = design_effect(batch=BATCH, window_stripes=stripes, stripe_samples=STRIPE)
    finite = 1 - (stripes - 1) / (SAMPLES // STRIPE - 1)  # windows empty a finite set of stripes
    said = 1 + (said - 1) * finite
    assert said > 1 + 10 * spread_limit(SAMPLES // BATCH)  # far from looking shuffled
    assert abs(found / said - 1) < 0.1


def test_a_window_shuffle_of_sorted_data_is_shuffled_within_each_window() -> None:
    """What it can do: given the classes of a window, their order in it is random. Relabelled by
    their rank in the window the samples pass as a permutation, batches and runs."""
    bounds = np.arange(0, SAMPLES + 1, STRIPE)
    order = WindowOrder(bounds, 5, window_stripes=64, first=64)
    whole, ranks, at = order.indices(0, 0, SAMPLES), [], 0
    while at < SAMPLES:
        window = order.window_of(0, at)
        part = whole[window.start : window.stop]
        rank = np.argsort(np.argsort(part))  # sorted by sample, so by class
        ranks.append(rank * CLASSES // len(part))
        at = window.stop
    labels = np.concatenate(ranks)
    assert abs(spread(labels, 64 * STRIPE) - 1) < spread_limit(SAMPLES // BATCH)
    assert run_statistic(labels) < RUN_LIMIT


def test_a_window_shuffle_of_data_shuffled_on_writing_looks_shuffled() -> None:
    """What ingest does: sorted data, written in a global order, read by windows."""
    written = GlobalOrder(SAMPLES, 99).indices(0, 0, SAMPLES)
    bounds = np.arange(0, SAMPLES + 1, STRIPE)
    for epoch in range(2):
        found = WindowOrder(bounds, 5, window_stripes=64).indices(epoch, 0, SAMPLES)
        labels = sorted_labels(written[found], SAMPLES)
        assert abs(spread(labels, SAMPLES) - 1) < spread_limit(SAMPLES // BATCH)
        assert run_statistic(labels) < RUN_LIMIT


def test_all_permutations_of_five_are_equally_likely() -> None:
    """12,000 epochs of a table: 120 permutations, 119 degrees of freedom."""
    order = GlobalOrder(5, 8)
    found = dict.fromkeys(itertools.permutations(range(5)), 0)
    for epoch in range(12_000):
        found[tuple(order.indices(epoch, 0, 5).tolist())] += 1
    statistic = sum((count - 100) ** 2 / 100 for count in found.values())
    assert abs(statistic - 119) < 5 * math.sqrt(2 * 119)


def test_a_position_takes_every_sample_over_the_epochs() -> None:
    """First, middle and last position of a network over 1,000 epochs: 20 bins each."""
    order = GlobalOrder(NETWORK, 8)
    for position in (0, NETWORK // 2, NETWORK - 1):
        found = [int(order.indices(e, position, position + 1)[0]) for e in range(1000)]
        counts = np.bincount(np.array(found) * 20 // NETWORK, minlength=20)
        statistic = float(((counts - 50) ** 2 / 50).sum())
        assert abs(statistic - 19) < 5 * math.sqrt(2 * 19)


def neighbours(images: Indices, distance: int) -> int:
    """Positions whose successor holds the sample `distance` further on."""
    return int((np.diff(images) == distance).sum())


def same_shift_z(images: Indices, columns: int) -> float:
    """Pairs of positions in one column of the network's grid whose samples lie as many rows
    apart as they do, in standard deviations from a random permutation. Up to four rounds twice
    as many: J. Patarin, "Generic attacks on Feistel schemes", ASIACRYPT 2001."""
    rows = len(images) // columns
    row, column = np.divmod(np.arange(len(images)), columns)
    shift = (images // columns - row) % rows
    pairs = np.bincount(column * rows + shift, minlength=len(images))
    found = float((pairs * (pairs - 1) / 2).sum())
    expected = columns * (rows * (rows - 1) / 2) / rows
    return (found - expected) / math.sqrt(expected)


@pytest.mark.parametrize(("rounds", "bad"), [(2, True), (4, True), (ROUNDS, False)])
def test_the_network_has_enough_rounds(rounds: int, bad: bool) -> None:
    """What two to four rounds give away is gone at the number we use: neighbours that stay
    neighbours, and distances that stay. 1,024 x 1,024, four epochs."""
    columns = 1024
    length = columns * columns
    kept, worst = 0, 0.0
    for epoch in range(4):
        images = Feistel.of(length, seed=2, epoch=epoch, rounds=rounds).images(0, length)
        kept += neighbours(images, 1) + neighbours(images, columns)
        worst = max(worst, abs(same_shift_z(images, columns)))
    assert (kept > 8 + 5 * math.sqrt(8) or worst > 5) is bad
