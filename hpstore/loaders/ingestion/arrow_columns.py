"""Columns of Arrow: which fields they are, how their values are made. Any: pyarrow is untyped."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.stored_values import StoredValues, stored_values
from hpstore.loaders.ingestion.arrow_nested import Convert, NullInside, json_column
from hpstore.loaders.ingestion.source_rows import (
    Column,
    ColumnRows,
    SourceItem,
    SourceRows,
    columns_bytes,
    grouped,
)


def arrow_field(arrow: Any, field: Any) -> tuple[Field, Convert]:
    """The field of an Arrow column, and how its values are made. Raises ConfigError."""
    t, kind = arrow.types, field.type
    if t.is_dictionary(kind):
        plain, convert = arrow_field(arrow, arrow.field(field.name, kind.value_type))
        return plain, lambda column: convert(column.dictionary_decode())
    if t.is_string(kind) or t.is_large_string(kind):
        return Field("str"), lambda column: column.to_pylist()
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind):
        return Field("bytes"), lambda column: column.to_pylist()
    if has_bytes_inside(arrow, kind):
        plain, convert = arrow_field(arrow, kind.field("bytes").with_name(field.name))
        return plain, lambda column: convert(_bytes_inside(column))
    if t.is_timestamp(kind) or t.is_duration(kind) or t.is_time64(kind) or t.is_date64(kind):
        return Field("int64"), lambda column: _numbers(column.cast(arrow.int64()))
    if t.is_date32(kind) or t.is_time32(kind):
        return Field("int32"), lambda column: _numbers(column.cast(arrow.int32()))
    if t.is_fixed_size_list(kind):
        return _fixed_lists(arrow, field)
    if (nested := _json_column(arrow, kind)) is not None:
        return nested
    if t.is_list(kind) or t.is_large_list(kind):
        inner, convert = arrow_field(arrow, kind.value_field.with_name(field.name))
        if not inner.is_ragged:
            return Field(inner.dtype, (None, *inner.shape)), lambda c: _ragged(c, convert)
    elif t.is_primitive(kind) and not t.is_temporal(kind) and not t.is_decimal(kind):
        with contextlib.suppress(NotImplementedError):  # intervals have no type of numpy
            return Field(np.dtype(kind.to_pandas_dtype()).name), _numbers
    raise ConfigError(
        f"column {field.name!r} is {kind}, which no field can hold; leave it out with fields="
    )


def has_bytes_inside(arrow: Any, kind: Any) -> bool:
    """Whether it is a struct with a binary `bytes`, as Hugging Face writes images."""
    t = arrow.types
    if not t.is_struct(kind) or kind.get_field_index("bytes") < 0:
        return False
    inner = kind.field("bytes").type
    return bool(t.is_binary(inner) or t.is_large_binary(inner) or t.is_fixed_size_binary(inner))


def _bytes_inside(column: Any) -> Any:
    """The bytes of a struct, as Hugging Face writes images. Raises NullInside where one has none:
    such an image lies elsewhere, at the path beside them."""
    found = column.field("bytes")
    if found.null_count > column.null_count:
        raise NullInside
    return found


def time_unit(arrow: Any, kind: Any) -> str | None:
    """What one of the ints of a column of times is, such as "timestamp[ms]"; None for others.
    Times of any zone are those of UTC, and apart from times without a zone."""
    t = arrow.types
    if t.is_dictionary(kind) or t.is_list(kind) or t.is_large_list(kind):
        return time_unit(arrow, kind.value_type)
    if t.is_fixed_size_list(kind):
        return time_unit(arrow, kind.value_type)
    if t.is_timestamp(kind) and kind.tz is not None:
        return f"timestamp[{kind.unit}, UTC]"
    return str(kind) if t.is_temporal(kind) else None


def time_units(arrow: Any, schema: Any) -> dict[str, str]:
    """Those of the columns of times, by name."""
    found = {field.name: time_unit(arrow, field.type) for field in schema}
    return {name: unit for name, unit in found.items() if unit is not None}


def _json_column(arrow: Any, kind: Any) -> tuple[Field, Convert] | None:
    """Of lists and structs that are no arrays of numbers."""
    t = arrow.types
    if (t.is_list(kind) or t.is_large_list(kind)) and _is_array(arrow, kind.value_type):
        return None
    return json_column(arrow, kind)


def _is_array(arrow: Any, kind: Any) -> bool:
    """Whether values of this type are numbers, or arrays of one size."""
    if arrow.types.is_fixed_size_list(kind):
        return _is_array(arrow, kind.value_type)
    return bool(arrow.types.is_primitive(kind))


def _fixed_lists(arrow: Any, field: Any) -> tuple[Field, Convert]:
    inner, convert = arrow_field(arrow, field.type.value_field.with_name(field.name))
    size = field.type.list_size
    if inner.is_ragged or size < 1:
        raise ConfigError(f"column {field.name!r} is {field.type}, which no field can hold")

    def rows(column: Any) -> Sequence[object]:
        if column.null_count:  # its place in the flat values is empty, or filled with anything
            raise NullInside
        values = np.asarray(convert(column.flatten()))
        return values.reshape(len(column), size, *inner.inner_shape)  # type: ignore[return-value]

    return Field(inner.dtype, (size, *inner.shape)), rows


def _numbers(column: Any) -> Sequence[object]:
    if column.null_count:
        raise NullInside
    values: Sequence[object] = column.to_numpy(zero_copy_only=False)
    return values


def _ragged(column: Any, convert: Convert) -> Sequence[object]:
    """Views of the flat values, one a row."""
    if column.null_count:
        raise NullInside
    values = np.asarray(convert(column.flatten()))
    ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
    return [values[a:b] for a, b in pairwise([0, *ends.tolist()])]


def arrow_rows(
    batch: Any, made: Mapping[str, tuple[Field, Convert]], name: str, origin: int, first: int
) -> Iterator[SourceRows]:
    """The rows of a batch by columns; one by one where one of them has a null that it must not
    have. `first`: the number of the first one, which follows `name` in messages."""
    optional = {n for n, (field, _) in made.items() if field.optional}
    convert = {n: c for n, (_, c) in made.items()}
    try:
        if any(batch.column(n).null_count for n in convert if n not in optional):
            raise NullInside
        columns = {n: _column(batch.column(n), *both) for n, both in made.items()}
    except NullInside:
        found = enumerate(arrow_samples(batch, convert, optional), first)
        yield from grouped(
            SourceItem(name=f"{name} {row}", origin=origin | row, sample=sample, problem=problem)
            for row, (sample, problem) in found
        )
        return
    rows = batch.num_rows
    origins = origin | np.arange(first, first + rows)
    nbytes = columns_bytes(columns, rows)
    yield ColumnRows(columns, origins, lambda row: f"{name} {first + row}", nbytes)


def _column(column: Any, field: Field, convert: Convert) -> Column:
    """Text and bytes as they lie in the column, all else as values."""
    if field.dtype in ("str", "bytes") and not field.shape:
        found = _stored(column)
        if found is not None:
            return found
    values = convert(column)
    return values if isinstance(values, np.ndarray | list) else list(values)


_LARGE = ("large_string", "large_binary")


def _stored(column: Any) -> StoredValues | None:
    """Views of the values of a column of texts or bytes; None for other columns."""
    kind = str(column.type)
    if (
        kind.startswith("struct<")
        and not column.null_count
        and column.type.get_field_index("bytes") >= 0
    ):
        return _stored(_bytes_inside(column))
    if kind not in ("string", "binary", *_LARGE):
        return None
    _, ends, data = column.buffers()
    wide = np.dtype(np.int64 if kind in _LARGE else np.int32)
    count, first = len(column), column.offset
    if not count:
        return None
    offsets = np.frombuffer(ends, wide, count + 1, first * wide.itemsize).astype(np.int64)
    flat = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    there = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    return stored_values(flat, offsets, text="string" in kind, there=there)


def arrow_samples(
    batch: Any, columns: dict[str, Convert], optional: Collection[str]
) -> Iterator[tuple[dict[str, object] | None, str]]:
    """Samples of a batch, or what is wrong with each. Whole columns at once where none is null."""
    try:
        if any(batch.column(name).null_count for name in columns if name not in optional):
            raise NullInside
        values = {name: convert(batch.column(name)) for name, convert in columns.items()}
    except NullInside:
        if batch.num_rows > 1:
            for row in range(batch.num_rows):
                yield from arrow_samples(batch.slice(row, 1), columns, optional)
        else:
            yield None, "it holds a null: " + ", ".join(_null_columns(batch, columns, optional))
        return
    for found in zip(*values.values(), strict=True):
        yield dict(zip(values, found, strict=True)), ""


def _null_columns(
    batch: Any, columns: dict[str, Convert], optional: Collection[str]
) -> Iterator[str]:
    for name, convert in columns.items():
        column = batch.column(name)
        try:
            convert(column)
        except NullInside:
            yield repr(name)
        else:
            if column.null_count and name not in optional:
                yield repr(name)
