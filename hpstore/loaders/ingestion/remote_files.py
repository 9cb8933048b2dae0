"""Files behind a URL (s3://, gs://, https://), read by fsspec in ranges.

A range is tried four times. What a file was when the source was opened (size, tag, time) is
compared each time that it is opened: one that has changed is refused.
"""

from __future__ import annotations

import io
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from hpstore.errors import ConfigError, IngestError
from hpstore.format.untrusted_bytes import brief
from hpstore.units import MIB

RANGE_BYTES = 8 * MIB
TRIES = 4
_FIRST_WAIT_SECONDS = 0.2
_TAGS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "generation")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What pathlib's stat() has of a file, as far as sources look at it; `tag`: of its content."""

    st_size: int
    tag: str
    st_mtime_ns: int = 0


class RemoteFile:
    """A file of a source, as sources use Path: name, suffix, stat(), open().

    `filesystem` is Any, as fsspec is untyped. Any number of threads may open it; what is opened
    belongs to one of them.
    """

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._filesystem, self._path, self.url = filesystem, path, url
        self.name = posixpath.basename(path)
        self.suffix = posixpath.splitext(self.name)[1]
        self.stem = posixpath.splitext(self.name)[0]
        self._facts: FileFacts | None = None

    def __str__(self) -> str:
        return self.url

    def __lt__(self, other: RemoteFile) -> bool:
        return self.url < other.url

    def stat(self) -> FileFacts:
        """Size and tag, asked for once. Raises OSError."""
        if self._facts is None:
            self._facts = self._asked()
        return self._facts

    def _asked(self) -> FileFacts:
        self._filesystem.invalidate_cache(posixpath.dirname(self._path))
        found: Mapping[str, Any] = tried(lambda: self._filesystem.info(self._path), self.url)
        size = found.get("size")
        if not isinstance(size, int):
            raise OSError(f"the server does not say how large {self.url} is")
        return FileFacts(size, "; ".join(str(found[tag]) for tag in _TAGS if found.get(tag)))

    def open(self, mode: str = "rb", buffering: int = RANGE_BYTES) -> IO[bytes]:
        """The file, to be read and sought; 0: each read is a range. Raises OSError; IngestError
        where it has changed."""
        if mode != "rb":
            raise ValueError(f"mode {mode!r}: a remote file is read only")
        known = self.stat()
        if self._asked() != known:
            raise IngestError(
                f"{self.url} has changed since this ingest began; what was written is not visible. "
                "Run it again with resume=False (--restart)"
            )
        raw = _Ranges(self._filesystem, self._path, self.url, known.st_size)
        if not buffering:
            return cast("IO[bytes]", raw)
        return cast("IO[bytes]", io.BufferedReader(raw, min(buffering, known.st_size + 1)))


class _Ranges(io.RawIOBase):
    """Ranges of a file, as a raw stream. One thread."""

    def __init__(self, filesystem: Any, path: str, url: str, size: int) -> None:
        self._filesystem, self._path, self._url, self._size = filesystem, path, url, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"a place of {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # as it is called
        stop = min(self._at + len(buffer), self._size)
        if stop <= self._at:
            return 0
        data = tried(lambda: self._range(self._at, stop), self._url)
        buffer[: len(data)] = data
        self._at = stop
        return len(data)

    def _range(self, first: int, stop: int) -> bytes:
        data: bytes = self._filesystem.cat_file(self._path, start=first, end=stop)
        if len(data) != stop - first:
            raise OSError(f"{len(data)} bytes came of {stop - first} from byte {first} on")
        return data


def tried(read: Callable[[], Any], url: str, wait: Callable[[float], None] = time.sleep) -> Any:
    """What `read` returns, after at most four tries. Raises OSError; what is not there, or not
    allowed, is not tried again."""
    for turn in range(TRIES):
        try:
            return read()
        except (FileNotFoundError, PermissionError) as error:
            raise type(error)(f"{url}: {brief(error)}") from error
        except Exception as error:
            if turn == TRIES - 1:
                raise OSError(f"{url}: {TRIES} tries failed, the last: {brief(error)}") from error
        wait(_FIRST_WAIT_SECONDS * 2**turn)
    raise AssertionError


def remote_files(
    url: str, patterns: Sequence[str], endings: Sequence[str], storage: Mapping[str, object]
) -> list[RemoteFile]:
    """The files of a URL, sorted: itself, those of a folder with one of `endings`, those of its
    `patterns`. Raises ConfigError where there are none, or the URL cannot be read."""
    try:
        import fsspec

        filesystem, _ = fsspec.core.url_to_fs(url, **storage)
    except ImportError as error:
        raise ConfigError(f"{url} cannot be read: {error}. {_extra(url)}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{url} cannot be read: {error}") from error

    def named(one: str) -> list[RemoteFile]:
        where = filesystem._strip_protocol(one)
        if url.startswith("http"):  # has no folders
            return [made(where)]
        if any(sign in one for sign in "*["):
            return [made(path) for path in tried(lambda: filesystem.glob(where), one)]
        if filesystem.isdir(where) and not filesystem.isfile(where):
            found = tried(lambda: filesystem.ls(where, detail=False), one)
            return [made(path) for path in found if path.lower().endswith(tuple(endings))]
        return [made(where)]

    def made(path: str) -> RemoteFile:
        return RemoteFile(filesystem, path, filesystem.unstrip_protocol(path))

    try:
        files = [file for one in patterns for file in named(one)]
        for file in files:
            file.stat()
    except FileNotFoundError as error:
        raise ConfigError(f"{url} does not exist: {error}") from error
    except OSError as error:
        raise IngestError(f"{url} cannot be read: {error}. Nothing was written") from error
    if not files:
        raise ConfigError(f"{url} holds no file that ends in {', '.join(endings)}")
    return sorted(files)


def _extra(url: str) -> str:
    """Which packages read a URL."""
    protocol = url.partition("://")[0]
    extras = {"s3": "hpstore[s3]", "http": "hpstore[http]", "https": "hpstore[http]"}
    packages = {
        "gs": "gcsfs",
        "gcs": "gcsfs",
        "az": "adlfs",
        "abfs": "adlfs",
        "hf": "huggingface_hub",
    }
    return f"pip install {extras.get(protocol) or packages.get(protocol, 'its package')!r}"
