"""Adam's update as one compiled pass: 16-bit gradients in, times a factor, states in place, 16-bit parameters out.

torch's fused kernel takes one dtype, so in eager mode casts and the factor of gradients stand before and behind it: in
host memory while a block is in cache, on a GPU as passes of their own. ``torch.compile`` makes one loop of them all,
which reads and writes every byte once. It needs a C++ compiler, or Triton, and up to a minute, once per machine
(PyTorch keeps what it has compiled in the folder ``TORCHINDUCTOR_CACHE_DIR``, behind locks that end with the process
that holds them); so it is made when it was asked for, and at the start.

On a device with streams nothing is read by the host: the factor, which is made of the norm of all gradients, stays a
tensor of the device, and what else is the same for all elements goes there from pinned memory.

Source: Adam (arXiv 1412.6980), AdamW (arXiv 1711.05101).
"""

from __future__ import annotations

import logging
import os
import types
import warnings
from collections.abc import Mapping
from functools import lru_cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.errors import ConfigError

__all__ = ["compiled_adam", "constants"]

LOG = logging.getLogger("shardfold")
EXAMPLE = 100_003  # elements of what it is compiled for: not 0 or 1, which would stay so, and no multiple of a vector


def _adamw(
    master: Tensor, average: Tensor, square: Tensor, gradient: Tensor, copy: Tensor, given: Tensor, factor: Tensor
) -> None:
    wide = gradient.float() * (given[0] * factor.float())
    m = average.float()
    m = m + given[1] * (wide - m)
    v = square.float() * given[2] + given[3] * wide * wide
    p = master.float() * given[4] - given[5] * (m / (v.sqrt() * given[6] + given[7]))
    average.copy_(m)
    square.copy_(v)
    master.copy_(p)
    copy.copy_(p)


def _adam(
    master: Tensor, average: Tensor, square: Tensor, gradient: Tensor, copy: Tensor, given: Tensor, factor: Tensor
) -> None:
    p = master.float()
    wide = gradient.float() * (given[0] * factor.float()) + given[4] * p
    m = average.float()
    m = m + given[1] * (wide - m)
    v = square.float() * given[2] + given[3] * wide * wide
    p = p - given[5] * (m / (v.sqrt() * given[6] + given[7]))
    average.copy_(m)
    square.copy_(v)
    master.copy_(p)
    copy.copy_(p)


def constants(group: Mapping[str, Any], decoupled: bool, step: int, device: torch.device) -> Tensor:
    """What is the same for all elements in a step, ``(8,)`` fp32 on ``device``, which the host does not wait for.

    Args:
        group: the hyper-parameters.
        decoupled: whether weight decay is AdamW's.
        step: counted from 1.
    """
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    values = [
        -1.0 if group["maximize"] else 1.0,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - lr * decay if decoupled else decay,
        lr / (1 - beta1**step),
        (1 - beta2**step) ** -0.5,
        group["eps"],
    ]
    made = torch.tensor(values, dtype=torch.float32, pin_memory=accelerator.has_streams(device))
    return made.to(device, non_blocking=True)


def _compiler(device: torch.device) -> str:
    return "a C++ compiler that it finds (CXX names one)" if device.type == "cpu" else "Triton (pip install triton)"


@lru_cache
def compiled_adam(
    decoupled: bool,
    master: torch.dtype,
    moments: torch.dtype,
    gradient: torch.dtype,
    copy: torch.dtype,
    device: torch.device,
) -> Any:
    """A function of ``(master, exp_avg, exp_avg_sq, gradient, copy, constants, factor)``, ``(n,)`` each but the last
    two, which updates the first three in place and writes the fifth; ``factor`` is 0-d, what gradients are multiplied
    by. In host memory it uses one thread, and leaves Python's lock free.

    Args:
        decoupled: whether weight decay is AdamW's.
        master: dtype of the first, and so on.
        device: that all are on; where nothing compiles for it, as for the simulated one, the function runs as it is.

    Raises:
        ConfigError: ``torch.compile`` could not make it.
    """
    source = _adamw if decoupled else _adam
    # Each has a code of its own: what is compiled is kept by it, and found again without a look at the dtypes.
    function = types.FunctionType(source.__code__.replace(), source.__globals__, source.__name__)
    if not accelerator.compiles(device):
        return function
    host = {"cpp.threads": 1, "cpp_wrapper": True}  # the other kind of wrapper holds Python's lock in a kernel
    options = {
        **(host if device.type == "cpu" else {}),
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,  # nothing is compiled again in the middle of training
    }
    made = torch.compile(function, fullgraph=True, dynamic=True, options=options)
    dtypes = (master, moments, moments, gradient, copy)
    tensors = [torch.zeros(EXAMPLE, dtype=dtype, device=device) for dtype in dtypes]
    LOG.info("compiling the update (up to a minute; what was compiled on this machine before is found again)")
    began, environment = perf_counter(), dict(os.environ)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts of PyTorch's about others of its own
            made(*tensors, torch.ones(8, device=device), torch.ones((), device=device))
    except Exception as error:
        why = str(error).strip().splitlines()
        raise ConfigError(
            f"Overlap(compiled_update=True): torch.compile could not make the update "
            f"({type(error).__name__}: {why[0] if why else 'no message'}): install {_compiler(device)}, or leave "
            "compiled_update out."
        ) from error
    finally:
        for name in os.environ.keys() - environment.keys():  # an address of this process, which is none in a child
            del os.environ[name]
    LOG.info("the update is compiled, in %.1f s", perf_counter() - began)
    return made
