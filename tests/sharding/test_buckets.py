"""Small blocks of a list are one unit: fewer collectives, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.plan import presets
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.rules import Rules
from shardfold.sharding.partition import cut
from shardfold.testing import Ranks, same_training

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
WIDTH = 8
BYTES = 4 * WIDTH * (WIDTH + 1)  # of the gradients of one block
ALL = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.skipped = nn.Linear(width, width), False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skipped else x + F.gelu(self.layer(x))


class Tower(nn.Module):
    """Blocks in a list, between layers that are the root's."""

    def __init__(self, blocks: int = 9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class InTurns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block() for _ in range(8)) for _ in range(2))


def names(model: nn.Module, bucket: int, layout: Layout = presets.zero3, units: Any = None, **sizes: int) -> list[str]:
    mesh = Mesh.of({"inter": 1, "intra": 2} | sizes)
    groups = {id(p): 0 for p in model.parameters() if p.requires_grad}
    rules = Rules(Precision.named("fp32"), layout, mesh)
    return [c.name for c in cut(model, units, groups, rules, mesh, bucket=bucket) if not c.spec.root]


def row(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(*blocks)


def frozen(blocks: int) -> nn.Sequential:
    model = row(*(Block() for _ in range(8)))
    model[:blocks].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("build", "bucket", "expected"),
    [
        (lambda: row(*(Block() for _ in range(8))), ALL, "0-1 2-3 4-5 6-7"),
        (lambda: row(*(Block() for _ in range(13))), ALL, "0-2 3-5 6-8 9-11 12"),
        (lambda: row(*(Block() for _ in range(7))), ALL, "0 1 2 3 4 5 6"),  # four units are left, or nothing is done
        (lambda: row(*(Block() for _ in range(12))), 2 * BYTES, "0-1 2-3 4-5 6-7 8-9 10-11"),
        (lambda: row(*(Block() for _ in range(8))), 2 * BYTES - 1, "0 1 2 3 4 5 6 7"),
        (lambda: row(*(Block() for _ in range(8))), 0, "0 1 2 3 4 5 6 7"),
        (lambda: row(*(Block(64 if n in (2, 3) else WIDTH) for n in range(8))), 1024, "0-1 2 3 4-5 6-7"),
        (lambda: frozen(3), ALL, "0-1 2 3-4 5-6 7"),
        (InTurns, ALL, " ".join(f"{side}.{n}" for side in ("left", "right") for n in range(8))),
        (lambda: nn.ModuleDict({f"b{n}": Block() for n in range(8)}), ALL, " ".join(f"b{n}" for n in range(8))),
    ],
)
def test_neighbours_in_a_list_are_put_together(build: Callable[[], nn.Module], bucket: int, expected: str) -> None:
    """Up to so many bytes and so that four units are left; those whose segments differ, lists that may take turns, and
    blocks that have names stay alone."""
    assert names(build(), bucket) == expected.split()


def test_what_rests_whole_is_in_two_units() -> None:
    assert names(row(*(Block() for _ in range(8))), ALL, presets.ddp) == ["0-3", "4-7"]
    assert names(row(*(Block() for _ in range(8))), ALL, presets.zero2) == ["0-1", "2-3", "4-5", "6-7"]


def test_blocks_that_are_named_and_those_of_a_pipeline_stay_alone() -> None:
    assert len(names(Tower(8), ALL, units=[Block])) == 8
    assert len(names(Tower(8), ALL, pipeline=2)) == 8


def batches(count: int) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, WIDTH, generator=draw),) for _ in range(count)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_they_train_as_in_plain_pytorch(ranks: Ranks, layout: str, mode: str) -> None:
    same_training(
        Tower, batches(5), layout=layout, world_size=2, accumulate=2, clip_norm=0.5, optimizer=ADAMW, steps=5,
        ranks=ranks, activations=mode,
    )  # fmt: skip


