"""The loop of Lightning's ``Trainer.fit`` over its ``DeepSpeedStrategy`` under ``shardfold run --elastic``: what is to
be done again, or for a rank that is gone, is done where automatic optimization does a micro-batch (``elastic_loop``).

Lightning counts its optimizer's steps there, and calls hooks around the last pass of a micro-batch; passes besides that
are forward and backward alone. What Lightning broadcasts in front of each micro-batch, whether rank 0 has been told to
end, is left out: the launcher tells all ranks. Validation, and callbacks behind a micro-batch, an epoch and the fit,
which save, are done again where a rank dies in them.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler

from shardfold.compat.deepspeed.elastic_loop import Readers, StepLoop, unknown_order
from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = ["LightningLoop", "enter_lightning"]

PACKAGES = "lightning.pytorch", "pytorch_lightning"
SAVING = frozenset(("on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_validation_end"))
"""Hooks in which callbacks of Lightning save, or decide something together."""
_LOOP = "_shardfold_loop"
"""What a Trainer has of us."""


class LightningLoop(StepLoop):
    """What a fit has done of the present step.

    Args:
        trainer: whose it is.
        engine: that it trains with.

    Raises:
        WrongArgument: other ranks do not know what this one reads.
    """

    def __init__(self, trainer: Any, engine: DeepSpeedEngine) -> None:
        super().__init__(engine, int(os.environ.get("PL_GLOBAL_SEED", "0")))
        self.trainer = trainer
        loader: Any = trainer.train_dataloader
        batches = getattr(loader, "batch_sampler", None)
        self._order: Any = getattr(batches, "sampler", None)
        if type(batches) is not BatchSampler or type(self._order) is not DistributedSampler:
            raise unknown_order("Lightning's Trainer", batches or loader, self._order)
        if trainer.reload_dataloaders_every_n_epochs:
            raise WrongArgument(
                "--elastic with reload_dataloaders_every_n_epochs: a loader that is made behind a rank's death has "
                "other samples for each rank. Leave it at 0, or start without --elastic."
            )
        self._readers = Readers(loader, lambda uid, epoch: _indices(batches, uid, epoch))
        self._own: list[tuple[int, int, Any]] = []  # micro-batches that the loop has come to: epoch, position, inputs

    def take(self, loop: Any, optimizer: Any, position: int, inputs: Any) -> dict[str, Any]:
        """The next micro-batch, for Lightning's loop of automatic optimization; what that gives of it."""
        if "batch" not in inputs:
            raise WrongArgument(
                "--elastic with a training_step(dataloader_iter): nobody knows what others have to read for a rank "
                "that is gone. Let it take the batch, or start without --elastic."
            )
        at, counted = len(self._own), copy.deepcopy(loop.optim_progress)
        self._own.append((self._order.epoch, position, inputs))
        last = len(self._own) == self.core.run.engine.accumulate
        found: dict[str, Any] = {}

        def passes(anew: bool) -> None:
            if anew:
                loop.optim_progress = copy.deepcopy(counted)
            found.update(self._pass(loop, optimizer, 0 if anew else at, last=last))

        if self.repeat(passes):
            loop.optim_progress = counted
            if not self.trainer.fit_loop._should_accumulate():  # by Lightning's own count
                counted.optimizer.step.increment_ready()
                counted.optimizer.step.increment_completed()
            found = {"loss": torch.tensor(self.core.mean)}
        if last:
            self._own = []
        return found

    def renumber(self) -> None:
        """Lightning counts the ranks that there are, and shares out among them what it validates on."""
        self.trainer.strategy.set_world_ranks()
        self.trainer.fit_loop.epoch_loop.val_loop._combined_loader = None  # the next validation makes another one

    def changed_beside_steps(self) -> list[Any]:
        """Callbacks."""
        return [*self.trainer.callbacks]

    def _pass(self, loop: Any, optimizer: Any, first: int, *, last: bool) -> dict[str, Any]:
        """Micro-batches from that one on to the one that the loop is at, of this rank and of those it reads for."""
        if first == 0:
            self.shares()
        engine, share, found = self.engine, self._share, dict[str, Any]()
        for number in range(first, len(self._own)):
            epoch, position, own = self._own[number]
            for slot, (uid, weight) in enumerate(share):
                inputs = own if uid == self.core.uid else self._read(uid, epoch, position, own)
                is_end = number == len(self._own) - 1 and slot == len(share) - 1
                engine.set_gradient_accumulation_boundary(last and is_end)
                self.begin_pass(number, uid, weight, summed=False)
                closure = loop._make_closure(inputs, optimizer, position)
                if number or slot:
                    closure._zero_grad_fn = None
                if is_end:
                    loop._optimizer_step(position, closure)
                else:
                    closure()
                    engine.step()
                result = closure.consume_result()
                if uid == self.core.uid and weight:
                    found = {} if result.loss is None else result.asdict()
        return found

    def _read(self, uid: int, epoch: int, position: int, own: Any) -> Any:
        """The inputs of a rank that is gone, as Lightning makes them of a batch."""
        trainer = self.trainer
        (batch,) = self._readers.read(uid, epoch, position, 1)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return {**own, "batch": trainer.strategy.batch_to_device(batch, dataloader_idx=0)}


