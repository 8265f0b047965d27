"""From a model to an ONNX graph: a few of its layers are exported by PyTorch, and their nodes repeated for the others.

What PyTorch's exporter takes grows with the number of layers, and layers of one kind become the same nodes. So a model
with only as many layers as it has kinds is exported, every node knows from which module it is, and the nodes of a layer
are copied for each other layer of its kind, with that one's weights. Weights are never copied into the graph: it refers
to the model's own tensors until it is written.

Parameters are inputs of the graph while it is optimized, so that nothing is computed from their values or joined with
others that happen to be equal.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn

__all__ = ["LayerGraph", "LayersDiffer", "ModelCall", "layer_kinds", "past_names", "present_names", "templates_of"]

ROOT = "model"
"""Under which a wrapper has the model."""

PRODUCER = "shardfold"
TOKENS = "tokens_there"
SCOPES = "pkg.torch.onnx.name_scopes"
NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index")
"""What modules call their own place among the layers, which makes no other kind of them."""


class LayersDiffer(Exception):
    """The layers of a model cannot be told apart from the rest of its graph, or from each other."""


@dataclass
class ModelCall:
    """How a model is called where it is exported.

    Attributes:
        module: takes the inputs in order, with past keys and values as one list of pairs behind them, and has the model
            as its ``model``.
        inputs: names of the inputs.
        examples: of each input.
        dynamic: of each input the axes that may have any size, with their names.
        outputs: names of the outputs, with the names of all axes; an axis of fixed size has None.
        past: an example of the past of one layer, (B, heads, P, width) each; None: the model keeps none.
        packed: behind the inputs comes one that the graph makes itself: where ``attention_mask`` is not 0.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    examples: tuple[Tensor, ...]
    dynamic: tuple[Mapping[int, str], ...]
    outputs: dict[str, dict[int, str]]
    past: tuple[Tensor, Tensor] | None = None
    packed: bool = False


PAST_AXES = {0: "batch_size", 2: "past_sequence_length"}
PRESENT_AXES = {0: "batch_size", 2: "total_sequence_length"}


def layer_kinds(layers: Iterable[nn.Module]) -> list[int]:
    """Of each layer the first one that is built and set up as it is."""
    signs = [_sign(layer) for layer in layers]
    return [signs.index(sign) for sign in signs]


def _sign(layer: nn.Module) -> str:
    said: list[str] = []
    for path, module in layer.named_modules():
        values = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str | tuple) and name not in NUMBERS
        }
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        said.append(f"{path} {type(module).__qualname__} {sorted(values.items())} {shapes}")
    return "\n".join(said)


def templates_of(kinds: Sequence[int]) -> list[int]:
    """Of each layer the one whose nodes it has: the first of its kind, but not the very first layer, which begins
    from other values than the layers behind it do."""
    found: list[int] = []
    for place, kind in enumerate(kinds):
        later = next((other for other in range(1, place) if kinds[other] == kind), place)
        found.append(later)
    return found


class LayerGraph:
    """A model as a graph of ONNX.

    Args:
        call: how it is called.
        layers: where the list of its layers is, and that list; None: all is exported as it is.

    Raises:
        LayersDiffer: the graph cannot be repeated by layers.
    """

    def __init__(self, call: ModelCall, layers: tuple[str, nn.ModuleList] | None, num_layers: int) -> None:
        self.call = call
        model: Any = call.module.model
        self.exported = num_layers
        if layers is None:
            self.graph_model = _exported(call, num_layers)
        else:
            path, every = layers
            templates = templates_of(layer_kinds(every))
            self.exported = max(templates) + 1
            with _only_first(model, path, every, self.exported):
                self.graph_model = _exported(call, self.exported)
            if self.exported < num_layers:
                _Repeated(self.graph_model, f"{ROOT}.{path}", every, self.exported).repeat(templates)
        if call.packed:
            _find_tokens(self.graph_model.graph)
        _finish(self.graph_model, call, num_layers)

    @property
    def operators(self) -> list[str]:
        """Names of the operators, each once."""
        return sorted({node.op_type for node in self.graph_model.graph.all_nodes()})


