"""One bucket through obstore: every call ends, is bounded, and raises DeviceErrors.

Retries are the client's own: of connections, of 5xx and 429 answers, a few times within the
deadline. A forked child cannot use the client (its threads stayed in the parent): it is refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import DirectoryEntry
from hpstore.devices.store_credentials import StoreCredentials, find_credentials
from hpstore.devices.store_errors import store_error
from hpstore.errors import ConfigError, DeviceDenied, DeviceError, DeviceMissing, DeviceTimeout
from hpstore.format.store_settings import StorePlace, StoreSettings
from hpstore.runtime.text_files import read_text_file
from hpstore.units import KIB, MIB, div_ceil, round_up

T = TypeVar("T")
WHOLE_PUT_BYTES = 16 * MIB  # up to this one request; a part of a larger one is sent again alone
PART_BYTES = 8 * MIB
_PARTS_MOST = 9_000  # S3 takes 10,000
_PARTS_AT_ONCE = 4
_CHUNK_BYTES = 256 * KIB  # of an answer's body that Python copies at once
_RETRIES = 3
_CONNECT_SECONDS = 5.0
_LOOKED_UP_SECONDS = 300.0  # then a profile or file is read again: keys are changed in it

_used_by: list[int] = []  # the process that the client's threads were started in


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """What a store says of a file. `etag` is "" where it has none."""

    size_bytes: int
    etag: str
    changed: datetime


class StoreChanged(DeviceError):
    """The file is another one than was opened, or a condition of a put does not hold."""


def has_obstore() -> bool:
    """Whether the package is there (`pip install hpstore[s3]`)."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return True


def open_bucket(
    place: StorePlace, settings: StoreSettings, *, url: str, deadline_seconds: float
) -> StoreClient:
    """A client of a bucket. Nothing is sent yet. Raises ConfigError for credentials that are not
    where they should be, DeviceMissing for settings that the client refuses."""
    from obstore import exceptions
    from obstore.store import S3Store

    where = f"[stores.{place.store}]" if place.store else url
    found = find_credentials(settings.credentials, where=where)
    options: dict[str, object] = {
        "timeout": timedelta(seconds=deadline_seconds),
        "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, deadline_seconds)),
        "allow_http": settings.endpoint.startswith("http://"),
    }
    if settings.ca_file:
        options["root_certificate"] = _certificates(settings.ca_file, where)
    # Any: passed on as keywords
    given: dict[str, Any] = {
        "client_options": options,
        "retry_config": _retries(deadline_seconds),
        "disable_bulk_delete": True,  # one file each: not every store has the bulk request
        "checksum_algorithm": "SHA256",  # is computed for the signature anyway
    }
    if settings.region:
        given["region"] = settings.region
    if settings.endpoint:
        endpoint = settings.endpoint.rstrip("/")
        if not settings.path_style:
            endpoint = endpoint.replace("://", f"://{place.bucket}.", 1)
            given["virtual_hosted_style_request"] = True
        # both: AWS_ENDPOINT_URL_S3 of the environment would win
        given["endpoint"] = given["aws_endpoint_url_s3"] = endpoint
    if settings.credentials == "none":
        given["skip_signature"] = True
    elif found is not None:
        given["credential_provider"] = _Provider(settings.credentials, where)
    try:
        store = S3Store(place.bucket, **given)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        raise DeviceMissing(
            f"device {url} cannot be opened: {type(error).__name__} of its settings {where}",
            device=url,
        ) from None
    return StoreClient(
        store,
        url=url,
        settings=settings,
        deadline_seconds=deadline_seconds,
        bucket=(settings.endpoint, place.bucket),
    )


def _retries(deadline_seconds: float) -> dict[str, object]:
    return {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=deadline_seconds),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=2),
            "base": 2,
        },
    }


