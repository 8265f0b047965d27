"""A model whose matrices are frozen, with adapters beside them, and what it is with matrices that were codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardfold.plan.formats import FORMATS, format_named

__all__ = ["Adapted", "Layer", "batches", "decoded", "quantized"]

WIDTH = 64


class Layer(nn.Module):
    """A frozen linear layer and an adapter of rank 4 beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.base = nn.Linear(width, out)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Layer(width, 2 * width)
        self.second = Layer(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Adapted(nn.Module):
    """Blocks of two such layers, and a frozen head."""

    def __init__(self, width: int = WIDTH, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".down." in name or ".up." in name)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def decoded(values: Tensor, name: str) -> Tensor:
    """What a tensor is behind its codes."""
    form = FORMATS[format_named(name, "base")]
    length = -(-values.numel() // form.block) * form.block
    payload = torch.empty(form.nbytes(length), dtype=torch.uint8)
    form.encode_tensor(values.reshape(-1), payload)
    back = torch.empty(length, dtype=values.dtype)
    form.decode(payload.view(1, -1), back.view(1, -1))
    return back[: values.numel()].view(values.shape)


def quantized(model: nn.Module, name: str) -> nn.Module:
    """The model itself, whose frozen matrices have the values of their codes."""
    with torch.no_grad():
        for module_name, module in model.named_modules():
            if module_name.endswith("base") and isinstance(module, nn.Linear):
                module.weight.copy_(decoded(module.weight, name))
    return model


def batches(count: int, size: int = 8, width: int = WIDTH) -> list[Tensor]:
    return list(torch.randn(count, size, width, generator=torch.Generator().manual_seed(1)))
