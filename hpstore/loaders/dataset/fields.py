"""Fields of a dataset: what one value of a sample is, and how it is checked and stored. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.dataset.json_values import decode_value, encode_value
from hpstore.loaders.dataset.media_types import may_be, media_type_of
from hpstore.loaders.dataset.python_numbers import plain_numbers, python_number, python_numbers

SCALAR_BYTES = 64  # a fixed value up to this size stands in a column of its own, not in records
MAX_VALUE_BYTES = (1 << 32) - 1  # of one ragged value: its length is stored as u32
MAX_NAME_BYTES = 255
# Any: arrays of every dtype pass through here
Array = npt.NDArray[Any]
Value = Any  # a tensor, bytes, str, what JSON holds, or None

_NUMBERS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
BFLOAT16 = "bfloat16"
DTYPES = (*_NUMBERS, BFLOAT16, "bytes", "str")
"""Those of manifests of format 1, which every hpstore reads."""
JSON_DTYPES = ("json", "chat")
MEDIA_DTYPES = ("image", "audio", "video")
_BYTES = ("bytes", *MEDIA_DTYPES)
_VALUES = ("str", *_BYTES, *JSON_DTYPES)  # one value of any length, without a shape
ALL_DTYPES = (*DTYPES, *MEDIA_DTYPES, *JSON_DTYPES)
_MEDIA_TYPE = re.compile(r"(image|audio|video|application)/[a-z0-9][a-z0-9.+-]{0,63}")


class FieldKind(StrEnum):
    """Where a field's values are stored."""

    SCALAR = "scalar"  # fixed size, at most 64 bytes: a column
    FIXED = "fixed"  # fixed size, in the record
    RAGGED = "ragged"  # bytes, str or a variable first dimension, in the record


