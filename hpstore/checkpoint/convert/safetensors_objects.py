"""safetensors files as objects of a pool: made in memory, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hpstore.checkpoint.convert.safetensors_files import (
    NAMES,
    StoredTensor,
    TensorEntry,
    aligned,
    header,
    read_header,
)
from hpstore.checkpoint.restore.fresh_memory import fresh
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, MalformedFile
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.pool.pool import Pool
from hpstore.units import MIB

RUN_BYTES = 16 * MIB  # small tensors are read together: each read alone costs milliseconds


def put_safetensors(
    pool: Pool, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> str:
    """Put tensors as one file; the version that it has. Durable on return.

    Memory: the file. Raises CheckpointError for a tensor that the format cannot hold.
    """
    entries = aligned([_entry(name, tensor) for name, tensor in tensors.items()])
    head = header(entries, metadata)
    data: Bytes = np.empty(len(head) + sum(entry.nbytes for entry in entries), np.uint8)
    data[: len(head)] = np.frombuffer(head, np.uint8)
    at = len(head)
    for entry in entries:
        flat = tensors[entry.name].detach().cpu().contiguous().reshape(-1)
        data[at : at + entry.nbytes] = flat.view(torch.uint8).numpy()
        at += entry.nbytes
    return pool.put(key, data).version


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{name!r} is a {tensor.layout} tensor of {dtype} on {tensor.device}, which a "
            "safetensors file cannot hold. Nothing names what was written until now"
        )
    return TensorEntry(
        name=name,
        source=name,
        dtype=dtype,
        shape=tuple(tensor.shape),
        nbytes=tensor.numel() * tensor.element_size(),
    )


def read_safetensors_object(reader: PooledReader, where: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, each in memory of its own on the CPU; the caller owns them.

    Memory besides them: RUN_BYTES. Every byte is verified by the pool. Raises MalformedFile.
    """
    at = [0]

    def read(count: int) -> bytes:
        found = bytearray(count)
        got = reader.read_into(found, at[0])
        at[0] += got
        return bytes(found[:got])

    start, rows = read_header(read, reader.size, where)
    found = {row.name: fresh(row.shape, row.dtype, None) for row in rows}
    for run in _runs(rows):
        data: Bytes = (
            _flat(found[run[0].name])
            if len(run) == 1
            else np.empty(run[-1].high - run[0].low, np.uint8)
        )
        if reader.read_into(data, start + run[0].low) != len(data):
            raise MalformedFile(f"{where} ends within {run[-1].name!r}")
        if len(run) > 1:
            for row in run:
                _flat(found[row.name])[:] = data[row.low - run[0].low : row.high - run[0].low]
    return found


def _flat(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _runs(rows: list[StoredTensor]) -> list[list[StoredTensor]]:
    """Neighbours that one read takes, none of them empty. Pure."""
    runs: list[list[StoredTensor]] = []
    for row in sorted((row for row in rows if row.high > row.low), key=lambda row: row.low):
        if not runs or row.high - runs[-1][0].low > RUN_BYTES:
            runs.append([])
        runs[-1].append(row)
    return runs
