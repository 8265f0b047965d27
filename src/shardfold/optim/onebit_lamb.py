"""1-bit LAMB: LAMB until its variance is steady, then momentum by signs, with scales that still follow a variance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.numerics.clipping import square_sum
from shardfold.optim.parts import ShardPlacement, Use, check_betas, check_number
from shardfold.optim.signed import SignOptimizer
from shardfold.plan.checks import described, is_number, known_arguments

__all__ = ["OneBitLamb"]


@known_arguments
class OneBitLamb(SignOptimizer):
    """1-bit LAMB (Li et al., arXiv 2104.06069, algorithm 1), with all moments corrected for their start at 0.

    Up to ``freeze_step``, with ``u = m / (sqrt(v) + eps) + weight_decay * x``: ``x -= lr * c * u``, where ``c`` is
    ``|x| / |u|`` of the whole parameter, held inside of ``trust_range``, of which a running mean is kept. From there on
    ``v`` and that mean stay, and ``c`` is the mean times a factor: the greatest of ``(sqrt(v) + eps) / (sqrt(w) +
    eps)`` over the parameter's elements, where the variance ``w`` goes on with the gradients that the averaged momentum
    tells of. The factor stays inside of ``factor_range``, and within ``factor_threshold`` of the last one. With decay
    it acts on the share that Adam's direction has in the length of ``u``.

    Under an engine with :class:`shardfold.Signs` the ranks along its axis send gradients up to there, and signs of
    ``m / (sqrt(v) + eps)`` from there on. Elements whose gradient was 0 until then have no variance, stay as they are
    but for decay, and have no say in the factor. State: 3 values per element.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        freeze_step: steps until the variance is frozen, or ``"stable"``, as of :class:`OneBitAdam`.
        betas: of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: part of the direction.
        bias_correction: False: none, as in the paper; see :class:`OneBitAdam`.
        trust_range: least and largest ``c`` before the variance is frozen.
        coeff_beta: of the running mean of ``c``, which begins with the first.
        factor_range: least and largest factor.
        factor_threshold: by how much of it the factor may change in a step.
        stable: as of :class:`OneBitAdam`.

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> warm = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.OneBitLamb, lr=1e-3, freeze_step=100))
        >>> warm.close()
    """

    per_element = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    per_parameter = ("step", "variance_steps", "coeff", "factor", "size", "looked", "frozen")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        freeze_step: int | str = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        trust_range: tuple[float, float] = (0.01, 10.0),
        coeff_beta: float = 0.9,
        factor_range: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
        stable: float = 0.96,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_number(OneBitLamb, name, value)
        check_betas(OneBitLamb, betas)
        check_number(OneBitLamb, "coeff_beta", coeff_beta, high=1.0)
        check_number(OneBitLamb, "factor_threshold", factor_threshold, high=1.0)
        for name, pair in {"trust_range": trust_range, "factor_range": factor_range}.items():
            given: Any = pair
            numbers = isinstance(given, (tuple, list)) and len(given) == 2 and all(is_number(each, 0) for each in given)
            if not numbers or not given[0] <= given[1]:
                raise ConfigError(
                    f"OneBitLamb({name}={described(given)}): it is the least and the largest, a pair of numbers from "
                    "0 up."
                )
        ranges = dict(trust_range=trust_range, factor_range=factor_range)
        scales = dict(coeff_beta=coeff_beta, factor_threshold=factor_threshold)
        rates = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, {**rates, **ranges, **scales}, freeze_step, stable)

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        moments = {name: torch.zeros_like(tensor) for name in self.per_element}
        return {"step": 0, "variance_steps": 0, **moments, "coeff": 0.0, "factor": 1.0, **self.watched()}

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        return 3 * itemsize * place.part_numel

    def update(self, uses: list[Use]) -> None:
        if not uses:
            return
        dense = self.how == "dense"
        for use in uses:
            use.state["step"] += 1
            if dense:
                self._follow(use)
            else:
                self._take(use)
        scales = self._trusted(uses) if dense else self._scaled(uses)
        for use, scale in zip(uses, scales, strict=True):
            # The direction is made twice, as keeping it would take as much memory as one more moment.
            use.tensor.sub_(self._direction(use).mul_(scale * use.group["lr"]))
        if dense:
            self.watch()

    def _follow(self, use: Use) -> None:
        """Both moments of a step of gradients."""
        (beta1, beta2), state = use.group["betas"], use.state
        state["exp_avg"].lerp_(use.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(use.grad, use.grad, value=1 - beta2)
        state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])
        state["variance_steps"] += 1

    def _take(self, use: Use) -> None:
        """The momentum that came, and what its change says of the gradient behind it."""
        (beta1, beta2), state = use.group["betas"], use.state
        average, fresh = state["exp_avg"], state["exp_avg_sq_fresh"]
        signs = self.meets == "signs"
        new = self.root(use.group, state).mul_(use.grad) if signs else average.lerp(use.grad, 1 - beta1)
        new = new.masked_fill(state["exp_avg_sq"] == 0, 0.0)
        grad = new.sub(average, alpha=beta1).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        average.copy_(new)

    def _trusted(self, uses: list[Use]) -> list[float]:
        """The ratio of norms of each, which its mean follows."""
        parts = [torch.stack([_squares(use.tensor), _squares(self._direction(use))]) for use in uses]
        found: list[float] = []
        for use, norms in zip(uses, torch.stack(self.summed(uses, parts)).sqrt().tolist(), strict=True):
            ratio = 1.0
            if min(norms) > 0:
                low, high = use.group["trust_range"]
                ratio = min(max(norms[0] / norms[1], low), high)
                stays = use.group["coeff_beta"] if use.state["coeff"] else 0.0
                use.state["coeff"] = use.state["coeff"] * stays + ratio * (1 - stays)
            found.append(ratio)
        return found

    def _scaled(self, uses: list[Use]) -> list[float]:
        """The mean of each times its factor."""
        most = torch.cat(self.greatest(uses, [self._change(use).reshape(1) for use in uses])).tolist()
        parts = [
            torch.stack([_squares(self._direction(use, decays=False)), _squares(self._direction(use))]) for use in uses
        ]
        norms = torch.stack(self.summed(uses, parts)).sqrt().tolist()
        found: list[float] = []
        for use, factor, (plain, decayed) in zip(uses, most, norms, strict=True):
            group, last = use.group, use.state["factor"]
            factor = factor if factor > 0 else 1.0  # no element has a variance
            if group["weight_decay"]:
                share = min(1.0, plain / decayed) if decayed else 0.0
                factor = factor * share + 1 - share
            (low, high), change = group["factor_range"], group["factor_threshold"]
            factor = min(max(factor, low), high)
            factor = min(max(factor, last * (1 - change)), last * (1 + change))
            use.state["factor"] = factor
            found.append((use.state["coeff"] or 1.0) * factor)  # none where a norm was always 0
        return found

    def _direction(self, use: Use, *, decays: bool = True) -> Tensor:
        """Adam's direction, and the decay, a new tensor."""
        direction = use.state["exp_avg"] / self.root(use.group, use.state)
        direction.div_(self.corrections(use.group, use.state)[0])
        return direction.add_(use.tensor, alpha=use.group["weight_decay"]) if decays else direction

    def _change(self, use: Use) -> Tensor:
        """The greatest ratio of what is divided by to what would be, over a part's elements that have a variance."""
        kept, fresh = use.state["exp_avg_sq"], use.state["exp_avg_sq_fresh"]
        if not kept.numel():
            return torch.zeros((), dtype=torch.float64, device=kept.device)
        eps, (_, smaller) = use.group["eps"], self.corrections(use.group, use.state)
        _, small = self.corrections(use.group, {**use.state, "variance_steps": use.state["step"]})
        ratio = kept.sqrt().mul_(smaller**-0.5).add_(eps) / fresh.sqrt().mul_(small**-0.5).add_(eps)
        return ratio.masked_fill_(kept == 0, 0.0).max().double()


def _squares(part: Tensor) -> Tensor:
    return square_sum([part.reshape(-1)], part.device)
