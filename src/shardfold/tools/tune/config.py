"""The settings of the tuning recipes: model, data, adapter, base, text, and the run around them.

Imports no torch, so that the command line can print its help and refuse bad values at once. Every setting is written
down here only, or in :class:`~shardfold.tools.recipes.train_config.TrainConfig` where both have it: its default, its
bounds and its help text serve the Python API, config files and the command line alike.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, field_serializer, model_validator

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan import presets
from shardfold.plan.checks import parse_bytes
from shardfold.plan.layout import Layout
from shardfold.plan.offload import offloaded
from shardfold.tools.effects import Effect
from shardfold.tools.named_optimizers import check_optimizer
from shardfold.tools.recipes.train_config import (
    ELASTIC_ADAMW,
    ELASTIC_SUMS,
    SPARES,
    SPARES_KNOW,
    RecipeSettings,
    Trackers,
    TrainConfig,
    read_settings,
)

__all__ = [
    "Adapter",
    "Base",
    "DPOConfig",
    "DistillConfig",
    "GRPOConfig",
    "KTOConfig",
    "Kind",
    "ORPOConfig",
    "PPOConfig",
    "PTConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTConfig",
    "Source",
    "Text",
    "TuneConfig",
    "config_class",
    "from_options",
    "option_fields",
    "recipe_names",
    "register",
    "resumed_settings",
]

Kind = Literal["text", "chat", "pair", "label", "prompt"]
"""What a row of data becomes."""

Chosen = TypeVar("Chosen", bound="TuneConfig")

VARIANTS = ("lora", "rslora", "dora", "pissa", "olora", "loftq")
ADAPTERS = ("lora", "prefix", "freeze", "expand")


def _as_in_train(name: str, **changes: Any) -> Any:
    """The field of that name as ``shardfold train`` has it, with another default or help text."""
    field = copy.copy(TrainConfig.model_fields[name])
    for key, value in changes.items():
        setattr(field, key, value)
    return field


class Source(RecipeSettings):
    """A file, or a folder of files, with rows."""

    path: Path = Field(description="A file or folder: jsonl, json, parquet, csv, plain text, or datasets on disk.")
    format: str | None = Field(
        None, description="The format of its rows, where their fields do not tell: messages, sharegpt, alpaca, ..."
    )
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="How often its rows come, of an epoch of all sources."
    )
    columns: dict[str, str] | None = Field(
        None, description="The file's name of a column, by the name that the format knows."
    )


class Adapter(RecipeSettings):
    """What is trained instead of all parameters; lora and prefix are peft's."""

    effects: ClassVar[tuple[Effect, ...]] = (
        *(
            Effect(name, lambda given: given.kind == "lora", "it is a setting of LoRA", "give --lora 16")
            for name in ("rank", "alpha", "dropout", "targets", "variant", "lr_ratio", "modules")
        ),
        *(
            Effect(name, lambda given: given.kind == "prefix", "it is of a prefix", "give --pre-seq-len 16")
            for name in ("pre_seq_len", "prefix_projection")
        ),
        Effect("layers", lambda given: given.kind in ("freeze", "expand"), "it counts layers of --freeze and --expand"),
    )

    kind: Literal["lora", "prefix", "freeze", "expand"] = Field(
        "lora",
        description="lora; prefix (P-tuning v2); freeze: all but the last layers; expand: new blocks between the old "
        "ones, which stay (LLaMA Pro).",
    )
    rank: int = Field(16, ge=1, le=2**16, description="Rank of LoRA's two matrices.")
    alpha: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Scale of LoRA, over the rank; twice the rank, if not given."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in front of LoRA's matrices.")
    targets: str = Field(
        "all-linear",
        description="Layers with LoRA: all-linear (all but the head), or names with commas: q_proj,v_proj.",
    )
    variant: Literal["lora", "rslora", "dora", "pissa", "olora", "loftq"] = Field(
        "lora", description="lora, rslora, dora, pissa, olora or loftq, as peft has them."
    )
    lr_ratio: float | None = Field(
        None, ge=1, allow_inf_nan=False, description="LoRA+: how many times --lr is the rate of LoRA's second matrices."
    )
    modules: str = Field("", description="Names of modules that are trained whole beside LoRA: embed_tokens,lm_head.")
    pre_seq_len: int = Field(16, ge=1, le=2**16, description="Virtual tokens of a prefix.")
    prefix_projection: bool = Field(False, description="The prefix comes out of an MLP.")
    layers: int = Field(2, ge=1, le=2**12, description="Layers that freeze leaves trained, or blocks that expand adds.")


