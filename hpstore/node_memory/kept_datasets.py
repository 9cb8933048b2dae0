"""What a node's memory holds for a user, for people: asked of the keeper."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpstore.node_memory.keeper_session import KeeperSession
from hpstore.runtime.local_messages import Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDataset:
    """A dataset in the memory of the node. Streams of it are summed."""

    pool: str
    dataset: str
    bytes: int
    filled: float  # share of its pages
    processes: tuple[int, ...]
    unused_seconds: float  # 0 while a process uses it
    keep_seconds: float
    dropped: bool  # its memory goes with its last process

    def as_dict(self) -> dict[str, object]:
        """JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """All that a keeper keeps. `process`: the keeper's; 0 where none runs."""

    process: int
    datasets: tuple[KeptDataset, ...]

    @property
    def bytes(self) -> int:
        """Of all datasets."""
        return sum(found.bytes for found in self.datasets)

    def as_dict(self) -> dict[str, object]:
        """JSON."""
        rows = [found.as_dict() for found in self.datasets]
        return {"process": self.process, "bytes": self.bytes, "datasets": rows}


def kept_datasets(directory: Path) -> NodeMemory:
    """What the keeper of a directory keeps. Raises Lost where it does not answer as it must."""
    with closing(KeeperSession(directory)) as session:
        if not session.connect():
            if session.over:
                raise Lost(session.reason)
            return NodeMemory(process=0, datasets=())
        answer = session.ask({"op": "list"})
    rows = answer.get("datasets")
    if not isinstance(rows, list):
        raise Lost("the keeper's answer makes no sense")
    grouped: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["pool"], row["dataset"], row["dropped"]), []).append(row)
    return NodeMemory(
        process=int(answer["process"]),
        datasets=tuple(_joined(some) for some in grouped.values()),
    )


def free_datasets(directory: Path, name: str | None) -> tuple[int, int]:
    """Free a dataset, or all: (bytes that are free, bytes that go with the processes that use
    them). Raises Lost where no keeper answers."""
    with closing(KeeperSession(directory)) as session:
        if not session.connect():
            raise Lost(session.reason)
        answer = session.ask({"op": "free", "all": name is None, "name": name or ""})
    return int(answer["freed"]), int(answer["later"])


def _joined(rows: list[Mapping[str, Any]]) -> KeptDataset:
    pages, there = sum(row["pages_of"] for row in rows), sum(row["pages"] for row in rows)
    users = sorted({process for row in rows for process in row["processes"]})
    return KeptDataset(
        pool=str(rows[0]["pool"]),
        dataset=str(rows[0]["dataset"]),
        bytes=sum(row["bytes"] for row in rows),
        filled=there / max(1, pages),
        processes=tuple(users),
        unused_seconds=min(row["unused_seconds"] for row in rows),
        keep_seconds=max(row["keep_seconds"] for row in rows),
        dropped=bool(rows[0]["dropped"]),
    )
