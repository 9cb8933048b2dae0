"""Which devices answer: probes run in the background, so that a hung device blocks no caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from hpstore.devices.opener import is_denied
from hpstore.errors import DeviceReadOnly, DeviceTimeout, HpstoreError
from hpstore.pool.admin import PoolAdmin
from hpstore.pool.pool_devices import ProbeAnswer

T = TypeVar("T")
_PAST = 60  # probes that are kept of each device


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the last answer of a device was. `problem` is "" for one that is well.

    A device that is full or read-only answers: what it holds can be read.
    """

    problem: str
    answers: bool = True
    read_only: bool = False
    total_bytes: int = 0
    free_bytes: int = 0
    probe_seconds: tuple[float, ...] = ()  # of the last probes, oldest first


class _Question(Generic[T]):
    """One call that is asked again and again, never twice at a time."""

    def __init__(self) -> None:
        self.future: Future[T] | None = None
        self.fresh = False  # answered at the last look
        self.asked_seconds = -1e18
        self.answer: T | None = None
        self.error: Exception | None = None

    def due(self, now_seconds: float, every_seconds: float) -> bool:
        """Whether it is time to ask, and the last call is over."""
        return self.future is None and now_seconds - self.asked_seconds >= every_seconds

    def ask(self, future: Future[T], now_seconds: float) -> None:
        self.future, self.asked_seconds = future, now_seconds

    def take(self, now_seconds: float, deadline_seconds: float) -> None:
        """Note the answer, if it is there; a call past its deadline counts as none."""
        self.fresh = False
        if self.future is None:
            return
        if not self.future.done():
            waited = now_seconds - self.asked_seconds
            if waited >= deadline_seconds:
                self.answer = None
                self.error = DeviceTimeout(f"no answer for {waited:.0f} s")
            return
        future, self.future, self.fresh = self.future, None, True
        error = future.exception()
        if error is not None and not isinstance(error, (HpstoreError, OSError)):
            raise error
        self.error = error
        self.answer = None if error is not None else future.result()


class Presence:
    """Members that answer, and devices that are back at places where none is open. One thread.

    `every_seconds` between two probes of a device; one that is silent is asked at each look.
    `scope`: the devices that this agent looks after; None for all.
    """

    def __init__(
        self,
        admin: PoolAdmin,
        *,
        every_seconds: float,
        deadline_seconds: float,
        patience_seconds: float = 1.0,
        scope: Callable[[], frozenset[str] | None] = lambda: None,
    ) -> None:
        self._scope = scope
        self._admin, self._every, self._deadline = admin, every_seconds, deadline_seconds
        self._patience = patience_seconds
        self._devices: dict[str, _Question[ProbeAnswer]] = {}
        self._seconds: dict[str, deque[float]] = {}
        self._seen: dict[str, Seen] = {}
        self._places: dict[str, _Question[str]] = {}
        self._generations: dict[str, _Question[int]] = {}
        self.back: frozenset[str] = frozenset()  # devices seen at places that are not open
        self.denied: frozenset[str] = frozenset()  # places on which this user has no rights

    def look(self, now_seconds: float) -> None:
        """Take answers, ask what is due, and wait a little for what answers at once."""
        self._ask_devices(now_seconds)
        self._ask_places(now_seconds)
        questions: list[_Question[ProbeAnswer] | _Question[str]]
        questions = [*self._devices.values(), *self._places.values()]
        asked: list[Future[ProbeAnswer] | Future[str]]
        asked = [q.future for q in questions if q.future is not None]
        wait(asked, timeout=self._patience)  # type: ignore[misc]  # of two kinds
        after = max(now_seconds, self._admin.clock.monotonic())
        for question in questions:
            question.take(after, self._deadline)
        self._seconds = {d: self._seconds.get(d, deque(maxlen=_PAST)) for d in self._devices}
        for device, probe in self._devices.items():
            if probe.fresh and probe.answer is not None:
                self._seconds[device].append(probe.answer.seconds)
        self._seen = self._gather()
        self.back = frozenset(
            question.answer for question in self._places.values() if question.answer is not None
        )
        self.denied = frozenset(
            url
            for url, question in self._places.items()
            if question.error is not None and is_denied(question.error)
        )

    def newest_generation(self, now_seconds: float) -> int:
        """Of the membership, as far as devices that are open have answered by now; 0: none has."""
        places = self._admin.devices.places
        self._generations = {d: self._generations.get(d, _Question()) for d in places}
        due = {d for d, question in self._generations.items() if question.due(now_seconds, 0.0)}
        asked = self._admin.devices.ask_generations(due)
        for device, future in asked.items():
            self._generations[device].ask(future, now_seconds)
        wait(asked.values(), timeout=self._patience)
        for question in self._generations.values():
            question.take(now_seconds, self._deadline)
        answers = [q.answer for q in self._generations.values() if q.answer is not None]
        return max(answers, default=0)

    def _ask_devices(self, now_seconds: float) -> None:
        places, scope = self._admin.devices.places, self._scope()
        wanted = [d for d in places if scope is None or d in scope]
        self._devices = {d: self._devices.get(d, _Question()) for d in wanted}
        due = {
            d
            for d, question in self._devices.items()
            if question.due(now_seconds, self._every if question.error is None else 0.0)
        }
        for device, future in self._admin.devices.probe(due).items():
            self._devices[device].ask(future, now_seconds)

    def _ask_places(self, now_seconds: float) -> None:
        silent = {d for d, found in self._seen.items() if not found.answers}
        places = self._admin.devices.unanswered_places(silent)
        self._places = {url: self._places.get(url, _Question()) for url in places}
        due = {
            url
            for url, question in self._places.items()
            if question.due(now_seconds, 0.0 if question.answer is None else self._every)
        }
        for url, future in self._admin.devices.identify_places(due).items():
            self._places[url].ask(future, now_seconds)

    def seen(self) -> dict[str, Seen]:
        """Open members by id; one that has not been heard of yet is not among them. Any thread."""
        return self._seen

    def _gather(self) -> dict[str, Seen]:
        found = {}
        for device, question in self._devices.items():
            past = tuple(self._seconds.get(device, ()))
            if question.error is not None:  # without rights it was not asked: it is not gone
                found[device] = Seen(
                    problem=str(question.error),
                    probe_seconds=past,
                    answers=is_denied(question.error),
                )
            elif question.answer is not None:
                usage, refused = question.answer.usage, question.answer.refused
                found[device] = Seen(
                    problem="" if refused is None else str(refused),
                    read_only=isinstance(refused, DeviceReadOnly) and not is_denied(refused),
                    total_bytes=usage.total,
                    free_bytes=usage.free,
                    probe_seconds=past,
                )
        return found
