"""What a user of `hpstore durability` may give, and how it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import typer

from hpstore.cli.options import size_option
from hpstore.durability import DOMAIN, SharedCause
from hpstore.errors import ConfigError

Afr = Annotated[float, typer.Option(help="failures of a device in a year, such as 0.005")]
RebuildHours = Annotated[
    float | None, typer.Option(help="from a failure until all is written again")
]
DeviceSize = Annotated[int | None, size_option("bytes of a device, such as 8TB")]
RebuildRate = Annotated[
    int | None, size_option("bytes per second at which a lost device is written again")
]
DeviceRate = Annotated[
    int | None, size_option("bytes per second of one device; a rebuild gets what training leaves")
]
Training = Annotated[
    float, typer.Option(help="share of the time that training uses the disks (--device-rate)")
]
WaitHours = Annotated[
    float, typer.Option(min=0.0, help="before a rebuild begins: noticing, a spare")
]
RepairStreams = Annotated[
    int, typer.Option(min=0, help="repairs at full speed; more of them share it (0: any number)")
]
Shared = Annotated[
    list[str] | None,
    typer.Option(help="what fails together, KIND:A_YEAR:UNITS[:SHARE], such as rack:0.01:4"),
]
Groups = Annotated[int, typer.Option(min=1, help="independent groups; any may lose")]
Unreadable = Annotated[
    float | None,
    typer.Option(min=0.0, max=0.5, help="unreadable sectors by bit read, such as 1e-15"),
]
PoolOption = Annotated[
    str | None,
    typer.Option("--pool", help="pool.toml: its devices, domains, rebuild speed and age"),
]
AfrByAge = Annotated[
    str,
    typer.Option(help="with --pool: years:AFR from that age on, such as 0:0.02,1:0.008,5:0.03"),
]
WantedNines = Annotated[
    float, typer.Option("--nines", min=0.1, max=60.0, help="a scheme should reach")
]
Simulate = Annotated[
    int,
    typer.Option(
        min=0, max=10_000_000, help="paths of a simulation by splitting; with --shared, draws"
    ),
]
SimulationSeed = Annotated[int, typer.Option(min=0, help="of the simulation; recorded")]

_MOST_NAME = 40
_CAUSE = "KIND:EVENTS_A_YEAR:UNITS[:SHARE], such as host:0.02:2, or batch:0.01:all:0.1"
_POOL_CAUSE = "domain:EVENTS_A_YEAR[:SHARE], or KIND:EVENTS_A_YEAR:all[:SHARE] for the whole pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class DurabilityOptions:
    """All but the scheme; 0 or None where it was not given."""

    afr: float
    rebuild_hours: float | None
    device_bytes: int
    rebuild_rate: int
    device_rate: int
    training: float
    wait_hours: float
    repair_streams: int
    causes: tuple[SharedCause, ...]
    unreadable: float | None
    wanted: float


def parse_causes(texts: list[str], *, in_pool: bool) -> tuple[SharedCause, ...]:
    """What fails together. Raises ConfigError that shows how it is written."""
    return tuple(_pool_cause(text) if in_pool else _cause(text) for text in texts)


def _cause(text: str) -> SharedCause:
    parts = text.split(":")
    if not 3 <= len(parts) <= 4 or not parts[0]:
        raise ConfigError(f"--shared {text!r}: write {_CAUSE}")
    units = 0 if parts[2] == "all" else _whole(parts[2], text, _CAUSE)
    return _made(text, parts[0], parts[1], units, parts[3:], _CAUSE)


def _pool_cause(text: str) -> SharedCause:
    parts = text.split(":")
    if parts[0] == DOMAIN and 2 <= len(parts) <= 3:
        return _made(text, DOMAIN, parts[1], 0, parts[2:], _POOL_CAUSE)
    if 3 <= len(parts) <= 4 and parts[0] not in ("", DOMAIN) and parts[2] == "all":
        return _made(text, parts[0], parts[1], 0, parts[3:], _POOL_CAUSE)
    raise ConfigError(
        f"--shared {text!r}: write {_POOL_CAUSE}; which devices share a domain, the pool knows"
    )


def _made(text: str, kind: str, rate: str, units: int, hit: list[str], form: str) -> SharedCause:
    if len(kind) > _MOST_NAME or not kind.isprintable():
        raise ConfigError(f"--shared {text[:80]!r}: the kind is a word of up to {_MOST_NAME}")
    return SharedCause(
        kind=kind,
        events_per_year=_number(rate, text, form),
        units=units,
        hit=_number(hit[0], text, form) if hit else 1.0,
    )


def _whole(word: str, text: str, form: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) <= 4 and int(word)):
        raise ConfigError(f"--shared {text!r}: {word!r} are not units; write {form}")
    return int(word)


def _number(word: str, text: str, form: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {word!r} is not a number; write {form}") from error


def parse_ages(text: str) -> tuple[tuple[float, float], ...]:
    """Ages in years and the failure rates from there on, rising. Raises ConfigError."""
    form = "years:AFR, such as 0:0.02,1:0.008,5:0.03"
    found = []
    for part in filter(None, text.split(",")):
        years, colon, rate = part.partition(":")
        if not colon:
            raise ConfigError(f"--afr-by-age {text!r}: write {form}")
        found.append((_number(years, text, form), _number(rate, text, form)))
    ages = [age for age, _ in found]
    if found and (ages[0] != 0 or any(b <= a for a, b in pairwise(ages))):
        raise ConfigError(f"--afr-by-age {text!r}: ages must rise from 0; write {form}")
    if not all(math.isfinite(age) and 0 < rate < 1e4 for age, rate in found):
        raise ConfigError(f"--afr-by-age {text!r}: rates must be above 0; write {form}")
    return tuple(found)
