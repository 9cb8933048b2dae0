"""Parsers of data sets, of what they are ingested from, and of caches."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import socket
import tarfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpstore.errors import HpstoreError, ObjectNotFound
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.disk_file import DiskFile
from hpstore.loaders.cache.disk_tier import _holder
from hpstore.loaders.cache.messages import Lost, receive
from hpstore.loaders.cache.saved_policy import load_learned, save_learned
from hpstore.loaders.dataset.dataset_manifest import (
    DatasetManifest,
    DatasetPart,
    StreamShards,
    dataset_of,
    nonce_of,
)
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.index_tables import (
    SIDE_MAGIC,
    decode_tables,
    encode_tables,
    side_dtypes,
)
from hpstore.loaders.dataset.record_layout import FixedPlan, Record, group_fields
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.ingestion.arrow_source import ArrowTables
from hpstore.loaders.ingestion.image_checks import image_problem
from hpstore.loaders.ingestion.ingest_journal import Progressed, Skipped
from hpstore.loaders.ingestion.numpy_source import numpy_files
from hpstore.loaders.ingestion.sample_source import BlockwiseSource, IndexedSource, Source
from hpstore.loaders.ingestion.webdataset_source import webdataset
from hpstore.loaders.ingestion.write_order import IngestPosition
from hpstore.loaders.policy import CachePolicy
from hpstore.loaders.zarr_views.dataset_views import is_chunk, names_within
from tests.fuzz.checkpoint_targets import zip_body, zip_file
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import record, scratch

FIELDS = {"x": Field("float32", (64,)), "label": Field("int64"), "text": Field("str")}
_ROWS = 40


def part(fields: dict[str, Field], rows: int, nonce: str) -> DatasetPart:
    streams = []
    for one in group_fields(fields, "rows")[1].values():
        payload = 9000 if one.ragged else FixedPlan.of(one, 1 << 20).payload_bytes(rows)
        made = StreamShards(unit_bytes=1 << 20, rows=(rows,), payload=(payload,),
                            side=("0" * 16,), pages="0" * 16 if one.ragged else "")  # fmt: skip
        streams.append(made)
    columns = {str(n): ("1" * 16,) for n, f in enumerate(fields.values()) if f.kind == "scalar"}
    return DatasetPart(
        nonce=nonce, rows=rows, streams=tuple(streams), cuts=(rows,), columns=columns, content="c"
    )


def dataset(fields: dict[str, Field], compression: str = "") -> DatasetManifest:
    return DatasetManifest(
        fields=fields, layout="rows", data=4, compression=compression, shuffle_seed=1,
        metadata={"classes": ["a"]}, content="c",
        parts=(part(fields, _ROWS, "0" * 16), part(fields, _ROWS // 2, "1" * 16)),
    )  # fmt: skip


def dataset_seeds() -> list[bytes]:
    fixed = {"x": Field("float32", (64,)), "label": Field("int64")}
    return [dataset(FIELDS).encode(), dataset(fixed).encode(), dataset(FIELDS, "lz4").encode(),
            dataset({"label": Field("int64")}).encode()]  # fmt: skip


def dataset_sealed(parts: Sequence[bytes]) -> bytes:
    """With the fingerprint that fits, too, where there can be one."""
    from hpstore.format.records import seal

    body = json.loads(parts[0])
    with contextlib.suppress(Exception):
        facts = {"fields": body["fields"], "layout": body["layout"], "content": body["content"],
                 "rows": sum(p["rows"] for p in body["parts"])}  # fmt: skip
        body["rows"] = facts["rows"]
        made = DatasetManifest(
            fields={str(n): Field.from_json((d, s)) for n, d, s in body["fields"]}, data=4,
            layout=str(body["layout"]), compression="", shuffle_seed=None, metadata={}, parts=(),
            content=str(body["content"]),
        )  # fmt: skip
        body["fingerprint"] = SimpleFingerprint(made, facts["rows"]).hex()
    return seal(body)


class SimpleFingerprint:
    """That of a manifest without its parts."""

    def __init__(self, made: DatasetManifest, rows: int) -> None:
        self._made, self._rows = made, rows

    def hex(self) -> str:
        from hpstore.format.checksum import digest128

        facts = {**self._made.schema(), "rows": self._rows, "content": self._made.content}
        return digest128(json.dumps(facts, sort_keys=True).encode()).hex()


class Nothing:
    """A pool without objects, as far as StoredData looks at it."""

    def get(self, key: str) -> bytes:
        raise ObjectNotFound(key)

    stat = get


def take_dataset(data: bytes) -> None:
    found = DatasetManifest.decode(data, where="x")
    stored = StoredData(Nothing(), "d", found)  # type: ignore[arg-type]
    for stream in stored.streams:
        for look in (lambda s=stream: stored.pages(s), lambda: stored.stripes()):
            with contextlib.suppress(HpstoreError):
                look()
    stored.close()


def journal() -> bytes:
    return Progressed(
        source="f",
        plan={"a": 1},
        place=IngestPosition(position=5),
        parts=(part(FIELDS, _ROWS, "0" * 16),),
        skipped=(Skipped(name="n", origin=4, problem="p"),),
        nbytes=5,
        writing=("2" * 16,),
    ).encode()


def take_journal(data: bytes) -> None:
    found = Progressed.decode(data, where="x")
    assert found.rows >= 0
    Progressed.decode(found.encode(), where="x")


SIDE = Record({"text": Field("str"), "x": Field("float32", (64,))})


def side_seeds() -> list[bytes]:
    tables = [np.arange(5).astype(d) for d in side_dtypes(SIDE)]
    return [encode_tables(SIDE_MAGIC, tables)]


def take_side(data: bytes) -> None:
    decode_tables(SIDE_MAGIC, data, side_dtypes(SIDE), 5, where="x")


def take_source(source: Source) -> None:
    """All of a source's records, as far as an ingest would look."""
    assert source.fields is None or isinstance(source.fields, dict)
    assert isinstance(source.metadata, dict)
    if isinstance(source, IndexedSource):
        for index in range(min(source.length, 50)):
            source.name_of(index), source.bytes_of(index)
            source.load(index)
    elif isinstance(source, BlockwiseSource):
        for block in range(min(source.blocks, 8)):
            for _ in itertools.islice(source.read_block(block, 0), 200):
                pass


