"""Which architectures of transformers become ONNX, and how near the graphs are: `python benchmarks/onnx_export.py`.

Small models with random values. Each is exported as `shardfold ckpt export --to onnx` does, which compares it with its
source; then greedy texts are compared again, in batches of 1, 8 and 64. `--optimum PYTHON` and `--genai PYTHON` export
the same folders with optimum-onnx and with the builder of onnxruntime-genai, under interpreters that have them, each in
a process of its own; the latter generates from our folder, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx_ir
import torch

from shardfold.tools.onnx._compared import TOLERANCE, SourceSteps
from shardfold.tools.onnx._layer_graph import LayerGraph
from shardfold.tools.onnx._onnx_source import OnnxSource
from shardfold.tools.onnx._tensorrt_operators import missing_operators
from shardfold.tools.onnx.onnx_export import export_onnx
from shardfold.tools.onnx.onnx_session import OnnxSession, continuations

LAYERS, WIDTH, HEADS, VOCABULARY = 3, 32, 4, 96
BATCHES = {1: 100, 8: 32, 64: 12}
"""Texts at once, and tokens of each: 1,124 in all."""

USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
SMALL_HEADS = {"head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 6},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, **SMALL_HEADS},
    "gemma": {**GROUPED, **SMALL_HEADS},
    "gemma2": {**GROUPED, **SMALL_HEADS, "sliding_window": 6},
    "gemma3_text": {**GROUPED, **SMALL_HEADS, "sliding_window": 6},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH},
    "phi": {},
    "phi3": {**GROUPED, "original_max_position_embeddings": 256},
    "falcon": {},
    "bloom": {},
    "mpt": {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 256},
    "starcoder2": {**GROUPED, "sliding_window": None},
    "stablelm": GROUPED,
    "olmo": GROUPED,
    "cohere": GROUPED,
    "granite": GROUPED,
    "mixtral": {**GROUPED, **EXPERTS},
}
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": WIDTH, "hidden_dim": 48, "n_layers": LAYERS, "n_heads": HEADS}),
    "roberta": ("RobertaForSequenceClassification", {}),
    "vit": ("ViTModel", {"image_size": 32, "patch_size": 8}),
}

TASKS = {"bert": "feature-extraction", "distilbert": "fill-mask", "roberta": "text-classification"}
"""For optimum-onnx, of what does not generate; others: feature-extraction."""

OPTIMUM = """
import sys
from optimum.exporters.onnx import main_export
main_export(sys.argv[1], sys.argv[2], task=sys.argv[3], do_validation=False)
"""
GENAI = """
import runpy, sys
given, made = sys.argv[1:3]
sys.argv[1:] = ["-i", given, "-o", made, "-p", "fp32", "-e", "cpu", "-c", made + "-cache"]
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
"""
GENERATED = """
import json, sys
import onnxruntime_genai as genai
model = genai.Model(sys.argv[1])
found = []
for prompt in json.loads(sys.argv[2]):
    options = genai.GeneratorParams(model)
    options.set_search_options(do_sample=False, max_length=len(prompt) + int(sys.argv[3]))
    generator = genai.Generator(model, options)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    found.append([int(token) for token in generator.get_sequence(0)][len(prompt):])
