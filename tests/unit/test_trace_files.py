"""Recorded traces: each format is read as its publisher describes it, others are one error."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hpstore.cli import app
from hpstore.errors import ConfigError
from hpstore.loaders.traces import trace_comparison, trace_files
from hpstore.loaders.traces.trace_files import read_trace

RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
IDS = [2**64 - 1, 5, 5, 7, 2**64 - 1]
MSR = (
    "128166372003061629,hm,1,Read,4096,8192,113736\n128166372016382155,hm,1,Write,8192,512,1\n"
    "128166372016382155,hm,0,Write,8192,512,1\n"
)


def oracle(ids: list[int]) -> bytes:
    records = np.zeros(len(ids), RECORD)
    records["id"], records["next"] = np.array(ids, np.uint64), -1
    return records.tobytes()


def test_oracle_general_has_objects_of_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "w01.oracleGeneral.bin"
    path.write_bytes(oracle(IDS))
    found = read_trace(path)
    assert found.format == "oracle"
    assert found.blocks == 3
    kept: dict[int, int] = {}
    for name, number in zip(IDS, found.requests.tolist(), strict=True):
        assert kept.setdefault(name, number) == number


def test_compressed_traces_are_those_of_the_plain_file(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    body = oracle(list(range(70_000)))  # more than one piece
    (tmp_path / "a.oracle").write_bytes(body)
    (tmp_path / "a.oracle.gz").write_bytes(gzip.compress(body))
    # two frames, as parallel compressors write
    halves = zstandard.compress(body[:24_000]) + zstandard.compress(body[24_000:])
    (tmp_path / "a.oracle.zst").write_bytes(halves)
    plain = read_trace(tmp_path / "a.oracle").requests
    for name in ("a.oracle.gz", "a.oracle.zst"):
        assert np.array_equal(read_trace(tmp_path / name).requests, plain)


def test_msr_requests_are_those_of_blocks_and_volumes_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "hm_1.csv"
    path.write_text(MSR)
    found = read_trace(path)
    assert found.format == "msr"
    assert found.requests.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("time,obj_id,size\n1,a,5\n2,b,5\n3,a,5\n", "", [0, 1, 0]),
        ("1,7,5\n2,9,5\n3,7,5\n", "", [0, 1, 0]),
        ("4\n6\n4\n", "", [0, 1, 0]),
        ("k;v\n4;1\n6;2\n4;3\n", "k", [0, 1, 0]),
        ("4;1\n6;2\n4;1\n", "2", [0, 1, 0]),
        ("1|7|5\r\n2|9|5\r\n3|7|5\r\n", "", [0, 1, 0]),
        ("1  7 5\n2 9  5\n3 7 5\n", "", [0, 1, 0]),
        ("\ufeffkey,time,size\n7,1,5\n9,2,5\n7,3,5\n", "", [0, 1, 0]),
        ("size,ttl,key,op\n5,1,k1,get\n5,1,k2,get\n5,1,k1,get\n", "", [0, 1, 0]),
        ("1,a,5\n2,b,5\n3,a,5\n", "", [0, 1, 0]),
        ("a\nb\na\n", "", [0, 1, 0]),
        ("t1,obj2,size3\n1,7,5\n2,9,5\n3,7,5\n", "", [0, 1, 0]),
        ("a,2\nb,3\na,4\n", "1", [0, 1, 0]),
    ],
)
def test_csv_by_its_header_by_place_or_by_the_column_named(
    tmp_path: Path, text: str, column: str, expected: list[int]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    found = read_trace(path, column=column).requests
    assert len(set(zip(found.tolist(), expected, strict=True))) == 2
    assert len(set(found.tolist())) == 2


def test_a_name_decides_on_bytes_that_are_no_text_alone(tmp_path: Path) -> None:
    (tmp_path / "oracle_db.csv").write_text("1,a,5\n2,b,5\n3,a,5\n4,c,6\n")  # 24 bytes
    assert read_trace(tmp_path / "oracle_db.csv").format == "csv"
    (tmp_path / "oracle_db.csv").write_bytes("\ufeffid,größe\n1,5\n2,5\n33,77\n".encode())
    assert read_trace(tmp_path / "oracle_db.csv").format == "csv"


def test_msr_may_have_a_header_and_lines_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "hm_1.csv"
    path.write_text("Timestamp,Hostname,DiskNumber,Type,Offset,Size,Response\n" + MSR)
    assert read_trace(path).requests.tolist() == [0, 1, 1, 2]
    path.write_bytes(MSR.replace("\n", "\r\n").encode())
    assert read_trace(path).requests.tolist() == [0, 1, 1, 2]


def test_a_zstd_file_that_is_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    """Within a frame, whatever record that ends at; two whole frames are read."""
    zstandard = pytest.importorskip("zstandard")
    frame, path = zstandard.compress(oracle(list(range(1000)))), tmp_path / "a.oracle.zst"
    for kept in (3, len(frame) // 2, len(frame) - 1, len(frame) + 2, 2 * len(frame) - 1):
        path.write_bytes((frame + frame)[:kept])
        with pytest.raises(ConfigError, match="within a zstd frame"):
            read_trace(path)
    path.write_bytes(frame + frame)
    assert len(read_trace(path).requests) == 2000


def test_a_limit_cuts_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.oracle"
    path.write_bytes(oracle(IDS))
    found = read_trace(path, limit=3)
    assert (len(found.requests), found.cut) == (3, True)
    assert not read_trace(path, limit=5).cut


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("t.oracle", oracle(IDS)[:-1], "ends within record 4"),
        ("t.oracle", b"\xff" * 24 * 3 + b"\xfe" * 24, "record 3"),
        ("t.oracle", b"", "no requests"),
        ("t.oracle.gz", b"no gzip", "cannot be read"),
        ("t.oracle.gz", gzip.compress(b"x" * 240, mtime=0)[:-9], "cannot be read"),
        ("t.csv", b"1,2,3\n4,1\n5\n", "line 3 has no column 2"),
        ("t.csv", b"1" * 100_000, "65536 bytes"),
        ("hm.csv", b"1,hm,1,Read,-4096,512,1\n", "line 1: a request"),
        ("hm.csv", b"1,hm,1,Read,0,9999999999999999,1\n", "more than"),
        ("hm.csv", MSR.encode() + b"x\n", "line 4 has no offset"),
        ("hm.csv", b"1,hm,1,Read,0,-512,1\n", "line 1: a request of -512"),
        ("hm.csv", b"1,hm,1,Read,4611686018427387904,512,1\n", "line 1: a request"),
        ("t.csv", b"1,7,5\n2,,5\n", "line 2 has nothing in column 2"),
        ("t.csv", "1,7,5\n2,9,5\n".encode("utf-16"), "UTF-16"),
        ("t.csv", "1,7,5\n2,9,5\n".encode("utf-16-be"), "UTF-16"),
    ],
)
def test_other_bytes_are_one_error_that_names_the_place(
    tmp_path: Path, name: str, body: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(body)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no column 'c'"):
        read_trace(path, column="c")
    with pytest.raises(ConfigError, match="there are auto, oracle"):
        read_trace(path, format="lirs")
    with pytest.raises(ConfigError, match="at least 1"):
        read_trace(path, limit=0)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.oracle.zst"
    path.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        read_trace(path)


def test_text_of_any_length_takes_eight_bytes() -> None:
    names = {trace_files._named(text) for text in ("a", "b", "1" * 30, "é", "-1", "7")}
    assert len(names) == 6
    assert all(0 <= name < 2**63 for name in names)


def test_the_command_prints_every_policy_and_the_same_as_json(tmp_path: Path) -> None:
    path = tmp_path / "loop.csv"
    path.write_text("\n".join(map(str, [*range(40)] * 5)))
    words = ["cache", "simulate", str(path), "--capacity", "50"]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "250"}).stdout
    assert "200 requests of 40 blocks" in shown
    done = CliRunner().invoke(app, [*words, "--json"])
    (row,) = json.loads(done.stdout)["capacities"]
    ratios = row["hit_ratios"]
    assert ratios["LRU"] == 0.0
    assert ratios["MIN"] == max(ratios.values())
    assert row["difference"] == pytest.approx(ratios["hpstore"] - ratios[row["best_plain"]])
    for name in ratios:
        assert name in shown


def test_the_command_draws_a_picture_and_refuses_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--plot names a file, or nothing follows it, or another option does."""
    path = tmp_path / "loop.csv"
    path.write_text("\n".join(map(str, [*range(40)] * 5)))
    words = ["cache", "simulate", str(path), "--policies", "lru,hpstore"]
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, [*words, "--plot", str(tmp_path / "p.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    for more in (["--plot"], ["--plot", "--batch", "8"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert "drawn: hit-ratios.png" in done.output
        assert Path("hit-ratios.png").read_bytes().startswith(b"\x89PNG")
        Path("hit-ratios.png").unlink()
    done = CliRunner().invoke(app, [*words, "--plot", str(tmp_path / "none" / "p.png")])
    assert isinstance(done.exception, ConfigError)
    assert "200 requests" in done.stdout  # the figures are there
    for more in (["--policies", "lur"], ["--capacity", "0"], ["--batch", "0"]):
        found = CliRunner().invoke(app, [*words, *more])
        assert isinstance(found.exception, ConfigError)


def test_a_trace_of_one_request_has_no_hits(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("5")
    done = CliRunner().invoke(app, ["cache", "simulate", str(path), "--json"])
    (row,) = json.loads(done.stdout)["capacities"]
    assert set(row["hit_ratios"].values()) == {0.0}


def test_the_library_and_python_give_equal_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever pieces the library gets the requests."""
    requests = np.random.default_rng(1).zipf(1.2, 3000) % 400
    monkeypatch.setattr(trace_comparison, "_PIECE", 1000)
    compiled = trace_comparison.plain_ratios([*trace_comparison.PLAIN], requests, 400, 40)
    monkeypatch.setattr(trace_comparison, "installed", lambda: None)
    found = trace_comparison.plain_ratios([*trace_comparison.PLAIN], requests, 400, 40)
    assert compiled == pytest.approx(found)
