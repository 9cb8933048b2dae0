"""Which disks will fail soon: flags, an explainable score, and a model that users train."""

from hpstore.health.forecast.evaluate_model import ForecastEvaluation, evaluate
from hpstore.health.forecast.forecast_model import ForecastModel, load_model
from hpstore.health.forecast.forecaster import FailureForecaster, Forecast, Risk
from hpstore.health.forecast.train_model import TrainOptions, train

__all__ = [
    "FailureForecaster",
    "Forecast",
    "ForecastEvaluation",
    "ForecastModel",
    "Risk",
    "TrainOptions",
    "evaluate",
    "load_model",
    "train",
]
