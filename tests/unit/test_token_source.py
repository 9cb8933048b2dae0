"""Token files as sources: every token once, indexes that lie refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import ConfigError, MalformedFile
from hpstore.loaders import Field, open_source
from tests.unit.test_ingest_sources import items_of, plain


def megatron(
    path: Path, documents: list[list[list[int]]], dtype: str = "<u2", code: int = 8
) -> Path:
    """As Megatron's IndexedDatasetBuilder writes them: .bin, and an .idx with ends of documents."""
    sequences = [np.array(tokens, dtype) for document in documents for tokens in document]
    path.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in sequences))
    sizes = [part.nbytes for part in sequences]
    ends = np.cumsum([0, *map(len, documents)])
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(ends))
    index += np.array([len(part) for part in sequences], "<i4").tobytes()
    index += np.cumsum([0, *sizes])[: len(sizes)].astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index + ends.astype("<i8").tobytes())
    return path.with_suffix(".bin")


def test_sequences_of_megatron(tmp_path: Path) -> None:
    """Of two files, by the .bin, the .idx and the folder; documents are numbered through."""
    megatron(tmp_path / "a", [[[1, 2]], [[3], [65535]]])
    megatron(tmp_path / "b", [[[]], [[5, 6, 7]]])
    source = open_source(tmp_path)
    assert source.fields == {"tokens": Field("uint16", (None,)), "document": Field("int64")}
    assert [plain(item.sample) for item in items_of(source)] == [
        {"tokens": [1, 2], "document": 0},
        {"tokens": [3], "document": 1},
        {"tokens": [65535], "document": 1},
        {"tokens": [], "document": 2},
        {"tokens": [5, 6, 7], "document": 3},
    ]
    assert items_of(source)[4].name == "b.bin: sequence 1"
    for ending in ("bin", "idx"):
        alone = open_source(tmp_path / f"b.{ending}")
        assert [plain(i.sample) for i in items_of(alone)] == [{"tokens": []}, {"tokens": [5, 6, 7]}]
    wide = open_source(megatron(tmp_path / "c", [[[1 << 20]]], "<i4", 4))
    assert wide.fields == {"tokens": Field("int32", (None,))}
    with pytest.raises(ConfigError, match="several types"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (
            0,
            "<B",
        ),
        (9, "<Q"),
        (17, "<B"),
        (18, "<Q"),
        (26, "<Q"),
        (34, "<i"),
        (38, "<q"),
        (46, "<q"),
        (54, "<q"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, at: int, value: str) -> None:
    """Every number of it as -1, too large by one, and as much as it holds."""
    path = megatron(tmp_path / "a", [[[1, 2]]])
    whole = path.with_suffix(".idx").read_bytes()
    shape = struct.Struct(value)
    (is_now,) = shape.unpack_from(whole, at)
    most = (1 << 8 * shape.size - (value[1] in "iq")) - 1
    for number in {most, is_now + 7, -1 if value[1] in "iq" else most - 1}:
        raw = bytearray(whole)
        shape.pack_into(raw, at, number)
        path.with_suffix(".idx").write_bytes(raw)
        with pytest.raises(MalformedFile, match=r"a\.idx"):
            open_source(path)
    for size in range(len(whole)):
        path.with_suffix(".idx").write_bytes(whole[:size])
        with pytest.raises(MalformedFile, match=r"a\.idx"):
            open_source(path)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11])
@pytest.mark.parametrize("header", [False, True])
def test_flat_files_are_cut_into_records(tmp_path: Path, count: int, header: bool) -> None:
    """Plain, and with the header of llm.c; joined in their order the records are the file."""
    tokens = np.arange(count, dtype="<u2") + 65000
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, count
    path = tmp_path / "train.bin"
    path.write_bytes((head.tobytes() if header else b"") + tokens.tobytes())
    options: dict[str, Any] = {"record_tokens": 5}
    items = items_of(open_source(path, source_options=options))
    parts = [np.asarray(item.sample["tokens"]) for item in items if item.sample]
    assert [len(part) for part in parts] == [5] * (count // 5) + [count % 5] * (count % 5 > 0)
    assert [int(token) for part in parts for token in part] == tokens.tolist()
    if header:
        path.write_bytes(head.tobytes() + tokens.tobytes() + b"xx")
        with pytest.raises(MalformedFile, match="behind its header"):
            open_source(path)


def test_wrong_token_files_are_refused(tmp_path: Path) -> None:
    """Half a token, another type, an .idx without its .bin, both kinds at once."""
    (tmp_path / "a.bin").write_bytes(b"123456")
    with pytest.raises(MalformedFile, match="no uint32 tokens"):
        open_source(tmp_path / "a.bin", source_options={"dtype": "uint32"})
    with pytest.raises(ConfigError, match="not 'float32'"):
        open_source(tmp_path / "a.bin", source_options={"dtype": "float32"})
    with pytest.raises(ConfigError, match="record_tokens"):
        open_source(tmp_path / "a.bin", source_options={"record_tokens": 0})
    megatron(tmp_path / "b", [[[1]]])
    with pytest.raises(ConfigError, match=r"a.bin has no .idx"):
        open_source(tmp_path)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(ConfigError, match=r"b.bin does not exist"):
        open_source(tmp_path / "b.idx")
