"""Time of a step and memory of `shardfold tune`'s recipes beside TRL's trainers, alone and over DeepSpeed 3, in turns.

    python benchmarks/tuning.py                                  # sft and dpo, whole and with LoRA, one rank
    python benchmarks/tuning.py --ranks 2 --recipes sft dpo orpo kto reward grpo distill
    python benchmarks/tuning.py --recipes sft+lora sft+dora
    python benchmarks/tuning.py --ranks 2 --deepspeed VENV/bin/python    # an interpreter that has DeepSpeed besides

Each contender is a process of one thread that has its libraries loaded; for each case it forks its ranks, which take
some steps on the same rows and say when each began. On several ranks ours is ``zero3``, TRL alone has the whole model
on each rank. Printed are medians over all rounds but the first two steps of each, and the largest resident memory of a
rank.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import itertools
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS, BATCH, LENGTH, ANSWERS, NEW = 10, 4, 128, 4, 16
LIMIT = 300  # seconds of a case
CASES = ("sft", "sft+lora", "dpo", "dpo+lora")
LIBRARIES = {
    "shardfold": ("shardfold.tools.tune.run", "shardfold.tools.tune.grpo", "peft"),
    "TRL": ("trl", "datasets", "peft"),
    "TRL, DeepSpeed 3": ("datasets", "peft"),  # a rank that is forked from a process with DeepSpeed in it hangs
}
ZERO3 = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_force_ds_cpu_optimizer": False,
}


def rows(recipe: str) -> list[dict[str, Any]]:
    from tests.tools.tune import support

    number = 8 * STEPS * BATCH
    if recipe == "grpo":
        return [{"prompt": row["prompt"]} for row in support.pairs(number)]
    made = {"sft": support.chats, "distill": support.chats, "kto": support.labelled}
    return made.get(recipe, support.pairs)(number)


def rated(completions: list[Any], **columns: Any) -> list[float]:
    """The reward of answers for TRL, as ``shares`` is for ours."""
    return [answer.count("e") / max(len(answer), 1) for answer in completions]


REWARD = """\
def shares(answer):
    return answer.text.count("e") / max(len(answer.text), 1)
"""


def ours(recipe: str, variant: str, folder: Path, ranks: int) -> list[float]:
    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.run import TuneRun

    settings: dict[str, Any] = {
        "model": folder / "base", "data": str(folder / f"{recipe}.jsonl"), "cache": folder / "cache", "steps": STEPS,
        "micro_batch": BATCH, "layout": "zero3" if ranks > 1 else "ddp", "text": {"length": LENGTH},
        "adapter": {"rank": 16, "variant": variant} if variant else None,
    }  # fmt: skip
    if recipe == "distill":
        settings["teacher"] = folder / "base"
    if recipe == "grpo":
        rates = {"reward": f"{folder / 'rewards.py'}:shares", "n": ANSWERS, "max_tokens": NEW}
        settings |= {"micro_batch": BATCH // ANSWERS, **rates}
    run = TuneRun(config_class(recipe).load(settings), lenient_console())
    run.recipe.begin(run)
    windows, moments = iter(run.batches), [time.perf_counter()]
    for _ in range(STEPS):
        run.step(windows)
        moments.append(time.perf_counter())
    run.recipe.close()
    run.engine.close()
    return moments


def trainer_of(recipe: str, options: dict[str, Any], folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """TRL's trainer of a recipe, its config, and what it takes besides."""
    import trl

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    if recipe == "orpo":
        from trl.experimental import orpo

        return orpo.ORPOTrainer, orpo.ORPOConfig(**options, max_completion_length=64), {}
    if recipe == "distill":
        from trl.experimental import gkd

        more = {"lmbda": 0.0, "beta": 0.0, "teacher_model_name_or_path": str(folder / "base")}
        return gkd.GKDTrainer, gkd.GKDConfig(**options, **more), {"teacher_model": str(folder / "base")}
    if recipe == "grpo":
        del options["max_length"]
        more = {"num_generations": ANSWERS, "max_completion_length": NEW, "beta": 0.0}
        return trl.GRPOTrainer, trl.GRPOConfig(**options, **more), {"reward_funcs": rated}
    name = {"reward": "Reward"}.get(recipe, recipe.upper())
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")(**options), {}


def theirs(recipe: str, variant: str, folder: Path, zero3: bool) -> list[float]:
    import torch
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

    from tests.tools.tune.support import tiny_tokenizer

    disable_progress_bars()
    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            moments.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            moments.append(time.perf_counter())

    read = [json.loads(line) for line in (folder / f"{recipe}.jsonl").read_text().splitlines()]
    options: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "bf16": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_length": LENGTH,
        "gradient_checkpointing": False, "logging_strategy": "no", "deepspeed": ZERO3 if zero3 else None,
    }  # fmt: skip
    if recipe == "sft":
        read = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in read]
    trainer_class, arguments, more = trainer_of(recipe, options, folder)
    kind: Any = AutoModelForSequenceClassification if recipe == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(
        folder / "base", dtype=torch.float32, **({"num_labels": 1} if recipe == "reward" else {})
    )
    adapter = LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=variant == "dora"
    )
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=Dataset.from_list(read), processing_class=tiny_tokenizer(),
        callbacks=[Clock()], peft_config=adapter if variant else None, **more,
    )  # fmt: skip
    trainer.train()
    return moments


