"""Where devices lie: mounts that are not there, disks that are shared, directories of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hpstore
from hpstore.errors import ConfigError, DeviceInUse
from hpstore.membership import device_places
from hpstore.membership.device_places import disk_of, require_mounted, sharing_a_disk, sharing_note

ROOT = 1


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Paths and the numbers of their filesystems; the root's is ROOT."""
    places = {"/": ROOT}
    monkeypatch.setattr(device_places, "filesystem_of", places.get)
    return places


@pytest.mark.parametrize(
    ("others", "new", "refused"),
    [
        ((2, 3, 4), (ROOT,), True),  # the mistyped one
        ((), (2, 3, 4, ROOT), True),  # of a new pool
        ((), (ROOT, ROOT, ROOT, ROOT), False),  # a trial in one directory
        ((ROOT, ROOT, ROOT), (ROOT,), False),
        ((2, 2, 2), (ROOT,), False),  # directories of one other disk: no mounts of their own
        ((2, 3), (ROOT, ROOT), False),  # as many: meant so
        ((2,), (ROOT,), False),
        ((2, 3, 4), (5,), False),
    ],
)
def test_one_that_is_alone_on_the_root_disk_is_refused(
    lie: dict[str, int], others: tuple[int, ...], new: tuple[int, ...], refused: bool
) -> None:
    """A mistyped mount put a member on the root disk silently."""
    old = {f"/mnt/old{i}": number for i, number in enumerate(others)}
    fresh = {f"/mnt/new{i}": number for i, number in enumerate(new)}
    lie.update(old | fresh)
    if not refused:
        require_mounted(list(fresh), old, fstab="/none")
        return
    with pytest.raises(ConfigError, match=r"/mnt/new\d lies on the root.*--allow-root-disk"):
        require_mounted(list(fresh), old, fstab="/none")


def test_a_mount_point_of_fstab_without_its_mount_is_refused(tmp_path: Path) -> None:
    """Also a directory below it, which make_place would make."""
    fstab = tmp_path / "fstab"
    fstab.write_text(f"# disks\nUUID=1 / ext4 defaults 0 1\nUUID=2 {tmp_path}/b ext4 noauto 0 2\n")
    (tmp_path / "b").mkdir()
    for path in ("b", "b/hpstore"):
        with pytest.raises(ConfigError, match=rf"has a mount at {tmp_path}/b, and nothing"):
            require_mounted([str(tmp_path / path)], fstab=str(fstab))
    require_mounted([str(tmp_path / "bb"), "s3://x/b"], fstab=str(fstab))


def test_an_option_allows_it_and_nothing_is_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`create` and `add`, from Python."""
    monkeypatch.setattr(device_places, "_unmounted", lambda path, _: path * path.endswith("x"))
    devices, config = [tmp_path / f"d{i}" for i in range(3)], tmp_path / "pool.toml"
    with pytest.raises(ConfigError, match="allow-root-disk"):
        hpstore.create([*devices, tmp_path / "x"], data=2, parity=1, config=config)
    assert not list(tmp_path.iterdir())
    with hpstore.create(devices, data=2, parity=1, config=config) as pool:
        with pytest.raises(ConfigError, match="allow-root-disk"):
            pool.add_device(str(tmp_path / "x"))
        assert not (tmp_path / "x").exists()
        pool.add_device(str(tmp_path / "x"), allow_root_disk=True)


def test_partitions_of_one_disk_share_it(tmp_path: Path) -> None:
    """By sysfs: a partition's directory lies in its disk's."""
    number = os.stat(tmp_path).st_dev
    disk = tmp_path / "devices/sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "sda1/partition").touch()
    (tmp_path / "dev/block").mkdir(parents=True)
    link = tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}"
    link.symlink_to(disk / "sda1")
    assert disk_of(str(tmp_path), sys=str(tmp_path)) == str(disk)
    link.unlink()
    link.symlink_to(disk)
    assert disk_of(str(tmp_path), sys=str(tmp_path)) == str(disk)


def test_what_is_shared_is_said_once(tmp_path: Path) -> None:
    """Six directories of one disk: one line."""
    paths = [str(tmp_path / f"d{i}") for i in range(6)]
    assert sharing_a_disk([*paths, "s3://a/b"]) == paths
    assert sharing_note(paths).startswith("6 of 6 devices share 1 disk: ")
    assert sharing_note(paths[:1]) == ""


def test_a_directory_with_files_of_others_is_refused(tmp_path: Path) -> None:
    """`create` used to be silent. Nothing is claimed, `add` refuses it too; files that systems make
    by themselves do not count."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    for device in devices:
        device.mkdir()
    (devices[0] / "lost+found").mkdir()
    (devices[0] / ".Trash-1000").mkdir()
    (devices[2] / "thesis.tex").touch()
    config = tmp_path / "pool.toml"
    with pytest.raises(DeviceInUse, match=r"d2 holds thesis\.tex, which hpstore did not make"):
        hpstore.create(devices, data=2, parity=1, config=config)
    assert not any((device / "objects").exists() for device in devices)
    assert not config.exists()
    (devices[2] / "thesis.tex").unlink()
    (tmp_path / "d3").mkdir()
    (tmp_path / "d3/photo.png").touch()
    with hpstore.create(devices, data=2, parity=1, config=config) as pool:
        with pytest.raises(DeviceInUse, match="photo"):
            pool.add_device(str(tmp_path / "d3"))
        assert len(pool.admin.record.members) == 3


def test_pools_without_names_are_told_apart(tmp_path: Path) -> None:
    """By their files: each was "main"."""
    names = []
    for place, file in (("a", "fast.toml"), ("b", "slow.toml"), ("b", "tape.toml")):
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        devices = [folder / f"{file}-{i}" for i in range(3)]
        with hpstore.create(devices, data=2, parity=1, config=folder / file) as pool:
            names.append(pool.status().name)
    assert names == ["fast", "slow", "tape"]
