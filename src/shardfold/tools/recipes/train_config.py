"""The settings of the language-model recipe: the shape of the model and the run around it.

Imports no torch, so that the command line can print its help and refuse bad values at once. Every setting is written
down here only: its default, its bounds and its help text serve the Python API, config files and the command line alike.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan import presets
from shardfold.plan.checks import parse_bytes
from shardfold.plan.layout import Layout, Tier
from shardfold.plan.offload import offloaded
from shardfold.tools.effects import Effect, idle, without_effect
from shardfold.tools.observe.trackers import tracker_names

Chosen = TypeVar("Chosen", bound="RecipeSettings")

SHAPE = ("d_model", "layers", "heads", "context", "experts", "top_k")


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of a byte-level GPT decoder."""

    d_model: int
    layers: int
    heads: int
    context: int
    vocab: int = 256
    d_ff: int = 0
    """Width of the feed-forward layer; 0 derives 8/3 d_model, rounded up to a multiple of 32 (SwiGLU's convention)."""
    tied: bool = False
    """Whether the head shares the embedding's weight."""
    experts: int = 0
    """Experts of width `d_ff` in each block, in place of one feed-forward layer; 0: none."""
    top_k: int = 2
    """Experts that each token goes through."""
    balance: float = 0.01
    """Factor of the loss that keeps experts in use."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("d_ff", "tied", "experts", "balance") else 1
            if value < least:
                raise ConfigError(f"{field.name} is {value}, but must be at least {least}.")
        if self.d_model % self.heads:
            raise ConfigError(
                f"d_model {self.d_model} does not divide into {self.heads} heads: choose a multiple of {self.heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"d_model {self.d_model} over {self.heads} heads gives {self.head_dim} dims per head, but rotary "
                "positions need an even number: choose other heads."
            )
        if self.experts and self.top_k > self.experts:
            raise ConfigError(f"top_k is {self.top_k}, but there are {self.experts} experts.")
        if self.d_ff == 0:
            object.__setattr__(self, "d_ff", -(-8 * self.d_model // (3 * 32)) * 32)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def num_parameters(self) -> int:
        return self._parameters(max(1, self.experts))

    @property
    def num_read(self) -> int:
        """Parameters that one token goes through: of experts, those of the ``top_k`` that it is sent to."""
        return self._parameters(min(self.top_k, self.experts) or 1)

    def _parameters(self, experts: int) -> int:
        """Of a model that has so many experts in a block, or reads so many."""
        block = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff * experts + 2 * self.d_model
        block += self.experts * self.d_model  # routers
        tables = (1 if self.tied else 2) * self.vocab * self.d_model
        return self.layers * block + tables + self.d_model

    @classmethod
    def named(cls, name: str, **overrides: int) -> GPTConfig:
        """Return the size called `name`, with some of its fields replaced.

        A wider or narrower `d_model` derives `d_ff` anew.
        """
        if name not in SIZES:
            raise ConfigError(f"there is no model size {name!r}.{did_you_mean(name, SIZES)}")
        known = [field.name for field in fields(cls)]
        for key in overrides:
            if key not in known:
                raise ConfigError(f"a model has no setting {key!r}.{did_you_mean(key, known)}")
        settings: dict[str, Any] = {**SIZES[name], **overrides}
        return cls(**settings)


SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 64, "layers": 2, "heads": 2, "context": 64},
    "demo": {"d_model": 128, "layers": 4, "heads": 4, "context": 128},
    "small": {"d_model": 384, "layers": 6, "heads": 6, "context": 512},
    "base": {"d_model": 768, "layers": 12, "heads": 12, "context": 1024},
    "medium": {"d_model": 1024, "layers": 24, "heads": 16, "context": 1024},
    "large": {"d_model": 1536, "layers": 24, "heads": 16, "context": 2048},
    "xl": {"d_model": 2048, "layers": 20, "heads": 16, "context": 2048},
}
"""From 0.1 M parameters (`tiny`) to 1.0 G (`xl`); `demo` is trained in minutes on two CPU cores."""


def samples_or_max(given: Any) -> Any:
    """``max`` is no number of samples: it is kept as 0, which nobody writes.

    Raises:
        ValueError: it is a number below 1.
    """
    if given == "max":
        return 0
    if isinstance(given, (int, str)) and re.fullmatch(r"-\d+|0+", str(given)):
        raise ValueError("should be at least 1, or max: the most that fit, by plan")
    return given


def _known_trackers(given: str | None) -> str | None:
    """
    Raises:
        ConfigError: a name among them is unknown.
    """
    tracker_names(given)
    return given


Trackers = Annotated[str | None, AfterValidator(_known_trackers)]


def flops_or_file(given: str) -> float | Path:
    """What ``--peak-flops`` says, as ``engine.stats(peak_flops=)`` takes it.

    Raises:
        ConfigError: it is neither a number above 0 nor the file of a profile.
    """
    try:
        flops = float(given)
    except ValueError:
        path = Path(given).expanduser()
        if path.is_file():
            return path
        flops = 0.0
    if 0 < flops < inf:
        return flops
    raise ConfigError(
        f"peak_flops is {given!r}, which is neither FLOP/s, a number above 0, nor the file of a profile: write it as "
        "312e12, or let shardfold doctor --measure FILE write one."
    )


class RecipeSettings(BaseModel):
    """Of a recipe; unknown names and wrong values are told in one sentence."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    effects: ClassVar[tuple[Effect, ...]] = ()
    """What settings need that do nothing by themselves."""
    refused: ClassVar[frozenset[str]] = frozenset()
    """Dotted names of settings, or of values of theirs, that the recipe always refuses: no form offers them."""

    def idle(self) -> dict[str, Effect]:
        """Return settings that do nothing under the others, each with the rule that says so."""
        return idle(self, {name: field.default for name, field in type(self).model_fields.items()}, self.effects)

    @model_validator(mode="after")
    def _check_effects(self: Chosen, info: ValidationInfo) -> Chosen:
        inherited = (info.context or {}).get("inherited", ())
        for name, each in self.idle().items():
            if name not in inherited:
                raise ConfigError(without_effect(name, each.why, each.mend))
        return self

    @classmethod
    def load(
        cls: type[Chosen], settings: dict[str, Any], where: str = "the settings", inherited: Collection[str] = ()
    ) -> Chosen:
        """Validate plain values; the first that is wrong raises one sentence that names it and `where` it stands.

        Those that are `inherited` from an earlier run may do nothing in this one.
        """
        for key in settings:
            if key not in cls.model_fields:
                raise ConfigError(f"{where}: there is no setting {key!r}.{did_you_mean(key, cls.model_fields)}")
        try:
            return cls.model_validate(settings, context={"inherited": inherited})
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:  # a check of several settings at once, which wrote the sentence itself
                raise ConfigError(first["msg"].removeprefix("Value error, ")) from None
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "missing":
                option = name.replace("_", "-")
                raise ConfigError(
                    f"{where}: there is no {name}: give --{option}, or {name} = in a config file."
                ) from None
            raise ConfigError(f"{where}: {name} is {first['input']!r}, but {reason(first['msg'])}.") from None