def _number(given: Any) -> Any:
    """Of an option, which is text."""
    return int(given) if isinstance(given, str) and given.isdecimal() else given


class Base(RecipeSettings):
    """As what frozen parameters rest."""

    bits: Annotated[Literal[2, 4, 8] | None, BeforeValidator(_number)] = Field(
        None, description="Bits in which frozen parameters rest: 8, 4 or 2."
    )
    format: str | None = Field(
        None, description="Their format, as nf4/64+double; without it what is usual for that many bits."
    )

    @property
    def resting(self) -> str | None:
        """The format at rest; None: as the layout says."""
        usual = {8: "int8/64", 4: "nf4/64", 2: "int2/32", None: None}
        return self.format or usual[self.bits]


class Text(RecipeSettings):
    """How rows become tokens."""

    length: int = Field(1024, ge=2, le=2**30, description="Tokens of a sequence, at most; what is longer is cut.")
    pack: bool = Field(False, description="Several samples share a sequence; none sees another, and no loss changes.")
    template: str = Field("model", description="The chat template: model (the tokenizer's own), a file, or a name.")
    train_on: Literal["assistant", "last", "completion", "all"] = Field(
        "assistant",
        description="Tokens that are trained: assistant (all its turns), last (its last turn), completion, all.",
    )
    noise: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="NEFTune: noise on the embeddings while training, as 5."
    )
    rope: dict[str, Any] | None = Field(
        None, description="Other rotary positions, for longer texts: yarn:4, linear:2, dynamic:4."
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        rope = given.get("rope") if isinstance(given, dict) else None
        if isinstance(rope, str):
            kind, _, factor = rope.partition(":")
            if not re.fullmatch(r"\d+(\.\d+)?", factor):
                raise ConfigError(f"rope is {rope!r}, but should be a type and a factor, as yarn:4.")
            given = {**given, "rope": {"type": kind, "factor": float(factor)}}
        return given

    @model_validator(mode="after")
    def _check_rope(self) -> Text:
        if self.rope is not None and not {"type", "factor"} <= self.rope.keys():
            raise ConfigError('rope needs a type and a factor, as { type = "yarn", factor = 4 } or yarn:4.')
        return self


def _sources(given: Any) -> Any:
    """One path, a path with its format, or a list of these."""
    if given is None:
        return ()
    if isinstance(given, str | Path | Mapping | Source):
        given = [given]
    made: list[Any] = []
    for each in given:
        if isinstance(each, str | Path):
            made += [
                Source.model_validate({"path": Path(part)})
                for part in (each.split(",") if isinstance(each, str) else [each])
            ]
        else:
            made.append(Source.load(dict(each), where="data") if isinstance(each, Mapping) else each)
    return tuple(made)


SECTIONS: dict[str, type[RecipeSettings]] = {"adapter": Adapter, "base": Base, "text": Text}
"""Of a config file; their fields are options of the command by their own names."""

STEPS_OR_EPOCHS = "steps says how many there are"

TUNE_EFFECTS = (
    Effect("epochs", lambda run: run.steps is None, STEPS_OR_EPOCHS, "leave --steps out"),
    Effect(
        "memory", lambda run: not run.micro_batch, "it is what --micro-batch max plans for", "give --micro-batch max"
    ),
    Effect(
        "sequence_parallel",
        lambda run: run.tensor > 1,
        "it divides activations over the ranks of --tensor, of which there is 1",
        "give --tensor 2",
    ),
    Effect(
        "attention",
        lambda run: run.sequence > 1,
        "it says how attention crosses the ranks of --sequence, of which there is 1",
        "give --sequence 2",
    ),
    Effect("order", lambda run: run.pipeline > 1, "it is an order of stages, of which there is 1", "give --pipeline 2"),
    *(
        Effect(name, lambda run: run.optimizer.startswith("galore"), "it is of GaLore", "give --optimizer galore")
        for name in ("galore_rank", "galore_every", "galore_scale")
    ),
    Effect("eval_every", lambda run: bool(run.eval_data), "there is nothing to evaluate on", "give --eval-data"),
    Effect(
        "keep",
        lambda run: run.save_every > 0,
        "it says how many checkpoints stay, and none are written",
        "give --save-every",
    ),
)


ELASTIC_EFFECTS = (
    Effect(
        "elastic",
        lambda run: all(size == 1 for size in run.axes().values()),
        "a rank that shares the model with others cannot be gone on without",
        "give each of --tensor, --sequence and --pipeline 1",
    ),
    ELASTIC_SUMS,
    ELASTIC_ADAMW,
    Effect("elastic", lambda run: not run.text.noise, "noise is drawn by rank", "leave --noise out"),
    SPARES,
    SPARES_KNOW,
)


class TuneConfig(RecipeSettings):
    """What all recipes have. Field descriptions are the command line's help."""

    effects: ClassVar[tuple[Effect, ...]] = TUNE_EFFECTS
    recipe: ClassVar[str] = ""
    kind: ClassVar[Kind] = "chat"
    task: ClassVar[Literal["lm", "score"]] = "lm"
    """What the model ends in: logits over tokens, or one number."""

    model: Path = Field(
        description="A folder of transformers, a run, or an adapter of peft, which is merged as it is read."
    )
    data: Annotated[tuple[Source, ...], BeforeValidator(_sources)] = Field(
        min_length=1, description="Files or folders of rows, with commas between them."
    )
    eval_data: Annotated[tuple[Source, ...], BeforeValidator(_sources)] = Field(
        (), description="The same, of rows that are evaluated and not trained."
    )
    procs: int = _as_in_train("procs", default=1)
    adapter: Adapter | None = Field(None, description="What is trained; without it, all parameters.")
    base: Base = Field(Base.model_validate({}), description="As what frozen parameters rest.")
    text: Text = Field(Text.model_validate({}), description="How rows become tokens.")
    layout: str = _as_in_train("layout")
    gather: str | None = _as_in_train("gather")
    reduce: str | None = _as_in_train("reduce")
    offload: str | None = _as_in_train("offload")
    tensor: int = _as_in_train("tensor")
    sequence_parallel: bool = _as_in_train("sequence_parallel")
    sequence: int = _as_in_train("sequence")
    attention: Literal["auto", "ulysses", "ring"] = _as_in_train("attention")
    pipeline: int = _as_in_train("pipeline")
    order: str = _as_in_train("order")
    precision: Literal["fp32", "bf16", "fp16", "bf16-pure", "bf16-autocast", "fp16-autocast", "fp8"] = _as_in_train(
        "precision"
    )
    epochs: float = Field(1.0, gt=0, le=1e6, description="How often each row comes.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps, in place of --epochs.")
    micro_batch: int = _as_in_train(
        "micro_batch",
        default=4,
        description="Samples (with --pack: sequences) per rank and micro-batch; max: the most that fit, by plan.",
    )
    memory: str | None = _as_in_train("memory")
    activations: Literal["keep", "select", "recompute"] = _as_in_train("activations")
    accumulate: int = _as_in_train("accumulate")
    lr: float = _as_in_train("lr", default=2e-5)
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="How the learning rate goes on behind --warmup: cosine or linear to 0, or constant."
    )
    optimizer: Annotated[str, AfterValidator(check_optimizer)] = Field(
        "adamw",
        description="adamw, adamw8bit, adafactor, lion, muon (of the matrices of blocks), galore (moments of a low "
        "rank, of the same matrices) or galore8bit.",
    )
    galore_rank: int = Field(16, ge=1, le=2**16, description="Rank of what GaLore projects gradients to.")
    galore_every: int = Field(200, ge=1, le=2**30, description="Steps from one projector of GaLore to the next.")
    galore_scale: float = Field(
        0.25, gt=0, allow_inf_nan=False, description="GaLore's matrices have --lr times this as their rate."
    )
    warmup: int = _as_in_train("warmup", default=0, description="Steps over which the learning rate rises.")
    weight_decay: float = _as_in_train("weight_decay", default=0.0)
    clip_norm: float = _as_in_train("clip_norm")
    nonfinite: Literal["raise", "warn"] = _as_in_train("nonfinite")
    seed: int = _as_in_train("seed", description="Seed of adapters, the order of rows and noise.")
    eval_every: int = _as_in_train("eval_every", default=0)
    save_every: int = _as_in_train("save_every")
    keep: int = _as_in_train("keep")
    track: Trackers = _as_in_train("track")
    resume: Path | None = _as_in_train("resume")
    cache: Path | None = Field(
        None, description="Folder for what is prepared once, as rows as tokens; without it ~/.cache/shardfold."
    )
    out: Path | None = _as_in_train("out")

    @classmethod
    def load(
        cls: type[Chosen], settings: dict[str, Any], where: str = "the settings", inherited: Collection[str] = ()
    ) -> Chosen:
        """Validate plain values, those of sections too; the first that is wrong raises one sentence."""
        settings = dict(settings)
        settings.pop("recipe", None)
        for name, section in SECTIONS.items():
            if isinstance(given := settings.get(name), Mapping):
                settings[name] = section.load(dict(given), where=f"{where}, [{name}]")
        return super().load(settings, where, inherited)

    @classmethod
    def checked(cls, settings: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the settings of a file, which may lack some, as they are.

        Raises:
            ConfigError: one is unknown.
        """
        for section, names in (
            (None, cls.model_fields),
            *((name, kind.model_fields) for name, kind in SECTIONS.items()),
        ):
            for key in settings if section is None else settings.get(section) or ():
                if key not in names:
                    place = where if section is None else f"{where}, [{section}]"
                    raise ConfigError(f"{place}: there is no setting {key!r}.{did_you_mean(key, names)}")
        return settings

    @field_serializer("micro_batch")
    def _said(self, samples: int) -> int | str:
        return samples or "max"

    @model_validator(mode="after")
    def _check(self) -> TuneConfig:
        if self.memory is not None and parse_bytes(self.memory) is None:
            raise ConfigError(f"memory is {self.memory!r}, which is not a number of bytes: write it as 8GiB or 8GB.")
        if self.base.resting is not None and (self.adapter is None or self.adapter.kind in ("freeze", "expand")):
            raise ConfigError("what rests in few bits is not trained: give --lora or --pre-seq-len beside --bits.")
        if self.adapter is not None and self.adapter.kind == "prefix" and (self.sequence > 1 or self.tensor > 1):
            raise ConfigError(
                "a prefix is keys and values that each rank has for all tokens and heads: leave --sequence and "
                "--tensor out, or give --lora."
            )
        self._check_stages()
        if self.optimizer.startswith("galore") and self.adapter is not None and self.adapter.kind in ("lora", "prefix"):
            raise ConfigError(
                "GaLore keeps moments of a low rank of whole matrices, and an adapter's matrices are of a low rank "
                "already: leave --lora and --pre-seq-len out, or give --optimizer adamw."
            )
        if self.text.pack and self.adapter is not None and self.adapter.kind == "prefix":
            raise ConfigError("samples that share a sequence would share one prefix: leave --pack out.")
        self.table()
        return self

    def _check_stages(self) -> None:
        if self.pipeline == 1:
            return
        from shardfold.parallel.pipeline.stage_order import choose_order  # imports torch

        choose_order(self.order, "--order")
        if not self.micro_batch:
            raise ConfigError("--micro-batch max plans models without stages: give a number, or leave --pipeline out.")
        for name, given in (("sequence", self.sequence > 1), ("sequence-parallel", self.sequence_parallel)):
            if given:
                raise ConfigError(f"stages do not cut sequences: leave --{name} out, or --pipeline.")
        if self.adapter is not None and self.adapter.kind == "prefix":
            raise ConfigError("a prefix is a cache of keys and values, which stages do not have: give --lora.")

    def table(self) -> Layout:
        """Return the layout's table, with the wires that are named and the tiers that `offload` names."""
        wires = {"gather": self.gather, "reduce": self.reduce}
        table = presets.named(self.layout).replace(**{purpose: name for purpose, name in wires.items() if name})
        if self.base.resting is not None:
            table = table.replace(base=self.base.resting)
        return offloaded(table, self.offload)

    def axes(self) -> dict[str, int]:
        """Return how many processes there are on each axis but those of data."""
        return {"pipeline": self.pipeline, "sequence": self.sequence, "tensor": self.tensor}

    @property
    def is_elastic(self) -> bool:
        """Whether ranks go on without one that is killed; recipes that cannot have no such setting."""
        return bool(getattr(self, "elastic", False))

    def cache_folder(self) -> Path:
        """Return the folder of what is prepared once."""
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return self.cache.expanduser() if self.cache is not None else usual / "shardfold"

    def plain(self, *, given: bool = False) -> dict[str, Any]:
        """Return the settings as a config file has them: all, or those that were given."""
        return {"recipe": self.recipe, **self.model_dump(mode="json", exclude_none=True, exclude_unset=given)}


class PTConfig(TuneConfig):
    """Goes on with pre-training: every token of every text is a target."""

    recipe: ClassVar[str] = "pt"
    kind: ClassVar[Kind] = "text"
    effects: ClassVar[tuple[Effect, ...]] = (*TUNE_EFFECTS, *ELASTIC_EFFECTS)

    elastic: bool = _as_in_train("elastic")
    spares: int = _as_in_train("spares")


class SFTConfig(TuneConfig):
    """Supervised fine-tuning: the tokens of answers are targets."""

    recipe: ClassVar[str] = "sft"
    effects: ClassVar[tuple[Effect, ...]] = (*TUNE_EFFECTS, *ELASTIC_EFFECTS)

    elastic: bool = _as_in_train("elastic")
    spares: int = _as_in_train("spares")


class RewardConfig(TuneConfig):
    """A reward model (Bradley and Terry 1952; arXiv 2203.02155): one number for an answer, larger for the better."""

    recipe: ClassVar[str] = "reward"
    kind: ClassVar[Kind] = "pair"
    task: ClassVar[Literal["lm", "score"]] = "score"
    center: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Factor of what keeps the rewards of a pair around 0, as 0.01."
    )


