"""How saves are staged, written and committed: the options of a Checkpointer's saves."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hpstore.checkpoint.format.segment_codecs import CODECS
from hpstore.checkpoint.ranks.stop_step import ON_SIGTERM
from hpstore.checkpoint.save.accelerator import Accelerator
from hpstore.checkpoint.save.save_underway import ON_BUSY
from hpstore.checkpoint.save.stage import STAGING
from hpstore.errors import ConfigError
from hpstore.pool.pool import Pool
from hpstore.units import MIB, parse_bytes

BACKGROUND = ("thread", "process")
ON_FAILURE = ("raise", "warn", "retry")
PACES = ("fast", "gentle")
# Encoding, hashing and handing over cost some 0.4 core-seconds a GB: at this rate 3 % of one core
# of two, and a step that runs on all cores waits for the slowest of them
GENTLE_BYTES_PER_CORE_SECOND = 32 * MIB
INTERVAL_SHARE = 0.8  # of the time between two saves is used for writing when that is not enough


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a Checkpointer saves: `Checkpointer(pool, prefix, save=SaveOptions(pace="gentle"))`.

    Parameters
    ----------
    staging
        "copy" copies the state before save() returns. "overlap" copies parameters and moments of
        the state's optimizers during the next forward and backward.
    memory
        Bytes for staging on this node, shared by its ranks: a number or a text such as "8GiB".
        A larger state is staged in slices, and the trainer waits for all but the last. Default:
        60 % of the memory that is available.
    background
        "thread" writes from threads of this process. "process" writes from a process of its own,
        which leaves this one's GIL alone and finishes a save when this one has died; each rank has
        one. It opens the pool again, with memory of its own.
    on_busy
        What save() does while the save before it is under way: "wait", "skip" or "error".
    on_failure
        What a save that fails in the background does to the training: "raise" raises it in the next
        save(), wait() or close(), "warn" logs and counts it there, "retry" tries the staged bytes
        again within `retry_seconds`, and raises after that. Its handle raises in any case.
    retry_seconds
        How long after the first failure a save is tried again.
    pace
        "fast" writes as fast as the devices are, "gentle" at a rate that leaves the step its cores.
    compression
        "lz4", "zstd", "shuffle-lz4", or None.
    reuse
        Reference what the step before holds unchanged, instead of writing it again.
    prewrite
        With `keep_last`, write files for the first saves to overwrite in the background before they
        come, of the size of `example` or of the newest step.
    commit_seconds
        How long ranks wait for each other's messages.
    drain_seconds
        How long the end of the process waits for the save under way, and restore() for one that a
        trainer which has ended has left to its writer process.
    on_sigterm
        "finish" finishes the save under way, within `drain_seconds`, and ends. "save" saves and
        stops all ranks after one step, within these seconds: see Checkpointer.reached_preemption.
    warm
        Restore from the staging memory while it still holds the step; hashes are compared.
    max_stall_seconds
        Count and log a save() that keeps the trainer longer.
    min_losses_tolerated
        Further lost devices that a save must survive, else it is refused. Default: the pool's.
    lineage
        JSON values that every step records, as where the run comes from.
    accelerator
        What copies from devices, for tests and for other back ends. Default: CUDA when there is
        one.

    Raises
    ------
    ConfigError
        A value is not one of those above. It is a ValueError.
    """

    staging: str = "copy"
    memory: int | str | None = None
    background: str = "thread"
    on_busy: str = "wait"
    on_failure: str = "raise"
    retry_seconds: float = 120.0
    pace: str = "fast"
    compression: str | None = None
    reuse: bool = True
    prewrite: bool = True
    commit_seconds: float = 1800.0
    drain_seconds: float = 60.0
    on_sigterm: str = "finish"
    warm: bool = True
    max_stall_seconds: float | None = None
    min_losses_tolerated: int | None = None
    lineage: Mapping[str, Any] | None = None  # Any: JSON of the caller
    accelerator: Accelerator | None = None

    def __post_init__(self) -> None:
        checked_choice("staging", self.staging, STAGING)
        checked_choice("background", self.background, BACKGROUND)
        checked_choice("on_busy", self.on_busy, ON_BUSY)
        checked_choice("on_failure", self.on_failure, ON_FAILURE)
        if (self.background, self.on_failure) == ("process", "retry"):
            raise ConfigError(
                'background="process" has no on_failure="retry": choose one of them, or "warn"'
            )
        checked_choice("pace", self.pace, PACES)
        checked_choice("on_sigterm", self.on_sigterm, ON_SIGTERM)
        if self.compression is not None:
            checked_choice("compression", self.compression, CODECS)
        if self.memory is not None and parse_bytes(self.memory) < 1:
            raise ConfigError(f"memory must be at least one byte, not {self.memory!r}")
        for name in ("commit_seconds", "drain_seconds", "retry_seconds", "max_stall_seconds"):
            _require_seconds(name, getattr(self, name), optional=name == "max_stall_seconds")
        losses = self.min_losses_tolerated
        if losses is not None and (type(losses) is not int or losses < 0):
            raise ConfigError(
                f"min_losses_tolerated must be a whole number of at least 0, not {losses!r}"
            )
        try:
            json.dumps(self.lineage)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"lineage must hold JSON values only: {error}") from error

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)


def checked_options(pool: object, save: SaveOptions | None) -> SaveOptions:
    """`save`, by default the defaults. Raises ConfigError unless both are what they must be."""
    if not isinstance(pool, Pool):
        raise ConfigError(
            f"a Checkpointer takes an open pool, not a {type(pool).__name__}: hpstore.open(...)"
        )
    if save is not None and not isinstance(save, SaveOptions):
        raise ConfigError(f"save= takes SaveOptions(...), not a {type(save).__name__}")
    return save or SaveOptions()


def checked_choice(name: str, value: object, choices: Collection[str]) -> str:
    """`value`, which must be one of `choices`. Raises ConfigError that names all of them."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} {value!r} is not one of {', '.join(choices)}")
    return value


def _require_seconds(name: str, value: object, *, optional: bool) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ConfigError(f"{name} must be a number of seconds of at least 0, not {value!r}")


def save_rate(pace: str, nbytes: int, interval_seconds: float | None) -> float | None:
    """Bytes per second for a save, None for as fast as the devices are.

    "gentle" writes slowly enough to cost the step little, but in time for the next save.
    """
    if pace == "fast" or not nbytes:
        return None
    rate = float(GENTLE_BYTES_PER_CORE_SECOND * (os.cpu_count() or 1))
    if interval_seconds:
        rate = max(rate, nbytes / (INTERVAL_SHARE * interval_seconds))
    return rate
