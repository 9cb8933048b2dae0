"""Old behaviour by name: each takes one rule out of the code, to show that a simulation notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Exchange = Callable[[Any, str, object], None]  # module or class, name, what it is instead

MUTATIONS: dict[str, Callable[[Exchange], None]] = {}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The code with the old behaviour of that name; as it is for ""."""
    before: list[tuple[Any, str, object]] = []

    def exchange(place: Any, attribute: str, new: object) -> None:
        before.append((place, attribute, getattr(place, attribute)))
        setattr(place, attribute, new)

    if name:
        MUTATIONS[name](exchange)
    try:
        yield
    finally:
        for place, attribute, old in reversed(before):
            setattr(place, attribute, old)


__all__ = ["MUTATIONS", "mutated"]
