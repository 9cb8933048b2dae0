"""One rank of a packed run, started by torchrun: it writes the tokens that it was given."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch.distributed as dist

import hpstore
from hpstore.loaders import DataLoader, Dataset, Packing

LENGTH, EOS = 128, 7


def main() -> None:
    """Arguments: the pool's file, batches to take (0: the rest of the epoch), batch size."""
    config, steps, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = config.parent / "state.json"
    with hpstore.open(config) as pool, Dataset(pool, "a") as data:
        packing = Packing(field="tokens", length=LENGTH, separator=EOS)
        with closing(
            DataLoader(data, size, shuffle=True, seed=5, tail="uneven", packing=packing)
        ) as loader:
            if saved.exists():
                loader.load_state_dict(json.loads(saved.read_text()))
            batches = iter(loader)
            got = [batch["tokens"].tolist() for batch in islice(batches, steps or None)]
            state = loader.state_dict()
    (config.parent / f"tokens-{world}-{rank}.json").write_text(json.dumps(got))
    dist.barrier()  # all have loaded the state before it is written
    if rank == 0:
        saved.write_text(json.dumps(state))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
