"""Files of settings: read within bounds, and written where they are, not over a link to them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import hpstore
from hpstore.cli.output import output_file
from hpstore.config import load_config
from hpstore.errors import ConfigError
from hpstore.pool.pool_names import add_to_table, read_table
from hpstore.runtime.text_files import MOST_BYTES, read_text_file


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    made = tmp_path / "settings/pool.toml"
    made.parent.mkdir()
    hpstore.create(
        [tmp_path / f"d{i}" for i in range(4)], scheme="2+1", config=made, allow_root_disk=True
    ).close()
    return made


def test_a_link_to_settings_stays_one(toml: Path, tmp_path: Path) -> None:
    """`add` by a link made a file of it; who opened the pool by the first name lacked a device."""
    link = tmp_path / "link.toml"
    link.symlink_to("settings/pool.toml")
    with hpstore.open(link) as pool:
        pool.add_device(str(tmp_path / "d4"))
    assert link.is_symlink()
    assert len(load_config(toml).devices) == len(load_config(link).devices) == 5


def test_relative_devices_are_those_beside_the_file_by_any_name(toml: Path, tmp_path: Path) -> None:
    toml.write_text(toml.read_text().replace(f'"{tmp_path}/', '"../'))
    link = tmp_path / "link.toml"
    link.symlink_to(toml)
    assert (
        load_config(link).devices
        == load_config(toml).devices
        == tuple(str(tmp_path / f"d{i}") for i in range(4))
    )
    assert load_config(link).name == "pool"


def test_a_link_to_the_table_of_names_stays_one(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of those who keep their dotfiles in a repository."""
    table, link = tmp_path / "settings/names", tmp_path / "names.toml"
    link.symlink_to(table)
    monkeypatch.setenv("HPSTORE_POOLS", str(link))
    add_to_table("one", toml)
    assert link.is_symlink()
    assert read_table(table) == {"one": toml}


@pytest.mark.parametrize("before", ["\ufeff", ""])
@pytest.mark.parametrize("ends", ["\r\n", "\n"])
def test_what_editors_add_is_no_fault(toml: Path, before: str, ends: str) -> None:
    """A byte order mark, and line ends of Windows."""
    known = load_config(toml)
    toml.write_bytes((before + toml.read_text().replace("\n", ends)).encode())
    assert load_config(toml) == known
    with hpstore.open(toml) as pool:
        pool.add_device(str(toml.parent.parent / "d4"))
    assert load_config(toml).devices[:4] == known.devices


@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once(toml: Path) -> None:
    """A pipe was waited for, /dev/zero was read until memory ended."""
    pipe = toml.with_name("pipe.toml")
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), toml.parent):
        with pytest.raises(ConfigError, match=r"cannot be read: .*(is not a file|directory)"):
            load_config(path)
        with pytest.raises(ConfigError):
            read_table(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    """Not even as far as it is one of settings."""
    long = tmp_path / "long.toml"
    with long.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ConfigError, match="more than 16777216 bytes"):
        load_config(long)
    long.write_text("x" * 10)
    assert len(read_text_file(long, most_bytes=10)) == 10


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_what_root_changes_stays_the_users(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo hpstore add` made a pool.toml of mode 0600 root's: its user lost the pool's key."""
    table, out = tmp_path / "names.toml", tmp_path / "out"
    table.touch()
    out.write_bytes(b"old")
    for path in (toml, table, out):
        os.chown(path, 65534, 65533)
        path.chmod(0o600)
    monkeypatch.setenv("HPSTORE_POOLS", str(table))
    add_to_table("one", toml)
    with hpstore.open(toml) as pool:
        pool.add_device(str(tmp_path / "d4"))
    with output_file(out) as file:
        file.write(b"new")
    for path in (toml, table, out):
        found = path.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65534, 65533, 0o600)
    assert out.read_bytes() == b"new"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_settings_below_a_closed_directory_name_the_right_that_is_missing(toml: Path) -> None:
    toml.parent.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"cannot be read: .*65534"):
            load_config(toml)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
@pytest.mark.parametrize("member", [True, False])
def test_who_is_not_the_owner_keeps_the_group_of_a_file_or_its_secrets(
    tmp_path: Path, member: bool
) -> None:
    """`add` by a member of the group made the pool's key readable for another group, and locked the
    owner out: the kernel refuses owner and group together where only the owner is another's."""
    path, new = tmp_path / "pool.toml", tmp_path / "new"
    path.write_text("secret")
    os.chown(path, 65532, 65531)
    path.chmod(0o660)
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from hpstore.runtime.rights import keep_rights\n"
        f"os.setgroups([{65531 if member else 65530}])\nos.setgid(65533)\n"
        "os.setuid(65534)\n"  # its folder is closed to them: the file is named by its descriptor
        "keep_rights(int(sys.argv[1]), Path(f'/proc/self/fd/{sys.argv[2]}'))\n"
    )
    with new.open("w") as file, path.open() as old:
        os.fchown(file.fileno(), 65534, 65533)
        descriptors = [file.fileno(), old.fileno()]
        command = [sys.executable, "-c", code, *map(str, descriptors)]
        subprocess.run(command, check=True, pass_fds=descriptors)
    found = new.stat()
    assert (found.st_uid, found.st_gid) == (65534, 65531 if member else 65533)
    assert stat.S_IMODE(found.st_mode) == (0o660 if member else 0o600)