def tar(members: dict[str, bytes], form: int = tarfile.GNU_FORMAT, **pax: str) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(data), dict(pax)
            archive.addfile(info, io.BytesIO(data))
    return raw.getvalue()[:8192]


MEMBERS = {"a.cls": b"1", "a.txt": b"x", "b/c.json": b"{}", "b/c.jpg": b"\xff\xd8\xff\xd9",
           "l" * 120 + ".bin": b"5"}  # fmt: skip


def tar_seeds() -> list[bytes]:
    plain = tar(MEMBERS)
    return [b"p" + plain, b"p" + tar(MEMBERS, tarfile.PAX_FORMAT, comment="é", size="5"),
            b"p" + tar({"a.b": b"", "p" * 90 + "/" + "q" * 50 + ".x": b"1"}, tarfile.USTAR_FORMAT),
            b"g" + gzip.compress(plain), b"b" + bz2.compress(plain),
            b"x" + lzma.compress(plain)]  # fmt: skip


def tar_blocks(data: bytes) -> list[bytes]:
    if data[:1] == b"g":
        data = b"g" + gzip.decompress(data[1:])
    elif data[:1] != b"p":
        raise ValueError("as it is")
    return [data[at : at + 512] for at in range(1, len(data), 512)]


def tar_checked(blocks: Sequence[bytes]) -> bytes:
    """A tar whose headers have the checksums that fit."""
    out = []
    for block in blocks:
        if len(block) == 512 and block[257:262] == b"ustar":
            head = bytearray(block)
            head[148:156] = b" " * 8
            head[148:156] = b"%06o\0 " % sum(head)
            block = bytes(head)
        out.append(block)
    return b"p" + b"".join(out)


def take_tar(data: bytes) -> None:
    ending = {b"g": ".tar.gz", b"b": ".tar.bz2", b"x": ".tar.xz"}.get(data[:1], ".tar")
    take_source(webdataset(scratch(f"s{ending}", data[1:])))


def npy_seeds() -> list[bytes]:
    made = []
    structured = np.zeros(3, [("p", "f4", (3,)), ("q", "i8")])
    for array in (
        np.arange(6.0).reshape(3, 2),
        structured,
        np.asfortranarray(np.eye(3)),
    ):
        raw = io.BytesIO()
        np.save(raw, array)
        made.append(raw.getvalue())
    return made


