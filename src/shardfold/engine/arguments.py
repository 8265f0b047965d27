"""What an engine is given, checked before anything is made of it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Container, Sequence, Set
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from shardfold.comm.runtime import Runtime
from shardfold.errors import ConfigError, ModelError, UsageError, did_you_mean, nearest
from shardfold.parallel.parallel import Parallel
from shardfold.parallel.pipeline.stages import check_stages
from shardfold.parallel.sequence import check_choice
from shardfold.plan.checks import check_flags, check_times, described, is_integer, keywords, meant, regrouped
from shardfold.plan.copies import WORDS
from shardfold.plan.rewrites import Overlap
from shardfold.sharding.init import Init

__all__ = [
    "check_accumulate",
    "check_assigned",
    "check_begins",
    "check_closure",
    "check_last",
    "check_loss",
    "check_model",
    "check_number",
    "check_numbers",
    "check_schedule",
    "check_settings",
    "check_weight",
    "given_or",
    "make_schedule",
    "missing",
]

SPREAD = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of torch whose forward or backward does what an engine does."""

SETTINGS = ("lr", "learning_rate", "weight_decay", "betas", "momentum", "eps")
"""Of optimizers of torch, by group."""

RENAMED = {"agree": "max_over_ranks", "synchronize": "outer_step", "activations": "count_saved"}
"""Names that methods of an engine are looked for by, and their own."""

Kind = TypeVar("Kind")


# -- a new engine


def check_model(model: Any) -> None:
    """
    Raises:
        ModelError: it is no module, one that an engine cannot follow or that sends gradients itself, or one that cannot
            train because of ``torch.inference_mode``.
    """
    if isinstance(model, type):
        raise ModelError(f"Engine(model): {model.__name__} is a class: give a module that it makes.")
    if not isinstance(model, nn.Module):
        inner = " Its own model is its .module." * isinstance(getattr(model, "module", None), nn.Module)
        raise ModelError(f"Engine(model): the model is {described(model)}: give a torch.nn.Module.{inner}")
    for path, part in model.named_modules():
        where = f"Engine(model): {path}" if path else "Engine(model): the model"
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{where} is TorchScript, whose parameters and hooks no engine reaches: give the module that it was "
                "made of; torch.compile works under an engine."
            )
        kind = next((k.__name__ for k in type(part).__mro__ if k.__name__ in SPREAD and _of_torch(k)), None)
        if kind is not None:
            raise ModelError(
                f"{where} is wrapped in torch's {kind}, which would split the work a second time: give the plain "
                "module; an engine does the same under layout='ddp' or 'fsdp2'."
            )
    made = next((name for name, p in model.named_parameters() if not is_lazy(p) and p.is_inference()), None)
    if made is not None:
        raise ModelError(
            f"Engine(model): {made} was made under torch.inference_mode(), so it can have no gradients: make the model "
            "outside of it."
        )
    if torch.is_inference_mode_enabled() and any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "Engine(model): nothing that trains can be made under torch.inference_mode(): make the engine outside of "
            "it, and evaluate inside."
        )


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def given_or(given: Any, kind: type[Kind]) -> Kind:
    """What an engine's argument of this ``kind`` is: itself, or one with its defaults where None is given.

    Raises:
        ConfigError: it is of another kind.
    """
    if given is not None and not isinstance(given, kind):
        name, field = kind.__name__, next(iter(getattr(kind, "__dataclass_fields__", ())), "")
        raise ConfigError(f"{name.lower()}= is {described(given)}: give sf.{name}({field}=...), or None.")
    return kind() if given is None else given


