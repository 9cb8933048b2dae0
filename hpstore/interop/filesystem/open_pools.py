"""The pools that this process has open for file systems: one for each pool.toml.

fsspec makes a file system object for each thread; they share one pool, its threads and its memory.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from concurrent.futures import Future

from hpstore.config import PoolConfig
from hpstore.pool.create_pool import open_pool
from hpstore.pool.pool import Pool
from hpstore.runtime.budget import ByteBudget
from hpstore.units import MIB

_log = logging.getLogger(__name__)
MEMORY_BYTES = 256 * MIB  # spools of all streams of a process; beyond, streams wait on disk
MADE_LIMIT = 65_536  # empty directories remembered for a pool; 100 bytes each


class Mount:
    """An open pool and the directories that `mkdir` made in it, which only this process knows."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.warned = pool, False
        self._made: dict[str, None] = {}  # single dict operations only: atomic, no lock

    def made(self) -> list[str]:
        """Directories that were made; they may have objects in them by now."""
        return list(self._made)

    def make(self, directory: str) -> None:
        """Remember a directory; beyond the limit the oldest is forgotten, and logged."""
        self._made[directory] = None
        if len(self._made) > MADE_LIMIT:
            oldest = next(iter(self._made))
            _log.warning("more than %d empty directories: %s is forgotten", MADE_LIMIT, oldest)
            self.forget(oldest)

    def forget(self, directory: str) -> None:
        """Forget a directory. It is still there while it has objects."""
        self._made.pop(directory, None)


class Mounts:
    """Opens each pool once, on first use; closes them at exit. Thread-safe; survives fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _mounts and _hooked
        self._mounts: dict[tuple[str, bool], Future[Mount]] = {}
        self._hooked = False
        self._gone: set[str] = set()  # names without a pool, as logged; single operations only
        self.budget = ByteBudget(MEMORY_BYTES)

    def is_gone(self, name: str, error: Exception) -> None:
        """A listing of all pools passes over a name: logged once, until it is found again."""
        if name not in self._gone:
            self._gone.add(name)
            _log.warning("the pool %r is passed over: %s", name, error)

    def is_there(self, name: str) -> None:
        """A listing of all pools has found the pool of a name."""
        self._gone.discard(name)

    def mount(self, config: PoolConfig, *, read_only: bool) -> Mount:
        """The mount of a pool, opened by the first who asks. Raises what opening raises."""
        name = (str(config.path.resolve()), read_only)
        with self._lock:
            self._hook()
            found = self._mounts.get(name)
            mine = found is None
            if found is None:
                found = self._mounts[name] = Future()
        if mine:
            try:
                found.set_result(Mount(open_pool(config.path, read_only=read_only)))
            except BaseException as error:
                with self._lock:
                    self._mounts.pop(name, None)
                found.set_exception(error)
                raise
        return found.result()

    def _hook(self) -> None:
        if not self._hooked:
            self._hooked = True
            atexit.register(self.close)
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """Pools survive by themselves; what other threads were at in the parent is forgotten."""
        self._lock = threading.Lock()
        self._mounts = {name: found for name, found in self._mounts.items() if found.done()}
        self.budget = ByteBudget(MEMORY_BYTES)

    def close(self) -> None:
        """Close all pools; the next use opens them again. Idempotent."""
        with self._lock:
            mounts, self._mounts = self._mounts, {}
        for found in mounts.values():
            if found.exception() is None:
                found.result().pool.close()
