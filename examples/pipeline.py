"""Train a byte-level GPT in pipeline stages, fed from a pool and checkpointed into it.

    hpstore create pool.toml --data 4 --parity 2 disk0 disk1 disk2 disk3 disk4 disk5
    export RUN="examples/pipeline.py --pool pool.toml"
    torchrun --standalone --nproc-per-node 2 $RUN --steps 20
    torchrun --standalone --nproc-per-node 1 $RUN --steps 40 --resume

Kill it whenever you like, delete any two of the six disks, and go on with `--resume`: on as many
processes bit-exactly, on 1, 2 or 4 of them with the same losses. With `--max-restarts N` torchrun
does it by itself. Each process holds one stage of `--schedule gpipe` and `1f1b`, two of the others.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from model import ByteGPT
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from train import Events, write_tokens

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, list_datasets
from hpstore.trainers import PipelineHooks
from hpstore.trainers.pipelining import SCHEDULES, make_schedule, stages_of
from hpstore.units import positive

RECOMPUTED = ("gpipe", "1f1b")  # the schedules that --recompute was tried with


class Part(nn.Module):
    """Some blocks of a ByteGPT, with what comes before the first and behind the last.

    Names are those of the whole model: block 3 is `blocks.3` in whatever stage it is.
    """

    def __init__(self, whole: ByteGPT, start: int, stop: int, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        if start == 0:
            self.tokens, self.places = whole.tokens, whole.places
        self.blocks = nn.ModuleDict({str(n): whole.blocks[n] for n in range(start, stop)})
        if stop == len(whole.blocks):
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq) of bytes or (batch, seq, width) -> (batch, seq, width or 256)."""
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", required=True, help="pool.toml, or a pool's name")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="gpipe")
    parser.add_argument("--microbatches", type=positive, default=8, help="of one step")
    parser.add_argument("--rows", type=positive, default=4, help="samples of a micro-batch")
    parser.add_argument("--checkpoint-every", type=positive, default=5)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--prefix", default="runs/pipeline", help="where checkpoints go")
    parser.add_argument("--snapshot", choices=["free", "bubbles", "inline"], default="free")
    parser.add_argument("--feed-lazily", action="store_true", help="micro-batches one by one")
    parser.add_argument("--recompute", action="store_true", help="keep inputs of blocks only")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--length", type=positive, default=64, help="tokens a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", help="append one JSON line an event to this file")
    options = parser.parse_args()
    if options.recompute and options.schedule not in RECOMPUTED:
        parser.error("--recompute goes with gpipe and 1f1b")
    return options


def join() -> None:
    """Form the group. Each restart by torchrun gets names of its own in the launcher's store, where
    the addresses of the processes that died still stand."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo")
        return
    world = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False
    )
    again = os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"hpstore-{again}", store),
        rank=int(os.environ["RANK"]),
        world_size=world,
    )


def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.reshape(-1, 256), wanted.reshape(-1))


def main() -> int:
    options = parse()
    join()
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = stages_of(options.schedule, rank, world)
    count = world * len(mine)
    events = Events(options.events, silent=count - 1 not in mine)
    with hpstore.open(options.pool) as pool:
        name = f"python-stdlib-{options.length}"
        if rank == 0 and name not in [found.name for found in list_datasets(pool)]:
            write_tokens(pool, name, options.length)
        dist.barrier()
        loader = DataLoader(
            Dataset(pool, name),
            batch_size=options.rows,
            shuffle=True,
            seed=options.seed,
            drop_last=True,
        )
        with Checkpointer(pool, options.prefix, keep_last=3) as checkpointer:
            if checkpointer.steps() and not options.resume and not restarted():
                raise hpstore.errors.CheckpointError(
                    f"{options.prefix} holds checkpoints already: --resume, or another --prefix"
                )
            train(options, mine, count, loader, checkpointer, events)
        loader.close()
    dist.barrier()  # gloo aborts a process whose peer has left before it
    dist.destroy_process_group()
    return 0


def restarted() -> bool:
    """Whether torchrun has started this job anew after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def train(
    options: argparse.Namespace,
    mine: list[int],
    count: int,
    loader: DataLoader,
    checkpointer: Checkpointer,
    events: Events,
) -> None:
    hooks = PipelineHooks(
        checkpointer,
        loader,
        stages=mine,
        num_stages=count,
        every=options.checkpoint_every,
        inputs=lambda batch: batch["tokens"][:, :-1].long(),
        target=lambda batch: batch["tokens"][:, 1:].long(),
        before_optimizer=lambda: hooks.clip_grad_norm(1.0),
        snapshot=options.snapshot,
        lazy=options.feed_lazily,
    )
    torch.manual_seed(options.seed)
    whole = ByteGPT(width=options.width, layers=options.layers, length=options.length)
    cuts = [options.layers * n // count for n in range(count + 1)]
    stage_class, device = hooks.wrap_stage(PipelineStage), torch.device("cpu")
    stages = [
        stage_class(
            Part(whole, cuts[n], cuts[n + 1], recompute=options.recompute), n, count, device
        )
        for n in mine
    ]
    schedule = make_schedule(options.schedule, stages, options.microbatches, loss)
    optimizer = torch.optim.AdamW(
        [p for stage in stages for p in stage.submod.parameters()], lr=1e-3
    )
    start = hooks.restore(stages, optimizer)
    events("start", f"{count} stages, from step {start}", step=start, stages=count)
    for step in range(start, options.steps):
        record = hooks.step(schedule, optimizer)
        events(
            "step",
            f"step {step}: loss {record.loss:.6f}" if record.losses else "",
            step=step,
            loss=record.loss,
            digest=f"{hooks.ledger.digest:016x}",
            samples=hooks.ledger.samples,
        )
    if options.steps > start:
        if hooks.completed % options.checkpoint_every:
            hooks.save()
        checkpointer.wait()
        report = hooks.bubbles()
        events("end", str(report), idle=report.idle_share)
    hooks.close()


if __name__ == "__main__":
    sys.exit(main())
