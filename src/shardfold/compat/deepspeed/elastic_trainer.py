"""The loop of transformers' Trainer under ``shardfold run --elastic``: it turns once for each micro-batch of this
rank's own, whoever has died, and what is to be done besides is done inside ``training_step``.

A step is one unit. It begins with what ranks tell each other of it (who reads for whom, and over how many targets the
loss is a mean), and has a micro-batch for each of the ranks that began, of those that are gone too, whose samples
another one reads from the same sampler. If a rank dies in it, those that are left do all of it again, from its first
micro-batch to the one that the loop is at, on the engine that there is then; the loop does not come to know. What a
step's loss is all ranks know before the step is taken, so the Trainer's own gathering of losses has nothing to send.

Generators of random numbers begin anew with each micro-batch, from (seed, step, micro-batch, number of the rank that
began), and are behind it what they were: dropout does not depend on who computes.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler

from shardfold.checkpoint.rng import rng_state, set_rng_state
from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.data import seed_generators, seed_of

__all__ = ["Readers", "TrainerLoop", "enter_trainer"]

MODULE = "transformers.trainer"
_LOOPS = "_shardfold_loop"
"""What a Trainer has of us."""


class Readers:
    """The batches of ranks that are gone, as they would have read them.

    Args:
        loader: of the Trainer, as accelerate has prepared it.
        ranks: how many began.

    Raises:
        WrongArgument: it reads in an order that other ranks do not know.
    """

    def __init__(self, loader: Any, ranks: int) -> None:
        shard: Any = getattr(loader, "batch_sampler", None)
        inner = getattr(shard, "batch_sampler", None)
        order = getattr(inner, "sampler", None)
        if type(inner) is not BatchSampler or not (
            isinstance(order, SequentialSampler) or type(order).__name__ == "SeedableRandomSampler"
        ):
            raise WrongArgument(
                f"--elastic with a training loader of {type(inner or loader).__name__} over {type(order).__name__}: "
                "when a rank dies others read its samples, so their order has to follow from a seed and the epoch. "
                "Give the Trainer a map-style dataset and no sampler of your own, or start without --elastic."
            )
        self._loader, self._shard, self._ranks = loader, shard, ranks
        self._open: dict[int, tuple[int, int, Iterator[list[int]]]] = {}  # by rank: epoch, position, what comes then

    def read(self, uid: int, epoch: int, position: int, count: int) -> list[Any]:
        """So many batches of a rank from this position of an epoch on, fewer where the epoch ends."""
        at, place, indices = self._open.get(uid, (-1, 0, iter(())))
        if (at, place) != (epoch, position):
            indices = islice(self._indices(uid, epoch), position, None)
        found = list(islice(indices, count))
        self._open[uid] = (epoch, position + len(found), indices)
        dataset = self._loader.dataset
        return [self._loader.collate_fn([dataset[i] for i in each]) for each in found]

    def _indices(self, uid: int, epoch: int) -> Iterator[list[int]]:
        inner, sampler = copy.copy(self._shard.batch_sampler), copy.copy(self._shard.batch_sampler.sampler)
        if hasattr(sampler, "set_epoch"):
            sampler.generator = None  # the other one is in use
            sampler.set_epoch(epoch)
        inner.sampler = sampler
        shard = type(self._shard)(
            inner, self._ranks, uid, split_batches=self._shard.split_batches, even_batches=self._shard.even_batches
        )
        return iter(shard)


class TrainerLoop:
    """What a Trainer's loop has done of the present step.

    Args:
        trainer: whose loop it is.
        engine: that it trains with.
        step: its ``training_step``, as transformers has it.
    """

    def __init__(self, trainer: Any, engine: DeepSpeedEngine, step: Callable[..., Tensor]) -> None:
        assert engine.elastic is not None
        self.trainer, self.engine, self._step, self.core = trainer, engine, step, engine.elastic
        self._readers = Readers(trainer.callback_handler.train_dataloader, self.core.ranks)
        self._share: list[tuple[int, float]] = []
        self._shared_in = -1  # which epoch of the ranks that is of
        self._own: list[Any] = []  # micro-batches that the loop has come to
        self._others: dict[int, list[Any]] = {}
        self._all: list[Any] = []  # of the step, of this rank's own
        self._items: Any = None  # targets of all ranks

    def begin(self, batches: list[Any]) -> None:
        """The loop has read the micro-batches of a step."""
        self._all, self._own = batches, []

    def take(self, inputs: Any) -> Tensor:
        """The next micro-batch; 0, and of the last one the step's loss, the mean of all ranks."""
        last = bool(self.trainer.accelerator.gradient_state.sync_gradients)
        self._own.append(inputs)
        first, steps = len(self._own) - 1, self.core.run.engine.steps
        random = rng_state()
        try:
            while True:
                known = len(self.core.run.recoveries)
                with self.core.run.attempt(admits=False), self.core.inside():
                    self._pass(first, last=last)
                    break
                taken = self.core.run.engine.steps > steps
                self.follow(known, taken=taken)
                if taken:
                    break
                first = 0
        finally:
            set_rng_state(random)
            self.trainer.accelerator.gradient_state._set_sync_gradients(last)
        return torch.tensor(self.core.mean if last else 0.0, device=self.trainer.args.device)

    def follow(self, known: int, *, taken: bool = False) -> None:
        """Ranks may be fewer: whoever counts them learns it."""
        if len(self.core.run.recoveries) == known:
            return
        self.engine._follow_elastic(taken=taken)
        from accelerate.state import AcceleratorState, PartialState

        engine = self.core.run.engine
        on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        states: list[Any] = [PartialState(), AcceleratorState()]
        for state in states:
            state.num_processes, state.process_index = engine.world_size, engine.rank
            if on_one_host:  # elsewhere ranks keep the numbers that their hosts have started them with
                state.local_process_index = engine.rank
        state = self.trainer.state
        state.is_world_process_zero = self.trainer.is_world_process_zero()
        state.is_local_process_zero = self.trainer.is_local_process_zero()

    def _pass(self, first: int, *, last: bool) -> None:
        """Micro-batches from that one on to the one that the loop is at, of this rank and of those it reads for."""
        if first == 0:
            self._meet()
        gradients = self.trainer.accelerator.gradient_state
        args, step = self.trainer.args, self.core.run.engine.steps
        summed = self._items is not None and args.average_tokens_across_devices
        for number in range(first, len(self._own)):
            for slot, (uid, weight) in enumerate(self._share):
                inputs = self._own[number] if uid == self.core.uid else self._others[uid][number]
                gradients._set_sync_gradients(last and number == len(self._own) - 1 and slot == len(self._share) - 1)
                seed_generators(seed_of(args.seed, step, number, uid))
                self.core.scale(weight, summed=summed)
                given = dict(inputs) if isinstance(inputs, Mapping) else inputs
                self._step(self.trainer, self.engine, given, self._items)

    def _meet(self) -> None:
        """What ranks tell each other before a step; all do it, also when the step is done again."""
        core, trainer = self.core, self.trainer
        core.begin()
        if self._shared_in != len(core.run.recoveries):
            self._share, self._shared_in = core.share(), len(core.run.recoveries)
        size = len(trainer.callback_handler.train_dataloader)
        each = trainer.args.gradient_accumulation_steps
        epoch, update = divmod(trainer.state.global_step, max(-(-size // each), 1))
        others = {uid for uid, _ in self._share} - {core.uid}
        self._others = {uid: self._readers.read(uid, epoch, update * each, len(self._all)) for uid in sorted(others)}
        items = self._count(self._all)
        for batches in self._others.values():
            more = self._count(batches)
            items = None if items is None or more is None else items + more
        if items is not None:
            engine = core.run.engine
            items = torch.tensor(round(engine.mean(float(items)) * engine.world_size), device=trainer.args.device)
        self._items = items

    def _count(self, batches: list[Any]) -> Any:
        """Targets of some batches of this rank, as the Trainer counts them; None: it does not."""
        args = self.trainer.args
        averages, args.average_tokens_across_devices = args.average_tokens_across_devices, False  # else it gathers
        try:
            return self.trainer._get_num_items_in_batch(batches, args.device)
        finally:
            args.average_tokens_across_devices = averages


def enter_trainer(engine: DeepSpeedEngine) -> None:
    """The Trainer's loop, where one has been imported, goes on with an engine without a rank that is killed."""
    module: Any = sys.modules.get(MODULE)
    if engine.elastic is None or module is None or hasattr(module.Trainer, _LOOPS):
        return
    kind = module.Trainer
    step, read, told, gathered = (
        kind.training_step,
        kind.get_batch_samples,
        kind._maybe_log_save_evaluate,
        module.nested_gather,
    )
    summed = module.distributed_broadcast_scalars

    def loop_of(trainer: Any) -> TrainerLoop | None:
        model = trainer.model_wrapped
        if not isinstance(model, DeepSpeedEngine) or model.elastic is None or not trainer.is_in_train:
            return None
        if getattr(trainer, _LOOPS, None) is None or getattr(trainer, _LOOPS).engine is not model:
            setattr(trainer, _LOOPS, TrainerLoop(trainer, model, step))
        return getattr(trainer, _LOOPS)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loop = loop_of(self)
        return step(self, model, inputs, num_items_in_batch) if loop is None else loop.take(inputs)

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        if (loop := loop_of(self)) is None:
            return read(self, epoch_iterator, num_batches, device)
        batches = list(islice(epoch_iterator, num_batches))
        loop.begin(batches)
        return batches, None

    def _maybe_log_save_evaluate(self: Any, *args: Any, **more: Any) -> None:
        if (loop := loop_of(self)) is None:
            return told(self, *args, **more)
        while True:
            known = len(loop.core.run.recoveries)
            with loop.core.run.attempt(admits=False):
                return told(self, *args, **more)
            loop.follow(known)

    def distributed_broadcast_scalars(
        scalars: Any, num_total_examples: int | None = None, device: Any = None
    ) -> Tensor:
        if engine.elastic is None:
            return summed(scalars, num_total_examples, device)
        return torch.tensor(scalars, device=device) * engine.elastic.ranks  # of operations: those of each are as many

    def nested_gather(tensors: Any, parallel_mode: Any, name: str | None = None) -> Any:
        return tensors if engine.elastic is not None else gathered(tensors, parallel_mode, name)

    setattr(kind, _LOOPS, None)
    kind.training_step, kind.get_batch_samples = training_step, get_batch_samples
    kind._maybe_log_save_evaluate, module.nested_gather = _maybe_log_save_evaluate, nested_gather
    module.distributed_broadcast_scalars = distributed_broadcast_scalars
