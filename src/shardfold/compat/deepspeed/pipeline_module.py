"""``PipelineModule``: a list of layers that are built and run by stages.

Every layer is one piece of the engine's pipeline. On a rank the layers of its stage are built; those of other stages
have shapes only, on the meta device, until the engine takes them out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.activations.modes import ONLY_INPUTS
from shardfold.compat.deepspeed.comm import init_distributed, world
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from shardfold.compat.deepspeed.runtime.pipe.specs import LayerSpec, TiedLayerSpec
from shardfold.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from shardfold.compat.deepspeed.runtime.utils import partition_balanced, partition_uniform, set_random_seed
from shardfold.compat.deepspeed.together import together

__all__ = ["PipelineModule"]

AXES = ("pipe", "data", "model")


class PipelineModule(nn.Module):
    """Layers that are called one after the other, each with what the one before it gives.

    Args:
        layers: specs, modules or functions, an ``nn.Sequential`` of modules, or a callable that gives one of these.
        num_stages: of the pipeline; it divides the ranks.
        topology: how ranks are shared out, in its place: along ``pipe``, ``data`` and ``model``, in this order.
        loss_fn: called as ``loss_fn(outputs, labels)`` on the last stage; None: the last layer gives the loss.
        seed_layers: each layer is built, and run, with random numbers of its own: values then do not depend on the
            number of stages.
        seed_fn: seeds, in the place of PyTorch's, NumPy's and Python's generators.
        base_seed: of these.
        partition_method: ``"parameters"`` (stages have about as many trainable parameters), ``"uniform"`` (as many
            layers), or ``"type:REGEX"`` (as many layers whose class is so called).
        activation_checkpoint_interval: above 0 layers with parameters run again in backward, each by itself.
        activation_checkpoint_func: is not called: the engine runs layers again.
        checkpointable_layers: names of the classes of layers that do so; None: all.
        dynamic_shape: shapes may differ from batch to batch in any case.

    Attributes:
        forward_funcs: what is called, in order.
        parts: the first layer of each stage, and behind them the number of layers.
        tied_modules: what layers of one key share, by the key.

    Raises:
        RuntimeError: neither ``num_stages`` nor ``topology`` is given.
        WrongArgument: (a ``ValueError``) one of them does not fit the ranks, or there are fewer layers than stages.
        NotImplementedError: the partition method is unknown.
    """

    def __init__(
        self,
        layers: Any,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("PipelineModule() takes num_stages= or topology=.")
        init_distributed()
        self.loss_fn, self.seed_layers, self.seed_fn, self.base_seed = loss_fn, seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers, self.dynamic_shape = checkpointable_layers, dynamic_shape
        self.micro_offset, self.curr_layer = 0, None
        self.tied_modules, self.tied_weight_attrs = nn.ModuleDict(), dict[str, list[str]]()
        with together("PipelineModule()"):
            specs = _listed(layers)
            self._topology = _checked(topology, num_stages)
            self.num_stages: int = self._topology.get_dim("pipe")
            stand_ins = [_shaped(spec) for spec in specs]
            self.parts = _cut(stand_ins, specs, partition_method, self.num_stages)
        self._grid = PipelineParallelGrid(self._topology)
        self.stage_id: int = self._grid.get_stage_id()
        self.forward_funcs: list[nn.Module] = []
        self._mine = range(*self.parts[self.stage_id : self.stage_id + 2])
        self._build(specs, stand_ins)

    # -- layers

    def _build(self, specs: Sequence[Any], stand_ins: Sequence[nn.Module]) -> None:
        uses = Counter(id(spec) for spec in specs if isinstance(spec, nn.Module))
        keys = {str(specs[i].key) for i in self._mine if isinstance(specs[i], TiedLayerSpec)}
        for index, (spec, stand_in) in enumerate(zip(specs, stand_ins, strict=True)):
            tied = str(spec.key) if isinstance(spec, TiedLayerSpec) else None
            if self.seed_layers and (index in self._mine or tied in keys):
                self._seed(self.base_seed + index)
            if isinstance(spec, TiedLayerSpec):
                key = str(spec.key)
                if key not in self.tied_modules:  # with the values of its first place, if it is on this stage at all
                    self.tied_modules[key] = spec.build() if key in keys else stand_in
                    self.tied_weight_attrs[key] = spec.tied_weight_attr
                layer: nn.Module = _Use(self.tied_modules[key], spec.forward_fn)
            elif isinstance(spec, LayerSpec):
                layer = spec.build() if index in self._mine else stand_in
            elif isinstance(spec, nn.Module):
                layer = _Use(spec, None) if uses[id(spec)] > 1 else spec
            else:
                layer = _Function(spec)
            self.add_module(str(index), layer)
            self.forward_funcs.append(layer)

    def _seed(self, seed: int) -> None:
        (self.seed_fn or set_random_seed)(seed)

    def pipeline_pieces(self) -> list[str]:
        """The layers, by their paths."""
        return [str(index) for index in range(len(self.forward_funcs))]

    def stage_begins(self) -> list[str]:
        """The path of the first layer of each stage but the first."""
        return [str(index) for index in self.parts[1:-1]]

    def recomputed(self) -> list[str]:
        """The paths of this stage's layers that run again in backward: not of those that keep their inputs alone, which
        a layer that runs again keeps too."""
        if self.activation_checkpoint_interval <= 0:
            return []
        kinds, found = self.checkpointable_layers, list[str]()
        for path in self.with_parameters():
            layer = self.get_submodule(path)
            inner = layer.module if isinstance(layer, _Use) else layer
            if not isinstance(inner, ONLY_INPUTS) and (kinds is None or type(inner).__name__ in kinds):
                found.append(path)
        return found

    def with_parameters(self) -> list[str]:
        """The paths of this stage's layers that have parameters."""
        return [str(i) for i in self._mine if next(self.forward_funcs[i].parameters(), None) is not None]

    # -- calls

    def forward(self, forward_input: Any) -> Any:
        """All layers; an engine runs those of its stage."""
        if any(p.is_meta for p in self.parameters()):
            raise WrongCall(
                "a PipelineModule of several stages runs by an engine: give it to deepspeed.initialize(), and call "
                "engine.train_batch() or engine.eval_batch()."
            )
        self.micro_offset += 1
        value = forward_input
        for index, layer in enumerate(self.forward_funcs):
            self.curr_layer = index
            if self.seed_layers:
                self._seed(self.base_seed * self.micro_offset + index)
            value = layer(value)
        return value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PipelineModule:
        """What is of other stages has no values that could go to a device."""
        return super()._apply(lambda t: _changed(fn, t), recurse)

    # -- what there is

    def topology(self) -> ProcessTopology:
        """How ranks are shared out."""
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place, and its groups."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def partitions(self) -> list[int]:
        """The same as ``parts``."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer.

        Raises:
            WrongArgument: there is no such layer.
        """
        if not 0 <= layer_idx < len(self.forward_funcs):
            raise WrongArgument(f"stage_owner({layer_idx}): there are {len(self.forward_funcs)} layers.")
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def set_checkpoint_interval(self, interval: int) -> None:
        """Before ``deepspeed.initialize()``; see ``activation_checkpoint_interval``."""
        self.activation_checkpoint_interval = interval

    def allreduce_tied_weight_gradients(self) -> None:
        """Nothing: the engine has summed them over the stages that share them, when a batch ends."""

    def get_additional_losses(self) -> Mapping[str, Any] | None:
        """None: what ``loss_fn`` gives is the loss."""
        return None

    @property
    def world_group(self) -> Any:
        """All ranks."""
        return world.get_world_group()

    @property
    def world_size(self) -> int:
        return world.get_world_size()

    @property
    def global_rank(self) -> int:
        return world.get_rank()

    @property
    def local_rank(self) -> int:
        return world.get_local_rank()


