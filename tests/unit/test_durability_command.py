"""`hpstore durability` with shared causes, shared repairs, and a real pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hpstore
from hpstore.agent.rebuild_speeds import SPEEDS_FILE, measured_speed, note_rebuild
from hpstore.cli import app, durability_pool
from hpstore.config import Settings
from hpstore.durability import (
    DomainDevice,
    Group,
    SharedCause,
    crossings_per_year,
    domain_tree,
    in_a_year,
    losses_per_year,
    nines,
    regular_tree,
)
from hpstore.errors import ConfigError

TALK = ("--scheme", "6+3", "--afr", "0.005", "--rebuild-hours", "156")
MIB = 1 << 20


def ask(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["durability", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output, parse_constant=pytest.fail)
    return found


def said(*words: object) -> str:
    done = CliRunner().invoke(app, ["durability", *map(str, words)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_shared_causes_enter_the_figures_and_the_table_of_schemes() -> None:
    """Two hosts of 3 and a batch: the library's figure, in the table too; what was counted is not
    said to be left out."""
    found = ask(*TALK, "--shared", "host:0.005:3", "--shared", "batch:0.01:all:0.1")
    causes = (
        SharedCause(kind="host", events_per_year=0.005, units=3),
        SharedCause(kind="batch", events_per_year=0.01, hit=0.1),
    )
    group = Group(data=6, parity=3, afr=0.005, repair_hours=156)
    expected = crossings_per_year(regular_tree(group, causes), repair_hours=156, lost=3)
    assert found["failure_domains"]["losses_per_year"] == pytest.approx(expected)
    ours = next(s for s in found["schemes"] if (s["data"], s["parity"]) == (6, 3))
    assert ours["nines"] == pytest.approx(nines(in_a_year(expected)))
    assert found["left_out"][0].startswith("failures that come together, other than those given")
    words = (*TALK, "--shared", "host:0.005:3", "--simulate", 20_000)
    text = said(*words)
    assert "each host of 3 units is struck 0.005 times" in text
    assert "sampling, seed 0" in text
    sampled = ask(*words)
    shared = sampled["failure_domains"]["losses_per_year"]
    assert sampled["simulated"]["low"] * 0.9 < shared < sampled["simulated"]["high"] * 1.1


def test_frequent_events_have_a_table_too() -> None:
    """The longest repair time is looked for where a domain is struck many times in it."""
    words = ("--shared", "host:9:1:0.3", "--shared", "rack:9:3:0.1", "--nines", 1)
    found = ask("--scheme", "6+3", "--afr", 0.005, "--rebuild-hours", 1, *words)
    (ours,) = (s for s in found["schemes"] if (s["data"], s["parity"]) == (6, 3))
    assert 1 < ours["longest_repair_hours"] < 100


def test_unreadable_sectors_count_beside_shared_causes() -> None:
    """More critical moments, so more losses to sectors; also in the table."""
    size = ("--device-size", "8TB", "--unreadable", "1e-15")
    plain, shared = (ask(*TALK, *size, *more) for more in ((), ("--shared", "host:0.005:3")))
    lost = [found["unreadable_sectors"]["losses_per_year"] for found in (plain, shared)]
    assert lost[1] > 100 * lost[0]
    ours = next(s for s in shared["schemes"] if (s["data"], s["parity"]) == (6, 3))
    both = shared["failure_domains"]["losses_per_year"] + lost[1]
    assert ours["nines"] == pytest.approx(nines(in_a_year(both)))


def test_repairs_at_once_share_their_bandwidth() -> None:
    """One at a time: six times the losses of 6+3, in the models and in the simulation."""
    found = ask(*TALK, "--repair-streams", 1, "--simulate", 20_000)
    alone = losses_per_year(Group(data=6, parity=3, afr=0.005, repair_hours=156))
    assert found["closed_form"]["losses_per_year"] == pytest.approx(6 * alone, rel=0.01)
    assert found["simulated"]["low"] < 6 * alone < found["simulated"]["high"]
    assert "if no more than 1 repaired at once" in said(*TALK, "--repair-streams", 1)


def test_training_slows_a_rebuild_down() -> None:
    """8 TB onto a spare at 200 MB/s: 11.1 h of a device's whole time; 0.9 of it, or 0.3."""
    words = ("--scheme", "4+2", "--afr", "0.01", "--device-size", "8TB", "--device-rate", "200MB")
    assert ask(*words)["repair_hours"] == pytest.approx(11.11 / 0.9, abs=0.01)
    busy = ask(*words, "--training", 1)["repair_hours"]
    assert busy == pytest.approx(11.11 / 0.3, abs=0.01)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--shared", "host"), "write KIND:EVENTS_A_YEAR:UNITS"),
        (("--shared", "host:x:2"), "is not a number"),
        (("--shared", "host:0.1:0"), "are not units"),
        (("--shared", "host:0.1:2:7"), "a share of 7"),
        (("--shared", "h\n:0.1:2"), "the kind is a word"),
        (("--shared", "host:0.1:2", "--shared", "rack:0.1:3"), "hold one another whole"),
        (("--shared", "host:0.1:2", "--repair-streams", "1"), "give one of them"),
        (("--shared", "host:2000:2"), "can be counted"),
        (("--afr-by-age", "0:0.1"), "needs --pool"),
        (("--pool", "none.toml"), "--pool has a scheme"),
    ],
)
def test_wrong_words_are_one_error(words: tuple[str, ...], error: str) -> None:
    done = CliRunner().invoke(app, ["durability", *TALK, *words])
    assert isinstance(done.exception, ConfigError)
    assert error in str(done.exception)
    assert "\n" not in str(done.exception).replace("\\n", "")


