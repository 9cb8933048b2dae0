"""What the cache's policy learns, whom it lets in, and what it says about mistakes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders.policy import CachePolicy, SampledLog, belady, next_use, simulate
from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Int64s
from hpstore.loaders.policy.directories import RULES
from hpstore.loaders.policy.epoch_bits import EpochBits
from hpstore.loaders.policy.expert_choice import ExpertChoice
from hpstore.loaders.policy.frequency import Learner
from hpstore.loaders.policy.plain_queues import LruPolicy
from hpstore.loaders.policy.resident_set import Residents


def array(*values: int) -> Int64s:
    """int64[n]."""
    return np.array(values, np.int64)


@pytest.fixture
def counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where hpstore was installed without a compiler."""
    monkeypatch.setattr(next_use, "installed", lambda: None)


def shuffles(count: int, blocks: int, seed: int = 0) -> Int64s:
    """Epochs in a row, each another permutation."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(blocks) for _ in range(count)])


def test_unseen_blocks_are_expected_within_the_epoch_and_seen_ones_in_the_next() -> None:
    """One job, a quarter of the way: half of the rest, or the rest and half of an epoch."""
    table = Table(100)
    phases = EpochBits(table)
    phases.begin(0, 100)
    phases.touch(0, np.arange(25), 25)
    waits = np.exp(phases.waits(array(0, 99), (0,), [1.0]))
    assert waits == pytest.approx([75 + 50, 75 / 2], rel=0.02)


def test_of_two_jobs_a_block_that_both_need_comes_first() -> None:
    """Bits of each by themselves; a new epoch of one clears only its own."""
    table = Table(4)
    phases = EpochBits(table)
    for job in (0, 1):
        phases.begin(job, 4)
    phases.touch(0, array(0, 1), 2)
    phases.touch(1, array(0, 2), 2)
    both, first, second, none = phases.waits(array(0, 1, 2, 3), (0, 1), [0.5, 0.5]).tolist()
    assert none < first < both
    assert first == pytest.approx(second)
    phases.begin(0, 4)
    assert phases.seen.tolist() == [2, 0, 2, 0]


def test_two_sharing_jobs_hit_twice_as_often_when_their_epochs_are_told() -> None:
    """Phase bits against the same requests without them."""
    one, two = shuffles(6, 400, 1), shuffles(6, 400, 2)
    requests = np.stack([one, np.roll(two, 150)], axis=1).reshape(-1)
    jobs = np.tile([0, 1], 2400)
    starts = [list(range(0, 4800, 800)), list(range(301, 4800, 800))]
    told = simulate(requests, 40, batch=16, jobs=jobs, epoch_starts=starts)
    untold = simulate(requests, 40, batch=16, jobs=jobs)
    assert told.expert == "phase"
    assert told.hits > 1.5 * untold.hits


def test_a_newcomer_is_judged_without_its_present_request(counts_alone: None) -> None:
    """Reshuffled epochs: as many hits as fit, where counting first would keep the last seen."""
    found = simulate(shuffles(8, 500), 100, batch=10)
    assert found.hit[500:].mean() == pytest.approx(0.2, abs=0.004)
    assert found.expert == "counts"


def test_reshuffled_epochs_come_near_what_fits_once_a_rule_that_evicts_nothing_leads() -> None:
    """The contents that the first leader leaves cost a part of one epoch."""
    found = simulate(shuffles(12, 5000), 1000, batch=50)
    assert found.hit[20_000:].mean() == pytest.approx(0.2, abs=0.006)
    assert found.expert in ("static", "count")


def test_a_newcomer_must_be_better_by_a_margin(counts_alone: None) -> None:
    """Six requests against five are no reason to change places, seven are: 2**0.3 is 1.23."""
    policy = CachePolicy(1, 3000, 1)
    policy.access(0, array(0, 0, 0, 0, 0))
    assert policy.access(0, array(1, 1, 1, 1, 1, 1)).evict.tolist() == []
    assert policy.access(0, array(1)).evict.tolist() == []
    assert policy.access(0, array(1)).evict.tolist() == [0]


def test_a_learned_cache_never_loses_much_to_lru_where_lru_is_right() -> None:
    """A moving working set: another expert takes over, within two points of LRU's hits."""
    rng = np.random.default_rng(3)
    requests = (np.arange(60_000) // 20 + rng.integers(0, 150, 60_000)) % 3000
    recent: dict[int, None] = {}
    hits = 0
    for block in requests.tolist():
        hits += block in recent
        recent.pop(block, None)
        recent[block] = None
        if len(recent) > 300:
            del recent[next(iter(recent))]
    found = simulate(requests, 300, batch=16)
    assert found.switches > 0
    assert found.hit_ratio > hits / len(requests) - 0.02


@pytest.mark.parametrize("sample", [1 << 18, 2000])
def test_the_cache_holds_what_its_leader_would(
    sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of more residents than are all compared, and where only a sample is followed."""
    for limit in ("WHOLE", "SAMPLE"):
        monkeypatch.setattr(f"hpstore.loaders.policy.expert_choice.{limit}", sample)
    rng = np.random.default_rng(5)
    requests = (np.arange(200_000) // 4 + rng.integers(0, 9000, 200_000)) % 24_000
    found = simulate(requests, 6000, batch=64, blocks=24_000)
    request = LruPolicy(6000).request
    wanted = np.mean([request(block) for block in requests.tolist()])
    assert found.hit_ratio > wanted - 0.02


def sampled_choice(monkeypatch: pytest.MonkeyPatch, table: Table, *, whole: bool) -> ExpertChoice:
    for limit in ("WHOLE", "SAMPLE"):
        size = len(table.keys) if whole else len(table.keys) // 4
        monkeypatch.setattr(f"hpstore.loaders.policy.expert_choice.{limit}", size)
    return ExpertChoice(table, len(table.keys), 50.0, seed=0)


@pytest.mark.parametrize("whole", [True, False])
def test_lirs_leads_where_all_blocks_are_followed_alone(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sample is followed it has no directory of all blocks, and others would decide."""
    choice = sampled_choice(monkeypatch, Table(1000), whole=whole)
    choice.scores[:] = 100.0
    choice.scores[RULES.index("ARC")] = 500.0
    choice.scores[RULES.index("LIRS")] = 1000.0
    choice._choose(phases=False)
    assert choice.name == ("LIRS" if whole else "ARC")


def test_a_new_leader_gives_up_what_was_used_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory begins with the residents: 50, of which 0 was used most."""
    table = Table(1000)
    table.places[:50] = np.arange(50)
    table.keys[:50] = -np.arange(50)
    choice = sampled_choice(monkeypatch, table, whole=False)
    choice.leader = RULES.index("LRU")
    choice._lead()
    assert choice._leading is not None
    choice._leading.request(np.arange(500, 510))
    assert np.flatnonzero(choice._leading.masks[:50]).tolist() == [*range(40)]


def test_faded_counts_order_blocks_by_rate_and_survive_rebasing() -> None:
    """Over thousands of epochs keys stay finite, and the expected use is that of the rate."""
    table, blocks = Table(3), array(0, 1)
    learner = Learner(table)
    for _ in range(3000):
        learner.pass_time(1.0)
        rows = table.take(blocks)
        rows.keys = learner.touch(rows.keys, array(8, 1))
        table.put(blocks, rows)
    assert np.isfinite(learner.keys[:2]).all()
    assert float(np.abs(learner.keys[:2]).max()) < 3000
    assert np.isneginf(learner.keys[2]).all()
    waits = np.exp(learner.offset(9.0) - learner.keys[:2])
    assert waits == pytest.approx([9 / 8, 9.0], rel=0.2)


def test_drawn_residents_are_different_ones_and_all_come_round() -> None:
    """A lattice at changing offsets."""
    residents = Residents(Table(1000), 1000)
    residents.add(np.arange(0, 1000, 2))
    drawn = [residents.draw(50) for _ in range(60)]
    assert all(len(np.unique(one)) == 50 for one in drawn)
    assert set(np.concatenate(drawn).tolist()) == set(range(0, 1000, 2))


def test_drawn_victims_cost_no_hits() -> None:
    """More residents than are all compared, the order known: still 98 % of MIN."""
    requests = shuffles(4, 30_000)
    found = simulate(
        requests, 9000, batch=256, known_order=True, epoch_starts=list(range(0, 120_000, 30_000))
    )
    assert found.hits > 0.98 * int(belady(requests, 9000).sum())


def test_what_is_wanted_next_comes_by_deadline_and_does_no_harm() -> None:
    """Residents used sooner stay; what is in flight is late, then a hit, and never evicted."""
    policy = CachePolicy(10, 6, 20)
    policy.hold(array(0, 5))
    policy.expect(0, array(1, 0, 2, 3))
    wanted = policy.next_wanted(0, 25)
    assert (wanted.fetch.tolist(), wanted.evict.tolist()) == ([1], [5])
    plan = policy.access(0, array(1))
    assert (plan.late.tolist(), plan.hit.tolist()) == ([True], [False])
    assert policy.access(0, array(0)).hit.all()
    # 0 is not needed any more, 1 neither but in flight
    wanted = policy.next_wanted(0, 100)
    assert (wanted.fetch.tolist(), wanted.evict.tolist()) == ([2], [0])
    policy.arrived(array(1, 2))
    assert policy.access(0, array(2)).hit.all()
    assert policy.next_wanted(0, 9).fetch.tolist() == []
    assert policy.next_wanted(0, 10).fetch.tolist() == [3]


def test_favourites_fill_free_room_after_a_restart_and_displace_nothing() -> None:
    """What was asked for most, not what was never asked for."""
    policy = CachePolicy(1, 5, 2)
    policy.access(0, array(3, 3, 3, 4, 4, 1))
    other = CachePolicy(1, 5, 2)
    other.restore(policy.state_arrays(), residents=array(1))
    wanted = other.favourites(99)
    assert (wanted.fetch.tolist(), wanted.evict.tolist()) == ([3], [])
    assert other.favourites(99).fetch.tolist() == []


def test_pinned_blocks_stay() -> None:
    """Counted: two pins need two unpins."""
    policy = CachePolicy(1, 3, 1)
    policy.hold(array(0))
    policy.pin(array(0, 0))
    policy.unpin(array(0))
    policy.expect(0, array(1, 1, 1))
    assert policy.access(0, array(1)).admit.tolist() == []
    policy.unpin(array(0))
    assert policy.access(0, array(1)).evict.tolist() == [0]
    with pytest.raises(ValueError, match="block 0 is not pinned so often"):
        policy.unpin(array(0))


def test_jobs_at_different_speeds_are_merged_by_time() -> None:
    """The fast job's far request comes sooner than the slow job's near one."""
    policy = CachePolicy(1, 40, 1, jobs=2)
    policy.expect(0, np.concatenate((np.zeros(90, np.int64), array(*range(10, 40)))))
    policy.expect(1, array(1, 1, *range(2, 10)))
    for _ in range(9):
        policy.access(0, np.zeros(9, np.int64))
    policy.access(1, array(1))
    fast, slow = policy.expected_use(array(12, 4)).tolist()
    assert fast < slow


def test_a_request_cost_keeps_small_blocks() -> None:
    """Equal use: by bytes no difference, by requests the small ones."""
    sizes = array(10, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    policy = CachePolicy(sizes, 11, 10, request_cost_bytes=1 << 40)
    policy.hold(array(0))
    policy.expect(0, array(*range(1, 11), *range(1, 11), 0))
    assert policy.access(0, array(*range(1, 11))).evict.tolist() == [0]


def test_an_order_with_others_in_one_batch_is_kept_and_a_wrong_one_is_not() -> None:
    """Sorted within a batch is no mismatch; beyond what was foretold is none either."""
    policy = CachePolicy(1, 9, 2)
    policy.expect(0, array(1, 2, 3, 4, 5))
    policy.access(0, array(2, 1))
    assert policy.expected(0) == 3
    policy.access(0, array(3, 4, 5, 6))
    assert (policy.expected(0), policy.mismatched(0)) == (0, False)
    policy.expect(0, array(7, 8))
    policy.access(0, array(8))
    assert policy.mismatched(0)


def test_a_sampled_log_tells_the_share_of_min() -> None:
    """Hits of LRU's kind against MIN, on a sample of the blocks, near the figure of the whole."""
    requests = shuffles(8, 8000)
    hit = np.zeros(len(requests), np.bool_)
    hit[8000:] = np.isin(requests[8000:], np.arange(1600))
    log = SampledLog(1600, every=4, limit=30_000)
    for start in range(0, len(requests), 500):
        log.record(requests[start : start + 500], hit[start : start + 500])
    assert log.share_of_min() == pytest.approx(1.0, abs=0.06)
    assert SampledLog(10).share_of_min() is None


def test_mistakes_are_named_and_change_nothing() -> None:
    """Construction, requests, jobs, saved states."""
    with pytest.raises(ConfigError, match="holds no block of 10"):
        CachePolicy(10, 5, 9)
    with pytest.raises(ConfigError, match="sizes have the shape"):
        CachePolicy(array(1, 2), 3, 9)
    with pytest.raises(ConfigError, match="a block of -1 bytes"):
        CachePolicy(array(1, -1), 2, 9)
    with pytest.raises(ConfigError, match="0 blocks"):
        CachePolicy(1, 0, 9)
    with pytest.raises(ConfigError, match="0 jobs"):
        CachePolicy(1, 1, 9, jobs=0)
    policy = CachePolicy(1, 5, 2)
    for wrong in (array(5), array(-1)):
        with pytest.raises(ValueError, match=r"there are 0 \.\. 4"):
            policy.access(0, wrong)
    with pytest.raises(ValueError, match="job 1"):
        policy.access(1, array(0))
    with pytest.raises(ConfigError, match=r"lacks \['learner_clock'"):
        policy.restore({"policy": array(1, 5, 1, 0)})
    policy.access(0, array())
    for name in ("learner_keys", "choice_scores", "phases_seen", "choice_spread"):
        other = CachePolicy(1, 5, 2)
        other.access(0, array(1))
        arrays = other.state_arrays()
        arrays[name] = arrays[name][..., :0].reshape(-1, 3)
        with pytest.raises(ConfigError, match=name):
            policy.restore(arrays)
    saved = CachePolicy(1, 6, 2).state_arrays()
    with pytest.raises(ConfigError, match="start without it"):
        policy.restore(saved)
    assert policy.counters["requests"] == 0
    with pytest.raises(ConfigError, match="known_order needs epoch_starts"):
        simulate([1, 2], 1, known_order=True)
    with pytest.raises(ConfigError, match="a list for each"):
        simulate([1, 2], 1, jobs=[0, 1], epoch_starts=[0])
    with pytest.raises(ConfigError, match="one for each is needed"):
        simulate([1, 2], 1, jobs=[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, 1e18])
@pytest.mark.parametrize("name", ["learner_keys", "learner_clock"])
def test_counts_that_cannot_be_are_refused(name: str, value: float) -> None:
    """Of what is not a number nothing is ever let in, and it would be saved again at the end."""
    policy = CachePolicy(1, 50, 10)
    for _ in range(20):
        policy.access(0, np.arange(30))
    arrays = policy.state_arrays()
    CachePolicy(1, 50, 10).restore(arrays)
    arrays[name] = np.full(arrays[name].shape, value)
    with pytest.raises(ConfigError, match="counts of a saved cache policy cannot be"):
        CachePolicy(1, 50, 10).restore(arrays)


def test_empty_batches_and_data_never_foretold_cost_nothing() -> None:
    """Nothing asked, nothing known: no plan, no warning, infinite expected use."""
    policy = CachePolicy(1, 4, 2)
    plan = policy.access(0, array())
    assert len(plan.hit) == len(plan.admit) == len(plan.evict) == 0
    assert policy.expected_use(array(1)).tolist() == [math.inf]
    assert policy.favourites(10).fetch.tolist() == []
    assert simulate([], 3).hit_ratio == 0
