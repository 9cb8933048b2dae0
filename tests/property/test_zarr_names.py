"""Which data sets a key of the pool may lie in, and which keys their objects have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders.dataset import dataset_manifest as keys
from hpstore.loaders.zarr_views.dataset_views import is_chunk, names_within


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("data/train", []),
        ("data/train/", ["train"]),
        ("data/train/zarr.json", ["train"]),
        ("data/a/b/wide/c/0/0", ["a", "a/b", "a/b/wide"]),
        ("data/runs/17/zarr.json", ["runs", "runs/17"]),
        ("data/runs/17/wide/c/3", ["runs", "runs/17", "runs/17/wide"]),
        ("data/a/0123456789abcdef/stream-0/000000", ["a"]),
        ("data//a/b", []),
        (f"data/{'x' * 300}/b", []),
    ],
)
def test_names_that_a_key_may_lie_in(key: str, names: list[str]) -> None:
    """Each beginning that can name a data set; numbers of a chunk are not looked at."""
    assert list(names_within(key)) == names


_COMPONENT = st.sampled_from(["a", "b", "c", "17", "x.y"])


@given(st.lists(_COMPONENT, min_size=1, max_size=4).map("/".join), st.integers(0, 999))
def test_every_object_of_a_data_set_is_known_by_its_key(name: str, number: int) -> None:
    """Whatever its name; none is taken for a chunk, and its name is among those it may lie in."""
    nonce = "0123456789abcdef"
    for key in (
        keys.manifest_key(name),
        keys.journal_key(name),
        keys.part_key(name, (number, 1000)),
        keys.shard_key(name, nonce, 1, number),
        keys.side_key(name, nonce, 1, number),
        keys.pages_key(name, nonce, 1),
        keys.column_key(name, nonce, keys.ORDER, number),
        keys.column_key(name, nonce, "3", number),
    ):
        assert keys.dataset_of(key) == name
        assert not is_chunk(key)
        assert name in names_within(key)
    for key in ("zarr.json", "f/zarr.json", f"f/c/{number}", f"f/c/{number}/0", "f/.zarray"):
        assert keys.dataset_of(f"data/{name}/{key}") is None
        assert name in names_within(f"data/{name}/{key}")
