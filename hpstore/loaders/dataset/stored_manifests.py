"""What is stored of datasets: manifests, parts not yet published, whose objects are alive."""

from __future__ import annotations

import logging
import re
from typing import Any

from hpstore.errors import ConfigError, IntegrityError, ObjectNotFound
from hpstore.format.records import unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.loaders.dataset.dataset_manifest import (
    PREFIX,
    DatasetManifest,
    check_dataset_name,
    journal_key,
    manifest_key,
    version_of,
)
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)
PART_OF = re.compile(r"parts/(\d+)-of-(\d+)")


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
        match = PART_OF.fullmatch(key.removeprefix(prefix))
        if match is not None:
            part = (int(match[1]), int(match[2]))
            found[part] = DatasetManifest.decode(pool.get(key), where=f"object {key!r}")
    return found


def waiting_parts(pool: Pool) -> dict[str, tuple[int, int]]:
    """How many parts of how many are written and not published, by the name of the dataset."""
    found: dict[str, tuple[int, int]] = {}
    for key in pool.list(f"{PREFIX}/"):
        name, _, last = key.removeprefix(f"{PREFIX}/").rpartition("/parts/")
        match = PART_OF.fullmatch(f"parts/{last}")
        if name and match is not None:
            found[name] = (found.get(name, (0, 0))[0] + 1, int(match[2]))
    return found


def published_manifest(pool: Pool, name: str) -> tuple[DatasetManifest | None, str | None]:
    pool = require_pool(pool, "delete_dataset, as publish_parts,")
    return manifest_at(pool, name, manifest_key(check_dataset_name(name)))


def manifest_at(pool: Pool, name: str, key: str) -> tuple[DatasetManifest | None, str | None]:
    """The manifest under a key, with its version. A damaged one is taken as empty."""
    try:
        version = pool.stat(key).version
        return DatasetManifest.decode(pool.get(key), where=f"data set {name!r}"), version
    except ObjectNotFound:
        return None, None
    except IntegrityError as error:
        _log.warning("data set %r: %s; what it named stays until remove_orphans", name, error)
        return None, version


def kept_nonces(pool: Pool, name: str) -> set[str]:
    """What versions that are kept consist of. Raises IntegrityError when one cannot be read."""
    found: set[str] = set()
    for key in pool.list(f"{PREFIX}/{name}/parts/", certain=True):
        told = version_of(name, key)
        if told is None:
            continue
        try:
            found |= DatasetManifest.decode(pool.get(key), where=f"object {key!r}").nonces
        except ObjectNotFound:
            continue  # deleted meanwhile
        except (ConfigError, IntegrityError) as error:
            raise IntegrityError(
                f"the manifest of version {told[1]} of data set {name!r} cannot be read: what "
                "belongs to it is not known, nothing was removed. delete_dataset removes all of it."
            ) from error
    return found


def live_nonces(pool: Pool, name: str) -> set[str]:
    """What the dataset, its versions, written parts and an unfinished ingest consist of.

    Raises IntegrityError when a manifest cannot be read.
    """
    published, version = published_manifest(pool, name)
    if published is None and version is not None:
        raise IntegrityError(
            f"the manifest of data set {name!r} cannot be read: what belongs to it is not known, "
            "nothing was removed. delete_dataset removes all of it."
        )
    parts = {nonce for note in written_parts(pool, name).values() for nonce in note.nonces}
    live = published.nonces if published else set()
    return live | kept_nonces(pool, name) | parts | _journaled(pool, name)


def _journaled(pool: Pool, name: str) -> set[str]:
    """Nonces of what an unfinished ingest stored and goes on with."""
    key = journal_key(name)
    try:
        body: dict[str, Any] = unseal(pool.get(key), where=key)
    except ObjectNotFound:
        return set()
    with parsing(f"{key}: journal"):
        return {str(part["nonce"]) for part in body["parts"]} | set(map(str, body["writing"]))


def require_pool(pool: object, who: str) -> Pool:
    """The pool, open. ConfigError for what is none, such as the path of one."""
    if not isinstance(pool, Pool):
        raise ConfigError(
            f"{who} takes an open pool, not a {type(pool).__name__}: "
            'with hpstore.open("pool.toml") as pool: ...'
        )
    return pool


def require_same_columns(pool: Pool, name: str, manifest: DatasetManifest) -> None:
    """Raise ConfigError when a part that is written now would lie otherwise than the others."""
    if manifest.data != pool.data:
        raise ConfigError(
            f"data set {name!r} was written with {manifest.data} data columns, the pool has "
            f"{pool.data} now: a part more would lie otherwise. Nothing was changed; copy them "
            "into a data set of another name with a DatasetWriter."
        )
