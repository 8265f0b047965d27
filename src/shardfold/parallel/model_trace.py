"""What a model does, operation by operation, without memory: a run of a copy of it on the meta device.

Two lists come of it. Calls are what Python asked PyTorch for, which is where sizes are written down (``x.view(b, t, h,
d)``); steps are the operations that follow, of which there are few kinds. Linear layers and embeddings are one step
each. Tensors are numbers in the order in which they appear, so that two runs of one model can be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfold.parallel.lengths import adapt_lengths, is_transposed
from shardfold.torch_internals import DispatchMode, storage_key

__all__ = ["Leaf", "Ref", "Step", "TracedCall", "TracedRun", "leaf_of", "mapped", "record", "tensors_in"]


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a step or a call."""

    value: int


@dataclass(frozen=True)
class Leaf:
    """A module that is one step: a linear layer, or an embedding.

    Attributes:
        outputs: the length of the last dimension of what it gives.
        inputs: the same of what it is given; 0: it is given numbers of rows.
    """

    outputs: int
    inputs: int = 0


Invocation = tuple[str, int]
"""The path of a module, and which of its calls it is."""


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        op: its name, as ``aten.view``, or the path of a leaf.
        leaf: it is the call of one.
        pointwise: each element of its outputs is of one element of each input.
        args: with a :class:`Ref` for each tensor; of ``kwargs`` the same.
        outs: the tensors that it gives.
        stack: of modules that were being called, the outermost first.
    """

    op: str
    leaf: bool
    pointwise: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int, ...]
    stack: tuple[Invocation, ...]

    @property
    def ins(self) -> list[int]:
        return [ref.value for ref in _refs((self.args, tuple(self.kwargs.values())))]

    @property
    def where(self) -> str:
        """The innermost module, for messages."""
        return self.stack[-1][0] if self.stack else ""


@dataclass(frozen=True)
class TracedCall:
    """One call of PyTorch's by Python that gives tensors; see :class:`Step`."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    stack: tuple[Invocation, ...]


@dataclass
class TracedRun:
    """What one run did.

    Attributes:
        shapes: of each tensor.
        differentiable: tensors that a gradient may come back to.
        parameters: of tensors that are one, its name.
        results: what the model gave.
    """

    steps: list[Step] = field(default_factory=list)
    calls: list[TracedCall] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    floating: list[bool] = field(default_factory=list)
    differentiable: set[int] = field(default_factory=set)
    parameters: dict[int, str] = field(default_factory=dict)
    results: list[int] = field(default_factory=list)


def leaf_of(module: nn.Module) -> Leaf | None:
    """What a linear layer or an embedding is as one step; None: it is something else, or does more than it is named
    for."""
    forward, weight = type(module).forward, module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or "forward" in vars(module):
        return None
    if forward is nn.Embedding.forward and getattr(module, "max_norm", None) is None:
        return Leaf(weight.shape[1])
    if forward is nn.Linear.forward:
        return Leaf(weight.shape[0], weight.shape[1])
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return Leaf(weight.shape[1], weight.shape[0])
    return None


