"""Remove datasets: whole, what another one replaced, and what killed writers left."""

from __future__ import annotations

import logging

from hpstore.errors import ObjectNotFound
from hpstore.loaders.dataset.dataset_manifest import (
    PREFIX,
    DatasetManifest,
    check_dataset_name,
    journal_key,
    manifest_key,
    nonce_of,
    part_key,
    version_key,
    version_of,
)
from hpstore.loaders.dataset.stored_manifests import (
    PART_OF,
    kept_nonces,
    live_nonces,
    published_manifest,
    written_parts,
)
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)


def delete_dataset(pool: Pool, name: str) -> None:
    """Delete a dataset with its versions, parts that were not published, what killed writers left.

    Durable on return. The manifest goes first: stopped in between, nothing of it is visible, and
    calling it again goes on. What a process is writing under this name goes, too: its writer or
    ingest raises, and publishes nothing.

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
    published_manifest(pool, name)  # raises for a corpus of tokens
    prefix = f"{PREFIX}/{name}/"
    ours = [
        found
        for found in pool.list(prefix, certain=True)
        if nonce_of(name, found)
        or PART_OF.fullmatch(found.removeprefix(prefix))
        or version_of(name, found)
        or found == journal_key(name)
    ]
    try:
        pool.delete(key)
    except ObjectNotFound as error:
        if not ours:
            raise ObjectNotFound(f"no data set {name!r} in this pool", key=key) from error
    for found in sorted(ours, key=lambda found: nonce_of(name, found) is not None):
        delete_if_there(pool, found)
    gone = {nonce_of(name, found) for found in ours}
    late, version = published_manifest(pool, name)
    if late is not None and version is not None and late.nonces & gone:
        pool.admin.remove_versions({key: version})  # of a writer that did not notice it


def remove_orphans(pool: Pool, name: str) -> int:
    """Remove objects that no dataset, version of it, written part or unfinished ingest names.

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
    known = live_nonces(pool, name)
    removed = 0
    for key in pool.list(f"{PREFIX}/{name}/", certain=True):
        nonce = nonce_of(name, key)
        if nonce is not None and nonce not in known:
            delete_if_there(pool, key)
            removed += 1
    return removed


def remove_replaced(pool: Pool, name: str, old: DatasetManifest) -> None:
    """Remove the objects of a manifest, but for what the dataset or a version names.

    A part's note may still be there after its objects were published: the note goes, they stay.
    """
    published, version = published_manifest(pool, name)
    if published is None and version is not None:
        return  # it cannot be read: nobody knows what it names
    live = (published.nonces if published else set()) | kept_nonces(pool, name)
    notes = {
        part_key(name, part): note.parts[0].nonce
        for part, note in written_parts(pool, name).items()
    }
    keys = [key for key, nonce in notes.items() if nonce in old.nonces | live]
    gone = old.nonces - live
    keys += [key for key in pool.list(f"{PREFIX}/{name}/") if nonce_of(name, key) in gone]
    for key in keys:
        delete_if_there(pool, key)
    if gone and old.part is None:  # a change that was overtaken may have kept it meanwhile
        delete_if_there(pool, version_key(name, old.version, old.version_name))


def delete_if_there(pool: Pool, key: str) -> None:
    try:
        pool.delete(key)
    except ObjectNotFound:
        _log.debug("object %r was gone already", key)
