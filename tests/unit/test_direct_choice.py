"""The choice between direct and pinned reads: from what was measured, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.gpu.direct.path_choice import ChoiceConfig, PathChoice, Way

CONFIG = ChoiceConfig(trial_batches=4, again_batches=20, window=4, margin=0.1, failures=3)
Rate = Callable[[int], float]


def run(choice: PathChoice, rates: dict[Way, Rate], batches: int, device: str = "a") -> list[Way]:
    """Batches one after the other; `rates` give GB/s at a batch's number."""
    ways = []
    for number in range(batches):
        way = choice.choose(device)
        choice.record(device, way, 10**9, 1 / rates[way](number))
        ways.append(way)
    return ways


def steady(direct: float, pinned: float) -> dict[Way, Rate]:
    """The same rates all the time."""
    return {Way.DIRECT: lambda _: direct, Way.PINNED: lambda _: pinned}


@pytest.mark.parametrize(("direct", "pinned", "better"), [(8, 5, Way.DIRECT), (3, 5, Way.PINNED)])
def test_both_are_tried_and_the_faster_one_is_used(
    direct: float, pinned: float, better: Way
) -> None:
    """Four batches each, in turns; then the better one."""
    choice = PathChoice(CONFIG)
    ways = run(choice, steady(direct, pinned), 28)
    assert Counter(ways[:8]) == {Way.DIRECT: 4, Way.PINNED: 4}
    assert set(ways[8:]) == {better}
    (figures,) = choice.figures()
    assert figures.chosen is better
    assert figures.direct_bytes_per_second == pytest.approx(direct * 1e9)
    assert figures.pinned_bytes_per_second == pytest.approx(pinned * 1e9)


def test_the_first_batch_of_a_way_does_not_count() -> None:
    """It pays for opening files: a direct way that is slow once is chosen all the same."""
    choice = PathChoice(ChoiceConfig(trial_batches=2))
    rates: dict[Way, Rate] = {Way.DIRECT: lambda n: 0.1 if n < 1 else 8, Way.PINNED: lambda _: 5}
    assert run(choice, rates, 10)[-1] is Way.DIRECT


def test_the_other_way_is_looked_at_rarely() -> None:
    """One batch in 21 for as long as it does not win."""
    choice = PathChoice(CONFIG)
    ways = run(choice, steady(3, 5), 8 + 21 * 10)
    assert Counter(ways[8:]) == {Way.PINNED: 200, Way.DIRECT: 10}


def test_a_way_that_became_faster_is_changed_to() -> None:
    """Within one look; the figures say that it changed."""
    choice = PathChoice(CONFIG)
    rates: dict[Way, Rate] = {Way.DIRECT: lambda n: 9 if n > 50 else 3, Way.PINNED: lambda _: 5}
    ways = run(choice, rates, 50 + 22)
    assert ways[50] is Way.PINNED
    assert ways[-1] is Way.DIRECT
    (figures,) = choice.figures()
    assert (figures.chosen, figures.changes) == (Way.DIRECT, 1)
    assert figures.direct_bytes_per_second == pytest.approx(9e9)


def test_within_the_margin_nothing_changes() -> None:
    """Five percent faster is not ten."""
    choice = PathChoice(CONFIG)
    rates: dict[Way, Rate] = {Way.DIRECT: lambda n: 5.25 if n > 9 else 3, Way.PINNED: lambda _: 5}
    run(choice, rates, 300)
    assert choice.figures()[0].changes == 0


def test_failures_in_a_row_end_the_direct_way() -> None:
    """Three end it for good, with the reason in the figures; a good one in between counts anew."""
    choice = PathChoice(CONFIG)
    run(choice, steady(8, 5), 8)
    for _ in range(2):
        assert not choice.fail("a", "no such thing")
    choice.record("a", Way.DIRECT, 1, 1.0)
    for _ in range(2):
        assert not choice.fail("a", "no such thing")
    assert choice.choose("a") is Way.DIRECT
    assert choice.fail("a", "IO_NOT_SUPPORTED")
    assert set(run(choice, steady(8, 5), 100)) == {Way.PINNED}
    (figures,) = choice.figures()
    assert (figures.chosen, figures.changes, figures.direct_failures) == (Way.PINNED, 1, 5)
    assert "IO_NOT_SUPPORTED" in figures.reason


def test_a_refused_device_is_never_read_directly_and_others_are() -> None:
    """By detection's verdict; the reason is kept."""
    choice = PathChoice(CONFIG)
    choice.refuse("a", "compat: cuFile read through host memory")
    assert set(run(choice, steady(8, 5), 60)) == {Way.PINNED}
    assert Way.DIRECT in run(choice, steady(8, 5), 4, "b")
    by_name = {figures.device: figures for figures in choice.figures()}
    assert by_name["a"].reason.startswith("compat")
    assert by_name["b"].chosen is None


@given(
    st.lists(
        st.tuples(st.floats(0.1, 100), st.floats(0.1, 100), st.booleans()), min_size=1, max_size=200
    )
)
def test_batches_side_by_side_never_confuse_it(batches: list[tuple[float, float, bool]]) -> None:
    """Any rates, any failures, records that come late: it answers, and its figures are sums."""
    choice, late = PathChoice(CONFIG), []
    for direct, pinned, fails in batches:
        way = choice.choose("a")
        if way is Way.DIRECT and fails:
            choice.fail("a", "injected")
            way = Way.PINNED
        late.append((way, direct if way is Way.DIRECT else pinned))
        if len(late) > 3:
            done = late.pop(0)
            choice.record("a", done[0], 10**9, 1 / done[1])
    (figures,) = choice.figures()
    assert figures.direct_batches + figures.pinned_batches == max(0, len(batches) - 3)


@pytest.mark.parametrize("wrong", [{"trial_batches": 1}, {"window": 0}, {"margin": 1.0}])
def test_senseless_settings_are_refused(wrong: dict[str, int]) -> None:
    """One measured batch is not enough, nor is none."""
    with pytest.raises(ConfigError):
        ChoiceConfig(**wrong)


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_what_is_no_rate_is_refused(nbytes: int, seconds: float) -> None:
    """A programmer's mistake, not a measurement."""
    with pytest.raises(ValueError, match="no rate"):
        PathChoice().record("a", Way.DIRECT, nbytes, seconds)
