"""``FusedLamb``, done by the engine's LAMB, which is right on shards and on any device."""

from __future__ import annotations

from typing import Any

from shardfold.errors import UsageError
from shardfold.optim import LAMB

__all__ = ["DeepSpeedCPULamb", "FusedLamb"]


class FusedLamb(LAMB):
    """LAMB (arXiv 1904.00962), whose trust ratio is held between ``min_coeff`` and ``max_coeff``.

    Args:
        params: parameters or groups of them.
        lr, betas, eps, weight_decay: as of :class:`shardfold.optim.LAMB`.
        bias_correction: whether moments are divided by ``1 - beta ** step``.
        eps_inside_sqrt, max_grad_norm, amsgrad: are refused.
        max_coeff, min_coeff: of the trust ratio.

    Raises:
        UsageError: what is refused is asked for.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        refused = {"amsgrad": amsgrad, "eps_inside_sqrt": eps_inside_sqrt, "max_grad_norm": max_grad_norm}
        for name, value in refused.items():
            if value:
                instead = {"max_grad_norm": "the configuration's gradient_clipping clips the global norm"}
                raise UsageError(
                    f"{type(self).__name__}({name}={value!r}) is not supported: "
                    f"{instead.get(name, f'leave {name} out')}."
                )
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            trust_range=(min_coeff, max_coeff),
        )


class DeepSpeedCPULamb(FusedLamb):
    """:class:`FusedLamb` under the name of other CPU optimizers."""
