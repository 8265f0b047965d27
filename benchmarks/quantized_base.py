"""LoRA over a base of codes, beside peft with bitsandbytes: memory, losses and seconds of the same training, one rank.

    python benchmarks/quantized_base.py                       # a table
    python benchmarks/quantized_base.py --width 1024 --layers 12 --formats nf4/64

A random LLaMA is written in 16 bits into a folder. Each contender is a process of one thread that reads it into 4 bits,
adds LoRA of rank 8 to all linear layers from the same first values, and trains on the same batches in fp32:
``shardfold`` under ``zero3``, and ``peft + bitsandbytes`` by ``BitsAndBytesConfig``. Memory is resident, less what it
was before the model was read: the most while it was read, and the most of all. Needs bitsandbytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

RANK, LR = 8, 1e-3
MIB = 2**20


def write(folder: Path, width: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=width // 64, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def wrapped(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))


def first_values(name: str, shape: Iterable[int]) -> Tensor:
    """Of an adapter's matrix, by its name."""
    if "lora_B" in name:
        return torch.zeros(*shape)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) / 32


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Ours:
    """The engine's."""

    def __init__(self, folder: Path, base: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        import shardfold as sf
        from shardfold.tools.tune.models import FolderTensors

        with sf.meta_init():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
            stored = FolderTensors(folder, model)
            model = wrapped(model)
        weights = _Values(model, stored)
        optimizer = partial(torch.optim.AdamW, lr=LR)
        init = sf.Init(weights=weights)
        self._engine = sf.Engine(model, optimizer=optimizer, layout=f"zero3+{base}", init=init)
        self.said = {"memory": self._engine.memory().held}

    def step(self, ids: Tensor) -> float:
        loss = self._engine(input_ids=ids, labels=ids, use_cache=False).loss
        self._engine.backward(loss)
        self._engine.step()
        return loss.item()


class _Values(dict[str, Tensor]):
    """Of a wrapped model, read one at a time."""

    def __init__(self, model: nn.Module, stored: Mapping[str, Tensor]) -> None:
        super().__init__({name: p.detach() for name, p in model.named_parameters()})
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        if "lora_" in name:
            return first_values(name, super().__getitem__(name).shape)
        return self._stored[name.removeprefix("base_model.model.").replace(".base_layer", "")].float()


class Theirs:
    """peft's over bitsandbytes'."""

    def __init__(self, folder: Path, base: str) -> None:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=base.endswith("+double"),
            bnb_4bit_compute_dtype=torch.float32,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, device_map="cpu", dtype=torch.float32
        )
        self._model = wrapped(model.requires_grad_(False))
        self._model.train()
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(first_values(name, parameter.shape))
        self._optimizer = torch.optim.AdamW(trained.values(), lr=LR)
        self.said: dict[str, int] = {}

    def step(self, ids: Tensor) -> float:
        loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


CONTENDERS: dict[str, type[Ours | Theirs]] = {"shardfold": Ours, "peft + bitsandbytes": Theirs}
LIBRARIES = {"shardfold": "shardfold", "peft + bitsandbytes": "bitsandbytes"}


def train(who: str, folder: Path, base: str, steps: int, rows: int, length: int) -> None:
    """In a process of its own."""
    for library in ("peft", "transformers.models.llama.modeling_llama", LIBRARIES[who]):
        __import__(library)
    torch.set_num_threads(1)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    trained = CONTENDERS[who](folder, base)
    loading = resident("VmHWM") - before
    draw, losses, seconds = torch.Generator().manual_seed(1), list[float](), list[float]()
    for _ in range(steps):
        ids, begun = torch.randint(0, 512, (rows, length), generator=draw), perf_counter()
        losses.append(trained.step(ids))
        seconds.append(perf_counter() - begun)
    most = resident("VmHWM") - before
    print(json.dumps({
        "loading": loading, "most": most, "losses": losses, "seconds": statistics.median(seconds), **trained.said,
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--formats", nargs="+", default=["nf4/64", "nf4/64+double"])
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        who, folder, base = given.train
        train(who, Path(folder), base, given.steps, given.rows, given.length)
        return
    sizes = [str(each) for each in ("--steps", given.steps, "--rows", given.rows, "--length", given.length)]
    print("| base | | reading, MiB | most, MiB | `memory()`, MiB | a step, s | losses differ by |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given.width, given.layers)
        for base in given.formats:
            expected: list[float] = []
            for who in CONTENDERS:
                words = [sys.executable, __file__, *sizes, "--train", who, folder, base]
                told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
                found = json.loads(told.splitlines()[-1])
                expected = expected or found["losses"]
                apart = max(abs(a - b) for a, b in zip(expected, found["losses"], strict=True))
                held = f"{found['memory'] / MIB:.1f}" if "memory" in found else ""
                print(
                    f"| `{base}` | {who} | {found['loading'] / MIB:.0f} | {found['most'] / MIB:.0f} | {held} "
                    f"| {found['seconds']:.2f} | {apart:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
