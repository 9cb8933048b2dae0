"""Rungs 3 and 4 of detection: children that answer, hang, crash and lie; the verdict."""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpstore.loaders.gpu.direct import detect
from hpstore.loaders.gpu.direct.detect import (
    ChildReport,
    Detector,
    Route,
    parse_output,
    process_detector,
    run_child,
    verdict,
)
from hpstore.loaders.gpu.direct.machine_facts import MachineFacts, MountFacts
from hpstore.loaders.gpu.direct.probe_child import probe
from hpstore.testing.fake_direct import FakeCuFile

GOOD = MachineFacts(
    libcuda=True, bindings=True, nvfs_module=True, nvfs_nodes=True, p2pdma_kernel=True, udev=True
)
NVME = MountFacts(filesystem="xfs", options="rw", source="/dev/nvme0n1", transport="nvme")
COUNTERS = {"p2p": 0, "nvfs": 0, "posix": 0, "errors": 0}


def child(code: str, timeout_seconds: float = 60.0) -> ChildReport:
    """The report of a Python that runs `code`."""
    return run_child([sys.executable, "-c", code], timeout_seconds)


def done(counters: dict[str, int] | None, *, same: bool = True, code: int = 0) -> ChildReport:
    """A child that came to the end."""
    return ChildReport(step="done", facts={"same": same, "counters": counters}, code=code)


@pytest.mark.parametrize(
    ("report", "route", "words"),
    [
        (done({**COUNTERS, "p2p": 1}), Route.P2PDMA, "1 reads by p2p"),
        (done({**COUNTERS, "nvfs": 2, "posix": 1}), Route.NVFS, "2 reads by nvfs"),
        (done({**COUNTERS, "posix": 1}), Route.COMPAT, "host memory"),
        (done(COUNTERS), Route.COMPAT, "no read at all"),
        (done({**COUNTERS, "p2p": 1, "errors": 1}), Route.OFF, "1 failed reads"),
        (done({**COUNTERS, "p2p": 1}, same=False), Route.OFF, "not those of the file"),
        (done({**COUNTERS, "p2p": 1}, code=-11), Route.OFF, "signal 11 at step 'done'"),
        (done(None), Route.COMPAT, "does not count"),
        (ChildReport(step="open", code=None), Route.OFF, "within 7 s at step 'open'"),
        (ChildReport(step="read", code=-6, noise="boom"), Route.OFF, "signal 6 at step 'read'"),
        (ChildReport(step="failed", facts={"reason": "5008"}, code=1), Route.OFF, "5008"),
    ],
)
def test_the_verdict_follows_the_counters(report: ChildReport, route: Route, words: str) -> None:
    """Whatever a module or a flag says: by which way the bytes came, and how the child ended."""
    found, reason = verdict(report, strict=False, timeout_seconds=7)
    assert found is route
    assert words in reason


def test_a_library_without_counters_is_believed_when_it_could_not_bounce() -> None:
    """With bouncing forbidden, a read that went well was direct."""
    assert verdict(done(None), strict=True, timeout_seconds=7)[0] is Route.UNCOUNTED


def test_a_child_that_hangs_is_killed_with_its_children() -> None:
    """It says how far it came; nobody of its session is left."""
    report = child(
        "import json, os, signal, subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(json.dumps({'step': 'open', 'pids': [os.getpid(), other.pid]}), flush=True)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.pause()",
        timeout_seconds=3.0,
    )
    assert report.code is None
    assert report.step == "open"
    for pid in report.facts["pids"]:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([process], [], [], 30.0)[0]  # readable: it has ended
        os.close(process)


def test_a_child_that_crashes_takes_nobody_along() -> None:
    """Its signal and its last words."""
    report = child("import os, sys; print('oh no', file=sys.stderr, flush=True); os.abort()")
    assert report == ChildReport(step="start", code=-6, noise="oh no")


def test_a_child_that_closes_its_standard_input_closes_not_ours() -> None:
    """The trap of containers without device nodes: descriptor 0. Ours stays."""
    before = os.fstat(0)
    report = child('import os; os.close(0); print(\'{"step": "open"}\')')
    assert (report.step, report.code) == ("open", 0)
    assert os.fstat(0).st_ino == before.st_ino


def test_noise_between_the_lines_is_kept_apart() -> None:
    """Libraries print what they like; a line that is JSON of another kind is noise too."""
    text = 'W cufio\n{"step": "open"}\n[1]\n{"x": 1}\nnull\n{"step": "read", "n": 2}\n'
    report = parse_output(text, 0)
    assert (report.step, dict(report.facts)) == ("read", {"n": 2})
    assert report.noise == 'W cufio [1] {"x": 1} null'


