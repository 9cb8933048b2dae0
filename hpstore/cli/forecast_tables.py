"""What `health evaluate` shows: scores, families, probabilities, and what no score can find."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpstore.cli.output import table, write_out

if TYPE_CHECKING:
    from hpstore.health.forecast.alarm_scores import AlarmOutcome, Interval
    from hpstore.health.forecast.calibration import Reliability
    from hpstore.health.forecast.evaluate_model import ForecastEvaluation
    from hpstore.health.forecast.forecast_model import ForecastModel

_FAMILIES = 40  # rows that are shown; --json has all


def show_choice(model: ForecastModel) -> None:
    """Which score the alarms come from, and what it was compared with."""
    choice = model.card.choice
    if not isinstance(choice, dict):
        write_out("alarms come from the sum of SMART counters: an old model, not compared\n")
        return
    parts = [
        f"{name} {found['over_sum']:+.3f} "
        f"({found['over_sum_interval']['low']:+.3f} to {found['over_sum_interval']['high']:+.3f})"
        for name, found in choice["compared"].items()
        if name != "sum"
    ]
    why = (
        "none was shown to find more than the sum"
        if model.judged_by == "sum"
        else "it was shown to find more than the sum"
    )
    write_out(
        f"alarms come from: {model.judged_by}. On the training days, drives apart, {why}: FDR "
        f"above that of the sum, 95 %: {', '.join(parts)}\n"
    )


def show_evaluation(found: ForecastEvaluation) -> None:
    """All of an evaluation, for people."""
    from hpstore.health.forecast.evaluate_model import LEAK_FDR

    _show_scores(found)
    silent = found.no_signal / found.failed_drives
    write_out(
        f"{found.failed_drives} drives that failed and {found.healthy_drives} that lived, "
        f"{found.after} to {found.until}. A failure counts as found by an alarm 1 to "
        f"{found.horizon_days} days before it\n"
        f"{found.no_signal} of the failed ones ({100 * silent:.0f} %) never had a sign: no score "
        f"of these counters finds more than {1 - silent:.2f}\n"
    )
    _show_strict(found)
    _show_families(found)
    if found.reliability is not None:
        _show_reliability(found.reliability, found.horizon_days)
    if found.refused:
        shown = ", ".join(f"{name} ({count})" for name, count in list(found.refused.items())[:8])
        write_out(f"refused, not in the model's card: {shown}\n")
    if max(result.at_far.fdr for result in found.scores.values()) > LEAK_FDR:
        write_out(f"an FDR above {LEAK_FDR} is a leak until proven otherwise\n")


def _show_scores(found: ForecastEvaluation) -> None:
    rows = []
    for name, result in found.scores.items():
        own = " (alarms)" if name == found.judged_by else ""
        rows.append(
            (
                f"{name}{own}, fitted threshold",
                *_cells(result.fitted),
                _signed(result.over_sum_fitted, result.over_sum_fitted_interval),
            )
        )
        rows.append(
            (
                f"{name}, threshold at this FAR",
                *_cells(result.at_far),
                _signed(result.over_sum, result.over_sum_interval),
            )
        )
    rows.append(("spec flags", *_cells(found.flags), ""))
    table(
        f"FDR at FAR <= {found.far:g}, by drive; fitted: threshold from training drives alone",
        ("score", "FDR", "95 %", "FAR", "lead days (quartiles)", "precision", "FDR over sum, 95 %"),
        rows,
    )


def _show_strict(found: ForecastEvaluation) -> None:
    rows = []
    for name, result in found.scores.items():
        fitted = result.fitted
        rows.append(
            (
                name,
                f"{fitted.earlier_hits} of {fitted.detected}",
                fitted.earlier,
                f"{fitted.fdr_strict:.3f}",
                _span(fitted.fdr_strict_interval),
                fitted.false_alarms_strict,
                "" if fitted.precision_strict is None else f"{fitted.precision_strict:.3f}",
            )
        )
    table(
        f"Strict: an alarm more than {found.horizon_days} days before the failure is a false one",
        ("score, fitted", "hits alarmed earlier", "drives", "FDR", "95 %", "false", "precision"),
        rows,
    )


def _show_families(found: ForecastEvaluation) -> None:
    worst = sorted(found.families.items(), key=lambda item: (-item[1].failed, item[0]))
    rows = [
        (
            name,
            f"{family.detected} of {family.failed}",
            "" if family.fdr is None else _span(family.fdr_interval),
            family.sum_detected,
            family.no_signal,
            f"{family.false_alarms} of {family.healthy}",
            "" if family.far is None else _span(family.far_interval),
        )
        for name, family in worst[:_FAMILIES]
    ]
    table(
        f"By family, alarms from {found.judged_by}, fitted threshold",
        ("family", "found", "95 %", "by the sum", "no sign", "false alarms", "95 %"),
        rows,
    )
    if len(worst) > _FAMILIES:
        write_out(f"and {len(worst) - _FAMILIES} more families (--json has all)\n")


def _show_reliability(found: Reliability, horizon: int) -> None:
    table(
        f"Reliability: probability of a failure within {horizon} days, by drive and day",
        ("predicted", "observed", "95 %, by drive", "days", "drives", "failed"),
        [
            (
                f"{row.predicted:.4f}",
                f"{row.observed:.4f}",
                f"{row.observed_interval.low:.4f}-{row.observed_interval.high:.4f}",
                row.drive_days,
                row.drives,
                row.failed_drives,
            )
            for row in found.bins
        ],
    )
    write_out(
        f"{found.predicted_days:.0f} days before a failure were predicted, {found.observed_days} "
        "were seen. Probabilities hold for drives as in the training files: with a tenth of the "
        "healthy ones they are up to ten times too high\n"
    )


def _cells(found: AlarmOutcome) -> tuple[str, ...]:
    lead = found.lead_days
    return (
        f"{found.fdr:.3f}",
        _span(found.fdr_interval),
        f"{found.far:.4f}",
        ""
        if lead is None
        else f"{lead.quartile_1:.1f} / {lead.median:.1f} / {lead.quartile_3:.1f}",
        "" if found.precision_rescaled is None else f"{found.precision_rescaled:.3f}",
    )


def _span(found: Interval) -> str:
    return f"{found.low:.3f}-{found.high:.3f}"


def _signed(value: float, found: Interval) -> str:
    return f"{value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
