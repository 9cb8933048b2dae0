"""Patterns for the names of a checkpoint: which are meant, and what they are called instead. Pure.

Each takes time in proportion to the name: a hostile manifest has long names, and many.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from hpstore.errors import ConfigError

Renaming = Mapping[str, str | None] | Callable[[str], str | None]


class Globs:
    """Patterns as in file names: `*` is any text, slashes and dots too, `?` one character, `[0-5]`
    one of some. A pattern means what it matches, and what is under that at a slash."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._compiled = {pattern: re.compile(_regex(pattern), re.DOTALL) for pattern in patterns}

    def match(self, name: str) -> bool:
        """Whether one of the patterns means a name."""
        return any(compiled.match(name) for compiled in self._compiled.values())

    def unused(self, names: Iterable[str]) -> list[str]:
        """Patterns that mean none of these names."""
        left = dict(self._compiled)
        for name in names:
            if not left:
                break
            for pattern in [p for p, compiled in left.items() if compiled.match(name)]:
                del left[pattern]
        return list(left)


def _regex(pattern: str) -> str:
    whole = fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
    return whole + r"(?:@\d+)?(?:/.*)?\Z"


class Renames:
    """What names are called in the state: by patterns, of which the first that matches counts, or
    by a function. None leaves a name out."""

    def __init__(self, renaming: Renaming | None) -> None:
        self._call = renaming if callable(renaming) else None
        self._patterns = dict(renaming) if isinstance(renaming, Mapping) else {}
        self._used: set[str] = set()
        self.raised: Exception | None = None  # by the function

    def of(self, name: str) -> str | None:
        """The name in the state. Raises ConfigError for what a function must not return."""
        if self._call is not None:
            try:
                found = self._call(name)
            except Exception as error:
                self.raised = error
                raise
            if found is not None and not _is_name(found):
                raise ConfigError(
                    f"rename gave {found!r} for {name!r}: it must give a name such as "
                    "'model/weight', or None. Nothing was changed."
                )
            return found
        for pattern, new in self._patterns.items():
            stars = starred(pattern, name)
            if stars is not None:
                self._used.add(pattern)
                return None if new is None else _filled(new, stars)
        return name

    def unused(self) -> list[str]:
        """Patterns that have matched nothing."""
        return [pattern for pattern in self._patterns if pattern not in self._used]


def starred(pattern: str, name: str) -> list[str] | None:
    """What each `*` of a pattern stands for in a name, and what is under it at a slash; None when
    it does not match. All but the last `*` stand for as little as can be."""
    first, *rest = pattern.split("*")
    if not rest:
        below = name.removeprefix(first)
        matches = name.startswith(first) and below[:1] in ("", "/", "@")
        return [below] if matches else None
    last = rest.pop()
    at, end = len(first), len(name) - len(last)
    if end < at or not name.startswith(first) or not name.endswith(last):
        return None
    found = []
    for middle in rest:
        place = name.find(middle, at, end)
        if place < 0:
            return None
        found.append(name[at:place])
        at = place + len(middle)
    return [*found, name[at:end]]


def _filled(new: str, stars: Sequence[str]) -> str:
    if "*" not in new:
        return new + stars[0]
    parts = new.split("*")
    return "".join(part + star for part, star in zip(parts, [*stars, ""], strict=True))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and all(value.split("/"))


def checked_patterns(word: str, value: object) -> tuple[str, ...]:
    """Patterns of an argument, which may be one alone. Raises ConfigError."""
    found = (value,) if isinstance(value, str) else value
    if (
        not isinstance(found, (list, tuple, set, frozenset))
        or not found
        or not all(isinstance(pattern, str) and pattern for pattern in found)
    ):
        raise ConfigError(f"{word} must be patterns of names, such as 'model/*', not {value!r}")
    return tuple(found)


def check_renaming(value: object) -> None:
    """Raise ConfigError for what is neither patterns by patterns nor a function."""
    if callable(value):
        return
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(
            f"rename must be patterns, such as {{'model/old.*': 'model/new.*'}}, or a function of "
            f"a name, not {value!r}"
        )
    for old, new in value.items():
        named = new is None or _is_name(new)
        if not isinstance(old, str) or not old or not named:
            raise ConfigError(f"rename has {old!r}: {new!r}; both must be names, the last or None")
        if new is not None and new.count("*") != old.count("*"):
            raise ConfigError(f"rename has {old!r}: {new!r}, with another number of stars")
