"""Directories that are renamed by one put, over objects that cannot be renamed. Pure decisions.

A directory has a *place* (where its name leads) and a *root* (the key under which its files are).
They are the same until it is renamed; then one object, whose key tells everything, says where the
root's contents are now:

    moves/<sequence>-<n>/<root, n components>/<place>     the contents of root are at place
    moves/<sequence>-<n>/<root, n components>             they are removed, files may be left
    moves/<sequence>-<n>s/<root, n components>            they are removed and swept

Of the entries for one root the highest sequence holds, so a single put is the rename: before it
the contents are at the old place, after it at the new one, never at both. The old place begins
anew with another root (`again/1/...`), so what is written there never lands among what was moved.
A root is taken until its entry is dropped, which is long after, and never while a later root of its
place is in use: else that one would be lost from sight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TOP = "tree"
OLD = 100  # entries of swept roots are dropped when this many newer ones were made
_ENTRY = re.compile(r"(\d{12})-(\d+)(s?)/(.+)")
_AGAIN = re.compile(r"again/(\d+)/(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryMove:
    """One entry: the contents of `root` are at `place`, or removed (None)."""

    sequence: int
    root: str
    place: str | None
    swept: bool = False  # no file of it is left

    def __str__(self) -> str:
        parts = self.root.count("/") + 1
        tail = "" if self.place is None else f"/{self.place}"
        return f"{self.sequence:012d}-{parts}{'s' if self.swept else ''}/{self.root}{tail}"


def parse_move(text: str) -> EntryMove | None:
    """Inverse of str(); None for a text of another form."""
    found = _ENTRY.fullmatch(text)
    if found is None:
        return None
    parts, count = found[4].split("/"), int(found[2])
    if not 1 <= count <= len(parts):
        return None
    place = "/".join(parts[count:]) or None
    if place is not None and found[3]:
        return None
    root = "/".join(parts[:count])
    return EntryMove(sequence=int(found[1]), root=root, place=place, swept=bool(found[3]))


def base_of(root: str) -> str:
    """The place that a root was made for."""
    found = _AGAIN.fullmatch(root)
    return found[2] if found else root


def next_root(root: str) -> str:
    """The root that its place gets when this one is taken."""
    found = _AGAIN.fullmatch(root)
    return f"again/{int(found[1]) + 1}/{found[2]}" if found else f"again/1/{root}"


class RenamePlan:
    """What all entries together say."""

    def __init__(self, entries: Iterable[EntryMove]) -> None:
        self.entries = sorted(entries, key=lambda move: (move.sequence, str(move)))
        self.roots = {move.root: move for move in self.entries}  # the newest of each
        self.places = {m.place: m.root for m in self.roots.values() if m.place is not None}

    @property
    def next_sequence(self) -> int:
        """For the next entry."""
        return self.entries[-1].sequence + 1 if self.entries else 0

    def root_of(self, place: str) -> str:
        """Where the contents of a place are, or would be written."""
        if place in self.places:
            return self.places[place]
        candidate = place
        again = 0
        while candidate in self.roots:
            again += 1
            candidate = f"again/{again}/{place}"
        return candidate

    def find(self, parts: Iterable[str]) -> tuple[str, str]:
        """Place and root of a path, component by component."""
        place = root = TOP
        for part in parts:
            place = f"{root}/{part}"
            root = self.root_of(place)
        return place, root

    def visible(self, root: str, rest: str) -> bool:
        """Whether the object `root`/`rest` is seen there: not moved elsewhere, nor covered."""
        at = root
        for part in rest.split("/")[:-1]:
            at = f"{at}/{part}"
            if at in self.roots or at in self.places:
                return False
        return True

    def below(self, root: str) -> list[str]:
        """Places seen under a root whose contents, if there are any, lie elsewhere than there."""
        bases = (base_of(taken) for taken in self.roots)
        inside = {place for place in (*self.places, *bases) if place.startswith(f"{root}/")}
        return sorted(p for p in inside if self.visible(root, p[len(root) + 1 :]))

    def unswept(self) -> list[EntryMove]:
        """Removed roots whose files may be left."""
        return [m for m in self.roots.values() if m.place is None and not m.swept]

    def orphaned(self) -> list[str]:
        """Roots that were reached only through a removed one, if they are in use."""
        gone = tuple(f"{move.root}/" for move in self.roots.values() if move.place is None)
        bases = (base_of(taken) for taken in self.roots)
        return sorted({self.root_of(p) for p in (*self.places, *bases) if p.startswith(gone)})

    def stale(self) -> list[EntryMove]:
        """Entries that newer ones of the same root have replaced."""
        return [move for move in self.entries if self.roots[move.root] is not move]

    def droppable(self) -> list[EntryMove]:
        """Swept entries that are old; to drop unless the next root of the place is in use."""
        old = self.next_sequence - OLD
        return [
            move
            for move in self.roots.values()
            if move.swept and move.sequence < old and next_root(move.root) not in self.roots
        ]

    def owns(self, root: str, rest: str) -> bool:
        """Whether removing `root` removes the object `root`/`rest`: no other root holds it."""
        at = root
        for part in rest.split("/")[:-1]:
            at = f"{at}/{part}"
            if at in self.roots:
                return False
        return True
