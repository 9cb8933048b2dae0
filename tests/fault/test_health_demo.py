"""examples/health_demo.py on real devices: each step is seen, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpstore.testing.scratch import loops, mount_points, sweep, throttle_problem
from tests.fault.common import poll
from tests.thorough import LONG

pytestmark = [
    pytest.mark.fault,
    pytest.mark.root,
    pytest.mark.timeout(290),
    pytest.mark.skipif(not LONG, reason="takes two minutes: make test-fault"),
]
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0


@contextmanager
def demonstration(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The short form, with `directory` for temporary files; its output is `output` there."""
    problem = throttle_problem()
    if problem is not None:
        pytest.skip(problem)
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "health_demo.py"), "--quick"],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(directory),
                "TORCHINDUCTOR_CACHE_DIR": str(directory.parent / "torch"),
            },  # torch makes one
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        sweep()


def left_behind(directory: Path) -> list[str]:
    """Mounts, loop devices and processes that have to do with a directory."""
    below = f"{directory}/"
    found = [point for point in mount_points() if point.startswith(below)]
    found += [loop for loop, image in loops().items() if image.startswith(below)]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if below in words:
            found.append(words.replace("\0", " "))
    return found


def test_each_step_is_seen_and_the_trainer_goes_on(loop_mounts: None, tmp_path: Path) -> None:
    """Slow, dead, healed, back; the demonstration itself ends with 1 where one is missed."""
    with demonstration(tmp_path) as process:
        code = process.wait(280)
        text = (tmp_path / "output").read_text()
        assert code == 0, text[-3000:]
    for number, name in enumerate(("healthy", "slow", "dead", "healed", "back"), 1):
        assert f"=== {number}. {name}" in text
    assert text.count("  trainer: at step ") == 5
    poll(PATIENCE, lambda: left_behind(tmp_path) == [])  # the kernel lets go a little later
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_demonstration_that_is_ended_leaves_nothing(
    loop_mounts: None, tmp_path: Path, how: signal.Signals
) -> None:
    """Told to, it cleans up itself; killed, its processes die with it and a sweep does the rest."""
    with demonstration(tmp_path) as process:
        poll(PATIENCE, lambda: "=== 1. healthy" in (tmp_path / "output").read_text())
        process.send_signal(how)
        process.wait(PATIENCE)
        if how is signal.SIGKILL:
            poll(PATIENCE, lambda: not any("train.py" in what for what in left_behind(tmp_path)))
            assert sweep()
        assert process.returncode != 0
        poll(PATIENCE, lambda: left_behind(tmp_path) == [])
        assert [path.name for path in tmp_path.iterdir()] == ["output"]
