"""Every optimizer, scheduler, metric and scaler that torch and torchmetrics ship comes back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch.optim import lr_scheduler, swa_utils

import hpstore
from tests.integration.test_checkpoint_types import restored
from tests.property.test_typed_values import same


def _optimizers() -> list[type[torch.optim.Optimizer]]:
    kinds = [getattr(torch.optim, name) for name in torch.optim.__all__]
    return [
        k
        for k in kinds
        if inspect.isclass(k)
        and issubclass(k, torch.optim.Optimizer)
        and k is not torch.optim.Optimizer
    ]


@pytest.mark.parametrize("kind", _optimizers(), ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_comes_back(pool: hpstore.Pool, kind: Any) -> None:
    """Its state_dict() is the same, types included; two more steps are, too."""

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        sparse = kind is torch.optim.SparseAdam
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=sparse))
        if kind is torch.optim.Muon:
            model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4, bias=False))
        return model, kind(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for n in range(2):

            def loss() -> Any:
                optimizer.zero_grad()
                found = model(torch.arange(4) + n).square().sum()  # noqa: B023
                found.backward()
                return found

            optimizer.step(loss)

    first, optimizer = build()
    train(first, optimizer)
    second, into = build()
    restored(pool, {"m": first, "o": optimizer}, {"m": second, "o": into})
    assert same(into.state_dict(), optimizer.state_dict())
    train(first, optimizer)
    train(second, into)
    assert same(dict(first.state_dict()), dict(second.state_dict()))


def _half(n: int) -> float:
    return 0.5**n


Scheduler = Callable[[torch.optim.Optimizer], Any]


SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, _half),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, _half),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.MultiStepLR(o, [2, 4])], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2), lr_scheduler.MultiStepLR(o, [3])]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01),
}


def test_the_list_of_schedulers_is_all_of_them() -> None:
    """One that a later torch adds is tried, too."""
    base = {"LRScheduler", "_LRScheduler"}
    assert {*lr_scheduler.__all__, "SWALR"} - base == SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_comes_back(pool: hpstore.Pool, name: str) -> None:
    """r_counter (pytorch#153842): its rates go on as those of one that was not interrupted."""

    def build() -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)
        return {"o": optimizer, "s": SCHEDULERS[name](optimizer)}

    def rates(state: dict[str, Any], steps: int) -> list[float]:
        found = []
        for n in range(steps):
            state["o"].step()
            state["s"].step(*((1.0 + n,) if name == "ReduceLROnPlateau" else ()))
            found.append(state["o"].param_groups[0]["lr"])
        return found

    saved, into = build(), build()
    rates(saved, 3)
    restored(pool, saved, into)
    assert rates(into, 7) == rates(saved, 7)


METRICS: dict[str, Callable[[], torchmetrics.Metric]] = {
    "MeanMetric": torchmetrics.MeanMetric,
    "SumMetric": torchmetrics.SumMetric,
    "MaxMetric": torchmetrics.MaxMetric,
    "MinMetric": torchmetrics.MinMetric,
    "CatMetric": torchmetrics.CatMetric,
    "RunningMean": lambda: torchmetrics.RunningMean(window=2),
    "MeanSquaredError": torchmetrics.MeanSquaredError,
    "R2Score": torchmetrics.R2Score,
    "PearsonCorrCoef": torchmetrics.PearsonCorrCoef,
    "SpearmanCorrCoef": torchmetrics.SpearmanCorrCoef,
}


@pytest.mark.filterwarnings("ignore:Metric .* will save all targets:UserWarning")
@pytest.mark.parametrize("name", METRICS)
def test_metrics_come_back(pool: hpstore.Pool, name: str) -> None:
    """States that grow are lists of tensors, of another length than those of a fresh metric."""

    def build() -> torchmetrics.Metric:
        metric = METRICS[name]()
        metric.persistent(True)
        return metric

    def update(metric: torchmetrics.Metric, seed: int) -> None:
        numbers = [torch.rand(5, generator=torch.Generator().manual_seed(seed + n)) for n in (0, 9)]
        pairs = any(part in name for part in ("Error", "Score", "Corr"))
        metric.update(*numbers[: 2 if pairs else 1])

    saved, into = build(), build()
    update(saved, 1)
    update(saved, 2)
    restored(pool, {"metric": saved}, {"metric": into})
    into._update_count = saved._update_count
    update(saved, 3)
    update(into, 3)
    assert torch.equal(saved.compute(), into.compute())


def test_averages_and_scalers_come_back(pool: hpstore.Pool) -> None:
    """AveragedModel counts and averages on; GradScaler keeps its scale."""

    def build() -> dict[str, Any]:
        torch.manual_seed(2)
        model = torch.nn.Linear(2, 2)
        ema = swa_utils.get_ema_multi_avg_fn(0.5)  # type: ignore[no-untyped-call]
        return {
            "m": model,
            "ema": swa_utils.AveragedModel(model, multi_avg_fn=ema),
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
        }

    saved, into = build(), build()
    with torch.no_grad():
        saved["m"].weight.add_(1)
    saved["ema"].update_parameters(saved["m"])
    saved["scaler"].scale(torch.ones(1))
    saved["scaler"].update(16.0)
    into["scaler"].scale(torch.ones(1))
    restored(pool, saved, into)
    assert same(dict(into["ema"].state_dict()), dict(saved["ema"].state_dict()))
    assert into["scaler"].get_scale() == 16.0
