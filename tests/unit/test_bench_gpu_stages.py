"""The staged plan of a GPU where there is none: skips; children that hang, die, babble; reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpstore.benchmarks.gpu import gpu_stages
from hpstore.benchmarks.gpu.gpu_figures import NotHere, WrongBytes
from hpstore.benchmarks.gpu.gpu_stages import (
    PLAN,
    Command,
    GpuStage,
    StageOutcome,
    Status,
    environment_for,
    outcome,
    run_stage,
)
from hpstore.benchmarks.harness.bench_report import describe
from hpstore.benchmarks.harness.measure import Options, unmet
from hpstore.benchmarks.harness.sessions import Found
from hpstore.benchmarks.loader import loader_bench
from hpstore.benchmarks.loader.loader_sessions import LoaderSpec
from hpstore.benchmarks.suite import BENCHMARKS
from hpstore.cli import main
from hpstore.errors import ConfigError

OURS = [stage for stage in PLAN if stage.run is not None]
# a stage of the plan that has not long to live
DECODING = replace(PLAN[4], plan_seconds=0.5)
FIGURE = {"stage": 4, "what": "equality", "sets": 21}
PASSED = {"stage": 4, "status": "pass", "reason": "", "seconds": 0.1}
FAILED = {**PASSED, "status": "fail", "reason": "WrongBytes: columns (1,) differ"}


def saying(*lines: Found, then: str = "true") -> Command:
    """A child that says lines of JSON, then does something."""
    said = "\n".join(json.dumps(line) for line in lines)
    return lambda stage, directory: ["/bin/sh", "-c", f"echo '{said}'; {then}"]


def test_the_plan_has_every_stage_once_and_names_who_runs_the_others() -> None:
    """Ten stages; those of other programs point at files that are there."""
    assert [stage.number for stage in PLAN] == list(range(10))
    assert [stage.number for stage in OURS] == [0, 2, 4, 5, 6, 7]
    assert all(stage.limit_seconds == 4 * stage.plan_seconds > 0 for stage in OURS)
    root = Path(__file__).resolve().parents[2]
    for stage in set(PLAN) - set(OURS):
        assert (root / stage.elsewhere.split()[-1]).is_file()


@pytest.mark.parametrize("stage", OURS, ids=lambda stage: stage.what)
def test_without_cuda_a_stage_says_skip_and_ends_with_0(
    stage: GpuStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line: its verdict."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_stages.main(["--stage", str(stage.number), "--directory", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") >= 0
    assert found == {"stage": stage.number, "status": "skip", "reason": "no CUDA"}


def test_a_stage_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one, to which no GPU is visible; its directory is removed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = run_stage(replace(DECODING, plan_seconds=30), tmp_path)
    assert (ended.status, ended.reason) == (Status.SKIP, "no CUDA")
    assert ended.seconds > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "reason", "code"),
    [
        (None, "pass", "cuFile compat", 0),
        (NotHere("no Triton"), "skip", "no Triton", 0),
        (WrongBytes("columns differ"), "fail", "WrongBytes: columns differ", 1),
        (OSError(22, "Invalid argument"), "fail", "OSError: [Errno 22] Invalid argument", 1),
    ],
)
def test_a_stage_passes_fails_or_says_why_it_cannot_run(
    error: Exception | None,
    status: str,
    reason: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever it raises. Its files are in a directory of its own, and go."""
    (tmp_path / "file").write_text("ours")

    def measure(directory: Path) -> str:
        assert directory.parent == tmp_path
        (directory / "file").write_text("noise")
        if error is not None:
            raise error
        return "cuFile compat"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_stages, "PLAN", (replace(DECODING, run=measure),))
    assert gpu_stages.main(["--stage", "4", "--directory", str(tmp_path)]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["reason"]) == (status, reason)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["ours"]


def test_a_stage_that_hangs_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    """What it said before is kept."""
    ended = run_stage(DECODING, tmp_path, command=saying(FIGURE, then="exec sleep 60"))
    assert ended.status is Status.FAIL
    assert ended.reason == "not done within 2 s: killed; the last figure was equality"
    assert ended.figures == (FIGURE,)
    assert 2 <= ended.seconds < 30


@pytest.mark.parametrize("said", [[FIGURE], [FIGURE, PASSED]])
def test_a_stage_that_dies_has_failed_by_the_signal(tmp_path: Path, said: list[Found]) -> None:
    """In its midst, and on the way out after it passed."""
    ended = run_stage(DECODING, tmp_path, command=saying(*said, then="kill -SEGV $$"))
    assert ended.status is Status.FAIL
    assert ended.reason.startswith("died by SIGSEGV; the last figure was equality")
    assert ended.figures == (FIGURE,)


