"""Requests in the shape of public trace families, and of training jobs that share a cache.

Real traces are large, and many may not be passed on. Each generator has the traits that its family
is known for; parameters are those that are published, as cited, or lie in their range:

- Zipf: exponents of 0.64 to 0.83 for web requests (L. Breslau et al., INFOCOM 1999), about 1 and
  more for in-memory caches (J. Yang, Y. Yue, K. V. Rashmi, OSDI 2020).
- Objects that are asked for once: 26 % of a whole trace in the median, 72 % of a tenth of one
  (J. Yang et al., SOSP 2023), which `churn` and `wonders` span.
- Prefixes of language models: the trace of Mooncake (R. Qin et al., FAST 2025) has 12,031
  conversations in blocks of 512 tokens; sessions grow, system prompts are shared.
- Block storage: scans, loops and a skewed part, as in the MSR Cambridge traces
  (D. Narayanan, A. Donnelly, A. Rowstron, FAST 2008).

HELD_OUT were made after most parameters of the policy had been chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

import numpy as np

from hpstore.benchmarks.cache.cache_traces import Int64s, Rng, importance, mix, zipf_weights

REQUESTS = 100_000
Make = Callable[[Rng], Int64s]


def _drawn(rng: Rng, ranks: Int64s, exponent: float, count: int) -> Int64s:
    return ranks[rng.choice(len(ranks), count, p=zipf_weights(len(ranks), exponent))]


def _cut(parts: list[Int64s]) -> Int64s:
    return np.concatenate(parts)[:REQUESTS]


def static_zipf(rng: Rng, *, exponent: float, blocks: int = 10_000) -> Int64s:
    """Popularity that does not change."""
    return _drawn(rng, rng.permutation(blocks), exponent, REQUESTS)


def drifting_zipf(rng: Rng, *, exponent: float, every: int, share: float) -> Int64s:
    """Each `every` requests a `share` of the blocks change their ranks among themselves."""
    ranks = rng.permutation(10_000)
    parts = []
    for _ in range(REQUESTS // every):
        parts.append(_drawn(rng, ranks, exponent, every))
        moved = rng.choice(len(ranks), int(share * len(ranks)), replace=False)
        ranks[moved] = ranks[rng.permutation(moved)]
    return np.concatenate(parts)


def churn(rng: Rng, *, exponent: float, alive: int, once: float, life: int) -> Int64s:
    """Objects are born and die; a share of `once` of the requests is for objects never seen again.

    `life`: requests after which as many objects have died as are alive.
    """
    slots = rng.choice(alive, REQUESTS, p=zipf_weights(alive, exponent)).tolist()
    lonely = (rng.random(REQUESTS) < once).tolist()
    dies = (rng.random(REQUESTS) < alive / life).tolist()
    victims = rng.integers(0, alive, REQUESTS).tolist()
    names, born, found = list(range(alive)), alive, []
    for at in range(REQUESTS):
        if dies[at]:
            names[victims[at]] = born
            born += 1
        if lonely[at]:
            found.append(born)
            born += 1
        else:
            found.append(names[slots[at]])
    return np.array(found, np.int64)


def loops(rng: Rng, *, sizes: tuple[int, ...], rounds: tuple[int, ...]) -> Int64s:
    """Passes over one of several files, some rounds each time."""
    parts: list[Int64s] = []
    while sum(map(len, parts)) < REQUESTS:
        kind = int(rng.integers(len(sizes)))
        passes = np.arange(sizes[kind] * rounds[kind]) % sizes[kind]
        parts.append(100_000 * kind + passes)
    return _cut(parts)


def scans(rng: Rng, *, exponent: float, hot: int, share: float, length: int, space: int) -> Int64s:
    """Skewed requests, and a `share` in sequential runs over a larger space."""
    ranks, parts, made = rng.permutation(hot), list[Int64s](), 0
    while made < REQUESTS:
        between = int(rng.exponential(length * (1 - share) / share)) + 1
        run = int(rng.exponential(length)) + 1
        parts.append(_drawn(rng, ranks, exponent, between))
        parts.append(hot + (int(rng.integers(space)) + np.arange(run)) % space)
        made += between + run
    return _cut(parts)


def phases(rng: Rng, *, count: int, blocks: int, exponent: float) -> Int64s:
    """The working set is replaced by half at once, `count` times."""
    length = REQUESTS // count + 1
    made = [
        _drawn(rng, rng.permutation(blocks) + phase * blocks // 2, exponent, length)
        for phase in range(count)
    ]
    return _cut(made)


def programs(rng: Rng) -> Int64s:
    """One program after another on the same cache: skewed, looping, recent, shuffling."""
    quarter = REQUESTS // 4
    recent = 8000 + depths(rng, blocks=5000, near=200)[:quarter]
    shuffled = np.concatenate([rng.permutation(5000) for _ in range(quarter // 5000 + 1)])
    shuffled = shuffled[:quarter]
    first = static_zipf(rng, exponent=0.9, blocks=4000)[:quarter]
    return _cut([first, 4000 + np.arange(quarter) % 3000, recent, shuffled])


def depths(rng: Rng, *, blocks: int, near: int) -> Int64s:
    """The depth in the stack of last uses is drawn with weight 1 / (depth + blocks / near)."""
    weights = 1 / (np.arange(blocks) + blocks / near)
    stack, found = rng.permutation(blocks).tolist(), []
    for depth in rng.choice(blocks, REQUESTS, p=weights / weights.sum()).tolist():
        block = stack.pop(-1 - depth)
        stack.append(block)
        found.append(block)
    return np.array(found, np.int64)


def prefixes(rng: Rng, *, prompts: int, depth: int, turns: int, added: int, think: float) -> Int64s:
    """Sessions begin with one of some shared prompts and grow each turn; all of it is read again.

    A prompt has up to `depth` blocks, a turn adds about `added`; a session has about `turns`, with
    `think` between them, where one arrives each 20.
    """
    weights = zipf_weights(prompts, 1.0)
    waiting: list[tuple[float, int, list[int], int]] = []
    found: list[int] = []
    arrives, born, number = 0.0, prompts * depth, 0
    while len(found) < REQUESTS:
        if not waiting or waiting[0][0] > arrives:
            prompt = int(rng.choice(prompts, p=weights)) * depth
            begin = list(range(prompt, prompt + int(rng.integers(3, depth))))
            heapq.heappush(waiting, (arrives, number, begin, 1 + int(rng.geometric(1 / turns))))
            arrives += rng.exponential(20)
        now, _, blocks, left = heapq.heappop(waiting)
        number += 1
        more = 1 + int(rng.geometric(1 / added))
        blocks = blocks + list(range(born, born + more))
        born += more
        found += blocks
        if left > 1:
            heapq.heappush(waiting, (now + rng.exponential(think), number, blocks, left - 1))
    return np.array(found[:REQUESTS], np.int64)


def shuffled(rng: Rng, *, blocks: int) -> Int64s:
    """Another permutation every epoch."""
    return _cut([rng.permutation(blocks) for _ in range(REQUESTS // blocks + 1)])


def augmented(rng: Rng, *, blocks: int, share: float) -> Int64s:
    """Shuffled epochs that read a subset three times."""
    epoch = np.concatenate([np.arange(blocks)] + 2 * [np.arange(int(share * blocks))])
    return _cut([rng.permutation(epoch) for _ in range(REQUESTS // len(epoch) + 1)])


def jobs(rng: Rng, *, count: int, blocks: int) -> Int64s:
    """Jobs that shuffle the same blocks, each a part of an epoch later, without a word of it."""
    each = REQUESTS // count
    asked = []
    for job in range(count):
        order = np.concatenate([rng.permutation(blocks) for _ in range(each // blocks + 2)])
        asked.append(order[int(job * 0.37 * blocks) % blocks :][:each])
    return np.stack(asked, axis=1).reshape(-1)


def evaluations(rng: Rng, *, blocks: int, passes: int, every: int) -> Int64s:
    """Weighted draws, and a sequential pass over other blocks after each `every` of them."""
    ranks, parts = rng.permutation(blocks), list[Int64s]()
    for _ in range(REQUESTS // (every + passes) + 1):
        parts += [_drawn(rng, ranks, 0.8, every), blocks + np.arange(passes)]
    return _cut(parts)


def evaluated_epochs(rng: Rng, *, blocks: int, passes: int) -> Int64s:
    """Shuffled epochs, with a pass over other blocks at each third."""
    parts: list[Int64s] = []
    for _ in range(REQUESTS // (blocks + 3 * passes) + 1):
        for part in np.array_split(rng.permutation(blocks), 3):
            parts += [part, blocks + np.arange(passes)]
    return _cut(parts)


def bursts(rng: Rng, *, blocks: int, exponent: float, repeats: int, gap: float) -> Int64s:
    """Each request is repeated shortly after, and then not for long."""
    count = REQUESTS // repeats
    asked = _drawn(rng, rng.permutation(blocks), exponent, count)
    first = np.arange(count) * float(repeats)
    times = [first + rng.exponential(gap, count) * turn for turn in range(repeats)]
    return np.tile(asked, repeats)[np.argsort(np.concatenate(times), kind="stable")]


def samples(rng: Rng, *, blocks: int) -> Int64s:
    """Shuffled samples, 32 in a block."""
    count = REQUESTS // (32 * blocks) + 1
    return _cut([rng.permutation(32 * blocks) // 32 for _ in range(count)])


def growing(rng: Rng) -> Int64s:
    """A curriculum: epochs over a dataset that grows by a fifth each."""
    parts: list[Int64s] = []
    size = 2000.0
    while sum(map(len, parts)) < REQUESTS:
        parts.append(rng.permutation(int(size)))
        size = min(1.2 * size, 12_000)
    return _cut(parts)


def nights(rng: Rng) -> Int64s:
    """Days of skewed requests with another favourite part each, nights of one scan of all."""
    ranks, parts = rng.permutation(8000), list[Int64s]()
    for day in range(8):
        parts += [_drawn(rng, np.roll(ranks, 600 * day), 1.0, 9000), np.arange(4000)]
    return _cut(parts)


def extents(rng: Rng) -> Int64s:
    """Skewed extents of 1 to 64 blocks, read in order: a file server."""
    starts = np.cumsum(rng.integers(1, 65, 900))
    asked = _drawn(rng, np.arange(899), 0.8, REQUESTS // 20)
    return _cut([np.arange(starts[one], starts[one + 1]) for one in asked.tolist()])


FAMILIES: dict[str, Make] = {
    "zipf 0.7": partial(static_zipf, exponent=0.7),
    "zipf 1.0": partial(static_zipf, exponent=1.0),
    "zipf 1.2": partial(static_zipf, exponent=1.2),
    "drift": partial(drifting_zipf, exponent=0.9, every=5000, share=0.05),
    "drift, fast": partial(drifting_zipf, exponent=1.0, every=2000, share=0.1),
    "churn": partial(churn, exponent=0.9, alive=4000, once=0.3, life=15_000),
    "churn, fast": partial(churn, exponent=1.0, alive=3000, once=0.6, life=5000),
    "wonders": partial(churn, exponent=1.1, alive=2000, once=0.2, life=30_000),
    "loops": partial(loops, sizes=(2000, 5000, 800, 9000), rounds=(4, 3, 8, 2)),
    "one loop": partial(loops, sizes=(6000,), rounds=(20,)),
    "scans": partial(scans, exponent=1.0, hot=5000, share=0.4, length=500, space=40_000),
    "long scans": partial(scans, exponent=0.8, hot=3000, share=0.7, length=2000, space=30_000),
    "scans, loop": partial(scans, exponent=0.9, hot=5000, share=0.5, length=3000, space=9000),
    "phases": partial(phases, count=6, blocks=3000, exponent=0.8),
    "phases, many": partial(phases, count=20, blocks=2000, exponent=0.9),
    "programs": programs,
    "recency": partial(depths, blocks=10_000, near=200),
    "recency, deep": partial(depths, blocks=20_000, near=1000),
    "prefixes": partial(prefixes, prompts=50, depth=20, turns=5, added=6, think=300),
    "prefixes, chat": partial(prefixes, prompts=10, depth=40, turns=12, added=4, think=2000),
    "prefixes, tools": partial(prefixes, prompts=200, depth=30, turns=2, added=10, think=100),
    "epochs": partial(shuffled, blocks=8000),
    "augmented": partial(augmented, blocks=5000, share=0.1),
    "augmented fifth": partial(augmented, blocks=4000, share=0.2),
    "two jobs": partial(jobs, count=2, blocks=5000),
    "eight jobs": partial(jobs, count=8, blocks=6000),
    "evaluations": partial(evaluations, blocks=6000, passes=1500, every=3000),
    "evaluated epochs": partial(evaluated_epochs, blocks=6000, passes=1000),
    "bursts": partial(bursts, blocks=20_000, exponent=0.8, repeats=3, gap=30.0),
    "pairs": partial(bursts, blocks=8000, exponent=0.6, repeats=2, gap=200.0),
    "importance": lambda rng: importance(rng, 8000).requests,
    "samples": partial(samples, blocks=1000),
    "mix": lambda rng: mix(rng, 8000).requests,
}

HELD_OUT: dict[str, Make] = {
    "curriculum": growing,
    "nights": nights,
    "extents": extents,
    "agents": partial(prefixes, prompts=30, depth=60, turns=25, added=3, think=60),
    "four jobs": partial(jobs, count=4, blocks=7000),
    "drift, slow": partial(drifting_zipf, exponent=0.8, every=10_000, share=0.2),
}


def family_named(name: str, seed: int) -> tuple[Int64s, int]:
    """Requests of a family, numbered from 0, and how many blocks there are."""
    made = FAMILIES | HELD_OUT
    asked = made[name](np.random.default_rng([seed, list(made).index(name)]))
    names, requests = np.unique(asked, return_inverse=True)
    return requests.reshape(-1).astype(np.int64), len(names)