def _certificates(path: str, where: str) -> str:
    try:
        return read_text_file(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: ca_file {path} cannot be read: {error}") from error


class _Provider:
    """Gives the client what the reference names, looked up again every few minutes."""

    def __init__(self, reference: str, where: str) -> None:
        self._reference, self._where = reference, where

    def __call__(self) -> dict[str, object]:
        found: StoreCredentials | None = find_credentials(self._reference, where=self._where)
        if found is None:
            raise ConfigError(f"{self._where}: the credentials are gone")
        until = datetime.now(UTC) + timedelta(seconds=_LOOKED_UP_SECONDS)
        return {
            "access_key_id": found.key_id,
            "secret_access_key": found.secret,
            "token": found.token or None,
            "expires_at": until,
        }


class StoreClient:
    """A bucket. Thread-safe; calls block, and give up the GIL while they do.

    `bucket`: the server and its name there; None where no other client has it.
    """

    def __init__(
        self,
        store: Any,  # of obstore, which need not be installed
        *,
        url: str,
        settings: StoreSettings | None = None,
        deadline_seconds: float = 30.0,
        bucket: tuple[str, str] | None = None,
    ) -> None:
        import obstore

        self.bucket = bucket
        self.url, self.store, self._obstore = url, store, obstore
        self.settings = settings or StoreSettings()
        self.deadline_seconds = deadline_seconds

    def call(self, operation: str, act: Callable[[], T]) -> T:
        """Run a call of the client. Raises DeviceErrors, and FileNotFoundError."""
        if not _used_by:
            _used_by.append(os.getpid())
        if _used_by[0] != os.getpid():
            raise DeviceError(
                f"{operation} was not tried on device {self.url}: a forked process cannot use the "
                'connections of its parent. Start workers with multiprocessing_context="spawn".',
                device=self.url,
            )
        exceptions = self._obstore.exceptions
        try:
            return act()
        except DeviceError:
            raise
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise StoreChanged(
                f"{operation} on device {self.url}: the file is not what it was", device=self.url
            ) from None
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise store_error(
                error,
                url=self.url,
                operation=operation,
                endpoint=self.settings.endpoint,
                credentials=self.settings.credentials,
            ) from None  # its text has the whole answer

    def facts(self, path: str) -> StoredFile | None:
        """What there is; None where nothing is. Raises DeviceMissing where there is no bucket."""
        try:
            return _facts(self.call("stat", lambda: self._obstore.head(self.store, path)))
        except (FileNotFoundError, DeviceDenied):
            pass
        try:  # an answer to HEAD has no body: this names a bucket that is gone, a wrong key
            probe = np.empty(1, np.uint8)
            return self.read_into(path, 0, probe, short=True)[0]
        except FileNotFoundError:
            return None

    def read_into(
        self, path: str, start: int, target: Bytes, *, etag: str = "", short: bool = False
    ) -> tuple[StoredFile, int]:
        """Fill `target` from `start`; the file, and how many bytes there were.

        `etag`: raise StoreChanged unless the file still has it. `short`: the file may end before.
        More bytes than were asked for are an error, whatever the server says.
        """
        options: dict[str, object] = {"range": (start, start + len(target))}
        if etag:
            options["if_match"] = etag

        def read() -> tuple[StoredFile, int]:
            result = self._obstore.get(self.store, path, options=options)
            filled = 0
            if result.range[0] == start:
                for part in result.stream(min_chunk_size=_CHUNK_BYTES):
                    if filled + len(part) > len(target):
                        raise DeviceError(f"device {self.url}: more bytes than were asked for")
                    target[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
                    filled += len(part)
            return _facts(result.meta), filled

        found, filled = self.call("read", read)
        if filled < len(target) and not short:
            raise DeviceError(
                f"device {self.url}: {filled} of {len(target)} bytes at {start}", device=self.url
            )
        return found, filled

    def put(self, path: str, data: Bytes | bytes, *, only: str | None = None) -> str:
        """Store a file whole, in one step for readers; its etag.

        `only`: where the file has this etag, "" for where there is none; else StoreChanged. Larger
        ones go in parts, each with its checksum, and are given up as a whole when a part fails.
        """
        mode: object = "overwrite" if only is None else "create" if only == "" else {"e_tag": only}
        parts = len(data) > WHOLE_PUT_BYTES

        def put() -> str:
            result = self._obstore.put(
                self.store,
                path,
                data,
                mode=mode,
                use_multipart=parts,
                chunk_size=part_bytes(len(data)),
                max_concurrency=_PARTS_AT_ONCE,
            )
            return result["e_tag"] or ""

        return self.call("PUT", put)

    def delete(self, path: str) -> None:
        """Remove a file. Absent is fine."""
        with suppress(FileNotFoundError):
            self.call("delete", lambda: self._obstore.delete(self.store, path))

    def copy(self, source: str, target: str) -> None:
        """Copy a file within the store. Raises FileNotFoundError."""
        self.call("copy", lambda: self._obstore.copy(self.store, source, target))

    def entries(self, path: str) -> list[DirectoryEntry]:
        """Names below a path. All must have come by the deadline: a server may make up any."""
        found = self.call("list", lambda: self._listed(path))
        above = f"{path}/" if path else ""
        names = [(str(name), True) for name in found["common_prefixes"]]
        names += [(str(row["path"]), False) for row in found["objects"]]
        entries = []
        for name, is_directory in names:
            if name.rstrip("/") == path:
                continue
            last = name.removeprefix(above).rstrip("/")
            if not name.startswith(above) or not last or "/" in last or "\0" in last:
                raise DeviceError(
                    f"device {self.url} lists {name[:200]!r}, which is not in {path!r}",
                    device=self.url,
                )
            entries.append(DirectoryEntry(last, is_directory))
        return entries

    def _listed(self, path: str) -> Any:
        obstore, prefix = self._obstore, path or None
        try:
            if _in_event_loop():  # its own cannot run on this thread
                return obstore.list_with_delimiter(self.store, prefix)
            return asyncio.run(self._listed_in_time(prefix))
        except FileNotFoundError:  # a directory that is not there lists as empty: not this
            raise DeviceMissing(
                f"device {self.url} cannot be listed: its bucket does not exist", device=self.url
            ) from None

    async def _listed_in_time(self, prefix: str | None) -> Any:
        listing = self._obstore.list_with_delimiter_async(self.store, prefix)
        try:
            return await asyncio.wait_for(listing, self.deadline_seconds)
        except TimeoutError:
            raise DeviceTimeout(
                f"list on device {self.url}: names were still coming after "
                f"{self.deadline_seconds:.0f} s",
                device=self.url,
            ) from None

    def files(self, path: str) -> Iterator[tuple[str, StoredFile]]:
        """All files below a path, with their paths, 1,000 a request."""
        pages = self.call("list", lambda: iter(self._obstore.list(self.store, path or None)))
        while (page := self.call("list", lambda: next(pages, None))) is not None:
            for row in page:
                yield str(row["path"]), _facts(row)


def part_bytes(nbytes: int) -> int:
    """Size of the parts of an upload of so many bytes. Pure."""
    return max(PART_BYTES, round_up(div_ceil(nbytes, _PARTS_MOST), MIB))


def _facts(row: Any) -> StoredFile:
    return StoredFile(
        size_bytes=int(row["size"]), etag=row["e_tag"] or "", changed=row["last_modified"]
    )


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
