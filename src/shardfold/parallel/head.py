"""A classifier with a margin whose classes are split over ranks that read other samples.

Each rank has the centres of some of the classes, complete with gradients and optimizer states: nothing of them is sent.
What travels is features and labels of a batch, once in forward, and the features' gradients, once in backward:

    forward     features, labels   gathered: each rank has those of all ranks
                logits             of this rank's classes, a chunk of rows at a time; ranks exchange per row the
                                   largest, the sum of exponentials and the own class's
                loss               the mean over this rank's own rows
    backward    centres            the gradient of the sum of all ranks' losses, with respect to this rank's classes
                features           what this rank's classes contribute is scattered to the ranks that they came from

This is the class-parallel softmax of ArcFace (arXiv 1801.07698) and Partial FC (2203.15565). A head in data parallelism
instead has all classes on each rank, and sends their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.errors import ConfigError, UsageError, did_you_mean
from shardfold.nn.axis_group import AxisGroup
from shardfold.nn.cross_entropy import (
    INTEGERS,
    SIXTEEN_BITS,
    Head,
    by_chunks,
    check_targets,
    no_class,
    rows_at_once,
    span_of,
    wanted_of,
)
from shardfold.nn.parallel_cross_entropy import margin_of, sampled_classes
from shardfold.parallel.lengths import keep_part
from shardfold.parallel.module_group import axes_named, group_of
from shardfold.parallel.split import AxisPart
from shardfold.plan.axes import KNOWN, Mesh, Role
from shardfold.plan.checks import described, is_integer, known_arguments
from shardfold.plan.placement import shard_index
from shardfold.sharding.partitioned import hand_over
from shardfold.sharding.slices import mark_slice
from shardfold.torch_internals import keeps_graph, untraced

__all__ = ["MarginHead", "split_heads"]

IGNORED = -100
AXES = (*KNOWN, Role.DATA.value)
NONE_COUNTS = f": there is no mean of nothing. Leave the step out on all ranks, or give targets other than {IGNORED}."
SMALL = 1e-12
"""The least length of a vector, as of ``F.normalize``."""
BLOCK = 2**16  # elements of the weight's gradient that are made of the products' at once, on a CPU


@known_arguments
class MarginHead(nn.Module):
    """``scale * cos(theta)`` of embeddings and the centres of classes, of the own class ``scale * (cos(theta + angle) -
    cosine)``, and the cross entropy of these: ArcFace with ``angle``, CosFace with ``angle=0, cosine=0.35``.

    It is built whole, or without memory under ``meta_init()``. An engine whose mesh has several ranks along ``axis``
    leaves each of them its part of the classes, which may be one more on the first ones; the ranks read other samples.
    Without an engine it is a module of one process.

    Over more ranks the head takes less of each, and each computes as many logits: of more rows, fewer classes. What is
    sent in a step is features of all their samples, twice; where the head is split within nodes only, gradients of a
    node's classes cross the slow group instead, which are more wherever a node has more classes than all ranks have
    samples. So ``axis="data"`` is right for a head that is worth splitting; ``"intra"`` for a small one on many nodes.

    Args:
        width: of embeddings.
        classes: number of identities.
        axis: over whose ranks the classes are split. ``"data"``: all that read other samples and sum gradients in every
            step, along however many axes, within nodes and between them. ``"intra"``, or another axis of data: those
            along it; on the others gradients are summed. None: every rank has all classes.
        scale, angle, cosine, sample: see :func:`shardfold.nn.parallel_margin_loss`; ``sample`` of each rank's classes.

    Raises:
        ConfigError: an argument is out of its range.

    Examples:
        >>> head = sf.parallel.MarginHead(8, classes=100)
        >>> loss = head(x, torch.arange(4))
        >>> loss.shape
        torch.Size([])
    """

    def __init__(
        self,
        width: int,
        classes: int,
        *,
        axis: str | None = "data",
        scale: float = 64.0,
        angle: float = 0.5,
        cosine: float = 0.0,
        sample: float = 1.0,
    ) -> None:
        super().__init__()
        for name, number in (("width", width), ("classes", classes)):
            if not is_integer(number, 1):
                raise ConfigError(f"MarginHead: {name} is {number!r}, but must be a whole number, 1 or more.")
        if axis is not None and not (isinstance(axis, str) and axis):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"MarginHead: axis is {described(axis)}, but must be None or an axis's name.{did_you_mean(axis, AXES)}"
            )
        margin = margin_of("MarginHead", scale, angle, cosine, sample)
        self.classes, self.axis = classes, axis
        self.margin, self.sample = margin, float(sample)
        self.weight = nn.Parameter(torch.empty(classes, width))
        group_of(self, axis or "")
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal numbers: only directions count."""
        nn.init.normal_(self.weight, std=0.01)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.classes}, {self.margin}" + f", sample={self.sample}" * (
            self.sample < 1
        )

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of this rank's rows.

        Args:
            features: ``(rows, width)``, of any length; ranks may have other numbers of rows.
            targets: ``(rows,)``, integers from 0 to ``classes``; rows of -100 do not count.

        Returns:
            A scalar in fp32 or fp64; 0 on a rank none of whose rows counts, where other ranks have some.

        Raises:
            ConfigError: on all ranks: shapes or dtypes do not fit on one of them, a target on one of them is no class,
                or no row of any of them counts. One rank alone looks at targets on a CPU only: elsewhere it would wait
                for them, and one that is no class fails on the device.
            UsageError: in backward with ``create_graph=True``.
        """
        group = group_of(self, self.axis or "")
        sizes = self._sizes(group, features, targets)
        unit = F.normalize(features.to(self.weight.dtype))
        labels = group.all_gather(targets.long(), 0, sizes)
        start, rows = self._place(group)
        local = labels - start
        columns = local.where((local >= 0) & (local < rows), -1)
        wrong = (labels != IGNORED) & ((labels < 0) | (labels >= self.classes))
        columns = columns.where(~wrong, self.classes)  # a row that is not there fails as in PyTorch
        weight = self.weight.view_as(self.weight)  # at which an engine gathers what it has split
        if self.sample < 1:
            chosen = sampled_classes(columns, rows, self.sample, None)
            weight = weight.index_select(0, chosen)
            columns = torch.searchsorted(chosen, columns.clamp(min=0)).where(columns >= 0, -1)
        if group.size == 1:  # negative is here only what does not count
            columns = columns.clamp(min=0)
        wanted = wanted_of(unit, weight, None)
        most = -(-self.classes // group.size)  # chunks are the same on all ranks
        if self.sample < 1:
            most = min(most, round(most * self.sample) + len(labels))
        at_once = rows_at_once(len(labels), most, weight.dtype, weight.device.type)
        ranks = group if group.size > 1 else None
        head = Head(at_once, weight.dtype, IGNORED, 0.0, "mean", None, wanted, ranks, self.classes, self.margin)
        with torch.autocast(unit.device.type, enabled=False):
            return _losses(unit, weight, labels, columns, _Together(head, group, sizes))

    def _sizes(self, group: AxisGroup, features: Tensor, targets: Tensor) -> list[int]:
        """How many rows each rank has, once what all of them have fits.

        Raises:
            ConfigError: it does not, on some rank.
        """
        fits = all(isinstance(each, Tensor) for each in (features, targets))  # pyright: ignore[reportUnnecessaryIsInstance]
        fits = fits and features.dim() == 2 and features.shape[1] == self.weight.shape[1]
        fits = fits and targets.shape == features.shape[:1] and targets.dtype in INTEGERS
        if group.size == 1:  # nothing is asked of a tensor on a device, or of a plan's, which has no values
            if not fits:
                raise ConfigError(self._misfit(features, targets))
            check_targets(targets, IGNORED, self.classes)
            if not len(targets):
                raise ConfigError(f"MarginHead got no row that counts{NONE_COUNTS}")
            return [len(targets)]
        mine = torch.tensor([-1, 0, 0, 0], device=self.weight.device)
        if fits:
            rows = torch.stack((torch.tensor(len(targets), device=targets.device), (targets != IGNORED).sum()))
            mine = torch.cat((rows, span_of(targets, IGNORED))).to(mine.device)
        said = group.all_gather(mine, 0).view(group.size, -1).tolist()  # of all ranks, so that all refuse alike
        for rank, (rows, _, low, high) in enumerate(said):
            where = f" on rank {rank} of {group.size} along {group.axis!r}"
            if rows < 0:
                raise ConfigError(self._misfit(features, targets, where))
            if low < 0 or high >= self.classes:
                raise ConfigError(f"MarginHead: {no_class(low, high, IGNORED, self.classes, where)}")
        if not any(counted for _, counted, _, _ in said):
            raise ConfigError(f"MarginHead got on no rank along {group.axis!r} a row that counts{NONE_COUNTS}")
        return [rows for rows, *_ in said]

    def _misfit(self, features: Any, targets: Any, where: str = "") -> str:
        here = (
            f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else described(each)
            for each in (features, targets)
        )
        return (
            f"MarginHead takes features (rows, {self.weight.shape[1]}) and, as integers, one target for each row; they "
            f"are other{where}: here {' and '.join(here)}."
        )

    def _place(self, group: AxisGroup) -> tuple[int, int]:
        """The first class that is here, and how many are."""
        start, stop = group.range(self.classes)
        return start, stop - start


def split_heads(model: nn.Module, mesh: Mesh, coords: Mapping[str, int]) -> None:
    """Leaves of the classes of each :class:`MarginHead` this rank's part.

    Raises:
        ConfigError: its axis is unknown, or its ranks do not read other samples and sum gradients in every step, or
            there are fewer classes than ranks.
    """
    for path, module in model.named_modules():
        if not isinstance(module, MarginHead) or module.axis is None:
            continue
        where, named, known = path or "the model", f"axis={module.axis!r}", {*mesh, *AXES}
        if module.axis not in known:
            raise ConfigError(f"{where!r} has {named}, which the mesh does not have.{did_you_mean(module.axis, known)}")
        axes = axes_named(module.axis, mesh)
        if not axes:
            continue
        apart = tuple(axis for axis in mesh.sampling if axis not in mesh.rare)
        if not set(axes) <= set(apart):
            what = "come together now and then only" if set(axes) <= set(mesh.rare) else "read the same samples"
            raise ConfigError(
                f"{where!r} has {named}, on which ranks {what}: classes are split over ranks that read other samples "
                f"and sum gradients in every step; give it axis='data', which is all of these, or None."
            )
        place = AxisPart("+".join(axes), shard_index(axes, mesh, coords), mesh.parts(axes), mesh.size)
        if module.classes < place.size:
            classes = f"{module.classes} {'class' if module.classes == 1 else 'classes'}"
            raise ConfigError(
                f"{where!r} has {classes} and {named}, over {place.size} ranks: each needs one at least. Give it "
                "axis=None, with which every rank has all classes, or train on fewer ranks."
            )
        group = group_of(module, module.axis or "")
        start, stop = place.range(module.classes)
        whole = module.classes, module.weight.shape[1]
        if group.parts == 1:  # else cut for an engine that was closed; that it was for as many is seen in bind_groups
            group.part(place.size)
            hand_over([module.weight])
            part = module.weight.detach()[start:stop].clone(memory_format=torch.contiguous_format)
            keep_part(module.weight, part)
        if group.parts == place.size:
            for axis in axes:
                mark_slice(module, "weight", axis=axis, whole=whole, start=(start, 0))


class _Together(NamedTuple):
    """How losses are made of the rows of all ranks, which have ``sizes`` of them."""

    head: Head
    group: AxisGroup
    sizes: Sequence[int]


@untraced
def _losses(unit: Tensor, weight: Tensor, labels: Tensor, columns: Tensor, given: _Together) -> Tensor:
    """The mean loss of this rank's rows ``unit`` ``(n, d)``; ``labels`` and ``columns`` are of all ranks'."""
    return _Mean.apply(unit, weight, labels, columns, given)  # pyright: ignore[reportReturnType]


class _Mean(torch.autograd.Function):
    """Gradients of the sum of all rows' losses are made in forward, while logits are there. In backward each rank's
    rows are scaled by what comes there; where that differs between ranks logits are made again."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor, weight: Tensor, labels: Tensor, columns: Tensor, given: _Together) -> Tensor:
        head, group, sizes = given
        together = group.all_gather(unit, 0, sizes)
        wide = torch.promote_types(weight.dtype, torch.float32)
        lengths = torch.linalg.vector_norm(weight, dim=1, dtype=wide).clamp_(min=SMALL)
        losses, grads = _with_centres(together, weight, lengths, labels, columns, head, None)
        own = labels.split(list(sizes))[group.rank] != IGNORED
        count = own.sum()
        ctx.given = given
        ctx.save_for_backward(together, weight, lengths, labels, columns, count, *grads)
        return losses.split(list(sizes))[group.rank].sum() / (count if group.size == 1 else count.clamp(min=1))

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise UsageError("MarginHead has no gradients of its gradients (create_graph=True).")
        given: _Together = ctx.given
        group = given.group
        together, weight, lengths, labels, columns, count, *grads = ctx.saved_tensors
        mine = (outputs[0] / count).where(count > 0, 0.0).view(1)
        scales = group.all_gather(mine.to(lengths.dtype), 0)
        scale = scales[0]
        if group.size > 1 and not bool((scales == scale).all()):
            of_rows = scales.repeat_interleave(torch.tensor(given.sizes, device=scales.device))
            grads = _with_centres(together, weight, lengths, labels, columns, given.head, of_rows)[1]
            scale = torch.ones_like(scale)
        elif keeps_graph():
            grads = [each if each is None else each.clone() for each in grads]
        of_unit, of_weight = grads
        if of_unit is not None:
            of_unit = group.reduce_scatter(of_unit.mul_(scale), 0, given.sizes)
        if of_weight is not None:
            _along_spheres(of_weight, weight, lengths, scale)
        return of_unit, of_weight, None, None, None


