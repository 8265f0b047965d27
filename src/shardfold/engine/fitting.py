"""Whether a new engine's states fit: ``layout="auto"``, and a warning before anything is made that will not.

Only states and the program's buffers are counted, by ``planner.auto``: an engine is made before it sees a batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardfold import accelerator
from shardfold.comm.mesh import pick_device
from shardfold.errors import ConfigError, LayoutError, did_you_mean
from shardfold.plan import presets
from shardfold.plan.axes import Axis, Mesh, Role
from shardfold.plan.cost import resting_bytes
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.offload import offloaded
from shardfold.plan.placement import UnitSpec
from shardfold.plan.sizes import human
from shardfold.planner.auto import AUTO, ORDER, choose_layout, states_peak
from shardfold.planner.setting import mesh_of
from shardfold.tiers.limit import memory_limit

__all__ = ["table_of", "warn_of_memory"]

LOG = getLogger("shardfold")


def table_of(
    layout: Any,
    offload: Any,
    model: nn.Module,
    precision: Any,
    mesh: Mapping[str, int] | Sequence[Axis] | None,
    device: str | torch.device | None,
) -> Layout:
    """The table of an engine with these arguments; ``"auto"`` is said in the log.

    Raises:
        ConfigError: there is no such layout, or, with ``"auto"``, none fits, or the mesh cuts the model.
    """
    if layout == AUTO:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        sizes = mesh_of(mesh) if mesh is not None else Mesh.of({"inter": 1, "intra": world})
        if others := [axis.name for axis in sizes.axes if axis.role is not Role.DATA and axis.size > 1]:
            raise ConfigError(
                f"layout='auto' chooses for ranks that read other samples, but mesh= has {' and '.join(others)}, "
                "whose ranks have parts of the model: name a layout, or give a micro-batch, layout=sf.Auto(sample=...)."
            )
        found = choose_layout(model, precision, sizes, memory_of(pick_device(device)))
        if (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0:
            LOG.warning(found.told)
        layout = found.layout
    elif isinstance(layout, str) and layout not in presets.NAMES:
        raise LayoutError(f"layout {layout!r} is unknown.{did_you_mean(layout, (*presets.NAMES, AUTO))}")
    return offloaded(presets.named(layout), offload)


def warn_of_memory(
    layout: Layout, units: Sequence[UnitSpec], mesh: Mesh, moments: int, device: torch.device, precision: Precision
) -> None:
    """Says in the log that a step of these units will not fit into the device, and which layout would.

    Args:
        layout: bound.
        units: laid out on the mesh.
        mesh: of all ranks.
        moments: that the optimizer keeps of each element.
        device: of this rank.
        precision: of what no rule names.
    """
    memory = memory_of(device)
    resting = resting_bytes(layout, units, mesh, num_moments=moments, padded=True)
    if not memory or sum(resting.values()) < memory / 4:
        return
    needed = _needed(layout, units, mesh, moments, device)
    if needed <= memory or int(os.environ.get("LOCAL_RANK", "0")):  # one rank of a host says it
        return
    LOG.warning(
        f"a step will not fit: states and buffers alone take {human(needed)} of the {human(memory)} of each rank, and "
        f"activations come on top. {_advice(layout, units, mesh, moments, device, precision, memory)}; "
        "`shardfold plan` says what fits."
    )


def _needed(layout: Layout, units: Sequence[UnitSpec], mesh: Mesh, moments: int, device: torch.device) -> float:
    """Bytes of states and buffers at their peak; what rests in host memory counts where that is the device's, too."""
    needed = states_peak(layout, units, mesh, moments)
    if accelerator.has_streams(device):
        return needed
    resting = resting_bytes(layout, units, mesh, num_moments=moments, padded=True)
    return needed + sum(n for (_, tier), n in resting.items() if tier is Tier.HOST)


def _advice(
    layout: Layout,
    units: Sequence[UnitSpec],
    mesh: Mesh,
    moments: int,
    device: torch.device,
    precision: Precision,
    memory: float,
) -> str:
    """Which layout would fit, or how much the smallest takes."""
    if any(segment.table_or(layout) != layout for unit in units for segment in unit.segments):
        return "Layouts that divide more states, or offload= of some to a slower tier, take less"
    found = {
        name: _needed(presets.named(name).bind(precision, mesh), units, mesh, moments, device)
        for name in (ORDER if mesh.divisor > 1 else ORDER[-2:])
    }
    for name, needed in found.items():
        if needed <= memory:
            return f"layout={name!r} takes {human(needed)}"
    disk = _needed(offloaded(presets.zero3, "disk").bind(precision, mesh), units, mesh, moments, device)
    if disk <= memory:
        return f"layout='zero3' with offload='disk' takes {human(disk)}"
    least = min(found, key=lambda name: found[name])
    return f"Of all layouts {least!r} takes the least, {human(found[least])}: take more ranks or a smaller model"


def memory_of(device: torch.device) -> float:
    """Bytes that a rank here may take; of the host, its share among the ranks of this machine."""
    total = accelerator.total_memory(device) if accelerator.has_streams(device) else None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if total is not None:
        return total / -(-ranks // max(accelerator.count(device), 1))
    return memory_limit() / ranks
