"""Durability: the figures that are known, simulations against formulae, what a user sees."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hpstore.cli import app
from hpstore.durability import (
    Group,
    Sectors,
    in_a_year,
    longest_repair_hours,
    losses_per_year,
    nines,
    split,
    total_per_year,
    unreadable_per_year,
    window,
    years_to_loss,
)
from hpstore.errors import ConfigError
from tests.unit.event_simulation import simulate

TALK = Group(data=6, parity=3, afr=0.005, repair_hours=156)
ASKED = ("durability", "--data", "6", "--parity", "3", "--afr", "0.005")


def test_poisson_window_gives_the_figures_of_the_talk() -> None:
    """6+3, AFR 0.5 %, 156 h: P(3 failures) = 8.570e-11 and 12.02 nines a year."""
    found = window(TALK)
    assert f"{found.exactly_parity:.3e}" == "8.570e-11"
    assert f"{found.beyond_parity:.3e}" == "1.717e-14"
    assert round(nines(found.loss), 2) == 12.02
    assert round(found.per_year, 2) == 56.15


def test_continuous_models_agree_on_the_talk() -> None:
    """The same inputs without windows: 11.75 nines, by the closed form and by the Markov chain."""
    assert round(nines(in_a_year(losses_per_year(TALK))), 2) == 11.75
    assert round(nines(in_a_year(1 / years_to_loss(TALK))), 2) == 11.75


@pytest.mark.parametrize(
    ("data", "parity", "afr", "hours", "expected"),
    [
        (4, 2, 0.01, 1, 12.1),
        (8, 2, 0.01, 24, 8.6),
        (6, 3, 0.0044, 24, 14.4),
        (8, 3, 0.04, 168, 7.6),
        (17, 3, 0.01, 48, 10.5),
        (10, 4, 0.01, 0.5, 23.0),
        (16, 4, 0.02, 168, 10.5),
    ],
)
def test_nines_of_common_schemes(
    data: int, parity: int, afr: float, hours: float, expected: float
) -> None:
    """Against a table that was computed elsewhere, with a rate of -ln(1 - AFR), to one digit."""
    group = Group(data=data, parity=parity, afr=afr, repair_hours=hours)
    assert nines(in_a_year(1 / years_to_loss(group))) == pytest.approx(expected, abs=0.08)


def test_one_device_and_a_mirror_have_the_textbook_time_to_loss() -> None:
    """MTTDL of one device is 1 / rate; of a mirror (3 rate + repair) / (2 rate^2)."""
    alone = Group(data=1, parity=0, afr=0.25, repair_hours=10)
    assert years_to_loss(alone) == pytest.approx(4.0)
    mirror = Group(data=1, parity=1, afr=0.25, repair_hours=876)
    assert years_to_loss(mirror) == pytest.approx((3 * 0.25 + 10.0) / (2 * 0.25**2))


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed repair", "exponential repair"])
@pytest.mark.parametrize(
    "group",
    [
        Group(data=6, parity=3, afr=1.0, repair_hours=400),
        Group(data=4, parity=2, afr=0.5, repair_hours=300),
        Group(data=2, parity=1, afr=2.0, repair_hours=800),
    ],
    ids=["6+3", "4+2", "2+1"],
)
def test_event_simulation_agrees_with_the_closed_form(group: Group, fixed: bool) -> None:
    """At rates where losses are seen, whatever the repair times' distribution."""
    found = simulate(group, years=20, groups=3000, rng=np.random.default_rng(7), fixed=fixed)
    assert found.holds(losses_per_year(group))
    assert found.high - found.low < 0.2 * found.value


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed repair", "exponential repair"])
@pytest.mark.parametrize(
    "group", [TALK, Group(data=4, parity=2, afr=0.01, repair_hours=1)], ids=["talk", "4+2 in 1 h"]
)
def test_splitting_agrees_with_both_models_at_real_rates(group: Group, fixed: bool) -> None:
    """12 nines cannot be simulated directly; within 10 %, and within its own interval."""
    found = split(group, paths=40_000, rng=np.random.default_rng(7), fixed=fixed)
    assert found.holds(losses_per_year(group))
    assert found.value == pytest.approx(1 / years_to_loss(group), rel=0.1)
    assert found.high - found.low < 0.2 * found.value


def test_no_loss_seen_still_gives_an_upper_end() -> None:
    """The rule of three: nothing seen in so many years does not mean never."""
    found = simulate(TALK, years=10, groups=10, rng=np.random.default_rng(1))
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(3 / 100)


