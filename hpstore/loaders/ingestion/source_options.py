"""Options of formats: what a user may say about how a source is read. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from hpstore.errors import ConfigError
from hpstore.loaders.ingestion.source_formats import SourceFormat

OPTIONS: dict[SourceFormat, tuple[str, ...]] = {
    SourceFormat.WEBDATASET: ("storage",),
    SourceFormat.PARQUET: ("storage",),
    SourceFormat.JSONL: ("storage",),
    SourceFormat.CSV: ("delimiter", "storage"),
    SourceFormat.TFRECORD: ("storage",),
    SourceFormat.HDF5: ("group",),
    SourceFormat.LMDB: ("database",),
    SourceFormat.TOKENS: ("dtype", "record_tokens"),
}

REMOTE = frozenset(kind for kind, names in OPTIONS.items() if "storage" in names)
"""Formats that are read by URL; `storage`: options of fsspec for it."""


def options_of(given: Mapping[str, object] | None) -> dict[str, Any]:
    """The options as a dict. Raises ConfigError for what is none."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"source_options are a {type(given).__name__}: give a dict")
    return dict(given or {})


def refuse_options(what: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise ConfigError for an option that this kind of source has not."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            said = ", ".join(known) or "none"
            raise ConfigError(f"{what} has no option {name!r}{hint} (options: {said})")
