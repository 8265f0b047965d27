"""What a split parameter tells of itself: ``ds_id``, ``ds_shape``, ``ds_status`` and the like.

They are properties of ``torch.nn.Parameter`` that exist for split parameters only (``hasattr`` is False for others),
because ``ds_status`` has to follow an engine that gathers and frees without telling anybody. What is kept for a
parameter is one record in its ``__dict__``, which copies and pickles leave out.

A *part* is as in DeepSpeed: ``ceil(numel / ranks)`` elements per rank, in order, the last ones padded with zeros. An
engine lays parameters out in another way, so what it holds on a rank is not that rank's part; see ``ds_tensor``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.compat.deepspeed.zero import external
from shardfold.compat.deepspeed.zero.status import ZeroParamStatus, ZeroParamType
from shardfold.sharding.freed import FreedParameter
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.partitioned import early_shard
from shardfold.sharding.registry import model_of, models
from shardfold.sharding.segment import Segment
from shardfold.sharding.whole import whole
from shardfold.torch_internals import storage_key

__all__ = ["install", "is_zero_param", "note", "part_size", "place_of", "ranks_of", "uninstall"]

_RECORD = "_deepspeed"
_IDS = itertools.count()


class _Record:
    """What is kept for one parameter."""

    def __init__(self) -> None:
        self.id = next(_IDS)
        self.persist = False
        self.active_sub_modules: set[Any] = set()
        self.opened: Any = None  # the block that ``all_gather()`` opened

    def __reduce__(self) -> Any:  # a copy is an ordinary parameter
        return type(None), ()


def note(parameter: nn.Parameter) -> None:
    """From now on an engine's parameter answers as DeepSpeed's do."""
    install()
    _record(parameter)


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter is split: by ``zero.Init``, or by an engine of stage 3."""
    if not isinstance(parameter, nn.Parameter):
        return False
    if early_shard(parameter) is not None:
        return True
    model = model_of(parameter)
    noted = isinstance(parameter.__dict__.get(_RECORD), _Record)
    return model is not None and (noted or bool(model.layout.rest.over))


def install() -> None:
    """Gives ``torch.nn.Parameter`` and ``torch.nn.Module`` the attributes; again it does nothing."""
    if "ds_id" in vars(nn.Parameter):
        return
    for name, (read, write) in _ATTRIBUTES.items():
        setattr(nn.Parameter, name, _property(name, read, write))
    # A custom autograd Function gets from ``ctx.saved_tensors`` a plain tensor over a parameter's memory.
    Tensor.ds_status = property(_status_over)  # pyright: ignore[reportAttributeAccessIssue]
    for name, method in _METHODS.items():
        setattr(nn.Parameter, name, _property(name, lambda p, method=method: method.__get__(p), None))
    external.install()


def uninstall() -> None:
    """Takes back :func:`install`; an engine that notes another parameter gives the attributes again."""
    if "ds_id" in vars(nn.Parameter):
        for name in (*_ATTRIBUTES, *_METHODS):
            delattr(nn.Parameter, name)
        del Tensor.ds_status  # pyright: ignore[reportAttributeAccessIssue]
    external.uninstall()


def _property(name: str, read: Callable[[nn.Parameter], Any], write: Callable[..., None] | None) -> property:
    def get(self: nn.Parameter) -> Any:
        if is_zero_param(self):
            return read(self)
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: it is not split")

    def put(self: nn.Parameter, value: Any) -> None:
        if not is_zero_param(self):  # one of another's, such as those in the files that DeepSpeed saved
            vars(self)[name] = value
        elif write is not None:
            write(self, value)
        else:
            raise AttributeError(f"{name!r} of a split parameter cannot be set: it follows what holds the parameter")

    return property(get, put)


def _record(parameter: nn.Parameter) -> _Record:
    record = parameter.__dict__.get(_RECORD)
    if not isinstance(record, _Record):
        record = vars(parameter)[_RECORD] = _Record()
    return record


# -- parts ----------------------------------------------------------------------------------------------------------


def ranks_of(parameter: nn.Parameter) -> tuple[int, int]:
    """This rank, and how many ranks a parameter is split over."""
    shard = early_shard(parameter)
    if shard is not None:
        return shard.ranks.comm.mesh.rank, shard.ranks.comm.mesh.world
    model = model_of(parameter)
    return (model.rank, model.world_size) if model is not None else (0, 1)


