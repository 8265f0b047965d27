"""Trains a byte-level GPT on text: read it top to bottom to see how an engine is used.

Each rank runs `train`. It builds the model without memory, lets the engine shard it, and steps through the text in an
order that is the same for any number of ranks. Now and then, and at the end, it measures bits per byte on held-out
text. Rank 0 alone prints and writes: config.json, metrics.jsonl, program.txt, loss.png, sample.txt, summary.json and
report.html in the run folder.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

import shardfold as sf
from shardfold import accelerator
from shardfold.checkpoint.folders import IN_RUN
from shardfold.comm.mesh import pick_device
from shardfold.engine.peak_rate import peak_of
from shardfold.errors import ConfigError, NonFiniteError, ShardfoldError
from shardfold.plan.layout import Tier
from shardfold.plan.report import StepReport
from shardfold.tiers.limit import memory_limit
from shardfold.tools.extras import sentence
from shardfold.tools.observe import tables
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.metrics import StepMetrics
from shardfold.tools.observe.progress import Progress
from shardfold.tools.observe.readable import format_bytes, format_count, format_duration
from shardfold.tools.observe.run_folder import Run
from shardfold.tools.observe.run_page import write_page
from shardfold.tools.observe.trackers import tracker_names
from shardfold.tools.observe.working_line import working
from shardfold.tools.recipes._corpus import Corpus, Windows, baselines, held_out_windows, load_corpus
from shardfold.tools.recipes._needed_memory import check_memory
from shardfold.tools.recipes._planned_peak import Peak
from shardfold.tools.recipes.folder import claimed, claimed_by_launcher
from shardfold.tools.recipes.gpt import GPT, generate
from shardfold.tools.recipes.largest import with_most_samples
from shardfold.tools.recipes.train_config import SHAPE, TrainConfig, flops_or_file
from shardfold.tools.run_attempts import RunAttempts, RunOnRanks, check_spare
from shardfold.tools.run_engine import clip_of, held_in_memory, load_with_own_rates, not_finite, parallel_of
from shardfold.tools.stop_signal import StopSignal

__all__ = ["Result", "TrainConfig", "train"]

LN2 = math.log(2)
BETAS = (0.9, 0.95)
EVAL_BATCH = 16  # windows that go through the model at once
HASTY_WINDOWS = 32  # windows read by the evaluation after an interruption
HASTY_SAMPLE = 64  # bytes of text generated then, at most


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to; the same on every rank, but for `sample`, which rank 0 writes."""

    steps: int
    bits_per_byte: float
    """On held-out text."""
    baselines: dict[str, float]
    """Bits per byte of counting, on the same bytes."""
    seconds: float
    interrupted: int
    """The number of the signal that ended it early; 0: none."""
    out: Path
    sample: bytes

    @property
    def exit_status(self) -> int:
        return 128 + self.interrupted if self.interrupted else 0


class Position:
    """What a checkpoint keeps of the sampler; a refusal of it is said in the words of the command line."""

    def __init__(self, sampler: sf.Sampler, config: TrainConfig) -> None:
        self.sampler, self.config = sampler, config

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.sampler.state_dict()
        if state.get("length") != own["length"]:
            raise ConfigError(
                f"the checkpoint was trained on a text of {state.get('length'):,} windows, but this one has "
                f"{own['length']:,}: give --data and --context as they were, or begin a new run without --resume."
            )
        if state.get("seed") != own["seed"]:
            raise ConfigError(
                f"the checkpoint was trained with --seed {state.get('seed')}, so it cannot go on with {own['seed']}: "
                "leave out --seed, or begin a new run without --resume."
            )
        self.sampler.load_state_dict(state)


def _optimizer(config: TrainConfig, model: torch.nn.Module) -> Any:
    """As an engine takes it."""
    if config.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay)
    groups = sf.optim.muon_groups(model, lr=config.matrix_lr, adamw_lr=config.lr, betas=BETAS)
    return sf.optim.Muon(groups, weight_decay=config.weight_decay)


