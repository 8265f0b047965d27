"""Useful tokens per second of `shardfold tune sft` with packing beside TRL's SFTTrainer, padded and packed, in turns.

    python benchmarks/tuning_packing.py            # a LLaMA of 6M parameters, rows of 20 to 1,000 tokens, one thread
    python benchmarks/tuning_packing.py --rounds 5 --steps 8

The same rows and the same model: TRL's default pads 8 rows to the longest; packed, both put rows into sequences of the
length, two per step. Each contender is a process of its own; rounds alternate. Printed are medians over rounds: tokens
of rows (no padding) per second behind the first step, and how far the loss of the first batch is from that of its rows
one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LENGTH = 1024


def rows(number: int) -> list[dict[str, Any]]:
    """Questions and answers whose lengths are spread as those of people's: most short, a few long."""
    draw, words = random.Random(0), ("one", "two", "red", "blue", "cat", "dog", "runs", "sits", "here", "there")
    found: list[dict[str, Any]] = []
    for _ in range(number):
        length = int(min(max(draw.lognormvariate(4.6, 0.9), 20), 950))
        asked = " ".join(draw.choice(words) for _ in range(3))
        told = " ".join(draw.choice(words) for _ in range(length // 5 + 1))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        found.append({"messages": turns})
    return found


def one_by_one(model: Any, samples: Iterable[tuple[Any, Any]]) -> float:
    """Mean loss over the targets of samples, (n,) tokens and (n,) labels in place, each in a pass of its own."""
    import torch
    import torch.nn.functional as F

    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in samples:
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            total += float(F.cross_entropy(logits, labels[1:], reduction="sum"))
            count += int((labels[1:] != -100).sum())
    return total / count


def ours(folder: Path, steps: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.tune.config import SFTConfig
    from shardfold.tools.tune.run import TuneRun

    settings: dict[str, Any] = {
        "model": folder / "base", "data": str(folder / "rows.jsonl"), "cache": folder / "cache", "steps": steps,
        "micro_batch": 2, "layout": "ddp", "text": {"length": LENGTH, "pack": True},
    }  # fmt: skip
    run = TuneRun(SFTConfig.load(settings), lenient_console())
    run.recipe.begin(run)
    first: Any = None
    loss, tokens, moments = 0.0, [], [time.perf_counter()]

    def counted() -> Iterator[Any]:
        nonlocal first
        for window in run.batches:
            first = first or window.batches[0]
            tokens.append(sum(int((batch.documents >= 0).sum()) for batch in window.batches))
            yield window

    windows = counted()
    for step in range(steps):
        said = run.step(windows)
        loss = said.loss if step == 0 else loss
        moments.append(time.perf_counter())
    run.engine.close()
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    prepared = (run.rows[row] for row in first.rows)
    samples = [(torch.from_numpy(each.ids).long(), torch.from_numpy(each.trained)) for each in prepared]
    alone = one_by_one(model, [(ids, torch.where(trained, ids, -100)) for ids, trained in samples])
    return {"moments": moments[1:], "tokens": tokens[1:], "apart": abs(loss - alone)}


def theirs(folder: Path, steps: int, pack: bool) -> dict[str, Any]:
    import torch
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, TrainerCallback

    from tests.tools.tune.support import tiny_tokenizer

    disable_progress_bars()
    moments: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            moments.append(time.perf_counter())

    read = [json.loads(line)["messages"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": turns[:-1], "completion": turns[-1:]} for turns in read])
    options: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "max_steps": steps, "per_device_train_batch_size": 2 if pack else 8,
        "bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "max_length": LENGTH, "gradient_checkpointing": False, "logging_strategy": "no", "packing": pack,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    trainer = trl.SFTTrainer(
        model=model, args=trl.SFTConfig(**options), train_dataset=data, processing_class=tiny_tokenizer(),
        callbacks=[Clock()],
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    model.eval()
    with torch.no_grad():
        loss = float(trainer.compute_loss(model, dict(batch)))
    samples = []
    for line in range(len(batch["input_ids"])):
        ids, labels = batch["input_ids"][line], batch["labels"][line]
        if "attention_mask" in batch:
            seen = batch["attention_mask"][line].bool()
            samples.append((ids[seen], labels[seen]))
        else:
            starts = [*(batch["position_ids"][line] == 0).nonzero().flatten().tolist(), len(ids)]
            samples += [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(starts)]
    alone = one_by_one(model, samples)
    collate = trainer.data_collator

    def counted(examples: Any) -> Any:
        made = collate(examples)
        mask = made.get("attention_mask")
        tokens.append(int(made["input_ids"].numel() if mask is None else mask.sum()))
        return made

    trainer.data_collator = counted
    trainer.train()
    return {"moments": moments, "tokens": tokens[1:steps], "apart": abs(loss - alone)}


WHO: dict[str, Any] = {
    "shardfold, packed": ours,
    "TRL, packed": lambda folder, steps: theirs(folder, steps, True),
    "TRL, padded": lambda folder, steps: theirs(folder, steps, False),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        import torch

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        found = WHO[given.one[0]](Path(given.one[1]), given.steps)
        seconds = found["moments"][-1] - found["moments"][0]
        print(json.dumps({"rate": sum(found["tokens"]) / seconds, "apart": found["apart"]}))
        return
    from tests.tools.tune import support

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        support.model_folder(
            folder / "base", hidden_size=256, intermediate_size=768, num_hidden_layers=6, max_position_embeddings=LENGTH
        )
        support.write_rows(folder / "rows.jsonl", rows(12 * given.steps))
        results: dict[str, list[dict[str, float]]] = {who: [] for who in WHO}
        for _, who in itertools.product(range(given.rounds), WHO):
            command = [sys.executable, __file__, "--steps", str(given.steps), "--one", who, str(folder)]
            ran = subprocess.run(command, check=False, capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(ran.stderr)
            results[who].append(json.loads(ran.stdout.splitlines()[-1]))
        print(f"{'':<20}{'tokens/s':>10}{'ours / it':>11}{'loss apart':>13}")
        for who, found in results.items():
            rate = statistics.median(each["rate"] for each in found)
            pairs = zip(results["shardfold, packed"], found, strict=True)
            ratio = statistics.median(a["rate"] / b["rate"] for a, b in pairs)
            print(f"{who:<20}{rate:>10.0f}{ratio:>11.2f}{max(each['apart'] for each in found):>13.1e}")


if __name__ == "__main__":
    main()
