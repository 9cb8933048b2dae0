"""Whether values are JSON as they are, or at least numbers, texts and None: millions of them are
looked at without a call for each, by one call of C where that was compiled (decision 0171).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any

_log = logging.getLogger(__name__)
_LIBRARY = "hpstore._values"  # of plain_values.c; an extension to be installed, not to import

JSON_TYPES = frozenset({int, float, str, bool, type(None)})  # of leaves
MOST_BITS = 14_000  # of an int: Python reads and writes 4,300 digits
ROWS = frozenset({tuple, list})
_FEW = 8  # values that are cheaper to look at one by one
_LONG = 1 << 63
_OTHER, _LEAVES, _JSON = range(3)  # what the library says
_KNOWN: tuple[tuple[list[Any], int], ...] = (
    ([1, -(1 << 62), 0.5, "text", True, None], _JSON),
    ([1, 1 << 200], _LEAVES),
    ([1, math.nan], _LEAVES),
    (["\ud800"], _LEAVES),
    ([1, (1,)], _OTHER),
)

# Any below: values may be whatever a training state holds


def is_leaf(value: Any) -> bool:
    """Whether a value is a number, text or None of JSON's own types."""
    return type(value) in JSON_TYPES


def holds_leaves(node: Mapping[Any, Any]) -> bool:
    """Whether a dict holds numbers, text and None alone, of which there may be very many."""
    return set(map(type, node.values())) <= JSON_TYPES


def is_plain(values: Collection[Any]) -> bool:
    """Whether all are numbers, text or None, or tuples or lists of these: nothing else is in
    them."""
    if len(values) >= _FEW and _look(values) != _OTHER:
        return True
    kinds = set(map(type, values))
    if kinds and kinds <= ROWS:
        kinds = set(map(type, chain.from_iterable(values)))
    return kinds <= JSON_TYPES


def all_json(values: Collection[Any]) -> bool:
    """Whether values are JSON as they are."""
    if len(values) < _FEW:
        return all(map(_is_json, values))
    if _look(values) == _JSON:
        return True
    kinds = set(map(type, values))
    if not kinds <= JSON_TYPES:
        return False
    alone = len(kinds) == 1
    if float in kinds:
        some = values if alone else [v for v in values if type(v) is float]
        if not all(map(math.isfinite, some)):
            return False
    if int in kinds:
        whole = values if alone else [v for v in values if type(v) is int]
        if max(max(whole), -min(whole)).bit_length() > MOST_BITS:
            return False
    if str in kinds:
        texts = values if alone else [v for v in values if type(v) is str]
        return all(map(str.isascii, texts)) or all(map(is_unicode, texts))
    return True


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(-_LONG < value < _LONG)
    if kind is float:
        return math.isfinite(value)
    return (kind is str and is_unicode(value)) or value is None or kind is bool


def is_unicode(text: str) -> bool:
    """Whether a text has UTF-8: not with half a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _look(values: Collection[Any]) -> int:
    """What the library says of values; _OTHER, which is no promise, where there is none."""
    look = values_library()
    return _OTHER if look is None else look(values)


@functools.cache
def values_library() -> Callable[[Collection[Any]], int] | None:
    """The library's function, called with the GIL held; None where hpstore was
    installed without a C compiler, or where it is wrong of known values, said once."""
    spec = importlib.util.find_spec(_LIBRARY)
    try:
        if spec is None or spec.origin is None:
            raise OSError("it was not built")
        look = ctypes.PyDLL(spec.origin).hpstore_plain_values_1
        look.argtypes, look.restype = [ctypes.py_object], ctypes.c_int
        if any(look(values) != said for values, said in _KNOWN):
            raise OSError("it does not know what it should")
    except (OSError, AttributeError) as error:
        _log.warning(
            "states of millions of Python values stall a save for longer: no compiled look at them "
            "(%s). With a C compiler and Python's headers there (gcc, "
            "python3-dev), install hpstore again",
            error,
        )
        return None
    found: Callable[[Collection[Any]], int] = look
    return found
