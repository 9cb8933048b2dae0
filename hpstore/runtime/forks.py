"""What forked children begin with."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def call_in_children(method: Callable[[], object]) -> None:
    """Call a bound method first of all in each child that is forked while its object lives.

    Python keeps such calls for good. This one does not keep the object.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)
