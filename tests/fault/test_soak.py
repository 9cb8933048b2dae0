"""The soak: a short one on real devices, and that its judge finds what it is there to find."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any  # rows of journals

import pytest

from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.states import Decision, Role
from hpstore.testing.scratch import loops, mount_points, throttle_problem
from tests.fault.common import poll
from tests.fault.soak.crew import Life
from tests.fault.soak.judge import judge_evaluator, judge_evictions, judge_ingest, judge_trainer
from tests.fault.soak.load import SAMPLES, STEPS_AN_EPOCH, WORK_SECONDS, digest_of, new_state
from tests.fault.soak.rig import Soak
from tests.fault.soak.schedule import make_schedule
from tests.thorough import LONG

pytestmark = [pytest.mark.fault]
ROOT = Path(__file__).resolve().parents[2]
SEED, SECONDS = 3, 90.0
PATIENCE = 60.0
long = pytest.mark.skipif(not LONG, reason="takes three minutes: make test-fault")
Row = dict[str, Any]


# --- on real devices ------------------------------------------------------------------------


@long
@pytest.mark.root
@pytest.mark.timeout(900)
def test_a_short_soak_loses_nothing(
    loop_mounts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """90 seconds of faults; `make soak` runs longer ones. Goodput depends on the machine here."""
    if (problem := throttle_problem()) is not None:
        pytest.skip(problem)
    schedule = make_schedule(SEED, SECONDS)
    report = Soak(tmp_path, seed=SEED, seconds=SECONDS, schedule=schedule).run()
    with capsys.disabled():
        print(f"\n{report.text()}", end="")
    assert report.problems == []
    assert report.happened
    assert report.figures["trainer"]["batches_checked"] > 100
    assert report.figures["evaluator"]["looks"] > 0
    assert report.figures["ingest"]["acknowledged"] > 0
    assert report.goodput > 0.5


@long
@pytest.mark.root
@pytest.mark.timeout(200)
def test_a_soak_that_is_ended_leaves_nothing(loop_mounts: None, tmp_path: Path) -> None:
    """SIGTERM in the middle: no mount, no loop device, no process, no image is left."""
    command = [
        sys.executable,
        "-m",
        "tests.fault.soak",
        "--minutes",
        "2",
        "--directory",
        str(tmp_path),
        "--reports",
        str(tmp_path / "reports"),
    ]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        poll(PATIENCE, lambda: any(tmp_path.glob("hpfault-*/trainer.jsonl")))
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
    finally:
        process.kill()
    below = f"{tmp_path}/"
    poll(PATIENCE, lambda: not any(point.startswith(below) for point in mount_points()))
    poll(PATIENCE, lambda: not any(image.startswith(below) for image in loops().values()))
    assert {path.name for path in tmp_path.iterdir()} == {"output", "reports"}


# --- the schedule and the judge -------------------------------------------------------------


def test_a_schedule_is_its_seed() -> None:
    """The same seed gives the same faults, another one others."""
    assert make_schedule(1, 600) == make_schedule(1, 600)
    assert make_schedule(1, 600) != make_schedule(2, 600)
    assert all(event.at_seconds <= 600 for event in make_schedule(1, 600))


def steps(count: int, *, first: int = 1) -> list[Row]:
    """Steps of a trainer without fault, all of one life."""
    batch = SAMPLES // STEPS_AN_EPOCH
    return [
        {
            "event": "step",
            "at": float(step),
            "pid": 1,
            "step": step,
            "wrong": 0,
            "waited": 0.0,
            "worked": WORK_SECONDS,
            "saved": 0.0,
            "numbers": [((step - 1) * batch + n) % SAMPLES for n in range(batch)],
        }
        for step in range(first, first + count)
    ]


def test_the_judge_tells_lives_with_one_process_id_apart() -> None:
    """Ids come again in a long run; rows of the first life counted for the second, too."""
    rows = [
        {"event": "start", "at": 0.0, "pid": 1},
        *steps(10),
        {"event": "start", "at": 1000.0, "pid": 1},
        *({**row, "at": row["at"] + 1000.0} for row in steps(10, first=11)),
    ]
    lives = [Life(name="trainer", pid=1, began=at, ended=at + 20.0) for at in (0.0, 1000.0)]
    figures = judge_trainer(rows, lives).figures
    assert figures["alive_seconds"] == 40.0
    assert figures["work_seconds"] == pytest.approx(20 * WORK_SECONDS)


def test_the_judge_counts_no_life_after_the_kill() -> None:
    """A killed trainer that waits for a device that hangs ends when the device answers, and does
    not live until then: that took 4 % of the goodput of a soak."""
    rows = [{"event": "start", "at": 0.0, "pid": 1}, *steps(10)]
    life = Life(name="trainer", pid=1, began=0.0, ended=40.0, killed_at=10.0)
    figures = judge_trainer(rows, [life]).figures
    assert figures["alive_seconds"] == 10.0
    assert figures["seconds_to_restored"] == 10.0


def test_the_judge_accepts_a_trainer_that_resumes_where_it_saved() -> None:
    """Steps that come again are the same; its goodput is work in the time it lived."""
    rows = [
        {"event": "start", "at": 0.0, "pid": 1},
        *steps(STEPS_AN_EPOCH),
        {"event": "saved", "at": 190.0, "pid": 1, "step": 180},
        *steps(15, first=181),
    ]
    life = Life(name="trainer", pid=1, began=-5.0, ended=300.0, pauses=[(10.0, 20.0)])
    verdict = judge_trainer(rows, [life])
    assert verdict.problems == []
    work = (STEPS_AN_EPOCH + 15) * WORK_SECONDS
    assert verdict.figures["goodput"] == pytest.approx(work / 290.0)
    assert verdict.figures["goodput_from_process_start"] == pytest.approx(work / 295.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wrong": 1}, "wrong bytes"),
        ({"numbers": [0] * (SAMPLES // STEPS_AN_EPOCH)}, "every sample once"),
        ({"event": "restored", "digest": "x", "step": 7}, "180 had been acknowledged"),
        ({"event": "saving", "digest": "x", "step": 0}, "other bytes than before"),
    ],
)
def test_the_judge_finds_what_is_wrong_with_a_trainer(change: Row, says: str) -> None:
    """A flipped sample, an epoch that is not one, a step that is lost, a state that differs."""
    rows: list[Row] = [{"event": "saved", "at": 0.0, "pid": 1, "step": 180}, *steps(STEPS_AN_EPOCH)]
    rows[-1] = {**rows[-1], **change}
    assert any(says in text for text in judge_trainer(rows, []).problems)


def test_the_judge_finds_an_evaluator_that_goes_back() -> None:
    """Older than the look before, older than what was acknowledged, other bytes."""
    trainer = [
        {"event": "saving", "at": 1.0, "step": 15, "digest": "a"},
        {"event": "saved", "at": 2.0, "step": 15},
    ]
    new = digest_of(new_state())

    def look(step: int, digest: str, began: float) -> Row:
        return {"event": "look", "began": began, "step": step, "digest": digest}

    assert judge_evaluator([look(0, new, 1.5), look(15, "a", 3.0)], trainer).problems == []
    back = judge_evaluator([look(15, "a", 1.5), look(0, new, 1.6)], trainer).problems
    assert any("step 0 after step 15" in text for text in back)
    late = judge_evaluator([look(0, new, 3.0)], trainer).problems
    assert any("15 had been acknowledged" in text for text in late)
    torn = judge_evaluator([look(15, "b", 3.0)], trainer).problems
    assert any("wrong bytes" in text for text in torn)


def test_the_judge_finds_an_object_that_was_lost_or_returned() -> None:
    """What was acknowledged, or what was under way when the process was killed; nothing else."""
    rows = [
        {"event": "begin", "key": "a", "what": "1"},
        {"event": "done", "key": "a", "what": "1"},
        {"event": "begin", "key": "a", "what": "2"},
        {"event": "start"},
        {"event": "read", "key": "a", "what": "2"},
        {"event": "read", "key": "a", "what": "2"},
    ]
    verdict, expected = judge_ingest(rows)
    assert verdict.problems == []
    assert expected.allows("a", "2")
    assert not expected.allows("a", "1")  # what a read has seen stays
    for what in ("1", "absent", "3"):
        wrong, _ = judge_ingest([*rows, {"event": "read", "key": "a", "what": what}])
        assert wrong.problems


def test_the_judge_finds_an_eviction_before_its_grace() -> None:
    """Unless no parity was left; what an operator evicts has no grace."""

    def said(at: float, was: str, becomes: str, reason: str = "") -> Decision:
        return Decision(
            at_seconds=at,
            device="d",
            was=HealthState(was),
            becomes=HealthState(becomes),
            reason=reason,
            role=Role.AGENT,
        )

    gone = said(100.0, "online", "removed")
    early, late = said(103.0, "removed", "evicted"), said(108.5, "removed", "evicted")
    operated = said(103.0, "online", "evicted")
    needed = said(103.0, "removed", "evicted", "the pool has evicted it: no parity is left")
    assert judge_evictions([gone, late], 8.0).problems == []
    assert judge_evictions([operated], 8.0).problems == []
    assert judge_evictions([gone, needed], 8.0).problems == []
    assert judge_evictions([gone, early], 8.0).problems
