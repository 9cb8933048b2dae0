"""What an adapter says when its trainer is not installed, and how it comes to its pool."""

from __future__ import annotations

import os

import hpstore.pool.create_pool
from hpstore.pool.pool import Pool

PoolLike = Pool | str | os.PathLike[str]


def missing(package: str, extra: str) -> ImportError:
    """The error to raise when `package` cannot be imported; names the extra that brings it."""
    return ImportError(
        f"this adapter needs {package}, which is not installed: pip install 'hpstore[{extra}]'"
    )


def as_pool(pool: PoolLike) -> tuple[Pool, bool]:
    """A pool and whether it was opened here (then whoever asked closes it)."""
    if isinstance(pool, Pool):
        return pool, False
    return hpstore.pool.create_pool.open_pool(pool), True
