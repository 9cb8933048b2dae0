"""Bytes and files that are wrong: flipped bits, truncated files, wiped, copied, foreign devices."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import hpstore
from hpstore.devices.base import Device
from hpstore.devices.wrappers import FaultyDevice
from hpstore.errors import ConfigError, HpstoreError, TooFewDevices, TooManyErasures
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, empty, flip, payload, tree, value

pytestmark = pytest.mark.fault
HEADER = 4 * KIB
SIZES = pytest.mark.parametrize("size", [2 * KIB, 300 * KIB, 5 * MIB])


def table_offset(file: Path) -> int:
    """Where the checksum table of a column begins: it is the last page of these small files."""
    return file.stat().st_size - 4 * KIB


REGIONS = {
    "magic": lambda file: 2,
    "header": lambda file: 300,
    "header digest": lambda file: HEADER - 5,
    "first unit": lambda file: HEADER + 700,
    "last unit": lambda file: table_offset(file) - 4 * KIB + 1,
    "table": table_offset,
}


def scrub_mends(pool: Pool, damaged: int) -> None:
    """A scrub finds the damage and mends it; a second one finds nothing."""
    first = pool.scrub()
    assert (first.damaged_columns, first.columns_written) == (damaged, damaged)
    assert not first.clean
    assert pool.scrub().clean


@SIZES
@pytest.mark.parametrize("region", REGIONS)
def test_flipped_bit_in_any_two_columns_is_read_round_found_and_mended(
    bench: Bench, region: str, size: int
) -> None:
    """Flip a bit in each pair of a 2+2 object's columns: right bytes, mended, then clean."""
    bench.create(4, data=2, parity=2).close()
    with bench.open() as pool:
        pool.put("x", payload("x", size))
    columns = len(bench.files("x"))
    for pair in [*itertools.combinations(range(columns), 2), (0,)]:
        files = [bench.files("x")[column] for column in pair]
        for file in files:
            flip(file, REGIONS[region](file))
        with hpstore.open(bench.toml, read_only=True) as pool:  # mends nothing by itself
            assert pool.get("x") == payload("x", size)
            middle = size // 2
            assert pool.get("x", middle, middle + 1000) == payload("x", size)[middle:][:1000]
        with bench.open() as pool:
            scrub_mends(pool, len(pair))
            assert pool.get("x") == payload("x", size)
            assert len(bench.files("x")) == columns


def test_damage_is_mended_for_good_when_it_is_rebuilt_on_another_device(bench: Bench) -> None:
    """The repair goes to a device outside the stripe; the damaged file does not stay behind.

    The object was put while its best device was away, so the repair chooses that one.
    """
    bench.create(6, data=2, parity=2).close()
    for away, column in itertools.product(bench.paths, range(4)):
        key = f"{Path(away).name}/{column}"
        os.rename(away, f"{away}.away")
        with bench.open() as pool:
            pool.put(key, payload(key, 300 * KIB))
        os.rename(f"{away}.away", away)
        file = bench.files(key)[column]
        flip(file, HEADER + 700)
        with bench.open() as pool:
            assert pool.scrub().damaged_columns == 1
            assert pool.scrub().clean, f"{key}: the second scrub finds damage again"
            assert len(bench.files(key)) == 4
            assert pool.get(key) == payload(key, 300 * KIB)


@SIZES
@pytest.mark.parametrize("keep", ["nothing", "half a header", "header", "all but a page"])
def test_truncated_column_files_are_read_round_found_and_mended(
    bench: Bench, keep: str, size: int
) -> None:
    """Cut two column files short in turn: right bytes, mended, then clean."""
    bench.create(4, data=2, parity=2).close()
    with bench.open() as pool:
        pool.put("x", payload("x", size))
    for pair in itertools.combinations(range(len(bench.files("x"))), 2):
        for column in pair:
            file = bench.files("x")[column]
            whole = file.stat().st_size
            left = {"nothing": 0, "half a header": 2000, "header": HEADER}
            os.truncate(file, left.get(keep, whole - 4 * KIB))
        with hpstore.open(bench.toml, read_only=True) as pool:
            assert pool.get("x") == payload("x", size)
        with bench.open() as pool:
            scrub_mends(pool, 2)
            assert pool.get("x") == payload("x", size)