# --- a pool ---------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """2+2 on three hosts of two devices."""
    path = tmp_path / "pool.toml"
    hpstore.create(
        [str(tmp_path / f"d{n}") for n in range(6)],
        data=2,
        parity=2,
        domains=["a", "a", "b", "b", "c", "c"],
        config=path,
        settings=Settings(run_directory=str(tmp_path / "run")),
    ).close()
    return path


def test_a_pools_members_and_domains_are_those_it_has(pool: Path) -> None:
    """Six devices on three hosts; at most two columns a host, so one host may go; the figure is
    that of the library's tree, and of the whole pool's width without domains."""
    words = ("--pool", pool, "--afr", "0.01", "--rebuild-hours", "10", "--wait-hours", "1.75")
    found = ask(*words, "--shared", "domain:0.02")
    assert found["repair_hours"] == 12  # and the agent's quarter of an hour
    assert [m["domain"] for m in found["pool"]["members"]] == ["a", "a", "b", "b", "c", "c"]
    assert found["pool"]["units_most"] == 2
    tree = domain_tree(
        {name: [DomainDevice(afr=0.01)] * 2 for name in "abc"},
        (SharedCause(kind="domain", events_per_year=0.02),),
        units_most=2,
    )
    expected = crossings_per_year(tree, repair_hours=12, lost=2)
    assert found["failure_domains"]["losses_per_year"] == pytest.approx(expected)
    assert (found["data"], found["parity"]) == (4, 2)
    text = said(*words)
    assert "2+2 on 6 devices" in text
    assert "Left out: failures of whole failure domains" in text


def test_a_pools_rebuild_speed_is_the_one_that_was_measured(pool: Path) -> None:
    """None yet: an error that says what to give. Then the median of rebuilds, of what is used."""
    words = ("durability", "--pool", str(pool), "--afr", "0.01")
    done = CliRunner().invoke(app, [*words])
    assert "no rebuild of this pool has been measured" in str(done.exception)
    with hpstore.open(pool, read_only=True) as opened:
        directory = opened.admin.state_directory
    for seconds in (1.0, 4.0, 16.0):
        assert note_rebuild(directory, at_ms=86_400_000, nbytes=64 * MIB, seconds=seconds)
    found = ask(*words[1:], "--device-size", "1GiB")
    assert found["repair_hours"] == pytest.approx(2 * 1024 / 16 / 3600 + 0.25)
    assert (
        "the median of 3 rebuilds on this node, the last on 1970-01-02"
        in (found["pool"]["rebuild_from"])
    )


