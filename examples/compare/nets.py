"""Residual CNNs as chains of numbered blocks: whole for replicas, a range of blocks for a stage.

GroupNorm, not BatchNorm: what a sample becomes does not depend on which others share its batch, so
every way of splitting a batch has the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional

CLASSES = 10
SHAPES = {"small": (3, 32, 32), "tiny": (3, 32, 32), "resnet50": (3, 224, 224)}
"""Pictures by model; "tiny" is "small" with a stride of 2 in its first block, for a quick run."""


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(8, channels // 4), channels)


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(channels), norm(channels)
        self.short = None
        if stride > 1 or inputs != channels:
            self.short = nn.Conv2d(inputs, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, channels, height, width)
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return functional.relu(y + (x if self.short is None else self.short(x)))


class Bottleneck(nn.Module):
    """ResNet-50's block: 1 x 1, 3 x 3, 1 x 1, four times as many channels at its end."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        channels = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = norm(width), norm(width), norm(channels)
        self.short = None
        if stride > 1 or inputs != channels:
            self.short = nn.Conv2d(inputs, channels, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, channels, height, width)
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return functional.relu(y + (x if self.short is None else self.short(x)))


class Chain(nn.Module):
    """Blocks one after the other, by their numbers in the whole model.

    A stage keeps its blocks under these numbers, so the names of all stages together are those of
    the whole model.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})

    def keep(self, numbers: Iterable[int]) -> Chain:
        """Drop all other blocks; returns itself."""
        wanted = {str(number) for number in numbers}
        for name in list(self.blocks):
            if name not in wanted:
                del self.blocks[name]
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def build(model: str, seed: int) -> Chain:
    """The same parameters for the same seed, whoever builds it."""
    torch.manual_seed(seed)
    return Chain(resnet50() if model == "resnet50" else reduced(2 if model == "tiny" else 1))


def reduced(stride: int) -> list[nn.Module]:
    """175 thousand parameters, for a CPU."""
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, 16, 3, stride, 1, bias=False), norm(16), nn.ReLU())
    ]
    blocks += [Residual(16, 16, 1), Residual(16, 16, 1)]
    blocks += [Residual(16, 32, 2), Residual(32, 32, 1)]
    blocks += [Residual(32, 64, 2), Residual(64, 64, 1)]
    return [*blocks, head(64)]


def resnet50() -> list[nn.Module]:
    """23.5 million parameters; GroupNorm in BatchNorm's place."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    blocks: list[nn.Module] = [nn.Sequential(stem, norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))]
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            stride = 2 if number == 0 and width > 64 else 1
            blocks.append(Bottleneck(inputs, width, stride))
            inputs = 4 * width
    return [*blocks, head(inputs)]


def head(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def stage_blocks(blocks: int, stages: int) -> list[range]:
    """Numbers of the blocks of each stage: in order, as many each as can be."""
    return [range(blocks * s // stages, blocks * (s + 1) // stages) for s in range(stages)]
