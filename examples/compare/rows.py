"""The rows of the comparison by their names: METHOD, METHOD.STORAGE, METHOD.CHECKPOINTER."""

from __future__ import annotations

from dataclasses import dataclass

METHODS = ("ddp", "allreduce", "allreduce_bucket", "ps", "ps_reduce", "fsdp2", "gpipe", "f1b")
PIPELINES = ("gpipe", "f1b")
SERVERS = {"ps": 1, "ps_reduce": 1}
"""Processes that a method wants beside its workers; none unless it is named here."""
STORAGES = ("hpstore", "hpstore-faulty", "memory", "files")
POOLS = STORAGES[:2]
SAVERS = ("none", "hpstore", "torch_save", "dcp")
OURS, UNSAVED = STORAGES[0], SAVERS[0]
"""What a row has without a word: samples from a pool, and no saves. A method's own rate, and what
it talks, are measured without a checkpointer's work beside it; what savers cost has its own rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method, fed from one storage, saved by one checkpointer."""

    method: str
    storage: str = OURS
    checkpointer: str = UNSAVED

    @property
    def name(self) -> str:
        storage = [self.storage] if self.storage != OURS else []
        checkpointer = [self.checkpointer] if self.checkpointer != UNSAVED else []
        return ".".join([self.method, *storage, *checkpointer])

    @property
    def servers(self) -> int:
        return SERVERS.get(self.method, 0)


def row_named(name: str) -> Row:
    """Raises ValueError for a name that no row has."""
    method, *parts = name.split(".")
    storage = [part for part in parts if part in STORAGES and part != OURS]
    checkpointer = [part for part in parts if part in SAVERS]
    row = Row(method=method, storage=(*storage, OURS)[0], checkpointer=(*checkpointer, UNSAVED)[0])
    if method not in METHODS or row.name != name:
        raise ValueError(f"no row is called {name!r}")
    return row


def rows_of(methods: list[str], varied: list[str]) -> list[Row]:
    """Every method once; the varied ones from all storages and with all checkpointers."""
    rows = [Row(method=method) for method in methods]
    for method in varied:
        rows += [Row(method=method, storage=kind) for kind in STORAGES if kind != OURS]
        rows += [Row(method=method, checkpointer=kind) for kind in SAVERS if kind != UNSAVED]
    return rows
