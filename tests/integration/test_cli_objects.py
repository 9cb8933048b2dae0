"""put, get, ls and add when things are not as they were a moment ago, or not as they should be."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

import hpstore
from hpstore.objects.read.object_reader import Changed, ObjectReader
from tests.integration.cli_cases import Cli

COMMANDS = importlib.import_module("hpstore.cli.object_commands")
OLD, NEW = b"o" * 300_000, b"n" * 300_000


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    made = Cli(tmp_path, capsys)
    made.create(data=2, parity=1, devices=4)
    with hpstore.open(made.pool) as pool:
        pool.put("k", OLD)
    return made


def replace_in_mid_read(cli: Cli, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """In so many attempts, the second read finds the object replaced and its files gone."""
    monkeypatch.setattr(COMMANDS, "_GET_BYTES", 100_000)
    visits, plain = [0], ObjectReader.read_into

    def read_into(reader: ObjectReader, start: int, out: memoryview) -> None:
        visits[0] += start == 100_000
        if start == 100_000 and visits[0] % 2 and visits[0] < 2 * times:
            with hpstore.open(cli.pool) as pool:
                pool.put("k", NEW)
            raise Changed("the files are gone")
        plain(reader, start, out)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectReader, "read_into", read_into)


def test_get_writes_one_version_when_the_object_is_replaced_meanwhile(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is begun anew; one that is replaced again and again is an error, and no file."""
    replace_in_mid_read(cli, monkeypatch, 1)
    assert cli.json("get", cli.pool, "k", "out")["size"] == len(NEW)
    assert (tmp_path / "out").read_bytes() == NEW
    replace_in_mid_read(cli, monkeypatch, 100)
    assert "was replaced while it was read" in cli("get", cli.pool, "k", "out2", code=5)
    assert not (tmp_path / "out2").exists()
    assert (tmp_path / "out").read_bytes() == NEW


def test_get_into_a_pipe_fails_rather_than_mix_two_versions(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written cannot be taken back."""
    replace_in_mid_read(cli, monkeypatch, 1)
    got: list[bytes] = []

    class Pipe:
        def write(self, data: bytes) -> None:
            got.append(bytes(data))

    def output(_: Path) -> object:
        return _Opened(Pipe())

    monkeypatch.setattr(COMMANDS, "output_file", output)
    said = cli("get", cli.pool, "k", "-", code=5)
    assert "the 100000 bytes that were written are of the version before" in said
    assert b"".join(got) == OLD[:100_000]


def test_get_writes_into_a_pipe_by_its_name(cli: Cli) -> None:
    """/dev/stdout is a link whose target cannot be opened by its path."""
    with cli.start("get", cli.pool, "k", "/dev/stdout", stdout=subprocess.PIPE) as run:
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, OLD.decode()), err


class _Opened:
    def __init__(self, pipe: object) -> None:
        self.pipe = pipe

    def __enter__(self) -> BinaryIO:
        return self.pipe  # type: ignore[return-value]  # as far as get asks

    def __exit__(self, *_: object) -> None:
        pass


def test_ls_long_shows_all_that_can_be_read_and_says_what_cannot(cli: Cli, tmp_path: Path) -> None:
    """One object beyond repair does not hide the others."""
    with hpstore.open(cli.pool) as pool:
        pool.put("whole", np.random.default_rng(0).bytes(300_000))
    columns = sorted(tmp_path.glob("disk*/objects/**/k/@*"))
    for path in columns[:2]:
        path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    assert "1 of 2 objects cannot be read" in cli("ls", cli.pool, "--long", code=50)
    found = {row["key"]: row for row in _json_of(cli, "ls", cli.pool, "--long")}
    assert found["whole"]["size"] == 300_000
    assert "2 damaged" in str(found["k"]["error"])


def _json_of(cli: Cli, *words: object) -> list[dict[str, object]]:
    """What is on standard output of a call that fails."""
    with cli.start(*words, "--json", stdout=-1) as run:
        out, _ = run.communicate(timeout=60)
    assert run.returncode == 50
    return list(json.loads(out))


def test_put_from_a_closed_standard_input_says_so(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hpstore put pool.toml k - <&-`: Python has no stream there at all."""
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in cli("put", cli.pool, "k", "-", code=2)


def test_a_second_name_of_a_member_is_not_added(cli: Cli, tmp_path: Path) -> None:
    """Its place would be in the settings twice: a copied disk, for all who open the pool."""
    os.symlink(tmp_path / "disk0", tmp_path / "alias")
    before = (tmp_path / "pool.toml").read_bytes()
    said = cli("add", cli.pool, tmp_path / "alias", code=33)
    assert f"is a member already: {tmp_path / 'disk0'}" in said
    assert (tmp_path / "pool.toml").read_bytes() == before


def test_versions_are_listed_and_got_by_name(cli: Cli, tmp_path: Path) -> None:
    (version,) = cli.json("versions", cli.pool, "k")
    assert (version["standing"], version["current"], version["needed"]) == ("readable", True, 2)
    assert version["version"] in cli("versions", cli.pool, "k")
    token = version["version"]
    assert cli.json("get", cli.pool, "k", "out", "--version", token, "--yes")["size"] == len(OLD)
    assert (tmp_path / "out").read_bytes() == OLD
    assert cli.json("stat", cli.pool, "k", "--version", token)["version"] == token
    other = token[:-1] + ("0" if token[-1] != "0" else "1")
    assert "hpstore versions" in cli("get", cli.pool, "k", "new", "--version", other, code=4)
    assert "is not a version" in cli("get", cli.pool, "k", "new", "--version", "1", code=2)
    assert cli("versions", cli.pool, "none") == "no version of none\n"
