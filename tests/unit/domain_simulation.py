"""Domains of devices played event by event: the oracle for failures that come together.

It knows devices, clocks and blows alone; nothing of distributions. A device fails only while it
works; a blow strikes the dead, too, whose repair begins again.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from hpstore.durability import HOURS_PER_YEAR, DomainDevice, Estimate, FailureDomain

_Z95 = 1.96


class _Domains:
    """A tree laid flat: rates of devices, and of each domain its devices and parents."""

    def __init__(self, root: FailureDomain) -> None:
        self.rates: list[float] = []
        self.domains: list[tuple[FailureDomain, list[int]]] = []
        self._walk(root)
        self.root = root

    def _walk(self, domain: FailureDomain) -> list[int]:
        own: list[int] = []
        for part in domain.parts:
            if isinstance(part, DomainDevice):
                own.append(len(self.rates))
                self.rates.append(part.afr)
            else:
                own += self._walk(part)
        self.domains.append((domain, own))
        return own


def _lost(domain: FailureDomain, down: list[bool], start: int) -> tuple[int, int]:
    """Lost units below a domain, and the number of its devices."""
    lost, at = 0, start
    for part in domain.parts:
        if isinstance(part, DomainDevice):
            lost += down[at]
            at += 1
        else:
            more, count = _lost(part, down, at)
            lost, at = lost + more, at + count
    if domain.units_most is not None:
        lost = min(lost, domain.units_most)
    return lost, at - start


def simulate_domains(
    root: FailureDomain, *, repair_hours: float, lost: int, years: int, rng: np.random.Generator
) -> Estimate:
    """Crossings from at most `lost` lost units to more, a year, over so many years."""
    tree, repair = _Domains(root), repair_hours / HOURS_PER_YEAR
    down = [False] * len(tree.rates)
    due = [0.0] * len(tree.rates)  # end of the repair
    queue: list[tuple[float, str, int]] = []

    def push(kind: str, number: int, rate: float, now: float) -> None:
        if rate:
            heapq.heappush(queue, (now + rng.exponential(1 / rate), kind, number))

    for number, rate in enumerate(tree.rates):
        push("fails", number, rate, 0.0)
    for number, (domain, _) in enumerate(tree.domains):
        push("blow", number, domain.events_per_year, 0.0)
    crossings = np.zeros(years)
    while queue and queue[0][0] < years:
        now, kind, number = heapq.heappop(queue)
        if kind == "whole":
            if down[number] and due[number] <= now + 1e-12:
                down[number] = False
            continue
        before = _lost(tree.root, down, 0)[0]
        struck = [number]
        if kind == "blow":
            domain, devices = tree.domains[number]
            push("blow", number, domain.events_per_year, now)
            struck = [device for device in devices if rng.random() < domain.hit]
        else:
            push("fails", number, tree.rates[number], now)  # a clock that goes on beside repairs
            if down[number]:
                continue
        for device in struck:
            down[device], due[device] = True, now + repair
            heapq.heappush(queue, (now + repair, "whole", device))
        if before <= lost < _lost(tree.root, down, 0)[0]:
            crossings[int(now)] += 1
    mean = float(crossings.mean())
    half = _Z95 * float(crossings.std(ddof=1)) / math.sqrt(years)
    return Estimate(value=mean, low=max(0.0, mean - half), high=mean + half)
