"""Models that tests train: small, and each with one thing that is hard for a sharding engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, CONTEXT = 50, 24, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Embedding, blocks, norm, head; ``forward(tokens, targets)`` is the mean cross entropy."""

    def __init__(self, layers: int = 3, *, tied: bool = False, checkpointing: str | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embedding.weight

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.norm(x)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(tokens)).flatten(0, 1), targets.flatten())


def small() -> nn.Module:
    return Small()


def double(build: Callable[[], nn.Module]) -> nn.Module:
    """In fp64, where rounding turns no sign: what takes one can be compared with a whole batch only so."""
    return build().double()


def tied() -> nn.Module:
    return Small(tied=True)


def checkpointed() -> nn.Module:
    return Small(checkpointing="new")


def checkpointed_reentrant() -> nn.Module:
    return Small(checkpointing="reentrant")


def frozen() -> nn.Module:
    """Half of the blocks and the embedding are frozen: they have no gradient, master or moments."""
    model = Small(layers=4)
    for parameter in [*model.embedding.parameters(), *model.blocks[1].parameters(), *model.blocks[2].up.parameters()]:
        parameter.requires_grad_(False)
    return model


class Backwards(nn.Module):
    """Its blocks run in another order than they are defined in, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i in (3, 0, 4, 1):
            x = self.blocks[i](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def backwards() -> nn.Module:
    return Backwards()


class Twice(nn.Module):
    """One block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i in (0, 1, 0, 2):
            x = self.blocks[i](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def twice() -> nn.Module:
    return Twice()


def attends_in_fp16() -> bool:
    """Whether this PyTorch attends in fp16 here: by the kernels of a lower ``ATEN_CPU_CAPABILITY`` it cannot on a CPU
    that multiplies matrices of 16 bits (2.13)."""
    x = torch.ones(8, 2, 16, 16, dtype=torch.float16)
    try:
        F.scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError as error:
        if "pack_vnni2" not in str(error):
            raise
        return False
    return True


def batches(steps: int, rows: int = 48, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """``steps`` global batches of ``(tokens, targets)``, each ``(rows, CONTEXT)``; 48 rows divide by 1, 2, 3, 4 x 4."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(VOCAB, (rows, CONTEXT), generator=generator),
            torch.randint(VOCAB, (rows, CONTEXT), generator=generator),
        )
        for _ in range(steps)
    ]
