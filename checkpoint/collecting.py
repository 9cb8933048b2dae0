"""Keep Python's collector out of a stall: a full collection in the middle of 10,000 tensors takes
longer than to stage them."""

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


__all__ = ["collector_paused"]
