"""Useful tokens a second of generation between steps of training over split parameters, beside TRL over DeepSpeed 3.

    python benchmarks/rollouts.py [--deepspeed VENV/bin/python] [--only "zero3 without gather"] [--texts 64]

Each contender is two processes of one thread, each with prompts of its own of unequal lengths, whose answers end at
lengths of their own; parameters rest split. Ours gathers each unit in each forward, or the whole model once
(``gather=True``); TRL's trainers call transformers' ``generate`` for a padded batch, inside of
``unwrap_model_for_generation`` with ``gather_deepspeed3_params`` or without. What a batch computes behind the end of an
answer does not count. With ``--one`` ours runs besides on one process that has all prompts and the whole model, and on
two of which each has half of every layer: seconds are printed for each.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.generation import batches, made

LONGEST = 200, 128  # of prompts, of answers
ZERO3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False}
WAYS = {
    "zero3 without gather": 2, "zero3 gathered": 2, "TRL, DeepSpeed 3 without gather": 2,
    "TRL, DeepSpeed 3 gathered": 2, "one rank": 1, "tensor axis of two": 2,
}  # fmt: skip


def texts(count: int, vocabulary: int, part: int, parts: int) -> tuple[list[list[int]], list[int]]:
    """Every ``parts``-th of all."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(draw.randint(8, LONGEST[0]))] for _ in range(count)]
    most = [draw.randint(8, LONGEST[1]) for _ in prompts]
    return prompts[part::parts], most[part::parts]


def ours(way: str, count: int, rank: int) -> float:
    import shardfold as sf

    model = made(None)
    split = way.startswith("zero3")
    parallel = sf.Parallel(mesh={"tensor": 2}, tensor="auto") if "tensor" in way else None
    engine = sf.Engine(model, layout="zero3" if split else "ddp", parallel=parallel, optimizer=torch.optim.AdamW)
    prompts, most = texts(count, model.config.vocab_size, rank if split else 0, 2 if split else 1)
    list(sf.generate(engine, prompts[:2], max_tokens=2, temperature=0))
    began = time.perf_counter()
    answers = sf.generate(engine, prompts, max_tokens=most, temperature=0, gather="gathered" in way)
    assert sum(len(each.tokens) for each in answers) == sum(most)
    return time.perf_counter() - began


def theirs(way: str, count: int, rank: int) -> float:
    deepspeed_comm: Any = importlib.import_module("deepspeed.comm.torch")
    deepspeed_comm.build_shm_op = lambda: None  # it is compiled first; without it Gloo is taken
    from accelerate import Accelerator, DeepSpeedPlugin
    from trl.models.utils import unwrap_model_for_generation

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(ZERO3)))
    model = made(None)
    prompts, most = texts(count, model.config.vocab_size, rank, 2)
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for first in (True, False):
        began = time.perf_counter()
        with unwrap_model_for_generation(
            engine, accelerator, gather_deepspeed3_params="without" not in way
        ) as unwrapped:
            for ids, longest in batches(prompts, most, len(prompts)):
                with torch.no_grad():
                    unwrapped.generate(
                        ids, attention_mask=(ids != 0).long(), max_new_tokens=2 if first else longest, do_sample=False,
                        pad_token_id=0, eos_token_id=None, synced_gpus=True,
                    )  # fmt: skip
    return time.perf_counter() - began


def measured(python: str, way: str, count: int) -> float:
    """Seconds of the slowest rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = WAYS[way]
    everyone = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu", "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    command = [python, __file__, "--texts", str(count), "--rank-of", way]
    children = [
        subprocess.Popen(
            command, env=everyone | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{way}: a rank has failed")
    return max(float(line.split()[1]) for out in said for line in out.splitlines() if line.startswith("seconds "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--deepspeed", help="an interpreter that has TRL and DeepSpeed")
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--only", nargs="+", choices=WAYS)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank_of:
        act = theirs if given.rank_of.startswith("TRL") else ours
        print("seconds", act(given.rank_of, given.texts, int(os.environ["RANK"])), flush=True)
        os._exit(0)
    ways = [
        way
        for way in given.only or WAYS
        if (given.deepspeed or not way.startswith("TRL")) and (given.only or given.one or way not in list(WAYS)[-2:])
    ]
    useful = sum(texts(given.texts, 16384, 0, 1)[1])
    for _ in range(given.rounds):
        for way in ways:
            seconds = measured(given.deepspeed if way.startswith("TRL") else sys.executable, way, given.texts)
            print(f"{useful / seconds:9.0f} tokens/s  {seconds:7.2f} s  {way}", flush=True)


if __name__ == "__main__":
    main()
