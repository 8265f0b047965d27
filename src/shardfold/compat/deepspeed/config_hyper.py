"""The sections ``optimizer`` and ``scheduler``: which types there are and which arguments they take, as data.

``optimizers.py`` builds from them; here nothing imports torch, so that a config can be judged without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfold.compat.deepspeed.config_check import coerced
from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.errors import did_you_mean

__all__ = ["OPTIMIZERS", "SCHEDULERS", "SIGNED", "hyper", "idle"]

ADAM = {
    "lr": "number",
    "betas": "pair of numbers",
    "eps": "number",
    "weight_decay": "number",
    "bias_correction": "boolean",
    "amsgrad": "boolean",
    "torch_adam": "boolean",
    "adam_w_mode": "boolean",
    "foreach": "boolean",
    "fused": "boolean",
    "fp32_optimizer_states": "boolean",
}
ONE_BIT = {
    "lr": "number",
    "bias_correction": "boolean",
    "betas": "pair of numbers",
    "eps": "number",
    "eps_inside_sqrt": "boolean",
    "weight_decay": "number",
    "amsgrad": "boolean",
    "cuda_aware": "boolean",
    "comm_backend_name": "string",
}
OPTIMIZERS: Mapping[str, Mapping[str, str]] = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "Lamb": {
        "lr": "number",
        "bias_correction": "boolean",
        "betas": "pair of numbers",
        "eps": "number",
        "eps_inside_sqrt": "boolean",
        "weight_decay": "number",
        "max_coeff": "number",
        "min_coeff": "number",
        "amsgrad": "boolean",
    },
    "OneBitAdam": {**ONE_BIT, "freeze_step": "integer"},
    "OneBitLamb": {
        **ONE_BIT,
        "freeze_step": "integer",
        "max_coeff": "number",
        "min_coeff": "number",
        "coeff_beta": "number",
        "factor_max": "number",
        "factor_min": "number",
        "factor_threshold": "number",
    },
    "ZeroOneAdam": {
        **ONE_BIT,
        "var_freeze_step": "integer",
        "var_update_scaler": "integer",
        "local_step_scaler": "integer",
        "local_step_clipper": "integer",
    },
    "Lion": {"lr": "number", "betas": "pair of numbers", "weight_decay": "number", "fp32_optimizer_states": "boolean"},
    "Muon": {
        "lr": "number",
        "momentum": "number",
        "weight_decay": "number",
        "muon_lr": "number",
        "adam_lr": "number",
        "betas": "pair of numbers",
        "eps": "number",
        "torch_adam": "boolean",
        "adam_w_mode": "boolean",
        "ns_method": "string",
        "per_head_muon": "boolean",
        "bias_correction": "boolean",
    },
}
"""Types that DeepSpeed has itself, whatever the letter case, and their arguments."""

SIGNED = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
"""Those whose ranks send signs of momentum."""
TORCH_OPTIMIZERS = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
MUP_OPTIMIZERS = ("MuAdam", "MuAdamW", "MuSGD")
REFUSED = {
    "lbfgs": "it needs a closure",
    "sparseadam": "it needs sparse gradients",
}

WARMUP = {"warmup_num_steps": "integer", "warmup_type": "string", "last_batch_iteration": "integer"}
SCHEDULERS: Mapping[str, Mapping[str, str]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": "rate",
        "lr_range_test_step_size": "integer",
        "lr_range_test_step_rate": "number",
        "lr_range_test_staircase": "boolean",
        "last_batch_iteration": "integer",
    },
    "OneCycle": {
        "cycle_min_lr": "rate",
        "cycle_max_lr": "rate",
        "decay_lr_rate": "number",
        "cycle_first_step_size": "number",
        "cycle_second_step_size": "number",
        "cycle_first_stair_count": "integer",
        "cycle_second_stair_count": "integer",
        "decay_step_size": "number",
        "cycle_momentum": "boolean",
        "cycle_min_mom": "rate",
        "cycle_max_mom": "rate",
        "decay_mom_rate": "number",
        "last_batch_iteration": "integer",
    },
    "WarmupLR": {"warmup_min_lr": "rate", "warmup_max_lr": "rate", **WARMUP},
    "WarmupDecayLR": {"total_num_steps": "integer", "warmup_min_lr": "rate", "warmup_max_lr": "rate", **WARMUP},
    "WarmupCosineLR": {
        "total_num_steps": "integer",
        "warmup_min_ratio": "number",
        "cos_min_ratio": "number",
        **WARMUP,
    },
}
"""The five schedules of DeepSpeed, and their arguments."""

TORCH_SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)

HOST_STATES = "it is of DeepSpeed's optimizer on the host: moments have the dtype that the section bf16 says"
IDLE: Mapping[str, Mapping[str, tuple[tuple[Any, ...], str]]] = {
    **{kind: {"fp32_optimizer_states": ((True,), HOST_STATES)} for kind in ("Adam", "AdamW", "Lion")},
    **{
        kind: {
            "cuda_aware": ((False,), "what carries tensors is found by the device"),
            "comm_backend_name": ((), "what carries tensors is found by the device"),
        }
        for kind in SIGNED
    },
    "Muon": {
        "torch_adam": ((False,), "AdamW beside Muon is the same either way"),
        "ns_method": (("standard",), "Newton-Schulz has one form here, 'standard'; the others differ in rounding"),
    },
}
"""Arguments that change nothing here: the values that ask for nothing, and why."""


def idle(kind: str, params: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Of an optimizer's arguments those that change nothing: name, value and why."""
    rows = IDLE.get(kind, {})
    found = [
        (name, value, rows[name][1])
        for name, value in params.items()
        if name in rows and value is not None and value not in rows[name][0]
    ]
    if kind in ("Adam", "AdamW") and params.get("bias_correction") is False:
        kernels = [(name, params[name]) for name in ("foreach", "fused") if params.get(name) is not None]
        found += [(*kernel, "it chooses among kernels that all correct the bias") for kernel in kernels]
    return found