@dataclass(frozen=True, slots=True)
class Field:
    """Type of one value of a sample.

    Parameters
    ----------
    dtype
        A numpy name, "bfloat16" (numpy arrays of it are raw uint16), "bytes", "str", "json" (any
        JSON value), "chat" (a list of messages), or "image", "audio", "video" (encoded bytes).
    shape
        Shape of one sample's value. None as the first dimension makes it ragged; of "str", (None,)
        is a list of strings.
    optional
        None is a value, too.
    media_type
        Of "image", "audio" and "video": what every value is, such as "audio/flac". "": not said.

    Raises
    ------
    ConfigError
        The dtype is not known, or the shape cannot be stored.
    """

    dtype: str
    shape: tuple[int | None, ...] = ()
    optional: bool = field(default=False, kw_only=True)
    media_type: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        try:
            name = self.dtype if isinstance(self.dtype, str) else np.dtype(self.dtype).name
        except TypeError as error:
            raise ConfigError(f"field dtype {self.dtype!r} is no type") from error
        if name not in ALL_DTYPES:
            near = difflib.get_close_matches(name, ALL_DTYPES, 1)
            choices = ", ".join(ALL_DTYPES)
            hint = f"; did you mean {near[0]!r}?" if near else f": choose of {choices}"
            raise ConfigError(f"field dtype {name!r} is not known{hint}")
        shape = tuple(self.shape)
        if name in _VALUES and shape and (name, shape) != ("str", (None,)):
            raise ConfigError(f"a field of {name} has no shape, {shape} was given")
        if not isinstance(self.optional, bool):
            raise ConfigError(f"optional {self.optional!r} of a field: True or False")
        _check_media_type(name, self.media_type)
        for place, size in enumerate(shape):
            ragged = size is None and place == 0
            if not ragged and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ConfigError(
                    f"field shape {shape}: dimensions are whole numbers above 0; only the first "
                    "one may be None. Where others differ too, write the values flat, (None,), and "
                    "their shape as a field of its own"
                )
        object.__setattr__(self, "dtype", name)
        object.__setattr__(self, "shape", shape)

    @property
    def storage(self) -> np.dtype[Any]:
        """The numpy dtype of stored elements, little-endian; uint8 for bytes and text."""
        if self.dtype in _VALUES:
            return np.dtype(np.uint8)
        return np.dtype(np.uint16 if self.dtype == BFLOAT16 else self.dtype).newbyteorder("<")

    @property
    def is_ragged(self) -> bool:
        """Whether values differ in length."""
        return self.dtype in _VALUES or (bool(self.shape) and self.shape[0] is None)

    @property
    def is_bytes(self) -> bool:
        """Whether a value is bytes: of "bytes", "image", "audio", "video"."""
        return self.dtype in _BYTES

    @property
    def is_json(self) -> bool:
        """Whether a value is stored as JSON text: of "json", "chat", lists of strings."""
        return self.dtype in JSON_DTYPES or (self.dtype == "str" and bool(self.shape))

    @property
    def is_plain(self) -> bool:
        """Whether manifests of format 1 have such fields: a value is as the loader reads it."""
        return self.dtype in DTYPES and not (self.optional or self.is_json)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """Shape of a fixed value; of a ragged one, without its first dimension."""
        return tuple(size for size in self.shape if size is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes of a fixed value; of a ragged one, of one element of its first dimension."""
        return self.storage.itemsize * math.prod(self.inner_shape)

    @property
    def kind(self) -> FieldKind:
        """Where its values are stored."""
        if self.is_ragged:
            return FieldKind.RAGGED
        return FieldKind.SCALAR if self.row_bytes <= SCALAR_BYTES else FieldKind.FIXED

    def to_json(self) -> list[object]:
        """For a manifest."""
        options: dict[str, object] = {"optional": True} if self.optional else {}
        if self.media_type:
            options["media_type"] = self.media_type
        return [self.dtype, list(self.shape), *([options] if options else [])]

    @classmethod
    def from_json(cls, raw: Sequence[Any]) -> Field:
        """Inverse of to_json.

        Parameters
        ----------
        raw
            Dtype and shape, and options where there are some.

        Returns
        -------
        Field
            Equal to the one that to_json() was called of.

        Raises
        ------
        ConfigError
            They are not those of a field.
        """
        if len(raw) == 2:
            return cls(str(raw[0]), tuple(raw[1]))
        dtype, shape, options = raw
        odd = set(options) - {"optional", "media_type"}
        if odd:
            raise ConfigError(f"field option {sorted(odd)[0]!r} is not known")
        return cls(str(dtype), tuple(shape), **options)

    def as_value(self, raw: Bytes) -> Value:
        """Make a value of its stored bytes.

        Parameters
        ----------
        raw
            uint8 (n,). n is row_bytes; of a ragged field, a multiple of it.

        Returns
        -------
        torch.Tensor or bytes or str or what JSON holds
            A tensor of the field's shape over the memory of `raw`; all else are copies.

        Raises
        ------
        ValueError
            The bytes are no value of a field of text.
        """
        if self.dtype in _BYTES:
            return raw.tobytes()
        if self.is_json:
            return decode_value(self.dtype, raw.tobytes())
        if self.dtype == "str":
            return raw.tobytes().decode()
        lead = (-1,) if self.is_ragged and len(raw) else (0,) if self.is_ragged else ()
        return self.as_tensor(raw.view(self.storage).reshape(*lead, *self.inner_shape))

    def as_rows(self, raw: torch.Tensor) -> torch.Tensor:
        """Make fixed values of their stored bytes.

        Parameters
        ----------
        raw
            uint8 (n, row_bytes), on any device.

        Returns
        -------
        torch.Tensor
            (n, *shape) on the same device, over the memory of `raw` where that is contiguous, else
            a copy.
        """
        kind = torch.bfloat16 if self.dtype == BFLOAT16 else getattr(torch, self.dtype)
        made: torch.Tensor = raw.contiguous().view(kind).reshape(-1, *self.inner_shape)
        return made

    def as_tensor(self, value: Array) -> torch.Tensor:
        """Make a tensor of a numpy value of this field, or of several.

        Parameters
        ----------
        value
            Array in storage dtype, of any shape.

        Returns
        -------
        torch.Tensor
            Over the memory of `value`, without a copy; of bfloat16 where the field is.
        """
        tensor = torch.from_numpy(value)
        return tensor.view(torch.bfloat16) if self.dtype == BFLOAT16 else tensor


def _check_media_type(dtype: str, media_type: object) -> None:
    """Raise ConfigError unless a field of this dtype may record this."""
    if media_type == "":
        return
    if dtype not in MEDIA_DTYPES:
        raise ConfigError(f"a field of {dtype} has no media_type, {media_type!r} was given")
    if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
        raise ConfigError(f"media_type {media_type!r}: give one such as 'audio/flac'")


def check_fields(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields of a new dataset, in order. Raises ConfigError."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"fields are a {type(fields).__name__}: give a dict of names and Fields")
    if not fields:
        raise ConfigError("a data set has at least one field")
    for name, made in fields.items():
        if not isinstance(made, Field):
            raise ConfigError(f"field {name!r} is a {type(made).__name__}, not a Field")
        check_field_name(name)
    stored_fields(fields)
    return dict(fields)


def require_no_text(fields: object) -> None:
    """Raise ConfigError for one name where a list is wanted: its letters would be the names."""
    if isinstance(fields, str):
        raise ConfigError(f"fields are {fields!r}: give a list of names, such as [{fields!r}]")


def mask_name(name: str) -> str:
    """The field of bools, True where there is a value, that goes with an optional field."""
    return f"{name}_mask"


def stored_fields(fields: Mapping[str, Field]) -> dict[str, Field]:
    """What is stored for these: them and, behind each optional one, its mask. ConfigError where a
    mask has another field's name.
    """
    found: dict[str, Field] = {}
    for name, made in fields.items():
        found[name] = made
        if made.optional:
            mask = mask_name(name)
            if mask in fields:
                raise ConfigError(f"field {mask!r} has the name of the mask of {name!r}: rename it")
            check_field_name(mask)
            found[mask] = Field("bool")
    return found


def check_field_name(name: object) -> None:
    """Raise ConfigError unless this can name a field."""
    bad = (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or "/" in name
        or len(name.encode(errors="replace")) > MAX_NAME_BYTES
        or not name.isprintable()
    )
    if bad:
        raise ConfigError(
            f"{name!r} cannot name a field: printable text of 1 to {MAX_NAME_BYTES} bytes without "
            "'/', and not '.' or '..'"
        )


def check_names(given: Collection[str], fields: Mapping[str, Field], where: str) -> None:
    """Raise ConfigError unless exactly the fields are given."""
    if type(given) is not dict and not isinstance(given, Mapping):
        raise ConfigError(f"{where} is a {type(given).__name__}, not a dict of its fields")
    missing = [name for name in fields if name not in given]
    if missing:
        raise ConfigError(f"{where} lacks field {missing[0]!r}; it has {sorted(given)}")
    if len(given) > len(fields):
        extra = next(name for name in given if name not in fields)
        raise ConfigError(f"{where} has {extra!r}, which is no field; fields are {list(fields)}")


def as_array(field: Field, value: object) -> Array:
    """A number array in storage dtype, contiguity as it comes. Raises ConfigError."""
    array: Array
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.device.type != "cpu":
            raise ConfigError(f"is a tensor on {tensor.device}; give one on the CPU")
        if tensor.dtype is torch.bfloat16:
            if field.dtype != BFLOAT16:
                raise ConfigError(f"has dtype bfloat16, the field has {field.dtype}")
            tensor = tensor.view(torch.uint16)
        try:
            array = tensor.resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # float8, sparse, quantized
            layout = "" if tensor.layout is torch.strided else f", {tensor.layout}"
            raise ConfigError(f"is a tensor that numpy has not: {tensor.dtype}{layout}") from error
    elif isinstance(value, np.ndarray | np.generic):
        require_unmasked(value)
        array = np.asarray(value)
        if array.dtype.name == BFLOAT16 and field.dtype == BFLOAT16:
            array = array.view(np.uint16)  # another package's dtype of the same bits
    elif isinstance(value, bool | int | float | complex) and field.shape == ():
        return python_number(field.dtype, field.storage, value)
    elif isinstance(value, list) and field.shape:
        return python_numbers(field.dtype, field.storage, field.inner_shape, value)
    else:
        raise ConfigError(
            f"is a {type(value).__name__}; give a numpy array or a tensor of {field.dtype}"
        )
    if array.dtype != field.storage and array.dtype.newbyteorder("<") != field.storage:
        raise ConfigError(f"has dtype {array.dtype.name}, the field has {field.dtype}")
    return array


def require_unmasked(value: object) -> None:
    """Raise ConfigError for a numpy array with masked elements, which hold no values."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ConfigError(
            "is a masked array, of which what is masked would become values: give .filled(...), or "
            "None in those rows of an optional field"
        )


