"""The loader benchmark on tiny data: every contender gives back what was written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.harness.memory_ballast import MemoryBallast
from hpstore.benchmarks.harness.raw_devices import DATA
from hpstore.benchmarks.harness.sessions import Found, Sections, Session, Sessions, progress
from hpstore.benchmarks.loader import (
    loader_bars,
    loader_bench,
    loader_ours,
    loader_raw,
    loader_sessions,
    loader_special,
)
from hpstore.benchmarks.loader.loader_contenders import PEERS, kind_of, not_installed
from hpstore.benchmarks.loader.loader_data import BATCH, Batch, Data
from hpstore.benchmarks.loader.loader_library_peers import LIBRARY_PEERS
from hpstore.benchmarks.loader.loader_limits import MemoryLimit, enter
from hpstore.benchmarks.loader.loader_ours import LOST, OURS, HpstoreLoader, lost_share, share_on
from hpstore.benchmarks.loader.loader_peers import TORCH_PEERS, LoaderPeer, Memmap
from hpstore.benchmarks.loader.loader_raw import Raw
from hpstore.benchmarks.loader.loader_sessions import (
    LoaderSpec,
    epoch_session,
    timed_epoch,
    write_session,
)
from hpstore.benchmarks.suite import size_named
from hpstore.loaders.batching.page_memory import PageMemory, Places
from hpstore.units import KIB, MIB
from tests.thorough import LONG

SIZE = 4 * BATCH * 12 * KIB
LOADER = "hpstore.benchmarks.loader.loader_sessions"


class NoBallast(Sections):
    """Sections of a session that runs in the test itself."""

    def __init__(self) -> None:
        pass

    def warm(self, nbytes: int) -> None:
        pass


@pytest.fixture(params=["A", "B"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> LoaderSpec:
    """Tiny data of both kinds."""
    return LoaderSpec(contender="", directory=tmp_path, data=Data(request.param, SIZE))


def test_full_data_are_200_000_and_20_000_records() -> None:
    """12 KiB each, and 150 KiB in the mean."""
    fixed, ragged = Data("A", size_named("full", "loader")), Data("B", size_named("", "loader"))
    assert (fixed.rows, fixed.nbytes) == (200_000, 200_000 * 12 * KIB)
    assert ragged.rows == 20_000
    assert ragged.nbytes / ragged.rows == pytest.approx(150 * KIB, rel=0.01)


def test_check_sees_a_changed_byte_and_a_wrong_label() -> None:
    """The last row is compared whole, the others by their numbers."""
    data = Data("A", SIZE)
    rows = torch.from_numpy(np.stack([data.record(i) for i in (3, 9, 5)]))
    data.check((rows, torch.tensor([3, 9, 5])), "nobody")
    with pytest.raises(RuntimeError, match="nobody returned other values"):
        data.check((rows, torch.tensor([3, 8, 5])), "nobody")
    rows[-1, 5000] += 1
    with pytest.raises(RuntimeError, match="other values"):
        data.check((rows, torch.tensor([3, 9, 5])), "nobody")


class Wrong(Memmap):
    """Loses or repeats samples."""

    drop: tuple[int, ...] = ()

    def epoch(self, number: int) -> Iterator[Batch]:
        values = torch.from_numpy(np.stack(list(self.data.records())))
        labels = torch.arange(len(values))
        kept = torch.tensor([i for i in range(len(values)) if i not in self.drop])
        yield values[kept], labels[kept]


def test_epoch_with_a_lost_sample_is_an_error_and_no_figure(tmp_path: Path) -> None:
    """Complete epochs pass."""
    data = Data("A", SIZE)
    spec = LoaderSpec(contender="", directory=tmp_path, data=data)
    who = Wrong(tmp_path, data)
    assert timed_epoch(who, 0, spec)["batches"] == 1
    who.drop = (17,)
    with pytest.raises(RuntimeError, match="samples, not 1024 once each"):
        timed_epoch(who, 0, spec)


def test_epoch_that_takes_too_long_is_cut_and_says_so(tmp_path: Path) -> None:
    """Its rate counts what it read."""
    data = Data("A", SIZE)
    spec = LoaderSpec(contender="", directory=tmp_path, data=data, epoch_seconds=0.0)
    who = Wrong(tmp_path, data)
    who.drop = (1, 2)
    assert timed_epoch(who, 0, spec)["cut"]


def run(session: Session, spec: LoaderSpec) -> Found:
    """In a process of its own, as the benchmark does it, what may leave processes behind."""
    kind = kind_of(spec.contender)
    if kind in LIBRARY_PEERS or getattr(kind, "workers", False):
        return Sessions(MemoryBallast(0), preload=LOADER).run(session, spec)
    return session(NoBallast(), spec)


@pytest.mark.parametrize("name", [*PEERS, *(kind.name for kind in OURS)])
def test_every_contender_reads_each_sample_once_an_epoch(spec: LoaderSpec, name: str) -> None:
    """Bytes and labels are checked by the session; two epochs."""
    if name in PEERS and (why := not_installed(name)):
        pytest.skip(why)
    workers = getattr(kind_of(name), "workers", False)
    if workers and (name, spec.data.kind) != ("torch files 2 workers", "A") and not LONG:
        pytest.skip("15 s of starting processes: HPSTORE_LONG_TESTS=1 runs it")
    spec = replace(spec, contender=name, cold=False)
    run(write_session, spec)
    found = run(epoch_session, spec)
    assert found["rate"] > 0
    assert found["batches"] == found["first_epoch"]["batches"] >= spec.data.rows // BATCH
    assert not found["cut"]


def test_a_warm_epoch_begins_with_all_pages_in_memory(
    spec: LoaderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers find all of their files in the page cache; here filling outlasts the first epoch."""
    spec = replace(spec, contender=HpstoreLoader.name, cold=False)
    write_session(NoBallast(), spec)
    over = threading.Event()
    read, epoch, seen = PageMemory.read, loader_sessions.timed_epoch, list[int]()

    def late(slab: PageMemory, places: Places) -> None:
        over.wait(30)
        read(slab, places)

    def watched(who: LoaderPeer, number: int, spec: LoaderSpec) -> Found:
        assert isinstance(who, HpstoreLoader)
        found = epoch(who, number, spec)
        seen.append(who.stats()["pages_in_memory"])
        threading.Timer(0.2, over.set).start()
        return found

    monkeypatch.setattr(PageMemory, "read", late)
    monkeypatch.setattr(loader_sessions, "timed_epoch", watched)
    found = epoch_session(NoBallast(), spec)
    assert found["settle_seconds"] >= 0.1
    assert seen == [0, *[found["stats"]["pages_to_keep"]] * found["epochs"]]
    assert seen[1] > 0