NONSENSE = [
    "libcufile: {not json",
    "[1, 2]",
    '"pass"',
    '{"stage": 4}',
    '{"stage": 5, "status": "pass", "reason": ""}',
    '{"stage": 4, "status": "great", "reason": ""}',
    '{"stage": 4, "status": ["pass"], "reason": ""}',
    '{"stage": 4, "status": "pass"}',
]


@pytest.mark.parametrize("line", ["", *NONSENSE])
def test_what_cannot_be_read_is_no_verdict(line: str) -> None:
    """It is shown with the reason."""
    ended = outcome(DECODING, 0, line)
    assert (ended.status, ended.figures) == (Status.FAIL, ())
    wanted = "ended with code 0 and said no verdict; the last figure was nothing"
    assert ended.reason == (f"{wanted}: {line}" if line else wanted)


def test_verdicts_stand_between_what_libraries_print() -> None:
    """Blank lines and noise around them."""
    lines = [*NONSENSE, "", json.dumps(FIGURE), "", *NONSENSE, json.dumps(PASSED), "bye"]
    ended = outcome(DECODING, 0, "\n".join(lines))
    assert (ended.status, ended.reason, ended.figures) == (Status.PASS, "", (FIGURE,))


@pytest.mark.parametrize(
    ("code", "verdict", "status", "reason"),
    [
        (1, FAILED, Status.FAIL, "WrongBytes: columns (1,) differ"),
        (3, PASSED, Status.FAIL, "ended with code 3 after the verdict pass; the last figure was"),
        (-50, PASSED, Status.FAIL, "died by signal 50;"),
        (None, PASSED, Status.FAIL, "not done within 2 s: killed;"),
    ],
)
def test_the_exit_status_has_the_last_word(
    code: int | None, verdict: Found, status: Status, reason: str
) -> None:
    """No pass but with 0."""
    ended = outcome(DECODING, code, json.dumps(verdict))
    assert ended.status is status
    assert ended.reason.startswith(reason)


@pytest.mark.parametrize(
    ("gpu", "before", "after"),
    [(0, None, None), (0, "3,5", "3,5"), (1, None, "1"), (1, "3,5", "5"), (2, "", "2")],
)
def test_a_child_sees_the_gpu_that_was_asked_for(
    gpu: int, before: str | None, after: str | None
) -> None:
    """As its first one: what is measured knows no other."""
    around = {"A": "b"} if before is None else {"A": "b", "CUDA_VISIBLE_DEVICES": before}
    found = environment_for(gpu, around)
    assert found.get("CUDA_VISIBLE_DEVICES") == after
    assert found["A"] == "b"
    assert set(found["PYTHONPATH"].split(":")) <= set(sys.path)


# ---- the benchmark of the loader


class NoRunner:
    """Epochs that take no GPU."""

    def __init__(self, spec: LoaderSpec, *_: object) -> None:
        self.found, self._spec = loader_bench.LoaderFindings(), spec

    def write(self) -> None:
        self._spec.directory.mkdir()

    def repetition(self) -> None: ...

    def special(self) -> None: ...


STAGES = (
    replace(PLAN[2], plan_seconds=0.25),
    PLAN[3],
    DECODING,
    PLAN[5],
    PLAN[6],
)


