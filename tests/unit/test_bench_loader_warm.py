"""What is measured of a loader whose data are in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.benchmarks.harness.sessions import Found
from hpstore.benchmarks.loader import loader_sessions
from hpstore.benchmarks.loader.loader_data import Data
from hpstore.benchmarks.loader.loader_peers import LoaderPeer, Memmap
from hpstore.benchmarks.loader.loader_sessions import (
    WARM_EPOCHS,
    WARM_SECONDS,
    LoaderSpec,
    warm_epochs,
)
from hpstore.units import MIB


@pytest.mark.parametrize(
    ("seconds", "cut", "epochs"),
    [
        ([WARM_SECONDS], False, 1),
        ([WARM_SECONDS / 4, WARM_SECONDS / 2, WARM_SECONDS / 4], False, 3),
        ([WARM_SECONDS / 100] * WARM_EPOCHS, False, WARM_EPOCHS),
        ([WARM_SECONDS / 4], True, 1),
    ],
)
def test_a_warm_figure_is_all_samples_over_all_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: list[float], cut: bool, epochs: int
) -> None:
    """Whole epochs from the second on: enough for a second, at most five; none after a cut one."""
    asked: list[int] = []

    def scripted(who: LoaderPeer, number: int, spec: LoaderSpec) -> Found:
        asked.append(number)
        took = seconds[number - 1]
        rate = 1000 / took
        return {"rate": rate, "steady_rate": rate, "seconds": took, "main_us": 3.0, "cut": cut}

    monkeypatch.setattr(loader_sessions, "timed_epoch", scripted)
    data = Data("A", MIB)
    spec = LoaderSpec(contender="", directory=tmp_path, data=data)
    found = warm_epochs(Memmap(tmp_path, data), spec)
    assert asked == list(range(1, epochs + 1))
    assert found["rate"] == pytest.approx(1000 * epochs / sum(seconds))
    assert found["second_epoch_rate"] == pytest.approx(1000 / seconds[0])
    assert (found["cut"], found["epochs"]) == (cut, epochs)
