"""The checkpoint benchmark on a tiny state: peers give back what was saved, ratios are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hpstore.benchmarks.checkpoint import (
    checkpoint_background,
    checkpoint_bench,
    checkpoint_compression,
    checkpoint_ranks,
    checkpoint_shapes,
    checkpoint_special,
)
from hpstore.benchmarks.checkpoint.checkpoint_bars import floor_verdicts, special_verdicts, to_best
from hpstore.benchmarks.checkpoint.checkpoint_contenders import PEERS, not_installed, peers_named
from hpstore.benchmarks.checkpoint.checkpoint_library_peers import LIBRARY_PEERS
from hpstore.benchmarks.checkpoint.checkpoint_ours import Copy, HpstoreSaver
from hpstore.benchmarks.checkpoint.checkpoint_peers import SaverPeer
from hpstore.benchmarks.checkpoint.checkpoint_sessions import (
    CheckpointSpec,
    contender,
    load_session,
    save_session,
)
from hpstore.benchmarks.checkpoint.checkpoint_state import (
    FULL_BYTES,
    SharedState,
    TensorContents,
    empty_state,
    leaves,
    map_state,
    shapes,
    state_bytes,
)
from hpstore.benchmarks.harness.bench_verdicts import verdict
from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.harness.memory_ballast import MemoryBallast, ballast_bytes
from hpstore.benchmarks.harness.memory_use import drop_cache
from hpstore.benchmarks.harness.sessions import (
    Found,
    Sections,
    Session,
    SessionFailed,
    Sessions,
    progress,
)
from hpstore.checkpoint.format.segment_codecs import CODECS
from hpstore.errors import ConfigError
from hpstore.units import GIB, MIB
from tests.thorough import LONG

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
SIZE = 2 * MIB


class NoBallast(Sections):
    """Sections of a session that runs in the test itself."""

    def __init__(self) -> None:
        pass

    def warm(self, nbytes: int) -> None:
        pass


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[CheckpointSpec]:
    """A tiny state, filled, and what it is loaded into."""
    state, target = SharedState("state", SIZE), SharedState("target", SIZE)
    TensorContents().fill(map_state(state.path, SIZE), 0)
    yield CheckpointSpec(
        contender="", directory=tmp_path, size_bytes=SIZE, state=state.path, target=target.path
    )
    state.close()
    target.close()


def test_full_state_is_440_tensors_and_one_and_a_half_gib() -> None:
    """Shapes alone say so: 110 parameters with a weight, two moments and a step."""
    wanted = shapes(FULL_BYTES)
    words = sum(int(torch.Size(shape).numel()) for shape in wanted.values())
    assert 4 * len(wanted) == 440
    assert 10 * words + 4 * len(wanted) == pytest.approx(1.5 * GIB, rel=0.01)


def test_small_state_keeps_all_tensors_and_scales() -> None:
    """440 tensors at any size, near the bytes asked for."""
    state = empty_state(16 * MIB)
    assert len(list(leaves(state))) == 440
    assert state_bytes(state) == pytest.approx(16 * MIB, rel=0.1)


def test_content_check_sees_one_changed_number() -> None:
    """A single element, or a step of another save, is noticed."""
    state, content = empty_state(SIZE), TensorContents()
    content.fill(state, 3)
    content.check(state, 3, "nobody")
    with pytest.raises(RuntimeError, match="other values"):
        content.check(state, 4, "nobody")
    state["model"]["head.weight"][-1, -1] += 1
    with pytest.raises(RuntimeError, match="other values"):
        content.check(state, 3, "nobody")


def test_shared_state_is_seen_by_every_mapping(spec: CheckpointSpec) -> None:
    """What one mapping writes, another reads; tensors have storages of their own."""
    one, other = map_state(spec.state, SIZE), map_state(spec.state, SIZE)
    TensorContents().fill(one, 9)
    TensorContents().check(other, 9, "the other mapping")
    sizes = [tensor.untyped_storage().nbytes() for _, tensor in leaves(one)]
    assert sizes == [tensor.nbytes for _, tensor in leaves(one)]


def run(session: Session, spec: CheckpointSpec) -> Found:
    """As the benchmark does, in a process of its own, what may leave processes or groups behind."""
    if PEERS.get(spec.contender) in LIBRARY_PEERS:
        return Sessions(MemoryBallast(0)).run(session, spec)
    return session(NoBallast(), spec)


@pytest.mark.parametrize("name", [*PEERS, HpstoreSaver.name])
def test_every_contender_gives_back_what_it_saved(spec: CheckpointSpec, name: str) -> None:
    """Sessions check every byte after each load, in the process that saved and from new."""
    if name != HpstoreSaver.name and (why := not_installed(name)):
        pytest.skip(why)
    spec = replace(spec, contender=name)
    saved, loaded = run(save_session, spec), run(load_session, spec)
    assert saved["load_warm_seconds"].keys() == loaded["load_cold_seconds"].keys()
    assert saved["steady"]["durable_seconds"] >= saved["steady"]["blocked_seconds"] > 0
    assert ("load_degraded_seconds" in loaded) == (name == HpstoreSaver.name)


def _loads_another_state(_: Sections, spec: CheckpointSpec) -> Found:
    """Saves zeros, then loads as if it had been the usual state."""
    who, other = contender(spec), empty_state(SIZE)
    who.prepare(other)
    who.save(other, who.last_step)
    who.close()
    return load_session(NoBallast(), spec)


@pytest.mark.parametrize("name", [name for name in PEERS if "loads" in vars(PEERS[name])])
def test_a_load_of_other_values_is_an_error(spec: CheckpointSpec, name: str) -> None:
    """A contender whose file holds another state does not get a figure."""
    if why := not_installed(name):
        pytest.skip(why)
    if PEERS[name] in LIBRARY_PEERS and not LONG:
        pytest.skip("10 s of starting a library: HPSTORE_LONG_TESTS=1 runs it")
    with pytest.raises((RuntimeError, SessionFailed), match="other values"):
        run(_loads_another_state, replace(spec, contender=name))


def test_degraded_load_lacks_m_devices_with_data(
    spec: CheckpointSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the load session exactly two directories are away, and the load before them worked."""
    spec = replace(spec, contender=HpstoreSaver.name)
    save_session(NoBallast(), spec)
    load_session(NoBallast(), spec)
    assert len(list((spec.directory / HpstoreSaver.name).glob("gone-d*"))) == 2
    assert len(list((spec.directory / HpstoreSaver.name).glob("d[0-9]"))) == 4


