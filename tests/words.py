"""Words that the project's prose does not use, and where some are left.

`python -m tests.words` lowers the counts in tests/words_left.tsv to what is there now. It never
raises one: a new hit is rewritten, not listed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT = ROOT / "tests" / "words_left.tsv"
_UNITS = "samples|bytes|batches|reads|lines|records|steps|tokens|calls|objects|times"
_SPANS = "second(?! (time|one|device|process))|minute|hour|day|week|year"

# one word per concept (decision 0104): what is not written, and what to write
INSTEAD = {
    "heal": (r"(un)?heal(s|ed|ing)?", "rebuild (columns), repair (one object)"),
    "mend": (r"(un)?mend(s|ed|ing)?", "repair"),
    "anew": (r"anew", "again, rewrite, restart"),
    "make whole": (r"(make|makes|made|making) (\w+ )?whole|whole again", "rebuild, repair"),
    "make up for": (r"(make|makes|made|making) up for", "rebuild"),
    "nobody": (r"(no|some|any|every)body", "the actor: the caller, the agent, a reader thread"),
    "tell": (r"tell|tells|telling|told", "report, log, show, warn, distinguish"),
    "go round": (r"(go|goes|going|went|gone) round|kept off|keep off", "avoid"),
    "is to be": (r"(is|are|was|were) to be|of no use", "must, cannot be used"),
    "a second": (rf"({_UNITS}) an? ({_SPANS})", "per second"),
    "data set": (r"data sets?", "dataset"),
    "interpreter's lock": (r"interpreter's lock", "GIL"),
}
_PATTERNS = {
    word: re.compile(rf"\b({pattern})\b", re.IGNORECASE) for word, (pattern, _) in INSTEAD.items()
}


def prose(text: str) -> str:
    """Markdown or a docstring without code blocks, inline code, and what links lead to."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = re.sub(r"^(    |\t).*$", " ", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", " ", text)).replace("\n", " ")


def hits(text: str) -> Counter[str]:
    """How often each word stands in prose."""
    return Counter({word: len(found.findall(text)) for word, found in _PATTERNS.items()})


def docstrings(source: str) -> Iterator[str]:
    """Of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""


def places() -> dict[str, str]:
    """Prose by place: a page by itself, all decisions, the docstrings of each folder of hpstore."""
    found = {page.name: prose(page.read_text()) for page in sorted(ROOT.glob("*.md"))}
    for page in sorted((ROOT / "docs").glob("*.md")):
        found[f"docs/{page.name}"] = prose(page.read_text())
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    found["docs/decisions"] = " ".join(prose(page.read_text()) for page in decisions)
    for path in sorted((ROOT / "hpstore").rglob("*.py")):
        inside = path.relative_to(ROOT).parts
        place = "/".join(inside[:2]) if len(inside) > 2 else "hpstore"
        texts = " ".join(prose(text) for text in docstrings(path.read_text()))
        found[place] = f"{found.get(place, '')} {texts}"
    return found


def counted() -> dict[tuple[str, str], int]:
    """Hits by place and word."""
    return {
        (place, word): count
        for place, text in places().items()
        for word, count in hits(text).items()
        if count
    }


def listed() -> dict[tuple[str, str], int]:
    """Hits that tests/words_left.tsv still allows."""
    rows = [line.split("\t") for line in LEFT.read_text().splitlines()[1:]]
    return {(place, word): int(count) for place, word, count in rows}


def main() -> int:
    """Lower the counts; 1 when a place has more hits than it may."""
    now, before = counted(), listed()
    more = {key: count for key, count in now.items() if count > before.get(key, 0)}
    kept = {key: min(count, now[key]) for key, count in sorted(before.items()) if key in now}
    rows = [f"{place}\t{word}\t{count}" for (place, word), count in kept.items()]
    LEFT.write_text("\n".join(["place\tword\tcount", *rows]) + "\n")
    for (place, word), count in sorted(more.items()):
        allowed = before.get((place, word), 0)
        print(f"{place}: {count} x {word!r}, {allowed} allowed: write {INSTEAD[word][1]}")
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
