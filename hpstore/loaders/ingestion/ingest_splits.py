"""Each split of a source as a dataset of its own: NAME/train, NAME/val, ..."""

from __future__ import annotations

from typing import Any

from hpstore.errors import ConfigError, ObjectNotFound, VersionConflict
from hpstore.loaders.dataset.publish_dataset import list_datasets
from hpstore.loaders.dataset.stored_manifests import require_pool
from hpstore.loaders.ingestion.ingest_report import IngestReport
from hpstore.loaders.ingestion.ingest_run import ingest
from hpstore.loaders.ingestion.source_splits import splits_of
from hpstore.pool.pool import Pool


def ingest_splits(pool: Pool, name: str, source: object, **options: Any) -> dict[str, IngestReport]:
    """Write every split of a source as a dataset, `name`/train, `name`/val and so on.

    Each is visible when all of it is there, one after another. After an error or a kill the same
    call goes on with the split that was cut short; those that are published are left as they are.

    Parameters
    ----------
    pool
        An open pool.
    name
        What comes before the slash.
    source
        A folder with train/, val/ or test/ in it or with files named for splits, or a DatasetDict.
    **options
        Those of ingest(), for all splits.

    Returns
    -------
    dict
        A report for each split that this call wrote, by the name of the split.

    Raises
    ------
    ConfigError
        The source has no splits, or as of ingest().
    IngestError
        As of ingest(). The splits before are published.
    VersionConflict
        All splits are published already, and `overwrite` is not given.
    """
    found = splits_of(source)
    if not found:
        raise ConfigError(
            f"{source if isinstance(source, str) else type(source).__name__} has no splits: "
            "ingest() writes it as one dataset"
        )
    if options.get("append"):
        raise ConfigError(
            "append=True (--append) takes one split at a time, as a call that is cut short would "
            f"append those before it again: name one of {', '.join(found)}"
        )
    require_pool(pool, "ingest_splits")
    there = set() if options.get("overwrite") else _published(pool)
    left = {split: part for split, part in found.items() if f"{name}/{split}" not in there}
    if not left:
        raise VersionConflict(
            f"datasets {', '.join(f'{name}/{split}' for split in found)} exist; they are "
            "unchanged. overwrite=True (--overwrite) replaces them."
        )
    return {split: ingest(pool, f"{name}/{split}", part, **options) for split, part in left.items()}


def _published(pool: Pool) -> set[str]:
    try:
        return {found.name for found in list_datasets(pool)}
    except ObjectNotFound:
        return set()
