"""A status as Prometheus metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hpstore.agent.agent_status import AgentStatus, DeviceView
from hpstore.health.detect.verdicts import HealthState

_NAME = re.compile(r"[^a-zA-Z0-9_]")


class StatusCollector(Collector):
    """Metrics of the last status; none before the first one."""

    def __init__(self, status: Callable[[], AgentStatus | None]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        if status is None:
            return
        yield from _pool_metrics(status)
        yield from _device_metrics(status)
        for name, value in sorted(status.metrics.items()):
            plain = _NAME.sub("_", name)
            if plain.endswith("_total"):
                yield CounterMetricFamily(
                    f"hpstore_{plain.removesuffix('_total')}", "Counter of the pool.", value=value
                )
            else:
                yield GaugeMetricFamily(f"hpstore_{plain}", "Figure of the pool.", value=value)


def _pool_metrics(status: AgentStatus) -> Iterator[Metric]:
    yield CounterMetricFamily("hpstore_agent_rounds", "Rounds of the agent.", value=status.ticks)
    yield GaugeMetricFamily(
        "hpstore_agent_round_seconds",
        "When the last round was, since 1970.",
        value=status.at_ms / 1000,
    )
    yield GaugeMetricFamily(
        "hpstore_agent_warnings", "Warnings and alarms.", value=len(status.warnings)
    )
    yield GaugeMetricFamily(
        "hpstore_pool_generation", "Of the membership.", value=status.generation
    )
    found, job = status.condition, status.job
    if found is not None:
        rows = (
            ("objects", "Objects.", found.objects),
            ("degraded_objects", "Readable, but short of their full stripe.", found.degraded),
            ("unreadable_objects", "Need devices that are missing.", found.unreadable),
            ("losses_tolerated", "Devices that may be lost yet.", found.losses_tolerated),
            ("unsettled_objects", "That a rebuild would look at.", found.todo),
            ("put_off_objects", "Degraded, and soon deleted.", sum(status.put_off.values())),
        )
        for name, text, value in rows:
            yield GaugeMetricFamily(f"hpstore_pool_{name}", text, value=value)
    running = GaugeMetricFamily(
        "hpstore_job_objects_done", "Objects that the running job has looked at.", labels=["job"]
    )
    total = GaugeMetricFamily("hpstore_job_objects", "Objects of the running job.", labels=["job"])
    rate = GaugeMetricFamily("hpstore_job_bytes_per_second", "Of the running job.", labels=["job"])
    if job is not None:
        running.add_metric([job.kind], job.done)
        total.add_metric([job.kind], job.total)
        rate.add_metric([job.kind], job.bytes_per_second)
    yield from (running, total, rate)


def _device_metrics(status: AgentStatus) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "hpstore_device_state",
        "1 for the state that the agent keeps a device in.",
        labels=["device", "url", "state"],
    )
    for device in status.devices:
        for known in HealthState:
            state.add_metric([device.device, device.url, known], float(device.state == known))
    yield state
    figures: dict[str, tuple[str, Callable[[DeviceView], float]]] = {
        "present": ("Whether it answers.", lambda d: float(d.present)),
        "score": ("Level of its leaky bucket.", lambda d: d.score),
        "total_bytes": ("Its size.", lambda d: d.total_bytes),
        "free_bytes": ("Its free space.", lambda d: d.free_bytes),
        "probe_seconds": (
            "Write, sync and read of its last probe.",
            lambda d: d.probe_seconds[-1] if d.probe_seconds else 0.0,
        ),
        "read_seconds_p99": ("Reads of this process.", lambda d: d.read_seconds_p99),
    }
    for name, (text, figure) in figures.items():
        family = GaugeMetricFamily(f"hpstore_device_{name}", text, labels=["device", "url"])
        for device in status.devices:
            family.add_metric([device.device, device.url], figure(device))
        yield family


def exposition(status: Callable[[], AgentStatus | None]) -> Callable[[], bytes]:
    """What makes the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    return lambda: generate_latest(registry)
