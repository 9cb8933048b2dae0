"""PyTorch Ignite: python examples/trainers/ignite_loop.py pool.toml."""

from __future__ import annotations

import parts
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint

import hpstore
from hpstore.loaders import DataLoader
from hpstore.trainers import PoolSaveHandler


class Steps:
    """How many are done; saved with the rest."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Inverse of state_dict."""
        self.done = state["done"]


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    options = parts.options(__doc__)
    with hpstore.open(options.pool) as pool, PoolSaveHandler(pool, "runs/ignite") as handler:
        model = parts.net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(parts.rows(pool), batch_size=8, shuffle=True, seed=0)

        def update(engine: Engine, batch: dict[str, torch.Tensor]) -> None:
            optimizer.zero_grad()
            parts.loss(model, batch).backward()
            optimizer.step()
            step.done += 1
            if step.done == options.steps:
                engine.terminate()

        step = Steps()
        trainer = Engine(update)
        to_save = {"model": model, "optimizer": optimizer, "loader": loader, "step": step}
        saver = Checkpoint(to_save, handler, n_saved=2, global_step_transform=lambda *_: step.done)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=options.every), saver)
        if handler.latest() is not None:
            Checkpoint.load_objects(to_save, checkpoint=handler.load())
        if step.done < options.steps:
            trainer.run(loader, max_epochs=1000)
        handler.wait()
        parts.show(step.done, model.state_dict())
        loader.close()


if __name__ == "__main__":
    main()
