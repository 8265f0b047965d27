"""The norm of all gradients of a step, what it is clipped by, and whether anything overflowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.comm import Comm
from shardfold.errors import ConfigError, NonFiniteError
from shardfold.numerics.clipping import Clip, clip_coefficient, joined_terms, norm_of, norm_terms
from shardfold.numerics.ordered_sums import GRIDS, joined_slices, largest_power, slice_sums
from shardfold.numerics.scaling import all_finite, sum_of, sum_of_all
from shardfold.plan.layout import Axes, Tier
from shardfold.sharding.segment import Segment

__all__ = ["Norms"]

NORMS = "whether the norm of each group is finite"


class Norms:
    """Looks at the gradients of one engine's shards.

    Args:
        clip: what is asked for; None: nothing is clipped.
        comm: to sum over the axes on which other elements lie.
        trainable: the segments as they are now.
        looks: whether overflows are looked for.
        exact: whether the sum does not depend on how many ranks have a part of it.

    Raises:
        ConfigError: a norm that cannot be summed so.

    Attributes:
        norm: 0-d tensor, what the last NORM of the program gave; None if it takes none.
    """

    def __init__(
        self,
        clip: Clip | None,
        comm: Comm,
        trainable: Callable[[], Iterable[Segment]],
        *,
        looks: bool = False,
        exact: bool = False,
    ) -> None:
        if exact and clip is not None and clip.p not in (1, 2, inf):
            raise ConfigError(
                f"Clip(p={clip.p}) with Runtime(exact=True): norms of p = 1, 2 and inf can be summed without rounding; "
                "give one of these, or leave exact out."
            )
        self.clip, self._looks, self._exact = clip, looks, exact
        self._comm, self._trainable = comm, trainable
        self.norm: Tensor | None = None
        self._coefficients: dict[torch.device, Tensor | None] = {}  # where they were made, and where somebody asked
        self._parts: dict[Axes, Tensor] | None = None  # of the norm, where looking for overflows has summed it already

    def begin_step(self) -> None:
        self.norm = None
        self._coefficients = {}

    def coefficient(self, device: torch.device) -> Tensor | None:
        """What this step's gradients on that device are multiplied by, 0-d; None: by nothing. Where the norm is on
        another one, it is read once: for the host's, the host waits."""
        if device not in self._coefficients and self._coefficients:
            made = next(iter(self._coefficients.values()))
            there = made.to(device) if made is not None else None
            streams = accelerator.has_streams(device)  # asking a device for the number would stop the host
            unchanged = there is not None and not streams and float(there) >= 1.0
            self._coefficients[device] = None if unchanged else there
        return self._coefficients.get(device)

    def forget_part(self) -> None:
        """What was summed was multiplied by other factors."""
        self._parts = None

    def summed(self) -> Tensor:
        """A 0-d fp64 number that is finite only if every gradient of this rank's shards is; where a norm is taken, out
        of the norm's own sums. It is where the gradients are: reading it stops the host."""
        if self.clip is not None and self.clip.norm is not None:
            self._parts = self._parts_of_norm(self.clip.p)
            return sum_of_all([part.double() for part in self._parts.values()], self._comm.memory.device)
        found: dict[torch.device, list[Tensor]] = {}
        for segment in self._trainable():
            for number in self._numbers(segment):
                found.setdefault(number.device, []).append(number)
        sums = [sum_of_all(some, device) for device, some in found.items()]
        if len(sums) == 1:
            return sums[0]
        device = self._comm.memory.device
        return sum_of_all([each.to(device) for each in sums], device)

    def _numbers(self, segment: Segment) -> list[Tensor]:
        """0-d each, of the gradients of this rank's master range: what they add to the norm, or, where none is taken,
        their sum. Of those in a file it was taken on their way there, unless they were changed since: then they are
        read once more."""
        if segment.noted is not None:
            return segment.noted
        return self._take(_gradients(segment))

    def _take(self, grads: Tensor) -> list[Tensor]:
        if self.clip is not None and self.clip.norm is not None:
            return norm_terms(grads, self.clip.p)
        return [sum_of(grads)]

    def note(self, segment: Segment, grads: Tensor) -> None:
        """The sums of a segment's gradients are on their way to a file: what a step asks of them is taken now."""
        if self._looks or (self.clip is not None and self.clip.norm is not None):
            segment.note(self._take(grads))

    def overflowed(self, summed: float) -> bool:
        """Whether a gradient is inf or NaN, once what :meth:`summed` gave was read: sums of large ones overflow too."""
        return not isfinite(summed) and not all_finite(_gradients(segment) for segment in self._trainable())

    def _parts_of_norm(self, p: float) -> dict[Axes, Tensor]:
        """What this rank's elements add to the norm, 0-d each, by the axes on which other ranks have other elements: a
        replica on an axis is counted once."""
        device, mesh = self._comm.memory.device, self._comm.mesh.sizes
        terms: dict[tuple[Axes, float, torch.device], list[Tensor]] = {}
        here = [self._comm.mesh.coords[axis] for axis in mesh.stages]
        for segment in self._trainable():
            if segment.spec.places and [segment.spec.places[0]] != here:  # counted there
                continue
            over = self._apart(segment)
            for term in self._numbers(segment):
                terms.setdefault((over, segment.unscale, term.device), []).append(term)
        parts: dict[Axes, Tensor] = {}
        for (over, unscale, where), some in terms.items():
            part = joined_terms(some, p, where).to(device)
            part = part * unscale if p == inf else part * unscale**p
            parts[over] = _joined(parts[over], part, p) if over in parts else part
        return parts

    def _apart(self, segment: Segment) -> Axes:
        """The axes on which other ranks have other elements of it."""
        return self._comm.mesh.sizes.normed(segment.table.master.over, segment.spec.distinct)

    def take(self) -> None:
        """
        Raises:
            NonFiniteError: the norm, of any group of those that meet in this step, is inf or NaN and
                ``Clip.error_if_nonfinite`` is set.
        """
        clip = self.clip
        assert clip is not None and clip.norm is not None
        self.norm = norm_of(self._exact_total(clip.p) if self._exact and clip.p != inf else self._total(clip.p), clip.p)
        if clip.error_if_nonfinite:
            self._refuse_nonfinite(float(self.norm))
        if clip.norm < inf:
            made = clip_coefficient(self.norm, clip.norm)
            here = accelerator.has_streams(made.device)  # asking a device for the number would stop the host
            self._coefficients[made.device] = made if here or float(made) < 1.0 else None

    def _total(self, p: float) -> Tensor:
        """What all elements of all ranks add to the norm."""
        parts = self._parts if self._parts is not None else self._parts_of_norm(p)
        self._parts = None
        how = dist.ReduceOp.MAX if p == inf else dist.ReduceOp.SUM
        total = torch.zeros((), dtype=torch.float64, device=self._comm.memory.device)
        for over, part in parts.items():
            self._comm.number(part, over, how, "the sum of norms")
            total = _joined(total, part, p)
        self._comm.number(total, self._comm.mesh.sizes.stages, how, "the sum of norms over stages")
        return total

    def _exact_total(self, p: float) -> Tensor:
        """The same, to the bit whichever rank has which elements."""
        comm, segments = self._comm, list(self._trainable())
        grads = [_gradients(segment) for segment in segments]
        most = comm.control([largest_power(grads, p)], dist.ReduceOp.MAX, program=True)[0]
        count = sum(segment.spec.numel for segment in segments)
        total, found = torch.zeros(GRIDS, dtype=torch.float64, device=comm.memory.device), dict[Axes, list[Tensor]]()
        for segment, flat in zip(segments, grads, strict=True):
            found.setdefault(self._apart(segment), []).append(flat)
        for over, flats in found.items():
            part = slice_sums(flats if isfinite(most) else (), p, most, count, total.device)
            comm.number(part, over, dist.ReduceOp.SUM, "the sum of norms")
            total += part
        unscale = segments[0].unscale if segments else 1.0  # 1, or what weights make of all, as nothing is in 16 bits
        return joined_slices(total, most) * unscale**p

    def _refuse_nonfinite(self, norm: float) -> None:
        """Where groups of ranks send each other signs, each may have a norm of its own: all hear of one that is not
        finite, before they send anything."""
        group, sizes, finite = self._comm.group, self._comm.mesh.sizes, isfinite(norm)
        if sizes.meets:
            finite = not self._comm.anyone([not finite], NORMS)[0]
        if finite:
            return
        whose, said = "all gradients", dict.fromkeys(group.peers.ranks, str(norm))
        if sizes.meets:
            own = "" if isfinite(norm) else str(norm)
            said = dict(zip(group.peers.ranks, group.exchange(NORMS, own), strict=True))
        if sizes.rare:
            whose = f"the gradients of rank {', '.join(str(rank) for rank, text in said.items() if text)}"
        raise NonFiniteError(
            f"the norm of {whose} is {' or '.join(sorted(set(filter(None, said.values()))))} and "
            "Clip(error_if_nonfinite=True): nothing was updated; engine.zero_grad() drops these gradients."
        )

    def clip_values(self) -> None:
        """Cuts every element of this rank's gradients to the range of ``Clip.value``, if there is one."""
        if self.clip is None or self.clip.value is None:
            return
        for segment in self._trainable():
            if segment.table.grads.tier is not Tier.DISK:
                self._clip_elements(segment, segment.master_grads)

    def clip_fetched(self, segment: Segment, grads: Tensor) -> None:
        """The same, of gradients that have come from a file to be used."""
        if self.clip is not None and self.clip.value is not None:
            self._clip_elements(segment, grads)

    def _clip_elements(self, segment: Segment, grads: Tensor) -> None:
        assert self.clip is not None and self.clip.value is not None
        limit = self.clip.value / segment.unscale
        grads.clamp_(-limit, limit)


def _gradients(segment: Segment) -> Tensor:
    """Those of this rank's master range."""
    shard = segment.shard("grads")
    assert shard is not None
    return segment.master_grads if shard.memory is not None else shard.read()


def _joined(a: Tensor, b: Tensor, p: float) -> Tensor:
    return torch.maximum(a, b) if p == inf else a + b
