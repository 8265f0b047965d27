"""Any module as experts: its parameters stacked, a row for each expert."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardfold.errors import ConfigError
from shardfold.nn.experts import ByRows

__all__ = ["StackedExperts"]


class StackedExperts(ByRows):
    """``count`` experts that begin as copies of ``expert``, which maps rows of tokens ``(rows, width)`` to such.

    Its parameter ``a.b`` is the parameter ``a__b`` here, with a dimension in front.

    Args:
        expert: without buffers.
        count: how many experts there are.

    Raises:
        ConfigError: the expert has buffers.
    """

    def __init__(self, expert: nn.Module, count: int) -> None:
        super().__init__()
        if buffers := [name for name, _ in expert.named_buffers()]:
            raise ConfigError(
                f"an expert of class {type(expert).__name__} has the buffers {', '.join(buffers)}, of which experts "
                "would need one each: use layers without, as nn.LayerNorm in place of nn.BatchNorm1d."
            )
        self.num_experts = count
        for name, parameter in expert.named_parameters():
            values = parameter.detach().expand(count, *parameter.shape).clone()
            self.register_parameter(
                name.replace(".", "__"), nn.Parameter(values, requires_grad=parameter.requires_grad)
            )
        # One that has no values, and is no part of this module: it says what is computed.
        self._kind: Sequence[nn.Module] = (copy.deepcopy(expert).to("meta"),)

    def train(self, mode: bool = True) -> StackedExperts:
        self._kind[0].train(mode)
        return super().train(mode)

    def of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        kind = self._kind[0]
        names = {name: name.replace(".", "__") for name, _ in kind.named_parameters()}
        each = {name: getattr(self, own).unbind(0) for name, own in names.items()}
        made: list[Tensor] = []
        for number, part in enumerate(rows.split(list(counts))):
            values = {name: of[number] for name, of in each.items()}
            out: Any = functional_call(kind, values, (part,))
            made.append(out[0] if isinstance(out, tuple) else out)
        return torch.cat(made)