class _Use(nn.Module):
    """One of the places of a layer that has several."""

    def __init__(self, module: nn.Module, function: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module, self._function = module, function

    def forward(self, value: Any) -> Any:
        return self.module(value) if self._function is None else self._function(self.module, value)


class _Function(nn.Module):
    """A function among the layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def _changed(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return fn(tensor)
    try:
        return fn(tensor)
    except NotImplementedError:  # a copy of values
        return tensor


def _listed(layers: Any) -> list[Any]:
    """
    Raises:
        WrongArgument: there is no list of layers.
    """
    given = layers() if callable(layers) and not isinstance(layers, nn.Module) else layers
    if isinstance(given, PipelineModule) or not isinstance(given, Iterable):
        raise WrongArgument(
            f"PipelineModule(layers=...) was given a {type(given).__name__}: give a list of layers or an nn.Sequential."
        )
    return list(given)


def _shaped(spec: Any) -> nn.Module:
    """A layer without values.

    Raises:
        WrongArgument: it is no layer.
        NotImplementedError: it is a pipeline by itself.
    """
    if isinstance(spec, PipelineModule):
        raise NotImplementedError(
            "PipelineModule(layers=...) has a PipelineModule, which is not a layer: list its layers."
        )
    if isinstance(spec, LayerSpec):
        state = torch.random.get_rng_state()
        try:
            with torch.device("meta"):
                return spec.build()
        except Exception:  # it asks for values, or for a device, when it is made
            return spec.build().to("meta")
        finally:
            torch.random.set_rng_state(state)
    if isinstance(spec, nn.Module):
        return spec
    if callable(spec):
        return _Function(spec)
    raise WrongArgument(
        f"PipelineModule(layers=...) has a {type(spec).__name__}: layers are LayerSpec, TiedLayerSpec, torch.nn.Module "
        "or functions."
    )


def _checked(topology: ProcessTopology | None, num_stages: int | None) -> ProcessTopology:
    """
    Raises:
        WrongArgument: the stages do not divide the ranks, or there are other axes, or in another order.
    """
    ranks = world.get_world_size()
    if topology is None:
        assert num_stages is not None
        if not isinstance(num_stages, int) or num_stages < 1 or ranks % num_stages:
            raise WrongArgument(
                f"PipelineModule(num_stages={num_stages!r}): the {ranks} rank{'s' * (ranks > 1)} cannot be divided "
                "into so many stages: give a number that divides them."
            )
        return PipeDataParallelTopology(num_stages, ranks // num_stages)
    axes = list(topology.get_axis_names())
    if "pipe" not in axes or axes != [axis for axis in AXES if axis in axes]:
        raise WrongArgument(
            f"PipelineModule(topology=...) has the axes {', '.join(axes)}: here they are pipe, data, model, in this "
            "order, of which the last varies fastest."
        )
    if topology.world_size() != ranks:
        raise WrongArgument(
            f"PipelineModule(topology=...) has {topology.world_size()} ranks, and there are {ranks}: change the sizes."
        )
    if num_stages not in (None, topology.get_dim("pipe")):
        raise WrongArgument(
            f"PipelineModule(num_stages={num_stages}), but its topology has {topology.get_dim('pipe')}: leave one out."
        )
    return topology


def _cut(layers: Sequence[nn.Module], specs: Sequence[Any], method: str, stages: int) -> list[int]:
    """Where each stage begins, and the number of layers.

    Raises:
        WrongArgument: there are fewer layers than stages, or none is of the class.
        NotImplementedError: the method is unknown.
    """
    if len(layers) < stages:
        raise WrongArgument(
            f"PipelineModule(layers=...) has {len(layers)} layers for {stages} stages: every stage needs one."
        )
    word = method.lower() if isinstance(method, str) else method
    if word == "uniform":
        return partition_uniform(len(layers), stages)
    if word == "parameters":
        weights = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
        return partition_balanced(weights, stages)
    if isinstance(word, str) and word.startswith("type:"):
        wanted = re.compile(method[len("type:") :], re.IGNORECASE)
        weights = [int(bool(wanted.search(_name_of(spec)))) for spec in specs]
        if not any(weights):
            raise WrongArgument(
                f"PipelineModule(partition_method={method!r}): no layer's class is so called; there are "
                f"{', '.join(sorted(set(map(_name_of, specs))))}."
            )
        return partition_balanced(weights, stages)
    raise NotImplementedError(
        f"PipelineModule(partition_method={method!r}) is not implemented: 'parameters', 'uniform' and 'type:REGEX' are."
    )


def _name_of(spec: Any) -> str:
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, nn.Module) else getattr(spec, "__name__", type(spec).__name__)
