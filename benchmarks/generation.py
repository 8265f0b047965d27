"""How many useful tokens a second :func:`shardfold.generate` makes on this machine, beside transformers.

    python benchmarks/generation.py [--model FOLDER] [--prompts 256] [--rounds 3] [--only together shardfold.generate]

Prompts and answers are of unequal lengths. In turns, with the same model, threads and greedy decoding: ours;
transformers' continuous batching, ``generate_batch``; padded batches, ``generate``, with prompts of about equal length
together, and of all prompts; with ``--genai FOLDER`` also padded batches of onnxruntime-genai (which has to be
installed) in fp32, as its own builder writes the model there. A padded batch goes on until its longest answer ends:
tokens that nobody asked for do not count. Rates by the clock are printed as they are measured; medians are of seconds
of a core, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import shardfold as sf

PADDED = 32  # prompts of one padded batch


def made(folder: str | None) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384, hidden_size=448, intermediate_size=1216, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ours(model: Any, prompts: list[list[int]], most: list[int]) -> None:
    assert sum(len(each.tokens) for each in sf.generate(model, prompts, max_tokens=most, temperature=0)) == sum(most)


def continuous(model: Any, prompts: list[list[int]], most: list[int]) -> None:
    """All answers are as long as the longest here: ``generate_batch`` takes one length. Its rate counts them all."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=max(most), do_sample=False, pad_token_id=0, eos_token_id=-1)
    model.generate_batch(prompts, generation_config=config, progress_bar=False)


def batches(prompts: list[list[int]], most: list[int], together: int) -> Iterator[tuple[Any, int]]:
    """Prompts of about equal length, padded in front with 0, and the longest answer of each batch."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), together):
        part = order[start : start + together]
        longest = max(len(prompts[number]) for number in part)
        ids = torch.tensor([[0] * (longest - len(prompts[n])) + prompts[n] for n in part])
        yield ids, max(most[number] for number in part)


def padded(model: Any, prompts: list[list[int]], most: list[int], together: int) -> None:
    for ids, longest in batches(prompts, most, together):
        with torch.no_grad():
            model.generate(
                ids, attention_mask=(ids != 0).long(), max_new_tokens=longest, do_sample=False, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip


def genai_model(model: Any, folder: Path, threads: int) -> Any:
    """What genai's builder makes of the model, opened."""
    import onnxruntime_genai
    from onnxruntime_genai.models.builder import create_model, parse_extra_options
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    settings = folder / "genai" / "genai_config.json"
    if not settings.exists():
        model.save_pretrained(folder / "hf")
        words = {f"w{number}": number for number in range(model.config.vocab_size)}
        made = Tokenizer(models.WordLevel(words, unk_token="w1"))
        named = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
        PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained(folder / "hf")
        given = ("", str(folder / "hf"), str(settings.parent), "fp32", "cpu", str(folder / "cache"))
        create_model(*given, **parse_extra_options(*given, []))
    found = json.loads(settings.read_text())
    found["model"]["pad_token_id"] = 0
    found["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    settings.write_text(json.dumps(found))
    return onnxruntime_genai.Model(str(settings.parent))


def genai(opened: Any, prompts: list[list[int]], most: list[int], together: int) -> None:
    import onnxruntime_genai

    for ids, longest in batches(prompts, most, together):
        options = onnxruntime_genai.GeneratorParams(opened)
        size = ids.shape[1] + longest
        options.set_search_options(do_sample=False, max_length=size, batch_size=len(ids))
        running = onnxruntime_genai.Generator(opened, options)
        running.append_tokens(ids.int().numpy())
        while not running.is_done():
            running.generate_next_token()
        assert len(running.get_sequence(0)) == size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a folder of transformers; without it a random LLaMA of 33M parameters")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, nargs=2, default=(400, 200), help="of prompts, of answers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--genai", type=Path, help="a folder for genai's model; what is there is taken")
    parser.add_argument("--only", nargs="+", help="ends of names: the others are left out")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, draw = made(given.model), random.Random(0)
    vocabulary = model.config.vocab_size
    prompts = [
        [draw.randrange(3, vocabulary) for _ in range(draw.randint(8, given.longest[0]))] for _ in range(given.prompts)
    ]
    most = [draw.randint(8, given.longest[1]) for _ in prompts]
    useful, all_longest = sum(most), max(most) * len(most)
    ways: dict[str, tuple[Callable[[], None], int]] = {
        "shardfold.generate": (lambda: ours(model, prompts, most), useful),
        "shardfold.generate, all answers as long as the longest": (
            lambda: ours(model, prompts, [max(most)] * len(most)),
            all_longest,
        ),
        "transformers generate_batch, the same": (lambda: continuous(model, prompts, most), all_longest),
        f"transformers generate, padded, {PADDED} together": (lambda: padded(model, prompts, most, PADDED), useful),
        "transformers generate, padded, all together": (lambda: padded(model, prompts, most, len(prompts)), useful),
    }
    if given.genai is not None:
        opened = genai_model(model, given.genai, given.threads)
        ways[f"onnxruntime-genai fp32, padded, {PADDED} together"] = (
            lambda: genai(opened, prompts, most, PADDED),
            useful,
        )
    if given.only:
        ways = {name: way for name, way in ways.items() if name.endswith(tuple(given.only))}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, (call, tokens) in ways.items():
            began, before = time.perf_counter(), time.process_time()
            call()
            rates[name].append(tokens / (time.process_time() - before))
            print(f"{tokens / (time.perf_counter() - began):9.0f} tokens/s  {name}", flush=True)
    size = sum(parameter.numel() for parameter in model.parameters())
    cpu = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    print(
        f"{size / 1e6:.1f}M parameters, {given.prompts} prompts, {useful} tokens asked; {given.threads} threads,",
        end=" ",
    )
    print(f"{cpu or platform.processor()}")
    first = statistics.median(rates.get("shardfold.generate", [0.0]))
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{middle:9.0f} tokens per second of a core  {first / middle:5.2f}x  {name}")
    names = "shardfold.generate, all answers as long as the longest", "transformers generate_batch, the same"
    if all(name in rates for name in names):
        again, theirs = (statistics.median(rates[name]) for name in names)
        print(f"of equal answers {again / theirs:.2f}x generate_batch")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    main()
