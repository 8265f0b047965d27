"""Gradients of weights that are computed apart from those of inputs, and later.

Inside of :class:`Splits` a linear layer, a convolution or an embedding computes in backward the gradients of its
inputs, and leaves with a :class:`DeferredWeightGrads` what it takes to compute those of its weights: its input, and
the gradient of its output. Nothing is computed twice, and the rest of what autograd saved is freed with the first part,
as ever. Weights of other operations (norms, most of all) get their gradients in the first part, which are kept until
the second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfold.parallel.adjoint import paired
from shardfold.sharding.autograd import inside_checkpoint

__all__ = ["DeferredWeightGrads", "Splits"]


class DeferredWeightGrads:
    """What is left to compute of one micro-batch of one stage.

    Attributes:
        waiting: parameters, and what computes their gradients, in the order in which backward came by; a parameter may
            be there several times.
        kept: gradients that are there already: who takes them, and they.
        coming: ``id`` of the parameters whose gradients :meth:`roots` gives.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []
        self.kept: list[Any] = []
        self.coming: frozenset[int] = frozenset()

    def take_kept(self) -> deque[Any]:
        """:attr:`kept`, which is empty from then on."""
        kept, self.kept = deque(self.kept), []
        return kept

    def roots(self, number: Mapping[int, int], device: torch.device) -> list[Tensor]:
        """What a backward is to begin from to compute them: first the one returned first, which is of no parameter,
        then those of the unit with the least ``number``, which is by the ``id`` of a parameter."""
        ordered = sorted(self.waiting, key=lambda each: number.get(id(each[0]), len(number)))
        self.waiting, self.coming = [], frozenset(id(parameter) for parameter, _ in ordered)
        made = [_given(parameter, make) for parameter, make in reversed(ordered)]
        first = torch.zeros((), device=device, requires_grad=True) * 1  # autograd runs what was made last first
        return [first, *reversed(made)]


class Splits(TorchFunctionMode):
    """Inside, operations on parameters leave the gradients of these to ``deferred``; those that are recomputed do not,
    nor those on parameters of other classes than ``plain``."""

    def __init__(self, deferred: DeferredWeightGrads, device: torch.device, plain: type[Tensor] = nn.Parameter) -> None:
        super().__init__()
        self._deferred, self._plain = deferred, plain
        self._anchor = torch.zeros((), device=device, requires_grad=True)  # what is apart from weights has a backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        how = _KNOWN.get(func)
        if how is None or not torch.is_grad_enabled() or inside_checkpoint():
            return func(*args, **kwargs)
        if any(isinstance(x, nn.Parameter) and type(x) is not self._plain for x in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        found = how(*args, **kwargs)
        if found is None:
            return func(*args, **kwargs)
        function, given, weight, more = found
        return function.apply(self._anchor, given, self._deferred, weight, *more)


def _given(parameter: nn.Parameter, make: Callable[[], Tensor]) -> Tensor:
    """A number in whose backward a parameter gets a gradient that is computed then."""
    left = [make]  # what it holds is let go of with the call
    return paired(parameter, lambda p: torch.zeros((), device=p.device), lambda grad: left.pop()())


class _Left(NamedTuple):
    """What a backward leaves, and to whom: the gradients of a weight and of a bias, if it has one.

    Attributes:
        how: numbers that its operation was called with.
    """

    deferred: DeferredWeightGrads
    weight: Any
    bias: Any
    how: Any

    @property
    def has_bias(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def put(self, of_weight: Callable[[], Tensor], of_bias: Callable[[], Tensor] | None = None) -> None:
        self.deferred.waiting.append((self.weight, of_weight))
        if self.has_bias and of_bias is not None:
            self.deferred.waiting.append((self.bias, of_bias))


class _Linear(torch.autograd.Function):
    """``F.linear``; ``across``: the weight lies as that of ``addmm``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, deferred: DeferredWeightGrads, weight: Any, bias: Any, across: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = _Left(deferred, weight, bias, across)
        return torch.addmm(bias, x, weight) if across else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x, weight), across = grads, ctx.saved_tensors, ctx.left.how
        inputs = None
        if ctx.needs_input_grad[1]:
            w = weight.to(grad.dtype)
            inputs = (grad @ (w.t() if across else w)).to(x.dtype)
        rows, given = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])

        def weights() -> Tensor:
            other = given.to(rows.dtype)
            return other.t() @ rows if across else rows.t() @ other

        ctx.left.put(weights, lambda: rows.sum(0))
        return None, inputs, None, None, None, None


class _Convolution(torch.autograd.Function):
    """``F.conv1d``, ``conv2d`` and ``conv3d``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, deferred: DeferredWeightGrads, weight: Any, bias: Any, how: Any, call: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = _Left(deferred, weight, bias, how)
        return call(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x, weight), left = grads, ctx.saved_tensors, ctx.left
        shape, given = tuple(weight.shape), x.to(grad.dtype)

        def run(w: Tensor, mask: Sequence[bool]) -> Any:
            stride, padding, dilation, groups = left.how
            return torch.ops.aten.convolution_backward(
                grad,
                given,
                w,
                [shape[0]] if left.has_bias else None,
                stride,
                padding,
                dilation,
                False,
                [0] * len(stride),
                groups,
                list(mask),
            )

        inputs = None
        if ctx.needs_input_grad[1]:
            inputs = run(weight.to(grad.dtype), (True, False, False))[0].to(x.dtype)

        def weights() -> Tensor:  # of the weight, whose memory may be given back, only the shape counts
            return run(grad.new_empty(shape), (False, True, False))[1]

        left.put(weights, lambda: grad.sum([0, *range(2, grad.dim())]))
        return None, inputs, None, None, None, None, None


class _Embedding(torch.autograd.Function):
    """``F.embedding``."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, at: Tensor, deferred: DeferredWeightGrads, weight: Any, padding: int, scale: bool
    ) -> Tensor:
        ctx.save_for_backward(at)
        ctx.left = _Left(deferred, weight, None, (padding, scale))
        return F.embedding(at, weight, padding if padding >= 0 else None, scale_grad_by_freq=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (at,) = grads, ctx.saved_tensors
        count, how = ctx.left.weight.shape[0], ctx.left.how

        def weights() -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grad, at, count, *how)

        ctx.left.put(weights)
        return None, None, None, None, None, None


def _takes(weight: Any, bias: Any = None) -> bool:
    """Whether they are parameters, of which the first is trained."""
    plain = isinstance(weight, nn.Parameter) and weight.requires_grad
    return plain and (bias is None or isinstance(bias, nn.Parameter))


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return (_Linear, input, weight, (bias, False)) if _takes(weight, bias) else None


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    if not _takes(mat2, input) or (beta, alpha, out) != (1, 1, None) or input.dim() != 1:
        return None
    return _Linear, mat1, mat2, (input, True)


def _convolution(call: Any, sizes: int) -> Any:
    def found(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        if not _takes(weight, bias) or isinstance(padding, str) or input.dim() != sizes + 2:
            return None
        how = [
            list(each) if isinstance(each, (list, tuple)) else [each] * sizes for each in (stride, padding, dilation)
        ]
        how = [each * sizes if len(each) == 1 else each for each in how]
        return _Convolution, input, weight, (bias, (*how, groups), call)

    return found


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not _takes(weight) or max_norm is not None or sparse:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _Embedding, input, weight, (padding, scale_grad_by_freq)


_KNOWN: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    **{call: _convolution(call, n) for n, call in enumerate((F.conv1d, F.conv2d, F.conv3d), 1)},
}
