"""Files that others wrote as a committed step: safetensors, torch.save, DCP."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpstore.checkpoint.catalog.fence_record import fence_key
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import here
from hpstore.checkpoint.checkpointer import ALONE, Checkpointer
from hpstore.checkpoint.convert.dcp_directories import METADATA, unpickle_dcp
from hpstore.checkpoint.convert.dcp_sources import SCHEME, read_plain_dcp
from hpstore.checkpoint.convert.export import FORMATS, guessed_format
from hpstore.checkpoint.convert.safetensors_files import read_safetensors
from hpstore.checkpoint.convert.torch_files import read_torch_file, tensors_in
from hpstore.checkpoint.convert.torchtitan_layout import from_torchtitan, require_layout
from hpstore.checkpoint.format.checkpoint_manifest import checked_step
from hpstore.checkpoint.restore.tensor_stream import ByteProgress
from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.checkpoint.state.state_tree import PerRank
from hpstore.checkpoint.state.targets import RNG_KEY
from hpstore.errors import (
    CheckpointError,
    ConfigError,
    MalformedFile,
    ObjectNotFound,
    VersionConflict,
)
from hpstore.format.records import unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.pool.pool import Pool
from hpstore.runtime.text_files import checked_path


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
    layout: str | None = None,
    under: str = "",
    allow_pickle: bool = False,
    overwrite: bool = False,
    take_over: bool = False,
    progress: ByteProgress | None = None,
) -> ImportReport:
    """Commit a checkpoint of another format as a step. Durable on return.

    Not collective: of the ranks of a job one calls it. safetensors and torch.save files are mapped;
    a DCP directory is read into memory whole. After an error nothing is visible.

    Parameters
    ----------
    pool, prefix, step
        Where to, as for a Checkpointer and its save().
    source
        A safetensors file or folder, a torch.save file, a DCP directory or "hpstore://NAME/path".
    format
        "safetensors", "torch" or "dcp". Default: what the source looks like.
    layout
        "torchtitan": what lies at the top becomes "model", flattened optimizers can be restored.
    under
        Subtree to put it into, such as "model", which a model is restored from.
    allow_pickle
        Accept files and DCP folders with objects: runs code that their writer chose, saves pickles.
    overwrite
        Replace the step if it is committed already.
    take_over
        Import although a training on this host saves under the prefix. Its next save then fails.
    progress
        Called with bytes written and in all.

    Raises
    ------
    CheckpointError, VersionConflict
        The source cannot be read, or a training saves under the prefix; the step exists.
    """
    if not isinstance(source, str) or "://" not in source:
        checked_path(source, "source", recorded=True)
    began, kind = time.perf_counter(), _kind(source, format, layout, allow_pickle)
    _require_free(pool, prefix, step, overwrite=overwrite, take_over=take_over)
    state = _nested(_read(source, kind, layout, allow_pickle), under, source)
    options = SaveOptions(warm=False, lineage={"imported_from": Path(source).name, "format": kind})
    with Checkpointer(
        pool, prefix, rng=False, group=ALONE, allow_pickle=allow_pickle, save=options
    ) as ckpt:
        tensors, nbytes = _saved(ckpt, step, state, overwrite, progress)
    path, seconds = os.fspath(source), time.perf_counter() - began
    return ImportReport(
        step=step, format=kind, path=path, tensors=tensors, bytes=nbytes, seconds=seconds
    )


def _saved(
    ckpt: Checkpointer,
    step: int,
    state: dict[str, Any],
    overwrite: bool,
    progress: ByteProgress | None,
) -> tuple[int, int]:
    """Save what was read; how many tensors it has, and their bytes."""
    tensors = list(tensors_in(state))
    if RNG_KEY in state:
        state[RNG_KEY] = PerRank(state[RNG_KEY])
    total = sum(t.numel() * t.element_size() for t in tensors)
    if progress is not None:
        progress(0, total)
    written = _of_tensors(progress, total)
    ckpt.save(step, state, overwrite=overwrite, progress=written).result()
    if progress is not None:
        progress(total, total)
    return len(tensors), total


def _require_free(pool: Pool, prefix: str, step: int, *, overwrite: bool, take_over: bool) -> None:
    """Raise VersionConflict when the step exists, CheckpointError when a training saves there."""
    if checked_step(step) in StepCatalog(pool, prefix).all() and not overwrite:
        raise VersionConflict(f"step {step} under {prefix!r} exists; --overwrite replaces it")
    if not take_over:
        _refuse_living_writer(pool, prefix)


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


def _kind(source: str | Path, asked: str | None, layout: str | None, allow_pickle: bool) -> str:
    """The format of a source. Raises ConfigError, CheckpointError."""
    url = _is_url(source)
    kind = _url_format(source, asked, allow_pickle) if url else _format(Path(source), asked)
    require_layout(layout, kind)
    return kind


def _is_url(source: str | Path) -> bool:
    return os.fspath(source).startswith(SCHEME)


def _url_format(url: str | Path, asked: str | None, allow_pickle: bool) -> str:
    """The format of a source in a pool, which must be DCP. Raises ConfigError."""
    if asked not in (None, "dcp"):
        raise ConfigError(
            f"{url} is imported as dcp alone. Nothing was imported. Copy a file of {asked} to a "
            "disk first: fsspec.filesystem('hpstore').get(url, path)"
        )
    if allow_pickle:
        raise ConfigError(
            f"{url} is read without running code alone. Nothing was imported. Copy it to a folder "
            "that you trust first: fsspec.filesystem('hpstore').get(url, folder, recursive=True)"
        )
    return "dcp"


# Any below: nested values of a training state, checked leaf by leaf when they are saved
def _read(source: str | Path, kind: str, layout: str | None, allow_pickle: bool) -> Any:
    """What the source holds, in a Checkpointer's layout if its own is another."""
    path = Path(source)
    if _is_url(source):
        found: Any = read_plain_dcp(source)
    elif kind == "dcp":
        found = unpickle_dcp(path) if allow_pickle else _plain_dcp(path)
    elif kind == "safetensors":
        found = read_safetensors(path)
    else:
        found = read_torch_file(path, allow_pickle=allow_pickle)
    return found if layout is None else from_torchtitan(found)


def _plain_dcp(path: Path) -> Any:
    """A DCP directory without running code; what refuses it names the flag."""
    if not (path / METADATA).is_file():
        raise CheckpointError(f"{path} is no DCP checkpoint: it has no {METADATA}")
    try:
        return read_plain_dcp(path)
    except (CheckpointError, MalformedFile) as error:
        raise type(error)(
            f"{str(error).removesuffix('.')}. Nothing was imported. If you trust the directory, "
            "torch reads it and runs its code: --allow-pickle (allow_pickle=True)"
        ) from error


def _nested(value: Any, under: str, source: str | Path) -> dict[str, Any]:
    """The state to save: the value, under a path of names."""
    for name in reversed([part for part in under.split("/") if part]):
        value = {name: value}
    if not isinstance(value, Mapping) or not all(type(name) is str for name in value):
        raise CheckpointError(
            f"{source} holds a {type(value).__name__} that is no dict with str names; --as NAME "
            "puts it under one"
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
