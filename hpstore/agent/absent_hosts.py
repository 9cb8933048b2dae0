"""How long hosts have been away, as this agent has seen it, and whether one is waited for still.

Only what was observed counts: by the monotonic clock, and of a pause between two looks no more than
a minute or so. An agent that was stopped for an hour has not seen that a host was away for an hour.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class AbsentHosts:
    """Of one pool; one thread.

    `wait_seconds`: that a host must be seen away before its devices are evicted.
    `gap_seconds`: of a longer pause between two looks only so much counts.
    """

    def __init__(self, wait_seconds: float, gap_seconds: float) -> None:
        self._wait, self._gap = wait_seconds, gap_seconds
        self._seen: dict[str, float] = {}  # host -> seconds that it was seen away
        self._hosts: Mapping[str, frozenset[str]] = {}
        self._looked_seconds: float | None = None

    def look(
        self, now_seconds: float, hosts: Mapping[str, frozenset[str]], present: Collection[str]
    ) -> None:
        """Note which hosts are away whole: no device of theirs is `present`. Monotonic seconds."""
        last, self._looked_seconds = self._looked_seconds, now_seconds
        passed = 0.0 if last is None else min(max(0.0, now_seconds - last), self._gap)
        there = set(present)
        away = [host for host, devices in hosts.items() if not devices & there]
        self._seen = {
            host: self._seen[host] + passed if host in self._seen else 0.0 for host in away
        }
        self._hosts = hosts

    def forget(self) -> None:
        """What was seen counts no more: this agent did not decide meanwhile."""
        self._seen, self._looked_seconds = {}, None

    def waited_for(self) -> dict[str, float]:
        """Hosts that are away and may come back, with the seconds that are left to them."""
        return {h: self._wait - seen for h, seen in self._seen.items() if seen < self._wait}

    def gone(self) -> dict[str, frozenset[str]]:
        """Hosts that were waited for long enough, with their devices."""
        return {h: self._hosts[h] for h, seen in self._seen.items() if seen >= self._wait}

    def devices_waited_for(self) -> frozenset[str]:
        """Devices of waited_for()."""
        return frozenset().union(*(self._hosts[host] for host in self.waited_for()))

    def seconds_away(self) -> dict[str, float]:
        """Hosts that are away, with how long that was seen."""
        return dict(self._seen)
