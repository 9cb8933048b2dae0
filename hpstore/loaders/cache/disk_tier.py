"""The tier on a local disk: who may use it, what it may take, and what happens when it fails.

It is a help and never a condition: after a failure its blocks are misses, counted, said once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.cache.block_source import BlockSource, sizes_of
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.disk_file import PLACE_BYTES, DiskFile, places, punch
from hpstore.loaders.cache.own_files import new_own, open_lock
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.runtime.closing import Closing
from hpstore.runtime.scheduler import Scheduler
from hpstore.units import format_bytes

_log = logging.getLogger(__name__)

LOCK = "hpstore-cache.lock"
READERS = 4  # an NVMe drive answers several small reads at a time
DEADLINE_SECONDS = 30.0  # a disk that takes longer is given up; a busy one may take seconds
JOIN_SECONDS = 5.0
MARGIN = 0.1  # of ln(expected use): a block that is needed hardly sooner is not worth a write
MOST_ERRORS = 10
_LANE = "cache"
Floats: TypeAlias = npt.NDArray[np.float32]
UsesOf: TypeAlias = Callable[[Int64s], Floats]


@dataclass(frozen=True, slots=True)
class Taken:
    """Blocks that the tier will write, and which of its blocks it gives up for them."""

    take: npt.NDArray[np.bool_]  # of those that were offered
    drop: list[int]


class DiskTier(Closing):
    """Files in `path`, at most `limit_bytes` of blocks. Thread-safe.

    Raises ConfigError when the path cannot be used, and naming the holder when another cache does.
    """

    def __init__(self, path: str, limit_bytes: int, tally: CacheTally) -> None:
        self.path, self.limit_bytes, self.tally = os.path.abspath(path), limit_bytes, tally
        self._lock_fd = _claim(self.path)
        self._reads = _lane(READERS)
        self._writes = _lane(1)  # one after the other, as giving up and writing must be
        self._parts: dict[str, DiskPart] = {}
        self.alive = True
        try:
            _try_out(self.path)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"disk_path {path} is not usable: {error.strerror}. Blocks need a local filesystem "
                "that can punch holes (ext4, xfs, btrfs, tmpfs)."
            ) from error

    def part(self, source: BlockSource) -> DiskPart | None:
        """The tier's part for a source, with what a last run left of it. None when it failed."""
        stem = os.path.join(self.path, xxhash.xxh3_64_hexdigest(source.name.encode()))
        if not self.alive:
            return None
        try:
            file = DiskFile(stem, source)
        except OSError as error:
            self.fail(error, "cannot be opened")
            return None
        part = DiskPart(self, file)
        self._parts[stem] = part
        return part

    def forget_part(self, part: DiskPart) -> None:
        """Close the files of a part when the last write to them is through."""
        self._parts.pop(part.file.stem, None)
        self.later(part.file.close)

    def share_out(self, weights: dict[str, int]) -> None:
        """Divide the room between the parts, by the bytes of their sources; drop other files."""
        total = max(1, sum(weights.values()))
        for stem, part in self._parts.items():
            part.limit_bytes = self.limit_bytes * weights[stem] // total
            part.trim()
        self._drop_others()

    def _drop_others(self) -> None:
        """Files of sources that this run does not use go when room is scarce, the oldest first."""
        try:
            names = os.listdir(self.path)
            stems = {n.rsplit(".", 1)[0] for n in names if n.endswith((".blocks", ".table"))}
            others = [
                (os.stat(path).st_mtime, os.stat(path).st_blocks * 512, path)
                for stem in stems
                if (path := os.path.join(self.path, stem + ".blocks"))
                and path.removesuffix(".blocks") not in self._parts
                and os.path.exists(path)
            ]
            used = sum(part.used_bytes for part in self._parts.values())
            excess = used + sum(size for _, size, _ in others) - self.limit_bytes
            wanted = sum(part.limit_bytes - part.used_bytes for part in self._parts.values())
            for _, size, path in sorted(others):
                if excess + wanted <= 0:
                    break
                excess -= size
                for suffix in (".blocks", ".table", ".learned.npz"):
                    file = path.removesuffix(".blocks") + suffix
                    if os.path.exists(file):
                        os.unlink(file)
        except OSError as error:
            self.fail(error, "cannot be listed")

    # --- failures -----------------------------------------------------------------------------

    def fail(self, error: Exception | str, what: str) -> None:
        """From now on everything is a miss here. Counted, said once."""
        if not self.alive:
            return
        self.alive = False
        if self.tally.first("disk_failed_total"):
            _log.warning(
                "the cache's disk tier %s %s (%s): going on without it. No data is lost; blocks "
                "are read from their source.",
                self.path,
                what,
                error,
            )

    def refuse(self, error: OSError) -> None:
        """A write failed: full disks get less, others no more writes."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            used = sum(part.used_bytes for part in self._parts.values())
            for part in self._parts.values():
                part.limit_bytes = min(part.limit_bytes, part.used_bytes * 9 // 10)
            if self.tally.first("disk_full_total"):
                _log.warning(
                    "the disk of the cache's tier %s is full at %s: it takes no more than that",
                    self.path,
                    format_bytes(used),
                )
            return
        for part in self._parts.values():
            part.limit_bytes = 0
        if self.tally.first("disk_write_error_total"):
            _log.warning(
                "the cache's disk tier %s cannot be written (%s): what it holds is still used",
                self.path,
                error,
            )

    def read(self, part: DiskPart, blocks: Int64s) -> list[Bytes | None]:
        """Blocks, None for those that cannot be had; never raises what a disk may raise."""
        step = -(-len(blocks) // READERS)
        if step <= 2:
            parts = [blocks] if len(blocks) else []
        else:
            parts = [blocks[at : at + step] for at in range(0, len(blocks), step)]
        futures = [self._reads.submit(_LANE, partial(part.file.read, p)) for p in parts]
        wait(futures, DEADLINE_SECONDS)
        found: list[Bytes | None] = []
        for future, wanted in zip(futures, parts, strict=True):
            found += self._outcome(future, len(wanted))
        return found

    def _outcome(self, future: Future[list[Bytes | None]], count: int) -> list[Bytes | None]:
        if not future.done():
            self.fail(f"no answer for {DEADLINE_SECONDS:.0f} s", "hangs")
            return [None] * count
        error = future.exception()
        if error is None:
            return future.result()
        if not isinstance(error, OSError):
            raise error
        if self.tally.value("disk_read_error_total") >= MOST_ERRORS:
            self.fail(error, "cannot be read")
        self.tally.add(disk_read_error_total=1)
        return [None] * count

    def later(self, call: Callable[[], None]) -> bool:
        """Run a call on the thread that writes; False when too many wait already."""
        future = self._writes.submit(_LANE, call)
        return not (future.done() and future.exception() is not None)

    def flush(self) -> None:
        """Wait until what was given to later() is done, or the deadline has passed."""
        wait([self._writes.submit(_LANE, lambda: None)], DEADLINE_SECONDS)

    def close(self) -> None:
        """Finish what is being written and let go of the path. Idempotent.

        Files stay open for a write that has not ended: their numbers could be another file's by the
        time it goes on.
        """
        self.alive = False
        if self._lock_fd < 0:
            return
        files = [part.file for part in self._parts.values()]
        self._reads.close(JOIN_SECONDS)  # first: reads under way need the files
        self._writes.close(JOIN_SECONDS, {_LANE: partial(_close_all, files)})
        fd, self._lock_fd = self._lock_fd, -1
        os.close(fd)  # not an explicit unlock: a forked child's copy is its own affair


class DiskPart:
    """The blocks of one source on the disk."""

    def __init__(self, tier: DiskTier, file: DiskFile) -> None:
        self.tier, self.file = tier, file
        self.limit_bytes = tier.limit_bytes
        self.left = False
        self._lock = threading.Lock()  # guards used_bytes, _allowance, _pending
        there = np.flatnonzero(file.checks)
        self.used_bytes = file.bytes_of(there)
        # bytes that may be written: two fills, and from then on as much as is read here
        self._allowance = 2 * tier.limit_bytes
        self._pending: set[int] = set()
        self._known: Int64s = there  # of which victims are drawn, renewed now and then
        self._changes = 0
        self._rng = np.random.default_rng(0)  # which victims are looked at: nothing else

    def holds(self, blocks: Int64s) -> npt.NDArray[np.bool_]:
        """Which blocks are there, as far as the table says."""
        if self.left or not self.tier.alive:
            return np.zeros(len(blocks), bool)
        found: npt.NDArray[np.bool_] = self.file.checks[blocks] != 0
        return found

    def read(self, blocks: Int64s) -> list[Bytes | None]:
        """Blocks that are there; None for those that cannot be had. They are counted."""
        wanted = self.file.checks[blocks].copy()
        found = self.tier.read(self, blocks)
        bad = [i for i, data in enumerate(found) if data is None]
        good = len(blocks) - len(bad)
        with self._lock:
            self._allowance += self.file.bytes_of(blocks) * good // max(1, len(blocks))
        if bad and self.tier.alive:
            # given up meanwhile: no damage
            spoilt = [int(blocks[i]) for i in bad if self.file.checks[blocks[i]] == wanted[i]]
            self._spoilt(spoilt)
        return found

    def _spoilt(self, blocks: list[int]) -> None:
        """Blocks that do not match their checksums: they are given up."""
        if not blocks:
            return
        if self.tier.tally.first("disk_mismatch_total"):
            _log.warning(
                "block %d of the cache's disk tier %s does not match its checksum: it is read from "
                "its source",
                blocks[0],
                self.file.stem,
            )
        self.tier.tally.add(disk_mismatch_total=len(blocks) - 1)
        self.drop(blocks)

    def offer(self, blocks: Int64s, uses: Floats, limit_bytes: int, uses_of: UsesOf) -> Taken:
        """Which blocks to write here: those needed sooner than what leaves for them.

        At most `limit_bytes` of them, the soonest.
        `uses`: ln of requests until each is needed, inf for never; `uses_of` tells it of others,
        inf for those that are in memory too. Called under the cache's lock.
        """
        take = np.zeros(len(blocks), bool)
        drop: list[int] = []
        new = np.flatnonzero((self.file.checks[blocks] == 0) & np.isfinite(uses))
        if not len(new) or self.left or not self.tier.alive or self.limit_bytes <= 0:
            return Taken(take, drop)
        new = new[np.argsort(uses[new], kind="stable")]
        need = self._rounded(blocks[new])
        victims, victim_uses = self._victims(len(new), uses_of)
        room = self._rounded(victims)
        at = 0
        with self._lock:
            for i, size in zip(new.tolist(), need.tolist(), strict=True):
                block = int(blocks[i])
                if block in self._pending or size > self._allowance:
                    continue
                limit_bytes -= size
                if limit_bytes < 0:
                    self.tier.tally.add(spill_skipped_total=1)
                    break
                chosen = at
                free = self.limit_bytes - self.used_bytes
                while free < size and chosen < len(victims):
                    if not uses[i] + MARGIN < victim_uses[chosen]:
                        break
                    free += int(room[chosen])
                    chosen += 1
                if free < size:
                    break
                drop += victims[at:chosen].tolist()
                self.used_bytes += size - int(room[at:chosen].sum())
                at = chosen
                self._allowance -= size
                self._pending.add(block)
                take[i] = True
            self.file.checks[drop] = 0
        return Taken(take, drop)

    def _here(self) -> Int64s:
        """Blocks on the disk, ascending. Of a copy: nonzero refuses what changes under it."""
        return np.flatnonzero(self.file.checks != 0)

    def _rounded(self, blocks: Int64s) -> Int64s:
        return places(sizes_of(self.file.sizes, blocks))

    def _victims(self, count: int, uses_of: UsesOf) -> tuple[Int64s, Floats]:
        """Some of the blocks here, the one needed last first: eight are looked at for each."""
        self._changes += count
        stale = max(64, len(self._known) // 8, self.file.block_count // 4096)
        if self._changes > stale or not len(self._known):
            self._known, self._changes = self._here(), 0
        if not len(self._known) or self.used_bytes < self.limit_bytes * 7 // 8:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        drawn = np.unique(self._rng.choice(self._known, 8 * count))
        drawn = drawn[self.file.checks[drawn] != 0]
        uses = uses_of(drawn)
        order = np.argsort(-uses, kind="stable")
        return drawn[order], uses[order]

    def write(self, blocks: Sequence[int], data: Sequence[Bytes], drop: Sequence[int]) -> None:
        """Write blocks that were taken, giving up others before. On the thread that writes."""
        left = set(blocks)
        try:
            if not self.left and self.file.gone():
                self.tier.fail("deleted", "is gone")
            if self.tier.alive and not self.left:
                self.file.forget(drop)
                for block, content in zip(blocks, data, strict=True):
                    self.file.write(block, content)
                    left.discard(block)
                    self.tier.tally.add(disk_written_total=1, disk_written_bytes=len(content))
        except OSError as error:
            self.tier.refuse(error)
        with self._lock:
            self._pending -= set(blocks)
            self.used_bytes -= int(self._rounded(np.array(sorted(left), np.int64)).sum())

    def cancel(self, blocks: Sequence[int], drop: Sequence[int]) -> None:
        """Blocks that were taken and will not be written; what was to leave for them does."""
        with self._lock:
            self._pending -= set(blocks)
            self.used_bytes -= int(self._rounded(np.array(sorted(blocks), np.int64)).sum())
        self.tier.later(lambda: self.write([], [], drop))

    def trim(self) -> None:
        """Give up blocks beyond a limit that has become lower, whichever come last."""
        excess = self.used_bytes - self.limit_bytes
        if excess <= 0:
            return
        there = self._here()[::-1]
        count = int(np.searchsorted(np.cumsum(self._rounded(there)), excess)) + 1
        self.drop(there[:count].tolist())

    def leave(self) -> None:
        """The source is gone or has changed: no more reads and writes; the files stay."""
        self.left = True
        self.tier.forget_part(self)

    def drop(self, blocks: Sequence[int]) -> None:
        """Give blocks up."""
        chosen = [b for b in blocks if self.file.checks[b]]
        self.file.checks[chosen] = 0
        with self._lock:
            self.used_bytes -= self.file.bytes_of(np.array(chosen, np.int64))
        self.tier.later(lambda: self.write([], [], chosen))


def _claim(path: str) -> int:
    """Hold the path's lock; the descriptor. Raises ConfigError, naming who holds it."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = open_lock(os.path.join(path, LOCK))
    except OSError as error:
        raise ConfigError(f"disk_path {path} is not usable: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 4096, 0)
        os.close(fd)
        raise ConfigError(
            f"disk_path {path} is in use by another cache: {_holder(holder)}. Give each cache its "
            "own path, or let processes share one cache (share=)."
        ) from error
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "command": " ".join(sys.argv)[:200]}
    with contextlib.suppress(OSError):  # for the message alone
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(mine).encode(), 0)
    return fd


def _holder(raw: bytes) -> str:
    try:
        found = json.loads(raw)
        return f"process {found['pid']} on {found['host']} ({found['command']})"
    except (ValueError, KeyError, TypeError):
        return "a process that did not leave its name"


def _try_out(path: str) -> None:
    """Do once what will be done later. Raises OSError."""
    file = os.path.join(path, "hpstore-cache.try")
    fd = new_own(file)
    try:
        os.pwrite(fd, b"\0" * PLACE_BYTES, 0)
        punch(fd, 0, PLACE_BYTES)
    finally:
        os.close(fd)
        os.unlink(file)


def _close_all(files: Sequence[DiskFile]) -> None:
    for file in files:
        file.close()


def _lane(workers: int) -> Scheduler:
    return Scheduler(
        workers_per_device=workers,
        queue_depth=4096,
        compute_threads=1,
        threads=True,
        stuck_seconds=DEADLINE_SECONDS,
    )
