"""`hpstore ...` for tests: what main() does with its arguments, in this process or one of its own.

A process costs a second of importing; only what it alone can show needs one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpstore.cli import main

ROOT = Path(__file__).resolve().parents[2]


class Cli:
    """Runs the command line in a directory; `before`: words that each call begins with.

    A call returns standard output, or, of one that fails, standard error; `err` is of the last one.
    """

    def __init__(
        self, directory: Path, captured: pytest.CaptureFixture[str], *before: object
    ) -> None:
        self.directory, self.pool, self.err = directory, str(directory / "pool.toml"), ""
        self._captured, self._before = captured, before

    def create(self, *, data: int, parity: int, devices: int) -> None:
        """A pool of directories disk0, disk1 and so on."""
        disks = [self.directory / f"disk{i}" for i in range(devices)]
        self.run("create", self.pool, "--data", data, "--parity", parity, *disks)

    def __call__(self, *words: object, code: int = 0) -> str:
        return self.run(*self._before, *words, code=code)

    def json(self, *words: object) -> Any:
        """The one document that --json gives."""
        return json.loads(self(*words, "--json"))

    def run(self, *words: object, code: int = 0) -> str:
        """In this process."""
        self._captured.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.directory)
            patch.setenv("HOME", str(self.directory))
            patch.setattr(sys, "argv", ["hpstore", *map(str, words)])
            with pytest.raises(SystemExit) as ended:
                main()
        out, self.err = self._captured.readouterr()
        assert (ended.value.code or 0) == code, f"{words}: {ended.value.code}\n{out}{self.err}"
        return out if code == 0 else self.err

    def start(self, *words: object, **streams: Any) -> subprocess.Popen[str]:
        """In a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", "from hpstore.cli import main; main()", *map(str, words)],
            cwd=self.directory,
            text=True,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(self.directory)},
            **streams,
        )

    def fails(self, *words: object, code: int) -> str:
        """In a process of its own that ends with `code`: its standard error."""
        with self.start(*words, stdout=subprocess.PIPE) as run:
            out, err = run.communicate(timeout=120)
        assert run.returncode == code, f"{words}: {run.returncode}\n{out}{err}"
        return err


class PoolCommands(Cli):
    """Those of one group that take the pool first: `hpstore GROUP COMMAND pool.toml ...`."""

    def __init__(self, directory: Path, captured: pytest.CaptureFixture[str], group: str) -> None:
        super().__init__(directory, captured)
        self._group = group

    def __call__(self, *words: object, code: int = 0) -> str:
        return self.run(self._group, words[0], self.pool, *words[1:], code=code)
