"""Budgets of `activations="fit:..."`: the measured peak beside the budget, and the time of a step beside that of the
best uniform mode that fits, on six architectures with random weights, one rank and one thread.

python benchmarks/activation_budget.py [NAME ...]
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

import shardfold as sf
from tests.support.held import HeldBytes

SHARES = (0.6, 0.35)
ROUNDS = 12
UNIFORM = ("keep", "select", "recompute")
MIB = 2**20
TEXT: dict[str, Any] = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 6, "num_attention_heads": 6,
}  # fmt: skip


class Case(NamedTuple):
    model: str
    config: str
    sizes: dict[str, Any]
    rows: int
    length: int  # tokens of a row; 0: images


CASES = {
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", {**TEXT, "n_embd": 192, "n_layer": 6, "n_head": 6}, 4, 128),
    "llama": Case("LlamaForCausalLM", "LlamaConfig", {**TEXT, **SIZE, "num_key_value_heads": 2}, 4, 128),
    "bert": Case("BertForMaskedLM", "BertConfig", {**TEXT, **SIZE}, 4, 128),
    "t5": Case(
        "T5ForConditionalGeneration", "T5Config",
        {**TEXT, "d_model": 192, "d_kv": 32, "d_ff": 576, "num_layers": 4, "num_heads": 6,
         "decoder_start_token_id": 0}, 4, 96,
    ),
    "vit": Case("ViTForImageClassification", "ViTConfig", {**SIZE, "image_size": 96, "patch_size": 8}, 4, 0),
    "mixtral": Case(
        "MixtralForCausalLM", "MixtralConfig",
        {**TEXT, **SIZE, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}, 4, 96,
    ),
}  # fmt: skip


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(getattr(transformers, case.config)(**case.sizes))
    return model.train()


def batch_of(case: Case) -> dict[str, torch.Tensor]:
    if not case.length:
        side = case.sizes["image_size"]
        return {"pixel_values": torch.randn(case.rows, 3, side, side), "labels": torch.zeros(case.rows).long()}
    tokens = torch.randint(3, case.sizes["vocab_size"], (case.rows, case.length))
    return {"input_ids": tokens, "labels": tokens}


def train(engine: sf.Engine, batch: dict[str, torch.Tensor]) -> float:
    begun = time.process_time()
    engine.backward(engine(**batch).loss)
    engine.step()
    return time.process_time() - begun


def held(engine: sf.Engine, batch: dict[str, torch.Tensor]) -> HeldBytes:
    """What autograd holds at most, and what is live at most, in a pass of an engine that has trained."""
    flats = [segment.flat for unit in engine.units for segment in unit.segments]
    grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
    meter = HeldBytes([*flats, *grads, *engine.module.buffers(), *batch.values()])
    with meter.watching():
        loss = engine(**batch).loss
        meter.end_forward()
        engine.backward(loss)
    engine.step()
    return meter


def measure(name: str) -> None:
    case = CASES[name]
    batch = batch_of(case)
    adamw = partial(torch.optim.AdamW, lr=1e-4)

    def make(activations: str) -> sf.Engine:
        engine = sf.Engine(build(case), optimizer=adamw, layout="ddp", activations=activations)
        while engine._replaced.waits:  # the first passes measure
            train(engine, batch)
        train(engine, batch)
        return engine

    engines = {mode: make(mode) for mode in UNIFORM}
    peaks = {mode: held(engine, batch).peak for mode, engine in engines.items()}
    budgets = {f"fit:{int(share * peaks['keep'])}": int(share * peaks["keep"]) for share in SHARES}
    for asked in budgets:
        engines[asked] = make(asked)
        peaks[asked] = held(engines[asked], batch).peak
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    for _ in range(ROUNDS):  # in turn, so that what else runs on the machine meets all of them
        for mode, engine in engines.items():
            seconds[mode].append(train(engine, batch))
    best = {mode: min(times) for mode, times in seconds.items()}
    for asked, budget in budgets.items():
        fits = [mode for mode in UNIFORM if peaks[mode] <= budget]
        uniform = min(fits, key=best.__getitem__, default="-")
        ratio = f"{best[asked] / best[uniform]:.3f}" if fits else "-"
        modes = [place.current.mode for place in engines[asked]._replaced.places]
        plan = ", ".join(f"{modes.count(mode)} {mode}" for mode in UNIFORM if mode in modes)
        print(
            f"| {name} | {budget / MIB:.1f} ({budget / peaks['keep']:.0%}) | {peaks[asked] / MIB:.1f} | "
            f"{peaks[asked] / budget:.3f} | {plan} | {1000 * best[asked]:.0f} | {uniform} "
            f"{1000 * best.get(uniform, 0):.0f} | {ratio} |",
            flush=True,
        )
    for engine in engines.values():
        engine.close()


def main() -> None:
    torch.set_num_threads(1)
    print("| model | budget, MiB | measured | of the budget | plan | ms | best uniform that fits, ms | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or CASES:
        measure(name)


if __name__ == "__main__":
    main()
