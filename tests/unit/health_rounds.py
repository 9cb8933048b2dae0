"""A policy and its rounds, for tests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hpstore.health import DeviceVerdict, HealthState
from hpstore.health.policy.health_policy import decide
from hpstore.health.policy.states import (
    Action,
    ActionKind,
    Decision,
    DeviceFacts,
    DeviceHealth,
    PolicyConfig,
    PolicyState,
    PoolFacts,
)

S = HealthState
PROCESS = PolicyConfig()
WELL = {"probes": 64, "probe_ratio": 1.1}


class Policy:
    """A pool of 5+3 on eight devices, and the policy's rounds, ten seconds apart."""

    def __init__(self, config: PolicyConfig = PROCESS, *, count: int = 8, parity: int = 3) -> None:
        self.config, self.now, self.state = config, 1e6, PolicyState()
        devices = {f"d{i}": DeviceFacts(domain=f"h{i}") for i in range(count)}
        self.facts = PoolFacts(parity=parity, devices=devices)
        self.actions: list[Action] = []
        self.decisions: list[Decision] = []

    def fact(self, device: str, **changes: object) -> None:
        """Change what is so of a device."""
        fact = replace(self.facts.devices[device], **changes)  # type: ignore[arg-type]
        self.facts = replace(self.facts, devices={**self.facts.devices, device: fact})

    def round(
        self,
        *,
        after: float = 10.0,
        suspect: Collection[str] = (),
        slow: Collection[str] = (),
        faulted: Collection[str] = (),
    ) -> Policy:
        """One round; earlier actions and decisions are forgotten."""
        self.now += after
        verdicts = [
            DeviceVerdict(device=device, state=state, score=score, reason=f"{device} is {state}")
            for state, score, devices in (
                (S.SUSPECT, 12.0, suspect),
                (S.SITOUT, 25.0, slow),
                (S.FAULTED, 0.0, faulted),
            )
            for device in devices
        ]
        found = decide(self.state, verdicts, self.facts, self.now, self.config)
        self.state, self.actions = found.state, list(found.actions)
        self.decisions = list(found.decisions)
        return self

    def health(self, device: str = "d0") -> DeviceHealth:
        return self.state.health(device)

    def states(self) -> dict[str, HealthState]:
        """Of all that are not online."""
        return {d: h.state for d, h in self.state.devices.items() if h.state is not S.ONLINE}

    def asked(self) -> list[tuple[ActionKind, str]]:
        return [(action.kind, action.device) for action in self.actions]

    def sit_out(self, device: str = "d0") -> Policy:
        return self.round(slow=[device]).round(slow=[device])

    def probation(self, device: str = "d0") -> Policy:
        """Through a sit-out that went well."""
        self.sit_out(device)
        self.fact(device, **WELL)
        wait = self.health(device).until_seconds - self.now
        return self.round(after=wait)
