"""Fields of a dataset from its first samples. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.fields import DTYPES, Field
from hpstore.loaders.dataset.json_values import check_json, is_chat
from hpstore.loaders.dataset.python_numbers import is_float
from hpstore.loaders.ingestion.source_rows import Column, Sample

LOOKED_AT = 64
"""Samples that fields are inferred from."""

_HINT = "say what they are with fields={...}"


def infer_fields(samples: Sequence[Sample]) -> dict[str, Field]:
    """A field for every name. Arrays whose first dimension differs become ragged.

    Python ints become int64, floats float64, bools bool, lists of them ragged. Fields that are None
    in some samples are optional. Lists of strings are that, messages a chat, other dicts and lists
    JSON. Raises ConfigError for what no field can hold, and for samples that have not the same
    names.
    """
    names = list(samples[0])
    for sample in samples:
        if set(sample) != set(names):
            odd = sorted(set(sample) ^ set(names))[0]
            raise ConfigError(
                f"not every sample has {odd!r} (fields of the first: {names}); name the fields "
                "that all have with fields={...}"
            )
    return {name: _inferred(name, [sample[name] for sample in samples]) for name in names}


def _inferred(name: str, values: Sequence[object]) -> Field:
    some = [value for value in values if value is not None]
    if not some:
        raise ConfigError(f"{name!r} is None in the first {len(values)} samples; {_HINT}")
    if any(isinstance(value, dict | list) for value in some):
        made = _nested(name, some)
    else:
        made = _merged(name, [value_field(name, value) for value in some])
        rounded = next((v for v in some if made.dtype == "float64" and not _is_float(v)), None)
        if rounded is not None:
            raise ConfigError(
                f"{name!r} is {rounded} in one sample and a float in another, and no float is "
                f"{rounded}: Field('json') keeps both; {_HINT}"
            )
    return replace(made, optional=True) if len(some) < len(values) else made


def _nested(name: str, values: Sequence[object]) -> Field:
    """The field of dicts and lists."""
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) == len(values):
        kinds = {type(one) for value in lists for one in value}
        if kinds == {str}:
            return Field("str", (None,))
        if kinds in ({bool}, {int}, {float}, {int, float}):
            every = [one for value in lists for one in value]
            flat = np.asarray(every)
            plain = flat.dtype.name in ("bool", "int64")
            if plain or (float in kinds and all(map(_is_float, every))):
                return Field(flat.dtype.name, (None,))
        if all(map(is_chat, lists)):
            return Field("chat")
    for value in values:
        try:
            check_json(value)
        except ConfigError as error:
            raise ConfigError(
                f"{name!r} {error}; give numbers, str, bytes, arrays, tensors or JSON, put arrays "
                f"that are in a dict into fields of their own, or {_HINT}"
            ) from None
    return Field("json")


def _is_float(value: object) -> bool:
    return type(value) is not int or is_float(value)


def value_field(name: str, value: object) -> Field:
    """The field of one value. Raises ConfigError."""
    if isinstance(value, str):
        return Field("str")
    if isinstance(value, bytes | bytearray | memoryview):
        return Field("bytes")
    if isinstance(value, bool | int | float | complex):
        dtype = np.asarray(value).dtype.name
        if dtype not in DTYPES:
            raise ConfigError(
                f"{name!r} is {str(value)[:40]}, which takes more than 64 bits: Field('json') "
                f"keeps it; {_HINT}"
            )
        return Field(dtype)
    if isinstance(value, torch.Tensor):
        return _field(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array_interface__"):
        array = np.asarray(value)
        return _field(name, array.dtype.name, array.shape)
    raise ConfigError(
        f"{name!r} is a {type(value).__name__}, which no field can hold; give numbers, str, bytes, "
        "arrays or tensors, or leave it out with fields={...}"
    )


def _field(name: str, dtype: str, shape: tuple[int, ...]) -> Field:
    if dtype not in DTYPES:
        raise ConfigError(f"{name!r} has dtype {dtype}, which no field can hold")
    if 0 in shape:  # an empty ragged value
        return Field(dtype, (None, *shape[1:]))
    return Field(dtype, shape)


def _merged(name: str, found: Sequence[Field]) -> Field:
    """One field for all that was found: ragged where the first dimensions differ."""
    made = found[0]
    for other in found[1:]:
        if other == made:
            continue
        dtypes = {made.dtype, other.dtype}
        if dtypes == {"int64", "float64"} and not (made.shape or other.shape):
            made = Field("float64")
            continue
        if len(dtypes) > 1:
            raise ConfigError(f"{name!r} is {made.dtype} and {other.dtype}; {_HINT}")
        if len(made.shape) != len(other.shape) or made.shape[1:] != other.shape[1:]:
            raise ConfigError(
                f"{name!r} has shapes {made.shape} and {other.shape}: only the first dimension may "
                f"differ; make them alike, or {_HINT}"
            )
        made = Field(made.dtype, (None, *made.shape[1:]))
    return made


def fitted(sample: Sample, fields: Iterable[str], *, whole: bool = False) -> dict[str, object]:
    """What `fields` take of a sample, arrays made of what says it is one. Raises ConfigError, with
    `whole` also for a sample that has more than these."""
    try:
        found = {name: _value(sample[name]) for name in fields}
    except KeyError as error:
        raise ConfigError(f"it lacks {error}; it has {sorted(sample)}") from None
    if whole and len(sample) > len(found):
        odd = sorted(sample.keys() - found.keys())[0]
        raise ConfigError(
            f"it has {odd!r}, which the first {LOOKED_AT} samples have not, and which would be "
            f"left out; list the fields to take with fields=[...] (so far: {list(found)})"
        )
    return found


def fitted_columns(
    columns: Mapping[str, Column], fields: Collection[str], *, whole: bool = False
) -> dict[str, Column] | None:
    """As fitted(), of many samples at once; None where it raises for one of them."""
    if not columns.keys() >= set(fields) or (whole and len(columns) > len(fields)):
        return None
    found = ((name, columns[name]) for name in fields)
    return {n: list(map(_value, c)) if isinstance(c, list) else c for n, c in found}


def _value(value: object) -> object:
    if hasattr(value, "__array_interface__") and not isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    return value
