"""Arguments that are wrong, or exclude each other. What torch refuses is refused in its words,
which other programs look for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders.batching.chosen_data import native_of
from hpstore.loaders.batching.loader_options import GpuTransfer, LoaderMemory
from hpstore.loaders.batching.page_budget import cache_budget
from hpstore.loaders.batching.worker_pool import Processes
from hpstore.loaders.cache import Cache
from hpstore.loaders.sampling.random_draws import check_seed
from hpstore.loaders.sampling.rank_slices import require_tail
from hpstore.units import whole_argument

_log = logging.getLogger(__name__)
if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    T_co = DefaultTypeVar("T_co", covariant=True, default=Any)  # of what a loader yields
else:
    T_co = TypeVar("T_co", covariant=True)


# Any below: whatever the user gives
def require_arguments(
    loader: Any, dataset: Any, sampler: Any, batch_sampler: Any, others: Mapping[str, Any]
) -> None:
    """Raise ConfigError, a ValueError, for arguments of a loader that are wrong.

    `loader` has those of ours, as given; `others`: the further ones of torch's.
    """
    _require_one_order(dataset, loader.shuffle, sampler, batch_sampler, others)
    _require_ours(loader, others["collate_fn"])
    if loader.packing is not None and (sampler is not None or batch_sampler is not None):
        raise ConfigError(
            "packing with a sampler: it packs documents in an order that has each of them once an "
            "epoch. Leave the sampler out, or choose documents with filter= or a Subset"
        )
    if native_of(dataset) is not None:
        _require_threads(others["num_workers"], others["prefetch_factor"])


def native_options(options: Mapping[str, Any], *, called: bool) -> dict[str, Any]:
    """What torch's constructor is given for a dataset of hpstore: threads of ours read it.

    `called`: whether processes of ours call `worker_init_fn`.
    """
    if options["worker_init_fn"] is not None and not called:
        _log.warning(
            "worker_init_fn is not called: batches of a hpstore data set are made by "
            "threads of this process. Random numbers of transforms come from their rng."
        )
    none = dict.fromkeys(("multiprocessing_context", "prefetch_factor"))
    return {**options, **none, "num_workers": 0, "persistent_workers": False}


def asked_processes(options: Mapping[str, Any]) -> Processes | None:
    """Processes of ours, where torch's arguments ask for them."""
    return Processes.asked(
        options["multiprocessing_context"], options["num_workers"], options["worker_init_fn"]
    )


def copied_cache(cache: Any) -> Any:
    """A loader's `cache` for its copy in another process. Warns of a Cache, which stays."""
    if not isinstance(cache, Cache):
        return cache
    _log.warning(
        "a Cache stays in its process: the copy of this loader keeps pages of its own. "
        'Give it Cache(..., share="name") there to share one.'
    )
    return None


def kept_names(given: Mapping[str, Any], *, ours: bool, batches: bool) -> set[str]:
    """Arguments that stay attributes as they were given, whatever torch's constructor got.

    `ours`: for a dataset of hpstore; `batches`: with a batch sampler.
    """
    names = {"batch_size", "drop_last"}
    changed = given.keys() - {"multiprocessing_context"} if ours else names
    return set(changed) - names if batches else set(changed)


def _require_one_order(
    dataset: Any, shuffle: Any, sampler: Any, batch_sampler: Any, others: Mapping[str, Any]
) -> None:
    """At most one of them decides the order."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        pipe = isinstance(dataset, torch.utils.data.IterDataPipe)  # takes shuffle
        given = {
            "shuffle": None if pipe or shuffle in (False, None, "none") else shuffle,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"DataLoader with IterableDataset: expected unspecified {name} option, but got "
                    f"{name}={value}: its samples come in its own order. Shuffle in it"
                )
        return
    if sampler is not None and shuffle:
        raise ConfigError(
            "sampler option is mutually exclusive with shuffle: a sampler decides the order. "
            "Leave shuffle out"
        )
    if batch_sampler is not None and (
        others["batch_size"] != 1 or shuffle or sampler is not None or others["drop_last"]
    ):
        raise ConfigError(
            "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and "
            "drop_last: a batch sampler decides the order and the batches. Leave these out"
        )


def _require_ours(loader: Any, collate_fn: Any) -> None:
    """What would be seen in the first batch, or never."""
    check_seed(loader.seed)
    require_tail(loader.tail)
    cache_budget(loader.cache)
    for name, wanted in (("memory", LoaderMemory), ("gpu", GpuTransfer)):
        given = getattr(loader, name)
        if not isinstance(given, wanted):
            raise ConfigError(f"{name} is a {type(given).__name__}: give a {wanted.__name__}(...)")
    if not isinstance(loader.shard, bool):
        raise ConfigError(f"shard is {loader.shard!r}: True, or False to read everything on a rank")
    if loader.snapshot_every_n_steps is not None:
        whole_argument("snapshot_every_n_steps", loader.snapshot_every_n_steps, least=0)
    functions = {
        "transform": loader.transform,
        "batch_transform": loader.batch_transform,
        "collate_fn": collate_fn,
    }
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name} is a {type(function).__name__}, not a function")


def _require_threads(num_workers: object, prefetch_factor: object) -> None:
    """torch sees neither for a dataset of hpstore."""
    if whole_argument("num_workers", num_workers, least=-1) < 0:
        raise ConfigError("num_workers option should be non-negative; use num_workers=0")
    if prefetch_factor is not None:
        whole_argument("prefetch_factor", prefetch_factor, least=1)
