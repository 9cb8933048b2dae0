"""Whose turn it is in the benchmark of the loader, who is left out, and the bars."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from hpstore.benchmarks.harness.sessions import Found, Session, SessionFailed, Sessions, progress
from hpstore.benchmarks.loader import loader_bars, loader_bench
from hpstore.benchmarks.loader.loader_contenders import (
    GROUPS,
    PEERS,
    kind_of,
    not_installed,
    peers_named,
)
from hpstore.benchmarks.loader.loader_data import BATCH, Data
from hpstore.benchmarks.loader.loader_ours import OURS, HpstoreLoader
from hpstore.benchmarks.loader.loader_peers import TORCH_PEERS, LoaderPeer, Memmap
from hpstore.benchmarks.loader.loader_sessions import LoaderSpec
from hpstore.errors import ConfigError
from hpstore.units import KIB

SIZE = 4 * BATCH * 12 * KIB


@pytest.fixture(params=["A", "B"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> LoaderSpec:
    """Tiny data of both kinds."""
    return LoaderSpec(contender="", directory=tmp_path, data=Data(request.param, SIZE))


class Scripted(Sessions):
    """Sessions of which those of one contender fail; others do not finish, or are far behind."""

    def __init__(self, fails: str, slow: str = "", far: str = "") -> None:
        self._fails, self._slow, self._far = fails, slow, far
        self.asked: list[str] = []

    def run(self, session: Session, spec: object) -> Found:
        assert isinstance(spec, LoaderSpec)
        self.asked.append(spec.contender)
        if spec.contender == self._fails:
            raise SessionFailed("OSError: no space\nTraceback ...")
        rate = 9.0 if spec.contender == self._far else 100.0
        return {"cut": spec.contender == self._slow, "rate": rate}


def test_who_does_not_finish_or_is_far_behind_is_measured_once(spec: LoaderSpec) -> None:
    """Others in every repetition; ratios are of the repetitions that both have."""
    with progress(1) as bar:
        sessions = Scripted("", slow="torch files", far="torch memmap getitems")
        peers = ["torch files", "torch memmap", "torch memmap getitems"]
        runner = loader_bench.LoaderRunner(spec, sessions, bar, peers, ["cold"])
        for _ in range(3):
            runner._case("cold", spec)
    assert sessions.asked.count("torch files") == 1
    assert sessions.asked.count("torch memmap getitems") == 1
    assert sessions.asked.count("torch memmap") == 3
    found = defaultdict(
        list,
        {
            "hpstore": [session(10.0), session(99.0)],
            "torch files": [session(5.0, cut=True)],
        },
    )
    row = loader_bars.to_one(found, "hpstore", "torch files", 1.5)
    assert (row["median"], row["cut"], row["met"]) == (2.0, True, True)


def test_another_contender_comes_first_in_each_repetition(spec: LoaderSpec) -> None:
    """Behind the raw figures, which empty the page cache; neighbours stay neighbours."""
    ours, memmap, files = "hpstore", "torch memmap", "torch files"
    with progress(1) as bar:
        sessions = Scripted("nobody")
        runner = loader_bench.LoaderRunner(spec, sessions, bar, [memmap, files], ["warm"])
        for _ in range(4):
            runner.repetition()
    raw = ""
    assert sessions.asked == [
        raw,
        ours,
        memmap,
        files,
        raw,
        files,
        ours,
        memmap,
        raw,
        memmap,
        files,
        ours,
        raw,
        ours,
        memmap,
        files,
    ]


def test_turns_are_of_those_who_are_still_measured(spec: LoaderSpec) -> None:
    """One that is far behind is not the first one of a repetition that it has no part in."""
    with progress(1) as bar:
        sessions = Scripted("nobody", far="torch files")
        runner = loader_bench.LoaderRunner(
            spec, sessions, bar, ["torch memmap", "torch files"], ["warm"]
        )
        for _ in range(3):
            runner.repetition()
    assert sessions.asked[4:] == ["", "torch memmap", "hpstore", "", "hpstore", "torch memmap"]


def test_peer_that_fails_is_left_out_with_its_reason_and_ours_ends_the_run(
    spec: LoaderSpec,
) -> None:
    """The others go on."""
    with progress(1) as bar:
        sessions = Scripted("litdata")
        runner = loader_bench.LoaderRunner(spec, sessions, bar, ["torch memmap"], ["cold"])
        runner._peers.append("litdata")  # whether it is installed here or not
        for _ in range(2):
            runner._case("cold", spec)
        assert runner.found.failed == {"litdata, cold": "OSError: no space"}
        assert sessions.asked.count("litdata") == 1
        assert len(runner.found.cases["cold"]["torch memmap"]) == 2
        with pytest.raises(SessionFailed):
            loader_bench.LoaderRunner(spec, Scripted(HpstoreLoader.name), bar, [], ["cold"])._case(
                "cold", spec
            )


def test_unknown_names_are_named() -> None:
    """Peers, cases, devices."""
    with pytest.raises(ConfigError, match=r"no peer is called 'tourch'.*torch"):
        peers_named("tourch")
    with pytest.raises(ConfigError, match=r"no case is called 'hot'.*cold"):
        loader_bench.cases_named("hot")
    with pytest.raises(ConfigError, match="'warp' is not here"):
        loader_bench.check_device("warp")


def test_groups_name_their_peers_and_absent_ones_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch` stands for all ways to use torch."""
    assert set(peers_named("torch")) == {kind.name for kind in TORCH_PEERS}
    assert "litdata" in GROUPS
    monkeypatch.setattr(Memmap, "package", "no-such-package")
    assert not_installed(Memmap.name).endswith("pip install no-such-package")


