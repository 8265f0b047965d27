"""A vision transformer that learns the digits of an eight-by-eight font, drawn with noise: images, labels, accuracy.

python examples/vision_transformer.py
torchrun --nproc-per-node 2 examples/vision_transformer.py
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf

WIDTH, PATCH, STEPS, BATCH = 48, 4, 120, 64
FONT = ["7e424242427e", "081808081c1c", "7e027e40407e", "7e023e02027e", "42427e020202", "7e407e02027e"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(FONT))

    def forward(self, images: Tensor) -> Tensor:  # (batch, 1, 16, 16)
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Glyphs somewhere on a noisy picture of 16 by 16."""
    rows = [[glyph[i : i + 2] for i in range(0, len(glyph), 2)] for glyph in FONT]
    pixels = [[[int(row, 16) >> bit & 1 for bit in range(8)] for row in glyph] for glyph in rows]
    glyphs = torch.tensor(pixels, dtype=torch.float32)
    labels = torch.randint(len(FONT), (BATCH,), generator=draw)
    images = torch.randn(BATCH, 1, 16, 16, generator=draw) * 0.2
    places = torch.randint(2, 6, (BATCH, 2), generator=draw).tolist()
    for image, label, (down, right) in zip(images, labels.tolist(), places, strict=True):
        image[0, down : down + 6, right : right + 8] += glyphs[label]
    return images, labels


torch.manual_seed(0)
engine = sf.Engine(VisionTransformer(), optimizer=partial(torch.optim.AdamW, lr=3e-3), layout="zero2", clip_norm=1.0)
draw = torch.Generator().manual_seed(engine.data_rank)  # each rank draws its own pictures
for step in range(STEPS):
    images, labels = (each.to(engine.device) for each in batch(draw))
    logits = engine(images)
    loss = F.cross_entropy(logits, labels)
    engine.backward(loss)
    engine.step()
    if step % 30 == 0 or step == STEPS - 1:
        mean = engine.mean(loss.item())
        if engine.rank == 0:
            print(f"step {step + 1:3}  loss {mean:.4f}")
with engine.gathered(), torch.no_grad():
    images, labels = (each.to(engine.device) for each in batch(torch.Generator().manual_seed(99)))
    right = (engine.module(images).argmax(1) == labels).float().mean().item()
if engine.rank == 0:
    print(f"{right:.0%} of new pictures are read right")
engine.close()
