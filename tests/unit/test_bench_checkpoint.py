"""The checkpoint benchmark on a tiny state: peers give back what was saved, ratios are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpstore.benchmarks import checkpoint, checkpoint_special
from hpstore.benchmarks.ballast import Ballast, ballast_bytes
from hpstore.benchmarks.checkpoint_bars import to_best, verdict
from hpstore.benchmarks.checkpoint_contenders import PEERS, peers_named
from hpstore.benchmarks.checkpoint_ours import Copy, Ours
from hpstore.benchmarks.checkpoint_sessions import (
    Spec,
    contender,
    load_session,
    save_session,
)
from hpstore.benchmarks.checkpoint_state import (
    FULL_BYTES,
    Content,
    SharedState,
    empty_state,
    leaves,
    map_state,
    shapes,
    state_bytes,
)
from hpstore.benchmarks.measure import Options
from hpstore.benchmarks.sessions import Found, Sections, SessionFailed, Sessions
from hpstore.errors import ConfigError
from hpstore.units import GIB, MIB

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
SIZE = 2 * MIB


class NoBallast(Sections):
    """Sections of a session that runs in the test itself."""

    def __init__(self) -> None:
        pass

    def warm(self, nbytes: int) -> None:
        pass


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Spec]:
    """A tiny state, filled, and what it is loaded into."""
    state, target = SharedState("state", SIZE), SharedState("target", SIZE)
    Content().fill(map_state(state.path, SIZE), 0)
    yield Spec(
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
    state, content = empty_state(SIZE), Content()
    content.fill(state, 3)
    content.check(state, 3, "nobody")
    with pytest.raises(RuntimeError, match="other values"):
        content.check(state, 4, "nobody")
    state["model"]["head.weight"][-1, -1] += 1
    with pytest.raises(RuntimeError, match="other values"):
        content.check(state, 3, "nobody")


def test_shared_state_is_seen_by_every_mapping(spec: Spec) -> None:
    """What one mapping writes, another reads; tensors have storages of their own."""
    one, other = map_state(spec.state, SIZE), map_state(spec.state, SIZE)
    Content().fill(one, 9)
    Content().check(other, 9, "the other mapping")
    sizes = [tensor.untyped_storage().nbytes() for _, tensor in leaves(one)]
    assert sizes == [tensor.nbytes for _, tensor in leaves(one)]


@pytest.mark.parametrize("name", [*PEERS, Ours.name])
def test_every_contender_gives_back_what_it_saved(spec: Spec, name: str) -> None:
    """Sessions check every byte after each load, in the process that saved and from new."""
    spec = replace(spec, contender=name)
    saved = save_session(NoBallast(), spec)
    loaded = load_session(NoBallast(), spec)
    ways = set(contender(spec).loads)
    assert set(saved["load_warm_seconds"]) == set(loaded["load_cold_seconds"]) == ways
    assert saved["steady"]["durable_seconds"] >= saved["steady"]["blocked_seconds"] > 0
    assert ("load_degraded_seconds" in loaded) == (name == Ours.name)


@pytest.mark.parametrize("name", list(PEERS))
def test_a_load_of_other_values_is_an_error(spec: Spec, name: str) -> None:
    """A contender whose file holds another state does not get a figure."""
    spec = replace(spec, contender=name)
    who, other = contender(spec), empty_state(SIZE)
    who.prepare(other)
    who.save(other, who.last_step)
    who.close()
    with pytest.raises(RuntimeError, match="other values"):
        load_session(NoBallast(), spec)


def test_degraded_load_lacks_m_devices_with_data(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the load session exactly two directories are away, and the load before them worked."""
    spec = replace(spec, contender=Ours.name)
    save_session(NoBallast(), spec)
    load_session(NoBallast(), spec)
    assert len(list((spec.directory / Ours.name).glob("gone-d*"))) == 2
    assert len(list((spec.directory / Ours.name).glob("d[0-9]"))) == 4


def test_copy_ends_with_equal_bytes(spec: Spec) -> None:
    """The reference copy moves every tensor."""
    state = map_state(spec.state, SIZE)
    copy = Copy(state)
    assert copy.seconds(1) > 0
    assert all(torch.equal(place, tensor) for place, tensor in copy._pairs)


SMALL = {
    "MANY_TENSORS": 50,
    "GROWTH_SAVES": 3,
    "GROWTH_WARM": 2,
    "_STEP_SECONDS": 0.001,
    "_QUIET_STEPS": 2,
}


@pytest.mark.parametrize("name", [name for name in checkpoint.SPECIAL if name != "overlap"])
def test_figures_without_peers_are_found_or_skipped_with_a_reason(
    spec: Spec, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session runs on small numbers; a skip says why."""
    for constant, value in SMALL.items():
        monkeypatch.setattr(checkpoint_special, constant, value)
    found = checkpoint.SPECIAL[name](NoBallast(), replace(spec, contender=name))
    assert found
    assert found.get("skipped", "a reason")


def test_run_names_every_ratio_with_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One repetition in processes of their own; what cannot be had says why."""
    monkeypatch.setattr(checkpoint, "SPECIAL", {"slice": checkpoint_special.slice_session})
    options = Options(directory=tmp_path, size_bytes=SIZE, repeats=1, peers="safetensors")
    found = json.loads(json.dumps(checkpoint.bench_checkpoint(options)))
    assert set(found["contenders"]) == {"hpstore", "safetensors"}
    assert found["failed"] == {}
    ratios = found["ratios"]
    assert {
        "stall_to_copy", "stall_to_best_peer", "durable_steady_to_best_peer",
        "durable_first_to_best_peer", "load_cold_to_best_peer", "load_warm",
        "load_degraded_to_healthy", "memory_to_state_and_64MiB", "slice_bytes_to_4.2_MiB",
        "first_stall_to_steady_stall", "durable_steady_to_raw_overwrite",
    } <= set(ratios)  # fmt: skip
    for row in (row for row in ratios.values() if "bar" in row):
        assert isinstance(row["met"], bool)
    assert list(tmp_path.iterdir()) == []


def test_peers_are_optional_in_the_verdicts() -> None:
    """Without peers the ratios to them are skipped, not invented."""
    assert "skipped" in to_best({"hpstore": [1.0]}, 1.0)
    row = to_best({"hpstore": [2.0, 4.0], "slow": [4.0, 4.0], "fast": [2.0, 2.0]}, 1.6)
    assert (row["median"], row["met"], row["against"]) == (1.5, True, "fast")


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
    assert ballast_bytes(1 * GIB, 64 * GIB) < 4 * GIB
    assert ballast_bytes(8 * GIB, 16 * GIB) <= 8 * GIB


def _dies(_: Sections, spec: Callable[[], None]) -> Found:
    raise RuntimeError(f"told {spec}")


def test_session_that_raises_is_an_error_with_its_words() -> None:
    """The message crosses the process border."""
    with pytest.raises(SessionFailed, match="told something"):
        Sessions(Ballast(0)).run(_dies, "something")
