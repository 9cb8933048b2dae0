"""Views: what zarr is shown in place of objects that mean nothing to it, such as a dataset's.

A package above says by an entry point of the group `hpstore.zarr_views` that it has views: the name
is the first component of the keys, what is loaded makes KeyViews. It is loaded for such keys only,
so stores elsewhere import none of it, nor torch.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, distributions

from hpstore.interop.zarr.base_store import BlockingStore
from hpstore.pool.pool import Pool

GROUP = "hpstore.zarr_views"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Where a key of the pool is in a view. `start`: of the view's keys in the pool."""

    store: BlockingStore
    start: str
    key: str


class KeyViews(ABC):
    """The views of one store below one first component. Thread-safe; survives a fork.

    Keys are those of the pool. Everything may block.
    """

    @abstractmethod
    def find(self, key: str) -> Shown | None:
        """The view that shows a key; None for a plain object, whether it is there or not."""

    @abstractmethod
    def show(self, prefix: str, keys: Sequence[str]) -> list[str]:
        """What a listing shows: `keys` are all objects under `prefix`, which lies in no view."""

    @abstractmethod
    def check_write(self, key: str) -> None:
        """Raise ConfigError if this key must not be written or deleted."""

    @abstractmethod
    def check_delete(self, folder: str, keys: Sequence[str]) -> None:
        """Raise ConfigError unless all `keys`, those under `folder`, may be deleted."""

    @abstractmethod
    def seen(self) -> Mapping[str, str]:
        """What was opened, each with its fingerprint: for a copy, which accepts no other."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open; the next use opens it again."""


MakeViews = Callable[[Pool, Mapping[str, str]], KeyViews]  # a pool, what a copy has seen


@cache
def _registered() -> Mapping[str, EntryPoint]:
    """By first component. Looked up once a process.

    In all distributions, not with entry_points(), which sees one of each name: what an older
    installation has left in a checkout would hide the newer one.
    """
    entries = [entry for found in distributions() for entry in found.entry_points]
    found = {entry.name: entry for entry in entries if entry.group == GROUP}
    if not found:
        _log.warning(
            "no package says that it has zarr views (entry points %s): data sets show as their "
            "objects and are not guarded. Install hpstore again.",
            GROUP,
        )
    return found


class PoolViews:
    """All views of one store, opened as they are met."""

    def __init__(self, pool: Callable[[], Pool]) -> None:
        self._pool = pool
        self._seen: Mapping[str, Mapping[str, str]] = {}
        self._made: dict[str, KeyViews] = {}  # single dict operations only: atomic, no lock

    def _below(self, root: str) -> KeyViews | None:
        made = self._made.get(root)
        if made is None and root in _registered():
            make: MakeViews = _registered()[root].load()
            made = self._made.setdefault(root, make(self._pool(), self._seen.get(root, {})))
        return made

    def find(self, key: str) -> Shown | None:
        """The view that shows a key of the pool; None for a plain object."""
        root, slash, _ = key.partition("/")
        views = self._below(root) if slash else None
        return None if views is None else views.find(key)

    def list(self, prefix: str, *, names: bool = False) -> list[str]:
        """Keys under a prefix as zarr sees them, sorted. Raises TooFewDevices.

        `names`: those next below are asked for. Of them objects tell as much, and nothing is
        opened for it.
        """
        folder = prefix[: prefix.rfind("/") + 1]
        shown = self.find(folder)
        if shown is not None:
            below = shown.store._keys(shown.key + prefix[len(folder) :])
            return [f"{shown.start}{key}" for key in below]
        keys = self._pool().list(prefix, certain=True)
        if names:
            return keys
        for root in {key.partition("/")[0] for key in keys if "/" in key}:
            views = self._below(root)
            if views is not None:
                own = [key for key in keys if key.startswith(f"{root}/")]
                others = [key for key in keys if not key.startswith(f"{root}/")]
                keys = others + views.show(prefix, own)
        return sorted(keys)

    def check_write(self, key: str) -> None:
        """Raise ConfigError if a view forbids to write or delete this key."""
        views = self._below(key.partition("/")[0])
        if views is not None:
            views.check_write(key)

    def check_delete(self, folder: str, keys: Sequence[str]) -> None:
        """Raise ConfigError if a view forbids to delete `keys`, which are those under `folder`."""
        views = self._below(folder.partition("/")[0])
        if views is not None:
            views.check_delete(folder, keys)

    def seen(self) -> Mapping[str, Mapping[str, str]]:
        """What was opened, with fingerprints, by first component: for expect()."""
        found = {root: views.seen() for root, views in list(self._made.items())}
        return {root: facts for root, facts in {**self._seen, **found}.items() if facts}

    def expect(self, seen: Mapping[str, Mapping[str, str]]) -> None:
        """Accept nothing but what another store has seen. Before anything is opened."""
        self._seen = seen

    def close(self) -> None:
        """Close what is open; the next use opens it again."""
        for views in list(self._made.values()):
            views.close()
