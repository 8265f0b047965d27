"""Peaks as planned beside peaks of live storages, for architectures of transformers under layouts and modes.

python benchmarks/planned.py --world 2 --layouts zero1,zero3 --names llama,bert
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.plan.layout import Precision
from shardfold.plan.presets import PRESETS
from shardfold.planner.tracing import loss_of
from shardfold.testing import Ranks
from shardfold.tools.bench.planned import compare
from shardfold.tools.recipes.gpt import GPT, GPTConfig

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


def build(name: str) -> nn.Module:
    """The model, with random weights."""
    if name == "gpt":
        return GPT(GPTConfig(d_model=WIDTH, layers=4, heads=4, context=LENGTH))
    import transformers

    model, config, sizes, _ = ZOO[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made.train()


def batch(name: str) -> Any:
    """A micro-batch."""
    tokens = torch.randint(3, 200, (ROWS, LENGTH))
    if name == "gpt":
        return tokens, tokens.clone()
    kind = ZOO[name][3]
    if kind == "images":
        return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(10, (ROWS,))}
    if kind == "spectra":
        return {"input_features": torch.randn(ROWS, 16, 128), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens.clone()}


def one(name: str, layout: str, precision: str, mode: str, accumulate: int) -> tuple[float, float, str]:
    """On a rank: planned and measured bytes, and where the peak is."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    # PyTorch's kernels of batch normalization on CPUs take no statistics in fp32 beside weights in 16 bits.
    policy = Precision(compute="bf16", buffers="compute") if (name, precision) == ("resnet", "bf16") else precision
    found = compare(
        partial(build, name), batch(name), layout=layout, precision=policy, mode=mode, compute=_loss,
        accumulate=accumulate,
    )  # fmt: skip
    return found.planned, found.measured, found.plan.top.where


def _loss(model: nn.Module, given: Any) -> Tensor:
    return loss_of(model, given)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default=",".join(["gpt", *ZOO]))
    parser.add_argument("--layouts", default=",".join(PRESETS))
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--modes", default="keep,recompute")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    given = parser.parse_args()
    lists = (given.names, given.layouts, given.precisions, given.modes)
    errors: list[float] = []
    print(f"{'model':<12}{'layout':<10}{'precision':<11}{'activations':<12}{'planned':>12}{'measured':>12}{'error':>9}")
    with Ranks(given.world) as ranks:
        for case in itertools.product(*(each.split(",") for each in lists)):
            try:
                found = ranks.run(one, *case, given.accumulate, world_size=given.world)
            except Exception as error:
                print(f"{'  '.join(case)}  failed: {str(error).strip().splitlines()[0]}", flush=True)
                continue
            planned, measured, where = max(found, key=lambda each: abs(each[0] / each[1] - 1))
            errors.append(100 * (planned / measured - 1))
            name, layout, precision, mode = case
            print(
                f"{name:<12}{layout:<10}{precision:<11}{mode:<12}{planned:>12,.0f}{measured:>12,.0f}"
                f"{errors[-1]:>+8.2f} %  {where}", flush=True,
            )  # fmt: skip
    if errors:
        sizes = sorted(map(abs, errors))
        print(
            f"{len(errors)} peaks: median {median(sizes):.2f} %, worst {sizes[-1]:.2f} %, lowest {min(errors):+.2f} %"
        )


if __name__ == "__main__":
    main()
