"""Experts beside a dense layer of as many active parameters, ours and transformers', on two ranks.

    python benchmarks/experts.py --rounds 3 --steps 2

All contenders live in the same two processes, of one thread each, and take turns: a round is one step that is not timed
and some that are, in an order that is reversed in every second round. A step's time is the slower rank's, a round's
figure the median of its steps, the table's the median over rounds; ratios are taken in each round. Each has the same
attention, tokens and fused AdamW, in fp32 under zero2; each token goes through as many weights: a dense layer of width
``top_k * hidden``, or ``top_k`` of the experts of width ``hidden``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.plan.checks import human
from shardfold.testing import run_ranks

RANKS, WIDTH, HIDDEN, EXPERTS, TOP_K, LAYERS, VOCAB, ROWS, TOKENS = 2, 256, 256, 8, 2, 2, 512, 2, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": TOKENS, "tie_word_embeddings": False,
}  # fmt: skip
ADAM = partial(torch.optim.AdamW, lr=1e-3)


class OurExperts(nn.Module):
    """A mixture of ours in place of that of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = sf.nn.MoE(WIDTH, HIDDEN, EXPERTS, top_k=TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).out


def dense() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, intermediate_size=TOP_K * HIDDEN, sliding_window=None))


def of_transformers(implementation: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    given = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": HIDDEN}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **given, experts_implementation=implementation))


def ours() -> nn.Module:
    model: Any = of_transformers("eager")
    for layer in model.model.layers:
        layer.mlp = OurExperts()
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "dense": (dense, {"intra": RANKS}),
    "Mixtral, its loop": (partial(of_transformers, "eager"), {"intra": RANKS}),
    "Mixtral, its grouped products": (partial(of_transformers, "grouped_mm"), {"intra": RANKS}),
    "Mixtral, grouped, `expert=2`": (partial(of_transformers, "grouped_mm"), {"expert": RANKS}),
    "`sf.nn.MoE`": (ours, {"intra": RANKS}),
    "`sf.nn.MoE`, `expert=2`": (ours, {"expert": RANKS}),
}


def take_turns(rounds: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    engines = {
        name: sf.Engine(make(), optimizer=ADAM, layout="zero2", parallel=mesh) for name, (make, mesh) in KINDS.items()
    }
    batch = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        for name in list(engines) if number % 2 == 0 else list(engines)[::-1]:
            engine, taken = engines[name], []
            for step in range(steps + 1):
                dist.barrier()
                began = perf_counter()
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
                slowest = torch.tensor(perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                taken += [slowest.item()] * (step > 0)
            times[name].append(median(taken))
    found: dict[str, Any] = {}
    for name, engine in engines.items():
        rows = engine.traffic().rows
        found[name] = {
            "seconds": times[name],
            "parameters": sum(p.numel() for p in engine.module.parameters()),
            "held": engine.memory().held,
            "sent": {row.op: sum(r.sent for r in rows if r.op == row.op) for row in rows},
            "same": all(row.program == row.sent for row in rows),
        }
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    found = run_ranks(take_turns, RANKS, given.rounds, given.steps, timeout=1200)[0]
    base = found["dense"]["seconds"]
    print("| | parameters here | step, ms | / dense | states here | sent in a step | of which tokens |")
    print("|---|---|---|---|---|---|---|")
    for name, row in found.items():
        ratio = median(a / b for a, b in zip(row["seconds"], base, strict=True))
        sent = sum(row["sent"].values())
        print(
            f"| {name} | {row['parameters'] / 1e6:.2f}M | {median(row['seconds']) * 1e3:.0f} | {ratio:.2f} | "
            f"{human(row['held'])} | {human(sent)} | {human(row['sent'].get('ALL_TO_ALL', 0))} |"
        )
        assert row["same"], name


if __name__ == "__main__":
    main()