class DPOConfig(TuneConfig):
    """Direct preference optimization (arXiv 2305.18290)."""

    recipe: ClassVar[str] = "dpo"
    kind: ClassVar[Kind] = "pair"
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="How closely the reference is kept to.")
    loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        "sigmoid", description="sigmoid; hinge (SLiC, arXiv 2305.10425); ipo (arXiv 2310.12036)."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that are the wrong way round (conservative DPO)."
    )

    effects: ClassVar[tuple[Effect, ...]] = (
        *TUNE_EFFECTS,
        Effect(
            "label_smoothing", lambda run: run.loss == "sigmoid", "it is of the sigmoid loss", "give --loss sigmoid"
        ),
    )


class ORPOConfig(TuneConfig):
    """Odds-ratio preference optimization (arXiv 2403.07691): no reference."""

    recipe: ClassVar[str] = "orpo"
    kind: ClassVar[Kind] = "pair"
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="Factor of the odds ratio, lambda in the paper.")


class KTOConfig(TuneConfig):
    """Kahneman-Tversky optimization (arXiv 2402.01306): answers that are good or bad, no pairs."""

    recipe: ClassVar[str] = "kto"
    kind: ClassVar[Kind] = "label"
    beta: float = Field(0.1, gt=0, allow_inf_nan=False, description="How closely the reference is kept to.")
    desirable: float = Field(1.0, gt=0, allow_inf_nan=False, description="Weight of good answers.")
    undesirable: float = Field(1.0, gt=0, allow_inf_nan=False, description="Weight of bad answers.")


