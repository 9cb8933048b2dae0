"""Pauses of Python's collector: of several threads, lifted in the middle, left behind in a fork."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from hpstore.runtime.collector_pause import collector_allowed, collector_paused


@pytest.fixture(autouse=True)
def _switched_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_the_last_of_two_threads_lets_it_run_again() -> None:
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            inside.set()
            leave.wait()

    other = threading.Thread(target=pause)
    with collector_paused():
        other.start()
        assert inside.wait(60)
    assert not gc.isenabled()  # of the other
    leave.set()
    other.join()
    assert gc.isenabled()


def test_a_pause_is_lifted_in_the_middle() -> None:
    with collector_paused():
        with collector_allowed():
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_lifting_does_not_switch_on_what_was_off() -> None:
    gc.disable()
    with collector_paused(), collector_allowed():
        assert not gc.isenabled()
    assert not gc.isenabled()


def _report(answer: Connection) -> None:
    enabled = [gc.isenabled()]
    with collector_paused():
        enabled.append(gc.isenabled())
    enabled.append(gc.isenabled())
    answer.send(enabled)


def test_a_child_forked_within_a_pause_collects() -> None:
    """The thread that would end the pause is not in it."""
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            inside.set()
            leave.wait()

    other = threading.Thread(target=pause)
    other.start()
    assert inside.wait(60)
    child = fork.Process(target=_report, args=(theirs,))
    child.start()
    leave.set()
    other.join()
    assert mine.poll(60)
    assert mine.recv() == [True, False, True]
    child.join()
