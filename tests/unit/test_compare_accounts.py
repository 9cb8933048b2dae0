"""examples/compare: the ledger, the gate and the report, from lines that were made up."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.thorough import LONG

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "compare"
SAMPLES, BATCH, EPOCHS = 12, 4, 2
NAMES = ("accounts", "analyze", "plots", "rows")
# Any below: JSON
Line = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import each other by plain names, as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield
        for name in NAMES:
            sys.modules.pop(name, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def took(step: int, share: int) -> Line:
    """The samples of a share at a step: in order, two shares a batch."""
    at = (step - 1) * BATCH % SAMPLES + share * BATCH // 2
    return {
        "kind": "took",
        "step": step,
        "epoch": (step - 1) * BATCH // SAMPLES,
        "share": share,
        "ids": list(range(at, at + BATCH // 2)),
    }


def rank_lines(first: int, last: int, share: int) -> list[Line]:
    """A rank that goes on after step `first` and ends after step `last`."""
    lines: list[Line] = [{"kind": "start", "step": first, "restore_s": 0.5 if first else 0.0}]
    for step in range(first + 1, last + 1):
        lines.append(took(step, share))
        lines.append(
            {
                "kind": "step",
                "step": step,
                "epoch": (step - 1) * BATCH // SAMPLES,
                "seconds": 0.1,
                "wait": 0.01,
                "stall": 0.0,
                "talk": {"communication": 0.02},
                "loss": 2.0 / step,
                "right": 1,
                "samples": BATCH // 2,
            }
        )
    storage = {"loader": "hpstore", "checkpointer": "none", "ckpt_count": 0}
    return [*lines, {"kind": "end", "parameters": {"w": ["aa", 1.5]}, "storage": storage}]


def attempt(first: int, last: int) -> dict[int, list[Line]]:
    return {share: rank_lines(first, last, share) for share in range(2)}


STEPS = SAMPLES * EPOCHS // BATCH
FACTS: dict[str, Any] = {
    "method": "ddp",
    "title": "DDP",
    "row": "ddp",
    "world_size": 2,
    "workers": 2,
    "batch_size": BATCH,
    "micro_batches": 2,
    "model": "tiny",
    "device": "cpu",
    "seed": 0,
    "samples": SAMPLES,
    "epoch_count": EPOCHS,
    "checkpoint_every": 2,
    "torch": "2",
    "git": "abc",
    "cpus": 2,
    "load": 0.5,
    "start_time": "2026-01-01T00:00:00+00:00",
    "end_time": "2026-01-01T00:01:00+00:00",
    "communication": "calls",
    "exact": True,
}


def result(row: str = "ddp", **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = module("accounts").composed(FACTS, attempt(0, STEPS), servers=0)
    return {**found, "row": row, "title": row, **changes}


# --- the ledger ---------------------------------------------------------------------------------


@given(st.integers(0, STEPS - 1), st.data())
def test_a_resumed_run_has_every_sample_once(committed: int, data: st.DataObject) -> None:
    """Steps after the commit were done twice; what the dead attempt took of them does not count."""
    killed = data.draw(st.integers(committed, STEPS))
    dead = attempt(0, killed)
    for lines in dead.values():
        for line in lines:
            if line["kind"] == "took" and line["step"] > committed:
                line["ids"] = line["ids"][::-1]
    found = module("accounts").account([dead, attempt(committed, STEPS)], SAMPLES, EPOCHS)
    assert (found.lost, found.repeated, found.differing) == (0, 0, 0)


@given(st.integers(0, STEPS - 1), st.integers(0, 1), st.integers(0, BATCH // 2 - 1))
def test_the_ledger_sees_one_lost_sample_and_one_taken_twice(
    step: int, share: int, place: int
) -> None:
    lines = attempt(0, STEPS)
    victim = [line for line in lines[share] if line["kind"] == "took"][step]
    other = (victim["ids"][place] + 1) % SAMPLES
    victim["ids"][place] = other
    found = module("accounts").account([lines], SAMPLES, EPOCHS)
    assert (found.lost, found.repeated) == (1, 1)


def test_a_loader_that_resumes_too_late_or_too_early_is_seen() -> None:
    """The model went on after step 2, the loader one step beyond it, and one before."""
    accounts = module("accounts")
    for shift, lost in ((1, True), (-1, False)):
        second = attempt(2, STEPS)
        for share, lines in second.items():
            for line in lines:
                if line["kind"] == "took" and line["step"] + shift <= STEPS:
                    line["ids"] = took(line["step"] + shift, share)["ids"]
        found = accounts.account([attempt(0, 3), second], SAMPLES, EPOCHS)
        assert found.repeated
        assert found.lost or not lost


def test_two_stages_that_take_different_samples_are_seen() -> None:
    lines = {0: rank_lines(0, STEPS, 0), 1: rank_lines(0, STEPS, 0)}
    assert module("accounts").account([lines], SAMPLES, EPOCHS).differing == 0
    taken = [line for line in lines[1] if line["kind"] == "took"][3]
    taken["ids"] = taken["ids"][::-1]
    assert module("accounts").account([lines], SAMPLES, EPOCHS).differing == 1


# --- results ------------------------------------------------------------------------------------


def test_times_and_shares_of_a_run_are_those_of_its_lines() -> None:
    """Two workers of equal pace: an epoch of three steps of 0.1 s, twelve samples."""
    found = result()
    assert module("accounts").problems(found) == []
    epoch = found["epochs"][1]
    assert epoch["time"] == pytest.approx(0.3)
    assert epoch["throughput"] == pytest.approx(40)
    assert epoch["accuracy"] == pytest.approx(0.5)
    assert epoch["loss"] == pytest.approx((2 / 4 + 2 / 5 + 2 / 6) / 3)
    summary = found["summary"]
    assert summary["comm_share"] == pytest.approx(0.2)
    assert summary["data_wait_share"] == pytest.approx(0.1)
    assert summary["avg_comm_time"] == pytest.approx(0.02)
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4, 5, 6]
    assert found["steps"][-1]["clock"] == pytest.approx(0.6)


def test_a_server_is_no_worker_and_pulls_stand_apart() -> None:
    lines = {0: rank_lines(0, STEPS, 0), 1: rank_lines(0, STEPS, 0), 2: rank_lines(0, STEPS, 1)}
    for line in lines[0]:
        if line["kind"] == "step":  # it waits for the workers, and sees no samples
            line |= {"seconds": 9.0, "samples": 0, "right": 0, "talk": {"pull": 4.0, "push": 5.0}}
    for rank in (1, 2):
        for line in lines[rank]:
            if line["kind"] == "step":
                line["talk"] = {"pull": 0.01, "push": 0.03}
    found = module("accounts").composed(FACTS, lines, servers=1)
    assert found["epochs"][0]["time"] == pytest.approx(0.3)
    assert found["epochs"][0]["avg_pull_time"] == pytest.approx(0.01)
    assert found["epochs"][0]["avg_push_time"] == pytest.approx(0.03)
    assert found["summary"]["avg_comm_time"] == pytest.approx(0.04)


def test_replicas_that_differ_are_no_digest() -> None:
    digested = module("accounts").digested
    assert digested([{"w": ["a", 1.0]}, {"w": ["b", 1.0]}])[0] == "replicas differ: w"
    split = digested([{"a": ["x", 1.0]}, {"b": ["y", 2.0]}])
    assert split == digested([{"a": ["x", 1.0], "b": ["y", 2.0]}] * 2)


def test_repeats_are_their_median_run() -> None:
    runs = [result(), result(), result()]
    for run, rate in zip(runs, (30.0, 10.0, 20.0), strict=True):
        run["summary"] = {**run["summary"], "avg_throughput": rate}
    found = module("accounts").merged(runs)
    assert found["summary"]["avg_throughput"] == 20.0
    assert found["repeats"]["avg_throughput"] == {"median": 20.0, "lowest": 10.0, "highest": 30.0}
    assert found["repeats"]["digests"] == [runs[0]["params_digest"]]


# --- the gate and the report --------------------------------------------------------------------


def killed(**changes: Any) -> dict[str, Any]:
    return {
        "killed_at_step": 4,
        "killed_rank": 1,
        "resumed_from": 2,
        "starts": 2,
        "samples_lost": 0,
        "samples_repeated": 0,
        "stages_differ": 0,
        "loss_gap": 0.0,
        "same_digest": True,
        "same_ledger": True,
        "restore_s": 0.5,
        **changes,
    }


def driven(samples: int = SAMPLES * EPOCHS) -> dict[str, Any]:
    """What the hooks of a pipeline tell at its end."""
    rank = {
        "rank": 0,
        "idle_share": 0.4,
        "data_wait_share": 0.01,
        "hook_seconds_per_event": 5e-6,
        "idle_bytes": 3_000_000,
        "busy_bytes": 1_000_000,
    }
    return {
        "steps": STEPS,
        "step_seconds": 0.1,
        "idle_share": 0.4,
        "theory": 1 / 3,
        "modelled": None,
        "ranks": [rank, rank | {"rank": 1}],
        "ledger": {"samples": samples, "digest": "ab"},
    }


BAD: dict[str, dict[str, Any]] = {
    "another digest": {"params_digest": "f" * 64},
    "replicas differ": {"params_digest": "replicas differ: w"},
    "repeats differ": {"repeats": {"digests": ["a", "b"], "count": 2}},
    "another sum, where bits cannot agree": {"exact": False, "params_abs_sum": 1.5001},
    "no sum at all": {"exact": False, "params_abs_sum": float("nan")},
    "a sample lost": {"resume": killed(samples_lost=1)},
    "a sample twice": {"resume": killed(samples_repeated=1)},
    "stages differ": {"resume": killed(stages_differ=1)},
    "not resumed": {"resume": killed(resumed_from=0)},
    "another ledger": {"resume": killed(same_ledger=False)},
    "a ledger that lacks a sample": {"pipeline": driven(SAMPLES * EPOCHS - 1)},
    "another end": {"resume": killed(same_digest=False)},
    "other losses": {"resume": killed(loss_gap=1e-9)},
    "other losses, where bits cannot agree": {"exact": False, "resume": killed(loss_gap=1e-3)},
    "no losses": {"exact": False, "resume": killed(loss_gap=float("nan"))},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_the_gate_goes_red_and_names_the_row(changes: dict[str, Any]) -> None:
    gate = module("accounts").gate
    assert gate({"ddp": result(), "fsdp2": result("fsdp2", resume=killed())}) == []
    assert gate({"ddp": result(), "gpipe": result("gpipe", pipeline=driven())}) == []
    close = result("fsdp2", exact=False, params_abs_sum=1.500001, params_digest="f" * 64)
    assert gate({"ddp": result(), "fsdp2": close}) == []
    wrong = gate({"ddp": result(), "fsdp2": result("fsdp2", **changes)})
    assert len(wrong) == 1
    assert wrong[0].startswith("fsdp2: ")


def store(directory: Path, *results: dict[str, Any]) -> None:
    for found in results:
        (directory / f"results_{found['row']}.json").write_text(json.dumps(found))


def family() -> list[dict[str, Any]]:
    """Two methods, one of them killed, and variants of the first."""
    rows = [result(), result("fsdp2", resume=killed())]
    for loader, keeper in (("files", "none"), ("hpstore", "hpstore"), ("hpstore", "dcp")):
        row = module("rows").Row(method="ddp", storage=loader, checkpointer=keeper)
        found = copy.deepcopy(result(row.name))
        found["storage"] |= {"loader": loader, "checkpointer": keeper}
        rows.append(found)
    return rows


def test_methods_and_storages_are_measured_without_savers() -> None:
    """Case compare: every rate, and "communication", contained the saves of hpstore (DDP 22.4 ms of
    8.5). Every saver has a row of its own, and every row a name that leads back to it."""
    rows = module("rows")
    found = rows.rows_of(["ddp", "gpipe"], ["ddp"])
    assert [row.name for row in found if row.checkpointer == "none"] == [
        "ddp",
        "gpipe",
        "ddp.hpstore-faulty",
        "ddp.memory",
        "ddp.files",
    ]
    assert {row.name: row.checkpointer for row in found if row.checkpointer != "none"} == {
        "ddp.hpstore": "hpstore",
        "ddp.torch_save": "torch_save",
        "ddp.dcp": "dcp",
    }
    assert [rows.row_named(row.name) for row in found] == found
    with pytest.raises(ValueError, match=r"no row is called 'ddp\.none'"):
        rows.row_named("ddp.none")


def test_a_mismatch_is_in_the_report_and_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Green first; then one digest is changed. Without matplotlib the report says so."""
    monkeypatch.setitem(sys.modules, "plots", None)
    analyze = module("analyze")
    store(tmp_path, *family())
    assert analyze.report(tmp_path) == 0
    text = (tmp_path / "performance_report.txt").read_text()
    assert "AGREE: 5 rows" in text
    assert "MISMATCH" not in text
    assert "No plots" in text
    for words in ("from four storages", "with four checkpointers", "resumed by torchrun", "x DDP"):
        assert words in text
    savers = text[text.index("with four checkpointers") :].split("\n\n")[1].splitlines()
    assert {line.split()[0] for line in savers[2:]} == {"none", "hpstore", "dcp"}
    store(tmp_path, result("fsdp2", params_digest="0" * 64))
    assert analyze.report(tmp_path) == 1
    text = (tmp_path / "performance_report.txt").read_text()
    assert "MISMATCH" in text
    assert "AGREE" not in text
    assert json.loads((tmp_path / "verdict.json").read_text())["agree"] is False


