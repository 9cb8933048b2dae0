"""What trainers find as `loader.sampler`: this rank's samples, as torch's DistributedSampler."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from hpstore.loaders.batching.served import Served
from hpstore.loaders.sampling.batch_plan import pieces


class RankSampler(DistributedSampler[Any]):
    """This rank's samples of the loader's present epoch, in order.

    Trainers (Lightning) put a DistributedSampler of their own in the place of any other sampler,
    which would shard twice and lose the order and the position. This one tells them that the
    loader deals out the ranks' shares itself; set_epoch() is the loader's.
    """

    def __init__(self, loader: Served) -> None:
        # not DistributedSampler's: it wants a process group
        assert loader.order is not None
        assert loader.shares is not None
        self._loader = weakref.ref(loader)
        self._order, self._shares = loader.order, loader.shares
        self.epoch = 0

    def _look_again(self) -> Any:
        """The loader, if it is still there; its dataset may be longer than it was."""
        loader = self._loader()
        if loader is not None and loader.order is not None and loader.shares is not None:
            loader.follow_growth()
            self._order, self._shares = loader.order, loader.shares
        return loader

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Data-parallel ranks."""
        return self._shares.now().world_size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This one of them."""
        return self._shares.now().rank

    def __iter__(self) -> Iterator[int]:
        loader = self._look_again()
        if loader is not None:
            self.epoch, _ = loader.standing()
        found = pieces(self._shares.now(), self.epoch, 0)
        return itertools.chain.from_iterable(p.indices(self._order).tolist() for p in found)

    def __len__(self) -> int:
        self._look_again()
        return sum(piece.stop - piece.start for piece in pieces(self._shares.now(), 0, 0))

    def set_epoch(self, epoch: int) -> None:
        """As DataLoader.set_epoch."""
        self.epoch = epoch
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)


def show_sampler(loader: Any, *, native: bool) -> None:
    """Trainers look at `sampler`: one of theirs must not take the place of our order."""
    if loader.order is None or (loader.positions is not None and loader.batch_size is None):
        return
    made = RankSampler(loader)
    object.__setattr__(loader, "sampler", made)  # torch's own refuses it
    if native and loader.batch_size is not None:
        batches = BatchSampler(made, loader.batch_size, loader.drop_last)
        object.__setattr__(loader, "batch_sampler", batches)


def agree_on_epoch(loader: Any, epoch: int, told: int | None) -> int:
    """Tell a user's sampler the epoch, if it follows one; or follow the user's own set_epoch().

    `told`: the epoch that it was told last. Returns the epoch that holds now.
    """
    asked = asked_epoch(loader, told)
    epoch = epoch if asked is None else asked
    for sampler in _following(loader):
        sampler.set_epoch(epoch)
    return epoch


def asked_epoch(loader: Any, told: int | None) -> int | None:
    """The epoch that the user has set on a sampler since the loader told it one; None for none."""
    epochs = [getattr(sampler, "epoch", None) for sampler in _following(loader)]
    set_since = [epoch for epoch in epochs if isinstance(epoch, int) and epoch != (told or 0)]
    return set_since[-1] if set_since else None


def _following(loader: Any) -> list[Any]:
    """The user's samplers that have epochs."""
    samplers = [
        loader.batch_sampler,
        loader.sampler,
        getattr(loader.batch_sampler, "sampler", None),
    ]
    return [one for one in samplers if callable(getattr(one, "set_epoch", None))]
