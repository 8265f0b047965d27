"""``engine.optimizer.parameter_offload``: what clients reach for to run a gathered model without gathering.

Inside ``GatheredParameters`` the engine's hooks send nothing, so there are no hooks to take off and put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardfold.compat.deepspeed.zero.attributes import note
from shardfold.compat.deepspeed.zero.gathered import GatheredParameters
from shardfold.sharding.registry import model_of

__all__ = ["DeepSpeedZeRoOffload", "note_parameters", "unwrap_model_for_generation"]


class _Coordinator:
    """The order of units is recorded anew by itself where it changes."""

    def is_invalid_trace(self) -> bool:
        return True

    def is_complete_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        return


class DeepSpeedZeRoOffload:
    """Of a model under stage 3.

    Attributes:
        module: the user's model.
        forward_hooks, backward_hooks: handles with ``remove()``; always empty lists at first.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def get_param_coordinator(self, *args: Any) -> _Coordinator:
        return self.param_coordinator

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        return

    def setup_zero_stage3_hooks(self) -> None:
        return

    def _remove_module_hooks(self) -> None:
        return

    def partition_all_parameters(self) -> None:
        """The engine gives back what it gathered by itself."""

    def empty_partition_cache(self) -> None:
        """The engine keeps nothing between passes."""

    def destroy(self) -> None:
        return


def note_parameters(engine: Any) -> None:
    """From now on the parameters of a stage-3 engine answer as DeepSpeed's do.

    Args:
        engine: the compatibility layer's, or the library's; its ``optimizer``, if any, gets a ``parameter_offload``.
    """
    for parameter in engine.module.parameters():
        note(parameter)
        core = model_of(parameter)
        for unit in core.units if core is not None else ():
            unit.hollow = True  # clients read the data, as of DeepSpeed's parameters: it has no elements
    _note_small(engine.module)
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, DeepSpeedZeRoOffload):
        optimizer.parameter_offload = DeepSpeedZeRoOffload(engine.module)


def _note_small(module: nn.Module) -> None:
    """Parameters that are whole although others are split say so."""
    for core in {id(core): core for p in module.parameters() if (core := model_of(p)) is not None}.values():
        for unit in core.units if core.layout.small else ():
            for _, parameter in unit.parameters() if not unit.spec.table_or(core.layout).comes_and_goes else ():
                parameter.ds_persist = True  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gathers all of a model once, to generate with it."""
    with GatheredParameters(model.parameters()):
        yield model
