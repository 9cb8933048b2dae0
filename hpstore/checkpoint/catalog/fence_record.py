"""The record that says which session saves under a prefix, and which manifests are steps.

PROTOCOL 18. It is the fence and the index of a run. A manifest is a step if it was put after the
fence was taken, or if the record names its step: whoever takes the fence writes down which steps
there are. The counters of versions show what was put after, as the fence and all manifests of a run
are put under one claim. So a commit stays one put, and what a session puts that has lost the fence
is no step, however long it was stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpstore.checkpoint.format.step_ranges import StepRanges
from hpstore.errors import HpstoreError, IntegrityError, ObjectNotFound, TooManyErasures
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing, whole
from hpstore.objects.version_listing import parse_token
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)


def fence_key(prefix: str) -> str:
    """Key of the object that says which session saves here."""
    return f"{prefix}/writer"


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRecord:
    """Which session saves here, and what was committed before it began.

    `epoch`: the counter that the versions of what it commits are above; None before the first save
    here before it, and in records of older versions of hpstore: then every manifest is a step.
    `steps`: those that are not above it.
    """

    session: str
    host: str = ""
    boot: str = ""
    pid: int = 0
    since_ms: int = 0
    epoch: int | None = None
    steps: StepRanges = field(default_factory=StepRanges)

    def counts(self, step: int, version: str) -> bool:
        """Whether a manifest of this version is a step."""
        return self.epoch is None or counter_of(version) > self.epoch or step in self.steps

    def committed(self, manifests: Mapping[int, str]) -> dict[int, str]:
        """Those of these manifests, versions by step, that are steps."""
        return {step: found for step, found in manifests.items() if self.counts(step, found)}

    def encode(self) -> bytes:
        """A sealed record; bytes in docs/format.md."""
        body: dict[str, Any] = {"format": FORMAT, **asdict(self), "steps": self.steps.text()}
        if self.epoch is None:
            del body["epoch"], body["steps"]
        return seal(body)

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> FenceRecord:
        """Inverse of encode, also of what older versions have put. Raises IntegrityError."""
        with parsing(where):
            body: Any = unseal(data, where=where)  # Any: JSON
            epoch = body.get("epoch")
            return cls(
                session=str(body.get("session")),
                host=str(body.get("host")),
                boot=str(body.get("boot")),
                pid=whole(body.get("pid", 0), "pid"),
                since_ms=whole(body.get("since_ms", 0), "since_ms"),
                epoch=None if epoch is None else whole(epoch, "epoch"),
                steps=StepRanges.parse("" if epoch is None else str(body["steps"])),
            )


def counter_of(version: str) -> int:
    """The counter of a version of an object."""
    return parse_token(version)[0]


def read_fence(pool: Pool, prefix: str) -> FenceRecord | None:
    """The record as it is; None before the first save here. Raises what reading raises;
    IntegrityError also where all copies are damaged, and no device that is away may have one."""
    key = fence_key(prefix)
    try:
        return FenceRecord.decode(pool.get(key), where=key)
    except ObjectNotFound:
        return None
    except TooManyErasures as error:
        if error.damaged:
            raise IntegrityError(str(error), key=key) from error
        raise


def fence_session(pool: Pool, prefix: str) -> str | None:
    """The session that saves under `prefix` now; None when that is unclear or there is none."""
    try:
        found = read_fence(pool, prefix)
    except (HpstoreError, OSError):
        return None
    return None if found is None else found.session


def index_of(pool: Pool, prefix: str) -> FenceRecord | None:
    """By which the manifests that were listed before are steps; None where all are.

    A damaged record hides nothing: what was committed must be found. Raises what reading raises.
    """
    try:
        return read_fence(pool, prefix)
    except IntegrityError as error:
        pool.metrics.count("fence_damaged_total")
        _log.warning("all manifests under %r are taken for steps: %s", prefix, error)
        return None
