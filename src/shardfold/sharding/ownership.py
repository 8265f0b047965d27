"""Who owns a model: one engine at a time, from when it is made until it is closed.

    nobody's    --Engine(model)-->    an engine's    --close()-->      whole where this rank has all values, else split
                                                     --release()-->    whole on every rank: nobody's again

An engine that nobody refers to any more, nor its model, is collected and gives back what it took from the process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.comm.agreement import Agreement
from shardfold.errors import ConfigError, UsageError, did_you_mean
from shardfold.sharding.freed import FreedParameter, unseal
from shardfold.sharding.gathered import gathered, listed
from shardfold.sharding.model import ShardedModel, refuse_during
from shardfold.sharding.partitioned import EarlyShard, ShardRanks, early_shard
from shardfold.sharding.pickling import forget_alone
from shardfold.sharding.rebuild import forget
from shardfold.sharding.registry import model_of, name_in
from shardfold.sharding.unit import CLOSED_WAY, Unit
from shardfold.torch_internals import without_user_modes

__all__ = ["claim", "close_split", "mark_closed", "release"]

WHOLE = "this engine is closed, and its model a plain module again: train it as it is, or make a new engine of it"
SPLIT = f"this{CLOSED_WAY.removeprefix('its')}"


def claim(model: nn.Module, agreement: Agreement) -> None:
    """Every rank is about to give ``model`` to a new engine.

    Raises:
        UsageError: on every rank, if on any: an engine that is not closed holds some of its parameters, or one that was
            closed left them split.
    """
    for problem in filter(None, agreement.exchange("claim", _objection(model))):
        raise UsageError(problem)


def _objection(model: nn.Module) -> str:
    if _held(model):
        gc.collect()  # an engine that waits to be collected does not count, and on other ranks it may not wait
    if held := _held(model):
        return (
            f"{listed(held)} belong{'s' * (len(held) == 1)} to another engine, which sf.engine_of(parameter) finds: "
            "close() it first, or release() it to have whole parameters; what shares parameters is put into one model "
            "with one engine."
        )
    left = [n for n, p in model.named_parameters() if isinstance(p, FreedParameter) and early_shard(p) is None]
    return f"{listed(left)} cannot be given to a new engine: {CLOSED_WAY}." if left else ""


def _held(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if model_of(p) is not None]


def mark_closed(model: ShardedModel, reason: str = "") -> None:
    """Nothing can be done with the model any more; ``reason`` is what calls raise with."""
    for unit in model.units:
        unit.close()
    split = any(isinstance(p, FreedParameter) for unit in model.units for _, p in unit.parameters())
    model.close(reason or (SPLIT if split else WHOLE))


def release(model: ShardedModel, of: str, close: Callable[[str], None]) -> nn.Module:
    """See :meth:`Engine.release`; ``close`` ends what trains the model, and takes the reason."""
    if of not in ("params", "master"):
        near = did_you_mean(of, ("params", "master"))
        raise ConfigError(f"engine.release(of={of!r}): parameters become 'params' or 'master'.{near}")
    refuse_during(model.loans, "engine.release()")
    if model.whole is not None:
        raise UsageError(
            "engine.release(): this rank has some stages of the model only: take engine.state_dict(), or save a "
            "checkpoint, and load it into a whole model."
        )
    model.gate.meet(f"engine.release(of={of!r})", follow=True)
    members = [p for unit in model.units for _, p in unit.parameters()]
    values = {key: value for unit in model.units for key, value in _whole(model, unit, of).items()}
    close(WHOLE)
    for p in members:
        unseal(p)
        forget_alone(p)
        p.data = values.pop(id(p))
    for unit in model.units:
        forget(model, unit)
    model.take_units([])
    return model.module


def close_split(model: ShardedModel, close: Callable[[str], None]) -> None:
    """Closes an engine whose model stays usable: what it held in parts is as under :func:`shardfold.sharded_init`.

    So no rank ever has more of it whole than a unit, and another engine takes it over. Every rank calls it.

    Raises:
        OrderError: the other ranks do something else; the engine is open still.
    """
    if model.closed:
        return
    split = [unit for unit in model.units if unit.split]
    if split:
        model.gate.meet("the end of an engine whose model stays split", follow=True)
        ranks = ShardRanks(model.device, hollow=any(unit.hollow for unit in split))
        for unit in split:
            members = [(name_in(model, p), p) for s in unit.segments if s.split for p in s.parameters]
            names = tuple(name for name, _ in members)
            with gathered(model, names, write=False, of="params"), torch.no_grad():
                copies = [p.detach().clone() for _, p in members]
            with torch.no_grad(), without_user_modes():
                for (name, p), copy in zip(members, copies, strict=True):
                    if isinstance(p, FreedParameter):
                        unseal(p)
                    p.data = copy
                    EarlyShard(p, name, ranks, None, same=True)
        ranks.complete()
    close("")


def _whole(model: ShardedModel, unit: Unit, of: str) -> dict[int, Tensor]:
    """All values of a unit's parameters, by ``id``, in memory of their own."""
    members = {name_in(model, p): p for _, p in unit.parameters()}
    with gathered(model, tuple(members), write=False, of="params"), torch.no_grad():
        values = {id(p): p.detach().clone() for p in members.values()}
    trained = {name_in(model, p): p for s in unit.trainable for p in s.parameters}
    if of == "master" and trained:
        with gathered(model, tuple(trained), write=False, of="master") as masters:
            named: Any = masters if len(trained) > 1 else dict.fromkeys(trained, masters)
            values |= {id(p): named[name] for name, p in trained.items()}
    return values
