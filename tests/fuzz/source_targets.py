"""Parsers of what data sets are ingested from: archives, arrays, tables, images."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import struct
import tarfile
from collections.abc import Sequence

import numpy as np

from hpstore.loaders.ingestion.arrow_source import ArrowTables
from hpstore.loaders.ingestion.image_checks import image_problem
from hpstore.loaders.ingestion.numpy_source import numpy_files
from hpstore.loaders.ingestion.sample_source import BlockwiseSource, IndexedSource, Source
from hpstore.loaders.ingestion.tfrecord_source import masked_crc, read_frames
from hpstore.loaders.ingestion.token_source import token_files
from hpstore.loaders.ingestion.webdataset_source import webdataset
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import scratch
from tests.fuzz.weight_file_targets import zip_body, zip_file


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


MEMBERS = {
    "a.cls": b"1",
    "a.txt": b"x",
    "b/c.json": b"{}",
    "b/c.jpg": b"\xff\xd8\xff\xd9",
    "l" * 120 + ".bin": b"5",
}


def tar_seeds() -> list[bytes]:
    plain = tar(MEMBERS)
    return [
        b"p" + plain,
        b"p" + tar(MEMBERS, tarfile.PAX_FORMAT, comment="é", size="5"),
        b"p" + tar({"a.b": b"", "p" * 90 + "/" + "q" * 50 + ".x": b"1"}, tarfile.USTAR_FORMAT),
        b"g" + gzip.compress(plain, mtime=0),
        b"b" + bz2.compress(plain),
        b"x" + lzma.compress(plain),
    ]


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


def arrow_seeds() -> list[bytes]:
    import pyarrow as pa

    table = pa.table(
        {
            "v": pa.array([b"aaaa", b"bbbb", b"cccc"], pa.binary()),
            "s": pa.array(["a", "bb", None]),
            "n": pa.array([1, 2, 3], pa.int32()),
            "l": pa.array([[1], [2, 3], []], pa.list_(pa.int64())),
            "f": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
            "d": pa.array(["x", "y", "x"]).dictionary_encode(),
            "b": pa.array([{"bytes": b"q", "path": ""}] * 3),
        }
    )
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
    return [png, gif, jpeg, b"BM\x0e\0\0\0" + bytes(8), b"RIFF\x04\0\0\0WEBP"]


def take_image(data: bytes) -> None:
    for suffix in (".jpg", ".png", ".ppm"):
        image_problem(data, suffix)


def idx_seeds() -> list[bytes]:
    """Two documents of one and two sequences, with and without modes."""
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3)
    parts = [np.array([2, 3, 1], "<i4"), np.array([0, 4, 10], "<i8"), np.array([0, 1, 3], "<i8")]
    plain = head + b"".join(part.tobytes() for part in parts)
    return [plain, plain + bytes(3), head[:17] + struct.pack("<BQQ", 4, 0, 0)]


def take_idx(data: bytes) -> None:
    scratch("megatron.bin", bytes(12))
    take_source(token_files(scratch("megatron.idx", data)))


def frame_seeds() -> list[bytes]:
    records = (b"", b"one record", bytes(300))
    framed = []
    for data in records:
        length = struct.pack("<Q", len(data))
        framed += [length, struct.pack("<I", masked_crc(length))]
        framed += [data, struct.pack("<I", masked_crc(data))]
    return [b"".join(framed), b"".join(framed[:4])]


def take_frames(data: bytes) -> None:
    for _ in read_frames(scratch("frames.tfrecord", data)):
        pass


SOURCE_TARGETS = [
    Target(name="tfrecord-frames", run=take_frames, seeds=frame_seeds),
    Target(name="megatron-idx", run=take_idx, seeds=idx_seeds),
    Target(
        name="tar", run=take_tar, seeds=tar_seeds, take_apart=tar_blocks, put_together=tar_checked
    ),
    Target(name="npy", run=take_npy, seeds=npy_seeds, take_apart=npy_parts, put_together=npy_file),
    Target(name="npz", run=take_npz, seeds=npz_seeds, take_apart=zip_body, put_together=zip_file),
    Target(name="arrow", run=take_arrow, seeds=arrow_seeds_once),
    Target(name="parquet", run=take_parquet, seeds=parquet_seeds),
    Target(
        name="table-lists",
        run=take_folder,
        seeds=lambda: [
            b'\x00{"_data_files": [{"filename": "x-train.arrow"}]}',
            b'\x01{"splits": {"train": {"name": "train"}}}',
        ],
    ),
    Target(name="image", run=take_image, seeds=image_seeds),
]
