"""What an optimizer of ours sees: parts of parameters, and the ranks that have the other parts.

On a plain model every part is a whole parameter and there are no other ranks. On shards a part is the elements of a
parameter that lie in this rank's master range, a 1-D view that may be empty; every rank has a part of every parameter,
in the same order, so that ranks which sum or exchange something per parameter mean the same ones.

    elementwise          reads its part only                                       Lion, AdamW8bit
    sums per parameter   ``summed``: one small vector for all parameters           LAMB, Adafactor
    whole matrices       ``owners.on_owners``: parts go to a rank that completes   Muon, GaLore
                         the matrix, what it makes of it comes back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardfold.errors import ConfigError
from shardfold.nn.axis_group import AxisGroup, OneRank
from shardfold.plan.axes import Axes
from shardfold.plan.cost import Sent
from shardfold.plan.placement import Box
from shardfold.torch_internals import spare_compiler

__all__ = ["PartOptimizer", "PartRanks", "ShardPlacement", "Use", "check_betas", "check_number"]


class ShardPlacement(NamedTuple):
    """Where parts of one parameter are.

    Attributes:
        shape: of the parameter, as the ranks have it together.
        shares: ``(start, stop)`` in the flattened parameter of each rank's part, by rank.
        rank: whose part is this one.
        larger: the shape of the larger parameter that this one is a box of; empty: it is the whole.
        box: which box; None: it is the whole.
        axes: of the mesh, on which ranks have the other boxes.
    """

    shape: tuple[int, ...]
    shares: tuple[tuple[int, int], ...]
    rank: int = 0
    larger: tuple[int, ...] = ()
    box: Box | None = None
    axes: Axes = ()

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    def whole_numel(self) -> int:
        """Elements of the larger parameter that it is a box of, or of itself."""
        return prod(self.whole)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the larger parameter that it is a box of, or of itself."""
        return self.larger or self.shape

    @property
    def start(self) -> int:
        return self.shares[self.rank][0]

    @property
    def part_numel(self) -> int:
        """Elements of this rank's part."""
        return self.shares[self.rank][1] - self.start


class Use(NamedTuple):
    """A part that has a gradient in this step, which all ranks agree on.

    Attributes:
        tensor: the part, ``(place.part_numel,)`` on shards and ``place.shape`` of a whole parameter; updated in place.
        grad: of the same shape and dtype.
    """

    group: dict[str, Any]
    tensor: Tensor
    grad: Tensor
    state: dict[str, Any]
    place: ShardPlacement


class PartRanks:
    """The ranks that hold parts of the same parameters. These here are one process that holds all of every parameter.

    Attributes:
        group: the ranks.
        kind: what an exchange is counted as.
        places: of each rank, whose part of a box it has and of which box.
    """

    group: AxisGroup = OneRank()
    kind = Sent("update", "ALL_TO_ALL", ())
    places: Sequence[tuple[int, int]] = ((0, 0),)

    def beside(self, axes: Axes) -> PartRanks:
        """These ranks and those along more axes, which have other boxes of parameters."""
        return self


