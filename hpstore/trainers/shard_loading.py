"""FSDP2 under the Trainer: weights and moments come from the pool into each rank's shards.

The Trainer reads them from files of a local folder, by two functions of accelerate. For the folder
of a resume these two are answered from the pool (docs/decisions/0121).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from hpstore.errors import CheckpointError
from hpstore.trainers.optional_import import missing

try:
    import transformers
    from transformers import trainer as trainer_module
except ModuleNotFoundError as error:
    raise missing("transformers", "huggingface", error) from error

# Any: plugins, accelerators and models of others

_LOADERS = ("load_fsdp_model", "load_fsdp_optimizer")


class ShardLoading:
    """Answers the Trainer's loads from `folder` by `fill`, from open() to close().

    `fill` gets {"model": weights} or {"optimizer": optimizer} and is collective. Loads from other
    folders, as of load_best_model_at_end, stay the Trainer's. require_done() makes sure that those
    `wanted` were asked for.
    """

    def __init__(
        self,
        folder: str,
        fill: Callable[[Mapping[str, Any]], None],
        wanted: Collection[str] = ("model", "optimizer"),
    ) -> None:
        self.folder, self._fill = folder, fill
        self._left = set(wanted)
        self._active = False

    @staticmethod
    def known() -> bool:
        """Whether transformers loads shards by the functions that are replaced here."""
        return all(callable(getattr(trainer_module, name, None)) for name in _LOADERS)

    def open(self) -> None:
        """Take the functions' places. Raises CheckpointError where transformers has them not."""
        if not self.known():
            raise CheckpointError(
                f"transformers {transformers.__version__} is not one whose loading of FSDP shards "
                f"this hpstore knows ({', '.join(_LOADERS)} in transformers.trainer). Nothing was "
                "changed; use a version that docs/trainers.md names"
            )
        self._active = True
        model, optimizer = (getattr(trainer_module, name) for name in _LOADERS)

        def load_model(
            plugin: Any, accelerator: Any, target: Any, place: Any, **options: Any
        ) -> Any:
            if not self._is_ours(place):
                return model(plugin, accelerator, target, place, **options)
            self._answer("model", target)
            return torch.nn.modules.module._IncompatibleKeys([], [])

        def load_optimizer(
            plugin: Any, accelerator: Any, target: Any, owner: Any, place: Any, **options: Any
        ) -> None:
            if self._is_ours(place):
                self._answer("optimizer", target)
            else:
                optimizer(plugin, accelerator, target, owner, place, **options)

        self._before = (model, optimizer)
        self._mine = (load_model, load_optimizer)
        for name, function in zip(_LOADERS, self._mine, strict=True):
            setattr(trainer_module, name, function)

    def _is_ours(self, place: Any) -> bool:
        return self._active and os.path.realpath(place) == os.path.realpath(self.folder)

    def _answer(self, part: str, target: Any) -> None:
        self._fill({part: target})
        self._left.discard(part)

    def require_done(self) -> None:
        """Raise CheckpointError unless weights and moments are loaded."""
        if self._left:
            raise CheckpointError(
                f"the Trainer of transformers {transformers.__version__} has not loaded the "
                f"{' and the '.join(sorted(self._left))} of the checkpoint. Nothing is trained: "
                "give train(resume_from_checkpoint=...) what resume_folder() returned, after the "
                "Trainer was made"
            )

    def close(self) -> None:
        """Give the functions back, unless others have taken their places since: then ours hand
        every load on. Idempotent."""
        if not self._active:
            return
        self._active = False
        for name, mine, before in zip(_LOADERS, self._mine, self._before, strict=True):
            if getattr(trainer_module, name) is mine:
                setattr(trainer_module, name, before)
