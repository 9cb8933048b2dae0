"""What the tests of writer processes share."""

from __future__ import annotations

from pathlib import Path

from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.save.writer_client import WriterClient


def writer(ckpt: Checkpointer) -> WriterClient:
    """The client of its writer process."""
    found = ckpt.saver._writing.writer
    assert found is not None
    return found


def alive(process: int) -> bool:
    """Whether it runs, or stands; a zombie does neither."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
