"""Muon: momentum whose singular values are made equal, for the matrices of hidden layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.errors import ConfigError, did_you_mean
from shardfold.optim._hidden_matrices import hidden_matrices
from shardfold.optim._owners import balanced, exchanged, joined_place, on_owners
from shardfold.optim.adamw import adamw_
from shardfold.optim.parts import PartOptimizer, ShardPlacement, Use, check_betas, check_number
from shardfold.plan.axes import Axes
from shardfold.plan.checks import known_arguments
from shardfold.plan.cost import Sent

__all__ = ["Muon", "muon_groups"]

SCALES = ("original", "match_rms_adamw")
TRAVELS = torch.bfloat16
"""In which matrices travel where no ``ns_dtype`` is given, whatever they are multiplied in: all devices send alike."""


@known_arguments
class Muon(PartOptimizer):
    """Muon (K. Jordan, https://kellerjordan.github.io/posts/muon/; at scale arXiv 2502.16982), with the arguments and
    the numbers of ``torch.optim.Muon``, and AdamW (arXiv 1711.05101) for groups with ``adamw=True``.

    Newton-Schulz needs whole matrices. Momentum is element-wise and stays split; what is to be orthogonalized goes to
    one rank per matrix and its result comes back, both in bf16 or what ``ns_dtype`` says, so that a rank sends about
    4 bytes per element of its own, or twice that dtype's. State: 1 value per element (AdamW's groups: 2).

    Args:
        params: groups, as :func:`muon_groups` makes them; all parameters of a group without ``adamw`` are matrices.
        lr, weight_decay: of every group that has none of its own.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as in ``torch.optim.Muon``.
        eps: least norm that a matrix is divided by.
        ns_dtype: in which matrices travel and are orthogonalized. None: they travel in bf16, and are orthogonalized in
            it too if all ranks of the engine have devices that multiply it fast, else in fp32. (PyTorch's takes bf16.)
        adamw: whether a group is AdamW's.
        betas, adamw_eps: of AdamW.

    Raises:
        ConfigError: a hyper-parameter is out of its range, or a group for matrices has something else.

    Examples:
        >>> groups = sf.optim.muon_groups(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), lr=0.02, adamw_lr=1e-3)
        >>> len(groups)
        2
    """

    per_element = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    exchanges = True
    multiplies = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        adamw: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        if not isinstance(ns_steps, int) or not 0 < ns_steps < 100:
            raise ConfigError(f"Muon(ns_steps={ns_steps!r}): it is an integer from 1 to 99.")
        if adjust_lr_fn is not None and adjust_lr_fn not in SCALES:
            raise ConfigError(
                f"Muon(adjust_lr_fn={adjust_lr_fn!r}) is unknown.{did_you_mean(str(adjust_lr_fn), SCALES)}"
            )
        if ns_dtype is not None and not (isinstance(ns_dtype, torch.dtype) and ns_dtype.is_floating_point):
            raise ConfigError(f"Muon(ns_dtype={ns_dtype!r}): it is a floating dtype, as torch.float32, or None.")
        super().__init__(
            params,
            dict(
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=ns_coefficients,
                eps=eps,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
                ns_dtype=ns_dtype,
                adamw=adamw,
                betas=betas,
                adamw_eps=adamw_eps,
            ),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for name in ("lr", "weight_decay", "eps", "adamw_eps"):
                check_number(Muon, name, group[name])
            check_number(Muon, "momentum", group["momentum"], high=1.0)
            check_betas(Muon, group["betas"])
        except ConfigError:
            self.param_groups.pop()
            raise
        wrong = [tuple(p.shape) for p in group["params"] if p.dim() != 2]
        if wrong and not group["adamw"]:
            self.param_groups.pop()
            raise ConfigError(
                f"Muon got a parameter of shape {wrong[0]} in a group for matrices: put biases, norms, embeddings and "
                "heads into a group with adamw=True; sf.optim.muon_groups(model) makes both groups."
            )

    def needs_whole(self, group: dict[str, Any]) -> bool:
        return not group["adamw"]

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        if group["adamw"]:
            return {"step": 0, "exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}
        return {"momentum_buffer": torch.zeros_like(tensor)}

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        return (2 if group["adamw"] else 1) * itemsize * place.part_numel

    def update(self, uses: list[Use]) -> None:
        for use in uses:
            if use.group["adamw"]:
                use.state["step"] += 1
                adamw_(
                    use.tensor,
                    use.grad,
                    use.state["exp_avg"],
                    use.state["exp_avg_sq"],
                    use.state["step"],
                    use.group,
                    use.group["adamw_eps"],
                )
        matrices = [use for use in uses if not use.group["adamw"]]
        for dtype in dict.fromkeys(use.group["ns_dtype"] for use in matrices):
            self._orthogonalize([use for use in matrices if use.group["ns_dtype"] is dtype], dtype or TRAVELS)

    def _orthogonalize(self, uses: list[Use], dtype: torch.dtype) -> None:
        parts: list[Tensor] = []
        for use in uses:
            momentum, average = use.group["momentum"], use.state["momentum_buffer"]
            average.lerp_(use.grad, 1 - momentum)
            direction = use.grad.lerp(average, momentum) if use.group["nesterov"] else average
            parts.append(direction.reshape(-1).to(dtype))
        for axes in sorted({use.place.axes for use in uses}):
            these = [i for i, use in enumerate(uses) if use.place.axes == axes]
            self._exchange(axes, [uses[i] for i in these], [parts[i] for i in these])

    def _exchange(self, axes: Axes, uses: list[Use], parts: list[Tensor]) -> None:
        ranks = self.ranks.beside(axes)
        places = [joined_place(use.place, ranks) for use in uses]
        owners = balanced([_cost(use.place, use.group) for use in uses], ranks.group.size)
        boxes = [use.place for use in uses]

        def equalized(i: int, matrix: Tensor) -> Tensor:
            products = uses[i].group["ns_dtype"] or self.products or accelerator.product_dtype(matrix.device)
            return _whole_equalized(matrix.to(products), boxes[i], uses[i].group).to(matrix.dtype)

        for i, part in on_owners(parts, places, owners, ranks.group, equalized):
            group, tensor = uses[i].group, uses[i].tensor
            lr = float(group["lr"])
            tensor.mul_(1 - lr * group["weight_decay"])
            tensor.add_(part.view(tensor.shape), alpha=-lr * _scale(group["adjust_lr_fn"], *boxes[i].whole))

    def refuses(self, group: dict[str, Any], shape: Sequence[int], whole: Sequence[int]) -> str:
        parts = [b / a for a, b in zip(shape, whole, strict=True) if a != b]
        equal = len(parts) == 1 and parts[0] == int(parts[0])
        return "" if equal else "ranks have parts of it that are not equal"

    def traffic(self) -> dict[Sent, tuple[int, int]]:
        found: dict[Sent, tuple[int, int]] = {}
        matrices = [(group, place) for group, _, place in self.parts() if not group["adamw"] and place.whole_numel]
        for dtype, axes in dict.fromkeys((group["ns_dtype"], place.axes) for group, place in matrices):
            ranks = self.ranks.beside(axes)
            some = [(g, place) for g, place in matrices if g["ns_dtype"] is dtype and place.axes == axes]
            owners = balanced([_cost(place, group) for group, place in some], ranks.group.size)
            joined = [joined_place(place, ranks) for _, place in some]
            more = exchanged(joined, owners, (dtype or TRAVELS).itemsize, ranks.group)
            calls, sent = found.get(ranks.kind, (0, 0))
            if more[0]:
                found[ranks.kind] = calls + more[0], sent + more[1]
        return found


@known_arguments
def muon_groups(
    model: nn.Module, *, lr: float, adamw_lr: float, others: Sequence[str] = ("*head*",), **adamw: Any
) -> list[dict[str, Any]]:
    """Two groups for :class:`Muon`: the matrices of hidden layers, and everything else for AdamW.

    Everything else is what has not two dims, what an ``nn.Embedding`` holds (and what is tied to it), and what a
    pattern of ``others`` names.

    Args:
        model: whose trainable parameters are sorted.
        lr: of the matrices.
        adamw_lr: of the others.
        others: patterns of names of parameters that are no hidden layers, such as the output layer's.
        adamw: more options of the second group.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> groups = sf.optim.muon_groups(model, lr=0.02, adamw_lr=1e-3)
        >>> [len(group["params"]) for group in groups]
        [2, 2]
    """
    matrices, rest = hidden_matrices(model, others)
    return [{"params": matrices, "lr": lr}, {"params": rest, "lr": adamw_lr, "adamw": True, **adamw}]


def _equalized(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton-Schulz: the same singular vectors, with singular values near 1. ``(rows, columns)``."""
    a, b, c = group["ns_coefficients"]
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _whole_equalized(matrix: Tensor, place: ShardPlacement, group: dict[str, Any]) -> Tensor:
    """:func:`_equalized` of the matrix that boxes make up, as boxes. Rows that change places do so in what comes out:
    boxes of several blocks need no order."""
    if place.box is None:
        return _equalized(matrix, group)
    if place.shape[0] != place.whole[0]:
        return _equalized(matrix.flatten(0, 1), group).view(matrix.shape)
    joined = matrix.transpose(0, 1).flatten(1, 2)
    return _equalized(joined, group).unflatten(1, (matrix.shape[0], -1)).transpose(0, 1).contiguous()


def _cost(place: ShardPlacement, group: dict[str, Any]) -> float:
    """Multiplications of :func:`_equalized`."""
    small, large = sorted(place.whole)
    return group["ns_steps"] * (2.0 * small * small * large + small**3)


def _scale(kind: str | None, rows: int, columns: int) -> float:
    """What the rate of a matrix is multiplied by, so that updates of all shapes are of one size."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
