"""How many threads torch keeps in a process that was forked, by os.fork or by a fork server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import some_of

_SCRIPT = """
import multiprocessing
import os
import sys

import torch


def threads(fork):
    from hpstore.checkpoint.ranks.forked_child import calm_torch

    torch.set_num_threads(2)
    if fork:
        read, write = os.pipe()
        if not os.fork():
            calm_torch()
            os.write(write, bytes([torch.get_num_threads()]))
            os._exit(0)
        os.wait()
        return os.read(read, 1)[0]
    calm_torch()
    return torch.get_num_threads()


def answer(pipe, fork):
    pipe.send(threads(fork))


if __name__ == "__main__":
    kind, fork = sys.argv[1], sys.argv[2] == "fork"
    if kind == "main":
        print(threads(fork))
        sys.exit()
    context = multiprocessing.get_context("forkserver")
    if kind == "preloaded":
        context.set_forkserver_preload(["hpstore.checkpoint.ranks.forked_child"])
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(there, fork))
    process.start()
    print(here.recv())
    process.join()
"""


@pytest.mark.parametrize(
    ("kind", "fork", "threads"),
    some_of(
        [(k, *f) for f in (("fork", "1"), ("", "2")) for k in ("main", "server", "preloaded")],
        *(0, 2, 4),
    ),
)
def test_only_a_child_of_a_process_that_ran_something_gets_one_thread(
    tmp_path: Path, kind: str, fork: str, threads: str
) -> None:
    """A fork server that has imported hpstore has no threads to lose; its processes' forks have."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", str(script), kind, fork]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [threads]
