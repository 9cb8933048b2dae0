"""The processes of a soak but the agent.

python -m tests.fault.soak.worker NAME POOL JOURNAL SEED
"""

from __future__ import annotations

import itertools
import os
import random
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import hpstore
from hpstore.errors import HpstoreError, ObjectNotFound
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.kills.ledger import ABSENT, data_of, digest
from tests.fault.soak.journal import Journal, read_journal

SIZES = (1 * KIB, 60 * KIB, 700 * KIB, 3 * MIB)
SLOTS, ONCE_MOST = 8, 60
LOOKS_AN_OPEN = 8  # of the evaluator, before it opens the pool again
LOOK_SECONDS, INGEST_SECONDS, OPERATOR_SECONDS = 2.0, 0.05, 3.0


def train(toml: str, journal: Journal, _: int) -> None:
    """Load, check each batch, save now and then; go on where the last life had saved."""
    import numpy as np
    import torch

    from hpstore.checkpoint import Checkpointer
    from hpstore.loaders import DataLoader, Dataset
    from tests.fault.soak import load

    torch.set_num_threads(1)
    journal.write("start")
    pool = hpstore.open(toml)
    checkpointer = Checkpointer(pool, load.PREFIX, keep_last=load.KEEP_LAST, rng=False)
    loader = DataLoader(
        Dataset(pool, load.DATA_SET),
        batch_size=load.BATCH,
        shuffle=True,
        seed=1,
        cache=0,
        drop_last=True,
    )
    state = load.new_state()
    step = checkpointer.restore({**state, "loader": loader}) or 0
    journal.write("restored", step=step, digest=load.digest_of(state))
    pending = None
    while True:
        waited_since = time.monotonic()
        for batch in loader:
            began = time.monotonic()
            step += 1
            numbers = batch["number"].numpy()
            wrong = int((batch["bytes"].numpy() != load.samples_of(numbers)).any(axis=1).sum())
            load.train_on(state, numbers)
            rest = load.WORK_SECONDS - (time.monotonic() - began)
            time.sleep(max(0.0, rest))
            worked = time.monotonic()
            if pending is not None and pending.done():
                journal.write("saved", step=pending.result().step)
                pending = None
            if step % load.SAVE_EVERY == 0:
                journal.write("saving", step=step, digest=load.digest_of(state))
                if pending is not None:
                    journal.write("saved", step=pending.result().step)
                pending = checkpointer.save(step, {**state, "loader": loader})
            journal.write(
                "step",
                step=step,
                wrong=wrong,
                waited=began - waited_since,
                worked=worked - began,
                saved=time.monotonic() - worked,
                numbers=np.asarray(numbers).tolist(),
            )
            waited_since = time.monotonic()


def evaluate(toml: str, journal: Journal, _: int) -> None:
    """Restore the newest step into a process that only reads, and say what it was."""
    import torch

    from hpstore.checkpoint import Checkpointer, SaveOptions
    from tests.fault.soak import load

    torch.set_num_threads(1)
    journal.write("start")
    while True:
        with _noting(journal, "open"), hpstore.open(toml, read_only=True) as pool:
            checkpointer = Checkpointer(pool, load.PREFIX, rng=False, save=SaveOptions(warm=False))
            for _look in range(LOOKS_AN_OPEN):
                with _noting(journal, "restore"):
                    began, state = time.monotonic(), load.new_state()
                    step = checkpointer.restore(state, strict=False) or 0
                    journal.write("look", began=began, step=step, digest=load.digest_of(state))
                time.sleep(LOOK_SECONDS)


def ingest(toml: str, journal: Journal, seed: int) -> None:
    """Put, overwrite, delete and read back objects. It knows from its journal what is there."""
    there: dict[str, str] = {}
    with suppress(IndexError):
        there = known(read_journal(Path(sys.argv[3])))[0]
    journal.write("start")
    rng = random.Random(seed)
    with hpstore.open(toml) as pool:
        for turn in itertools.count():
            _ingest_once(pool, journal, rng, there, f"{seed}.{turn}")
            time.sleep(INGEST_SECONDS)


