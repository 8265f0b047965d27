"""AdamW with both moments in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.optim.adamw import adamw_
from shardfold.optim.parts import PartOptimizer, ShardPlacement, Use, check_betas, check_number
from shardfold.plan.checks import known_arguments

__all__ = ["AdamW8bit", "dequantize", "quantize"]

CPU_AT_ONCE = 256 * 1024
"""Elements that are in fp32 at a time: what is read again is in cache by then."""
DEVICE_AT_ONCE = 8 * 1024 * 1024
"""The same where each of some thirty kernels is launched for so many: enough to fill a device, and its temporaries take
200 MB."""


@known_arguments
class AdamW8bit(PartOptimizer):
    """AdamW (arXiv 1711.05101) whose moments are one byte per element and one fp32 scale per block (Dettmers et al.,
    arXiv 2110.02861): block-wise, with the dynamic map.

    Element-wise but for the blocks, which on shards no rank boundary cuts: nothing is sent. State: ``2 + 8 / block``
    bytes per element; 8 of parameters with fewer than ``min_8bit_size`` elements, which stay in fp32.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        block: elements that share a scale, a power of 2 from 16 up; one for all groups.
        min_8bit_size: elements from which a parameter's moments are in 8 bits.

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> small = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.AdamW8bit, lr=1e-3), layout="zero2")
        >>> small.close()
    """

    per_element = ("exp_avg", "exp_avg_sq")
    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block: int = 256,
        min_8bit_size: int = 4096,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "min_8bit_size": min_8bit_size}
        for name, value in numbers.items():
            check_number(AdamW8bit, name, value)
        check_betas(AdamW8bit, betas)
        if not isinstance(block, int) or block < 16 or block & (block - 1):
            raise ConfigError(f"AdamW8bit(block={block!r}): it is a power of 2 from 16 up, such as 256 or 2048.")
        self.block, self.min_8bit_size = block, min_8bit_size
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "block": self.block, "min_8bit_size": self.min_8bit_size}

    @property
    def align(self) -> int:
        return self.block

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        if place.whole_numel < self.min_8bit_size:
            wide = torch.zeros_like(tensor, dtype=torch.float32)
            return {"step": 0, "exp_avg": wide, "exp_avg_sq": wide.clone()}
        state: dict[str, Any] = {"step": 0}
        for name in self.per_element:
            zero = _code_of_zero(signed=name == "exp_avg")
            state[f"{name}_codes"] = torch.full((place.part_numel,), zero, dtype=torch.uint8, device=tensor.device)
            state[f"{name}_scales"] = torch.zeros(-(-place.part_numel // self.block), device=tensor.device)
        return state

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        if place.whole_numel < self.min_8bit_size:
            return 8 * place.part_numel
        return 2 * (place.part_numel + 4 * -(-place.part_numel // self.block))

    def update(self, uses: list[Use]) -> None:
        for use in uses:
            use.state["step"] += 1
            x, grad = use.tensor.reshape(-1), use.grad.reshape(-1)
            dtype = torch.promote_types(x.dtype, torch.float32)
            step = self._at_once(x)
            for a in range(0, x.numel(), step):
                b = min(a + step, x.numel())
                m, v = (self._read(use.state, name, a, b).to(dtype) for name in self.per_element)
                wide = x[a:b].to(dtype)
                adamw_(wide, grad[a:b].to(dtype), m, v, use.state["step"], use.group, use.group["eps"])
                if x.dtype != dtype:
                    x[a:b].copy_(wide)
                for name, moment in (("exp_avg", m), ("exp_avg_sq", v)):
                    self._write(use.state, name, a, moment)
            if not use.tensor.is_contiguous():
                use.tensor.copy_(x.view(use.tensor.shape))

    def dtypes(self, tensor: Tensor) -> dict[str, torch.dtype]:
        return dict.fromkeys(self.per_element, torch.float32) if self.state.get(tensor) else {}

    def value(self, tensor: Tensor, name: str) -> Tensor:
        return self._read(self.state[tensor], name, 0, tensor.numel()).view(tensor.shape)

    def take_value(self, tensor: Tensor, name: str, values: Tensor) -> None:
        flat, step = values.reshape(-1), self._at_once(values)
        for a in range(0, flat.numel(), step):
            self._write(self.state[tensor], name, a, flat[a : a + step])

    def stored(self, tensor: Tensor) -> dict[str, tuple[int, Tensor]]:
        state = self.state.get(tensor, {})
        if "exp_avg_codes" not in state:
            return super().stored(tensor)
        codes = {f"{name}_codes": (1, state[f"{name}_codes"]) for name in self.per_element}
        return codes | {f"{name}_scales": (self.block, state[f"{name}_scales"]) for name in self.per_element}

    def _at_once(self, tensor: Tensor) -> int:
        """Elements of ``tensor`` that are in fp32 at a time: whole blocks."""
        elements = DEVICE_AT_ONCE if accelerator.has_streams(tensor.device) else CPU_AT_ONCE
        return max(elements // self.block, 1) * self.block

    def _read(self, state: dict[str, Any], name: str, a: int, b: int) -> Tensor:
        """Elements ``[a, b)`` of a moment in fp32; ``a`` is a multiple of the block."""
        if name in state:
            return state[name].view(-1)[a:b]
        scales = state[f"{name}_scales"][a // self.block : -(-b // self.block)]
        return dequantize(state[f"{name}_codes"][a:b], scales, self.block, signed=name == "exp_avg")

    def _write(self, state: dict[str, Any], name: str, a: int, values: Tensor) -> None:
        if name in state:
            state[name].view(-1)[a : a + values.numel()].copy_(values)
            return
        codes, scales = quantize(values.float(), self.block, signed=name == "exp_avg")
        state[f"{name}_codes"][a : a + values.numel()].copy_(codes)
        state[f"{name}_scales"][a // self.block : a // self.block + scales.numel()].copy_(scales)


def quantize(values: Tensor, block: int, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes ``(n,)`` uint8 and scales ``(ceil(n / block),)`` fp32 of 1-D fp32 ``values``: of each block the element of
    the largest magnitude, with its sign, and of each element the nearest value of the map to its part of that.

    The map has 1 but not -1: with its sign the largest is kept exactly, and quantizing again changes nothing.
    """
    blocks = _in_blocks(values, block)
    scales = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    parts = blocks / torch.where(scales == 0, 1.0, scales)
    return _nearest(parts.view(-1), signed).to(torch.uint8)[: values.numel()], scales.view(-1)


