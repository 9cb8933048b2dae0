"""How long a rebuild takes beside training that uses the same disks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.errors import ConfigError

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBandwidth:
    """What a device can move, and how much of that a rebuild gets.

    `training`: the share of the time in which training uses the disks. A rebuild then takes
    `share_busy` of the time of a device, else `share_idle`: `heal_share_busy` and
    `heal_share_idle` of pool.toml. Raises ConfigError.
    """

    bytes_per_second: float  # of one device
    training: float = 0.0
    share_busy: float = 0.3
    share_idle: float = 0.9

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ConfigError(f"a device moves {self.bytes_per_second:g} bytes a second: above 0")
        shares = (self.training, self.share_busy, self.share_idle)
        if not all(0 <= share <= 1 for share in shares) or not self.share > 0:
            raise ConfigError(
                f"shares {', '.join(f'{share:g}' for share in shares)}: each 0 to 1, and a rebuild "
                "must get some of the time"
            )

    @property
    def share(self) -> float:
        """Of a device's bandwidth that a rebuild gets in the long run."""
        return self.training * self.share_busy + (1 - self.training) * self.share_idle


def rebuild_hours(
    lost_bytes: int,
    bandwidth: SharedBandwidth,
    *,
    data: int,
    devices: int,
    spare: bool,
) -> float:
    """Hours until what a device held is written again.

    Every lost unit takes reads of `data` units and one write. The other devices of the pool,
    `devices` - 1 of them, share the reads. Writes go to one new device with `spare`, else the
    others share them too. Checksums, code and network are taken as faster than the disks.

    Raises
    ------
    ConfigError
        There are no other devices, or nothing to rebuild.
    """
    if devices < 2 or data < 1 or lost_bytes <= 0:
        raise ConfigError(
            f"{lost_bytes} bytes to rebuild from {devices - 1} other devices with {data} data "
            "units: each must be 1 or more"
        )
    read = data * lost_bytes / (devices - 1)
    busiest = max(read, lost_bytes) if spare else read + lost_bytes / (devices - 1)
    return busiest / (bandwidth.bytes_per_second * bandwidth.share) / _SECONDS_PER_HOUR