class LanguageRun(RunOnRanks):
    """One training: the engine, the text and the run folder.

    Besides the engine, what a run is at is `done`, its optimizer steps, and the position of `sampler`: a checkpoint
    keeps both.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, console: Console) -> None:
        self.config = config
        self.corpus = corpus
        self.console = console
        self.shape = config.model_shape()
        self.text = Windows(corpus, context=self.shape.context)
        self.attempts = RunAttempts(self.make, elastic=config.elastic, changed=self.changed)
        if not config.micro_batch:
            config = self.config = with_most_samples(config, self.engine, len(self.text))
        self.sampler = sf.Sampler(
            len(self.text),
            config.micro_batch,
            seed=config.seed,
            rank=self.engine.data_rank,
            num_ranks=self.engine.data_ranks,
            fill_last=True,
        )
        self.windows = held_out_windows(corpus, context=self.shape.context, number=config.eval_windows)
        given = None if config.peak_flops is None else flops_or_file(config.peak_flops)
        self.flops = peak_of(given, self.engine.device, sf.Precision.named(config.precision)).flops
        self.done = self.begun_at = 0
        self.history: list[StepMetrics] = []
        self.stop = StopSignal()
        self.interrupted = 0
        self.peak = Peak(config, self.engine, self.text.text)

    def make(self, ranks: int) -> sf.Engine:
        """Build the model and its engine, on so many ranks."""
        config = self.config
        with sf.meta_init():
            self.model = GPT(self.shape)
        return sf.Engine(
            self.model,
            optimizer=_optimizer(config, self.model),
            layout=config.table(),
            activations=None if config.activations == "keep" else config.activations,
            parallel=parallel_of(config),
            precision=config.precision,
            accumulate=config.accumulate,
            clip_norm=clip_of(config),
            lr_schedule=sf.optim.warmup_cosine(warmup=config.warmup_steps(), total=config.steps, floor=0.1),
            init=sf.Init(seed=config.seed),
            runtime=sf.Runtime(survive="rank" if config.elastic else None, exact=config.exact),
        )

    def changed(self) -> None:
        """Ranks are fewer, or more: this one may be another, and the one that prints and writes."""
        super().changed()
        self.peak = Peak(self.config, self.engine, self.text.text)

    @property
    def tokens_per_step(self) -> int:
        return self.sampler.num_ranks * self.config.accumulate * self.config.micro_batch * self.shape.context

    def folder_of_all(self, folder: Path | None) -> Path:
        """Return the run folder, which without `--out` rank 0 has named after the time and number of its start."""
        if self.config.out is not None:
            return folder or self.config.out
        words = [] if folder is None else folder.name.split("-")
        numbers = [float(word) for word in (words[0][:4], words[0][4:], *words[1:])] if words else []
        year, day, moment, number = self.engine.max_over_ranks([*numbers, *[0.0] * (4 - len(numbers))])
        name = f"{year:04.0f}{day:04.0f}-{moment:06.0f}"
        return Path("runs", f"{name}-{number:.0f}" if number else name)

    def check_corpus(self) -> None:
        """Refuse to train on different text on different machines, where batches would not be what they claim."""
        digest = self.corpus.digest
        parts = [float(digest >> 16), float(digest & 0xFFFF)]  # 16 bits each are exact in any float that is reduced
        if self.engine.max_over_ranks([*parts, *(-part for part in parts)]) != [*parts, *(-part for part in parts)]:
            raise ConfigError(
                f"the ranks read different text from {self.corpus.source}: give --data one folder that all of them see."
            )

    def resume(self, path: Path) -> str:
        """Go on where a checkpoint was written, on any number of ranks; return a word on it."""
        report = load_with_own_rates(self.engine, path, {"data": Position(self.sampler, self.config)})
        self.done = self.begun_at = report.state["done"]
        if self.done >= self.config.steps:
            raise ConfigError(
                f"{report.path} has done {self.done} steps, and --steps {self.config.steps}, which counts them, "
                f"leaves none to do: give more than {self.done}."
            )
        return "\n".join([f"Resumed from {report.path}, at step {self.done} of {self.config.steps}.", *report.notes])

    def save(self, out: Path, *, wait: bool = False) -> None:
        """Write a checkpoint into the run folder, beside the training unless it is the last."""
        path = out / IN_RUN / f"step-{self.done:06d}"
        self.engine.save(path, state={"data": self.sampler, "done": self.done}, keep=self.config.keep, wait=wait)

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the mean loss of this rank's part of a micro-batch, and of how many tokens it is the mean."""
        batch = self.on_device(tokens, targets)
        if self.engine.sequence is not None:
            batch = sf.sequence_shard(batch)
        return self.engine(**batch), batch["targets"].numel()

    def whole_sequences(self) -> AbstractContextManager[None]:
        """Inside, each rank attends to the sequences that it has by itself."""
        return nullcontext() if self.engine.sequence is None else self.engine.sequence.local()

    def step(self, batches: Iterator[list[int]]) -> StepMetrics:
        """Do one optimizer step, over as many micro-batches as it accumulates."""
        began = time.perf_counter()
        scaler = self.engine.loss_scale  # which skips steps that are not finite, and gives up by itself
        try:
            done, mean = self.step_of_stages(batches) if self.config.pipeline > 1 else self.step_of_passes(batches)
        except NonFiniteError as error:
            if scaler is not None:
                raise
            said = not_finite("the loss or its gradient is inf or NaN", self.done + 1, self.config)
            raise ShardfoldError(said) from error
        assert done is not None and done.lr is not None
        if not math.isfinite(mean) and scaler is None and self.config.nonfinite == "raise":
            raise ShardfoldError(not_finite(f"the loss is {mean}", self.done + 1, self.config))
        self.done += 1
        now = time.perf_counter()
        tokens_per_s = self.tokens_per_step / (now - began)
        return StepMetrics(
            step=self.done,
            loss=mean,
            bits_per_byte=mean / LN2,
            lr=done.lr,
            grad_norm=done.grad_norm,
            tokens_per_s=tokens_per_s,
            mfu=self.mfu(tokens_per_s),
            seconds=now - self.began,
            # Walking live storages every step would cost time, and at rest between steps nothing changes.
            memory_bytes=self.history[-1].memory_bytes if self.history else held_in_memory(self.engine.memory()),
            loss_scale=done.loss_scale if scaler is not None else None,
            straggler=str(done.straggler) if done.straggler is not None else None,
            skipped=scaler.skipped if scaler is not None else 0,
        )

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the part of what all devices could do that the model's products come to, at this pace."""
        if self.flops is None:
            return None
        return 6 * self.shape.num_read * tokens_per_s / (self.flops * self.engine.world_size)

    def step_of_passes(self, batches: Iterator[list[int]]) -> tuple[StepReport | None, float]:
        """Forward, backward and step of each micro-batch; what the step said, and the mean loss of all ranks."""
        loss = torch.zeros((), device=self.engine.device)
        done, number, count = None, 1, 0.0
        for indices in batches:
            weight = self.engine.micro_batch_weight
            value, tokens = self.loss(*self.text.batch(indices))
            self.engine.backward(value)
            done = self.engine.step(tokens=0 if weight == 0 else tokens)
            if weight != 0:
                number = tokens
            loss += value.detach() * (1.0 if weight is None else weight)
            count += 1.0 if weight is None else weight
            if not self.engine.micro_batch:
                break
        return done, self.engine.mean(loss.item() / max(count, 1.0), weight=number * count / self.config.accumulate)

    def step_of_stages(self, batches: Iterator[list[int]]) -> tuple[StepReport | None, float]:
        """The same of stages, which run all micro-batches together."""
        parts = [self.on_device(*self.text.batch(indices)) for indices in islice(batches, self.config.accumulate)]
        loss = self.engine.train_batch(parts)
        return self.engine.step(tokens=sum(part["targets"].numel() for part in parts)), self.engine.mean(loss.item())

    def on_device(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return what the model is called with."""
        return {"tokens": tokens.to(self.engine.device), "targets": targets.to(self.engine.device)}

    def evaluated(self, parts: Sequence[Tensor]) -> float:
        """Return the sum of nats of these windows; all ranks call it."""
        nats = 0.0
        if self.config.pipeline > 1:  # ranks of all stages evaluate as often
            most = math.ceil(len(self.windows) / self.engine.data_ranks)
            often = math.ceil(most / EVAL_BATCH)
            for number in range(often):
                part = parts[min(number, len(parts) - 1)]
                loss = self.engine.eval_batch([self.on_device(part[:, :-1], part[:, 1:])], micro_batches=1)
                nats += loss.item() * len(part) * self.shape.context * (number < len(parts))
            return nats
        often = len(parts)
        if self.config.expert > 1:  # ranks that share experts out do, too
            often = math.ceil(math.ceil(len(self.windows) / self.engine.mesh.data_ranks) / EVAL_BATCH)
        with self.engine.gathered(), self.whole_sequences(), working("evaluating", unit="batches") as line:
            for number in range(often):
                line.amount(number, often)
                part = parts[min(number, len(parts) - 1)]
                batch = self.on_device(part[:, :-1], part[:, 1:])
                nats += self.model(**batch).item() * len(part) * self.shape.context if number < len(parts) else 0.0
        return nats

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return bits per byte on the held-out windows, which the ranks share out."""
        mesh = self.engine.mesh
        mine = self.windows[mesh.data_rank :: mesh.data_ranks]
        everyone = self.engine.mean(self.evaluated(mine.split(EVAL_BATCH))) * mesh.data_ranks
        return everyone / (len(self.windows) * self.shape.context) / LN2

    def train(self, progress: Progress, written: Run) -> None:
        """Step until the end, or until some rank was asked to stop; checkpoints go to the run folder."""
        out, attempts = written.folder, self.attempts
        self.began = time.perf_counter()
        with self.stop as stop:
            batches = attempts.batches(self.sampler)
            while self.done < self.config.steps:
                steps = self.engine.steps
                with self.peak.watching(self.done):
                    metrics = attempts.once(lambda: self.step(batches))
                if metrics is None:  # a rank has died; if others had taken the step, it counts, and what follows it too
                    if self.engine.steps == steps:
                        continue
                    self.done += 1
                every = self.config.eval_every
                if every and self.done % every == 0 and self.done < self.config.steps:
                    with written.during("evaluating"), progress.during("evaluating"):
                        bits = attempts.whole(self.evaluate)
                    if metrics is not None:
                        metrics = StepMetrics(**{**vars(metrics), "held_out_bits_per_byte": bits})
                if metrics is not None:
                    self.history.append(metrics)
                    progress.update(metrics)
                    written.write(metrics.row())
                if self.config.save_every and self.done % self.config.save_every == 0 and self.done < self.config.steps:
                    with written.during("saving"), progress.during("saving"):
                        attempts.whole(partial(self.save, out))
                # A signal may reach ranks in different steps: all stop at the first step after any rank saw it.
                asked = attempts.whole(lambda: self.engine.max_over_ranks([float(stop.received)]))
                self.interrupted = int(asked[0])
                if self.interrupted:
                    self.windows = self.windows[:: -(-len(self.windows) // HASTY_WINDOWS)]
                    progress.note(f"Stopping after step {self.done}; {stop.then}.")
                    break
        if self.config.save_every:
            with written.during("saving"), progress.during("saving"):
                attempts.whole(partial(self.save, out, wait=True))

    def sample(self) -> bytes:
        """Return generated text, on rank 0; stages generate none."""
        if self.config.pipeline > 1:
            return b""
        prompt = b"def " if self.config.data is None else b"\n"
        length = min(self.config.sample, HASTY_SAMPLE) if self.interrupted else self.config.sample
        with self.engine.gathered(), self.whole_sequences():
            # Ranks that share layers generate together.
            if not length or not (self.leads or self.config.tensor > 1 or self.config.expert > 1):
                return b""
            return prompt + generate(
                self.model, prompt, length, temperature=self.config.temperature, seed=self.config.seed
            )

    def introduce(self) -> str:
        """Return who trains on what, in two lines."""
        config, shape, corpus = self.config, self.shape, self.corpus
        files = f"{corpus.num_files} file{'s' if corpus.num_files > 1 else ''}"
        skipped = f", {len(corpus.skipped)} skipped: {'; '.join(corpus.skipped[:3])}" if corpus.skipped else ""
        skipped += " ..." if len(corpus.skipped) > 3 else ""
        return (
            f"GPT {config.size}, {format_count(shape.num_parameters)} parameters ({shape.layers} blocks of "
            f"{shape.d_model}, context {shape.context}); {config.layout} over {ranks(self)} on "
            f"{self.engine.device.type}, {config.precision}{elsewhere(self.engine.layout)}\n"
            f"{format_bytes(len(corpus.train))} of {corpus.source} ({files}{skipped}); "
            f"{format_bytes(len(corpus.held_out))} held out"
        )


def train(config: TrainConfig) -> Result:
    """Train on this rank, together with the others if a launcher started several.

    Raises:
        ConfigError: the run folder is not empty, the text is too short, or the run cannot fit into memory; nothing is
            left behind.
        ShardfoldError: the checkpoint to go on from does not fit, or the loss is no longer finite.
    """
    leads = int(os.environ.get("RANK", "0")) == 0
    check_spare(config.out, config.micro_batch)
    tracker_names(config.track, installed=leads)  # refused before anything is loaded
    mine = claimed(config.out) if leads and not claimed_by_launcher(config.out) else nullcontext(config.out)
    with mine as folder:
        check_device(config)
        run = LanguageRun(config, load_corpus(config.data), lenient_console())
        joined, resumed = run.attempts.joined, None
        if joined:  # with what the others have, who have looked at all of this
            run.done = run.begun_at = run.engine.steps
        else:
            run.check_corpus()
        out = run.folder_of_all(folder)
        if config.resume is not None and not joined:
            resumed = run.resume(config.resume)
        if run.leads:
            (out / "config.json").write_text(json.dumps(resolved(run), indent=2) + "\n", encoding="utf-8")
        with run.attempts.begin_run(out, steps=config.steps, track=config.track) as written:
            return run_and_report(run, written, resumed)


def check_device(config: TrainConfig) -> None:
    """Refuse what cannot fit into this rank's device."""
    ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    device = pick_device()
    available = accelerator.total_memory(device)
    of_host = [Tier.HOST]
    if available is not None:
        sharing = -(-here // accelerator.count(device))
        check_memory(config, ranks=ranks, sharing=sharing, available=available, where="a GPU", tiers=[Tier.DEVICE])
    else:
        of_host.append(Tier.DEVICE)  # one memory
    check_memory(config, ranks=ranks, sharing=here, available=memory_limit(), where="this machine", tiers=of_host)


def run_and_report(run: LanguageRun, written: Run, resumed: str | None) -> Result:
    """Train, evaluate, write what came of it, and only then sample and print: a run is not lost at its last line."""
    with Progress(run.config.steps, console=run.console, enabled=run.leads) as progress:
        progress.note(run.introduce())
        if resumed:
            progress.note(resumed)
        run.written, run.progress = written, progress
        run.train(progress, written)
        run.progress = None
    out = written.folder
    with written.during("evaluating"):
        found = run.attempts.whole(run.evaluate)
        bits = {f"GPT {run.config.size}": found, **baselines(run.corpus.train, run.windows)}
        seconds = time.perf_counter() - run.began
        said = write_results(run, out, bits, seconds) if run.leads else []
        sample = run.attempts.whole(run.sample)
    if run.leads:
        with written.during("saving"):
            (out / "sample.txt").write_bytes(sample)
            write_page(out)
        show(run, out, bits, seconds, sample, said)
    run.engine.close()
    run.stop.release()
    written.close("stopped" if run.interrupted else "done")
    model, *counted = bits.items()
    return Result(
        steps=run.done,
        bits_per_byte=model[1],
        baselines=dict(counted),
        seconds=seconds,
        interrupted=run.interrupted,
        out=out,
        sample=sample,
    )


def elsewhere(layout: sf.Layout) -> str:
    """Return which states rest in slower tiers, for the end of a line; nothing if none does."""
    states: dict[Tier, list[str]] = {}
    for state, cell in layout.cells().items():
        states.setdefault(cell.tier, []).append(state)
    places = {Tier.HOST: "in host memory", Tier.DISK: "on disk"}
    return "".join(f"; {', '.join(states[tier])} {place}" for tier, place in places.items() if tier in states)


def ranks(run: LanguageRun) -> str:
    return f"{run.engine.world_size} rank{'s' if run.engine.world_size > 1 else ''}"


def resolved(run: LanguageRun) -> dict[str, Any]:
    """Return the settings with nothing left to choose: a config file for the same run, and what it came to."""
    settings = run.config.model_dump(
        mode="json", exclude={"out", "data", "resume", *run.config.idle()}, exclude_none=True
    )
    # As they are, and not as the model writes them: a path need not be UTF-8.
    # From the root on, so that a run which is resumed from another folder finds them.
    paths = {name: getattr(run.config, name) for name in ("data", "resume")}
    flops = run.config.peak_flops and flops_or_file(run.config.peak_flops)
    paths["peak_flops"] = flops if isinstance(flops, Path) else None
    settings.update({name: os.path.abspath(path.expanduser()) for name, path in paths.items() if path is not None})
    settings.update({name: getattr(run.shape, name) for name in SHAPE})
    settings["procs"] = run.engine.world_size
    settings["warmup"] = run.config.warmup_steps()
    settings["derived"] = {
        "d_ff": run.shape.d_ff,
        "world_size": run.engine.world_size,
        "device": str(run.engine.device),
    }
    return settings


def write_results(run: LanguageRun, out: Path, bits: Mapping[str, float], seconds: float) -> list[str]:
    """Write summary.json and loss.png; return what there is to say of it."""
    memory, traffic = run.engine.memory(), run.engine.traffic()
    (name, model), *counted = bits.items()
    summary = {
        "steps": run.done,
        "skipped_steps": run.engine.stats().skipped,
        "interrupted": bool(run.interrupted),
        "seconds": round(seconds, 3),
        "resumed_at": run.begun_at,
        "tokens": run.done * run.tokens_per_step,
        "num_parameters": run.shape.num_parameters,
        "world_size": run.engine.world_size,
        "bits_per_byte": {"model": model, **dict(counted)},
        "memory": [row._asdict() for row in memory.rows],
        "traffic": [row._asdict() for row in traffic.rows],
        "moved": [row._asdict() for row in traffic.moved],
        "control_bytes": traffic.control,
        "skipped_files": list(run.corpus.skipped),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (out / "program.txt").write_text(run.engine.explain() + "\n", encoding="utf-8")
    try:
        from shardfold.tools.observe.pictures import (
            loss_picture,  # matplotlib takes a second to import: rank 0 alone pays it
        )
    except ModuleNotFoundError as error:
        said = sentence("loss.png", error)
        if said is None:
            raise
        return [f"There is no picture: {said}"]
    held_out = [(m.step, m.held_out_bits_per_byte) for m in run.history if m.held_out_bits_per_byte is not None]
    trained = [(m.step, m.bits_per_byte) for m in run.history if m.bits_per_byte is not None]
    loss_picture(
        out / "loss.png",
        train=[(step, bits) for step, bits in trained if math.isfinite(bits)],
        held_out=[*held_out, (run.done, model)],
        baselines=dict(counted),
        memory=memory.rows,
        title=f"{name}, {format_count(run.shape.num_parameters)} parameters, {run.config.layout} on {ranks(run)}",
    )
    return []


def show(
    run: LanguageRun, out: Path, bits: Mapping[str, float], seconds: float, sample: bytes, said: list[str]
) -> None:
    """Print the final report."""
    console = run.console
    memory, traffic = run.engine.memory(), run.engine.traffic()
    steps = run.done - run.begun_at
    pace = steps * run.tokens_per_step / seconds
    mfu = "" if run.mfu(pace) is None else f", MFU {run.mfu(pace):.1%}"
    console.print(f"\n{steps} steps in {format_duration(seconds)}, {format_count(pace)} tokens/s{mfu}", highlight=False)
    tables.print_whole(
        console,
        tables.quality_table(bits),
        tables.memory_table(memory.rows),
        tables.traffic_table(traffic.rows, traffic.control),
        *([tables.moved_table(traffic.moved)] if traffic.moved else []),
    )
    console.print("\n".join(["", *run.peak.told()]), highlight=False, soft_wrap=True)
    if sample:
        console.print("\n[bold]A sample[/bold]")
        console.print(Text(tables.printable(sample)), soft_wrap=True)
    names = [each.name + "/" * each.is_dir() for each in sorted(out.iterdir(), key=lambda each: (each.is_dir(), each))]
    console.print(
        "\n".join(["", *said, f"Written to {out}: {', '.join(names)}"]), highlight=False, markup=False, soft_wrap=True
    )
