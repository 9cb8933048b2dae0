"""Micro-batches from a loader, fetched ahead of their deadlines by a thread.

Micro-batches are needed in the order in which the loader gives them, whatever the schedule: the
nearest deadline is always that of the next one, so the queue is in the order of deadlines. What is
fetched ahead never counts as consumed: each micro-batch carries the loader's state behind it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.runtime.closing import Closing, call_at_exit
from hpstore.runtime.threads import start_thread
from hpstore.trainers.pipelining.consumed_samples import Span

_log = logging.getLogger(__name__)
CLOSE_SECONDS = 30.0
Pick = Any  # Any: a name or index in the batch, several of them, or what makes them of the batch
Keywords = Any  # Any: names with their picks, or what makes a dict of the batch; None for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """One micro-batch. `after`: the loader's state behind it; `ready`: when it was there."""

    batch: Any  # Any: whatever the loader hands out
    span: Span
    after: dict[str, Any]
    ready: float


class Feed(Closing):
    """Keeps `ahead` micro-batches ready, those in use among them, and has one more in its hand. The
    loader belongs to it from the first look to close(); the calls are for the training thread."""

    def __init__(self, loader: DataLoader, *, ahead: int) -> None:
        self._loader, self._ahead = loader, ahead
        self._ready: deque[Fed] = deque()
        self._wanted = ahead  # micro-batches that may lie here
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()  # guards the five above
        self._thread: threading.Thread | None = None
        self.stuck = False

    def start(self) -> None:
        """Begin to fetch. Idempotent."""
        if self._thread is None:
            self._thread = start_thread(
                threading.Thread(target=self._run, name="hpstore-feed", daemon=True)
            )
            call_at_exit(self.close)

    def keep_ready(self, ahead: int) -> None:
        """So many may lie here from now on."""
        with self._changed:
            self._ahead = self._wanted = ahead
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether the loader has raised: nothing more comes."""
        with self._changed:
            return self._error is not None

    def look(self, index: int) -> tuple[Fed, float]:
        """The micro-batch so many places from the first that was not dropped, and the seconds
        waited for it. Raises what the loader raised."""
        self.start()
        began = time.perf_counter()
        with self._changed:
            if index >= self._wanted:
                self._wanted = index + 1
                self._changed.notify_all()
            while len(self._ready) <= index:
                if self._closed:
                    raise ConfigError("the feed is closed")
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._ready[index], time.perf_counter() - began

    def drop(self, count: int) -> None:
        """The first `count` are consumed."""
        with self._changed:
            for _ in range(count):
                self._ready.popleft()
            self._wanted = self._ahead
            self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching; what lies here was not consumed. Idempotent. `stuck` tells afterwards
        whether the thread still waits for the loader, which it would then go on with."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)
            self.stuck = thread.is_alive()
            if self.stuck:
                _log.warning(
                    "the loader has kept a batch for %.0f s: its thread is left behind",
                    CLOSE_SECONDS,
                )

    def _run(self) -> None:
        try:
            for fed in self._stream():
                with self._changed:
                    while len(self._ready) >= self._wanted and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    self._ready.append(fed)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised by look, where the data are needed)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _stream(self) -> Iterator[Fed]:
        """Micro-batches without end, over the borders of epochs. What is left of an epoch may be
        less than one, after a resume with larger ones."""
        while True:
            count = 0
            before = begun = self._loader.state_dict()
            for batch in self._loader:
                after = self._loader.state_dict()
                yield Fed(
                    batch=batch, span=self._span(before), after=after, ready=time.perf_counter()
                )
                before, count = after, count + 1
            if not count and not begun["samples"] and "at_end" not in begun:
                raise ConfigError("the loader has no whole micro-batch in an epoch")

    def _span(self, before: dict[str, Any]) -> Span:
        """Positions of the global micro-batch that begins where the loader stood."""
        epoch, start = int(before["epoch"]), int(before["samples"])
        slices = self._loader.slices
        stop = start + 1 if slices is None else slices.step(start).after
        return Span(epoch=epoch, start=start, stop=stop)


def picked(batch: Any, what: Pick) -> Any:
    """A part of a batch: by name or index, a tuple of parts, or what a function makes of it."""
    if callable(what):
        return what(batch)
    if isinstance(what, (list, tuple)):
        return tuple(batch[part] for part in what)
    return batch[what]


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Positional arguments of the first stage."""
    return value if isinstance(value, tuple) else (value,)


def keywords_of(batch: Any, what: Keywords) -> dict[str, Any]:
    """Keyword arguments of every stage."""
    if callable(what):
        return dict(what(batch))
    return {name: picked(batch, pick) for name, pick in what.items()}


def shapes_of(value: Any) -> Any:
    """Of the tensors in a part of a micro-batch, nested as they are."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: shapes_of(part) for name, part in value.items()}
    return tuple(map(shapes_of, value)) if isinstance(value, (list, tuple)) else None


def require_alike(first: Any, other: Any) -> None:
    """Raise ConfigError for a micro-batch of other shapes than `first`, those of the first."""
    if first != shapes_of(other):
        raise ConfigError(uneven([first, shapes_of(other)], "data"))


def uneven(shapes: Sequence[Any], what: str) -> str:
    """What to say of micro-batches of several sizes."""
    return (
        f"the micro-batches of one step have {what} of the shapes {shapes}: a schedule takes "
        "equal ones only. Give the loader drop_last=True."
    )


def joined(parts: Sequence[Any], what: str) -> Any:
    """A whole batch of micro-batches that torch's schedule cuts into the same ones again.

    Raises ConfigError for what is no tensor, and for micro-batches that are not equally large.
    """
    if isinstance(parts[0], tuple):
        return tuple(joined(column, what) for column in zip(*parts, strict=True))
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise ConfigError(f"{what} are {type(parts[0]).__name__}, not tensors: use lazy=True")
    if len({part.shape for part in parts}) > 1:
        shapes = [tuple(part.shape) for part in parts]
        raise ConfigError(uneven(shapes, what))
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