def check_settings(parallel: Parallel, runtime: Runtime, init: Init, overlap: Any, accumulate: Any) -> None:
    """
    Raises:
        ConfigError: one of these arguments of an engine is of a wrong type or value.
    """
    units = init.units
    if isinstance(units, (str, type)):
        one = repr(units) if isinstance(units, str) else units.__name__
        raise ConfigError(f"Init(units=...) is one pattern: give a list, Init(units=[{one}]).")
    if units is not None and not (
        isinstance(units, (Sequence, Set)) and all(isinstance(each, (str, type)) for each in units)
    ):
        raise ConfigError(f"Init(units=...) is {described(units)}: it is a list of path patterns and classes, or None.")
    if overlap is not None and not isinstance(overlap, Overlap):
        raise ConfigError(f"overlap= is {described(overlap)}: it is an Overlap, as in Overlap(prefetch=2), or None.")
    if not is_integer(init.seed):
        raise ConfigError(f"Init(seed=...) is {described(init.seed)}: it is an integer.")
    check_times("Runtime", patience=runtime.patience, timeout=runtime.timeout)
    check_flags("Runtime", debug=runtime.debug, checksums=runtime.checksums, exact=runtime.exact)
    if runtime.survive is not None and runtime.survive not in WORDS:
        raise ConfigError(
            f"Runtime(survive={described(runtime.survive)}): it says who holds copies of states, or None."
            f"{did_you_mean(str(runtime.survive), WORDS)}"
        )
    check_flags("Parallel", sequence_parallel=parallel.sequence_parallel)
    check_accumulate(accumulate)
    check_choice(parallel.attention)
    check_stages(parallel.stages)


def check_accumulate(accumulate: Any) -> None:
    """
    Raises:
        ConfigError: it is no number of micro-batches.
    """
    if not is_integer(accumulate, 1):
        raise ConfigError(
            f"accumulate={described(accumulate)}: it is the number of micro-batches per step, an integer >= 1."
        )


def _is_settable(found: object) -> bool:
    return isinstance(found, property) and found.fset is not None


def check_assigned(engine: object, name: str, value: Any, own: Container[str], *, derived: bool) -> None:
    """What acts may be assigned to an engine that is made: a property that takes values, another function in place of a
    method, and what a class ``derived`` from the engine's, whose ``own`` names are given, has beside them.

    Raises:
        ConfigError: a public name that would do nothing.
    """
    if name.startswith("_") or (derived and name not in own):
        return
    kind = type(engine)
    there = getattr(kind, name, None)
    if _is_settable(there) or (callable(value) and inspect.isfunction(there)):
        return
    options = keywords(kind) or []
    if name in options or regrouped([name], options):
        hint = f" An engine takes {regrouped([name], options) or f'{name}='} when it is made."
    elif name in SETTINGS:
        hint = " The optimizer's settings are in engine.optimizer.param_groups."
    elif name in own:
        hint = f" engine.{name} is only to be read."
    else:
        hint = meant(name, [each for each, found in inspect.getmembers(kind) if _is_settable(found)])
    raise ConfigError(f"engine.{name} = {described(value)} would do nothing.{hint}")


def check_schedule(schedule: Any, optimizer: Any) -> None:
    """
    Raises:
        ConfigError: ``schedule`` is no schedule, or was made of another optimizer than the engine's, or there is none.
    """
    if schedule is not None and optimizer is None:
        raise ConfigError("lr_schedule= needs an optimizer: pass optimizer= to the Engine too.")
    if schedule is None or (callable(schedule) and not isinstance(schedule, LRScheduler)):
        return
    kind = type(schedule).__name__
    if not callable(getattr(schedule, "step", None)):
        raise ConfigError(
            f"lr_schedule= was given a {kind}: it is a torch.optim.lr_scheduler, or makes one of the optimizer."
        )
    if getattr(schedule, "optimizer", None) is not optimizer or optimizer is None:
        raise ConfigError(
            f"lr_schedule= was given a {kind} over another optimizer than optimizer=: give both as objects, the "
            f"schedule made of that optimizer, or give what makes one, such as lr_schedule=partial({kind}, ...)."
        )
    _refuse_metric(schedule)


def make_schedule(schedule: Any, optimizer: Any) -> Any:
    """The schedule of an engine: ``schedule`` itself, or what it makes of the optimizer; None without one.

    Raises:
        ConfigError: its ``step()`` asks for a metric.
    """
    if schedule is None or optimizer is None:
        return None
    made = schedule if isinstance(schedule, LRScheduler) or not callable(schedule) else schedule(optimizer)
    _refuse_metric(made)
    return made


