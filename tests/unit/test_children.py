"""Child processes with a deadline: none is left behind, however waiting for it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hpstore.runtime.subprocesses import output_of

ENVIRONMENT = {"PATH": os.environ["PATH"]}
POPEN = subprocess.Popen


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Children that were started."""
    found: list[subprocess.Popen[bytes]] = []

    def remember(*words: object, **options: object) -> subprocess.Popen[bytes]:
        found.append(POPEN(*words, **options))  # type: ignore[call-overload]
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    yield found
    monkeypatch.undo()
    for child in found:
        child.kill()
        child.wait()


def sleeping() -> list[str]:
    return ["/bin/sleep", "60"]


def test_output_and_status_of_a_child_that_ends() -> None:
    """Both outputs, at most so many bytes."""
    command = ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"]
    assert output_of(command, 10.0, max_bytes=100, environment=ENVIRONMENT) == (3, "out\nerr\n")
    assert output_of(command, 10.0, max_bytes=4, environment=ENVIRONMENT) == (3, "out\n")


def test_a_child_that_takes_too_long_is_killed(begun: list[subprocess.Popen[bytes]]) -> None:
    """Told by None."""
    assert output_of(sleeping(), 0.05, max_bytes=10, environment=ENVIRONMENT) == (None, "")
    assert begun[0].poll() is not None


def test_an_interrupt_kills_the_child_and_goes_on(
    begun: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it is waited for."""
    wait = POPEN.wait

    def interrupted(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == 7.0:
            raise KeyboardInterrupt
        return wait(self, timeout)

    monkeypatch.setattr(POPEN, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output_of(sleeping(), 7.0, max_bytes=10, environment=ENVIRONMENT)
    assert begun[0].poll() is not None


def test_a_child_that_ended_just_now_is_no_error(
    begun: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the deadline and the kill it was waited for by somebody."""

    def gone(group: int, number: int) -> None:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "killpg", gone)
    command = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    code, _ = output_of(command, 0.05, max_bytes=10, environment=ENVIRONMENT)
    assert code is None
