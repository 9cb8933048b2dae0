"""Which device is meant, a new disk in the place of an old one, and when one can be taken out."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hpstore
from hpstore.agreement.registers import AGENT
from hpstore.cli import app
from hpstore.devices.disk_location import locate, openers
from hpstore.errors import LockTimeout, MembershipError
from hpstore.format.records import IDENTITY_FILE
from hpstore.maintenance.survey_condition import Condition, survey_condition
from hpstore.pool import pool_devices
from hpstore.pool.replace_device import replace_device


def swap(pool: hpstore.Pool, tmp_path: Path) -> tuple[str, str]:
    """The disk at d0 dies, and a new one is mounted and added there; the ids of both."""
    place = tmp_path / "d0"
    (old,) = (d for d, url in pool.admin.devices.places.items() if url == str(place))
    place.rename(tmp_path / "dead")
    place.mkdir()
    pool.admin.refresh()
    return old, pool.add_device(str(place))


def test_a_place_that_two_devices_share_is_asked_about_not_guessed(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """`evict PATH` took the healthy disk, the new one, and `readmit` called that one online."""
    pool.put("k", bytes(100_000))
    old, new = swap(pool, tmp_path)
    place = str(tmp_path / "d0")
    with pytest.raises(MembershipError, match=rf"(?s)any of 2.*{old[:8]}.*{new[:8]}.*its id"):
        pool.evict(place)
    with pytest.raises(MembershipError, match="any of 2"):
        pool.sit_out(place)
    assert pool.admin.record.member(old) is not None
    pool.evict(old[:8])
    assert pool.admin.record.member(old) is None
    assert pool.admin.record.member(new) is not None
    with pytest.raises(MembershipError, match="another device now"):
        pool.readmit(place)  # the one that has left, not the one that is there
    pool.evict(place)  # one member is left at this place
    assert pool.admin.record.member(new) is None
    with pytest.raises(MembershipError, match="any of 2"):
        pool.readmit(place)


def test_a_living_disk_is_replaced_by_moving_it_off(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Its domain is kept; a second run after all is done says that it has left."""
    bodies = {f"k{i}": os.urandom(200_000) for i in range(4)}
    for key, body in bodies.items():
        pool.put(key, body)
    old, new = str(tmp_path / "d1"), str(tmp_path / "n1")
    (member,) = (m for m in pool.admin.record.members if m.url == old)
    done = replace_device(pool, old, new)
    assert done.report is None
    assert done.moved == 4
    found = pool.admin.record.member(done.new)
    assert found is not None
    assert (found.url, found.domain) == (new, member.domain)
    assert pool.admin.record.member(member.device_id) is None
    assert {key: pool.get(key) for key in bodies} == bodies
    assert pool.status().losses_tolerated == 2
    with pytest.raises(MembershipError, match="has left the pool already"):
        replace_device(pool, old, new)


@pytest.mark.parametrize("same_place", [False, True])
def test_a_dead_disk_is_replaced_and_made_up_for(
    pool: hpstore.Pool, tmp_path: Path, same_place: bool
) -> None:
    """Also by a disk that is mounted where it was; killed after the new one was added, the next run
    goes on."""
    pool.put("k", bytes(200_000))
    place = tmp_path / "d2"
    (old,) = (d for d, url in pool.admin.devices.places.items() if url == str(place))
    place.rename(tmp_path / "dead")
    new = place if same_place else tmp_path / "n2"
    pool.admin.refresh()
    if same_place:
        new.mkdir()
    added = pool.add_device(str(new))  # as far as the run that was killed came
    done = replace_device(pool, old[:8], str(new))
    assert done.new == added
    assert done.report is not None
    assert done.report.whole
    assert pool.status().losses_tolerated == 2


