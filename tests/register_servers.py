"""Servers of registers that tests start; a skip with a reason where they are not there."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hpstore.testing.etcd_cluster import EtcdCluster

_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


def etcd_or_skip(
    directory: Path, members: int = 3, certificates: Path | None = None
) -> EtcdCluster:
    """A cluster of etcd in a directory."""
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd (Debian: apt-get install etcd-server)")
    return EtcdCluster(directory, members, certificates)


def certificates_or_skip(directory: Path) -> Path:
    """A directory with the certificates that EtcdCluster takes, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    (directory / "san").write_text("subjectAltName=IP:127.0.0.1\n", encoding="utf-8")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        "req", "-x509", *key, "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt"
    )
    for name in ("server", "client"):
        openssl(
            "req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"
        )
        openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            "san",
            "-out",
            f"{name}.crt",
        )
    return directory


@contextmanager
def s3_or_skip(*, enforces: bool = True) -> Iterator[str]:
    """The URL of a bucket of a real server of S3 in this process (moto).

    One request at a time: moto looks at a condition and writes in two steps, which threads would
    come between. `enforces`: conditional writes; without, their conditions do not reach the server,
    as with stores that ignore them.
    """
    server = pytest.importorskip("moto.server", reason="needs moto[server]")
    serving = pytest.importorskip("werkzeug.serving", reason="needs moto[server]")
    pytest.importorskip("obstore", reason="needs obstore (the extra `s3`)")
    plain = server.DomainDispatcherApplication(server.create_backend_app)

    def ignoring(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        for name in _CONDITIONS:
            environ.pop(name, None)
        return plain(environ, start)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    made = serving.make_server("127.0.0.1", 0, plain if enforces else ignoring, threaded=False)
    thread = threading.Thread(target=made.serve_forever, name="moto", daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{made.server_port}"
    try:
        with mock.patch.dict(os.environ, _KEYS):
            bucket = f"bucket-{made.server_port}"
            request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
            urllib.request.urlopen(request).close()
            yield f"s3://{bucket}/registers?endpoint={endpoint}&region=us-east-1"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
