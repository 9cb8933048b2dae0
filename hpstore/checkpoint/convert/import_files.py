"""Files that others wrote as a committed step: safetensors, torch.save, DCP."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import fence_key, here
from hpstore.checkpoint.checkpointer import Checkpointer
from hpstore.checkpoint.convert.dcp_directories import METADATA, read_dcp
from hpstore.checkpoint.convert.export import FORMATS, guessed_format
from hpstore.checkpoint.convert.safetensors_files import read_safetensors
from hpstore.checkpoint.convert.torch_files import read_torch_file, tensors_in
from hpstore.checkpoint.format.checkpoint_manifest import checked_step
from hpstore.checkpoint.restore.tensor_stream import ByteProgress
from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.checkpoint.state.state_tree import PerRank
from hpstore.checkpoint.state.targets import RNG_KEY
from hpstore.errors import CheckpointError, ConfigError, ObjectNotFound, VersionConflict
from hpstore.format.records import unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.pool.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import committed."""

    step: int
    format: str
    path: str
    tensors: int
    bytes: int  # of tensors
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def import_checkpoint(
    pool: Pool,
    prefix: str,
    step: int,
    source: str | Path,
    *,
    format: str | None = None,  # noqa: A002 (the word that users look for)
    under: str = "",
    allow_pickle: bool = False,
    overwrite: bool = False,
    take_over: bool = False,
    progress: ByteProgress | None = None,
) -> ImportReport:
    """Commit what `source` holds as `step`: a safetensors file or folder, torch.save, DCP.

    `under` ("model") puts it into a subtree, which a model is restored from. safetensors and
    torch.save files are mapped; a DCP directory is read into memory whole. `allow_pickle`: for
    torch.save files with objects and for DCP, whose .metadata is a pickle; it runs code that the
    writer of the source chose, and objects in it are saved as pickles.

    Durable on return. A training that saves under the same prefix would lose its right to do so:
    refused while its process runs on this host, unless `take_over`. Raises CheckpointError for a
    source that cannot be read, VersionConflict for a step that exists unless `overwrite`. After an
    error nothing is visible.
    """
    began = time.perf_counter()
    path = Path(source)
    kind = _format(path, format)
    steps = StepCatalog(pool, prefix)
    if checked_step(step) in steps.all() and not overwrite:
        raise VersionConflict(f"step {step} under {prefix!r} exists; --overwrite replaces it")
    if not take_over:
        _refuse_living_writer(pool, prefix)
    state = _nested(_read(path, kind, allow_pickle), under, path)
    tensors = list(tensors_in(state))
    if RNG_KEY in state:
        state[RNG_KEY] = PerRank(state[RNG_KEY])
    total = sum(t.numel() * t.element_size() for t in tensors)
    if progress is not None:
        progress(0, total)
    lineage = {"imported_from": path.name, "format": kind}
    with Checkpointer(
        pool,
        prefix,
        rng=False,
        allow_pickle=allow_pickle,
        save=SaveOptions(warm=False, lineage=lineage),
    ) as checkpointer:
        told = _of_tensors(progress, total)
        checkpointer.save(step, state, overwrite=overwrite, progress=told).result()
    if progress is not None:
        progress(total, total)
    return ImportReport(
        step=step, format=kind, path=str(path), tensors=len(tensors), bytes=total,
        seconds=time.perf_counter() - began,
    )  # fmt: skip


def _of_tensors(progress: ByteProgress | None, total: int) -> ByteProgress | None:
    """A callback for what is written, told as bytes of tensors: segments are padded."""
    if progress is None:
        return None
    return lambda done, _: progress(min(done, total), total)


def _format(path: Path, asked: str | None) -> str:
    """The format of a source, by what is there. Raises ConfigError, CheckpointError."""
    if asked is not None and asked not in FORMATS:
        raise ConfigError(f"format {asked!r} is not one of {', '.join(FORMATS)}")
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if asked is not None:
        return asked
    if path.is_dir():
        if (path / METADATA).is_file():
            return "dcp"
        if any(path.glob("*.safetensors")):
            return "safetensors"
        raise CheckpointError(f"{path} holds neither .safetensors files nor a DCP {METADATA}")
    guess = guessed_format(path)
    if guess is None:
        raise ConfigError(f"the format of {path} is not clear by its name; say --format")
    return guess


# Any below: nested values of a training state, checked leaf by leaf when they are saved
def _read(path: Path, kind: str, allow_pickle: bool) -> Any:
    if kind == "dcp":
        return read_dcp(path, allow_pickle=allow_pickle)
    if kind == "safetensors":
        return read_safetensors(path)
    return read_torch_file(path, allow_pickle=allow_pickle)


def _nested(value: Any, under: str, path: Path) -> dict[str, Any]:
    """The state to save: the value, under a path of names."""
    for name in reversed([part for part in under.split("/") if part]):
        value = {name: value}
    if not isinstance(value, Mapping) or not all(type(name) is str for name in value):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__} that is no dict with str names; --as NAME puts "
            "it under one"
        )
    return dict(value)


def _refuse_living_writer(pool: Pool, prefix: str) -> None:
    """Raise VersionConflict when the last to save under `prefix` still runs on this host."""
    key = fence_key(prefix)
    try:
        body = unseal(pool.get(key), where=key)
    except ObjectNotFound:
        return
    host, boot, _ = here()
    with parsing(key):
        pid = int(str(body.get("pid", 0)))
    if (body.get("host"), body.get("boot")) != (host, boot) or pid in (0, os.getpid()):
        return
    if Path(f"/proc/{pid}").exists():
        raise VersionConflict(
            f"process {pid} on this host saves under {prefix!r}; an import would end its right to. "
            "Import under another prefix, or say --take-over (take_over=True)"
        )


__all__ = ["ImportReport", "import_checkpoint"]
