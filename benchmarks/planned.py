"""Peaks as planned beside peaks of live storages, for architectures under layouts and modes, and products of these.

    python benchmarks/planned.py                                 # all architectures, layouts, precisions, modes
    python benchmarks/planned.py --names llama,bert --layouts zero1,zero3
    python benchmarks/planned.py --axes tensor=2 --layouts offload,zero3
    python benchmarks/planned.py --axes inter=2,intra=2 --layouts hsdp,hpz --names gpt,llama
    python benchmarks/planned.py --products                      # axes with tiers, levels of nodes, formats
    python benchmarks/planned.py --save rows.jsonl               # and goes on behind the rows that are there
    python benchmarks/planned.py --show rows.jsonl               # those rows as a table by architecture

Ranks are processes over Gloo, as many as the axes have (`intra=2` where none is named). Each case is the rank with the
largest error. Exits with 1 if an error is beyond 6 % above or 1 % below.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.presets import PRESETS, named
from shardfold.planner.division import Division
from shardfold.planner.setting import Subject
from shardfold.planner.tracing import loss_of
from shardfold.testing import Ranks
from shardfold.tools.bench.planned import compare
from shardfold.tools.recipes.gpt import GPT, GPTConfig

ABOVE, BELOW = 6.0, 1.0
"""Percent: what no case is to be beyond."""
ROWS, LENGTH, WIDTH, VOCAB = 4, 64, 128, 512
DIMS = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LM = {**TEXT, **DIMS, "max_position_embeddings": LENGTH}
PAIR = {
    **TEXT, "d_model": WIDTH, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": LENGTH, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
IMAGE = {"image_size": 64, "num_labels": 10}

#: Name: class of the model, class of its configuration, sizes, what it is given.
ZOO: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LM, "num_key_value_heads": 2}, "text"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**LM, "num_key_value_heads": 2, "tie_word_embeddings": True}, "text"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {**TEXT, "n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}, "text"),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LM, "text"),
    "bert": ("BertForMaskedLM", "BertConfig", {**LM, "type_vocab_size": 2}, "text"),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config",
                   {**LM, "type_vocab_size": 2, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "text"),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, "text"),
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIR, "text"),
    "vit": ("ViTForImageClassification", "ViTConfig", {**DIMS, **IMAGE, "patch_size": 8}, "images"),
    "resnet": ("ResNetForImageClassification", "ResNetConfig",
               {"num_labels": 10, "embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2],
                "layer_type": "basic"}, "images"),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 {**IMAGE, "hidden_sizes": [64, 128], "depths": [2, 2], "num_stages": 2}, "images"),
    "swin": ("SwinForImageClassification", "SwinConfig",
             {**IMAGE, "patch_size": 4, "embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
             "images"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig",
                {**PAIR, "num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": LENGTH}, "spectra"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig",
                {**LM, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}, "text"),
    "mamba": ("MambaForCausalLM", "MambaConfig",
              {**TEXT, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, "text"),
}  # fmt: skip


SHORT = {"mamba": 16}
"""Tokens of a sequence where a model goes through them one by one."""
EXPERTS = 4


@dataclass(frozen=True)
class Case:
    """What is planned and measured.

    Attributes:
        name: of the architecture; ``experts``: a GPT whose tokens all go to all experts.
        layout, precision, mode: names.
        axes: of the mesh, as ``tensor=2,intra=2``; ``stream`` among them: sequence parallelism.
        gather, reduce: formats; empty: as the layout has them.
        outer: optimizer of outer steps between nodes, every second step; empty: none.
        order: of stages.
        accumulate: micro-batches of a step.
    """

    name: str = "gpt"
    layout: str = "zero3"
    precision: str = "fp32"
    mode: str = "keep"
    axes: str = "intra=2"
    gather: str = ""
    reduce: str = ""
    outer: str = ""
    order: str = "1f1b"
    accumulate: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        pairs = (each.split("=") for each in self.axes.split(",") if "=" in each)
        return {name: int(size) for name, size in pairs}

    @property
    def world(self) -> int:
        return prod(self.sizes.values())

    @property
    def division(self) -> Division:
        """How ranks share the model."""
        shared = {name: n for name, n in self.sizes.items() if name not in ("inter", "intra")}
        stream = "stream" in self.axes.split(",")
        return Division(**shared, sequence_parallel=stream, order=self.order, micro_batches=self.accumulate)

    @property
    def table(self) -> Layout:
        """The layout with its formats."""
        wires = {name: getattr(self, name) for name in ("gather", "reduce") if getattr(self, name)}
        table = named(self.layout).replace(**wires) if wires else named(self.layout)
        return table.with_outer(sf.Outer(every=2, optimizer=self.outer)) if self.outer else table

    @property
    def engine(self) -> dict[str, Any]:
        """More arguments of the engine's."""
        how: dict[str, Any] = {"pipeline": self.order} if "pipeline" in self.sizes else {}
        if "tensor" in self.sizes:
            how |= {"tensor": "auto", "sequence_parallel": self.division.sequence_parallel}
        return {"parallel": sf.Parallel(mesh=self.sizes, **how), "accumulate": self.accumulate}

    def __str__(self) -> str:
        what = [self.layout, *(f"{n} {getattr(self, n)}" for n in ("gather", "reduce", "outer") if getattr(self, n))]
        order = f" {self.order}" * ("pipeline" in self.sizes)
        return f"{self.name:<12}{self.axes + order:<26}{', '.join(what):<34}{self.precision:<6}{self.mode:<10}"


