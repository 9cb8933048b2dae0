"""The numbers that a save records beside its state, for keep_best and for whoever looks later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpstore.errors import ConfigError

# Any: numbers of any type that float() takes: numpy's, and tensors of one element


def recorded_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a manifest records of them, {} for none. Raises ConfigError for what is no number."""
    if not metrics:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics= takes numbers by name, not a {type(metrics).__name__}")
    return {"metrics": {str(name): _number(name, value) for name, value in metrics.items()}}


def requiring(
    metrics: Mapping[str, Any] | None, require: Callable[[int], None] | None
) -> Callable[[int], None]:
    """`require`, after the metrics were looked at."""

    def check(step: int) -> None:
        recorded_metrics(metrics)
        if require is not None:
            require(step)

    return check


def _number(name: object, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    shown = repr(value)
    raise ConfigError(
        f"metrics[{name!r}] is {shown[:60]}{'...' if len(shown) > 60 else ''}, not a number. "
        "Nothing was saved"
    )
