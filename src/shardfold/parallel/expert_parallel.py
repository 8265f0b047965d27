"""Experts that are shared out over the ranks of an axis, and the tokens' way to them and back.

Each rank has some of the experts, all of each, and reads samples of its own. A module of experts is one whose
parameters have one row for each expert, and whose forward is given ``(tokens, chosen, weights)``: ours
(:class:`shardfold.nn.Experts`), and those of transformers. Its forward is replaced where it stands:

    tokens' choices, sorted by expert, and counted                     (experts,)
    counts go to the experts' ranks            one ALL_TO_ALL          (ranks, own experts)
    rows go to the experts' ranks              one ALL_TO_ALL          (rows that come, width)
    sorted by own expert, through the experts
    rows come back                             one ALL_TO_ALL          (rows that went, width)
    weighed and summed where the token is

Backward goes the same ways with gradients, two exchanges; counts are known. Nothing is dropped, and a rank to which no
row comes takes part all the same. Gradients of an expert are the sums over all tokens that came, from all ranks of the
axis; over the remaining axes of data the engine sums them (see ``plan.axes``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.comm.comm import Comm
from shardfold.comm.mesh_group import MeshGroup
from shardfold.errors import ConfigError
from shardfold.nn.axis_group import AxisGroup, Everyone
from shardfold.nn.experts import ByRows, combined, sorted_rows
from shardfold.nn.moe import MoE
from shardfold.nn.router import Router
from shardfold.parallel.adjoint import paired
from shardfold.parallel.lengths import keep_part
from shardfold.parallel.module_group import ModuleGroup, group_of
from shardfold.parallel.split import is_cut
from shardfold.plan.axes import Mesh, Role, nearest_that_divides
from shardfold.sharding.partitioned import hand_over
from shardfold.sharding.slices import mark_slice, marked_on
from shardfold.torch_internals import untraced

__all__ = [
    "Dispatch",
    "connect_routers",
    "described",
    "dispatches",
    "experts_of",
    "give_shapes",
    "is_shared_out",
    "rebalance",
    "share_out",
]

_DISPATCH = "_shardfold_dispatch"


# -- which modules


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of experts, by path."""
    for path, module in model.named_modules():
        if isinstance(module, ByRows) or _is_of_transformers(module):
            yield path, module


def _is_of_transformers(module: Any) -> bool:
    """Whether it is one of those that share an interface there: experts in parameters with a row for each."""
    if not type(module).__module__.startswith("transformers.") or not hasattr(type(module), "_apply_gate"):
        return False
    own = [p for p in module._parameters.values() if p is not None]
    return bool(own) and isinstance(getattr(module, "num_experts", None), int)


def give_shapes(model: nn.Module) -> None:
    """From now on experts of transformers, which ask how many tokens came to each, give what has the shape and the
    dtype of their tokens alone: for a run without values. Those of ours know such a run by themselves."""
    for _, module in experts_of(model):
        if not isinstance(module, ByRows):
            vars(module)["forward"] = partial(_of_shape, module)


