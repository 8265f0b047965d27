"""``PipelineEngine``: what ``initialize`` returns for a :class:`PipelineModule`: batches go through stages.

The iterator gives ``(inputs, labels)``. The first stage reads inputs, the last labels; a stage between them needs no
iterator: it is told the shapes of the inputs, which is all that what it sends and receives depends on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from shardfold.compat.deepspeed.engine import DeepSpeedEngine
from shardfold.compat.deepspeed.pipeline_module import PipelineModule
from shardfold.compat.deepspeed.refused import WrongCall
from shardfold.compat.deepspeed.runtime.dataloader import RepeatingLoader
from shardfold.compat.deepspeed.runtime.pipe.errors import PipelineError
from shardfold.compat.deepspeed.runtime.pipe.topology import PipelineParallelGrid
from shardfold.compat.deepspeed.runtime.utils import move_to_device
from shardfold.errors import UsageError
from shardfold.parallel.pipeline.flow import Made, placeholder

__all__ = ["DataEnded", "PipelineEngine", "describe", "imagine"]


class DataEnded(UsageError, StopIteration):
    """The iterator has no more micro-batches; a ``StopIteration`` too, which is what DeepSpeed's users catch."""


class PipelineEngine(DeepSpeedEngine):
    """Trains a :class:`PipelineModule` batch by batch.

    Attributes:
        module: the pipeline.
        grid: this rank's place among stages and copies of the model, and groups along them.
        num_stages, stage_id: of the pipeline, and this rank's.
        agg_train_loss: the mean loss of the last batch over all micro-batches and copies of the model.
        batch_fn: what is called with each micro-batch that is read, if set; gives ``(inputs, labels)``.
    """

    module: PipelineModule  # pyright: ignore[reportIncompatibleVariableOverride]
    pipeline_parallelism = True

    def __init__(self, model: PipelineModule, *args: Any, **kwargs: Any) -> None:
        self._iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        interval = args[0].settings["pipeline.activation_checkpoint_interval"]
        if interval > 0:
            model.activation_checkpoint_interval = interval
        data = kwargs.pop("training_data", None)
        super().__init__(model, *args, **kwargs)
        self.grid: PipelineParallelGrid = model.mpu()
        self.mpu = self.grid
        self.num_stages, self.stage_id = model.num_stages, model.stage_id
        self.is_pipe_parallel, self.is_model_parallel = self.num_stages > 1, self._ways.tensor > 1
        self.is_data_parallel = self._ways.data > 1
        self.agg_train_loss: Tensor | None = None
        self.training_data = data
        if data is not None:
            sampler = DistributedSampler(data, self._ways.data, self._ways.data_rank, shuffle=False)
            self.set_dataloader(RepeatingLoader(self.deepspeed_io(data, data_sampler=sampler)))

    def _stages(self, model: nn.Module) -> Sequence[str] | None:
        assert isinstance(model, PipelineModule)
        return model.stage_begins() if model.num_stages > 1 else None

    def _units(self, model: nn.Module) -> Sequence[str] | None:
        assert isinstance(model, PipelineModule)
        return model.with_parameters() or None

    def _activations(self, model: nn.Module) -> Any:
        assert isinstance(model, PipelineModule)
        paths = model.recomputed()
        return {**dict.fromkeys(paths, "recompute"), "*": "keep"} if paths else super()._activations(model)

    # -- who this is

    def is_first_stage(self) -> bool:
        """Whether this rank reads inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank reads labels and computes losses."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    @property
    def micro_batches(self) -> int:
        """Per batch: ``gradient_accumulation_steps``."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of each on each copy of the model."""
        return self.train_micro_batch_size_per_gpu()

    # -- data

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Micro-batches come from it."""
        self.training_dataloader, self._iterator = None, iterator  # pyright: ignore[reportAttributeAccessIssue]

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Micro-batches come from it, once from its beginning."""
        self.training_dataloader, self._iterator = loader, iter(loader)  # pyright: ignore[reportAttributeAccessIssue]

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """See ``batch_fn``."""
        self.batch_fn = fn

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing: whatever a layer gives is sent."""

    def reset_activation_shape(self) -> None:
        """Nothing: shapes may differ from batch to batch."""

    def _next_parts(self, call: str, iterator: Iterator[Any] | None, count: int) -> list[Any]:
        """So many micro-batches; every rank calls it.

        Raises:
            DataEnded: on ranks whose iterator has fewer.
            WrongCall: the first or the last stage has none, or it gives something else than pairs.
        """
        found: list[Any] = []

        def read() -> None:
            if iterator is None and (self.is_first_stage() or self.is_last_stage()):
                raise WrongCall(
                    f"{call} on rank {self.global_rank}, which has the {'first' if self.is_first_stage() else 'last'} "
                    "stage, without data: give the first and the last stage an iterator, here or by set_dataiterator()."
                )
            found.extend(self._pair(call, part) for part in _taken(call, iterator, count))

        core = self._core
        core.sharded.gate.meet(call, check=read)
        if self.num_stages <= 2 or not core.max_over_ranks([float(not found)])[0]:
            return found
        said = core.sharded.comm.job.exchange(f"{call} {core.attempt}", json.dumps([describe(p[0]) for p in found]))
        if not found:  # as the first stage of the same copy of the model
            forms = json.loads(said[self.grid.stage_to_global(0)])
            found = [(imagine(form, core.device), None) for form in forms]
        return found

    def _pair(self, call: str, part: Any) -> tuple[Any, Any]:
        part = part if self.batch_fn is None else self.batch_fn(part)
        if not isinstance(part, (tuple, list)) or len(part) != 2:
            raise WrongCall(
                f"{call}: a micro-batch is {_said(part)}: it is a pair of inputs and labels, which a function given to "
                "engine.set_batch_fn() may make of it."
            )
        inputs = tuple(part[0]) if isinstance(part[0], list) else part[0]
        return move_to_device((inputs, part[1]), self._core.device)

    # -- batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Reads ``gradient_accumulation_steps`` micro-batches, trains with them and updates the weights.

        Args:
            data_iter: from which they come from now on; None: as before. The stages between the first and the last may
                have none.

        Returns:
            The mean loss over micro-batches and copies of the model, on every rank.

        Raises:
            RuntimeError: gradients are off.
            DataEnded: (a ``StopIteration``) the iterator has fewer.
            OrderError: on the ranks of other stages, where one has failed: the engine is given up.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("engine.train_batch() needs gradients: leave torch.no_grad(), or call eval_batch().")
        self._need_optimizer("train_batch()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        core, call = self._core, "engine.train_batch()"
        parts = self._next_parts(call, self._iterator, self.micro_batches)
        core.last_micro_batch = None  # the batch has all of them
        self.tput_timer.start()
        with self.observers.phase("forward"):
            loss = core.train_batch(parts, partial(self._compute, None))
        self.agg_train_loss = loss.new_tensor(core.mean(float(loss)))
        self.observers.note_loss(self.agg_train_loss)
        super().step()
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Runs forwards of a batch without gradients.

        Args:
            data_iter: of micro-batches; the stages between the first and the last may have none.
            return_logits: gives also the outputs of the last layer, by micro-batch, on the last stage (None on others).
            compute_loss: False: the outputs take the place of the losses.
            reduce_output: ``"avg"``: the mean over micro-batches and copies of the model; None: a list.
            bcast_loss: whether all stages have the mean, or the last alone.
            num_micro_batches: how many; None: as in training.

        Returns:
            The loss, or the losses of this copy of the model on the last stage, and None where there is none; with
            ``return_logits`` a pair of that and the outputs.

        Raises:
            NotImplementedError: ``reduce_output`` is another word.
            DataEnded: (a ``StopIteration``) the iterator has fewer.
        """
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"engine.eval_batch(reduce_output={reduce_output!r}): it is 'avg' or None.")
        trains, call = self.module.training, "engine.eval_batch()"
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        self.module.eval()
        kept = _Kept(loss=compute_loss)
        try:
            parts = self._next_parts(call, data_iter, count)
            mean = self._core.eval_batch(parts, partial(self._compute, kept), micro_batches=count)
        finally:
            self.module.train(trains)
        found = self._reduced(kept, mean, reduce_output, everywhere=bcast_loss)
        return (found, kept.outputs if self.is_last_stage() else None) if return_logits else found

    def _reduced(self, kept: _Kept, mean: Tensor, how: str | None, *, everywhere: bool) -> Any:
        if kept.computes_loss and how == "avg":
            loss = mean.new_tensor(self._core.mean(float(mean)))
            return loss if everywhere or self.is_last_stage() else None
        if not self.is_last_stage():
            return None
        values = kept.losses if kept.computes_loss else kept.outputs
        if how is None:
            return values
        return torch.stack(list(values)).mean(0)

    def _compute(self, kept: _Kept | None, model: nn.Module, part: tuple[Any, Any]) -> Any:
        """The loss of a micro-batch. What only finds which shapes there are needs no labels."""
        inputs, labels = part
        output = model(inputs)
        if model is not self.module and self.num_stages > 1:
            return output
        if kept is not None:
            kept.outputs.append(output)
            if not kept.computes_loss:
                return torch.zeros((), device=self.device)
        loss = output if self.module.loss_fn is None else self.module.loss_fn(output, labels)
        if kept is not None:
            kept.losses.append(loss)
        return loss

    # -- what other engines have

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        Raises:
            PipelineError: always.
        """
        raise PipelineError("engine(...) is not for a pipeline: call engine.train_batch() or engine.eval_batch().")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        Raises:
            PipelineError: always.
        """
        raise PipelineError("engine.backward() is not for a pipeline: engine.train_batch() does it.")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        Raises:
            PipelineError: always.
        """
        raise PipelineError("engine.step() is not for a pipeline: engine.train_batch() does it.")

    def no_sync(self) -> NoReturn:
        """
        Raises:
            PipelineError: always.
        """
        raise PipelineError("engine.no_sync() is not for a pipeline: a batch has all micro-batches of a step.")

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> NoReturn:
        """
        Raises:
            PipelineError: always.
        """
        raise PipelineError("engine.set_gradient_accumulation_boundary() is not for a pipeline: a batch is a step.")

    def is_gradient_accumulation_boundary(self) -> bool:
        """True: behind each batch there is a step."""
        return True

    def _tell_boundary(self) -> None:
        self._core.last_micro_batch = None


class _Kept:
    """What the last stage keeps of an evaluation."""

    def __init__(self, *, loss: bool) -> None:
        self.computes_loss = loss
        self.outputs: list[Any] = []
        self.losses: list[Tensor] = []


def _taken(call: str, iterator: Iterator[Any] | None, count: int) -> list[Any]:
    """
    Raises:
        DataEnded: there are fewer.
        WrongCall: the user's iterator raised.
    """
    found: list[Any] = []
    while iterator is not None and len(found) < count:
        try:
            found.append(next(iterator))
        except StopIteration:
            raise DataEnded(
                f"{call}: the iterator ended after {len(found)} of {count} micro-batches: give one that goes on, as a "
                "deepspeed.utils.RepeatingLoader does."
            ) from None
        except Exception as error:  # other stages wait for this one
            raise WrongCall(f"{call}: the iterator raised {type(error).__name__}: {error}.") from error
    return found


def _said(part: Any) -> str:
    return f"a {type(part).__name__}" + (f" of {len(part)}" if isinstance(part, (tuple, list)) else "")


def describe(value: Any) -> Any:
    """What is known of a batch beside its values, for JSON.

    Raises:
        UsageError: it has something that cannot be told.
    """
    if isinstance(value, Tensor):
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__ if type(value) in (tuple, list) else "tuple": [describe(x) for x in value]}
    if isinstance(value, Mapping):
        return {"dict": [[key, describe(x)] for key, x in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise UsageError(
        f"a batch has a {type(value).__name__}, which cannot be described to stages without data: give tensors."
    )


def imagine(form: Any, device: torch.device) -> Any:
    """A batch of that form, without values."""
    ((kind, said),) = form.items()
    if kind == "tensor":
        return placeholder(Made(tuple(said[0]), getattr(torch, said[1]), False), device)
    if kind == "dict":
        return {key: imagine(x, device) for key, x in said}
    if kind == "value":
        return said
    return (tuple if kind == "tuple" else list)(imagine(x, device) for x in said)
