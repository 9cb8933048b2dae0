"""`hpstore durability`: how many nines a scheme has, by which model, and what that leaves out."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer

from hpstore.cli.options import DataUnits, Json, ParityUnits, SchemeText, size_option
from hpstore.cli.output import emit_json, table
from hpstore.durability import (
    Estimate,
    Group,
    RepairWindow,
    Scheme,
    Sectors,
    compare,
    in_a_year,
    losses_per_year,
    nines,
    split,
    unreadable_per_year,
    window,
    years_to_loss,
)
from hpstore.errors import ConfigError
from hpstore.format.scheme import choose_scheme

_SECONDS_PER_HOUR = 3600.0
_CORRELATED = (
    "failures that come together: power, heat, a controller, one batch of drives, software, people"
)
_UNREADABLE = "sectors that cannot be read when no parity is left (--unreadable adds them)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DurabilityReport:
    """Everything that is printed. Losses are those of all groups in a year."""

    group: Group
    groups: int
    wanted: float
    window: RepairWindow
    closed_form: float
    markov: float
    unreadable: float | None
    simulated: Estimate | None
    seed: int
    schemes: list[Scheme]

    def losses(self) -> dict[str, float]:
        """Losses a year, by model."""
        return {"closed form": self.closed_form, "Markov chain": self.markov}

    def left_out(self) -> list[str]:
        """What these figures do not see."""
        return [_CORRELATED] if self.unreadable is not None else [_CORRELATED, _UNREADABLE]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        poisson = {**asdict(self.window), "nines": _finite(nines(self.window.loss))}
        simulated = (
            None
            if self.simulated is None
            else {
                **asdict(self.simulated),
                "nines": _finite(nines(in_a_year(self.simulated.value))),
                "seed": self.seed,
            }
        )
        return {
            **asdict(self.group),
            "groups": self.groups,
            "poisson_window": poisson,
            "closed_form": _figures(self.closed_form),
            "markov": {**_figures(self.markov), "mean_years_to_loss": _years(self.markov)},
            "unreadable_sectors": None if self.unreadable is None else _figures(self.unreadable),
            "simulated": simulated,
            "wanted_nines": self.wanted,
            "schemes": [
                {
                    **asdict(s),
                    "nines": _finite(s.nines),
                    "longest_repair_hours": _finite(s.longest_repair_hours),
                }
                for s in self.schemes
            ],
            "left_out": self.left_out(),
        }


def _figures(rate: float) -> dict[str, object]:
    probability = in_a_year(rate)
    return {
        "losses_per_year": rate,
        "probability": probability,
        "nines": _finite(nines(probability)),
    }


def _years(rate: float) -> float | None:
    return _finite(1 / rate) if rate else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run(
    afr: Annotated[float, typer.Option(help="failures of a device in a year, such as 0.005")],
    data: DataUnits = None,
    parity: ParityUnits = None,
    scheme: SchemeText = None,
    rebuild_hours: Annotated[
        float | None, typer.Option(help="from a failure until all is written again")
    ] = None,
    device_size: Annotated[int | None, size_option("bytes of a device, such as 8TB")] = None,
    rebuild_rate: Annotated[
        int | None, size_option("bytes per second at which a lost device is written again")
    ] = None,
    wait_hours: Annotated[
        float, typer.Option(min=0.0, help="before a rebuild begins: noticing, a spare")
    ] = 0.0,
    groups: Annotated[int, typer.Option(min=1, help="independent groups; any may lose")] = 1,
    unreadable: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.5, help="unreadable sectors by bit read, such as 1e-15"),
    ] = None,
    wanted: Annotated[
        float, typer.Option("--nines", min=0.1, max=60.0, help="a scheme should reach")
    ] = 12.0,
    simulate: Annotated[
        int, typer.Option(min=0, max=10_000_000, help="paths of a simulation by splitting")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="of the simulation; recorded")] = 0,
    as_json: Json = False,
) -> None:
    """Estimate the probability of losing data in a year; compare schemes.

    hpstore durability --scheme 6+3 --afr 0.005 --rebuild-hours 156

    hpstore durability --scheme 4+2 --afr 0.01 --device-size 8TB --rebuild-rate 200MB
    """
    size = device_size or 0
    hours = _repair_hours(rebuild_hours, size, rebuild_rate or 0)
    chosen = choose_scheme(data, parity, scheme)
    group = Group(data=chosen.data, parity=chosen.parity, afr=afr, repair_hours=hours + wait_hours)
    sectors = _sectors(size, unreadable)
    poisson = window(group)
    answer = DurabilityReport(
        group=group,
        groups=groups,
        wanted=wanted,
        window=poisson,
        closed_form=losses_per_year(group) * groups,
        markov=groups / years_to_loss(group),
        unreadable=_lost_to(sectors, group, groups),
        simulated=_simulated(group, groups, simulate, seed),
        seed=seed,
        schemes=compare(group, wanted=wanted, groups=groups, sectors=sectors),
    )
    if as_json:
        emit_json(answer.as_dict())
    else:
        _show(answer, size)


def _repair_hours(given: float | None, size: int, rate: int) -> float:
    if given is not None:
        if rate:
            raise ConfigError("give --rebuild-hours, or --device-size with --rebuild-rate")
        return given
    if not size or not rate:
        raise ConfigError("give --rebuild-hours, or --device-size with --rebuild-rate")
    return size / rate / _SECONDS_PER_HOUR


def _sectors(size: int, unreadable: float | None) -> Sectors | None:
    if unreadable is None:
        return None
    if not size:
        raise ConfigError("--unreadable needs --device-size: it counts the bits that are read")
    return Sectors(device_bytes=size, errors_per_bit=unreadable)


def _lost_to(sectors: Sectors | None, group: Group, groups: int) -> float | None:
    """Losses a year, of all groups."""
    if sectors is None:
        return None
    return unreadable_per_year(group, sectors.device_bytes, sectors.errors_per_bit) * groups


def _simulated(group: Group, groups: int, paths: int, seed: int) -> Estimate | None:
    if not paths:
        return None
    found = split(group, paths=paths, rng=np.random.default_rng(seed))
    return Estimate(value=found.value * groups, low=found.low * groups, high=found.high * groups)


def _show(answer: DurabilityReport, size: int) -> None:
    group, poisson = answer.group, answer.window
    sys.stdout.write(
        f"{group.data}+{group.parity}, {answer.groups} group{'s' * (answer.groups > 1)}, a device "
        f"fails {100 * group.afr:g} % a year, whole again after {group.repair_hours:.4g} h\n"
    )
    rows = [
        (name, f"{in_a_year(rate):.3e}", f"{nines(in_a_year(rate)):.2f}")
        for name, rate in answer.losses().items()
    ]
    if answer.unreadable is not None:
        both = in_a_year(answer.markov + answer.unreadable)
        rows.append(("Markov chain, unreadable sectors", f"{both:.3e}", f"{nines(both):.2f}"))
    if answer.simulated is not None:
        found = answer.simulated
        rows.append(
            (
                f"splitting, seed {answer.seed}: {found.low:.3e} to {found.high:.3e}",
                f"{in_a_year(found.value):.3e}",
                f"{nines(in_a_year(found.value)):.2f}",
            )
        )
    any_window = in_a_year(
        -math.log1p(-poisson.loss) if poisson.loss < 1 else math.inf, answer.groups
    )
    rows.append(("Poisson window (optimistic)", f"{any_window:.3e}", f"{nines(any_window):.2f}"))
    table("", ("model", "loss in a year", "nines"), rows)
    sys.stdout.write(
        f"In one window of {group.repair_hours:.4g} h: {poisson.expected:.4e} failures expected, "
        f"P({group.parity} failures) = {poisson.exactly_parity:.3e}, "
        f"P(more, data lost) = {poisson.beyond_parity:.3e}; {poisson.per_year:.2f} windows a year\n"
    )
    _show_schemes(answer, size)
    sys.stdout.write("".join(f"Left out: {line}.\n" for line in answer.left_out()))
    sys.stdout.write(
        f"One event in a million years that takes {group.parity + 1} devices at once already means "
        "6 nines.\n"
    )


def _within(hours: float) -> str:
    if not hours:
        return "never"
    return f"{hours:.3g} h" if math.isfinite(hours) else "any time"


def _show_schemes(answer: DurabilityReport, size: int) -> None:
    rows = []
    for scheme in answer.schemes:
        longest = scheme.longest_repair_hours
        row = [
            f"{scheme.data}+{scheme.parity}",
            f"{scheme.overhead:.2f}",
            f"{scheme.nines:.2f}",
            "yes" if scheme.reaches else "no",
            _within(longest),
        ]
        if size:
            rate = size / longest / _SECONDS_PER_HOUR / 1e6 if longest else math.inf
            row.append(f"{rate:.3g} MB/s" if longest else "")
        rows.append(row)
    wanted = f"{answer.wanted:g} nines"
    columns = ["scheme", "stored a byte", "nines", wanted, "if whole again within"]
    table("", columns + ["if rebuilt at"] * bool(size), rows)
