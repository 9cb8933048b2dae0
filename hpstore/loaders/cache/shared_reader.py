"""A reader that shares the cache of another process: it maps the memory, and only reads it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.cache.block_source import BlockSource, Targets
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.local_reader import check_targets, read_each_once, sizes_of_blocks
from hpstore.loaders.cache.memory_tier import mapped
from hpstore.loaders.cache.messages import connect
from hpstore.loaders.cache.page_allocator import Int32s, Pages
from hpstore.loaders.cache.policy_interface import Bools
from hpstore.loaders.cache.shared_server import AGAIN, FETCH, HERE, INLINE, KEEP, LATE
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.runtime.closing import Closing
from hpstore.runtime.local_messages import Lost, Message, as_bytes, receive, send

_log = logging.getLogger(__name__)
_ATTACH_SHARE = 4  # of the time for an answer: for the first one


@dataclass(frozen=True, slots=True)
class _Mapped:
    """The owner's memory, as it was laid out once."""

    layout: int
    pages: Pages
    first: Int32s


class _Connection:
    """A socket that is closed with its thread, or with the reader."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made

    def __del__(self) -> None:
        self.socket.close()


class _Own(threading.local):
    """The connection of one thread."""

    connection: _Connection | None = None


class SharedAttached(Closing):
    """As Attached, through the owner of a shared cache. read() is for many threads.

    When the owner is gone or does not answer, or this is a forked child, it reads the source:
    counted, said once.
    """

    def __init__(
        self, name: str, source: BlockSource, job: str, batch_blocks: int, tally: CacheTally
    ) -> None:
        self._name, self._source, self._tally = name, source, tally
        self._pid, self._lost, self._closed = os.getpid(), False, False
        self._own = _Own()
        self._lock = threading.Lock()  # guards _main's use, _mapped, _others, _told
        self._others: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self._told = 0  # messages about what comes: requests count after them
        facts = {
            "op": "attach",
            "name": source.name,
            "identity": source.identity,
            "job": job,
            "blocks": source.block_count,
            "batch": batch_blocks,
            "sizes": source.sizes if isinstance(source.sizes, int) else 0,
        }
        table = () if isinstance(source.sizes, int) else (as_bytes(source.sizes),)
        self._main = connect(name)
        answer_seconds = self._main.gettimeout() or 0.0
        try:
            # what the disk has of it is looked up, and what is being written must end
            self._main.settimeout(_ATTACH_SHARE * answer_seconds)
            send(self._main, facts, table)
            answer = receive(self._main)
            self._main.settimeout(answer_seconds)
            if "error" in answer.facts:
                raise ConfigError(f"the owner of the shared cache says: {answer.facts['error']}")
            self._stock, self._job = answer.count("stock"), answer.count("job")
            self._mapped: _Mapped | None = self._map(answer)
        except BaseException:
            self._main.close()
            raise

    def _map(self, answer: Message) -> _Mapped:
        count, page_bytes = answer.count("pages"), answer.count("page_bytes")
        try:
            data_fd, pages_fd, first_fd = answer.fds
            data = mapped(data_fd, answer.count("data_bytes"))
            tables = mapped(pages_fd, max(4, 8 * count)).view(np.int32)[: 2 * count]
            first = mapped(first_fd, 4 * self._source.block_count).view(np.int32)
            pages = Pages(data, page_bytes, tables.reshape(2, count))
        except (OSError, ValueError) as error:
            raise Lost(f"its memory cannot be mapped: {error}") from error
        return _Mapped(answer.count("layout"), pages, first)

    def read(self, blocks: Int64s, targets: Targets) -> None:
        """As Attached.read."""
        blocks = np.asarray(blocks, np.int64)
        sizes = sizes_of_blocks(self._source, blocks)
        check_targets(sizes, targets)
        left = np.arange(len(blocks))
        if not self._beside():
            good = self._copy(blocks, sizes, targets)
            left = np.flatnonzero(~good)
            try:
                connection = self._connection()
                if len(left):
                    left = self._ask(connection, blocks, sizes, targets, left)
                else:
                    send(connection, {"op": "note", "told": self._told}, [as_bytes(blocks)])
            except Lost as error:
                self._lose(error)
            hits = int(good.sum())
            self._tally.add(memory_hit_total=hits, memory_hit_bytes=int(sizes[good].sum()))
        if len(left):
            missed = read_each_once(self._source, blocks, targets, left)
            self._tally.add(miss_total=missed, miss_bytes=int(sizes[left].sum()))

    def _copy(self, blocks: Int64s, sizes: Int64s, targets: Targets) -> Bools:
        """Copy what is in the owner's memory; which of them were."""
        where = self._mapped
        if where is None or not len(blocks):
            return np.zeros(len(blocks), bool)
        return where.pages.copy(where.pages.find(where.first, blocks), sizes, targets)

    def _ask(
        self,
        connection: socket.socket,
        blocks: Int64s,
        sizes: Int64s,
        targets: Targets,
        left: Int64s,
    ) -> Int64s:
        """What is missing, fetched here, from the owner or by others; what is still missing."""
        send(connection, {"op": "ask", "told": self._told}, [as_bytes(blocks)])
        answer = receive(connection)
        self._map_anew(answer.count("layout"))
        states, at = answer.raw[: len(blocks)], len(blocks)
        inline = int(sizes[states == INLINE].sum()) if len(states) == len(blocks) else -1
        if answer.raw.size != at + inline:
            raise Lost("an answer that does not fit the request")
        for i in np.flatnonzero(states == INLINE).tolist():
            targets[i][:] = answer.raw[at : at + len(targets[i])]
            at += len(targets[i])
        mine = np.flatnonzero((states == FETCH) | (states == KEEP))
        if len(mine):
            self._fetch(connection, blocks, targets, mine, states[mine] == KEEP)
        here = left[states[left] == HERE]  # it came, or the memory was laid out anew
        here = here[self._copy(blocks[here], sizes[here], [targets[i] for i in here.tolist()])]
        done = {*np.flatnonzero(states == INLINE).tolist(), *mine.tolist(), *here.tolist()}
        self._tally.add(
            disk_hit_total=int((states == INLINE).sum()),
            miss_total=len(mine),
            miss_bytes=int(sizes[mine].sum()),
        )
        by_block = {int(blocks[i]): i for i in done}
        if (states == LATE).any():
            send(connection, {"op": "wait"})
            answer, at = receive(connection), 0
            late = answer.facts.get("requests")
            if not isinstance(late, list) or not set(late) <= set(left.tolist()):
                raise Lost("an answer that does not fit the request")
            if answer.raw.size != int(sizes[np.array(late, np.int64)].sum()):
                raise Lost("an answer that does not fit the request")
            for i in late:
                targets[i][:] = answer.raw[at : at + len(targets[i])]
                at += len(targets[i])
            done |= set(late)
            self._tally.add(late_total=len(late))
        for i in np.flatnonzero(states == AGAIN).tolist():
            if int(blocks[i]) in by_block:
                targets[i][:] = targets[by_block[int(blocks[i])]]
                done.add(i)
        return np.array([i for i in left.tolist() if i not in done], np.int64)

    def _fetch(
        self,
        connection: socket.socket,
        blocks: Int64s,
        targets: Targets,
        mine: Int64s,
        keep: Bools,
    ) -> None:
        """Read what this process is to fetch; the owner gets the bytes that are to be kept."""
        rows: Sequence[Bytes] = [targets[i] for i in mine.tolist()]
        try:
            self._source.read(blocks[mine], rows)
        except BaseException:
            self._drop_connection()  # the owner gives up what was to come
            raise
        sent = np.flatnonzero(keep).tolist()
        parts = [np.ascontiguousarray(rows[n]) for n in sent]
        send(connection, {"op": "land", "sent": sent, "last": False}, parts)
        wanted = receive(connection).facts.get("wanted")
        if wanted:
            place = {int(block): n for n, block in enumerate(blocks[mine].tolist())}
            if not isinstance(wanted, list) or not set(wanted) <= place.keys():
                raise Lost("an answer that does not fit the request")
            parts = [np.ascontiguousarray(rows[place[block]]) for block in wanted]
            numbers = list(range(len(wanted)))
            send(connection, {"op": "land", "sent": numbers, "last": True}, parts)
            receive(connection)

    # --- the owner ----------------------------------------------------------------------------

    def _connection(self) -> socket.socket:
        """The calling thread's."""
        if self._own.connection is None:
            made = _Connection(connect(self._name))
            send(made.socket, {"op": "join", "stock": self._stock, "job": self._job})
            receive(made.socket)
            self._own.connection = made
            with self._lock:
                self._others.add(made)
        return self._own.connection.socket

    def _drop_connection(self) -> None:
        made, self._own.connection = self._own.connection, None
        if made is not None:
            made.socket.close()

    def _map_anew(self, layout: int) -> None:
        """Map the memory as it is laid out now, unless it is."""
        with self._lock:
            if self._mapped is None or self._mapped.layout == layout:
                return
            send(self._main, {"op": "layout"})
            answer = receive(self._main)
            if "error" in answer.facts:
                raise Lost(answer.facts["error"])
            self._mapped = self._map(answer)

    def _beside(self) -> bool:
        if self._pid != os.getpid() and not self._lost:
            self._tally.renew()
            self._lose(Lost("this is a forked process"))
        return self._lost

    def _lose(self, error: Lost) -> None:
        self._lost, self._mapped = True, None
        if self._pid == os.getpid():  # an owner that was stopped, and goes on, hands us nothing
            self._hang_up()
        if self._closed:
            return
        if self._tally.first("owner_lost_total"):
            _log.warning(
                "the owner of the shared cache %r is gone, or was stopped (%s): reading without it "
                "from now on. No data is lost.",
                self._name,
                error,
            )

    def expect(self, epoch: int, blocks: Int64s | None) -> None:
        """As Attached.expect."""
        facts = {"op": "expect", "epoch": epoch, "nothing": blocks is None}
        self._tell(facts, [] if blocks is None else [as_bytes(blocks)])

    def drawn(self, blocks: Int64s) -> None:
        """As Attached.drawn."""
        if len(blocks):
            self._tell({"op": "drawn"}, [as_bytes(blocks)])

    def begin_epoch(self, requests: int | None = None) -> None:
        """As Attached.begin_epoch."""
        self._tell({"op": "begin", "requests": requests}, [])

    def _tell(self, facts: dict[str, object], parts: Sequence[Bytes]) -> None:
        if self._beside():
            return
        try:
            with self._lock:
                send(self._main, facts, parts)
                self._told += 1
        except Lost as error:
            self._lose(error)

    def _hang_up(self) -> None:
        """End the connections, also under threads that use them, which then are Lost."""
        for connection in (self._main, *(one.socket for one in list(self._others))):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As Attached.close."""
        self.let_go()
        if self._pid == os.getpid():
            for connection in (self._main, *(one.socket for one in list(self._others))):
                connection.close()

    def let_go(self) -> None:
        """As Attached.let_go."""
        self._closed = self._lost = True
        if self._pid == os.getpid():
            self._hang_up()
