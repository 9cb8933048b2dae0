"""Hugging Face's save_pretrained and from_pretrained on a pool; no file on a disk holds weights."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from hpstore.checkpoint.convert.safetensors_files import read_index
from hpstore.checkpoint.convert.safetensors_objects import put_safetensors, read_safetensors_object
from hpstore.errors import CheckpointError, ConfigError, MalformedFile, VersionConflict
from hpstore.interop.filesystem import PoolFileSystem
from hpstore.interop.filesystem.paths import ParsedPath
from hpstore.trainers.optional_import import missing
from hpstore.trainers.peft_adapters import (
    MARK,
    WEIGHTS,
    adapters_from,
    base_model,
    is_adapter_model,
    writer_module,
)
from hpstore.units import GIB, MIB, parse_bytes

try:
    import transformers
    from transformers import modeling_utils
except ModuleNotFoundError as error:
    raise missing("transformers", "huggingface", error) from error

# Any: models, configurations and tokenizers of transformers

MARKS = ("config.json", MARK)  # put last: one of them makes a model complete
MOST_FILE_BYTES = 64 * MIB  # of a configuration or a vocabulary, which pass through a folder
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf")
_INDEX = ".safetensors.index.json"
# what a save of transformers or PEFT may leave before it is complete, with a variant or without
_LEFT = re.compile(
    r"(adapter_)?model((\.[^./]+)?(-\d+-of-\d+)?\.safetensors|\.safetensors\.index(\.[^./]+)?\.json)"
)


def save_pretrained(
    model: Any, url: str, *, max_shard_bytes: int | str = GIB, **options: Any
) -> None:
    """model.save_pretrained(folder), where the folder is a path in a pool.

    The files are those that transformers writes, with an index where there are several of weights.
    Weights go from memory to the pool; configurations pass through a temporary folder. config.json
    is put last, so that a crash leaves a path that load_pretrained() refuses and that may be saved
    to again. Durable on return. One process saves to a path at a time. Memory: one file of weights.

    Parameters
    ----------
    model
        A PreTrainedModel, or a PeftModel, of which the adapters alone are saved. A tokenizer,
        processor or configuration is taken, too, and may replace files that are there.
    url
        "hpstore://NAME/path" without a model: what would be replaced is refused.
    max_shard_bytes
        Of one file of weights, unless a tensor is larger: a number or "5GB".
    options
        Of transformers' save_pretrained. In a job of several ranks all call this with
        is_main_process, as there.

    Raises
    ------
    ConfigError
        A model is there already, or an argument is wrong.
    CheckpointError
        The model, or its transformers, cannot be saved like this.
    VersionConflict
        Another process saves there, too.
    TooFewDevices
        Too few devices took it.
    """
    place = PoolFileSystem().resolved(url)
    if options.get("push_to_hub") or options.get("distributed_checkpoint"):
        raise ConfigError("push_to_hub and distributed_checkpoint are for folders on a disk")
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"a {type(model).__name__} has no save_pretrained()")
    with tempfile.TemporaryDirectory(prefix="hpstore-") as folder:
        adapter = is_adapter_model(model)
        if not adapter and not isinstance(model, transformers.PreTrainedModel):
            model.save_pretrained(folder, **options)
            _put_files(place, folder)
            return
        limit = parse_bytes(max_shard_bytes)
        options |= {} if adapter else {"max_shard_size": limit}
        leads = bool(options.get("is_main_process", True))
        if leads:
            _make_room(place)
        writer = writer_module() if adapter else modeling_utils
        with _Shards.routed(folder, place, writer) as shards:
            model.save_pretrained(folder, **options)
        if leads and not shards.versions:
            raise CheckpointError(
                f"{writer.__name__.partition('.')[0]} did not hand over its weights as "
                f"safetensors: leave out safe_serialization=, or this hpstore does not know how "
                f"transformers {transformers.__version__} writes them. Nothing is saved"
            )
        _put_files(place, folder, shards.versions)


def load_pretrained(kind: Any, url: str, **options: Any) -> Any:
    """kind.from_pretrained(folder, **options), where the folder is a path in a pool.

    Weights go from the pool to memory, every byte verified and decoded where units are lost; small
    files pass through a temporary folder. No code in the path runs.

    Parameters
    ----------
    kind
        A class of models such as GPT2LMHeadModel or AutoModelForCausalLM, or of tokenizers,
        processors or configurations; or PeftModel, with model= for what its adapter is for.
    url
        "hpstore://NAME/path": what save_pretrained() has written, or a folder of Hugging Face's
        with safetensors that was copied there.
    options
        Of from_pretrained, but for those that say where files are.

    Returns
    -------
    Any
        What from_pretrained returns. The weights are memory of the model's own.

    Raises
    ------
    CheckpointError
        No complete model with safetensors is there.
    IntegrityError, RedundancyError
        It is malformed (MalformedFile) or cannot be read.
    """
    place = PoolFileSystem().resolved(url)
    names = _names_at(place)
    with tempfile.TemporaryDirectory(prefix="hpstore-") as folder:
        for name in names:
            if not name.endswith((*_WEIGHTS, _INDEX, ".py")) and "/" not in name:
                _fetch(place, name, folder)
        if is_adapter_model(kind):
            return _adapter(kind, place, names, folder, options)
        mapped = getattr(kind, "_model_mapping", None)
        if mapped is None and not _is_model(kind):
            return kind.from_pretrained(folder, **options)
        if MARKS[0] not in names:
            raise CheckpointError(
                f"there is no complete model at {url}: it has no {MARKS[0]}"
                + (
                    ", but an adapter: load_pretrained(PeftModel, url, model=base)"
                    if MARKS[1] in names
                    else ""
                )
            )
        config = options.pop("config", None)
        if config is None:
            config = transformers.AutoConfig.from_pretrained(folder)
        made = _model_class(mapped, config) if mapped is not None else kind
        weights = _weights(place, names)
        found = made.from_pretrained(None, config=config, state_dict=weights, **options)
        model = found[0] if isinstance(found, tuple) else found
        model.config.name_or_path = model.name_or_path = url
        if "generation_config.json" in names and model.can_generate():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        return found


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)


def _model_class(mapping: Any, config: Any) -> Any:
    """The class that an Auto class means by a configuration."""
    if type(config) not in mapping:
        raise ConfigError(f"this Auto class knows no model for a {type(config).__name__}")
    found = mapping[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = config.architectures or []
    return next((one for one in found if one.__name__ in named), found[0])


# --- saving --------------------------------------------------------------------------------------


class _Shards:
    """Takes what transformers would write to a folder as safetensors, and puts it into a pool."""

    _lock: ClassVar = threading.Lock()  # held while transformers' function is replaced

    def __init__(self, place: ParsedPath) -> None:
        self._place = place
        self.versions: dict[str, str] = {}  # by file name

    def put(self, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        """Put one file."""
        key = f"{self._place.key}/{name}"
        self.versions[name] = put_safetensors(self._place.mount.pool, key, tensors, metadata)

    @classmethod
    @contextmanager
    def routed(cls, folder: str, place: ParsedPath, writer: ModuleType) -> Iterator[_Shards]:
        """Inside, what `writer` writes below `folder` goes to the pool (docs/decisions/0118).

        Saves of other threads to other folders go where they belong.
        """
        shards = cls(place)
        with cls._lock:
            original = getattr(writer, "safe_save_file", None)
            if original is None:
                raise CheckpointError(
                    f"transformers {transformers.__version__} is not one whose writing of weights "
                    "this hpstore knows. Nothing is saved; save to a folder and put that"
                )

            def save(tensors: Any, filename: Any, metadata: Any = None) -> None:
                name = os.path.relpath(filename, folder)
                if not name.startswith(os.pardir):
                    shards.put(name, tensors, metadata or {})
                else:
                    original(tensors, filename, metadata=metadata)

            vars(writer)["safe_save_file"] = save
            try:
                yield shards
            finally:
                vars(writer)["safe_save_file"] = original


def _make_room(place: ParsedPath) -> None:
    """Remove what a save that was killed has left here, and nothing of others that is here or
    below. Raises ConfigError where a model is."""
    names = _names_at(place)
    mark = next((name for name in names if _is_mark(name)), None)
    if mark is not None:
        raise ConfigError(
            f"{place.path(place.key)} holds a model already ({mark}): choose another path, or "
            "remove that one first. Nothing was written"
        )
    for name in names:
        if _LEFT.fullmatch(name):
            place.mount.pool.delete(f"{place.key}/{name}")


def _put_files(place: ParsedPath, folder: str, versions: dict[str, str] | None = None) -> None:
    """Put the small files; with `versions` of weights, the one that makes a model complete last."""
    pool = place.mount.pool
    files = sorted(Path(folder).rglob("*"), key=lambda path: (path.name in MARKS, path.name))
    for path in files:
        if path.is_dir():
            continue
        name = path.relative_to(folder).as_posix()
        if name.endswith(_WEIGHTS) or path.stat().st_size > MOST_FILE_BYTES:
            raise CheckpointError(
                f"{name} holds weights, which only a PreTrainedModel's can be put into a pool"
            )
        once = _is_mark(name) and versions is not None
        if once and versions is not None:
            _require_own(place, versions)
        pool.put(f"{place.key}/{name}", path.read_bytes(), if_absent=once)


def _is_mark(name: str) -> bool:
    """Whether a file makes a model, or an adapter in a folder of its name, complete."""
    return name.rpartition("/")[2] in MARKS


def _require_own(place: ParsedPath, versions: dict[str, str]) -> None:
    """Raise VersionConflict when another process has replaced weights."""
    for name, version in versions.items():
        if place.mount.pool.stat(f"{place.key}/{name}").version != version:
            raise VersionConflict(
                f"another process saves to {place.path(place.key)}, too: it has replaced {name}. "
                "One process saves to a path at a time"
            )


# --- loading -------------------------------------------------------------------------------------


def _names_at(place: ParsedPath) -> list[str]:
    start = f"{place.key}/"
    return [key.removeprefix(start) for key in place.mount.pool.list(start)]


def _adapter(
    kind: Any, place: ParsedPath, names: list[str], folder: str, options: dict[str, Any]
) -> Any:
    """A model with an adapter from the pool."""
    base = base_model(kind, options)
    below = f"{options['subfolder']}/" if options.get("subfolder") else ""
    mark, weights = below + MARK, below + WEIGHTS
    if mark not in names or weights not in names:
        there = sorted(name for name in names if name.endswith(MARK))
        raise CheckpointError(
            f"there is no complete adapter at {place.path(place.key)}: it lacks {mark} or {weights}"
            f"; adapters there are {there}"
        )
    os.makedirs(os.path.join(folder, below), exist_ok=True)
    _fetch(place, mark, folder)

    def read(name: str) -> dict[str, torch.Tensor]:
        key = f"{place.key}/{name}"
        with place.mount.pool.open(key) as reader:
            return read_safetensors_object(reader, place.path(key))

    with adapters_from(folder, [weights], read):
        return kind.from_pretrained(base, folder, **options)


def _fetch(place: ParsedPath, name: str, folder: str) -> None:
    """Copy a small file into the folder."""
    key = f"{place.key}/{name}"
    size = place.mount.pool.stat(key).size
    if size > MOST_FILE_BYTES:
        raise MalformedFile(f"{place.path(key)} has {size} bytes, too many for a configuration")
    Path(folder, name).write_bytes(place.mount.pool.get(key))


def _weights(place: ParsedPath, names: list[str]) -> dict[str, torch.Tensor]:
    """All tensors, by the index or of the one file that there is."""
    pool, found = place.mount.pool, {}
    indexes = [name for name in names if name.endswith(_INDEX)]
    single = [name for name in names if name.endswith(".safetensors")]
    if len(indexes) == 1:
        key = f"{place.key}/{indexes[0]}"
        with_names = read_index(pool.get(key).decode("utf-8", "replace"), place.path(key))
    elif len(single) == 1:
        with_names = {single[0]: None}
    else:
        raise CheckpointError(
            f"{place.path(place.key)} holds {len(single)} .safetensors files and {len(indexes)} "
            "index files; wanted are one file, or files with one index"
        )
    for name, wanted in with_names.items():
        if name not in names:
            raise CheckpointError(f"{place.path(place.key)} lacks {name}, which the index names")
        with pool.open(f"{place.key}/{name}") as reader:
            tensors = read_safetensors_object(reader, place.path(f"{place.key}/{name}"))
        lacking = sorted((wanted or set()) - set(tensors))
        if lacking:
            raise CheckpointError(f"{name} holds no {lacking[:4]}, which the index names")
        found.update({n: t for n, t in tensors.items() if wanted is None or n in wanted})
    return found
