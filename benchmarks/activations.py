"""Time of a step and bytes saved for backward under each mode of ``activations=``, of a GPT on one rank and one thread.

python benchmarks/activations.py
"""

from __future__ import annotations

import time
from functools import partial

import torch

import shardfold as sf
from shardfold.activations import MODES
from shardfold.recipes.config import GPTConfig
from shardfold.recipes.gpt import GPT

STEPS = 5
MIB = 2**20


def main() -> None:
    torch.set_num_threads(1)
    config = GPTConfig(vocab=256, d_model=256, layers=6, heads=4, context=256)
    tokens, targets = torch.randint(config.vocab, (2, 4, config.context))
    adamw = partial(torch.optim.AdamW, lr=1e-4)
    engines = {mode: sf.Engine(GPT(config), optimizer=adamw, layout="ddp", activations=mode) for mode in MODES}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}

    def step(engine: sf.Engine) -> float:
        before = time.process_time()
        engine.backward(engine(tokens, targets))
        engine.step()
        return time.process_time() - before

    for _ in range(STEPS):  # in turn, so that what else runs on the machine meets all of them
        for mode, engine in engines.items():
            seconds[mode].append(step(engine))
    print(f"{'activations':<12}{'CPU ms':>8}{'device MiB':>12}{'outside MiB':>13}{'back at once MiB':>18}")
    for mode, engine in engines.items():
        with engine.activations() as saved:
            step(engine)
        row = [saved.device / MIB, saved.outside / MIB, saved.peak / MIB]
        print(f"{mode:<12}{min(seconds[mode]) * 1000:>8.0f}{row[0]:>12.1f}{row[1]:>13.1f}{row[2]:>18.1f}")
        engine.close()


if __name__ == "__main__":
    main()
