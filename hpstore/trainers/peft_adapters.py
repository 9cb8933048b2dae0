"""PEFT's own files of an adapter: written to and read from a pool where peft opens them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hpstore.errors import CheckpointError, ConfigError

# Any: models and classes of peft

WEIGHTS = "adapter_model.safetensors"
MARK = "adapter_config.json"
_reading = threading.Lock()  # held while peft's function is replaced


def is_adapter_model(thing: Any) -> bool:
    """Whether an object, or a class, is a PeftModel. Imports nothing."""
    kind = thing if isinstance(thing, type) else type(thing)
    return any(k.__name__ == "PeftModel" and k.__module__.startswith("peft") for k in kind.__mro__)


def writer_module() -> ModuleType:
    """The module whose safe_save_file writes adapters."""
    return import_module("peft.peft_model")


@contextmanager
def adapters_from(
    folder: str, names: list[str], read: Callable[[str], dict[str, torch.Tensor]]
) -> Iterator[None]:
    """Inside, peft loads files of weights below `folder` by `read`, which gets their names there.

    An empty file stands for each: should peft open it by another function, that is an error.
    """
    module = import_module("peft.utils.save_and_load")
    for name in names:
        Path(folder, name).touch()
    with _reading:
        original = getattr(module, "safe_load_file", None)
        if original is None:
            raise CheckpointError(
                "this peft is not one whose reading of weights this hpstore knows: copy "
                "the adapter to a folder, and load that"
            )

        def load(filename: Any, device: Any = "cpu") -> dict[str, torch.Tensor]:
            name = os.path.relpath(filename, folder)
            if name not in names:
                found: dict[str, torch.Tensor] = original(filename, device=device)
                return found
            return {key: tensor.to(device) for key, tensor in read(name).items()}

        vars(module)["safe_load_file"] = load
        try:
            yield
        finally:
            vars(module)["safe_load_file"] = original


def base_model(kind: Any, options: dict[str, Any]) -> torch.nn.Module:
    """The model that an adapter is loaded onto, taken out of the options."""
    found = options.pop("model", None)
    if not isinstance(found, torch.nn.Module):
        raise ConfigError(
            f"{kind.__name__} wants the model that the adapter is for: load_pretrained("
            f"{kind.__name__}, url, model=base)"
        )
    return found
