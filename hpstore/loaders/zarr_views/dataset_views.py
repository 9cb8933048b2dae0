"""Which keys of a pool lie in a dataset: PoolStore shows the dataset there, and changes nothing.

Found through the entry point `data` of the group `hpstore.zarr_views`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hpstore.errors import ConfigError, InvalidKey, ObjectNotFound, VersionConflict
from hpstore.interop.zarr.view_registry import KeyViews, Shown
from hpstore.loaders.dataset.dataset_manifest import (
    PREFIX,
    DatasetManifest,
    check_dataset_name,
    dataset_of,
    manifest_key,
)
from hpstore.loaders.zarr_views.dataset_store import DatasetStore
from hpstore.pool.pool import Pool

_CHUNK = re.compile(r"/c((?:/\d+)*)\Z")  # of a zarr v3 array, below the array's name
_OLD_CHUNK = re.compile(r"/\d+(\.\d+)*\Z")  # of a v2 one
_REMEMBERED = 4096  # names of no dataset; each costs a look-up when it is forgotten


def names_within(key: str) -> Iterator[str]:
    """Names of the datasets that this key may lie in, shortest first. Pure.

    A key ends in a value's name, which is no part of them. Nor are the numbers of a chunk: there
    would be a look-up for each chunk.
    """
    parts = key.split("/")[1:-1]
    chunk = _CHUNK.search(key)
    if chunk is not None:
        parts = parts[: len(parts) - chunk[1].count("/")]
    for end in range(1, len(parts) + 1):
        try:
            yield check_dataset_name("/".join(parts[:end]))
        except (ConfigError, InvalidKey):
            return  # nor has a longer one


def is_chunk(key: str) -> bool:
    """Whether a key has the form of an array's chunk, and not of a dataset's object. Pure."""
    found = _CHUNK.search(key) or _OLD_CHUNK.search(key)
    return found is not None and dataset_of(key) is None


class DatasetViews(KeyViews):
    """The datasets of a pool as a zarr store over it shows them. Thread-safe; survives a fork.

    A dataset is there when its manifest is. That is looked up for each value, but for chunks only
    the first time: their array was opened before. A plain array that is open when a dataset of its
    name is published goes on so, in objects that are none of the dataset's.

    `seen`: fingerprints of datasets that a copied store had open; no others are shown.
    """

    def __init__(self, pool: Pool, seen: Mapping[str, str]) -> None:
        self._pool, self._seen = pool, dict(seen)
        # single dict operations only: atomic, no lock
        self._open: dict[str, DatasetStore] = {}
        self._plain: dict[str, None] = {}

    # --- reading ----------------------------------------------------------------------------

    def find(self, key: str) -> Shown | None:
        """The dataset that a key lies in.

        Names may lie under one another (`a`, `a/b`): what is no field of the outer one may be in
        the inner one.
        """
        outer, remembered = None, is_chunk(key)
        for name in names_within(key):
            store = self._view(name, remembered=remembered)
            if store is None:
                continue
            start = f"{PREFIX}/{name}/"
            shown = Shown(store=store, start=start, key=key[len(start) :])
            if store.has(shown.key):
                return shown
            outer = outer or shown
        return outer

    def show(self, prefix: str, keys: Sequence[str]) -> list[str]:
        """Plain objects, and of each dataset what its view lists; of inner ones nothing."""
        stores: dict[str, DatasetStore] = {}
        for name in _named(keys):  # an outer one before those within it
            store = None
            if not _outer(stores, manifest_key(name)):
                store = self._view(name, remembered=False)
            if store is not None:
                stores[name] = store
        shown = [key for key in keys if not _outer(stores, key)]
        for name, store in stores.items():
            made = (f"{PREFIX}/{name}/{key}" for key in store._keys(""))
            shown += [key for key in made if key.startswith(prefix)]
        return shown

    def _view(self, name: str, *, remembered: bool) -> DatasetStore | None:
        """The view of a dataset; None when there is none of this name."""
        store = self._open.get(name)
        if store is not None:
            return store
        if name not in self._seen and not self._published(name, remembered=remembered):
            return None
        store = DatasetStore(self._pool, name, fingerprint=self._seen.get(name))
        try:
            self._seen[name] = store.fingerprint
        except ObjectNotFound as error:
            # zarr would take a FileNotFoundError for a chunk of fill values
            raise VersionConflict(f"data set {name!r} was deleted", key=error.key) from error
        kept = self._open.setdefault(name, store)
        if kept is not store:
            store.close()
        return kept

    def _published(self, name: str, *, remembered: bool) -> bool:
        """Whether there is such a dataset. Raises when that is unclear.

        `remembered`: what was found before may do.
        """
        if remembered and name in self._plain:
            return False
        if not self._is_data_set(name):
            if len(self._plain) >= _REMEMBERED:
                self._plain.clear()
            self._plain[name] = None
            return False
        self._plain.pop(name, None)
        return True

    def _is_data_set(self, name: str) -> bool:
        try:
            data = self._pool.get(manifest_key(name))
        except ObjectNotFound:
            return False
        try:
            DatasetManifest.decode(data, where=f"data set {name!r}")
        except ConfigError:
            return False  # something else of this name
        return True

    # --- writing ----------------------------------------------------------------------------

    def check_write(self, key: str) -> None:
        """Raise ConfigError for a key that lies in a dataset, or belongs to one to be."""
        remembered = is_chunk(key)
        for name in names_within(key):
            self._refuse(name, f"{key!r} lies in", remembered=remembered)
        self._refuse_unpublished(key)

    def check_delete(self, folder: str, keys: Sequence[str]) -> None:
        """Raise ConfigError if `folder` lies in a dataset, or one is below."""
        for name in names_within(folder):
            self._refuse(name, f"{folder!r} lies in", remembered=False)
        for name in _named(keys):
            self._refuse(name, f"below {folder!r} is", remembered=False)
        for key in keys:
            self._refuse_unpublished(key)

    def _refuse(self, name: str, where: str, *, remembered: bool) -> None:
        """Raise ConfigError if there is such a dataset, or was when this store opened it."""
        known = name in self._seen
        if self._published(name, remembered=remembered and not known):
            raise ConfigError(
                f"{where} data set {name!r}, which zarr reads and does not change: nothing was "
                "changed. DatasetWriter(..., overwrite=True) replaces a data set; "
                f"{self._remover(name)} deletes it."
            )
        if known:  # it would not read what it writes
            raise ConfigError(
                f"{where} what was data set {name!r} when this store opened it, and was deleted "
                "since: nothing was changed. Make another store for what is there now."
            )

    def _refuse_unpublished(self, key: str) -> None:
        """Raise ConfigError for an object of a dataset that is being written."""
        name = dataset_of(key)
        if name is not None and key != manifest_key(name):
            raise ConfigError(
                f"{key!r} belongs to data set {name!r}, which is being written, or was left "
                "unfinished by an ingest or a DatasetWriter: nothing was changed. "
                f"{self._remover(name)} deletes what was left."
            )

    def _remover(self, name: str) -> str:
        return f"`hpstore dataset rm {self._pool.config.path} {name}`"

    # --- life -------------------------------------------------------------------------------

    def seen(self) -> Mapping[str, str]:
        """Fingerprints of the datasets that were opened."""
        return dict(self._seen)

    def close(self) -> None:
        """Close all datasets; the next use opens them again, and takes no others."""
        for store in list(self._open.values()):
            store.close()


def _named(keys: Sequence[str]) -> list[str]:
    """Names whose manifests are among these keys; sorted, so that `a` comes before `a/b`."""
    names = ((dataset_of(key), key) for key in keys)
    return sorted(name for name, key in names if name is not None and key == manifest_key(name))


def _outer(stores: Mapping[str, DatasetStore], key: str) -> bool:
    """Whether a key lies in one of these."""
    return any(name in stores for name in names_within(key))
