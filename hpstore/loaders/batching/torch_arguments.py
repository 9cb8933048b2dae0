"""Arguments that exclude each other, refused in torch's words, which other programs look for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils.data

from hpstore.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    T_co = DefaultTypeVar("T_co", covariant=True, default=Any)  # of what a loader yields
else:
    T_co = TypeVar("T_co", covariant=True)


# Any: whatever the user gives
def require_one_order(
    dataset: Any, shuffle: Any, sampler: Any, batch_sampler: Any, others: Mapping[str, Any]
) -> None:
    """Raise ConfigError, a ValueError, where more than one of them would decide the order.

    `others`: the arguments of torch's, of which batch_size and drop_last are looked at.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset):
        pipe = isinstance(dataset, torch.utils.data.IterDataPipe)  # takes shuffle
        given = {"shuffle": None if pipe or shuffle in (False, None, "none") else shuffle,
                 "sampler": sampler, "batch_sampler": batch_sampler}  # fmt: skip
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


__all__ = ["T_co", "require_one_order"]