PRODUCTS = (
    *(Case(layout=layout, precision=precision, mode=mode, axes=axes)
      for axes in ("tensor=2", "tensor=2,stream", "sequence=2")
      for layout, precision, mode in (("offload", "bf16", "keep"), ("infinity", "fp32", "recompute"))),
    *(Case("llama", layout, precision, axes=axes)
      for axes in ("tensor=2", "sequence=2")
      for layout, precision in (("offload", "bf16"), ("infinity", "fp32"))),
    *(Case("experts", layout, precision, axes="expert=2")
      for layout, precision in (("zero3", "fp32"), ("offload", "bf16"), ("infinity", "bf16"))),
    *(Case(layout=layout, precision=precision, axes="pipeline=2", accumulate=4, order=order)
      for layout, precision, order in (("offload", "bf16", "1f1b"), ("zero1", "fp32", "gpipe"))),
    *(Case(layout=layout, precision=precision, mode=mode, axes="pipeline=2", accumulate=4, order=order)
      for order, layout, precision, mode in (
          ("interleaved:2", "zero1", "bf16", "recompute"), ("looped-bfs", "zero2", "fp32", "keep"),
          ("zb-h1", "zero1", "fp32", "keep"), ("zb-h1", "offload", "bf16", "recompute"),
          ("interleaved-zb", "zero1", "bf16", "select"), ("zbv", "zero1", "fp32", "recompute"),
          ("v-half", "zero2", "bf16", "keep"), ("v-min", "zero1", "bf16", "recompute"),
          ("dualpipev", "offload", "bf16", "keep"))),
    Case(layout="zero3", axes="pipeline=2,intra=2", accumulate=4, order="interleaved:2"),
    Case(layout="zero2", precision="bf16", axes="pipeline=2,intra=2", accumulate=4, order="interleaved-zb"),
    Case(layout="zero1", axes="pipeline=2,intra=2", accumulate=4),
    Case(layout="offload", precision="bf16", axes="pipeline=2,intra=2", accumulate=4),
    Case(layout="offload", precision="bf16", axes="tensor=2,intra=2"),
    Case(layout="infinity", precision="bf16", mode="recompute", axes="sequence=2,intra=2"),
    Case("experts", axes="expert=2,intra=2"),
    *(Case(name, layout, precision, mode, "inter=2,intra=2")
      for name in ("gpt", "llama")
      for layout, precision, mode in (("hsdp", "fp32", "keep"), ("hsdp", "bf16", "recompute"),
                                      ("hpz", "fp32", "recompute"), ("hpz", "bf16", "keep"))),
    *(Case(layout=layout, precision=precision, gather=gather, reduce=reduce)
      for layout, precision, gather, reduce in (
          ("zero3", "bf16", "int8", "int8"), ("zero3", "fp32", "int4", "int4"), ("zero2", "bf16", "", "int8+error"),
          ("offload", "bf16", "", "int8"), ("infinity", "bf16", "int8", ""))),
    Case(layout="zeropp", precision="bf16", axes="inter=2,intra=2"),
    Case(layout="zero3", precision="bf16", axes="inter=2,intra=2", gather="int8x2", reduce="int4x2+error"),
    Case(layout="zero1", axes="inter=2,intra=1", outer="average"),
    Case(layout="zero1", axes="inter=2,intra=1", outer="nesterov"),
)  # fmt: skip


def build(name: str) -> nn.Module:
    """The model, with random weights."""
    if name in ("gpt", "experts"):
        experts = {"experts": EXPERTS, "top_k": EXPERTS} if name == "experts" else {}
        return GPT(GPTConfig(d_model=WIDTH, layers=4, heads=4, context=LENGTH, **experts))
    import transformers

    model, config, sizes, _ = ZOO[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made.train()


@cache
def batch(name: str) -> Any:
    """A micro-batch."""
    tokens = torch.randint(3, 200, (ROWS, SHORT.get(name, LENGTH)))
    if name in ("gpt", "experts"):
        return {"tokens": tokens, "targets": tokens.clone()}
    kind = ZOO[name][3]
    if kind == "images":
        return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(10, (ROWS,))}
    if kind == "spectra":
        return {"input_features": torch.randn(ROWS, 16, 128), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens.clone()}


@cache
def subject(name: str, division: Division) -> Subject:
    """What is planned for, with its traces."""
    return Subject(build(name), batch(name), loss, division=division)


