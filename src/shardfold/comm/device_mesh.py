"""PyTorch's own word for ranks with named axes, ``torch.distributed.DeviceMesh``: read as ``mesh=``, and made.

What is read of one are its names, its sizes and the order of its ranks. Its process groups stay the user's: Gloo pairs
collectives by their number within a group, so that one group carries either the user's or the engine's. What is made
is of the CPU, over Gloo groups of its own, one for each axis.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardfold.comm.mesh import DataMesh, Given
from shardfold.errors import LayoutError, did_you_mean
from shardfold.plan.axes import ALSO, DATA_AXES, KNOWN, LINKS, Axes

__all__ = ["device_mesh_of", "is_dtensor", "named_sizes"]


def named_sizes(mesh: Any) -> Given | None:
    """What ``mesh=`` says, where it is a ``DeviceMesh``: its sizes by axis; anything else as it is.

    Raises:
        LayoutError: its dimensions have no names, or unknown ones, it is not of all ranks, or counts them in another
            order than the engine.
    """
    module = sys.modules.get("torch.distributed.device_mesh")  # else there is none
    if module is None or not isinstance(mesh, module.DeviceMesh):
        return mesh
    names: tuple[str, ...] | None = mesh.mesh_dim_names
    if not names:
        raise LayoutError(
            "parallel= is a DeviceMesh whose dimensions have no names: make it with mesh_dim_names=, of "
            f"{', '.join(KNOWN)}."
        )
    for name in names:
        if name not in KNOWN:
            near = f" Did you mean {ALSO[name]!r}?" if name in ALSO else did_you_mean(name, KNOWN)
            raise LayoutError(f"parallel= is a DeviceMesh with the dimension {name!r}, which is unknown.{near}")
    ranks, world = mesh.mesh, dist.get_world_size() if dist.is_initialized() else 1
    if sorted(ranks.flatten().tolist()) != list(range(world)):
        raise LayoutError(
            f"parallel= is a DeviceMesh of rank {', '.join(map(str, sorted(ranks.flatten().tolist())))}, but the job "
            f"has {world} ranks, which all take part in an engine: give a mesh of all of them."
        )
    order = sorted(names, key=lambda name: (LINKS.index(KNOWN[name]), [*DATA_AXES, name].index(name)))
    counted = ranks.permute([names.index(name) for name in order]).flatten()
    if counted.tolist() != list(range(world)):
        raise LayoutError(
            f"parallel= is a DeviceMesh that counts ranks along ({', '.join(names)}) as {ranks.tolist()}, but an "
            f"engine counts them along ({', '.join(order)}), the last fastest: give init_device_mesh() its dimensions "
            "in that order."
        )
    return dict(zip(names, ranks.shape, strict=True))


def is_dtensor(value: Any) -> bool:
    """Whether ranks of a ``DeviceMesh`` have a tensor in parts, or copies."""
    module = sys.modules.get("torch.distributed.tensor")  # else there is none
    return module is not None and isinstance(value, module.DTensor)


def device_mesh_of(mesh: DataMesh, axes: Axes) -> Any:
    """A ``DeviceMesh`` of the CPU with these axes of more than one rank as dimensions, in this order: of the ranks that
    differ from this one on them only. All ranks of the job call it."""
    from torch.distributed.device_mesh import DeviceMesh

    groups: Sequence[Any] = [mesh.host_group(axis) for axis in axes]
    known = [axis for axis in mesh.sizes if axis in axes]
    row = next(row for row in mesh.sizes.rows(axes) if mesh.rank in row)
    ranks = torch.tensor(row).view([mesh.sizes[axis] for axis in known]).permute([known.index(axis) for axis in axes])
    return DeviceMesh.from_group(list(groups), "cpu", ranks.contiguous(), mesh_dim_names=axes)
