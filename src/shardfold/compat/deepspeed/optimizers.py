"""The sections ``optimizer`` and ``scheduler`` as objects: DeepSpeed's names, defaults and meaning on our classes.

All of them run on the flat shards that an engine gives them. Where DeepSpeed has a fused kernel of its own, here are
PyTorch's fused ones, or those of :mod:`shardfold.optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardfold.compat.deepspeed.config_arguments import check_arguments, naming
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_hyper import MUP_OPTIMIZERS, SCHEDULERS, hyper
from shardfold.compat.deepspeed.ops.adam import FusedAdam
from shardfold.compat.deepspeed.runtime import lr_schedules
from shardfold.optim import LAMB, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam
from shardfold.optim.parts import check_number

__all__ = ["check_schedule_arguments", "make_optimizer", "make_scheduler", "tag_for_muon"]

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