def npy_parts(data: bytes) -> list[bytes]:
    size = int.from_bytes(data[8:10], "little")
    return [data[10 : 10 + size], data[10 + size :]]


def npy_file(parts: Sequence[bytes]) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(parts[0]).to_bytes(2, "little") + b"".join(parts)


def npz_seeds() -> list[bytes]:
    made = []
    for save in (np.savez, np.savez_compressed):
        raw = io.BytesIO()
        save(raw, x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
        made.append(raw.getvalue())
    return made


def take_npy(data: bytes) -> None:
    take_source(numpy_files(scratch("a.npy", data)))


def take_npz(data: bytes) -> None:
    take_source(numpy_files(scratch("a.npz", data)))


def _part(data: bytes) -> Any:  # Any: stands for a DiskPart
    path = scratch("c.learned.npz", data)
    return SimpleNamespace(file=SimpleNamespace(stem=str(path)[: -len(".learned.npz")]),
                           tier=SimpleNamespace(refuse=print))  # fmt: skip


def policy() -> CachePolicy:
    return CachePolicy(4096, 50, 4096 * 10, jobs=8)


def learned_seeds() -> list[bytes]:
    part = _part(b"")
    save_learned(part, "id", policy().state_arrays(), CacheTally())
    return [Path(f"{part.file.stem}.learned.npz").read_bytes()]


def take_learned(data: bytes) -> None:
    arrays = load_learned(_part(data), "id", CacheTally())
    if arrays is not None:
        made = policy()
        made.restore(arrays, residents=np.empty(0, np.int64))
        made.expected_use(np.arange(50))


def arrow_seeds() -> list[bytes]:
    import pyarrow as pa

    table = pa.table({
        "v": pa.array([b"aaaa", b"bbbb", b"cccc"], pa.binary()),
        "s": pa.array(["a", "bb", None]), "n": pa.array([1, 2, 3], pa.int32()),
        "l": pa.array([[1], [2, 3], []], pa.list_(pa.int64())),
        "f": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        "d": pa.array(["x", "y", "x"]).dictionary_encode(),
        "b": pa.array([{"bytes": b"q", "path": ""}] * 3),
    })  # fmt: skip
    made = []
    for opened in (pa.ipc.new_file, pa.ipc.new_stream):
        raw = io.BytesIO()
        with opened(raw, table.schema) as writer:
            writer.write_table(table)
        made.append(raw.getvalue())
    raw = io.BytesIO()
    with pa.ipc.new_file(raw, table.select(["v", "l"]).schema) as writer:
        writer.write_table(table.select(["v", "l"]))
    return [*made, raw.getvalue()]


def parquet_seeds() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"n": [1, 2, 3], "s": ["a", "b", None], "l": [[1.0], [], [2.0, 3.0]]})
    made = []
    for compression in ("none", "snappy", "zstd"):
        raw = io.BytesIO()
        pa.parquet.write_table(table, raw, compression=compression)
        made.append(raw.getvalue())
    return made


def take_arrow(data: bytes) -> None:
    take_source(ArrowTables(scratch("a.arrow", data)))


def take_parquet(data: bytes) -> None:
    take_source(ArrowTables(scratch("a.parquet", data)))


def take_folder(data: bytes) -> None:
    """The files that list others, in a folder with one table."""
    folder = scratch("tables.json", data).parent / "tables"
    folder.mkdir(exist_ok=True)
    name = (b"state.json", b"dataset_info.json", b"dataset_dict.json")[data[0] % 3 if data else 0]
    for other in (b"state.json", b"dataset_info.json", b"dataset_dict.json"):
        (folder / other.decode()).unlink(missing_ok=True)
    (folder / name.decode()).write_bytes(data[1:])
    (folder / "x-train.arrow").write_bytes(arrow_seeds_once()[2])
    ArrowTables(folder)


_ARROW: list[bytes] = []


def arrow_seeds_once() -> list[bytes]:
    if not _ARROW:
        _ARROW.extend(arrow_seeds())
    return _ARROW


