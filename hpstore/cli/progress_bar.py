"""The progress bar of commands: on standard error, and only where that is a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hpstore.cli.output import visible
from hpstore.maintenance.rebuild import Progress as Step
from hpstore.units import format_bytes

_REFRESH_SECONDS = 0.1
_SETTLED_SECONDS = 0.5  # before it a rate is a guess


class SampleCount(Protocol):
    """How far work on samples is."""

    @property
    def records(self) -> int: ...

    @property
    def total(self) -> int | None: ...

    @property
    def bytes(self) -> int: ...

    @property
    def estimated(self) -> bool: ...


class Bar:
    """One piece of work with its amount, rates and time left. Moved by one thread at a time.

    Each method is a callback of the kind that the library takes: one of them moves a bar.
    """

    def __init__(self, what: str, shown: Progress) -> None:
        self._shown = shown
        self._task = shown.add_task(visible(what), total=None, amount="", rate="")
        self._began = self._last = time.monotonic()
        self._before: SampleCount | None = None
        self._bytes = 0

    def objects(self, step: Step) -> None:
        """So many objects are done, of so many, with the bytes moved for them."""
        self._show(step.done, step.total, f"{step.done}/{step.total}", self._rate(step.bytes))

    def samples(self, count: SampleCount) -> None:
        """So many samples are done; those of the first call were there before and have no rate."""
        if self._before is None:
            self._before = count
        records, nbytes = count.records - self._before.records, count.bytes - self._before.bytes
        seconds = time.monotonic() - self._began
        rate = (
            f"{records / seconds:.0f}/s {self._rate(nbytes)}" if seconds > _SETTLED_SECONDS else ""
        )
        about = "~" if count.estimated else ""
        amount = f"{count.records}/{'?' if count.total is None else f'{about}{count.total}'}"
        self._show(count.records, count.total, amount, rate)

    def of_bytes(self, done: int, total: int) -> None:
        """So many bytes are done, of so many."""
        amount = f"{format_bytes(done)}/{format_bytes(total)}"
        self._show(done, total, amount, self._rate(done))

    def steps(self, done: int, total: int) -> None:
        """So many steps are done, of so many; no bytes."""
        self._show(done, total, f"{done}/{total}", "")

    def advance(self, count: int, total: int) -> None:
        """`count` bytes more are done, of `total` in all."""
        self._bytes += count
        self.of_bytes(self._bytes, total)

    def _rate(self, nbytes: int) -> str:
        seconds = time.monotonic() - self._began
        return f"{format_bytes(nbytes / seconds)}/s" if seconds > _SETTLED_SECONDS else ""

    def _show(self, done: int, total: int | None, amount: str, rate: str) -> None:
        now = time.monotonic()
        if now - self._last < _REFRESH_SECONDS and done != total:
            return
        self._last = now
        self._shown.update(self._task, completed=done, total=total, amount=amount, rate=rate)


@contextmanager
def progress_bar(what: str) -> Iterator[Bar]:
    """A bar for what is done inside; gone at the end."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:
        yield Bar(what, shown)