def rank_of(who: str, case: str, folder: Path, ranks: int, rank: int, port: int) -> dict[str, float]:
    """A forked rank."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if ranks > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    recipe, _, variant = case.partition("+")
    if who == "shardfold":
        if ranks > 1:
            torch.distributed.init_process_group("gloo")
        moments = ours(recipe, variant, folder, ranks)
    else:
        if who != "TRL":
            deepspeed_comm: Any = importlib.import_module("deepspeed.comm.torch")
            deepspeed_comm.build_shm_op = lambda: None  # it is compiled first; without it Gloo is taken
        moments = theirs(recipe, variant, folder, who != "TRL")
    steps = [b - a for a, b in itertools.pairwise(moments[2:])]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step": statistics.median(steps), "rss": rss}


def forked(who: str, case: str, folder: Path, ranks: int) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in range(ranks):
        (folder / f"said{rank}").unlink(missing_ok=True)
        if not (child := os.fork()):
            log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            found: dict[str, Any]
            try:
                found = rank_of(who, case, folder, ranks, rank, port)
            except BaseException as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
            (folder / f"said{rank}").write_text(json.dumps(found))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    said = [folder / f"said{rank}" for rank in range(ranks)]
    return [json.loads(each.read_text()) if each.exists() else {"error": "it hung, or died"} for each in said]


def serve(who: str, folder: Path, ranks: int) -> None:
    """A contender: cases come line by line, and figures go back so."""
    for library in LIBRARIES[who]:
        __import__(library)
    for line in sys.stdin:
        found = forked(who, line.strip(), folder, ranks)
        error = next((each["error"] for each in found if "error" in each), None)
        said = {"error": error} if error else {name: max(each[name] for each in found) for name in ("step", "rss")}
        print(f"said {json.dumps(said)}", flush=True)


def ask(contender: subprocess.Popen[str], case: str) -> dict[str, Any]:
    assert contender.stdin is not None and contender.stdout is not None
    print(case, file=contender.stdin, flush=True)
    while line := contender.stdout.readline():
        if line.startswith("said "):
            return json.loads(line[5:])
    return {"error": "it ended"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--recipes", nargs="+", default=CASES)
    parser.add_argument("--deepspeed", help="an interpreter that has TRL and DeepSpeed")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve[0], Path(given.serve[1]), given.ranks)
        return
    from tests.tools.tune import support

    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        support.model_folder(
            base, hidden_size=given.width, intermediate_size=3 * given.width, num_hidden_layers=given.layers
        )
        pythons = {"shardfold": sys.executable, "TRL": sys.executable}
        pythons |= {"TRL, DeepSpeed 3": given.deepspeed} if given.deepspeed else {}
        contenders, environment = {}, os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        for number, (who, python) in enumerate(pythons.items()):
            folder = Path(place) / str(number)
            folder.mkdir()
            (folder / "base").symlink_to(base)
            (folder / "rewards.py").write_text(REWARD)
            for recipe in {case.partition("+")[0] for case in given.recipes}:
                support.write_rows(folder / f"{recipe}.jsonl", rows(recipe))
            command = [python, __file__, "--ranks", str(given.ranks), "--serve", who, str(folder)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            contenders[who] = subprocess.Popen(command, env=environment, **pipes)
        print(f"{'':<12}{'':<18}{'step, ms':>10}{'ours / it':>11}{'MiB':>8}")
        for case in given.recipes:
            rounds = [{who: ask(each, case) for who, each in contenders.items()} for _ in range(given.rounds)]
            for who in contenders:
                if error := next((each[who]["error"] for each in rounds if "error" in each[who]), None):
                    print(f"{case:<12}{who:<18}{error:.300}", flush=True)
                    continue
                step = statistics.median(each[who]["step"] for each in rounds)
                both = [each for each in rounds if "step" in each["shardfold"]]
                ratios = [each["shardfold"]["step"] / each[who]["step"] for each in both]
                ratio = statistics.median(ratios) if ratios else float("nan")
                rss = max(each[who]["rss"] for each in rounds)
                print(f"{case:<12}{who:<18}{1e3 * step:>10.1f}{ratio:>11.2f}{rss:>8.0f}", flush=True)
        for each in contenders.values():
            each.communicate()


if __name__ == "__main__":
    main()
