"""What forked children begin with."""

from __future__ import annotations

import gc
import os
import weakref

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
