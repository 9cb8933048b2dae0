"""Turns of processes that save and restore checkpoints, with the real Checkpointer.

Its background thread runs when the turn waits for the save. Notes are not renewed: a process that
is held up renews nothing, and others take no longer than the note is young. Each process is a host
of its own, so that only what was seen to stand still counts as dead (PROTOCOL 18).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

from hpstore.checkpoint.catalog import writer_fence
from hpstore.checkpoint.catalog.writer_fence import NoteWatch
from hpstore.checkpoint.checkpointer import Checkpointer
from hpstore.checkpoint.save import saver
from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.errors import HpstoreError
from hpstore.pool.pool import Pool
from hpstore.testing.simulation.actions import EXPECTED, ActionScene, Client, content
from hpstore.testing.simulation.machinery import STAGE
from hpstore.testing.simulation.run_history import PREFIX, Save
from hpstore.testing.simulation.schedule import Turn
from hpstore.testing.simulation.world import Process

FROZEN_BYTES = 6_000  # of a tensor that never changes: saves refer to an earlier step's
_HELD_UP = frozenset({"pause", "clock"})  # faults that take nothing away


class LaterThread:
    """In place of the thread of a save: it runs when its process waits for it."""

    def __init__(
        self, *, target: Callable[..., None], args: tuple[Any, ...] = (), **_: object
    ) -> None:
        self.target, self.args = target, args

    def start(self) -> None:
        """Leave it with the process."""
        STAGE.now.process().later.append(self)

    def join(self, timeout: float | None = None) -> None:
        """It has run."""


class NoThread(LaterThread):
    """In place of the thread that renews a note."""

    def start(self) -> None:
        """Nothing is renewed."""


class NoDraining:
    """In place of what finishes a save at the end of a process."""

    def __init__(self, *_: object) -> None:
        """Takes what a Draining takes."""

    def forget(self) -> None:
        """There is nothing to forget."""


def _here() -> tuple[str, str, str]:
    return f"host of {STAGE.now.process().name}", "boot", "namespace"


def _began(pid: int) -> int:
    return STAGE.now.process().born  # whoever asks about its own host is the one that lives there


def exchanged() -> list[tuple[Any, str, object]]:
    """What is exchanged in hpstore.checkpoint."""
    locks = {name: getattr(threading, name) for name in ("Event", "Lock", "RLock")}
    return [
        (saver, "threading", SimpleNamespace(Thread=LaterThread, **locks)),
        (writer_fence, "threading", SimpleNamespace(Thread=NoThread, **locks)),
        (saver, "Draining", NoDraining),
        (writer_fence, "here", _here),
        (writer_fence, "began", _began),
    ]


def open_checkpointer(
    pool: Pool, process: Process, keep_last: int | None, *, within: bool = False
) -> Checkpointer:
    """As a trainer opens it: it collects what dead saves have left. `within`: its saves are small
    enough to be all in their manifests; else they are saved as large ones are."""
    made = Checkpointer(
        pool,
        PREFIX,
        keep_last=keep_last,
        rng=False,
        group="alone",
        save=SaveOptions(memory=1 << 20, warm=False, prewrite=False),
    )
    made._catalog._watch = NoteWatch(process.clock.monotonic)
    if not within:
        made.saver._planner.within_bytes = -1
    return made


def checkpointer_of(client: Client) -> Checkpointer:
    """Of a process, for as long as its pool is open."""
    if client.checkpointer is None:
        keep_last = client.scene.run_history.keep_last
        client.checkpointer = open_checkpointer(
            client.open_pool, client.process, keep_last, within=client.scene.world.setup.within
        )
    made = client.checkpointer
    assert isinstance(made, Checkpointer)
    return made


def state_of(value: int, size: int) -> dict[str, torch.Tensor]:
    """A training state that holds a value."""
    frozen = content(7, FROZEN_BYTES)
    return {
        "weights": torch.frombuffer(bytearray(content(value, size)), dtype=torch.uint8),
        "frozen": torch.frombuffer(bytearray(frozen), dtype=torch.uint8),
    }


def save(client: Client, turn: Turn) -> None:
    """Save the next step, or the same as the last save, which may be under way."""
    scene, history = client.scene, client.scene.run_history
    scene.values += 1
    step = history.next_step
    if history.saves and turn.device % 4 == 3:
        step -= 1
    made = Save(step, scene.values, scene.event(), who=client.who)
    history.saves.append(made)
    process = client.process
    process.later.clear()
    try:
        maker = checkpointer_of(client)
        made.session = maker.saver.session
        handle = maker.save(step, state_of(made.value, scene.run_bytes))
        for thread in process.later:
            thread.args[2].add_done_callback(lambda f: _committed(scene, made, f))
            thread.target(*thread.args)
        handle.result()
    except EXPECTED as error:
        if made.acknowledged > scene.world.steps:
            made.refused = _refused(error)
        raise


def _refused(error: Exception) -> bool:
    text = str(error)
    if "may have been stored" in text:
        return False
    return "is not committed" in text or "saves no more there" in text or "was not staged" in text


def _committed(scene: ActionScene, made: Save, future: Future[Any]) -> None:
    if future.exception() is None:
        problem = scene.run_history.acknowledge(
            made, scene.event(), future.result().losses_tolerated
        )
        scene.world.note(f"{made}")
        if problem:
            scene.find("committed twice", problem)


def restore(client: Client, turn: Turn) -> None:
    """Restore the newest step into a state that holds something else."""
    scene = client.scene
    maker = checkpointer_of(client)
    began, sound = scene.event(), _sound(client, turn)
    newest = scene.run_history.committed(began)
    state = state_of(0, scene.run_bytes)
    try:
        step = maker.restore(state)
    except EXPECTED as error:
        if newest is not None and sound and _sound(client, turn):
            scene.find("not restored", f"{newest}: {type(error).__name__}: {error}")
        raise
    judge(scene, state, step, began, sound=sound and _sound(client, turn))
    scene.world.note(f"{client.process.name} restored step {step}")


def _sound(client: Client, turn: Turn) -> bool:
    """Whether no more is lost than the newest step tolerates."""
    scene, newest = client.scene, client.scene.run_history.committed()
    bad = scene.world.trouble | scene.away() | scene.lost | client.process.silent
    held = all(fault.kind in _HELD_UP for fault in turn.faults)
    tolerated = newest.tolerates if newest is not None else scene.config_parity
    return held and len(bad) <= tolerated and not client.blind


def judge(
    scene: ActionScene, state: dict[str, torch.Tensor], step: int | None, began: int, *, sound: bool
) -> None:
    """Hold what was restored against the history."""
    problem = ""
    if step is not None:
        data, frozen = (bytes(state[name].numpy()) for name in ("weights", "frozen"))
        value = int(data[:15]) if data[:15].isdigit() else -1
        if data != content(value, len(data)) or frozen != content(7, FROZEN_BYTES):
            problem = f"step {step}: wrong bytes: {data[:40]!r}"
        problem = problem or scene.run_history.bytes_problem(step, value)
    if not problem and sound:
        problem = scene.run_history.age_problem(step, began)
    if problem:
        scene.find("wrong restore", problem)


def collect(client: Client, turn: Turn) -> None:
    """Remove what dead saves have left."""
    checkpointer_of(client).steps.collect_garbage()


def check_at_end(scene: ActionScene, pool: Pool, when: str) -> None:
    """All steps that must be there are, and can be restored; the newest is what a restart gets."""
    history, began = scene.run_history, scene.event()
    if not history.saves:
        return
    maker = open_checkpointer(pool, scene.world.observer, None)
    state = state_of(0, scene.run_bytes)
    try:
        step = maker.restore(state)
        judge(scene, state, step, began, sound=True)
        there = maker.steps()
        for save_ in history.must_be_there():
            if save_.step not in there:
                scene.find("step is gone", f"{when}: {save_}; there are {there}")
        for save_ in history.saves:
            if save_.acknowledged <= began and save_.step in there:
                maker.restore(state, save_.step)
                judge(scene, state, save_.step, began, sound=False)
        known = {save_.step for save_ in history.saves if save_.acknowledged <= began}
        for step in sorted(set(there) - known):  # also of saves that are "not committed"
            with suppress(HpstoreError):
                maker.restore(state, step)
                judge(scene, state, step, began, sound=False)
    except HpstoreError as error:
        if history.committed() is not None:
            scene.find("not restored", f"{when}: {type(error).__name__}: {error}")


def check_nothing_left(scene: ActionScene, pool: Pool) -> None:
    """Once notes have stood still for long enough, nothing is left that no step names."""
    if not scene.run_history.saves:
        return
    maker = open_checkpointer(pool, scene.world.observer, None)
    maker.steps.collect_garbage()  # sees the notes
    scene.world.now += writer_fence.ATTEMPT_SECONDS + 1.0
    maker.steps.collect_garbage()
    listing = maker._catalog.listing()
    named = {s.key for step in listing.steps for s in maker._catalog.facts(step).objects}
    rest = sorted({*listing.attempts, *(listing.segments.keys() - named)})
    if rest:
        scene.find("garbage is left", f"{rest}")
