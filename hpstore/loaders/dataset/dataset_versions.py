"""Versions of a dataset: every change is a new manifest over parts that stay.

The newest manifest is the dataset. Before a change replaces it, it is stored once more under its
number and name (decision 0128); objects stay for as long as any manifest names them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from hpstore.errors import (
    ConfigError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    VersionConflict,
    without_promise,
)
from hpstore.loaders.dataset.dataset_manifest import (
    PREFIX,
    DatasetManifest,
    check_dataset_name,
    check_label,
    manifest_key,
    nonce_of,
    object_prefix,
    version_key,
    version_of,
)
from hpstore.loaders.dataset.publish_dataset import joined_content, publish_over
from hpstore.loaders.dataset.remove_dataset import delete_if_there
from hpstore.loaders.dataset.stored_manifests import live_nonces, manifest_at, require_pool
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)
_ATTEMPTS = 100  # of a change, while other processes change the same dataset
Change = Callable[[DatasetManifest], DatasetManifest]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetVersion:
    """One version of a dataset; `problem` says why facts are missing."""

    name: str  # what Dataset(..., version=) takes
    number: int
    current: bool = False
    rows: int = 0
    fields: Sequence[str] = ()
    fingerprint: str = ""
    created: float = 0.0  # seconds since 1970
    problem: str = ""


def list_versions(pool: Pool, name: str) -> list[DatasetVersion]:
    """Find the versions of a dataset.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.

    Returns
    -------
    list of DatasetVersion
        The oldest first; the last one is what Dataset(pool, name) opens.

    Raises
    ------
    ObjectNotFound
        There is no published dataset of this name.
    ConfigError, InvalidKey, IntegrityError, FormatTooNew, TooFewDevices
        As Dataset raises them.
    """
    current = read_manifest(require_pool(pool, "list_versions"), name)
    found = []
    for number, (key, called) in sorted(_kept(pool, name).items()):
        if number == current.version:
            continue  # a change was stopped right before it became visible
        try:
            manifest = DatasetManifest.decode(pool.get(key), where=_told(name, called))
        except ObjectNotFound:
            continue  # removed meanwhile
        except HpstoreError as error:
            found.append(DatasetVersion(name=called, number=number, problem=str(error)))
            continue
        found.append(_facts(pool, manifest, key, current=False))
    return [*found, _facts(pool, current, manifest_key(name), current=True)]


def _facts(pool: Pool, manifest: DatasetManifest, key: str, *, current: bool) -> DatasetVersion:
    return DatasetVersion(
        name=manifest.version_name,
        number=manifest.version,
        current=current,
        rows=manifest.rows,
        fields=tuple(manifest.fields),
        fingerprint=manifest.fingerprint,
        created=pool.stat(key).created,
    )


def read_manifest(pool: Pool, name: str, version: str | None = None) -> DatasetManifest:
    """The manifest of a published dataset, or of one of its versions, by name.

    Raises ObjectNotFound, ConfigError, IntegrityError.
    """
    key = manifest_key(check_dataset_name(name))
    try:
        data = pool.get(key)
    except ObjectNotFound as error:
        raise ObjectNotFound(
            f"no data set {name!r} in this pool (parts show after publish_parts)", key=key
        ) from error
    current = DatasetManifest.decode(data, where=f"data set {name!r}")
    if version is None or version == current.version_name:
        return current
    kept = {called: key for key, called in _kept(pool, name).values()}
    if version not in kept:
        there = ", ".join([*kept, current.version_name])
        raise ObjectNotFound(f"data set {name!r} has no version {version!r}; it has {there}")
    return DatasetManifest.decode(pool.get(kept[version]), where=_told(name, version))


def version_with(pool: Pool, name: str, fingerprint: str) -> DatasetManifest | None:
    """The version that has a fingerprint, the newest first; None when there is none."""
    current = read_manifest(pool, name)
    if current.fingerprint == fingerprint:
        return current
    for _, (key, called) in sorted(_kept(pool, name).items(), reverse=True):
        try:
            manifest = DatasetManifest.decode(pool.get(key), where=_told(name, called))
        except HpstoreError as error:
            _log.debug("version %s of data set %r is passed over: %s", called, name, error)
            continue
        if manifest.fingerprint == fingerprint:
            return manifest
    return None


def delete_version(pool: Pool, name: str, version: str) -> int:
    """Delete an old version, and what no other version, written part or ingest names.

    Durable on return. Who still reads it gets errors. Stopped in between, nothing is lost: what it
    left goes with the next version that is deleted, or with `remove_orphans`.

    Parameters
    ----------
    pool
        An open pool.
    name
        Name of the dataset.
    version
        Name of the version, as `list_versions` gives it.

    Returns
    -------
    int
        How many objects were removed.

    Raises
    ------
    ConfigError
        It is the newest version; delete_dataset deletes the dataset.
    ObjectNotFound
        There is no such version.
    IntegrityError
        A manifest of this dataset cannot be read, so what it names is not known. Nothing was
        removed.
    TooFewDevices
        Objects may be there unseen, or a delete cannot be made durable.
    """
    pool = require_pool(pool, "delete_version")
    going = read_manifest(pool, name, version)
    key = version_key(name, going.version, going.version_name)
    if read_manifest(pool, name).version == going.version:
        raise ConfigError(
            f"version {version!r} is the newest of data set {name!r}: delete_dataset deletes all"
        )
    live_nonces(pool, name)  # raises before anything is removed
    pool.delete(key)
    try:
        gone = going.nonces - live_nonces(pool, name)
    except IntegrityError as error:
        raise IntegrityError(
            f"version {version!r} of data set {name!r} is deleted, its objects are left: "
            f"{without_promise(error)} Once that is mended, remove_orphans removes them"
        ) from error
    removed = 0
    for found in pool.list(f"{PREFIX}/{name}/", certain=True):
        if nonce_of(name, found) in gone:
            delete_if_there(pool, found)
            removed += 1
    return removed


def change_dataset(
    pool: Pool,
    name: str,
    change: Change,
    *,
    label: str | None = None,
    putting: Callable[[bool], None] = lambda _: None,
) -> DatasetManifest:
    """Publish what `change` makes of the newest manifest, and keep that as a version.

    `change` is called again when another process changed the dataset meanwhile. Durable on return.
    Raises ObjectNotFound, VersionConflict, IntegrityError, what `change` raises: nothing changed.
    `putting` is called with True right before a put that may become visible whatever comes of it,
    and with False when it was refused for certain.
    """
    label = check_label(label)
    key = manifest_key(check_dataset_name(name))
    for _ in range(_ATTEMPTS):
        old, found = manifest_at(pool, name, key)
        if old is None or found is None:
            read_manifest(pool, name)  # raises
            raise IntegrityError(f"the manifest of data set {name!r} came and went")
        taken = {called for _, called in _kept(pool, name).values()} | {old.version_name}
        if label in taken:
            raise VersionConflict(f"data set {name!r} has a version {label!r}; nothing was changed")
        made = replace(change(old), label=label)
        _keep(pool, name, old)
        putting(True)
        try:
            return publish_over(pool, key, made, old, found)
        except VersionConflict as error:
            if error.maybe_visible:  # what is there may be this very change: not a second time
                raise
            putting(False)
            _log.info("data set %r was changed meanwhile: once more", name)
            _drop_replaced(pool, name, old)
    raise VersionConflict(
        f"data set {name!r} was changed by others {_ATTEMPTS} times meanwhile; nothing was changed"
    )


def withdraw_parts(
    pool: Pool, name: str, gone: Set[str], before: DatasetManifest | None = None
) -> None:
    """Take parts with these nonces, whose objects are removed, off a dataset and its versions.

    Who published them meanwhile, unless it was killed, looks for who removes them and does the
    same (PROTOCOL 25). A dataset of nothing else goes; the one that was there `before` is put back.
    """
    key = manifest_key(name)
    newest, version = manifest_at(pool, name, key)
    if newest is not None and version is not None and newest.nonces & gone:
        if any(not part.nonces & gone for part in newest.parts):
            change_dataset(pool, name, lambda now: _without(pool, name, now, gone))
        elif before is not None and not before.nonces & gone:
            pool.put(key, before.encode(), if_version=version)
        else:
            pool.admin.remove_versions({key: version})
    for kept, _ in _kept(pool, name).values():
        manifest, _ = manifest_at(pool, name, kept)
        if manifest is not None and manifest.nonces & gone:
            delete_if_there(pool, kept)


def _without(pool: Pool, name: str, now: DatasetManifest, gone: Set[str]) -> DatasetManifest:
    left = tuple(part for part in now.parts if not part.nonces & gone)
    return replace(now, parts=left, content=joined_content(pool, name, now, left))


def _keep(pool: Pool, name: str, manifest: DatasetManifest) -> None:
    """Store a manifest as a version. Raises VersionConflict when another one has its place."""
    key = version_key(name, manifest.version, manifest.version_name)
    data = manifest.encode()
    try:
        pool.put(key, data, if_absent=True)
    except VersionConflict:
        if bytes(pool.get(key)) != data:
            raise VersionConflict(
                f"{key!r} is of a data set {name!r} that was deleted: nothing was changed. "
                "pool.delete() with this key removes it.",
                key=key,
            ) from None


def _drop_replaced(pool: Pool, name: str, kept: DatasetManifest) -> None:
    """Remove a manifest that was kept too late: it was replaced whole, and its objects went.

    Who replaces looks for it, too, after the objects: one of both sees it (PROTOCOL 25).
    """
    nonces = {nonce for part in kept.parts if part.rows for nonce in part.nonces}
    prefixes = [object_prefix(name, nonce) + "/" for nonce in nonces]
    try:
        if all(pool.list(prefix, certain=True) for prefix in prefixes):
            return
    except HpstoreError as error:
        _log.info("whether version %s is whole is not known: %s", kept.version_name, error)
        return
    delete_if_there(pool, version_key(name, kept.version, kept.version_name))


def _kept(pool: Pool, name: str) -> dict[int, tuple[str, str]]:
    """Keys and names of manifests that are kept, by number."""
    found = {}
    for key in pool.list(f"{PREFIX}/{name}/parts/", certain=True):
        told = version_of(name, key)
        if told is not None:
            found[told[0]] = (key, told[1])
    return found


def _told(name: str, version: str) -> str:
    return f"version {version} of data set {name!r}"
