"""Where bytes of a stored range go: into memory, a tensor, a decoder, or to a hash alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import xxhash

from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.segment_codecs import decode
from hpstore.checkpoint.state.scalars import dtype_named
from hpstore.codec.galois import Bytes
from hpstore.errors import IntegrityError


class TensorTarget(Protocol):
    """Takes the bytes of one stored range, in order; when they come again, from the first."""

    def take(self, at: int, data: Bytes) -> None:
        """Bytes at `at` of the range; good until the return."""


class ItemDigest:
    """Hash of an item over all its reads, which come in order."""

    def __init__(self, item: Item) -> None:
        self._item, self._hash, self._at = item, xxhash.xxh3_128(), 0

    def take(self, at: int, data: Bytes, total: int) -> None:
        if at == 0:
            self._hash.reset()
            self._at = 0
        if at != self._at:
            raise IntegrityError(f"item {self._item.name!r} was read out of order")
        self._hash.update(data.data)
        self._at += len(data)
        if self._at == total and self._hash.hexdigest() != self._item.digest:
            raise IntegrityError(
                f"item {self._item.name!r} does not match the hash it was saved with"
            )


class MemoryTarget:
    """Into memory that lies as the stored bytes do."""

    def __init__(self, target: Bytes, digest: ItemDigest | None) -> None:
        self._target, self._digest = target, digest

    def take(self, at: int, data: Bytes) -> None:
        copied = self._target[at : at + len(data)]
        copied[:] = data
        if self._digest is not None:  # of the copy: a save may write `data` again meanwhile
            self._digest.take(at, copied, len(self._target))


class GatherTarget:
    """Into a buffer, and from there, strided, cast or over a bus, into a tensor."""

    def __init__(
        self,
        target: torch.Tensor,
        dtype: torch.dtype,
        strides: Sequence[int],
        length: int,
        digest: tuple[ItemDigest, int, int] | None,
    ) -> None:
        self._target, self._dtype, self._strides = target, dtype, strides
        self._length, self._digest = length, digest
        self._buffer: Bytes | None = None

    def take(self, at: int, data: Bytes) -> None:
        if self._buffer is None:
            self._buffer = np.empty(self._length, np.uint8)
        self._buffer[at : at + len(data)] = data
        if self._digest is not None:
            digest, base, total = self._digest
            digest.take(base + at, data, total)
        if at + len(data) == self._length:
            flat = torch.from_numpy(self._buffer).view(self._dtype)
            with torch.no_grad():
                self._target.copy_(flat.as_strided(self._target.shape, self._strides))
            self._buffer = None


class ItemCheck:
    """Hashes an item, keeps nothing; notes it when it is not what was saved."""

    def __init__(self, item: Item, damaged: list[str], seen: Callable[[int], None] | None) -> None:
        self._item, self._damaged, self._digest, self._seen = item, damaged, ItemDigest(item), seen

    def take(self, at: int, data: Bytes) -> None:
        if self._seen is not None:
            self._seen(len(data))
        try:
            self._digest.take(at, data, raw_bytes(self._item))
        except IntegrityError:
            self._damaged.append(self._item.name)


class FramedTarget:
    """Decompresses frames; hands on the raw bytes that are wanted of them."""

    def __init__(
        self,
        codec: str,
        lengths: Sequence[int],
        raw: Sequence[int],
        skip: int,
        inner: TensorTarget,
        length: int,
    ) -> None:
        self._codec, self._raw, self._inner = codec, raw, inner
        self._ends = list(itertools.accumulate(lengths))
        self._starts = [0, *self._ends[:-1]]
        self._skip, self._length = skip, length
        self._buffer: Bytes = np.empty(max(lengths), np.uint8)
        self._frame = 0
        self._given = 0

    def take(self, at: int, data: Bytes) -> None:
        if at == 0:
            self._frame = self._given = 0
        while len(data):
            start, end = self._starts[self._frame], self._ends[self._frame]
            count = min(len(data), end - at)
            self._buffer[at - start : at - start + count] = data[:count]
            at, data = at + count, data[count:]
            if at == end:
                self._finish(end - start)

    def _finish(self, stored: int) -> None:
        out: Bytes = np.empty(self._raw[self._frame], np.uint8)
        decode(self._codec, self._buffer[:stored], out)
        first = self._skip if self._frame == 0 else 0
        wanted = out[first : first + self._length - self._given]
        self._inner.take(self._given, wanted)
        self._given += len(wanted)
        self._frame += 1


def raw_bytes(item: Item) -> int:
    return item.box.count * dtype_named(item.dtype).itemsize
