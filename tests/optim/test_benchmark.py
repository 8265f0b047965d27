"""``benchmarks/update.py`` times what an engine runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from shardfold.optim.threads import UpdateThreads
from shardfold.torch_internals import fused_adamw_

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "update.py"


def test_what_is_timed_is_the_update_of_the_separate_passes() -> None:
    """Both ways make the same master, moments and 16-bit parameters, to the bit."""
    spec = importlib.util.spec_from_file_location("update", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["update"] = module
    spec.loader.exec_module(module)
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
