"""`hpstore health ...` through the app: train, evaluate, report; on made-up fleets."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hpstore
from hpstore.agent.smart_watch import RECORD_FILE
from hpstore.cli import app
from hpstore.cli import health_report as reports
from hpstore.config import Settings
from tests.integration.cli_cases import Cli
from tests.integration.fleets import HEADER, fleet, write_csv

FLEET = fleet(150, 120)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files of a fleet and a model of it."""
    path = tmp_path_factory.mktemp("health")
    write_csv(path / "a.csv", FLEET)
    words = ["train", str(path / "a.csv"), "--out", str(path / "model.json")]
    done = CliRunner().invoke(app, ["health", *words, "--trees", "8", "--folds", "2"])
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture
def cli(place: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(place, capsys, "health")


def test_train_writes_a_model_with_its_card_and_figures(cli: Cli) -> None:
    """--json: what it learned from, until when, what it was seen to do; as in the model file."""
    said = json.loads(
        cli(
            "train",
            "a.csv",
            "--out",
            "m.json",
            "--trees",
            8,
            "--folds",
            2,
            "--horizon-days",
            10,
            "--until",
            "2024-03-01",
            "--json",
        )
    )
    card = json.loads((cli.directory / "m.json").read_text())["card"]
    assert said["card"] == card
    assert (card["horizon_days"], card["known_until"]) == (10, "2024-03-01")
    assert list(card["families"]) == ["ST4000DM000"]
    assert card["evaluation"]["after"] == "2024-03-01"
    assert card["evaluation"]["scores"]["model"]["at_far"]["fdr"] > 0.4
    assert said["bad_rows"] == {"count": 0, "named": []}


def test_evaluate_compares_the_model_with_rule_sum_and_flags(cli: Cli) -> None:
    """JSON for machines, a table for people with the same figures."""
    words = ("evaluate", "a.csv", "--model", "model.json", "--far", "0.05", "--resamples", 50)
    found = json.loads(cli(*words, "--healthy-share", "0.1", "--json"))
    assert set(found["scores"]) == {"model", "rule", "sum"}
    best = found["scores"]["model"]["at_far"]
    assert best["far"] <= 0.05
    assert best["precision_rescaled"] < best["precision"]
    text = cli(*words)
    assert f"{best['fdr']:.3f}" in text
    assert f"{found['failed_drives']} drives that failed" in text
    assert "spec flags" in text


def test_a_model_is_used_without_scikit_learn(place: Path) -> None:
    """evaluate where it cannot be imported; train says what to install."""
    code = "import sys; sys.modules['sklearn'] = None; from hpstore.cli import main; main()"
    root = Path(__file__).resolve().parents[2]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, "health", *words],
            cwd=place,
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    done = run("evaluate", "a.csv", "--model", "model.json", "--far", "0.05", "--resamples", "10")
    assert done.returncode == 0, done.stderr
    done = run("train", "a.csv", "--out", "none.json")
    assert done.returncode == 70
    assert "hpstore[health]" in done.stderr
    assert not (place / "none.json").exists()


def test_errors_are_one_line_with_their_code_and_leave_no_model(cli: Cli) -> None:
    """Another family, a cut file, missing columns, a hostile model, nothing left to judge."""
    write_csv(cli.directory / "other.csv", fleet(30, 120, model="WD40EFRX"))
    write_csv(cli.directory / "short.csv", FLEET[:9], HEADER[1:])
    (cli.directory / "cut.csv.xz").write_bytes(b"\xfd7zXZ\0\0\4")
    (cli.directory / "bad.json").write_text('{"format": "hpstore-failure-forecast"}')
    for words, code, said in (
        (("evaluate", "other.csv", "--model", "model.json"), 71, "covers ST4000DM000"),
        (("evaluate", "a.csv", "--model", "bad.json"), 70, "damaged or not one of ours"),
        (("evaluate", "a.csv", "--model", "none.json"), 70, "cannot read the model"),
        (("evaluate", "none.csv", "--model", "model.json"), 70, "cannot read none.csv"),
        (("train", "short.csv", "--out", "x.json"), 70, "lacks the columns date"),
        (("train", "cut.csv.xz", "--out", "x.json"), 70, "cut short"),
        (("train", "a.csv", "--out", "x.json", "--until", "soon"), 2, "a date such as"),
        (("report", "a.csv", "--record", "r.csv"), 2, "--record is for the disks"),
    ):
        text = cli(*words, code=code)
        assert said in text
        assert text.count("\n") == 1
    assert not (cli.directory / "x.json").exists()
    assert "not evaluated: the model knows everything" in cli(
        "train", "a.csv", "--out", "all.json", "--trees", 2, "--folds", 2, "--until", "last"
    )


def test_a_family_is_named_for_files_without_a_model_column(cli: Cli) -> None:
    """As the samples of one drive model are; bad rows are named on standard error."""
    path = write_csv(
        cli.directory / "one.csv", FLEET[:60], tuple(n for n in HEADER if n != "model")
    )
    path.write_text(path.read_text() + "2024-01-09,S,zero\n")
    words = ("evaluate", "one.csv", "--model", "model.json", "--far", "0.05", "--resamples", 10)
    assert "the files hold unnamed" in cli(*words, code=71)
    cli(*words, "--family", "ST4000DM000")
    assert "LEFT OUT one.csv:" in cli.err


