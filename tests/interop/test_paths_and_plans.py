"""Pure parts of the file system: directories out of keys, ranges, moves, orders of deleting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.interop.filesystem.directory_tree import descend, metadata_first
from hpstore.interop.filesystem.move_plan import Selection, plan_move
from hpstore.interop.parallel_calls import WORKERS, share_out, slice_bounds

KEYS = st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=4).map("/".join)


@given(keys=st.lists(KEYS), made=st.lists(KEYS), top=st.one_of(st.just(""), KEYS))
def test_a_tree_has_what_lies_below_and_nothing_else(
    keys: list[str], made: list[str], top: str
) -> None:
    """Against the obvious: every key below, and every proper ancestor or made directory below."""
    prefix = f"{top}/" if top else ""
    tree = descend(keys, made, top)
    ancestors = {k[:i] for k in keys for i, c in enumerate(k) if c == "/"}
    ancestors |= {m[:i] for m in made for i, c in enumerate(m) if c == "/"} | set(made)
    assert set(tree.files) == {k for k in keys if k.startswith(prefix)}
    assert set(tree.directories) == {d for d in ancestors if d.startswith(prefix)}
    for depth in (1, 2):
        cut = descend(keys, made, top, depth)
        assert set(cut.files) == {f for f in tree.files if f[len(prefix) :].count("/") < depth}
        assert set(cut.directories) == {
            d for d in tree.directories if d[len(prefix) :].count("/") < depth
        }


@given(
    st.integers(0, 9),
    st.one_of(st.none(), st.integers(-12, 12)),
    st.one_of(st.none(), st.integers(-12, 12)),
)
def test_bounds_are_those_of_a_slice(size: int, start: int | None, end: int | None) -> None:
    """The oracle is slicing bytes."""
    data = bytes(range(size))
    low, high = slice_bounds(size, start, end)
    assert data[low:high] == data[start:end]
    assert 0 <= low <= high <= size


def test_metadata_goes_first() -> None:
    """In any directory the dot files stand before all others."""
    assert metadata_first(["r/__0_0.distcp", "r/+x", "r/.metadata"])[0] == "r/.metadata"


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_every_range_has_one_reader_and_no_path_too_many(paths: list[str]) -> None:
    """share_out gives every index once, in at most WORKERS parts of a path."""
    jobs = share_out(paths)
    assert sorted(i for _, indices in jobs for i in indices) == list(range(len(paths)))
    assert all(paths[i] == path for path, indices in jobs for i in indices)
    assert all(sum(path == p for path, _ in jobs) <= WORKERS for p in "abc")


def test_a_move_into_itself_is_refused() -> None:
    """Deleting the source afterwards would delete the copy."""
    chosen = Selection(files=frozenset({"a/x"}), directories=frozenset({"a"}))
    with pytest.raises(OSError, match="into itself"):
        plan_move(["a"], chosen, "a/b", into=False)
    with pytest.raises(OSError, match="into itself"):
        plan_move(["a"], chosen, "a", into=True)
    assert plan_move(["a"], chosen, "a", into=False) is None


def test_two_sources_never_share_a_target() -> None:
    """x/f and y/f would both become z/f."""
    chosen = Selection(files=frozenset({"x/f", "y/f"}), directories=frozenset())
    with pytest.raises(OSError, match="twice"):
        plan_move(["x/f", "y/f"], chosen, "z", into=True)