def test_intervals_of_simulations_do_not_reach_below_zero() -> None:
    """Few losses seen: the symmetric interval would. Some of these runs have so few."""
    group = Group(data=2, parity=1, afr=1.0, repair_hours=50)
    found = [
        simulate(group, years=1, groups=60, rng=np.random.default_rng(seed)) for seed in range(12)
    ]
    assert all(0 <= one.low <= one.value <= one.high for one in found)
    assert any(one.value > 0 and one.low == 0 for one in found)


def test_splitting_that_meets_no_loss_says_so() -> None:
    """Instead of "never, 95 times in 100"."""
    group = Group(data=1, parity=40, afr=0.01, repair_hours=1)
    with pytest.raises(ConfigError, match="none of 20 paths"):
        split(group, paths=20, rng=np.random.default_rng(1))


def test_a_window_with_more_failures_than_devices_loses_data() -> None:
    """Nine thousand failures expected: exp(-9000) is 0, the probability of a loss is 1."""
    found = window(Group(data=6, parity=3, afr=1000.0, repair_hours=8760))
    assert (found.beyond_parity, found.loss) == (1.0, 1.0)


@pytest.mark.parametrize("expected", [3.9, 4.1])
def test_both_ways_to_sum_a_poisson_tail_agree(expected: float) -> None:
    """Upwards below m + 1 failures, by the complement above; against a plain sum."""
    group = Group(data=6, parity=3, afr=1.0, repair_hours=expected / 9 * 8760)
    plain = sum(math.exp(-expected) * expected**n / math.factorial(n) for n in range(4, 60))
    assert window(group).beyond_parity == pytest.approx(plain, rel=1e-12)


def test_extreme_groups_have_figures() -> None:
    """A load of 1e9 to the 64th power is no float; 255 data units may meet a bad sector."""
    assert losses_per_year(Group(data=4, parity=64, afr=9e3, repair_hours=1e9)) < 1e-3
    widest = Group(data=255, parity=2, afr=0.01, repair_hours=10)
    assert (
        0
        < unreadable_per_year(widest, 10**12, 1e-15)
        < losses_per_year(Group(data=254, parity=1, afr=0.011, repair_hours=10))
    )


def test_groups_cost_the_logarithm_of_their_number() -> None:
    """A hundred groups have two nines less, ten thousand four."""
    rate = 1 / years_to_loss(TALK)
    alone = nines(in_a_year(rate))
    assert nines(in_a_year(rate, 100)) == pytest.approx(alone - 2, abs=1e-6)
    assert nines(in_a_year(rate, 10_000)) == pytest.approx(alone - 4, abs=1e-6)


def test_unreadable_sectors_count_once_no_parity_is_left() -> None:
    """Six reads of 8 TB meet a bad sector in 0.38 % of cases at 1e-17 a bit, in 32 % at 1e-15."""
    critical = losses_per_year(Group(data=7, parity=2, afr=0.005, repair_hours=156))
    for rate, share in ((1e-17, 0.0038), (1e-15, 0.319)):
        found = unreadable_per_year(TALK, 8 * 10**12, rate) / critical
        assert found == pytest.approx(share, rel=0.01)
    none = Group(data=3, parity=0, afr=0.01, repair_hours=1)
    assert unreadable_per_year(none, 10**12, 1e-15) == 0.0


def test_longest_repair_is_where_the_nines_are_just_reached() -> None:
    """A little less has them, a little more has not; a hopeless rate has no such time."""
    hours = longest_repair_hours(6, 3, 0.01, wanted=12.0, groups=1)
    for factor, enough in ((0.999, True), (1.001, False)):
        group = Group(data=6, parity=3, afr=0.01, repair_hours=hours * factor)
        assert (nines(in_a_year(1 / years_to_loss(group))) >= 12.0) is enough
    assert longest_repair_hours(4, 0, 0.01, wanted=12.0, groups=1) == 0.0
    assert longest_repair_hours(1, 8, 1e-6, wanted=1.0, groups=1) == math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": 0},
        {"parity": -1},
        {"afr": 0.0},
        {"afr": math.nan},
        {"repair_hours": 0.0},
        {"repair_hours": math.inf},
    ],
)
def test_a_group_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Group(**{"data": 4, "parity": 2, "afr": 0.01, "repair_hours": 1.0, **wrong})


# --- the command ----------------------------------------------------------------------------


