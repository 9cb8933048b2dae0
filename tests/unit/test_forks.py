"""What forked children begin with."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from hpstore.runtime import forks
from hpstore.runtime.forks import call_in_children


class Counted:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self) -> None:
        self.calls += 1


def test_a_child_calls_what_lives_and_keeps_nothing() -> None:
    """In the child alone; an object that nothing else keeps goes, and forks go on without it."""
    kept, dropped = Counted(), Counted()
    call_in_children(kept.call)
    call_in_children(dropped.call)
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    child = os.fork()
    if not child:
        os._exit(kept.calls)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert kept.calls == 0


def test_many_that_come_and_go_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent makes links to a dead host every few seconds, for months."""
    monkeypatch.setattr(os, "register_at_fork", None)  # Python never forgets these
    gc.collect()
    before = len(forks._methods)
    for _ in range(100):
        call_in_children(Counted().call)
    gc.collect()
    assert len(forks._methods) == before


def test_what_outlives_this_module_ends_the_process_in_silence(tmp_path: Path) -> None:
    """Python's own weak reference to a method prints an error for an object that goes last."""
    (tmp_path / "kept.py").write_text(
        "from hpstore.runtime.forks import call_in_children\n"
        "class Counted:\n"
        "    def call(self): pass\n"
        "one = Counted()\n"
        "call_in_children(one.call)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", "import kept"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stderr == b""


def test_one_that_fails_keeps_no_other_from_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing:
        def call(self) -> None:
            raise ValueError("on purpose")

    failing, later = Failing(), Counted()
    call_in_children(failing.call)
    call_in_children(later.call)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    child = os.fork()
    if not child:
        os._exit(later.calls)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