@SIZES
def test_read_that_meets_damage_mends_it_by_itself(bench: Bench, size: int) -> None:
    """Read a damaged object through an ordinary pool; then a scrub finds it clean."""
    with bench.create(4, data=2, parity=2) as pool:
        pool.put("x", payload("x", size))
        for file in bench.files("x")[:2]:
            flip(file, HEADER + 100)
        for _ in range(3):
            assert pool.get("x") == payload("x", size)
        pool.rebuild()
    with bench.open() as pool:
        pool.scrub()
        assert pool.scrub().clean


@SIZES
def test_more_damage_than_parity_is_said_and_nothing_is_deleted(bench: Bench, size: int) -> None:
    """Damage three columns: reads and scrubs say so, the files stay, other objects read."""
    bench.create(4, data=2, parity=2).close()
    with bench.open() as pool:
        pool.put("x", payload("x", size))
        pool.put("y", payload("y", size))
    files = bench.files("x")
    for file in files[:3]:
        flip(file, HEADER + 100)
    before = {file: file.read_bytes() for file in files}
    with bench.open() as pool:
        with pytest.raises(TooManyErasures, match="Nothing was deleted"):
            pool.get("x")
        assert list(pool.scrub().unreadable) == ["x"]
        assert list(pool.scrub().unreadable) == ["x"]
        assert pool.get("y") == payload("y", size)
    assert {file: file.read_bytes() for file in files} == before
    for file in files[:3]:
        flip(file, HEADER + 100)
    with bench.open() as pool:
        assert pool.get("x") == payload("x", size)


@SIZES
def test_column_on_a_leaving_device_is_a_source_when_another_is_lost(
    bench: Bench, size: int
) -> None:
    """One device is drained when another dies, at a parity of one: everything is healed."""
    with bench.create(5, data=2, parity=1) as pool:
        for number in range(6):
            pool.put(f"x/{number}", payload(f"x/{number}", size))
        pool.evict(bench.paths[0])
        pool.drain(bench.paths[1])
        pool.rebuild()
        for number in range(6):
            assert pool.get(f"x/{number}") == payload(f"x/{number}", size)
            assert pool.stat(f"x/{number}").losses_tolerated == 1


# --- records --------------------------------------------------------------------------------


