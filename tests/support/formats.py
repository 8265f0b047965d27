"""A format of a test's own, to show what a new one takes: one class and one line in the table of formats."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfold.plan.formats import FLOATS, FORMATS, Format

BLOCK = 96  # no power of 2, and more than a parameter's alignment in fp32


class Blocks(Format):
    """Blocks of :data:`BLOCK` int8 codes and one fp32 scale; ``feedback``: what is lost is added to the next values."""

    block = BLOCK

    def __init__(self, name: str, *, feedback: bool = False) -> None:
        super().__init__(name)
        self.state = "fp32" if feedback else None

    def carries(self, dtype: str) -> bool:
        return dtype in FLOATS

    def nbytes(self, length: int) -> int:
        return length // BLOCK * (BLOCK + 4)

    def encode(self, values: Tensor, payload: Tensor, state: Tensor | None = None) -> None:
        blocks = values.unflatten(1, (-1, BLOCK)).float()
        if state is not None:
            blocks = blocks + state.unflatten(1, (-1, BLOCK))
        into = payload.unflatten(1, (-1, BLOCK + 4))
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        codes = (blocks / scale.clamp(min=1e-30)).round()
        into[..., BLOCK:].view(torch.float32).copy_(scale)
        into[..., :BLOCK].view(torch.int8).copy_(codes)
        if state is not None:
            state.copy_((blocks - codes * scale).flatten(1))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        blocks = payload.unflatten(1, (-1, BLOCK + 4))
        values.copy_((blocks[..., :BLOCK].view(torch.int8) * blocks[..., BLOCK:].view(torch.float32)).flatten(1))


def add_blocks() -> None:
    """This process knows ``blocks`` and ``feedback``."""
    FORMATS["blocks"] = Blocks("blocks")
    FORMATS["feedback"] = Blocks("feedback", feedback=True)