def session(rate: float, **facts: object) -> Found:
    """What an epoch session found."""
    return {"rate": rate, "steady_rate": rate, "cut": False, "main_us": 1.0, **facts}


def test_bars_of_warm_data_compare_with_the_peer_they_name() -> None:
    """1.2 times the memmap by batch, 4 times two workers; the best peer is found."""
    found = defaultdict(
        list,
        {
            "hpstore": [session(260.0)],
            "torch memmap getitems": [session(200.0)],
            "torch memmap 2 workers": [session(80.0)],
        },
    )
    rows = loader_bars.warm_verdicts("A", found)
    assert rows["warm_to_memmap_getitems"]["median"] == 1.3
    assert rows["warm_to_memmap_getitems"]["met"]
    assert not rows["warm_to_memmap_2_workers"]["met"]
    assert rows["warm_to_best_peer"]["against"] == "torch memmap getitems"
    assert "skipped" in rows["warm_to_memmap_getitems_2_workers"]
    assert rows["main_thread_us_a_sample"]["met"]


def test_degraded_random_reads_are_held_against_arithmetic() -> None:
    """Half of healthy is all that is allowed when one in three units is lost: 0.45 is 0.9 of it."""
    names = (loader_bars.RECORDS, loader_bars.WINDOWS)
    found = {
        lost: {"cold": {name: [session(rate)] for name in names}}
        for lost, rate in ((0, 100.0), (2, 46.0))
    }
    rows = loader_bars.degraded_verdicts(found, {2: 0.5})
    assert not any(title.startswith("degraded_0") for title in rows)
    assert rows["degraded_2_global_to_what_arithmetic_allows"]["met"]
    assert not rows["degraded_2_window_to_healthy"]["met"]
    assert "skipped" in rows["degraded_2_in_memory_to_healthy"]


def test_every_contender_says_how_it_is_set_up() -> None:
    """The report shows it beside the figures."""
    for name in (*PEERS, *(kind.name for kind in OURS)):
        kind: type[LoaderPeer] = kind_of(name)
        assert len(kind.configuration) > 20