@contextmanager
def _only_first(model: nn.Module, path: str, layers: nn.ModuleList, count: int) -> Iterator[None]:
    """The model has only its first layers inside."""
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
    changed = [(c, c.num_hidden_layers) for c in configs.values() if getattr(c, "num_hidden_layers", 0) == len(layers)]
    setattr(owner, name, layers[:count])
    try:
        for config, _ in changed:
            config.num_hidden_layers = count
        yield
    finally:
        setattr(owner, name, layers)
        for config, before in changed:
            config.num_hidden_layers = before


def _exported(call: ModelCall, layers: int) -> ir.Model:
    """By PyTorch's exporter; parameters and buffers are initializers with the names that the wrapper has for them."""
    examples: tuple[Any, ...] = call.examples
    any_size: Any = torch.export.Dim.DYNAMIC
    dynamic: list[Any] = [dict.fromkeys(axes, any_size) for axes in call.dynamic]
    if call.past is not None:
        # One tensor in two places would be one input.
        examples = (*examples, [(call.past[0].clone(), call.past[1].clone()) for _ in range(layers)])
        of_past = dict.fromkeys(PAST_AXES, any_size)
        dynamic.append([(of_past, of_past) for _ in range(layers)])
    with torch.no_grad(), _quiet_exporter():
        program = torch.export.export(call.module, examples, dynamic_shapes=(tuple(dynamic),), strict=False)
        made: Any = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
        model: ir.Model = made.model
        _optimize(model, call)
    _name(model, call, layers)
    return model


def _optimize(model: ir.Model, call: ModelCall) -> None:
    from onnxscript import optimizer

    graph = model.graph
    tensors = {**dict(call.module.named_parameters()), **dict(call.module.named_buffers())}
    kept = {name: value.const_value for name, value in graph.initializers.items() if name in tensors}
    values = [graph.initializers.pop(name) for name in kept]
    graph.inputs.extend(values)
    for value in values:
        value.const_value = None
    optimizer.optimize(model)
    for value in values:
        graph.inputs.remove(value)
        assert value.name is not None
        if value.uses():
            value.const_value = kept[value.name]
            graph.register_initializer(value)


def _name(model: ir.Model, call: ModelCall, layers: int) -> None:
    """Gives inputs and outputs their names."""
    graph = model.graph
    names = [*call.inputs, *[TOKENS] * call.packed]
    outputs = [*call.outputs]
    if call.past is not None:
        names += [name for layer in range(layers) for name in past_names(layer)]
        outputs += [name for layer in range(layers) for name in present_names(layer)]
    assert len(graph.inputs) == len(names) and len(graph.outputs) == len(outputs)
    taken = {*names, *outputs}
    for node in graph:
        for value in node.outputs:
            if value.name in taken:
                value.name = f"{value.name}.within"
    for value, name in zip([*graph.inputs, *graph.outputs], [*names, *outputs], strict=True):
        value.name = name


def _find_tokens(graph: ir.Graph) -> None:
    """The graph finds by itself where tokens are: the places where the mask is not 0."""
    by_name = {value.name: value for value in graph.inputs}
    given, mask = by_name[TOKENS], by_name["attention_mask"]
    flat = ir.Value(name=f"{TOKENS}.flat", const_value=ir.tensor([-1], name=f"{TOKENS}.flat"))
    graph.register_initializer(flat)
    rows = ir.node("Reshape", [mask, flat])
    found = ir.node("NonZero", rows.outputs)
    there = ir.node("Reshape", [found.outputs[0], flat])
    graph.inputs.remove(given)
    ir.convenience.replace_all_uses_with(given, there.outputs[0])
    first = graph[0]
    graph.insert_before(first, [rows, found, there])


def past_names(layer: int) -> tuple[str, str]:
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    return f"present.{layer}.key", f"present.{layer}.value"


