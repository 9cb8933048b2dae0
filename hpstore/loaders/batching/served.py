"""What a DataLoader shows of itself to the parts that serve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hpstore.loaders.batching.batch_counters import Waits
from hpstore.loaders.batching.engines import AnyEngine
from hpstore.loaders.batching.loader_options import LoaderMemory
from hpstore.loaders.batching.postprocess import Finish
from hpstore.loaders.sampling.data_parallel import RankShares
from hpstore.loaders.sampling.loop_position import LoaderPosition
from hpstore.loaders.sampling.order import Order
from hpstore.loaders.sampling.rank_slices import Slices


# Any below: torch's own signatures are untyped here
class Served(Protocol):
    """A loader: torch's attributes, ours, and what is told to it as batches go by."""

    dataset: Any
    batch_size: int | None
    num_workers: int
    sampler: Any
    batch_sampler: Any
    generator: Any
    timeout: float
    in_order: bool
    prefetch_factor: int | None
    collate_fn: Callable[..., Any]
    worker_init_fn: Callable[..., Any] | None
    seed: int
    snapshot_every_n_steps: int | None
    memory: LoaderMemory
    order: Order | None
    shares: RankShares | None
    positions: Any
    to_skip: int
    skipped_batches_total: int
    waits: Waits
    finish: Finish
    stands: LoaderPosition

    @property
    def slices(self) -> Slices | None: ...

    def __len__(self) -> int: ...

    def engine(self) -> AnyEngine: ...

    def standing(self) -> tuple[int, int]: ...

    def keep_ready(self, run: Any) -> None: ...

    def follow_growth(self) -> None: ...

    def set_epoch(self, epoch: int) -> None: ...
