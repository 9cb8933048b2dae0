"""A column's checksum table is read beside its bytes, not before them by everybody."""

from __future__ import annotations

import threading
from pathlib import Path

import hpstore
from hpstore.codec.galois import Bytes
from hpstore.format.column_header import HEADER_BYTES
from hpstore.runtime.buffers import aligned_array
from hpstore.units import KIB, MIB
from tests.fault.common import payload


def test_who_reads_beside_the_first_reads_bytes_before_the_table(tmp_path: Path) -> None:
    """Of a device where each read is a request: two windows of a column are read at once, and each
    waited for a table of its own first."""
    places = [tmp_path / f"d{n}" for n in range(3)]
    with hpstore.create(places, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        pool.put("x", payload("x", 8 * MIB))
        with pool.open("x") as reader:
            column = next(iter(reader._reader.columns.values()))
            handle, reads, go = column._handle, list[str](), threading.Event()

            class Recorded:
                size_bytes, descriptor = handle.size_bytes, handle.descriptor

                def read_into(self, offset: int, target: Bytes) -> None:
                    what = "table" if offset == column.header.table_offset else "bytes"
                    reads.append(what)
                    if len(reads) == 1:
                        begun.set()
                        assert go.wait(60)
                    elif what == "bytes":
                        go.set()
                    handle.read_into(offset, target)

                def close(self) -> None:
                    handle.close()

            begun = threading.Event()
            column._handle = Recorded()
            found = [aligned_array(64 * KIB) for _ in range(2)]
            first = threading.Thread(target=column.read_into, args=(0, found[0]))
            first.start()
            assert begun.wait(60)
            column.read_into(64 * KIB, found[1])
            first.join(60)
            column._handle = handle
            assert reads[:2] == ["table", "bytes"]
            raw = aligned_array(128 * KIB)
            handle.read_into(HEADER_BYTES, raw)
            assert b"".join(part.tobytes() for part in found) == raw.tobytes()
