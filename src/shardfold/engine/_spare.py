"""A process that its launcher has started to take the place of a rank that dies, until it has one.

It has imported all that a rank needs and has taken a step of a tiny engine by itself: what is made at the first use is
there. It has no model yet, as it does not know what its part will be.
"""

from __future__ import annotations

import os
from contextlib import closing
from time import sleep

import torch
from torch import nn

from shardfold.checkpoint.rng import rng_state, set_rng_state
from shardfold.comm.backend import import_compiler
from shardfold.comm.launcher_notes import SPARE, is_dismissed, note_elastic, place_here
from shardfold.comm.membership import EpochPlace
from shardfold.engine.engine import Engine

__all__ = ["spare_number", "wait_for_place"]

LOOK = 0.002


def spare_number() -> int | None:
    """The number of this process, if it is one that waits for a place."""
    return int(os.environ[SPARE]) if SPARE in os.environ else None


def wait_for_place() -> EpochPlace:
    """Returns when it has one; what is random in this process stays as it was.

    Raises:
        SystemExit: the run has come to its end, and this process ends well.
    """
    random, there = rng_state(), {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ.update(dict.fromkeys(there, "1"), RANK="0")
    import_compiler()
    with closing(Engine(nn.Linear(2, 2), optimizer=_adamw, layout="ddp")) as engine:
        engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
        engine.step()
    os.environ.update(there)
    set_rng_state(random)
    note_elastic()
    while (place := place_here()) is None:
        if is_dismissed():
            raise SystemExit(0)
        sleep(LOOK)
    del os.environ[SPARE]
    return place


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)
