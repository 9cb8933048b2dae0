"""The cache benchmark on little data: ratios, verdicts, peers out of process, cut runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest

from hpstore.benchmarks.cache.cache_bars import BARS, CAPACITIES, share_of_min, to_best_peer
from hpstore.benchmarks.cache.cache_bench import bench_cache
from hpstore.benchmarks.cache.cache_cost import measure_cost
from hpstore.benchmarks.cache.cache_families import measure_families
from hpstore.benchmarks.cache.cache_peers import PACKAGES, SCRIPT, PeerRun, missing, packages_named
from hpstore.benchmarks.cache.cache_traces import TRACES, trace_named
from hpstore.benchmarks.cache.trace_families import FAMILIES, HELD_OUT, family_named
from hpstore.benchmarks.harness.measure import Options, unmet
from hpstore.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def options(cases: str, **more: object) -> Options:
    """Quick ones without peers."""
    facts: dict[str, object] = {"peers": "none", "quick": True} | more
    return Options(directory=None, size_bytes=0, repeats=1, cases=cases, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TRACES)
def test_every_workload_asks_for_blocks_that_there_are_and_tells_its_epochs(name: str) -> None:
    """Another seed gives another trace, the same one the same."""
    trace = trace_named(name, 1, 400)
    assert trace.requests.min() >= 0
    assert trace.requests.max() < trace.blocks
    assert 0 < trace.counted < len(trace.requests)
    assert all(starts[0] < len(trace.requests) for starts in trace.starts)
    assert np.array_equal(trace.requests, trace_named(name, 1, 400).requests)
    assert not np.array_equal(trace.requests, trace_named(name, 2, 400).requests)
    assert name in BARS


def test_results_are_handed_on_after_each_workload_with_all_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut run leaves what it has, pictures too; MIN is beaten by nothing."""
    monkeypatch.setattr("hpstore.benchmarks.cache.cache_bench.QUICK_BLOCKS", 800)
    monkeypatch.setattr("hpstore.benchmarks.cache.cache_traces.EPOCHS", 4)
    reports: list[list[str]] = []

    def keep(results: dict[str, object]) -> None:
        found = results["workloads"]
        assert isinstance(found, dict)
        reports.append(list(found))

    results = bench_cache(options("uniform,sizes", keep=keep, plots=tmp_path))
    assert reports == [["uniform"], ["uniform", "sizes"]]
    json.dumps(results)
    workloads = results["workloads"]
    assert isinstance(workloads, dict)
    assert list(workloads["uniform"]) == [f"{100 * share:g}" for share in CAPACITIES]
    row = workloads["uniform"]["20"]
    assert row["known to MIN"]["met"]
    for of_one in workloads["uniform"].values():
        found = {who: ratios["hit_ratio"] for who, ratios in of_one["hit_ratios"].items()}
        assert max(found, key=lambda who: (found[who], who == "MIN")) == "MIN"
    assert "skipped" in row["unknown to best peer"]
    assert "MIN" not in workloads["sizes"]["10"]["hit_ratios"]
    failed = results["failed"]
    assert isinstance(failed, dict)
    assert (tmp_path / "cache-uniform.png").is_file() or "plots" in failed


def test_a_share_below_its_bar_and_a_better_peer_are_named() -> None:
    """By the path of the figure."""
    assert share_of_min("uniform", "unknown", 0, 0.0979, 0.1)["met"] is False
    assert share_of_min("block32", "unknown", 1, 0.2, 0.5)["met"] is True
    peers = {"LRU": {"hit_ratio": 0.1}, "ARC": {"hit_ratio": 0.2}}
    found = to_best_peer(0.194, peers, "hit_ratio")
    assert (found["best"], found["points"], found["met"]) == ("ARC", -0.6, False)
    assert unmet({"a": {"b": found}, "c": {"us_met": False, "met": True}}) == [
        "a/b/met",
        "c/us_met",
    ]


