"""A committed step as files that others read: safetensors, torch.save, DCP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from hpstore.checkpoint.catalog.removed_steps import reading_step
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.convert import dcp_directories, safetensors_files
from hpstore.checkpoint.convert.atomic_files import published
from hpstore.checkpoint.convert.export_choices import export_dtype, model_keys, narrowed, rounded
from hpstore.checkpoint.convert.safetensors_files import INDEX, NAMES, TensorEntry
from hpstore.checkpoint.convert.torch_files import write_torch_file
from hpstore.checkpoint.convert.torchtitan_layout import require_layout, to_torchtitan
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.restore.tensor_stream import ByteProgress, TensorStream
from hpstore.checkpoint.state.scalars import dtype_named
from hpstore.checkpoint.state.targets import RNG_KEY
from hpstore.checkpoint.state.tree_paths import (
    leaves,
    of_rank,
    only_branch,
    plain,
    stripped,
    subtree,
)
from hpstore.errors import CheckpointError, ConfigError
from hpstore.pool.pool import Pool
from hpstore.runtime.text_files import checked_path
from hpstore.units import GIB, parse_bytes

FORMATS = ("safetensors", "torch", "dcp")
_SUFFIXES = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
SHARD_BYTES = 5 * GIB  # as Hugging Face cuts by default


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export wrote. `left_out`: paths of entries that are not in it."""

    step: int
    format: str
    path: str
    files: tuple[str, ...]
    tensors: int
    bytes: int  # of tensors, as they were written
    left_out: tuple[str, ...]
    seconds: float
    cast: tuple[str, ...] = ()  # tensors that were written in another dtype

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The part of a step that is exported."""

    manifest: Manifest
    tree: Any  # Any: JSON, see outline.py
    prefix: str  # stripped from names
    left_out: tuple[str, ...]
    dtype: torch.dtype | None = None  # of floats that are wider
    kind: str = FORMATS[0]
    layout: str | None = None

    def written_dtype(self, item: Item) -> torch.dtype:
        """What a tensor is written as."""
        return narrowed(dtype_named(item.dtype), self.dtype)

    def placeholder(self, item: Item, device: str | None = None) -> torch.Tensor:
        """A tensor without values in the place of one that is written later."""
        return torch.empty(item.shape, dtype=self.written_dtype(item), device=device)

    def state(self, placeholder: Callable[[str], torch.Tensor]) -> Any:
        """Nested values, in the layout that was asked for."""
        found = plain(self.tree, placeholder)
        return found if self.layout is None else to_torchtitan(found)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(leaf.item for leaf in leaves(self.tree) if leaf.item))


def guessed_format(path: Path) -> str | None:
    """The format that a file's suffix says; None for other names."""
    return _SUFFIXES.get(path.suffix)


def export_checkpoint(
    pool: Pool,
    prefix: str,
    step: int,
    target: str | Path,
    *,
    format: str | None = None,  # noqa: A002 (the word that users look for)
    layout: str | None = None,
    keys: Collection[str] | None = None,
    strip: str | None = None,
    max_shard_bytes: int | str = SHARD_BYTES,
    dtype: str | torch.dtype | None = None,
    model_only: bool = False,
    rank: int = 0,
    force: bool = False,
    progress: ByteProgress | None = None,
) -> ExportReport:
    """Write a committed step, or parts of it, as files of others. Every byte is verified.

    Durable on return; before that nothing has the name `target`. Memory: 256 MiB or the largest
    tensor, whichever is more, dcp twice that.

    Parameters
    ----------
    target, format
        A file or a folder; "safetensors", "torch" (nested dicts) or "dcp". Default: by the suffix,
        for a folder (no suffix, or one that is there) safetensors with Hugging Face's names.
    layout
        "torchtitan": dcp with the model's tensors at the top and flattened optimizers.
    keys, strip
        The parts to export (default: all), and the path that names lose (default for safetensors:
        that of the one subtree which holds all tensors; slashes become dots).
    max_shard_bytes
        Of one safetensors file in a folder, unless a tensor is larger: a number or "5GB".
    dtype
        "bf16", "fp16" or "fp32": wider floating tensors are rounded to it. All others stay.
    model_only
        Export the model alone: what is called "model", or has an optimizer's parameters.
    rank, force, progress
        Whose values are exported of those kept by rank; replace what is there; called with bytes.

    Returns
    -------
    ExportReport
        The files, and what was left out.

    Raises
    ------
    ConfigError, CheckpointError, IntegrityError, RedundancyError
        An argument is wrong; the step or the format lacks it; bytes cannot be read.
    """
    began, path = time.perf_counter(), Path(checked_path(target, "target")).absolute()
    kind = _format(format, path, target)
    require_layout(layout, kind)
    catalog, shard_bytes = StepCatalog(pool, prefix), parse_bytes(max_shard_bytes)
    manifest = catalog.manifest(step)
    keys = model_keys(manifest.tree, keys, model_only=model_only)
    chosen = _choose(manifest, kind, keys, strip, rank)
    chosen = replace(chosen, dtype=export_dtype(dtype), kind=kind, layout=layout)
    return _exported(catalog, path, chosen, shard_bytes, force, progress, began)


