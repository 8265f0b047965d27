"""What stands before the methods of an engine's optimizer that, called by users, would do nothing or only a part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn

from torch.optim import Optimizer

from shardfold.errors import UsageError

__all__ = ["Guard", "is_guarded"]

_METHODS = ("step", "zero_grad", "state_dict", "load_state_dict")
_HANDLES_SCALES = "_step_supports_amp_scaling"
_SCALE = ("grad_scale", "found_inf")  # what a GradScaler leaves on an optimizer that handles scales


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether it is an engine's, which is open."""
    return _HANDLES_SCALES in vars(optimizer)


class Guard:
    """Until it is closed, the optimizer of an engine answers by it.

    ``step()`` and the state dicts raise a ``UsageError`` that names what to call instead, and ``zero_grad()`` drops the
    engine's gradients. Behind that ``step()`` still raises, as nothing gives the pieces in the groups gradients. The
    methods are put on the instance, as methods, so that schedules wrap them as usual.

    Args:
        optimizer: whose groups hold this rank's pieces.
        zero_grad: a method that is called with ``set_to_none``.
    """

    def __init__(self, optimizer: Optimizer, zero_grad: Callable[[bool], None]) -> None:
        self._optimizer = optimizer
        self._stepping = self._closed = False
        self._had = {name: vars(optimizer).get(name) for name in (*_METHODS[1:], _HANDLES_SCALES)}
        own, drop = weakref.ref(self), weakref.WeakMethod(zero_grad)  # the optimizer may outlive the engine
        step = optimizer.step

        # Of one argument more than a method shows, as a schedule that is made later binds what it finds here again.
        def guarded(it: Optimizer, *args: Any, **kwargs: Any) -> Any:
            guard = own()
            if guard is not None and guard._stepping:
                return step(*args, **kwargs)
            if guard is None or guard._closed:
                raise UsageError(
                    f"{type(it).__name__}.step() updates nothing, because its engine is closed: make a new optimizer "
                    "of the model's parameters."
                )
            return guard._refuse_step()

        vars(guarded).update(vars(step))  # a schedule that was made before looks for its mark

        def zero(it: Optimizer, set_to_none: bool = True) -> None:
            if (alive := drop()) is not None:
                alive(set_to_none)

        def refuse(call: str, instead: str) -> Callable[..., NoReturn]:
            def refused(it: Optimizer, *args: Any, **kwargs: Any) -> NoReturn:
                raise UsageError(
                    f"{type(it).__name__}.{call}() of an engine's optimizer would be of this rank's pieces, without "
                    f"the state that the engine keeps: {instead}."
                )

            return refused

        state = refuse("state_dict", "engine.save(path) writes all of it, with the weights, for any number of ranks")
        load = refuse("load_state_dict", "engine.load(path) reads what engine.save(path) wrote")
        for name, method in zip(_METHODS, (guarded, zero, state, load), strict=True):
            setattr(optimizer, name, MethodType(method, optimizer))
        setattr(optimizer, _HANDLES_SCALES, True)  # so that a GradScaler calls step() instead of looking for gradients

    def _refuse_step(self) -> NoReturn:
        scaled = [name for name in _SCALE if vars(self._optimizer).pop(name, None) is not None]
        if scaled:
            raise UsageError(
                "torch.amp.GradScaler.step() with an engine's optimizer: the engine scales losses itself: leave the "
                'scaler out, give the engine precision="fp16" (loss_scale= says how), and call '
                "engine.backward(loss) and engine.step()."
            )
        raise UsageError(
            f"{type(self._optimizer).__name__}.step() of an engine's optimizer updates nothing: call engine.step()."
        )

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, ``step()`` is the engine's own call."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def close(self) -> None:
        """The optimizer has its own methods again, but for ``step()``."""
        self._closed = True
        for name, had in self._had.items():
            vars(self._optimizer).pop(name, None)
            if had is not None:
                setattr(self._optimizer, name, had)
