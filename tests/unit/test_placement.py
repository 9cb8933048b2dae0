"""Placement: every process agrees, domains are spread, weights count, little moves."""

from __future__ import annotations

from collections import Counter

import pytest

from hpstore.format.placement import Candidate, choose, domain_cap, rank, score, tolerated_domains

KEYS = [f"key/{i}" for i in range(3000)]


def devices(count: int, per_domain: int = 1) -> list[Candidate]:
    return [
        Candidate(device=f"dev{i:02d}", domain=f"dom{i // per_domain:02d}") for i in range(count)
    ]


def ids(chosen: list[Candidate]) -> list[str]:
    return [c.device for c in chosen]


def test_the_choice_depends_on_nothing_but_its_arguments() -> None:
    """Neither the order of candidates nor the process matters: a recorded choice is reproduced."""
    pool = devices(10)
    chosen = choose("runs/gpt/1", pool, 6, parity=2)
    assert ids(chosen) == ids(choose("runs/gpt/1", pool[::-1], 6, parity=2))
    assert ids(chosen) == ["dev06", "dev03", "dev09", "dev00", "dev02", "dev01"]


def test_no_device_is_chosen_twice() -> None:
    """At most `count`, at most all, none twice."""
    pool = devices(8, per_domain=2)
    for key in KEYS[:200]:
        for count in (0, 1, 6, 8, 12):
            chosen = ids(choose(key, pool, count, parity=2))
            assert len(chosen) == len(set(chosen)) == min(count, 8)
    assert choose("a", [], 3, parity=2) == []


@pytest.mark.parametrize(("count", "per_domain", "parity"), [(6, 2, 2), (6, 3, 2), (12, 4, 4)])
def test_no_domain_holds_more_than_its_cap(count: int, per_domain: int, parity: int) -> None:
    """ceil(width / domains), never more than m, as long as there are domains enough."""
    pool = devices(24, per_domain=per_domain)
    cap = domain_cap(count, 24 // per_domain, parity)
    for key in KEYS[:500]:
        loads = Counter(c.domain for c in choose(key, pool, count, parity=parity))
        assert max(loads.values()) <= cap <= parity


def test_domains_too_few_are_filled_all_the_same() -> None:
    """Two domains for 4+2: the cap cannot hold, six columns are placed, each domain has its two."""
    pool = devices(8, per_domain=4)
    for key in KEYS[:200]:
        loads = Counter(c.domain for c in choose(key, pool, 6, parity=2))
        assert loads.total() == 6
        assert min(loads.values()) >= 2


def test_domains_that_the_object_already_uses_are_avoided() -> None:
    """A rebuilt column goes where the stripe has least."""
    pool = devices(8, per_domain=2)
    occupied = ["dom00", "dom00", "dom01", "dom01", "dom02"]
    for key in KEYS[:200]:
        (chosen,) = choose(key, pool, 1, parity=2, occupied=occupied)
        assert chosen.domain in ("dom02", "dom03")


@pytest.mark.parametrize(
    ("width", "domains", "parity", "cap"),
    [
        (6, 6, 2, 1),
        (6, 3, 2, 2),
        (6, 2, 2, 2),
        (6, 4, 2, 2),
        (6, 100, 2, 1),
        (12, 1, 4, 4),
        (6, 0, 2, 0),
        (3, 3, 1, 1),
    ],
)
def test_domain_cap(width: int, domains: int, parity: int, cap: int) -> None:
    """PROTOCOL 3: ceil((k + m) / domains), never more than m."""
    assert domain_cap(width, domains, parity) == cap


def test_load_is_about_even() -> None:
    """3,000 keys over 10 devices: none is more than 10 % off its share of 1,800."""
    load: Counter[str] = Counter()
    for key in KEYS:
        load.update(ids(choose(key, devices(10), 6, parity=2)))
    assert len(load) == 10
    assert all(abs(count - 1800) < 180 for count in load.values())


def test_load_follows_weights() -> None:
    """Twice the weight, about twice the first places."""
    pool = [*devices(4), Candidate(device="big", domain="dom99", weight=2.0)]
    first = Counter(choose(key, pool, 1, parity=2)[0].device for key in KEYS)
    assert abs(first["big"] - 3000 * 2 / 6) < 120
    assert all(abs(first[c.device] - 500) < 90 for c in pool[:4])


def test_a_new_device_moves_only_what_it_takes() -> None:
    """With 11 devices instead of 10, a stripe loses at most the one device it makes room for."""
    before, after, moved = devices(10), devices(11), 0
    for key in KEYS[:1000]:
        old = set(ids(choose(key, before, 6, parity=2)))
        new = set(ids(choose(key, after, 6, parity=2)))
        assert new - old <= {"dev10"}
        moved += len(new - old)
    assert 450 < moved < 640  # 6/11 of 1,000


def test_a_lost_device_moves_only_what_it_held() -> None:
    """The other five columns stay where they are."""
    pool = devices(10)
    for key in KEYS[:500]:
        old = ids(choose(key, pool, 6, parity=2))
        new = ids(choose(key, [c for c in pool if c.device != old[2]], 6, parity=2))
        assert set(old) - set(new) == {old[2]}
        assert len(new) == 6


def test_weight_zero_never_wins() -> None:
    """Its score is below every other one."""
    idle = Candidate(device="idle", domain="x", weight=0.0)
    assert all(score(key, idle) == -float("inf") for key in KEYS[:10])
    assert all(rank(key, [idle, *devices(3)])[-1] == idle for key in KEYS[:100])
    for key in KEYS[:100]:
        assert idle not in choose(key, [*devices(6), idle], 6, parity=2)


def test_weight_zero_is_not_chosen_even_when_others_are_too_few() -> None:
    """Five devices and an idle one for six columns: five columns, the put records a debt."""
    idle = Candidate(device="idle", domain="x", weight=0.0)
    for key in KEYS[:20]:
        assert idle not in choose(key, [*devices(5), idle], 6, parity=2)


def test_weight_zero_is_not_chosen_for_its_domain() -> None:
    """Being alone in a failure domain does not make an idle device eligible."""
    idle = Candidate(device="idle", domain="alone", weight=0.0)
    for key in KEYS[:20]:
        assert idle not in choose(key, [*devices(8, per_domain=4), idle], 6, parity=2)


@pytest.mark.parametrize(
    ("width", "data", "sizes", "lost"),
    [
        (6, 4, [1] * 6, 2),
        (6, 4, [1] * 10, 2),
        (6, 4, [2, 2, 2], 1),
        (6, 4, [3, 3], 0),
        (6, 4, [6], 0),
        (3, 1, [1, 1, 1], 2),
        (12, 8, [2] * 6, 2),
        (6, 4, [5, 1], 0),
        (6, 4, [], 0),
    ],
)
def test_tolerated_domains(width: int, data: int, sizes: list[int], lost: int) -> None:
    """Whole domains that may fail together, worst first."""
    assert tolerated_domains(width, data, sizes) == lost


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 2, 2], [3, 3], [4, 2, 1, 1], [5, 1], [3, 2, 2]])
def test_tolerated_domains_is_what_choose_gives(sizes: list[int]) -> None:
    """The promise made at create holds for every key: kill that many of its largest domains."""
    pool = [
        Candidate(device=f"dev{d}-{i}", domain=f"dom{d}")
        for d, size in enumerate(sizes)
        for i in range(size)
    ]
    lost = tolerated_domains(6, 4, sizes)
    for key in KEYS[:200]:
        loads = Counter(c.domain for c in choose(key, pool, 6, parity=2))
        worst = sum(count for _, count in loads.most_common(lost))
        assert loads.total() - worst >= 4
