"""DeepSpeed's automatic tensor parallelism: what is cut, and whole values of what was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardfold.comm.mesh_group import MeshGroup
from shardfold.compat.deepspeed.config import Settings
from shardfold.compat.deepspeed.config_parallel import TENSOR_AXIS, Said, plan_words
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.engine.engine import Engine
from shardfold.parallel.plan import AUTO, TensorPlan
from shardfold.parallel.same_batch import same_inputs
from shardfold.plan.placement import Box

__all__ = ["Joining", "check_dtype", "check_same_batch", "plan_of", "set_autotp_mode", "told_of", "tp_model_init"]

_ASKED: WeakKeyDictionary[nn.Module, tuple[int, torch.dtype]] = WeakKeyDictionary()
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: Any = None
) -> nn.Module:
    """Asks ``deepspeed.initialize`` to cut ``model`` over ``tp_size`` ranks, as ``tensor_parallel.autotp_size`` does.

    Args:
        model: whole; it stays so until then.
        tp_size: ranks that share each layer.
        dtype: that of the config given to ``initialize``.
        config: which may say the same.
        tp_group: of as many ranks, which follow each other.

    Returns:
        The model.

    Raises:
        WrongArgument: a ``ValueError``: the config or an earlier call says another size, or the group has one.
    """
    if not isinstance(model, nn.Module) or not isinstance(tp_size, int) or tp_size < 1:
        raise WrongArgument(
            f"tp_model_init(model=..., tp_size={tp_size!r}): it takes a torch.nn.Module and a number of ranks."
        )
    section: Any = config.get("tensor_parallel") if isinstance(config, Mapping) else None
    said = section.get("autotp_size") if isinstance(section, Mapping) else None
    if said not in (None, 0, tp_size):
        raise WrongArgument(
            f"tp_model_init(tp_size={tp_size}), but its config's tensor_parallel.autotp_size is {said}: give the same."
        )
    if tp_group is not None and tp_group.size() != tp_size:
        raise WrongArgument(f"tp_model_init(tp_size={tp_size}): tp_group has {tp_group.size()} ranks; give the same.")
    if _ASKED.get(model, (tp_size, dtype)) != (tp_size, dtype):
        raise WrongArgument(
            f"tp_model_init(tp_size={tp_size}, dtype={dtype}): the model was given {_ASKED[model]} before; give the "
            "same."
        )
    _ASKED[model] = tp_size, dtype
    return model


def set_autotp_mode(training: bool = False) -> None:
    """Nothing: what the config of ``initialize`` says is trained."""


def told_of(model: nn.Module) -> list[Said]:
    """What :func:`tp_model_init` was told of the model, or of a part of it."""
    found = {_ASKED[module] for module in model.modules() if module in _ASKED}
    return [Said(size, "tp_model_init(tp_size=...)") for size, _ in found]


def check_dtype(model: nn.Module, settings: Settings) -> None:
    """
    Raises:
        WrongArgument: :func:`tp_model_init` was told another dtype than the config.
    """
    mine = DTYPES.get(settings.precision.compute)
    narrow = mine in (torch.float16, torch.bfloat16)
    for module in model.modules():
        if narrow and module in _ASKED and _ASKED[module][1] != mine:
            raise WrongArgument(
                f"tp_model_init(dtype={_ASKED[module][1]}), but the config trains in {mine}: give the same."
            )


def plan_of(model: nn.Module, settings: Settings) -> Any:
    """``Parallel(tensor=...)`` for a model that is cut by itself."""
    section: Mapping[str, Any] = settings["tensor_parallel.partition_config"]
    kind = getattr(getattr(model, "config", None), "model_type", None)
    words = plan_words(section, [name for name, _ in model.named_parameters()], kind) if section else {}
    whole = settings["tensor_parallel.vocab_parallel_lm_head"] is False
    if section and not section.get("use_default_specs", True):
        return words
    if not words and not whole:
        return AUTO
    its = {
        path: (word.name, word.blocks) if word.blocks > 1 else word.name
        for path, word in TensorPlan(model, AUTO).words.items()
        if not (whole and word.name == "vocabulary")
    }
    return {**its, **words}


# -- the same batch


def check_same_batch(core: Engine, inputs: Any) -> None:
    """All ranks along the axis of tensor call it.

    Raises:
        WrongCall: on all of them: they read other things.
    """
    if not same_inputs(inputs, TENSOR_AXIS, core.sharded.comm):
        raise WrongCall(
            f"engine(...): the {core.mesh.sizes[TENSOR_AXIS]} ranks that share each layer have different batches: give "
            "the sampler num_replicas=engine.dp_world_size and rank=engine.get_data_parallel_rank()."
        )


# -- whole values


class Joining:
    """Puts together what ranks along the axis of tensor have of each parameter; every rank makes one.

    Args:
        core: the engine underneath.
        ask: sends a text to all ranks and returns theirs, by rank.
    """

    def __init__(self, core: Engine, ask: Any) -> None:
        slots = [
            (parameter, slot)
            for unit in core.units
            for segment in unit.segments
            for parameter, slot in zip(segment.parameters, segment.spec.slots, strict=True)
            if slot.box is not None
        ]
        self._mine = {id(parameter): (slot.whole, slot.box) for parameter, slot in slots if slot.box is not None}
        self._boxes: list[Mapping[str, Any]] = []
        self._names = {id(parameter): slot.name for parameter, slot in slots}
        if TENSOR_AXIS in core.mesh.sizes and core.mesh.sizes[TENSOR_AXIS] > 1:
            self._link = MeshGroup(TENSOR_AXIS, core.sharded.comm)
            said = ask(json.dumps({slot.name: slot.box for _, slot in slots}))
            first = core.rank - self._link.rank  # ranks of tensor follow each other
            self._boxes = [json.loads(text) for text in said[first : first + self._link.size]]

    def whole(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """All of a parameter, of which ``value`` is what this rank has; all ranks call it for the same one."""
        if id(parameter) not in self._mine:
            return value
        shape, _ = self._mine[id(parameter)]
        boxes = [Box(*map(tuple, said[self._names[id(parameter)]])) for said in self._boxes]
        sizes = [box.numel for box in boxes]
        parts = self._link.all_gather(value.reshape(-1), 0, sizes).split(sizes)
        out = value.new_empty(shape)
        for box, part in zip(boxes, parts, strict=True):
            out.view(box.view(shape))[box.slices] = part.view(box.sizes)
        return out

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """What this rank has of a parameter whose whole is ``value``; what is of another shape is left as it is."""
        if id(parameter) not in self._mine or tuple(value.shape) != tuple(self._mine[id(parameter)][0]):
            return value
        shape, box = self._mine[id(parameter)]
        return value.reshape(box.view(shape))[box.slices].reshape(parameter.shape)
