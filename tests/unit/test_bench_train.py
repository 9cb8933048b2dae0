"""`hpstore bench train`: it drives the comparison, and keeps what is finished."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpstore.benchmarks import train_bench
from hpstore.benchmarks.harness.measure import Options
from hpstore.errors import ConfigError

ROW = {
    "row": "ddp",
    "world_size": 2,
    "params_digest": "abcdef" * 10,
    "summary": {"avg_throughput": 100.0, "data_wait_share": 0.01},
    "storage": {},
}
HEAD = "import json, sys, time\nfrom pathlib import Path\n"
FIND = "out = Path(sys.argv[sys.argv.index('--out') + 1])\n"


def scripts(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Stand-ins for run_all.py and analyze.py."""
    home = directory / "scripts"
    home.mkdir()
    (home / "run_all.py").write_text(HEAD + FIND + body)
    (home / "analyze.py").write_text(
        HEAD + "(Path(sys.argv[1]) / 'verdict.json').write_text('{\"agree\": true}')\n"
    )
    monkeypatch.setattr(train_bench, "SCRIPTS", home)
    monkeypatch.setattr(
        train_bench, "measured_pipelines", lambda folder, _: {"measured in": folder}
    )


def options(directory: Path, kept: list[dict[str, Any]], **more: Any) -> Options:
    return Options(
        directory=None, size_bytes=0, repeats=3, plots=directory / "out", keep=kept.append, **more
    )


def writing(row: str, **changes: Any) -> str:
    """Code that writes a results file and says so."""
    found = json.dumps({**ROW, "row": row, **changes})
    return f"(out / 'results_{row}.json').write_text({found!r})\nprint('{row}', flush=True)\n"


def test_rows_are_kept_as_they_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = writing("ddp") + "while not (out / 'kept').exists(): time.sleep(0.01)\n"
    body += (
        writing("fsdp2")
        + "(out / 'verdict.json').write_text('{\"agree\": true}')\nprint(sys.argv[1:])\n"
    )
    scripts(tmp_path, monkeypatch, body)
    kept: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        kept.append(found)
        (tmp_path / "out" / "kept").touch()

    found = train_bench.bench_train(replace(options(tmp_path, []), keep=keep))
    assert list(kept[0]["rows"]) == ["ddp"]
    assert list(kept[-1]["rows"]) == ["ddp", "fsdp2"]
    assert found["pipeline"] == {"measured in": tmp_path / "out"}
    assert found["agree"] is True
    assert found["folder"] == str(tmp_path / "out")


def test_pipelines_are_measured_where_they_are_among_the_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts(tmp_path, monkeypatch, writing("ddp"))
    assert "pipeline" not in train_bench.bench_train(options(tmp_path, [], cases="ddp,ps"))
    (tmp_path / "out" / "results_ddp.json").unlink()
    assert "pipeline" in train_bench.bench_train(options(tmp_path, [], cases="ddp,f1b"))


def test_figures_of_pipelines_are_written_with_met_and_not_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least three rounds, as asked; without matplotlib no picture, and it says so."""
    from hpstore.benchmarks.pipeline import pipeline_bench

    asked: list[Any] = []

    def tables(**told: Any) -> dict[str, Any]:
        asked.append(told)
        row = {"median": 0.04, "lowest": 0.03, "highest": 0.05, "bar": 0.03, "met": False}
        return {"bars": {"data_wait": row | {"bar": 0.05, "met": True}, "idle": row}}

    monkeypatch.setattr(pipeline_bench, "tables", tables)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = train_bench.measured_pipelines(
        tmp_path, replace(options(tmp_path, [], quick=True), repeats=1)
    )
    assert asked == [{"rounds": 3, "quick": True, "directory": None}]
    assert found["picture"].startswith("none: ")
    assert json.loads((tmp_path / "pipeline.json").read_text()) == found
    assert (tmp_path / "pipeline.txt").read_text().splitlines() == [
        "met      data_wait: 0.04 (0.03 to 0.05), bar 0.05",
        "NOT MET  idle: 0.04 (0.03 to 0.05), bar 0.03",
    ]


def test_what_was_asked_for_is_handed_on(tmp_path: Path) -> None:
    asked = options(tmp_path, [], quick=True, cases="ddp,ps", device="cuda:1")
    words = " ".join(train_bench.command(Path("run_all.py"), Path("out"), asked))
    assert words.endswith("run_all.py --out out --repeats 3 --quick --methods ddp,ps --device cuda")


def test_an_interrupted_comparison_ends_its_job_and_keeps_rows_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would go on for an hour; it is told to end, and says that it was."""
    body = (
        "import signal\n"
        "def end(*_):\n    (out / 'ended').touch(); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end)\n" + writing("ddp") + "time.sleep(3600)\n"
    )
    scripts(tmp_path, monkeypatch, body)
    kept: list[dict[str, Any]] = []

    def cut(found: dict[str, Any]) -> None:
        kept.append(found)
        if len(kept) == 1:
            signal.raise_signal(signal.SIGINT)

    asked = Options(directory=None, size_bytes=0, repeats=1, plots=tmp_path / "out", keep=cut)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background
    try:  # was started with SIGINT ignored
        with pytest.raises(KeyboardInterrupt):
            train_bench.bench_train(asked)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "out" / "ended").exists()
    assert list(kept[-1]["rows"]) == ["ddp"]
    assert kept[-1]["agree"] is True


def test_a_mismatch_is_an_error_with_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts(tmp_path, monkeypatch, writing("ddp") + "print('MISMATCH: ps')\nsys.exit(1)\n")
    with pytest.raises(train_bench.ComparisonFailed, match="MISMATCH: ps"):
        train_bench.bench_train(options(tmp_path, []))


def test_old_results_and_an_installed_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts(tmp_path, monkeypatch, writing("ddp"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results_ddp.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds results already"):
        train_bench.bench_train(options(tmp_path, []))
    monkeypatch.setattr(train_bench, "SCRIPTS", tmp_path)
    with pytest.raises(ConfigError, match="from a checkout"):
        train_bench.bench_train(options(tmp_path, []))


def test_bars_are_those_of_the_pipeline_with_and_without_checkpoints() -> None:
    def row(rate: float) -> dict[str, Any]:
        return {"summary": {"avg_throughput": rate, "data_wait_share": 0.03}}

    rows = {"gpipe": row(102.0), "gpipe.hpstore": row(100.0), "gpipe.torch_save": row(51.0)}
    found = train_bench.ratios(rows)
    assert found["checkpoints_to_none_hpstore"] == {"median": 1.02, "bar": 1.03, "met": True}
    assert found["checkpoints_to_none_torch_save"] == {"median": 2.0}
    assert found["data_wait_share"]["met"] is False
    rows["gpipe.hpstore"]["repeats"] = {"avg_throughput": {"median": 98.0}}
    assert train_bench.ratios(rows)["checkpoints_to_none_hpstore"]["met"] is False
