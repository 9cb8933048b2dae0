"""ingest by URL: a real S3 server, HTTP, ranges that fail, files that change."""

from __future__ import annotations

import functools
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders import ingest, open_source
from hpstore.loaders.ingestion import remote_files
from hpstore.loaders.ingestion.remote_files import RemoteFile, tried
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import SHARD, cut_short, make_pool, samples
from tests.unit.test_ingest_sources import items_of, plain

ROWS = [{"n": n, "s": "x" * 3000} for n in range(40)]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Options of fsspec for a bucket of a moto server that runs here."""
    server = pytest.importorskip("moto.server", reason="needs moto[server]")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs (the extra `s3`)")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    s3fs.S3FileSystem(**options).mkdir("bucket")
    yield options
    running.stop()


def lines(first: int, stop: int) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[first:stop])


def tar(first: int, stop: int) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as made:
        for row in ROWS[first:stop]:
            for ending, data in (("id", str(row["n"])), ("txt", str(row["s"]))):
                info = tarfile.TarInfo(f"{row['n']:03d}.{ending}")
                info.size = len(data)
                made.addfile(info, io.BytesIO(data.encode()))
    return raw.getvalue()


def parquet(first: int, stop: int) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (the extra `parquet`)")
    raw = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS[first:stop]), raw, row_group_size=7)
    return raw.getvalue()


@pytest.mark.filterwarnings("ignore")  # botocore's own deprecations
@pytest.mark.parametrize(
    ("ending", "written"), [("jsonl", lines), ("tar", tar), ("parquet", parquet)]
)
def test_an_ingest_from_s3(pool: Pool, s3: dict[str, Any], ending: str, written: Any) -> None:
    """By folder, pattern and braces; cut short and on; an object that was replaced is refused."""
    bucket = fsspec.filesystem("s3", **s3)
    for number in range(2):
        bucket.pipe(f"bucket/{ending}/{number}.{ending}", written(number * 20, number * 20 + 20))
    options: dict[str, Any] = {"source_options": {"storage": s3}, "shuffle": False}
    formats = {"tar": "webdataset"}
    for where in (f"*.{ending}", f"{{0..1}}.{ending}", ""):
        source = open_source(
            f"s3://bucket/{ending}/{where}",
            format=formats.get(ending, ending),
            source_options={"storage": s3},
        )
        assert len(items_of(source)) == 40
    url = f"s3://bucket/{ending}/*.{ending}"
    assert 0 < cut_short(pool, "t", url, 33, **options) < 33
    report = ingest(pool, "t", url, **options, **SHARD)
    assert report.samples == 40
    field = "id" if ending == "tar" else "n"
    assert [int(sample[field]) for sample in samples(pool, "t")] == list(range(40))
    cut_short(pool, "u", url, 33, **options)
    bucket.pipe(f"bucket/{ending}/1.{ending}", written(19, 39))
    with pytest.raises(IngestError, match="the source has changed"):
        ingest(pool, "u", url, **options, **SHARD)
    with pytest.raises(ConfigError, match="does not exist"):
        open_source(f"s3://bucket/none.{ending}", source_options={"storage": s3})


class Server(http.server.SimpleHTTPRequestHandler):
    """With ranges; `fail` requests of a range break off in the middle first."""

    fail = 0

    def do_GET(self) -> None:
        whole = Path(self.translate_path(self.path))
        asked = self.headers.get("Range")
        if asked is None or not whole.is_file():
            super().do_GET()
            return
        data = whole.read_bytes()
        first, last = asked.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last or len(data)) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        if Server.fail:
            Server.fail -= 1
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            return
        self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
        del format, args


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The URL of a folder."""
    root = tmp_path / "web"
    root.mkdir()
    (root / "a.jsonl").write_bytes(lines(0, 20))
    (root / "b.jsonl").write_bytes(lines(20, 40))
    handler = functools.partial(Server, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_ranges_of_http_are_tried_again(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers that break off are made good; with four the file cannot be read."""
    pytest.importorskip("aiohttp", reason="needs aiohttp (the extra `http`)")
    monkeypatch.setattr(remote_files, "_FIRST_WAIT_SECONDS", 0.0)
    for fails, whole in [(3, True), (4, False)]:
        source = open_source(f"{web}/a.jsonl")
        assert source.fields
        Server.fail = fails
        items = items_of(source)
        Server.fail = 0
        if whole:
            assert [plain(item.sample) for item in items] == ROWS[:20]
        else:
            assert "4 tries failed" in items[-1].problem


def test_a_file_that_changes_while_it_is_read_ends_the_ingest(pool: Pool, tmp_path: Path) -> None:
    """Between its blocks: what came before is not mixed with what comes after."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/changing/a.jsonl", lines(0, 20))
    source = open_source("memory://changing/a.jsonl")
    assert source.fields
    memory.pipe("/changing/a.jsonl", lines(0, 19))
    with pytest.raises(IngestError, match=r"a.jsonl has changed since"):
        ingest(pool, "t", source)


def test_tries_are_bounded() -> None:
    """Four, with waits that double; what is not there is not asked for again."""
    waits: list[float] = []
    asked: list[int] = []

    def fails(error: Exception) -> None:
        asked.append(1)
        raise error

    with pytest.raises(OSError, match="4 tries failed, the last: RuntimeError: no"):
        tried(lambda: fails(RuntimeError("no")), "u", waits.append)
    assert (len(asked), waits) == (4, [0.2, 0.4, 0.8])
    with pytest.raises(FileNotFoundError):
        tried(lambda: fails(FileNotFoundError("no")), "u", waits.append)
    assert len(asked) == 5


def test_what_cannot_be_read_by_url_says_so(tmp_path: Path) -> None:
    """A package that is missing, a format of local files, a file that is written to."""
    with pytest.raises(ConfigError, match=r"gs://bucket/a\.jsonl (cannot be read|does not exist)"):
        open_source("gs://bucket/a.jsonl")
    with pytest.raises(ConfigError, match="is not on this machine"):
        open_source("s3://bucket/a.bin")
    with pytest.raises(ConfigError, match="Protocol not known"):
        open_source("odd://bucket/a.jsonl")
    memory = fsspec.filesystem("memory")
    with pytest.raises(ValueError, match="read only"):
        RemoteFile(memory, "/a", "memory://a").open("wb")