def _gathers(settings: TrainConfig) -> bool:
    cells = presets.named(settings.layout).cells()
    return any(cell.over for state, cell in cells.items() if state in ("params", "held", "master"))


ELASTIC_SUMS = Effect(
    "elastic",
    lambda run: run.table().grads.tier is not Tier.DISK,
    "copies of states do not go with gradients on disk",
    "give --offload optimizer=disk,grads=host",
)
ELASTIC_ADAMW = Effect(
    "elastic", lambda run: run.optimizer == "adamw", "copies are of AdamW's states", "give --optimizer adamw"
)
SPARES = Effect("spares", lambda run: run.elastic, "without it a rank that is killed ends the run", "give --elastic")
SPARES_KNOW = Effect(
    "spares",
    lambda run: run.micro_batch > 0,
    "a rank that joins later cannot ask the others what --micro-batch max came to",
    "give --micro-batch a number",
)
TRAIN_EFFECTS = (
    Effect("exact", lambda run: run.elastic, "it is about ranks that die or come in", "give --elastic"),
    Effect(
        "elastic",
        lambda run: all(size == 1 for size in run.axes().values()),
        "a rank that shares the model with others cannot be gone on without",
        "give each of --tensor, --sequence, --pipeline and --expert 1",
    ),
    ELASTIC_SUMS,
    ELASTIC_ADAMW,
    SPARES,
    SPARES_KNOW,
    Effect(
        "top_k",
        lambda run: bool(run.experts) or run.top_k == GPTConfig.top_k,
        "it says through how many experts tokens go, and there are none",
        "give --experts",
    ),
    Effect("gather", _gathers, "the layout gathers nothing, as each rank has all parameters", "give another --layout"),
    Effect(
        "sequence_parallel",
        lambda run: run.tensor > 1,
        "it divides activations over the ranks of --tensor, of which there is 1 (--sequence cuts sequences over ranks "
        "of their own)",
        "give --tensor 2",
    ),
    Effect(
        "attention",
        lambda run: run.sequence > 1,
        "it says how attention crosses the ranks of --sequence, of which there is 1",
        "give --sequence 2",
    ),
    Effect(
        "order",
        lambda run: run.pipeline > 1,
        "it is an order of stages, of which there is 1",
        "give --pipeline 2",
    ),
    Effect(
        "memory",
        lambda run: not run.micro_batch,
        "it is what --micro-batch max plans for",
        "give --micro-batch max",
    ),
    Effect(
        "matrix_lr",
        lambda run: run.optimizer == "muon",
        "it is a rate of Muon's, and the optimizer is adamw",
        "give --optimizer muon, or --lr in its place",
    ),
    Effect("warmup", lambda run: run.warmup < run.steps, "the run ends before it is over", "warm up for fewer steps"),
    Effect(
        "nonfinite",
        lambda run: not run.precision.startswith("fp16"),
        "under a loss scale, which fp16 has, steps that are not finite are skipped",
        "give another --precision",
    ),
    Effect("sample", lambda run: run.pipeline == 1, "stages of --pipeline generate no text"),
    Effect("temperature", lambda run: run.pipeline == 1, "stages of --pipeline generate no text"),
    Effect(
        "temperature",
        lambda run: run.sample > 0,
        "no text is generated with --sample 0",
        "give --sample another number",
    ),
    Effect(
        "keep",
        lambda run: run.save_every > 0,
        "it says how many checkpoints stay, and none are written",
        "give --save-every",
    ),
)


