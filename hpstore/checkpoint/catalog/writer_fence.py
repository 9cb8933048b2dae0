"""Who is saving under a prefix: notes of saves under way, and the fence between checkpointers.

PROTOCOL 18: a save is noted, durably, before it writes; garbage collection honours the note as
long as it is alive. The fence is one object that names the session which saves here: the last one
to begin has it, an older one that is still running fails clearly instead of mixing in.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpstore.checkpoint.format.checkpoint_manifest import attempt_key
from hpstore.errors import HpstoreError, ObjectNotFound, ThreadsExhausted, VersionConflict
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
BEAT_SECONDS = 60.0
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


def fence_key(prefix: str) -> str:
    """Key of the object that says which session saves here."""
    return f"{prefix}/writer"


def take_fence(pool: Pool, prefix: str, session: str, *, if_version: str | None = None) -> None:
    """Become the session that saves under `prefix`; an older one fails at its next commit.

    `if_version`: raise VersionConflict when the fence is of another version than this.
    """
    host, boot, _ = here()
    body = {
        "format": FORMAT,
        "session": session,
        "host": host,
        "boot": boot,
        "pid": os.getpid(),
        "since_ms": time.time_ns() // 1_000_000,
    }
    pool.put(fence_key(prefix), seal(dict(body)), if_version=if_version)


def take_fence_of(pool: Pool, prefix: str, boot: str, pid: int) -> None:
    """Take the fence from a process of this boot, for a session that saves nothing; not from
    another one, which may have taken it by then."""
    key = fence_key(prefix)
    try:
        version = pool.stat(key).version
        body = unseal(pool.get(key), where=key)
        if (body.get("boot"), body.get("pid")) == (boot, pid):
            take_fence(pool, prefix, f"restore-{secrets.token_hex(8)}", if_version=version)
    except (ObjectNotFound, VersionConflict):
        return


def fence_session(pool: Pool, prefix: str) -> str | None:
    """The session that saves under `prefix` now; None when that is unclear or there is none."""
    key = fence_key(prefix)
    try:
        return str(unseal(pool.get(key), where=key).get("session"))
    except (HpstoreError, OSError):
        return None


def require_fence(pool: Pool, prefix: str, session: str) -> None:
    """Raise VersionConflict when another session has begun to save here since."""
    key = fence_key(prefix)
    try:
        body = unseal(pool.get(key), where=key)
    except ObjectNotFound:
        return
    if body.get("session") != session:
        raise VersionConflict(
            f"another checkpointer (process {body.get('pid')} on {body.get('host')}) has begun to "
            f"save under {prefix!r} since this one did; this one saves no more there. What both "
            "have committed is untouched. Stop one of them, or use another prefix.",
            key=key,
        )
