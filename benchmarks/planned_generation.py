"""Tokens a second and memory of generations as `shardfold plan --inference` has them, beside what they are.

    python benchmarks/planned_generation.py                     # measures the machine first, as `doctor --measure` does
    python benchmarks/planned_generation.py --profile here.json --only "4 bits" --rounds 3

Random LLaMAs of 33M and 134M parameters, in fp32 and in few bits, with 1, 8 and 32 texts under way that are short or
have 200 tokens and more, on one process that has all cores and on two that share every layer. Each case is in processes
of its own. Printed are milliseconds of a forward with a token of each text, the median of those behind the first two,
and bytes of all storages that live when a block begins, both beside the plan. Weights on a drive are in
`streamed_generation.py --profile`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from streamed_generation import most_held

MODELS: dict[str, dict[str, Any]] = {
    "33M": dict(vocab_size=16384, hidden_size=448, intermediate_size=1216, num_hidden_layers=8, num_attention_heads=8,
                num_key_value_heads=4, head_dim=64),
    "134M": dict(vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                 num_attention_heads=12),
}  # fmt: skip
PAGE, TOKENS = 16, 12
SHORT, LONG = 4, 200


class Case(NamedTuple):
    model: str
    rows: int
    bits: int | None = None
    prompt: int = SHORT
    ranks: int = 1

    @property
    def name(self) -> str:
        kind = "fp32" if self.bits is None else f"{self.bits} bits"
        ranks = "" if self.ranks == 1 else f", tensor axis of {self.ranks}"
        return f"{self.model}, {kind}, {self.rows} texts of {self.prompt + TOKENS}{ranks}"


CASES = [
    *(Case("33M", rows) for rows in (1, 8, 32)),
    *(Case("33M", rows, prompt=LONG) for rows in (8, 32)),
    *(Case("33M", 8, bits) for bits in (8, 4)),
    Case("33M", 32, 4),
    *(Case("134M", rows) for rows in (1, 8, 32)),
    *(Case("134M", 8, bits) for bits in (8, 4)),
    *(Case("134M", rows, ranks=2) for rows in (1, 8, 32)),
    Case("134M", 8, 4, ranks=2),
]


def config(name: str) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**MODELS[name], max_position_embeddings=1024, pad_token_id=0, eos_token_id=None)


def run(case: Case) -> dict[str, float]:
    """On each rank: seconds of a forward, and bytes that live."""
    from transformers import LlamaForCausalLM

    import shardfold as sf
    from shardfold.generation import Continuation, Generation, SamplingRule
    from shardfold.tools.answering.open_config import table_of_weights

    torch.manual_seed(0)
    model = LlamaForCausalLM(config(case.model)).requires_grad_(False)
    parallel = sf.Parallel(mesh={"tensor": case.ranks}, tensor="auto") if case.ranks > 1 else None
    engine = sf.Engine(model, layout=table_of_weights("ddp", case.bits, "memory"), parallel=parallel)
    del model
    pages = case.rows * -(-(case.prompt + TOKENS) // PAGE)
    running, rule = Generation(engine, pages=pages, page_size=PAGE), SamplingRule(0.0)
    for row in range(case.rows):
        prompt = [3 + (7 * place + 13 * row) % 1000 for place in range(case.prompt)]
        running.add(Continuation(row, 0, prompt, len(prompt), TOKENS, rule, frozenset()))
    seconds: list[float] = []
    while running.busy:
        begun = time.perf_counter()
        running.step()
        seconds.append(time.perf_counter() - begun)
    held = most_held(engine, running, Continuation(case.rows, 0, [1, 2], 2, 2, rule, frozenset()))
    running.close()
    engine.close()
    return {"seconds": statistics.median(seconds[2 - TOKENS :]), "held": held}


def measured(case: Case) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // case.ranks)
    everyone = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if case.ranks > 1:
        everyone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        everyone |= {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--case", json.dumps(case)],
            env=everyone | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if case.ranks > 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.ranks)
    ]
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{case.name}: a rank has failed")
    found = [json.loads(out.splitlines()[-1]) for out in said]
    return {what: max(each[what] for each in found) for what in found[0]}


def planned(case: Case, device: Any) -> tuple[float, float]:
    """Seconds, and bytes on each rank, as the command has them."""
    from transformers import LlamaForCausalLM

    import shardfold as sf
    from shardfold.planner.division import Division
    from shardfold.planner.inference import generating
    from shardfold.planner.setting import Subject
    from shardfold.tools.answering.open_config import table_of_weights

    with sf.meta_init():
        model = LlamaForCausalLM(config(case.model)).requires_grad_(False)
    length = case.prompt + TOKENS
    tokens = torch.empty((2, length), dtype=torch.int64, device="meta")
    subject = Subject(model, {"input_ids": tokens}, division=Division(tensor=case.ranks, streams=False))
    table = table_of_weights("ddp", case.bits, "memory")
    found = generating(subject, table, "fp32", device, rows=case.rows, length=length, page=PAGE)
    return found.seconds, found.memory


def machine(path: str) -> Any:
    from shardfold.planner.hardware import read_device
    from shardfold.tools.doctor._rates import measure

    if path:
        return read_device(Path(path))
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder)).device


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--profile", default="", help="a file of `shardfold doctor --measure`")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names: other cases are left out")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(run(Case(*json.loads(given.case)))))
        return
    device = machine(given.profile)
    print("| | ms a forward | planned | tokens/s | MB | planned |\n|---|---|---|---|---|---|")
    missed = []
    for case in CASES:
        if not any(part in case.name for part in given.only):
            continue
        rounds = [measured(case) for _ in range(given.rounds)]
        seconds, held = (statistics.median(each[what] for each in rounds) for what in ("seconds", "held"))
        time_planned, memory_planned = planned(case, device)
        print(
            f"| {case.name} | {seconds * 1e3:.1f} | {time_planned * 1e3:.1f} ({time_planned / seconds - 1:+.0%}) "
            f"| {case.rows / seconds:.0f} | {held / 1e6:.1f} | {memory_planned / 1e6:.1f} "
            f"({memory_planned / held - 1:+.1%}) |",
            flush=True,
        )
        if abs(seconds / time_planned - 1) > 0.2 or abs(memory_planned / held - 1) > 0.03:
            missed.append(case.name)
    print(f"{len(missed)} beyond 20 % of tokens a second or 3 % of memory: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
