"""What gradients are multiplied by is not rounded to what they travel in, and multiplies each of them once."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from shardfold.plan.placement import Slot
from shardfold.sharding.gradient_buffer import SMALL, GradientBuffer


class _Segment:
    """Parameters in one flat, with so much padding behind each."""

    adopted = None

    def __init__(self, sizes: tuple[int, ...], pad: int = 0) -> None:
        starts = [sum(sizes[:i]) + i * pad for i in range(len(sizes))]
        places = zip(sizes, starts, strict=True)
        self.spec = SimpleNamespace(slots=[Slot(f"p{i}", (n,), a) for i, (n, a) in enumerate(places)])
        self.length = sum(sizes) + len(sizes) * pad

    def parts_of(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slots = self.spec.slots
        stops = [*(slot.offset for slot in slots[1:]), len(flat)]
        ends = [(slot.offset + slot.numel, stop) for slot, stop in zip(slots, stops, strict=True)]
        return [flat[s.offset : s.offset + s.numel] for s in slots], [flat[a:b] for a, b in ends if b > a]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("times", [1, 3])
def test_a_scale_that_the_dtype_cannot_hold_is_not_rounded(dtype: torch.dtype, times: int) -> None:
    """Rounding of single elements has no direction, so by 100,000 of them the sum is right to 1e-4 (by two standard
    deviations of the coarser dtype to 2e-5); a scale that was rounded itself would be off by 2e-3, or 2e-4 in fp16."""
    torch.manual_seed(0)
    sizes = (1000, 200_000)
    assert 1000 * 2 <= SMALL < 200_000 * 2
    segment = _Segment(sizes)
    buffer = GradientBuffer([segment], [torch.zeros(sum(sizes), dtype=dtype)], adopt=False)  # type: ignore[list-item]
    small = [torch.randn(1000).to(dtype) for _ in range(200)]
    grads = [torch.cat(small), torch.randn(200_000).to(dtype)]
    for slot, numel in enumerate(sizes):
        found, wanted = [], []
        for chunk in grads[slot].split(numel):
            buffer.clear()
            for _ in range(times):
                buffer.add(0, slot, chunk, 1 / 3)
            buffer.flush()
            found.append(buffer.views[0][slot].double())
            wanted.append(chunk.double() * times / 3)
        got, right = torch.cat(found), torch.cat(wanted)
        assert float((got * right).sum() / right.square().sum()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_gradients_in_any_order_are_multiplied_once_each(seed: int) -> None:
    """Bit for bit as one product each: neighbours and others, small ones and such that go alone, of two segments in
    turns, dropped, put, added to, and none at all; behind ``complete`` the padding is zero."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [tuple(draw.choice((0, 1, 60, 1000, SMALL // 4, SMALL // 4 + 1)) for _ in range(12)) for _ in range(2)]
    segments = [_Segment(each, pad) for each, pad in zip(sizes, (draw.choice((0, 4)), 4), strict=True)]
    flats = [torch.full((segment.length,), float("nan")) for segment in segments]
    buffer = GradientBuffer(segments, flats, adopt=False)  # type: ignore[arg-type]
    places = [(i, j) for i in range(2) for j in range(12)]
    for _ in range(2):
        buffer.clear()
        if draw.random() < 0.5:
            draw.shuffle(places)
        wanted = {place: torch.zeros(sizes[place[0]][place[1]]) for place in places}
        scale = draw.choice((0.5, 1 / 3, 1.0))
        for i, j in places:
            grad = torch.randn(sizes[i][j], generator=generator)
            what = draw.choice(("add", "add", "add", "add", "skip", "twice", "drop", "put", "flush"))
            if what == "put":
                buffer.put(i, j, grad)
                wanted[i, j] = grad
            elif what != "skip":
                buffer.add(i, j, grad, scale)
                wanted[i, j] = grad * scale
            if what == "twice":
                buffer.add(i, j, grad, scale)
                wanted[i, j] = wanted[i, j].add(grad, alpha=scale)
            elif what == "drop":
                buffer.drop(i, j)
                wanted[i, j] = torch.zeros_like(grad)
            elif what == "flush":
                buffer.flush()
        buffer.complete()
        for (i, j), values in wanted.items():
            assert torch.equal(buffer.views[i][j], values), (i, j)
        assert not any(flat.isnan().any() for flat in flats)