def _indices(batches: Any, uid: int, epoch: int) -> Iterator[list[int]]:
    """What a rank reads in an epoch."""
    batches, order = copy.copy(batches), copy.copy(batches.sampler)
    order.rank = uid
    order.set_epoch(epoch)
    batches.sampler = order
    return iter(batches)


def enter_lightning(engine: DeepSpeedEngine) -> None:
    """Lightning's loop, where it has been imported, goes on with an engine without a rank that is killed."""
    for package in PACKAGES:
        if engine.elastic is not None and f"{package}.loops.optimization.automatic" in sys.modules:
            _enter(package)


def _loop_of(trainer: Any) -> LightningLoop | None:
    """None: the Trainer does not fit, or with an engine that does not go on."""
    model = trainer.strategy.model
    if not isinstance(model, DeepSpeedEngine) or model.elastic is None or trainer.state.fn != "fit":
        return None
    if getattr(trainer, _LOOP, None) is None or getattr(trainer, _LOOP).engine is not model:
        setattr(trainer, _LOOP, LightningLoop(trainer, model))
    return getattr(trainer, _LOOP)


def _enter(package: str) -> None:
    loops = f"{package}.loops"
    automatic: Any = sys.modules[f"{loops}.optimization.automatic"]._AutomaticOptimization
    epochs: Any = sys.modules[f"{loops}.training_epoch_loop"]._TrainingEpochLoop
    evaluation: Any = sys.modules[f"{loops}.evaluation_loop"]._EvaluationLoop
    calls: Any = sys.modules[f"{package}.trainer.call"]
    if hasattr(automatic, _LOOP):
        return
    run, tell, evaluate, call = (
        automatic.run,
        epochs._broadcast_sigterm_tensor,
        evaluation.run,
        calls._call_callback_hooks,
    )

    def optimization_run(self: Any, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        loop = _loop_of(self.trainer)
        return (
            run(self, optimizer, batch_idx, kwargs) if loop is None else loop.take(self, optimizer, batch_idx, kwargs)
        )

    def _broadcast_sigterm_tensor(self: Any) -> None:
        if _loop_of(self.trainer) is None:
            tell(self)

    def whole(trainer: Any, do: Callable[[], Any]) -> Any:
        loop = getattr(trainer, _LOOP, None)  # before the first step there is none, nor is anything done again
        return do() if loop is None or _loop_of(trainer) is None else loop.whole(do)

    def evaluation_run(self: Any) -> Any:
        return whole(self.trainer, lambda: evaluate(self))

    def _call_callback_hooks(trainer: Any, hook_name: str, *args: Any, **more: Any) -> Any:
        if hook_name not in SAVING:
            return call(trainer, hook_name, *args, **more)
        return whole(trainer, lambda: call(trainer, hook_name, *args, **more))

    setattr(automatic, _LOOP, None)
    automatic.run, epochs._broadcast_sigterm_tensor = optimization_run, _broadcast_sigterm_tensor
    evaluation.run, calls._call_callback_hooks = evaluation_run, _call_callback_hooks