def image_seeds() -> list[bytes]:
    png = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0IEND\xae\x42\x60\x82"
    gif = b"GIF89a" + bytes(7) + b"\x2c" + bytes(10) + b"\x01\x05\0;"
    jpeg = b"\xff\xd8\xff\xe0\0\x04ab\xff\xda\0\x02xx\xff\xd9"
    return [png, gif, jpeg, b"BM\x0e\0\0\0" + bytes(8),
            b"RIFF\x04\0\0\0WEBP"]  # fmt: skip


def take_image(data: bytes) -> None:
    for suffix in (".jpg", ".png", ".ppm"):
        image_problem(data, suffix)


def message(facts: object, raw: bytes = b"") -> bytes:
    text = json.dumps(facts).encode()
    return b"".join(n.to_bytes(4, "little") for n in (len(text), len(raw), 0)) + text + raw


def message_parts(data: bytes) -> list[bytes]:
    size = int.from_bytes(data[:4], "little")
    return [data[12 : 12 + size], data[12 + size :]]


def message_sealed(parts: Sequence[bytes]) -> bytes:
    raw = b"".join(parts[1:])
    return b"".join(n.to_bytes(4, "little") for n in (len(parts[0]), len(raw), 0)) + parts[0] + raw


def take_message(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data[:60000])
        theirs.close()
        try:
            while True:
                found = receive(ours)
                assert isinstance(found.facts, dict)
                for fd in found.fds:
                    os.close(fd)
                found.numbers()
        except Lost:
            return


SOURCE = SimpleNamespace(name="d/rows", identity="id", sizes=5000, block_count=20)


def take_disk_table(data: bytes) -> None:
    stem = str(scratch("disk.table", data))[: -len(".table")]
    made = DiskFile(stem, SOURCE)
    made.read(np.arange(20))
    made.close()
    _holder(data)


def disk_table_seeds() -> list[bytes]:
    stem = str(scratch("disk.table", b""))[: -len(".table")]
    DiskFile(stem, SOURCE).close()
    made = Path(f"{stem}.table").read_bytes()
    return [made, made + (5).to_bytes(8, "little") * 20, b'{"pid": 1, "host": "h", "command": "c"}']


def take_key(data: bytes) -> None:
    key = data.decode(errors="replace")
    is_chunk(key), dataset_of(key), nonce_of("a", key)
    for _ in itertools.islice(names_within(key), 100):
        pass


DATA_TARGETS = [
    Target(name="dataset-manifest", run=take_dataset, seeds=dataset_seeds,
           take_apart=lambda data: [json.dumps({k: v for k, v in json.loads(data).items()
                                                if k != "digest"}).encode()],
           put_together=dataset_sealed),
    record("journal", lambda: [journal()], take_journal),
    Target(name="side-tables", run=take_side, seeds=side_seeds),
    Target(name="tar", run=take_tar, seeds=tar_seeds, take_apart=tar_blocks,
           put_together=tar_checked),
    Target(name="npy", run=take_npy, seeds=npy_seeds, take_apart=npy_parts, put_together=npy_file),
    Target(name="npz", run=take_npz, seeds=npz_seeds, take_apart=zip_body, put_together=zip_file),
    Target(name="cache-learned", run=take_learned, seeds=learned_seeds, take_apart=zip_body,
           put_together=zip_file),
    Target(name="arrow", run=take_arrow, seeds=arrow_seeds_once),
    Target(name="parquet", run=take_parquet, seeds=parquet_seeds),
    Target(name="table-lists", run=take_folder, seeds=lambda: [
           b'\x00{"_data_files": [{"filename": "x-train.arrow"}]}',
           b'\x01{"splits": {"train": {"name": "train"}}}']),
    Target(name="image", run=take_image, seeds=image_seeds),
    Target(name="cache-message", run=take_message, take_apart=message_parts,
           put_together=message_sealed, seeds=lambda: [
           message({"op": "ask", "told": 1}, bytes(16)), message({"op": "wait"})]),
    Target(name="cache-disk-table", run=take_disk_table, seeds=disk_table_seeds),
    Target(name="data-key", run=take_key, seeds=lambda: [
           b"data/a/b/0123456789abcdef/stream-0/000001.side", b"data/a/x/c/0/1"]),
]  # fmt: skip

__all__ = ["DATA_TARGETS"]
