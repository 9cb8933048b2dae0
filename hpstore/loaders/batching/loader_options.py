"""What a DataLoader takes beside torch's arguments, where several values belong together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.errors import ConfigError
from hpstore.units import MIB, bytes_argument

PREFETCH_BYTES = 256 * MIB
ARENA_BYTES = 256 * MIB  # two batches of 38 MB with the sources of half of their records
NODE_MINUTES = 10.0  # a restart within them finds the data in memory
MOST_MINUTES = 30 * 24 * 60
DIRECT = ("auto", "always", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderMemory:
    """Host memory of a DataLoader beside its `cache`. Sizes are numbers or text such as "64MiB".

    Parameters
    ----------
    prefetch_bytes
        For batches that are made ahead or held by you. A batch above all of it is made by itself.
    window_bytes
        Of a window of `shuffle="window"`; None: a quarter of `prefetch_bytes`.
    node_minutes
        How long the node keeps the pages of a dataset that fits in `cache` when no process uses
        them any more, for the next one (docs/data.md); 0: they lie in this process's own memory.

    Raises
    ------
    ConfigError
        A size is not a number of bytes, or is below 1; minutes are below 0 or no number.
    """

    prefetch_bytes: int | str = PREFETCH_BYTES
    window_bytes: int | str | None = None
    node_minutes: float = NODE_MINUTES

    def __post_init__(self) -> None:
        _count(self, "prefetch_bytes", least=1)
        if self.window_bytes is not None:
            _count(self, "window_bytes", least=1)
        minutes = self.node_minutes
        number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
        if not (number and 0 <= minutes <= MOST_MINUTES):
            raise ConfigError(
                f"node_minutes {minutes!r}: give minutes from 0 to {MOST_MINUTES}, such as 10"
            )

    def window(self) -> int:
        """Bytes of a window."""
        return int(self.window_bytes or int(self.prefetch_bytes) // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTransfer:
    """How batches of a DataLoader come to its `device`, a GPU (docs/gpu.md).

    Parameters
    ----------
    direct
        Records go straight from the drive to the GPU: "auto" where cuFile works and was measured
        to be faster, "always" wherever it works, "off" never.
    arena_bytes
        GPU memory for such reads.
    ring_bytes
        GPU memory in which batches lie, instead of that of torch's allocator; 0: none.

    Raises
    ------
    ConfigError
        `direct` is none of the three, or a size is not a number of bytes.
    """

    direct: str = "auto"
    arena_bytes: int | str = ARENA_BYTES
    ring_bytes: int | str = 0

    def __post_init__(self) -> None:
        if self.direct not in DIRECT:
            raise ConfigError(f'direct {self.direct!r} is none of "auto", "always", "off"')
        _count(self, "arena_bytes", least=1)
        _count(self, "ring_bytes", least=0)


def _count(options: LoaderMemory | GpuTransfer, name: str, *, least: int) -> None:
    """Keep a size as a number: options that mean the same are equal, however they were given."""
    nbytes = bytes_argument(name, getattr(options, name), least=least)
    object.__setattr__(options, name, nbytes)