def test_copy_ends_with_equal_bytes(spec: CheckpointSpec) -> None:
    """The reference copy moves every tensor."""
    state = map_state(spec.state, SIZE)
    copy = Copy(state)
    assert copy.seconds(1) > 0
    assert all(torch.equal(place, tensor) for place, tensor in copy._pairs)


SMALL: dict[ModuleType, dict[str, Any]] = {
    checkpoint_special: {
        "SAMPLES": 1,
        "PACES": {"fast": (1, 1.0), "gentle": (1, 0.25)},
        "MANY_TENSORS": 50,
        "GROWTH_SAVES": 3,
        "GROWTH_WARM": 2,
        "_STEP_SECONDS": 0.001,
        "_QUIET_STEPS": 2,
    },
    checkpoint_background: {"_SAMPLES": 1, "_WARM_SAVES": 0, "_QUIET_STEPS": 2},
    checkpoint_shapes: {"SAMPLES": 1, "WARM_SAVES": 0, "STAND_IN_STEPS": 2},
    checkpoint_ranks: {"SAMPLES": 1, "WARM_SAVES": 0, "WORLDS": (2,), "LOADING_WORLDS": (2, 1)},
}


@pytest.mark.parametrize("name", [name for name in checkpoint_bench.SPECIAL if name != "overlap"])
def test_figures_without_peers_are_found_or_skipped_with_a_reason(
    spec: CheckpointSpec, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session runs on small numbers and gives a ratio; a skip says why."""
    for module, constants in SMALL.items():
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
    found = checkpoint_bench.SPECIAL[name](NoBallast(), replace(spec, contender=name))
    rows = special_verdicts(defaultdict(list, {name: [found]}))
    assert [row for row in rows.values() if "median" in row] or found["skipped"]


def test_run_names_every_ratio_with_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One repetition in processes of their own; what cannot be had says why."""
    monkeypatch.setattr(checkpoint_bench, "SPECIAL", {"slice": checkpoint_special.slice_session})
    options = Options(directory=tmp_path, size_bytes=SIZE, repeats=1, peers="safetensors")
    found = json.loads(json.dumps(checkpoint_bench.bench_checkpoint(options)))
    assert set(found["contenders"]) == {"hpstore", "safetensors"}
    assert found["failed"] == {}
    ratios = found["ratios"]
    assert {
        "stall_to_copy",
        "stall_to_best_peer",
        "durable_steady_to_best_peer",
        "durable_first_to_best_peer",
        "load_cold_to_best_peer",
        "load_warm",
        "load_degraded_to_healthy",
        "memory_to_state_and_64MiB",
        "slice_bytes_to_4.2_MiB",
        "first_stall_to_steady_stall",
        "durable_steady_to_raw_overwrite",
    } <= set(ratios)
    for row in (row for row in ratios.values() if "bar" in row):
        assert isinstance(row["met"], bool)
    assert {"durable_steady_floor", "durable_first_floor", "load_cold_floor"} <= set(ratios)
    assert list(tmp_path.iterdir()) == []


class Scripted(Sessions):
    """Sessions of which those of one contender fail."""

    def __init__(self, fails: str) -> None:
        self._fails = fails
        self.asked: list[str] = []

    def run(self, session: Session, spec: object) -> Found:
        assert isinstance(spec, CheckpointSpec)
        self.asked.append(spec.contender)
        if spec.contender == self._fails:
            raise SessionFailed("ValueError: no such option\nTraceback ...")
        return {}


def test_peer_that_fails_is_reported_with_its_reason_and_not_asked_again(
    spec: CheckpointSpec,
) -> None:
    """The others go on; one that fails later loses the figures that it had."""
    sessions = Scripted("dcp")
    with progress(1) as bar:
        runner = checkpoint_bench.CheckpointRunner(spec, sessions, bar)
        runner.repetition(["safetensors", "dcp"])
        runner.repetition(["safetensors", "dcp"])
    assert runner.found.failed == {"dcp": "ValueError: no such option"}
    assert sessions.asked.count("dcp") == 1
    assert {name: len(found) for name, found in runner.found.saves.items()} == {
        "hpstore": 2,
        "safetensors": 2,
    }


def test_failure_of_hpstore_itself_ends_the_benchmark(spec: CheckpointSpec) -> None:
    """It is not reported as one peer among others."""
    with progress(1) as bar, pytest.raises(SessionFailed, match="no such option"):
        checkpoint_bench.CheckpointRunner(spec, Scripted("hpstore"), bar).repetition(
            ["safetensors"]
        )


def test_a_file_that_goes_while_caches_are_dropped_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool's own cleaning may take it after it was listed; the others are dropped."""
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(4096))
    opened, usual = [], os.open

    def late(path: Path, flags: int) -> int:
        if path.name == "b":
            path.unlink()
        fd = usual(path, flags)
        opened.append(path.name)
        return fd

    monkeypatch.setattr(os, "open", late)
    drop_cache(tmp_path)
    assert sorted(opened) == ["a", "c"]


