"""Which devices are slow, by the service times of their peers. Pure; the clock is the caller's.

Each tick brings one mean service time for each device that was used. How far it is beyond what
peers take moves the device's score, in both directions; above one level it is suspect if avoiding
it gains, and after a while it should sit out. docs/health.md describes the rules, decisions 0016
and 0131 why they are these.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from statistics import median

from hpstore.health.detect.device_track import DeviceTrack, SlowEvidence
from hpstore.health.detect.evidence import Media, Signs, Traits
from hpstore.health.detect.peer_group import GroupMemory, PeerGroup
from hpstore.health.detect.slow_config import SlowConfig
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState

_NO_TRAITS = Traits()
_IDLE_SECONDS = 8.0  # without a value: it is not only waited for


class SlowDetector:
    """Finds slow, hung and failing devices among peers.

    `traits` say which devices are peers (the same model where five of it are there, else the same
    media) and which share a link. Not thread-safe: one thread calls it. `shared_slow` counts vetoed
    ticks.
    """

    def __init__(
        self, config: SlowConfig | None = None, traits: Mapping[str, Traits] | None = None
    ) -> None:
        self.config = config or SlowConfig()
        self.traits = dict(traits or {})
        self.shared_slow = 0
        self._tracks: dict[str, DeviceTrack] = {}
        self._memories: dict[str, GroupMemory] = {}
        self._now = -math.inf

    def tick(
        self,
        now_seconds: float,
        mean_service_seconds: Mapping[str, float],
        signs: Mapping[str, Signs] | None = None,
        watched: Collection[str] = (),
    ) -> list[DeviceVerdict]:
        """Judge one tick; verdicts of all devices that are not well now, by name.

        `mean_service_seconds` has the devices that were used, each with the mean of its
        *normalised* service times (`telemetry.Tick.means`); plain means do for equal loads.
        `now_seconds` is monotonic. `watched` devices, those on probation, are suspect after two
        values beyond the limit. Raises ValueError for a time that is negative or not finite.
        """
        elapsed = max(0.0, now_seconds - self._now)
        self._now = max(self._now, now_seconds)
        values = self._values(mean_service_seconds)
        decay = 0.5 ** (elapsed / self.config.half_life_seconds)
        for device, track in self._tracks.items():
            idle = self._now - track.seen > _IDLE_SECONDS and device not in values
            track.score *= decay if idle else 1.0
        known = signs or {}
        for name, media, judged, peers in self._groups(values):
            group = PeerGroup(
                self.config,
                self._memories.setdefault(name, GroupMemory()),
                self._tracks,
                judged,
                {device: values[device] for device in peers},
                known,
                self.config.excess_least(media),
            )
            self.shared_slow += group.judge(self._now, elapsed, self.traits)
        found = []
        for device in sorted({*self._tracks, *known}):
            verdict = self._verdict(device, known.get(device), device in watched)
            if verdict is not None:
                found.append(verdict)
        return found

    def accept(self, device: str) -> float:
        """Take what a device does now, compared with its peers, as normal; returns the ratio.

        For a device that is slower by nature and whose traits do not say so. Forgives it. Raises
        ValueError for a device that was in no tick.
        """
        track = self._tracks.get(device)
        if track is None:
            raise ValueError(f"device {device} was in no tick: there is nothing to accept")
        others = [
            median(t.recent)
            for d, t in self._tracks.items()
            if d != device and t.recent and self._media(d) is self._media(device)
        ]
        if others and track.recent and median(others) > 0:
            track.scale *= median(track.recent) / median(others)
        track.own.clear()
        track.offset, track.offset_ticks = 0.0, 0
        self.forgive(device)
        return track.scale

    def forgive(self, device: str) -> None:
        """Forget a device's score and errors, not its normal values: it starts again."""
        old = self._tracks.get(device)
        if old is not None:
            self._tracks[device] = old.renewed()

    def forget(self, device: str) -> None:
        """Drop all that is known of a device that left."""
        self._tracks.pop(device, None)

    def score(self, device: str) -> float:
        """A device's score, 0 when it is not known."""
        track = self._tracks.get(device)
        return 0.0 if track is None else track.score

    def evidence(self, device: str) -> SlowEvidence:
        """What speaks for and against a device as of its last tick; empty when it was in none."""
        track = self._tracks.get(device)
        if track is None:
            return SlowEvidence()
        return replace(
            track.evidence,
            gain=track.gain,
            observed_seconds=track.observed,
            slow_seconds=track.slow,
            suspected_seconds=track.suspected,
        )

    def _media(self, device: str) -> Media:
        return self.traits.get(device, _NO_TRAITS).media

    def _values(self, means: Mapping[str, float]) -> dict[str, float]:
        """Values of this tick by device, in the order of names, so that no sum depends on it."""
        values = {}
        for device in sorted(means):
            value = float(means[device])
            if not 0 <= value < math.inf:
                raise ValueError(f"mean service time of device {device} is {value}")
            track = self._tracks.setdefault(device, DeviceTrack(self.config))
            values[device] = value / track.scale
            track.see(self._now, values[device])
        return values

    def _groups(
        self, values: Mapping[str, float]
    ) -> Iterator[tuple[str, Media, list[str], list[str]]]:
        """Name, media, judged and peers: devices of one model, where there are enough of them; the
        others by their media."""
        models: defaultdict[tuple[Media, str], list[str]] = defaultdict(list)
        medias: defaultdict[Media, list[str]] = defaultdict(list)
        for device in values:
            traits = self.traits.get(device, _NO_TRAITS)
            models[traits.media, traits.model].append(device)
            medias[traits.media].append(device)
        rest: defaultdict[Media, list[str]] = defaultdict(list)
        for (media, model), devices in models.items():
            if len(devices) >= self.config.group_least:
                yield f"{media}/{model}", media, devices, devices
            else:
                rest[media] += devices
        for media, devices in rest.items():
            yield str(media), media, sorted(devices), medias[media]

    def _verdict(self, device: str, sign: Signs | None, watched: bool) -> DeviceVerdict | None:
        config = self.config
        track = self._tracks.setdefault(device, DeviceTrack(config))
        track.settle(self._now)
        state, reasons = HealthState.ONLINE, []
        if track.suspect or (watched and track.outliers >= config.probation_outliers):
            out = track.tripped(self._now) and not track.few
            state = HealthState.SITOUT if out else HealthState.SUSPECT
            reasons.append(track.reason)
        if sign is not None:
            track.errors.add(self._now, sign.io_errors)
            track.checksums.add(self._now, sign.checksum_errors)
        hang, why = self._hang(sign or Signs())
        if hang is not HealthState.ONLINE:
            state = max(state, hang, key=_SEVERITY.index)
            reasons.append(why)
        window = f"within {config.error_window_seconds:.0f} s"
        if track.checksums.full(self._now):
            state = max(state, HealthState.SUSPECT, key=_SEVERITY.index)
            reasons.append(f"{config.error_count} checksum errors {window}")
        if track.errors.full(self._now):
            state = HealthState.FAULTED
            reasons.append(f"{config.error_count} I/O errors {window}")
        if state is HealthState.ONLINE:
            return None
        return DeviceVerdict(
            device=device, state=state, score=track.score, reason="; ".join(reasons)
        )

    def _hang(self, sign: Signs) -> tuple[HealthState, str]:
        config = self.config
        why = f"a call has been in flight for {sign.oldest_seconds:.1f} s"
        if sign.oldest_seconds > config.hang_fault_seconds:
            return HealthState.FAULTED, why
        usual = config.hang_suspect_ratio * sign.usual_seconds_p999
        if sign.oldest_seconds > max(config.hang_suspect_seconds, usual):
            return HealthState.SUSPECT, why
        return HealthState.ONLINE, ""


_SEVERITY = (HealthState.ONLINE, HealthState.SUSPECT, HealthState.SITOUT, HealthState.FAULTED)