def _with_centres(
    together: Tensor,
    weight: Tensor,
    lengths: Tensor,
    labels: Tensor,
    columns: Tensor,
    head: Head,
    scales: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Losses of all rows, and gradients of their sum with respect to unit vectors and to centres, these divided by the
    ``lengths`` of ``weight`` but for 16 bits."""
    if weight.dtype in SIXTEEN_BITS:  # whose products with what is not of length 1 may be too small
        losses, grads = by_chunks(together, weight / lengths[:, None], None, labels, columns, head, scales)
    else:  # one pass less over the weight
        with_lengths = head._replace(lengths=lengths)
        losses, grads = by_chunks(together, weight, None, labels, columns, with_lengths, scales)
    return losses, grads[:2]


def _along_spheres(grads: Tensor, weight: Tensor, lengths: Tensor, scale: Tensor) -> None:
    """In place: what :func:`_with_centres` gives of ``weight``, times ``scale``, as gradients of vectors of any length,
    of which the part along the vector counts nothing."""
    narrow = weight.dtype in SIXTEEN_BITS
    step = max(BLOCK // max(weight.shape[1], 1), 1) if weight.device.type == "cpu" else max(len(weight), 1)
    for begin in range(0, len(weight), step):  # a block is read from memory once
        grad, vectors, length = (each[begin : begin + step] for each in (grads, weight, lengths[:, None]))
        grad.mul_(scale / length if narrow else scale)
        along = (grad * vectors).sum(1, keepdim=True).div_(length.square())
        grad.addcmul_(vectors, along, value=-1)
