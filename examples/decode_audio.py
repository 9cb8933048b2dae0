"""Classify sounds: wav files are kept with their container and decoded as they are read.

    hpstore create pool.toml --data 4 --parity 2 disk0 disk1 disk2 disk3 disk4 disk5
    python examples/decode_audio.py --pool pool.toml

The sounds are made by the script and written with Python's own `wave`: sine, square and sawtooth
tones of any pitch and length, with noise. FLAC, Ogg and the like work the same way, with a decoder
of theirs in `decode`.
"""

from __future__ import annotations

import argparse
import io
import sys
import wave
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hpstore
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, list_datasets

RATE, CLIP, BATCH = 8000, 1024, 64  # samples per second, of a clip; clips of a batch
KINDS = ("sine", "square", "sawtooth")


# 1. Sounds, each a whole wav file in memory.
def sound(kind: str, rng: np.random.Generator) -> bytes:
    """A tone of 0.2 to 0.5 seconds: 16 bits, one channel."""
    count = int(rng.integers(RATE // 5, RATE // 2))
    turns = np.arange(count) * rng.uniform(100, 400) / RATE + rng.uniform()
    shapes = {
        "sine": np.sin(2 * np.pi * turns),
        "square": np.sign(np.sin(2 * np.pi * turns)),
        "sawtooth": 2 * (turns % 1) - 1,
    }
    signal = shapes[kind] * rng.uniform(0.2, 0.9) + rng.normal(0, 0.02, count)
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(RATE)
        made.writeframes((signal.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


# 2. The files as they are: the field says which container, and the writer checks it.
def store(pool: hpstore.Pool, name: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fields = {"audio": Field("audio", media_type="audio/wav"), "label": Field("int64")}
    classes = {"classes": {"label": list(KINDS)}}
    with DatasetWriter(pool, name, fields, shuffle=True, metadata=classes) as writer:
        for number in range(count):
            label = number % len(KINDS)
            writer.write({"audio": sound(KINDS[label], rng), "label": label})
    print(f"{name}: {count} wav files")


# 3. Decoded in a map, by the threads that read. `rng` depends on seed, epoch and position alone.
def decode(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A clip of the sound, from anywhere in it, as floats."""
    with wave.open(io.BytesIO(sample["audio"])) as file:
        first = int(rng.integers(0, file.getnframes() - CLIP + 1))
        file.setpos(first)
        clip = np.frombuffer(file.readframes(CLIP), "<i2").astype(np.float32)
    return {"clip": torch.from_numpy(clip / 32768), "label": sample["label"]}


# 4. The batch as a spectrum, without its loudness, all at once.
def spectrum(batch: dict[str, Any]) -> dict[str, Any]:
    found = torch.fft.rfft(batch["clip"] * torch.hann_window(CLIP)).abs().log1p()
    return {"spectrum": found - found.mean(1, keepdim=True), "label": batch["label"]}


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    right = total = 0
    with torch.no_grad():
        for batch in loader:
            right += int((model(batch["spectrum"]).argmax(1) == batch["label"]).sum())
            total += len(batch["label"])
    return right / total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", required=True, help="pool.toml, or a pool's name")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sounds", type=int, default=3000, help="to train with")
    options = parser.parse_args()
    torch.manual_seed(0)
    with hpstore.open(options.pool) as pool:
        there = [found.name for found in list_datasets(pool)]
        for seed, (name, count) in enumerate(
            {"tones/train": options.sounds, "tones/val": options.sounds // 5}.items()
        ):
            if name not in there:
                store(pool, name, count, seed)
        train, val = Dataset(pool, "tones/train"), Dataset(pool, "tones/val")
        file = train[0]["audio"]
        print(f"{train.fields['audio'].media_type}, {len(file)} bytes: {file[:4]!r} {file[8:12]!r}")
        how: dict[str, Any] = {"transform": decode, "batch_transform": spectrum}
        training = DataLoader(train, BATCH, shuffle=True, seed=0, **how)
        testing = DataLoader(val, BATCH, **how)
        model = nn.Sequential(nn.Linear(CLIP // 2 + 1, 64), nn.ReLU(), nn.Linear(64, len(KINDS)))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for epoch in range(options.epochs):
            for batch in training:
                loss = functional.cross_entropy(model(batch["spectrum"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(
                f"epoch {epoch + 1}: loss {loss.item():.3f}, {accuracy(model, testing):.3f} right"
            )
        training.close()
        testing.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"decode_audio.py: {error}")