def _of_shape(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    x, _, weights = (*args, *kwargs.values())
    others = [p.sum().to(x.dtype) for p in module._parameters.values() if p is not None]
    return x * weights.sum().to(x.dtype) + sum(others)  # which has gradients where any of them has


def is_shared_out(module: nn.Module) -> bool:
    """Whether each rank has some of its experts."""
    return _DISPATCH in vars(module)


def dispatches(model: nn.Module) -> Iterator[Dispatch]:
    """Of modules whose experts are shared out."""
    for module in model.modules():
        if is_shared_out(module):
            yield vars(module)[_DISPATCH]


def share_out(model: nn.Module, mesh: Mesh, coords: Mapping[str, int]) -> None:
    """Leaves of each module of experts this rank's, which tokens of all ranks along the axis go to.

    Args:
        model: whole, with values or built under ``meta_init``; or shared out like this before.
        mesh: its axis of role expert.
        coords: this rank's place.

    Raises:
        ConfigError: experts do not divide by the ranks, are cut along an axis of tensor too, or there are none; or the
            mesh has two such axes.
    """
    axes = mesh.of_role(Role.EXPERT)
    if not axes:
        return
    axis, size = axes[0], mesh[axes[0]]
    if len(axes) > 1:
        raise ConfigError(f"parallel= has two axes of experts, {' and '.join(axes)}: give one.")
    found = list(experts_of(model))
    if not found and not marked_on(model, axis):
        raise ConfigError(
            f"parallel= has {size} ranks on {axis!r}, but {type(model).__name__} has no experts that are known: "
            "sf.nn.MoE, sf.nn.Experts and the experts of transformers are; layers of your own say which they have with "
            f"sf.mark_slice(module, 'weight', axis={axis!r}, dim=0), or leave the axis out."
        )
    for path, module in found:
        if is_shared_out(module):  # for an engine that was closed; for as many ranks, as is seen where groups are bound
            continue
        _share_out(path, module, axis, coords[axis], mesh)


def _share_out(path: str, module: Any, axis: str, rank: int, mesh: Mesh) -> None:
    """
    Raises:
        ConfigError: see :func:`share_out`.
    """
    experts, size = module.num_experts, mesh[axis]
    if is_cut(module):
        raise ConfigError(
            f"{path!r} has experts that Parallel(tensor=...) cuts, and parallel= has an axis of experts: give "
            "Parallel(tensor=...) a plan that leaves them whole (without the word 'experts'), or leave one of the axes "
            "out."
        )
    if experts % size:
        raise ConfigError(
            f"{path!r} has {experts} experts, which cannot be divided over the {size} ranks along {axis!r}: give the "
            f"axis a size that divides them, as {nearest_that_divides(size, experts, mesh.size)}."
        )
    each, group = experts // size, group_of(module, axis)
    group.part(size)
    own = {name: p for name, p in module._parameters.items() if p is not None}
    for name, parameter in own.items():
        if len(parameter) != experts:
            raise ConfigError(
                f"{path!r} has {experts} experts, but its parameter {name!r} of shape {tuple(parameter.shape)} has no "
                f"row for each: its experts cannot be shared out along {axis!r}."
            )
    hand_over(list(own.values()))  # built under sharded_init(): it is whole here until the next lines
    for name, parameter in own.items():
        keep_part(parameter, parameter.detach().narrow(0, rank * each, each).clone())
        mark_slice(module, name, axis=axis, dim=0)
    vars(module)["num_experts"] = each
    vars(module)[_DISPATCH] = vars(module)["forward"] = Dispatch(module, group, experts, path)


# -- the way of tokens


@dataclass(eq=False)
class Dispatch:
    """The forward of experts that are shared out.

    Attributes:
        module: with this rank's experts.
        group: the ranks that have the others.
        experts: on all ranks.
        path: of the module.
        sent: rows that went to each rank in the last forward.
        came: rows that came from each.
        even: choices are not looked at; as many rows go to each expert, as a plan takes it.
    """

    module: Any
    group: ModuleGroup
    experts: int
    path: str
    sent: Sequence[int] = ()
    came: Sequence[int] = ()
    even: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            names = list(inspect.signature(type(self.module).forward).parameters)[1:]
            args = (*args, *(kwargs[name] for name in names[len(args) :]))
        return self._run(*args)

    @untraced
    def _run(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if x.is_meta:
            return x * weights.sum().to(x.dtype)
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = chosen.reshape(-1, chosen.shape[-1]), weights.reshape(-1, weights.shape[-1])
        order, counts = self._sorted(chosen)
        rows = tokens[order // chosen.shape[1]]
        made = self._of_ranks(rows, counts)
        return combined(made, order, weights, x.dtype).view(x.shape)

    def _sorted(self, chosen: Tensor) -> tuple[Tensor, list[int]]:
        """Choices by expert, and how many each has."""
        if not self.even:
            return sorted_rows(chosen, self.experts)
        rows, of = chosen.numel(), range(self.experts)
        return chosen.reshape(-1).argsort(stable=True), [rows * (e + 1) // len(of) - rows * e // len(of) for e in of]

    def _of_ranks(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """What the experts of all ranks make of ``rows``, by expert."""
        size, each, group = self.group.size, self.experts // self.group.size, self.group
        mine = torch.tensor(counts, dtype=torch.int64, device=rows.device)
        told = group.exchange(mine, [each] * size, [each] * size).view(size, each)  # by rank, of own experts
        if self.even:
            told = mine[:each].repeat(size, 1)
        by_rank: list[list[int]] = [list(counts[:each])] * size if self.even else told.tolist()
        to = [sum(counts[r * each : (r + 1) * each]) for r in range(size)]
        by = [sum(of_rank) for of_rank in by_rank]
        self.sent, self.came = to, by
        came = _exchanged(rows, group, to, by)
        # Rows lie by rank and expert; they are to lie by expert.
        experts = torch.arange(each, device=rows.device).repeat(size)
        experts = experts.repeat_interleave(told.reshape(-1), output_size=sum(by))
        order = experts.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=rows.device)
        made = self._own(came[order], [sum(column) for column in zip(*by_rank, strict=True)])
        # Where no row came nothing of these is in the graph: they are, so that all ranks go the way back.
        own = [p for p in self.module._parameters.values() if p is not None]
        return _exchanged(made[back], group, by, to, () if len(made) else own)

    def _own(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """What this rank's experts make of ``rows``, ``counts`` of each one behind the other."""
        if not len(rows):
            return rows
        if isinstance(self.module, ByRows):
            return self.module.of_rows(rows, counts)
        numbers = torch.arange(len(counts), device=rows.device)
        chosen = numbers.repeat_interleave(torch.tensor(counts, device=rows.device)).unsqueeze(1)
        return type(self.module).forward(self.module, rows, chosen, rows.new_ones(len(rows), 1))


def _exchanged(
    rows: Tensor, group: AxisGroup, to: Sequence[int], by: Sequence[int], with_: Sequence[nn.Parameter] = ()
) -> Tensor:
    """Rows to ranks; its backward is the way back. ``with_`` takes part in the graph on each rank, so that on each rank
    the way back is gone."""
    there, back = partial(group.exchange, to=to, by=by), partial(group.exchange, to=by, by=to)
    return paired(rows.contiguous(), there, back, with_)


# -- routers


def connect_routers(model: nn.Module, comm: Comm, apart: Callable[[], bool]) -> Callable[[], None]:
    """Tells each mixture of ours who else reads other things, of which its loss is, and its bias; returns what undoes
    it."""
    mesh = comm.mesh.sizes
    axes = [MeshGroup(axis, comm, apart) for axis in mesh.reading]
    told: list[Everyone] = [module.everyone for module in model.modules() if isinstance(module, (MoE, Router))]
    for everyone in told:
        everyone.follow(axes)

    def undo() -> None:
        for everyone in told:
            everyone.follow(())

    return undo


def rebalance(modules: Iterable[nn.Module]) -> None:
    """After a step: see :meth:`Router.rebalance`."""
    for module in modules:
        if isinstance(module, Router):
            module.rebalance()


# -- text


def described(model: nn.Module) -> list[str]:
    """Lines: modules of experts that are shared out, and what is sent for them."""
    found = [(path, module, vars(module)[_DISPATCH]) for path, module in model.named_modules() if is_shared_out(module)]
    if not found:
        return []
    group: ModuleGroup = found[0][2].group
    lines = [
        f"experts along {group.axis!r} over {group.parts} ranks; for each choice of a token that is another rank's, "
        "its vector is sent there and one comes back, in forward and in backward:"
    ]
    for path, module, dispatch in found:
        shapes = " ".join(f"{name}{list(p.shape)}" for name, p in module._parameters.items() if p is not None)
        lines.append(f"  {path:<44}{module.num_experts} of {dispatch.experts} experts here  {shapes}")
    return lines
