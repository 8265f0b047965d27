"""The jobs: a model whose forward gives the loss, and each rank's batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardfold.tools.bench.settings import UNITS, Settings, gpt_shape
from shardfold.tools.recipes.gpt import GPT

__all__ = ["LEARNING_RATE", "batches", "build"]

BLOCKS, TENSORS, ELEMENTS = 40, 50, 1000
POOL = 8  # different batches, used again and again

#: So that a GPT learns, and that the values of the others stay where they are.
LEARNING_RATE = {"gpt": 1e-4, "offload": 1e-4, "tensors": 1e-6, "units": 1e-9}


class ManyTensors(nn.Module):
    """``TENSORS`` vectors that scale and shift in turn: next to no work for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(
            torch.ones(ELEMENTS) if i % 2 == 0 else torch.randn(ELEMENTS) * 0.01 for i in range(TENSORS)
        )

    def forward(self, x: Tensor) -> Tensor:
        tensors = iter(self.tensors)
        for scale, shift in zip(tensors, tensors, strict=True):
            x = x * scale + shift
        return x


class AlmostNothing(nn.Module):
    """Four parameters of one element, four operations on one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))
        self.other_scale = nn.Parameter(torch.ones(1))
        self.other_shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift) * self.other_scale + self.other_shift


class Stack(nn.Module):
    """Blocks one behind the other; the loss is the mean square of what comes out."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.start
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def build(settings: Settings, device: torch.device | None = None) -> nn.Module:
    """The job's model in fp32, with the same values in every process. Its blocks are ``model.blocks``.

    Args:
        settings: of the benchmark.
        device: where it is made: a GPU draws billions of values in a moment, a CPU takes a minute. None: the CPU.
    """
    torch.manual_seed(0)
    with device or torch.device("cpu"):
        if settings.of_gpt:
            return GPT(gpt_shape(settings.params, settings.context))
        if settings.job == "tensors":
            return Stack([ManyTensors() for _ in range(BLOCKS)])
        return Stack([AlmostNothing() for _ in range(UNITS)])


def batches(settings: Settings, rank: int) -> list[tuple[Tensor, ...]]:
    """Arguments of the model's forward: step ``i`` takes number ``i % len``.

    For a GPT tokens and next tokens, (rows, context) each; for the others a vector (rows, elements).
    """
    generator = torch.Generator().manual_seed(1 + rank)
    if settings.of_gpt:
        shape = (settings.rows, settings.context + 1)
        drawn = [torch.randint(256, shape, generator=generator) for _ in range(POOL)]
        return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in drawn]
    elements = ELEMENTS if settings.job == "tensors" else 1
    return [(torch.randn(settings.rows, elements, generator=generator),) for _ in range(POOL)]
