"""Reading ahead changes nothing but when it is read: order, errors, ends, and a bound."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from hpstore.errors import ThreadsExhausted
from hpstore.loaders.ingestion import read_ahead as module
from hpstore.loaders.ingestion.read_ahead import read_ahead


class Source:
    """Numbers, with an error behind them; counts what was taken and whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.taken, self.closed = 0, False
        self.thread = ""

    def read(self) -> Generator[int, None, None]:
        try:
            for number in range(self.count):
                self.thread = threading.current_thread().name
                self.taken += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def test_everything_comes_in_order_and_the_error_in_its_place() -> None:
    """A hundred numbers, then the error of the source; read by a thread that is gone then."""
    source = Source(100, ValueError("bad"))
    found: list[int] = []
    with pytest.raises(ValueError, match="bad"):
        found.extend(read_ahead(source.read(), lambda _: 1, most_bytes=7))
    assert found == list(range(100))
    assert source.thread == "hpstore-ingest-ahead"
    assert source.closed
    assert source.thread not in [thread.name for thread in threading.enumerate()]


def test_no_more_than_its_bytes_is_read_ahead() -> None:
    """Each is ten bytes: of thirty-five, four are read before the first is taken, and no more."""
    source = Source(100)
    ahead = read_ahead(source.read(), lambda _: 10, most_bytes=35)
    assert next(ahead) == 0
    for number in range(1, 20):
        assert next(ahead) == number
        assert source.taken <= number + 1 + 4
    ahead.close()
    assert source.closed
    assert source.taken < 30


def test_closing_it_early_closes_the_source() -> None:
    source = Source(10**9)
    ahead = read_ahead(source.read(), lambda _: 1, most_bytes=3)
    next(ahead)
    ahead.close()
    assert source.closed


def test_without_another_thread_it_is_read_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: threading.Thread) -> threading.Thread:
        raise ThreadsExhausted("no more")

    monkeypatch.setattr(module, "start_thread", refused)
    source = Source(5)
    ahead = read_ahead(source.read(), lambda _: 1)
    assert next(ahead) == 0
    assert source.taken == 1
    assert list(ahead) == [1, 2, 3, 4]
    assert source.thread == threading.current_thread().name
