"""The sections ``optimizer`` and ``scheduler`` as objects: DeepSpeed's names, defaults and meaning on our classes.

All of them run on the flat shards that an engine gives them. Where DeepSpeed has a fused kernel of its own, here are
PyTorch's fused ones, or those of :mod:`shardfold.optim`.

Where one refuses its arguments, its own words name the argument at best ("Invalid learning rate: -1"), and the section
of the config never: which key is to blame is said here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardfold.compat.deepspeed.config import Settings
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_hyper import MUP_OPTIMIZERS, SCHEDULERS, hyper
from shardfold.compat.deepspeed.ops.adam import FusedAdam
from shardfold.compat.deepspeed.optimizer import EngineOptimizer
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.compat.deepspeed.runtime import lr_schedules
from shardfold.errors import did_you_mean
from shardfold.optim import LAMB, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam
from shardfold.optim.parts import check_number

__all__ = [
    "check_arguments",
    "check_schedule_arguments",
    "check_scheduler",
    "chosen_optimizer",
    "chosen_scheduler",
    "make_optimizer",
    "make_scheduler",
    "naming",
    "tag_for_muon",
]


#: What messages of ``torch.optim`` call arguments, where it is not their name.
ALSO = {"lr": "learning rate", "eps": "epsilon", "betas": "beta parameter", "lr_lambda": "lambda"}


def check_arguments(where: str, kind: Any, given: Mapping[str, Any]) -> None:
    """Whether a class takes these arguments beside its first.

    Args:
        where: the path of the arguments in the config.
        kind: the class.
        given: by name.

    Raises:
        DeepSpeedConfigError: it needs one that is not given, or has none of such a name.
    """
    known = dict(list(inspect.signature(kind).parameters.items())[1:])
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    for name in given:
        if name not in known:
            raise DeepSpeedConfigError(
                f"{where}.{name} is not an argument of {kind.__name__}.{did_you_mean(name, known)}"
            )
    missing = [name for name, each in known.items() if each.default is each.empty and name not in given]
    if missing:
        keys = " and ".join(f"{where}.{name}" for name in missing)
        raise DeepSpeedConfigError(
            f"{keys} {'is' if len(missing) == 1 else 'are'} missing, which {kind.__name__} needs: give a value."
        )


@contextmanager
def naming(where: str, kind: str, given: Mapping[str, Any]) -> Iterator[None]:
    """What is made of the arguments ``given`` inside refuses them with the config's keys.

    Raises:
        DeepSpeedConfigError: what is raised inside, with the path and the value of each key that it is about.
    """
    try:
        yield
    except DeepSpeedConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        words = (str(error) or type(error).__name__).rstrip(".")
        guilty = [name for name in given if _is_named(name, words)]
        guilty = guilty or [name for name, value in given.items() if _has_word(repr(value), words)]
        guilty = guilty or list(given)[: len(given) == 1]
        keys = " and ".join(f"{where}.{name} is {given[name]!r}" for name in guilty) or f"{where} is {dict(given)!r}"
        raise DeepSpeedConfigError(f"{keys}, which {kind} does not take: {words}.") from error


def _is_named(name: str, words: str) -> bool:
    return _has_word(name, words) or (name in ALSO and ALSO[name] in words.lower())


def _has_word(word: str, words: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w.])", words) is not None


Groups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def make_optimizer(
    type: str, params: Mapping[str, Any], groups: Groups, *, model: nn.Module | None = None
) -> Optimizer:
    """The optimizer that ``{"type": type, "params": params}`` means, over parameters or groups of them.

    ``Adam`` decays as AdamW does unless ``adam_w_mode`` is false, as in DeepSpeed. ``Muon`` asks each parameter's
    ``use_muon``; where it is missing, :func:`tag_for_muon` sets it, for which ``model`` is needed.

    Raises:
        DeepSpeedConfigError: the type or an argument is unknown, or is refused; or a value is out of its range.
    """
    found = hyper("optimizer", type, params)
    assert found is not None
    name, arguments = found
    listed = list(groups)
    with naming("optimizer.params", name, arguments):
        if name == "Muon":
            return _muon(listed, arguments, model)
        if name in MAKERS:
            return MAKERS[name](listed, arguments)
        kind = _mup(name) if name in MUP_OPTIMIZERS else getattr(torch.optim, name)
        check_arguments("optimizer.params", kind, arguments)
        return kind(listed, **_tuples(arguments))


def make_scheduler(type: str, params: Mapping[str, Any], optimizer: Optimizer) -> Any:
    """The schedule that ``{"type": type, "params": params}`` means, one of DeepSpeed's five or of PyTorch's.

    Raises:
        DeepSpeedConfigError: the type or an argument is unknown, one is missing, or a value is out of its range.
    """
    name, arguments = _checked_schedule(type, params)
    with naming("scheduler.params", name, arguments):
        return _schedule_class(name)(optimizer, **arguments)


def check_schedule_arguments(type: str, params: Mapping[str, Any]) -> None:
    """What :func:`make_scheduler` refuses without an optimizer.

    Raises:
        DeepSpeedConfigError: the type or an argument is unknown, or one is missing.
    """
    _checked_schedule(type, params)


def _checked_schedule(type: str, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    found = hyper("scheduler", type, params)
    assert found is not None
    check_arguments("scheduler.params", _schedule_class(found[0]), found[1])
    return found


def _schedule_class(name: str) -> Any:
    return getattr(lr_schedules if name in SCHEDULERS else torch.optim.lr_scheduler, name)


def _adam(groups: list[Any], given: dict[str, Any], *, decoupled: bool) -> Optimizer:
    given = dict(given)
    given.pop("fp32_optimizer_states", None)
    decoupled = given.pop("adam_w_mode", True) or decoupled
    # With torch_adam the defaults are PyTorch's too: its AdamW decays by 0.01.
    theirs = given.pop("torch_adam", False)
    if given.get("bias_correction") is False:
        if theirs:
            raise DeepSpeedConfigError(
                "optimizer.params.bias_correction is false, which PyTorch's Adam does not have: leave torch_adam out."
            )
        given = {name: value for name, value in given.items() if name not in ("foreach", "fused")}
        return FusedAdam(groups, adam_w_mode=decoupled, **_tuples(given))
    given.pop("bias_correction", None)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(groups, **{**({} if theirs else {"weight_decay": 0.0}), **_tuples(given)})


def _lamb(groups: list[Any], given: dict[str, Any]) -> Optimizer:
    given = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **given}
    for unsupported in ("amsgrad", "eps_inside_sqrt"):
        if given.pop(unsupported, False):
            raise DeepSpeedConfigError(f"optimizer.params.{unsupported} is true, which Lamb does not have here.")
    trust = (given.pop("min_coeff", 0.01), given.pop("max_coeff", 10.0))
    return LAMB(groups, **_tuples(given), trust_range=trust)


def _signed(kind: Callable[..., Optimizer], groups: list[Any], given: dict[str, Any]) -> Optimizer:
    given = {NAMES.get(name, name): value for name, value in given.items()}
    for unsupported in ("amsgrad", "eps_inside_sqrt"):
        if given.pop(unsupported, False):
            raise DeepSpeedConfigError(
                f"optimizer.params.{unsupported} is true, which {getattr(kind, '__name__', kind)} does not have."
            )
    for idle in ("cuda_aware", "comm_backend_name"):
        given.pop(idle, None)
    for name, low, high in (("trust_range", "min_coeff", "max_coeff"), ("factor_range", "factor_min", "factor_max")):
        if low in given or high in given:
            given[name] = (given.pop(low, RANGES[low]), given.pop(high, RANGES[high]))
    return kind(groups, **_tuples(given))


#: Of ZeroOneAdam: DeepSpeed's names, and ours.
NAMES = {
    "var_freeze_step": "freeze_step",
    "var_update_scaler": "variance_scaler",
    "local_step_scaler": "local_scaler",
    "local_step_clipper": "local_clipper",
}
RANGES = {"min_coeff": 0.01, "max_coeff": 10.0, "factor_min": 0.5, "factor_max": 4.0}


def _lion(groups: list[Any], given: dict[str, Any]) -> Optimizer:
    given = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, **given}
    given.pop("fp32_optimizer_states", None)
    return Lion(groups, **_tuples(given))


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists only, and null for what is left out."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None}


MAKERS: dict[str, Callable[[list[Any], dict[str, Any]], Optimizer]] = {
    "Adam": lambda groups, given: _adam(groups, given, decoupled=False),
    "AdamW": lambda groups, given: _adam(groups, given, decoupled=True),
    "Lamb": _lamb,
    "OneBitAdam": partial(_signed, OneBitAdam),
    "OneBitLamb": partial(_signed, OneBitLamb),
    "ZeroOneAdam": partial(_signed, ZeroOneAdam),
    "Lion": _lion,
}


def tag_for_muon(model: nn.Module) -> None:
    """Sets ``use_muon`` of every parameter that has none: of matrices of hidden layers True, of what an embedding or a
    head holds, of biases and norms False."""
    for name, p in model.named_parameters():
        if not hasattr(p, "use_muon"):
            outer = any(word in name.lower() for word in ("embed", "lm_head"))
            p.use_muon = p.dim() >= 2 and not outer  # pyright: ignore[reportAttributeAccessIssue]


MUON_KEYS, ADAM_KEYS = ("lr", "momentum", "weight_decay"), ("lr", "betas", "eps", "weight_decay")


def _muon(groups: list[Any], given: dict[str, Any], model: nn.Module | None) -> Optimizer:
    """Each group is split in a half of matrices and a half for AdamW. Settings of a group win over those of a half
    (``muon_lr``, ``adam_lr``), which win over those of all."""
    if given.get("per_head_muon"):
        raise DeepSpeedConfigError("optimizer.params.per_head_muon is true, which Muon does not have here.")
    if given.get("ns_method") not in (None, "gram", "standard"):
        raise DeepSpeedConfigError(
            f"optimizer.params.ns_method is {given['ns_method']!r}: it is 'gram' or 'standard', which are one here."
        )
    if given.get("bias_correction") is False:
        raise DeepSpeedConfigError("optimizer.params.bias_correction is false: AdamW beside Muon corrects the bias.")
    if given.get("adam_w_mode") is False:
        raise DeepSpeedConfigError("optimizer.params.adam_w_mode is false: beside Muon there is AdamW only.")
    for rate in ("muon_lr", "adam_lr"):
        if rate in given:
            check_number(Muon, rate, given[rate])
    if model is not None:
        tag_for_muon(model)
    whole = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    made: list[dict[str, Any]] = []
    for group in whole:
        params = [p for p in group["params"] if p.requires_grad]
        if untagged := sum(not hasattr(p, "use_muon") for p in params):
            raise DeepSpeedConfigError(
                f"Muon got {untagged} parameters without use_muon: set p.use_muon = True or False on each, or give "
                "initialize() the model that they are of."
            )
        own = {name: value for name, value in group.items() if name != "params"}
        for muon, keys, rate in ((True, MUON_KEYS, "muon_lr"), (False, ADAM_KEYS, "adam_lr")):
            half = [p for p in params if bool(p.use_muon) is muon]
            settings = _tuples({key: given[key] for key in keys if key in given})
            settings.setdefault("lr", 0.02 if muon else 3e-4)
            if rate in given:
                settings["lr"] = given[rate]
            settings |= {key: value for key, value in own.items() if key in keys}
            if "eps" in settings:
                settings["adamw_eps"] = settings.pop("eps")
            if half:
                made.append({"params": half, "use_muon": muon, "adamw": not muon, **settings})
    return Muon(made, momentum=0.95, weight_decay=0.0, betas=(0.9, 0.95), adamw_eps=1e-10)


def _mup(name: str) -> Callable[..., Optimizer]:
    try:
        import mup  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DeepSpeedConfigError(f"optimizer.type {name!r} is of the package mup: pip install mup.") from None
    return getattr(mup, name)


def chosen_optimizer(given: Any, settings: Settings, model: nn.Module, model_parameters: Any) -> Optimizer | None:
    """The optimizer that ``initialize`` was given, or makes; None for an engine that only runs forward.

    Args:
        given: an optimizer, a callable that makes one of ``model_parameters``, or None.
        settings: with type and arguments of the config's optimizer, if it has one and none is given.
        model: whose parameters are the default.
        model_parameters: parameters or groups of them, in any iterable; None: all of the model's.

    Raises:
        WrongArgument: one of another kind is given; or there is nothing to optimize.
    """
    section = settings.optimizer
    if given is None and section is None:
        return None
    if isinstance(given, Optimizer):
        optimizer = given
    else:
        parameters = list(model.parameters() if model_parameters is None else model_parameters)
        if not parameters:
            raise WrongArgument(
                "initialize(model_parameters=...) is empty, so there is nothing to optimize: give parameters or groups "
                "of them, or leave it out for all of the model's."
            )
        if section is not None:
            optimizer = make_optimizer(*section, parameters, model=model)
        elif callable(given):
            optimizer = given(parameters)
        else:
            raise WrongArgument(
                f"initialize(optimizer=...) was given a {type(given).__name__}: give a torch.optim.Optimizer, or a "
                "function that makes one of parameters."
            )
    if not isinstance(optimizer, Optimizer):
        raise WrongArgument(
            f"the function given as initialize(optimizer=...) made a {type(optimizer).__name__}: it has to return a "
            "torch.optim.Optimizer."
        )
    # DeepSpeed takes away groups that have no parameters. One that a schedule was made with stays: schedules go through
    # groups by their numbers, and write initial_lr into each.
    groups = optimizer.param_groups
    groups[:] = [group for group in groups if group["params"] or "initial_lr" in group]
    return optimizer


def check_scheduler(given: Any, settings: Settings, optimizer: Optimizer) -> None:
    """What can be known of the schedule before the engine is made: see :func:`chosen_scheduler`.

    Raises:
        WrongArgument: it is a schedule of another optimizer.
        DeepSpeedConfigError: the config's lacks an argument, or has an unknown one.
    """
    if given is None and settings.scheduler is not None:
        check_schedule_arguments(*settings.scheduler)
    its = getattr(given, "optimizer", None)
    known = {id(group) for group in optimizer.param_groups}
    if isinstance(its, Optimizer) and not any(id(group) in known for group in its.param_groups):
        raise WrongArgument(
            f"initialize(lr_scheduler=...) was given a {type(given).__name__} of another optimizer than the one that "
            "is used: make it of that one, or give a function that makes it of an optimizer."
        )


def chosen_scheduler(given: Any, settings: Settings, optimizer: EngineOptimizer) -> Any:
    """The schedule that ``initialize`` was given, or makes; None if there is none.

    Args:
        given: a schedule, a callable that makes one of the inner optimizer, or None.
        settings: with type and arguments of the config's scheduler, if it has one.
        optimizer: the one that ``initialize`` returns.
    """
    if given is not None:
        return given(optimizer.optimizer) if callable(given) else given
    if settings.scheduler is None:
        return None
    return make_scheduler(*settings.scheduler, optimizer.optimizer)
