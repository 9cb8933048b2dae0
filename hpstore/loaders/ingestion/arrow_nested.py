"""Columns of Arrow that hold None, lists and structs: which fields they are. Any: pyarrow is
untyped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpstore.loaders.dataset.fields import Field

Convert = Callable[[Any], Sequence[object]]  # an Arrow array without nulls to one value a row


class NullInside(ValueError):
    """A list, or a dictionary, holds a null."""


def json_column(arrow: Any, kind: Any) -> tuple[Field, Convert] | None:
    """The field of lists and structs of what JSON has; None where it has no such type."""
    t = arrow.types
    if t.is_list(kind) or t.is_large_list(kind):
        inner = kind.value_type
        if t.is_string(inner) or t.is_large_string(inner):
            return Field("str", (None,)), lambda column: column.to_pylist()
        if is_json(arrow, kind):
            return Field("chat" if _is_message(arrow, inner) else "json"), _values
    elif t.is_struct(kind) and is_json(arrow, kind):
        return Field("json"), _values
    return None


def _values(column: Any) -> Sequence[object]:
    found: list[object] = column.to_pylist()
    return found


def is_json(arrow: Any, kind: Any) -> bool:
    """Whether every value of this type is one of JSON, but for NaN."""
    t = arrow.types
    if t.is_struct(kind):
        return all(is_json(arrow, kind.field(place).type) for place in range(kind.num_fields))
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return is_json(arrow, kind.value_type)
    if t.is_dictionary(kind):
        return is_json(arrow, kind.value_type)
    text = t.is_string(kind) or t.is_large_string(kind)
    numbers = t.is_boolean(kind) or t.is_integer(kind) or t.is_floating(kind)
    return bool(text or numbers or t.is_null(kind))


def _is_message(arrow: Any, kind: Any) -> bool:
    """Whether structs of this type have the role and the content of a chat's messages."""
    t = arrow.types
    if not t.is_struct(kind):
        return False
    places = [kind.get_field_index(name) for name in ("role", "content")]
    return all(place >= 0 and t.is_string(kind.field(place).type) for place in places)


def with_none(convert: Convert) -> Convert:
    """The same for a column with nulls, which become None."""

    def values(column: Any) -> Sequence[object]:
        if not column.null_count:
            return convert(column)
        there = np.asarray(column.is_valid())
        found: list[object] = [None] * len(column)
        for row, value in zip(
            np.flatnonzero(there).tolist(), convert(column.drop_null()), strict=True
        ):
            found[row] = value
        return found

    return values
