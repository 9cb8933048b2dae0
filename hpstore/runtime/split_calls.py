"""Calls in two halves: a request that is sent, and the answer that is received later.

One thread sends the requests of several calls before it waits for the first answer. The other sides
work at the same time, and no thread is woken here. A call that is not answered soon is finished on
the lane of its device, like any other call.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from hpstore.runtime.call_tours import settle

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
Call = Callable[[], Any]
SOON_SECONDS = 0.005  # for answers that the sending thread waits for


class Unfinished(Exception):
    """An answer was received, and the call needs more that may take long: `rest`, for the lane of
    its device; None for all of the call: nothing was carried out, or it may be made twice."""

    def __init__(self, rest: Call | None = None) -> None:
        super().__init__("the call goes on elsewhere")
        self.rest = rest


class Sent(Generic[T_co]):
    """A request that was sent. One thread at a time.

    Parameters
    ----------
    fileno
        The socket on which its answer comes.
    arrived
        Receives what has come, without waiting; whether `finish` would not wait. None: too much
        comes to be collected like that.
    finish
        Waits for the answer, as long as the call may take; what came of the call. Once. Raises what
        the call raises, and Unfinished.
    drop
        Gives the answer up, in the place of `finish`.
    unjudged
        Says, before `finish`, that the time until then is not that of the call.
    """

    __slots__ = ("arrived", "drop", "fileno", "finish", "unjudged")

    def __init__(
        self,
        fileno: int,
        arrived: Callable[[], bool | None],
        finish: Callable[[], T_co],
        drop: Callable[[], None],
        unjudged: Callable[[], None] = lambda: None,
    ) -> None:
        self.fileno, self.arrived, self.finish, self.drop = fileno, arrived, finish, drop
        self.unjudged = unjudged

    def with_finish(self, finish: Callable[[], U]) -> Sent[U]:
        """The same request, with another last half, which runs this one's."""
        return Sent(self.fileno, self.arrived, finish, self.drop, self.unjudged)

    def then(self, act: Callable[[T_co], U]) -> Sent[U]:
        """The same request; its answer goes through `act`, which must not wait: it raises
        Unfinished in the place of that."""
        return self.with_finish(lambda: act(self.finish()))


class SplitCall(Generic[T]):
    """A call that can be made in two halves.

    Parameters
    ----------
    begin
        Sends the request, without waiting. None where that cannot be, and nothing was sent.
    whole
        Makes all of it.
    """

    __slots__ = ("_whole", "begin")

    def __init__(self, begin: Callable[[], Sent[T] | None], whole: Callable[[], T]) -> None:
        self.begin, self._whole = begin, whole

    def __call__(self) -> T:
        return self._whole()


def are_split(calls: Mapping[str, Call]) -> bool:
    """Whether they are calls in two halves, all of them."""
    return bool(calls) and all(isinstance(call, SplitCall) for call in calls.values())


def make_together(
    calls: Mapping[str, Call], silent: Collection[str], futures: dict[str, Future[Any]]
) -> dict[str, Call]:
    """Make split calls by this thread, as far as they are answered soon, into `futures`; those of
    them, and rests of them, that are for the lanes.

    `silent`: devices that are not asked here. Where this is interrupted, what was not answered is
    given up, and `futures` has what was.
    """
    made = _Round()
    try:
        made.run({name: call for name, call in calls.items() if name not in silent})
    finally:
        for name, answer in made.answers.items():
            settle(futures.setdefault(name, Future()), answer)
    return made.left | {name: calls[name] for name in silent}


class _Round:
    """Split calls that one thread begins and ends."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}  # errors as well
        self.left: dict[str, Call] = {}
        self._sent: dict[str, Sent[Any]] = {}

    def run(self, calls: Mapping[str, Any]) -> None:
        try:
            for name, call in calls.items():
                self._begin(name, call)
            self._collect(calls)
        except BaseException:
            for sent in self._sent.values():
                sent.drop()
            raise
        for name, sent in self._sent.items():
            self.left[name] = _Rest(sent, calls[name])

    def _begin(self, name: str, call: SplitCall[Any]) -> None:
        try:
            sent = call.begin()
        except Exception as error:  # noqa: BLE001 (the answer of this call)
            self.answers[name] = error
            return
        if sent is None:
            self.left[name] = call
        else:
            self._sent[name] = sent

    def _collect(self, calls: Mapping[str, SplitCall[Any]]) -> None:
        poll, names = select.poll(), {}
        for name, sent in self._sent.items():
            poll.register(sent.fileno, select.POLLIN)
            names[sent.fileno] = name
        until = time.monotonic() + SOON_SECONDS
        while names and (wait := until - time.monotonic()) > 0:
            for fileno, _ in poll.poll(1000 * wait):
                name = names[fileno]
                arrived = self._sent[name].arrived()
                if arrived is False:
                    continue
                poll.unregister(fileno)
                del names[fileno]
                if arrived:
                    self._end(name, calls[name])

    def _end(self, name: str, call: SplitCall[Any]) -> None:
        sent = self._sent.pop(name)
        try:
            self.answers[name] = sent.finish()
        except Unfinished as error:
            self.left[name] = error.rest or call
        except Exception as error:  # noqa: BLE001 (the answer of this call)
            self.answers[name] = error


class _Rest:
    """The last half of a call, for a lane; given up where no lane makes it."""

    def __init__(self, sent: Sent[Any], call: Call) -> None:
        self._sent: Sent[Any] | None = sent
        self._call = call

    def __call__(self) -> Any:  # what the call returns
        """Receive the answer, however long that takes, and do what it leaves to be done."""
        sent, self._sent = self._sent, None
        assert sent is not None  # a job is made once
        if sent.arrived() is not False:
            sent.unjudged()  # it waited for the lane, not the lane for it
        try:
            return sent.finish()
        except Unfinished as error:
            return (error.rest or self._call)()

    def __del__(self) -> None:
        if self._sent is not None:
            self._sent.drop()
