"""Whole parameters for a while, whoever holds them: engines, nobody yet, or this rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from logging import getLogger

import torch
from torch import nn

from shardfold.errors import ConfigError, UsageError
from shardfold.plan.checks import check_flags, described, is_integer, known_arguments
from shardfold.sharding.gathered import gathered
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.partitioned import early_shard, gather, release
from shardfold.sharding.registry import model_of, name_in
from shardfold.sharding.unit import Life

__all__ = ["whole"]

LOG = getLogger("shardfold")


@known_arguments
@contextmanager
def whole(
    parameters: nn.Parameter | Iterable[nn.Parameter | None], *, source: int | None = None, strict: bool = True
) -> Iterator[list[nn.Parameter]]:
    """Makes parameters whole on every rank; all ranks enter with the same ones.

    Args:
        parameters: one or several, of any number of models: built under :func:`shardfold.sharded_init`, held by
            engines, or ordinary ones, which are left alone. None and repetitions do not matter.
        source: the rank whose values are everyone's at the end; None: nothing is changed.
        strict: False: a change without ``source`` is logged, and gone where parameters are split, instead of an error.

    Raises:
        ConfigError: an argument is of a wrong type.
        UsageError: changed without ``source``; or as :meth:`Engine.gathered` does.
        OrderError: ranks ask for different parameters, or only some of them ask.

    Examples:
        >>> with sf.whole(engine.module.parameters()), torch.no_grad():
        ...     tuple(engine.module[0].weight.shape)
        (8, 8)
    """
    if not isinstance(parameters, (torch.Tensor, Iterable)) or isinstance(parameters, str):
        raise ConfigError(f"sf.whole(): the parameters are {described(parameters)}: give one, or several in a list.")
    if source is not None and not is_integer(source, 0):
        raise ConfigError(f"sf.whole(): source= is {described(source)}: it is a rank, or None.")
    check_flags("sf.whole()", strict=strict)
    asked = [parameters] if isinstance(parameters, torch.Tensor) else [p for p in parameters if p is not None]
    if stranger := [p for p in asked if not isinstance(p, torch.Tensor)]:
        raise ConfigError(f"sf.whole(): the parameters have one that is {described(stranger[0])}: give tensors.")
    unique = list({id(p): p for p in asked}.values())
    held: dict[str, tuple[ShardedModel, list[str]]] = {}
    for p in unique:
        model = model_of(p)
        if model is not None:
            held.setdefault(model.comm.mesh.name, (model, []))[1].append(name_in(model, p))
    early = [p for p in unique if early_shard(p) is not None]
    with ExitStack() as stack:
        if early:
            stack.enter_context(_early(early, source, strict))
        for name in sorted(held, key=lambda name: (len(name), name)):  # one order on all ranks
            model, names = held[name]
            stack.enter_context(_held(model, tuple(sorted(names)), source, strict))
        yield unique


@contextmanager
def _early(parameters: Sequence[nn.Parameter], source: int | None, strict: bool) -> Iterator[None]:
    gather(parameters)
    names = [shard.name for p in parameters if (shard := early_shard(p)) is not None]
    versions = [p._version for p in parameters]
    try:
        yield
    except BaseException:
        release(parameters, source=source, failed=True)
        raise
    changed = [n for n, p, version in zip(names, parameters, versions, strict=True) if p._version != version]
    release(parameters, source=source)
    if changed and source is None:
        text = f"{', '.join(changed[:3])} changed inside sf.whole(), which only reads; that is gone now: pass source=."
        if strict:
            raise UsageError(text)
        LOG.warning(text)


@contextmanager
def _held(model: ShardedModel, names: tuple[str, ...], source: int | None, strict: bool) -> Iterator[None]:
    inside, gate = model.gate.under_way, model.gate
    if not inside:
        gate.follow()
    write = source is not None
    with gathered(model, names, write=write, of="params", source=source or 0, strict=strict):
        try:
            yield
        finally:
            if not write and not strict:
                _put_back(model, names)
            gate.secure()
    if not inside:
        gate.follow()


def _put_back(model: ShardedModel, names: Sequence[str]) -> None:
    """What ``parameter.data = x`` put in the place of values that are split is not read in."""
    wanted = set(names)
    for unit in model.units:
        for segment in unit.segments if unit.split and unit.life is Life.GATHERED else ():
            views = segment.views_of(segment.flat)
            for slot, p, view in zip(segment.spec.slots, segment.parameters, views, strict=True):
                if slot.name in wanted and p.shape == view.shape and p.data_ptr() != view.data_ptr():
                    p.data = view