@pytest.mark.parametrize(
    ("driver", "route"),
    [
        (FakeCuFile(), Route.P2PDMA),
        (FakeCuFile(route="posix"), Route.COMPAT),
        (FakeCuFile(route=""), Route.COMPAT),
    ],
)
def test_the_probe_reads_a_real_file_of_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], driver: FakeCuFile, route: Route
) -> None:
    """With the stand-in for cuFile: the steps in order, a verdict, no file left."""
    (tmp_path / "tmp").mkdir()
    probe(str(tmp_path), driver)
    lines = capsys.readouterr().out
    steps = [json.loads(line)["step"] for line in lines.splitlines()]
    assert steps == ["open", "write", "register", "read", "done"]
    assert verdict(parse_output(lines, 0), strict=False, timeout_seconds=7)[0] is route
    assert list((tmp_path / "tmp").iterdir()) == []
    assert driver.misuse == []


class Scripted:
    """What stands in for the child: reports by whether bouncing is allowed."""

    def __init__(self, loose: ChildReport, strict: ChildReport) -> None:
        self.reports = {"1": loose, "0": strict}
        self.asked: list[str] = []

    def __call__(self, command: list[str], timeout_seconds: float) -> ChildReport:
        self.asked.append(command[-1])
        return self.reports[command[-1]]


def detector(
    monkeypatch: pytest.MonkeyPatch,
    script: Scripted,
    machine: MachineFacts = GOOD,
    mount: MountFacts = NVME,
) -> Detector:
    """A detector on a machine of our making."""
    monkeypatch.setattr(detect, "machine_facts", lambda: machine)
    monkeypatch.setattr(detect, "mount_facts", lambda _: mount)
    monkeypatch.setattr(detect, "run_child", script)
    return Detector(timeout_seconds=7)


UNUSED = ChildReport(step="failed", facts={"reason": "was not to be asked"}, code=1)


def test_a_verdict_is_kept_by_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directories of one filesystem are probed once; another GPU is probed by itself."""
    script = Scripted(done({**COUNTERS, "nvfs": 1}), UNUSED)
    one = detector(monkeypatch, script)
    (tmp_path / "b").mkdir()
    first = one.detect(str(tmp_path))
    assert (first.route, first.rung, first.direct) == (Route.NVFS, 4, True)
    assert one.detect(str(tmp_path / "b")) is first
    assert script.asked == ["1"]
    one.detect(str(tmp_path), gpu=1)
    assert script.asked == ["1", "1"]


@pytest.mark.parametrize(
    ("machine", "mount", "rung"),
    [(replace(GOOD, libcuda=False), NVME, 1), (GOOD, replace(NVME, filesystem="tmpfs"), 2)],
)
def test_no_child_is_started_where_it_cannot_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: MachineFacts,
    mount: MountFacts,
    rung: int,
) -> None:
    """Rungs 1 and 2 end it, with the facts in the result, which is JSON."""
    script = Scripted(UNUSED, UNUSED)
    found = detector(monkeypatch, script, machine, mount).detect(str(tmp_path))
    assert (found.route, found.rung, found.direct, script.asked) == (Route.OFF, rung, False, [])
    assert json.loads(json.dumps(found.as_dict()))["machine"]["bindings"] is True


@pytest.mark.parametrize(
    ("strict", "route"),
    [
        (done(None), Route.UNCOUNTED),
        (ChildReport(step="failed", facts={"reason": "5008"}, code=1), Route.COMPAT),
    ],
)
def test_without_counters_it_asks_again_with_bouncing_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: ChildReport, route: Route
) -> None:
    """An older libcufile: the second child decides."""
    script = Scripted(done(None), strict)
    found = detector(monkeypatch, script).detect(str(tmp_path))
    assert (found.route, script.asked) == (route, ["1", "0"])


def test_a_hang_is_off_at_rung_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is not asked a second time."""
    script = Scripted(ChildReport(step="open", code=None), UNUSED)
    found = detector(monkeypatch, script).detect(str(tmp_path))
    assert (found.route, found.rung, script.asked) == (Route.OFF, 3, ["1"])


def test_the_process_keeps_one_detector() -> None:
    """Its verdicts are those of the whole process."""
    assert process_detector() is process_detector()
