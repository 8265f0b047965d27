"""Products in fp8 on the device: its codes are those of the CPU, to the bit; its kernels give what the emulation does,
which multiplies the same codes in fp32; a small model trains as in bf16; and how long a linear layer takes."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfold as sf
from shardfold import accelerator
from shardfold.comm.mesh import pick_device
from shardfold.numerics._fp8_products import E4M3, E5M2, fp8_linear, rounded
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.support.gpu.section import Asked, Notes, Outcome
from tests.support.gpu.setting import SIM

__all__ = ["run"]

RECIPES = {"fp8": False, "fp8-rowwise": True}
SIZES = {True: (40, 64, 48), False: (8200, 4096, 4096)}  # rows, which are no multiple of 16, inputs and outputs
ROUNDS = {True: 1, False: 10}
FAST, EXACT = 2.0**-6, 2.0**-8
"""How far products may be off, of their norm: rounded to bf16, and of sums that keep 14 bits (arXiv 2412.19437, 3.3.2),
as forward asks for."""
STEPS = {True: 3, False: 50}
NEAR = 0.02  # of a loss, of a model that has seen few tokens


def run(asked: Asked, notes: Notes) -> None:
    inside = nullcontext()
    if asked.device == SIM:
        inside = importlib.import_module("shardfold.testing.simulated").simulated()
    with inside:
        device = pick_device(asked.device)
        native = accelerator.multiplies_fp8(device)
        for name, dim in (("tensor", None), ("rows", 1), ("columns", 0)):
            notes.attempt(f"codes by {name}", partial(_coded, device, dim, asked.small), needs=2.0)
        for recipe, rowwise in RECIPES.items():
            name = f"{recipe}: kernel and emulation"
            if native:
                notes.attempt(name, partial(_multiplied, device, rowwise, asked.small), needs=5.0)
            else:
                notes.not_run(name, "torch._scaled_mm has no kernel for it here")
        for recipe in RECIPES:
            notes.attempt(
                f"{recipe}: training beside bf16", partial(_trained, asked.device, recipe, asked.small), needs=10
            )
        if device.type in ("cpu", SIM) or not native:
            notes.not_run("times", "there is no kernel of a GPU here to take the time of")
        else:
            notes.attempt("times", partial(_timed, device, asked.small), needs=5.0)


def _some(asked: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a gradient of an output, in bf16."""
    rows, inputs, outputs = SIZES[asked]
    draw = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=draw) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    x, weight, grad = (each.to(torch.bfloat16).to(device) for each in made)
    return x, weight, grad


def _coded(device: torch.device, dim: int | None, small: bool) -> tuple[str, dict[str, Any]]:
    for here in _some(small, torch.device("cpu")):
        there = here.to(device)
        for dtype in (E4M3, E5M2):
            for mine, other in zip(rounded(there, dtype, dim), rounded(here, dtype, dim), strict=True):
                off = int((mine.cpu().float() != other.float()).sum())
                if off:
                    raise Outcome(f"{off} of {other.numel()} codes or scales of {dtype} differ from the CPU's")
    return "", {}


def _three(product: Callable[[Tensor, Tensor], Tensor], given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """An output, and gradients of both factors."""
    x, weight = (each.clone().requires_grad_() for each in given[:2])
    y = product(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), given[2])]


def _multiplied(device: torch.device, rowwise: bool, small: bool) -> tuple[str, dict[str, Any]]:
    given = _some(small, device)
    made = [
        _three(partial(fp8_linear, bias=None, rowwise=rowwise, native=native), given) for native in (True, False)
    ]  # fmt: skip
    figures: dict[str, Any] = {
        name: ((mine.float() - other.float()).norm() / other.float().norm()).item()
        for name, mine, other in zip(("output", "gradient of input", "gradient of weight"), *made, strict=True)
    }
    bad = [name for name, off in figures.items() if not off <= (FAST if name == "output" else EXACT)]
    if bad:
        raise Outcome(f"{', '.join(bad)}: beyond {EXACT:.1e} (output: {FAST:.1e})", **figures)
    return "", figures


def _losses(device: str, precision: str, small: bool) -> list[float]:
    torch.manual_seed(0)
    shape = GPTConfig(vocab=64, d_model=32 if small else 256, layers=2, heads=2, context=16 if small else 128)
    engine = sf.Engine(
        GPT(shape),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        precision=precision,
        runtime=sf.Runtime(device=device),
    )
    draw, losses = torch.Generator().manual_seed(0), list[float]()
    for _ in range(STEPS[small]):
        tokens = torch.randint(0, 64, (4, shape.context), generator=draw).to(engine.device)
        loss = engine(tokens, tokens).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


def _trained(device: str, recipe: str, small: bool) -> tuple[str, dict[str, Any]]:
    mine, other = _losses(device, recipe, small), _losses(device, "bf16", small)
    off = max(abs(a / b - 1) for a, b in zip(mine, other, strict=True))
    figures: dict[str, Any] = {"largest difference": off, "last loss": mine[-1], "of bf16": other[-1]}
    if not off <= NEAR:
        raise Outcome(f"losses differ by {off:.1e}, beyond {NEAR}", **figures)
    return "", figures


def _timed(device: torch.device, small: bool) -> tuple[str, dict[str, Any]]:
    """Rates of a linear layer's three products, with rounding and scales."""
    given = _some(small, device)
    rows, inputs, outputs = SIZES[small]
    products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"bf16": F.linear}
    products |= {
        name: partial(fp8_linear, bias=None, rowwise=rowwise, native=True) for name, rowwise in RECIPES.items()
    }
    figures: dict[str, Any] = {}
    for name, product in products.items():
        for rounds in (2, ROUNDS[small]):  # the first finds kernels
            accelerator.synchronize(device)
            begun = time.perf_counter()
            for _ in range(rounds):
                _three(product, given)
            accelerator.synchronize(device)
            seconds = (time.perf_counter() - begun) / rounds
        figures[f"{name}, TFLOP/s"] = round(6 * rows * inputs * outputs / seconds / 1e12, 1)
    return "", figures
