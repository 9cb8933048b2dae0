"""Train a byte-level GPT on Python's own source, fed from a pool and checkpointed into it.

    hpstore create pool.toml --data 4 --parity 2 disk0 disk1 disk2 disk3 disk4 disk5
    python examples/train.py --pool pool.toml --steps 200 --checkpoint-every 50
    python examples/train.py --pool pool.toml --steps 400 --checkpoint-every 50 --resume

Kill it whenever you like and delete any two of the six disks: `--resume` goes on bit-exactly.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from model import ByteGPT
from torch.nn import functional

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import TokenBatches, TokenCorpus, write_corpus

CORPUS = "python-stdlib"


def standard_library() -> Iterator[bytes]:
    """The source files of Python's standard library on this machine, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_bytes()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", required=True, help="pool.toml, or a pool's name")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--checkpoint-every", type=positive, default=50)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--prefix", default="runs/gpt", help="where checkpoints go in the pool")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--length", type=positive, default=128, help="tokens a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", help="append one JSON line an event to this file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch finds no CUDA device")
    return options


class Events:
    """Prints what happens; a copy as JSON lines for whoever compares runs."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a") if path else None  # noqa: SIM115 (lives as long as the run)

    def __call__(self, kind: str, text: str, **facts: object) -> None:
        print(text, flush=True)
        if self._file is not None:
            self._file.write(json.dumps({"event": kind, **facts}) + "\n")
            self._file.flush()


def main() -> int:
    options = parse()
    events = Events(options.events)
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    with hpstore.open(options.pool) as pool:
        if not pool.exists(f"data/{CORPUS}/manifest"):
            count = write_corpus(pool, CORPUS, standard_library())
            events("corpus", f"stored {count / 1e6:.1f} MB of source text", tokens=count)
        batches = TokenBatches(
            TokenCorpus(pool, CORPUS),
            batch_size=options.batch_size,
            length=options.length,
            seed=options.seed,
        )
        model = ByteGPT(length=options.length).to(options.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"model": model, "optimizer": optimizer, "batches": batches}
        with batches, Checkpointer(pool, options.prefix, keep_last=3) as checkpointer:
            if checkpointer.steps() and not options.resume:
                raise hpstore.errors.CheckpointError(
                    f"{options.prefix} holds checkpoints already: --resume, or another --prefix"
                )
            step = (checkpointer.restore(state) or 0) if options.resume else 0
            events(
                "start", f"{parameters(model) / 1e6:.1f}M parameters, from step {step}", step=step
            )
            train(step, options, state, checkpointer, events)
    return 0


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train(
    step: int,
    options: argparse.Namespace,
    state: dict[str, object],
    checkpointer: Checkpointer,
    events: Events,
) -> None:
    model, optimizer, batches = state["model"], state["optimizer"], state["batches"]
    assert isinstance(model, ByteGPT)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(batches, TokenBatches)
    model.train()
    began, first, stalled = time.perf_counter(), step, 0.0
    while step < options.steps:
        tokens = next(batches).to(options.device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        value = loss.item()
        rate = (step - first) * tokens[:, 1:].numel() / (time.perf_counter() - began)
        text = f"step {step:5d}  loss {value:.4f}  {rate:7.0f} tokens/s"
        text += f"  data wait {batches.wait_seconds:.2f} s  stall {stalled:.2f} s"
        events("step", text, step=step, loss=value.hex())
        if step % options.checkpoint_every == 0:
            handle = checkpointer.save(step, state)
            stalled += handle.staged_seconds
            events("staged", f"step {step:5d}  staged in {handle.staged_seconds * 1e3:.0f} ms",
                   step=step, seconds=handle.staged_seconds)  # fmt: skip
    checkpointer.wait()
    events(
        "done",
        f"checkpoints {checkpointer.steps()}",
        stall_seconds=stalled,
        wait_seconds=batches.wait_seconds,
        seconds=time.perf_counter() - began,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"train.py: {error}")
