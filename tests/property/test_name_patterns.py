"""Patterns of names against a slow and obvious matcher; names that are hostile or many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import Item, whole
from hpstore.checkpoint.restore.chosen_names import choose
from hpstore.checkpoint.restore.load_options import LoadOptions
from hpstore.checkpoint.restore.name_patterns import Globs, Renames, Renaming, starred
from tests.thorough import LONG

NAMES = st.text("ab/.@1[", max_size=10)


def matches(pattern: str, name: str) -> bool:
    """Whether stars and question marks fit, tried one after the other."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(matches(pattern[1:], name[n:]) for n in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and matches(pattern[1:], name[1:])


def heads(name: str) -> list[str]:
    """A name, and what it is under: at a slash, without the number of a rank."""
    found = [name, *(name[:n] for n, letter in enumerate(name) if letter == "/")]
    for head in list(found):
        start, at, number = head.rpartition("@")
        if at and number.isdigit():
            found.append(start)
    return found


@given(st.lists(st.text("ab/.*?", min_size=1, max_size=8), min_size=1, max_size=3), NAMES)
def test_globs_mean_what_they_match_and_what_is_under_it(patterns: list[str], name: str) -> None:
    wanted = [p for p in patterns if any(matches(p, head) for head in heads(name))]
    globs = Globs(patterns)
    assert globs.match(name) == bool(wanted)
    assert set(globs.unused([name])) == set(patterns) - set(wanted)


@given(st.text("ab/.*", min_size=1, max_size=8), NAMES)
def test_stars_give_the_name_back(pattern: str, name: str) -> None:
    """Put in their places again; and there are none when no text fits."""
    stars = starred(pattern, name)
    if "*" not in pattern:
        below = name.removeprefix(pattern)
        fits = name.startswith(pattern) and (not below or below[0] in "/@")
        assert stars == ([below] if fits else None)
    elif stars is None:
        assert not matches(pattern.replace("?", "\0"), name)
    else:
        assert Renames({pattern: pattern}).of(name) == name
        assert len(stars) == pattern.count("*")


def test_names_that_nearly_match_take_no_time() -> None:
    """A matcher that tries each place of each star against each other would not come back."""
    name = "ab" * 50_000
    assert not Globs(["*a" * 30 + "c"]).match(name)
    assert starred("*a" * 30 + "c", name) is None
    assert Globs(["*a" * 30 + "*"]).match(name)


@pytest.mark.parametrize(
    ("count", "rename"),
    [
        (100_000 if LONG else 20_000, {"model/layer.*.weight": "model/l.*.w"}),
        (1_000, lambda name: name.replace("layer", "l")),
    ],
)
def test_many_names_are_chosen(count: int, rename: Renaming) -> None:
    """By patterns and by a function; the manifest's bytes are where they were."""
    names = [f"model/layer.{n}.weight" for n in range(count)]
    tree = {"model": {n[6:]: {"$": "tensor", "item": n} for n in names}}
    items = tuple(
        Item(name=n, dtype="float32", shape=(1,), box=whole((1,)), offset=64 * at, length=4)
        for at, n in enumerate(names)
    )
    manifest = Manifest(step=1, created_ms=1, segments=(), items=items, tree=tree)
    found = choose(manifest, LoadOptions(rename=rename, exclude=["*.1?.*", "*7.*"]))
    assert len(found.manifest.items) + len(found.left_out) == count
    assert set(found.manifest.tree["model"]) == {i.name[6:] for i in found.manifest.items}
    offsets = {i.name.split(".")[1]: i.offset for i in found.manifest.items}
    assert all(offset == 64 * int(number) for number, offset in offsets.items())
