"""A model's tensors of a committed step, by URL: for programs that save nothing."""

from __future__ import annotations

import torch

from hpstore.checkpoint.checkpointer import Checkpointer
from hpstore.checkpoint.restore.fill_state import RestoreReport
from hpstore.checkpoint.restore.load_options import LoadOptions
from hpstore.errors import ConfigError
from hpstore.pool.create_pool import open_pool

_SCHEME = "hpstore://"


def load_model(
    url: str,
    model: torch.nn.Module,
    step: int | None = None,
    *,
    name: str = "model",
    strict: bool = True,
    load: LoadOptions | None = None,
) -> RestoreReport:
    """Fill a model from a step of a run, and read nothing else: no optimizer, no RNG states.

    The pool is opened read-only for the call. With torch.distributed in use all ranks call it, each
    with its part of the model.

    Parameters
    ----------
    url
        "hpstore://NAME/prefix": the registered name of a pool, and the run's prefix.
    model
        The module to fill. It stays in its mode: call its eval().
    step
        A committed step. Default: the newest that can be read.
    name
        What the model is called in the run's state.
    strict
        As for Checkpointer.restore().
    load
        What of the model is loaded, under which names.

    Returns
    -------
    RestoreReport
        The step, and all names that were loaded or not.

    Raises
    ------
    ConfigError
        `url` is no such URL, or there is no pool of this name.
    CheckpointMismatch
        Model and checkpoint do not fit together. Nothing was changed.
    CheckpointError, IntegrityError, RedundancyError
        There is no checkpoint, or nothing can be read now.
    """
    pool_name, prefix = _parts(url)
    with (
        open_pool(pool_name, read_only=True) as pool,
        Checkpointer(pool, prefix, rng=False) as ckpt,
    ):
        return ckpt.load_model(model, step, name=name, strict=strict, load=load)


def _parts(url: str) -> tuple[str, str]:
    """Name of the pool, and prefix. Raises ConfigError."""
    if isinstance(url, str) and url.startswith(_SCHEME):
        name, _, prefix = url[len(_SCHEME) :].strip("/").partition("/")
        if name and prefix:
            return name, prefix
    raise ConfigError(f"{url!r} is no URL of a run: write {_SCHEME}NAME/prefix")
