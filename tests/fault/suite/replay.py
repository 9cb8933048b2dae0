"""Crash replay at block level: every prefix of the writes of a commit is mounted and judged.

Three ext4 lie on images behind a FUSE server that records writes and flushes of all of them in one
order. A crash leaves a prefix of that log, less any writes that no flush of their image covers yet.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.config import Settings
from hpstore.errors import HpstoreError
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.testing.faultfs import FaultFilesystem, Logged, read_log
from hpstore.testing.scratch import attach, fails, run, scratch_directory, unmounted
from hpstore.units import MIB
from tests.fault.suite.table import Row

IMAGES, IMAGE_BYTES = 3, 32 * MIB
FLOATS, SEED = 100_000, 20261122
OLD, NEW = 1, 2  # steps


class Mounted(Closing):
    """Image files on loop devices, mounted side by side; always cleaned up."""

    def __init__(self, images: Sequence[Path], work: str, *, direct: bool = False) -> None:
        self.paths = [f"{work}/m{number}" for number in range(len(images))]
        self._loops: list[str] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for image, path in zip(images, self.paths, strict=True):
                os.makedirs(path, exist_ok=True)
                self._loops.append(attach(str(image), *["--direct-io=on"] * direct))
                run("mount", "-t", "ext4", self._loops[-1], path)
            undo.pop_all()

    def close(self) -> None:
        """Unmount and detach. Idempotent."""
        for path in self.paths:
            unmounted(path)
        while self._loops:
            fails("losetup", "-d", self._loops.pop())


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Values that tell their step."""
    return {"w": torch.full((FLOATS,), float(step)), "small": torch.full((3,), float(step))}


def checkpointer(pool: Pool) -> Checkpointer:
    return Checkpointer(
        pool, "run", rng=False, keep_last=1, save=SaveOptions(warm=False, prewrite=False)
    )


class Recording(Closing):
    """One commit, recorded: images as they were before it, and the log of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._work = scratch_directory(root)
        self.base = Path(self._work, "base")
        self.base.mkdir()
        self._settings = Settings(run_directory=str(root / "run"), recycle_bytes=0)
        live = Path(self._work, "live")
        live.mkdir()
        for number in range(IMAGES):
            with open(live / f"image{number}", "wb") as image:
                image.truncate(IMAGE_BYTES)
            run("mkfs.ext4", "-q", "-F", "-b", "4096", str(live / f"image{number}"))
        log = f"{self._work}/log"
        with FaultFilesystem(str(live), self._work, log=log) as recorded:
            images = [Path(recorded.path, f"image{n}") for n in range(IMAGES)]
            with Mounted(images, f"{self._work}/mounts", direct=True) as mounted:
                self.toml = root / "replay.toml"
                with hpstore.create(
                    mounted.paths, data=2, parity=1, config=self.toml, settings=self._settings
                ) as pool:
                    self._record(pool, live, log, mounted)
        self.log = list(read_log(log))

    def _record(self, pool: Pool, live: Path, log: str, mounted: Mounted) -> None:
        with checkpointer(pool) as ckpt:
            ckpt.save(OLD, state_of(OLD)).result()
            for path in mounted.paths:
                run("sync", "-f", path)
            for number in range(IMAGES):
                shutil.copy(live / f"image{number}", self.base / f"image{number}")
            self.began = sum(1 for _ in read_log(log))
            ckpt.save(NEW, state_of(NEW)).result()
            self.acknowledged = sum(1 for _ in read_log(log))

    def close(self) -> None:
        """Remove everything. Idempotent."""
        shutil.rmtree(self._work, ignore_errors=True)

    def after(self, records: Sequence[Logged]) -> tuple[int | None, str]:
        """The newest step that the next process finds on these blocks, and what is wrong."""
        copy = Path(self._work, "copy")
        shutil.copytree(self.base, copy)
        try:
            with ExitStack() as stack:
                files = {
                    name: stack.enter_context(open(copy / name, "r+b")) for name in os.listdir(copy)
                }
                for record in records:
                    if not record.flush:
                        files[record.name].seek(record.offset)
                        files[record.name].write(record.data)
            # the same places, so that the pool's settings hold
            with Mounted(sorted(copy.iterdir()), f"{self._work}/mounts"):
                return self._judge()
        finally:
            shutil.rmtree(copy)

    def _judge(self) -> tuple[int | None, str]:
        try:
            with hpstore.open(self.toml) as pool, checkpointer(pool) as ckpt:
                state = state_of(-1)
                step = ckpt.restore(state)
                if step is None:
                    return None, "no checkpoint is left"
                wanted = state_of(step)
                if any(not torch.equal(state[name], wanted[name]) for name in wanted):
                    return step, f"step {step} does not hold its values"
                return step, "" if all(ckpt.verify(s).ok for s in ckpt.steps()) else "damaged"
        except HpstoreError as error:
            return None, f"{type(error).__name__}: {error}"


def prefixes(recording: Recording, count: int) -> Iterator[tuple[str, int, list[Logged]]]:
    """(what, records of the commit, all records) for so many cuts, each with and without the
    writes that were in flight: some of those since the last flush of their image are missing."""
    rng = random.Random(SEED)
    commit = recording.log[recording.began :]
    cuts = sorted({round(i * len(commit) / max(1, count - 1)) for i in range(count)})
    for cut in cuts:
        kept = commit[:cut]
        yield f"cut {cut}", cut, kept
        flushed = {r.name: i for i, r in enumerate(kept) if r.flush}
        some = [
            r
            for i, r in enumerate(kept)
            if r.flush or i < flushed.get(r.name, -1) or rng.random() < 0.5
        ]
        if len(some) < len(kept):
            yield f"cut {cut}, {len(kept) - len(some)} in flight lost", cut, some


def replay(root: Path, count: int, row: Row) -> None:
    """Record a commit, cut it at `count` places; old or new everywhere, new once acknowledged."""
    old = new = 0
    with Recording(root) as recording:
        acknowledged = recording.acknowledged - recording.began
        for what, cut, records in prefixes(recording, count):
            step, wrong = recording.after(records)
            if wrong:
                row.failures.append(f"{what}: {wrong}")
            elif cut >= acknowledged and step != NEW:
                row.failures.append(f"{what}: acknowledged, but step {step} is found")
            old, new = old + (step == OLD), new + (step == NEW)
        commit = recording.log[recording.began :]
        flushes = sum(record.flush for record in commit)
    row.note = f"{len(commit) - flushes} writes, {flushes} flushes; {old} states old, {new} new"
    if not old or not new:
        row.failures.append("the cuts do not show both sides of the commit")
