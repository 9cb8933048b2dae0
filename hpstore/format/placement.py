"""Which devices get the columns of an object. Pure.

Weighted rendezvous hashing: the score of a device for a key is -weight / ln(h), h uniform in
(0, 1) from xxh3 of both (C. Schindelhauer and G. Schomaker, "Weighted Distributed Hash Tables",
2005). Best scores win, capped per failure domain. The choice is stored with the object, so this
function may change without moving anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from hpstore.units import div_ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A device that may take a column."""

    device: str
    domain: str
    weight: float = 1.0


def score(key: str, candidate: Candidate) -> float:
    """Rendezvous score; higher is better. A weight of 0 never wins."""
    if candidate.weight <= 0:
        return -math.inf
    digest = xxhash.xxh3_64_intdigest(f"{candidate.device}\0{key}".encode())
    return -candidate.weight / math.log((digest + 0.5) / 2.0**64)


def rank(key: str, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates, best first; ties by device id, so that every process agrees."""
    return sorted(candidates, key=lambda c: (-score(key, c), c.device))


def domain_cap(width: int, domains: int, parity: int) -> int:
    """Most columns that one failure domain may hold: ceil(width / domains), never more than m."""
    if domains == 0:
        return 0
    return max(1, min(div_ceil(width, domains), parity))


def placeable(domains: Iterable[str], spread: int | None, occupied: Iterable[str] = ()) -> int:
    """How many columns of one object fit on devices of these failure domains, each device one.

    `spread`: most columns that a domain may hold, those in `occupied` counted; None for no bound.
    """
    taken = Counter(occupied)
    if spread is None:
        return len(list(domains))
    return sum(
        min(count, max(0, spread - taken[domain])) for domain, count in Counter(domains).items()
    )


def lost_columns(domains: Iterable[str], spread: int | None) -> int:
    """Most columns of one object that devices of these failure domains can hold: the weight u of
    losing them. A device counts one where nothing bounds the columns of a domain."""
    return placeable(domains, spread)


def bound_spread(width: int, parity: int, domain_sizes: Sequence[int]) -> int | None:
    """The bound of columns a domain for a new pool; None where every device is its own domain, or
    where domains are too few for a stripe with full parity under a bound of m."""
    if all(size == 1 for size in domain_sizes):
        return None
    spread = domain_cap(width, len(domain_sizes), parity)
    fits = sum(min(spread, size) for size in domain_sizes)
    return spread if fits >= min(width, sum(domain_sizes)) else None


def choose(
    key: str,
    candidates: Sequence[Candidate],
    count: int,
    *,
    parity: int,
    occupied: Iterable[str] = (),
    spread: int | None = None,
) -> list[Candidate]:
    """At most `count` candidates for new columns of `key`, best first.

    `occupied` are the failure domains of columns that the object already has. The cap per domain
    is kept while it can be; when domains are too few, the rest is filled by score alone, which
    `create` has warned about. With `spread`, no domain gets more columns than that, and fewer
    candidates than `count` may be returned.
    """
    taken = Counter(occupied)
    ordered = rank(key, (c for c in candidates if c.weight > 0))
    domains = len({c.domain for c in candidates} | set(taken))
    cap = min(domain_cap(count + taken.total(), domains, parity), spread or parity)
    chosen: list[Candidate] = []
    for candidate in ordered:
        if len(chosen) < count and taken[candidate.domain] < cap:
            chosen.append(candidate)
            taken[candidate.domain] += 1
    rest = [c for c in ordered if c not in chosen]
    rest.sort(key=lambda c: taken[c.domain])  # stable: least loaded domain first, then score
    for candidate in rest:
        if len(chosen) < count and (spread is None or taken[candidate.domain] < spread):
            chosen.append(candidate)
            taken[candidate.domain] += 1
    return chosen


def tolerated_domains(width: int, data: int, domain_sizes: Sequence[int]) -> int:
    """How many whole failure domains a stripe over these domains survives, worst case."""
    cap = max(1, div_ceil(width, max(1, len(domain_sizes))))
    loads = sorted((min(cap, size) for size in domain_sizes), reverse=True)
    left, lost = min(width, sum(loads)), 0
    for load in loads:
        if left - load < data:
            break
        left, lost = left - load, lost + 1
    return lost
