"""Modules of a training state: what they hold by name, and how they take it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from hpstore.checkpoint.state.optimizers import clean_name, unwrapped
from hpstore.errors import CheckpointMismatch

Values = Mapping[str, Any]  # Any: what get_extra_state() gives is no tensor


def module_state(model: torch.nn.Module) -> dict[str, Any]:
    """Parameters, buffers and extra states, by names without wrappers; {} for one that has none,
    such as a loss."""
    return dict(get_model_state_dict(unwrapped(model), options=StateDictOptions(strict=False)))


def load_module(path: str, model: torch.nn.Module, loaded: Values, *, strict: bool) -> None:
    """Let a module load what was saved of it. Raises CheckpointMismatch."""
    if not loaded:
        return
    try:
        set_model_state_dict(
            unwrapped(model), dict(loaded), options=StateDictOptions(strict=strict)
        )
    except RuntimeError as error:
        raise CheckpointMismatch(
            f"model {path!r}: {error}. Other parts of the state may be filled already."
        ) from error


def loads_its_own_way(module: torch.nn.Module) -> bool:
    """Whether loading a state into a module does more than to fill its tensors."""
    kind, plain = type(module), torch.nn.Module
    return bool(
        _has_own_loader(module)
        or kind.load_state_dict is not plain.load_state_dict
        or kind.set_extra_state is not plain.set_extra_state
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
    )


def _has_own_loader(module: torch.nn.Module) -> bool:
    mine = type(module)._load_from_state_dict
    plain = (torch.nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
    return mine not in plain


def free_sizes(model: torch.nn.Module, names: Values) -> set[str]:
    """Names whose module decides itself whether it takes a value of another shape or dtype: extra
    states, and what belongs to a module with a loader or a hook of its own."""
    model = unwrapped(model)
    own = tuple(_own_prefixes(model))
    return {
        name
        for name in names
        if name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX
        or any(name.startswith(prefix) and "." not in name[len(prefix) :] for prefix in own)
    }


def _own_prefixes(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        hooks = [getattr(h, "hook", h) for h in module._load_state_dict_pre_hooks.values()]
        own = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith("torch.")]
        if own or _has_own_loader(module):
            cleaned = clean_name(model, name) if name else ""
            yield f"{cleaned}." if cleaned else ""
