"""Which disks will fail soon: flags, an explainable score, and a model that users train."""

from hpstore.health.forecast.evaluation import Evaluation, evaluate
from hpstore.health.forecast.forecaster import FailureForecaster, Forecast, Risk
from hpstore.health.forecast.model import ForecastModel, load_model
from hpstore.health.forecast.training import TrainOptions, train

__all__ = ["Evaluation", "FailureForecaster", "Forecast", "ForecastModel", "Risk", "TrainOptions",
           "evaluate", "load_model", "train"]  # fmt: skip
