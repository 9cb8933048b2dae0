"""What the cache asks of whoever decides what stays: the part of CachePolicy that it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hpstore.loaders.dataset.record_layout import Int64s

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[np.generic]]


class CacheDecision(Protocol):
    """As hpstore.loaders.policy.Plan."""

    @property
    def hit(self) -> Bools: ...
    @property
    def late(self) -> Bools: ...
    @property
    def admit(self) -> Int64s: ...
    @property
    def evict(self) -> Int64s: ...


class CacheWants(Protocol):
    """As hpstore.loaders.policy.Wanted."""

    @property
    def fetch(self) -> Int64s: ...
    @property
    def evict(self) -> Int64s: ...


class Policy(Protocol):
    """As hpstore.loaders.policy.CachePolicy. The cache's lock makes its calls one at a time."""

    def begin_epoch(self, job: int, requests: int | None = None) -> None: ...
    def expect(self, job: int, blocks: Int64s | None, *, drawn: bool = False) -> None: ...
    def expected(self, job: int) -> int: ...
    def mismatched(self, job: int) -> bool: ...
    def access(self, job: int, blocks: Int64s) -> CacheDecision: ...
    def next_wanted(self, job: int, budget_bytes: int) -> CacheWants: ...
    def favourites(self, budget_bytes: int) -> CacheWants: ...
    def arrived(self, blocks: Int64s) -> None: ...
    def dropped(self, blocks: Int64s) -> None: ...
    def expected_use(self, blocks: Int64s) -> Floats: ...
    def state_arrays(self) -> Arrays: ...
    def restore(self, arrays: Arrays, *, residents: Int64s | None = None) -> None: ...


class MakePolicy(Protocol):
    """CachePolicy itself, or what takes its place."""

    def __call__(
        self, sizes: int | Int64s, blocks: int, capacity_bytes: int, *, jobs: int
    ) -> Policy: ...


__all__ = ["Arrays", "Bools", "Floats", "MakePolicy", "CacheDecision", "Policy", "CacheWants"]