def scripted(stage: GpuStage, directory: Path) -> Sequence[str]:
    """2 hangs, 4 dies, 5 passes, 6 cannot run."""
    passed = {"stage": 5, "status": "pass", "reason": ""}
    skipped = {"stage": 6, "status": "skip", "reason": "no CUDA"}
    return {
        2: saying(then="exec sleep 60"),
        4: saying(FIGURE, then="kill -SEGV $$"),
        5: saying({"stage": 5, "what": "xxh3", "rate": 1207.0}, passed),
        6: saying(skipped),
    }[stage.number](stage, directory)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A machine with two GPUs whose stages are children that hang, die, pass; who was asked."""
    asked: list[tuple[int, int]] = []

    def run(stage: GpuStage, directory: Path, gpu: int) -> StageOutcome:
        asked.append((stage.number, gpu))
        return run_stage(stage, directory, gpu, scripted)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(loader_bench, "PLAN", STAGES)
    monkeypatch.setattr(loader_bench, "run_stage", run)
    monkeypatch.setattr(loader_bench, "LoaderRunner", NoRunner)
    monkeypatch.setattr(loader_bench, "report", lambda *_: {"ratios": {}})
    return asked


def options(directory: Path, **more: object) -> Options:
    """The least there is."""
    least = Options(directory=directory, size_bytes=1 << 20, repeats=1, cases="warm")
    return replace(least, **more)  # type: ignore[arg-type]  # fields by name


def test_the_report_has_the_stages_and_each_that_fails_misses_its_bar(
    tmp_path: Path, a_gpu: list[tuple[int, int]]
) -> None:
    """First, with the GPU's number; the rest goes on. What is known is kept as it comes."""
    kept: list[int] = []

    def keep(so_far: Found) -> None:
        kept.append(len(so_far["stages"]))

    found = loader_bench.bench_loader(options(tmp_path, device="cuda:1", keep=keep))
    assert list(found) == ["stages", "A", "B"]
    assert a_gpu == [(stage.number, 1) for stage in STAGES]
    assert kept[:6] == [1, 2, 3, 4, 5, 5]
    rows = json.loads(json.dumps(found["stages"]))
    assert [(row["stage"], row["status"], row.get("met")) for row in rows.values()] == [
        (2, "fail", False),
        (3, "elsewhere", None),
        (4, "fail", False),
        (5, "pass", True),
        (6, "skip", None),
    ]
    assert rows["2 raw copies"]["reason"].startswith("not done within 1 s: killed")
    assert "tests/gpu/test_training.py" in rows["3 from files to the GPU"]["reason"]
    assert "SIGSEGV" in rows["4 decoding"]["reason"]
    assert rows["4 decoding"]["figures"] == [FIGURE]
    assert unmet(found) == ["stages/2 raw copies/met", "stages/4 decoding/met"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", [{"device": "cuda", "stages": False}, {"device": "cpu"}])
def test_no_stages_where_none_are_wanted_or_there_is_no_gpu(
    tmp_path: Path, a_gpu: list[tuple[int, int]], told: dict[str, object]
) -> None:
    """--no-stages, and the processor by default."""
    assert set(loader_bench.bench_loader(options(tmp_path, **told))) == {"A", "B"}
    assert a_gpu == []


def test_stages_are_refused_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, before anything is made."""
    with pytest.raises(ConfigError, match="--device cuda"):
        loader_bench.bench_loader(options(tmp_path / "new", stages=True))
    assert not (tmp_path / "new").exists()
    words = ["hpstore", "bench", "loader", "--stages", "--size", "small"]
    monkeypatch.setattr(sys, "argv", [*words, "--directory", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ConfigError.exit_code
    assert "--stages is about a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda:2", "cuda:", "cuda:-1", "cudax"])
def test_devices_that_are_not_here_are_refused_with_those_that_are(
    a_gpu: list[tuple[int, int]], device: str
) -> None:
    """Two GPUs."""
    for here in ("cpu", "cuda", "cuda:0", "cuda:1"):
        loader_bench.check_device(here)
    with pytest.raises(ConfigError, match="give cpu or cuda or cuda:0 or cuda:1"):
        loader_bench.check_device(device)


@pytest.mark.parametrize(
    ("word", "told"), [([], None), (["--stages"], True), (["--no-stages"], False)]
)
def test_the_command_shows_a_table_of_the_stages(
    word: list[str],
    told: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stage, what, status, reason; each figure has a line. The option reaches the benchmark."""

    def bench(options: Options) -> dict[str, object]:
        assert (options.stages, options.device) == (told, "cuda")
        ended = [
            StageOutcome(stage=PLAN[1], status=Status.ELSEWHERE, reason=PLAN[1].elsewhere),
            StageOutcome(
                stage=PLAN[4],
                status=Status.FAIL,
                reason="[Errno 22] Invalid: [/tmp]",
                figures=(FIGURE, {**FIGURE, "sets": 129}),
            ),
        ]
        return {"stages": {str(one.stage.number): one.as_dict() for one in ended}}

    monkeypatch.setitem(BENCHMARKS, "loader", bench)
    monkeypatch.setattr(sys, "argv", ["hpstore", "bench", "loader", "--device", "cuda", *word])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert any("elsewhere" in line and "tests/gpu/test_direct.py" in line for line in lines)
    (row,) = (line for line in lines if "Invalid" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "4",
        "decoding",
        "fail",
        "[Errno 22] Invalid: [/tmp]",
    ]
    assert [line.strip() for line in lines if "what equality" in line] == [
        "stage 4, what equality, sets 21",
        "stage 4, what equality, sets 129",
    ]


def test_reports_without_stages_are_described_as_before() -> None:
    """Records in a list have a line each; what else is in lists has not."""
    found = {"loader": {"A": {"rate": 1, "seconds": [1, 2], "none": []}}, "cpus": 2}
    assert describe(found) == "loader\n  A: rate 1, seconds [1, 2], none []\ncpus: 2\n"
