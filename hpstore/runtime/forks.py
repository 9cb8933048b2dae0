"""What forked children begin with."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable

_numbers = itertools.count()
_methods: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}  # in the order of their coming


def call_in_children(method: Callable[[], object]) -> None:
    """Call a bound method first of all in each child that is forked while its object lives, which
    this does not keep."""
    number = next(_numbers)
    _methods[number] = weakref.WeakMethod(method, lambda _: _methods.pop(number, None))


def _call_all() -> None:
    errors = []
    for reference in list(_methods.values()):
        method = reference()
        try:
            if method is not None:
                method()
        except Exception as error:  # noqa: BLE001 (the others come first)
            errors.append(error)
    if errors:
        raise errors[0]


os.register_at_fork(after_in_child=_call_all)  # once: Python never forgets such a call
