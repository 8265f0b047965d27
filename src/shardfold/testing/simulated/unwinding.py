"""Exceptions of hooks inside a backward.

When a hook raises, autograd's C++ unwinds with the error still set in the interpreter, and on its way asks the device's
guard for its type, which is Python here. A call of Python with an error set ends the process. So the guard takes the
error away first, with a call that converts no argument and so checks none, and the end of the backward raises it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardfold.torch_internals import PRIVATE_DEVICE, DeviceGuard

__all__ = ["HELD", "Guard"]

_kind, _value, _trace = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
_places = tuple(ctypes.c_void_p(ctypes.addressof(place)) for place in (_kind, _value, _trace))
_at_kind, _at_value, _at_trace = _places
# Without `argtypes`: to convert an argument by them, ctypes calls Python.
_fetch = ctypes.PYFUNCTYPE(None)(("PyErr_Fetch", ctypes.pythonapi))
_normalize = ctypes.PYFUNCTYPE(None)(("PyErr_NormalizeException", ctypes.pythonapi))


class _Held:
    """Errors that the guard took away, until the backward is over."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def keep(self) -> None:
        """What was fetched is kept here."""
        _normalize(_at_kind, _at_value, _at_trace)
        if _value.value is not None:
            error = ctypes.cast(_value, ctypes.py_object).value
            if _trace.value is not None:
                error = error.with_traceback(ctypes.cast(_trace, ctypes.py_object).value)
            self._errors.append(error)
        for place in (_kind, _value, _trace):
            if place.value is not None:
                ctypes.pythonapi.Py_DecRef(place)  # the reference that the fetch gave us
                place.value = None

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


class Guard(DeviceGuard):
    """The device guard."""

    def type_(self) -> Any:
        _fetch(_at_kind, _at_value, _at_trace)  # first of all: nothing else can be called while an error is set
        if _kind.value is not None:
            HELD.keep()
        return PRIVATE_DEVICE
