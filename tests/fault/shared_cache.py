"""A process that owns a shared cache, for tests of others beside it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpstore.loaders.cache import Cache
from tests.integration.cache_sources import NumberedSource, read_epoch

COUNT, SIZE = 200, 3000
PATIENCE = 60.0


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """How many warnings have these words."""
    return sum(words in record.getMessage() for record in caplog.records)


def owner(name: str, ready: Path, folder: Path | None = None) -> Callable[[], None]:
    """A process that owns a shared cache of all blocks, has read the first half, and waits."""

    def body() -> None:
        extra = {} if folder is None else {"disk_path": folder, "disk_bytes": COUNT * 4096}
        memory = 2 * COUNT * SIZE if folder is None else COUNT * SIZE // 8
        cache = Cache(memory, share=name, **extra)  # type: ignore[arg-type]
        source = NumberedSource(COUNT, SIZE)
        reader = cache.attach(source, batch_blocks=10)
        read_epoch(reader, source, np.arange(COUNT // 2), 10)
        ready.touch()
        signal.pause()

    return body