def spoil(file: Path, how: str) -> None:
    """Damage a record."""
    text = file.read_bytes()
    if how == "truncated":
        file.write_bytes(text[: len(text) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "zeros":
        file.write_bytes(bytes(len(text)))
    elif how == "absent":
        file.unlink()
    elif how == "flipped":
        flip(file, len(text) // 2)
    else:  # one bit of the format number, then later than this hpstore
        known, later = (b"3", b"7") if b'"format": 3' in text else (b"1", b"3")
        assert b'"format": ' + known in text
        file.write_bytes(text.replace(b'"format": ' + known, b'"format": ' + later))


SPOILS = ("truncated", "empty", "zeros", "absent", "flipped", "format bit flipped")


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("name", ["pool.json", "hpstore.json"])
def test_spoilt_records_on_m_devices_cost_nothing(bench: Bench, name: str, how: str) -> None:
    """Damage a record on two devices of 2+2, before an open; everything reads, puts work."""
    with bench.create(5, data=2, parity=2) as pool:
        pool.put("x", payload("x", 300 * KIB))
    for path in bench.paths[:2]:
        spoil(Path(path, name), how)
    with hpstore.open(bench.toml, read_only=True) as pool:
        assert pool.get("x") == payload("x", 300 * KIB)
    with bench.open() as pool:
        assert pool.get("x") == payload("x", 300 * KIB)
        pool.put("y", payload("y", 300 * KIB))
        assert pool.get("y") == payload("y", 300 * KIB)
        if name == "pool.json":
            assert {d.state for d in pool.status().devices} == {"online"}
            assert pool.scrub().clean
        else:
            problems = [d.problem for d in pool.status().devices if d.state == "missing"]
            assert len(problems) == 2
            assert all(problems)


@pytest.mark.parametrize("how", SPOILS)
def test_a_pool_whose_records_are_all_spoilt_says_so_of_each_device(bench: Bench, how: str) -> None:
    """And what is still safe; one whole pool.json opens it again."""
    with bench.create(3, data=2, parity=1) as pool:
        pool.put("x", payload("x", 300 * KIB))
    files = [Path(path, "pool.json") for path in bench.paths]
    whole = files[0].read_bytes()
    for file in files:
        spoil(file, how)
    with pytest.raises(TooFewDevices, match="Objects are not touched") as caught:
        bench.open()
    assert all(str(path) in str(caught.value) for path in bench.paths)
    assert str(caught.value).count("pool.json") >= 3
    files[0].write_bytes(whole)
    with bench.open() as pool:
        assert pool.get("x") == payload("x", 300 * KIB)


@pytest.mark.parametrize("how", SPOILS)
def test_spoilt_membership_records_under_an_open_pool_cost_nothing(bench: Bench, how: str) -> None:
    """Damage pool.json on m devices while the pool is open; reads and puts go on."""
    with bench.create(5, data=2, parity=2) as pool:
        pool.put("x", payload("x", 300 * KIB))
        for path in bench.paths[:2]:
            spoil(Path(path, "pool.json"), how)
        assert pool.get("x") == payload("x", 300 * KIB)
        pool.put("y", payload("y", 300 * KIB))
        assert pool.get("y") == payload("y", 300 * KIB)
        pool.status()
    with bench.open() as pool:
        assert pool.get("x") == payload("x", 300 * KIB)
        assert pool.get("y") == payload("y", 300 * KIB)


# --- wiped, foreign, copied -----------------------------------------------------------------


def old_and_degraded_new(bench: Bench) -> None:
    """x: an old version whole on d0..d3, a newer one acknowledged on three of them with a debt."""
    bench.create(4, data=2, parity=2).close()
    with bench.open() as pool:
        pool.put("x", payload("old", 300 * KIB))

    def failing(url: str, device: Device) -> Device:
        # d3 takes the column but cannot publish it, the others cannot be replaced: a debt
        return FaultyDevice(device, "YE*") if url == bench.paths[3] else device

    with bench.open(wrap=failing) as pool:
        info = pool.put("x", payload("new", 300 * KIB))
        assert info.losses_tolerated == 1


@pytest.mark.parametrize("reopen", [False, True])
def test_wiped_devices_are_not_taken_for_empty_ones(bench: Bench, reopen: bool) -> None:
    """Wipe two devices so that the newest version has one column left and an older one two.

    The newest cannot be read, but it was acknowledged: the read raises, it never falls back.
    """
    old_and_degraded_new(bench)
    pool = hpstore.open(bench.toml, read_only=True)
    assert pool.get("x") == payload("new", 300 * KIB)
    for path in bench.paths[:2]:
        empty(path)
    if reopen:
        pool.close()
        pool = hpstore.open(bench.toml, read_only=True)
    with pool:
        with pytest.raises(TooManyErasures):
            pool.get("x")
        with pytest.raises(TooManyErasures):
            pool.exists("x")


def test_wiped_device_under_an_open_pool_is_read_round_and_never_rejoins(bench: Bench) -> None:
    """Wipe a device while the pool is open: reads and puts go on, nothing is written there."""
    with bench.create(5, data=2, parity=2) as pool:
        for number in range(8):
            pool.put(f"x/{number}", payload(f"x/{number}", 200 * KIB))
        empty(bench.paths[0])
        for number in range(8):
            assert pool.get(f"x/{number}") == payload(f"x/{number}", 200 * KIB)
            pool.put(f"y/{number}", payload(f"y/{number}", 200 * KIB))
        for number in range(8):
            assert pool.get(f"y/{number}") == payload(f"y/{number}", 200 * KIB)
    with bench.open() as pool:
        row = next(d for d in pool.status().devices if d.url == bench.paths[0])
        assert row.state == "missing"
        pool.rebuild(include_missing=True)
        # all objects survive two losses; the pool opens with two members away, and one is
        assert pool.stat("x/0").spare_columns == 2
        assert pool.status().losses_tolerated == 1
    assert tree(bench.paths[0]).keys() <= {".", "tmp/."}


def test_device_of_another_pool_is_refused_and_untouched(bench: Bench) -> None:
    """Put a device of another pool in the place of one's own: told so, nothing written to it."""
    other_root = bench.root / "other"
    other_root.mkdir()
    other = Bench(other_root)
    with other.create(3, data=2, parity=1) as pool:
        pool.put("theirs", payload("theirs", 300 * KIB))
    with bench.create(4, data=2, parity=1) as pool:
        pool.put("x", payload("x", 300 * KIB))
    os.rename(bench.paths[0], f"{bench.paths[0]}.away")
    os.rename(other.paths[0], bench.paths[0])
    before = tree(bench.paths[0])
    with bench.open() as pool:
        assert pool.get("x") == payload("x", 300 * KIB)
        pool.put("y", payload("y", 300 * KIB))
        row = next(d for d in pool.status().devices if d.url == bench.paths[0])
        assert row.state == "missing"
        assert "another pool" in row.problem
    after = tree(bench.paths[0])
    assert {k: v for k, v in after.items() if not k.startswith("tmp")} == {
        k: v for k, v in before.items() if not k.startswith("tmp")
    }
    os.rename(bench.paths[0], other.paths[0])
    with other.open() as pool:
        assert pool.get("theirs") == payload("theirs", 300 * KIB)
        assert pool.scrub().clean


def test_copied_device_is_refused(bench: Bench) -> None:
    """Copy one device over another (cp -a): told so, the other's columns count as lost."""
    with bench.create(4, data=2, parity=2) as pool:
        for number in range(6):
            pool.put(f"x/{number}", payload(f"x/{number}", 200 * KIB))
    for original, copy in ((0, 1), (3, 2)):
        shutil.move(bench.paths[copy], f"{bench.paths[copy]}.away")
        subprocess.run(["cp", "-a", bench.paths[original], bench.paths[copy]], check=True)
        with bench.open() as pool:
            for number in range(6):
                assert pool.get(f"x/{number}") == payload(f"x/{number}", 200 * KIB)
            status = pool.status()
            assert any("copied" in d.problem for d in status.devices) or any(
                d.state == "missing" for d in status.devices
            )
            assert len([d for d in status.devices if d.state == "online"]) <= 3
        empty(bench.paths[copy])
        os.rmdir(bench.paths[copy])
        shutil.move(f"{bench.paths[copy]}.away", bench.paths[copy])
    with bench.open() as pool:
        assert pool.scrub().clean


def test_device_path_that_is_a_file_is_refused(bench: Bench) -> None:
    """A file lies where a device was: told so at open and at create, and left as it is."""
    with bench.create(4, data=2, parity=1) as pool:
        pool.put("x", payload("x", 300 * KIB))
    shutil.rmtree(bench.paths[0])
    Path(bench.paths[0]).write_bytes(b"mine")
    with bench.open() as pool:
        assert pool.get("x") == payload("x", 300 * KIB)
        row = next(d for d in pool.status().devices if d.url == bench.paths[0])
        assert "not a directory" in row.problem
    assert Path(bench.paths[0]).read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="not a directory"):
        hpstore.create(
            [bench.paths[0], bench.root / "e1"], data=1, parity=1, config=bench.root / "e.toml"
        )


def test_read_only_open_writes_nothing(bench: Bench) -> None:
    """Open read-only, read, list, look at the status; no file on any device has changed.

    Also with damage, a device behind and orphans, which a writer would mend.
    """
    with bench.create(4, data=2, parity=2) as pool:
        for number in range(4):
            pool.put(f"x/{number}", payload(f"x/{number}", 300 * KIB))
        pool.delete("x/3")
    flip(bench.files("x/0")[0], HEADER + 10)
    Path(bench.paths[1], "pool.json").unlink()
    orphan = Path(bench.paths[2], "tmp", "00000000000000000001-1-abc")
    orphan.write_bytes(b"left over")
    os.utime(orphan, (1, 1))
    before = [tree(path) for path in bench.paths]
    with hpstore.open(bench.toml, read_only=True) as pool:
        for number in range(3):
            assert pool.get(f"x/{number}") == payload(f"x/{number}", 300 * KIB)
        assert value(pool, "x/3") is None
        assert pool.list() == ["x/0", "x/1", "x/2"]
        assert pool.status().read_only
        for forbidden in (
            lambda: pool.put("y", b"y"),
            lambda: pool.delete("x/0"),
            pool.scrub,
            pool.rebuild,
            lambda: pool.evict(bench.paths[0]),
            lambda: pool.admin.settle("x/0"),
        ):
            with pytest.raises(HpstoreError):
                forbidden()
    assert [tree(path) for path in bench.paths] == before


def test_open_without_enough_devices_names_every_missing_one(bench: Bench) -> None:
    """Three of five devices are gone at a parity of two: the error names each, all stays."""
    with bench.create(5, data=2, parity=2) as pool:
        pool.put("x", payload("x", 300 * KIB))
    for path in bench.paths[:3]:
        os.rename(path, f"{path}.away")
    with pytest.raises(TooFewDevices) as caught:
        bench.open()
    assert all(path in str(caught.value) for path in bench.paths[:3])
    for path in bench.paths[:3]:
        assert not os.path.exists(path)
        os.rename(f"{path}.away", path)
    with bench.open() as pool:
        assert pool.get("x") == payload("x", 300 * KIB)
        assert pool.scrub().clean
