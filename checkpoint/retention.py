"""Which steps stay, and what under a prefix belongs to nobody (PROTOCOL 18). Pure decisions."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hpstore.checkpoint.manifest import Listing
from hpstore.records import FORMAT, seal, unseal

ATTEMPT_SECONDS = 3600.0  # a save of another host is taken for dead when its note is this old


def steps_to_drop(
    steps: Iterable[int], *, committed: int, keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Steps that retention removes after `committed` was: only earlier ones, never itself.

    Later steps are those of a run that was rolled back; they are the user's to delete.
    """
    if keep_last is None:
        return []
    ordered = sorted(step for step in steps if step <= committed)
    kept = set(ordered[-max(1, keep_last) :])
    if keep_every:
        kept |= {step for step in ordered if step % keep_every == 0}
    return [step for step in ordered if step not in kept and step != committed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A save that is under way, and how to tell whether its process still lives."""

    step: int
    nonce: str
    host: str
    boot: str
    pid: int
    namespace: str  # of process ids: another container's pid says nothing here
    started_ms: int

    def encode(self) -> bytes:
        return seal({"format": FORMAT, **asdict(self)})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Attempt:
        body = unseal(data, where=where)
        return cls(
            step=int(str(body["step"])),
            nonce=str(body["nonce"]),
            host=str(body["host"]),
            boot=str(body["boot"]),
            pid=int(str(body["pid"])),
            namespace=str(body["namespace"]),
            started_ms=int(str(body["started_ms"])),
        )


def here() -> tuple[str, str, str]:
    """This host's name, its boot id and the namespace of this process' id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return os.uname().nodename, boot, namespace


def attempt_lives(attempt: Attempt, now_ms: int) -> bool:
    """Whether a save may still be under way: its process runs here, or its note is young."""
    if (attempt.host, attempt.boot, attempt.namespace) == here() and attempt.boot:
        return Path(f"/proc/{attempt.pid}").exists()
    return now_ms - attempt.started_ms < ATTEMPT_SECONDS * 1000


def orphans(
    listing: Listing, named: Collection[str], living: Collection[str]
) -> list[str]:  # fmt: skip
    """Segments that no manifest names and no living attempt (by nonce) may still commit."""
    return sorted(
        key
        for key, (_, nonce) in listing.segments.items()
        if key not in named and nonce not in living
    )


__all__ = ["Attempt", "attempt_lives", "here", "orphans", "steps_to_drop"]
