"""A pool of several users: its group uses what any of it made; others are told about rights."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hpstore
import hpstore.agent  # before a fork: another user may not read it
import hpstore.cli
from hpstore.config import load_config
from hpstore.errors import DeviceDenied

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be several users"),
]
GROUP, FIRST, SECOND, STRANGER = 54321, 20001, 20002, 65534
USE = """
import sys, hpstore
me, other = sys.argv[1:]
with hpstore.open("pool.toml") as pool:
    for key in (f"a/{me}/small", f"both", f"gone/{me}"):
        pool.put(key, me.encode())
    pool.put(f"a/{me}/large", bytes(3_000_000))
    if not pool.exists("once"):
        pool.put("once", me.encode(), if_absent=True)
    pool.put("once", me.encode(), if_version=pool.stat("once").version)
    if other in {key.split("/")[1] for key in pool.list("a/")}:
        assert pool.get(f"a/{other}/small") == other.encode()
        pool.put(f"a/{other}/small", other.encode())
        pool.delete(f"gone/{other}")
        pool.delete(f"a/{other}/large")
        pool.put(f"a/{other}/large", bytes(2_000_000))
    report = pool.scrub()
    assert not report.failed and not report.damaged_columns, report
    pool.rebuild()
    assert not pool.status().degraded
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter."""
    made = Path(tempfile.mkdtemp(prefix="hpstore-users-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def as_user(
    place: Path,
    user: int,
    groups: Sequence[int],
    code: str | Sequence[str],
    *arguments: str,
    umask: int = 0o077,
) -> Done:
    """Run code, or an hpstore command, as a forked process of that user, with a temporary directory
    of its own. Forked: the interpreter's files may be readable for this user alone."""
    own, said = place / f"own-{user}", [place / "stdout", place / "stderr"]
    own.mkdir(exist_ok=True)
    os.chown(own, user, user)
    pid = os.fork()
    if not pid:
        ended = 1
        try:
            for fd, path in enumerate(said, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(place)
            os.setgroups(groups)
            os.setgid(user)
            os.setuid(user)
            os.umask(umask)
            os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = str(own)
            sys.argv[1:] = arguments if isinstance(code, str) else code
            if isinstance(code, str):
                exec(compile(code, "<user>", "exec"), {})
            else:
                hpstore.cli.main()
            ended = 0
        except SystemExit as error:
            ended = int(str(error.code or 0))
        except BaseException:  # noqa: BLE001 (shown; the exit code says the rest)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Done(ended, *(path.read_text() for path in said))


def created(place: Path, *options: str) -> None:
    """A pool of 2+1 on four directories, made by root with a umask that closes all."""
    devices = [str(place / f"d{i}") for i in range(4)]
    command = ["create", str(place / "pool.toml"), "--data", "2", "--parity", "1"]
    before = os.umask(0o077)
    try:
        done = CliRunner().invoke(hpstore.cli.app, [*command, *options, *devices])
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output


def test_members_of_the_group_use_what_any_of_them_made(place: Path) -> None:
    """Two users and root, with umasks that would close what they make to the others."""
    created(place, "--group", str(GROUP), "--mode", "0770")
    written = (place / "pool.toml").read_text()
    assert "file_mode = 0o660" in written
    assert load_config(place / "pool.toml").settings.directory_mode == 0o770
    for me, other, umask in (
        (FIRST, SECOND, 0o077),
        (SECOND, FIRST, 0o022),
        (FIRST, SECOND, 0o077),
    ):
        done = as_user(place, me, [GROUP], USE, str(me), str(other), umask=umask)
        assert done.returncode == 0, done.stderr
        assert "keeps no room" not in done.stderr
    with hpstore.open(place / "pool.toml") as pool:  # root
        assert pool.get(f"a/{FIRST}/small") == str(FIRST).encode()
        assert not pool.status().degraded
    for path in (p for d in place.glob("d*") for p in (d, *d.rglob("*"))):
        found = path.lstat()
        assert found.st_gid == GROUP, path
        wanted = 0o2770 if path.is_dir() else 0o660
        assert stat.S_IMODE(found.st_mode) & wanted == wanted, (path, oct(found.st_mode))
        assert not found.st_mode & 0o007, path


def test_settings_of_ones_own_do_not_close_a_shared_pool(place: Path) -> None:
    """A member of the group has a pool.toml without modes: the devices have them."""
    created(place, "--group", str(GROUP))
    devices = ", ".join(f'"{place}/d{i}"' for i in range(4))
    key = load_config(place / "pool.toml").key
    assert key is not None
    (place / "pool.toml").write_text(f'key = "{key.text}"\ndevices = [{devices}]\n')
    (place / "pool.toml").chmod(0o644)
    for me, other in ((FIRST, SECOND), (SECOND, FIRST)):
        done = as_user(place, me, [GROUP], USE, str(me), str(other))
        assert done.returncode == 0, done.stderr


def test_a_user_without_rights_is_told_about_rights_and_takes_no_device_for_lost(
    place: Path,
) -> None:
    """Before: "not mounted, wiped", "gone for good". Nor is anything changed by the attempt."""
    created(place, "--group", str(GROUP))
    (place / "pool.toml").chmod(0o644)
    before = {path: path.read_bytes() for path in place.glob("d*/pool.json")}
    for command in ("status", "ls", "scrub", "rebuild"):
        told = as_user(place, STRANGER, [], [command, "pool.toml"])
        assert told.returncode == DeviceDenied.exit_code, told.stderr
        for words in (
            f"{place}/d",
            "user nobody (65534)",
            f"group {GROUP} ",
            "mode 2770",
            "add this user to that group",
        ):
            assert words in told.stderr, (words, told.stderr)
        for wrong in ("gone for good", "not mounted", "wiped"):
            assert wrong not in told.stderr.split("It showed as")[0]
    assert {path: path.read_bytes() for path in place.glob("d*/pool.json")} == before


def test_a_pool_file_without_rights_names_the_rights(place: Path) -> None:
    created(place, "--group", str(GROUP))
    told = as_user(place, STRANGER, [], "import hpstore; hpstore.open('pool.toml')")
    assert f"no rights on {place}/pool.toml" in told.stderr
    assert "mode 0660" in told.stderr


def test_a_group_of_others_is_refused_by_name_and_nothing_is_made(place: Path) -> None:
    """For devices by create, and for the file of settings; one of the user's own is taken."""
    own = place / f"own-{FIRST}"
    devices = [str(own / f"d{i}") for i in range(3)]
    command = ["create", str(own / "pool.toml"), "--scheme", "2+1", "--group"]
    told = as_user(place, FIRST, [SECOND], [*command, str(GROUP), *devices])
    assert told.returncode == 2, told.stderr
    assert f"d0 cannot be given to group {GROUP}: user {FIRST} is not in it" in told.stderr
    assert list(own.iterdir()) == []
    save = f"""
import hpstore.config as c
settings = c.parse_settings({{"group": "{GROUP}"}}, where="x")
c.save_config(c.PoolConfig(path=c.Path("{own}/x.toml"), name="x", devices=(), settings=settings))
"""
    told = as_user(place, FIRST, [SECOND], save)
    assert f"x.toml cannot be given to group {GROUP}: user {FIRST}" in told.stderr
    told = as_user(place, FIRST, [SECOND], [*command, str(SECOND), *devices])
    assert told.returncode == 0, told.stderr
    assert os.stat(devices[0]).st_gid == SECOND


ONE_DENIED = """
import hpstore
from hpstore.agent import Agent, agent_config
from hpstore.errors import DeviceDenied
with hpstore.open("pool.toml") as pool:
    assert len(pool.admin.denied) == 1, pool.admin.denied
    row, = [d for d in pool.status().devices if d.url in pool.admin.denied]
    assert "no rights" in row.problem, row
    pool.put("k", b"2")
    pool.rebuild()
    assert len(pool.admin.record.members) == 4 and not pool.admin.record.evicted
    try:
        Agent(pool, agent_config(pool.config))
    except DeviceDenied as error:
        print(error)
"""


def test_one_device_without_rights_is_not_evicted_and_no_agent_begins(place: Path) -> None:
    """An agent of that user would count the device as lost, and heal it away after its grace."""
    created(place, "--group", str(GROUP))
    os.chown(place / "d1", 0, 0)
    done = as_user(place, FIRST, [GROUP], ONE_DENIED)
    assert done.returncode == 0, done.stderr
    assert f"{place}/d1" in done.stdout


READ = """
import hpstore
from hpstore.errors import HpstoreError
with hpstore.open("pool.toml") as pool:
    assert pool.get("k") == b"1"
    assert {d.state for d in pool.status().devices} == {"read-only"}
    for act in (lambda: pool.put("k", b"2"), lambda: pool.delete("k")):
        try:
            act()
        except HpstoreError as error:
            print(error)
"""


def test_a_group_that_may_only_read_reads_and_hears_why_it_cannot_write(place: Path) -> None:
    created(place, "--group", str(GROUP), "--mode", "0750")
    with hpstore.open(place / "pool.toml") as pool:
        pool.put("k", b"1")
    done = as_user(place, FIRST, [GROUP], READ)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all(f"user {FIRST}" in text and "mode 2750" in text for text in said), said
