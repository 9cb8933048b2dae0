"""What the policy itself costs: time of Python a sample, memory a block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from hpstore.benchmarks.harness.measure import forget
from hpstore.loaders.policy import CachePolicy

BLOCKS = 10_000_000
BATCH = 256
BATCHES = 400  # of one measurement
DRAWN_BATCHES = 16  # as many as a loader draws ahead
MICROSECONDS, INDEX_BYTES = 1.0, 24.0  # the bars
KNOWN_BYTES = 40.0  # of two epochs that are known: 24 of them are links and the order itself

Int64s = npt.NDArray[np.int64]
Found = dict[str, object]  # JSON


def zipf_like(rng: np.random.Generator, blocks: int, count: int) -> Int64s:
    """Draws of about Zipf 0.9, scattered over the blocks, without a table of weights."""
    ranks = blocks ** (rng.random(count) ** 1.2)
    found: Int64s = (ranks.astype(np.int64) * 2_654_435_761) % blocks
    return found


def even(rng: np.random.Generator, blocks: int, count: int) -> Int64s:
    """Any block as well as any other."""
    return rng.integers(0, blocks, count)


def measure_unknown(
    draw: Callable[[np.random.Generator, int, int], Int64s],
    *,
    blocks: int,
    repeats: int,
    drawn_batches: int = 0,
) -> Found:
    """Measure a full cache of a fifth of the blocks, order unknown, with batches drawn ahead."""
    rng = np.random.default_rng(0)
    policy = CachePolicy(1, blocks, blocks // 5)
    policy.begin_epoch(0)
    policy.hold(rng.permutation(blocks)[: blocks // 5])
    times = []
    for _ in range(repeats + 1):
        batches = draw(rng, blocks, BATCHES * BATCH).reshape(BATCHES, BATCH)
        began = time.thread_time()
        if drawn_batches:
            policy.expect(0, batches[:drawn_batches].reshape(-1), drawn=True)
        for number, batch in enumerate(batches):
            if drawn_batches and number + drawn_batches < BATCHES:
                policy.expect(0, batches[number + drawn_batches], drawn=True)
            policy.access(0, batch)
        times.append((time.thread_time() - began) / batches.size * 1e6)
    # the first round brings the learner's pages into memory
    return _figures(times[1:], policy.index_bytes / blocks)


def measure_known(*, blocks: int, repeats: int) -> Found:
    """Measure shuffled epochs, this one and the next known; passing the order is timed, too."""
    rng = np.random.default_rng(0)
    policy = CachePolicy(1, blocks, blocks // 5)
    policy.hold(rng.permutation(blocks)[: blocks // 5])
    order, following = rng.permutation(blocks), rng.permutation(blocks)
    policy.expect(0, order)
    policy.expect(0, following)
    part = min(BATCHES * BATCH, blocks // (repeats + 1) // BATCH * BATCH)
    times, telling = [], []
    for number in range(repeats + 1):
        here = slice(number * part, (number + 1) * part)
        batches = order[here].reshape(-1, BATCH)
        began = time.thread_time()
        for batch in batches:
            policy.access(0, batch)
        made = time.thread_time()
        # two epochs stay foretold: as much is told as was made
        policy.expect(0, order[here])
        times.append((time.thread_time() - began) / part * 1e6)
        telling.append((time.thread_time() - made) / part * 1e6)
    facts = {
        "of it telling_us": round(statistics.median(telling[1:]), 3),
        "mismatches": policy.counters["mismatches"],
    }
    return _figures(times[1:], policy.index_bytes / blocks, KNOWN_BYTES) | facts


def _figures(times: list[float], index: float, bytes_bar: float = INDEX_BYTES) -> Found:
    middle = statistics.median(times)
    return {
        "us_a_sample": round(middle, 3),
        "lowest": round(min(times), 3),
        "highest": round(max(times), 3),
        "bar_us": MICROSECONDS,
        "us_met": middle <= MICROSECONDS,
        "index_bytes_a_block": round(index, 1),
        "bar_index_bytes": bytes_bar,
        "index_met": index <= bytes_bar,
    }


def measure_cost(
    *,
    blocks: int = BLOCKS,
    repeats: int = 5,
    keep: Callable[[Found], None] = forget,
    say: Callable[[str], None] = forget,
) -> Found:
    """Batches of 256, by order and kind of requests.

    `keep` receives the figures so far after each of them, `say` the name of what runs now.
    """
    found: Found = {"blocks": blocks, "batch": BATCH}
    measures: dict[str, Callable[..., Found]] = {
        "unknown, weighted": partial(measure_unknown, zipf_like),
        "unknown, even": partial(measure_unknown, even),
        "unknown, drawn ahead": partial(measure_unknown, zipf_like, drawn_batches=DRAWN_BATCHES),
        "known, shuffled": measure_known,
    }
    for name, measure in measures.items():
        say(name)
        found[name] = measure(blocks=blocks, repeats=repeats)
        keep(found)
    return found
