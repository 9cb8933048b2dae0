"""Train a byte-level GPT on Python's own source, fed from a pool and checkpointed into it.

    hpstore create pool.toml --data 4 --parity 2 disk0 disk1 disk2 disk3 disk4 disk5
    python examples/train.py --pool pool.toml --steps 200 --checkpoint-every 50
    python examples/train.py --pool pool.toml --steps 400 --checkpoint-every 50 --resume

Kill it whenever you like and delete any two of the six disks: `--resume` goes on bit-exactly.
It does so on another number of ranks too (1, 2 or 4), in the midst of an epoch:

    torchrun --nproc-per-node 2 examples/train.py --pool pool.toml --steps 600 --resume
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from model import ByteGPT
from torch.nn import functional

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, list_datasets
from hpstore.units import positive

PARTS = 4  # gradients of a global batch are summed from so many parts, whoever computes them


def write_tokens(pool: hpstore.Pool, name: str, length: int) -> int:
    """The source of Python's standard library as samples of length + 1 bytes; how many."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    rows = len(text) // (length + 1)
    fields = {"tokens": Field("uint8", (length + 1,))}
    with DatasetWriter(pool, name, fields) as writer:
        writer.write_batch({"tokens": text[: rows * (length + 1)].reshape(rows, length + 1)})
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", required=True, help="pool.toml, or a pool's name")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--checkpoint-every", type=positive, default=50)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--prefix", default="runs/gpt", help="where checkpoints go in the pool")
    parser.add_argument("--batch-size", type=positive, default=8, help="of all ranks together")
    parser.add_argument("--length", type=positive, default=128, help="tokens a sample")
    parser.add_argument("--width", type=positive, default=256, help="of the model")
    parser.add_argument("--layers", type=positive, default=4, help="of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cache", default="auto", help="bytes of samples kept in memory, such as 8GiB; 0: none"
    )
    parser.add_argument("--events", help="append one JSON line an event to this file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch finds no CUDA device")
    if options.batch_size % PARTS:
        parser.error(f"--batch-size must be a multiple of {PARTS}")
    return options


class Events:
    """Prints what happens; a copy as JSON lines for whoever compares runs."""

    def __init__(self, path: str | None, *, silent: bool) -> None:
        self._silent = silent  # all ranks but one
        opened = path and not silent
        self._file = open(path, "a", encoding="utf-8") if opened else None  # noqa: SIM115 (lives as long as the run)

    def __call__(self, kind: str, text: str, **facts: object) -> None:
        if self._silent:
            return
        print(text, flush=True)
        if self._file is not None:
            said = {"event": kind, "monotonic_seconds": time.monotonic(), **facts}
            self._file.write(json.dumps(said) + "\n")
            self._file.flush()


def main() -> int:
    options = parse()
    if "WORLD_SIZE" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if PARTS % world:
        raise hpstore.errors.ConfigError(f"{world} ranks: 1, 2 or {PARTS} share {PARTS} parts")
    events = Events(options.events, silent=rank > 0)
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # sums depend on it, and torchrun gives each rank one by itself
    with hpstore.open(options.pool) as pool:
        name = f"python-stdlib-{options.length}"
        if rank == 0 and name not in [found.name for found in list_datasets(pool)]:
            count = write_tokens(pool, name, options.length)
            events("corpus", f"stored {count} samples of source text", samples=count)
        if world > 1:
            dist.barrier()
        loader = DataLoader(
            Dataset(pool, name),
            batch_size=options.batch_size // world,
            shuffle=True,
            seed=options.seed,
            drop_last=True,
            cache=options.cache,
        )
        model = ByteGPT(width=options.width, layers=options.layers, length=options.length).to(
            options.device
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        with Checkpointer(pool, options.prefix, keep_last=3, rng=False) as checkpointer:
            if checkpointer.steps() and not options.resume:
                raise hpstore.errors.CheckpointError(
                    f"{options.prefix} holds checkpoints already: --resume, or another --prefix"
                )
            step = (checkpointer.restore(state) or 0) if options.resume else 0
            events(
                "start", f"{parameters(model) / 1e6:.1f}M parameters, from step {step}", step=step
            )
            train(step, options, state, checkpointer, events)
        loader.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def backward(model: ByteGPT, tokens: torch.Tensor, parts: int, seed: int) -> float:
    """Gradients of the global batch, of which `tokens` is this rank's share; its mean loss.

    Every part's gradient is computed by itself, with dropout of its own, and all of them are added
    up in the same order by everybody: so the sum is the same, bit by bit, however many ranks share
    the work.
    """
    found = []
    first = dist.get_rank() * parts if dist.is_initialized() else 0
    for number, part in enumerate(tokens.chunk(parts), first):
        torch.manual_seed(seed * PARTS + number)
        logits = model(part[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, 256), part[:, 1:].reshape(-1)) / PARTS
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([loss.detach().reshape(1), *(g.reshape(-1) for g in gradients)]))
    mine = torch.stack(found).cpu()
    everybody = [mine]
    if dist.is_initialized():
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
    total = torch.zeros_like(mine[0])
    for row in torch.cat(everybody):
        total += row
    at = 1
    for parameter in model.parameters():
        values = total[at : at + parameter.numel()]
        parameter.grad = values.reshape(parameter.shape).to(parameter.device)
        at += parameter.numel()
    return float(total[0])


def train(
    step: int,
    options: argparse.Namespace,
    state: dict[str, object],
    checkpointer: Checkpointer,
    events: Events,
) -> None:
    model, optimizer, loader = state["model"], state["optimizer"], state["loader"]
    assert isinstance(model, ByteGPT)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(loader, DataLoader)
    model.train()
    parts = PARTS // (dist.get_world_size() if dist.is_initialized() else 1)
    began, first, stalled = time.perf_counter(), step, 0.0
    batches = iter(loader)
    while step < options.steps:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)  # the next epoch
            continue
        tokens = batch["tokens"].long().to(options.device)
        value = backward(model, tokens, parts, (options.seed << 32) + step)
        optimizer.step()
        step += 1
        rate = (step - first) * options.batch_size * options.length / (time.perf_counter() - began)
        text = f"step {step:5d}  loss {value:.4f}  {rate:7.0f} tokens/s"
        text += f"  data wait {loader.wait_seconds:.2f} s  stall {stalled:.2f} s"
        events("step", text, step=step, loss=value.hex())
        if step % options.checkpoint_every == 0:
            handle = checkpointer.save(step, state)
            stalled += handle.staged_seconds
            events(
                "staged",
                f"step {step:5d}  staged in {handle.staged_seconds * 1e3:.0f} ms",
                step=step,
                seconds=handle.staged_seconds,
            )
    checkpointer.wait()
    events(
        "done",
        f"checkpoints {checkpointer.steps()}",
        stall_seconds=stalled,
        wait_seconds=loader.wait_seconds,
        seconds=time.perf_counter() - began,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"train.py: {error}")
