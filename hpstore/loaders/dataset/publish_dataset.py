"""Publish parts as one dataset, and list what is published."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hpstore.errors import ConfigError, HpstoreError, ObjectNotFound, VersionConflict
from hpstore.loaders.dataset.class_names import other_meaning
from hpstore.loaders.dataset.dataset_manifest import (
    PREFIX,
    ContentDigest,
    DatasetManifest,
    DatasetPart,
    column_key,
    manifest_key,
    part_key,
    shard_key,
    side_key,
)
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.index_tables import SIDE_MAGIC, check_hash, decode_tables, side_dtypes
from hpstore.loaders.dataset.record_layout import group_fields
from hpstore.loaders.dataset.remove_dataset import delete_if_there, remove_replaced
from hpstore.loaders.dataset.stored_manifests import (
    manifest_at,
    published_manifest,
    require_pool,
    written_parts,
)
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """Facts about a published dataset; `problem` says why the others are empty."""

    name: str
    rows: int = 0
    record_bytes: int = 0  # payload of all shards, before compression
    fingerprint: str = ""
    fields: Mapping[str, Field] | None = None
    layout: str = ""
    compression: str = ""
    parts: int = 0
    created: float = 0.0  # seconds since 1970
    version: str = ""
    problem: str = ""


def dataset_info(pool: Pool, name: str, manifest: DatasetManifest) -> DatasetInfo:
    """The facts of a published manifest."""
    return DatasetInfo(
        name=name,
        rows=manifest.rows,
        record_bytes=sum(sum(s.payload) for part in manifest.parts for s in part.streams),
        fingerprint=manifest.fingerprint,
        fields=manifest.fields,
        layout=manifest.layout,
        compression=manifest.compression,
        parts=len(manifest.parts),
        created=pool.stat(manifest_key(name)).created,
        version=manifest.version_name,
    )


def publish_parts(
    pool: Pool,
    name: str,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> DatasetInfo:
    """Make the parts that n writers put one dataset, in the order of their numbers.

    Durable on return; before it nothing is visible, after it all. Reads the side and column objects
    of all parts: their content makes the fingerprint, so it is that of one writer that wrote the
    same samples. What it replaced is removed.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.
    overwrite
        Replace the dataset that has this name.
    metadata
        JSON, instead of the metadata of part 0.

    Returns
    -------
    DatasetInfo
        Facts about the published dataset.

    Raises
    ------
    ConfigError
        Parts, which the message names, are missing or do not fit. Nothing was published.
    VersionConflict
        The name is taken, or another process published meanwhile. What is there is unchanged.
    ObjectNotFound, IntegrityError
        An object of a part is not there, or is not the one that was written. Nothing was published.
    TooFewDevices
        Parts may be there unseen, or the manifest cannot be made durable.
    """
    old, version = published_manifest(pool, name)
    stale = old.nonces if old else set()
    waiting = {
        part: manifest
        for part, manifest in written_parts(pool, name).items()
        if manifest.parts[0].nonce not in stale  # published, and its note was not removed yet
    }
    manifests = _complete(name, waiting)
    if version is not None and not overwrite:
        raise VersionConflict(
            f"data set {name!r} exists; it is unchanged. overwrite=True replaces it."
        )
    merged = _merged(pool, name, manifests, metadata)
    keys = [part_key(name, part) for part in waiting]
    replaces, there = version if overwrite else None, partial(_all_there, pool, keys)
    merged = publish(pool, name, manifest_key(name), merged, version=replaces, stays=there)
    _remove_notes(pool, keys)
    return dataset_info(pool, name, merged)


def _remove_notes(pool: Pool, keys: Sequence[str]) -> None:
    """Of parts that are published. Best effort: their nonces are known as published."""
    for key in keys:
        try:
            delete_if_there(pool, key)
        except (HpstoreError, OSError) as error:
            _log.warning("%r, the note of a part that is published, stays: %s", key, error)


def _all_there(pool: Pool, keys: Sequence[str]) -> bool:
    """Whether the notes of parts are there: who removes parts removes these first."""
    return all(map(pool.exists, keys))


def _merged(
    pool: Pool,
    name: str,
    manifests: Sequence[DatasetManifest],
    metadata: Mapping[str, object] | None,
) -> DatasetManifest:
    """One manifest of all parts."""
    first = manifests[0]
    return DatasetManifest(
        fields=first.fields,
        layout=first.layout,
        data=first.data,
        compression=first.compression,
        shuffle_seed=first.shuffle_seed,
        metadata=first.metadata if metadata is None else dict(metadata),
        parts=tuple(manifest.parts[0] for manifest in manifests),
        content=joined_content(pool, name, first, [m.parts[0] for m in manifests]),
    )


def publish(
    pool: Pool,
    name: str,
    key: str,
    manifest: DatasetManifest,
    *,
    version: str | None,
    stays: Callable[[], bool] = lambda: True,
) -> DatasetManifest:
    """Put a manifest: the dataset, or the part, is there. What it replaced is removed afterwards,
    but for what a version names that is kept.

    `version`: of the manifest that it may replace; None: there must be none. `stays`: whether no
    other process removes the objects; asked when the dataset is there, as who removes them looks
    for it afterwards. Returns the manifest with its number. Raises VersionConflict.
    """
    old, _ = manifest_at(pool, name, key) if version is not None else (None, None)
    if manifest.part is None:
        manifest = publish_over(pool, key, manifest, old, version)
        _require_whole(pool, name, key, manifest)
        if not stays():
            _take_back(pool, name, key, manifest, old)
            raise begun_anew(name, key)
    else:
        pool.put(key, manifest.encode(), if_absent=version is None, if_version=version)
    if old is not None:
        try:
            remove_replaced(pool, name, old)
        except (HpstoreError, OSError) as error:  # what is published stays so
            _log.warning("what data set %r replaced stays until remove_orphans: %s", name, error)
    return manifest


def _require_whole(pool: Pool, name: str, key: str, made: DatasetManifest) -> None:
    """Take back what was published where delete_dataset removed objects of it meanwhile: it looks
    for a manifest, too, after the objects, so one of both sees it. Raises VersionConflict."""
    try:
        lost = lost_object(pool, name, made.parts)
        if lost is None:
            return
        found, version = manifest_at(pool, name, key)
    except HpstoreError as error:
        _log.info("whether data set %r is whole is not known: %s", name, error)
        return
    if found is not None and version is not None:
        if found.nonces != made.nonces:
            return  # another one replaced it, with its objects
        pool.admin.remove_versions({key: version})
    raise VersionConflict(
        f"data set {name!r} was deleted while it was written, {lost!r} with it: nothing of it is "
        "visible. Write it again.",
        key=key,
    )


def lost_object(pool: Pool, name: str, parts: Sequence[DatasetPart]) -> str | None:
    """The key of an object of these parts that is not there; None when all are."""
    there = set(pool.list(f"{PREFIX}/{name}/", certain=True))
    lost = next((one for one in _objects(name, parts) if one not in there), None)
    return None if lost is None or pool.exists(lost) else lost


def _take_back(
    pool: Pool, name: str, key: str, made: DatasetManifest, old: DatasetManifest | None
) -> None:
    """What was there before is there again, unless another one has replaced it since."""
    found, version = manifest_at(pool, name, key)
    if found is None or version is None or found.nonces != made.nonces:
        return
    if old is None:
        pool.admin.remove_versions({key: version})
    else:
        pool.put(key, old.encode(), if_version=version)


def begun_anew(name: str, key: str) -> VersionConflict:
    """The error of a process whose parts another one removes while it publishes them."""
    error = VersionConflict(
        f"data set {name!r}: another process began its ingest anew, or deleted it, while this one "
        "published it. What is there is whole, and may be of either; look at it before you do "
        "this again",
        key=key,
    )
    error.maybe_visible = True
    return error


def _objects(name: str, parts: Sequence[DatasetPart]) -> Iterator[str]:
    """Keys of the shards, their side objects, and the columns."""
    for part in parts:
        for number, stream in enumerate(part.streams):
            for shard in range(len(stream.rows)):
                yield shard_key(name, part.nonce, number, shard)
                yield side_key(name, part.nonce, number, shard)
        for column, hashes in part.columns.items():
            for cut in range(len(hashes)):
                yield column_key(name, part.column_nonce(column), column, cut)


def publish_over(
    pool: Pool,
    key: str,
    manifest: DatasetManifest,
    old: DatasetManifest | None,
    version: str | None,
) -> DatasetManifest:
    """Put the manifest of a dataset over `old`, whose object has this version; nothing is removed.

    Returns it with its number, one more than that of `old`. Raises VersionConflict.
    """
    made = replace(manifest, version=old.version + 1 if old is not None else 1)
    pool.put(key, made.encode(), if_absent=version is None, if_version=version)
    return made


def _complete(
    name: str, waiting: Mapping[tuple[int, int], DatasetManifest]
) -> list[DatasetManifest]:
    """All parts in order. Raises ConfigError when one is missing or differs."""
    counts = sorted({count for _, count in waiting})
    if len(counts) != 1:
        what = f"parts of different counts ({counts})" if counts else "no parts to publish"
        raise ConfigError(f"data set {name!r} has {what}; nothing was published")
    missing = [i for i in range(counts[0]) if (i, counts[0]) not in waiting]
    if missing:
        raise ConfigError(
            f"data set {name!r} lacks part {', '.join(map(str, missing))} of {counts[0]}; nothing "
            "was published. Write them, then publish again."
        )
    manifests = [waiting[i, counts[0]] for i in range(counts[0])]
    wanted = _common(manifests[0])
    first = manifests[0]
    for number, manifest in enumerate(manifests):
        odd = other_meaning(first.metadata, manifest.metadata, first.fields, more=False)
        if odd is not None:
            raise ConfigError(
                f"data set {name!r}: parts 0 and {number} differ in {odd}: the same numbers would "
                "stand for others. Nothing was published"
            )
        for what, value in _common(manifest).items():
            if value != wanted[what]:
                raise ConfigError(
                    f"data set {name!r}: part {number} has {what} {value}, part 0 has "
                    f"{wanted[what]}; nothing was published"
                )
    return manifests


def _common(manifest: DatasetManifest) -> dict[str, object]:
    """What all parts must agree on."""
    return {
        **manifest.schema(),
        "compression": manifest.compression,
        "shuffle seed": manifest.shuffle_seed,
        "k": manifest.data,
        "units": [stream.unit_bytes for stream in manifest.parts[0].streams],
    }


def joined_content(
    pool: Pool, name: str, schema: DatasetManifest, parts: Sequence[DatasetPart]
) -> str:
    """Digest over the samples of all parts in order; checks that their objects are there.

    `schema`: a manifest with the same fields and layout.
    """
    content = ContentDigest()
    _, records = group_fields(schema.stored, schema.layout)
    for part in parts:
        for number, (stream, record) in enumerate(records.items()):
            dtypes = side_dtypes(record)
            shards = part.streams[number]
            for shard, (rows, wanted) in enumerate(zip(shards.rows, shards.side, strict=True)):
                pool.stat(shard_key(name, part.nonce, number, shard))
                key = side_key(name, part.nonce, number, shard)
                data = pool.get(key)
                check_hash(key, data, wanted)
                tables = decode_tables(SIDE_MAGIC, data, dtypes, rows, where=f"object {key!r}")
                content.add_side(stream, record, tables)
        for column, field in enumerate(schema.stored):
            for cut, wanted in enumerate(part.columns.get(str(column), ())):
                key = column_key(name, part.column_nonce(str(column)), str(column), cut)
                data = pool.get(key)
                check_hash(key, data, wanted)
                content.add_column(field, data)
    return content.hexdigest()


def list_datasets(pool: Pool) -> list[DatasetInfo]:
    """Find the published datasets.

    Parameters
    ----------
    pool
        An open pool.

    Returns
    -------
    list of DatasetInfo
        In the order of their names. One whose manifest cannot be read has a `problem`. With more
        than m devices away some may be missing.

    Raises
    ------
    ConfigError
        `pool` is not an open pool.
    """
    found = []
    for key in require_pool(pool, "list_datasets").list(f"{PREFIX}/"):
        name, _, last = key.removeprefix(f"{PREFIX}/").rpartition("/")
        if last != "manifest" or not name:
            continue
        try:
            manifest = DatasetManifest.decode(pool.get(key), where=f"data set {name!r}")
            found.append(dataset_info(pool, name, manifest))
        except ConfigError:
            continue  # a corpus of tokens
        except ObjectNotFound:
            continue  # deleted meanwhile
        except HpstoreError as error:
            found.append(DatasetInfo(name=name, problem=str(error)))
    return found