def test_pages_that_never_come_are_an_error_and_no_figure(spec: LoaderSpec) -> None:
    """The session fails; it does not measure something else."""
    who = HpstoreLoader(spec.directory / HpstoreLoader.store, spec.data)
    who.directory.mkdir()
    who.write()
    stats = {"pages_in_memory": 3, "pages_to_keep": 4}
    who.stats = lambda: stats  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="3 of 4 pages"):
        who.in_memory(0.05)
    stats["pages_in_memory"] = 4
    assert who.in_memory(0.05) < 0.05


@pytest.mark.parametrize("lost", [1, 2])
def test_degraded_sessions_read_without_devices(
    spec: LoaderSpec, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are whole; what the missing devices hold of the data columns is known."""
    monkeypatch.setattr(loader_ours, "_shard_bytes", lambda _: MIB)
    spec = replace(spec, contender=HpstoreLoader.name, lost=lost)
    write_session(NoBallast(), spec)
    who = spec.peer()
    assert isinstance(who, HpstoreLoader)
    states = [device.state for device in who.open().pool.status().devices]
    assert states.count("missing") == lost
    assert timed_epoch(who, 0, spec)["batches"] == len(who.open()) // BATCH
    who.close()
    places = sorted(who.directory.glob("pool/d[0-9]"))
    shares = {place.name: share_on(places, [place], DATA) for place in places}
    # that of a device which was slow for a moment may be 0: it has the parity then
    assert sum(shares.values()) == pytest.approx(1)
    gone = sum(shares[name] for name in LOST[lost])
    assert lost_share(who.directory, lost) == pytest.approx(gone)
    assert lost_share(who.directory, 0) == 0


def test_every_shuffle_is_another_one(tmp_path: Path) -> None:
    """No peer reads the file in order, and two epochs differ."""
    data = Data("A", SIZE)
    for kind in (*TORCH_PEERS, *OURS):
        directory = tmp_path / kind.store
        if not directory.exists():
            directory.mkdir()
            kind(directory, data).write()
        if getattr(kind, "workers", False):
            continue  # the same sampler as without
        who = kind(directory, data)
        orders = [torch.cat([labels for _, labels in who.epoch(e)]) for e in (0, 1)]
        assert not torch.equal(orders[0], orders[1])
        assert not torch.equal(orders[0], torch.arange(data.rows))
        who.close()


def test_raw_figures_are_rates_of_the_same_bytes(
    spec: LoaderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fio is used where it is there, and its absence is explained."""
    raw = Raw(spec.directory / "flat" / "flat", spec.data)
    raw.write()
    assert raw.sequential() > 0
    assert raw.random() > 0
    assert raw.copy() > 0
    hung = spec.directory / "fio"
    hung.write_text("#!/bin/sh\nexec sleep 60\n")
    hung.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{spec.directory}:{os.environ['PATH']}")
        patch.setattr(loader_raw, "FIO_SECONDS", 0.2)
        assert raw.fio() == (None, "fio did not end within 0.2 s")
    monkeypatch.setenv("PATH", "")
    assert raw.fio() == (None, "fio is not installed: the figure of 32 threads stands in")


def test_memory_limit_holds_or_says_why_not() -> None:
    """A process in the group is counted there; the group goes when it is closed."""
    with closing(MemoryLimit(64 * MIB)) as limit:
        if limit.problem:
            pytest.skip(limit.problem)
        path = limit.path
        assert path is not None
        if not (child := os.fork()):
            enter(path)
            inside = str(os.getpid()) in (path / "cgroup.procs").read_text().split()
            os._exit(0 if inside else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert not path.exists()


SMALL = {"EPOCHS": 3, "WARM_EPOCHS": 1, "GROWTH_BATCHES": 4, "BOUNDARIES": 1, "READY": 2}


@pytest.mark.skipif(not LONG, reason="half a minute: HPSTORE_LONG_TESTS=1")
def test_figures_without_peers_have_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session gives a ratio for every mode, or says why not."""
    for constant, value in SMALL.items():
        monkeypatch.setattr(loader_special, constant, value)
    spec = LoaderSpec(contender=HpstoreLoader.name, directory=tmp_path, data=Data("A", SIZE))
    write_session(NoBallast(), spec)
    found = {name: run(NoBallast(), spec) for name, run in loader_special.SPECIAL.items()}
    rows = loader_bars.special_verdicts(found)
    for mode in loader_special.MODES:
        for figure in (
            "first_batch_ms, {}, 99 %",
            "boundary_gap_in_batches, {}",
            "ready_next_us, {}",
            "growth_MiB_50_epochs, {}",
            "memory_MiB_50_epochs, {}",
        ):
            assert isinstance(rows[figure.format(mode)]["met"], bool)
    assert rows["names_in_shared_memory_after_kill"]["median"] == 0


def test_special_figures_of_few_moments_are_medians_of_several_processes(spec: LoaderSpec) -> None:
    """One of them that the machine held up decides nothing."""
    asked: list[Session] = []

    class Held(Sessions):
        def __init__(self) -> None:
            pass

        def run(self, session: Session, spec: object) -> Found:
            asked.append(session)
            slow = 9.0 if len(asked) in (1, 4) else 0.1
            named = {
                loader_special.SPECIAL["first batch"]: "start",
                loader_special.SPECIAL["epoch boundary"]: "gaps_in_batches",
            }
            return {"hpstore": {named[session]: [slow]}} if session in named else {}

    with progress(1) as bar:
        runner = loader_bench.LoaderRunner(spec, Held(), bar, [], ["special"])
        runner.special()
    rows = loader_bars.special_verdicts(runner.found.special)
    assert [row["median"] for row in rows.values()] == [100.0, 0.1]
    assert [row["highest"] for row in rows.values()] == [9000.0, 9.0]
    assert all(row["met"] for row in rows.values())
    assert len(asked) == len(loader_special.SPECIAL) + 4


def test_first_batches_are_joined_by_mode_and_position() -> None:
    """All seconds of each."""
    sessions = [{"hpstore": {"start": [seconds]}} for seconds in (0.1, 9.0, 0.12)]
    found = {"first batch": loader_special.joined(sessions)}
    (row,) = loader_bars.special_verdicts(found).values()
    assert (row["median"], row["met"]) == (120.0, True)


def test_too_few_batches_to_wait_for_are_no_figure_and_no_error(tmp_path: Path) -> None:
    """Of large records `--size small` makes less than three."""
    spec = LoaderSpec(contender=HpstoreLoader.name, directory=tmp_path, data=Data("B", SIZE))
    assert spec.data.rows < 3 * BATCH
    write_session(NoBallast(), spec)
    found = loader_special.ready_session(NoBallast(), spec)
    rows = loader_bars.special_verdicts({"ready batch": found})
    assert len(rows) == len(loader_special.MODES)
    assert all("batches" in row["skipped"] for row in rows.values())


def test_a_state_is_timed_at_a_billion_samples(tmp_path: Path) -> None:
    """And over the data set; each saved state, the first too, against 50 us."""
    spec = LoaderSpec(contender=HpstoreLoader.name, directory=tmp_path, data=Data("B", SIZE))
    write_session(NoBallast(), spec)
    found = loader_special.state_session(NoBallast(), spec)
    assert len(found["1e+09 samples"]["seconds"]) == loader_special.STATES
    rows = loader_bars.special_verdicts({"state": {"one": {"seconds": [40e-6, 45e-6, 70e-6]}}})
    assert rows["state_dict_us, one"]["median"] == pytest.approx(45.0)
    assert rows["state_dict_us, one"]["met"] is True
    assert len(loader_bars.special_verdicts({"state": found})) == 2


@pytest.mark.parametrize("taken", [39, 41])
def test_memory_is_held_against_what_the_loader_may_take(taken: int) -> None:
    """Beside growth: flat, but too much, is no success."""
    grown = {"growth_bytes": 0, "taken_bytes": taken * MIB, "budget_bytes": 40 * MIB}
    rows = loader_bars.special_verdicts({"growth": {"hpstore": grown}})
    assert rows["growth_MiB_50_epochs, hpstore"]["met"] is True
    assert rows["memory_MiB_50_epochs, hpstore"]["met"] is (taken < 40)


@pytest.mark.skipif(not LONG, reason="half a minute: HPSTORE_LONG_TESTS=1")
def test_run_reports_both_data_sets_with_verdicts(tmp_path: Path) -> None:
    """One repetition; what was not measured says so, and nothing is left behind."""
    options = Options(
        directory=tmp_path, size_bytes=SIZE, repeats=1, peers="", cases="warm,limited"
    )
    found = json.loads(json.dumps(loader_bench.bench_loader(options)))
    assert set(found) == {"A", "B"}
    assert "not three times larger" in found["A"]["failed"]["limited"]
    for kind in found.values():
        assert isinstance(kind["ratios"]["warm_to_best_peer"]["skipped"], str)
        assert set(kind["contenders"]) == {HpstoreLoader.name}
        assert kind["raw"]["random_reads"]["median"] > 0
    assert list(tmp_path.iterdir()) == []
