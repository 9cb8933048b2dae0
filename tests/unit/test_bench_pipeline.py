"""Figures of pipelines: how rounds of ranks become rows, and rows verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpstore.benchmarks.pipeline import pipeline_bars, pipeline_bench
from hpstore.cli.bench_command import run
from tests.thorough import LONG

# Any below: JSON
Row = dict[str, Any]


def idle_round(count: int, idle: float, forward: float, event: float = 5e-6) -> Row:
    ranks = [{"idle_share": idle, "hook_seconds_per_event": event * (1 + n)} for n in range(2)]
    return {
        "microbatches": count,
        "forward_seconds": forward,
        "idle_share": idle,
        "modelled": 0.2,
        "step_seconds": 0.9,
        "ranks": ranks,
    }


def cost(seconds: list[float], wait: list[float], tail: float = 0.0) -> Row:
    return {
        "seconds": seconds,
        "wait": wait,
        "tail": [tail] * len(seconds),
        "idle_bytes": 3_000_000,
        "busy_bytes": 1_000_000,
    }


def test_the_bubble_in_theory_is_that_of_the_formula() -> None:
    """(K - 1) / (M + K - 1)."""
    found = [pipeline_bars.bubble(2, count) for count in (4, 8, 16)]
    assert found == [pytest.approx(share) for share in (1 / 5, 1 / 9, 1 / 17)]
    assert pipeline_bars.bubble(4, 8) == pytest.approx(3 / 11)


def test_idle_is_the_median_of_rounds_and_its_distance_to_theory_decides() -> None:
    """Rounds of 0.22, 0.31 and 0.29 with M = 4: 9 points off. With short forwards, and 11 points
    off on either side, it is not met."""
    shares = (0.22, 0.31, 0.29)
    ranks = [
        [idle_round(count, share, forward) for share in shares for count in (4, 8)]
        for forward in (0.055, 0.06)
    ]
    rows = pipeline_bars.idle_rows(ranks, 2)
    assert rows["M=4"]["idle_share"]["median"] == 0.29
    assert rows["M=4"]["forward_ms"] == 55.0
    assert rows["M=4"]["us_an_event"]["median"] == 10.0
    assert pipeline_bars.idle_verdict(rows["M=4"])["met"]
    assert not pipeline_bars.idle_verdict(rows["M=8"])["met"]
    short = pipeline_bars.idle_verdict({**rows["M=4"], "forward_ms": 49.9})
    assert not short["met"]
    assert "too short" in short["why"]
    low = pipeline_bars.idle_rows([[idle_round(4, 0.09, 0.06)]], 2)["M=4"]
    assert pipeline_bars.idle_verdict(low)["median"] == pytest.approx(0.11)
    assert not pipeline_bars.idle_verdict(low)["met"]


def test_hooks_in_a_running_schedule_have_the_bar_too() -> None:
    """10 microseconds an event in the rounds of all ranks; with 25 it is not met."""
    rows = pipeline_bars.idle_rows([[idle_round(4, 0.2, 0.06)]], 2)
    plain = {
        way: {"overhead": {"values": [0.0], "median": 0.0}, "data_wait": {"values": [0.0]}}
        for way in ("free", "torch.save")
    }
    found = pipeline_bars.bars(rows, plain, [1.0])
    assert found["hook_us_in_schedule_M=4"]["median"] == 10.0
    assert found["hook_us_in_schedule_M=4"]["met"]
    rows["M=4"]["us_an_event"]["values"] = [25.0]
    assert not pipeline_bars.bars(rows, plain, [1.0])["hook_us_in_schedule_M=4"]["met"]


def test_a_checkpoint_costs_what_its_steps_take_beyond_those_of_the_same_round() -> None:
    """The slowest rank counts, in each round; torch.save stands beside it."""
    ranks = [
        {
            "none": cost([1.0, 2.0, 1.0], [0.0] * 3),
            "free": cost([1.01, 2.0, 1.02], [0.0] * 3),
            "torch.save": cost([1.5, 3.0, 1.5], [0.0] * 3),
        },
        {
            "none": cost([0.9, 1.9, 1.0], [0.0] * 3),
            "free": cost([1.0, 2.04, 1.05], [0.01, 0.03, 0.01], tail=0.2),
            "torch.save": cost([1.5, 3.0, 1.5], [0.0] * 3),
        },
    ]
    rows = pipeline_bars.cost_rows(ranks)
    assert rows["free"]["overhead"]["values"] == pytest.approx([0.01, 0.02, 0.05])
    assert rows["free"]["data_wait"]["median"] == 0.01
    assert rows["free"]["still_written_ms"] == 200.0
    assert (rows["free"]["idle_mb"], rows["free"]["busy_mb"]) == (6, 2)
    found = pipeline_bars.bars({}, rows, [4.0, 25.0, 5.0])
    assert found["checkpoint_every_5_steps"]["met"]
    assert found["checkpoint_every_5_steps"]["torch_save"] == 0.5
    assert found["data_wait"]["met"]
    assert found["hook_us_an_event"] == {
        "median": 5.0,
        "lowest": 4.0,
        "highest": 25.0,
        "bar": 20.0,
        "met": True,
    }
    lines = pipeline_bars.told(found)
    assert lines[0] == (
        "met      checkpoint_every_5_steps: 0.02 (0.01 to 0.05), bar 0.03, torch_save 0.5"
    )
    rows["free"]["overhead"]["values"] = [0.04, 0.05, 0.01]
    assert pipeline_bars.told(pipeline_bars.bars({}, rows, [1.0]))[0].startswith("NOT MET")


def test_rounds_that_would_not_hold_equally_many_saves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rounds would differ"):
        pipeline_bench.cost_table(tmp_path, steps=7, every=5)


def test_what_hooks_add_to_a_call_is_measured() -> None:
    """Something, and far from a millisecond on any machine."""
    assert all(0 < value < 1000 for value in pipeline_bench.hook_us(1))


@pytest.mark.skipif(not LONG, reason="half a minute: HPSTORE_LONG_TESTS=1")
def test_all_figures_can_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Short: real ranks, every way of saving, all bars, machine and load."""
    run(["pipeline"], json_file="-", quick=True, directory=tmp_path)
    said = capsys.readouterr()
    found = json.loads(said.out)["pipeline"]
    assert list(found["idle"]) == ["M=4", "M=8", "M=16"]
    assert list(found["checkpoints"]) == ["none", "free", "bubbles", "inline", "torch.save"]
    assert found["checkpoints"]["free"]["idle_mb"] + found["checkpoints"]["free"]["busy_mb"] > 0
    assert len(found["bars"]) == 6
    assert len(found["load"]) == 3
    assert said.err.count(", bar ") == 6
