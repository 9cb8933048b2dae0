"""Train on a pool of six directories, delete two of them in the middle, and plot what happens.

    pip install 'hpstore[plot]'
    python examples/two_disks_die.py --out docs/two-disks.png

The same run is made twice: once on six whole directories, once with two that are deleted at a third
of the steps, and evicted and rebuilt at two thirds. The losses of both must be equal, bit by bit.
Every step reads its batch from the pool and then one object of 16 MiB, which is timed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from model import ByteGPT
from torch.nn import functional
from train import write_tokens

import hpstore
from hpstore.checkpoint import Checkpointer, SaveHandle
from hpstore.loaders import DataLoader, Dataset
from hpstore.units import MIB, positive

DISKS, DEAD = "abcdef", "be"
LENGTH, EVERY, TIMED_BYTES = 64, 20, 16 * MIB


@dataclass(slots=True)
class Run:
    """One training run, by step."""

    losses: list[float] = field(default_factory=list)
    read_mib_per_second: list[float] = field(default_factory=list)
    saves: list[SaveHandle] = field(default_factory=list)
    rebuild_seconds: float = 0.0


def delete(directories: list[Path]) -> None:
    """Also what a save under way still writes there."""
    while any(path.exists() for path in directories):
        for path in directories:
            shutil.rmtree(path, ignore_errors=True)


def train(home: Path, steps: int, *, disks_die: bool) -> Run:
    """Train for `steps`; a checkpoint every EVERY steps."""
    home.mkdir()
    disks = {name: home / f"disk-{name}" for name in DISKS}
    dead = [disks[name] for name in DEAD]
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the order of sums, and so their bits, depends on it
    found = Run()
    with hpstore.create(list(disks.values()), scheme="4+2", config=home / "pool.toml") as pool:
        write_tokens(pool, "text", LENGTH)
        pool.put("timed", np.random.default_rng(0).bytes(TIMED_BYTES))
        loader = DataLoader(Dataset(pool, "text"), batch_size=16, shuffle=True, seed=0, cache=0)
        model = ByteGPT(width=96, layers=2, length=LENGTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        with closing(loader), Checkpointer(pool, "runs/plot", keep_last=2) as checkpointer:
            for step, batch in zip(range(1, steps + 1), loader, strict=False):
                if disks_die and step == steps // 3:
                    delete(dead)
                if disks_die and step == 2 * steps // 3:
                    began = time.perf_counter()
                    for path in dead:
                        pool.evict(str(path))
                    pool.rebuild()
                    found.rebuild_seconds = time.perf_counter() - began
                tokens = batch["tokens"].long()
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.losses.append(loss.item())
                began = time.perf_counter()
                pool.get("timed")
                seconds = time.perf_counter() - began
                found.read_mib_per_second.append(TIMED_BYTES / MIB / seconds)
                if step % EVERY == 0:
                    found.saves.append(checkpointer.save(step, state))
    return found


def draw(whole: Run, wounded: Run, out: Path) -> None:
    """Two panels over the steps: losses with the commits, and the rate of reads."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = len(wounded.losses)
    borders = [0, steps // 3, 2 * steps // 3, steps]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    numbers = range(1, steps + 1)
    top.plot(numbers, wounded.losses, color="tab:blue", label="two of six disks die")
    top.plot(numbers, whole.losses, color="black", ls=":", lw=1, label="no disk dies")
    commits = [handle.result() for handle in wounded.saves]
    for tolerated, colour in ((2, "tab:green"), (1, "tab:olive"), (0, "tab:orange")):
        at = [report.step for report in commits if report.losses_tolerated == tolerated]
        label = f"checkpoint committed, {tolerated} more disks may die"
        if at:
            top.scatter(
                at, [wounded.losses[n - 1] for n in at], color=colour, zorder=3, label=label
            )
    top.set_ylabel("training loss")
    top.legend(fontsize=8)
    bottom.plot(numbers, wounded.read_mib_per_second, ".", ms=3, color="tab:blue", alpha=0.5)
    names = ("six disks", "two deleted", "evicted and rebuilt on four")
    for low, high, name in zip(borders, borders[1:], names, strict=False):
        middle = statistics.median(wounded.read_mib_per_second[low:high])
        bottom.hlines(middle, low, high, color="tab:blue")
        bottom.text(
            (low + high) / 2,
            0,
            f"{name}\nmedian {middle:.0f} MiB/s",
            ha="center",
            va="bottom",
            fontsize=8,
        )
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("verified reads, MiB/s")
    bottom.set_xlabel("step")
    changes = ((borders[1], "tab:red", "two deleted"), (borders[2], "tab:green", "evict, rebuild"))
    for step, colour, change in changes:
        for axes in (top, bottom):
            axes.axvline(step, color=colour, lw=1)
        top.text(step, top.get_ylim()[0], f" {change}", color=colour, va="bottom", fontsize=8)
    figure.savefig(out, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("two-disks.png"))
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument(
        "--directory", help="where the pools are made; default: for temporary files"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as made:
        whole = train(Path(made) / "whole", options.steps, disks_die=False)
        wounded = train(Path(made) / "wounded", options.steps, disks_die=True)
    if whole.losses != wounded.losses:
        sys.exit("two_disks_die.py: the losses of the two runs differ")
    print(f"{len(whole.losses)} losses are equal, bit by bit; ", end="")
    print(f"evict and rebuild took {wounded.rebuild_seconds:.2f} s")
    draw(whole, wounded, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