def _exported(
    catalog: StepCatalog,
    path: Path,
    chosen: _Chosen,
    shard_bytes: int,
    force: bool,
    progress: ByteProgress | None,
    began: float,
) -> ExportReport:
    """Write what was chosen."""
    manifest, kind = chosen.manifest, chosen.kind
    items = {item.name: item for item in manifest.items}

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return rounded(name, tensor, chosen.written_dtype(items[name]))

    order = _order(kind, chosen, shard_bytes, path)
    stream = TensorStream(catalog.pool, manifest, order, progress, cast)
    with reading_step(catalog, manifest):
        files = _write(kind, path, chosen, stream, force, shard_bytes)
    written = {name: chosen.written_dtype(items[name]) for name in chosen.names}
    return ExportReport(
        step=manifest.step,
        format=kind,
        path=str(path),
        files=tuple(files),
        tensors=len(written),
        bytes=sum(prod(items[n].shape) * made.itemsize for n, made in written.items()),
        left_out=chosen.left_out,
        seconds=time.perf_counter() - began,
        cast=tuple(n for n, made in written.items() if made != dtype_named(items[n].dtype)),
    )


def _write(
    kind: str, path: Path, chosen: _Chosen, stream: TensorStream, force: bool, shard_bytes: int
) -> list[str]:
    """The names of the files."""
    if kind == "torch":
        return _to_torch(path, chosen, stream, force)
    if kind == "dcp":
        return _to_dcp(path, chosen, stream, force)
    if path.suffix == ".safetensors":
        return _to_one_file(path, chosen, stream, force)
    return _to_folder(path, chosen, stream, force, shard_bytes)


def _format(asked: str | None, path: Path, target: str | Path) -> str:
    """The format asked for, or that of the suffix. Raises ConfigError for one that is unknown."""
    kind = asked or guessed_format(path) or _folder_format(target)
    if kind not in FORMATS:
        raise ConfigError(f"format {kind!r} is not one of {', '.join(FORMATS)}")
    return kind


def _folder_format(target: str | Path) -> str:
    """The format of what is no file of a known suffix. Raises ConfigError unless it is a folder."""
    path = Path(target)
    if path.suffix and not str(target).endswith("/") and not path.is_dir():
        raise ConfigError(
            f"the suffix of {path.name!r} says no format: it is none of {', '.join(_SUFFIXES)}. "
            f"Nothing was written. Say --format ({', '.join(FORMATS)}), or end the name of a "
            "folder with a slash"
        )
    return "safetensors"


def _choose(
    manifest: Manifest, kind: str, keys: Collection[str] | None, strip: str | None, rank: int
) -> _Chosen:
    everything = manifest.tree
    tree = subtree(everything, list(keys) if keys is not None else None)
    if kind == "safetensors" and keys is None and isinstance(tree, dict):
        tree = {name: child for name, child in tree.items() if name != RNG_KEY}
    before = {leaf.path for leaf in leaves(tree)}
    tree = of_rank(tree, rank)
    left = before - {leaf.path for leaf in leaves(tree)}
    if kind == "safetensors":
        left |= {leaf.path for leaf in leaves(tree) if not leaf.item}
        if keys is None and isinstance(everything, dict) and RNG_KEY in everything:
            left |= {leaf.path for leaf in leaves(everything[RNG_KEY], RNG_KEY)}
        tree = _tensors_only(tree)
        strip = only_branch(tree) if strip is None else strip
    if strip:
        tree = stripped(tree, strip)
    return _Chosen(
        manifest=manifest, tree=tree, prefix=(strip or "").strip("/"), left_out=tuple(sorted(left))
    )