def dequantize(codes: Tensor, scales: Tensor, block: int, *, signed: bool) -> Tensor:
    """What :func:`quantize` kept, ``(n,)`` fp32."""
    values = _in_blocks(_on(codes.device, _dynamic_map, signed).index_select(0, codes.int()), block)
    return (values * scales.unsqueeze(1)).view(-1)[: codes.numel()]


@lru_cache
def _on(device: torch.device, table: Callable[[bool], Tensor], signed: bool) -> Tensor:
    """A table in the memory of a device; copied once, because a copy of pageable memory stops the host."""
    return table(signed).to(device)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """``(blocks, block)``; the last one is filled up with zeros."""
    missing = -values.numel() % block
    return (torch.cat([values, values.new_zeros(missing)]) if missing else values).view(-1, block)


@lru_cache
def _dynamic_map(signed: bool) -> Tensor:
    """The 256 values of a byte, rising, ``(256,)`` fp32 (the paper's section 1.3 and figure 2).

    Behind the sign (if there is one) the number of leading zeros is an exponent of 10, a 1 ends it, and the bits that
    are left divide that decade from 0.1 to 1 into equal parts, of which the middle is taken. 0 and 1 are kept exactly.
    """
    magnitudes: list[Tensor] = []
    for exponent in range(7):
        parts = 2 ** (exponent + (0 if signed else 1))
        middles = 0.1 + 0.9 * (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
        magnitudes.append(middles * 10.0 ** (exponent - 6))
    positive = torch.cat(magnitudes)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return torch.cat([positive, -positive, ends] if signed else [positive, ends]).sort().values.float()


@lru_cache
def _borders(signed: bool) -> Tensor:
    """Up to where each value of the map is the nearest, ``(256,)``; the last has no end."""
    values = _dynamic_map(signed).double()
    return torch.cat([((values[1:] + values[:-1]) / 2).float(), torch.tensor([torch.inf])])


@lru_cache
def _first_codes(signed: bool) -> Tensor:
    """The nearest code of the least number that begins with the same 16 bits, for each such beginning, ``(65536,)``."""
    high = torch.arange(65536, dtype=torch.int64).sub(32768).bitwise_left_shift(16).to(torch.int32)
    ends = torch.stack([high.view(torch.float32), (high | 0xFFFF).view(torch.float32)]).nan_to_num()
    return torch.bucketize(ends.amin(0), _borders(signed), out_int32=True)


def _nearest(parts: Tensor, signed: bool) -> Tensor:
    """The code nearest to each element, ``(n,)`` int32.

    Numbers with the same first 16 bits lie closer together than values of the map, so that at most one border is
    between them: a table and one comparison take a tenth of the time of a search.
    """
    low = _on(parts.device, _first_codes, signed).index_select(0, (parts.view(torch.int32) >> 16) + 32768)
    return low + (parts > _on(parts.device, _borders, signed).index_select(0, low))


@lru_cache
def _code_of_zero(signed: bool) -> int:
    return int((_dynamic_map(signed) == 0).nonzero())