def test_peer_that_is_not_installed_is_reported_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on without it and says so."""

    class Absent(SaverPeer):
        name, package = "absent", "no-such-package"

    monkeypatch.setitem(PEERS, "absent", Absent)
    monkeypatch.setattr(checkpoint_bench, "SPECIAL", {})
    options = Options(directory=tmp_path, size_bytes=SIZE, repeats=1, peers="absent")
    found = checkpoint_bench.bench_checkpoint(options)
    assert found["failed"] == {
        "absent": "no-such-package is not installed here: pip install no-such-package"
    }


def test_peers_are_optional_in_the_verdicts() -> None:
    """Without peers the ratios to them are skipped, not invented."""
    assert "skipped" in to_best({"hpstore": [1.0]}, 1.0)
    row = to_best({"hpstore": [2.0, 4.0], "slow": [4.0, 4.0], "fast": [2.0, 2.0]}, 1.6)
    assert (row["median"], row["met"], row["against"]) == (1.5, True, "fast")


def _timed(seconds: float) -> Found:
    return {"steady": {"durable_seconds": seconds}, "first": {"durable_seconds": seconds}}


def test_floor_says_whether_the_devices_can_meet_the_bar() -> None:
    """0.8 s raw for k + m columns beside a peer's 1.0 s: no writer reaches 0.7 of that."""
    raw = [{"write_over_seconds": 0.8, "write_new_seconds": 0.8, "read_seconds": 0.8}]
    saves = {"hpstore": [_timed(0.9)], "fast": [_timed(1.0)], "slow": [_timed(3.0)]}
    loads = {name: [{"load_cold_seconds": {"load": 1.0}}] for name in saves}
    rows = floor_verdicts(saves, loads, raw)
    assert rows["durable_steady_floor"]["against"] == "fast"
    assert rows["durable_steady_floor"]["median"] == pytest.approx(0.8)
    assert not rows["durable_steady_floor"]["devices_can"]
    assert rows["durable_first_floor"]["devices_can"]
    assert rows["load_cold_floor"]["devices_can"]


