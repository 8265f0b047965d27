"""Parameters that a module reads and another owns.

The engine finds such uses by itself, so that nothing has to be registered; what is registered is kept, because clients
ask for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from shardfold.errors import UsageError

__all__ = ["all_parameters", "external_parameters", "register_external_parameter", "unregister_external_parameter"]

_EXTERNAL = "_external_params"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Notes that the forward of ``module`` reads ``parameter``, which another module owns.

    Raises:
        UsageError: (a ``RuntimeError``) it is no ``torch.nn.Parameter``.
    """
    _check(parameter)
    install()
    module.__dict__.setdefault(_EXTERNAL, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Takes back :func:`register_external_parameter`.

    Raises:
        UsageError: (a ``RuntimeError``) it is no ``torch.nn.Parameter``, or was not registered.
    """
    _check(parameter)
    if id(parameter) not in module.__dict__.get(_EXTERNAL, {}):
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} is not a registered external parameter of this "
            f"{type(module).__name__}: register it first."
        )
    del module.__dict__[_EXTERNAL][id(parameter)]


def external_parameters(self: nn.Module) -> Iterable[tuple[int, nn.Parameter]]:
    """``(key, parameter)`` of what was registered."""
    return self.__dict__.get(_EXTERNAL, {}).items()


def all_parameters(self: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    """The module's own parameters, and those that were registered."""
    return itertools.chain(self.named_parameters(recurse=False), external_parameters(self))


def install() -> None:
    """Gives ``torch.nn.Module`` the two methods; again it does nothing."""
    nn.Module.ds_external_parameters = external_parameters  # pyright: ignore[reportAttributeAccessIssue]
    nn.Module.all_parameters = all_parameters  # pyright: ignore[reportAttributeAccessIssue]


def uninstall() -> None:
    """Takes back :func:`install`."""
    for name in ("ds_external_parameters", "all_parameters"):
        if name in vars(nn.Module):
            delattr(nn.Module, name)


def _check(parameter: Any) -> None:
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"a {type(parameter).__name__} is not a torch.nn.Parameter: register parameters only.")
