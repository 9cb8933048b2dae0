"""Whole tensors of a step by name, in memory of their own."""

from __future__ import annotations

from collections.abc import Collection

import torch

from hpstore.checkpoint.format.backed_bytes import Backed
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import by_name
from hpstore.checkpoint.format.segment_plan import chunks_of
from hpstore.checkpoint.restore.fresh_memory import fresh
from hpstore.checkpoint.restore.read_items import Warm, fill_chunks
from hpstore.checkpoint.state.scalars import dtype_named
from hpstore.pool.pool import Pool


def load_tensors(
    pool: Pool,
    manifest: Manifest,
    names: Collection[str],
    device: torch.device | None,
    warm: Warm | None = None,
    *,
    cast: torch.dtype | None = None,
    on_host: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Whole tensors by name, in fresh memory that the caller owns. `cast`: the dtype of those that
    float. `on_host`: names that do not lie on the device."""
    stored = by_name(manifest.items)
    found, wanted = {}, []
    backed = Backed(pool, manifest.segments)
    for name in names:
        backed.require(name, stored[name])
        item = stored[name][0]
        dtype = dtype_named(item.dtype)
        if cast is not None and dtype.is_floating_point:
            dtype = cast
        tensor = fresh(item.shape, dtype, None if name in on_host else device)
        found[name] = tensor
        wanted += chunks_of(name, tensor)
    fill_chunks(pool, manifest.segments, manifest.items, wanted, warm)
    return found