class DistillConfig(TuneConfig):
    """Distillation: the distribution of a teacher is what each trained token learns."""

    recipe: ClassVar[str] = "distill"
    teacher: Path = Field(description="The teacher, with the same tokenizer: as --model.")
    divergence: Literal["forward", "reverse"] = Field(
        "forward", description="forward: KL of the student from the teacher; reverse: of the teacher from the student."
    )
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="Both distributions are softened by it.")
    mix: float = Field(0.0, ge=0, le=1, description="Share of the usual loss in the whole.")


class RolloutConfig(TuneConfig):
    """What recipes have that learn from answers of their own, which rewards rate."""

    kind: ClassVar[Kind] = "prompt"
    effects: ClassVar[tuple[Effect, ...]] = (
        *TUNE_EFFECTS,
        Effect("reference", lambda run: run.beta > 0, "nothing is kept to a reference", "give --beta 0.04"),
    )
    refused: ClassVar[frozenset[str]] = frozenset(
        {"sequence", "attention", "pipeline", "order"}
        | {"adapter.kind=prefix", "adapter.pre_seq_len", "adapter.prefix_projection"}
    )

    reward: str = Field(
        description="What rates an answer, added up: contains, ends, gsm8k, or rewards.py:name, a function in a file "
        "of yours, which is run; with commas between them."
    )
    max_tokens: int = Field(64, ge=1, le=2**20, description="Tokens of an answer, at most.")
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False, description="At which answers are drawn.")
    top_p: float = Field(1.0, gt=0, le=1, description="Of the likeliest tokens, those that sum to it are drawn from.")
    top_k: int = Field(0, ge=0, description="The likeliest so many tokens are drawn from; 0: all.")
    pages: int | None = Field(
        None,
        ge=1,
        description="Pages of 16 tokens for keys and values while answers are drawn; as many as they fill, "
        "if not given.",
    )
    beta: float = Field(0.0, ge=0, allow_inf_nan=False, description="How closely the reference is kept to.")
    reference: Literal["adapter", "copy"] = Field(
        "adapter", description="What is kept to: adapter, the model without its adapter; copy, a second, frozen model."
    )
    updates: int = Field(1, ge=1, le=2**10, description="Optimizer steps on the same answers.")
    epsilon: float = Field(0.2, gt=0, allow_inf_nan=False, description="Ratios are clipped to 1 -+ epsilon.")

    @model_validator(mode="after")
    def _check_rollouts(self) -> RolloutConfig:
        if self.sequence > 1:
            raise ConfigError("answers are not drawn along an axis of sequence: leave --sequence out.")
        if self.pipeline > 1:
            raise ConfigError(
                "answers are not drawn through stages, which keep no keys and values: leave --pipeline out."
            )
        if self.adapter is not None and self.adapter.kind == "prefix":
            raise ConfigError("answers are not drawn with a prefix: give --lora, or leave --pre-seq-len out.")
        if self.beta and self.reference == "adapter" and (self.adapter is None or self.adapter.kind != "lora"):
            raise ConfigError(
                "the reference is the model without its adapter, and there is none: give --lora 16, --reference copy "
                "for a second, frozen model, or --beta 0."
            )
        return self


