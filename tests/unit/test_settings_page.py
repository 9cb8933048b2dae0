"""docs/pool-toml.md, [advanced] and what is set twice."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hpstore.agent.agent_config import AgentConfig, agent_config
from hpstore.config import PoolConfig, Settings, load_config, save_config
from hpstore.errors import ConfigError
from hpstore.health.policy.states import PolicyConfig
from tests.settings_page import PAGE, page

NOT_IN_THE_FILE = {"role", "dry_run", "policy"}
PLAIN = 'devices = ["/a"]\n'


def load(tmp_path: Path, text: str) -> PoolConfig:
    file = tmp_path / "p.toml"
    file.write_text(text)
    return load_config(file)


def test_the_page_is_of_these_settings() -> None:
    """`python -m tests.settings_page` writes it again."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("owner", [Settings, AgentConfig, PolicyConfig])
def test_every_setting_says_what_it_is(owner: type[Settings | AgentConfig | PolicyConfig]) -> None:
    silent = {row.name for row in fields(owner) if not row.metadata.get("text")}
    assert silent <= NOT_IN_THE_FILE


def test_a_dozen_settings_are_plain() -> None:
    plain = [row for row in fields(Settings) if not row.metadata["advanced"]]
    assert len(plain) <= 12


def test_advanced_ones_are_read_from_their_table_and_from_the_old_one(tmp_path: Path) -> None:
    told = load(tmp_path, PLAIN + "[advanced]\nclaim_seconds = 2\n[settings]\nhealth = false\n")
    assert (told.settings.claim_seconds, told.settings.health) == (2.0, False)
    old = load(tmp_path, PLAIN + "[settings]\nclaim_seconds = 2\nhealth = false\n")
    assert old.settings == told.settings
    agent = load(tmp_path, PLAIN + "[agent]\nscrub_days = 7\n[agent.advanced]\ntick_seconds = 1\n")
    found = agent_config(agent)
    assert (found.scrub_days, found.tick_seconds) == (7.0, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[settings]\nclaim_seconds = 2\n[advanced]\nclaim_seconds = 2\n", "set twice"),
        ("advanced = 3\n", "must be a table"),
        ("[advanced]\nclaim_second = 2\n", "did you mean 'claim_seconds'"),
        ("[advanced]\nqueue_depth = 0\n", "queue_depth must be at least 1"),
    ],
)
def test_bad_tables_are_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, PLAIN + text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("advanced = 3\n", "must be a table"),
        ("[agent.advanced]\ntick = 3\n", "did you mean 'tick_seconds'"),
        ("tick_seconds = 1\nadvanced.tick_seconds = 1\n", "set twice"),
    ],
)
def test_bad_tables_of_the_agent_are_refused(tmp_path: Path, text: str, words: str) -> None:
    told = load(tmp_path, PLAIN + "[agent]\n" * (text[0] != "[") + text)
    with pytest.raises(ConfigError, match=words):
        agent_config(told)


def test_a_new_file_has_each_in_its_table_and_keeps_them(tmp_path: Path) -> None:
    settings = Settings(queue_depth=7, file_mode=0o640)
    made = PoolConfig(path=tmp_path / "p.toml", name="p", devices=("/a",), settings=settings)
    save_config(made)
    written = tomllib.loads(made.path.read_text())
    assert written["settings"] == {"file_mode": 0o640}
    assert written["advanced"] == {"queue_depth": 7}
    assert load_config(made.path).settings == settings
    made.path.write_text(made.path.read_text() + "\n[agent]\nscrub_days = 3.0  # often\n")
    save_config(replace(made, devices=("/a", "/b")))
    again = load_config(made.path)
    assert (again.devices, again.settings) == (("/a", "/b"), settings)
    assert "# often" in made.path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        'settings.health = false\nagent = {scrub_days = 3.0}\ndevices = ["/a"]\n'
        "advanced = {queue_depth = 9}\n",
        'devices = ["/a"]\n[agent]\nscrub_days = 3.0  # kept\n[settings]\nhealth = false\n'
        "[agent.policy]\nreserve = 2\n[advanced]\nqueue_depth = 9\n",
        'devices = [\n"/a",\n]\n\n# about it\n[settings]\nhealth = false\n',
    ],
)
def test_devices_change_in_place_and_nothing_else_moves(tmp_path: Path, text: str) -> None:
    """However the tables are written: one that moved behind [settings] became part of it."""
    before = load(tmp_path, text)
    save_config(replace(before, devices=("/a", "/b")))
    after = load_config(before.path)
    assert after.devices == ("/a", "/b")
    assert (after.settings, agent_config(after)) == (before.settings, agent_config(before))
    kept = [line for line in text.splitlines() if "/a" not in line]
    assert [line for line in after.path.read_text().splitlines() if line in kept] == kept