def test_what_hooks_have_seen_is_in_results_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the line at the end of a pipeline; a resumed run is compared by its ledger, too."""
    monkeypatch.setitem(sys.modules, "plots", None)
    accounts, analyze = module("accounts"), module("analyze")
    lines = attempt(0, STEPS)
    for rank in lines.values():
        rank[-1]["pipeline"] = driven()
    found = accounts.composed({**FACTS, "row": "gpipe", "title": "GPipe"}, lines, servers=0)
    assert accounts.problems(found) == []
    assert found["pipeline"] == driven()
    store(tmp_path, result(), found)
    assert analyze.report(tmp_path) == 0
    row = next(
        line
        for line in (tmp_path / "performance_report.txt").read_text().splitlines()
        if line.startswith("gpipe ")
    )
    assert row.split() == ["gpipe", "40.0", "33.3", "-", "1.0", "6.0", "2.0", "5"]
    again = accounts.resume_of(found, {**found, "pipeline": driven(9)}, [lines], (4, 1))
    assert again["same_ledger"] is False
    assert accounts.resume_of(found, found, [lines], (4, 1))["same_ledger"] is True


def test_a_failed_row_and_an_empty_folder_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plots", None)
    analyze = module("analyze")
    assert analyze.report(tmp_path) == 1
    store(tmp_path, result())
    assert analyze.report(tmp_path) == 0
    (tmp_path / "failed.json").write_text(json.dumps({"gpipe": "exit code 9"}))
    assert analyze.report(tmp_path) == 1
    assert "FAILED gpipe: exit code 9" in (tmp_path / "performance_report.txt").read_text()


def test_a_results_file_that_lacks_fields_is_refused_by_their_names(tmp_path: Path) -> None:
    found = result()
    del found["summary"]["step_p99"], found["epochs"][1]["throughput"]
    store(tmp_path, found)
    with pytest.raises(ValueError, match=r"summary\.step_p99, epochs\[1\]\.throughput"):
        module("analyze").report(tmp_path)


def test_speed_ups_are_against_ddp() -> None:
    rows = {"ddp": result(), "ps": result("ps")}
    rows["ps"]["summary"] = {**rows["ps"]["summary"], "avg_throughput": 10.0}
    found = module("analyze").speed_ups(rows)
    assert found["ddp"] == 1.0
    assert found["ps"] == pytest.approx(0.25)


@pytest.mark.skipif(not LONG, reason="seconds of drawing: HPSTORE_LONG_TESTS=1")
def test_six_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    store(tmp_path, *family())
    assert module("analyze").report(tmp_path) == 0
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert names == {
        "throughput",
        "training_time",
        "loss_curves",
        "accuracy_curves",
        "communication_overhead",
        "step_time",
    }