def test_a_rebuild_that_fails_after_the_old_disk_has_left_is_gone_on_with(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what stands: the old one is out. Run again, what it held is made again."""
    pool.put("k", bytes(200_000))
    place, new = tmp_path / "d2", str(tmp_path / "n2")
    (old,) = (d for d, url in pool.admin.devices.places.items() if url == str(place))
    place.rename(tmp_path / "dead")
    pool.admin.refresh()

    def busy(*_: object, **__: object) -> object:
        raise LockTimeout("rebuild: another process is at work. Nothing was changed. Try again.")

    monkeypatch.setattr(hpstore.Pool, "rebuild", busy)
    with pytest.raises(LockTimeout, match=r"is a member now and stays one, .* has left") as said:
        replace_device(pool, old, new)
    assert "Nothing was changed" not in str(said.value)
    assert "not out yet" not in str(said.value)
    monkeypatch.undo()
    done = replace_device(pool, old, new)
    assert done.report is not None
    assert done.report.whole
    assert pool.status().losses_tolerated == 2


def test_a_disk_that_still_answers_is_not_replaced_at_its_own_place(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Nothing was changed: generation and members are as before."""
    before = pool.admin.record
    with pytest.raises(MembershipError, match="a place of its own"):
        replace_device(pool, str(tmp_path / "d0"), str(tmp_path / "d0"))
    assert pool.admin.record == before


def test_release_says_who_has_a_disk_open_and_when_it_is_free(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """`umount` was busy after evict, and nothing said why."""
    run, toml, place = CliRunner(), str(tmp_path / "pool.toml"), str(tmp_path / "d3")
    pool.put("k", bytes(200_000))
    refused = run.invoke(app, ["release", toml, place])
    assert isinstance(refused.exception, MembershipError)
    pool.evict(place)
    with (tmp_path / "d3" / IDENTITY_FILE).open("rb"):
        busy = run.invoke(app, ["release", toml, place, "--wait", "0"])
    assert busy.exit_code == 50
    assert f"process {os.getpid()}" in busy.output
    free = run.invoke(app, ["release", toml, place, "--wait", "0"])
    assert free.exit_code == 0, free.output
    assert "unmount it" in free.output


def test_an_idle_process_lets_a_disk_go_that_another_one_evicts(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """It kept the directory open for good, and the disk could not be unmounted."""
    place = tmp_path / "d4"
    pool.put("k", bytes(1000))
    with hpstore.open(tmp_path / "pool.toml") as other:
        other.evict(str(place))
    assert [o.pid for o in openers(str(place))] == [os.getpid()]
    pool.admin.health.pause()
    pool._session._follower._asked_seconds = -1e9  # it is time
    until = time.monotonic() + 20
    while openers(str(place)) and time.monotonic() < until:
        pool.admin.health.tick_now()
    assert openers(str(place)) == []
    assert len(pool.admin.record.members) == 4
    pool._session._follower.close()


def test_a_disk_is_located_without_being_touched(tmp_path: Path) -> None:
    """By the table of mounts: the partition, names that do not change, what is printed on it."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:17 / /mnt/b\\040c rw - ext4 /dev/sdb1 rw\n"
    )
    disk = tmp_path / "sys/devices/sdb"
    (disk / "sdb1").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "device").mkdir()
    (disk / "device/serial").write_text("S123\n")
    (tmp_path / "sys/class/block").mkdir(parents=True)
    (tmp_path / "sys/class/block/sdb1").symlink_to(disk / "sdb1")
    by_id = tmp_path / "dev/disk/by-id"
    by_id.mkdir(parents=True)
    (tmp_path / "dev/sdb1").touch()
    (by_id / "ata-X_S123-part1").symlink_to("../../sdb1")
    (by_id / "ata-Y-part1").symlink_to("../../sda1")
    found = locate("/mnt/b c/pool", root=f"{tmp_path}/")
    assert (found.disk, found.serial) == ("/dev/sdb1", "S123")
    assert found.by_id == ("/dev/disk/by-id/ata-X_S123-part1",)
    assert locate("s3://bucket/x").disk == ""
    shutil.rmtree(tmp_path / "proc")
    assert locate("/mnt/b", root=f"{tmp_path}/").disk == ""


def test_a_disk_may_rest_only_while_nothing_needs_it(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release is refused where an object could not be read without the disk; readmit ends it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    pool.put("k", bytes(200_000))
    for number in (0, 1):
        pool.admin.devices.begin_release(str(tmp_path / f"d{number}"))
        until = time.monotonic() + 30  # a call that the put did not wait for may be under way
        while openers(str(tmp_path / f"d{number}")) and time.monotonic() < until:
            time.sleep(0.01)
        assert openers(str(tmp_path / f"d{number}")) == []
    assert len(pool.admin.devices.places) == 3
    assert pool.get("k") == bytes(200_000)
    with pytest.raises(MembershipError, match="cannot be released"):
        pool.admin.devices.begin_release(str(tmp_path / "d2"))
    with hpstore.open(tmp_path / "pool.toml") as other:
        (row,) = (d for d in other.status().devices if d.url == str(tmp_path / "d0"))
        assert (row.state, "readmit" in row.problem) == ("missing", True)
    for number in (0, 1):
        pool.readmit(str(tmp_path / f"d{number}"))
    assert len(pool.admin.devices.places) == 5
    assert pool.rebuild().whole
    assert not list(tmp_path.glob("d*/released"))


def test_two_that_release_at_once_leave_what_is_needed(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one looks after the first has marked its disk, not while it looks (rule 14)."""
    monkeypatch.setenv("HOME", str(tmp_path))
    pool.put("k", bytes(200_000))
    pool.admin.devices.begin_release(str(tmp_path / "d0"))
    look, outcomes = survey_condition, list[str]()
    with hpstore.open(tmp_path / "pool.toml") as other:

        def second() -> None:
            try:
                other.admin.devices.begin_release(str(tmp_path / "d2"))
                outcomes.append("released")
            except MembershipError as error:
                outcomes.append(str(error))

        thread = threading.Thread(target=second)

        def seen(*args: Any) -> Condition:
            found = look(*args)
            if not thread.ident:
                thread.start()
                thread.join(2)  # it ends here if nothing keeps it from looking now
            return found

        monkeypatch.setattr(pool_devices, "survey_condition", seen)
        pool.admin.devices.begin_release(str(tmp_path / "d1"))
        thread.join()
    (refused,) = outcomes
    assert "cannot be released" in refused
    assert pool.get("k") == bytes(200_000)
    for number in (0, 1):
        pool.readmit(str(tmp_path / f"d{number}"))


def test_an_order_that_the_agent_would_not_hear_is_refused(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of another user reads orders of that user alone: "no agent runs here" was wrong."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["sit-out", str(tmp_path / "pool.toml"), str(tmp_path / "d0")]
    with pool.admin.registers.hold(AGENT, "agent of pool x"):
        refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, MembershipError)
    assert f"process {os.getpid()}" in str(refused.exception)
    assert CliRunner().invoke(app, words).exit_code == 0