print(json.dumps(found))
"""


def tokenizer() -> Any:
    """One that has as many words as the models."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{number}": number for number in range(4, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def make(name: str, folder: Path) -> Path:
    """A folder of transformers with a small model of that type."""
    import transformers

    torch.manual_seed(0)
    kind, settings = READERS.get(name, ("", DECODERS.get(name, {})))
    config = transformers.AutoConfig.for_model(name, **{**USUAL, **settings})
    model = getattr(transformers, kind)(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
    place = folder / name
    model.save_pretrained(place)
    if not kind:
        tokenizer().save_pretrained(place)
    return place


def ours(name: str, place: Path, folder: Path) -> dict[str, Any]:
    """What our export says, and greedy texts at several batches."""
    began, cpu = time.perf_counter(), time.process_time()
    try:
        report = export_onnx(place, folder / f"{name}-ours", threads=1)
    except Exception as error:
        return {"taken": False, "why": f"{type(error).__name__}: {error}"[:300]}
    found: dict[str, Any] = {
        "taken": True,
        "error": report.error,
        "exported": report.layers[1],
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "bytes": report.num_bytes,
        "operators": len(report.operators),
        "not_in_tensorrt": missing_operators(report.operators),
    }
    if report.kind == "decoder":
        found |= greedy(place, folder / f"{name}-ours")
    return found


def greedy(place: Path, made: Path) -> dict[str, Any]:
    source, graph = SourceSteps(OnnxSource.open(place)), OnnxSession(made / "model.onnx", 1)
    draw = torch.Generator().manual_seed(1)
    tokens = different = 0
    for batch, count in BATCHES.items():
        prompts = [torch.randint(3, VOCABULARY, (2 + row % 5,), generator=draw).tolist() for row in range(batch)]
        theirs, gaps = continuations(source, prompts, count)
        texts, _ = continuations(graph, prompts, count)
        for row, (a, b) in enumerate(zip(theirs, texts, strict=True)):
            tokens += count
            at = next((i for i in range(count) if a[i] != b[i]), None)
            different += at is not None and bool(gaps[row, at] > 2 * TOLERANCE)
    return {"greedy_tokens": tokens, "texts_that_differ": different}


def peer(python: str, code: str, *arguments: str) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [python, "-c", code, *arguments], check=False, capture_output=True, text=True, timeout=600
        )
    except subprocess.TimeoutExpired:
        return {"taken": False, "why": "10 minutes were not enough"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"taken": False, "why": lines[-1][:300] if lines else f"status {done.returncode}"}
    said = done.stdout.splitlines()
    return {"taken": True, "seconds": round(time.perf_counter() - began, 1), "said": said[-1] if said else ""}


def generated(python: str, place: Path, made: Path, count: int = 64) -> dict[str, Any]:
    """Greedy tokens of onnxruntime-genai from our folder, beside transformers'; a text of the former may end."""
    prompts = [[1, 5, 9], [7, 8, 11, 30, 31], [40]]
    found = peer(python, GENERATED, str(made), json.dumps(prompts), str(count))
    if not found["taken"]:
        return found
    source, tokens, same = SourceSteps(OnnxSource.open(place)), 0, True
    for prompt, theirs in zip(prompts, json.loads(found["said"]), strict=True):
        (text,), _ = continuations(source, [prompt], count)
        tokens, same = tokens + len(theirs), same and bool(theirs) and text[: len(theirs)] == theirs
    return {"taken": True, "tokens": tokens, "same": same}


def padding(threads: int = 1, turns: int = 7) -> None:
    """A BERT of 11M parameters and 16 texts of 8 to 128 tokens: its layers with and without padding, in turns."""
    import statistics

    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
    lengths = torch.randint(8, 129, (16,))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    inputs = {"input_ids": torch.randint(3, 500, mask.shape), "attention_mask": mask}
    inputs["token_type_ids"] = torch.zeros_like(mask)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        transformers.BertModel(transformers.BertConfig(vocab_size=500, **sizes)).save_pretrained(place)
        source = OnnxSource.open(place)
        graphs: dict[bool, OnnxSession] = {}
        for packed in (False, True):
            layers = source.layers if packed else None
            made = LayerGraph(source.call(packed=packed), layers, source.num_layers)
            onnx_ir.save(made.graph_model, place / f"{packed}.onnx")
            graphs[packed] = OnnxSession(place / f"{packed}.onnx", threads)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    found: dict[bool, torch.Tensor] = {}
    for _ in range(turns):
        for packed, graph in graphs.items():
            began = time.perf_counter()
            found[packed] = graph.run(inputs)["last_hidden_state"]
            seconds[packed].append(time.perf_counter() - began)
    apart = ((found[True] - found[False]).abs() * mask[..., None]).max()
    padded, without = (statistics.median(seconds[packed]) for packed in (False, True))
    print(
        f"{int(mask.sum())} of {mask.numel()} places have tokens: {padded * 1e3:.1f} ms padded, {without * 1e3:.1f} ms"
    )
    print(f"without, {padded / without:.2f} times as fast; {apart:.1e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="Types of models; all, if none is given.")
    parser.add_argument("--optimum", help="An interpreter that has optimum-onnx.")
    parser.add_argument("--genai", help="An interpreter that has onnxruntime-genai.")
    parser.add_argument("--padding", action="store_true", help="What padding costs an encoder, and nothing else.")
    parser.add_argument("--only-peers", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON, to which results are added.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.padding:
        return padding()
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    for name in given.names or [*DECODERS, *READERS]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            found = results.setdefault(name, {})
            try:
                place = make(name, folder)
            except Exception as error:
                found["made"] = f"{type(error).__name__}: {error}"[:300]
                print(name, found, flush=True)
                continue
            if not given.only_peers:
                found["shardfold"] = ours(name, place, folder)
            if given.optimum:
                task = "text-generation-with-past" if name in DECODERS else TASKS.get(name, "feature-extraction")
                found["optimum"] = peer(given.optimum, OPTIMUM, str(place), str(folder / "optimum"), task)
            if given.genai and name in DECODERS:
                found["genai"] = peer(given.genai, GENAI, str(place), str(folder / "genai"))
                if not given.only_peers:
                    found["genai_reads_ours"] = generated(given.genai, place, folder / f"{name}-ours")
        print(name, json.dumps(found), flush=True)
        if given.out:
            given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
