"""The state of the random generators of a process, as values that need no pickle to be saved."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.plan.checks import described, known_arguments

__all__ = ["rng_state", "set_rng_state"]


@known_arguments
def rng_state() -> dict[str, Any]:
    """The state of this process's global generators; each rank has its own.

    Returns:
        Nested dicts whose leaves are CPU tensors, numbers, strings and None:

        - ``"python"``: of ``random``: ``version``, ``words`` ((625,) int64), ``gauss`` (float or None).
        - ``"numpy"``: of ``numpy.random``'s global generator, as ``numpy.random.get_state(legacy=False)``; arrays of
          unsigned integers are tensors of the signed type with the same bits.
        - ``"torch"``: (5056,) uint8 in today's PyTorch.
        - ``"device"``: None, or of the device that this process uses: its ``type``, as ``"cuda"``, and ``state``
          (uint8). Which number it has says nothing: a rank that goes on elsewhere has another one.

    Examples:
        >>> state = sf.rng_state()
        >>> first = torch.rand(2)
        >>> sf.set_rng_state(state)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    version, words, gauss = random.getstate()
    device = accelerator.current(used=True)
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": _mapped(np.random.get_state(legacy=False), np.ndarray, _to_tensor),
        "torch": torch.get_rng_state(),
        "device": None if device is None else {"type": device.type, "state": accelerator.rng_state(device)},
    }


@known_arguments
def set_rng_state(state: Mapping[str, Any]) -> None:
    """Continues the streams that :func:`rng_state` saw; that of the device, if this process uses one of that type.

    Raises:
        ConfigError: it is none, a part of it is missing, or numpy's global generator is of another kind.

    Examples:
        >>> state = sf.rng_state()
        >>> first = torch.rand(2)
        >>> sf.set_rng_state(state)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state of the generators is {described(state)}: give what rng_state() returned.")
    if missing := [name for name in ("python", "numpy", "torch") if name not in state]:
        raise ConfigError(f"the state of the generators lacks {', '.join(missing)}: give what rng_state() returned.")
    python, kind = state["python"], np.random.get_state(legacy=False)["bit_generator"]  # pyright: ignore
    if state["numpy"]["bit_generator"] != kind:
        raise ConfigError(
            f"the state is of numpy's {state['numpy']['bit_generator']}, but its global generator is {kind}: set the "
            "same with numpy.random.set_bit_generator first."
        )
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(_mapped(state["numpy"], torch.Tensor, _to_array))
    torch.set_rng_state(state["torch"].cpu())
    device = accelerator.current()
    if device is not None and (there := _of_device(state, device)) is not None:
        accelerator.set_rng_state(device, there)


def _of_device(state: Mapping[str, Any], device: torch.device) -> torch.Tensor | None:
    """The state of the generator of a device of that type."""
    if (by_number := state.get(device.type)) is not None:  # older: of all devices that the process saw
        return by_number.get(str(device.index))
    saved = state.get("device")
    return saved["state"] if saved is not None and saved["type"] == device.type else None


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {name: _mapped(each, kind, change) for name, each in value.items()}
    return change(value) if isinstance(value, kind) else value


def _to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    # Not every file format has unsigned integers.
    return torch.from_numpy(array.view(f"i{array.itemsize}").copy())


def _to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy().view(f"u{tensor.itemsize}")
