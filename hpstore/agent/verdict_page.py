"""The part of the status page on verdicts: each with its evidence, also for devices that are well.

A device's own curve over its peers' band and the limit, what avoiding it would save and cost, and
the share of time that it was slow beside the share that it was suspected. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hpstore.agent.agent_status import DeviceView
from hpstore.health.detect.device_track import SlowEvidence
from hpstore.units import format_seconds

_WIDTH, _HEIGHT = 260, 60
STYLE = """
.band{fill:#cdeccd}.limit{stroke:#d9534f;stroke-dasharray:4 3}.own{stroke-width:2}
@media(prefers-color-scheme:dark){.band{fill:#235a2b}}
"""
NOTE = (
    "<p class=quiet>Blue: what a call on the device took lately, as this process saw it. Green: "
    "what its peers take. Red: the limit beyond which it is slow. It is suspect when it stays "
    "beyond the limit and when avoiding it saves more time than reading around it costs.</p>"
)
HEAD = ("device", "verdict", "own curve", "a call, peers, limit", "avoiding it", "slow / suspected")


def verdict_rows(devices: Sequence[DeviceView]) -> list[str]:
    """A row for each device that was compared; the slowest first."""
    known = [device for device in devices if device.evidence.observed_seconds > 0]
    known.sort(key=lambda device: (-device.evidence.smooth_ratio, device.url))
    return [_row(device) for device in known]


def _row(device: DeviceView) -> str:
    seen = device.evidence
    cells = (
        escape(device.url),
        _verdict(device),
        verdict_curve(device.latency_seconds, seen),
        _comparison(seen),
        _gain(seen),
        f"{_share(seen.slow_seconds, seen)} / {_share(seen.suspected_seconds, seen)}",
    )
    return f"<tr>{''.join(f'<td class=w>{cell}</td>' for cell in cells)}</tr>"


def _verdict(device: DeviceView) -> str:
    kind, word = ("", "slow") if device.reason else ("good", "well")
    why = f"<br>{escape(device.reason)}" if device.reason else ""
    return f"<span class='s {kind}'>{word}</span> score {device.score:.0f} of 10{why}"


def _comparison(seen: SlowEvidence) -> str:
    if not seen.compared_with:
        return f"{format_seconds(seen.value_seconds)}; nothing to compare it with yet"
    low, high = format_seconds(seen.peers_low_seconds), format_seconds(seen.peers_high_seconds)
    return (
        f"{format_seconds(seen.value_seconds)}, {seen.smooth_ratio:.1f} x "
        f"{escape(seen.compared_with)} lately; {low} to {high}; "
        f"limit {format_seconds(seen.limit_seconds)}"
    )


def _gain(seen: SlowEvidence) -> str:
    gain = seen.gain
    if not gain.expected_seconds:
        return "it is not slow"
    verb = "pays" if gain.gains else "does not pay"
    return (
        f"{verb}: slow for {gain.lasted_seconds:.0f} s, {gain.expected_seconds:.0f} s more "
        f"expected; saves {gain.saved_seconds:.0f} s of waiting, costs {gain.cost_seconds:.0f} s"
    )


def _share(seconds: float, seen: SlowEvidence) -> str:
    return f"{seconds / seen.observed_seconds:.1%}"


def verdict_curve(values: Sequence[float], seen: SlowEvidence) -> str:
    """Own values as a line over the peers' band and the limit; "" for fewer than two."""
    if len(values) < 2:
        return ""
    top = 1.1 * max(*values, seen.peers_high_seconds, seen.limit_seconds) or 1.0
    step = _WIDTH / (len(values) - 1)

    def down(seconds: float) -> float:
        return _HEIGHT * (1 - max(0.0, seconds) / top)

    points = " ".join(f"{i * step:.1f},{down(value):.1f}" for i, value in enumerate(values))
    high, low = down(seen.peers_high_seconds), down(seen.peers_low_seconds)
    shapes = (
        f"<rect class=band x=0 y={high:.1f} width={_WIDTH} height={max(1.0, low - high):.1f} />"
        f"<line class=limit x1=0 x2={_WIDTH} y1={down(seen.limit_seconds):.1f} "
        f"y2={down(seen.limit_seconds):.1f} />"
        if seen.compared_with
        else ""
    )
    return (
        f"<svg width={_WIDTH} height={_HEIGHT} viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img>"
        f"<title>0 to {format_seconds(top)}</title>{shapes}"
        f"<polyline class=own points='{points}'/></svg>"
    )
