"""The kernel's tables are bytes: names of mounts and of processes may hold anything."""

from __future__ import annotations

import os
from pathlib import Path

from hpstore.devices.disk_location import locate
from hpstore.devices.mount_table import parse_mounts, read_mounts, unescape
from hpstore.loaders.gpu.direct.machine_facts import mount_facts
from hpstore.runtime.process_identity import may_live, this_process

TABLE = """\
28-22 28 0:20 / /proc rw,nosuid shared:5 - proc proc rw
29-28 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
30-90 28 259:5 / /mnt/a\\040b rw,noatime shared:44 master:3 - xfs /dev/nvme1n1 rw,attr2
31-95 28 259:5 /sub /mnt/c\\134d rw,noatime - xfs /dev/nvme1n1 rw,inode64
32-"""


def test_optional_fields_differ_in_number_and_half_a_line_is_none() -> None:
    """proc_pid_mountinfo(5)."""
    found = parse_mounts(TABLE)
    assert [mount.number for mount in found] == ["0:20", "259:2", "259:5", "259:5"]
    assert [mount.place for mount in found] == ["/proc", "/", "/mnt/a b", "/mnt/c\\d"]
    assert found[-1].source == "/dev/nvme1n1"
    assert found[-1].options == "rw,inode64"


def test_octal_escapes_are_read_once() -> None:
    """An escaped backslash stands for itself: the digits after it are not an escape."""
    assert unescape("a\\040b\\011c\\134040") == "a b\tc\\040"


def test_a_name_that_is_not_utf8_or_holds_a_line_separator_is_a_name(tmp_path: Path) -> None:
    """Only a newline ends a line of the kernel."""
    table, place = tmp_path / "proc/self/mountinfo", os.fsdecode(b"/mnt/\xe9\x85\x0c")
    table.parent.mkdir(parents=True)
    table.write_bytes(b"9 1 8:1 / %s rw - ext4 /dev/sdb rw\n" % os.fsencode(place))
    (found,) = read_mounts(str(table))
    assert found.place == place
    assert locate(f"{place}/pool", root=f"{tmp_path}/").disk == "/dev/sdb"


def test_the_facts_of_a_mount_are_those_of_its_last_line(tmp_path: Path) -> None:
    """The directory of this test lies on some mount."""
    number = os.stat(tmp_path).st_dev
    lines = [m for m in read_mounts() if m.number == f"{os.major(number)}:{os.minor(number)}"]
    facts = mount_facts(str(tmp_path))
    assert facts.filesystem == (lines[-1].filesystem if lines else "unknown")


def test_a_process_may_have_any_name() -> None:
    """proc(5), stat: the name is not text."""
    comm = Path("/proc/self/comm")
    before, name = comm.read_bytes(), this_process()
    try:
        comm.write_bytes(b"\xff) 1 \xe9")
        assert this_process() == name
        assert may_live(name)
    finally:
        comm.write_bytes(before.strip())
