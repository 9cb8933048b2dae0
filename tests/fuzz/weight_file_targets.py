"""Parsers of files of weights that others wrote: safetensors and torch.save."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from hpstore.checkpoint.convert.dcp_directories import OneByOne
from hpstore.checkpoint.convert.metadata_pickle import nested, read_metadata_pickle
from hpstore.checkpoint.convert.safetensors_files import read_safetensors
from hpstore.checkpoint.convert.torch_files import read_torch_file, tensors_in
from hpstore.checkpoint.dcp.storage_reader import checked_bytes
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import scratch

LARGE = 1 << 16  # elements; larger tensors are not made here


def safetensors(entries: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + payload


def safetensors_seeds() -> list[bytes]:
    entries = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    }
    return [safetensors(entries, bytes(22))]


def safetensors_body(data: bytes) -> list[bytes]:
    size = int.from_bytes(data[:8], "little")
    return [data[8 : 8 + size], data[8 + size :]]


def safetensors_file(parts: Sequence[bytes]) -> bytes:
    return len(parts[0]).to_bytes(8, "little") + parts[0] + b"".join(parts[1:])


def take_safetensors(data: bytes) -> None:
    for one in read_safetensors(scratch("m.safetensors", data)).values():
        one.sum()


def take_index(data: bytes) -> None:
    folder = scratch("model.safetensors.index.json", data).parent / "hf"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(data)
    (folder / "a.safetensors").write_bytes(safetensors_seeds()[0])
    read_safetensors(folder)


def torch_seeds() -> list[bytes]:
    made = []
    state = {
        "w": torch.arange(6.0).reshape(2, 3),
        "n": [1, "a", {"b": torch.ones(2, dtype=torch.int8)}],
    }
    for zipped in (True, False):
        raw = io.BytesIO()
        torch.save(state, raw, _use_new_zipfile_serialization=zipped)
        made.append(raw.getvalue())
    return made


def zip_body(data: bytes) -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [part for m in archive.infolist() for part in (m.filename.encode(), archive.read(m))]


def zip_file(parts: Sequence[bytes]) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, body in zip(parts[::2], parts[1::2], strict=False):
            archive.writestr(name.decode(errors="replace").replace("\0", "") or "x", body)
    return raw.getvalue()


def take_torch(data: bytes) -> None:
    found = read_torch_file(scratch("m.pt", data), allow_pickle=False)
    for one in tensors_in(found):
        if one.layout is torch.strided and one.numel() <= LARGE:
            one.clone()


def take_dcp_bytes(data: bytes) -> None:
    checked_bytes(io.BytesIO(data), "x")


def metadata_seeds() -> list[bytes]:
    """A .metadata as torch pickles it, by two protocols."""
    planner = OneByOne(lambda found: found)
    state = {"a": [torch.ones(2, 3), {"b": 1}], "c": torch.ones(0)}
    planner.set_up_planner(state, is_coordinator=True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    metadata.storage_data = {
        MetadataIndex(name, None if offset is None else torch.Size(offset)): _StorageInfo("x", 0, n)
        for name, offset, n in [("a.0", (0, 0), 24), ("a.1.b", None, 9), ("c", (0,), 0)]
    }
    return [pickle.dumps(metadata, protocol=protocol) for protocol in (2, 4)]


def take_metadata(data: bytes) -> None:
    found = read_metadata_pickle(data, "x")
    nested(found.names, found.paths, lambda name: None)


WEIGHT_FILE_TARGETS = [
    Target(name="dcp-metadata", run=take_metadata, seeds=metadata_seeds),
    Target(
        name="safetensors",
        run=take_safetensors,
        seeds=safetensors_seeds,
        take_apart=safetensors_body,
        put_together=safetensors_file,
    ),
    Target(
        name="safetensors-index",
        run=take_index,
        seeds=lambda: [
            b'{"metadata": {}, "weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}'
        ],
    ),
    Target(
        name="torch-file",
        run=take_torch,
        seeds=torch_seeds,
        take_apart=zip_body,
        put_together=zip_file,
    ),
    Target(
        name="dcp-bytes",
        run=take_dcp_bytes,
        seeds=torch_seeds,
        take_apart=zip_body,
        put_together=zip_file,
    ),
]
