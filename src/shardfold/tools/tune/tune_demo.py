"""A small model tuned by one recipe after the other: `shardfold tune demo`, `make tune`.

    pt      stories: what words follow which
    sft     requests with stories: how to answer
    reward  pairs of stories: which of two is better, as a model of its own
    dpo     the same pairs: to write the better one
    grpo    a reward for stories that have the word that was asked for, and end
    ppo     the same reward, with a second model that tells what a story is going to be worth

Everything is made here: text from templates, a tokenizer of it, a LLaMA with random values. Each stage is a run in a
folder of its own, as its command would have made it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.readable import format_duration
from shardfold.tools.observe.run_page import PAGE
from shardfold.tools.tune._demo_base import held_out, make_base, make_text
from shardfold.tools.tune._demo_page import demo_page
from shardfold.tools.tune._demo_text import THINGS, is_happy
from shardfold.tools.tune.config import config_class
from shardfold.tools.tune.demo_config import DemoConfig
from shardfold.tools.tune.eval_config import EvalConfig

__all__ = ["STAGES", "DemoStage", "prepare", "run_demo"]

FACTS, LOG, MADE = "demo.json", "log.txt", "made.json"
SHOWN = 4  # requests on the page
DRAWN = 4  # answers to each held-out request
LEAST_STEPS = 2


@dataclass(frozen=True)
class DemoStage:
    """One recipe of the demo.

    Attributes:
        recipe: its name, and that of its folder.
        model: the folder that it begins with.
        data: name of its rows.
        title, what: for the page.
        settings: of the recipe.
        generates: whether its model writes stories.
    """

    recipe: str
    model: str
    data: str
    title: str
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    generates: bool = True


STAGES = (
    DemoStage(
        "pt",
        "base",
        "texts",
        "pt: pre-training",
        "From random values, on stories. The model learns words, sentences and how stories go; of requests it knows "
        "nothing.",
        {"steps": 120, "lr": 3e-3, "warmup": 12, "micro_batch": 16},
    ),
    DemoStage(
        "sft",
        "pt",
        "chats",
        "sft: supervised fine-tuning",
        "On requests with stories; only the stories' tokens are trained. The rows are careless: of four ways to ask, "
        "one gets the thing that it asks for, the others get any. So the model learns to answer and to end, and to "
        "obey only where the rows do.",
        {"steps": 120, "lr": 2e-3, "warmup": 6, "micro_batch": 16},
    ),
    DemoStage(
        "reward",
        "sft",
        "pairs",
        "reward: a reward model",
        "On pairs of stories that are alike but for the ending: the happy one is the better one. It gives one number "
        "for an answer.",
        {"steps": 40, "lr": 3e-4, "warmup": 4, "micro_batch": 8},
        generates=False,
    ),
    DemoStage(
        "dpo",
        "sft",
        "pairs",
        "dpo: direct preference optimization",
        "On the same pairs, without a reward model: happy endings become likelier, sad ones less likely.",
        {"steps": 40, "lr": 5e-5, "warmup": 4, "micro_batch": 8, "beta": 0.1},
    ),
    DemoStage(
        "grpo",
        "dpo",
        "prompts",
        "grpo: a reward that a function gives",
        "The model answers requests of the other three ways, eight times each. An answer is worth 1 if it is a story "
        "that ends and names the thing that was asked for and no other, else 0; what was better than the others of its "
        "request becomes likelier. The divergence from the model before is in the loss, so that stories stay stories.",
        {
            "steps": 40,
            "lr": 5e-4,
            "warmup": 4,
            "micro_batch": 16,
            "n": 8,
            "max_tokens": 40,
            "beta": 0.05,
            "reference": "copy",
        },
    ),
    DemoStage(
        "ppo",
        "dpo",
        "prompts",
        "ppo: the same reward, and a model of what comes",
        "From the same model as grpo, by the same reward. A second model learns what a story is going to be worth from "
        "each word on; words after which it is worth more than was expected become likelier.",
        {
            "steps": 40,
            "lr": 5e-4,
            "value_lr": 1e-3,
            "warmup": 4,
            "micro_batch": 16,
            "n": 8,
            "updates": 2,
            "max_tokens": 40,
            "beta": 0.05,
            "reference": "copy",
        },
    ),
)


def prepare(config: DemoConfig) -> None:
    """Make text, tokenizer and model in the folder `config.out`, in the process that starts the ranks."""
    folder = folder_of(config)
    began = time.perf_counter()
    rows = make_text(folder / "text", share=config.share, seed=config.seed)
    made = make_base(folder / "base", rows, seed=config.seed)
    (folder / MADE).write_text(json.dumps({**made, "seconds": time.perf_counter() - began}), encoding="utf-8")


def folder_of(config: DemoConfig) -> Path:
    assert config.out is not None  # the command has chosen one
    return config.out


def run_demo(config: DemoConfig) -> None:
    """Run all stages on this rank, together with the others; rank 0 says what came of each, and writes the page.

    :func:`prepare` has been in the folder `config.out`.

    Raises:
        ConfigError: a stage was interrupted.
    """
    folder = folder_of(config)
    import torch.distributed as dist

    console = lenient_console()
    if config.procs > 1:
        dist.init_process_group("gloo")  # of all stages, so that ranks can wait for what rank 0 writes
    leads = int(os.environ.get("RANK", "0")) == 0
    made = json.loads((folder / MADE).read_text(encoding="utf-8"))
    facts = _Facts(config, folder, made)
    if leads:
        console.print(facts.introduction(), highlight=False, soft_wrap=True)
    for stage in STAGES:
        with _logged(folder if leads else None):
            facts.run(stage)
        if config.procs > 1:
            dist.barrier()
        if leads:
            console.print(facts.line(stage), highlight=False, soft_wrap=True)
    if leads:
        facts.write()
        (folder / PAGE).write_text(demo_page(folder), encoding="utf-8")
        total = format_duration(sum(facts.seconds.values()))
        console.print(f"\n{total} in all. The page: {folder / PAGE}", highlight=False, markup=False, soft_wrap=True)
    if config.procs > 1:
        dist.destroy_process_group()


@contextmanager
def _logged(folder: Path | None) -> Iterator[None]:
    """What a stage prints goes into the log; of ranks that do not lead, nowhere."""
    with open(os.devnull if folder is None else folder / LOG, "a", encoding="utf-8") as file, redirect_stdout(file):
        yield


class _Facts:
    """What is known so far."""

    def __init__(self, config: DemoConfig, folder: Path, made: Mapping[str, Any]) -> None:
        self.config, self.folder, self.made = config, folder, made
        self.seconds: dict[str, float] = {"text, tokenizer and model": made["seconds"]}
        self.held_out: dict[str, Mapping[str, float]] = {}
        self.measures: dict[str, dict[str, float]] = {}
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def introduction(self) -> str:
        ranks = self.config.procs
        return (
            f"A LLaMA of {self.made['parameters']:,} parameters, {self.config.layout} over {ranks} "
            f"rank{'s' * (ranks != 1)}; everything is made here, in {self.folder}.\n"
            f"{format_duration(self.made['seconds'])}  text, tokenizer, model"
        )

    def settings(self, stage: DemoStage) -> dict[str, Any]:
        """Of the stage's recipe."""
        text = self.folder / "text"
        found: dict[str, Any] = {
            "model": self.folder / stage.model,
            "data": text / f"{stage.data}.jsonl",
            "layout": self.config.layout,
            "procs": self.config.procs,
            "seed": self.config.seed,
            "text": {"length": 64},
            **stage.settings,
        }
        if stage.data == "prompts":
            found["reward"] = f"{text / 'rewards.py'}:has_word"
        if stage.data == "pairs":
            found["eval_data"] = text / "pairs-held.jsonl"
        if "steps" in found:
            found["steps"] = max(LEAST_STEPS, round(found["steps"] * self.config.share))
            found["warmup"] = min(found.get("warmup", 0), found["steps"] // 2)
        return found

    def run(self, stage: DemoStage) -> None:
        """Train, and measure what came of it."""
        import torch.distributed as dist

        from shardfold.tools.tune.tuned import tune

        began = time.perf_counter()
        settings = {**self.settings(stage), "out": self.folder / stage.recipe}
        result = tune(config_class(stage.recipe).load(settings))
        if result.interrupted:
            raise ConfigError(f"the demo was stopped in its stage {stage.recipe}.")
        if self.config.procs > 1:
            dist.barrier()  # the model is written
        self.held_out[stage.recipe] = result.held_out
        if stage.generates:
            self.measure(stage.recipe)
        self.seconds[stage.recipe] = time.perf_counter() - began

    def measure(self, name: str) -> None:
        """The model's loss on held-out rows, and what its answers to held-out requests are like."""
        from shardfold.tools.tune.evaluate import ANSWERS, evaluate

        text, out = self.folder / "text", self.folder / name
        found = evaluate(
            EvalConfig.load(
                {
                    "model": out,
                    "data": [text / "prompts-held.jsonl", text / "chats-held.jsonl"],
                    "layout": self.config.layout,
                    "answers": held_out(self.config.share),
                    "max_tokens": 48,
                    "best_of": DRAWN,
                    "reward": f"{text / 'rewards.py'}:has_word",
                    "seed": self.config.seed,
                }
            )
        )
        assert found.language is not None and found.best_of is not None and found.best_of.reward is not None
        if int(os.environ.get("RANK", "0")) != 0:
            return
        with (out / ANSWERS).open(encoding="utf-8") as lines:
            self.answers[name] = [json.loads(line) for line in lines]
        drawn = [each["text"] for row in self.answers[name] for each in row["answers"] if not each["greedy"]]
        self.measures[name] = {
            "loss": found.language.loss,
            "bits_per_byte": found.language.bits_per_byte,
            "ended": found.best_of.stopped,
            "happy": sum(is_happy(each) is True for each in drawn) / len(drawn),
            "obeys": found.best_of.reward,
        }

    def line(self, stage: DemoStage) -> str:
        """What came of a stage, for the terminal."""
        said: list[str] = []
        if "accuracy" in self.held_out[stage.recipe]:
            said.append(f"{self.held_out[stage.recipe]['accuracy']:.0%} of held-out pairs told apart")
        if stage.recipe in self.measures:
            found = self.measures[stage.recipe]
            said.append(
                f"held-out loss {found['loss']:.2f}, {found['happy']:.0%} happy endings, "
                f"{found['obeys']:.0%} with the word that was asked for"
            )
        return f"{format_duration(self.seconds[stage.recipe])}  {stage.recipe:<6}  {'; '.join(said)}"

    def write(self) -> None:
        """``demo.json``."""
        models = list(self.measures)
        asked = {row["prompt"]: number for number, row in reversed(list(enumerate(self.answers[models[0]])))}
        shown = sorted(asked.values())[:SHOWN]  # the first of each request: none is on the page twice
        samples = [
            {
                "prompt": self.answers[models[0]][number]["prompt"],
                "word": _word(self.answers[models[0]][number]["prompt"]),
                "answers": {
                    name: {
                        each: first[each]
                        for first in [next(a for a in self.answers[name][number]["answers"] if not a["greedy"])]
                        for each in ("text", "stopped")
                    }
                    for name in models
                },
            }
            for number in shown
        ]
        facts = {
            **{name: value for name, value in self.made.items() if name != "seconds"},
            "procs": self.config.procs,
            "layout": self.config.layout,
            "seed": self.config.seed,
            "share": self.config.share,
            "seconds": self.seconds,
            "models": models,
            "measures": self.measures,
            "held_out": self.held_out,
            "samples": samples,
            "stages": {
                each.recipe: {"title": each.title, "what": each.what, "command": self.command(each)} for each in STAGES
            },
        }
        (self.folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def command(self, stage: DemoStage) -> list[str]:
        """The words behind ``shardfold tune`` that run a stage alone, in the demo's folder."""
        words = [stage.recipe]
        settings = self.settings(stage)
        settings["length"] = settings.pop("text")["length"]
        for name, value in settings.items():
            said = str(value).removeprefix(f"{self.folder}{os.sep}")
            words += [f"--{name.replace('_', '-')}", said]
        return words


def _word(request: str) -> str:
    """The thing that a request asks for."""
    return next(thing for thing in THINGS if re.search(rf"\b{thing}\b", request))
