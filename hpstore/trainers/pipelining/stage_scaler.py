"""A GradScaler over the stages of a pipeline: all ranks scale, skip and grow alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hpstore.errors import ConfigError
from hpstore.trainers.pipelining.gradients import share_overflow
from hpstore.trainers.pipelining.joint_optimizers import Optimizers, parameters_of


# Any below: GradScalers have no public type that all of them share
class Scaling:
    """Of one rank. Without a scaler it does nothing to a loss, and `active` is False."""

    def __init__(self) -> None:
        self._scaler: Any = None
        self._optimizers: tuple[Optimizer, ...] = ()
        self._device = torch.device("cpu")
        self._overflow = False  # of this step, on any rank
        self._standing: Optimizer | None = None  # for a rank without gradients
        self._unscaled: list[torch.Tensor] = []

    def begin(self, scaler: Any, optimizers: Optimizers, device: torch.device) -> None:
        """From now on with this scaler, which may be None. Others of its state were loaded."""
        self._scaler, self._optimizers, self._device = scaler, optimizers.each, device
        if scaler is not None:  # it begins with its first scale(), which only the last stage calls
            scaler.scale(torch.zeros(1, device=device))
            standing = torch.nn.Parameter(torch.zeros(1, device=device))
            self._standing = torch.optim.SGD([standing], lr=0.0)

    @property
    def active(self) -> bool:
        """Whether there is a scaler."""
        return self._scaler is not None

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The loss for a schedule: scaled for the backward, not in the records."""

        def scaled(*args: Any, **options: Any) -> torch.Tensor:
            value = function(*args, **options)
            self._unscaled.append(value.detach())
            return value if self._scaler is None else self._scaler.scale(value)

        return scaled

    def forget(self) -> None:
        """A step begins."""
        self._unscaled.clear()

    def plain(self, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Unscaled and detached. The trial run of the shapes has computed one too many."""
        if self._scaler is None or not losses:
            return [loss.detach() for loss in losses]
        if len(self._unscaled) < len(losses):
            raise ConfigError(
                "a GradScaler scales the loss: give the schedule loss_fn=hooks.loss(loss). The "
                "step is void."
            )
        return self._unscaled[-len(losses) :]

    def unscale(self) -> None:
        """Gradients are whole; an overflow on one rank becomes one on all. Collective."""
        each = [parameters_of(optimizer) for optimizer in self._optimizers]
        self._overflow = share_overflow(each, self._device)
        graded = self._graded()
        for optimizer in graded:
            self._scaler.unscale_(optimizer)
        if not graded:
            assert self._standing is not None
            for p in parameters_of(self._standing):  # so that the scale goes with the others
                p.grad = torch.full_like(p, float("inf") if self._overflow else 0.0)
            self._scaler.unscale_(self._standing)

    def _graded(self) -> list[Optimizer]:
        """Optimizers with gradients; a scaler steps no other."""
        return [
            optimizer
            for optimizer in self._optimizers
            if any(p.grad is not None for p in parameters_of(optimizer))
        ]

    def step(self) -> None:
        """The optimizers, unless there was an overflow; then the scale of the next step."""
        graded = self._graded()
        if not graded:
            self._scaler.step(self._standing)
        for optimizer in self._optimizers:
            if optimizer in graded:
                self._scaler.step(optimizer)
            elif not self._overflow:
                optimizer.step()  # it has nothing to change; steps are counted
        self._scaler.update()

    def undo(self) -> None:
        """The step is void: gradients may be unscaled again; the scale is unchanged."""
        self._scaler.update(new_scale=self._scaler.get_scale())
