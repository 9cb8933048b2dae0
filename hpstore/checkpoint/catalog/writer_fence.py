"""Who is saving under a prefix: notes of saves under way, and the fence between checkpointers.

PROTOCOL 18: a save is noted, durably, before it writes; garbage collection honours the note as
long as it is alive. The fence is one object that names the session which saves here: the last one
to begin has it, an older one that is still running fails clearly instead of mixing in. What such
a one had begun to commit is no step: the fence also says what was committed before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hpstore.checkpoint.catalog.fence_record import FenceRecord, counter_of, fence_key, read_fence
from hpstore.checkpoint.catalog.segment_safety import existing_version
from hpstore.checkpoint.format.checkpoint_manifest import attempt_key, manifest_key, sort_out
from hpstore.checkpoint.format.step_ranges import StepRanges
from hpstore.errors import (
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    ThreadsExhausted,
    VersionConflict,
)
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
BEAT_SECONDS = 60.0
_TRIES = 8  # of processes that take the fence at once
ATTEMPT_SECONDS = 15 * 60.0  # a save of another host is dead when its note stood still so long


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAttempt:
    """A save that is under way, and how to tell whether its process still lives."""

    step: int
    nonce: str
    host: str
    boot: str
    pid: int
    namespace: str  # of process ids: another container's pid says nothing here
    started_ms: int
    ticks: int = 0  # when the process began: its id alone is used again, 1 in every container
    beat_ms: int = 0  # when the note was last renewed
    session: str = ""
    references: tuple[str, ...] = field(default=())  # segments of earlier steps it may refer to
    manifest: str = ""  # key of what it commits with
    replaces: bool = True  # that may take the place of another one

    def encode(self) -> bytes:
        return seal({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> SaveAttempt:
        with parsing(where):
            body = unseal(data, where=where)
            references = body.get("references", [])
            return cls(
                step=int(str(body["step"])),
                nonce=str(body["nonce"]),
                host=str(body["host"]),
                boot=str(body["boot"]),
                pid=int(str(body["pid"])),
                namespace=str(body["namespace"]),
                started_ms=int(str(body["started_ms"])),
                ticks=int(str(body.get("ticks", 0))),
                beat_ms=int(str(body.get("beat_ms", 0))),
                session=str(body.get("session", "")),
                references=tuple(map(str, references)) if isinstance(references, list) else (),
                manifest=str(body.get("manifest", "")),
                replaces=bool(body.get("replaces", True)),
            )


def here() -> tuple[str, str, str]:
    """This host's name, its boot id and the namespace of this process' id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return os.uname().nodename, boot, namespace


def began(pid: int) -> int | None:
    """When a process of this host began, in clock ticks since the boot (proc(5), stat, field 22).

    None when there is none; 0 when that cannot be told.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])  # a name before it may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    except (OSError, ValueError, IndexError):
        return 0


def attempt_lives(attempt: SaveAttempt, unchanged_seconds: float) -> bool:
    """Whether a save may still be under way: its process runs here, or its note has changed lately.

    `unchanged_seconds`: for how long the caller has seen the same note, as Watch counts it. What
    the note says of its own time is another machine's clock and decides nothing.
    """
    if (attempt.host, attempt.boot, attempt.namespace) == here() and attempt.boot:
        ticks = began(attempt.pid)
        return ticks is not None and (not ticks or not attempt.ticks or ticks == attempt.ticks)
    return unchanged_seconds < ATTEMPT_SECONDS


class NoteWatch:
    """For how long notes have stood still, by this process' own monotonic clock. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[str, float]] = {}  # key -> version of the note, since when
        self._lock = threading.Lock()  # guards _seen

    def unchanged_seconds(self, key: str, version: str) -> float:
        """Since this version of a note was first seen here; 0 at the first look."""
        now = self._clock()
        with self._lock:
            before = self._seen.get(key)
            if before is None or before[0] != version:
                self._seen[key] = (version, now)
                return 0.0
            return now - before[1]

    def only(self, keys: Collection[str]) -> None:
        """Forget notes that are gone."""
        with self._lock:
            self._seen = {key: seen for key, seen in self._seen.items() if key in keys}