def fixed_rows(name: str, field: Field, values: object, where: str) -> Array:
    """Rows of a scalar or fixed field, (n, *shape) in storage dtype. Raises ConfigError."""
    if isinstance(values, list | tuple):
        if values and field.shape == () and field.dtype != BFLOAT16:
            numbers = plain_numbers(field.storage, values)
            if numbers is not None:
                return numbers
        rows = [fixed_value(name, field, value, where) for value in values]
        return np.stack(rows) if rows else np.empty((0, *field.inner_shape), field.storage)
    try:
        array = as_array(field, values)
    except ConfigError as error:
        raise ConfigError(f"{where}: field {name!r} {error}") from None
    if array.ndim < 1 or array.shape[1:] != field.shape:
        raise ConfigError(
            f"{where}: field {name!r} has shape {array.shape}, the batch of it is "
            f"(rows, {', '.join(map(str, field.shape))})"
        )
    return array


def fixed_value(name: str, field: Field, value: object, where: str) -> Array:
    """One value of a scalar or fixed field. Raises ConfigError."""
    try:
        array = as_array(field, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: field {name!r} {error}") from None
    if array.shape != field.shape:
        raise ConfigError(
            f"{where}: field {name!r} has shape {array.shape}, the field has {field.shape}"
        )
    return array


def ragged_value(name: str, field: Field, value: object, where: str) -> Bytes:
    """The bytes of one ragged value, (n,) uint8. Raises ConfigError."""
    if value is BLANK:
        return _EMPTY
    if field.is_json:
        try:
            raw = np.frombuffer(encode_value(field.dtype, value), np.uint8)
        except ConfigError as error:
            raise ConfigError(f"{where}: field {name!r} {error}") from None
    elif field.dtype == "str":
        if not isinstance(value, str):
            raise ConfigError(f"{where}: field {name!r} is a {type(value).__name__}, not a str")
        try:
            raw = np.frombuffer(value.encode(), np.uint8)
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: field {name!r} is not valid Unicode: {error}") from None
    elif field.is_bytes:
        raw = _raw_bytes(name, value, where)
        if field.media_type and not may_be(raw[:64].tobytes(), field.media_type):
            found = media_type_of(raw[:64].tobytes())
            raise ConfigError(
                f"{where}: field {name!r} is {found}, the field has {field.media_type}"
            )
    else:
        try:
            array = as_array(field, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: field {name!r} {error}") from None
        if array.ndim != len(field.shape) or array.shape[1:] != field.shape[1:]:
            raise ConfigError(
                f"{where}: field {name!r} has shape {array.shape}, the field has {field.shape}"
            )
        made = np.ascontiguousarray(array, field.storage)
        raw = made.reshape(-1).view(np.uint8) if made.size else _EMPTY
    if len(raw) > MAX_VALUE_BYTES:
        raise ConfigError(f"{where}: field {name!r} {too_large(len(raw))}")
    return raw


def too_large(nbytes: int) -> str:
    """What is wrong with a value of more than MAX_VALUE_BYTES. Pure."""
    return f"has {nbytes} bytes; at most {MAX_VALUE_BYTES} fit one value"


_EMPTY: Bytes = np.empty(0, np.uint8)
BLANK = object()
"""In the place of a ragged value that is None: no bytes."""


def _raw_bytes(name: str, value: object, where: str) -> Bytes:
    if isinstance(value, str | torch.Tensor):
        raise ConfigError(f"{where}: field {name!r} is a {type(value).__name__}, not bytes")
    try:
        view = memoryview(value)  # type: ignore[arg-type]  # raises TypeError for what is no buffer
    except TypeError:
        raise ConfigError(
            f"{where}: field {name!r} is a {type(value).__name__}, not bytes"
        ) from None
    if view.itemsize != 1:
        raise ConfigError(f"{where}: field {name!r} is an array of {view.format}, not bytes")
    return np.frombuffer(view.cast("B") if view.c_contiguous else view.tobytes(), np.uint8)


def ragged_rows(name: str, field: Field, values: object, where: str) -> list[Bytes]:
    """The bytes of many ragged values, from a sequence or an array with one value a row."""
    if isinstance(values, bytes | bytearray | str) or not isinstance(
        values, Sequence | np.ndarray | torch.Tensor
    ):
        raise ConfigError(
            f"{where}: field {name!r} is a {type(values).__name__}; the batch of a ragged field is "
            "a list with one value a row"
        )
    rows: Iterable[object] = values
    return [ragged_value(name, field, value, where) for value in rows]
