"""How parts of tensors go through operations.

A tensor is whole on all ranks, or each has a part of it. Where one rank's part of the inputs gives its part of the
output, the operation is followed; every other one is refused, so that what is not known is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from shardfold.parallel.model_trace import Step, TracedRun

__all__ = ["TensorPart", "UnfollowedOperation", "follow"]


@dataclass(frozen=True)
class TensorPart:
    """What each rank has of a tensor: along ``dim``, which is ``blocks`` equal blocks, an equal part of each of them.

    Attributes:
        group: a number that parts of one origin share.
    """

    dim: int
    blocks: int
    group: int

    def shape(self, whole: Sequence[int], ranks: int) -> tuple[int, ...]:
        """Of this rank's part."""
        return tuple(n // ranks if dim == self.dim else n for dim, n in enumerate(whole))


class UnfollowedOperation(Exception):
    """An operation is not followed.

    Args:
        why: it is not, in words that go behind the name of a module.
        values: tensors that may not be parts, or not these.
        blocks: how many blocks might do in place of one.
        wanted: a tensor that would have to be a part too.
    """

    def __init__(self, why: str, values: Sequence[int] = (), blocks: int = 1, wanted: int | None = None) -> None:
        super().__init__(why)
        self.why, self.values, self.blocks, self.wanted = why, tuple(values), blocks, wanted


@dataclass
class Follower:
    """Parts on their way through one run.

    Attributes:
        run: of the whole model.
        ranks: along the axis.
        parts: of the tensors so far that are parts.
        partial: parameters, by name, that parts were computed with, and what with.
    """

    run: TracedRun
    ranks: int
    parts: dict[int, TensorPart]
    partial: dict[str, tuple[int, ...]]

    def shape(self, value: int) -> tuple[int, ...]:
        return self.run.shapes[value]

    def given(self, step: Step) -> list[tuple[int, TensorPart]]:
        """The parts among what a step is given."""
        return [(value, self.parts[value]) for value in step.ins if value in self.parts]

    def whole(self, step: Step, value: int, sizes_at: int) -> None:
        """A tensor that is whole goes into a step with parts: it has one element where they are divided.

        Raises:
            UnfollowedOperation: it has more, or it is differentiable and no parameter.
        """
        op = _short(step.op)
        if sizes_at != 1:
            raise UnfollowedOperation(f"{op} puts a part together with a tensor that is whole", step.ins, wanted=value)
        if value in self.run.parameters:
            self.partial[self.run.parameters[value]] = tuple(step.ins)
        elif value in self.run.differentiable:
            raise UnfollowedOperation(
                f"{op} puts a part together with activations that are whole, whose gradient would be a summand",
                step.ins,
            )


def follow(step: Step, at: Follower) -> None:
    """Writes down which of the step's outputs are parts.

    Raises:
        UnfollowedOperation: it is not known what they are.
    """
    if not at.given(step):
        return
    if step.pointwise or step.op in ALIKE:
        _pointwise(step, at)
    elif step.op in RULES:
        RULES[step.op](step, at)
    elif step.op.startswith("aten._scaled_dot_product"):
        _attention(step, at)
    else:
        raise UnfollowedOperation(f"{_short(step.op)} of a part is not followed", step.ins)


def _short(op: str) -> str:
    return op.removeprefix("aten.").strip("_")


def _agreed(step: Step, given: Sequence[tuple[int, TensorPart]]) -> TensorPart:
    """
    Raises:
        UnfollowedOperation: parts differ in how they are divided.
    """
    first = given[0][1]
    if any((part.dim, part.blocks) != (first.dim, first.blocks) for _, part in given):
        raise UnfollowedOperation(f"{_short(step.op)} puts parts together that are divided differently", step.ins)
    return first


def _pointwise(step: Step, at: Follower) -> None:
    dims = len(at.shape(step.outs[0]))
    aligned = [(v, replace(part, dim=part.dim + dims - len(at.shape(v)))) for v, part in at.given(step)]
    part = _agreed(step, aligned)
    for value in step.ins:
        if value not in at.parts:
            shape = at.shape(value)
            dim = part.dim - (dims - len(shape))
            at.whole(step, value, shape[dim] if dim >= 0 else 1)
    for value in step.outs:
        if value in step.ins and value not in at.parts:
            raise UnfollowedOperation(f"{_short(step.op)} writes parts into a tensor that is whole", step.ins)
        at.parts[value] = part


def _same_order(step: Step, at: Follower) -> None:
    """Of the same elements in the same order, in another shape."""
    (value, part), *_ = at.given(step)
    shape, out = at.shape(value), at.shape(step.outs[0])
    before, first = prod(shape[: part.dim]) * part.blocks, 1
    for dim, length in enumerate(out):
        blocks, rest = divmod(before, first)
        if rest == 0 and blocks and length % (blocks * at.ranks) == 0:
            at.parts[step.outs[0]] = TensorPart(dim, blocks, part.group)
            return
        first *= length
    wide = _first_of(shape, out, part.dim)
    raise UnfollowedOperation(
        f"{_short(step.op)} from {shape} to {out} leaves {wide} along the dimension that is divided, which are no "
        f"multiple of {at.ranks}",
        step.ins,
        blocks=wide,
    )


def _first_of(shape: Sequence[int], out: Sequence[int], dim: int) -> int:
    """The length of the first dimension that ``dim`` is split into."""
    before, first = prod(shape[:dim]), 1
    for length in out:
        if first == before and length > 1:
            return length
        first *= length
    return 1


def _dim(step: Step, at: int, value_dims: int) -> int:
    dim = step.args[at] if len(step.args) > at else step.kwargs.get("dim", 0)
    return dim % value_dims


def _transpose(step: Step, at: Follower) -> None:
    (value, part), *_ = at.given(step)
    dims = len(at.shape(value))
    order = list(range(dims))
    if step.op == "aten.permute":
        order = [dim % dims for dim in step.args[1]]
    else:
        first, second = (0, 1) if step.op == "aten.t" else (step.args[1] % dims, step.args[2] % dims)
        if dims > 1:
            order[first], order[second] = order[second], order[first]
    at.parts[step.outs[0]] = replace(part, dim=order.index(part.dim))


def _expand(step: Step, at: Follower) -> None:
    (value, part), *_ = at.given(step)
    out = step.outs[0]
    at.parts[out] = replace(part, dim=part.dim + len(at.shape(out)) - len(at.shape(value)))


def _split(step: Step, at: Follower) -> None:
    (value, part), *_ = at.given(step)
    shape = at.shape(value)
    dim = _dim(step, 2, len(shape))
    lengths = [at.shape(out)[dim] for out in step.outs]
    blocks = _blocks_of(step, part, shape[dim], [0, *lengths], at) if dim == part.dim else [part.blocks] * len(lengths)
    for out, count in zip(step.outs, blocks, strict=True):
        at.parts[out] = replace(part, blocks=count)


def _slice(step: Step, at: Follower) -> None:
    (value, part), *_ = at.given(step)
    shape, out = at.shape(value), step.outs[0]
    dim = _dim(step, 1, len(shape))
    if dim == part.dim and at.shape(out)[dim] != shape[dim]:
        start = _start(step, shape[dim])
        if len(step.args) > 4 and step.args[4] != 1:
            raise UnfollowedOperation("a slice with steps goes over the dimension that is divided", step.ins)
        part = replace(part, blocks=_blocks_of(step, part, shape[dim], [start, at.shape(out)[dim]], at)[0])
    at.parts[out] = part


def _start(step: Step, length: int) -> int:
    start = step.args[2] if len(step.args) > 2 and step.args[2] is not None else 0
    return min(start + length if start < 0 else start, length)


def _blocks_of(step: Step, part: TensorPart, length: int, cuts: Sequence[int], at: Follower) -> list[int]:
    """How many blocks each piece has, where the first begins at ``cuts[0]`` and they are as long as the others say."""
    block, edge = length // part.blocks, cuts[0]
    found: list[int] = []
    for each in cuts[1:]:
        if edge % block or each % block or not each:
            among = length // gcd(length, *cuts)
            raise UnfollowedOperation(
                f"{_short(step.op)} takes {each} of {length} along the dimension that is divided",
                step.ins,
                blocks=among,
            )
        found.append(each // block)
        edge += each
    return found


def _select(step: Step, at: Follower) -> None:
    (value, part), *_ = at.given(step)
    shape = at.shape(value)
    dim = _dim(step, 1, len(shape))
    if dim == part.dim:
        raise UnfollowedOperation(
            f"{_short(step.op)} goes over the dimension that is divided", step.ins, blocks=shape[dim]
        )
    for out in step.outs:
        at.parts[out] = replace(part, dim=part.dim - (dim < part.dim))


def _cat(step: Step, at: Follower) -> None:
    given = at.given(step)
    if len(given) != sum(at.shape(value) != (0,) for value in step.ins):  # a cache begins with nothing
        raise UnfollowedOperation(f"{_short(step.op)} puts parts beside tensors that are whole", step.ins)
    dims = len(at.shape(given[0][0]))
    if step.op == "aten.stack":
        dim, part = _dim(step, 1, dims + 1), _agreed(step, given)
        at.parts[step.outs[0]] = replace(part, dim=part.dim + (dim <= part.dim))
        return
    dim = _dim(step, 1, dims)
    if any(part.dim == dim for _, part in given):
        lengths = {at.shape(value)[dim] // part.blocks for value, part in given if part.dim == dim}
        if len(lengths) > 1 or any(part.dim != dim for _, part in given):
            raise UnfollowedOperation(f"{_short(step.op)} puts parts together that are divided differently", step.ins)
        at.parts[step.outs[0]] = replace(given[0][1], blocks=sum(part.blocks for _, part in given))
        return
    at.parts[step.outs[0]] = _agreed(step, given)


def _along(position: int) -> Callable[[Step, Follower], None]:
    """Of a function of all elements along dimensions, which are the argument at ``position``."""

    def rule(step: Step, at: Follower) -> None:
        (value, part), *_ = at.given(step)
        dims = len(at.shape(value))
        said = step.args[position] if len(step.args) > position else step.kwargs.get("dim")
        over = {dim % dims for dim in (said if isinstance(said, (list, tuple)) else [said]) if dim is not None}
        if not over or part.dim in over:
            raise UnfollowedOperation(f"{_short(step.op)} goes over the dimension that is divided", step.ins)
        for out in step.outs:
            kept = len(at.shape(out)) == dims
            at.parts[out] = part if kept else replace(part, dim=part.dim - sum(dim < part.dim for dim in over))

    return rule


def _norm(step: Step, at: Follower) -> None:
    """Over the last dimensions."""
    value = step.ins[0]
    part = at.parts.get(value)
    if part is None or part.dim >= len(at.shape(value)) - len(step.args[1]):
        raise UnfollowedOperation(f"{_short(step.op)} goes over the dimension that is divided", step.ins)
    for other in step.ins[1:]:
        if other in at.parts:
            raise UnfollowedOperation(
                f"{_short(step.op)} of parts with parameters that are parts is not followed", step.ins
            )
        at.whole(step, other, 1)
    for out in step.outs:
        at.parts[out] = part


def _bmm(step: Step, at: Follower) -> None:
    first, second = step.ins[:2]
    one, two = at.parts.get(first), at.parts.get(second)
    if one is None or two is None or one.dim or two.dim or one.blocks != two.blocks:
        raise UnfollowedOperation(
            "a matrix product of a part with a tensor that is whole, or divided elsewhere, is not followed", step.ins
        )
    at.parts[step.outs[0]] = one


def _attention(step: Step, at: Follower) -> None:
    given = step.ins[:3]
    parts = [at.parts.get(value) for value in given]
    first, dims = parts[0], len(at.shape(given[0]))
    heads = {at.shape(value)[1] for value in given} if dims > 1 else set[int]()
    if first is None or any(p is None or (p.dim, p.blocks) != (first.dim, first.blocks) for p in parts):
        raise UnfollowedOperation("attention is between heads that are divided and others that are not", step.ins)
    if dims != 4 or first.dim > 1 or (len(heads) > 1 and first.blocks > 1):
        raise UnfollowedOperation("attention goes over the dimension that is divided", step.ins)
    for value in step.ins[3:]:
        shape, part = at.shape(value), at.parts.get(value)
        dim = first.dim - (dims - len(shape))
        if part is None:
            at.whole(step, value, shape[dim] if dim >= 0 else 1)
        elif (part.dim, part.blocks) != (dim, first.blocks):
            raise UnfollowedOperation("attention gets a mask that is divided elsewhere", step.ins)
    for out in step.outs:
        shape = at.shape(out)
        if len(shape) > first.dim and shape[first.dim] == at.shape(given[0])[first.dim]:
            at.parts[out] = first


def _last_two(step: Step, at: Follower) -> None:
    (value, part), *_ = at.given(step)
    if part.dim >= len(at.shape(value)) - 2:
        raise UnfollowedOperation(f"{_short(step.op)} goes over the dimension that is divided", step.ins)
    at.parts[step.outs[0]] = part


ALIKE = {
    f"aten.{name}"
    for name in (
        "_to_copy",
        "clone",
        "detach",
        "alias",
        "native_dropout",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "copy_",
        "lift_fresh",
        "bernoulli",
        "bernoulli_",
        "masked_fill_",
        "fill_",
        "zero_",
        "uniform_",
        "normal_",
        "hardswish",
        "log_sigmoid_forward",
    )
}
"""Operations on each element that PyTorch does not tag as such."""

RULES: Mapping[str, Callable[[Step, Follower], Any]] = {
    **{f"aten.{name}": _same_order for name in ("view", "_unsafe_view", "unsqueeze", "squeeze", "_reshape_alias")},
    **{f"aten.{name}": _transpose for name in ("transpose", "permute", "t")},
    **{f"aten.{name}": _split for name in ("split", "split_with_sizes")},
    **{f"aten.{name}": _select for name in ("select", "unbind")},
    **{f"aten.{name}": _cat for name in ("cat", "stack")},
    **{f"aten.{name}": _norm for name in ("native_layer_norm", "_fused_rms_norm", "rms_norm")},
    **{f"aten.{name}": _last_two for name in ("tril", "triu")},
    **{
        f"aten.{name}": _along(1)
        for name in (
            "sum",
            "mean",
            "amax",
            "amin",
            "var",
            "std",
            "logsumexp",
            "argmax",
            "argmin",
            "max",
            "min",
            "any",
            "all",
            "cumsum",
            "cumprod",
            "_softmax",
            "_log_softmax",
            "_safe_softmax",
            "prod",
            "var_mean",
        )
    },
    "aten.linalg_vector_norm": _along(2),
    "aten.topk": _along(2),
    "aten.expand": _expand,
    "aten.slice": _slice,
    "aten.bmm": _bmm,
}
