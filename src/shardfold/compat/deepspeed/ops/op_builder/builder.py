"""``deepspeed.ops.op_builder.builder``: what answers for a compiled operator. None is here, and each says so."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from shardfold.errors import UsageError

__all__ = ["ALL_OPS", "BUILDERS", "CUDAOpBuilder", "OpBuilder"]

#: ``{class without "Builder": name of the operator}``
BUILDERS = {
    "AsyncIO": "async_io",
    "CPUAdagrad": "cpu_adagrad",
    "CPUAdam": "cpu_adam",
    "CPULion": "cpu_lion",
    "DeepCompile": "dc",
    "EvoformerAttn": "evoformer_attn",
    "FPQuantizer": "fp_quantizer",
    "FusedAdam": "fused_adam",
    "FusedLamb": "fused_lamb",
    "FusedLion": "fused_lion",
    "GDS": "gds",
    "Inference": "transformer_inference",
    "InferenceCore": "inference_core_ops",
    "InferenceCutlass": "cutlass_ops",
    "PinMemory": "pin_memory",
    "Quantizer": "quantizer",
    "RaggedOps": "ragged_device_ops",
    "RaggedUtils": "ragged_ops",
    "RandomLTD": "random_ltd",
    "SpatialInference": "spatial_inference",
    "StochasticTransformer": "stochastic_transformer",
    "Transformer": "transformer",
    "Utils": "utils",
}
#: Where the variable that asks for the operator at installation is not named after it.
VARIABLES = {"async_io": "AIO", "dc": "DEEP_COMPILE"}


class OpBuilder:
    """A compiled operator that is not here. It can be asked; :meth:`load` raises.

    Attributes:
        NAME, BUILD_VAR: the operator's, and the environment variable's that asks for it when DeepSpeed is installed.
    """

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.jit_mode, self.error_log = False, None

    def absolute_name(self) -> str:
        """The module that would be compiled."""
        return f"deepspeed.ops.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """False: nothing is compiled."""
        if verbose:
            print(self._said())
        return False

    def load(self, verbose: bool = True) -> NoReturn:
        """
        Raises:
            UsageError: always.
        """
        raise UsageError(self._said())

    jit_load = builder = load

    def _said(self) -> str:
        return f"deepspeed's operator {self.name!r}: nothing is compiled here; use the optimizers of deepspeed.ops."

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether PyTorch is built for AMD's devices."""
        import torch

        return torch.version.hip is not None

    @staticmethod
    def is_sycl_enabled() -> bool:
        return False

    def sources(self) -> list[str]:
        """There are none."""
        return []

    include_paths = sources


class CUDAOpBuilder(OpBuilder):
    """One of a GPU's."""


def _made(short: str) -> Any:
    name, base = BUILDERS[short], OpBuilder if short in ("PinMemory", "Utils") else CUDAOpBuilder
    said: dict[str, Any] = {
        "NAME": name,
        "BUILD_VAR": f"DS_BUILD_{VARIABLES.get(name, name).upper()}",
        "__module__": __package__,
        "__doc__": f"Of the operator ``{name}``.",
    }
    return type(f"{short}Builder", (base,), said)


#: ``{name of a class: the class}``
CLASSES: dict[str, type[OpBuilder]] = {f"{short}Builder": _made(short) for short in BUILDERS}

#: ``{name of an operator: its builder}``
ALL_OPS = {cls.NAME: cls() for cls in CLASSES.values()}
