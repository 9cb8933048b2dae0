"""TFRecord files of tf.train.Example (needs `tfrecord`, the extra `tfrecord`).

The frames are read here, and their checksums compared: the packages that read them without
TensorFlow do not. What is in a frame is parsed by protobuf, with that package's messages.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import IO, Any

import google_crc32c
import numpy as np

from hpstore.errors import ConfigError, IngestError
from hpstore.format.untrusted_bytes import MALFORMED, brief, most_inflated
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.json_values import parse_value
from hpstore.loaders.ingestion.compressed_files import STREAM_ERRORS, FilePosition, decompressed
from hpstore.loaders.ingestion.infer_fields import infer_fields
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    InferredFields,
    digest_of,
    printable,
)
from hpstore.loaders.ingestion.source_paths import SourceFile, file_facts, source_files
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.units import MIB, format_bytes

TFRECORD = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")
LOOKED_AT = 1000
_PIECE_BYTES = MIB
_UNSET = ()  # a feature of no type: no values, of the type that it has in other examples


class TfRecords(InferredFields):
    """Examples of TFRecord files; a block is a file. What has another checksum is a bad record.

    A feature is a scalar (int64, float32) or bytes where each of the first 1000 examples has one
    value, else a ragged array; several byte strings are refused. As fields={...: Field("str")} a
    value is text, as Field("str", (None,)) several are, and so on for images and JSON.
    """

    kind = "tfrecord"
    by_files = True

    def __init__(
        self, where: str | os.PathLike[str], *, storage: Mapping[str, object] | None = None
    ) -> None:
        super().__init__()
        with needed("TFRecord needs tfrecord", extra="tfrecord"):
            from tfrecord.example_pb2 import Example
        self._example: Any = Example  # Any: it ships no types
        self.where = printable(str(where))
        self._files = source_files(where, TFRECORD, storage or {})
        self.blocks = len(self._files)
        self._position = FilePosition()

    def block_bytes(self, block: int) -> int:
        return self._files[block].stat().st_size

    def bytes_read(self) -> int:
        return self._position.reached()

    def _found(self) -> dict[str, Field]:
        if self._names is not None and all(name in self._types for name in self._names):
            return {name: self._types[name] for name in self._names}
        frames = (frame for file in self._files for frame in read_frames(file))
        parsed = [
            self._features(data) for data, problem in islice(frames, LOOKED_AT) if not problem
        ]
        examples = [features for features in parsed if isinstance(features, dict)]
        if self._names is not None:
            wanted = self._names
            examples = [{n: v for n, v in features.items() if n in wanted} for features in examples]
        if not examples:
            raise IngestError(
                f"{self.where}: no example to infer the fields from; nothing was written"
            )
        try:
            return {**example_fields(examples), **self._types}
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None

    def _features(self, data: bytes) -> dict[str, Any] | str:
        """Values by name, or what is wrong."""
        try:
            example = self._example.FromString(data)
        except Exception as error:  # noqa: BLE001 (protobuf's DecodeError; its module is private)
            return f"it is no tf.train.Example: {brief(error)}"
        found: dict[str, Any] = {}
        for name, feature in sorted(example.features.feature.items()):
            kind = feature.WhichOneof("kind")
            if kind == "bytes_list":
                found[name] = list(feature.bytes_list.value)
            elif kind == "float_list":
                found[name] = np.array(feature.float_list.value, np.float32)
            elif kind == "int64_list":
                found[name] = np.array(feature.int64_list.value, np.int64)
            else:
                found[name] = _UNSET
        return found

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every file."""
        return digest_of([self.kind, *file_facts(self._files)])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        file, fields, whole = self._files[block], self.fields, self._names is None
        for number, (data, problem) in islice(
            enumerate(read_frames(file, self._position)), start, None
        ):
            sample: dict[str, object] | None = None
            found = problem or self._features(data)
            if isinstance(found, str):
                problem = found
            else:
                try:
                    sample = {name: _value(name, found, made) for name, made in fields.items()}
                    if whole and len(found) > len(sample):
                        odd = sorted(found.keys() - sample.keys())[0]
                        raise ConfigError(f"it has {odd!r}, which the first examples have not")
                except ConfigError as error:
                    sample, problem = None, str(error)
            yield SourceItem(
                name=f"{printable(file.name)} record {number}",
                origin=block << BLOCK_SHIFT | number,
                sample=sample,
                problem=problem,
            )