class _Repeated:
    """Copies the nodes of layers for others."""

    def __init__(self, model: ir.Model, prefix: str, layers: nn.ModuleList, exported: int) -> None:
        self.graph, self.prefix, self.layers, self.exported = model.graph, prefix, layers, exported
        self.segments: list[list[ir.Node]] = [[] for _ in range(exported)]
        self._tensors = {
            **{f"{prefix}.{name}": value for name, value in layers.named_parameters(remove_duplicate=False)},
            **{f"{prefix}.{name}": value for name, value in layers.named_buffers(remove_duplicate=False)},
        }
        self._owner: dict[int, int] = {}
        for node in self.graph:
            kinds = {attribute.type for attribute in node.attributes.values()}
            if kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}:
                raise LayersDiffer("a layer has a graph inside of a node")
            place = self._layer(node)
            if place is not None:
                self._owner[id(node)] = place
                self.segments[place].append(node)
        self.carried = [self._carried(place) for place in range(exported)]

    def _layer(self, node: ir.Node) -> int | None:
        """The layer that a node is of: by the module that it was in, or the past that it reads. A node that was put in
        the place of others knows no module: it is where its inputs are."""
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
        for scope in scopes:
            if (number := self._number(scope)) is not None:
                return number
        inputs = [value for value in node.inputs if value is not None]
        for value in inputs:
            if value.is_graph_input() and (value.name or "").startswith("past_key_values") and node.op_type != "Shape":
                return int((value.name or "").split(".")[1])  # sizes are the same in all layers
        if scopes:
            return None
        places = [self._owner[id(made)] for value in inputs if id(made := value.producer()) in self._owner]
        return max(places, default=None)

    def _number(self, name: str) -> int | None:
        if not name.startswith(f"{self.prefix}."):
            return None
        first = name[len(self.prefix) + 1 :].partition(".")[0]
        return int(first) if first.isdigit() else None

    def _own(self, value: ir.Value) -> bool:
        """Whether a value is a layer's weight or past."""
        name = value.name or ""
        return self._number(name) is not None or (value.is_graph_input() and name.startswith("past_key_values"))

    def _carried(self, place: int) -> ir.Value:
        """The one value that a layer hands on: of its own weights, and used behind it."""
        within = {id(node) for node in self.segments[place]}
        follows: set[int] = set()
        found: dict[int, ir.Value] = {}
        for node in self.segments[place]:
            if not any(value is not None and (self._own(value) or id(value) in follows) for value in node.inputs):
                continue
            for value in node.outputs:
                follows.add(id(value))
                if not value.is_graph_output() and any(id(use.node) not in within for use in value.uses()):
                    found[id(value)] = value
        if len(found) != 1:
            raise LayersDiffer(f"layer {place} hands on {len(found)} values")
        return next(iter(found.values()))

    def repeat(self, templates: Sequence[int]) -> None:
        """Makes the other layers, each by its template, and puts them behind the last that was exported."""
        last = self.carried[-1]
        behind = [use for use in last.uses() if id(use.node) not in self._owner]
        at = self.segments[-1][-1]
        presents = [value for value in self.graph.outputs if (value.name or "").startswith("present.")]
        for place in range(self.exported, len(templates)):
            template = templates[place]
            into, outputs = self._copied(place, template, last)
            self.graph.insert_after(at, into)
            at = into[-1]
            last = outputs[id(self.carried[template])]
            for value in presents:
                if id(value) in outputs and value.name in present_names(template):
                    copied = outputs[id(value)]
                    copied.name = present_names(place)[present_names(template).index(value.name)]
                    self.graph.outputs.append(copied)
        for use in behind:
            use.node.replace_input_with(use.idx, last)
        self.graph.sort()

    def _copied(self, place: int, template: int, last: ir.Value) -> tuple[list[ir.Node], dict[int, ir.Value]]:
        """Nodes of a layer with their outputs by those of the template's."""
        new: dict[int, ir.Value] = {id(self.carried[template - 1]): last}
        made: list[ir.Node] = []
        for node in self.segments[template]:
            inputs: list[ir.Value | None] = []
            for value in node.inputs:
                if value is None or id(value) in new:
                    inputs.append(value if value is None else new[id(value)])
                elif self._own(value):
                    new[id(value)] = self._of_layer(value, place, template)
                    inputs.append(new[id(value)])
                else:
                    inputs.append(value)
            outputs = [
                ir.Value(name=f"{value.name}.{place}", type=value.type, shape=value.shape) for value in node.outputs
            ]
            new |= {id(old): value for old, value in zip(node.outputs, outputs, strict=True)}
            copied = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                node.attributes.values(),
                outputs=outputs,
                version=node.version,
                name=f"{node.name}.{place}",
            )
            made.append(copied)
        return made, new

    def _of_layer(self, value: ir.Value, place: int, template: int) -> ir.Value:
        """A layer's own weight, or past, in the place of its template's."""
        name = value.name or ""
        number = self._number(name)
        if number is None:
            which = past_names(int(name.split(".")[1])).index(name)
            if int(name.split(".")[1]) != template:
                return value  # a size, which is the same in all layers
            made = ir.Value(name=past_names(place)[which], type=value.type, shape=value.shape)
            self.graph.inputs.append(made)
            return made
        if number != template:
            raise LayersDiffer(f"layer {template} reads weights of layer {number}")
        theirs = f"{self.prefix}.{place}{name[len(f'{self.prefix}.{number}') :]}"
        if theirs in self.graph.initializers:
            return self.graph.initializers[theirs]
        made = ir.Value(name=theirs, type=value.type, shape=value.shape)
        made.const_value = tensor_of(self._tensors[theirs], theirs)
        self.graph.register_initializer(made)
        return made


