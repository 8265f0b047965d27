"""Collectives by DeepSpeed's names, done by ``torch.distributed``: a table of name, parameters and what is called.

Behind its own parameters each takes ``prof``, ``log_name`` and ``debug``, which are for the log of communication. A
``group`` of None is all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from shardfold.compat.deepspeed.comm.world import alone
from shardfold.compat.deepspeed.utils.comms_logging import comms_logger, configure, logged
from shardfold.errors import ConfigError
from shardfold.torch_internals import all_gather_single, reduce_scatter_single

__all__ = [
    "P2POp",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "gather",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "irecv",
    "isend",
    "log_summary",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
]

SUM: Any = ReduceOp.SUM


class _All:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> bool:
        return all([work.wait() for work in self.works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def _together(works: list[Any], async_op: bool) -> _All | None:
    return _All(works) if async_op else None


def _named(name: str, what: str, call: Callable[..., Any], *, log_name: str | None = None) -> Callable[..., Any]:
    """``call`` under that name, in the log of communication as ``log_name`` (None: by its own name)."""
    own = list(inspect.signature(call).parameters.values())
    word = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for_log = {"prof": False, "log_name": log_name or name, "debug": None}
    parameters = own + [inspect.Parameter(key, word, default=default) for key, default in for_log.items()]

    def collective(*args: Any, **kwargs: Any) -> Any:
        mine = args[: len(own)] if len(args) <= len(parameters) else args
        return call(*mine, **{key: value for key, value in kwargs.items() if key not in for_log})

    call.__name__ = call.__qualname__ = name  # which errors about arguments name
    collective.__name__ = collective.__qualname__ = name
    collective.__doc__ = what
    timed = logged(collective)
    timed.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return timed


broadcast = _named(
    "broadcast",
    "``src``'s values become everyone's.",
    lambda tensor, src, group=None, async_op=False: dist.broadcast(tensor, src, group, async_op),
)
broadcast_object_list = _named(
    "broadcast_object_list",
    "``src``'s objects become everyone's.",
    lambda object_list, src, group=None, device=None: dist.broadcast_object_list(object_list, src, group, device),
)
all_reduce = _named(
    "all_reduce",
    "Reduces over the ranks, in place.",
    lambda tensor, op=SUM, group=None, async_op=False: dist.all_reduce(tensor, op, group, async_op),
)
inference_all_reduce = _named(
    "inference_all_reduce",
    "The tensor, reduced in place: there is nothing to wait for, whatever ``async_op``.",
    lambda tensor, op=SUM, group=None, async_op=False: (dist.all_reduce(tensor, op, group), tensor)[1],
    log_name="all_reduce",
)
all_reduce_coalesced = _named(
    "all_reduce_coalesced",
    "``all_reduce`` of several tensors.",
    lambda tensors, op=SUM, group=None, async_op=False: _together(
        [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors], async_op
    ),
    log_name="all_reduce",
)
reduce = _named(
    "reduce",
    "Reduces over the ranks, for ``dst``.",
    lambda tensor, dst, op=SUM, group=None, async_op=False: dist.reduce(tensor, dst, op, group, async_op),
)
all_gather = _named(
    "all_gather",
    "Everyone's tensors, by rank.",
    lambda tensor_list, tensor, group=None, async_op=False: dist.all_gather(tensor_list, tensor, group, async_op),
)
all_gather_object = _named(
    "all_gather_object",
    "Everyone's objects, by rank.",
    lambda object_list, obj, group=None: dist.all_gather_object(object_list, obj, group),
)
all_gather_into_tensor = _named(
    "all_gather_into_tensor",
    "Everyone's tensors, one after another in ``output_tensor``.",
    lambda output_tensor, tensor, group=None, async_op=False: all_gather_single(
        output_tensor, tensor, group=group, async_op=async_op
    ),
)
reduce_scatter = _named(
    "reduce_scatter",
    "Each rank gets its own of the reduced tensors.",
    lambda output, input_list, op=SUM, group=None, async_op=False: dist.reduce_scatter(
        output, input_list, op, group, async_op
    ),
)
reduce_scatter_tensor = _named(
    "reduce_scatter_tensor",
    "Each rank gets its own range of the reduced tensor.",
    lambda output_tensor, tensor, op=SUM, group=None, async_op=False: reduce_scatter_single(
        output_tensor, tensor, op=op, group=group, async_op=async_op
    ),
)
all_to_all_single = _named(
    "all_to_all_single",
    "Each rank sends a range of its tensor to each other; None: ranges of equal size.",
    lambda output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False: (
        dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)
    ),
)
all_to_all = _named(
    "all_to_all",
    "Each rank sends a tensor to each other.",
    lambda output_tensor_list, input_tensor_list, group=None, async_op=False: dist.all_to_all(
        output_tensor_list, input_tensor_list, group, async_op
    ),
)
gather = _named(
    "gather",
    "Everyone's tensors, for ``dst``.",
    lambda tensor, gather_list=None, dst=0, group=None, async_op=False: dist.gather(
        tensor, gather_list, dst, group, async_op
    ),
)
scatter = _named(
    "scatter",
    "``src`` sends a tensor to each.",
    lambda tensor, scatter_list=None, src=0, group=None, async_op=False: dist.scatter(
        tensor, scatter_list, src, group, async_op
    ),
)
barrier = _named(
    "barrier",
    "Waits for every rank.",
    lambda group=None, async_op=False, device_ids=None: None if alone() else dist.barrier(group, async_op, device_ids),
)
monitored_barrier = _named(
    "monitored_barrier",
    "A barrier that names the ranks that did not come; Gloo's.",
    lambda group=None, timeout=None, wait_all_ranks=False: (
        None if alone() else dist.monitored_barrier(group, timeout, wait_all_ranks)
    ),
)
send = _named(
    "send",
    "Sends to ``dst``, and waits until it is sent.",
    lambda tensor, dst, group=None, tag=0: dist.send(tensor, dst, group, tag),
)
recv = _named(
    "recv",
    "Waits for a tensor from ``src`` (None: from anyone); gives the sender's rank.",
    lambda tensor, src=None, group=None, tag=0: dist.recv(tensor, src, group, tag),
)
isend = _named(
    "isend",
    "Begins to send to ``dst``.",
    lambda tensor, dst, group=None, tag=0: dist.isend(tensor, dst, group, tag),
)
irecv = _named(
    "irecv",
    "Begins to receive from ``src``; None: from anyone.",
    lambda tensor, src=None, group=None, tag=0: dist.irecv(tensor, src, group, tag),
)
batch_isend_irecv = _named(
    "batch_isend_irecv",
    "Starts them all, and gives what can be waited for.",
    lambda p2p_op_list: dist.batch_isend_irecv(
        [dist.P2POp(p.op, p.tensor, p.peer, p.group, p.tag) for p in p2p_op_list]
    ),
)


# -- that are not in the log


def allgather_fn(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op=False, debug=None) -> Any:
    """As :func:`all_gather_into_tensor`."""
    return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def all_gather_coalesced(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """:func:`all_gather_into_tensor` of several tensors."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together([all_gather_single(out, own, group=group, async_op=async_op) for out, own in pairs], async_op)


def reduce_scatter_fn(
    output_tensor: Tensor, tensor: Tensor, op: Any = SUM, group: Any = None, async_op=False, prof=False, debug=None
) -> Any:
    """As :func:`reduce_scatter_tensor`."""
    return reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)


class P2POp:
    """One of :func:`batch_isend_irecv`: ``op`` is :func:`isend` or :func:`irecv`."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        if op not in (isend, irecv):
            raise ConfigError(f"P2POp(op={op!r}): it is deepspeed.comm.isend or deepspeed.comm.irecv.")
        self.op = dist.isend if op is isend else dist.irecv
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


# -- what this PyTorch can do


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return True


def has_coalescing_manager() -> bool:
    return True


# -- the log


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints the log of operations on rank 0; every rank calls it. ``return_dict``: gives it too."""
    return comms_logger.log_all(show_straggler=show_straggler, return_dict=return_dict)


def reset_log() -> None:
    """Forgets the log."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Whether anything was logged."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """How many operations were logged."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Names of what was logged."""
    return comms_logger.get_operation_names()