def example_fields(examples: Sequence[Mapping[str, Any]]) -> dict[str, Field]:
    """Fields of features. The one place where such a schema becomes fields. Raises ConfigError."""
    examples = _typed(examples)
    single = {
        name for name in examples[0] if all(len(each.get(name, ())) == 1 for each in examples)
    }
    samples = []
    for example in examples:
        sample: dict[str, object] = {}
        for name, value in example.items():
            if isinstance(value, list) and name not in single:
                raise ConfigError(
                    f"feature {name!r} has several byte strings or none, which is taken as a list "
                    "of texts alone: fields={...: Field('str', (None,))}, or leave it out"
                )
            sample[name] = value[0] if name in single else value
        samples.append(sample)
    return infer_fields(samples)


def _typed(examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same, with what is not set as no values of the type in others, or of int64."""
    empty: dict[str, Any] = {}
    for name, value in ((n, v) for example in examples for n, v in example.items()):
        if value is not _UNSET:
            empty.setdefault(name, value[:0])
    none = np.empty(0, np.int64)
    return [
        {n: empty.get(n, none) if v is _UNSET else v for n, v in example.items()}
        for example in examples
    ]


def _value(name: str, found: Mapping[str, Any], made: Field) -> object:
    """A feature as the field has it. Raises ConfigError."""
    if made.optional and found.get(name, _UNSET) is _UNSET:
        return None
    if name not in found:
        raise ConfigError(f"it lacks {name!r}; it has {sorted(found)[:20]}")
    value, raw = found[name], made.is_bytes or made.is_json or made.dtype == "str"
    if made.dtype == "str" and made.shape:
        return [_text(name, one) for one in _several(name, value)]
    if raw or not made.shape:
        if len(value) != 1 or isinstance(value, list) is not raw:
            raise ConfigError(f"{name!r} has {len(value)} values, the field is one {made.dtype}")
        value = value[0]
    elif value is _UNSET:
        return np.empty((0, *made.inner_shape), made.storage)
    if made.is_json:
        try:
            return parse_value(made.dtype, value)
        except ValueError as error:
            raise ConfigError(f"{name!r}: {error}") from None
    return _text(name, value) if made.dtype == "str" else value


def _several(name: str, value: Any) -> list[bytes]:
    """The values of a feature of texts; none where it is not set. Raises ConfigError."""
    if value is _UNSET:
        return []
    if not isinstance(value, list):
        raise ConfigError(f"{name!r} has numbers, the field is a list of texts")
    return value


def _text(name: str, value: bytes) -> str:
    """UTF-8 as text. Raises ConfigError."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name!r} is no UTF-8: {error.reason}") from None


def read_frames(
    file: SourceFile, position: FilePosition | None = None
) -> Iterator[tuple[bytes, str]]:
    """The records of a file, or what is wrong; nothing comes behind a length that is damaged."""
    count = 0
    try:
        most = most_inflated(file.stat().st_size)
        with decompressed(file, position) as stream:
            while head := stream.read(12):
                length, masked = struct.unpack("<QI", head)
                if masked_crc(head[:8]) != masked:
                    yield b"", f"the length of record {count} is damaged: nothing is read behind it"
                    return
                if length > most:
                    yield b"", f"record {count} has {format_bytes(length)}, far more than its file"
                    return
                data = _read(stream, length)
                tail = stream.read(4)
                if len(data) < length or len(tail) < 4:
                    yield b"", f"it is cut short in record {count}"
                    return
                good = struct.unpack("<I", tail)[0] == masked_crc(data)
                yield (data, "") if good else (b"", "its bytes do not match their checksum")
                count += 1
    except (*STREAM_ERRORS, *MALFORMED) as error:
        yield b"", f"it cannot be read past record {count}: {brief(error)}"


def _read(stream: IO[bytes], length: int) -> bytes:
    """So many bytes, or what there is; memory grows with what is there."""
    if length <= _PIECE_BYTES:
        return stream.read(length)
    parts = bytearray()
    while len(parts) < length and (part := stream.read(min(length - len(parts), _PIECE_BYTES))):
        parts += part
    return bytes(parts)


def masked_crc(data: bytes) -> int:
    """CRC-32C as TFRecord stores it."""
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
