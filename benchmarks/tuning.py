"""Time of a step and memory of `shardfold tune`'s recipes beside TRL's trainers, on the same rows, in turns.

    python benchmarks/tuning.py                    # sft and dpo, whole and with LoRA, on this machine's CPU
    python benchmarks/tuning.py --width 512 --layers 8 --rounds 5

Each contender is a process of its own with one thread, which takes some steps and says when each began; rounds
alternate. Printed are medians over all rounds but the first two steps of each, and the largest resident memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS, BATCH, LENGTH = 8, 4, 128
CASES = [("sft", False), ("sft", True), ("dpo", False), ("dpo", True)]


def ours(recipe: str, lora: bool, folder: Path) -> list[float]:
    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.run import TuneRun

    settings: dict[str, Any] = {
        "model": folder / "base", "data": str(folder / f"{recipe}.jsonl"), "cache": folder / "cache", "steps": STEPS,
        "micro_batch": BATCH, "layout": "ddp", "adapter": {"rank": 16} if lora else None, "text": {"length": LENGTH},
    }  # fmt: skip
    run = TuneRun(config_class(recipe).load(settings), lenient_console())
    run.recipe.begin(run)
    windows, moments = iter(run.batches), [time.perf_counter()]
    for _ in range(STEPS):
        run.step(windows)
        moments.append(time.perf_counter())
    run.engine.close()
    return moments


def theirs(recipe: str, lora: bool, folder: Path) -> list[float]:
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback

    from tests.tools.tune.support import tiny_tokenizer

    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            moments.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            moments.append(time.perf_counter())

    rows = [json.loads(line) for line in (folder / f"{recipe}.jsonl").read_text().splitlines()]
    options: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "bf16": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_length": LENGTH,
        "gradient_checkpointing": False, "logging_strategy": "no",
    }  # fmt: skip
    if recipe == "sft":
        rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    name = recipe.upper()
    trainer = getattr(trl, f"{name}Trainer")(
        model=model, args=getattr(trl, f"{name}Config")(**options), train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(), callbacks=[Clock()],
        peft_config=adapter if lora else None,
    )  # fmt: skip
    trainer.train()
    return moments


def one(who: str, recipe: str, lora: bool, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", who, recipe, str(int(lora)), str(folder)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        import torch

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        who, recipe, lora, folder = given.one
        moments = {"ours": ours, "theirs": theirs}[who](recipe, lora == "1", Path(folder))
        steps = [b - a for a, b in itertools.pairwise(moments[2:])]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"step": statistics.median(steps), "rss": peak}))
        return
    from tests.tools.tune import support

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        support.model_folder(
            folder / "base", hidden_size=given.width, intermediate_size=3 * given.width, num_hidden_layers=given.layers
        )
        for recipe, rows in (("sft", support.chats), ("dpo", support.pairs)):
            support.write_rows(folder / f"{recipe}.jsonl", rows(STEPS * BATCH))
        print(f"{'':<12}{'ours, ms':>10}{'TRL, ms':>10}{'ratio':>8}{'ours, MiB':>12}{'TRL, MiB':>10}")
        for recipe, lora in CASES:
            rounds = [
                (one("ours", recipe, lora, folder), one("theirs", recipe, lora, folder)) for _ in range(given.rounds)
            ]
            step = [statistics.median(r[side]["step"] for r in rounds) for side in (0, 1)]
            ratio = statistics.median(a["step"] / b["step"] for a, b in rounds)
            rss = [max(r[side]["rss"] for r in rounds) for side in (0, 1)]
            name = f"{recipe}{' LoRA' if lora else ''}"
            print(
                f"{name:<12}{1e3 * step[0]:>10.1f}{1e3 * step[1]:>10.1f}{ratio:>8.2f}{rss[0]:>12.0f}{rss[1]:>10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
