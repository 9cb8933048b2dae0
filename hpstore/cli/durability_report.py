"""The report of `hpstore durability`: its figures, as JSON and for people."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from hpstore.cli.output import table, write_out
from hpstore.durability import (
    DOMAIN,
    Estimate,
    Group,
    RepairWindow,
    Scheme,
    SharedCause,
    in_a_year,
    nines,
)
from hpstore.units import format_bytes

_SECONDS_PER_HOUR = 3600.0
_CORRELATED = (
    "failures that come together: power, heat, a controller, one batch of drives, software, people "
    "(--shared adds those that have a rate)"
)
_UNSHARED = "failures that come together, other than those given: software, people"
_UNREADABLE = "sectors that cannot be read when no parity is left (--unreadable adds them)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """One device of a pool, as the figures take it. `age_years`: None where it is not known."""

    url: str
    domain: str
    state: str
    used_bytes: int
    age_years: float | None
    afr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """What was found out about a pool. `units_most`: of a stripe in one domain; None: not bound."""

    name: str
    data: int
    parity: int
    units_most: int | None
    members: tuple[PoolMember, ...]
    rebuild_from: str  # where the repair time comes from, in words
    left_out: tuple[str, ...]


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
    causes: tuple[SharedCause, ...] = ()
    shared: float | None = None  # with failures that come together, and those of single devices
    pool: PoolFigures | None = None  # the group is then all devices of the pool

    def losses(self) -> dict[str, float]:
        """Losses a year, by model."""
        found = {"closed form": self.closed_form, "Markov chain": self.markov}
        if self.shared is not None:
            found["failure domains"] = self.shared
        return found

    def left_out(self) -> list[str]:
        """What these figures do not see."""
        found = [_UNSHARED if self.causes else _CORRELATED]
        if self.unreadable is None:
            found.append(_UNREADABLE)
        return [*found, *(self.pool.left_out if self.pool is not None else ())]

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
            "shared_causes": [asdict(cause) for cause in self.causes],
            "failure_domains": None if self.shared is None else _figures(self.shared),
            "pool": None if self.pool is None else asdict(self.pool),
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


def show_report(answer: DurabilityReport, size: int) -> None:
    """All of it, for people. `size`: bytes of a device, 0 where they are not known."""
    group, poisson = answer.group, answer.window
    if answer.pool is not None:
        _show_pool(answer.pool)
    write_out(
        f"{group.data}+{group.parity}, {answer.groups} group{'s' * (answer.groups > 1)}, a device "
        f"fails {100 * group.afr:g} % a year, whole again after {group.repair_hours:.4g} h"
        f"{_sharing(group)}\n"
    )
    rows = [
        (name, f"{in_a_year(rate):.3e}", f"{nines(in_a_year(rate)):.2f}")
        for name, rate in answer.losses().items()
    ]
    if answer.unreadable is not None:
        name, rate = list(answer.losses().items())[-1]
        both = in_a_year(rate + answer.unreadable)
        rows.append((f"{name}, unreadable sectors", f"{both:.3e}", f"{nines(both):.2f}"))
    if answer.simulated is not None:
        found, way = answer.simulated, "sampling" if answer.causes else "splitting"
        rows.append(
            (
                f"{way}, seed {answer.seed}: {found.low:.3e} to {found.high:.3e}",
                f"{in_a_year(found.value):.3e}",
                f"{nines(in_a_year(found.value)):.2f}",
            )
        )
    any_window = in_a_year(
        -math.log1p(-poisson.loss) if poisson.loss < 1 else math.inf, answer.groups
    )
    rows.append(("Poisson window (optimistic)", f"{any_window:.3e}", f"{nines(any_window):.2f}"))
    table("", ("model", "loss in a year", "nines"), rows)
    write_out(
        f"In one window of {group.repair_hours:.4g} h: {poisson.expected:.4e} failures expected, "
        f"P({group.parity} failures) = {poisson.exactly_parity:.3e}, "
        f"P(more, data lost) = {poisson.beyond_parity:.3e}; {poisson.per_year:.2f} windows a year\n"
    )
    for cause in answer.causes:
        write_out(f"Counted: {_cause_words(cause)}.\n")
    if answer.schemes:
        _show_schemes(answer, size)
    write_out("".join(f"Left out: {line}.\n" for line in answer.left_out()))
    write_out(
        f"One event in a million years that takes {group.parity + 1} devices at once already means "
        "6 nines.\n"
    )


def _sharing(group: Group) -> str:
    if not group.repair_streams:
        return ""
    return f" if no more than {group.repair_streams} repaired at once"


def _cause_words(cause: SharedCause) -> str:
    where = "all devices" if not cause.units else f"{cause.units} units"
    place = "each failure domain" if cause.kind == DOMAIN else f"each {cause.kind} of {where}"
    return (
        f"{place} is struck {cause.events_per_year:g} times a year, which destroys "
        f"{100 * cause.hit:g} % of its devices"
    )


def _show_pool(pool: PoolFigures) -> None:
    table(
        f"pool {pool.name}: {pool.data}+{pool.parity} on {len(pool.members)} devices",
        ("device", "domain", "state", "used", "age", "fails a year"),
        [
            (
                m.url,
                m.domain,
                m.state,
                format_bytes(m.used_bytes),
                "unknown" if m.age_years is None else f"{m.age_years:.1f} years",
                f"{100 * m.afr:g} %",
            )
            for m in pool.members
        ],
    )
    most = "any number" if pool.units_most is None else str(pool.units_most)
    write_out(f"Units of a stripe in one domain: {most}. {pool.rebuild_from}\n")


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
