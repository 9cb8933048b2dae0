"""What makes the batches of a loader: of one dataset, or of a mixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from hpstore.loaders.batching.batch_maker import Engine, Session
from hpstore.loaders.batching.chosen_data import Native
from hpstore.loaders.batching.loader_options import LoaderMemory
from hpstore.loaders.batching.mixed_batches import MixedEngine, MixedSession
from hpstore.loaders.batching.mixture import Mixture
from hpstore.loaders.batching.packed_batches import PackedEngine, PackedSession
from hpstore.loaders.batching.packed_orders import documents_of
from hpstore.loaders.batching.page_budget import page_budget
from hpstore.loaders.cache import Cache
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.sampling.order import Order

if TYPE_CHECKING:
    from hpstore.loaders.gpu.direct_reader import DirectAccess

AnyEngine: TypeAlias = Engine | MixedEngine | PackedEngine
AnySession: TypeAlias = Session | MixedSession | PackedSession


def fingerprints(data: Mixture | Dataset) -> tuple[str, ...]:
    """Of all datasets in it."""
    return data.fingerprints if isinstance(data, Mixture) else (data.fingerprint,)


def stored_bytes(data: Mixture | Dataset) -> float:
    """Mean bytes of a sample's records."""
    sets = data.parts if isinstance(data, Mixture) else (data,)
    total = sum(int(s.payload_bytes.sum()) for one in sets for s in one.streams)
    return total / max(1, sum(map(len, sets)))


def sample_bytes(native: Native) -> float:
    """Mean bytes of a sample as it is in a batch, or of its records."""
    if native.packing is None:
        return stored_bytes(native.data)
    fields = native.packing.fields(native.fields).values()
    return float(sum(field.row_bytes for field in fields))


def make_engine(
    native: Native,
    order: Order | None,
    *,
    memory: LoaderMemory,
    cache: Cache | int | str | None,
    batch_rows: int,
    pin: Callable[[Any], object] | None,
    direct: DirectAccess | None,
    share: float,
) -> AnyEngine:
    """What makes the batches of a dataset, of a mixture or of sequences; `direct`: of the first.

    `cache`: as a loader was given it; else as Engine.
    """
    data, packing = native.data, native.packing
    options: dict[str, Any] = {
        "budget": page_budget(cache, memory),
        "prefetch_bytes": int(memory.prefetch_bytes),
        "pin": pin,
        "batch_rows": batch_rows,
        "cache": cache if isinstance(cache, Cache) else None,
        "share": share,
    }
    if packing is not None:
        packed: Any = order  # packed_order() has made it
        rows = documents_of(packed, batch_rows * packing.length)
        options |= {"pin": None, "batch_rows": rows}
        inner = (
            MixedEngine(data, None, **options)
            if isinstance(data, Mixture)
            else Engine(data, packed.documents, **options)
        )
        bases = data.bases if isinstance(data, Mixture) else [0]
        field = data.source_field if isinstance(data, Mixture) else None
        return PackedEngine(
            inner, packed, packing, packing.fields(native.fields), bases, field, rows
        )
    if isinstance(data, Mixture):
        return MixedEngine(data, order, **options)
    return Engine(data, order, **options, direct=direct)
