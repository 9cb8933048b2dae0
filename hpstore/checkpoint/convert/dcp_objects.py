"""A DCP checkpoint in torch's own format as objects of a pool, replaced by one put."""

from __future__ import annotations

import io
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem

from hpstore.checkpoint.convert.dcp_directories import FILE_BYTES, METADATA, OneByOne, is_ours
from hpstore.checkpoint.dcp.dcp_metadata import manifest_at
from hpstore.checkpoint.state.pickled import dumps
from hpstore.errors import ConfigError, HpstoreError, ObjectNotFound, VersionConflict
from hpstore.interop.filesystem import PoolFileSystem
from hpstore.interop.filesystem.paths import ParsedPath

# Any: values of a training state
_log = logging.getLogger(__name__)


def write_dcp_objects(
    url: str, state: Mapping[str, Any], tensor: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """What dcp.load(checkpoint_id=url) reads. `tensor` gives the real one for each in `state`.

    Data files have a nonce in their names, and the put of .metadata is the commit: a crash before
    leaves the checkpoint that was there. Old files that cannot be removed then are
    logged, and go with the next one. Memory: some 512 MiB, or twice the largest tensor.
    """
    files = PoolFileSystem()
    place = files.resolved(url)
    pool, before = place.mount.pool, _names_at(files, place)
    version = pool.stat(f"{place.key}/{METADATA}").version if METADATA in before else None
    planner = OneByOne(tensor)
    planner.set_up_planner(dict(state), is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    plan = planner.finish_plan(plans[0])
    parts = _Parts(files, place)
    try:
        for item in plan.items:
            parts.add(item, planner)
        parts.flush()
        planner.require_all(plan)
        metadata.storage_data = parts.places
        metadata.storage_meta = StorageMeta(checkpoint_id=url, save_id=secrets.token_hex(8))
    except BaseException:
        _remove_all(place, parts.names)
        raise
    try:
        _commit(place, metadata, version)
    except BaseException as error:  # it may have committed: the next call removes what is left
        if _is_certainly_old(place, version, error):
            _remove_all(place, parts.names)
        raise
    for name in before:
        if name != METADATA:
            _remove(place, name)


def _commit(place: ParsedPath, metadata: Metadata, version: str | None) -> None:
    """Put .metadata in the place of the one that was there. Raises VersionConflict."""
    place.mount.pool.put(
        f"{place.key}/{METADATA}",
        dumps(metadata, METADATA),
        if_absent=version is None,
        if_version=version,
    )


def _is_certainly_old(place: ParsedPath, version: str | None, error: BaseException) -> bool:
    """Whether no put of .metadata that failed can be, or become, what is read."""
    if getattr(error, "maybe_visible", False) or not isinstance(error, HpstoreError):
        return False
    if isinstance(error, VersionConflict):  # another one was there before this could be
        return True
    try:
        return place.mount.pool.stat(f"{place.key}/{METADATA}").version == version
    except ObjectNotFound:
        return version is None
    except HpstoreError:
        return False


class _Parts:
    """Entries as torch.save writes them, collected into objects of about FILE_BYTES."""

    def __init__(self, files: PoolFileSystem, place: ParsedPath) -> None:
        self._files, self._place = files, place
        self._nonce = secrets.token_hex(8)
        self._open = io.BytesIO()
        self.names: list[str] = []
        self.places: dict[Any, _StorageInfo] = {}

    def add(self, item: WriteItem, planner: OneByOne) -> None:
        """Append one entry."""
        if not self._open.tell():
            self.names.append(f"__0_{self._nonce}_{len(self.names)}.distcp")
        at = self._open.tell()
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            torch.save(data.detach().cpu().contiguous().clone(), self._open)
        else:
            self._open.write(data.getbuffer())
        self.places[item.index] = _StorageInfo(self.names[-1], at, self._open.tell() - at)
        if self._open.tell() >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Put what is collected."""
        if self._open.tell():
            path = self._place.path(f"{self._place.key}/{self.names[-1]}")
            self._files.pipe_file(path, self._open.getbuffer())
            self._open = io.BytesIO()


def _names_at(files: PoolFileSystem, place: ParsedPath) -> list[str]:
    """Names of the checkpoint that is there. Raises ConfigError when other things are."""
    start = f"{place.key}/"
    names = [key.removeprefix(start) for key in place.mount.pool.list(start)]
    foreign = [name for name in names if not is_ours(name)]
    if foreign or place.mount.pool.exists(manifest_at(place.key)):
        raise ConfigError(
            f"{place.path(place.key)} holds other objects ({', '.join(foreign[:4])}): choose a "
            "path of its own. Nothing was written"
        )
    return names


def _remove_all(place: ParsedPath, names: Sequence[str]) -> None:
    for name in names:
        _remove(place, name)


def _remove(place: ParsedPath, name: str) -> None:
    """Best effort: what stays is named by no .metadata, and goes with the next checkpoint there."""
    try:
        place.mount.pool.delete(f"{place.key}/{name}")
    except ObjectNotFound:
        return
    except (HpstoreError, OSError) as error:
        place.mount.pool.metrics.count("cleanup_postponed_total")
        _log.warning("%s stays for now: %s", place.path(f"{place.key}/{name}"), error)
