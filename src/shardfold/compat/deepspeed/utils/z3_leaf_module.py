"""Flags on modules whose parts are to be gathered together.

DeepSpeed needs them where ranks run different parts, as in mixtures of experts. The engine trains those right without
(see "Ranks that differ" in the documentation of the engine); the flags are kept, because clients set and read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.errors import ModelError, did_you_mean

__all__ = [
    "apply_zero_leaf_module_config",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_FLAG = "_z3_leaf"


class NoSuchModuleError(ModelError, ValueError):
    """No module of a model is of that class or name."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is flagged."""
    return bool(getattr(model, _FLAG, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether the parameter is kept together with all of a flagged module; never, here."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The flagged modules in ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Flags one module, or takes the flag off."""
    setattr(model, _FLAG, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Flags the modules in ``model`` of one of these classes, given as such or by name.

    Raises:
        NoSuchModuleError: (a ``ValueError``) there is none, and ``raise_if_not_found``.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the flag off the modules in ``model`` of one of these classes; raises as :func:`set_z3_leaf_modules`."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flags modules by their names in ``model.named_modules()``; gives those, and the names that are missing."""
    return _flag_names(model, module_names, lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flags modules by what their names end with; gives those, and the suffixes that match nothing."""
    return _flag_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Flags the modules that a config's ``zero_optimization.leaf_module`` names; what it names in vain is logged.

    Args:
        model: of the modules.
        leaf_cfg: has ``classes``, ``names`` and ``name_suffixes``; None flags nothing.

    Returns:
        The modules, each once.
    """
    if leaf_cfg is None:
        return []
    classes, names, suffixes = (
        list(dict.fromkeys(each))
        for each in (
            leaf_cfg.classes,
            leaf_cfg.names,
            leaf_cfg.name_suffixes,
        )
    )
    found = set_z3_leaf_modules(model, classes, raise_if_not_found=False)
    by_name, unknown = set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    by_suffix, unmatched = set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)
    if unknown:
        logger.warning("zero_optimization.leaf_module.names: the model has no module named %s.", ", ".join(unknown))
    if unmatched:
        logger.warning(
            "zero_optimization.leaf_module.name_suffixes: no module's name ends with %s.", ", ".join(unmatched)
        )
    return list({id(module): module for module in (*found, *by_name, *by_suffix)}.values())


def _flag_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    types = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind for kind in classes if isinstance(kind, str)}
    found = [module for module in model.modules() if isinstance(module, types) or names & _names(type(module))]
    if not found and raise_if_not_found:
        text = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in classes)
        near = did_you_mean(text, {type(module).__name__ for module in model.modules()})
        raise NoSuchModuleError(f"the model has no module of class {text}.{near}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _names(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _flag_names(
    model: nn.Module, wanted: Sequence[str], matches: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    hits = {text: [module for name, module in modules.items() if matches(name, text)] for text in wanted}
    missing = [text for text, found in hits.items() if not found]
    if missing and raise_if_not_found:
        near = did_you_mean(missing[0], list(modules)[1:12])
        raise NoSuchModuleError(f"the model has no module named {', '.join(missing)}.{near}")
    found = list({id(module): module for hit in hits.values() for module in hit}.values())
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