class PartOptimizer(Optimizer):
    """A ``torch.optim`` optimizer whose update is right on parts of parameters.

    It works on a plain model as any other. An engine gives it the other ranks and the place of every part.

    Attributes:
        per_element: names of the states that have a value for each element.
        per_parameter: names of the states that a parameter has once; equal on all ranks.
        elementwise: whether it reads nothing but the elements it updates, so that it asks no other rank.
        exchanges: whether it asks the other ranks for more than sums.
        multiplies: whether it multiplies matrices in a dtype that it takes by what devices are fast in.
        products: that dtype, the same on all ranks that compute alike; None: nobody has asked them.
        places: of parts; what is not in it is a whole parameter.
    """

    per_element: ClassVar[tuple[str, ...]] = ()
    per_parameter: ClassVar[tuple[str, ...]] = ("step",)
    elementwise: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False
    products: torch.dtype | None = None
    ranks = PartRanks()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.places: dict[Tensor, ShardPlacement] = {}
        spare_compiler()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("places", {})  # a copy is an optimizer of whole parameters

    def connect(self, ranks: PartRanks, products: torch.dtype | None) -> None:
        """The ranks that have the other parts, and the dtype in which all of them multiply; None: nobody has asked."""
        self.ranks, self.products = ranks, products

    @property
    def align(self) -> int:
        """A part begins and ends at a multiple of this many elements of its parameter (but for the parameter's end)."""
        return 1

    # -- what each optimizer says of itself

    def needs_whole(self, group: dict[str, Any]) -> bool:
        """Whether the update of an element reads others of its parameter, so that a slice of it is not enough."""
        return not self.elementwise

    def update(self, uses: list[Use]) -> None:
        """One step of the parts that have gradients; called without autograd."""
        raise NotImplementedError

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        """The state of a part before its first step."""
        raise NotImplementedError

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        """Bytes of a part's state, in tensors, for elements of ``itemsize`` bytes."""
        raise NotImplementedError

    def kept_bytes(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> int:
        """Of :meth:`state_bytes`, what this rank keeps."""
        return self.state_bytes(group, place, tensor.itemsize)

    def planned_bytes(self, parts: Sequence[tuple[dict[str, Any], int, ShardPlacement]]) -> list[int]:
        """What the rank that keeps the most will keep of each part, by its group, the bytes of an element and its
        place; nothing needs to be made yet."""
        return [self.state_bytes(group, place, itemsize) for group, itemsize, place in parts]

    def traffic(self) -> dict[Sent, tuple[int, int]]:
        """Collectives, and bytes that this rank sends in them, in a step that uses all parameters, by kind; sums are
        not counted here, as they are control messages."""
        return {}

    def refuses(self, group: dict[str, Any], shape: Sequence[int], whole: Sequence[int]) -> str:
        """Why a box of that shape is not enough for an update that needs the whole; empty: it is."""
        return ""

    # -- a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters that have gradients; gives what ``closure`` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.update(self._uses())
        return loss

    def _uses(self) -> list[Use]:
        uses: list[Use] = []
        for group, parameter, place in self.parts():
            grad = parameter.grad
            if grad is None or not place.whole_numel:
                continue
            if grad.is_sparse or grad.is_complex():
                raise ConfigError(
                    f"{type(self).__name__} takes no sparse or complex gradients: make the embedding with "
                    "sparse=False, or update that parameter with another optimizer."
                )
            self.prepare(group, parameter, place)
            uses.append(Use(group, parameter, grad, self.state[parameter], place))
        return uses

    def parts(self) -> Iterable[tuple[dict[str, Any], Tensor, ShardPlacement]]:
        """Every part with its group and place, in an order that all ranks share."""
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.places or type(self.ranks) is PartRanks:  # else it stands for a group that is elsewhere
                    yield group, p, self.places.get(p) or ShardPlacement(tuple(p.shape), ((0, p.numel()),))

    def load_state_dict(self, state_dict: Any) -> None:
        """As of any optimizer; every state keeps its own dtype, where PyTorch would give it the parameter's."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (_, p, _) in zip(numbers, self.parts(), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value

    def summed(self, uses: Sequence[Use], parts: Sequence[Tensor]) -> list[Tensor]:
        """The sums of 1-D ``parts``, one for each use, over all ranks that have elements of its parameter."""
        return self._joined(uses, parts, lambda group, every: group.all_reduce(every))

    def greatest(self, uses: Sequence[Use], parts: Sequence[Tensor]) -> list[Tensor]:
        """As :meth:`summed`, the greatest."""
        return self._joined(uses, parts, lambda group, every: group.max(every))

    def _joined(
        self, uses: Sequence[Use], parts: Sequence[Tensor], join: Callable[[AxisGroup, Tensor], Tensor]
    ) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for axes in sorted({use.place.axes for use in uses}):
            these = [i for i, use in enumerate(uses) if use.place.axes == axes]
            every = join(self.ranks.beside(axes).group, torch.cat([parts[i] for i in these]))
            found.update(zip(these, every.split([len(parts[i]) for i in these]), strict=True))
        return [found[i] for i in range(len(uses))]

    # -- the state, for who keeps shards

    def prepare(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> None:
        """Makes the state of a part that has none."""
        if not self.state[tensor]:
            self.state[tensor].update(self.new_state(group, tensor, place))

    def dtypes(self, tensor: Tensor) -> dict[str, torch.dtype]:
        """The states of a part that have a value for each element, by name."""
        state = self.state.get(tensor, {})
        return {name: state[name].dtype for name in self.per_element if name in state}

    def value(self, tensor: Tensor, name: str) -> Tensor:
        """One of these, of the shape of the part."""
        return self.state[tensor][name]

    def take_value(self, tensor: Tensor, name: str, values: Tensor) -> None:
        """Writes one of these."""
        self.state[tensor][name].copy_(values)

    def stored(self, tensor: Tensor) -> dict[str, tuple[int, Tensor]]:
        """These as they are kept, for a checkpoint: ``{name: (elements per value, 1-D values)}``."""
        return {name: (1, self.value(tensor, name).reshape(-1)) for name in self.dtypes(tensor)}

    def once(self, tensor: Tensor) -> dict[str, Any]:
        """The states that a parameter has once, by name."""
        state = self.state.get(tensor, {})
        return {name: state[name] for name in self.per_parameter if name in state}

    def owned(self, tensor: Tensor) -> dict[str, Tensor]:
        """The states of a parameter that one rank keeps for all, by name, on that rank; else none."""
        return {}

    def elsewhere(self, tensor: Tensor) -> Iterable[str]:
        """Names of states of that kind that another rank keeps."""
        return ()

    def take_once(self, tensor: Tensor, name: str, value: Any) -> None:
        """Sets one of :meth:`once` or, on the rank that keeps it, of :meth:`owned`."""
        self.state[tensor][name] = value.to(tensor.device, copy=True) if isinstance(value, Tensor) else value


def check_number(kind: type, name: str, value: Any, low: float = 0.0, high: float = float("inf")) -> None:
    """Refuses a hyper-parameter outside of ``[low, high)``; tensors are taken as they are.

    Raises:
        ConfigError: with one sentence.
    """
    if isinstance(value, Tensor):
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value < high:
        wanted = f"a number >= {low:g}" + (f" and < {high:g}" if high < float("inf") else "")
        raise ConfigError(f"{kind.__name__}({name}={value!r}): it is {wanted}.")


def check_betas(kind: type, betas: Any) -> None:
    """Refuses what is not a pair of numbers in [0, 1).

    Raises:
        ConfigError: with one sentence.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"{kind.__name__}(betas={betas!r}): it is a pair of numbers >= 0 and < 1.")
    for beta in betas:
        check_number(kind, "betas", beta, high=1.0)
