"""How ranks share one model besides its states: by layers' parts, by sequences, by experts, by stages.

A plan cuts a copy of the model without memory by the functions that an engine cuts it with, as rank 0 of each axis,
and runs it: what layers ask of the other ranks goes to links that give tensors of the right shapes and count what is
sent. So parameters, activations, temporaries and traffic are those of the code that would run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.comm.mesh_group import MeshGroup
from shardfold.comm.transport import Pending
from shardfold.errors import ConfigError, did_you_mean
from shardfold.parallel.attention import follow, open_sequence
from shardfold.parallel.batch import INPUTS
from shardfold.parallel.expert_parallel import dispatches, share_out
from shardfold.parallel.module_group import bind_groups
from shardfold.parallel.plan import Given, split_model
from shardfold.parallel.split import hear_gradients
from shardfold.plan.axes import LINKS, Axis, Mesh
from shardfold.plan.checks import described, is_integer
from shardfold.planner.hollow import hollow_values
from shardfold.planner.trace import Sends

__all__ = ["UNDIVIDED", "Division", "division_of"]

POSITIONS = ("position_ids", "positions")


@dataclass(frozen=True, kw_only=True)
class Division:
    """Sizes of the axes along which ranks share one model.

    Attributes:
        tensor: ranks that share each layer.
        sequence_parallel: what flows between these layers is divided, too.
        sequence: ranks that have parts of the same sequences.
        expert: ranks among which experts are shared out, with other samples each.
        pipeline: ranks among which stages are.
        plan: as ``Parallel(tensor=)`` takes it.
        attention: as ``Parallel(attention=)`` takes it; None: by heads where they divide.
        order: as ``Parallel(pipeline=)`` takes it.
        micro_batches: of a step, which go through the stages.
        stage: the place along the axis of stages of the rank that is planned for.
        streams: the device has streams, and kernels as a GPU.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    sequence: int = 1
    expert: int = 1
    pipeline: int = 1
    plan: Given = "auto"
    attention: str | None = None
    order: str = "1f1b"
    micro_batches: int = 1
    stage: int = 0
    streams: bool = False

    @property
    def ranks(self) -> int:
        """That have the parts of one model."""
        return prod(self.axes.values())

    @property
    def sharing(self) -> int:
        """Of these those that compute for the same tokens."""
        return self.tensor * self.pipeline

    @property
    def axes(self) -> dict[str, int]:
        """Axes of more than one rank."""
        sizes = {name: getattr(self, name) for name in ("tensor", "sequence", "expert", "pipeline")}
        return {name: size for name, size in sizes.items() if size > 1}

    def over(self, data: Mapping[str, int]) -> Mesh:
        """The mesh of all ranks.

        Args:
            data: ranks along the axes of data, all of which the other axes are carved out of, those within nodes first.

        Raises:
            ConfigError: they do not divide.
        """
        left = dict(data)
        for axis, size in self.axes.items():
            near = self._far(left, size) if axis == "pipeline" else self._near(left, size)
            if near is None:
                raise ConfigError(self._too_many(data, left, axis, size))
            left = near
        axes = [Axis(name, size) for name, size in {**left, **self.axes}.items()]
        return Mesh(sorted(axes, key=lambda axis: LINKS.index(axis.role)))

    def _too_many(self, data: Mapping[str, int], left: Mapping[str, int], axis: str, size: int) -> str:
        """Why an axis does not divide what is left of the ranks, in a sentence."""
        ranks, free = prod(data.values()), prod(left.values())
        divides = self._far if axis == "pipeline" else self._near
        sizes = [n for n in range(2, min(free, 2 * size) + 1) if free % n == 0 and divides(left, n)]
        taken = [f"{name}={n}" for name, n in self.axes.items() if name != axis and ranks != free]
        which = f"the {free} that {' and '.join(taken)} leave{'s' * (len(taken) == 1)} of them" if taken else "these"
        many = f"the {ranks} devices" if ranks > 1 else "one device"
        if not sizes:
            return f"{axis}={size} is a number of ranks that {many} cannot have: leave it out, or give more devices."
        return (
            f"{axis}={size} does not divide {many} evenly: sizes that divide {which} are {', '.join(map(str, sizes))}."
        )

    @staticmethod
    def _near(left: Mapping[str, int], size: int) -> dict[str, int] | None:
        """What is left of nodes and their ranks; None: neither divides."""
        inter, intra = left.get("inter", 1), left.get("intra", 1)
        if intra % size == 0:
            return {"inter": inter, "intra": intra // size}
        if size % intra == 0 and inter % (size // intra) == 0:
            return {"inter": inter // (size // intra), "intra": 1}
        return None

    @staticmethod
    def _far(left: Mapping[str, int], size: int) -> dict[str, int] | None:
        """The same of an axis that takes nodes first."""
        inter, intra = left.get("inter", 1), left.get("intra", 1)
        if inter % size == 0:
            return {"inter": inter // size, "intra": intra}
        if size % inter == 0 and intra % (size // inter) == 0:
            return {"inter": 1, "intra": intra // (size // inter)}
        return None

    def __str__(self) -> str:
        said = [f"{name}={size}" for name, size in self.axes.items()]
        if self.sequence_parallel:
            said.append("sequence parallelism")
        if self.pipeline > 1 and self.order != "1f1b":
            said.append(self.ordered)
        return ", ".join(said)

    @property
    def ordered(self) -> str:
        """The order of stages by its name; one of the user's own, which is a text of lines, has none."""
        return self.order if "\n" not in self.order else "an order of its own"

    # -- a model

    def cut(self, model: nn.Module, mesh: Mesh) -> None:
        """Leaves of a model without memory this rank's part.

        Raises:
            ConfigError: it does not divide.
        """
        coords = dict.fromkeys(mesh, 0)
        split_model(
            model, self.plan if self.tensor > 1 else None, mesh, coords, sequence_parallel=self.sequence_parallel
        )
        share_out(model, mesh, coords)

    def connect(self, model: nn.Module, mesh: Mesh, batch: Any, sent: list[Sends]) -> tuple[Any, Callable[[], None]]:
        """Links of a model that was cut, to ranks that are not there; its part of ``batch``, and what undoes it.

        Args:
            model: with memory or without.
            mesh: of all ranks.
            batch: of whole sequences.
            sent: gets what is sent.
        """
        whole = _filled(batch) if self.sequence > 1 else {}
        comm: Any = _Paper(mesh, sent, self.streams)
        with ExitStack() as held:
            held.callback(bind_groups(model, comm, group=PaperGroup))
            held.callback(hear_gradients(model))
            for dispatch in dispatches(model):
                dispatch.even = True
            axis = open_sequence(model, comm, self.attention, shares=self.tensor, apart=lambda: False, group=PaperGroup)
            if axis is not None:
                held.callback(follow(model, axis))
                batch = axis.shard(whole, True, (), ())
                axis.trust()
            undo = held.pop_all().close
        return batch, undo


UNDIVIDED = Division()
SEARCHED = ("tensor", "sequence", "expert", "pipeline", "sequence_parallel", "order")


def division_of(axes: Mapping[str, Any]) -> Division:
    """What sizes of axes by name say, and the order of stages.

    Raises:
        ConfigError: a name is none of an axis that a search looks at, or a size is no number of ranks.
    """
    for name, size in axes.items():
        if name not in SEARCHED:
            raise ConfigError(
                f"axes= names {name!r}.{did_you_mean(name, SEARCHED)} A search has {', '.join(SEARCHED)}."
            )
        if name not in ("sequence_parallel", "order") and not is_integer(size, 1):
            raise ConfigError(f"axes= has {described(size)} for {name!r}: it is a number of ranks, 1 or more.")
    return Division(**axes)


class PaperGroup(MeshGroup):
    """An axis of ranks that are not there: what comes has the right shapes, and what is sent is counted."""

    def _begin(self, verb: str, sent: int | None, begin: Callable[[Any], Pending]) -> Pending:
        paper: Any = self._comm
        paper.sent.append(Sends(self._axes[0], float(sent or 0), 1))  # of several axes the slowest one's link
        return Pending([])


class _Paper:
    """What a link asks of a communicator."""

    def __init__(self, mesh: Mesh, sent: list[Sends], streams: bool) -> None:
        self.mesh = SimpleNamespace(sizes=mesh, coords=dict.fromkeys(mesh, 0), on_streams=streams)
        self.memory = SimpleNamespace(device=torch.device("cpu"))
        self.agreement = SimpleNamespace(uninterrupted=nullcontext, wait=None)
        self.sent = sent


def _filled(batch: Any) -> Any:
    """A batch with values of no meaning, but for positions, which count."""
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"an axis of sequence cuts batches by the names of their tensors, and this one is a "
            f"{type(batch).__name__}: give the model a batch as {{'input_ids': ..., 'labels': ...}}."
        )

    if not any(name in batch for name in INPUTS):
        raise ConfigError(
            f"an axis of sequence cuts the tokens of texts, and this batch has {', '.join(map(str, batch))}: leave "
            "sequence= out, or give a batch with one of " + ", ".join(INPUTS) + "."
        )

    def zeros(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(tensor.shape, dtype=dtype)

    filled = dict(hollow_values(dict(batch), zeros))
    for name in POSITIONS:
        if name in filled:
            filled[name] = torch.arange(filled[name].shape[1]).expand(filled[name].shape)
    return filled
