"""The loop of transformers' Trainer under ``shardfold run --elastic``: what is to be done again, or for a rank that is
gone, is done inside ``training_step`` (``elastic_loop``).

A step begins with what ranks tell each other of it: who reads for whom, and over how many targets the loss is a mean.
As all ranks know the step's loss, the Trainer's own gathering of losses has nothing to send.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler

from shardfold.compat.deepspeed.elastic_loop import Readers, StepLoop, unknown_order
from shardfold.compat.deepspeed.engine import DeepSpeedEngine

__all__ = ["TrainerLoop", "enter_trainer", "readers"]

MODULE = "transformers.trainer"
TOGETHER = ("_evaluate", "evaluate", "_save_checkpoint", "_load_best_model", "save_model")
"""What a Trainer does beside its steps, on all ranks; also behind its training."""
_LOOPS = "_shardfold_loop"
"""What a Trainer has of us."""


def readers(loader: Any, ranks: int) -> Readers:
    """The batches of ranks that are gone.

    Args:
        loader: of the Trainer, as accelerate has prepared it.
        ranks: how many began.

    Raises:
        WrongArgument: it reads in an order that other ranks do not know.
    """
    shard: Any = getattr(loader, "batch_sampler", None)
    inner = getattr(shard, "batch_sampler", None)
    order: Any = getattr(inner, "sampler", None)
    if type(inner) is not BatchSampler or not (
        isinstance(order, SequentialSampler) or type(order).__name__ == "SeedableRandomSampler"
    ):
        raise unknown_order("the Trainer", inner or loader, order)

    def indices(uid: int, epoch: int) -> Iterator[list[int]]:
        sampler: Any = copy.copy(order)
        batches = copy.copy(inner)
        if hasattr(sampler, "set_epoch"):
            sampler.generator = None  # the other one is in use
            sampler.set_epoch(epoch)
        batches.sampler = sampler
        kind, split, even = type(shard), shard.split_batches, shard.even_batches
        return iter(kind(batches, ranks, uid, split_batches=split, even_batches=even))

    return Readers(loader, indices)


class TrainerLoop(StepLoop):
    """What a Trainer's loop has done of the present step.

    Args:
        trainer: whose loop it is.
        engine: that it trains with.
        step: its ``training_step``, as transformers has it.
    """

    def __init__(self, trainer: Any, engine: DeepSpeedEngine, step: Callable[..., Tensor]) -> None:
        super().__init__(engine, trainer.args.seed)
        self.trainer, self._step = trainer, step
        self._readers = readers(trainer.callback_handler.train_dataloader, self.core.ranks)
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
        at = len(self._own) - 1
        try:
            self.repeat(lambda anew: self._pass(0 if anew else at, last=last))
        finally:
            self.trainer.accelerator.gradient_state._set_sync_gradients(last)
        return torch.tensor(self.core.mean if last else 0.0, device=self.trainer.args.device)

    def renumber(self) -> None:
        """The Trainer and Accelerate count the ranks that there are."""
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

    def changed_beside_steps(self) -> list[Any]:
        """Callbacks, and what they have of the run and tell it."""
        return [self.trainer.state, self.trainer.control, *self.trainer.callback_handler.callbacks]

    def _pass(self, first: int, *, last: bool) -> None:
        """Micro-batches from that one on to the one that the loop is at, of this rank and of those it reads for."""
        if first == 0:
            self._meet()
        gradients = self.trainer.accelerator.gradient_state
        summed = self._items is not None and self.trainer.args.average_tokens_across_devices
        for number in range(first, len(self._own)):
            for slot, (uid, weight) in enumerate(self._share):
                inputs = self._own[number] if uid == self.core.uid else self._others[uid][number]
                gradients._set_sync_gradients(last and number == len(self._own) - 1 and slot == len(self._share) - 1)
                self.begin_pass(number, uid, weight, summed=summed)
                given = dict(inputs) if isinstance(inputs, Mapping) else inputs
                self._step(self.trainer, self.engine, given, self._items)

    def _meet(self) -> None:
        """What ranks tell each other before a step; all do it, also when the step is done again."""
        core, trainer = self.core, self.trainer
        share = self.shares()
        size = len(trainer.callback_handler.train_dataloader)
        each = trainer.args.gradient_accumulation_steps
        epoch, update = divmod(trainer.state.global_step, max(-(-size // each), 1))
        others = {uid for uid, _ in share} - {core.uid}
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
    step, read, gathered = kind.training_step, kind.get_batch_samples, module.nested_gather
    summed = module.distributed_broadcast_scalars

    def loop_of(trainer: Any) -> TrainerLoop | None:
        model, known = trainer.model_wrapped, getattr(trainer, _LOOPS, None)
        if not isinstance(model, DeepSpeedEngine) or model.elastic is None:
            return None
        if known is None and not trainer.is_in_train:
            return None
        if known is None or known.engine is not model:
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

    def whole(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def done(self: Any, *args: Any, **more: Any) -> Any:
            loop = loop_of(self)
            return call(self, *args, **more) if loop is None else loop.whole(lambda: call(self, *args, **more))

        return done

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
    for name in TOGETHER:
        setattr(kind, name, whole(getattr(kind, name)))
    module.nested_gather = nested_gather
    module.distributed_broadcast_scalars = distributed_broadcast_scalars