def test_compression_is_measured_with_every_codec_and_says_what_it_stored(
    spec: CheckpointSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow sine becomes smaller by zstd; each figure stands beside the one without a codec."""
    monkeypatch.setattr(checkpoint_compression, "SAMPLES", 1)
    kind = replace(spec, contender="smooth")
    found = checkpoint_compression.compression_session(NoBallast(), kind)
    assert set(found) == {"none", *CODECS}
    rows = checkpoint_compression.compression_report({"smooth": found})["smooth"]
    assert rows["none"]["durable_to_none"] == 1.0
    assert rows["none"]["stored_to_state"] == pytest.approx(1.0, abs=0.05)
    assert rows["zstd"]["stored_to_state"] < 0.9
    assert "sine" in rows["content"]


def test_every_content_is_checked_by_step() -> None:
    """Regular values, too, are others for every step, and finite in both dtypes."""
    state = empty_state(SIZE)
    for _, values in checkpoint_compression.CONTENTS.values():
        content = TensorContents(values())
        content.fill(state, 1)
        content.check(state, 1, "nobody")
        assert all(bool(tensor.isfinite().all()) for _, tensor in leaves(state))
        for _, tensor in leaves(state):
            if not tensor.dim():
                tensor.fill_(2)  # so that the numbers alone tell
        with pytest.raises(RuntimeError, match="other values"):
            content.check(state, 2, "nobody")


def test_memory_of_a_child_process_counts() -> None:
    """A peer that saves in a process of its own does not hide what that takes."""
    program = """
import subprocess, sys
from hpstore.benchmarks.harness.memory_use import resident_bytes
before = resident_bytes()
code = "import sys; held = bytearray(b'x') * (64 << 20); print(flush=True); sys.stdin.read()"
words = [sys.executable, "-c", code]
with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(resident_bytes() - before)
    child.stdin.close()
"""  # in a process of its own: children that other tests have left would end meanwhile
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert 64 * MIB <= int(done.stdout) < 128 * MIB


def test_median_decides_about_the_bar() -> None:
    """One bad repetition of three does not miss it, two do."""
    assert verdict([1.0, 1.0, 9.0], 1.2)["met"]
    assert not verdict([1.0, 9.0, 9.0], 1.2)["met"]


def test_unknown_peer_is_named() -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match=r"no peer is called 'dpc'.*dcp\.async"):
        peers_named("torch.save,dpc")


def test_ballast_leaves_half_of_the_memory() -> None:
    """A state that is large for the machine gets a smaller ballast."""
    assert ballast_bytes(1 * GIB, 64 * GIB) < 5 * GIB
    assert ballast_bytes(8 * GIB, 16 * GIB) <= 8 * GIB


def test_ballast_gives_what_is_asked_and_takes_back_what_is_free() -> None:
    """Only what is free beyond what was free while all was held is taken: the rest is cold."""
    free = [100 * MIB]
    with closing(MemoryBallast(16 * MIB, lambda: free[0])) as ballast:
        assert (ballast.held_bytes, ballast.problem) == (16 * MIB, "")
        ballast.release(8 * MIB)
        assert ballast.held_bytes == 8 * MIB
        free[0] = 102 * MIB  # somebody took six of the eight
        ballast.regain()
        assert ballast.held_bytes == 10 * MIB
        free[0] = 90 * MIB
        ballast.regain()
        assert ballast.held_bytes == 10 * MIB
        ballast.release(64 * MIB)
        assert ballast.held_bytes == 0
        ballast.hold(6 * MIB)
        assert ballast.held_bytes == 6 * MIB
        ballast.hold(16 * MIB)
        free[0] = 91 * MIB
        ballast.release(2 * MIB)
        ballast.regain()
        assert ballast.held_bytes == 15 * MIB + MIB  # in whole huge pages


def _dies(_: Sections, spec: Callable[[], None]) -> Found:
    raise RuntimeError(f"told {spec}")


def test_session_that_raises_is_an_error_with_its_words() -> None:
    """The message crosses the process border."""
    with pytest.raises(SessionFailed, match="told something"):
        Sessions(MemoryBallast(0)).run(_dies, "something")
