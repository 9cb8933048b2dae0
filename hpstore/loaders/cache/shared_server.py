"""The owner of a cache that the processes of a node share: the only one that writes into it.

One thread a connection. What a process that is gone was to fetch is given up, so that others
fetch it themselves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, HpstoreError, ThreadsExhausted
from hpstore.loaders.cache.block_source import Sizes, Targets, sizes_of
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.memory_tier import SharedMemory
from hpstore.loaders.cache.partition import Division
from hpstore.loaders.cache.source_state import Asked, BlockFetch, Fetched, ReaderJob, SourceState
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.runtime.closing import Closing
from hpstore.runtime.forks import call_in_children
from hpstore.runtime.local_messages import Lost, Message, check_peer, receive, send
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
HERE, FETCH, KEEP, LATE, AGAIN, INLINE = range(6)  # what a request is told; KEEP: fetch, and send
JOIN_SECONDS = 2.0
PAUSE_SECONDS = 0.1  # after a connection that could not be accepted


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """A source that only other processes can read."""

    name: str
    identity: str
    sizes: Sizes
    block_count: int

    def read(self, blocks: Int64s, targets: Targets) -> None:
        """Never called: its readers fetch."""
        raise ConfigError(f"{self.name!r} cannot be read by the owner of the cache")


class CacheServer(Closing):
    """Answers other processes. It lives in the process that made it, not in its forks."""

    def __init__(
        self, listener: socket.socket, core: Core, division: Division, memory: SharedMemory
    ) -> None:
        self.core, self.division, self.memory = core, division, memory
        self._listener = listener
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()  # guards _connections
        self._pid, self._closing = os.getpid(), threading.Event()
        self._thread = threading.Thread(
            target=self._accept, name="hpstore-cache-owner", daemon=True
        )
        call_in_children(self.let_go)
        start_thread(self._thread)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                if self.core.tally.first("accept_failed_total"):  # such as too many open files
                    _log.warning("a process cannot join the shared cache: %s", error)
                self._closing.wait(PAUSE_SECONDS)
                continue
            with self._lock:
                full = len(self._connections) >= MOST_CONNECTIONS
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="hpstore-cache-peer", daemon=True
                )
                if not full:
                    self._connections[connection] = thread
            if full:
                connection.close()
                continue
            try:
                start_thread(thread)
            except ThreadsExhausted:  # as one too many: its process reads for itself
                with self._lock:
                    self._connections.pop(connection, None)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        peer = _Peer(self, connection)
        try:
            check_peer(connection)
            while True:
                peer.answer(receive(connection))
        except Lost:
            pass
        except Exception:  # noqa: BLE001 (one process must not end the others' cache)
            self.core.tally.add(peer_error_total=1)
            _log.exception("a process that shares the cache is cut off")
        finally:
            peer.leave()
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def close(self) -> None:
        """Cut everybody off; they go on without the cache. Idempotent."""
        if self._pid != os.getpid():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_SECONDS)
        for thread in connections.values():
            thread.join(JOIN_SECONDS)

    def let_go(self) -> None:
        """In a forked child: its copies of the sockets must not outlive the owner."""
        self._listener.close()
        for connection in self._connections:
            connection.close()


class _Peer:
    """One connection. The first message says for whom: attach makes a job, join takes part."""

    def __init__(self, server: CacheServer, connection: socket.socket) -> None:
        self._server, self._core, self._connection = server, server.core, connection
        self._stock: SourceState
        self._job: ReaderJob
        self._owner = False  # of the job
        self._asked: Asked | None = None
        self._open: list[tuple[int, BlockFetch]] = []  # flights that the peer is to end
        self._answers: dict[str, Callable[[Message], None]] = {
            "attach": self._attach,
            "join": self._join,
            "layout": self._layout,
            "note": self._note,
            "ask": self._ask,
            "land": self._land,
            "wait": self._wait,
            "expect": self._expect,
            "drawn": self._drawn,
            "begin": self._begin,
        }

    def answer(self, message: Message) -> None:
        """Do what a message asks for. Raises Lost."""
        answer = self._answers.get(str(message.facts.get("op")))
        if answer is None:
            raise Lost(f"unknown message {message.facts}")
        answer(message)

    def leave(self) -> None:
        """The peer is gone."""
        if self._open:
            self._core.give_up(self._stock, self._open)
            self._core.tally.add(peer_gone_total=1)
        if self._asked is not None:
            self._core.forget_late(self._asked.late)
        if self._owner:
            self._server.division.detach(self._stock, self._job)

    # --- who it is ----------------------------------------------------------------------------

    def _attach(self, message: Message) -> None:
        facts = message.facts
        sizes: Sizes = facts["sizes"] if message.raw.size == 0 else message.numbers()
        source = RemoteSource(facts["name"], facts["identity"], sizes, facts["blocks"])
        try:
            self._stock, self._job = self._server.division.attach(
                source, facts["job"], facts["batch"], readable=False
            )
        except HpstoreError as error:
            send(self._connection, {"error": str(error)})
            return
        self._owner = True
        self._layout(message)

    def _join(self, message: Message) -> None:
        stocks = {stock.number: stock for stock in self._core.stocks.values()}
        stock = stocks.get(message.facts["stock"])
        if stock is None or message.facts["job"] not in stock.jobs:
            raise Lost("there is no such job")
        self._stock, self._job = stock, stock.jobs[message.facts["job"]]
        send(self._connection, {})

    def _layout(self, _: Message) -> None:
        """What the peer has to map."""
        stock, memory, fds = self._stock, self._server.memory, []
        facts: dict[str, object] = {"error": "another data set has taken its place"}
        with self._core.lock:
            if not stock.replaced:
                pages = self._core.room.pages
                names = ("data", "pages", f"first{stock.number}")
                fds = [os.dup(memory.fds[name]) for name in names]
                facts = {
                    "stock": stock.number,
                    "job": self._job.number,
                    "pages": pages.page_count,
                    "page_bytes": pages.page_bytes,
                    "data_bytes": len(memory.data),
                    "layout": self._core.layout,
                }
        try:
            send(self._connection, facts, fds=fds)
        finally:
            for fd in fds:
                os.close(fd)

    # --- requests -----------------------------------------------------------------------------

    def _note(self, message: Message) -> None:
        self._core.await_told(self._job, message.facts["told"])
        self._core.note(self._stock, self._job, message.numbers(), message.facts["told"])

    def _ask(self, message: Message) -> None:
        """States of all requests, then the bytes of those that the disk had."""
        blocks = message.numbers()
        core, stock = self._core, self._stock
        core.await_told(self._job, message.facts["told"])
        asked = core.ask(stock, self._job, blocks)
        core.copied(asked.room, asked.ticket)
        self._asked = asked
        self._open = [(block, flight) for _, block, flight in asked.fetch]
        states = np.zeros(len(blocks), np.uint8)
        for i, _, flight in asked.fetch:
            states[i] = KEEP if flight.keep else FETCH
        for i, _, _ in asked.late:
            states[i] = LATE
        for i, _ in asked.again:
            states[i] = AGAIN
        inline = self._from_disk(asked)
        for i in inline:
            states[i] = INLINE
        send(self._connection, {"layout": core.layout}, [states, *inline.values()])

    def _from_disk(self, asked: Asked) -> dict[int, Bytes]:
        """Blocks that the owner's disk has, landed; by request."""
        core, stock = self._core, self._stock
        if stock.disk is None or not asked.fetch:
            return {}
        blocks = np.array([block for _, block, _ in asked.fetch], np.int64)
        there = np.flatnonzero(stock.disk.holds(blocks))
        data = [np.empty(size, np.uint8) for size in sizes_of(stock.sizes, blocks[there]).tolist()]
        missing = set(core.from_disk(stock, blocks[there], data)) if len(there) else set()
        found = [(int(at), data[n]) for n, at in enumerate(there.tolist()) if n not in missing]
        landed = [Fetched(asked.fetch[at][1], asked.fetch[at][2], one) for at, one in found]
        if landed:
            core.land(stock, asked.room, landed)
            done = {one.block for one in landed}
            self._open = [pair for pair in self._open if pair[0] not in done]
        return {asked.fetch[at][0]: one for at, one in sorted(found)}

    def _land(self, message: Message) -> None:
        """The peer has fetched: the bytes of `sent`, numbers into what is open; in the end none.

        The answer names those whose bytes somebody waits for.
        """
        core, stock, room = self._core, self._stock, self._asked.room if self._asked else None
        if room is None:
            raise Lost("nothing was asked")
        sizes = sizes_of(stock.sizes, np.array([b for b, _ in self._open], np.int64)).tolist()
        at, fetched = 0, []
        for i in message.facts["sent"]:
            block, flight = self._open[i]
            fetched.append(Fetched(block, flight, message.raw[at : at + sizes[i]]))
            at += sizes[i]
        if at != message.raw.size:
            raise Lost("bytes do not fit their blocks")
        left = [pair for i, pair in enumerate(self._open) if i not in set(message.facts["sent"])]
        if fetched:
            core.land(stock, room, fetched)
        wanted = [] if message.facts["last"] else [i for i, (_, f) in enumerate(left) if f.waiting]
        asked_for = [left[i] for i in wanted]
        self._open = asked_for
        core.give_up(stock, [pair for pair in left if pair not in asked_for])
        send(self._connection, {"wanted": [block for block, _ in asked_for]})

    def _wait(self, _: Message) -> None:
        """Bytes of what others fetched; those that they did not are not among `numbers`."""
        if self._asked is None:
            raise Lost("nothing was asked")
        late = self._asked.late
        self._core.wait(self._stock, late)
        self._asked.late = []
        found = [(i, flight.data) for i, _, flight in late if flight.data is not None]
        send(self._connection, {"requests": [i for i, _ in found]}, [data for _, data in found])

    # --- what is foretold ---------------------------------------------------------------------

    def _expect(self, message: Message) -> None:
        blocks = None if message.facts["nothing"] else message.numbers()
        self._core.expect(self._stock, self._job, message.facts["epoch"], blocks)
        self._core.heard(self._job)

    def _drawn(self, message: Message) -> None:
        self._core.drawn(self._stock, self._job, message.numbers())
        self._core.heard(self._job)

    def _begin(self, message: Message) -> None:
        self._core.begin_epoch(self._stock, self._job, message.facts["requests"])
        self._core.heard(self._job)
