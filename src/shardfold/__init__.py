"""Shardfold trains models too big for the hardware at hand.

The whole idea, in twenty lines. Data-parallel training keeps a few kinds of state for every parameter: what forward
reads (``params``), what accumulates (``grads``), what the optimizer updates (``master``) and its own ``moments``.
Everything that ZeRO and its descendants do is a choice, for each kind, of *over which mesh axes it is split, in which
dtype, in which tier it rests*, and of *how the bytes travel* between two such rests. So there is

    one table      ``Layout``: a cell per state. ``ddp zero1 zero2 zero3 fsdp2 hsdp hpz`` are values of it.
    one program    the table lowered to a list of operations that prints as text: gather, free, reduce, update.
    one engine     hooks turn a model's forward and backward into events; events run the program.

    import shardfold as sf

    engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=3e-4), layout="zero3", precision="bf16")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    print(engine.explain())    # the table and the program
    print(engine.memory())     # bytes held, beside what the table says
    print(engine.traffic())    # bytes sent, beside what the program says
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardfold.errors import ShardfoldError
from shardfold.plan.auto_wire import AutoWire
from shardfold.plan.axes import Axis
from shardfold.plan.copies import Copies
from shardfold.plan.layout import Activations, Cell, Layout, Precision, Tier, Wire
from shardfold.plan.outer import Outer
from shardfold.plan.outer_runs import OuterRuns
from shardfold.plan.presets import PRESETS
from shardfold.plan.quantized import Quantized
from shardfold.plan.rewrites import Overlap
from shardfold.plan.signs import Signs
from shardfold.plan.version import __version__ as __version__

if TYPE_CHECKING:
    from shardfold import checkpoint, compat, nn, numerics, optim, parallel
    from shardfold.checkpoint import Checkpoint, load_model
    from shardfold.checkpoint.rng import rng_state, set_rng_state
    from shardfold.comm.runtime import Runtime
    from shardfold.data import Loader, Sampler
    from shardfold.engine.elastic import ElasticRun
    from shardfold.engine.engine import Engine, engine_of
    from shardfold.engine.stats import Stats
    from shardfold.generation import generate
    from shardfold.numerics.clipping import Clip
    from shardfold.numerics.scaling import LossScale
    from shardfold.optim.average import Average
    from shardfold.parallel.parallel import Parallel
    from shardfold.parallel.pipeline.costs import measure_pieces
    from shardfold.parallel.sequence import sequence_shard
    from shardfold.plan.report import MemoryReport, StepReport, TrafficReport
    from shardfold.planner.auto import Auto
    from shardfold.sharding.forwards import register_forward
    from shardfold.sharding.init import Init
    from shardfold.sharding.materialize import meta_init
    from shardfold.sharding.sharded_init import sharded_init
    from shardfold.sharding.slices import mark_slice
    from shardfold.sharding.whole import whole

    observe: Any  # of tools, which nothing below may import, through this package neither
    serving: Any


__all__ = [
    "PRESETS",
    "Activations",
    "Auto",
    "AutoWire",
    "Average",
    "Axis",
    "Cell",
    "Checkpoint",
    "Clip",
    "Copies",
    "ElasticRun",
    "Engine",
    "Init",
    "Layout",
    "Loader",
    "LossScale",
    "MemoryReport",
    "Outer",
    "OuterRuns",
    "Overlap",
    "Parallel",
    "Precision",
    "Quantized",
    "Runtime",
    "Sampler",
    "ShardfoldError",
    "Signs",
    "Stats",
    "StepReport",
    "Tier",
    "TrafficReport",
    "Wire",
    "checkpoint",
    "compat",
    "engine_of",
    "generate",
    "load_model",
    "mark_slice",
    "measure_pieces",
    "meta_init",
    "nn",
    "numerics",
    "optim",
    "parallel",
    "register_forward",
    "rng_state",
    "sequence_shard",
    "serving",
    "set_rng_state",
    "sharded_init",
    "whole",
]

_LAZY = {
    "Auto": "shardfold.planner.auto",
    "Init": "shardfold.sharding.init",
    "Parallel": "shardfold.parallel.parallel",
    "Runtime": "shardfold.comm.runtime",
    "Checkpoint": "shardfold.checkpoint",
    "Average": "shardfold.optim.average",
    "Stats": "shardfold.engine.stats",
    "ElasticRun": "shardfold.engine.elastic",
    "Engine": "shardfold.engine.engine",
    "Clip": "shardfold.numerics.clipping",
    "LossScale": "shardfold.numerics.scaling",
    "load_model": "shardfold.checkpoint",
    "mark_slice": "shardfold.sharding.slices",
    "meta_init": "shardfold.sharding.materialize",
    "measure_pieces": "shardfold.parallel.pipeline.costs",
    "sequence_shard": "shardfold.parallel.sequence",
    "sharded_init": "shardfold.sharding.sharded_init",
    "engine_of": "shardfold.engine.engine",
    "generate": "shardfold.generation",
    "register_forward": "shardfold.sharding.forwards",
    "whole": "shardfold.sharding.whole",
    "serving": "shardfold.tools.serve.serving",
    "StepReport": "shardfold.plan.report",
    "MemoryReport": "shardfold.plan.report",
    "Sampler": "shardfold.data",
    "Loader": "shardfold.data",
    "rng_state": "shardfold.checkpoint.rng",
    "set_rng_state": "shardfold.checkpoint.rng",
    "TrafficReport": "shardfold.plan.report",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for, so that a command's help does not wait for it."""
    import importlib

    if name in ("checkpoint", "compat", "nn", "numerics", "optim", "parallel"):
        return importlib.import_module(f"shardfold.{name}")
    if name == "observe":
        return importlib.import_module("shardfold.tools.observe")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'shardfold' has no attribute {name!r}")
