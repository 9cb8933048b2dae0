"""How many devices may yet be lost: one figure, of what is there now, wherever it is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.agent.background_call import CallSlot
from hpstore.agent.prometheus import exposition
from hpstore.agent.status_page import render
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import DeviceError
from hpstore.maintenance.survey_condition import Condition
from tests.unit.tended import Tended

T = TypeVar("T")
CACHED = ("list", "stamp", "counter")


class Dying(DeviceWrapper):
    """Once it is dead, its directories come out of a cache, and nothing else does."""

    dead = False

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if self.dead and operation not in CACHED:
            raise DeviceError(f"{operation} failed on device {self.url}: EIO", device=self.url)
        return call()


def shown(tended: Tended) -> dict[str, int]:
    """The figure by place."""
    assert tended.status is not None
    assert tended.status.condition is not None
    found = tended.status.condition.losses_tolerated
    metrics = exposition(lambda: tended.status)().decode().splitlines()
    (row,) = (line for line in metrics if line.startswith("hpstore_pool_losses_tolerated "))
    assert f"{found} more devices may be lost" in render(tended.status)
    return {
        "agent": found,
        "metrics": int(float(row.split()[1])),
        "status": tended.pool.status().losses_tolerated,
    }


@pytest.fixture
def dying(tmp_path: Path) -> tuple[Tended, dict[str, Dying]]:
    """A tended pool whose devices can die behind their caches."""
    tended, made = Tended(tmp_path), {}
    tended.stop()

    def wrap(url: str, device: Device) -> Device:
        made[url] = Dying(device)
        return made[url]

    tended.start(wrap)
    tended.rounds(10)
    return tended, made


def test_a_dead_disk_counts_as_lost_while_its_return_is_waited_for(
    dying: tuple[Tended, dict[str, Dying]],
) -> None:
    """Page and metrics claimed health during the 15 minutes of grace: a dead disk's listings come
    out of a cache, and a walk over names believed them."""
    tended, devices = dying
    assert set(shown(tended).values()) == {2}
    devices[tended.harness.columns("large")[0][0]].dead = True
    tended.rounds(40)
    assert tended.status is not None
    assert tended.status.condition is not None
    assert tended.status.condition.degraded >= 1
    assert set(shown(tended).values()) == {1}
    assert len(tended.members()) == 7  # it is still waited for
    tended.stop()


class Endless(CallSlot[Condition]):
    """A walk that does not end."""

    def take(self) -> object:  # type: ignore[override]  # of any slot
        return None


def test_until_a_walk_has_ended_the_screens_show_what_is_certain(
    dying: tuple[Tended, dict[str, Dying]],
) -> None:
    """A walk over many keys takes minutes: the last one's figures are not shown as today's."""
    tended, devices = dying
    eyes = tended.agent.eyes
    eyes._inline, eyes._walk = False, Endless("walk", threads=False)
    devices[tended.harness.columns("large")[0][0]].dead = True
    tended.rounds(40, work=False)
    assert tended.status is not None
    assert tended.status.condition is not None
    assert not tended.status.condition_current
    assert tended.status.condition.degraded >= 1
    assert set(shown(tended).values()) == {1}
    assert "being looked at again" in render(tended.status)
    tended.stop()


def test_what_was_evicted_and_not_made_up_for_is_counted_by_the_agent_too(tmp_path: Path) -> None:
    """tolerated_after_evict: the agent's page said 2 where `hpstore status` said 0."""
    tended = Tended(tmp_path, devices=15)  # two more than columns
    tended.rounds(10)
    used = {url for key in tended.content for url, _ in tended.harness.columns(key)}
    with tended.harness.open() as other:
        for url in [url for url in tended.harness.urls if url not in used][:2]:
            other.evict(url)
    tended.rounds(5, work=False)
    assert set(shown(tended).values()) == {0}
    tended.stop()
