"""The optimizers of one rank, of which there may be several: one for matrices, one for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from hpstore.errors import ConfigError


# Any below: containers of optimizers are classes of their trainers
class Optimizers:
    """What restore() was given: an optimizer, a list of them, or an object that holds some and has
    step() and zero_grad(), such as torchtitan's OptimizersContainer.

    `each`: the optimizers, in order. A checkpoint has theirs, by the names of their parameters;
    what a container has besides is not saved. Raises ConfigError where there is none.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.each = tuple(dict.fromkeys(_found(given)))
        if not self.each:
            raise ConfigError(
                f"no optimizer in a {type(given).__name__}: give a torch.optim.Optimizer, a list "
                "of them, or an object that has some in a list or dict. Nothing was changed."
            )
        self._container = given if not isinstance(given, (list, tuple, Optimizer)) else None
        if isinstance(given, Optimizer) and self.each != (given,):
            self._container = given

    @property
    def saved(self) -> Optimizer | list[Optimizer]:
        """What a state has: the one, or a list."""
        return self.each[0] if self.given is self.each[0] else list(self.each)

    def are(self, given: Any) -> bool:
        """Whether these are meant: the same object, or a list of the same optimizers."""
        same = isinstance(given, (list, tuple)) and tuple(dict.fromkeys(_found(given))) == self.each
        return given is self.given or same

    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all of them, in order."""
        return [p for one in self.each for p in parameters_of(one)]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        if self._container is not None:
            self._container.zero_grad()
            return
        for one in self.each:
            one.zero_grad(set_to_none=True)

    def step(self) -> None:
        """One step of each."""
        if self._container is not None:
            self._container.step()
            return
        for one in self.each:
            one.step()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Their classes' names, where there are several; another rank's must be alike."""
        return tuple(type(one).__name__ for one in self.each) if len(self.each) > 1 else ()


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """In the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _found(given: Any) -> Iterator[Optimizer]:
    """The optimizers in what was given, one level of containers deep."""
    if isinstance(given, (list, tuple)):
        for part in given:
            yield from _found(part)
        return
    if isinstance(given, Optimizer):
        inside = getattr(given, "optimizers", None)  # torchtitan's container is one itself
        held = [one for one in inside or () if isinstance(one, Optimizer)]
        yield from held or [given]
        return
    for value in list(getattr(given, "__dict__", {}).values()):
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(part, Optimizer):
                yield part
