"""What the stages of the GPU compute: decoding, checksums, and their checks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hpstore.benchmarks.gpu import gpu_figures
from hpstore.benchmarks.gpu.gpu_figures import NotHere, WrongBytes, check_checksums, check_decoding
from hpstore.codec import ErasureCode, choose_backend
from hpstore.format.checksum import block_digests, block_seeds
from hpstore.format.geometry import BLOCK_BYTES, Code
from hpstore.loaders.gpu.direct.gpu_checksums import Blocks
from hpstore.loaders.gpu.direct.gpu_decode import DecodeJobs


def codec(memory: torch.Tensor, jobs: DecodeJobs) -> None:
    """decode() by the host's codec, of one stripe."""
    units = memory.numpy().reshape(-1, jobs.length)
    targets = [np.empty(jobs.length, np.uint8) for _ in jobs.want]
    ErasureCode(choose_backend()).reconstruct(
        Code.RS_CAUCHY,
        jobs.data,
        jobs.parity,
        jobs.have,
        jobs.want,
        [units[at // jobs.length] for at in jobs.sources[0]],
        targets,
    )
    for at, target in zip(jobs.targets[0], targets, strict=True):
        units[at // jobs.length] = target


def test_decoding_is_equal_for_every_number_of_lost_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1 to m; every set of them where there are few. One wrong byte is an error."""
    tried: list[DecodeJobs] = []

    def decode(memory: torch.Tensor, jobs: DecodeJobs) -> None:
        tried.append(jobs)
        codec(memory, jobs)
        if jobs.want == wrong:
            memory[int(jobs.targets[0, -1]) + jobs.length - 1] ^= 1

    wrong: tuple[int, ...] = ()
    monkeypatch.setattr(gpu_figures, "decode", decode)
    monkeypatch.setattr(gpu_figures, "CHECKED_UNIT", 4096 + 520)
    assert check_decoding(4, 2, "cpu") == 6 + 15
    assert len({jobs.want for jobs in tried}) == 21
    assert any(5 in jobs.have for jobs in tried if len(jobs.want) == 1)  # any k survivors do
    wrong = (3, 5)
    with pytest.raises(WrongBytes, match=r"columns \(3, 5\) of 4\+2 from \(0, 1, 2, 4\) differ"):
        check_decoding(4, 2, "cpu")
    monkeypatch.setattr(gpu_figures, "decode", lambda memory, jobs: None)
    with pytest.raises(WrongBytes, match=r"columns \(0,\)"):
        check_decoding(4, 2, "cpu")


def test_sets_of_lost_columns_are_sampled_by_their_number() -> None:
    """Of 1,470 sets of 10+4, some of one, two, three and four."""
    sets = gpu_figures.lost_sets(10, 4)
    counts = [sum(len(lost) == count for lost in sets) for count in range(1, 5)]
    assert counts[:2] == [14, 91]
    assert all(64 <= count < 128 for count in counts[2:])


def xxhash(memory: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """verify() by the host's sums, of a column whose seed is check_checksums'."""
    assert (blocks.seeds == block_seeds(7, 0, len(blocks.starts))).all()
    assert (blocks.starts == np.arange(len(blocks.starts)) * BLOCK_BYTES).all()
    assert blocks.lengths.sum() == memory.numel()
    return torch.from_numpy(block_digests(7, 0, memory.numpy().data) == blocks.expected)


def test_checksums_know_right_blocks_and_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that says yes or no to everything, or remembers the first answer, is found out."""
    monkeypatch.setattr(gpu_figures, "verify", xxhash)
    assert check_checksums("cpu") == 64
    for answer, what in ((True, r"a wrong sum: .* \[32\]"), (False, "right blocks: ")):
        monkeypatch.setattr(
            gpu_figures,
            "verify",
            lambda memory, blocks, answer=answer: torch.full((64,), answer),
        )
        with pytest.raises(WrongBytes, match=what):
            check_checksums("cpu")
    first: list[torch.Tensor] = []

    def forgetful(memory: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        first.append(memory)
        return xxhash(first[0], blocks)

    monkeypatch.setattr(gpu_figures, "verify", forgetful)
    with pytest.raises(WrongBytes, match=r"a flipped bit: .* \[32\]"):
        check_checksums("cpu")


def test_kernels_are_checked_before_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All codes of the plan; what is wrong has no rate. Without Triton nothing is."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for measure in (gpu_figures.decoding, gpu_figures.checksums):
        with pytest.raises(NotHere, match="Triton is not installed"):
            measure(tmp_path)
    monkeypatch.setattr(gpu_figures, "need_triton", lambda: None)
    order: list[tuple[object, ...]] = []

    def check(*asked: object) -> int:
        order.append(asked)
        if asked in ((10, 4, "cuda"), ("cuda",)):
            raise WrongBytes("differ")
        return 21

    monkeypatch.setattr(gpu_figures, "check_decoding", check)
    monkeypatch.setattr(gpu_figures, "check_checksums", check)
    monkeypatch.setattr(gpu_figures, "decoding_rates", lambda *code: order.append(code))
    for measure in (gpu_figures.decoding, gpu_figures.checksums):
        with pytest.raises(WrongBytes):
            measure(tmp_path)
    assert order == [
        (4, 2, "cuda"),
        (4, 2),
        (6, 3, "cuda"),
        (6, 3),
        (8, 3, "cuda"),
        (8, 3),
        (10, 4, "cuda"),
        ("cuda",),
    ]
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    assert said == [
        {"stage": 4, "what": "equality", "k": k, "m": m, "sets": 21}
        for k, m in ((4, 2), (6, 3), (8, 3))
    ]
