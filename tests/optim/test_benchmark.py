"""``benchmarks/update.py`` times what an engine runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardfold.optim.threads import UpdateThreads
from shardfold.plan.cost import update_bytes
from shardfold.torch_internals import fused_adamw_

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "update.py"


def script() -> Any:
    """The benchmark, as a module."""
    spec = importlib.util.spec_from_file_location("update", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["update"] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_timed_is_the_update_of_the_separate_passes() -> None:
    """Both ways make the same master, moments and 16-bit parameters, to the bit."""
    module = script()
    timed, plain = module.Held(4096), module.Held(4096)
    pool = UpdateThreads(1)
    with torch.no_grad():
        module.ours(timed, pool, 0)()
        fused_adamw_(
            [plain.master], [plain.gradients.float()], [plain.averages], [plain.squares], [], [torch.ones(())],
            lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, amsgrad=False, maximize=False,
            grad_scale=None, found_inf=None,
        )  # fmt: skip
    pool.close()
    assert torch.equal(timed.master, plain.master) and torch.equal(timed.averages, plain.averages)
    assert torch.equal(timed.squares, plain.squares) and torch.equal(timed.copy, plain.master.bfloat16())


class Touched(TorchDispatchMode):
    """Counts the bytes of tensors that operations read and write; numbers as tensors are none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in str(func):
            return made
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(each, (kwargs or {})[each.name]) for each in func._schema.arguments if each.name in (kwargs or {})]
        for argument, value in given:
            tensors = [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not writes or not (str(func).startswith("aten.copy_") or argument.name == "out")
            if "fused" in str(func) and argument.name == "grads":
                writes = False  # without a scale of its own it leaves them
            self.bytes += sum(t.nbytes * (writes + reads) for t in tensors if t.dim())
        return made


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("clipped", [False, True])
def test_bytes_of_an_update_are_those_that_are_planned(gradient_dtype: torch.dtype, clipped: bool) -> None:
    """Passes of their own for the cast, the factor, the update and the copy, as on a device without a compiled pass,
    read and write what :func:`update_bytes` says of each element; in one pass each byte is touched once."""
    module = script()
    held = module.Held(1024)
    held.gradients = held.gradients.to(gradient_dtype)
    update = module.ours(held, UpdateThreads(1), 1024, factor=torch.full((), 0.5) if clipped else None)
    with Touched() as touched, torch.no_grad():
        update()
    size = gradient_dtype.itemsize
    assert touched.bytes == 1024 * update_bytes(4, size, 2, 2, one_pass=False, scaled=clipped)
    once = [held.master, held.averages, held.squares]
    whole = 2 * sum(each.nbytes for each in once) + held.gradients.nbytes + held.copy.nbytes
    assert whole == 1024 * update_bytes(4, size, 2, 2, scaled=clipped)
