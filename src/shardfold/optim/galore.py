"""GaLore: AdamW whose moments are of gradients that are projected to a low rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, did_you_mean
from shardfold.optim._hidden_matrices import hidden_matrices
from shardfold.optim._owners import balanced, exchanged, joined_place, on_owners
from shardfold.optim.adamw import adamw_
from shardfold.optim.adamw8bit import AdamW8bit, dequantize, quantize
from shardfold.optim.parts import PartOptimizer, PartRanks, ShardPlacement, Use, check_betas, check_number
from shardfold.plan.axes import Axes
from shardfold.plan.checks import known_arguments
from shardfold.plan.cost import Sent

__all__ = ["GaLore", "galore_groups"]

PROJECTIONS = ("std", "reverse_std", "left", "right", "full")
LEFT, RIGHT = "projector_left", "projector_right"
MOMENTS = ("projected_exp_avg", "projected_exp_avg_sq")
KEPT_WHOLE = (LEFT, RIGHT, *MOMENTS, *(f"{name}_{part}" for name in MOMENTS for part in ("codes", "scales")))
"""States that the owner of a matrix keeps, and no other rank."""


@known_arguments
class GaLore(AdamW8bit):
    """GaLore (Zhao et al., arXiv 2403.03507, algorithm 2): of each matrix in a group with a ``rank`` the gradient is
    projected to that rank, AdamW (arXiv 1711.05101) steps in the projected space, and the step is projected back.

    Takes the groups of galore-torch's ``GaLoreAdamW``; groups without ``rank`` are AdamW's. The projector is made of
    the singular vectors of the gradient in the first step and every ``update_proj_gap`` steps; moments are kept as they
    are then, as in the paper. A singular vector has no sign of its own: each takes the one that points to where its
    predecessor did, so that moments fit it, and results depend on no LAPACK. ``eps`` is added behind the correction
    of the bias, as in the paper and in ``torch.optim.AdamW``.

    A singular value decomposition needs the whole matrix. One rank owns each matrix: gradients go to it, in their own
    dtype, and what is to be added comes back, so that a rank sends about twice the bytes of its own elements. State of
    an ``(m, n)`` matrix under ``"std"``, on its owner only: ``2 * rank * max(m, n)`` values of moments, which is
    ``rank / min(m, n)`` of AdamW's, and ``rank * min(m, n)`` of the projector; in fp32, or the matrix's dtype if that
    is wider. AdamW's groups: 2 values per element.

    Args:
        params: groups, as :func:`galore_groups` makes them.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        rank: of the projected gradients; None: a group is AdamW's. Groups give it, or it is that of all.
        update_proj_gap: steps from one projector to the next.
        scale: of what is projected back (the paper's alpha): a matrix has the rate ``lr * scale``.
        proj_type: ``"std"`` projects the shorter side, ``"reverse_std"`` the longer; ``"left"`` rows, ``"right"``
            columns, ``"full"`` both.
        bits: 32, or 8: moments of both kinds of groups are as in :class:`AdamW8bit`. Projectors are not.
        block, min_8bit_size: of 8-bit moments, as in :class:`AdamW8bit`; the latter counts projected elements.

    Raises:
        ConfigError: a hyper-parameter is out of its range, or a group with a rank has something else than matrices.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> low = sf.optim.GaLore(sf.optim.galore_groups(model, rank=2), lr=1e-3)
        >>> engine = sf.Engine(model, optimizer=low, layout="zero2")
        >>> engine.close()
    """

    elementwise = False
    exchanges = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        bits: int = 32,
        block: int = 256,
        min_8bit_size: int = 4096,
    ) -> None:
        if bits not in (8, 32):
            raise ConfigError(f"GaLore(bits={bits!r}): moments have 8 or 32 bits.")
        if not isinstance(block, int) or block < 16 or block & (block - 1):
            raise ConfigError(f"GaLore(block={block!r}): it is a power of 2 from 16 up, such as 256 or 2048.")
        check_number(GaLore, "min_8bit_size", min_8bit_size)
        self.bits, self.block, self.min_8bit_size = bits, block, min_8bit_size
        options = dict(rank=rank, update_proj_gap=update_proj_gap, scale=scale, proj_type=proj_type)
        PartOptimizer.__init__(self, params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "bits": self.bits}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise

    @property
    def align(self) -> int:
        return self.block if self.bits == 8 else 1

    def needs_whole(self, group: dict[str, Any]) -> bool:
        return group["rank"] is not None

    def refuses(self, group: dict[str, Any], shape: Sequence[int], whole: Sequence[int]) -> str:
        parts = [b / a for a, b in zip(shape, whole, strict=True) if a != b]
        equal = len(parts) == 1 and parts[0] == int(parts[0])
        return "" if equal else "ranks have parts of it that are not equal"

    # -- who owns which matrix, and what it keeps

    def connect(self, ranks: PartRanks, products: torch.dtype | None) -> None:
        super().connect(ranks, products)
        every = [part for part in self.parts() if part[0]["rank"] is not None]
        for axes in sorted({place.axes for _, _, place in every}):
            some = [part for part in every if part[2].axes == axes]
            costs = [self.state_bytes(group, place, tensor.itemsize) for group, tensor, place in some]
            owners = balanced(costs, self.ranks.beside(axes).group.size)
            for (group, tensor, place), owner in zip(some, owners, strict=True):
                self.state[tensor]["owner"] = owner
                self._make_owned(group, tensor, place)

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        if group["rank"] is None:
            if self.bits == 8:
                return super().new_state(group, tensor, place)
            wide = torch.zeros_like(tensor, dtype=_wide(tensor.dtype))
            return {"step": 0, "exp_avg": wide, "exp_avg_sq": wide.clone()}
        if place.box is None and len(place.shares) == 1 and tensor not in self.places:  # all of it is here
            return {"step": 0, **self._whole_state(group, tensor, place)}
        if type(self.ranks) is PartRanks:  # connect() says who owns it
            return {"step": 0}
        owner = self._least_loaded(place)
        own = owner == self.ranks.beside(place.axes).group.rank
        return {"step": 0, "owner": owner, **(self._whole_state(group, tensor, place) if own else {})}

    def _least_loaded(self, place: ShardPlacement) -> int:
        """Who owns a matrix that comes later: all ranks have seen the same ones come and go."""
        load = [0] * self.ranks.beside(place.axes).group.size
        for group, tensor, other in self.parts():
            if other.axes == place.axes and "owner" in self.state.get(tensor, {}):
                load[self.state[tensor]["owner"]] += self.state_bytes(group, other, tensor.itemsize)
        return load.index(min(load))

    def _owns(self, tensor: Tensor, place: ShardPlacement) -> bool:
        return self.state[tensor].get("owner", 0) == self.ranks.beside(place.axes).group.rank

    def _make_owned(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> None:
        if self._owns(tensor, place):
            self.state[tensor].update(self._whole_state(group, tensor, place))

    def _whole_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        """What the owner keeps of a matrix before its first step."""
        low, kept = _low_shape(group, place.whole), {"dtype": _wide(tensor.dtype), "device": tensor.device}
        state: dict[str, Any] = {
            side: torch.zeros(place.whole[side == RIGHT], _rank(group, place.whole), **kept)
            for side in _sides(group, place.whole)
        }
        for name in MOMENTS:
            zeros = torch.zeros(low, **kept)
            state |= self._encoded(name, zeros) if self._in_codes(prod(low)) else {name: zeros}
        return state

    def _in_codes(self, numel: int) -> bool:
        return self.bits == 8 and numel >= self.min_8bit_size

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        """Of a matrix: what its owner keeps."""
        wide = max(itemsize, 4)
        if group["rank"] is None:
            return super().state_bytes(group, place, itemsize) if self.bits == 8 else 2 * wide * place.part_numel
        low = prod(_low_shape(group, place.whole))
        moment = low + 4 * -(-low // self.block) if self._in_codes(low) else wide * low
        projectors = sum(place.whole[side == RIGHT] for side in _sides(group, place.whole)) * _rank(group, place.whole)
        return (2 * moment + wide * projectors) if place.whole_numel else 0

    def kept_bytes(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> int:
        if group["rank"] is not None and not self._owns(tensor, place):
            return 0
        return super().kept_bytes(group, tensor, place)

    def planned_bytes(self, parts: Sequence[tuple[dict[str, Any], int, ShardPlacement]]) -> list[int]:
        found = super().planned_bytes(parts)
        whole = [i for i, (group, _, _) in enumerate(parts) if group["rank"] is not None]
        owners = balanced([found[i] for i in whole], max((len(parts[i][2].shares) for i in whole), default=1))
        load: dict[int, int] = {}
        for i, owner in zip(whole, owners, strict=True):
            load[owner] = load.get(owner, 0) + found[i]
        most = max(load, key=lambda owner: load[owner], default=0)
        for i, owner in zip(whole, owners, strict=True):
            found[i] *= owner == most
        return found

    def owned(self, tensor: Tensor) -> dict[str, Tensor]:
        state = self.state.get(tensor, {})
        return {name: state[name] for name in KEPT_WHOLE if name in state}

    def elsewhere(self, tensor: Tensor) -> Iterable[str]:
        return () if self.owned(tensor) else KEPT_WHOLE

    def dtypes(self, tensor: Tensor) -> dict[str, torch.dtype]:
        state = self.state.get(tensor, {})
        if f"{self.per_element[0]}_codes" in state:
            return super().dtypes(tensor)
        return PartOptimizer.dtypes(self, tensor)

    def take_once(self, tensor: Tensor, name: str, value: Any) -> None:
        if name in KEPT_WHOLE:
            own = self.owned(tensor)
            if not own:
                return
            if name not in own:
                bits = 8 if name.endswith(("_codes", "_scales")) else 32
                raise ConfigError(
                    f"GaLore has no use for {name!r} here: what is loaded was kept with bits={bits}, or another "
                    "proj_type or min_8bit_size; make the optimizer with these, or load weights only."
                )
            value = value.to(own[name].dtype)
        super().take_once(tensor, name, value)

    # -- a step

    def update(self, uses: list[Use]) -> None:
        super().update([use for use in uses if use.group["rank"] is None])
        matrices = [use for use in uses if use.group["rank"] is not None]
        for use in matrices:
            use.state["step"] += 1
        for kind in sorted({(use.place.axes, str(use.grad.dtype)) for use in matrices}):
            self._exchange(kind[0], [u for u in matrices if (u.place.axes, str(u.grad.dtype)) == kind])

    def _exchange(self, axes: Axes, uses: list[Use]) -> None:
        ranks = self.ranks.beside(axes)

        def stepped(i: int, parts: Tensor) -> Tensor:
            use, place = uses[i], uses[i].place
            step = self._step(use, _matrix(parts, place).to(_wide(parts.dtype)))
            return _boxes(step, place).to(parts.dtype)

        parts = [use.grad.reshape(-1) for use in uses]
        places = [joined_place(use.place, ranks) for use in uses]
        owners = [use.state.get("owner", 0) for use in uses]
        for i, part in on_owners(parts, places, owners, ranks.group, stepped):
            group, tensor = uses[i].group, uses[i].tensor
            lr = float(group["lr"])
            tensor.mul_(1 - lr * group["weight_decay"])
            tensor.add_(part.view(tensor.shape), alpha=lr)

    def _step(self, use: Use, grad: Tensor) -> Tensor:
        """What is added to a matrix, ``(rows, columns)``, for a rate of 1."""
        group, state, sides = use.group, use.state, _sides(use.group, grad.shape)
        if any(side not in state or state[side].shape[1] != _rank(group, grad.shape) for side in sides):
            for name in KEPT_WHOLE:  # its group has another rank now: it begins anew
                state.pop(name, None)
            state.update(self._whole_state(group, use.tensor, use.place))
            self._turn(state, sides, grad)
        elif (state["step"] - 1) % group["update_proj_gap"] == 0:
            self._turn(state, sides, grad)
        low = grad
        low = state[LEFT].T @ low if LEFT in sides else low
        low = low @ state[RIGHT] if RIGHT in sides else low
        m, v = (self._decoded(state, name, low) for name in MOMENTS)
        step = torch.zeros_like(low)
        adamw_(step, low, m, v, state["step"], {**group, "lr": 1.0, "weight_decay": 0.0}, group["eps"])
        for name, moment in zip(MOMENTS, (m, v), strict=True):
            if name not in state:
                state.update(self._encoded(name, moment))
        step = step @ state[RIGHT].T if RIGHT in sides else step
        step = state[LEFT] @ step if LEFT in sides else step
        return step.mul_(group["scale"])

    def _turn(self, state: dict[str, Any], sides: Sequence[str], grad: Tensor) -> None:
        """The projectors are of this gradient from now on; one that is not finite has no singular vectors."""
        if not bool(grad.isfinite().all()):
            return
        u, _, vh = torch.linalg.svd(grad, full_matrices=False)
        for side, vectors in ((LEFT, u), (RIGHT, vh.T)):
            if side in sides:
                old, new = state[side], vectors[:, : state[side].shape[1]]
                signs = torch.where((old * new).sum(0) < 0, -1.0, 1.0).to(new.dtype)
                old.copy_(new * signs)

    def _decoded(self, state: dict[str, Any], name: str, like: Tensor) -> Tensor:
        if name in state:
            return state[name]
        codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
        return dequantize(codes, scales, self.block, signed=name == MOMENTS[0]).view(like.shape).to(like.dtype)

    def _encoded(self, name: str, values: Tensor) -> dict[str, Tensor]:
        codes, scales = quantize(values.reshape(-1).float(), self.block, signed=name == MOMENTS[0])
        return {f"{name}_codes": codes, f"{name}_scales": scales}

    def traffic(self) -> dict[Sent, tuple[int, int]]:
        found: dict[Sent, tuple[int, int]] = {}
        matrices = [(t, place) for group, t, place in self.parts() if group["rank"] is not None and place.whole_numel]
        for axes, dtype in dict.fromkeys((place.axes, t.dtype) for t, place in matrices):
            ranks = self.ranks.beside(axes)
            some = [(t, place) for t, place in matrices if place.axes == axes and t.dtype == dtype]
            owners = [self.state[t].get("owner", 0) for t, _ in some]
            more = exchanged([joined_place(place, ranks) for _, place in some], owners, dtype.itemsize, ranks.group)
            calls, sent = found.get(ranks.kind, (0, 0))
            if more[0]:
                found[ranks.kind] = calls + more[0], sent + more[1]
        return found


@known_arguments
def galore_groups(
    model: nn.Module,
    *,
    rank: int,
    update_proj_gap: int = 200,
    scale: float = 0.25,
    proj_type: str = "std",
    others: Sequence[str] = ("*head*",),
    **adamw: Any,
) -> list[dict[str, Any]]:
    """Two groups for :class:`GaLore`: the matrices of hidden layers, which are projected, and everything else for
    AdamW, as :func:`muon_groups` sorts them.

    Args:
        model: whose trainable parameters are sorted.
        rank, update_proj_gap, scale, proj_type: of the matrices.
        others: patterns of names of parameters that are no hidden layers, such as the output layer's.
        adamw: more options of the second group.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> [len(group["params"]) for group in sf.optim.galore_groups(model, rank=4)]
        [2, 2]
    """
    matrices, rest = hidden_matrices(model, others)
    options = dict(rank=rank, update_proj_gap=update_proj_gap, scale=scale, proj_type=proj_type)
    return [{"params": matrices, **options}, {"params": rest, **adamw}]


def _check(group: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: an option of a group is out of its range, or its parameters have no such projection.
    """
    for name in ("lr", "eps", "weight_decay", "scale"):
        check_number(GaLore, name, group[name])
    check_betas(GaLore, group["betas"])
    for name in ("rank", "update_proj_gap"):
        value = group[name]
        if not (name == "rank" and value is None) and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"GaLore({name}={value!r}): it is an integer from 1 on.")
    if group["proj_type"] not in PROJECTIONS:
        near = did_you_mean(str(group["proj_type"]), PROJECTIONS)
        raise ConfigError(f"GaLore(proj_type={group['proj_type']!r}) is unknown.{near}")
    wrong = [tuple(p.shape) for p in group["params"] if p.dim() != 2]
    if wrong and group["rank"] is not None:
        raise ConfigError(
            f"GaLore got a parameter of shape {wrong[0]} in a group with rank={group['rank']}: only matrices are "
            "projected, so put biases, norms, embeddings and heads into a group without rank; "
            "sf.optim.galore_groups(model, rank=...) makes both groups."
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which moments and projectors are kept."""
    return torch.promote_types(dtype, torch.float32)


def _sides(group: Mapping[str, Any], shape: Sequence[int]) -> tuple[str, ...]:
    """Which sides of a matrix are projected."""
    shorter, longer = (RIGHT, LEFT) if shape[0] >= shape[1] else (LEFT, RIGHT)
    kinds = {"std": (shorter,), "reverse_std": (longer,), "left": (LEFT,), "right": (RIGHT,), "full": (LEFT, RIGHT)}
    return kinds[group["proj_type"]]


def _rank(group: Mapping[str, Any], shape: Sequence[int]) -> int:
    """A matrix has no more singular vectors than its shorter side is long."""
    return min(group["rank"], *shape)


def _low_shape(group: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, int]:
    """Of the projected gradient."""
    sides, rank = _sides(group, shape), _rank(group, shape)
    return (rank if LEFT in sides else shape[0], rank if RIGHT in sides else shape[1])


def _cut(place: ShardPlacement) -> tuple[int, int]:
    """Along which dimension boxes are cut, and of how many matrices one behind the other they have a part each."""
    assert place.box is not None
    dim = next(d for d, (part, whole) in enumerate(zip(place.shape, place.whole, strict=True)) if part != whole)
    return dim, place.box.stacked[1] if place.box.stacked and place.box.stacked[0] == dim else 1


def _matrix(parts: Tensor, place: ShardPlacement) -> Tensor:
    """The matrix that boxes make up, ``(boxes, rows, columns)``, with rows and columns in the whole's order."""
    if place.box is None:
        return parts
    dim, stacked = _cut(place)
    each = parts.unflatten(1 + dim, (stacked, -1))  # (boxes, ..., stacked, length, ...)
    return each.movedim(0, 1 + dim).reshape(place.whole)


def _boxes(matrix: Tensor, place: ShardPlacement) -> Tensor:
    """The boxes of a matrix, one behind the other: what :func:`_matrix` was made of."""
    if place.box is None:
        return matrix
    dim, stacked = _cut(place)
    each = matrix.unflatten(dim, (stacked, -1, place.shape[dim] // stacked))
    return each.movedim(dim + 1, 0).flatten(1 + dim, 2 + dim).contiguous()
