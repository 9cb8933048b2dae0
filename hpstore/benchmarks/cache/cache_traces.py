"""Requests as training makes them: which blocks, by which job, where epochs begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Rng = np.random.Generator

BLOCKS = 10_000
EPOCHS = 12
WARM = 1  # epochs that are not counted
RANKS = 8
SAMPLES_IN_A_BLOCK = 32
MEAN_BYTES, SD_BYTES = 114_660, 136_076  # ResNet-50 of DLIO's configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTrace:
    """`requests` int64[n]; `counted` the index from which hits count; `starts` a list per job."""

    blocks: int
    requests: Int64s
    counted: int
    starts: tuple[tuple[int, ...], ...]
    jobs: Int64s | None = None
    sizes: Int64s | None = None  # bytes of every block; None: equal
    horizons: tuple[int, int, int] = (2, 2, 2)  # epochs known ahead, at the three capacities


def regular(requests: Int64s, epoch: int, *, blocks: int, **more: object) -> CacheTrace:
    """A trace of one job whose epochs have equal lengths."""
    starts = tuple(range(0, len(requests), epoch))
    facts = {"counted": WARM * epoch} | more
    return CacheTrace(blocks=blocks, requests=requests, starts=(starts,), **facts)  # type: ignore[arg-type]


def zipf_weights(count: int, exponent: float) -> npt.NDArray[np.float64]:
    """Shares that fall with the rank."""
    weights: npt.NDArray[np.float64] = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def uniform(rng: Rng, blocks: int) -> CacheTrace:
    """Another permutation every epoch."""
    orders = [rng.permutation(blocks) for _ in range(EPOCHS)]
    return regular(np.concatenate(orders), blocks, blocks=blocks)


def rank1of8(rng: Rng, blocks: int) -> CacheTrace:
    """What one rank of eight reads of 80 permutations."""
    share = blocks // RANKS
    orders = [rng.permutation(blocks)[:share] for _ in range(80)]
    return regular(
        np.concatenate(orders), share, blocks=blocks, counted=20 * share, horizons=(4, 8, 16)
    )


def zipf(exponent: float) -> Callable[[Rng, int], CacheTrace]:
    """Draws with replacement: class-balanced or weighted sampling."""

    def make(rng: Rng, blocks: int) -> CacheTrace:
        ranks = rng.permutation(blocks)
        drawn = rng.choice(blocks, EPOCHS * blocks, p=zipf_weights(blocks, exponent))
        return regular(ranks[drawn], blocks, blocks=blocks)

    return make


def importance(rng: Rng, blocks: int) -> CacheTrace:
    """Importance sampling whose weights drift: exp(1.2 x), x AR(1) with 0.8 an epoch."""
    x = rng.standard_normal(blocks)
    drawn = []
    for _ in range(EPOCHS):
        weights = np.exp(1.2 * x)
        drawn.append(rng.choice(blocks, blocks, p=weights / weights.sum()))
        x = 0.8 * x + 0.6 * rng.standard_normal(blocks)
    return regular(np.concatenate(drawn), blocks, blocks=blocks)


def mix(rng: Rng, blocks: int) -> CacheTrace:
    """Five domains whose shares of the draws shift; each shuffled, without replacement."""
    parts = (np.array([0.6, 0.2, 0.1, 0.07, 0.03]) * blocks).astype(np.int64)
    first, last = np.array([40, 25, 15, 12, 8]) / 100, np.array([10, 15, 20, 25, 30]) / 100
    count = EPOCHS * blocks
    progress = np.linspace(0, 1, count)[:, None]
    shares = np.cumsum(first * (1 - progress) + last * progress, axis=1)
    domain = (rng.random(count)[:, None] > shares[:, :-1]).sum(axis=1)
    requests = np.empty(count, np.int64)
    for number, (size, base) in enumerate(zip(parts, np.cumsum(parts) - parts, strict=True)):
        at = np.flatnonzero(domain == number)
        passes = [rng.permutation(size) for _ in range(len(at) // int(size) + 1)]
        requests[at] = base + np.concatenate(passes)[: len(at)]
    return regular(requests, blocks, blocks=int(parts.sum()))


def two_jobs(speed: float) -> Callable[[Rng, int], CacheTrace]:
    """Two jobs that shuffle the same blocks; the second begins 0.37 epochs later."""

    def make(rng: Rng, blocks: int) -> CacheTrace:
        second = int(EPOCHS * speed)
        asked = [
            np.concatenate([rng.permutation(blocks) for _ in range(epochs)])
            for epochs in (EPOCHS, second)
        ]
        times = np.concatenate(
            (np.arange(len(asked[0])), 0.37 * blocks + np.arange(len(asked[1])) / speed)
        )
        rank = np.argsort(times, kind="stable")
        jobs = np.repeat([0, 1], [len(asked[0]), len(asked[1])])[rank]
        requests = np.concatenate(asked)[rank]
        # nobody is alone at the end
        stop = min(int(np.flatnonzero(jobs == job)[-1]) for job in (0, 1)) + 1
        requests, jobs = requests[:stop], jobs[:stop]
        starts = tuple(tuple(np.flatnonzero(jobs == job)[::blocks].tolist()) for job in (0, 1))
        return CacheTrace(
            blocks=blocks, requests=requests, jobs=jobs, starts=starts, counted=2 * WARM * blocks
        )

    return make


def valscan(rng: Rng, blocks: int) -> CacheTrace:
    """Weighted draws, and at the end of every epoch a pass over a validation set."""
    train, check = blocks * 8 // 10, blocks * 2 // 10
    ranks = rng.permutation(train)
    weights = zipf_weights(train, 0.9)
    parts: list[Int64s] = []
    for _ in range(EPOCHS):
        parts += [ranks[rng.choice(train, train, p=weights)], np.arange(train, train + check)]
    return regular(np.concatenate(parts), train + check, blocks=train + check)


def block32(rng: Rng, blocks: int) -> CacheTrace:
    """Shuffled samples, 32 of them in every block."""
    few = blocks // 10
    samples = few * SAMPLES_IN_A_BLOCK
    orders = [rng.permutation(samples) // SAMPLES_IN_A_BLOCK for _ in range(EPOCHS)]
    return regular(np.concatenate(orders), samples, blocks=few, horizons=(1, 1, 1))


def recency(rng: Rng, blocks: int) -> CacheTrace:
    """What was asked for lately is asked for again: LRU's own model of the world.

    The depth in the stack of last uses is drawn with weight 1 / (depth + blocks / 200).
    """
    weights = 1 / (np.arange(blocks) + blocks / 200)
    depths = rng.choice(blocks, EPOCHS * blocks, p=weights / weights.sum()).tolist()
    stack = rng.permutation(blocks).tolist()
    requests = []
    for depth in depths:
        block = stack.pop(-1 - depth)
        stack.append(block)
        requests.append(block)
    return regular(np.array(requests, np.int64), blocks, blocks=blocks)


def sizes(rng: Rng, blocks: int) -> CacheTrace:
    """Zipf 0.9 over blocks of many sizes, lognormal."""
    spread = np.log(1 + (SD_BYTES / MEAN_BYTES) ** 2)
    drawn = rng.lognormal(np.log(MEAN_BYTES) - spread / 2, np.sqrt(spread), blocks)
    found = zipf(0.9)(rng, blocks)
    return regular(
        found.requests, blocks, blocks=blocks, sizes=np.maximum(drawn, 1024).astype(np.int64)
    )


TRACES: dict[str, Callable[[Rng, int], CacheTrace]] = {
    "uniform": uniform,
    "rank1of8": rank1of8,
    "zipf0.9": zipf(0.9),
    "zipf1.1": zipf(1.1),
    "importance": importance,
    "mix": mix,
    "2jobs 1:1": two_jobs(1.0),
    "2jobs 1:0.6": two_jobs(0.6),
    "valscan": valscan,
    "block32": block32,
    "recency": recency,
    "sizes": sizes,
}


def trace_named(name: str, seed: int, blocks: int = BLOCKS) -> CacheTrace:
    """A workload; another seed gives other requests of the same kind."""
    return TRACES[name](np.random.default_rng([seed, list(TRACES).index(name)]), blocks)
