"""Codes that bitsandbytes makes, kept so that tests do not need it: ``nf4_reference.json`` was written with
bitsandbytes 0.50.2 on a CPU by

    python -m tests.support.nf4_reference
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CASES", "Reference", "bitsandbytes_codes", "kept", "values_of"]

FILE = Path(__file__).with_name("nf4_reference.json")
CASES = {"ties": (16, 64), "one group": (32, 512), "two groups and a part": (129, 256)}


class Reference(NamedTuple):
    """What bitsandbytes makes of a tensor: codes, scales in fp32, and with double quantization their codes, greatest
    magnitudes and mean."""

    codes: Tensor
    scales: Tensor
    scale_codes: Tensor
    most: Tensor
    mean: Tensor


def values_of(case: str) -> Tensor:
    """The tensor of a case, by integers only: sums of bytes, so that no generator of another version shows. ``ties``:
    what lies in the middle of two levels, and beside it, of blocks whose greatest magnitude is 1; and a block of
    zeros."""
    shape = CASES[case]
    numel = shape[0] * shape[1]
    mixed = (torch.arange(numel, dtype=torch.int64) * 2654435761 + 40503) % 2**32
    parts = [(mixed >> shift) & 255 for shift in (0, 8, 16, 24)]
    sums = (parts[0] + parts[1] + parts[2] + parts[3] - 510).float() / 8192
    if case == "ties":
        from shardfold.plan._codebooks import TABLES

        levels = torch.tensor(TABLES["nf4"])
        middles = (levels[:-1] + levels[1:]) / 2
        near = torch.cat([middles, *(torch.nextafter(middles, torch.full_like(middles, far)) for far in (-2.0, 2.0))])
        sums[:1024] = sums[:1024].clamp(-0.9, 0.9)
        for block in range(0, 960, 64):
            sums[block + 1 : block + 46] = near.roll(block // 64)
            sums[block] = 1.0
        sums[960:] = 0.0
    return sums.view(shape)


def bitsandbytes_codes(values: Tensor) -> Reference:
    """The same by bitsandbytes."""
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    codes, plain = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    _, double = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=True)
    return Reference(codes.view(-1), plain.absmax, double.absmax, double.state2.absmax, double.offset.view(1))


def kept(case: str) -> Reference:
    """What was written down of a case."""
    entry = json.loads(FILE.read_text())[case]
    dtypes = (torch.uint8, torch.float32, torch.uint8, torch.float32, torch.float32)
    tensors = (
        torch.frombuffer(bytearray(b64decode(entry[name])), dtype=dtype)
        for name, dtype in zip(Reference._fields, dtypes, strict=True)
    )
    return Reference(*tensors)


def _write() -> None:
    found = {
        case: {
            name: b64encode(tensor.contiguous().numpy().tobytes()).decode()
            for name, tensor in bitsandbytes_codes(values_of(case))._asdict().items()
        }
        for case in CASES
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    _write()
