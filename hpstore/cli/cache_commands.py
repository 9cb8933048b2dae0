"""Cache commands: what the cache's policy would do with a recorded trace. torch, which the loaders
need, is imported when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hpstore.cli.options import Json
from hpstore.cli.output import emit_json, table, write_err, write_out
from hpstore.errors import ConfigError

if TYPE_CHECKING:
    from hpstore.loaders.traces.trace_comparison import CapacityRow
    from hpstore.loaders.traces.trace_files import RecordedTrace

PICTURE = "hit-ratios.png"  # unless --plot names another file


class _Simulate(TyperCommand):
    """A command whose --plot may come without a file."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's Context
        """Give a --plot that nothing follows, or another option does, its file."""
        given: list[str] = []
        for word, following in zip(args, [*args[1:], "-"], strict=True):
            bare = word == "--plot" and following.startswith("-")
            given += [word, PICTURE] if bare else [word]
        return super().parse_args(ctx, given)


cache = typer.Typer(no_args_is_help=True, help="The loader's cache: play recorded traces to it.")


@cache.callback()
def about() -> None:
    """The loader's cache: play recorded traces to it."""


@cache.command(name="simulate", cls=_Simulate)
def play(
    trace: Annotated[Path, typer.Argument(help="a file of requests: oracleGeneral, CSV or MSR")],
    policies: Annotated[
        str, typer.Option(help="comma-separated: all, hpstore, LRU, ..., MIN")
    ] = "all",
    percents: Annotated[
        str, typer.Option("--capacity", help="percent of the different blocks, comma-separated")
    ] = "2,5,10,20,40",
    plot: Annotated[
        Path | None,
        typer.Option(help=f"draw the ratios into this PNG or SVG ({PICTURE} where none is named)"),
    ] = None,
    format: Annotated[str, typer.Option(help="auto, oracle, msr or csv")] = "auto",  # noqa: A002
    column: Annotated[str, typer.Option(help="of CSV: name or number of the object's column")] = "",
    block_bytes: Annotated[int, typer.Option(help="of MSR: bytes of a block")] = 4096,
    limit: Annotated[
        int | None, typer.Option(help="most requests that are read (default: 20 million)")
    ] = None,
    batch: Annotated[int, typer.Option(help="requests that hpstore decides on at a time")] = 16,
    as_json: Json = False,
) -> None:
    """Compare hit ratios of hpstore's policy, plain policies and Belady's MIN on a trace.

    hpstore cache simulate trace.oracleGeneral.zst --policies all --plot
    """
    from hpstore.loaders.traces.trace_comparison import capacities_of, compare, policies_named
    from hpstore.loaders.traces.trace_files import MOST_REQUESTS, read_trace

    named = policies_named(policies)
    if batch < 1:
        raise ConfigError(f"batch {batch}: at least 1")
    if plot is not None:
        _need_matplotlib()
    found = read_trace(
        trace,
        format=format,
        column=column,
        block_bytes=block_bytes,
        limit=MOST_REQUESTS if limit is None else limit,
    )
    rooms = capacities_of(percents, found.blocks)
    rows = list(compare(found.requests, found.blocks, rooms, named, batch=batch))
    if as_json:
        emit_json(_facts(found, rows))
    else:
        _print(trace.name, named, found, rows)
    if plot is not None:  # last: a picture that cannot be written leaves the figures
        _draw(plot, trace.name, found, rows)
        write_err(f"drawn: {plot}\n")


def _print(
    name: str, policies: tuple[str, ...], found: RecordedTrace, rows: list[CapacityRow]
) -> None:
    write_out(
        f"{name}: {len(found.requests):,} requests of {found.blocks:,} blocks, "
        f"{found.format}{', cut' if found.cut else ''}; hit ratios in %\n"
    )
    best = ("best plain", "difference") if any(r.difference is not None for r in rows) else ()
    table("", ("blocks", "share", *policies, *best), [_line(found, row) for row in rows])


def _line(found: RecordedTrace, row: CapacityRow) -> tuple[str, ...]:
    ratios = [f"{100 * ratio:.2f}" for ratio in row.hit_ratios.values()]
    share = f"{100 * row.capacity_blocks / found.blocks:.1f} %"
    gain = row.difference
    last = () if gain is None else (row.best_plain, f"{100 * gain:+.2f}")
    return (f"{row.capacity_blocks:,}", share, *ratios, *last)


def _facts(found: RecordedTrace, rows: list[CapacityRow]) -> dict[str, Any]:
    # Any: JSON
    return {
        "format": found.format,
        "requests": len(found.requests),
        "blocks": found.blocks,
        "cut": found.cut,
        "capacities": [
            {
                "blocks": row.capacity_blocks,
                "hit_ratios": row.hit_ratios,
                "best_plain": row.best_plain,
                "difference": row.difference,
            }
            for row in rows
        ],
    }


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib: {error}; pip install 'hpstore[plot]', or leave --plot out"
        ) from error


def _draw(path: Path, title: str, found: RecordedTrace, rows: list[CapacityRow]) -> None:
    import matplotlib as mpl

    from hpstore.loaders.traces.trace_comparison import OURS

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    shares = [100 * row.capacity_blocks / found.blocks for row in rows]
    for name in rows[0].hit_ratios:
        style: dict[str, Any] = {"linewidth": 1, "marker": "."}
        if name == OURS:
            style = {"linewidth": 2.5, "marker": "o", "zorder": 5}
        axes.plot(shares, [100 * row.hit_ratios[name] for row in rows], label=name, **style)
    axes.set(xlabel="capacity, % of the different blocks", ylabel="hit ratio, %", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be drawn: {error}; the trace is not changed") from error
    finally:
        plt.close(figure)
