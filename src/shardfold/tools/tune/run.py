"""One tuning: the engine, the data, the run folder, and how far it is."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor, nn

import shardfold as sf
from shardfold.checkpoint.folders import IN_RUN
from shardfold.data import seed_generators
from shardfold.engine.step_position import VIRTUAL
from shardfold.errors import ConfigError, NonFiniteError, ShardfoldError
from shardfold.optim.schedules import renew_rates
from shardfold.tools.observe.metrics import StepMetrics
from shardfold.tools.observe.progress import Progress
from shardfold.tools.observe.working_line import working
from shardfold.tools.run_attempts import RunAttempts, RunOnRanks
from shardfold.tools.run_engine import clip_of, held_in_memory, load_with_own_rates, not_finite, parallel_of
from shardfold.tools.stop_signal import StopSignal
from shardfold.tools.tune._model_config import changed_config, with_length
from shardfold.tools.tune._named_optimizer import optimizer_of, schedule_of
from shardfold.tools.tune._noise import EmbeddingNoise, sample_lengths
from shardfold.tools.tune.adapters import BASE_CHANGES, beginning
from shardfold.tools.tune.config import Kind, Source, TuneConfig
from shardfold.tools.tune.models import ModelPlace, hollow_model, loading

if TYPE_CHECKING:
    from shardfold.tools.observe.run_folder import Run
    from shardfold.tools.tune.data.batches import Batch, Batches, Window
    from shardfold.tools.tune.data.prepared import Prepared

__all__ = ["Loss", "Recipe", "Totals", "TuneRun"]

NONE = StepMetrics(step=0, loss=math.nan, lr=0.0, grad_norm=None, tokens_per_s=math.nan, seconds=0.0, memory_bytes=0)
"""Of a rank that has joined behind the last step."""
SAME = {"pt": "sft"}
"""Recipes that are another one with other targets."""


@dataclass(frozen=True)
class Loss:
    """What a recipe makes of a batch.

    Attributes:
        value: a 0-d mean, to go backward from.
        weight: of how many targets or pairs of this rank it is the mean; 0: of none, and the value counts nowhere.
        figures: more means of the same, to log.
    """

    value: Tensor
    weight: float
    figures: Mapping[str, Tensor] = field(default_factory=dict)


class Recipe:
    """How a run learns. A recipe says what loss a batch has, and may say more.

    Attributes:
        updates: of the optimizer in one step of the recipe.
        figures: names of those of its losses.
    """

    updates = 1
    figures: tuple[str, ...] = ()

    def made(self, run: TuneRun, model: nn.Module) -> None:
        """Called with the model before it has an engine."""

    def begin(self, run: TuneRun) -> None:
        """Called once before the first step, on every rank, when the engine is made and a checkpoint is loaded."""

    def window(self, run: TuneRun, window: Window) -> None:
        """Called with the micro-batches of a step before the first of them; of an evaluation with each."""

    def loss(self, run: TuneRun, batch: Batch) -> Loss:
        """The loss of one micro-batch of this rank."""
        raise NotImplementedError

    def weight(self, batch: Batch) -> float:
        """Of how many targets or pairs the loss of a batch is going to be the mean."""
        return float(batch.trained)

    def step(self, run: TuneRun, windows: Iterator[Window]) -> tuple[Any, Totals]:
        """One optimizer step; what the engine said, and the means of all ranks."""
        totals, said, window = Totals(), None, next(windows)
        self.window(run, window)
        if run.config.pipeline > 1:
            self.through_stages(run, window, totals, train=True)
            return run.engine.step(tokens=totals.tokens), totals
        for number, batch in enumerate(window.batches):
            if run.config.is_elastic:  # whoever reads it draws the same numbers for it
                seed_generators(window.seeds[number])
            loss = self.loss(run, batch)
            run.engine.backward(loss.value, weight=loss.weight)
            said = run.engine.step(tokens=int((batch.documents >= 0).sum()))
            totals.add(loss, batch)
        return said, totals

    def through_stages(self, run: TuneRun, window: Window, totals: Totals, *, train: bool) -> None:
        """The micro-batches of a window through all stages: their losses, whose mean an engine takes, are weighed so
        that it is that of all targets. The last stage has the losses; of the others none counts."""
        weights = [self.weight(batch) for batch in window.batches]
        mean = run.engine.mean(sum(weights) / len(weights))
        losses: dict[int, Loss] = {}

        def compute(model: nn.Module, given: Mapping[str, Any]) -> Tensor:
            number = int(given["number"])
            with run.calling(model):
                loss = self.loss(run, window.batches[number])
            if model is run.model:  # else it is one without values, by which stages learn what crosses their borders
                losses[number] = loss
            return loss.value * (weights[number] / mean if mean else 0.0)

        parts = [{"number": torch.tensor(number), **batch.inputs} for number, batch in enumerate(window.batches)]
        if train:
            run.engine.train_batch(parts, compute)
        else:
            run.engine.eval_batch(parts, compute, micro_batches=len(parts))
        zero = torch.zeros(())
        none = Loss(zero, 0.0, dict.fromkeys(self.figures, zero))
        for number, batch in enumerate(window.batches):
            totals.add(losses.get(number, none), batch)

    def close(self) -> None:
        """The run is over."""

    def saving(self, run: TuneRun, path: Path) -> None:
        """Called before each save of the engine to ``path``, on every rank: for what it has in other engines."""

    def resumed(self, run: TuneRun, path: Path) -> None:
        """Called when a checkpoint was loaded from ``path``, on every rank, before :meth:`begin`."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a checkpoint has kept of it."""


