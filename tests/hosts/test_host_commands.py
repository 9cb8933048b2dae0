"""`hpstore host init` and `hpstore host serve`, and a pool made with nothing but commands."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")
pytest.importorskip("cryptography", reason="needs the extra hosts")

from hpstore.errors import ConfigError
from hpstore.runtime.mutual_tls import TlsFiles
from tests.integration.cli_cases import Cli


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys)


def test_init_makes_an_authority_once_and_what_is_named(cli: Cli, tmp_path: Path) -> None:
    """Each folder is what is copied to one place; a later call has the same authority."""
    said = cli("host", "init", "tls", "--host", "b=10.0.0.2,b.lan", "--caller", "x:writer")
    assert "tls/hosts/b: copy its files to host b" in said
    before = (tmp_path / "tls/authority/ca.pem").read_bytes()
    TlsFiles(tmp_path / "tls/hosts/b", server=True)
    TlsFiles(tmp_path / "tls/callers/x", server=False)
    assert cli.json("host", "init", "tls", "--caller", "y:reader")["made"] == ["tls/callers/y"]
    assert (tmp_path / "tls/callers/y/ca.pem").read_bytes() == before
    code = ConfigError.exit_code
    assert "NAME:reader" in cli("host", "init", "tls", "--caller", "x:root", code=code)
    assert "names no host" in cli("host", "init", "tls", "--host", "../x", code=code)
    assert "name what needs" in cli("host", "init", "tls", code=code)


def test_serve_says_where_its_disks_are_and_ends_with_sigterm(cli: Cli, tmp_path: Path) -> None:
    """A pool over three disks of a host, by commands: create, put, get, status."""
    cli("host", "init", "tls", "--host", "b=127.0.0.1", "--caller", "x:keeper")
    (tmp_path / ".config/hpstore").mkdir(parents=True)
    (tmp_path / "tls/callers/x").rename(tmp_path / ".config/hpstore/tls")
    words = ("host", "serve", "--listen", "127.0.0.1:0", "--certificates", "tls/hosts/b")
    with cli.start(*words, "d0", "d1", "d2", stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        lines = [service.stdout.readline() for _ in range(3)]
        urls = [line.split()[0] for line in lines]
        assert [url.rsplit("/", 1)[1] for url in urls] == ["0", "1", "2"]
        assert lines[1].endswith("is d1\n")
        (tmp_path / "in").write_bytes(b"x" * 100_000)
        cli("create", "pool.toml", "--data", 2, "--parity", 1, *urls)
        cli("put", "pool.toml", "a", "in")
        cli("get", "pool.toml", "a", "out")
        assert (tmp_path / "out").read_bytes() == b"x" * 100_000
        assert urls[2] in cli("status", "pool.toml")
        with socket.create_connection(("127.0.0.1", urlsplit(urls[0]).port or 0)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while stranger.recv(100):
                pass
        service.send_signal(signal.SIGTERM)
        _, errors = service.communicate(timeout=30)
    assert service.returncode == 0, errors
    refused = [line for line in errors.splitlines() if "was refused" in line]
    assert refused  # an operator sees who was sent away,
    assert all(re.match(r"\d{4}-\d\d-\d\d .* INFO ", line) for line in refused)  # and when


def test_wrong_arguments_of_serve_name_what_is_wrong(cli: Cli) -> None:
    code = ConfigError.exit_code
    assert "hpstore host init" in cli("host", "serve", "--listen", "127.0.0.1:0", "d0", code=code)
    plain = ("host", "serve", "--tls", "plain")
    assert "no address" in cli(*plain, "--listen", "7200", "d0", code=code)
    assert "mutual" in cli("host", "serve", "--tls", "none", "--listen", "a:1", "d0", code=code)
    assert "cannot listen" in cli(*plain, "--listen", "192.0.2.1:7200", "d0", code=code)
    assert "no directory of this host" in cli(
        *plain, "--listen", "127.0.0.1:0", "memory://x", code=code
    )


def test_without_the_extra_the_command_says_what_to_install() -> None:
    """In a process that has no httptools."""
    script = (
        "import sys; sys.modules['httptools'] = None; sys.argv[1:] = sys.argv[1:]\n"
        "from hpstore.cli import main; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "host", "serve", "--listen", "127.0.0.1:0", "d0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == ConfigError.exit_code
    assert "install hpstore[hosts]" in run.stderr