def loss(model: nn.Module, given: Any) -> Tensor:
    """Of a micro-batch, of which ranks of an axis of sequence have parts."""
    parts = isinstance(model, sf.Engine) and model.sequence is not None
    return loss_of(model, sf.sequence_shard(given, engine=model) if parts else given)


def one(case: Case) -> tuple[float, float, str]:
    """On a rank: planned and measured bytes, and where the peak is."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    # PyTorch's kernels of batch normalization on CPUs take no statistics in fp32 beside weights in 16 bits.
    narrow = (case.name, case.precision) == ("resnet", "bf16")
    policy = Precision(compute="bf16", buffers="compute") if narrow else case.precision
    found = compare(
        partial(build, case.name), batch(case.name), layout=case.table, precision=policy, mode=case.mode, compute=loss,
        division=case.division, subject=partial(subject, case.name), **case.engine,
    )  # fmt: skip
    return found.planned, found.measured, found.plan.top.where


def rows(cases: Sequence[Case], save: Path | None) -> list[tuple[Case, float]]:
    """Runs those that are not saved yet: each with its error in percent."""
    known = dict(read(save)) if save is not None and save.exists() else {}
    found: list[tuple[Case, float]] = []
    with Ranks(max((case.world for case in cases), default=1)) as ranks:
        for case in cases:
            if case in known:
                found.append((case, known[case]))
                continue
            try:
                each = ranks.run(one, case, world_size=case.world, timeout=600)
            except Exception as error:
                print(f"{case}failed: {' '.join(str(error).strip().splitlines()[-3:])}", flush=True)
                continue
            planned, measured, where = max(each, key=lambda given: abs(given[0] / given[1] - 1))
            found.append((case, 100 * (planned / measured - 1)))
            print(f"{case}{planned:>13,.0f}{measured:>13,.0f}{found[-1][1]:>+8.2f} %  {where}", flush=True)
            if save is not None:
                with save.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**asdict(case), "error": found[-1][1]}) + "\n")
    return found


def read(path: Path) -> Iterable[tuple[Case, float]]:
    """Cases and errors of a file that ``--save`` wrote."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield Case(**{name: value for name, value in row.items() if name != "error"}), row["error"]


def show(found: Sequence[tuple[Case, float]]) -> None:
    """Markdown: by architecture and layout, the error that is largest."""
    plain = [(case, error) for case, error in found if case.axes == "intra=2" and not case.gather + case.reduce]
    layouts = [layout for layout in PRESETS if any(case.layout == layout for case, _ in plain)]
    if plain:
        print(
            "\n|  | " + " | ".join(f"`{layout}`" for layout in layouts) + " |\n|---" * 1 + "|---" * len(layouts) + "|"
        )
    for name in dict.fromkeys(case.name for case, _ in plain):
        cells = [[e for c, e in plain if (c.name, c.layout) == (name, layout)] for layout in layouts]
        print(f"| {name} | " + " | ".join(f"{max(cell, key=abs):+.2f} %" if cell else "" for cell in cells) + " |")
    if others := [row for row in found if row not in plain]:
        print("\n| architecture | axes | layout | precision | activations | error |\n|---|---|---|---|---|---|")
        for case, error in others:
            what = ", ".join(filter(None, (f"`{case.layout}`", case.gather, case.reduce, case.outer)))
            order = f", {case.order}" * ("pipeline" in case.sizes)
            print(f"| {case.name} | {case.axes}{order} | {what} | {case.precision} | {case.mode} | {error:+.2f} % |")
    if found:
        errors = [error for _, error in found]
        sizes = sorted(map(abs, errors))
        within = sum(-BELOW <= error <= 3.0 for error in errors)
        print(
            f"\n{len(errors)} peaks: {within} within -1 % and +3 %, median {median(sizes):.2f} %, highest "
            f"{max(errors):+.2f} %, lowest {min(errors):+.2f} %"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default=",".join(["gpt", *ZOO]))
    parser.add_argument("--layouts", default=",".join(PRESETS))
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--modes", default="keep,recompute")
    parser.add_argument("--axes", default="intra=2", help="as tensor=2,intra=2; with stream: sequence parallelism")
    parser.add_argument("--gather", default="", help="format of gathers")
    parser.add_argument("--reduce", default="", help="format of reductions")
    parser.add_argument("--order", default="1f1b", help="of stages")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--products", action="store_true", help="axes with tiers, levels of nodes, formats")
    parser.add_argument("--save", type=Path, help="file of rows; those that it has are not run again")
    parser.add_argument("--show", type=Path, help="only shows the rows of a file")
    given = parser.parse_args()
    lists = (given.names, given.layouts, given.precisions, given.modes)
    more = {name: getattr(given, name) for name in ("axes", "gather", "reduce", "order", "accumulate")}
    cases = [Case(*each, **more) for each in itertools.product(*(each.split(",") for each in lists))]
    # traces of one architecture serve all of its layouts
    found = list(read(given.show)) if given.show else rows(PRODUCTS if given.products else cases, given.save)
    show(found)
    if not all(-BELOW <= error <= ABOVE for _, error in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
