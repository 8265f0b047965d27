"""Models that no rank could build whole: under :func:`sharded_init` each module is split as soon as it is made.

Right after the constructor of a module has run on every rank its parameters become ``early`` ones: this rank's slice of
rank 0's values, while the objects stay. Constructors may write into parameters of modules that were made before, as
many do to initialize them: what is touched is gathered, and rank 0's values are split again when the constructor that
runs (or the function that ``nn.Module.apply`` calls) has returned. So every rank must build the same modules in one
order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardfold.comm.mesh import parse_device, pick_device
from shardfold.plan.checks import check_flags, check_times, known_arguments
from shardfold.plan.patience import usual_patience
from shardfold.sharding.freed import FreedParameter
from shardfold.sharding.partitioned import TOUCHED, EarlyShard, ShardRanks, early_shard, gather, release
from shardfold.sharding.registry import model_of
from shardfold.sharding.segment import check_dtype
from shardfold.tiers.pages import let_go, spare
from shardfold.torch_internals import without_user_modes

__all__ = ["shard_module", "sharded_init"]

KEPT, ROOM = 16, 64 * 1024 * 1024  # parameters, and bytes, that may be whole because constructors touched them


@known_arguments
@contextmanager
def sharded_init(
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    shard_device: str | torch.device | None = None,
    apply: bool = True,
    patience: float | None = None,
    timeout: float = 1800.0,
    hollow: bool = False,
) -> Iterator[None]:
    """Inside, parameters of new modules are split over all ranks as soon as their module's constructor has run.

    Every rank builds the same modules; rank 0's values are everyone's. A block inside another joins it.

    Args:
        dtype: that floating parameters are cast to; None: they keep theirs.
        device: of whole values; None: this local rank's GPU if there is one, else the CPU.
        shard_device: where slices are until an engine takes them; None: on the device.
        apply: ``module.apply(fn)`` gives back after each call of ``fn`` what that touched; else at the end of the
            constructor that called it.
        patience, timeout: seconds until ranks that wait for each other in vain, or for too long, raise.
        hollow: reading the data of a split parameter gives no elements instead of raising.

    Raises:
        ConfigError: an argument is of a wrong type or value.
        OrderError: ranks build different modules, or initialize them in different ways.

    Examples:
        >>> with sf.sharded_init():
        ...     model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> split = sf.Engine(model, optimizer=adam)
        >>> tuple(split(x).shape)
        (4, 8)
    """
    if TOUCHED:
        yield
        return
    patience = usual_patience() if patience is None else patience
    check_times("sharded_init()", patience=patience, timeout=timeout)
    check_flags("sharded_init()", apply=apply, hollow=hollow)
    check_dtype("sharded_init()", dtype)
    place, kept = pick_device(device), parse_device("shard_device", shard_device) if shard_device is not None else None
    ranks = ShardRanks(place, kept, patience, timeout, hollow=hollow)
    construction = _Construction(ranks, dtype)
    spare(ranks)  # whole values that come and go leave no holes in the heap
    try:
        with _watching_constructors(construction, apply):
            yield
            construction.finish()
    finally:
        let_go(ranks)


def shard_module(
    module: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    shard_device: str | torch.device | None = None,
    hollow: bool = False,
) -> None:
    """Splits the parameters of a module that exists, as if it had been built under :func:`sharded_init`."""
    ranks = ShardRanks(
        pick_device(device), torch.device(shard_device) if shard_device is not None else None, hollow=hollow
    )
    construction = _Construction(ranks, dtype)
    for part in module.modules():
        construction.split(part)
    construction.rename(module)
    ranks.complete()


class _Construction:
    """What happens while modules are made.

    Attributes:
        levels: constructors that run, outermost first, each with the parameters that it touched; the first level is
            the block itself.
    """

    def __init__(self, ranks: ShardRanks, dtype: torch.dtype | None) -> None:
        self._ranks, self._dtype = ranks, dtype
        self.levels: list[tuple[nn.Module | None, list[nn.Parameter]]] = [(None, [])]
        self._roots: list[weakref.ref[nn.Module]] = []

    def runs(self, module: nn.Module) -> bool:
        """Whether the constructor of ``module`` is under way (and calls that of its base class)."""
        return any(other is module for other, _ in self.levels)

    def begin(self, module: nn.Module | None) -> None:
        self.levels.append((module, []))

    def end(self) -> None:
        """The innermost constructor has returned on every rank."""
        module, touched = self.levels.pop()
        release(touched, source=0)
        if module is not None:
            for part in module.modules():  # parts may be copies, which no constructor made
                self.split(part)
            if len(self.levels) == 1:
                self._roots.append(weakref.ref(module))

    def abandon(self, depth: int) -> None:
        """Constructors from that level on were left by an exception: what they wrote into others is gone."""
        while len(self.levels) > depth:
            release(self.levels.pop()[1])

    def split(self, module: nn.Module) -> None:
        """Splits the parameters that ``module`` itself has."""
        new = {
            name: p
            for name, p in module._parameters.items()
            if p is not None and not (p.is_meta or is_lazy(p) or isinstance(p, FreedParameter))
            if early_shard(p) is None and model_of(p) is None
        }
        if new:
            kind = type(module).__name__
            shapes = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in new.items())
            self._ranks.comm.agreement.meet(f"the construction of a {kind} with {shapes}")
            with torch.no_grad(), without_user_modes():
                for name, p in new.items():
                    EarlyShard(p, f"{kind}.{name}", self._ranks, self._dtype)

    def touched(self, parameter: nn.Parameter) -> bool:
        """Makes a parameter whole until the end of the constructor that touches it."""
        touched = self.levels[-1][1]
        if len(touched) > KEPT and sum(p.nbytes for p in touched) > ROOM:
            old, touched[:] = touched[: -KEPT // 2], touched[-KEPT // 2 :]
            release(old, source=0)
        gather([parameter])
        touched.append(parameter)
        return True

    def finish(self) -> None:
        """The end of the block."""
        self._ranks.comm.agreement.meet("the end of sharded_init()")
        release(self.levels[0][1], source=0)
        self.levels[0][1].clear()
        for root in self._roots:
            module = root()
            if module is not None:
                for part in module.modules():
                    self.split(part)
                self.rename(module)
        self._ranks.complete()

    def rename(self, module: nn.Module) -> None:
        """From now on messages say where in a model a parameter is."""
        for name, p in module.named_parameters():
            shard = early_shard(p)
            if shard is not None and shard.ranks is self._ranks:
                shard.rename(p, name)


@contextmanager
def _watching_constructors(construction: _Construction, apply: bool) -> Iterator[None]:
    """Inside, every constructor of a module tells when it begins and when it has returned."""
    wrapped: list[tuple[type, Any, Any]] = []

    def watch(kind: type) -> None:
        init = vars(kind).get("__init__")
        if isinstance(init, FunctionType):
            watched = _watched(init, construction)
            setattr(kind, "__init__", watched)  # noqa: B010 (pyright takes an assignment for an error)
            wrapped.append((kind, init, watched))

    def on_subclass(kind: type[nn.Module], **kwargs: Any) -> None:
        super(nn.Module, kind).__init_subclass__(**kwargs)
        watch(kind)

    for kind in _subclasses(nn.Module):
        watch(kind)
    plain_apply = nn.Module.apply
    nn.Module.__init_subclass__ = classmethod(on_subclass)  # pyright: ignore[reportAttributeAccessIssue]
    if apply:
        nn.Module.apply = _apply(construction)  # pyright: ignore[reportAttributeAccessIssue]
    TOUCHED.append(construction.touched)
    try:
        yield
    finally:
        TOUCHED.clear()
        nn.Module.apply = plain_apply
        del nn.Module.__init_subclass__
        for kind, init, watched in wrapped:
            if vars(kind).get("__init__") is watched:
                setattr(kind, "__init__", init)  # noqa: B010


def _watched(init: Callable[..., None], construction: _Construction) -> Callable[..., None]:
    @wraps(init)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if construction.runs(self):
            init(self, *args, **kwargs)
            return
        construction.begin(self)
        depth = len(construction.levels)
        try:
            init(self, *args, **kwargs)
        except BaseException:
            construction.abandon(depth - 1)
            raise
        construction.end()

    return watched


def _apply(construction: _Construction) -> Callable[..., Any]:
    def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
        """As ``nn.Module.apply``; what ``fn`` touched is split again when it has returned."""
        for child in self.children():
            child.apply(fn)
        construction.begin(None)
        depth = len(construction.levels)
        try:
            fn(self)
        except BaseException:
            construction.abandon(depth - 1)
            raise
        construction.end()
        return self

    return apply


def _subclasses(kind: type) -> Iterator[type]:
    seen: set[type] = set()
    waiting = list(kind.__subclasses__())
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen.add(found)
            yield found
            waiting += found.__subclasses__()
