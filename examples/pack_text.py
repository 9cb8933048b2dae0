"""Three JSON Lines files to packed tokens; stopped on three ranks, resumed on two, none lost.

    hpstore create pool.toml --data 4 --parity 2 disk0 disk1 disk2 disk3 disk4 disk5
    python examples/pack_text.py --pool pool.toml

The texts are docstrings and source of Python's standard library, and sums that the script makes up.
Three processes train on a mixture of them, are killed between two checkpoints, and two processes go
on. At the end all sequences that were trained on are compared with those of one process that was
never stopped, and these with the files, token by token.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, Field, Mixture, Packing, ingest, list_datasets

Tokens = dict[str, Any]
SOURCES, WEIGHTS = ("docs", "code", "sums"), (3, 3, 1)
LENGTH, BATCH, END = 256, 4, 256  # tokens of a sequence; sequences of a rank's batch; end of text
CHARACTERS = 2000  # of a document at most


# 1. Files as users have them: {"text": ...} on every line.
def texts(limit: int) -> dict[str, list[str]]:
    """So many documents of each source, or fewer."""
    docs: list[str] = []
    code: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(code) >= limit and len(docs) >= limit:
            break
        text = path.read_text(encoding="utf-8")
        code.append(text[:CHARACTERS])
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
        found = (ast.get_docstring(n) for n in ast.walk(ast.parse(text)) if isinstance(n, nodes))
        docs += [one[:CHARACTERS] for one in found if one]
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 10_000, (limit, 2)).tolist()
    sums = [f"{a} and {b} make {a + b}, and {a} times {b} is {a * b}." for a, b in pairs]
    return {"docs": docs[:limit], "code": code[:limit], "sums": sums}


def write_files(root: Path, limit: int) -> None:
    for name, found in texts(limit).items():
        lines = (json.dumps({"text": text}) + "\n" for text in found)
        (root / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


# 2. A tokenizer, here bytes, and a dataset for each file. A sample is a document.
def tokenized(file: Path) -> Iterator[Tokens]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            raw = np.frombuffer(json.loads(line)["text"].encode(), np.uint8)
            yield {"tokens": raw.astype(np.uint16)}


def store(pool: hpstore.Pool, files: Path) -> None:
    for name in SOURCES:
        fields = {"tokens": Field("uint16", (None,))}
        report = ingest(
            pool,
            f"text/{name}",
            lambda name=name: tokenized(files / f"{name}.jsonl"),
            fields=fields,
        )
        print(f"text/{name}: {report.samples} documents, {report.bytes // 2} tokens", flush=True)


# 3. The loader: each document and its end, back to back, cut every LENGTH tokens.
def loader_of(pool: hpstore.Pool, **ranks: Any) -> DataLoader:
    """An epoch ends when all three sources have been gone through."""
    sources = [Dataset(pool, f"text/{name}") for name in SOURCES]
    mixture = Mixture(sources, WEIGHTS, source_field="source", stop="all")
    packing = Packing(field="tokens", length=LENGTH, separator=END, pad=END)
    return DataLoader(mixture, BATCH, shuffle=True, seed=1, packing=packing, tail="uneven", **ranks)


# 4. Training. What each rank was given is written down beside it, step by step.
def train(rank: int, world: int, pool: str, out: Path, stop_at: int, every: int) -> None:
    with hpstore.open(pool) as opened, Checkpointer(opened, "runs/text", keep_last=1) as saver:
        loader = loader_of(opened)
        model = nn.Sequential(nn.Embedding(END + 1, 32), nn.Linear(32, END + 1))
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step, loss = saver.restore(state) or 0, torch.zeros(())
        if rank == 0:
            print(f"{world} ranks go on from step {step}", flush=True)
        with parallel.join():  # at the end of the epoch a rank may have a batch less
            for batch in loader:
                tokens = batch["tokens"]
                optimizer.zero_grad()
                made = parallel(tokens[:, :-1])
                loss = functional.cross_entropy(made.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                step += 1
                rows = torch.cat([batch["source"][:, None], tokens], 1).numpy()
                np.save(out / f"{step:06d}-{rank}-of-{world}.npy", rows)
                if step == stop_at:
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
                if stop_at and step % every == 0:
                    saver.save(step, state).result()
        if rank == 0:
            print(f"{world} ranks ended the epoch at step {step}, loss {loss:.2f}", flush=True)
        loader.close()


def enter(rank: int, world: int, store: str, pool: str, out: Path, stop: int, every: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, pool, out, stop, every)
    dist.destroy_process_group()


def launch(world: int, pool: str, root: Path, stop_at: int, every: int) -> None:
    """`world` processes, as torchrun starts them; with `stop_at` they are killed at that step."""
    context = mp.get_context("spawn")
    more = (world, str(root / f"store-{world}"), pool, root / "seen", stop_at, every)
    ranks = [context.Process(target=enter, args=(rank, *more)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    wanted = -signal.SIGKILL if stop_at else 0
    if any(rank.exitcode != wanted for rank in ranks):
        raise SystemExit(f"{world} ranks ended with {[rank.exitcode for rank in ranks]}")


# 5. The proof: the same sequences as without a stop, and in them every document of the files.
def seen(root: Path, checkpoint: int) -> Counter[bytes]:
    """Sequences that the model was trained on: of the killed ranks those before the checkpoint."""
    found: Counter[bytes] = Counter()
    for file in sorted((root / "seen").glob("*.npy")):
        if int(file.name[:6]) <= checkpoint or "-of-2" in file.name:
            found.update(row.tobytes() for row in np.load(file))
    return found


def documents_of(rows: np.ndarray) -> Counter[bytes]:
    """The documents of the sequences of one pass through a source, laid end to end."""
    flat = rows.reshape(-1)
    parts = np.split(flat, np.flatnonzero(flat == END) + 1)
    return Counter(part[:-1].astype(np.uint8).tobytes() for part in parts if len(part) > 1)


def prove(pool: str, root: Path, checkpoint: int) -> None:
    with hpstore.open(pool) as opened:
        loader = loader_of(opened, rank=0, world_size=1)
        rows = [torch.cat([b["source"][:, None], b["tokens"]], 1).numpy() for b in loader]
        loader.close()
    whole = np.concatenate(rows)
    counted = seen(root, checkpoint)
    if counted != Counter(row.tobytes() for row in whole):
        raise SystemExit("the sequences of three and then two ranks are not those of one")
    print(f"3 ranks and then 2 were given the {len(whole)} sequences of 1, each as often")
    for number, name in enumerate(SOURCES):
        wanted = [t["tokens"] for t in tokenized(root / f"{name}.jsonl")]
        count = sum(len(tokens) + 1 for tokens in wanted)  # each with its end
        sequences = whole[whole[:, 0] == number][:, 1:]
        first = sequences[: -(-count // LENGTH)]
        if documents_of(first) != Counter(t.astype(np.uint8).tobytes() for t in wanted):
            raise SystemExit(f"the documents of {name} are not all there, once")
        print(
            f"{name}: all {count} tokens of {len(wanted)} documents, once in a pass; "
            f"{len(sequences) / len(first):.2f} passes"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", required=True, help="pool.toml, or a pool's name")
    parser.add_argument("--documents", type=int, default=1000, help="of a source, at most")
    parser.add_argument("--stop-at", type=int, default=50, help="step at which ranks are killed")
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="hpstore-text-"))
    try:
        (root / "seen").mkdir()
        write_files(root, options.documents)
        with hpstore.open(options.pool) as pool:
            if "text/sums" in [found.name for found in list_datasets(pool)]:
                raise hpstore.errors.ConfigError("the pool holds text/ already: take another one")
            store(pool, root)
        launch(3, options.pool, root, options.stop_at, options.every)
        print(f"all three were killed at step {options.stop_at}", flush=True)
        launch(2, options.pool, root, 0, options.every)
        prove(options.pool, root, options.stop_at // options.every * options.every)
    finally:
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"pack_text.py: {error}")
