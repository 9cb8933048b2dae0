"""LMDB environments: `key` and `value` of every record, as bytes (needs lmdb, the extra `lmdb`).

A block is 1024 records, in the order of the keys. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from hpstore.errors import ConfigError, MalformedFile
from hpstore.format.untrusted_bytes import brief
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.ingestion.optional_packages import needed
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    BlockwiseSource,
    digest_of,
    printable,
)
from hpstore.loaders.ingestion.source_paths import file_facts, local_path
from hpstore.loaders.ingestion.source_rows import SourceItem

LMDB = (".lmdb", ".mdb")
BLOCK_RECORDS = 1024


class LmdbRecords(BlockwiseSource):
    """Records of an environment: a folder with data.mdb, or a file. `database`: a named one."""

    kind = "lmdb"
    by_files = True

    def __init__(self, where: str | os.PathLike[str], *, database: str = "") -> None:
        with needed("LMDB needs lmdb", extra="lmdb"):
            import lmdb
        self._lmdb: Any = lmdb  # Any: it ships no types
        path = Path(local_path(where))
        self._file = path / "data.mdb" if path.is_dir() else path
        self.where, self._database = printable(str(path)), database
        self._names = ["key", "value"]
        if not self._file.is_file():
            raise ConfigError(f"{self.where} is no LMDB environment: {self._file} does not exist")
        self._firsts: list[bytes] = []
        try:
            with self._cursor() as cursor:
                self.length = 0
                for key in cursor.iternext(keys=True, values=False):
                    if self.length % BLOCK_RECORDS == 0:
                        self._firsts.append(bytes(key))
                    self.length += 1
        except lmdb.Error as error:
            raise MalformedFile(f"{self.where} cannot be read: {brief(error)}") from error
        self.blocks = len(self._firsts)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        """Over the database. Reads alone: no lock file is made, writers are not waited for."""
        options = {"readonly": True, "lock": False, "subdir": False, "create": False}
        name = self._database.encode()
        with self._lmdb.open(str(self._file), max_dbs=1 if name else 0, **options) as opened:
            database = opened.open_db(name, create=False) if name else opened.open_db()
            with opened.begin(db=database) as seen, seen.cursor() as cursor:
                if database.flags(seen)["dupsort"]:  # blocks begin at keys
                    raise ConfigError(
                        f"{self.where} has keys with several values (MDB_DUPSORT), which are not "
                        "read: copy it into a database without"
                    )
                yield cursor

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        del types  # the source has its own
        self._names = [name for name in ("key", "value") if name in names]

    @property
    def fields(self) -> dict[str, Field]:
        return {name: Field("bytes") for name in self._names}

    def fingerprint(self) -> str:
        """Over the database, and the path, size and time of change of the file."""
        return digest_of([self.kind, self._database, *file_facts([self._file])])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        number, origin = 0, block << BLOCK_SHIFT
        try:
            with self._cursor() as cursor:
                cursor.set_key(self._firsts[block])
                for key, value in islice(cursor.iternext(), BLOCK_RECORDS):
                    if start <= number:
                        both = {"key": bytes(key), "value": bytes(value)}
                        yield SourceItem(
                            name=f"key {bytes(key)[:80]!r}",
                            origin=origin | number,
                            sample={name: both[name] for name in self._names},
                        )
                    number += 1
        except self._lmdb.Error as error:
            if start <= number:  # else it was given before this place
                problem = f"it cannot be read past record {number}: {brief(error)}"
                yield SourceItem(name=f"block {block}", origin=origin | number, problem=problem)
