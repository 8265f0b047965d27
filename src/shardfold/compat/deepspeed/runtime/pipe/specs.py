"""Layers by their class and arguments, to be built later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shardfold.compat.deepspeed.comm import world
from shardfold.compat.deepspeed.runtime.utils import call_to_str
from shardfold.compat.deepspeed.utils.logging import logger

__all__ = ["LayerSpec", "TiedLayerSpec"]


class LayerSpec:
    """A layer's class and what it is built with.

    Raises:
        RuntimeError: the class is no ``torch.nn.Module``.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not issubclass(typename, nn.Module):
            raise RuntimeError(f"LayerSpec only supports torch.nn.Module types, and {typename.__name__} is none.")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        self.global_rank = world.get_rank() if world.is_initialized() else -1

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, self.module_args, self.module_kwargs)

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        if log:
            logger.info(f"RANK={self.global_rank} building {self!r}")
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with others of its key.

    Args:
        key: of the layers that share.
        forward_fn: called as ``forward_fn(layer, inputs)`` in place of the layer.
        tied_weight_attr: names of the weights.
    """

    def __init__(
        self,
        key: Any,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
