"""How attention of a model crosses the ranks that have parts of the same sequences: over links of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from shardfold.comm.mesh_group import MeshGroup
from shardfold.compat.deepspeed.config_parallel import SEQUENCE_AXIS
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.engine.engine import Engine
from shardfold.nn.axis_group import AxisGroup

__all__ = ["axis_for", "cross"]

_AXES: WeakKeyDictionary[nn.Module, tuple[AxisGroup, list[int]]] = WeakKeyDictionary()


def cross(model: nn.Module, core: Engine) -> Callable[[], None]:
    """Modules of ``model`` have a link along the engine's axis of sequence from now on; returns what undoes it."""
    comm, loans = core.sharded.comm, core.sharded.loans
    axis = MeshGroup(SEQUENCE_AXIS, comm, lambda: bool(loans))
    ranks = dist.get_process_group_ranks(comm.mesh.group((SEQUENCE_AXIS,)))
    modules = list(model.modules())
    for module in modules:
        _AXES[module] = axis, ranks

    def undo() -> None:
        for module in modules:
            if (found := _AXES.get(module)) is not None and found[0] is axis:
                del _AXES[module]

    return undo


def axis_for(module: nn.Module, group: Any) -> AxisGroup:
    """The link of a module's attention, which was made for the ranks of ``group``.

    Raises:
        WrongCall: no engine that knows of these ranks has the module.
        WrongArgument: the group has other ranks than the engine's axis.
    """
    if module not in _AXES:
        raise WrongCall(
            f"attention of a {type(module).__name__} crosses ranks that share sequences, and no engine has it that "
            "knows of them: give deepspeed.initialize() the mpu, mesh_param=, or sequence_parallel_size in the config."
        )
    axis, ranks = _AXES[module]
    if group is not None and dist.get_process_group_ranks(group) != ranks:
        raise WrongArgument(
            f"attention was made for the ranks {dist.get_process_group_ranks(group)}, and the engine's that share "
            f"sequences are {ranks}: take deepspeed.utils.groups._get_sequence_parallel_group()."
        )
    return axis
