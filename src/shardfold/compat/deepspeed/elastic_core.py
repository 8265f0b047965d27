"""The engine underneath a :class:`DeepSpeedEngine` that goes on without a rank that is killed.

``shardfold run --elastic --as-deepspeed`` says that it shall. The loop is the client's, and turns once for each
micro-batch whatever happens: what it has done of a step is done again below it (``elastic_loop``). The model and the
optimizer are the client's too, and stay the same objects: each engine is made on them anew, with parameters whose
values come from the ranks that are left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardfold.comm.backend import start_group
from shardfold.comm.mesh import keep_default
from shardfold.compat.deepspeed.constants import default_pg_timeout
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall
from shardfold.engine.elastic import ElasticRun
from shardfold.engine.engine import Engine

__all__ = ["ElasticCore", "refuse_axes"]


class _Place(NamedTuple):
    """Where a model has a parameter, as ``module.name``; ``key`` is the first name of it in the model, one for all
    places of one that is shared."""

    module: nn.Module
    name: str
    key: str


class ElasticCore:
    """Makes an engine on a model, and others on the same one when ranks are fewer.

    Args:
        model: of the client.
        optimizer: of its parameters.
        build: makes an engine of both.

    Attributes:
        run: the run, which has the present engine.
        uid: the number that this rank was started with.
        ranks: how many there were then.
        factor: what losses are multiplied by, so that the mean over ranks is that over those that began.
        loss: the sum of the present step's losses so far, each times its factor, on this rank.
        mean: of the step's losses, over all ranks; known before the step is taken, so that all have it or none.

    Raises:
        ConfigError: the engine is one that cannot go on without a rank.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, build: Callable[[], Engine]) -> None:
        self._optimizer, self._build = optimizer, build
        keys = {id(p): key for key, p in model.named_parameters()}
        self._places = [
            _Place(module, name, keys[id(p)])
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._dtypes = {key: (p.dtype, p.requires_grad) for key, p in model.named_parameters()}
        self._groups = [[keys[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.uid, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.factor, self.loss, self.mean, self._is_inside = 1.0, 0.0, 0.0, False
        self.run = ElasticRun(self._make)

    def _make(self, ranks: int) -> Engine:
        if self._shapes:
            self._renew()
        keep_default()  # which a client may have started
        engine = self._build()
        keep_default()
        if not dist.is_initialized():  # one rank is left, whose client has begun with a group, and asks it things
            where = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # pyright: ignore[reportPrivateImportUsage]
            start_group(engine.device, default_pg_timeout, **where)
        self._shapes = {s.name: tuple(s.whole) for segment in engine.sharded.segments() for s in segment.spec.slots}
        return engine

    def _renew(self) -> None:
        """The model has parameters of no engine again, of whatever values."""
        fresh = {
            key: nn.Parameter(torch.zeros(self._shapes[key], dtype=dtype), requires_grad=trained)
            for key, (dtype, trained) in self._dtypes.items()
        }
        for place in self._places:
            place.module.register_parameter(place.name, fresh[place.key])
        self._optimizer.state.clear()
        for group, keys in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = [fresh[key] for key in keys]

    def begin(self) -> None:
        """Nothing of a step has been done."""
        self.loss = 0.0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What is inside belongs to a step that its loop can do again."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def take(self, loss: Tensor, *, last: bool) -> Tensor:
        """A loss of the client's as it counts; ``last``: the step's, behind which ranks tell each other their sums.

        Raises:
            WrongCall: the loop is not one that can do a step again.
        """
        if not self._is_inside:
            raise WrongCall(
                "--elastic is for the loops of transformers' Trainer and of Lightning's, with automatic optimization. "
                "Of another one, as a script's own with Accelerate, nobody knows what to do again of a step in which a "
                "rank dies, nor how to read what that one would have read: start without --elastic, or write the loop "
                "with shardfold.ElasticRun."
            )
        loss = loss * self.factor if self.factor != 1.0 else loss
        self.loss += loss.item()
        if last:
            self.mean = self.run.engine.mean(self.loss)
        return loss

    def share(self) -> list[tuple[int, float]]:
        """Which of the ranks that began this one reads for in the present epoch, itself first, each with weight 1; all
        ranks do as many passes, so one may do its own again with weight 0. All ranks call it."""
        engine = self.run.engine
        told = engine.sharded.comm.job.exchange("elastic ranks", str(self.uid))
        lives = [int(uid) for uid in told]
        gone = [uid for uid in range(self.ranks) if uid not in lives]
        mine = [(uid, 1.0) for uid in (self.uid, *gone[engine.rank :: len(lives)])]
        most = 1 + -(-len(gone) // len(lives))
        return [*mine, *[(self.uid, 0.0)] * (most - len(mine))]

    def scale(self, weight: float, *, summed: bool) -> None:
        """The next losses have this weight among those of all ranks that began. ``summed``: they are sums over a number
        that all of these share, times the number of ranks there are."""
        self.factor = weight if summed else weight * self.run.engine.world_size / self.ranks


def refuse_axes(mesh: Mapping[str, int] | None) -> None:
    """
    Raises:
        WrongArgument: ranks are shared out along axes.
    """
    if mesh is not None:
        axes = ", ".join(f"{name} {size}" for name, size in mesh.items())
        raise WrongArgument(
            f"--elastic with ranks along axes ({axes}): what a rank has would be lost with it. Leave these sections "
            "out of the config, or start without --elastic."
        )
