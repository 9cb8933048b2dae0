"""Quarters as they are published: a file a day, zipped, columns that come and go, many families;
memory that stays within its bound; hostile files."""

from __future__ import annotations

import tracemalloc
import zipfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import ForecastError
from hpstore.health.forecast.drive_histories import DRIVE_BYTES, DriveHistory, load_histories
from hpstore.health.forecast.drive_stats import BadRows, read_rows
from hpstore.health.smart.counters import INDEX
from tests.integration.fleets import FIRST

MIB = 1 << 20
EARLY = (
    "date,serial_number,model,capacity_bytes,failure,smart_1_normalized,smart_1_raw,"
    "smart_5_normalized,smart_5_raw,smart_197_raw,smart_198_raw"
)
LATE = (
    "date,serial_number,model,capacity_bytes,failure,datacenter,cluster_id,vault_id,pod_id,"
    "is_legacy_format,smart_5_raw,smart_187_raw,smart_197_raw,smart_198_raw,smart_9_raw,"
    "nvme_media_errors,nvme_available_spare,smart_255_raw"
)
DRIVES = (
    ("ZA1", "ST4000DM000"),
    ("PL2", "HGST HMS5C4040BLE640"),
    ("X3", "TOSHIBA MG07ACA14TA"),
    ("4B", "WDC WUH721816ALE6L4"),
    ("S5", "Samsung SSD 980 PRO 1TB"),
)


def early_day(day: int) -> str:
    rows = [
        f"{FIRST + timedelta(day)},{serial},{model},4000787030016,0,100,5,100,{day},0,0"
        for serial, model in DRIVES[:3]
    ]
    return "\n".join([EARLY, *rows]) + "\n"


def late_day(day: int) -> str:
    """ZA1 has failed on its first day here; NVMe counters stand in the rows of one drive alone."""
    rows = []
    for serial, model in DRIVES[0 if day == 90 else 1 :]:
        head = f"{FIRST + timedelta(day)},{serial},{model},1,{int(serial == 'ZA1')},sac0,0,1,2,0"
        nvme = f",,,,4000,{day},98" if serial == "S5" else f"{day},1,0,0,4000,,"
        rows.append(f"{head},{nvme},")
    return "\n".join([LATE, *rows]) + "\n"