def trained(layout: str, bucket: str | None, offload: Any = None) -> tuple[list[float], list[Tensor], int, int]:
    """Losses, weights, collectives of units in a step, and the program's."""
    engine = sf.Engine(Tower(), optimizer=ADAMW, layout=layout, overlap=sf.Overlap(bucket=bucket), offload=offload)
    losses: list[float] = []
    for (x,) in batches(4):
        loss = engine(x + engine.rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with engine.gathered():
        weights = [p.detach().clone() for p in engine.module.parameters()]
    rows = [row for row in engine.traffic().rows if row.program is not None and row.purpose in ("gather", "reduce")]
    assert all(row.sent == row.program for row in rows)
    calls = sum(row.calls for row in rows)
    engine.close()
    return losses, weights, calls, len(rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "offload"), [("ddp", None), ("zero2", None), ("zero3", None), ("zero3", "host")])
def test_numbers_are_the_same_to_the_bit_by_fewer_collectives(ranks: Ranks, layout: str, offload: Any) -> None:
    """Nine blocks are five units where anything is split, three where nothing is, and the root is another."""
    together, alone = (ranks.run(trained, layout, bucket, offload, world_size=2) for bucket in ("8MiB", None))
    units = 4 if layout == "ddp" else 6
    kinds = 1 if layout == "ddp" else 3 if layout == "zero3" else 2
    for (losses, weights, calls, _), (others, before, more, _) in zip(together, alone, strict=True):
        assert losses == others
        assert all(map(torch.equal, weights, before))
        assert (calls, more) == (kinds * units, kinds * 10)


def explained() -> str:
    engine = sf.Engine(Tower(8), optimizer=ADAMW, activations={"blocks.[0-2]": "recompute", "*": "keep"})
    said = engine.explain()
    engine.close()
    return said


def test_what_is_printed_names_them(ranks: Ranks) -> None:
    said = ranks.run(explained, world_size=2)[0]
    assert "ALL_GATHER blocks.0-1 params -> flat [intra] fp32" in said
    assert "  blocks.0-1                    recompute\n" in said
    assert "  blocks.2-3                    blocks.2: recompute\n" in said


def lopsided() -> tuple[list[Tensor], list[str]]:
    """Rank 1 leaves out some blocks, of one unit and of two, from the third step on; then a block is taken away."""
    model = Tower()
    engine = sf.Engine(model, optimizer=ADAMW)
    blocks: list[Any] = [*model.blocks]
    for step, (x,) in enumerate(batches(6)):
        left_out = blocks[1:4] if engine.rank == 1 and step >= 2 else []
        for block in left_out:
            block.skipped = True
        engine.backward(engine(x))
        engine.step()
        for block in left_out:
            block.skipped = False
    del model.blocks[4]
    engine.backward(engine(batches(1)[0][0]))
    engine.step()
    units = [unit.name for unit in engine.sharded.units if not unit.spec.root]
    with engine.gathered():
        return [p.detach().clone() for p in model.parameters()], units


def plain() -> list[Tensor]:
    model = Tower()
    optimizer = ADAMW(model.parameters())
    blocks = [*model.blocks]
    for step, (x,) in enumerate(batches(6)):
        optimizer.zero_grad()
        losses = [model(x)]
        if step >= 2:
            y = model.first(x)
            for block in (blocks[0], *blocks[4:]):
                y = block(y)
            losses.append(y.square().mean())
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        optimizer.step()
    del model.blocks[4]
    optimizer.zero_grad()
    model(batches(1)[0][0]).backward()
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_ranks_may_leave_out_a_part_of_a_unit_and_models_may_change(ranks: Ranks) -> None:
    first, second = ranks.run(lopsided, world_size=2)
    assert first[1] == ["blocks.0-1", "blocks.2-3", "blocks.4-5", "blocks.6-7"]
    for one, other, expected in zip(first[0], second[0], plain(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_of_bytes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Overlap\.bucket is 'much': it is bytes as a text, such as '8MiB', 'auto', or None"
    ):
        sf.Overlap(bucket="much")
    assert sf.Overlap(bucket=None).bucket_bytes == 0
