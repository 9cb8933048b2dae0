"""Drive-stats files: forms, bad rows, columns, memory; on small real files."""

from __future__ import annotations

import gzip
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import ForecastError
from hpstore.health.forecast.drive_histories import ROW_BYTES, choose, load_histories, survey
from hpstore.health.forecast.drive_stats import BadRows, read_rows
from hpstore.health.smart.counters import INDEX, SPEC_FLAG, family_of
from tests.integration.fleets import fleet, histories, write_csv

MIB = 1 << 20


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "a.csv", fleet(9, 30))


def load(*paths: Path, memory_bytes: int = MIB) -> dict[str, list[list[float]]]:
    found = load_histories(list(paths), bad=BadRows(), salt="", memory_bytes=memory_bytes)
    return {h.serial: np.nan_to_num(h.values).tolist() for h in found.histories}


def test_plain_packed_and_split_files_give_the_same_histories(table: Path, tmp_path: Path) -> None:
    """.csv, .xz, .gz, .zip with a file a month, and rows by drive instead of by day."""
    text = table.read_bytes()
    lines = text.splitlines(keepends=True)
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(text))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("q/1.csv", b"".join(lines[:100]))
        archive.writestr("q/2.csv", lines[0] + b"".join(lines[100:]))
        archive.writestr("__MACOSX/1.csv", b"\0\1")
    by_drive = sorted(lines[1:], key=lambda line: line.split(b",")[1])
    (tmp_path / "b.csv").write_bytes(lines[0] + b"".join(by_drive))
    made = histories(fleet(9, 30)).histories
    expected = {h.serial: np.nan_to_num(h.values).tolist() for h in made}
    for name in ("a.csv", "a.csv.xz", "a.csv.gz", "a.zip", "b.csv"):
        assert load(tmp_path / name) == expected, name


def test_bad_rows_are_counted_and_named_and_the_rest_is_read(table: Path) -> None:
    """Too few fields (a row that was cut), a date, a failure, a count, a serial that are none."""
    lines = table.read_text().splitlines()
    good = len(lines) - 1
    cells = lines[1].split(",")
    for column, text in ((0, "2024-13-01"), (1, ""), (4, "2"), (5, "many"), (6, "-1"), (7, "nan")):
        lines.append(",".join([*cells[:column], text, *cells[column + 1 :]]))
    table.write_text("\n".join(lines) + "\n2024-01-30,S0-0001,ST40")
    bad = BadRows()
    assert sum(1 for _ in read_rows(table, bad=bad)) == good
    assert bad.count == 7
    for line, words in zip(
        bad.named,
        ("date", "serial", "failure", "smart_5", "smart_187", "smart_188", "3 fields"),
        strict=True,
    ):
        assert line.startswith(f"{table}:")
        assert words in line


def test_missing_columns_are_named(tmp_path: Path) -> None:
    """No serial number and no counter that a score could be made of."""
    (tmp_path / "a.csv").write_text("date,failure,smart_9_raw\n2024-01-01,0,5\n")
    with pytest.raises(ForecastError, match=r"serial_number, smart_5_raw or smart_187_raw"):
        list(read_rows(tmp_path / "a.csv", bad=BadRows()))


@pytest.mark.parametrize("kind", ["xz", "gz", "zip"])
def test_a_packed_file_that_is_cut_short_is_an_error_that_names_it(
    table: Path, tmp_path: Path, kind: str
) -> None:
    """Half of a download: nothing is learned from the part that came."""
    path = tmp_path / f"a.csv.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(table, "a.csv")
    else:
        path.write_bytes((lzma if kind == "xz" else gzip).compress(table.read_bytes()))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ForecastError, match=r"cut short.*nothing was written"):
        survey([path], bad=BadRows())


def test_endless_lines_are_no_drive_stats(tmp_path: Path) -> None:
    """Memory stays bounded whatever the file is."""
    header = b"date,serial_number,failure,smart_5_raw\n"
    (tmp_path / "a.csv").write_bytes(header + b"x" * (3 * MIB))
    with pytest.raises(ForecastError, match="more than 1 MiB"):
        survey([tmp_path / "a.csv"], bad=BadRows())


def test_packed_words_and_lowest_normalised_values_are_understood(tmp_path: Path) -> None:
    """Seagate's 188 is three words, the lowest is the count; an attribute at 1 is a flag."""
    (tmp_path / "a.csv").write_text(
        "date,serial_number,failure,smart_5_raw,smart_5_normalized,smart_188_raw\n"
        "2024-01-01,A,0,7,100,4295032833\n2024-01-02,A,0,8,1,\n"
    )
    first, second = read_rows(tmp_path / "a.csv", bad=BadRows())
    assert first.values[INDEX["smart_188"]] == 1
    assert np.isnan(second.values[INDEX["smart_188"]])
    assert [row.values[INDEX[SPEC_FLAG]] for row in (first, second)] == [0, 1]


def test_too_little_memory_keeps_all_failed_drives_and_a_share_of_the_others(table: Path) -> None:
    """The same share whatever the order; failed drives alone not fitting is an error."""
    drives = survey([table], bad=BadRows())
    failed = {serial for serial, facts in drives.items() if facts.failed_day is not None}
    rows = sum(facts.rows for facts in drives.values())
    kept, share = choose(drives, memory_bytes=3 * ROW_BYTES * (rows - 31), salt="")
    assert failed < kept < set(drives)
    assert share == (len(kept) - len(failed)) / (len(drives) - len(failed))
    assert (kept, share) == choose(
        dict(reversed(drives.items())), salt="", memory_bytes=3 * ROW_BYTES * (rows - 31)
    )
    with pytest.raises(ForecastError, match="failed drives alone"):
        choose(drives, memory_bytes=ROW_BYTES, salt="")


def test_rows_of_one_day_count_once_and_rows_after_the_failure_never(tmp_path: Path) -> None:
    """The later of two rows of a day counts; a drive that lives on after failing is cut there."""
    (tmp_path / "a.csv").write_text(
        "date,serial_number,failure,smart_5_raw\n2024-01-02,A,0,2\n2024-01-01,A,0,1\n"
        "2024-01-02,A,0,3\n2024-01-03,A,1,4\n2024-01-04,A,0,5\n"
    )
    found = load_histories([tmp_path / "a.csv"], bad=BadRows(), salt="", memory_bytes=MIB)
    assert found.histories[0].values[:, INDEX["smart_5"]].tolist() == [1, 3, 4]
    assert found.repeated == 1


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("ST4000DM000", "ST4000DM000"),
        ("Seagate ST4000DM000-1F2168", "ST4000DM000"),
        ("HGST HMS5C4040BLE640", "HMS5C4040BLE640"),
        ("TOSHIBA  MG07ACA14TA", "MG07ACA14TA"),
        ("Samsung SSD 870 EVO 1TB", "SSD 870 EVO 1TB"),
        ("", "unnamed"),
    ],
)
def test_a_family_is_named_alike_by_files_and_by_drives(model: str, family: str) -> None:
    """smartctl adds vendors and revisions that the public files leave out."""
    assert family_of(model) == family