def _tensors_only(tree: Any) -> Any:
    """A tree without the plain values of its dicts; lists are kept as they are."""
    if not isinstance(tree, dict) or "$" in tree:
        return tree
    kept = {name: _tensors_only(child) for name, child in tree.items()}
    return {n: child for n, child in kept.items() if any(leaf.item for leaf in leaves(child))}


def _order(kind: str, chosen: _Chosen, max_shard_bytes: int, path: Path) -> list[str]:
    """Names of tensors in the order in which they will be written."""
    if kind != "safetensors":
        return chosen.names
    limit = 1 << 62 if path.suffix == ".safetensors" else max_shard_bytes
    return [e.source for shard in _shards(chosen, limit) for e in shard]


def _entries(chosen: _Chosen) -> list[TensorEntry]:
    """What goes into safetensors files. Raises CheckpointError for what they cannot hold."""
    items = {item.name: item for item in chosen.manifest.items}
    found: dict[str, TensorEntry] = {}
    for name in chosen.names:
        item = items[name]
        dtype = str(chosen.written_dtype(item)).removeprefix("torch.")
        if dtype not in NAMES:
            raise CheckpointError(
                f"{name!r} is {item.dtype}, which safetensors cannot hold; export it as torch or "
                "dcp, or choose other parts with keys"
            )
        short = name.removeprefix(f"{chosen.prefix}/").replace("/", ".")
        if short in found:
            raise CheckpointError(
                f"{name!r} and {found[short].source!r} would both be called {short!r}; choose one "
                "with keys"
            )
        size = prod(item.shape) * dtype_named(dtype).itemsize
        found[short] = TensorEntry(
            name=short, source=name, dtype=dtype, shape=item.shape, nbytes=size
        )
    if not found:
        raise CheckpointError(f"nothing chosen of step {chosen.manifest.step} is a tensor")
    return list(found.values())


def _shards(chosen: _Chosen, limit: int) -> list[list[TensorEntry]]:
    return safetensors_files.sharded(_entries(chosen), limit)


def _to_folder(
    path: Path, chosen: _Chosen, stream: TensorStream, force: bool, limit: int
) -> list[str]:
    shards = _shards(chosen, limit)
    names = safetensors_files.shard_names(len(shards))
    with published(path, directory=True, force=force, ours=safetensors_files.is_ours) as part:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(part / name, shard, stream, chosen.manifest.step)
        if len(shards) > 1:
            index = safetensors_files.index_of(shards, names)
            (part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            return [*names, INDEX]
    return names


def _to_one_file(path: Path, chosen: _Chosen, stream: TensorStream, force: bool) -> list[str]:
    with published(path, directory=False, force=force, ours=_any_name) as part:
        _write_shard(part, _shards(chosen, 1 << 62)[0], stream, chosen.manifest.step)
    return [path.name]


def _write_shard(path: Path, shard: list[TensorEntry], stream: TensorStream, step: int) -> None:
    with path.open("wb") as out:
        out.write(safetensors_files.header(shard, {"format": "pt", "hpstore_step": str(step)}))
        for entry in shard:
            safetensors_files.write_tensor(out, stream.take(entry.source))


def _to_torch(path: Path, chosen: _Chosen, stream: TensorStream, force: bool) -> list[str]:
    names: list[str] = []

    def placeholder(name: str) -> torch.Tensor:
        names.append(name)
        return chosen.placeholder(stream.item(name))

    state = plain(chosen.tree, placeholder)
    with published(path, directory=False, force=force, ours=_any_name) as part:
        write_torch_file(part, state, lambda number: stream.take(names[number]))
    return [path.name]


def _to_dcp(path: Path, chosen: _Chosen, stream: TensorStream, force: bool) -> list[str]:
    names: dict[int, str] = {}

    def placeholder(name: str) -> torch.Tensor:
        made = chosen.placeholder(stream.item(name), "meta")
        names[id(made)] = name
        return made

    state = chosen.state(placeholder)
    with published(path, directory=True, force=force, ours=dcp_directories.is_ours) as part:
        dcp_directories.write_dcp(part, state, lambda made: stream.take(names[id(made)]))
    return sorted(entry.name for entry in path.iterdir())


def _any_name(name: str) -> bool:
    return True
