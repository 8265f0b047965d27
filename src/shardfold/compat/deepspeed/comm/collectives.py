"""Collectives by DeepSpeed's names, done by ``torch.distributed``.

``prof``, ``log_name`` and ``debug`` are for the log of communication; a ``group`` of None is all ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

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


@logged
def broadcast(
    tensor: Tensor, src: int, group: Any = None, async_op: bool = False, prof=False, log_name="broadcast", debug=None
) -> Work | None:
    """``src``'s values become everyone's."""
    return dist.broadcast(tensor, src, group, async_op)


@logged
def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Any = None,
    device: Any = None,
    prof=False,
    log_name="broadcast_object_list",
    debug=None,
) -> None:
    """``src``'s objects become everyone's."""
    dist.broadcast_object_list(object_list, src, group, device)


@logged
def all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="all_reduce",
    debug=None,
) -> Work | None:
    """Reduces over the ranks, in place."""
    return dist.all_reduce(tensor, op, group, async_op)


@logged
def inference_all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="all_reduce",
    debug=None,
) -> Tensor:
    """The tensor, reduced in place as by :func:`all_reduce`; there is nothing to wait for, whatever ``async_op``."""
    dist.all_reduce(tensor, op, group)
    return tensor


@logged
def all_reduce_coalesced(
    tensors: list[Tensor],
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="all_reduce",
    debug=None,
) -> Any:
    """:func:`all_reduce` of several tensors."""
    return _together([dist.all_reduce(tensor, op, group, async_op) for tensor in tensors], async_op)


@logged
def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="reduce",
    debug=None,
) -> Work | None:
    """Reduces over the ranks, for ``dst``."""
    return dist.reduce(tensor, dst, op, group, async_op)


@logged
def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="all_gather",
    debug=None,
) -> Work | None:
    """Everyone's tensors, by rank."""
    return dist.all_gather(tensor_list, tensor, group, async_op)


@logged
def all_gather_object(
    object_list: list[Any], obj: Any, group: Any = None, prof=False, log_name="all_gather_object", debug=None
) -> None:
    """Everyone's objects, by rank."""
    dist.all_gather_object(object_list, obj, group)


@logged
def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="all_gather_into_tensor",
    debug=None,
) -> Work | None:
    """Everyone's tensors, one after another in ``output_tensor``."""
    return all_gather_single(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, debug=None
) -> Work | None:
    """As :func:`all_gather_into_tensor`."""
    return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def all_gather_coalesced(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: Any = None, async_op: bool = False
) -> Any:
    """:func:`all_gather_into_tensor` of several tensors."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _together([all_gather_single(out, own, group=group, async_op=async_op) for out, own in pairs], async_op)


@logged
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="reduce_scatter",
    debug=None,
) -> Work | None:
    """Each rank gets its own of the reduced tensors."""
    return dist.reduce_scatter(output, input_list, op, group, async_op)


@logged
def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="reduce_scatter_tensor",
    debug=None,
) -> Work | None:
    """Each rank gets its own range of the reduced tensor."""
    return reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = SUM,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    debug=None,
) -> Work | None:
    """As :func:`reduce_scatter_tensor`."""
    return reduce_scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)


@logged
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="all_to_all_single",
    debug=None,
) -> Work | None:
    """Each rank sends a range of its tensor to each other; None: ranges of equal size."""
    return dist.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group, async_op)


@logged
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="all_to_all",
    debug=None,
) -> Work | None:
    """Each rank sends a tensor to each other."""
    return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)


@logged
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="gather",
    debug=None,
) -> Work | None:
    """Everyone's tensors, for ``dst``."""
    return dist.gather(tensor, gather_list, dst, group, async_op)


@logged
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof=False,
    log_name="scatter",
    debug=None,
) -> Work | None:
    """``src`` sends a tensor to each."""
    return dist.scatter(tensor, scatter_list, src, group, async_op)


@logged
def barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, prof=False, log_name="barrier", debug=None
) -> Work | None:
    """Waits for every rank."""
    return None if alone() else dist.barrier(group, async_op, device_ids)


@logged
def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof=False,
    log_name="monitored_barrier",
    debug=None,
) -> None:
    """A barrier that names the ranks that did not come; Gloo's."""
    if not alone():
        dist.monitored_barrier(group, timeout, wait_all_ranks)


# -- from one to another


@logged
def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0, prof=False, log_name="send", debug=None) -> None:
    dist.send(tensor, dst, group, tag)


@logged
def recv(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof=False, log_name="recv", debug=None
) -> int:
    return dist.recv(tensor, src, group, tag)


@logged
def isend(
    tensor: Tensor, dst: int, group: Any = None, tag: int = 0, prof=False, log_name="isend", debug=None
) -> Work | None:
    return dist.isend(tensor, dst, group, tag)


@logged
def irecv(
    tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, prof=False, log_name="irecv", debug=None
) -> Work | None:
    return dist.irecv(tensor, src, group, tag)


class P2POp:
    """One of :func:`batch_isend_irecv`: ``op`` is :func:`isend` or :func:`irecv`."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
        if op not in (isend, irecv):
            raise ConfigError(f"P2POp(op={op!r}): it is deepspeed.comm.isend or deepspeed.comm.irecv.")
        self.op = dist.isend if op is isend else dist.irecv
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


@logged
def batch_isend_irecv(p2p_op_list: list[P2POp], prof=False, log_name="batch_isend_irecv", debug=None) -> list[Work]:
    """Starts them all, and gives what can be waited for."""
    return dist.batch_isend_irecv([dist.P2POp(p.op, p.tensor, p.peer, p.group, p.tag) for p in p2p_op_list])


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