def part_size(parameter: nn.Parameter) -> int:
    """Elements of a part, with padding."""
    return -(-parameter.numel() // ranks_of(parameter)[1])


def place_of(model: ShardedModel, parameter: nn.Parameter) -> tuple[Segment, int]:
    """Where an engine keeps a parameter: segment and slot."""
    for unit in model.units:
        for segment in unit.segments:
            for slot, other in enumerate(segment.parameters):
                if other is parameter:
                    return segment, slot
    raise LookupError("the engine does not hold this parameter")


def _part(parameter: nn.Parameter) -> Tensor:
    """This rank's part. Of what an engine holds: with the elements that are on this rank, and NaN (0 in integers) for
    those that are on another."""
    shard = early_shard(parameter)
    if shard is not None:
        return _described(shard.values, shard.numel)
    rank, size = ranks_of(parameter)[0], part_size(parameter)
    model = model_of(parameter)
    assert model is not None
    segment, slot = place_of(model, parameter)
    offset, numel = segment.spec.slots[slot].offset, parameter.numel()
    dtype = parameter.dtype
    missing = float("nan") if dtype.is_floating_point else 0
    part = torch.full((size,), missing, dtype=dtype, device=model.device)
    part[max(0, min(size, numel - rank * size)) :].zero_()
    begin = rank * size
    with torch.no_grad():
        if not isinstance(parameter, FreedParameter):
            values = parameter.detach().reshape(-1)[begin : begin + size]
            part[: values.numel()].copy_(values)
            return _described(part, numel)
        source = segment.shard("params") or segment.shard("master")
        assert source is not None
        start = segment.rest_range[0] - offset  # of what is here, in the parameter
        a, b = max(begin, start, 0), min(begin + size, start + source.numel(), numel)
        if a < b:
            part[a - begin : b - begin].copy_(source.part(slice(a - start, b - start)).read())
    return _described(part, numel)


def _described(part: Tensor, numel: int) -> Tensor:
    described: Any = part
    described.ds_numel = part.numel()
    described.status = ZeroParamStatus.AVAILABLE
    described.final_location = None
    return part


# -- gathering by hand ----------------------------------------------------------------------------------------------


class _Done:
    """A handle of something that is done."""

    def wait(self, **kwargs: Any) -> None:
        return


def _listed(parameter: nn.Parameter, others: Iterable[nn.Parameter] | nn.Parameter | None) -> list[nn.Parameter]:
    if others is None:
        return [parameter]
    return [others] if isinstance(others, nn.Parameter) else list(others)


def _all_gather(self: nn.Parameter, param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> _Done | None:
    """Makes the parameters whole until ``partition()``; every rank calls it."""
    for parameter in _listed(self, param_list):
        record = _record(parameter)
        if record.opened is None:
            opened = whole(parameter, strict=False)
            opened.__enter__()
            record.opened = opened
    return _Done() if async_op else None


def _all_gather_coalesced(self: nn.Parameter, params: Iterable[nn.Parameter], **kwargs: Any) -> _Done:
    _all_gather(self, params)
    return _Done()


def _partition(
    self: nn.Parameter,
    param_list: Any = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Ends ``all_gather()``; ``has_been_updated``: each rank keeps its part of the values that it has."""
    for parameter in _listed(self, param_list):
        record = _record(parameter)
        opened, record.opened = record.opened, None
        if opened is None:
            continue
        if has_been_updated:
            _keep_parts(parameter)
        opened.__exit__(None, None, None)


def _keep_parts(parameter: nn.Parameter) -> None:
    shard, model = early_shard(parameter), model_of(parameter)
    if shard is not None:
        shard.keep_own(parameter)
    elif model is not None:
        segment, slot = place_of(model, parameter)
        with torch.no_grad():
            segment.take(slot, parameter)
        torch.autograd.graph.increment_version([parameter])
        for loan in model.loans:
            loan.look()


def _summary(self: Any, use_debug_name: bool = False) -> dict[str, Any]:
    return {
        "id": self.ds_id,
        "status": self.ds_status.name,
        "numel": self.numel(),
        "ds_numel": self.ds_numel,
        "shape": tuple(self.shape),
        "ds_shape": tuple(self.ds_shape),
        "requires_grad": self.requires_grad,
        "grad_shape": tuple(self.grad.shape) if self.grad is not None else None,
        "persist": self.ds_persist,
        "active_sub_modules": self.ds_active_sub_modules,
        "ds_tensor.shape": torch.Size((part_size(self),)),
    }


def _group(parameter: nn.Parameter) -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _status(parameter: nn.Parameter) -> ZeroParamStatus:
    model, gone = model_of(parameter), isinstance(parameter, FreedParameter)
    if model is not None and model.world_size == 1:  # which frees nothing; clients look for what they gather
        unit = next(unit for unit in model.units if any(p is parameter for _, p in unit.parameters()))
        gone = not (unit.pins or model.gate.under_way)
    return ZeroParamStatus.NOT_AVAILABLE if gone else ZeroParamStatus.AVAILABLE


def _status_over(tensor: Tensor) -> ZeroParamStatus:
    """Of a tensor in the memory of a unit, which is there while the unit is gathered only."""
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    if storage is not None and storage.nbytes():
        units = (unit for model in models() if model.layout.rest.over for unit in model.units)
        if any(storage_key(storage) in unit.storages() for unit in units):
            return ZeroParamStatus.AVAILABLE
    raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'ds_status': it is not split")


_ATTRIBUTES: dict[str, tuple[Callable[[nn.Parameter], Any], Callable[..., None] | None]] = {
    "ds_id": (lambda p: _record(p).id, None),
    "ds_shape": (lambda p: p.shape, None),
    "ds_numel": (lambda p: p.numel(), None),
    "ds_status": (_status, None),
    "ds_tensor": (_part, None),
    "ds_param_type": (lambda p: ZeroParamType.PARTITIONED, None),
    "ds_process_group": (_group, None),
    "ds_active_sub_modules": (
        lambda p: _record(p).active_sub_modules,
        lambda p, value: setattr(_record(p), "active_sub_modules", value),
    ),
    "ds_persist": (lambda p: _record(p).persist, lambda p, value: setattr(_record(p), "persist", bool(value))),
    "is_external_param": (lambda p: False, None),
}
_METHODS: dict[str, Callable[..., Any]] = {
    "partition_numel": part_size,
    "aligned_size": lambda p: part_size(p) * ranks_of(p)[1],
    "padding_size": lambda p: part_size(p) * ranks_of(p)[1] - p.numel(),
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
    "ds_summary": _summary,
}