def output(*words: str) -> str:
    done = CliRunner().invoke(app, [*words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


def test_command_prints_the_figures_and_what_they_leave_out() -> None:
    """Figures of the talk, the schemes that reach 12 nines, correlated failures, bad sectors."""
    text = output(*ASKED, "--rebuild-hours", "156")
    for figure in (
        "8.570e-11",
        "12.02",
        "11.75",
        "Left out: failures that come together",
        "Left out: sectors that cannot be read",
    ):
        assert figure in text
    assert "12 nines" in text


def test_command_takes_size_and_rate_for_the_rebuild() -> None:
    """8 TB at 200 MB/s are 11.1 hours; the schemes that reach 12 nines follow from them."""
    found = json.loads(
        output(
            "durability",
            "--data",
            "4",
            "--parity",
            "2",
            "--afr",
            "0.01",
            "--device-size",
            "8TB",
            "--rebuild-rate",
            "200MB",
            "--json",
        )
    )
    assert found["repair_hours"] == pytest.approx(11.11, abs=0.01)
    reach = {(s["data"], s["parity"]) for s in found["schemes"] if s["reaches"]}
    assert reach == {(6, 3), (8, 3), (17, 3), (10, 4), (16, 4)}


def test_command_takes_a_scheme_in_one_word() -> None:
    """--scheme 6+3 is --data 6 --parity 3."""
    words = ("durability", "--scheme", "6+3", "--afr", "0.005", "--rebuild-hours", "156", "--json")
    assert output(*words) == output(*ASKED, "--rebuild-hours", "156", "--json")


def test_command_simulates_and_adds_unreadable_sectors() -> None:
    """--simulate and --unreadable, as JSON; what is counted is not said to be left out."""
    found = json.loads(
        output(
            *ASKED,
            "--rebuild-hours",
            "156",
            "--device-size",
            "8TB",
            "--unreadable",
            "1e-15",
            "--simulate",
            "20000",
            "--seed",
            "3",
            "--json",
        )
    )
    assert found["poisson_window"]["nines"] == pytest.approx(12.016, abs=0.001)
    assert found["markov"]["nines"] == pytest.approx(11.75, abs=0.005)
    assert found["simulated"]["low"] < found["closed_form"]["losses_per_year"]
    assert found["simulated"]["high"] > found["closed_form"]["losses_per_year"]
    assert found["simulated"]["seed"] == 3
    assert found["unreadable_sectors"]["nines"] < 10
    assert len(found["left_out"]) == 1
    # case durability --unreadable: the schemes were compared without these sectors
    both = found["markov"]["losses_per_year"] + found["unreadable_sectors"]["losses_per_year"]
    ours = next(s for s in found["schemes"] if (s["data"], s["parity"]) == (6, 3))
    assert ours["nines"] == pytest.approx(nines(in_a_year(both)), abs=1e-6)
    assert ours["nines"] < 10


def test_a_scheme_must_be_whole_again_sooner_where_sectors_cannot_be_read() -> None:
    """The repair time asked for gives the nines, with all losses counted; one parity gives none."""
    sectors = Sectors(device_bytes=8 * 10**12, errors_per_bit=1e-15)
    hours = longest_repair_hours(6, 3, 0.005, wanted=9, groups=2, sectors=sectors)
    assert 0 < hours < longest_repair_hours(6, 3, 0.005, wanted=9, groups=2)
    found = Group(data=6, parity=3, afr=0.005, repair_hours=hours)
    assert nines(in_a_year(total_per_year(found, sectors), 2)) == pytest.approx(9, abs=1e-6)
    assert longest_repair_hours(6, 1, 0.005, wanted=9, groups=1, sectors=sectors) == 0


def test_command_has_no_figure_for_a_loss_that_never_comes() -> None:
    """Beyond what a float holds: null in JSON, "any time" in the table."""
    words = (
        "durability",
        "--data",
        "1",
        "--parity",
        "64",
        "--afr",
        "1e-6",
        "--rebuild-hours",
        "0.001",
    )
    found = json.loads(output(*words, "--json"), parse_constant=pytest.fail)
    assert found["markov"] == {
        "losses_per_year": 0.0,
        "probability": 0.0,
        "nines": None,
        "mean_years_to_loss": None,
    }
    assert "any time" in output(*words)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--rebuild-rate", "200MB"),
        ("--rebuild-hours", "1", "--rebuild-rate", "1MB"),
        ("--rebuild-hours", "0"),
        ("--rebuild-hours", "1", "--unreadable", "1e-15"),
    ],
)
def test_command_refuses_what_does_not_fit(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*ASKED, *words])
    assert isinstance(done.exception, ConfigError)
