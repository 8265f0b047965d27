"""``GatheredParameters``: whole parameters for a while."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from shardfold.compat.deepspeed.zero.attributes import is_zero_param, ranks_of
from shardfold.compat.deepspeed.zero.external import register_external_parameter
from shardfold.errors import ConfigError
from shardfold.sharding.whole import whole

__all__ = ["GatheredParameters"]


class GatheredParameters:
    """Inside, split parameters are whole on every rank; at the end they are split again. Every rank enters.

    Blocks may be nested, also with the same parameters. Under stages 0 to 2 nothing is split, and nothing happens.

    Args:
        params: a parameter, or an iterable of them. What is not split, None and repetitions are left alone.
        modifier_rank: the rank whose values everyone has at the end, in the master copy too. None: nothing is meant to
            be changed; what is changed all the same is logged, and gone.
        fwd_module: that the parameters are registered with as external ones.
        enabled: False: nothing happens.

    Raises:
        ConfigError: there is no such rank.
        UsageError, OrderError: as :func:`shardfold.whole`; a rank that enters alone is found out.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.params: list[nn.Parameter] = []
        self.enabled, self.src_rank, self.fwd_module = enabled, modifier_rank, fwd_module
        self._stack = ExitStack()
        if not enabled:
            return
        single = isinstance(params, torch.Tensor)
        given: Iterable[Any] = [params] if single else params if isinstance(params, Iterable) else []
        self.params = [p for p in given if is_zero_param(p)]
        self.enabled = bool(self.params)
        if not self.enabled:
            return
        ranks = ranks_of(self.params[0])[1]
        if modifier_rank is not None and not 0 <= modifier_rank < ranks:
            raise ConfigError(f"modifier_rank={modifier_rank}: with {ranks} ranks it is 0 to {ranks - 1}, or None.")
        for p in self.params if fwd_module is not None else ():
            register_external_parameter(fwd_module, p)  # pyright: ignore[reportArgumentType]

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.enter_context(whole(self.params, source=self.src_rank, strict=False))

    def __exit__(self, *exc: Any) -> bool | None:
        return self._stack.__exit__(*exc)
