"""CONTRIBUTING.md, "Paths through the code", beside what a put, a save or a batch runs through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house_graph import ROOT
from tests.path_files import Paths, paths_in

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NAMED = {
    what: set(re.findall(r"`([\w/]+\.py)`", line))
    for what, line in re.findall(r"^- \*\*A (\w+)\*\*: (.+)$", TEXT, re.MULTILINE)
}
ELSE = {  # what runs where columns are lost, steps are to be deleted, or with a Cache
    "codec/backends.py": "get",
    "checkpoint/catalog/retention.py": "save",
    "loaders/batching/cached_reads.py": "batch",
    "loaders/cache/local_reader.py": "batch",
}
MOST = {"put": 49, "get": 41, "save": 114, "restore": 89, "cold batch": 89, "warm batch": 8}
"""What decision 0166 counted; but for the last, and two for what a busy machine adds."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    found = paths_in(Path(tmp_path_factory.mktemp("paths")))
    return found | {"batch": found["cold batch"] | found["warm batch"]}


@pytest.mark.parametrize("what", sorted(NAMED))
def test_what_the_map_names_is_run(paths: Paths, what: str) -> None:
    """A file that a path is said to lead through, and no longer does, misleads."""
    assert len(NAMED[what]) > 5
    assert {n for n in NAMED[what] - paths[what] if ELSE.get(n) != what} == set()


@pytest.mark.parametrize("what", sorted(MOST))
def test_a_path_does_not_grow_longer(paths: Paths, what: str) -> None:
    """The files that one call runs through, in all threads."""
    assert len(paths[what]) <= MOST[what], sorted(paths[what])
