"""A tiny training with torchtitan's own parts, and what its ranks do in tests/trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

# Any: torchtitan has no types where it is not installed


class TrainState:
    """What torchtitan's Trainer saves as its train_state."""

    step = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Inverse of state_dict."""
        self.step = int(state["step"])


class Net(torch.nn.Module):
    """Two layers, whose names have dots."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = {"0": torch.nn.Linear(6, 5), "1": torch.nn.Linear(5, 1)}
        self.layers = torch.nn.ModuleDict(layers)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Of one batch."""
        found: torch.Tensor = self.layers["1"](self.layers["0"](rows).tanh())
        return found


class Training:
    """Model, torchtitan's containers of optimizers and schedulers, and its manager."""

    def __init__(self, folder: str, *, seed: int, native: bool = False, **options: Any) -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.optimizer import (
            LRSchedulersContainer,
            OptimizersContainer,
            ParamGroupConfig,
        )

        from hpstore.trainers.torchtitan import PoolCheckpointManager

        self.model: Any = fully_shard(Net(seed))
        groups = [
            ParamGroupConfig(
                pattern=r"bias$", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}
            ),
            ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01}),
        ]
        made = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = made.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=4)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
        self.progress = TrainState()
        kind: Any = PoolCheckpointManager if native else CheckpointManager
        config = kind.Config(
            enable=True, folder=folder, interval=1, last_save_model_only=False, **options
        )
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
        )

    def steps(self, count: int) -> None:
        """Train and save each step."""
        for _ in range(count):
            rows = torch.full((3, 6), float(self.progress.step + 1))
            self.optimizers.zero_grad()
            self.model(rows).square().mean().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.progress.step += 1
            self.manager.save(self.progress.step)
        self.manager.maybe_wait_for_staging()
        self.manager.maybe_wait_for_saving()

    def facts(self) -> dict[str, Any]:
        """Whole tensors of the model, and of the optimizers as torchtitan names them."""
        options = StateDictOptions(full_state_dict=True)
        weights: Any = get_model_state_dict(self.model, options=options)
        moments = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in self.optimizers.state_dict().items()
        }
        return {
            "model": {name: tensor.clone() for name, tensor in weights.items()},
            "optimizer": {n: v.clone() if torch.is_tensor(v) else v for n, v in moments.items()},
            "last_epoch": self.schedulers.state_dict()["last_epoch"],
            "step": self.progress.step,
        }


def require_same(one: Any, other: Any) -> None:
    """Raise AssertionError unless nested facts are the same, bit by bit."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            require_same(one[name], other[name])
    elif torch.is_tensor(one):
        assert torch.equal(one, other)
    else:
        assert one == other
