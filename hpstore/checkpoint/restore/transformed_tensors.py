"""Tensors that a function of the caller changes between the step and the state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.restore.load_options import Transform
from hpstore.checkpoint.restore.name_patterns import Globs
from hpstore.checkpoint.restore.read_items import Warm
from hpstore.checkpoint.restore.whole_tensors import load_tensors
from hpstore.checkpoint.state.plain_tensors import is_plain_tensor
from hpstore.checkpoint.state.targets import RNG_KEY
from hpstore.errors import CheckpointMismatch, ConfigError
from hpstore.pool.pool import Pool


def transforms_of(
    names: Collection[str],
    transform: Transform | Mapping[str, Transform],
    step: int,
    among: Collection[str],
) -> dict[str, Transform]:
    """The function for each name that has one: that of the first pattern that matches. Raises
    CheckpointMismatch for a pattern that matches none of `among`: other ranks have other names."""
    if callable(transform):
        return dict.fromkeys(names, transform)
    found: dict[str, Transform] = {}
    for pattern, call in transform.items():
        globs = Globs([pattern])
        mine = list(filter(globs.match, names))
        if not mine and globs.unused(among):
            raise CheckpointMismatch(
                f"transform={pattern!r} matches no tensor of step {step}. Nothing was changed."
            )
        for name in mine:
            found.setdefault(name, call)
    return found


def applied(call: Transform, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a function makes of a tensor. Raises ConfigError for what no place could take."""
    made = call(name, tensor)
    if (
        not isinstance(made, torch.Tensor)
        or hasattr(made, "to_local")
        or not is_plain_tensor(made)
        or made.is_meta
    ):
        raise ConfigError(
            f"transform gave a {type(made).__name__} for {name!r}: it must give a dense tensor "
            "that holds values. Nothing was changed."
        )
    return made.detach()


def _weights(names: Collection[str]) -> list[str]:
    return [name for name in names if not name.startswith(f"{RNG_KEY}@")]


def transformed(
    pool: Pool,
    manifest: Manifest,
    names: Collection[str],
    transform: Transform | Mapping[str, Transform],
    warm: Warm | None,
    among: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Those of the named tensors that a function is given for, read and changed, on the host.
    `among`: names that a pattern may mean, by default these."""
    own = _weights(names)
    calls = transforms_of(own, transform, manifest.step, own if among is None else _weights(among))
    read = load_tensors(pool, manifest, list(calls), None, warm)
    return {name: applied(call, name, read.pop(name)) for name, call in calls.items()}
