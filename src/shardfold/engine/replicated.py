"""What ranks along an axis of tensor have to have alike: batches, and gradients of parameters that they all have.

Nothing is sent for these, so nothing makes them equal but that the ranks compute the same. The first forward and the
first steps are looked at, before a wrong number is in a weight; under ``Runtime(debug=True)`` all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ModelError, UsageError
from shardfold.parallel.same_batch import same_inputs
from shardfold.plan.axes import Role
from shardfold.plan.layout import Tier
from shardfold.sharding.model import ShardedModel

__all__ = ["Replicated"]

STEPS = 2
"""How many are looked at: the second has weights, moments and orders that the first had not."""
NEAR = 1e-2
"""By how much sums may differ, of what they are at most: kernels of a device add in any order, in 16 bits too."""


class Replicated:
    """Compares ranks along the axes of tensor of one engine.

    Args:
        model: of the engine.
        always: every forward and step.
        losses: too, as where a plan has cut the layers: slices that a model marks itself may have a loss for each.
    """

    def __init__(self, model: ShardedModel, *, always: bool, losses: bool) -> None:
        self._model, self._always, self._losses = model, always, losses
        self._axes = model.comm.mesh.sizes.of_role(Role.TENSOR)
        self._forwards = self._steps = 0
        self._loss: Tensor | None = None

    @property
    def on(self) -> bool:
        """Whether there are any."""
        return bool(self._axes)

    def check_inputs(self, inputs: Any) -> None:
        """All ranks along the axis call it, before a forward.

        Raises:
            UsageError: on all of them: they are called with other tensors.
        """
        if not self._axes or self._model.loans or (self._forwards and not self._always):
            return
        self._forwards += 1
        for axis in self._axes:
            if not same_inputs(inputs, axis, self._model.comm):
                ranks = self._model.comm.mesh.sizes[axis]
                raise UsageError(
                    f"engine(...): the {ranks} ranks along {axis!r}, which share each layer, have different batches: "
                    "give the sampler rank=engine.data_rank and num_ranks=engine.data_ranks."
                )

    def note(self, loss: Any) -> None:
        """A backward begins at this loss."""
        if self._axes and self._losses and isinstance(loss, Tensor) and (self._steps < STEPS or self._always):
            self._loss = loss.detach()

    def check_gradients(self) -> None:
        """All ranks call it, between backward and update.

        Raises:
            ModelError: on all of them: losses, or gradients of what is replicated, differ.
        """
        if not self._axes or (self._steps >= STEPS and not self._always):
            return
        self._steps += 1
        loss, self._loss = self._loss, None
        if loss is not None and loss.numel() == 1:
            for axis in self._axes:
                self._check_loss(loss, axis)
        for axis in self._axes:
            names, mine = self._sums(axis)
            if not names:
                continue
            first = mine.clone()
            self._model.comm.broadcast(first, f"the comparison of gradients on {axis}", over=(axis,))
            flags = (~_near(mine, first)).tolist()
            differ = self._model.comm.any_rank(flags, f"gradients of what is replicated on {axis}")
            wrong = [name for name, other in zip(names, differ, strict=True) if other]
            if wrong:
                more = f" and of {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise ModelError(
                    f"the gradient of {wrong[0]!r}{more} differs between ranks along {axis!r}, which all have it. If "
                    "its module works on a part of what a cut layer gives, its gradient has to be summed: give it the "
                    "word 'partial' in Parallel(tensor=...). Or ranks draw other random numbers: seed them alike. "
                    "Nothing was updated; engine.zero_grad() drops these gradients."
                )

    def _check_loss(self, loss: Tensor, axis: str) -> None:
        """
        Raises:
            ModelError: on all ranks: they have different losses.
        """
        value = loss.double().reshape(())
        mine = torch.stack([value, value.square(), torch.ones_like(value)]).reshape(1, 3)
        first = mine.clone()
        self._model.comm.broadcast(first, f"the comparison of losses on {axis}", over=(axis,))
        if self._model.comm.any_rank((~_near(mine, first)).tolist(), f"losses on {axis}")[0]:
            raise ModelError(
                f"the loss differs between ranks along {axis!r}, which share each layer and have the same batch: "
                "something besides a row computes with what a column gives, or reads a weight that is cut, so it has "
                "a part of it: leave that layer 'replicated', or give it the word 'gathered'. Or ranks draw other "
                "random numbers: seed them alike. Nothing was updated; engine.zero_grad() drops these gradients."
            )

    def _sums(self, axis: str) -> tuple[list[str], Tensor]:
        """Names of replicated parameters, and ``(parameters, 3)``: of this rank's elements of their gradients the sum,
        the sum of squares, and how many there are."""
        names: list[str] = []
        rows: list[Tensor] = []
        for segment in (segment for unit in self._model.units for segment in unit.trainable):
            sizes = self._model.comm.mesh.sizes
            if axis not in sizes.replicas(segment.spec.distinct) or segment.table.grads.tier is Tier.DISK:
                continue
            grads = segment.master_grads
            for slot, spec in enumerate(segment.spec.slots):
                piece = grads[segment.own_piece(slot)[0]].detach().double()
                count = piece.new_full((), piece.numel())
                rows.append(torch.stack([piece.sum(), piece.square().sum(), count]).to(self._model.device))
                names.append(spec.name)
        return names, torch.stack(rows) if rows else torch.empty(0, 3)


def _near(mine: Tensor, first: Tensor) -> Tensor:
    """By row, whether sums are the same up to rounding; what is not finite is somebody else's to find."""
    largest = torch.maximum(mine[:, 1], first[:, 1])
    squares = (mine[:, 1] - first[:, 1]).abs() <= NEAR * largest
    sums = (mine[:, 0] - first[:, 0]).abs() <= NEAR * (largest * mine[:, 2]).sqrt()
    return (squares & sums) | ~torch.isfinite(mine[:, :2].sum(1)) | ~torch.isfinite(first[:, :2].sum(1))
