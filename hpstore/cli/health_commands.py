"""Health commands: train a failure forecast, evaluate it, report on disks; an operator's words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpstore.cli.agent_requests import tell
from hpstore.cli.confirm import agree_to_replace
from hpstore.cli.forecast_tables import show_choice, show_evaluation
from hpstore.cli.options import DeviceName, Json, PoolName, Yes, size_option
from hpstore.cli.output import emit_json, output_file, require_place, table, write_err, write_out
from hpstore.cli.progress_bar import progress_bar
from hpstore.errors import ConfigError, ForecastError
from hpstore.health.policy.operator_commands import Command
from hpstore.units import GIB, format_bytes

if TYPE_CHECKING:
    from hpstore.health.forecast.drive_histories import Gathered
    from hpstore.health.forecast.drive_stats import BadRows
    from hpstore.health.forecast.evaluate_model import ForecastEvaluation
    from hpstore.health.forecast.forecast_model import ForecastModel

health = typer.Typer(
    no_args_is_help=True,
    help="Forecast disk failures; overrule what the agent makes of a device.",
)

Files = Annotated[
    list[Path], typer.Argument(help="drive-stats files or folders: .csv, .csv.xz, .gz, .zip")
]
Family = Annotated[
    str | None, typer.Option(help="drive model of the files, for those without a model column")
]
Memory = Annotated[int, size_option("for rows; healthy drives are sampled to fit", "1GiB")]
_SALT = "memory"


@health.command()
def train(
    files: Files,
    out: Annotated[Path, typer.Option(help="the model to write")],
    horizon_days: Annotated[int, typer.Option(min=1, max=365, help="days ahead")] = 14,
    until: Annotated[
        str, typer.Option(help="learn from days up to this date, or last (default: two thirds)")
    ] = "",
    family: Family = None,
    folds: Annotated[int, typer.Option(min=2, max=64, help="parts; each spares its drives")] = 5,
    trees: Annotated[int, typer.Option(min=1, max=2000, help="of each part")] = 100,
    min_failures: Annotated[
        int, typer.Option(min=1, help="failed drives that a family needs to be covered")
    ] = 10,
    memory: Memory = GIB,
    seed: Annotated[int, typer.Option(min=0, help="of folds and samples; recorded")] = 0,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Learn to forecast failures from drive-stats files, and evaluate on the days left over.

    hpstore health train data_Q1_2025.zip data_Q2_2025.zip --horizon-days 14 --out model.json
    """
    from hpstore.health.forecast.drive_stats import BadRows
    from hpstore.health.forecast.train_model import TrainOptions
    from hpstore.health.forecast.train_model import train as learn

    require_place(out)  # it takes hours
    agree_to_replace(out, yes=yes, named=True)
    bad = BadRows()
    gathered = _load(files, bad, family, memory)
    options = TrainOptions(
        horizon_days=horizon_days, folds=folds, trees=trees, seed=seed, min_failures=min_failures
    )
    with progress_bar("train") as bar:
        model = learn(
            gathered,
            until=_split(gathered, until),
            files=[path.name for path in files],
            options=options,
            step=bar.steps,
        )
    evaluation, unevaluated = _evaluated(model, gathered, seed)
    card = (
        model.card if evaluation is None else replace(model.card, evaluation=evaluation.as_dict())
    )
    with output_file(out) as target:
        target.write(replace(model, card=card).to_json().encode())
    if as_json:
        emit_json(
            {
                "model": str(out),
                "card": card.as_dict(),
                "bad_rows": bad.as_dict(),
                "not_evaluated": unevaluated,
            }
        )
        return
    _show_trained(model, str(out), bad, evaluation or unevaluated)


def _show_trained(
    model: ForecastModel, out: str, bad: BadRows, judged: ForecastEvaluation | str
) -> None:
    """`judged`: the evaluation, or why there is none."""
    _show_bad(bad)
    _show_card(model, out)
    if isinstance(judged, str):
        write_out(f"not evaluated: {judged}\n")
    else:
        show_evaluation(judged)


def _split(gathered: Gathered, until: str) -> int:
    """The last day that is learnt from."""
    from hpstore.health.forecast.labels import split_day

    first = min(int(h.days[0]) for h in gathered.histories)
    return split_day(first, max(int(h.days[-1]) for h in gathered.histories), until)


def _evaluated(
    model: ForecastModel, gathered: Gathered, seed: int
) -> tuple[ForecastEvaluation | None, str]:
    """The evaluation on the days left over, or why there is none."""
    from hpstore.health.forecast.evaluate_model import evaluate as judge

    try:
        return judge(model, gathered, far=0.01, seed=seed), ""
    except ForecastError as error:
        return None, str(error)


