"""What an adapter says when its trainer cannot be imported, and how it comes to its pool."""

from __future__ import annotations

import os
from dataclasses import dataclass

import hpstore.pool.create_pool
from hpstore.config import PoolConfig
from hpstore.pool.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnopenedPool:
    """A pool by its settings, as a pickled adapter names it: opened at the first use, if ever."""

    config: PoolConfig
    read_only: bool


PoolLike = Pool | UnopenedPool | str | os.PathLike[str]


def missing(package: str, extra: str, error: ImportError) -> ImportError:
    """The error to raise from `error` when `package` cannot be imported: a package that is there
    but not whole fails likewise. It names the extra that brings the package."""
    return ImportError(
        f"this adapter needs {package}, which cannot be imported ({error}): "
        f"pip install 'hpstore[{extra}]'"
    )


def as_pool(pool: PoolLike) -> tuple[Pool, bool]:
    """A pool and whether it was opened here (then whoever asked closes it)."""
    if isinstance(pool, Pool):
        return pool, False
    if isinstance(pool, UnopenedPool):
        return Pool(pool.config, read_only=pool.read_only), True
    return hpstore.pool.create_pool.open_pool(pool), True
