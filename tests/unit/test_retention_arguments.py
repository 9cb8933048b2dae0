"""Which steps stay: what keep_last, keep_every and keep_best may be."""

from __future__ import annotations

from typing import Any

import pytest

from hpstore.checkpoint import Best
from hpstore.checkpoint.catalog.retention import Retention
from hpstore.errors import ConfigError


def test_keep_best_says_which_is_better() -> None:
    """The mode stands before the name, which may hold colons itself."""
    assert Best.of("min:loss") == Best(metric="loss", mode="min")
    assert Best.of("max:val:acc") == Best(metric="val:acc", mode="max")
    assert Best.of(None) is None
    two = Best(metric="acc", mode="max", count=2)
    assert Best.of(two) is two


@pytest.mark.parametrize("said", ["loss", "acc", "mean:loss", "", "val:loss", 5])
def test_a_bare_metric_is_refused_with_both_spellings(said: Any) -> None:
    """It was taken for the smallest: keep_best="acc" kept the worst."""
    with pytest.raises(ConfigError, match=f'"min:{said}" .* "max:{said}"') as caught:
        Best.of(said)
    assert isinstance(caught.value, ValueError)


def test_a_best_has_no_default_mode() -> None:
    """To leave it out is Python's own error."""
    with pytest.raises(TypeError, match="mode"):
        Best(metric="loss")  # type: ignore[call-arg]  # on purpose


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"metric": "loss", "mode": "least"}, "mode 'least' of Best is neither 'min' nor 'max'"),
        ({"metric": "", "mode": "min"}, "metric '' of Best is not a name"),
    ],
)
def test_a_wrong_best_is_refused(words: dict[str, Any], said: str) -> None:
    """When it is made, not at the first save."""
    with pytest.raises(ConfigError, match=said):
        Best(**words)


def test_retention_takes_what_keep_best_means() -> None:
    """As a Checkpointer hands it on."""
    assert Retention(keep_last=1, keep_best=Best.of("min:loss")).keep_best is not None
