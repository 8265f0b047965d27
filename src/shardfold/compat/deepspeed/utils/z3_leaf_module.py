"""Leaf modules: DeepSpeed gathers all of one at once, because its experts' order differs between ranks and steps.

Here any order is right, so a leaf is only marked, and training is the same with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from shardfold.errors import ConfigError

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

Classes = Sequence[type[nn.Module] | str]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether the parameter is of a marked module, as it was marked."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks this module, or takes the mark away."""
    model._z3_leaf = flag  # pyright: ignore[reportArgumentType]
    for parameter in model.parameters():
        if flag:
            parameter.ds_z3_leaf_module = model  # pyright: ignore[reportAttributeAccessIssue]
        elif hasattr(parameter, "ds_z3_leaf_module"):
            delattr(parameter, "ds_z3_leaf_module")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of these classes, or of classes of these names, and gives them.

    Raises:
        ConfigError: there is none, and ``raise_if_not_found``.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the mark away; otherwise as :func:`set_z3_leaf_modules`."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks the modules of these names in ``named_modules()``; gives them, and the names that there are not.

    Raises:
        ConfigError: there are such names, and ``raise_if_not_found``.
    """
    return _mark_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As :func:`set_z3_leaf_modules_by_name`, of names that end so."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _mark_classes(model: nn.Module, classes: Classes, flag: bool, required: bool) -> list[nn.Module]:
    types = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind for kind in classes if isinstance(kind, str)}
    if len(types) + len(names) < len(set(classes)):
        raise ConfigError(f"leaf_module_classes={classes!r}: they are classes, or names of classes.")
    found: list[nn.Module] = []
    for module in model.modules():
        kind = type(module)
        if isinstance(module, types) or {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} & names:
            set_z3_leaf_module(module, flag)
            found.append(module)
    if required and not found:
        raise ConfigError(f"the {type(model).__name__} has no modules of type {classes!r}.")
    return found


def _mark_named(
    model: nn.Module, names: Sequence[str], fits: Callable[[str, str], bool], flag: bool, required: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    by_name = {wanted: [module for name, module in modules.items() if fits(name, wanted)] for wanted in names}
    missing = [wanted for wanted, found in by_name.items() if not found]
    if required and missing:
        raise ConfigError(f"the {type(model).__name__} has no modules named {missing!r}.")
    found = list(dict.fromkeys(module for modules in by_name.values() for module in modules))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
