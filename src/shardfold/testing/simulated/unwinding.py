"""Exceptions of hooks inside a backward.

When a hook raises, autograd's C++ unwinds with the error still set in the interpreter, and on its way asks the device's
guard for its type, which is Python here. A call of Python with an error set ends the process. So the guard takes the
error away first, with a call that converts no argument and so checks none, and the end of the backward raises it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from shardfold.torch_internals import PRIVATE_DEVICE, DeviceGuard

__all__ = ["HELD", "SimulatedDeviceGuard"]

# Without `argtypes`: to convert an argument by them, ctypes calls Python.
_fetch = ctypes.PYFUNCTYPE(None)(("PyErr_Fetch", ctypes.pythonapi))
_normalize = ctypes.PYFUNCTYPE(None)(("PyErr_NormalizeException", ctypes.pythonapi))


class _Places:
    """Where one error is fetched to: its type, its value, its traceback."""

    def __init__(self) -> None:
        self.held = [ctypes.c_void_p() for _ in range(3)]
        self.addresses = [ctypes.c_void_p(ctypes.addressof(place)) for place in self.held]

    def error(self) -> BaseException | None:
        """What was fetched; None: nothing."""
        if self.held[0].value is None:
            return None
        _normalize(*self.addresses)
        _, value, trace = (None if p.value is None else ctypes.cast(p, ctypes.py_object).value for p in self.held)
        for place in self.held:
            if place.value is not None:
                ctypes.pythonapi.Py_DecRef(place)  # the reference that the fetch gave us
                place.value = None
        return value if trace is None or value is None else value.with_traceback(trace)


# Each call of the guard has its own, as threads may take turns in between.
_TURNS = cycle([(places, *places.addresses) for places in [_Places() for _ in range(64)]])


class _Held:
    """Errors that the guard took away, until the backward is over."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def keep(self, error: BaseException) -> None:
        """It is raised at the end of the backward."""
        self._errors.append(error)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Around a backward.

        Raises:
            BaseException: what was taken away inside.
        """
        try:
            yield
        except SystemError:  # C++ found no error where it expected one
            if self._errors:
                error = self._errors[0]
                self._errors.clear()
                raise error from None
            raise


HELD = _Held()


class SimulatedDeviceGuard(DeviceGuard):
    """The device guard."""

    def type_(self) -> Any:
        # First of all: nothing else can be called while an error is set, but a loop may take a step.
        for places, kind, value, trace in _TURNS:
            _fetch(kind, value, trace)
            error = places.error()
            if error is not None:
                HELD.keep(error)
            break
        return PRIVATE_DEVICE