class GRPOConfig(RolloutConfig):
    """Group relative policy optimization (arXiv 2402.03300): answers to one prompt are compared with each other."""

    recipe: ClassVar[str] = "grpo"
    n: int = Field(8, ge=2, le=2**12, description="Answers to each prompt; --micro-batch counts prompts.")
    epsilon_high: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Upper bound of ratios, 1 + this; without it as --epsilon."
    )
    scale: Literal["group", "batch", "none"] = Field(
        "group", description="Advantages are divided by the deviation of rewards in their group, in all, or not."
    )
    loss: Literal["dapo", "grpo", "dr_grpo"] = Field(
        "dapo",
        description="Mean over: dapo, all tokens (arXiv 2503.14476); grpo, the tokens of an answer, then answers; "
        "dr_grpo, --max-tokens of each answer (arXiv 2503.20783).",
    )


class PPOConfig(RolloutConfig):
    """Proximal policy optimization (arXiv 1707.06347): a second model tells what an answer is going to be worth."""

    recipe: ClassVar[str] = "ppo"
    n: int = Field(1, ge=1, le=2**12, description="Answers to each prompt; --micro-batch counts prompts.")
    beta: float = Field(
        0.05,
        ge=0,
        allow_inf_nan=False,
        description="By how much of the divergence from the reference rewards are less.",
    )
    updates: int = Field(4, ge=1, le=2**10, description="Optimizer steps on the same answers.")
    gamma: float = Field(1.0, gt=0, le=1, description="By what a reward counts less a token earlier.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE: 0 trusts the value model, 1 the rewards.")
    value: Path | None = Field(
        None, description="What the value model begins with, as a reward model; without it, --model."
    )
    value_lr: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="The value model's learning rate, if not --lr."
    )
    value_clip: float = Field(
        0.2, gt=0, allow_inf_nan=False, description="How far the value of a token moves on the same answers."
    )


