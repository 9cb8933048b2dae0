"""Zarr stores on a pool."""

from __future__ import annotations

from hpstore.interop.zarr.pool_store import PoolStore

__all__ = ["PoolStore"]