def test_a_pools_training_share_takes_the_agents_settings(pool: Path) -> None:
    """heal_share_busy of its pool.toml; the other five devices share reads and writes."""
    pool.write_text(pool.read_text() + "\n[agent]\nheal_share_busy = 0.5\n")
    found = ask(
        *("--pool", pool, "--afr", "0.01", "--device-rate", "1MB", "--training", 1),
        *("--device-size", "1GB"),
    )
    assert found["repair_hours"] == pytest.approx(3 * 1000 / 5 / 0.5 / 3600 + 0.25)


def test_a_pools_devices_fail_by_their_age(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones by the last rate, new ones by the first; unknown ones by --afr, which is said."""
    ages = dict(zip("012345", (6.0, 0.5, 3.0, 3.0, 3.0, None), strict=True))
    monkeypatch.setattr(durability_pool, "age_years", lambda url: ages[url[-1]])
    words = ("--pool", pool, "--afr", "0.5", "--rebuild-hours", "10")
    found = ask(*words, "--afr-by-age", "0:0.02,1:0.01,5:0.08")
    assert [m["afr"] for m in found["pool"]["members"]] == [0.08, 0.02, 0.01, 0.01, 0.01, 0.5]
    assert any("the age of disks that did not answer" in line for line in found["left_out"])
    older = ask(*words, "--afr-by-age", "0:0.04,1:0.02,5:0.16")
    losses = [one["failure_domains"]["losses_per_year"] for one in (found, older)]
    assert losses[1] > losses[0]


@pytest.mark.parametrize("text", ["1:0.1", "0:0.1,0:0.2", "0", "0:x", "0:0", "0:nan"])
def test_ages_that_do_not_rise_from_0_are_refused(pool: Path, text: str) -> None:
    done = CliRunner().invoke(
        app, ["durability", "--pool", str(pool), "--afr", "0.1", "--afr-by-age", text]
    )
    assert isinstance(done.exception, ConfigError)
    assert "0:0.02,1:0.008,5:0.03" in str(done.exception)


def test_a_pools_own_kind_is_domain(pool: Path) -> None:
    """A host of so many units is not what the pool knows; all of it may be struck."""
    words = ("--pool", pool, "--afr", "0.01", "--rebuild-hours", "10")
    done = CliRunner().invoke(app, ["durability", *map(str, words), "--shared", "host:0.1:2"])
    assert "write domain:EVENTS_A_YEAR" in str(done.exception)
    struck = ask(*words, "--shared", "batch:0.1:all:0.3")["failure_domains"]["losses_per_year"]
    assert struck > ask(*words)["failure_domains"]["losses_per_year"]


def test_speeds_that_are_cut_or_small_count_not(tmp_path: Path) -> None:
    """A crash in a line, numbers of nobody, a rebuild of a few objects."""
    assert measured_speed(tmp_path) is None
    assert not note_rebuild(tmp_path, at_ms=1, nbytes=MIB, seconds=1.0)
    assert note_rebuild(tmp_path, at_ms=5, nbytes=128 * MIB, seconds=2.0)
    with (tmp_path / SPEEDS_FILE).open("ab") as file:
        file.write(
            b'{"at_ms": 1, "bytes": Infinity, "seconds": 1}\n[]\n\xff\n'
            b'{"at_ms": 1, "bytes": 9, "seconds": 0}\n{"at_ms": 7, "byt'
        )
    found = measured_speed(tmp_path)
    assert found is not None
    assert (found.bytes_per_second, found.rebuilds, found.last_ms) == (64 * MIB, 1, 5)
