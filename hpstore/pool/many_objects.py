"""Many objects put or deleted by one call: in batches that share their calls on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from hpstore.agreement.claims import Claims
from hpstore.errors import HpstoreError, ObjectNotFound, SomeFailed
from hpstore.format.column_header import Metadata, encode_metadata
from hpstore.format.keys import check_key
from hpstore.maintenance.sweep import sweep_deleted
from hpstore.objects.context import PoolContext
from hpstore.objects.object_info import ObjectInfo
from hpstore.objects.write import conditional_put
from hpstore.objects.write.many_writes import (
    MOST_KEYS,
    SMALL_BYTES,
    SmallPut,
    delete_objects,
    put_objects,
)
from hpstore.objects.write.put import delete_object, put_object
from hpstore.objects.write.put_source import PutSource, as_source
from hpstore.pool.loss_tolerance import require_stored, require_tolerance, wanted_losses
from hpstore.runtime.threads import WorkerThreads
from hpstore.units import MIB

BATCHES = 2  # at once: while one waits for its syncs, the next is looked up and planned
_BATCH_BYTES = MIB  # of objects in a batch, so that its columns fit the smallest memory budget
T = TypeVar("T")
U = TypeVar("U")


def put_many(
    store: PoolContext,
    objects: Mapping[str, object],
    metadata: Metadata,
    *,
    min_losses_tolerated: int | None,
) -> dict[str, ObjectInfo]:
    """Pool.put_many."""
    encode_metadata(metadata)
    sources = {check_key(key): as_source(data) for key, data in objects.items()}
    wanted = wanted_losses(store, min_losses_tolerated)
    require_tolerance(store, wanted, f"{len(sources)} objects")

    def put(batch: Mapping[str, PutSource]) -> dict[str, ObjectInfo | Exception]:
        found: Mapping[str, ObjectInfo | Exception]
        try:
            found = _put_batch(store, batch, metadata)
        except (HpstoreError, OSError) as error:
            found = dict.fromkeys(batch, _of_all(error))
        return {key: _tolerated(answer, wanted) for key, answer in found.items()}

    results: dict[str, ObjectInfo | Exception] = {}
    for answers in _side_by_side(put, list(put_batches(sources))):
        results |= answers
    return _whole(results, list(sources), "stored")


def _put_batch(
    store: PoolContext, batch: Mapping[str, PutSource], metadata: Metadata
) -> dict[str, ObjectInfo | Exception]:
    if len(batch) > 1:
        puts = {key: SmallPut(source=s, metadata=metadata) for key, s in batch.items()}
        return put_objects(store, puts)
    ((key, source),) = batch.items()
    try:
        return {key: put_object(store, key, source, metadata=metadata)}
    except (HpstoreError, OSError) as error:
        return {key: error}


def delete_many(store: PoolContext, keys: Iterable[str], *, missing_ok: bool) -> None:
    """Pool.delete_many."""
    wanted = list(dict.fromkeys(check_key(key) for key in keys))

    def delete(batch: Sequence[str]) -> dict[str, Exception | None]:
        try:
            found = _delete_batch(store, batch)
        except (HpstoreError, OSError) as error:
            found = dict.fromkeys(batch, _of_all(error))
        sweep_deleted(store)
        if missing_ok:
            found = {k: None if isinstance(e, ObjectNotFound) else e for k, e in found.items()}
        return found

    batches = [wanted[at : at + MOST_KEYS] for at in range(0, len(wanted), MOST_KEYS)]
    results: dict[str, Exception | None] = {}
    for answers in _side_by_side(delete, batches):
        results |= answers
    _whole(results, wanted, "deleted")


def remove_versions(store: PoolContext, claims: Claims, going: Mapping[str, str]) -> None:
    """PoolAdmin.remove_versions."""
    wanted = {check_key(key): version for key, version in going.items()}
    results: dict[str, Exception | None] = dict.fromkeys(wanted)
    keys = list(wanted)
    for at in range(0, len(keys), MOST_KEYS):
        part = {key: wanted[key] for key in keys[at : at + MOST_KEYS]}
        results |= conditional_put.remove_versions(store, claims, part)
        sweep_deleted(store)
    _whole(results, keys, "deleted")


def _of_all(error: HpstoreError | OSError) -> HpstoreError | OSError:
    """An error of a whole batch, of which a part may have been stored, or deleted, before it."""
    error.maybe_visible = True  # type: ignore[union-attr]
    return error


def _delete_batch(store: PoolContext, batch: Sequence[str]) -> dict[str, Exception | None]:
    if len(batch) > 1:
        return delete_objects(store, batch)
    try:
        delete_object(store, batch[0])
    except (HpstoreError, OSError) as error:
        return {batch[0]: error}
    return {batch[0]: None}


def put_batches(sources: Mapping[str, PutSource]) -> Iterator[dict[str, PutSource]]:
    """Small objects in batches, larger ones each by itself. Pure."""
    batch: dict[str, PutSource] = {}
    nbytes = 0
    for key, source in sources.items():
        if source.size > SMALL_BYTES:
            yield {key: source}
            continue
        if len(batch) == MOST_KEYS or nbytes + source.size > _BATCH_BYTES:
            yield batch
            batch, nbytes = {}, 0
        batch[key] = source
        nbytes += source.size
    if batch:
        yield batch


def _tolerated(answer: ObjectInfo | Exception, wanted: int) -> ObjectInfo | Exception:
    """The error instead, where devices failed meanwhile and it survives less than is wanted."""
    if isinstance(answer, ObjectInfo):
        try:
            require_stored(answer, wanted)
        except HpstoreError as error:
            return error
    return answer


def _side_by_side(call: Callable[[T], U], batches: Sequence[T]) -> Iterator[U]:
    """The results in order. Where one raises, those that have not begun are not made."""
    if len(batches) <= 1:
        yield from map(call, batches)
        return
    with WorkerThreads(BATCHES, "hpstore-batch") as threads:
        futures = [threads.submit(call, batch) for batch in batches]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _whole(results: Mapping[str, T | Exception], keys: Sequence[str], what: str) -> dict[str, T]:
    """The results, in the order of keys. Raises SomeFailed."""
    done: dict[str, T] = {}
    failed: dict[str, Exception] = {}
    for key in keys:
        answer = results[key]
        if isinstance(answer, Exception):
            failed[key] = answer
        else:
            done[key] = answer
    if not failed:
        return done
    first = next(iter(failed))
    unclear = any(getattr(e, "maybe_visible", False) for e in failed.values())
    error = SomeFailed(
        f"{len(failed)} of {len(keys)} objects are not {what}{' for certain' if unclear else ''}, "
        f"the first is {first!r}: "
        f"{type(failed[first]).__name__}: {failed[first]} The {len(done)} others are {what}, "
        "durably. `failed` of this error has the reason of each; the call may be repeated for "
        "these.",
        key=first,
    )
    error.done, error.failed = tuple(done), failed
    error.maybe_visible = unclear
    raise error from failed[first]