def hyper(section: str, name: str | None, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The type, in its own letter case, and its arguments; None if the section names no type.

    Raises:
        DeepSpeedConfigError: the type or an argument is unknown or refused, or an argument is of the wrong type.
    """
    if name is None:
        if params:
            raise DeepSpeedConfigError(f"{section}.params are given without {section}.type: name the type.")
        return None
    own = OPTIMIZERS if section == "optimizer" else SCHEDULERS
    torch_names = (*TORCH_OPTIMIZERS, *MUP_OPTIMIZERS) if section == "optimizer" else TORCH_SCHEDULERS
    if section == "optimizer" and name.lower() in REFUSED:
        raise DeepSpeedConfigError(f"optimizer.type is {name!r}, which is refused: {REFUSED[name.lower()]}.")
    found = next((known for known in (*own, *torch_names) if known.lower() == name.lower()), None)
    if found is None:
        raise DeepSpeedConfigError(
            f"{section}.type is {name!r}, which is unknown.{did_you_mean(name, (*own, *torch_names))}"
        )
    if section == "optimizer" and "max_grad_norm" in params:
        raise DeepSpeedConfigError(
            f"optimizer.params.max_grad_norm is {params['max_grad_norm']!r}: clip with the key gradient_clipping."
        )
    return found, _checked(f"{section}.params", found, own[found], params) if found in own else dict(params)


def _checked(where: str, kind: str, known: Mapping[str, str], params: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, each of its type."""
    checked: dict[str, Any] = {}
    for name, value in params.items():
        if name not in known:
            raise DeepSpeedConfigError(f"{where}.{name} is not an argument of {kind}.{did_you_mean(name, known)}")
        try:
            checked[name] = None if value is None else coerced(known[name], value)
        except ValueError:
            article = "an" if known[name][0] in "aio" else "a"
            raise DeepSpeedConfigError(
                f"{where}.{name} is {value!r}, of type {type(value).__name__}: expected {article} {known[name]}."
            ) from None
    return checked