def tensor_of(tensor: Tensor, name: str) -> ir.TensorProtocol:
    """A tensor of PyTorch in a graph, by reference."""
    return TorchTensor(tensor.detach(), name=name)


def _finish(model: ir.Model, call: ModelCall, layers: int) -> None:
    """Inputs and outputs in order with the names of their axes, and weights as matrix products read them."""
    graph = model.graph
    model.producer_name = PRODUCER
    model.producer_version = None
    by_name = {value.name: value for value in [*graph.inputs, *graph.outputs]}
    inputs = dict(zip(call.inputs, call.dynamic[: len(call.inputs)], strict=True))
    outputs = dict(call.outputs)
    if call.past is not None:
        for layer in range(layers):
            inputs |= dict.fromkeys(past_names(layer), PAST_AXES)
            outputs |= dict.fromkeys(present_names(layer), PRESENT_AXES)
    for named in (inputs, outputs):
        for name, axes in named.items():
            value = by_name[name]
            sizes: list[Any] = list(value.shape or ())
            value.shape = ir.Shape([axes.get(place, size) for place, size in enumerate(sizes)])
    graph.inputs[:] = [by_name[name] for name in inputs if name in by_name]
    graph.outputs[:] = [by_name[name] for name in outputs]
    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = None  # sizes have names of the exporter's own
    _turn_weights(graph)


def _turn_weights(graph: ir.Graph) -> None:
    """Weights that are only read transposed are stored transposed: quantizers and TensorRT want them so."""
    for node in list(graph):
        if node.op_type != "Transpose":
            continue
        weight = node.inputs[0]
        if weight is None or not weight.is_initializer() or weight.const_value is None or len(weight.uses()) != 1:
            continue
        order = node.attributes.get_ints("perm", list(range(len(weight.const_value.shape)))[::-1])
        raw: Any = weight.const_value
        tensor = raw.raw if isinstance(raw.raw, Tensor) else torch.from_numpy(raw.numpy())
        turned = tensor.permute(*order)
        assert weight.name is not None
        name = weight.name
        del graph.initializers[name]
        made = ir.Value(name=name, type=weight.type, shape=ir.Shape(turned.shape))
        made.const_value = ir.LazyTensor(
            lambda turned=turned, name=name: tensor_of(turned.contiguous(), name),
            dtype=raw.dtype,
            shape=ir.Shape(turned.shape),
            name=name,
        )
        graph.register_initializer(made)
        ir.convenience.replace_all_uses_with(node.outputs[0], made)
        graph.remove(node, safe=True)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Leaves out what PyTorch's exporter says of its own inside: old names that it uses, and torchvision, which is not
    needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