def _ingest_once(
    pool: Pool, journal: Journal, rng: random.Random, there: dict[str, str], tag: str
) -> None:
    """One operation. What was under way when it failed is left for later reads to find out."""
    kind, size = rng.random(), rng.choice(SIZES)
    once = sorted(key for key, what in there.items() if key.startswith("once/") and what != ABSENT)
    if kind < 0.3 and there:
        key = rng.choice(sorted(there))
        with _noting(journal, f"get {key}"):
            journal.write("read", key=key, began=time.monotonic(), what=digest(_get(pool, key)))
        return
    if kind < 0.45 or len(once) > ONCE_MOST:
        key = rng.choice(once) if once and kind < 0.4 else f"slot/{rng.randrange(SLOTS)}"
        journal.write("begin", key=key, what=ABSENT)
        with _noting(journal, f"delete {key}"):
            with suppress(ObjectNotFound):
                pool.delete(key)
            journal.write("done", key=key, what=ABSENT)
            there[key] = ABSENT
        return
    key = f"once/{tag}" if kind < 0.7 else f"slot/{rng.randrange(SLOTS)}"
    data = data_of(tag, size)
    journal.write("begin", key=key, what=digest(data))
    with _noting(journal, f"put {key}"):
        pool.put(key, data)
        journal.write("done", key=key, what=digest(data))
        there[key] = digest(data)


def _get(pool: Pool, key: str) -> bytes | None:
    try:
        return pool.get(key)
    except ObjectNotFound:
        return None


def known(rows: list[dict[str, object]]) -> tuple[dict[str, str], dict[str, set[str]]]:
    """What was acknowledged of each key, and what else it may hold since."""
    acknowledged: dict[str, str] = {}
    maybe: dict[str, set[str]] = {}
    for row in rows:
        key, what = str(row.get("key")), str(row.get("what"))
        if row["event"] == "begin":
            maybe.setdefault(key, set()).add(what)
        elif row["event"] == "done":
            acknowledged[key] = what
            maybe.pop(key, None)
    return acknowledged, maybe


def operate(toml: str, journal: Journal, seed: int) -> None:
    """Look at the pool now and then; obey orders, one a line on standard input."""
    journal.write("start")
    rng = random.Random(seed)
    while True:
        ready, _, _ = select.select([0], [], [], rng.random() * OPERATOR_SECONDS)
        words = _line().split() if ready else [rng.choice(("list", "status", "status"))]
        if not words:
            return  # the rig has ended
        began = time.monotonic()
        with _noting(journal, " ".join(words)):
            journal.write("did", order=" ".join(words), began=began, **_obey(toml, words))


def _line() -> str:
    """A line of standard input, not one byte more: `select` would not know of it."""
    found = bytearray()
    while (part := os.read(0, 1)) not in (b"", b"\n"):
        found += part
    return found.decode()


def _obey(toml: str, words: list[str]) -> Mapping[str, object]:
    """One order by the interface of Python."""
    read_only = words[0] in ("list", "status")
    with hpstore.open(toml, read_only=read_only) as pool:
        match words:
            case ["list"]:
                return {"objects": len(pool.list())}
            case ["status"]:
                found = pool.status()
                return {"degraded": found.degraded, "tolerated": found.losses_tolerated}
            case ["scrub"]:
                report = pool.scrub(resume=False)
                return {
                    "damaged": report.damaged_columns,
                    "whole": report.whole,
                    "clean": report.clean,
                    "unreadable": sorted(report.unreadable),
                }
            case ["rebuild"]:
                return {"whole": pool.rebuild().whole}
            case ["evict", device]:
                pool.evict(device)
            case ["drain", device]:
                return {"moved": pool.drain(device)}
            case ["readmit", device]:
                pool.readmit(device)
            case ["add", device]:
                pool.add_device(device)
            case _:
                raise ValueError(f"no such order: {words}")
    return {}


class _noting:  # noqa: N801 (reads as a statement)
    """Write down an error of hpstore and go on."""

    def __init__(self, journal: Journal, what: str) -> None:
        self._journal, self._what = journal, what

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, HpstoreError):
            return False
        self._journal.write(
            "refused", what=self._what, began=self._began, error=f"{type(error).__name__}: {error}"
        )
        return True


WORKERS: dict[str, Callable[[str, Journal, int], None]] = {
    "trainer": train,
    "evaluator": evaluate,
    "ingest": ingest,
    "operator": operate,
}

if __name__ == "__main__":
    WORKERS[sys.argv[1]](sys.argv[2], Journal(sys.argv[3]), int(sys.argv[4]))