_RECIPES: dict[str, type[TuneConfig]] = {}


def register(settings: type[TuneConfig]) -> type[TuneConfig]:
    """Make a recipe known to the command by the settings that it has; decorates the class."""
    _RECIPES[settings.recipe] = settings
    return settings


for _each in (
    PTConfig,
    SFTConfig,
    RewardConfig,
    DPOConfig,
    ORPOConfig,
    KTOConfig,
    DistillConfig,
    GRPOConfig,
    PPOConfig,
):
    register(_each)


def recipe_names() -> list[str]:
    return list(_RECIPES)


def config_class(recipe: str) -> type[TuneConfig]:
    """Return the settings of a recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    if recipe not in _RECIPES:
        raise ConfigError(f"there is no recipe {recipe!r}.{did_you_mean(recipe, _RECIPES)}")
    return _RECIPES[recipe]


def resumed_settings(settings: type[TuneConfig], path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that `path` belongs to, a run folder or a checkpoint in one, under those given.

    Raises:
        ConfigError: there is no such run, it is of another recipe, or a setting that has to stay is given otherwise.
    """
    for folder in (path, *path.parents[:2]):
        if (folder / "config.json").is_file():
            first = read_settings(folder / "config.json")
            break
    else:
        raise ConfigError(f"there is no run folder or checkpoint {str(path)!r} to resume from.")
    if (named := first.pop("recipe", None)) is None:
        raise ConfigError(
            f"{str(folder)!r} is no run of shardfold tune, or one that ended before its first step: begin a new run "
            "without --resume."
        )
    if named != settings.recipe:
        raise ConfigError(f"{str(folder)!r} is a run of {named}, so it cannot go on as {settings.recipe}.")
    started = {name: value for name, value in first.items() if name not in ("resume", "out", "procs")}
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if name in given:
            started.pop(other, None)  # one takes the place of the other
    before, now = settings.load(started, inherited=started.keys()), settings.load({**started, **given})
    for name in ("seed", "adapter", "base"):
        if getattr(before, name) != getattr(now, name):
            raise ConfigError(
                f"the run in {str(folder)!r} has another {name}, so it cannot go on with this one: leave its options "
                "out, or begin a new run without --resume."
            )
    if before.model.resolve() != now.model.resolve():
        raise ConfigError(
            f"the run in {str(folder)!r} began with the model {str(before.model)!r}: leave --model out, or begin a new "
            "run without --resume."
        )
    return {**started, **given}


