"""Which loaders read records straight to the GPU, and with what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpstore.loaders.batching.chosen_data import Native
from hpstore.loaders.batching.loader_options import GpuTransfer
from hpstore.loaders.batching.mixture import Mixture
from hpstore.loaders.cache import Cache

if TYPE_CHECKING:
    from hpstore.loaders.gpu.direct_reader import DirectAccess
    from hpstore.loaders.gpu.gpu_device import Gpu


def why_no_direct(
    transfer: GpuTransfer, cache: Cache | int | str | None, native: Native | None, on_host: str
) -> str:
    """Why no record may be read straight to the GPU, whatever the machine can; "" when it may.

    `on_host`: what is done with samples in host memory.
    """
    if transfer.direct == "off":
        return 'direct="off"'
    if isinstance(cache, Cache):
        return "records come through a Cache"
    if native is None or isinstance(native.data, Mixture):
        return "batches are put together in host memory (a mixture, or a foreign data set)"
    if native.packing is not None:
        return "documents are packed into sequences in host memory"
    if on_host:
        return f"samples are worked on in host memory ({on_host})"
    return ""


def direct_access(transfer: GpuTransfer, gpu: Gpu | None, obstacle: str) -> DirectAccess | None:
    """What reads to `gpu`; None without one, or where why_no_direct() has found an `obstacle`."""
    if gpu is None or obstacle:
        return None
    from hpstore.loaders.gpu.direct_reader import DirectAccess

    always = transfer.direct == "always"
    return DirectAccess(gpu, always=always, arena_bytes=int(transfer.arena_bytes))