class Heartbeat:
    """The note of one save, renewed while it runs. Durable when the constructor returns.

    `key`: where it is, by default where a Checkpointer under `prefix` has it. `manifest` and
    `replaces` as Attempt has them. A note that somebody has removed is not put again: the save is
    over.
    """

    def __init__(
        self,
        pool: Pool,
        prefix: str,
        step: int,
        nonce: str,
        session: str,
        references: Sequence[str],
        *,
        key: str | None = None,
        manifest: str,
        replaces: bool,
    ) -> None:
        self.nonce = nonce
        self._pool, self._key = pool, key or attempt_key(prefix, step, nonce)
        host, boot, namespace = here()
        now = time.time_ns() // 1_000_000
        self._note = SaveAttempt(
            step=step,
            nonce=nonce,
            host=host,
            boot=boot,
            pid=os.getpid(),
            namespace=namespace,
            started_ms=now,
            ticks=began(os.getpid()) or 0,
            beat_ms=now,
            session=session,
            references=tuple(references),
            manifest=manifest,
            replaces=replaces,
        )
        self._over = threading.Event()
        self._version = pool.put(self._key, self._note.encode()).version
        thread = threading.Thread(target=self._beat, name="hpstore-beat", daemon=True)
        try:
            self._thread = start_thread(thread)
        except ThreadsExhausted:  # else the note says that this save is under way
            with suppress(HpstoreError, OSError):
                pool.delete(self._key)
            raise

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            note = {**asdict(self._note), "beat_ms": time.time_ns() // 1_000_000}
            try:
                data = SaveAttempt(**note).encode()
                self._version = self._pool.put(self._key, data, if_version=self._version).version
            except VersionConflict:
                if self._is_gone():
                    return
            except (HpstoreError, OSError) as error:
                _log.warning(
                    "the note of the save of step %d was not renewed: %s", self._note.step, error
                )

    def _is_gone(self) -> bool:
        """Whether the note was removed; a renewal that failed and became visible is no removal."""
        try:
            self._version = self._pool.stat(self._key).version
        except ObjectNotFound:
            return True
        except (HpstoreError, OSError) as error:
            _log.warning("the note %s was not looked at: %s", self._key, error)
        return False

    def removed(self) -> bool:
        """Whether another process has taken this save for dead and removed its note. Raises what
        looking raises: then it is unclear."""
        return not self._pool.exists(self._key)

    def fade(self) -> None:
        """End it without waiting, and leave the note to age: for finalizers, and where it is not
        clear what became of the save."""
        self._over.set()

    def stop(self) -> None:
        """End it and remove the note; best effort, garbage collection finds a dead note."""
        self._over.set()
        self._thread.join()
        try:
            self._pool.delete(self._key)
        except (HpstoreError, OSError) as error:
            _log.info("the note %s is left to garbage collection: %s", self._key, error)


def take_fence(
    pool: Pool,
    prefix: str,
    session: str,
    *,
    if_version: str | None = None,
    end_replacements: Callable[[], object] = lambda: None,
) -> None:
    """Become the session that saves under `prefix`; an older one commits nothing after the return.

    What is there then is written down: a manifest that an older session puts later is no step,
    however long it was stopped (PROTOCOL 18). `end_replacements` ends saves that may put theirs in
    the place of a step. After a crash in the middle, the next call takes it again.

    `if_version`: raise VersionConflict when the fence is of another version than this.
    """
    key, mine = fence_key(prefix), _mine(session)
    for _ in range(_TRIES):
        version = existing_version(pool, key)
        if if_version not in (None, version):
            raise VersionConflict(f"the fence of {prefix!r} was taken by another process", key=key)
        try:
            if version is None:  # no other process can have begun anything
                pool.put(key, mine.encode(), if_absent=True)
                return
            before = _before(pool, key, version)
            mine = replace(mine, epoch=before.epoch, steps=before.steps)
            version = pool.put(key, mine.encode(), if_version=version).version
        except VersionConflict:
            continue
        end_replacements()
        manifests = manifests_of(pool, prefix)
        write_index(pool, prefix, mine, manifests, version=version, epoch=counter_of(version))
        return
    raise VersionConflict(f"other processes took the fence of {prefix!r} again and again", key=key)


def manifests_of(pool: Pool, prefix: str) -> dict[int, str]:
    """The versions of all manifests by step, also of those that are no steps. Raises TooFewDevices
    where some may be there unseen."""
    found = pool.admin.versions_under(f"{prefix}/step-")
    return {step: found[manifest_key(prefix, step)] for step in sort_out(prefix, found).steps}


def _mine(session: str) -> FenceRecord:
    host, boot, _ = here()
    since_ms = max(0, time.time_ns() // 1_000_000)  # for people
    return FenceRecord(session=session, host=host, boot=boot, pid=os.getpid(), since_ms=since_ms)


def _before(pool: Pool, key: str, version: str) -> FenceRecord:
    """What is replaced. One that is damaged hides nothing: every manifest is a step."""
    try:
        return FenceRecord.decode(pool.get(key, version=version), where=key)
    except ObjectNotFound as error:
        raise VersionConflict(f"{key} was replaced while it was read", key=key) from error
    except IntegrityError as error:
        _log.warning("the fence is replaced, all manifests are taken for steps: %s", error)
        return FenceRecord(session="")


def write_index(
    pool: Pool,
    prefix: str,
    record: FenceRecord,
    manifests: Mapping[int, str],
    *,
    version: str,
    epoch: int,
    without: Collection[int] = (),
) -> None:
    """Put the record of the fence, of which this is the `version`, with what is committed now.

    `manifests`: versions by step, listed after a version with the counter `epoch` was put under the
    claim of this run: so all below it that was acknowledged is listed. `without`: steps that are no
    steps from now on. Raises VersionConflict when another session has taken the fence: nothing was
    changed.
    """
    there = {step for step, found in manifests.items() if record.counts(step, found)}
    after = replace(record, epoch=epoch, steps=StepRanges.of(there.difference(without)))
    try:
        pool.put(fence_key(prefix), after.encode(), if_version=version)
    except VersionConflict as error:
        raise _lost(read_fence(pool, prefix), prefix) from error


def require_fence(pool: Pool, prefix: str, session: str) -> FenceRecord | None:
    """Raise VersionConflict when another session has begun to save here since. The record."""
    found = read_fence(pool, prefix)
    if found is not None and found.session != session:
        raise _lost(found, prefix)
    return found


def _lost(found: FenceRecord | None, prefix: str) -> VersionConflict:
    process = "a process" if found is None else f"process {found.pid} on {found.host}"
    return VersionConflict(
        f"another checkpointer ({process}) has begun to save under {prefix!r} since this one did; "
        "this one saves no more there. What both have committed is untouched. Stop one of them, or "
        "use another prefix.",
        key=fence_key(prefix),
    )
