"""Uploads in parts that a killed writer has left in a bucket: invisible, and paid for.

obstore cannot list them, so these two requests are made here: signed (AWS Signature 4), bounded,
and with keys that hpstore has found itself. Where the machine's role signs, a rule of the bucket
(AbortIncompleteMultipartUpload) is the way.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import http.client
import logging
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import quote, urlsplit

from hpstore.devices.store_client import StoreClient
from hpstore.devices.store_credentials import StoreCredentials, find_credentials
from hpstore.errors import ConfigError
from hpstore.runtime.http_deadlines import end_by

_log = logging.getLogger(__name__)
ABANDONED_SECONDS = 6 * 3600.0  # no upload of one column takes so long
_ANSWER_BYTES_MOST = 4 << 20
_SWEPT_MOST = 1000  # in one sweep
_UPLOAD = re.compile(r"<Upload>.{1,20000}?</Upload>", re.DOTALL)
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUpload:
    """An upload that was begun. `age_seconds` by the server's clock."""

    key: str
    upload_id: str
    age_seconds: float


def sweep_uploads(client: StoreClient, prefix: str) -> int:
    """Give up uploads below a prefix that are older than ABANDONED_SECONDS; how many.

    Best effort: what is not possible is logged, and the next sweep tries again.
    """
    bucket = getattr(client.store, "config", {}).get("bucket", "")
    if not client.settings.endpoint or not bucket:
        return 0
    found: StoreCredentials | None = None
    try:
        found = find_credentials(client.settings.credentials, where=client.url)
        if found is None:
            return 0
        requests = _Requests(client, found, bucket)
        old = [
            upload
            for upload in requests.uploads(prefix)
            if upload.age_seconds > ABANDONED_SECONDS and upload.key.startswith(prefix)
        ]
        return sum(map(requests.abort, old[:_SWEPT_MOST]))
    except (OSError, http.client.HTTPException, ConfigError, ValueError) as error:
        _log.warning(
            "uploads that were left on %s were not swept: %s",
            client.url,
            found.hidden_in(str(error)) if found is not None else error,
        )
        return 0


class _Requests:
    """Signed requests about one bucket."""

    def __init__(self, client: StoreClient, keys: StoreCredentials, bucket: str) -> None:
        self._keys, self._region = keys, client.store.config.get("region") or "us-east-1"
        self._url = urlsplit(client.settings.endpoint)
        self._path = f"/{bucket}" if client.settings.path_style else ""
        self._host = (
            self._url.netloc if client.settings.path_style else f"{bucket}.{self._url.netloc}"
        )
        self._ca_file, self._seconds = client.settings.ca_file, client.deadline_seconds

    def uploads(self, prefix: str) -> Iterator[StoredUpload]:
        status, body, now = self._send("GET", "/", {"prefix": prefix, "uploads": ""})
        if status != 200:
            raise ValueError(f"HTTP {status}")
        for found in _UPLOAD.finditer(body):
            begun = datetime.fromisoformat(_field(found[0], "Initiated"))
            begun = begun if begun.tzinfo else begun.replace(tzinfo=UTC)
            yield StoredUpload(
                key=_field(found[0], "Key"),
                upload_id=_field(found[0], "UploadId"),
                age_seconds=(now - begun).total_seconds(),
            )

    def abort(self, upload: StoredUpload) -> bool:
        status, _, _ = self._send("DELETE", f"/{upload.key}", {"uploadId": upload.upload_id})
        return status in (200, 204)

    def _send(self, method: str, path: str, query: dict[str, str]) -> tuple[int, str, datetime]:
        place = quote(self._path + path, safe="/-_.~") or "/"
        asked = "&".join(
            f"{quote(k, safe='-_.~')}={quote(query[k], safe='-_.~')}" for k in sorted(query)
        )
        secure = self._url.scheme == "https"
        host = self._host.rsplit("@", 1)[-1]
        connection = (
            http.client.HTTPSConnection(
                host,
                timeout=self._seconds,
                context=ssl.create_default_context(cafile=self._ca_file or None),
            )
            if secure
            else http.client.HTTPConnection(host, timeout=self._seconds)
        )
        with closing(connection):
            headers = self._signed(method, host, place, asked)
            connection.request(method, f"{place}?{asked}", headers=headers)
            end_by(connection, time.monotonic() + self._seconds)
            answer = connection.getresponse()
            body = answer.read(_ANSWER_BYTES_MOST).decode(errors="replace")
            date = answer.getheader("Date")
            now = parsedate_to_datetime(date) if date else datetime.now(UTC)
            return answer.status, body, now

    def _signed(self, method: str, host: str, path: str, query: str) -> dict[str, str]:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
        if self._keys.token:
            headers["x-amz-security-token"] = self._keys.token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        asked = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY}"
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        digest = hashlib.sha256(asked.encode()).hexdigest()
        key = f"AWS4{self._keys.secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._keys.key_id}/{scope}, SignedHeaders={names}, "
            f"Signature={signature}"
        )
        return headers


def _field(text: str, name: str) -> str:
    found = re.search(rf"<{name}>([^<]{{1,4096}})</{name}>", text)
    if found is None:
        raise ValueError(f"an upload has no {name}")
    return html.unescape(found[1])
