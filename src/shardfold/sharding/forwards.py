"""Methods of a model that begin a pass, besides ``forward``: what they run is gathered, ordered and counted alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from shardfold.errors import ModelError, UsageError, did_you_mean
from shardfold.plan.checks import known_arguments
from shardfold.sharding.registry import model_of

__all__ = ["register_forward"]


@known_arguments
def register_forward(module: nn.Module, method: str) -> None:
    """Makes calls of ``module.method(...)`` forwards of the model that ``module`` is, or is a part of.

    Under an engine such a call does all that calling the model does: parameters are gathered for it, buffers and inputs
    follow, and what it returns may be trained by. Inside of another forward, and without an engine, it is a plain call.
    Before or after the engine is made; every rank registers the same methods; copies of the module have them too.

    Args:
        module: the model, or a part of it.
        method: the name of a method other than ``forward``.

    Raises:
        ModelError: there is no such method.
        UsageError: it is ``forward``, which a model has as an entry already, and a part cannot have; or ``module`` is
            no module, or ``method`` no name.

    Examples:
        >>> class Encoder(nn.Linear):
        ...     def encode(self, x):
        ...         return self(x).tanh()
        >>> encoder = sf.Engine(Encoder(8, 8), optimizer=adam)
        >>> sf.register_forward(encoder.module, "encode")
        >>> tuple(encoder.module.encode(x).shape)
        (4, 8)
    """
    if not isinstance(module, nn.Module) or not isinstance(method, str):
        raise UsageError(
            f"register_forward({getattr(module, '__name__', type(module).__name__)}, {method!r}): it takes a module, "
            "not its class, and the name of one of its methods, as in register_forward(model, 'encode')."
        )
    if method in ("forward", "__call__"):
        raise UsageError(
            f"register_forward(..., {method!r}): calling the model is a forward already; for a part of it register a "
            "method of another name that calls the part."
        )
    found = getattr(module, method, None)
    if not callable(found) or isinstance(found, nn.Module):  # a part is called through a method
        near = did_you_mean(method, [name for name in dir(type(module)) if not name.startswith("_")])
        raise ModelError(f"register_forward: a {type(module).__name__} has no method {method!r}.{near}")
    if isinstance(found, partial) and found.func is _enter:
        return
    vars(module)[method] = partial(_enter, module, method, vars(module).get(method))


def _enter(module: nn.Module, method: str, own: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
    """``own`` is what the module itself, and not its class, had under that name."""
    call = own if own is not None else getattr(type(module), method).__get__(module)
    first = next(module.parameters(), None)
    model = model_of(first) if first is not None else None
    return call(*args, **kwargs) if model is None else model.gate.enter(call, args, kwargs)
