"""examples/compare under torchrun: a method that is killed goes on; the whole matrix on demand."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.integration import ranks
from tests.thorough import LONG

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "compare"
SAMPLES, BATCH, EVERY, KILLED = 128, 32, 3, 5
only_long = pytest.mark.skipif(
    not LONG,
    reason="half a minute and more: HPSTORE_LONG_TESTS=1 runs it",
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def lines(directory: Path, attempt: int) -> dict[int, list[dict[str, Any]]]:
    """By rank."""
    return {
        rank: [json.loads(row) for row in path.read_text().splitlines()]
        for rank, path in enumerate(sorted(directory.glob(f"attempt-{attempt}-*.jsonl")))
    }


def launch(directory: Path, failures: Any) -> None:
    """What torchrun does, with workers forked from here, where all is imported. Own process."""
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    sys.path.insert(0, str(SCRIPTS))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="compare",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.05,
        start_method="fork",
    )
    try:
        importlib.import_module("storages").prepare(directory, SAMPLES, 32, 0)
        importlib.import_module("train")
        importlib.import_module("methods.replicas")
        agent: Any = elastic_launch(config, work)  # Any: its call is untyped
        agent(directory)
    except BaseException as error:  # noqa: BLE001 (handed to the test)
        failures.put(repr(error))


def work(directory: Path) -> None:
    """A rank."""
    sys.argv = [
        "train.py",
        "--rows",
        "ddp.hpstore",
        "--model",
        "tiny",
        "--directory",
        str(directory),
        "--samples",
        str(SAMPLES),
        "--batch-size",
        str(BATCH),
        "--epochs",
        "2",
        "--checkpoint-every",
        str(EVERY),
        "--kills",
        f"{KILLED}:1",
    ]
    importlib.import_module("train").main()


@pytest.mark.timeout(120)
@only_long
def test_ddp_that_is_killed_goes_on_with_the_same_steps_and_no_sample_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of rank 1 after step 5, checkpoints after 3 and 6: steps 4 and 5 are done twice, by
    both attempts from the same samples to the same losses (PROTOCOL 20)."""
    monkeypatch.syspath_prepend(SCRIPTS)
    accounts = importlib.import_module("accounts")
    context = multiprocessing.get_context("forkserver")
    failures = context.SimpleQueue()
    launcher = context.Process(target=launch, args=(tmp_path, failures))
    launcher.start()
    launcher.join(ranks.PATIENCE)
    launcher.kill()
    assert failures.empty(), failures.get()
    assert launcher.exitcode == 0
    directory = tmp_path / "runs" / "ddp.hpstore-0"
    attempts = [lines(directory, number) for number in range(2)]
    assert not accounts.of_kind(attempts[0][1], "end")
    assert {accounts.of_kind(found, "start")[0]["step"] for found in attempts[1].values()} == {3}
    account = accounts.account(attempts, SAMPLES, 2)
    assert (account.lost, account.repeated) == (0, 0)
    for rank in range(2):
        for kind, name in (("took", "ids"), ("step", "loss")):
            first, second = (
                {line["step"]: line[name] for line in accounts.of_kind(found[rank], kind)}
                for found in attempts
            )
            assert {4, 5} <= first.keys() & second.keys()
            assert all(first[step] == second[step] for step in (4, 5)), (rank, kind)
    found = json.loads((directory / "result.json").read_text())
    assert accounts.problems(found) == []
    assert not found["params_digest"].startswith("replicas differ")


def compare(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "run_all.py"), "--quick", "--out", str(out), *more],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@only_long
@pytest.mark.timeout(1600)
def test_all_methods_storages_and_checkpointers_end_with_the_same_bits(tmp_path: Path) -> None:
    """The whole matrix, each method killed and resumed: report, plots, exit code 0."""
    done = compare(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {path.stem.removeprefix("results_") for path in tmp_path.glob("results_*.json")}
    assert {
        "ddp",
        "allreduce",
        "allreduce_bucket",
        "ps",
        "ps_reduce",
        "fsdp2",
        "gpipe",
        "f1b",
    } <= rows
    assert len(rows) == 14
    report = (tmp_path / "performance_report.txt").read_text()
    assert "AGREE: 14 rows end with the same parameters, 14 of them bit by bit" in report
    assert len(list(tmp_path.glob("*.png"))) == 6
    for row in ("gpipe", "f1b"):  # driven by hooks, killed and resumed through them
        found = json.loads((tmp_path / f"results_{row}.json").read_text())
        assert found["pipeline"]["ledger"]["samples"] == found["samples"] * found["epoch_count"]
        assert found["resume"]["same_ledger"]
        assert 0 < found["pipeline"]["idle_share"] < 1
    assert "pipelines, by their hooks" in report


@only_long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a job on CUDA would not fail here")
@pytest.mark.timeout(600)
def test_a_job_that_fails_is_a_failed_row(tmp_path: Path) -> None:
    """It wants a CUDA device, and there is none: the row says so, and the exit code is 1."""
    done = compare(
        tmp_path,
        "--methods",
        "ddp",
        "--vary",
        "",
        "--workers",
        "1",
        "--micro-batches",
        "1",
        "--device",
        "cuda",
        "--no-resume",
    )
    assert done.returncode == 1
    assert "FAILED ddp" in done.stdout
