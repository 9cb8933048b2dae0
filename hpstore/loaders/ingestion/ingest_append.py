"""Append what is ingested to the dataset that is there, as a new version of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpstore.errors import ConfigError
from hpstore.loaders.dataset.class_names import class_names, other_unit
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest, DatasetPart, check_label
from hpstore.loaders.dataset.dataset_versions import change_dataset, read_manifest
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.publish_dataset import joined_content
from hpstore.loaders.dataset.stored_manifests import require_same_columns
from hpstore.loaders.ingestion.sample_source import InferredFields, Source
from hpstore.loaders.writer.dataset_writer import require_same_fields
from hpstore.pool.pool import Pool


def append_base(
    pool: Pool, name: str, *, append: bool, overwrite: bool, version: str | None
) -> DatasetManifest | None:
    """The dataset to append to; None where nothing is appended. Raises ConfigError,
    ObjectNotFound."""
    check_label(version)
    if not append:
        if version is not None:
            raise ConfigError("version= names what append=True makes; a new data set begins at v1")
        return None
    if overwrite:
        raise ConfigError("append=True and overwrite=True: choose one")
    base = read_manifest(pool, name)
    require_same_columns(pool, name, base)
    return base


def fields_of_base(name: str, base: DatasetManifest, source: Source) -> dict[str, Field]:
    """Those of the dataset that is appended to. Raises ConfigError where a source with a schema has
    more: they would be left out without a word."""
    known = {} if isinstance(source, InferredFields) else source.fields or {}
    more = [field for field in known if field not in base.fields]
    if more:
        raise ConfigError(
            f"{source.where} has {more[0]!r}, which data set {name!r} lacks: "
            f"fields={list(base.fields)} leaves it out. Nothing was appended"
        )
    return dict(base.fields)


def require_same_meaning(base: DatasetManifest, source: Source) -> None:
    """Raise ConfigError where numbers of classes would stand for other names than before, or times
    have another unit."""
    numbers = [name for name, field in base.fields.items() if field.dtype not in ("str", "bytes")]
    ours, theirs = class_names(base.metadata, numbers), class_names(source.metadata, numbers)
    for name, names in theirs.items():
        if ours.get(name) != names:
            raise ConfigError(
                f"{source.where}: the classes of {name!r} are {_some(names)}, in the data set they "
                f"are {_some(ours.get(name, []))}: the same numbers would stand for others. "
                "Nothing was appended; give the source the same classes in the same order (an "
                "empty folder is one, too)"
            )
    odd = other_unit(base.metadata, source.metadata, numbers)
    if odd is not None:
        raise ConfigError(
            f"{source.where}: {odd} would differ from that in the data set: the same numbers would "
            "stand for others. Nothing was appended; cast the column to the unit that is there"
        )


def _some(names: list[str]) -> str:
    return f"{names[:5]} and {len(names) - 5} more" if len(names) > 5 else str(names)


def appended(
    pool: Pool,
    name: str,
    fields: Mapping[str, Field],
    parts: tuple[DatasetPart, ...],
    *,
    label: str | None,
) -> DatasetManifest:
    """Publish the newest manifest with these parts behind it. Durable on return.

    Others may append meanwhile. Raises what change_dataset raises; ConfigError where the fields
    have changed since.
    """

    def behind(newest: DatasetManifest) -> DatasetManifest:
        require_same_fields(name, newest, fields)
        together = (*newest.parts, *parts)
        return replace(newest, parts=together, content=joined_content(pool, name, newest, together))

    return change_dataset(pool, name, behind, label=label)
