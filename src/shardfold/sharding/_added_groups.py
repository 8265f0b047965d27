"""What users add to the groups of an optimizer that an engine drives, looked at when they add it.

The engine puts its own pieces into the groups, so that PyTorch's own look does not find a parameter of the model there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

__all__ = ["look_at_added"]


def look_at_added(optimizer: Any, check: Callable[[list[Any]], None]) -> None:
    """From now on ``optimizer.add_param_group()`` asks first; nothing here keeps the optimizer or what checks alive.

    Args:
        optimizer: a ``torch.optim.Optimizer``.
        check: a method, which is called with the parameters that are added, and raises where they cannot be.
    """
    seen, checks = weakref.ref(optimizer), weakref.WeakMethod(check)

    @wraps(type(optimizer).add_param_group)
    def add_param_group(param_group: dict[str, Any]) -> None:
        own = seen()
        assert own is not None  # it is its attribute
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is not None and not isinstance(params, set):  # which has no order: PyTorch refuses it
            params = [params] if isinstance(params, Tensor) else list(params)  # an iterator is read once
            param_group = {**param_group, "params": params}
            if (ask := checks()) is not None:
                ask([each[1] if isinstance(each, tuple) else each for each in params])
        type(own).add_param_group(own, param_group)

    optimizer.add_param_group = add_param_group
