"""Does GPUDirect work for a directory? Four rungs, the last ones in a child process.

1. What the machine has. 2. What the mount is. 3. A child reads 1 MiB of noise from a real file of
that directory into GPU memory. 4. cuFile's own counters say by which way the bytes came. A library
without counters is asked again with bouncing forbidden. Never in this process: opening cuFile is
known to hang, to crash, and to close descriptor 0.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from hpstore.loaders.gpu.direct.machine_facts import (
    MachineFacts,
    MountFacts,
    doubts,
    machine_facts,
    machine_obstacle,
    mount_facts,
    mount_obstacle,
)
from hpstore.runtime.subprocesses import output_of

TIMEOUT_SECONDS = 60.0  # importing torch from a cold disk is most of it
_MAX_OUTPUT_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class Route(StrEnum):
    """The way that bytes take from a directory's files to the GPU."""

    P2PDMA = "gds-p2pdma"  # drive to GPU by PCI peer-to-peer DMA
    NVFS = "gds-nvfs"  # drive to GPU through the nvidia-fs module
    UNCOUNTED = "gds"  # drive to GPU, the library does not say how
    COMPAT = "compat"  # cuFile works, through host memory: no better than pinned memory
    OFF = "off"  # not to be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """The verdict for one directory and GPU, and what it rests on."""

    directory: str
    gpu: int
    route: Route
    reason: str
    rung: int  # the highest that was reached
    seconds: float
    counters: Mapping[str, int] | None = None
    doubts: tuple[str, ...] = ()
    machine: MachineFacts | None = None
    mount: MountFacts | None = None

    @property
    def direct(self) -> bool:
        """Whether bytes go to the GPU without host memory."""
        return self.route in (Route.P2PDMA, Route.NVFS, Route.UNCOUNTED)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "direct": self.direct}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReport:
    """How a child ended: its last words, its exit code (None: it was killed)."""

    step: str = "start"  # the last step that it announced
    facts: Mapping[str, Any] = field(default_factory=dict)  # Any: what JSON holds
    code: int | None = None
    noise: str = ""  # the end of what else it wrote


def verdict(report: ChildReport, *, strict: bool, timeout_seconds: float) -> tuple[Route, str]:
    """What a child's end means. `strict`: bouncing was forbidden. Pure."""
    if report.code is None:
        return Route.OFF, (
            f"cuFile did not answer within {timeout_seconds:.0f} s at step {report.step!r}; the "
            "child was killed"
        )
    if report.step == "failed":
        return Route.OFF, str(report.facts.get("reason", "no reason given"))
    if report.step != "done" or report.code != 0:
        how = f"signal {-report.code}" if report.code < 0 else f"exit code {report.code}"
        return Route.OFF, f"the child died by {how} at step {report.step!r}: {report.noise}"
    if report.facts.get("same") is not True:
        return Route.OFF, "the bytes that arrived on the GPU are not those of the file"
    counters = report.facts.get("counters")
    if counters is None:
        if strict:
            return Route.UNCOUNTED, "a read went well with bouncing forbidden"
        return Route.COMPAT, "the library does not count reads by route"
    if counters["errors"]:
        return Route.OFF, f"cuFile counted {counters['errors']} failed reads"
    for name, route in (("p2p", Route.P2PDMA), ("nvfs", Route.NVFS)):
        if counters[name]:
            return route, f"cuFile counted {counters[name]} reads by {name}"
    if counters["posix"]:
        return Route.COMPAT, "cuFile read through host memory"
    return Route.COMPAT, "cuFile counted no read at all"


def probe_command(directory: str, gpu: int, compat: bool) -> list[str]:
    """The child: this Python, told nothing by its working directory."""
    flag = "1" if compat else "0"
    return [
        sys.executable,
        "-P",
        "-m",
        "hpstore.loaders.gpu.direct.probe_child",
        directory,
        str(gpu),
        flag,
    ]


def run_child(command: Sequence[str], timeout_seconds: float) -> ChildReport:
    """Run a probe with its own standard input and session; kill all of it when the time is over.

    A child that cannot even be killed is left behind: this returns all the same.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory() as here:
        code, text = output_of(
            command,
            timeout_seconds,
            max_bytes=_MAX_OUTPUT_BYTES,
            environment=environment,
            directory=here,
        )
    return parse_output(text, code)


def parse_output(text: str, code: int | None) -> ChildReport:
    """The last JSON line with a step, and the end of the rest. Pure."""
    step, facts, rest = "start", {}, []
    for line in text.splitlines():
        try:
            found = json.loads(line)
            step = str(found.pop("step"))
            facts = found
        except (ValueError, KeyError, AttributeError, TypeError):
            rest.append(line)
    return ChildReport(
        step=step, facts=facts, code=code, noise=" ".join(" ".join(rest).split())[-300:]
    )


class Detector:
    """Verdicts of one process, kept by filesystem and GPU. Thread-safe; one probe at a time."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._known: dict[tuple[int, int], Detection] = {}
        self._lock = threading.RLock()  # guards _known, and is held through a probe on purpose

    def detect(self, directory: str, gpu: int = 0) -> Detection:
        """The verdict for a directory that can be written to; probes once for each filesystem.

        Writes and removes a file of 1 MiB there. Logs one line. Raises OSError when the directory
        is not there.
        """
        key = (os.stat(directory).st_dev, gpu)
        with self._lock:
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self.climb(directory, gpu)
                _log.info("GPUDirect for %s: %s, %s", directory, known.route, known.reason)
        return known

    def climb(self, directory: str, gpu: int) -> Detection:
        """Rungs 1 to 4, not from memory."""
        began = time.monotonic()
        machine, mount = machine_facts(), mount_facts(directory)

        def found(route: Route, reason: str, rung: int, **more: Any) -> Detection:  # Any: counters
            return Detection(
                directory=directory,
                gpu=gpu,
                route=route,
                reason=reason,
                rung=rung,
                seconds=time.monotonic() - began,
                machine=machine,
                mount=mount,
                doubts=doubts(machine, mount),
                **more,
            )

        for rung, obstacle in ((1, machine_obstacle(machine)), (2, mount_obstacle(mount))):
            if obstacle is not None:
                return found(Route.OFF, obstacle, rung)
        for strict in (False, True):
            report = run_child(probe_command(directory, gpu, not strict), self._timeout_seconds)
            route, reason = verdict(report, strict=strict, timeout_seconds=self._timeout_seconds)
            counters = report.facts.get("counters")
            rung = 4 if report.step == "done" else 3
            if strict and route is Route.OFF:  # it worked when it could bounce
                return found(Route.COMPAT, f"with bouncing forbidden: {reason}", rung)
            if route is not Route.COMPAT or counters is not None:
                break
        return found(route, reason, rung, counters=counters)


@cache
def _detector_of(process: int) -> Detector:
    return Detector()


def process_detector() -> Detector:
    """The one of this process; a forked child has its own, and with it no lock of the parent."""
    return _detector_of(os.getpid())
