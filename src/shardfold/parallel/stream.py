"""Sequence parallelism (Megatron-LM, arXiv 2205.05198): between the layers that are cut each rank along the axis has
some of the tokens, so norms, dropout and sums with residuals are divided too.

    word         forward                           backward
    scattered    this rank's tokens                the ranks' tokens
    collected    the ranks' tokens                 of the sum over the ranks this rank's tokens
    row          of the sum this rank's tokens     the ranks' tokens
    joined       the ranks' tokens                 this rank's tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.nn.axis_group import AxisGroup

__all__ = ["DROPOUTS", "TOKENS", "SequenceParallel", "apart_draws"]

TOKENS = -2
"""The dimension of activations that tokens lie on."""

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Modules that draw random numbers."""

_APART = 0x9E3779B97F4A7C15


class SequenceParallel:
    """Whether the activations of a model are cut along their sequence now.

    In training they are. A forward without gradients over a number of tokens that the ranks do not divide, as in
    generation, goes through with whole sequences.
    """

    def __init__(self) -> None:
        self._begun = True

    @property
    def cut(self) -> bool:
        return self._begun or torch.is_grad_enabled()

    def begin(self, length: int, group: AxisGroup) -> bool:
        """Whether so many tokens are cut.

        Raises:
            ConfigError: ranks do not divide them, in training.
        """
        self._begun = length % group.size == 0
        if torch.is_grad_enabled() and not self._begun:
            raise ConfigError(
                f"Parallel(sequence_parallel=True) divides sequences over the {group.size} ranks along {group.axis!r}, "
                f"but this one has {length} tokens: pad it to a multiple of {group.size}, or evaluate under "
                "torch.no_grad(), where sequences of other lengths stay whole."
            )
        return self._begun


@contextmanager
def apart_draws(x: Tensor, group: AxisGroup) -> Iterator[None]:
    """Inside, random numbers of ``x``'s device are this rank's own; behind it they go on alike on all ranks.

    They are seeded by a number that is drawn of the CPU's generator, which ranks have alike, and the rank: where a
    forward is computed again from the same state, they are the same again.
    """
    seed = (int(torch.randint(2**62, (), device="cpu")) + (group.rank + 1) * _APART) % 2**63
    with accelerator.seeded(x.device, seed):
        yield
