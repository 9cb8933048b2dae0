"""How devices that sit out fare in probes, the last ones counting most."""

from __future__ import annotations

from collections.abc import Collection

_READS = 16.0  # that are remembered; the mean of all would keep what was slow at first
_STALE_SECONDS = 60.0


class ProbeScores:
    """By device. Not thread-safe."""

    def __init__(self) -> None:
        self._scores: dict[str, tuple[float, float, float]] = {}  # sum, reads, when

    def note(self, device: str, score: float, reads: int, now_seconds: float) -> None:
        """So many reads took `score` times what such reads take."""
        total, count, _ = self._scores.get(device, (0.0, 0.0, 0.0))
        kept = min(1.0, max(0.0, _READS - reads) / count) if count else 0.0
        fresh = min(float(reads), _READS)
        self._scores[device] = (kept * total + score * fresh, kept * count + fresh, now_seconds)

    def ratio(self, device: str, now_seconds: float) -> float:
        """Their mean; 1 where nothing was timed for a minute: then it is not known."""
        total, count, when = self._scores.get(device, (0.0, 0.0, -_STALE_SECONDS))
        return total / count if count and now_seconds - when < _STALE_SECONDS else 1.0

    def keep_only(self, devices: Collection[str]) -> None:
        """Forget all others."""
        self._scores = {d: score for d, score in self._scores.items() if d in devices}
