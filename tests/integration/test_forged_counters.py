"""Numbers and formats that one hostile device makes up stop nobody (t1)."""

from __future__ import annotations

import json

import pytest

from hpstore.devices.horizon_guard import HORIZON, MARK, encode_counter
from hpstore.errors import FormatTooNew
from hpstore.format.keys import MAX_COUNTER
from hpstore.format.pool_key import Use
from hpstore.format.records import NEWEST_FORMAT, POOL_FILE, seal
from hpstore.testing.memory_pool import Harness
from tests.integration import test_forged_files
from tests.integration.test_forged_files import BIG, SMALL, all_is_well, content

made = test_forged_files.made  # the fixture


@pytest.mark.parametrize("name", [HORIZON, MARK])
@pytest.mark.parametrize("public", [True, False], ids=["public-digest", "mac-of-the-other"])
@pytest.mark.parametrize("opened", [True, False], ids=["under-an-open-pool", "before-it-opens"])
def test_a_counter_that_a_device_made_up_stops_nobody(
    made: Harness, name: str, public: bool, opened: bool
) -> None:
    """Near the end of the numbers it left no version above it: every put and delete failed. It is
    a damaged counter of one device, and is written again."""
    hostile = made.devices["memory://d0"]
    other = MARK if name == HORIZON else HORIZON
    forged = encode_counter(name, MAX_COUNTER - 1)
    if not public:  # a genuine MAC, for what it does not stand for
        forged = encode_counter(other, MAX_COUNTER - 1, made.config.key)
    if not opened:
        hostile.write_small(name, forged)
    with made.open() as pool:
        if opened:
            hostile.write_small(name, forged)
        for round_of in range(2):
            pool.put("more", SMALL)
            pool.put("more", BIG)
            pool.delete("more")
            made.clock.wait(pool.config.settings.tombstone_seconds + 3600)
            pool.scrub()
            assert hostile.counter(name, made.config.key) < 1 << 60, round_of
        pool.rebuild()
        all_is_well(pool)


def test_a_device_with_a_forged_horizon_can_return(made: Harness) -> None:
    """It is judged as one that has missed every sweep, and has the members' horizon then."""
    hostile = made.devices["memory://d0"]
    with made.open() as pool:
        pool.add_device("memory://spare")
        pool.evict(hostile.url)
        made.clock.wait(pool.config.settings.tombstone_seconds + 3600)
        pool.scrub()
        hostile.write_small(HORIZON, encode_counter(HORIZON, MAX_COUNTER - 1))
        pool.readmit(hostile.url)
        key = made.config.key
        assert len({device.counter(HORIZON, key) for device in made.devices.values()}) == 1
        pool.put("other", SMALL)
        pool.delete("other")
        pool.rebuild()
        all_is_well(pool)


@pytest.mark.parametrize("keyed", [True, False])
def test_a_membership_of_a_later_format_counts_when_it_has_its_mac(
    made: Harness, keyed: bool
) -> None:
    """One device that says "a newer hpstore was here" kept everybody out: with the key it can be
    told from one that was."""
    hostile = made.devices["memory://d0"]
    body = json.loads(content(made, hostile.url, POOL_FILE))
    body = {name: value for name, value in body.items() if name not in ("digest", "mac")}
    body |= {"format": NEWEST_FORMAT + 1, "generation": body["generation"] + 1}
    if not keyed:
        hostile.write_small(POOL_FILE, seal(body))
        with made.open() as pool:
            all_is_well(pool)
        return
    assert made.config.key is not None
    text = json.dumps(body, sort_keys=True, ensure_ascii=False)
    body["mac"] = made.config.key.mac(Use.RECORD, text.encode()).hex()
    hostile.write_small(POOL_FILE, seal(body))
    with pytest.raises(FormatTooNew, match=f"format {NEWEST_FORMAT + 1}"):
        made.open()
