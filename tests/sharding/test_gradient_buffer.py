"""What gradients are multiplied by is not rounded to what they travel in."""

from __future__ import annotations

import pytest
import torch

from shardfold.sharding.gradient_buffer import SMALL, GradientBuffer


class _Segment:
    """Two parameters in one flat."""

    adopted = None

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def parts_of(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return list(flat.split(self.sizes)), []


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
