"""The five processes of a soak: started, killed, stopped and started again by the rig."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpstore.runtime.closing import Closing
from tests.fault.soak.schedule import PROCESSES

ROOT = Path(__file__).resolve().parents[3]
AGENT_COMMAND = ("-c", "from hpstore.cli import main; main()", "agent")
RESTART_SECONDS = 0.5
PATIENCE = 60.0


@dataclass
class Life:
    """One run of a process. `killed_at`: when the rig killed it. It may end later, when a device
    that hangs answers it: a call to it cannot be interrupted. Times are of the monotonic clock."""

    name: str
    pid: int
    began: float
    ended: float | None = None
    killed_at: float | None = None
    status: int | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)  # while it was stopped


class Crew(Closing):
    """Processes that do not outlive the rig. `problems`: ends that it did not cause."""

    def __init__(self, root: Path, toml: Path, seed: int) -> None:
        self._root, self._toml, self._seed = root, toml, seed
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._due: dict[str, float] = {}  # when one that has ended is started again
        self._stopped: dict[str, tuple[float, float]] = {}  # since when, until when
        self.lives: list[Life] = []
        self.problems: list[str] = []
        self._closed = False

    def journal(self, name: str) -> Path:
        """Of all lives of a process."""
        return self._root / f"{name}.jsonl"

    def log(self, name: str) -> Path:
        """What it wrote to its standard output and error."""
        return self._root / f"{name}.log"

    def start_all(self) -> None:
        """The first lives."""
        for name in PROCESSES:
            self._start(name)

    def _start(self, name: str) -> None:
        if name == "agent":
            words = [*AGENT_COMMAND, str(self._toml), "--listen", "none"]
        else:
            words = [
                "-m",
                "tests.fault.soak.worker",
                name,
                str(self._toml),
                str(self.journal(name)),
                str(self._seed * 1000 + len(self.lives)),
            ]
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._root,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    "HOME": str(self._root),
                },
            )
        pid = self._processes[name].pid
        self.lives.append(Life(name=name, pid=pid, began=time.monotonic()))

    def life(self, name: str) -> Life:
        """Its last one."""
        return next(life for life in reversed(self.lives) if life.name == name)

    # --- faults -----------------------------------------------------------------------------

    def kill(self, name: str) -> bool:
        """SIGKILL; False when it does not run now, or was killed before.

        It may end later: when what it reads from a device that hangs comes back.
        """
        process, life = self._processes[name], self.life(name)
        if process.poll() is not None or life.killed_at is not None:
            return False
        self._go_on(name)
        life.killed_at = time.monotonic()
        process.kill()
        return True

    def stop(self, name: str, seconds: float) -> bool:
        """SIGSTOP for so long; False when it does not run now."""
        process = self._processes[name]
        if (
            process.poll() is not None
            or name in self._stopped
            or self.life(name).killed_at is not None
        ):
            return False
        process.send_signal(signal.SIGSTOP)
        now = time.monotonic()
        self._stopped[name] = (now, now + seconds)
        return True

    def _go_on(self, name: str) -> None:
        if name in self._stopped:
            since, _ = self._stopped.pop(name)
            self._processes[name].send_signal(signal.SIGCONT)
            self.life(name).pauses.append((since, time.monotonic()))

    def order(self, text: str) -> None:
        """To the operator. One that has just been killed does not hear it."""
        pipe = self._processes["operator"].stdin
        assert pipe is not None
        with suppress(OSError):
            pipe.write(f"{text}\n".encode())
            pipe.flush()

    # --- care -------------------------------------------------------------------------------

    def look(self) -> None:
        """Continue what was stopped for long enough, note what has ended, start it again."""
        now = time.monotonic()
        for name, (_, until) in list(self._stopped.items()):
            if now >= until:
                self._go_on(name)
        for name, process in self._processes.items():
            life = self.life(name)
            if process.poll() is None:
                continue
            if life.ended is None:
                self._note_end(life, process.returncode)
                self._due[name] = now + RESTART_SECONDS
            elif now >= self._due[name]:
                _hang_up(process)
                self._start(name)
                return  # the processes have changed

    def _note_end(self, life: Life, status: int) -> None:
        life.ended, life.status = time.monotonic(), status
        if life.killed_at is None or status != -signal.SIGKILL:
            tail = self.log(life.name).read_text(errors="replace")[-1500:].strip()
            self.problems.append(f"the {life.name} ended with {status} by itself: {tail}")

    def end(self) -> None:
        """The agent is told to end and must; the others are killed."""
        self.look()
        for name in self._processes:
            self._go_on(name)
        agent = self._processes["agent"]
        agent.send_signal(signal.SIGTERM)
        try:
            status = agent.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        life = self.life("agent")
        life.ended, life.status = time.monotonic(), status
        if status != 0:
            tail = self.log("agent").read_text(errors="replace")[-1500:]
            self.problems.append(f"the agent was told to end and gave {status}: {tail}")
        for name, process in self._processes.items():
            self.kill(name)
            process.wait(PATIENCE)
            if self.life(name).ended is None:
                self._note_end(self.life(name), process.returncode)

    def close(self) -> None:
        """Kill all. Idempotent."""
        if not self._closed:
            self._closed = True
            for process in self._processes.values():
                process.kill()
            for process in self._processes.values():
                _hang_up(process)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe of orders; its reader may be gone."""
    with suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
