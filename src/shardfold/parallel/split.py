"""Modules that are cut where they stand: each rank along an axis keeps its part of their parameters, and their forward
does its part of the work. They stay what they are: class, names, keys of the state dict.

What a parameter is on the axis follows from the word its module has in a plan, and is one of three:

    cut         each rank has other elements; its gradient is that of these elements
    replicated  all ranks have the same and compute the same gradient from the same tensors
    partial     all ranks have the same, and each computes a summand of its gradient from parts, of heads or, under
                sequence parallelism, of tokens: it is summed over the axis as it arrives (see :class:`Summed`)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardfold.errors import ConfigError, UsageError
from shardfold.nn.axis_group import AxisGroup
from shardfold.parallel.draws import Parts
from shardfold.parallel.functions import collect, copy, gather, reduce, scatter, spread
from shardfold.parallel.lengths import adapt_lengths, is_transposed, keep_part
from shardfold.parallel.module_group import ModuleGroup, group_of
from shardfold.parallel.shared_input import SharedInput
from shardfold.parallel.stream import DROPOUTS, TOKENS, SequenceParallel, apart_draws
from shardfold.plan.axes import nearest_that_divides
from shardfold.sharding.partitioned import hand_over
from shardfold.sharding.slices import mark_slice

__all__ = [
    "WORKS",
    "AxisPart",
    "Forward",
    "ModuleCut",
    "Owners",
    "Summed",
    "cut_forward",
    "cut_module",
    "hear_gradients",
    "is_cut",
    "is_partial",
    "is_streamed",
    "sum_gradients",
]

_FORWARD = "_shardfold_split"
_SUMMED = "_shardfold_summed"
_FOLLOWED = ("Conv1D", "FalconLinear", "ScaledWordEmbedding", "NormedEmbedding")
"""Ends of the names of classes of transformers whose own forward is right on a part of the weight: linear layers, and
embeddings that change each vector by itself."""
WORKS = ("partial", "sequence", "scattered", "collected", "joined")
"""Words of modules that nothing is cut of; they work on parts, or hand them on."""


Owners = Mapping[int, Sequence[tuple[nn.Module, str]]]
"""Who has each parameter, by its ``id``: modules, and its name there."""


class AxisPart(AxisGroup):
    """Which part of a model this rank has along an axis, before an engine connects it to the others; ``ranks``: of the
    mesh, 0: not known."""

    def __init__(self, axis: str, rank: int, size: int, ranks: int = 0) -> None:
        super().__init__(axis, size, rank)
        self.ranks = ranks

    def near(self, length: int) -> int:
        """The size of the axis next to this one that divides so many."""
        return nearest_that_divides(self.size, length, self.ranks)

    def divide(self, length: int, what: str) -> tuple[int, int]:
        """As :meth:`range`.

        Raises:
            ConfigError: they do not divide.
        """
        if length % self.size:
            raise ConfigError(
                f"{what}: {length} cannot be divided over the {self.size} ranks along {self.axis!r}; give the axis "
                f"another size, as {self.near(length)}, or the module the word 'replicated'."
            )
        return self.range(length)

    def sizes(self, length: int) -> list[int]:
        """Of all ranks' parts."""
        return [length // self.size + (rank < length % self.size) for rank in range(self.size)]


@dataclass(eq=False)
class Forward:
    """The forward of a cut module.

    Attributes:
        module: that was cut.
        word: how.
        group: the ranks that have the other parts.
        shared: of the columns of the same parent.
        start: of this rank's rows of an embedding.
        sizes: of the ranks' parts of an output that is gathered.
        rows: of the weight that this rank computes with, where it has more.
        stream: of the model, under sequence parallelism: activations between pairs of layers are cut.
        collected: a module around it has made its inputs whole.
        begins: the stream, behind this embedding.
        path: of the module, for messages.
        parts: of the model's tensors, to which columns add what they give.
        product: of input, weight and bias of a linear layer, in place of its own; None: its own.
    """

    module: nn.Module
    word: str
    group: ModuleGroup
    shared: SharedInput
    start: int = 0
    sizes: list[int] = field(default_factory=list)
    rows: tuple[int, ...] = ()
    stream: SequenceParallel | None = None
    collected: bool = False
    begins: bool = False
    path: str = ""
    parts: Parts = field(default_factory=Parts)
    product: Callable[..., Tensor] | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Of the matrix that this rank multiplies by."""
        weight: Any = self.module.weight
        return (len(self.rows) or weight.shape[0], weight.shape[1])

    def multiply_by(self, product: Callable[..., Tensor] | None) -> None:
        """A linear layer computes ``product(x, weight, bias)`` from now on; None: what its class does."""
        self.product = product

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args:  # its first argument is given by name
            first = list(inspect.signature(type(self.module).forward).parameters)[1]
            args = (kwargs.pop(first),)
        if self.word == "row" and args[0].shape[-1] != self._inputs():
            raise UsageError(
                f"{self.path!r} is a row of {self._inputs()} inputs on each rank along {self.group.axis!r}, and gets "
                f"{args[0].shape[-1]}: what it is given is not divided; give the layers before it the word 'column'."
            )
        if self.word in (*WORKS, "draws"):  # what it does between columns and rows is looked at
            return getattr(self, f"_{self.word}")(*args, **kwargs)
        if torch.compiler.is_compiling():  # random numbers are not looked at in a graph
            return getattr(self, f"_{self.word}")(*args, **kwargs)
        self.parts.enter()
        try:
            y = getattr(self, f"_{self.word}")(*args, **kwargs)
        finally:
            self.parts.leave()
        if self.word in ("column", "kv"):
            self.parts.add(y)
        return y

    @property
    def is_product(self) -> bool:
        """Whether it computes on this rank the product with the weight that rests here, and nothing else."""
        return self.product is None and self.stream is None and not self.rows

    @property
    def in_graphs(self) -> bool:
        """Whether torch.compile can look into it."""
        return self.word in ("column", "row", "kv", "partial", "sequence", "scattered", "collected", "joined")

    @property
    def graph_key(self) -> Any:
        """What torch.compile finds the same in another one, with which this one can share a graph."""
        product = None if self.product is None else tuple(sorted(getattr(self.product, "keywords", {}).items()))
        own = self.word, self.start, tuple(self.sizes), self.rows, self.collected, self.begins
        return (*own, self.group.axis, id(self.stream), product)

    @property
    def _cut(self) -> bool:
        return self.stream is not None and self.stream.cut

    def _enter(self, x: Tensor) -> Tensor:
        """What all columns multiply, of what this rank has."""
        return collect(x, self.group, TOKENS) if self._cut else copy(x, self.group)

    def _given(self, x: Tensor) -> Tensor:
        return x if self.collected and self._cut else self.shared.copy(x, self._enter)

    def _leave(self, y: Tensor) -> Tensor:
        """Of the sum over the ranks what this rank goes on with."""
        return spread(y, self.group, TOKENS) if self._cut else reduce(y, self.group)

    def _inputs(self) -> int:
        weight: Any = self.module.weight
        return weight.shape[0 if is_transposed(self.module) else 1]

    def _own(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = self.module
        if self.product is not None:
            return self.product(x, module.weight, module.bias)
        forward: Any = type(module).forward
        return forward(module, x, *args, **kwargs)

    def _column(self, x: Tensor) -> Tensor:
        return self._own(self._given(x) if x.is_floating_point() else x)  # an embedding gets numbers

    def _gathered(self, x: Tensor) -> Tensor:
        # Behind the stream, or without one.
        y = self._own(self.shared.copy(x, lambda x: copy(x, self.group)))
        return gather(y, self.group, -1, self.sizes)

    def _scattered(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self.stream is not None
        cut = self.stream.begin(x.shape[TOKENS], self.group)
        return self._own(scatter(x, self.group, TOKENS) if cut else x, *args, **kwargs)

    def _collected(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._own(collect(x, self.group, TOKENS) if self._cut else x, *args, **kwargs)

    def _joined(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self._own(x, *args, **kwargs)
        return gather(y, self.group, TOKENS) if self._cut else y

    def _draws(self, x: Tensor) -> Tensor:
        """Of dropout that works on parts."""
        if self.stream is not None and not self.stream.cut:
            return self._own(x)
        with apart_draws(x, self.group):
            return self._own(x)

    def _kv(self, x: Tensor) -> Tensor:
        module: Any = self.module
        x, rows = self._given(x), list(self.rows)
        bias = module._parameters.get("bias")
        # Through the values as they are now: an engine may have just gathered them.
        return (self.product or F.linear)(x, module.weight[rows], None if bias is None else bias[rows])

    def _row(self, x: Tensor) -> Tensor:
        module: Any = self.module
        bias = module._parameters.get("bias")
        if bias is None:
            return self._leave(self._own(x))
        weight = module.weight.t() if is_transposed(module) else module.weight
        y = self._leave((self.product or F.linear)(x, weight, None))
        return y + bias.to(y.dtype)  # once

    def _experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Each rank has some of the hidden units of every expert; what routes is the same on all."""
        wide = weights.to(torch.promote_types(weights.dtype, x.dtype))  # their gradients are summed before they round
        return reduce(self._own(copy(x, self.group), chosen, copy(wide, self.group)), self.group)

    def _vocabulary(self, tokens: Tensor) -> Tensor:
        rows = self.sizes[self.group.rank]
        local = tokens - self.start
        here = (local >= 0) & (local < rows)
        padding: Any = getattr(self.module, "padding_idx", None)
        if padding is not None:  # a number among all words, which initialization reads
            vars(self.module)["padding_idx"] = padding - self.start if 0 <= padding - self.start < rows else None
        try:
            y = self._own(local.where(here, 0))
        finally:
            if padding is not None:
                vars(self.module)["padding_idx"] = padding
        y = y.masked_fill(~here.unsqueeze(-1), 0)
        if self.begins and self.stream is not None and self.stream.begin(y.shape[TOKENS], self.group):
            return spread(y, self.group, TOKENS)
        return reduce(y, self.group)


class Summed:
    """Makes the gradient of a parameter, of which each rank has a summand, the sum over an axis; of a module's
    parameters those of these ``names``, None: all."""

    def __init__(self, group: ModuleGroup, names: Sequence[str] | None = None) -> None:
        self._group, self.names = group, names

    def __call__(self, grad: Tensor) -> Tensor:
        return self._group.all_reduce(grad)


def is_cut(module: nn.Module) -> bool:
    """Whether it was cut before, for another engine."""
    return _FORWARD in vars(module)


def cut_forward(module: nn.Module) -> Forward | None:
    """What it was cut for does; None: it was not."""
    return vars(module).get(_FORWARD)


def is_streamed(module: nn.Module) -> bool:
    """Whether it was cut for sequence parallelism."""
    forward: Forward | None = vars(module).get(_FORWARD)
    return forward is not None and forward.stream is not None


def is_partial(module: nn.Module) -> bool:
    """Whether gradients of its own parameters are summed over an axis."""
    return _SUMMED in vars(module)


@dataclass(frozen=True)
class ModuleCut:
    """How one module is to be cut.

    Attributes:
        module: a linear layer or an embedding; for ``partial`` and ``experts`` others.
        name: its path, for messages.
        word: of a plan, or ``kv``: a matrix that stays whole, of which this rank computes with some rows.
        blocks: matrices that its rows are made of, one behind the other, each of which is divided.
        unit: rows that stay together, as those of a head.
        rows: of ``kv``.
        stream, collected, begins: see :class:`Forward`.
    """

    module: nn.Module
    name: str
    word: str
    blocks: int = 1
    unit: int = 1
    rows: tuple[int, ...] = ()
    stream: SequenceParallel | None = None
    collected: bool = False
    begins: bool = False

    @property
    def embedding(self) -> bool:
        return isinstance(self.module, nn.Embedding) or (self.word == "vocabulary" and not _is_linear(self.module))

    @property
    def outputs(self) -> int:
        """The dimension of the weight that outputs lie on."""
        return 1 if is_transposed(self.module) or (self.embedding and self.word == "column") else 0

    def lengths(self) -> tuple[int, ...]:
        """The shape of the weight's whole, also where it is tied and was cut already."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return vars(weight).get(_FORWARD, (tuple(weight.shape),))[0]

    def range(self, place: AxisPart) -> tuple[int, int]:
        """This rank's rows of each block, or for ``row`` its columns.

        Raises:
            ConfigError: they do not divide.
        """
        if self.word == "experts":
            return place.divide(self._experts()[1].shape[2], f"the hidden units of each expert in {self.name!r}")
        if self.word == "row":
            start, stop = place.divide(self.lengths()[1 - self.outputs] // self.unit, f"the inputs of {self.name!r}")
        else:
            length = self.lengths()[self.outputs]
            if length % (self.blocks * self.unit):
                raise ConfigError(
                    f"{self.name!r} has {length} rows, which are not {self.blocks} x {self.unit} times some."
                )
            length //= self.blocks * self.unit
            even = self.word == "column"
            start, stop = place.divide(length, f"the outputs of {self.name!r}") if even else place.range(length)
        return start * self.unit, stop * self.unit

    def check(self, place: AxisPart) -> None:
        """
        Raises:
            ConfigError: the module is of no kind that the word is for, or does not divide.
        """
        if self.word in WORKS:
            return
        if self.word == "experts":
            if self.stream is not None:
                raise ConfigError(
                    f"{self.name!r} has experts, which get tokens of no sequence: leave sequence_parallel out."
                )
            self.range(place)
            return
        weight = self.module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            raise ConfigError(
                f"the plan calls {self.name!r} {self.word!r}, but {type(self.module).__name__} has no weight of two "
                "dimensions: give the linear layers and embeddings inside it their words."
            )
        if self.embedding and self.word not in ("vocabulary", "column"):
            raise ConfigError(
                f"the plan calls the embedding {self.name!r} {self.word!r}: its word is 'vocabulary', or 'column' "
                "where each rank needs some of the elements of every vector."
            )
        if self.embedding and getattr(self.module, "max_norm", None) is not None:
            raise ConfigError(f"{self.name!r} has max_norm=, by which it changes rows that it reads: leave it whole.")
        if self.word == "vocabulary" and getattr(self.module, "scale_grad_by_freq", False):
            raise ConfigError(
                f"{self.name!r} has scale_grad_by_freq=, which counts words, and each rank along {place.axis!r} looks "
                "other ranks' words up in a row of its own: leave it whole."
            )
        if self.word != "kv":
            self.range(place)

    def check_forward(self, own: bool) -> None:
        """``own``: the plan is the model's, which knows what its modules compute, but not that a row's bias is added
        behind the sum.

        Raises:
            ConfigError: what the module computes is not known to be the sum, or the parts, of what its parts compute.
        """
        if self.word in (*WORKS, "experts") or (
            own and (self.word != "row" or self.module._parameters.get("bias") is None)
        ):
            return
        kind = type(self.module)
        if kind is NonDynamicallyQuantizableLinear:
            raise ConfigError(
                f"the plan calls {self.name!r} {self.word!r}, but nn.MultiheadAttention reads its weight by itself: "
                "leave the attention whole, or give Parallel(tensor='auto'), which cuts it."
            )
        plain = kind.forward in (nn.Linear.forward, nn.Embedding.forward)
        followed = kind.__module__.startswith("transformers.") and kind.__name__.endswith(_FOLLOWED)
        normed = kind.__name__.endswith("NormedEmbedding") and self.word != "vocabulary"  # it needs whole vectors
        more = [name for name in self.module._parameters if name not in ("weight", "bias")]
        if not (plain or followed) or normed or more:
            does = f"has parameters besides ({', '.join(more)})" if more else "computes in its own way"
            raise ConfigError(
                f"the plan calls {self.name!r} {self.word!r}, but {kind.__name__} {does}, which may be wrong on a part "
                "of its weight: leave it 'replicated', make it an nn.Linear or an nn.Embedding, or, if it is right, "
                "give the plan to the model as its own attribute tensor_plan (a row without a bias)."
            )
        if "forward" in vars(self.module) and not is_cut(self.module):
            raise ConfigError(
                f"the plan calls {self.name!r} {self.word!r}, but its forward was replaced on the module itself: make "
                "the engine first, or leave it 'replicated'."
            )

    def _experts(self) -> tuple[Tensor, Tensor]:
        """``(experts, 2 x hidden units, width)``, gates and up one behind the other, and ``(experts, width, hidden
        units)``.

        Raises:
            ConfigError: the module has other parameters.
        """
        own = {name: p for name, p in self.module._parameters.items() if p is not None}
        first, second = own.get("gate_up_proj"), own.get("down_proj")
        if first is not None and second is not None and len(own) == 2 and first.dim() == second.dim() == 3:
            experts, width, hidden = second.shape
            odd = getattr(self.module, "is_transposed", False) or not getattr(self.module, "is_concatenated", True)
            if tuple(first.shape) == (experts, 2 * hidden, width) and not odd:
                return first, second
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in own.items()) or "none"
        raise ConfigError(
            f"the plan calls {self.name!r} 'experts', which is for parameters gate_up_proj (experts, 2 x hidden, "
            f"width) and down_proj (experts, width, hidden) alone; {type(self.module).__name__} has {shapes}: leave it "
            "whole."
        )


def cut_module(cut: ModuleCut, place: AxisPart, shared: SharedInput, owners: Owners, parts: Parts) -> None:
    """Cuts a module in place; ``shared`` is of its parent, ``owners`` of the model's parameters, ``parts`` of its
    tensors.

    Raises:
        ConfigError: a parameter that it shares with another is cut in two ways.
    """
    module, word, outputs = cut.module, cut.word, cut.outputs
    group = group_of(module, place.axis)
    group.part(place.size)
    if word in ("kv", *WORKS):
        sum_gradients(module, place)
    elif word == "row" and cut.stream is not None:
        sum_gradients(module, place, ["bias"])
    forward = Forward(
        module,
        word,
        group,
        shared,
        rows=cut.rows,
        stream=cut.stream,
        collected=cut.collected,
        begins=cut.begins,
        path=cut.name,
        parts=parts,
    )
    if word in ("partial", "sequence"):
        if not isinstance(module, DROPOUTS):
            return
        forward.word = "draws"
    if word == "experts":
        rows = cut.range(place)
        _cut(owners, module, "gate_up_proj", 1, rows, place, blocks=2)
        _cut(owners, module, "down_proj", 2, rows, place)
    elif word == "row":
        _cut(owners, module, "weight", 1 - outputs, cut.range(place), place)
    elif word not in ("kv", *WORKS):
        start, stop = cut.range(place)
        forward.start = start
        forward.sizes = [each * cut.unit for each in place.sizes(cut.lengths()[outputs] // (cut.blocks * cut.unit))]
        for own, dim in (("weight", outputs), ("bias", 0)):
            if module._parameters.get(own) is not None:
                _cut(owners, module, own, dim, (start, stop), place, cut.blocks)
        if word == "vocabulary" and not cut.embedding:
            forward.word = "gathered"
    if word not in ("kv", "experts", *WORKS):
        adapt_lengths(module)
    vars(module)[_FORWARD] = vars(module)["forward"] = forward


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Linear", "Conv1D")


def _cut(
    owners: Owners, module: nn.Module, name: str, dim: int, rows: tuple[int, int], place: AxisPart, blocks: int = 1
) -> None:
    """Leaves of a parameter those rows of each of its blocks along ``dim``."""
    parameter = module._parameters[name]
    assert parameter is not None
    whole = tuple(parameter.shape)
    done: Any = vars(parameter).get(_FORWARD)
    if done is not None:  # it is tied, and was cut where it was met first
        if done[1:] != (dim, rows, blocks):
            raise ConfigError(
                f"a parameter that {type(module).__name__} shares with another module is cut in two ways: give both "
                "one word."
            )
        return
    hand_over([parameter])  # built under sharded_init(): it is whole here until the next lines, and no other is
    vars(parameter)[_FORWARD] = whole, dim, rows, blocks
    parts = [each.narrow(dim, rows[0], rows[1] - rows[0]) for each in parameter.detach().chunk(blocks, dim)]
    part = torch.cat(parts, dim) if blocks > 1 else parts[0].clone(memory_format=torch.contiguous_format)
    keep_part(parameter, part)
    start = [rows[0] * (of == dim) for of in range(len(whole))]
    for owner, own in owners[id(parameter)]:
        if blocks > 1:
            mark_slice(owner, own, axis=place.axis, dim=dim, blocks=blocks)
        else:
            mark_slice(owner, own, axis=place.axis, whole=whole, start=start)


def sum_gradients(module: nn.Module, place: AxisPart, names: Sequence[str] | None = None) -> None:
    """Gradients of the module's own parameters, or of some of them, are summed over the axis as they arrive, once
    :func:`hear_gradients` was called."""
    group = group_of(module, place.axis)
    group.part(place.size)
    vars(module)[_SUMMED] = Summed(group, names)


def hear_gradients(model: nn.Module) -> Callable[[], None]:
    """Begins to sum what is partial; returns what ends it. Each parameter is heard once, however many modules have it.

    Call it when parameters have their memory: what is made of meta tensors before has no hooks any more.
    """
    heard: dict[int, Any] = {}
    for module in model.modules():
        summed: Summed | None = vars(module).get(_SUMMED)
        if summed is None:
            continue
        for name, parameter in module._parameters.items():
            partial = summed.names is None or name in summed.names
            if partial and parameter is not None and parameter.requires_grad and id(parameter) not in heard:
                heard[id(parameter)] = parameter.register_hook(summed)

    def end() -> None:
        for handle in heard.values():
            handle.remove()

    return end
