"""DLPack: the one door through which Python can make a tensor of a PrivateUse1 device that has memory.

A managed tensor of DLPack with the device type "extension" becomes a tensor of that device, with a true storage: sizes,
views, offsets, autograd are PyTorch's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["tensor_over"]

EXTENSION = 12  # kDLExtDev
INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
CODES = {
    torch.bool: BOOL,
    torch.bfloat16: BFLOAT,
    torch.uint8: UINT,
    torch.uint16: UINT,
    torch.uint32: UINT,
    torch.uint64: UINT,
    torch.float8_e4m3fn: 10,
    torch.float8_e4m3fnuz: 11,
    torch.float8_e5m2: 12,
    torch.float8_e5m2fnuz: 13,
    torch.float8_e8m0fnu: 14,
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


def _capsules() -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make


_capsule = _capsules()


def _code(dtype: torch.dtype) -> int:
    if dtype in CODES:
        return CODES[dtype]
    return COMPLEX if dtype.is_complex else FLOAT if dtype.is_floating_point else INT


def tensor_over(memory: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Any]:
    """A tensor of the extension device over the bytes of ``memory``, and what has to live as long as its storage does:
    PyTorch looks into it once more when it frees that. (There is no deleter: it would be called while exceptions are on
    their way, when no Python may run.)

    Args:
        memory: of the host, uint8; the caller keeps it.
        size, stride: in elements.
        dtype: of the tensor.
    """
    managed, rank = _Managed(), len(size)
    shape, strides = (ctypes.c_int64 * max(rank, 1))(*size), (ctypes.c_int64 * max(rank, 1))(*stride)
    fields = managed.tensor
    fields.data, fields.device, fields.ndim = memory.data_ptr(), _Device(EXTENSION, 0), rank
    fields.dtype = _Type(_code(dtype), 8 * dtype.itemsize, 1)
    fields.shape, fields.strides, fields.offset = shape, strides, 0
    tensor = torch.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))
    return tensor, (managed, shape, strides)