# -- its methods


def check_loss(call: str, loss: Any) -> None:
    """
    Raises:
        UsageError: it is no tensor.
    """
    if not isinstance(loss, Tensor):
        lost = ", without .item()" * isinstance(loss, (int, float))
        raise UsageError(f"{call}: the loss is of type {type(loss).__name__}: give the tensor that forward made{lost}.")


def check_begins(call: str, loss: Tensor, model: nn.Module) -> None:
    """Whether a backward of ``model`` can begin at this loss.

    Raises:
        UsageError: it is not one number, or does not require grad.
    """
    if loss.numel() != 1:
        raise UsageError(
            f"{call}: the loss has shape {tuple(loss.shape)}, but a backward begins at one number: give loss.mean() or "
            "loss.sum(); for gradients of outputs call their own backward(gradient)."
        )
    if loss.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"{call}: the loss does not require grad, because all of the model's parameters are frozen "
            "(requires_grad=False), so nothing trains: unfreeze what is to be trained, or leave the backward out."
        )
    raise UsageError(
        f"{call}: the loss, of {str(loss.dtype).removeprefix('torch.')}, does not require grad, so no parameter leads "
        "to it: it was detached, is of integers, is made of frozen parameters only, or forward ran under "
        "torch.no_grad(): give what forward made in training."
    )


def check_closure(closure: Any) -> None:
    """
    Raises:
        UsageError: there is one.
    """
    if closure is not None:
        raise UsageError(
            f"engine.step(): {described(closure)} was given as a closure, which it does not call: run forward and "
            "engine.backward(loss), then engine.step()."
        )


def check_last(last: Any) -> None:
    """
    Raises:
        ConfigError: it is neither True nor False nor None.
    """
    if last is not None:
        check_flags("engine", last_micro_batch=last)


def check_numbers(call: str, values: Any) -> None:
    """
    Raises:
        ConfigError: they are no list of numbers, or of tensors of one.
    """
    many = isinstance(values, Collection) and not isinstance(values, (str, bytes))
    if not many or (isinstance(values, Tensor) and values.ndim != 1):
        raise ConfigError(f"{call}: the values are {described(values)}: give a list of numbers.")
    for value in values:
        check_number(call, value)


def check_number(call: str, value: Any) -> None:
    """
    Raises:
        ConfigError: it is no number, and no tensor of one.
    """
    try:
        if not isinstance(value, (str, bytes)):
            float(value)
            return
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise ConfigError(f"{call}: the value is {described(value)}: give a number, or a tensor of one.")


def check_weight(call: str, weight: Any) -> None:
    """
    Raises:
        ConfigError: it is no finite number >= 0, and no tensor of one.
    """
    check_number(call, weight)
    if not 0 <= float(weight) < inf:
        raise ConfigError(f"{call}: the weight is {float(weight)}: give a number >= 0, such as a count of tokens.")


def missing(engine: object, name: str, model: nn.Module | None, optimizer: object) -> AttributeError:
    """The error of a name that an engine does not have, which says who has it."""
    plain = f"{type(engine).__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(plain)
    if name in RENAMED:
        return AttributeError(f"{plain}. Did you mean {RENAMED[name]!r}?")
    for place, other in (("engine.module", model), ("engine.optimizer", optimizer)):
        if other is not None and hasattr(other, name):
            return AttributeError(f"{plain}: an engine is not a module, and has one: use {place}.{name}.")
    near = nearest(name, [known for known in dir(type(engine)) if not known.startswith("_")])
    return AttributeError(plain + (f". Did you mean {near!r}?" if near else "."))


def _refuse_metric(schedule: Any) -> None:
    try:
        inspect.signature(schedule.step).bind()
    except ValueError:  # of C, which tells nothing
        return
    except TypeError as error:
        raise ConfigError(
            f"lr_schedule= cannot be a {type(schedule).__name__}, whose step() wants what no engine knows ({error}): "
            "make it yourself of engine.optimizer and call its step(metric) behind engine.step()."
        ) from None