@pytest.fixture
def quarters(tmp_path: Path) -> Path:
    """One quarter as a zip with a folder in it, the next as the folder that unpacking leaves."""
    folder = tmp_path / "stats"
    folder.mkdir()
    with zipfile.ZipFile(folder / "data_Q1_2024.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for day in range(90):
            archive.writestr(f"data_Q1_2024/{FIRST + timedelta(day)}.csv", early_day(day))
        archive.writestr("__MACOSX/._2024-01-01.csv", b"\0\5\x16")
        archive.writestr("data_Q1_2024/readme.txt", "cite the source")
    for day in range(90, 100):
        (folder / f"{FIRST + timedelta(day)}.csv").write_text(late_day(day))
    (folder / "notes.md").write_text("not a table")
    return folder


def loaded(path: Path) -> dict[str, DriveHistory]:
    bad = BadRows()
    found = load_histories([path], bad=bad, salt="", memory_bytes=MIB)
    assert (bad.count, found.repeated) == (0, 0)
    return {history.serial: history for history in found.histories}


def test_quarters_are_read_as_they_are_published(quarters: Path) -> None:
    """Every family and vendor; a drive's history goes on over the change of columns, a counter
    without a column is unknown there; a failure in the second quarter is known."""
    found = loaded(quarters)
    assert {serial: history.family for serial, history in found.items()} == {
        "ZA1": "ST4000DM000",
        "PL2": "HMS5C4040BLE640",
        "X3": "MG07ACA14TA",
        "4B": "WUH721816ALE6L4",
        "S5": "SSD 980 PRO 1TB",
    }
    kept = found["PL2"]
    assert kept.days.tolist() == [FIRST.toordinal() + day for day in range(100)]
    assert kept.values[:, INDEX["smart_5"]].tolist() == list(range(100))
    grown = kept.values[:, INDEX["smart_187"]]
    assert np.isnan(grown[:90]).all()
    assert grown[90:].tolist() == [1] * 10
    assert found["ZA1"].failed_day == FIRST.toordinal() + 90
    assert len(found["4B"].days) == 10


def test_nvme_counters_are_read_where_there_are_some(quarters: Path) -> None:
    """Beside disks that have none of them."""
    found = loaded(quarters)
    assert found["S5"].values[:, INDEX["nvme_media_errors"]].tolist() == list(range(90, 100))
    assert np.isnan(found["S5"].values[:, INDEX["smart_5"]]).all()
    assert np.isnan(found["PL2"].values[:, INDEX["nvme_media_errors"]]).all()


def write_many(path: Path, drives: int, days: int) -> None:
    with path.open("w") as file:
        file.write("date,serial_number,model,failure,smart_5_raw\n")
        for day in range(days):
            when = FIRST + timedelta(day)
            file.writelines(f"{when},S{n:08},M{n},0,{n}\n" for n in range(drives))


@pytest.mark.parametrize(("drives", "days"), [(3000, 2), (30, 300)], ids=["many", "long"])
def test_memory_stays_within_what_was_allowed(tmp_path: Path, drives: int, days: int) -> None:
    """The bound of the docs: what is allowed for rows, as much again for drives, and 2 MiB.

    Rows of `long` would be 1.3 MB; the drives of `many` are 3.6 MB by the bound."""
    write_many(tmp_path / "a.csv", drives, days)
    allowed = max(drives * DRIVE_BYTES, MIB // 2)
    tracemalloc.start()
    try:
        found = load_histories([tmp_path / "a.csv"], bad=BadRows(), salt="", memory_bytes=allowed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.histories
    assert peak <= 2 * allowed + 2 * MIB
    if days > 100:
        assert found.healthy_share < 1


def test_a_drive_takes_no_more_than_the_bound_counts(tmp_path: Path) -> None:
    """Names as long as they may be, a row each: at most DRIVE_BYTES a drive."""
    drives = 2000
    with (tmp_path / "a.csv").open("w") as file:
        file.write("date,serial_number,model,failure,smart_5_raw\n")
        file.writelines(f"2024-01-01,{n:0256},{n:M<256},0,1\n" for n in range(drives))
    tracemalloc.start()
    try:
        load_histories([tmp_path / "a.csv"], bad=BadRows(), salt="", memory_bytes=8 * MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    rows = 3 * drives * (4 + 8 * len(INDEX))
    names = 4096 * 800  # of models that are kept while one file is read
    assert peak <= drives * DRIVE_BYTES + rows + names + MIB


def test_more_drives_than_fit_are_one_error(tmp_path: Path) -> None:
    """Made-up serial numbers without end would fill the memory."""
    write_many(tmp_path / "a.csv", 101, 1)
    load_histories([tmp_path / "a.csv"], bad=BadRows(), salt="", memory_bytes=101 * DRIVE_BYTES)
    with pytest.raises(ForecastError, match=r"more than 100 drives.*Nothing was written"):
        load_histories([tmp_path / "a.csv"], bad=BadRows(), salt="", memory_bytes=100 * DRIVE_BYTES)


def test_hostile_archives_are_one_error(tmp_path: Path) -> None:
    """No table; too many; one that is encrypted; a packing that is not known; an empty folder."""
    path = tmp_path / "a.zip"

    def read() -> list[object]:
        return list(read_rows(path, bad=BadRows()))

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "")
    with pytest.raises(ForecastError, match=r"holds no \.csv files"):
        read()
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(10_001):
            archive.writestr(f"{number}.csv", "")
    with pytest.raises(ForecastError, match=r"holds 10001 \.csv files"):
        read()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.csv", early_day(0))
    whole = bytearray(path.read_bytes())
    directory = whole.index(b"PK\1\2")
    for flags, method, words in ((1, 0, "encrypted"), (0, 9, "packed in a way")):
        hostile = bytearray(whole)
        hostile[6], hostile[directory + 8] = flags, flags
        hostile[8], hostile[directory + 10] = method, method
        path.write_bytes(hostile)
        with pytest.raises(ForecastError, match=words):
            read()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForecastError, match="holds none of"):
        load_histories([tmp_path / "empty"], bad=BadRows(), salt="", memory_bytes=MIB)


def test_names_of_days_and_models_do_not_pile_up(tmp_path: Path) -> None:
    """More days than are kept: all are read."""
    with (tmp_path / "a.csv").open("w") as file:
        file.write("date,serial_number,model,failure,smart_5_raw\n")
        file.writelines(f"{FIRST + timedelta(n)},A,M{n},0,{n}\n" for n in range(9000))
    found = load_histories([tmp_path / "a.csv"], bad=BadRows(), salt="", memory_bytes=8 * MIB)
    assert len(found.histories[0].days) == 9000