def recipe_of(name: str) -> Recipe:
    """The recipe of that name, which its module calls ``RECIPE``."""
    module = SAME.get(name, name)
    return importlib.import_module(f"shardfold.tools.tune.{module}").RECIPE()


class Totals:
    """Sums of losses, figures and tokens of this rank."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.tokens = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, loss: Loss, batch: Batch) -> None:
        """Of one micro-batch."""
        self.weight += loss.weight
        self.tokens += int((batch.documents >= 0).sum())
        for name, value in {"loss": loss.value, **loss.figures}.items():
            part = value.detach().double() * loss.weight if loss.weight else torch.zeros((), dtype=torch.float64)
            self._sums[name] = self._sums[name] + part.cpu() if name in self._sums else part.cpu()

    def means(self, engine: sf.Engine) -> dict[str, float]:
        """Over all targets of all ranks, which all call it."""
        weight = self.weight
        return {
            name: engine.mean(float(total) / weight if weight else 0.0, weight=weight)
            for name, total in self._sums.items()
        }


class TuneRun(RunOnRanks):
    """One training of a recipe.

    Attributes:
        config: the settings; after the start with nothing left to choose.
        recipe: how it learns.
        model: transformers' model; with an adapter, peft's wrapper of it.
        engine: that has the model.
        tokenizer: of transformers.
        batches: this rank's windows of micro-batches, epoch after epoch.
        tensors: first values of its parameters, by name, read one at a time.
        numel, trained: how many elements each parameter has, by name, and the names of those that are trained.
        total: optimizer steps of the whole run.
        done: optimizer steps so far.
        split: of which rows batches are: ``"train"`` or ``"eval"``.
        out: the run folder, once it trains.
    """

    def __init__(self, config: TuneConfig, console: Console, recipe: Recipe | None = None) -> None:
        self.config, self.console = config, console
        self.recipe = recipe_of(config.recipe) if recipe is None else recipe
        self.recipe.updates = getattr(config, "updates", 1)
        self.place = ModelPlace.find(config.model)
        config = self.config = with_length(config, self.place)
        self.tokenizer = self.place.tokenizer()
        self.rows = self.prepare(config.data, config.kind)
        self.held_out = self.prepare(config.eval_data, config.kind) if config.eval_data else None
        self.model_config = changed_config(config, self.place)
        self.total = config.steps or 1
        self.attempts = RunAttempts(self.make, elastic=config.is_elastic, changed=self.changed)
        self.part: Any = None  # of the model, in whose place it is called while a batch goes through stages
        if config.text.pack and not self._is_packed():
            text = config.text.model_copy(update={"pack": False})
            config = self.config = config.model_copy(update={"text": text})
        if not config.micro_batch:
            from shardfold.tools.tune.tuning_plan import most_samples  # plans of models take a while to import

            config = self.config = config.model_copy(
                update={"micro_batch": most_samples(config, self.engine, len(self.rows))}
            )
        self.batches = self.batches_of(self.rows)
        if self.attempts.joined:
            self.batches.share_among(self.attempts.position[VIRTUAL])
        with self.rows.telling():
            self.total = config.steps or max(1, math.ceil(config.epochs * self.batches.epoch_windows))
        self._renew_schedule()
        self.done = self.begun_at = self.engine.steps // self.recipe.updates
        self.history: list[StepMetrics] = []
        self.stop = StopSignal()
        self.interrupted = 0
        self.split = "train"
        self.out: Path | None = None
        self.began = time.perf_counter()

    # -- what it is made of

    def make(self, ranks: int) -> sf.Engine:
        """Build the model and its engine, on however many ranks there are."""
        config, task = self.config, self.config.task
        self.model, self.tensors = beginning(
            hollow_model(self.model_config, task), self.place, config.adapter, task, config.seed, config.base.resting
        )
        self.recipe.made(self, self.model)
        self.noise = EmbeddingNoise(self.model, config.text.noise, config.seed) if config.text.noise else None
        self.numel = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        self.trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.model.train()
        return self.engine_of(self.model, self.tensors, self.total * self.recipe.updates)

    def engine_of(self, model: nn.Module, tensors: Mapping[str, Tensor], updates: int, lr: float | None = None) -> Any:
        """An engine that trains a model by the settings, for so many updates; ``lr``: in place of the settings'."""
        config = self.config if lr is None else self.config.model_copy(update={"lr": lr})
        if config.text.pack and config.sequence == 1:  # an axis of sequence has an attention of its own
            from shardfold.tools.tune.data.packed_attention import pack_attention

            pack_attention(model)
        with loading(tensors, model) as told:
            return sf.Engine(
                model,
                optimizer=optimizer_of(config, model),
                layout=config.table(),
                activations=None if config.activations == "keep" else config.activations,
                parallel=parallel_of(config),
                precision=config.precision,
                accumulate=config.accumulate,
                clip_norm=clip_of(config),
                lr_schedule=schedule_of(config, updates),
                init=sf.Init(weights=told, seed=config.seed),
                runtime=sf.Runtime(survive="rank" if config.is_elastic else None),
            )

    def prepare(self, sources: tuple[Source, ...], kind: Kind) -> Prepared:
        """Rows as tokens, of the whole of some sources."""
        from shardfold.tools.tune.data.prepared import prepare

        return prepare(list(sources), self.tokenizer, self.config.text, kind, cache=self.config.cache_folder())

    def batches_of(self, rows: Prepared, *, accumulate: int | None = None, shuffle: bool = True) -> Batches:
        """This rank's windows of some rows."""
        from shardfold.tools.tune.data.batches import Batches

        config = self.config
        return Batches(
            rows,
            length=config.text.length,
            pack=config.text.pack,
            micro_batch=config.micro_batch,
            accumulate=config.accumulate if accumulate is None else accumulate,
            seed=config.seed,
            data_rank=self.engine.data_rank,
            data_ranks=self.engine.data_ranks,
            shuffle=shuffle,
            pad=self.tokenizer.pad_token_id or 0,
        )

    def _is_packed(self) -> bool:
        """Whether the model can read packed samples, or the axis of sequence says so itself; what the other ranks have
        found one that joins hears from them."""
        from shardfold.tools.tune.data.packed_attention import why_not_packed

        if self.attempts.joined:
            return self.attempts.position["pack"]
        if self.config.task != "lm" or self.config.sequence > 1:
            return True
        self.model.eval()
        vocab = self.model_config.get_text_config().vocab_size

        def logits(**batch: Any) -> Tensor:
            return self.engine(**batch, use_cache=False).logits

        if (why := why_not_packed(logits, vocab, self.engine.device)) is not None:
            words = f"{type(self.model).__name__} cannot be packed: {why}. Samples are padded."
            self.console.print(words, highlight=False, soft_wrap=True)
        return why is None

    def _renew_schedule(self) -> None:
        """The rates of as many steps as the data make."""
        if self.config.steps is None and (schedule := self.engine.lr_schedule) is not None:
            other = torch.optim.SGD([torch.zeros(())])  # a second schedule of the run's own would step twice
            fresh = schedule_of(self.config, self.total * self.recipe.updates)(other)
            schedule.lr_lambdas = [fresh.lr_lambdas[0]] * len(schedule.lr_lambdas)
            renew_rates(schedule)

    def stops(self) -> int | list[int]:
        """The tokens at which an answer ends."""
        found: list[int] = self.rows.facts["stop"] or [self.tokenizer.eos_token_id]
        return found[0] if len(found) == 1 else found

    @property
    def last(self) -> StepMetrics:
        """Of the last step that this rank has come to the end of."""
        return self.history[-1] if self.history else replace(NONE, step=self.done)

    # -- batches and what the model makes of them

    def on_rank(self, batch: Batch) -> Batch:
        """The batch on this rank's device; where ranks share sequences, this rank's part of it."""
        device = self.engine.device
        inputs = {name: value.to(device) for name, value in batch.inputs.items()}
        labels, documents = batch.labels.to(device), batch.documents.to(device)
        lengths = sample_lengths(documents)
        if self.engine.sequence is not None:
            whole = {**inputs, "shift_labels": labels, "document_ids": documents, "documents": documents}
            inputs = sf.sequence_shard({**whole, "lengths": lengths}, also=("documents", "lengths"), engine=self.engine)
            labels, documents, lengths = (inputs.pop(name) for name in ("shift_labels", "documents", "lengths"))
        if self.noise is not None:
            self.noise.lengths = lengths
        return replace(batch, inputs=inputs, labels=labels, documents=documents)

    def on_rank_of(self, values: Tensor, batch: Batch) -> Tensor:
        """This rank's part of ``(B, L)`` more values of the tokens of a batch, on its device; before :meth:`on_rank`,
        as attention goes by the batch that was cut last."""
        values = values.to(self.engine.device)
        if self.engine.sequence is None:
            return values
        inputs = {"input_ids": batch.inputs["input_ids"].to(self.engine.device), "values": values}
        return sf.sequence_shard(inputs, also=("values",), engine=self.engine)["values"]

    def logits(self, batch: Batch) -> Tensor:
        """``(B, L, vocabulary)``, of a batch of this rank (:meth:`on_rank`)."""
        inputs = dict(batch.inputs)
        if self.config.adapter is not None and self.config.adapter.kind == "prefix":
            inputs.pop("position_ids")  # peft counts them from behind the prefix
        found = (self.engine if self.part is None else self.part)(**inputs, use_cache=False).logits
        return found[:, -batch.labels.shape[1] :]  # a prefix may stand before them

    @contextmanager
    def calling(self, model: Any) -> Iterator[None]:
        """Inside, a batch goes to that model in place of the engine: to a part of it, on a stage."""
        self.part = model
        try:
            yield
        finally:
            self.part = None

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks that share sequences; gradients are what a loss on one rank would give."""
        axis = self.engine.sequence
        return values if axis is None or axis.group.size == 1 else _SumOfParts.apply(values, axis.group)

    # -- steps

    def step(self, windows: Iterator[Window]) -> StepMetrics:
        """Do one optimizer step."""
        began = time.perf_counter()
        scaler = self.engine.loss_scale
        if self.noise is not None:
            sequence = self.engine.sequence
            self.noise.step((self.engine.data_rank, 0 if sequence is None else sequence.group.rank), self.done)
        try:
            said, totals = self.recipe.step(self, windows)
        except NonFiniteError as error:
            if scaler is not None:
                raise
            said = not_finite("the loss or its gradient is inf or NaN", self.done + 1, self.config)
            raise ShardfoldError(said) from error
        means = totals.means(self.engine)
        loss = means.pop("loss")
        if not math.isfinite(loss) and scaler is None and self.config.nonfinite == "raise":
            raise ShardfoldError(not_finite(f"the loss is {loss}", self.done + 1, self.config))
        tokens = self.engine.mean(float(totals.tokens)) * self.engine.data_ranks
        self.done += 1
        now = time.perf_counter()
        return StepMetrics(
            step=self.done,
            loss=loss,
            lr=said.lr,
            grad_norm=said.grad_norm,
            tokens_per_s=tokens / (now - began),
            seconds=now - self.began,
            memory_bytes=self.history[-1].memory_bytes if self.history else held_in_memory(self.engine.memory()),
            loss_scale=said.loss_scale if scaler is not None else None,
            straggler=str(said.straggler) if said.straggler is not None else None,
            skipped=scaler.skipped if scaler is not None else 0,
            figures=means,
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The means of loss and figures over all rows of ``eval_data``, each once; all ranks call it."""
        assert self.held_out is not None
        batches = self.batches_of(self.held_out, accumulate=1)
        totals, often = Totals(), batches.epoch_windows
        self.model.eval()
        self.split = "eval"
        with working("evaluating", unit="batches") as line:
            for number, window in enumerate(batches.epoch()):
                line.amount(number, often)
                self.recipe.window(self, window)
                if self.config.pipeline > 1:
                    self.recipe.through_stages(self, window, totals, train=False)
                    continue
                for batch in window.batches:
                    totals.add(self.recipe.loss(self, batch), batch)
        self.split = "train"
        self.model.train()
        return totals.means(self.engine)

    def train(self, progress: Progress, written: Run) -> None:
        """Step until the end, or until some rank was asked to stop; checkpoints go to the run folder."""
        config, out, attempts = self.config, written.folder, self.attempts
        self.began, self.out, self.written, self.progress = time.perf_counter(), out, written, progress
        with self.stop as stop:
            windows = attempts.windows(self.batches)
            while self.done < self.total:
                steps = self.engine.steps
                metrics = attempts.once(lambda: self.step(windows))
                if metrics is None:  # a rank has died; if others had taken the step, it counts, and what follows it too
                    if self.engine.steps == steps:
                        continue
                    self.done += 1
                last = self.done == self.total
                if self.held_out is not None and config.eval_every and self.done % config.eval_every == 0 and not last:
                    with written.during("evaluating"), progress.during("evaluating"):
                        held_out_loss = attempts.whole(self.evaluate)["loss"]
                    if metrics is not None:
                        metrics = replace(metrics, held_out_loss=held_out_loss)
                if metrics is not None:
                    self.history.append(metrics)
                    progress.update(metrics)
                    written.write(metrics.row())
                if config.save_every and self.done % config.save_every == 0 and not last:
                    with written.during("saving"), progress.during("saving"):
                        attempts.whole(partial(self.save, out))
                # A signal may reach ranks in different steps: all stop at the first step after any rank saw it.
                asked = attempts.whole(lambda: self.engine.max_over_ranks([float(stop.received)]))
                self.interrupted = int(asked[0])
                if self.interrupted:
                    progress.note(f"Stopping after step {self.done}; {stop.then}.")
                    break
        if config.save_every:
            with written.during("saving"), progress.during("saving"):
                attempts.whole(partial(self.save, out, wait=True))
        self.progress = None

    # -- checkpoints

    @property
    def trains_base(self) -> bool:
        """Whether values of the model itself change, or were changed: then they are in checkpoints too."""
        adapter = self.config.adapter
        return adapter is None or adapter.kind in ("freeze", "expand") or adapter.variant in BASE_CHANGES

    def save(self, out: Path, *, wait: bool = False) -> None:
        """Write a checkpoint into the run folder, beside the training unless it is the last."""
        state = {"data": self.batches, "done": self.done, "recipe": self.recipe}
        path = out / IN_RUN / f"step-{self.done:06d}"
        frozen = "keep" if self.trains_base else "skip"
        self.recipe.saving(self, path)
        self.engine.save(path, state=state, keep=self.config.keep, wait=wait, frozen=frozen)

    def resume(self, path: Path) -> str:
        """Go on where a checkpoint was written, on any number of ranks; return a word on it."""
        state = {"data": self.batches, "recipe": self.recipe}
        report = load_with_own_rates(self.engine, path, state)
        self.done = self.begun_at = report.state["done"]
        self.recipe.resumed(self, Path(report.path))
        if self.done >= self.total:
            raise ConfigError(
                f"{report.path} has done {self.done} steps of {self.total}, which leaves none to do: give more "
                "--epochs or --steps."
            )
        return "\n".join([f"Resumed from {report.path}, at step {self.done} of {self.total}.", *report.notes])


class _SumOfParts(torch.autograd.Function):
    """A sum over ranks, each of which goes on with the same loss: its gradient is the sum of theirs, as an engine
    divides by the weights of all of them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return group.all_reduce(values.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.group.all_reduce(grads[0].clone()), None
