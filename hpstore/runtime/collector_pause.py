"""Keep Python's collector out of a stall or a load: a full collection takes 0.2 s with torch's
modules alone, longer than to stage 10,000 tensors, and all threads of a load wait for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic garbage collection inside; as it was before afterwards. For short sections."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
