"""What reads keep off, by states; what may be read in vain; time that accuses nobody. Pure."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.health.detect.evidence import Signs
from hpstore.health.detect.stall_filter import Stalls
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.read_shares import no_new_columns, read_shares
from hpstore.health.policy.states import DeviceHealth, PolicyConfig, PolicyState
from hpstore.objects.read_routing import HedgeBudget, Routing, well_placed

SHARES = PolicyConfig().probation_shares
MIB = 1 << 20

placed = st.dictionaries(st.integers(0, 9), st.sampled_from("abcdefgh"), max_size=10)
avoided = st.lists(st.sampled_from("abcdefgh"), unique=True)


def states(**devices: DeviceHealth) -> PolicyState:
    return PolicyState(devices=devices)


def test_shares_of_reads_follow_from_states_the_worst_device_first() -> None:
    """PROTOCOL 16. A suspect's reads are planned round it; a draining device serves."""
    found = read_shares(
        states(
            a=DeviceHealth(state=HealthState.PROBATION, stage=1),
            b=DeviceHealth(state=HealthState.SUSPECT, score=12),
            c=DeviceHealth(state=HealthState.SITOUT),
            d=DeviceHealth(),
            e=DeviceHealth(state=HealthState.DRAINING),
            f=DeviceHealth(state=HealthState.FAULTED),
            g=DeviceHealth(state=HealthState.SUSPECT, score=15),
        ),
        SHARES,
    )
    assert list(found.items()) == [("f", 0), ("c", 0), ("g", 0), ("b", 0), ("a", 0.25)]


def test_only_online_devices_take_new_columns() -> None:
    """PROTOCOL 3."""
    every = {state.value: DeviceHealth(state=state) for state in HealthState}
    assert set(no_new_columns(PolicyState(devices=every))) == every.keys() - {"online"}


@given(placed, avoided, st.integers(1, 6))
def test_avoided_devices_are_read_only_as_far_as_others_are_too_few(
    devices: dict[int, str], away: list[str], need: int
) -> None:
    """Never so few that an object which could be read cannot be, and then the least bad ones."""
    chosen = well_placed(devices, away, need)
    well = {column for column, device in devices.items() if device not in away}
    assert well <= chosen <= devices.keys()
    assert len(chosen) == max(len(well), min(need, len(devices)))
    worst_chosen = [away.index(devices[c]) for c in chosen - well]
    left_out = [away.index(devices[c]) for c in devices.keys() - chosen]
    assert not worst_chosen or not left_out or min(worst_chosen) >= max(left_out)


@given(st.sampled_from([0.05, 0.25, 1.0]), st.integers(1, 400))
def test_a_device_on_probation_gets_its_share_of_reads(share: float, reads: int) -> None:
    """Evenly: after any number of reads it had its share, rounded down."""
    routing = Routing()
    routing.set_avoided({"a": share, "b": 0.0})
    kept = Counter(device for _ in range(reads) for device in routing.avoided_now())
    assert reads - kept["a"] == int(reads * share)
    assert kept["b"] == reads


def test_readers_hear_of_a_change_once() -> None:
    """The version rises when something is different, not at each tick."""
    routing = Routing()
    assert routing.avoided_now() == ()
    routing.set_avoided({"a": 0.0})
    routing.set_avoided({"a": 0.0})
    assert routing.version == 1
    routing.after_fork()
    assert routing.version == 2
    assert routing.avoided_now() == ()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40 * MIB)), max_size=60))
def test_spares_cost_at_most_their_share_beside_what_there_is_at_the_beginning(
    story: list[tuple[bool, int]],
) -> None:
    """5 % of the bytes read, and 16 MiB."""
    budget, read, spent = HedgeBudget(0.05), 0, 0
    for is_spare, nbytes in story:
        if not is_spare:
            budget.earn(nbytes)
            read += nbytes
        elif budget.spend(nbytes):
            spent += nbytes
    assert spent <= 0.05 * read + 16 * MIB + 1
    assert not HedgeBudget(0.0).spend(1)


def test_an_unused_budget_does_not_grow_for_ever() -> None:
    """After a day of calm a storm of spares may not begin."""
    budget = HedgeBudget(0.05)
    budget.earn(1 << 50)
    assert budget.spend(16 * MIB)
    assert not budget.spend(1)


def hang(seconds: float) -> Signs:
    return Signs(oldest_seconds=seconds)


def test_time_in_which_the_process_was_stopped_is_no_hang() -> None:
    """Stopped for a minute (SIGSTOP, a paused machine): what was in flight is not that old."""
    stalls = Stalls(1.0)
    for now in (1.0, 2.0, 3.0, 63.0):
        stalls.note(now)
    found = stalls.excused({"a": hang(61.0), "b": hang(0.0)}, 63.0, 6, 2)
    assert found["a"].oldest_seconds == pytest.approx(61.0 - 59.0)
    stalls.note(64.0)
    later = stalls.excused({"a": hang(62.0), "b": hang(0.5)}, 64.0, 6, 2)
    assert later["a"].oldest_seconds == pytest.approx(3.0)
    assert later["b"].oldest_seconds == 0.5
    assert not stalls.shared


def test_ticks_that_are_a_little_late_excuse_nothing() -> None:
    stalls = Stalls(1.0)
    for now in (1.0, 2.5, 5.0):
        stalls.note(now)
    assert stalls.excused({"a": hang(4.0)}, 5.0, 6, 2)["a"].oldest_seconds == 4.0


@pytest.mark.parametrize(("hanging", "excused"), [(1, False), (2, False), (3, True), (6, True)])
def test_more_hangs_than_parity_replaces_accuse_the_host(hanging: int, excused: bool) -> None:
    """One link, one NFS server, one stopped machine: planning round them would not help."""
    stalls = Stalls(1.0)
    signs = {f"d{i}": hang(40.0 if i < hanging else 0.1) for i in range(6)}
    found = stalls.excused(signs, 50.0, 6, 2)
    assert (found["d0"].oldest_seconds == 0.0) is excused
    assert found["d5"].oldest_seconds in (0.0, 0.1)
    assert stalls.shared == excused


def test_spares_that_win_are_free_and_come_sooner() -> None:
    """Those in vain cost their bytes, and make reads wait longer before the next one."""
    budget = HedgeBudget(0.05)
    for _ in range(100):
        assert budget.spend(MIB)
        budget.won(MIB)
    assert budget.patience == 1.0
    for _ in range(16):
        assert budget.spend(MIB)
        budget.in_vain()
    assert not budget.spend(MIB)
    assert budget.patience == 32.0
    budget.won(MIB)
    assert budget.patience < 32.0
    assert budget.spend(MIB)


def test_reads_wait_as_long_as_spares_in_vain_have_shown() -> None:
    """Not at all for a device that has not ended a read which a spare overtook."""
    routing = Routing(0.05)
    routing.deadlines = {"d0": (2e-3,), "d1": (2e-3,)}
    assert routing.patience_seconds("d0", 4096) == 2e-3
    routing.budget.in_vain()
    assert routing.patience_seconds("d0", 4096) == pytest.approx(2.6e-3)
    read: Future[None] = Future()
    routing.lost("d0", read)
    assert routing.patience_seconds("d0", 4096) == 0.0
    assert routing.patience_seconds("d1", 4096) == pytest.approx(2.6e-3)
    assert routing.patience_seconds("d2", 4096) is None
    read.set_result(None)
    assert routing.patience_seconds("d0", 4096) == pytest.approx(2.6e-3)