Rewrite = Callable[[int, str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Of the number of a call, its name and its arguments makes those that it is called with."""


def record(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    differentiable: bool,
    leaves: Mapping[str, Leaf] | None = None,
    words: Mapping[str, int] | None = None,
    rewrite: Rewrite | None = None,
) -> TracedRun:
    """Runs a copy of ``module`` on meta tensors.

    Args:
        args, kwargs: of its forward; only shapes and dtypes of tensors are read.
        differentiable: gradients go back into ``args``.
        leaves: of some paths that are leaves, which lengths they have in this run in place of their own, in what they
            give and in what the model reads of them.
        words: of embeddings and heads, how many words the model reads that they have; they give what they gave.
        rewrite: changes arguments of calls.

    Raises:
        Exception: whatever the module raises.
    """
    twin = _on_meta(module)
    recorder = _Recorder(rewrite)
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        recorder.names.setdefault(id(parameter), name)
    for path, inner in twin.named_modules():
        leaf = leaf_of(inner)
        inner.register_forward_pre_hook(lambda *_, path=path: recorder.enter(path), prepend=True)
        inner.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
        if leaf is not None:
            vars(inner)["forward"] = _LeafRun(recorder, path, inner, (leaves or {}).get(path, leaf))
            if path in (leaves or {}) or path in (words or {}):
                _shorten(inner, (leaves or {}).get(path, leaf), (words or {}).get(path))
    given = mapped((tuple(args), dict(kwargs)), _as_given)
    for tensor in tensors_in(given):
        value = recorder.number(tensor)
        if differentiable and tensor.is_floating_point():
            recorder.run.differentiable.add(value)
    with torch.no_grad(), torch.device("meta"), recorder.functions, recorder:
        result = twin(*given[0], **given[1])
    return replace(recorder.run, results=[recorder.number(tensor) for tensor in tensors_in(result)])


def _shorten(module: nn.Module, leaf: Leaf, words: int | None) -> None:
    """Gives a leaf a weight and a bias of these lengths, and the numbers that it keeps of them."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    if isinstance(module, nn.Embedding):
        shape = words or len(weight), leaf.outputs
    elif is_transposed(module):
        shape = leaf.inputs, words or leaf.outputs
    else:
        shape = words or leaf.outputs, leaf.inputs
    module._parameters["weight"] = _of_shape(weight, shape)
    if bias is not None:
        module._parameters["bias"] = _of_shape(bias, (words or leaf.outputs,))
    adapt_lengths(module)


def _of_shape(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    made = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def _as_given(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no memory; whatever it stores while it runs, the module does not get."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


class _LeafRun:
    """The forward of a leaf."""

    def __init__(self, recorder: _Recorder, path: str, module: nn.Module, leaf: Leaf) -> None:
        self._recorder, self._path, self._module, self._leaf = recorder, path, module, leaf

    def __call__(self, x: Tensor) -> Tensor:
        weight, leaf = self._module._parameters["weight"], self._leaf
        assert weight is not None
        if x.is_floating_point() != bool(leaf.inputs) or (leaf.inputs and x.shape[-1] != leaf.inputs):
            raise TypeError(f"{self._path!r} is given {tuple(x.shape)} of {x.dtype}")
        with self._recorder.paused():
            shape = (*x.shape[:-1], leaf.outputs) if leaf.inputs else (*x.shape, leaf.outputs)
            y = torch.empty(shape, dtype=weight.dtype, device="meta")
        self._recorder.add_leaf(self._path, x, y)
        return y


class _Recorder(DispatchMode):
    """Writes down steps, and with :attr:`functions` calls."""

    def __init__(self, rewrite: Rewrite | None) -> None:
        super().__init__()
        self.run, self.names = TracedRun(), dict[int, str]()
        self.rewrite = rewrite
        self.functions = _CallRecorder(self)
        self.quiet = 0
        self._stack: list[Invocation] = []
        self._times: dict[str, int] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._sharing: dict[int, list[int]] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is written down."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def enter(self, path: str) -> None:
        self._times[path] = self._times.get(path, 0) + 1
        self._stack.append((path, self._times[path]))

    def leave(self) -> None:
        self._stack.pop()

    @property
    def stack(self) -> tuple[Invocation, ...]:
        return tuple(self._stack)

    def number(self, tensor: Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is None:
            known = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
            self.run.shapes.append(tuple(tensor.shape))
            self.run.floating.append(tensor.is_floating_point())
            self._sharing.setdefault(storage_key(tensor.untyped_storage()), []).append(known)
            if id(tensor) in self.names:
                self.run.parameters[known] = self.names[id(tensor)]
            if tensor.requires_grad:
                self.run.differentiable.add(known)
        return known

    def add_leaf(self, path: str, x: Tensor, y: Tensor) -> None:
        ref, out = Ref(self.number(x)), self.number(y)
        self.run.differentiable.add(out)
        stack = self.stack[:-1]  # without its own
        self.run.steps.append(Step(path, True, False, (ref,), {}, (out,), stack))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.quiet:
            return out
        refs, named = mapped((tuple(args), kwargs or {}), lambda t: Ref(self.number(t)))
        ins = [self.number(tensor) for tensor in tensors_in((args, kwargs or {}))]
        outs = tuple(self.number(tensor) for tensor in tensors_in(out))
        if outs:
            pointwise = torch.Tag.pointwise in func.tags
            op = str(func.overloadpacket)
            self.run.steps.append(Step(op, False, pointwise, refs, named, outs, self.stack))
            if any(value in self.run.differentiable for value in ins):
                self.run.differentiable.update(value for value in outs if self.run.floating[value])
                if op.endswith("_"):  # so are all views of what was written to
                    for value in outs:
                        self.run.differentiable.update(self._sharing[storage_key(self._alive[value].untyped_storage())])
        return out


class _CallRecorder(TorchFunctionMode):
    """Writes down calls."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self._recorder, dict(kwargs or {})
        if recorder.quiet:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if recorder.rewrite is not None:
            args, kwargs = recorder.rewrite(len(recorder.run.calls), name, tuple(args), kwargs)
        out = func(*args, **kwargs)
        if name != "__get__" and any(True for _ in tensors_in(out)):
            refs, named = mapped((tuple(args), kwargs), lambda t: Ref(recorder.number(t)))
            ins = tuple(recorder.number(tensor) for tensor in tensors_in((args, kwargs)))
            outs = tuple(recorder.number(tensor) for tensor in tensors_in(out))
            recorder.run.calls.append(TracedCall(name, refs, named, ins, outs, recorder.stack))
        return out


def mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tuples, lists and mappings, with each tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        made = [mapped(each, change) for each in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    if isinstance(tree, list):
        return [mapped(each, change) for each in tree]
    if isinstance(tree, dict):
        return {key: mapped(each, change) for key, each in tree.items()}
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Tensors in tuples, lists, mappings, and data classes of models' outputs."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from tensors_in(each)
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from tensors_in(each)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for each in vars(tree).values():
            yield from tensors_in(each)


def _refs(tree: Any) -> Iterator[Ref]:
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _refs(each)
