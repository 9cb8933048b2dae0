"""Directories of torch.distributed.checkpoint (DCP), written and read by torch's own code.

Export: a planner that gives the writer one tensor at a time, into files of bounded size. Import of
checkpoints whose code is trusted: the whole state in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpstore.checkpoint.convert.torch_files import tensors_in
from hpstore.errors import CheckpointError
from hpstore.units import MIB

METADATA = ".metadata"
FILE_BYTES = 256 * MIB


def is_ours(name: str) -> bool:
    """Whether a file of this name is part of a DCP directory."""
    return name == METADATA or name.endswith(".distcp")


class OneByOne(DefaultSavePlanner):
    """Resolves placeholders to tensors when the writer asks for them.

    Also those within values that torch's planner takes for one, such as tuples.
    """

    def __init__(self, tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._tensor = tensor
        self.resolved: set[object] = set()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],  # Any: as torch has it
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        try:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
        except ValueError as error:  # two paths with one name, as of {"a.b": 1, "a": {"b": 2}}
            raise CheckpointError(
                f"DCP cannot hold this state: {error}. It joins the keys on the way to an entry by "
                "dots. Nothing was written. Leave one of the two out, or choose another format"
            ) from error

    def resolve_data(self, write_item: WriteItem) -> Any:  # Any: a tensor or BytesIO, as torch has
        self.resolved.add(write_item.index)
        found = self.lookup_object(write_item.index)
        if isinstance(found, torch.Tensor):
            return self._tensor(found)
        return super().transform_object(write_item, self._filled(found))

    def _filled(self, value: Any) -> Any:
        """A value with real tensors in it."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if type(value) in (list, tuple):
            return type(value)(self._filled(child) for child in value)
        if type(value) is dict:
            return {name: self._filled(child) for name, child in value.items()}
        if any(True for _ in tensors_in(value)):
            raise CheckpointError(f"a {type(value).__name__} with tensors in it cannot be written")
        return value

    def require_all(self, plan: SavePlan) -> None:
        """Raise CheckpointError unless everything planned was asked for."""
        lacking = {item.index for item in plan.items} - self.resolved
        if lacking:
            raise CheckpointError(f"torch's writer passed over {len(lacking)} entries")


class _InParts(FileSystemWriter):
    """Writes files of about FILE_BYTES: torch keeps all tensors of a file until it is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_parts(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            part = replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _parts(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Items in order, cut where FILE_BYTES are reached. Pure."""
    parts: list[list[WriteItem]] = [[]]
    total = 0
    for item in items:
        facts = item.tensor_data
        size = prod(facts.size) * facts.properties.dtype.itemsize if facts is not None else 0
        if parts[-1] and total + size > FILE_BYTES:
            parts.append([])
            total = 0
        parts[-1].append(item)
        total += size
    return parts


# Any: nested values of a training state
def write_dcp(
    folder: Path, state: Mapping[str, Any], tensor: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A DCP checkpoint that dcp.load reads. `state` holds placeholders; `tensor` gives for each
    the real one, in the order of the state, one at a time."""
    planner = OneByOne(tensor)
    writer = _InParts(folder, single_file_per_rank=True, thread_count=1)
    try:
        with _without_the_warning():
            metadata = save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as wrapped:  # a BaseException: what went wrong is inside
        raise _cause(wrapped) from wrapped
    planner.require_all(planner.plan)
    stored = getattr(metadata, "storage_data", None)
    if not isinstance(stored, dict) or len(stored) != len(planner.plan.items):
        raise CheckpointError("torch's writer did not record all entries")


def unpickle_dcp(folder: Path) -> dict[str, Any]:
    """All of a DCP checkpoint, nested as it was saved, in memory, read by torch's own code: it runs
    what the writer of the checkpoint chose."""
    if not (folder / METADATA).is_file():
        raise CheckpointError(f"{folder} is no DCP checkpoint: it has no {METADATA}")
    state: dict[str, Any] = {}
    reader = FileSystemReader(folder)
    try:
        reader.read_metadata()  # torch logs tracebacks when it finds it broken later
        _load_state_dict(
            state,
            storage_reader=reader,
            planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
            no_dist=True,
        )
    except (Exception, CheckpointException) as error:
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        first = str(cause).strip().split("\n")[0]
        raise CheckpointError(
            f"{folder} cannot be read by torch.distributed.checkpoint: {type(cause).__name__}: "
            f"{first[:200]}"
        ) from error
    return state


def _cause(error: CheckpointException) -> BaseException:
    """The first error that torch has collected."""
    found: BaseException = next(iter(error.failures.values()))[0]
    return found


@contextmanager
def _without_the_warning() -> Iterator[None]:
    """torch warns of a missing process group although no_dist was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