def test_peers_play_the_trace_in_a_process_of_their_own() -> None:
    """LRU against LRU written here; a package that is not there is a line with its reason."""
    trace = trace_named("zipf0.9", 3, 300)
    absent = missing(["libcachesim"])
    run = PeerRun(trace, [30], ["libcachesim", "no_such_package"])
    found, failed = run.collect()
    assert "no_such_package" in failed
    if absent:
        assert "libcachesim" in failed
        return
    recent: dict[int, None] = {}
    hits = np.zeros(len(trace.requests), np.bool_)
    for at, block in enumerate(trace.requests.tolist()):
        hits[at] = block in recent
        recent.pop(block, None)
        recent[block] = None
        if len(recent) > 30:
            del recent[next(iter(recent))]
    assert found[30]["LRU"]["hit_ratio"] == pytest.approx(float(hits[trace.counted :].mean()))


def test_no_module_of_the_package_imports_a_peer() -> None:
    """Only the script does, by name, and nobody imports the script."""
    for path in (ROOT / "hpstore").rglob("*.py"):
        text = path.read_text()
        if not any(name in text for name in (*PACKAGES, "scripts")):
            continue
        tree = ast.parse(text)
        names = [
            n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names
        ]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not any(name.split(".")[0] in PACKAGES for name in names), path
        assert not any("benchmarks.scripts" in name for name in names), path
    assert SCRIPT.is_file()


def test_costs_have_bars_and_the_index_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes a block do not depend on the machine."""
    monkeypatch.setattr("hpstore.benchmarks.cache.cache_cost.BATCHES", 20)
    for limit in ("WHOLE", "SAMPLE"):
        monkeypatch.setattr(f"hpstore.loaders.policy.expert_choice.{limit}", 256)
    said: list[str] = []
    kept: list[dict[str, object]] = []
    found = measure_cost(
        blocks=50_000, repeats=1, keep=lambda so_far: kept.append(dict(so_far)), say=said.append
    )
    assert [len(so_far) for so_far in kept] == [3, 4, 5, 6]
    assert said == list(found)[2:]
    names = ["unknown, weighted", "unknown, even", "unknown, drawn ahead", "known, shuffled"]
    assert list(kept[-1])[2:] == names
    for name in names:
        row = found[name]
        assert isinstance(row, dict)
        assert row["index_met"]
        assert row["us_a_sample"] > 0


def test_unknown_cases_and_peers_are_refused() -> None:
    """With the names that there are."""
    with pytest.raises(ConfigError, match="no case is called 'nothing'; there are uniform"):
        bench_cache(options("nothing"))
    with pytest.raises(ConfigError, match="no peer is called 'nobody'; there are libcachesim"):
        packages_named("nobody")
    assert packages_named("none") == []


def test_families_are_played_with_the_bars_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, the worst of them, means; a difference is ours less the best plain one's."""
    monkeypatch.setattr("hpstore.benchmarks.cache.trace_families.REQUESTS", 4000)
    monkeypatch.setattr("hpstore.benchmarks.cache.cache_families.SHARES", (0.2,))
    kept: list[dict[str, object]] = []
    found = measure_families(batch=64, quick=True, keep=lambda so_far: kept.append(dict(so_far)))
    json.dumps(found)
    rows = found["rows"]
    assert len(rows) == len(kept) == -(-len(FAMILIES | HELD_OUT) // 5)
    for row in rows:
        ratios = dict(row["hit_ratios"])
        ours = ratios.pop("hpstore")
        assert row["points"] == pytest.approx(100 * (ours - max(ratios.values())), abs=0.02)
    worst = min(row["points"] for row in rows)
    assert found["worst row"]["points"] == worst
    assert found["worst row"]["met"] == (worst >= -0.5)
    assert found["spread by seed"]["met"]


@pytest.mark.parametrize("name", FAMILIES | HELD_OUT)
def test_a_family_is_the_same_for_a_seed_and_another_for_another(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are numbered from 0, each there at least once."""
    monkeypatch.setattr("hpstore.benchmarks.cache.trace_families.REQUESTS", 20_000)
    requests, blocks = family_named(name, 1)
    assert np.array_equal(np.unique(requests), np.arange(blocks))
    assert np.array_equal(requests, family_named(name, 1)[0])
    assert not np.array_equal(requests[:500], family_named(name, 2)[0][:500]) or name == "one loop"
