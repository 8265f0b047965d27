"""What every wire that carries data between ranks of the CPU promises, compared with Gloo's collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardfold.comm.mesh import DataMesh
from shardfold.comm.transport import GlooTransport, Transport

LIMIT = timedelta(seconds=30)
BLOCK = 256 * 1024  # bytes, of which sums are made


def wait(work: Any) -> None:
    work.wait(LIMIT)


def exchange(key: str, text: str) -> list[str]:
    """What every rank says."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    return said


def plain() -> GlooTransport:
    """Gloo's."""
    return GlooTransport(lambda n, dtype: torch.empty(n, dtype=dtype), lambda flat: None)


def values_of(numel: int, dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _summed(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All ranks' values added up in the order of their ranks, 16 bits in fp32 and rounded once."""
    total = torch.zeros(len(like), dtype=torch.promote_types(dtype, torch.float32))
    for rank in range(dist.get_world_size()):
        total += values_of(len(like), dtype, rank).to(total.dtype)
    return total.to(dtype)


def compare(gloo: Transport, wire: Transport, mesh: DataMesh) -> list[str]:
    """Which collectives of ``wire`` do not give, bit for bit, what those of ``gloo`` give, and sums in rank order."""
    group = mesh.everyone
    world, rank = mesh.world, mesh.rank
    wrong: list[str] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for chunk in (1, 1000, BLOCK // 4, BLOCK // 2 + 12345):
            values = values_of(world * chunk, dtype)
            answers: list[list[torch.Tensor]] = []
            for each in (gloo, wire):
                full, resident = torch.zeros_like(values), values.chunk(world)[rank].clone()
                full.chunk(world)[rank].copy_(resident)
                again = full.clone()
                each.all_gather(full, group).wait(wait)
                each.all_gather(again, group, resident=resident).wait(wait)
                each.fence(wait)
                inside, wide = values.clone(), torch.ones(chunk, dtype=torch.float32)
                each.reduce_scatter(inside, inside.chunk(world)[rank], group, add=False).wait(wait)
                if dtype.itemsize <= 4:
                    each.reduce_scatter(values.clone(), wide, group, add=True).wait(wait)
                answers.append([full, again, inside.chunk(world)[rank], wide])
            if not torch.equal(answers[1][2], _summed(values, dtype).chunk(world)[rank]):
                wrong.append(f"in rank order {dtype} {chunk}")
            for name, a, b in zip(("gather", "resident", "inside", "added"), *answers, strict=True):
                if not torch.equal(a, b):
                    wrong.append(f"{name} {dtype} {chunk}")
            summed, parts = values.clone(), [torch.empty_like(values) for _ in range(world)]
            wire.all_reduce(summed, group).wait(wait)
            dist.all_gather(parts, summed)
            dist.all_gather(parts, values)
            whole = torch.stack([part.double() for part in parts]).sum(0)
            error = (summed.double() - whole).abs().max() / whole.abs().max()
            if error > 2 * torch.finfo(dtype).eps:
                wrong.append(f"sum {dtype} {chunk}: {error}")
    return wrong


def exchanges(wire: Transport, mesh: DataMesh) -> bool:
    """Parts of other lengths for each rank, none of them too, and its own."""
    group = mesh.everyone
    right = True
    for unit, dtype in ((1, torch.float32), (1000, torch.bfloat16), (BLOCK // 4, torch.float64)):
        lengths = [
            [(sender + 2 * receiver) % 3 * unit for receiver in range(mesh.world)] for sender in range(mesh.world)
        ]
        whole = [values_of(sum(row), dtype, sender) for sender, row in enumerate(lengths)]
        received = torch.empty(sum(row[mesh.rank] for row in lengths), dtype=dtype)
        by = [row[mesh.rank] for row in lengths]
        wire.exchange(whole[mesh.rank].clone(), lengths[mesh.rank], received, by, group).wait(wait)
        expected = [each.split(row)[mesh.rank] for each, row in zip(whole, lengths, strict=True)]
        right &= torch.equal(received, torch.cat(expected))
    return right
