"""Folders named `column=value`, by which Hive, Spark and pyarrow divide a table: a column each.

pyarrow.dataset reads the names and infers types: int32 where all values are whole numbers, else
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpstore.errors import ConfigError

_HIDDEN = (".", "_")


def is_divided(path: Path, folder: Path) -> bool:
    """Whether a file below `folder` is in folders of such names."""
    return any("=" in part for part in path.relative_to(folder).parts[:-1])


def divided_files(folder: Path, endings: Sequence[str]) -> Iterator[Path]:
    """Files with these endings in folders of such names, however deep, in the order of names."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(_HIDDEN) or not entry.is_dir() or "=" not in entry.name:
            continue
        for path in sorted(entry.rglob("*")):
            inside = path.relative_to(folder).parts
            if any(part.startswith(_HIDDEN) for part in inside):
                continue
            if path.name.lower().endswith(tuple(endings)) and path.is_file():
                yield path


class Partitions:
    """Columns of which every file has one value. Any: pyarrow ships no types."""

    def __init__(self, arrow: Any, folder: Path | None, files: Sequence[object]) -> None:
        self._arrow = arrow
        self.schema: Any = arrow.schema([])
        self._values: dict[object, Mapping[str, Any]] = {}
        if folder is None:  # remote
            return
        ours = [file for file in files if isinstance(file, Path) and file.is_relative_to(folder)]
        if not any(is_divided(file, folder) for file in ours):
            return
        dataset = arrow.dataset
        discovered = dataset.HivePartitioning.discover(infer_dictionary=False)
        options = dataset.FileSystemFactoryOptions(str(folder), discovered)
        factory = dataset.FileSystemDatasetFactory(
            arrow.fs.LocalFileSystem(), [str(f) for f in ours], dataset.ParquetFileFormat(), options
        )
        self.schema = factory.inspect(fragments=0)
        parse = dataset.HivePartitioning(self.schema).parse
        for file in ours:
            inside = file.relative_to(folder).parent
            keys = [part.partition("=")[0] for part in inside.parts if "=" in part]
            if sorted(keys) != sorted(self.schema.names):
                raise ConfigError(
                    f"{file} is divided by {', '.join(keys) or 'nothing'}, other files by "
                    f"{', '.join(self.schema.names)}: name the files of one table with a pattern"
                )
            found = dataset.get_partition_keys(parse(f"{inside.as_posix()}/{file.name}"))
            self._values[file] = found

    def has_null(self, name: str) -> bool:
        """Whether a file has no value of one of these columns."""
        return any(values.get(name) is None for values in self._values.values())

    def added(self, file: object, batch: Any, names: Sequence[str]) -> Any:
        """A batch of a file with the columns of its folders, of these names."""
        arrays, fields = list(batch.columns), list(batch.schema)
        for field in self.schema:
            if field.name in names:
                value = self._arrow.scalar(self._values[file].get(field.name), field.type)
                arrays.append(self._arrow.repeat(value, batch.num_rows))
                fields.append(field)
        return self._arrow.RecordBatch.from_arrays(arrays, schema=self._arrow.schema(fields))


def root_of(where: str) -> Path:
    """The folder that a source names: itself, or what is before a pattern."""
    path = Path(where)
    if path.is_dir():
        return path
    fixed: list[str] = []
    for part in path.parts:
        if any(sign in part for sign in "*?[{"):
            break
        fixed.append(part)
    found = Path(*fixed)
    return found if len(fixed) < len(path.parts) else found.parent
