"""One word per concept: pages, decisions and docstrings keep to it (decision 0104)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.words import INSTEAD, ROOT, counted, docstrings, hits, listed, prose

CLEAN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/benchmarks.md",
    "docs/durability.md",
    "docs/faults.md",
    "docs/fsspec.md",
    "docs/hostile.md",
    "docs/zarr.md",
)
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("lost columns are healed", "heal"),
        ("Unmended blocks", "mend"),
        ("drawn anew", "anew"),
        ("until the pool is whole again", "make whole"),
        ("makes everything whole", "make whole"),
        ("made up for", "make up for"),
        ("Nobody waits", "nobody"),
        ("the log tells", "tell"),
        ("reads go round it", "go round"),
        ("it is to be installed", "is to be"),
        ("1,000 samples a second", "a second"),
        ("two data sets", "data set"),
        ("the interpreter's\nlock", "interpreter's lock"),
    ],
)
def test_each_word_is_found(text: str, word: str) -> None:
    """Guards the tests below against finding nothing."""
    assert word in INSTEAD
    assert hits(prose(text))[word] == 1


@pytest.mark.parametrize(
    "text",
    [
        "a healthy device",
        "an amended, recommended text",
        "it reads a second time",
        "`heal_share_idle` stays a setting",
        "```\nheal\n```",
        "    hpstore heal",
        "[a page](docs/heal.md)",
        "the whole object",
    ],
)
def test_other_words_and_code_are_not(text: str) -> None:
    assert hits(prose(text)).total() == 0


def test_docstrings_are_those_of_modules_classes_and_functions() -> None:
    source = (
        '"""a"""\nclass A:\n    """b"""\n    def f(self):\n        """c"""\n        return "d"\n'
    )
    assert [text for text in docstrings(source) if text] == ["a", "b", "c"]


def test_no_page_uses_more_of_these_words_than_are_listed() -> None:
    """tests/words_left.tsv has what is left; what to write instead is in tests/words.py."""
    allowed = listed()
    more = {
        f"{place}: {count} x {word}, write {INSTEAD[word][1]}"
        for (place, word), count in counted().items()
        if count > allowed.get((place, word), 0)
    }
    assert more == set()


def test_the_list_only_shrinks() -> None:
    """What is gone is off the list: `python -m tests.words` takes it off."""
    assert set(listed()) - set(counted()) == set()
    assert [place for place, _ in listed() if place in CLEAN] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem[:4])
def test_the_title_of_a_decision_is_its_number_and_a_sentence(page: Path) -> None:
    """As `# 0042 A ragged batch releases the GIL once`: no colon, three words or more."""
    title = page.read_text().splitlines()[0]
    assert re.match(rf"# {page.stem[:4]} \S+ \S+ \S+", title), title