SHORT = {
    "lora": ("adapter", "rank", "Trains LoRA matrices of this rank, the rest stays."),
    "pre_seq_len": ("adapter", "pre_seq_len", "Trains a prefix of so many virtual tokens (P-tuning v2)."),
    "freeze": ("adapter", "layers", "Trains this many last layers only."),
    "expand": ("adapter", "layers", "Adds this many blocks, which are trained (LLaMA Pro)."),
}
"""Options that choose an adapter: of which section and field, and their help."""

KINDS = {"lora": "lora", "pre_seq_len": "prefix", "freeze": "freeze", "expand": "expand"}
OTHER_NAMES = {("adapter", "modules"): "whole", ("base", "format"): "base_format"}
HIDDEN = {("adapter", name) for name in ("kind", "rank", "pre_seq_len", "layers")}


def option_fields(settings: type[TuneConfig]) -> dict[str, tuple[tuple[str, str] | None, Any]]:
    """Return the options of a recipe by name: of which section and field (None: the recipe's own), and the field."""
    found: dict[str, tuple[tuple[str, str] | None, Any]] = {}
    for name, field in settings.model_fields.items():
        if name not in SECTIONS:
            found[name] = (None, field)
            continue
        if name == "adapter":
            for short, (section, inner, text) in SHORT.items():
                field = copy.copy(Adapter.model_fields[inner])
                field.default, field.description = None, text
                found[short] = ((section, inner), field)
        for inner, each in SECTIONS[name].model_fields.items():
            if (name, inner) not in HIDDEN:
                found[OTHER_NAMES.get((name, inner), inner)] = ((name, inner), each)
    return found


def from_options(settings: type[TuneConfig], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the command, by field name, as a config file would have them.

    Raises:
        ConfigError: two of them choose an adapter.
    """
    fields, made = option_fields(settings), dict[str, Any]()
    chosen = [name for name in KINDS if options.get(name) is not None]
    if len(chosen) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in chosen[:2])
        raise ConfigError(f"{first} and {second} choose different adapters: leave one of them out.")
    for name, value in options.items():
        place, _ = fields[name]
        if place is None:
            made[name] = value
        else:
            made.setdefault(place[0], {})[place[1]] = value
    if chosen:
        made["adapter"]["kind"] = KINDS[chosen[0]]
    return made
