"""What trainers find as `loader.sampler`: this rank's samples, as torch's DistributedSampler."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data.distributed import DistributedSampler

from hpstore.loaders.progress import pieces

if TYPE_CHECKING:
    from hpstore.loaders.loader import DataLoader


class RankSampler(DistributedSampler[Any]):
    """This rank's samples of the loader's present epoch, in order.

    Trainers (Lightning) put a DistributedSampler of their own in the place of any other sampler,
    which would shard twice and lose the order and the position. This one tells them that the
    loader deals out the ranks' shares itself; set_epoch() is the loader's.
    """

    def __init__(self, loader: DataLoader) -> None:
        # not DistributedSampler's: it wants a process group
        assert loader.order is not None
        assert loader.shares is not None
        self._loader = weakref.ref(loader)
        self._order, self._shares = loader.order, loader.shares
        self.epoch = 0

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Data-parallel ranks."""
        return self._shares.now().world_size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This one of them."""
        return self._shares.now().rank

    def __iter__(self) -> Iterator[int]:
        loader = self._loader()
        if loader is not None:
            self.epoch, _ = loader.standing()
        found = pieces(self._shares.now(), self.epoch, 0)
        return itertools.chain.from_iterable(p.indices(self._order).tolist() for p in found)

    def __len__(self) -> int:
        return sum(piece.stop - piece.start for piece in pieces(self._shares.now(), 0, 0))

    def set_epoch(self, epoch: int) -> None:
        """As DataLoader.set_epoch."""
        self.epoch = epoch
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)


def agree_on_epoch(loader: Any, epoch: int, told: int | None) -> int:
    """Tell a user's sampler the epoch, if it follows one; or follow the user's own set_epoch().

    `told`: the epoch that it was told last. Returns the epoch that holds now.
    """
    samplers = [
        loader.batch_sampler,
        loader.sampler,
        getattr(loader.batch_sampler, "sampler", None),
    ]
    following = [one for one in samplers if callable(getattr(one, "set_epoch", None))]
    for sampler in following:
        theirs = getattr(sampler, "epoch", None)
        if isinstance(theirs, int) and theirs != (told or 0):
            epoch = theirs
    for sampler in following:
        sampler.set_epoch(epoch)
    return epoch


__all__ = ["RankSampler", "agree_on_epoch"]