@health.command()
def evaluate(
    files: Files,
    model: Annotated[Path, typer.Option(help="the model to judge with")],
    far: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="share of healthy drives alarmed at most")
    ] = 0.01,
    healthy_share: Annotated[
        float,
        typer.Option(min=1e-6, max=1.0, help="of all healthy drives, those in the files"),
    ] = 1.0,
    family: Family = None,
    resamples: Annotated[int, typer.Option(min=10, max=100_000, help="for the intervals")] = 1000,
    memory: Memory = GIB,
    seed: Annotated[int, typer.Option(min=0, help="of the resamples")] = 0,
    as_json: Json = False,
) -> None:
    """Find out what a model forecasts: by drive, after the days and without the drives it knows.

    hpstore health evaluate data_Q3_2025.zip --model model.json --far 0.01
    """
    from hpstore.health.forecast.drive_stats import BadRows
    from hpstore.health.forecast.evaluate_model import evaluate as judge
    from hpstore.health.forecast.forecast_model import load_model

    bad, loaded = BadRows(), load_model(str(model))
    gathered = _load(files, bad, family, memory)
    found = judge(
        loaded, gathered, far=far, resamples=resamples, healthy_share=healthy_share, seed=seed
    )
    if as_json:
        emit_json({**found.as_dict(), "bad_rows": bad.as_dict()})
        return
    _show_bad(bad)
    show_evaluation(found)


@health.command()
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="drive-stats files; without any, the disks of this machine"),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="a trained model")] = None,
    far: Annotated[float, typer.Option(min=0.0, max=0.5, help="of healthy drives")] = 0.01,
    record: Annotated[
        Path | None, typer.Option(help="add today's counters to this file, and look back in it")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="the record is the one that this pool's agent keeps")
    ] = None,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", min=0.1, help="seconds for each disk")
    ] = 20.0,
    everything: Annotated[bool, typer.Option("--all", help="drives without a sign, too")] = False,
    family: Family = None,
    memory: Memory = GIB,
    as_json: Json = False,
) -> None:
    """Flags, sum of error counters and forecast of disks, with reasons.

    hpstore health report --record /var/lib/hpstore/disks.csv --model model.json

    hpstore health report --pool pool.toml
    """
    from hpstore.cli.health_report import agents_record, report_files, report_machine
    from hpstore.health.forecast.forecast_model import load_model
    from hpstore.health.forecast.forecaster import FailureForecaster

    forecaster = FailureForecaster(load_model(str(model)) if model else None, far=far)
    if pool is not None:
        if files or record is not None:
            raise ConfigError("--pool names a record: give neither --record nor files with it")
        record = agents_record(pool)
    if not files:
        report_machine(forecaster, record, timeout_seconds, as_json=as_json)
        return
    if record is not None:
        raise ConfigError("--record is for the disks of this machine: give it, or files")
    from hpstore.health.forecast.drive_stats import BadRows

    bad = BadRows()
    gathered = _load(files, bad, family, memory)
    if not as_json:
        _show_bad(bad)
    report_files(forecaster, gathered, bad, everything=everything, as_json=as_json)


@health.command()
def ignore(pool: PoolName, device: DeviceName, as_json: Json = False) -> None:
    """Never act on a device's slowness, until readmit.

    hpstore health ignore pool.toml /mnt/b
    """
    tell(pool, device, Command.IGNORE, as_json=as_json)


@health.command()
def accept(pool: PoolName, device: DeviceName, as_json: Json = False) -> None:
    """Take what a device does now as normal for it.

    hpstore health accept pool.toml /mnt/b
    """
    tell(pool, device, Command.ACCEPT, as_json=as_json)


@health.command()
def maintenance(pool: PoolName, device: DeviceName, as_json: Json = False) -> None:
    """Leave a device to an operator until readmit.

    hpstore health maintenance pool.toml /mnt/b
    """
    tell(pool, device, Command.MAINTENANCE, as_json=as_json)


def _load(files: list[Path], bad: BadRows, family: str | None, memory: int) -> Gathered:
    from hpstore.health.forecast.drive_histories import load_histories, stored_bytes

    paths = [str(path) for path in files]
    total = 2 * stored_bytes(paths)
    with progress_bar("read") as bar:
        gathered = load_histories(
            paths,
            bad=bad,
            salt=_SALT,
            memory_bytes=memory,
            family=family,
            progress=lambda count: bar.advance(count, total),
        )
    if gathered.healthy_share < 1:
        write_err(
            f"hpstore: note: {100 * gathered.healthy_share:.1f} % of the healthy drives fit into "
            f"{format_bytes(memory)} of memory; the others were left out\n"
        )
    if gathered.repeated:
        write_err(f"hpstore: note: {gathered.repeated} rows repeat a drive and day\n")
    return gathered


def _show_bad(bad: BadRows) -> None:
    for line in bad.named:
        write_err(f"LEFT OUT {line}\n")
    if bad.count > len(bad.named):
        write_err(f"and {bad.count - len(bad.named)} more bad rows\n")


def _show_card(model: ForecastModel, path: str) -> None:
    card = model.card
    rows = [(name, facts.drives, facts.failed, "covered") for name, facts in card.families.items()]
    rows += [
        (name, facts.drives, facts.failed, "left out: too few failures")
        for name, facts in card.left_out.items()
    ]
    table("", ("family", "drives", "failed", ""), rows)
    write_out(
        f"{path}: failures within {card.horizon_days} days, learned from {card.known_from} to "
        f"{card.known_until}: {card.positive_rows} days before failures, {card.negative_rows} of "
        f"healthy drives, {len(model.parts)} parts\n"
    )
    show_choice(model)
