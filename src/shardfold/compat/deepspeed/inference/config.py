"""What ``deepspeed.init_inference`` is told: every key, and what it does here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_quantized import base_of, codes_of
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.errors import did_you_mean
from shardfold.plan.quantized import Quantized

__all__ = ["DeepSpeedInferenceConfig", "default_inference_config"]

ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "args": "config",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "expert_group": "ep_group",
    "expert_mp_group": "ep_mp_group",
}
ACTS: dict[str, Any] = {
    "dtype": torch.float16,
    "tensor_parallel": None,
    "mp_size": 1,
    "mpu": None,
    "quant": None,
    "weight_quantization": None,
    "checkpoint": None,
    "base_dir": "",
    "checkpoint_config": None,
    "zero": None,
}
"""Keys that act, and their defaults."""
KERNELS = "the model computes with PyTorch's own operations"
OWN_CACHE = "keys and values take what the texts take"
NOTED: dict[str, tuple[Any, str]] = {
    "replace_with_kernel_inject": (False, KERNELS),
    "use_triton": (False, KERNELS),
    "triton_autotune": (False, KERNELS),
    "enable_cuda_graph": (False, "nothing is captured"),
    "max_out_tokens": (1024, OWN_CACHE),
    "min_out_tokens": (1, OWN_CACHE),
    "triangular_masking": (True, "masks are the model's"),
    "return_tuple": (True, "outputs are the model's"),
    "transposed_mode": (False, KERNELS),
    "keep_module_on_host": (False, "where weights rest is said by zero.offload_param"),
    "set_empty_params": (False, "a model without memory is one that was built under deepspeed.OnDevice(device='meta')"),
    "injection_policy": (None, "how layers are cut is found by itself"),
    "injection_policy_tuple": (None, "how layers are cut is found by itself"),
    "replace_method": ("auto", "DeepSpeed itself has removed it"),
    "training_mp_size": (1, "a checkpoint is read whole, on any number of ranks"),
    "moe_type": ("standard", "experts are the model's"),
    "moe_experts": ([1], "experts are the model's"),
    "config": (None, "DeepSpeed itself has removed it"),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "save_mp_checkpoint_path": (None, "files with parts of single ranks are not written: save the model's own"),
    "moe": (False, "experts over ranks are not here for inference: leave it out, and each rank has all"),
    "ep_size": (1, "experts over ranks are not here for inference: leave it out, and each rank has all"),
    "ep_group": (None, "experts over ranks are not here for inference: leave it out, and each rank has all"),
    "ep_mp_group": (None, "experts over ranks are not here for inference: leave it out, and each rank has all"),
}
DTYPES = {
    **dict.fromkeys(("float32", "fp32", "float", "torch.float32", "torch.float"), torch.float32),
    **dict.fromkeys(("float16", "fp16", "half", "torch.float16", "torch.half"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("int8", "torch.int8"), torch.int8),
}
TENSOR_PARALLEL = {"enabled": True, "tp_size": 1, "tp_grain_size": 64, "mpu": None, "tp_group": None}
CHECKPOINT_CONFIG = ("checkpoint_dir", "save_mp_checkpoint_path", "base_dir")
ZERO = ("stage", "offload_param")
MORE_ZERO = "of zero only stage and offload_param are for inference"


class DeepSpeedInferenceConfig:
    """A config of ``init_inference``, read.

    Attributes:
        raw: the dict given, by the keys' full names.
        dtype: of weights and arithmetic, ``torch.int8`` if weights are codes of 8 bits; their arithmetic is that of the
            model's own dtype.
        tensor: ranks that share each layer.
        base: what weights rest as; None: as they are.
        checkpoint: a path or a description of one; None: the model has its values.
        base_dir: where files of the description are.
        stage, tier, folder: of ZeRO: 3 splits weights over all ranks; where they rest.
        notes: what to say once.

    Raises:
        WrongArgument: a ``ValueError``: a key is unknown or cannot be honoured.
    """

    def __init__(self, given: Mapping[str, Any] | str | Path | None = None, **more: Any) -> None:
        self.raw = _named(given, more)
        self.notes: list[Note] = []
        for key, (default, why) in NOTED.items():
            if key in self.raw and self.raw[key] != default:
                self.notes.append(Note(key, self.raw[key], why))
        for key, (default, why) in REFUSED.items():
            if (value := self.raw.get(key, default)) not in (default, None, False):
                raise WrongArgument(f"init_inference({key}={value!r}): {why}.")
        self.dtype = _dtype(self.raw.get("dtype", torch.float16))
        self.tensor = self._tensor()
        self.base = self._base()
        self.checkpoint, self.base_dir = self._files()
        self.stage, self.tier, self.folder = self._zero()

    def _tensor(self) -> int:
        section = _section(self.raw, "tensor_parallel", TENSOR_PARALLEL)
        sizes = {"mp_size": self.raw.get("mp_size", 1)}
        if section.get("enabled", True):
            sizes["tensor_parallel.tp_size"] = section.get("tp_size", 1)
        for name, mpu in (("mpu", self.raw.get("mpu")), ("tensor_parallel.mpu", section.get("mpu"))):
            if mpu is not None:
                sizes[name] = mpu.get_model_parallel_world_size()
        if (group := section.get("tp_group")) is not None:
            sizes["tensor_parallel.tp_group"] = group.size()
        asked = {name: size for name, size in sizes.items() if size != 1}
        for name, size in asked.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise WrongArgument(f"init_inference({name}={size!r}): it is a number of ranks.")
        if len(set(asked.values())) > 1:
            said = ", ".join(f"{name}={size}" for name, size in asked.items())
            raise WrongArgument(f"init_inference({said}): they are the same number, so give one of them.")
        return next(iter(asked.values()), 1)

    def _base(self) -> Quantized | None:
        section = self.raw.get("quant")
        quant = section if isinstance(section, Mapping) else {}
        weight = quant.get("weight") or {}
        if section is not None and not (isinstance(section, Mapping) and isinstance(weight, Mapping)):
            raise WrongArgument(f"init_inference(quant={section!r}): it is a dict, as {{'weight': {{'num_bits': 8}}}}.")
        _known("quant", quant, ("enabled", "activation", "weight", "qkv"))
        rules = ("quantized_initialization", "post_init_quant")
        _known("quant.weight", weight, ("enabled", "num_bits", "q_type", "q_groups", *rules))
        for name in ("activation", "qkv"):
            if quant.get(name):
                self.notes.append(Note(f"quant.{name}", quant[name], "activations keep their dtype"))
        if "q_groups" in weight:
            self.notes.append(Note("quant.weight.q_groups", weight["q_groups"], "each 64 weights have a scale"))
        if not quant.get("enabled", True) or not weight.get("enabled", True):
            weight = {}
        by_rules = {name: weight[name] for name in rules if weight.get(name)} | (
            self.raw.get("weight_quantization") or {}
        )
        if by_rules:
            return base_of(by_rules, "weight_quantization", self.notes)
        if self.dtype is torch.int8 or "num_bits" in weight:
            return Quantized(format=codes_of(weight.get("num_bits", 8), 64, "quant.weight.num_bits"))
        return None

    def _files(self) -> tuple[Any, str]:
        section = _section(self.raw, "checkpoint_config", CHECKPOINT_CONFIG)
        if section.get("save_mp_checkpoint_path"):
            raise WrongArgument(
                f"init_inference(checkpoint_config.save_mp_checkpoint_path=...): "
                f"{REFUSED['save_mp_checkpoint_path'][1]}."
            )
        checkpoint = self.raw.get("checkpoint") or section.get("checkpoint_dir")
        return checkpoint, str(self.raw.get("base_dir") or section.get("base_dir") or "")

    def _zero(self) -> tuple[int, str | None, str | None]:
        zero = self.raw.get("zero") or {}
        if not isinstance(zero, Mapping):
            raise WrongArgument(f"init_inference(zero={zero!r}): it is a dict, as {{'stage': 3}}.")
        for name in sorted(zero.keys() - set(ZERO)):
            self.notes.append(Note(f"zero.{name}", zero[name], MORE_ZERO))
        stage = zero.get("stage", 0)
        if stage not in (0, 1, 2, 3):
            raise WrongArgument(f"init_inference(zero.stage={stage!r}): the stages are 0, 1, 2 and 3.")
        offload = zero.get("offload_param") or {}
        device = offload.get("device") or "none"
        tiers = {"none": None, "cpu": "host", "nvme": "disk"}
        if device not in tiers:
            raise WrongArgument(f"init_inference(zero.offload_param.device={device!r}): it is cpu, nvme or none.")
        if tiers[device] is not None and stage != 3:
            raise WrongArgument(f"init_inference(zero.offload_param): it is for stage 3, and the stage is {stage}.")
        folder = offload.get("nvme_path")
        return stage, tiers[device], None if folder is None else str(folder)


def default_inference_config() -> dict[str, Any]:
    """Every key and its default."""
    return {**ACTS, **{key: default for key, (default, _) in {**NOTED, **REFUSED}.items()}}


def _named(given: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Both, by the keys' full names."""
    if isinstance(given, (str, Path)):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise WrongArgument(f"init_inference(config={str(given)!r}) cannot be read: {error}.") from None
    if given is not None and not isinstance(given, Mapping):
        raise WrongArgument(f"init_inference(config=...) was given a {type(given).__name__}: it is a dict or a path.")
    found: dict[str, Any] = {}
    known = [*ACTS, *NOTED, *REFUSED]
    for key, value in [*dict(given or {}).items(), *more.items()]:
        name = ALIASES.get(key, key)
        if name not in known:
            near = did_you_mean(str(key), [*known, *ALIASES])
            raise WrongArgument(f"init_inference({key}=...): this key is unknown.{near}")
        if name in found and found[name] != value:
            raise WrongArgument(f"init_inference({key}=...) is given twice, as {found[name]!r} and as {value!r}.")
        found[name] = value
    return found


def _section(raw: Mapping[str, Any], name: str, known: Any) -> Mapping[str, Any]:
    section = raw.get(name) or {}
    if not isinstance(section, Mapping):
        raise WrongArgument(f"init_inference({name}={section!r}): it is a dict with {', '.join(known)}.")
    _known(name, section, known)
    return section


def _known(where: str, section: Mapping[str, Any], known: Any) -> None:
    for key in section:
        if key not in known:
            raise WrongArgument(f"init_inference({where}.{key}=...): this key is unknown.{did_you_mean(key, known)}")


def _dtype(given: Any) -> torch.dtype:
    dtype = given if isinstance(given, torch.dtype) else DTYPES.get(str(getattr(given, "value", given)))
    if dtype is None or dtype not in DTYPES.values():
        raise WrongArgument(
            f"init_inference(dtype={given!r}): it is torch.float32, torch.float16, torch.bfloat16 or torch.int8."
        )
    return dtype