class TrainConfig(RecipeSettings):
    """A language model of bytes, trained from its beginning on text.

    Everything that decides a run; field descriptions are the command line's help.
    """

    effects: ClassVar[tuple[Effect, ...]] = TRAIN_EFFECTS

    procs: int = Field(2, ge=1, le=4096, description="Processes on this machine; torchrun's own count wins.")
    size: str = Field("demo", description=f"Model size: {', '.join(SIZES)}.")
    d_model: int | None = Field(None, ge=1, le=2**20, description="Width of the model, in place of the size's own.")
    layers: int | None = Field(None, ge=1, le=2**12, description="Number of blocks, in place of the size's own.")
    heads: int | None = Field(None, ge=1, le=2**12, description="Attention heads, in place of the size's own.")
    context: int | None = Field(None, ge=2, le=2**30, description="Bytes of context, in place of the size's own.")
    experts: int | None = Field(
        None, ge=0, le=2**16, description="Experts in each block, in place of one feed-forward layer."
    )
    top_k: int | None = Field(
        None, ge=1, le=2**10, description="Experts that each token goes through: 2, if not given."
    )
    data: Path | None = Field(
        None, description="A file or folder of text; without it, the Python standard library's own sources."
    )
    layout: str = Field("zero3", description=f"How state is split over ranks: {', '.join(presets.NAMES)}.")
    gather: str | None = Field(
        None, description="As what parameters travel, in place of the layout's own, as bf16 or int8x2 (in two hops)."
    )
    reduce: str | None = Field(None, description="As what gradients travel, in place of the layout's own.")
    offload: str | None = Field(
        None,
        description="Slower tier of gradients and optimizer states: host or disk; or a tier of each state, as "
        "params=host,optimizer=disk; with folder=/mnt/a or folder=/mnt/a:/mnt/b where files are.",
    )
    tensor: int = Field(1, ge=1, le=4096, description="Ranks that share each layer: heads, columns and words.")
    sequence_parallel: bool = Field(
        False, description="Between layers that are shared, each of the --tensor ranks has some of the tokens."
    )
    sequence: int = Field(
        1,
        ge=1,
        le=4096,
        description="Processes that cut each sequence among them; they divide the number of processes.",
    )
    attention: Literal["auto", "ulysses", "ring"] = Field(
        "auto", description="How attention crosses them: ulysses (by heads), ring (keys travel), auto."
    )
    expert: int = Field(1, ge=1, le=4096, description="Processes that have other experts; they read other samples too.")
    pipeline: int = Field(1, ge=1, le=4096, description="Stages of layers, each on ranks of its own.")
    order: str = Field(
        "1f1b",
        description="In which order stages run their micro-batches, of which there are --accumulate: gpipe, 1f1b, "
        "interleaved:2, looped-bfs:2.",
    )
    precision: Literal["fp32", "bf16", "fp16", "bf16-pure", "bf16-autocast", "fp16-autocast", "fp8"] = Field(
        "fp32",
        description="Arithmetic of forward and backward: fp32, bf16, fp16 (under a loss scale), bf16-autocast, "
        "fp16-autocast; bf16-pure: all states in bf16 too; fp8: bf16, with products of linear layers in fp8.",
    )
    steps: int = Field(600, ge=1, description="Optimizer steps.")
    micro_batch: Annotated[int, BeforeValidator(samples_or_max)] = Field(
        8, description="Sequences per rank and micro-batch; max: the most that fit, by plan."
    )
    memory: str | None = Field(
        None, description="Memory of each rank that --micro-batch max plans for, as 8GiB; else what there is."
    )
    activations: Literal["keep", "select", "recompute"] = Field(
        "keep", description="What backward needs of blocks: keep, select (products), recompute."
    )
    accumulate: int = Field(1, ge=1, description="Micro-batches per optimizer step.")
    lr: float = Field(4e-3, gt=0, allow_inf_nan=False, description="Peak learning rate.")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw; or muon: for the matrices of blocks, and AdamW for everything else."
    )
    matrix_lr: float = Field(0.02, gt=0, allow_inf_nan=False, description="Peak learning rate of Muon's matrices.")
    warmup: int = Field(50, ge=0, description="Steps over which the learning rate rises; a cosine falls after it.")
    weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False, description="Decoupled weight decay.")
    clip_norm: float = Field(1.0, ge=0, allow_inf_nan=False, description="Largest gradient norm; 0 does not clip.")
    nonfinite: Literal["raise", "warn"] = Field(
        "raise",
        description="Where the loss or a gradient is inf or NaN: raise ends the run before weights are; warn goes on. "
        "A loss scale (fp16) skips such steps.",
    )
    elastic: bool = Field(
        False,
        description="Go on without a rank that is killed, in the processes that are left and from the same step; what "
        "no other rank has another one holds a copy of.",
    )
    spares: int = Field(
        0,
        ge=0,
        description="Processes beside those of --procs that wait, with all imports done, to take the place of ranks "
        "that are killed.",
    )
    exact: bool = Field(
        False,
        description="With --elastic: sums in the order in which ranks began, so that weights are the same to the bit, "
        "whatever ranks die or come in. It takes more bytes on the way.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of parameters, batches and sample.")
    eval_every: int = Field(100, ge=0, description="Steps between held-out evaluations; 0 evaluates at the end only.")
    eval_windows: int = Field(256, ge=1, description="Held-out windows that an evaluation reads.")
    peak_flops: str | None = Field(
        None,
        description="What a device could do, for MFU in metrics.jsonl: FLOP/s, or the file that doctor --measure "
        "wrote; without it, as printed of a GPU that plan knows by name.",
    )
    sample: int = Field(400, ge=0, description="Bytes of text to generate at the end.")
    temperature: float = Field(0.7, ge=0, allow_inf_nan=False, description="Temperature of that text; 0 is greedy.")
    save_every: int = Field(
        0,
        ge=0,
        description="Steps between checkpoints in the run folder; with one at the end or at Ctrl-C. 0: none.",
    )
    keep: int = Field(2, ge=1, description="Checkpoints that stay.")
    track: Trackers = Field(
        None, description="Where figures go besides the run folder: tensorboard, wandb, mlflow, trackio, with commas."
    )
    resume: Path | None = Field(
        None, description="Run folder or checkpoint to go on from; its settings hold where none are given."
    )
    out: Path | None = Field(None, description="Run folder, new or empty; without it, runs/<timestamp>.")

    @field_serializer("micro_batch")
    def _said(self, samples: int) -> int | str:
        return samples or "max"

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.model_shape().heads % self.tensor:
            raise ConfigError(
                f"tensor is {self.tensor}, which does not divide the {self.model_shape().heads} heads: give --tensor a "
                "number that does, or the model other --heads."
            )
        if self.sequence_parallel and self.model_shape().context % (self.sequence * self.tensor):
            raise ConfigError(
                f"sequence_parallel cuts the context of {self.model_shape().context} bytes into {self.tensor} parts"
                f"{f', each of {self.sequence} once more' if self.sequence > 1 else ''}, which do not come out even: "
                "give another --context."
            )
        if self.expert > 1 and (not self.model_shape().experts or self.model_shape().experts % self.expert):
            raise ConfigError(
                f"expert is {self.expert}, which does not divide the model's {self.model_shape().experts} experts: "
                f"give --experts a multiple of {self.expert}, or leave --expert out."
            )
        if not self.micro_batch and self.experts:
            raise ConfigError(
                "--micro-batch max plans memory, but which experts tokens go to is known in a run only: give a number."
            )
        if self.memory is not None and parse_bytes(self.memory) is None:
            raise ConfigError(f"memory is {self.memory!r}, which is not a number of bytes: write it as 8GiB or 8GB.")
        if self.peak_flops is not None:
            flops_or_file(self.peak_flops)
        self._check_stages()
        self.table()
        return self

    def _check_stages(self) -> None:
        if self.pipeline > 1:
            from shardfold.parallel.pipeline.stage_order import (
                choose_order,  # imports torch, which other commands do without
            )

            choose_order(self.order, "--order")
        for name, given in (("sequence", self.sequence > 1), ("sequence-parallel", self.sequence_parallel)):
            if self.pipeline > 1 and given:
                raise ConfigError(f"stages do not cut sequences: leave --{name} out, or --pipeline.")

    def check_start(self) -> None:
        """What can be known before a process is started.

        Raises:
            ConfigError: there is nothing at a path.
        """
        if self.data is not None and not self.data.expanduser().exists():
            raise ConfigError(f"there is no file or folder {str(self.data)!r}: give --data the path of some text.")

    def model_shape(self) -> GPTConfig:
        """Return the shape that `size` and its overrides name."""
        overrides = {name: getattr(self, name) for name in SHAPE}
        return GPTConfig.named(self.size, **{name: value for name, value in overrides.items() if value is not None})

    def table(self) -> Layout:
        """Return the layout's table, with the wires that are named and the tiers that `offload` names."""
        wires = {"gather": self.gather, "reduce": self.reduce}
        table = presets.named(self.layout).replace(**{purpose: name for purpose, name in wires.items() if name})
        return offloaded(table, self.offload)

    def axes(self) -> dict[str, int]:
        """Return how many processes there are on each axis but those of data."""
        return {
            "pipeline": self.pipeline,
            "expert": self.expert,
            "sequence": self.sequence,
            "tensor": self.tensor,
        }

    def warmup_steps(self) -> int:
        """Return `warmup`, or a tenth of a run that is too short for the default."""
        return self.warmup if self.warmup < self.steps else self.steps // 10


