"""The ways of training that are compared. Each is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from methods.base import Method

_HOMES = {
    "ddp": "replicas.Ddp",
    "allreduce": "replicas.AllReduce",
    "allreduce_bucket": "replicas.AllReduceBuckets",
    "ps": "servers.ParameterServer",
    "ps_reduce": "servers.ParameterServerReduce",
    "fsdp2": "sharded.Fsdp2",
    "gpipe": "pipelines.GPipe",
    "f1b": "pipelines.OneForwardOneBackward",
}


def method_named(name: str) -> type[Method]:
    """Its class."""
    module, _, kind = _HOMES[name].partition(".")
    found: type[Method] = getattr(import_module(f"methods.{module}"), kind)
    return found
