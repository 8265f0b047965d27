"""The settings of the face-recognition recipe. Imports no torch; see the language model's."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from shardfold.errors import ConfigError
from shardfold.plan import presets
from shardfold.plan.layout import Layout
from shardfold.plan.offload import offloaded
from shardfold.tools.effects import Effect
from shardfold.tools.packages import package_of
from shardfold.tools.recipes.train_config import ELASTIC_SUMS, SPARES, RecipeSettings, Trackers, TrainConfig

__all__ = ["DEFAULT_WARMUP", "STUDY_CHOOSES", "FaceConfig"]

STUDY_CHOOSES = {"layout", "offload", "head", "matcher", "save_every", "track", "elastic", "spares"}
"""Settings that the study itself chooses, or does without."""
DEFAULT_WARMUP = 40


DRAWN = "faces are drawn only where there is no --data"
OF_TIMM = "a model of timm has its own sizes"
FACE_EFFECTS = (
    Effect(
        "elastic",
        lambda run: run.head == "replicated",
        "the classes of a rank are on no other one",
        "give --head replicated",
    ),
    ELASTIC_SUMS,
    SPARES,
    *(Effect(name, lambda run: run.data is None, DRAWN) for name in ("identities", "shots", "difficulty")),
    *(
        Effect(name, lambda run: not run.backbone.startswith("timm:"), OF_TIMM)
        for name in ("patch", "width", "layers", "heads")
    ),
    Effect("warmup", lambda run: run.warmup < run.steps, "the run ends before it is over", "warm up for fewer steps"),
    Effect("transforms", lambda run: run.augment, "with --no-augment images are not changed"),
)


class FaceConfig(RecipeSettings):
    """A model of faces whose head has a class for each identity, divided over the ranks.

    Everything that decides a run; field descriptions are the command line's help.
    """

    effects: ClassVar[tuple[Effect, ...]] = FACE_EFFECTS

    procs: int = Field(2, ge=1, le=4096, description="Processes on this machine; torchrun's own count wins.")
    data: Path | None = Field(
        None,
        description="A folder with a folder of images for each identity, or with .tar (webdataset) or .parquet files; "
        "without it, faces that are drawn.",
    )
    identities: int = Field(2000, ge=2, le=10**7, description="Identities that are drawn for training.")
    shots: int = Field(8, ge=2, le=4096, description="Images of each that are drawn.")
    held_out: int = Field(60, ge=2, le=10**6, description="Identities that are kept apart, for evaluation.")
    difficulty: float = Field(
        0.4, ge=0, le=2, allow_inf_nan=False, description="Of what is drawn: 0 portraits, 1 surveillance."
    )
    size: str = Field("32", description="Size of images in pixels: one number, or rows x columns, as 48x32.")
    channels: Literal[1, 3] = Field(1, description="Channels of images: 1 for grey, 3 for colour.")
    backbone: str = Field("vit", description="vit; or transformers:NAME or timm:NAME, a model of these packages.")
    patch: int = Field(8, ge=1, le=1024, description="Height and width of a patch in pixels.")
    width: int = Field(64, ge=8, le=2**16, description="Width of the backbone.")
    layers: int = Field(2, ge=1, le=1024, description="Blocks of the backbone.")
    heads: int = Field(4, ge=1, le=1024, description="Attention heads of a block.")
    embedding: int = Field(160, ge=2, le=2**16, description="Dimensions of an embedding.")
    head: Literal["sharded", "replicated"] = Field(
        "sharded", description="Classes split over the ranks, or all of them on each."
    )
    scale: float = Field(16.0, gt=0, allow_inf_nan=False, description="Factor of the logits.")
    angle: float = Field(0.1, ge=0, le=1.57, description="Margin of ArcFace, in radians.")
    cosine: float = Field(0.0, ge=0, le=2, description="Margin of CosFace; give --angle 0 with it.")
    sample: float = Field(1.0, gt=0, le=1, description="Share of the classes in a step (Partial FC).")
    layout: str = Field("zero2", description=f"How state is split over ranks: {', '.join(presets.PRESETS)}.")
    offload: str | None = Field(None, description="Slower tier of gradients and optimizer states: host or disk.")
    precision: Literal["fp32", "bf16", "fp16", "bf16-autocast"] = Field(
        "fp32", description="Of the backbone; the head and statistics of batch normalization are fp32."
    )
    steps: int = Field(400, ge=1, description="Optimizer steps.")
    batch: int = Field(48, ge=2, description="Images per rank and step.")
    lr: float = Field(4e-3, gt=0, allow_inf_nan=False, description="Peak learning rate.")
    warmup: int = Field(
        DEFAULT_WARMUP, ge=0, description="Steps over which the learning rate rises; a cosine falls after it."
    )
    weight_decay: float = Field(0.05, ge=0, allow_inf_nan=False, description="AdamW's decoupled weight decay.")
    clip_norm: float = Field(5.0, ge=0, allow_inf_nan=False, description="Largest gradient norm; 0 does not clip.")
    augment: bool = Field(True, description="Shift, mirror, brighten and cover images at random.")
    transforms: Literal["own", "torchvision"] = Field(
        "own", description="Whose changes these are: torchvision's v2 mirrors, turns, scales, adds noise and covers."
    )
    elastic: bool = Field(False, description=TrainConfig.model_fields["elastic"].description)
    spares: int = Field(0, ge=0, description=TrainConfig.model_fields["spares"].description)
    workers: int = Field(0, ge=0, le=1024, description="Processes of each rank that make images.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of identities, parameters and batches.")
    far: str = Field("0.1,0.01,0.001", description="False-accept rates at which Precision is measured.")
    matcher: bool = Field(False, description="Also train a small ResNet that matches pairs of embeddings.")
    save_every: int = Field(0, ge=0, description="Steps between checkpoints; with one at the end. 0: none.")
    track: Trackers = Field(None, description=TrainConfig.model_fields["track"].description)
    resume: Path | None = Field(
        None,
        description="Checkpoint to go on from; identities are found by name, new ones begin anew. With --study: the "
        "folder of a study that was stopped.",
    )
    out: Path | None = Field(None, description="Run folder, new or empty; without it, runs/<timestamp>.")

    @model_validator(mode="after")
    def _check(self) -> FaceConfig:
        self.image_size()
        self.rates()
        if self.backbone != "vit" and package_of(self.backbone) is None:
            raise ConfigError(
                f"backbone is {self.backbone!r}: it is vit, transformers:NAME (a type of model, as vit, deit or "
                "resnet) or timm:NAME."
            )
        self.table()
        if self.backbone == "vit" and self.width % self.heads:
            raise ConfigError(f"width {self.width} does not divide into {self.heads} heads: choose a multiple.")
        return self

    def check_start(self, *, study: bool) -> None:
        """What can be known before a process is started or PyTorch imported.

        Raises:
            ConfigError: there is nothing at a path, a rank of a sharded head would have no classes, or a study is
                asked for what it does not do.
        """
        if self.data is not None and not self.data.expanduser().exists():
            raise ConfigError(f"there is no file or folder {str(self.data)!r}: give --data images by identity.")
        if self.resume is not None and not self.resume.expanduser().exists():
            what = "the folder of a study" if study else "a checkpoint"
            raise ConfigError(f"there is no {str(self.resume)!r}: give --resume {what}.")
        if study:
            self.check_study()
        if self.data is None and (study or self.head == "sharded"):
            self.check_classes(self.identities, self.procs, study=study)

    def check_classes(self, identities: int, ranks: int, *, study: bool = False) -> None:
        """
        Raises:
            ConfigError: there are fewer than ranks.
        """
        if identities < ranks:
            other = "" if study else "--head replicated, "
            raise ConfigError(
                f"--head sharded splits {identities} identities over {ranks} processes, and some would have none: give "
                f"{other}--procs {identities} at most, or more identities."
            )

    def check_study(self) -> None:
        """
        Raises:
            ConfigError: a setting is the study's own choice, or of two precisions, which it does not plan.
        """
        if self.precision not in ("fp32", "bf16-autocast"):
            raise ConfigError(
                f"the study plans one precision for the whole model, and a head in fp32 beside a backbone in "
                f"{self.precision} is two: leave out --precision, or give bf16-autocast."
            )
        if given := sorted(self.model_fields_set & STUDY_CHOOSES):
            raise ConfigError(
                "the study chooses layouts, offload and heads itself, keeps no checkpoints, tells no tracker and "
                f"trains no matcher: leave out {', '.join('--' + name.replace('_', '-') for name in given)}."
            )

    def image_size(self) -> tuple[int, int]:
        """Rows and columns.

        Raises:
            ConfigError: ``size`` says none.
        """
        parts = self.size.lower().split("x")
        if len(parts) > 2 or not all(part.isdecimal() and 4 <= int(part) <= 4096 for part in parts):
            raise ConfigError(f"size is {self.size!r}: it is a number of pixels from 4 to 4096, or two, as 48x32.")
        return int(parts[0]), int(parts[-1])

    def rates(self) -> list[float]:
        """The false-accept rates of ``far``.

        Raises:
            ConfigError: they are none.
        """
        try:
            found = [float(part) for part in self.far.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 < rate < 1 for rate in found):
            raise ConfigError(f"far is {self.far!r}: it is rates between 0 and 1, as 0.1,0.01.")
        return found

    def warmup_steps(self) -> int:
        """``warmup``; in its place, where nothing else was said, at most a quarter of the run."""
        return min(self.warmup, self.steps // 4) if self.warmup == DEFAULT_WARMUP else self.warmup

    def table(self) -> Layout:
        """The layout's table, with the tiers that ``offload`` names."""
        return offloaded(presets.named(self.layout), self.offload)
