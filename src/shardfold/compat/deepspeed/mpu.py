"""What an ``mpu`` says: an object that tells, in Megatron's words, how ranks are shared out by a model of one's own.

Such a model has its own layers of tensor and their collectives. Its parameters say so: ``tensor_model_parallel`` is
true, ``partition_dim`` is the dimension that is divided, ``partition_stride`` how many matrices lie one behind the
other.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardfold.compat.deepspeed.comm import world
from shardfold.compat.deepspeed.config_parallel import TENSOR_AXIS, Said
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.sharding.slices import mark_slice

__all__ = ["mark_slices", "told_by"]

GIVEN = "initialize(mpu=...)"


def told_by(mpu: Any) -> dict[str, list[Said]]:
    """The sizes of the axes of tensor and sequence; of those that it says nothing of, nothing.

    Raises:
        WrongArgument: it has other axes, or counts ranks in another order.
    """
    if mpu is None:
        return {}
    others = {
        "pipeline": _ask(mpu, 1, "get_pipeline_model_parallel", "get_pipe_parallel"),
        "context": _ask(mpu, 1, "get_context_parallel"),
    }
    for axis, size in others.items():
        if size > 1:
            raise WrongArgument(
                f"{GIVEN} has {size} ranks of {axis}, and such parallelism is not here: stage 3 of zero_optimization "
                "makes a model fit."
            )
    told: dict[str, list[Said]] = {}
    sequence = _ask(mpu, None, "get_sequence_parallel")
    if sequence is not None:
        told["sequence"] = [Said(sequence, GIVEN)]
    by_name = hasattr(mpu, "get_tensor_model_parallel_world_size") or hasattr(mpu, "get_slice_parallel_world_size")
    names = ("get_tensor_model_parallel", "get_slice_parallel", "get_model_parallel")
    tensor = _ask(mpu, 1, *names) if by_name or sequence is None else 1
    if tensor > 1:
        told["tensor"] = [Said(tensor, GIVEN)]
    _check_order(mpu, tensor, sequence or 1)
    return told


def _ask(mpu: Any, otherwise: Any, *axes: str) -> Any:
    """Ranks along an axis, by whichever of its names it has."""
    calls = (f"{axis}_world_size" for axis in axes)
    return next((getattr(mpu, call)() for call in calls if hasattr(mpu, call)), otherwise)


def _check_order(mpu: Any, tensor: int, sequence: int) -> None:
    """
    Raises:
        WrongArgument: sizes do not multiply up, or ranks of tensor do not follow each other.
    """
    ranks, rank = world.get_world_size(), world.get_rank()
    data = _ask(mpu, ranks // (tensor * sequence), "get_data_parallel")
    if data * tensor * sequence != ranks:
        parts = [f"{data} data-parallel"] + [f"{tensor} of tensor"] * (tensor > 1)
        parts += [f"{sequence} of sequence"] * (sequence > 1)
        raise WrongArgument(f"{GIVEN} has {' x '.join(parts)} ranks, which does not multiply up to the {ranks} ranks.")
    places = {"get_tensor_model_parallel_rank": (tensor, 1), "get_sequence_parallel_rank": (sequence, tensor)}
    for name, (size, stride) in places.items():
        if size > 1 and hasattr(mpu, name) and getattr(mpu, name)() != rank // stride % size:
            raise WrongArgument(
                f"{GIVEN}: {name}() is {getattr(mpu, name)()} on rank {rank}: ranks of tensor follow each other, then "
                "those of sequence, then those of data."
            )


def mark_slices(model: nn.Module) -> None:
    """Marks the parameters that layers of the model's own have divided."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if getattr(parameter, "tensor_model_parallel", False):
                dim = getattr(parameter, "partition_dim", 0)
                stride = getattr(parameter, "partition_stride", 1)
                mark_slice(module, name, axis=TENSOR_AXIS, dim=dim, blocks=stride)
