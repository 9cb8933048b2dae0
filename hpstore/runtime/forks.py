"""What forked children begin with."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

_Reference = weakref.ref[Any]  # Any: to whatever has a method
_numbers = itertools.count()
_methods: dict[int, tuple[_Reference, Callable[[Any], object]]] = {}  # in the order of their coming


def call_in_children(method: Callable[[], object]) -> None:
    """Call a bound method first of all in each child that is forked while its object lives, which
    this does not keep."""
    number, bound, methods = next(_numbers), cast(MethodType, method), _methods

    def gone(_: _Reference) -> None:
        methods.pop(number, None)

    # no WeakMethod: its own callback fails for an object that outlives this module, at the exit
    methods[number] = (weakref.ref(bound.__self__, gone), bound.__func__)


def _call_all() -> None:
    errors = []
    for reference, function in list(_methods.values()):
        found = reference()
        try:
            if found is not None:
                function(found)
        except Exception as error:  # noqa: BLE001 (the others come first)
            errors.append(error)
    if errors:
        raise errors[0]


os.register_at_fork(after_in_child=_call_all)  # once: Python never forgets such a call
