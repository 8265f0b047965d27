"""Trains a face model on images by identity and tells how well it recognizes identities that it has never seen.

Each rank runs `train`. Rank 0 alone prints and writes: config.json, metrics.jsonl, summary.json, roc.png, faces.png
and embeddings.npz, of the identities that were kept apart, in the run folder.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import shardfold as sf
from shardfold.checkpoint.folders import IN_RUN
from shardfold.errors import ConfigError, ShardfoldError
from shardfold.tools.extras import sentence
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.readable import format_bytes, format_count, format_duration
from shardfold.tools.observe.run_folder import Run
from shardfold.tools.observe.trackers import tracker_names
from shardfold.tools.observe.working_line import working
from shardfold.tools.recipes.face._matcher import fit, scores_of
from shardfold.tools.recipes.face._transforms import change_of
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.images import Encoded, EpochSampler, ImageBatches, ImageSource, sources, unchanged
from shardfold.tools.recipes.face.verification import PairVerification, cosine_scores, identification, verify
from shardfold.tools.recipes.face.vit import FaceModel
from shardfold.tools.recipes.folder import claimed, claimed_by_launcher
from shardfold.tools.run_attempts import RunAttempts, RunOnRanks, check_spare
from shardfold.tools.stop_signal import StopSignal

__all__ = ["FaceResult", "FaceRun", "train"]

EVAL_BATCH = 64
BOOTSTRAP = 100  # draws of identities
MATCHED = 3000  # training images that a matcher learns from


@dataclass(frozen=True, kw_only=True)
class FaceResult:
    """What a run came to; `found` is on rank 0."""

    steps: int
    images_per_s: float
    found: PairVerification | None
    interrupted: int
    """The number of the signal that ended it early; 0: none."""
    out: Path

    @property
    def exit_status(self) -> int:
        return 128 + self.interrupted if self.interrupted else 0


class FaceRun(RunOnRanks):
    """One training: the engine, the images, and how far it is."""

    def __init__(self, config: FaceConfig, images: tuple[ImageSource, ImageSource] | None = None) -> None:
        self.config = config
        self.images, self.held_out = images or sources(config)
        self.attempts = RunAttempts(self.make, elastic=config.elastic, changed=self.changed)
        self.sampler = EpochSampler(
            len(self.images.labels),
            config.batch,
            seed=config.seed,
            rank=self.engine.data_rank,
            num_ranks=self.engine.data_ranks,
            fill_last=True,
        )
        dataset = ImageBatches(self.images, augment=config.augment, seed=config.seed, change=change_of(config))
        more: dict[str, Any] = {"persistent_workers": True} if config.workers else {}
        self.loader = sf.Loader(dataset, self.sampler, num_workers=config.workers, collate_fn=unchanged, **more)
        self.done = self.engine.steps
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def make(self, ranks: int) -> sf.Engine:
        """Build the model and its engine, on so many ranks."""
        config, identities = self.config, len(self.images.names)
        if config.head == "sharded":
            config.check_classes(identities, ranks)
        with sf.meta_init() if config.backbone == "vit" else seeded(config.seed):  # packages' own have values at once
            model = FaceModel(config, identities)
        return sf.Engine(
            model,
            optimizer=partial(torch.optim.AdamW, lr=config.lr, weight_decay=config.weight_decay),
            layout=config.layout,
            offload=config.offload,
            precision={"head": "fp32", "*": config.precision}
            if "autocast" not in config.precision
            else config.precision,
            clip_norm=config.clip_norm or None,
            lr_schedule=sf.optim.warmup_cosine(warmup=config.warmup_steps(), total=config.steps, floor=0.02),
            init=sf.Init(seed=config.seed),
            runtime=sf.Runtime(survive="rank" if config.elastic else None),
        )

    def images_per_s(self) -> float:
        """Of all ranks; the median of the steps so far but the first two, in which orders are recorded."""
        times = sorted(self.seconds[2:] or self.seconds)
        return self.sampler.global_batch / times[len(times) // 2] if times else math.nan

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's, epoch after epoch: one for each step, as the neck normalizes over those of all ranks."""
        return self.attempts.batches(self.loader, together=True)

    def step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """One step; what it came to."""
        images, labels = (t.to(self.engine.device) for t in next(batches))
        began = time.perf_counter()  # of the engine alone: what images cost is the loader's
        loss = self.engine(images, labels)
        self.engine.backward(loss)
        said = self.engine.step(samples=len(labels))
        self.seconds.append(time.perf_counter() - began)
        mean = self.engine.mean(loss.item(), weight=len(labels))
        if not math.isfinite(mean) and self.engine.loss_scale is None:
            raise ShardfoldError(
                f"the loss is {mean} at step {self.done + 1}: lower the learning rate (--lr, now {self.config.lr:g})."
            )
        self.done += 1
        self.losses.append(mean)
        return {"step": self.done, "loss": mean, "lr": said.lr, "grad_norm": said.grad_norm, "updated": said.updated}

    @torch.no_grad()
    def embeddings(self, source: ImageSource, most: int | None = None) -> npt.NDArray[np.float32]:
        """Of all images ``(n, d)``, or of the first so many, on every rank; all ranks call it, and each computes its
        part."""
        engine, number = self.engine, min(len(source.labels), most or len(source.labels))
        ranks = engine.world_size
        each = -(-number // ranks)
        mine = [min(engine.rank * each + i, number - 1) for i in range(each)]
        dataset = ImageBatches(source, augment=False, seed=0)
        engine.module.eval()
        parts = [
            engine(dataset.__getitems__(mine[at : at + EVAL_BATCH])[0].to(engine.device)).float()
            for at in range(0, each, EVAL_BATCH)
        ]
        engine.module.train()
        found = torch.cat(parts)
        if ranks > 1:
            gathered = [torch.empty_like(found) for _ in range(ranks)]
            dist.all_gather(gathered, found)
            found = torch.cat(gathered)
        return found[:number].cpu().numpy()

    def verify(self, bootstrap: int = 0) -> PairVerification:
        """On the identities that were kept apart; all ranks call it."""
        scores = cosine_scores(self.embeddings(self.held_out))
        return verify(scores, self.held_out.labels, self.config.rates(), bootstrap=bootstrap)

    def save(self, out: Path, *, wait: bool = False) -> None:
        """Write a checkpoint into the run folder."""
        state = {"data": self.sampler, "done": self.done, "names": list(self.images.names)}
        self.engine.save(out / IN_RUN / f"step-{self.done:06d}", state=state, keep=2, wait=wait)

    def resume(self, path: Path) -> list[str]:
        """Go on where a checkpoint was written, on any number of ranks, with the same identities or others: those that
        there were keep their centres, new ones begin anew. Return what there is to say of it.
        """
        saved = sf.Checkpoint(path).run().get("state") or {}
        if not {"names", "data", "done"} <= saved.keys():
            raise ConfigError(f"{str(path)!r} is no checkpoint of `train face`: it has no names of identities.")
        names = {name: row for row, name in enumerate(saved["names"])}
        rows = [names.get(name, -1) for name in self.images.names]
        same = rows == list(range(len(saved["names"])))
        state = {"data": self.sampler} if same and saved["data"]["length"] == self.sampler.length else {}
        report = self.engine.load(path, state=state, rows=None if same else {"head.weight": rows})
        self.done = report.state["done"]
        new = rows.count(-1)
        words = (
            [] if same else [f"{len(rows) - new} identities go on, {new} are new, {len(names) - len(rows) + new} left."]
        )
        if self.done >= self.config.steps:
            words.append("No step is left: give more --steps to train on.")
        return [f"Resumed from {report.path}, at step {self.done} of {self.config.steps}.", *words, *report.notes]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """PyTorch's generator begins with a seed, and is afterwards as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def pca(train: npt.NDArray[np.uint8], images: npt.NDArray[np.uint8], components: int = 64) -> npt.NDArray[np.float32]:
    """Eigenfaces (Turk and Pentland 1991), whitened: what linear algebra makes of pixels."""
    flat = train.reshape(len(train), -1).astype(np.float32)
    mean = flat.mean(0)
    _, size, axes = np.linalg.svd(flat - mean, full_matrices=False)
    keep = slice(0, min(components, len(size)))
    projected = (images.reshape(len(images), -1).astype(np.float32) - mean) @ axes[keep].T
    return (projected / np.maximum(size[keep], 1e-6)).astype(np.float32)


def train(config: FaceConfig) -> FaceResult:
    """Train on this rank, together with the others if a launcher started several.

    Raises:
        ConfigError: the run folder is not empty, or the images do not do.
        ShardfoldError: the checkpoint does not fit, or the loss is no longer finite.
    """
    leads = int(os.environ.get("RANK", "0")) == 0
    check_spare(config.out)
    tracker_names(config.track, installed=leads)  # refused before anything is loaded
    mine = claimed(config.out) if leads and not claimed_by_launcher(config.out) else nullcontext(config.out)
    with mine as folder:
        run = FaceRun(config)
        if config.out is None and run.engine.world_size > 1 and config.save_every:
            raise ConfigError("ranks of a launcher of its own write checkpoints together: give --out one folder.")
        out = folder or Path("runs", "unnamed")
        console = lenient_console()
        joined = run.attempts.joined  # with what the others have
        notes = run.resume(config.resume) if config.resume is not None and not joined else []
        if run.leads and not joined:
            settings = config.model_dump(mode="json", exclude={"out"}, exclude_none=True)
            settings["procs"] = run.engine.world_size
            (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            introduce(run, console, notes)
        with run.attempts.begin_run(out, steps=config.steps, track=config.track) as written:
            return whole(run, written, console)


def whole(run: FaceRun, written: Run, console: Console) -> FaceResult:
    """Verify, train, verify again, and write and print what came of it."""
    out, attempts = written.folder, run.attempts
    run.written = written
    before = None
    if not attempts.joined:
        with written.during("evaluating"), working("verifying"):
            before = attempts.whole(run.verify)
    interrupted = steps(run, written, console)
    with written.during("evaluating"), working("verifying"):
        found = attempts.whole(lambda: run.verify(BOOTSTRAP))
        held = attempts.whole(lambda: run.embeddings(run.held_out))
        seen = attempts.whole(lambda: run.embeddings(run.images, MATCHED)) if run.config.matcher else None
    result = FaceResult(steps=run.done, images_per_s=run.images_per_s(), found=found, interrupted=interrupted, out=out)
    if run.leads:
        with written.during("saving"):
            report(run, out, console, before, found, held, seen)
    run.engine.close()
    written.close("stopped" if interrupted else "done")
    return result


def introduce(run: FaceRun, console: Console, notes: list[str]) -> None:
    """Say who trains on what."""
    config = run.config
    parts = {"backbone": 0, "head": 0}
    for segment in run.engine.sharded.segments():
        for slot in segment.spec.slots:
            parts["head" if slot.name.startswith("head.") else "backbone"] += math.prod(slot.whole)
    console.print(
        f"{config.backbone}, {format_count(parts['backbone'])} parameters, and a {config.head} head of "
        f"{len(run.images.names):,} classes, {format_count(parts['head'])}; {config.layout} on "
        f"{run.engine.world_size} rank{'s' * (run.engine.world_size > 1)}, {config.precision}\n"
        f"{len(run.images.labels):,} images of {len(run.images.names):,} identities, "
        f"{'drawn' if config.data is None else config.data}; {len(run.held_out.names)} other identities are held out",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if isinstance(run.images, Encoded) and run.images.left_out:
        notes = [f"Identities with one image, {run.images.left_out:,} of them, are left out.", *notes]
    for note in notes:
        console.print(note, highlight=False, markup=False)


def steps(run: FaceRun, written: Run, console: Console) -> int:
    """Train until the end, or until some rank was asked to stop; return the number of the signal that did, or 0."""
    config, attempts, out, asked = run.config, run.attempts, written.folder, 0
    batches = run.batches()
    with StopSignal() as stop:
        while run.done < config.steps:
            before = run.engine.steps
            said = attempts.once(lambda: run.step(batches))
            if said is None:  # a rank has died; if others had taken the step, it counts, and what follows it too
                if run.engine.steps == before:
                    continue
                run.done += 1
            else:
                written.write(said)
                if run.leads and (run.done % max(config.steps // 10, 1) == 0 or run.done == config.steps):
                    rate = f"{run.images_per_s():.0f} images/s"
                    console.print(f"step {run.done:>5}  loss {said['loss']:.3f}  {rate}", highlight=False)
            if config.save_every and run.done % config.save_every == 0 and run.done < config.steps:
                with written.during("saving"):
                    attempts.whole(partial(run.save, out))
            asked = int(attempts.whole(lambda: run.engine.max_over_ranks([float(stop.received)]))[0])
            if asked:
                if run.leads:
                    console.print(f"Stopping after step {run.done} of {config.steps}; {stop.then}.", highlight=False)
                break
    if config.save_every:
        with written.during("saving"):
            attempts.whole(partial(run.save, out, wait=True))
    return asked


def report(
    run: FaceRun,
    out: Path,
    console: Console,
    before: PairVerification | None,
    found: PairVerification,
    held: npt.NDArray[np.float32],
    seen: npt.NDArray[np.float32] | None,
) -> None:
    """Write and print what came of it."""
    config = run.config
    some = list(range(0, len(run.images.labels), max(len(run.images.labels) // 2000, 1)))
    pixels = run.held_out.read(range(len(run.held_out.labels)))
    eigen = verify(cosine_scores(pca(run.images.read(some), pixels)), run.held_out.labels, config.rates())
    first, fifth = identification(cosine_scores(held), run.held_out.labels)
    rows = {"trained": found, **({} if before is None else {"untrained": before}), "PCA of pixels": eigen}
    if seen is not None:
        matcher = fit(seen, run.images.labels[: len(seen)], config.seed)
        rows["trained, ResNet matcher"] = verify(scores_of(matcher, held), run.held_out.labels, config.rates())
    memory = run.engine.memory()
    summary = {
        "steps": run.done,
        "interrupted": run.done < config.steps,
        "images_per_s": run.images_per_s() if run.seconds else None,
        "precision_at_far": {name: dict(zip(map(str, v.rates), v.accepted, strict=True)) for name, v in rows.items()},
        "intervals": found.intervals,
        "thresholds": found.thresholds,
        "genuine_pairs": found.genuine,
        "impostor_pairs": found.impostor,
        "rank_1": first,
        "rank_5": fifth,
        "losses": run.losses,
        "memory": [row._asdict() for row in memory.rows],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    np.savez(out / "embeddings.npz", embeddings=held, labels=run.held_out.labels, names=np.array(run.held_out.names))
    said: list[str] = []
    try:
        from shardfold.tools.recipes.face._face_pictures import faces_picture, roc_picture

        roc_picture(out / "roc.png", rows)
        faces_picture(out / "faces.png", run.held_out)
    except ModuleNotFoundError as error:
        if (words := sentence("roc.png", error)) is None:
            raise
        said = [f"There is no picture: {words}"]
    for name, value in rows.items():
        console.print(f"{name:<24}{value}", highlight=False)
    rate = f"{run.images_per_s():.0f}" if run.seconds else "no"
    if run.done < config.steps:
        kept = f"; --resume {out} goes on" if config.save_every else ""
        said.append(f"Interrupted at step {run.done} of {config.steps}{kept}.")
    spans = ", ".join(f"{100 * a:.1f} to {100 * b:.1f}" for a, b in found.intervals)
    console.print(
        f"Precision at false-accept rates, {found.genuine:,} genuine and {found.impostor:,} impostor pairs of "
        f"identities that training never saw; 95 % intervals of the first row: {spans or 'none'}\n"
        f"found among {len(run.held_out.names)}: first {100 * first:.1f} %, among the first five {100 * fifth:.1f} %\n"
        f"{rate} images/s; {format_bytes(memory.held)} held by this rank, "
        f"{format_duration(sum(run.seconds))} of steps\n" + "\n".join([*said, f"Written to {out}"]),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
