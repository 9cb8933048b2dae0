"""What README, CONTRIBUTING and the pages of docs/ name is there: commands, settings, links."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from hpstore.agent.agent_config import agent_config
from hpstore.cli import app
from hpstore.config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}
TREE: Any = typer.main.get_command(app)  # typer's own click has its own types
ENDS = {"|", "&&", "||", ";", ">", ">>", "<", "2>", "&", "...", "…"}
COMMAND = r"hpstore (?!\w+ \d)"  # and not the first line of a file of that format
HELP = {"--help", "-h"}
of_every_page = pytest.mark.parametrize("name", PAGES)


def fences(text: str, *kinds: str) -> Iterator[str]:
    """Blocks of code of these kinds."""
    for kind, body in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        if kind in kinds:
            yield body


def commands(text: str) -> Iterator[str]:
    """Lines of shell blocks that begin with hpstore, continued ones joined; and inline code."""
    for body in fences(text, "sh", "bash", "console", "shell", "text", ""):
        for line in body.replace("\\\n", " ").splitlines():
            if found := re.match(rf"\s*(?:\$ )?(?:sudo )?({COMMAND}.*)", line):
                yield found[1]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(code.split()) for code in re.findall(rf"`({COMMAND}[^`]+)`", prose))


def wrong_in(line: str) -> str:
    """What a command line names that there is not; "" for nothing. `ls|stat`: either."""
    alternatives = re.search(r" ([a-z-]+(?:\|[a-z-]+)+)", line)
    if alternatives:
        lines = [line.replace(alternatives[1], word, 1) for word in alternatives[1].split("|")]
        return next(filter(None, map(wrong_in, lines)), "")
    words = list(takewhile(lambda word: word not in ENDS, shlex.split(line, comments=True)))[1:]
    command, place = TREE, ["hpstore"]
    while getattr(command, "commands", None):
        if not words or words[0] in HELP or words[0].isupper() or words[0].startswith("--"):
            break
        if words[0] not in command.commands:
            if "run" not in command.commands:
                return f"{' '.join(place)} has no {words[0]!r}"
            command = command.commands["run"]  # `hpstore agent pool.toml`
            break
        place.append(words[0])
        command, words = command.commands[words[0]], words[1:]
    known = HELP.union(*([*p.opts, *p.secondary_opts] for p in command.params))
    given = [word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
    unknown = [option for option in given if option not in known]
    return f"{' '.join(place)} has no {unknown}" if unknown else ""


def slugs(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*?)\s*$", re.sub(r"```.*?```", "", text, flags=re.S), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def test_faults_are_found() -> None:
    """Guards the tests below against finding nothing."""
    assert wrong_in("hpstore create pool.toml --scheme 4+2 /mnt/a  # six disks") == ""
    assert wrong_in("hpstore ls|stat pool.toml a --json | head --lines 3") == ""
    assert wrong_in("hpstore ls|stats pool.toml a") == "hpstore has no 'stats'"
    assert wrong_in("hpstore agent pool.toml --once") == ""
    assert wrong_in("hpstore mend pool.toml") == "hpstore has no 'mend'"
    assert wrong_in("hpstore checkpoint fold pool.toml") == "hpstore checkpoint has no 'fold'"
    assert wrong_in("hpstore get --quickly pool.toml a") == "hpstore get has no ['--quickly']"
    assert sum(len(list(commands(text))) for text in PAGES.values()) > 100
    assert sum(len(list(fences(text, "toml"))) for text in PAGES.values()) > 3
    assert slugs("# One `two`, [three](x.md)\n") == {"one-two-three"}


@of_every_page
def test_every_command_is_there_with_its_options(name: str) -> None:
    found = {line: wrong_in(line) for line in commands(PAGES[name])}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


@of_every_page
def test_every_setting_is_taken(name: str, tmp_path: Path) -> None:
    """Each TOML block, with devices where it has none, is read as a pool's file."""
    for body in fences(PAGES[name], "toml"):
        text = body.replace('key = "..."\n', "")
        if "devices" not in tomllib.loads(text):
            text = f'devices = ["/a"]\n{text}'
        file = tmp_path / "pool.toml"
        file.write_text(text)
        agent_config(load_config(file))


@of_every_page
def test_every_link_leads_somewhere(name: str) -> None:
    """To a file that is there, and to a heading that it has."""
    page, lost = ROOT / name, []
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in slugs(file.read_text())):
            lost.append(target)
    assert lost == []