def test_report_on_files_gives_reasons_in_words(cli: Cli) -> None:
    """The living by risk, worst first; the failed only counted; with and without a model."""
    sick = next(d for d in FLEET if d.failed and d.counts[-1].sum() > 100)
    write_csv(
        cli.directory / "now.csv",
        [
            *(d for d in FLEET if not d.failed),
            type(sick)(serial="SICK", model=sick.model, counts=sick.counts, failed=False),
        ],
    )
    found = json.loads(cli("report", "now.csv", "--model", "model.json", "--far", "0.05", "--json"))
    worst = found["drives"][0]
    assert (worst["serial"], worst["risk"], worst["model_alarm"]) == ("SICK", "warn", True)
    assert any("rose by" in reason for reason in worst["reasons"])
    assert {d["risk"] for d in found["drives"]} == {"warn", "no sign"}
    text = cli("report", "a.csv")
    assert re.search(r"100 drives: \d+ watch, \d+ no sign; 50 have failed before", text)
    assert "no forecast for 100 drives: no model was given" in text


@pytest.fixture
def machine(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two disks, one asleep, and a smartctl that tells of them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    answer = {
        "serial_number": "Z1",
        "model_name": "ST4000DM000-1F2168",
        "ata_smart_attributes": {
            "table": [{"id": i, "raw": {"value": 0}} for i in (5, 187, 188, 197, 198)]
        },
    }
    (tmp_path / "answer").write_text(json.dumps(answer))
    (tools / "smartctl").write_text(
        '#!/bin/sh\nfor last; do :; done\n[ "$last" = /dev/sdb ] && exit 3\n'
        f'read -r line < {tmp_path}/answer; echo "$line"\n'
    )
    (tools / "smartctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(reports, "disks", lambda: ["/dev/sda", "/dev/sdb"])
    return tmp_path


def test_report_on_this_machine_records_and_looks_back(cli: Cli, machine: Path) -> None:
    """A row a disk and day in the public form; rises are told from it; a row that was cut is left
    out; the sleeping disk is named and not judged."""
    record = machine / "disks.csv"
    text = cli("report", "--record", record)
    assert "/dev/sdb: asleep: it sleeps; not woken" in text
    with record.open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["serial_number"], r["smart_5_raw"]) for r in rows] == [("Z1", "0")]
    cli("report", "--record", record)
    assert len(record.read_text().splitlines()) == 2  # once a day
    record.write_text(record.read_text()[:-9])  # a crash in the first row of all
    cli("report", "--record", record)
    header, cut, whole = (line.count(",") for line in record.read_text().splitlines())
    assert header == whole > cut
    record.write_text("\n".join(record.read_text().splitlines()[::2]) + "\n")
    lines = record.read_text().splitlines()
    past = [lines[1].replace(rows[0]["date"], f"2024-01-{day:02}") for day in range(1, 9)]
    record.write_text("\n".join([lines[0], *past]) + "\n2024-01-09,Z1,ST40")
    answer = json.loads((machine / "answer").read_text())
    answer["ata_smart_attributes"]["table"][0]["raw"]["value"] = 25
    (machine / "answer").write_text(json.dumps(answer))
    disk, asleep = json.loads(cli("report", "--record", record, "--json"))
    assert "LEFT OUT" in cli.err
    assert disk["forecast"]["risk"] == "warn"
    assert disk["forecast"]["reasons"] == ["reallocated sectors rose by 25 to 25 in 14 days"]
    assert (asleep["readout"], asleep["forecast"]) == ("asleep", None)
    with record.open() as file:
        assert list(csv.DictReader(file))[-1]["smart_5_raw"] == "25"


def test_report_knows_what_the_agent_of_a_pool_has_seen(cli: Cli, machine: Path) -> None:
    """Eight days in the agent's record, then a rise: the report sees it and adds a row there."""
    hpstore.create(
        [str(machine / f"d{number}") for number in range(3)],
        scheme="2+1",
        config=machine / "pool.toml",
        settings=Settings(run_directory=str(machine / "run")),
    ).close()
    cli("report", "--pool", machine / "pool.toml")
    with hpstore.open(machine / "pool.toml", read_only=True) as pool:
        record = pool.admin.state_directory / RECORD_FILE
    header, row = record.read_text().splitlines()
    past = [f"2024-01-{day:02}{row[10:]}" for day in range(1, 9)]
    record.write_text("\n".join([header, *past]) + "\n")
    answer = json.loads((machine / "answer").read_text())
    answer["ata_smart_attributes"]["table"][0]["raw"]["value"] = 25
    (machine / "answer").write_text(json.dumps(answer))
    disk, _ = json.loads(cli("report", "--pool", machine / "pool.toml", "--json"))
    assert disk["forecast"]["reasons"] == ["reallocated sectors rose by 25 to 25 in 14 days"]
    assert len(record.read_text().splitlines()) == 10
    words = ("report", "--pool", machine / "pool.toml", "--record", record)
    assert "--pool names a record" in cli(*words, code=2)


def test_a_file_that_is_no_record_is_not_added_to(cli: Cli, machine: Path) -> None:
    """Its bytes stay as they are."""
    (machine / "other.csv").write_text("date,serial_number,failure,smart_5_raw\n2024-01-01,A,0,1\n")
    before = (machine / "other.csv").read_bytes()
    assert "other columns" in cli("report", "--record", machine / "other.csv", code=70)
    assert (machine / "other.csv").read_bytes() == before


def test_every_health_command_has_help_with_an_example() -> None:
    """--help names an example line for each."""
    for name in ("train", "evaluate", "report"):
        shown = CliRunner().invoke(app, ["health", name, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert f"hpstore health {name}" in shown.output
