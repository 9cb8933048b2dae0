"""What a Checkpointer reads of a committed step without filling a state. Nothing is collective."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import torch

from hpstore.checkpoint.ranks.collectives import Ranks
from hpstore.checkpoint.restore.fill_state import SavedStep, chosen, load_tensors
from hpstore.checkpoint.restore.read_items import Warm
from hpstore.checkpoint.save.group_copies import collector_paused
from hpstore.checkpoint.state.state_tree import Decoding, decode_tree
from hpstore.checkpoint.step_methods import Keeping


class Loading(Keeping):
    """Tensors and values of committed steps, as they are."""

    allow_pickle: bool
    _ranks: Ranks

    @property
    @abstractmethod
    def _memory(self) -> Warm | None:
        """The arena, while it holds a step."""

    @collector_paused()
    def load(
        self,
        step: int,
        keys: Collection[str] | None = None,
        *,
        map_location: str | torch.device | None = None,
    ) -> dict[str, torch.Tensor]:
        """Tensors of a step by name, without a model; `keys` limits them to names or prefixes.

        Only their bytes are read. Not collective.
        """
        manifest = self.manifest(step)
        names = dict.fromkeys(item.name for item in manifest.items)
        device = torch.device(map_location) if map_location is not None else None
        return load_tensors(
            self.pool, manifest, chosen(names, keys, step), device, self._memory
        )  # fmt: skip

    @collector_paused()
    def load_state(
        self, step: int, *, map_location: str | torch.device | None = None
    ) -> dict[str, Any]:
        """All of a step as plain nested values, as it was collected. Not collective."""
        manifest = self.manifest(step)
        names = dict.fromkeys(item.name for item in manifest.items)
        device = torch.device(map_location) if map_location is not None else None
        tensors = load_tensors(self.pool, manifest, list(names), device, self._memory)
        how = Decoding(
            tensor=tensors.__getitem__, rank=self._ranks.rank, allow_pickle=self.allow_pickle
        )
        tree: dict[str, Any] = decode_tree(manifest.tree, how)
        return tree

    def open(self, step: int) -> SavedStep:
        """The tensors of a step by name, read when they are indexed: `ckpt.open(7)["w"][2:4]`."""
        return SavedStep(self.pool, self.manifest(step))


__all__ = ["Loading"]
