"""``deepspeed.runtime.zero.leaf_module_config``: which modules are gathered whole."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedZeroLeafModuleConfig",
]

DEFAULT_LEAF_MODULE_CLASSES = [
    f"transformers.models.{family}.modeling_{family}.{name}SparseMoeBlock"
    for family, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class DeepSpeedZeroLeafModuleConfig:
    """``zero_optimization.leaf_module``. Each takes a string for a list of one, and drops what is there twice.

    Attributes:
        classes: names of classes, with or without their modules.
        names: of submodules.
        name_suffixes: ends of such names.
    """

    def __init__(
        self,
        classes: str | Iterable[str] | None = None,
        names: str | Iterable[str] | None = None,
        name_suffixes: str | Iterable[str] | None = None,
    ) -> None:
        self.classes = _listed(classes, DEFAULT_LEAF_MODULE_CLASSES)
        self.names = _listed(names, DEFAULT_LEAF_MODULE_NAMES)
        self.name_suffixes = _listed(name_suffixes, DEFAULT_LEAF_MODULE_NAME_SUFFIXES)


def _listed(given: str | Iterable[str] | None, default: list[str]) -> list[str]:
    values = default if given is None else [given] if isinstance(given, str) else given
    return list(dict.fromkeys(str(value) for value in values))