def reason(message: str) -> str:
    """Turn pydantic's `Input should be x` into the end of a sentence."""
    return (
        message.removeprefix("Value error, ")
        .replace("Input should be", "should be", 1)
        .partition(", unable to parse")[0]
        .rstrip(".")
    )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        detail = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the config file {str(path)!r} cannot be read: {detail}.") from None
    try:
        settings = json.loads(text) if path.suffix == ".json" else parse_toml(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"the config file {str(path)!r} is not valid {kind}: {error}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"the config file {str(path)!r} should hold names and values, not {settings!r}.")
    settings.pop("derived", None)  # what a run's config.json says that it came to
    return settings


def parse_toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]

    return tomllib.loads(text)


def resumed_settings(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that `path` belongs to, a run folder or a checkpoint in one, under those given.

    Raises:
        ConfigError: there is nothing at `path`, or a setting that has to stay is given otherwise.
    """
    for folder in (path, *path.parents[:2]):
        if (folder / "config.json").is_file():
            first = read_settings(folder / "config.json")
            break
    else:
        if not path.exists():
            raise ConfigError(f"there is no run folder or checkpoint {str(path)!r} to resume from.")
        if not {"size", *SHAPE} & given.keys():
            raise ConfigError(
                f"{str(path)!r} has no config.json beside it, as a checkpoint that was copied out of its run: give "
                "--size, and what else its run was started with, or --resume the run's folder."
            )
        return dict(given)
    started = {name: value for name, value in first.items() if name not in ("resume", "out")}
    settings = {**started, **given}
    if "size" in given:  # the widths in a run's config.json are those of its size
        settings = {name: value for name, value in settings.items() if name not in SHAPE or name in given}
    before = TrainConfig.load(started, where=str(folder / "config.json"), inherited=started.keys())
    now = TrainConfig.load(settings, where="the command line", inherited=started.keys() - given.keys())
    settings = {name: value for name, value in settings.items() if name not in now.idle()}
    fixed = {"seed": (before.seed, now.seed)}
    fixed |= {name: (getattr(before.model_shape(), name), getattr(now.model_shape(), name)) for name in SHAPE}
    for name, (was, wanted) in fixed.items():
        if was != wanted:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"the run in {str(folder)!r} has {option} {was}, so it cannot go on with {wanted}: leave out {option}"
                f"{' and --size' if 'size' in given and name in SHAPE else ''}, or begin a new run without --resume."
            )
    return settings
