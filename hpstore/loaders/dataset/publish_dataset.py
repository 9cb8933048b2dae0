"""Publish parts as one dataset; list, delete, clean up."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpstore.errors import (
    ConfigError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    VersionConflict,
)
from hpstore.format.records import unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.loaders.dataset.dataset_manifest import (
    PREFIX,
    ContentDigest,
    DatasetManifest,
    DatasetPart,
    check_dataset_name,
    column_key,
    journal_key,
    manifest_key,
    nonce_of,
    part_key,
    shard_key,
    side_key,
)
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.index_tables import SIDE_MAGIC, check_hash, decode_tables, side_dtypes
from hpstore.loaders.dataset.record_layout import group_fields
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)
_PART = re.compile(r"parts/(\d+)-of-(\d+)")


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
    )


def written_parts(pool: Pool, name: str) -> dict[tuple[int, int], DatasetManifest]:
    """Find the parts that are complete and wait to be published.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.

    Returns
    -------
    dict
        The manifest of each part by (i, n), as DatasetWriter was given it.

    Raises
    ------
    ConfigError, InvalidKey
        `pool` is not an open pool, or no dataset can have this name.
    TooFewDevices
        Parts may be there unseen.
    IntegrityError
        The manifest of a part is damaged.
    """
    require_pool(pool, "written_parts")
    prefix = f"{PREFIX}/{check_dataset_name(name)}/"
    found = {}
    for key in pool.list(prefix + "parts/", certain=True):
        match = _PART.fullmatch(key.removeprefix(prefix))
        if match is not None:
            part = (int(match[1]), int(match[2]))
            found[part] = DatasetManifest.decode(pool.get(key), where=f"object {key!r}")
    return found


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
    old, version = _published(pool, name)
    stale = {part.nonce for part in old.parts} if old else set()
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
    publish(pool, name, manifest_key(name), merged, version=version if overwrite else None)
    for part in waiting:
        try:
            _delete(pool, part_key(name, part))
        except (HpstoreError, OSError) as error:  # harmless: its nonce is known as published
            _log.warning("the note of part %s of data set %r stays: %s", part, name, error)
    return dataset_info(pool, name, merged)


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
    pool: Pool, name: str, key: str, manifest: DatasetManifest, *, version: str | None
) -> None:
    """Put a manifest: the dataset, or the part, is there. What it replaced is removed afterwards.

    `version`: of the manifest that it may replace; None: there must be none. Raises
    VersionConflict.
    """
    old, _ = _manifest_at(pool, name, key) if version is not None else (None, None)
    pool.put(key, manifest.encode(), if_absent=version is None, if_version=version)
    if old is not None:
        try:
            _remove_replaced(pool, name, {part.nonce for part in old.parts})
        except (HpstoreError, OSError) as error:  # what is published stays so
            _log.warning("what data set %r replaced stays until remove_orphans: %s", name, error)


def _remove_replaced(pool: Pool, name: str, nonces: set[str]) -> None:
    """Remove the objects of these writers, but for what the dataset or a written part names.

    A part's note may still be there after its objects were published: the note goes, they stay.
    """
    published, version = _published(pool, name)
    if published is None and version is not None:
        return  # it cannot be read: nobody knows what it names
    live = {part.nonce for part in published.parts} if published else set()
    notes = {
        part_key(name, part): note.parts[0].nonce
        for part, note in written_parts(pool, name).items()
    }
    keys = [key for key, nonce in notes.items() if nonce in nonces | live]
    gone = nonces - live
    keys += [key for key in pool.list(f"{PREFIX}/{name}/") if nonce_of(name, key) in gone]
    for key in keys:
        _delete(pool, key)


def _published(pool: Pool, name: str) -> tuple[DatasetManifest | None, str | None]:
    pool = require_pool(pool, "delete_dataset, as publish_parts,")
    return _manifest_at(pool, name, manifest_key(check_dataset_name(name)))


def _manifest_at(pool: Pool, name: str, key: str) -> tuple[DatasetManifest | None, str | None]:
    """The manifest under a key, with its version. A damaged one is taken as empty."""
    try:
        version = pool.stat(key).version
        return DatasetManifest.decode(pool.get(key), where=f"data set {name!r}"), version
    except ObjectNotFound:
        return None, None
    except IntegrityError as error:
        _log.warning("data set %r: %s; what it named stays until remove_orphans", name, error)
        return None, version


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
    for number, manifest in enumerate(manifests):
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
    _, records = group_fields(schema.fields, schema.layout)
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
        for column, field in enumerate(schema.fields):
            for cut, wanted in enumerate(part.columns.get(str(column), ())):
                key = column_key(name, part.nonce, str(column), cut)
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


def delete_dataset(pool: Pool, name: str) -> None:
    """Delete a dataset, parts that were not published, and what killed writers left.

    Durable on return. The manifest goes first: stopped in between, nothing of it is visible, and
    calling it again goes on.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.

    Raises
    ------
    ObjectNotFound
        There is nothing to delete.
    ConfigError, InvalidKey
        `name` is something else than a dataset, or no dataset can have it.
    TooFewDevices
        Objects may be there unseen, or a delete cannot be made durable.
    """
    key = manifest_key(check_dataset_name(name))
    _published(pool, name)  # raises for a corpus of tokens
    prefix = f"{PREFIX}/{name}/"
    ours = [
        found
        for found in pool.list(prefix, certain=True)
        if nonce_of(name, found)
        or _PART.fullmatch(found.removeprefix(prefix))
        or found == journal_key(name)
    ]
    try:
        pool.delete(key)
    except ObjectNotFound as error:
        if not ours:
            raise ObjectNotFound(f"no data set {name!r} in this pool", key=key) from error
    for found in sorted(ours, key=lambda found: nonce_of(name, found) is not None):
        _delete(pool, found)


def remove_orphans(pool: Pool, name: str) -> int:
    """Remove objects that no dataset, written part or unfinished ingest names.

    They are left by writers that were killed. Call it only while no process writes this dataset:
    the objects of an open writer look the same.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.

    Returns
    -------
    int
        How many objects were removed.

    Raises
    ------
    IntegrityError
        A manifest cannot be read, so what it names is not known. Nothing was removed.
    ConfigError, InvalidKey
        `name` is something else than a dataset, or no dataset can have it.
    TooFewDevices
        Objects may be there unseen, or a delete cannot be made durable.
    """
    known = {p.nonce for m in written_parts(pool, name).values() for p in m.parts}
    published, version = _published(pool, name)
    if published is None and version is not None:
        raise IntegrityError(
            f"the manifest of data set {name!r} cannot be read: what belongs to it is not known, "
            "nothing was removed. delete_dataset removes all of it."
        )
    known |= {part.nonce for part in published.parts} if published else set()
    known |= _journaled(pool, name)
    removed = 0
    for key in pool.list(f"{PREFIX}/{name}/", certain=True):
        nonce = nonce_of(name, key)
        if nonce is not None and nonce not in known:
            _delete(pool, key)
            removed += 1
    return removed


def _journaled(pool: Pool, name: str) -> set[str]:
    """Nonces of what an unfinished ingest stored and goes on with."""
    key = journal_key(name)
    try:
        body: dict[str, Any] = unseal(pool.get(key), where=key)
    except ObjectNotFound:
        return set()
    with parsing(f"{key}: journal"):
        return {str(part["nonce"]) for part in body["parts"]} | set(map(str, body["writing"]))


def _delete(pool: Pool, key: str) -> None:
    try:
        pool.delete(key)
    except ObjectNotFound:
        _log.debug("object %r was gone already", key)


def require_pool(pool: object, who: str) -> Pool:
    """The pool, open. ConfigError for what is none, such as the path of one."""
    if not isinstance(pool, Pool):
        raise ConfigError(
            f"{who} takes an open pool, not a {type(pool).__name__}: "
            'with hpstore.open("pool.toml") as pool: ...'
        )
    return pool
