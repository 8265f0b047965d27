"""Architectures of the transformers library, small and with random weights, train as in plain PyTorch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks, same_training
from tests.support.options import grouped

pytestmark = pytest.mark.product

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VOCAB = 97


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=64, **SIZES))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes, **none))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, **SIZES, **NO_DROPOUT))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=7, **SIZES, **NO_DROPOUT))


class Seq2Seq(nn.Module):
    """Decoder inputs come from the labels, so both are the model's."""

    def __init__(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        config = T5Config(vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
        self.inner = T5ForConditionalGeneration(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, labels=labels).loss


def token_loss(output: Any, batch: tuple[Any, ...]) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), batch[-1].flatten())


def class_loss(output: Any, batch: tuple[Any, ...]) -> Tensor:
    return F.cross_entropy(output.logits, batch[-1])


def batches(build: Any) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    if build is vit:
        return [(torch.randn(24, 3, 16, 16, generator=g), torch.randint(7, (24,), generator=g)) for _ in range(5)]
    return [tuple(torch.randint(1, VOCAB, (24, 12), generator=g) for _ in range(2)) for _ in range(5)]  # type: ignore[misc]


def loss_of(build: Any) -> Any:
    return {vit: class_loss, Seq2Seq: None}.get(build, token_loss)


def check(ranks: Ranks, build: Any, layout: str, world: int, steps: int, **options: Any) -> None:
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world % 2 == 0 else None
    same_training(
        build,
        batches(build),
        **grouped(layout=layout, clip_norm=1.0, mesh=mesh, **options),
        world_size=world,
        optimizer=ADAMW,
        steps=steps,
        ranks=ranks,
        loss=loss_of(build),
        tol=1e-6,
    )


MODELS = [llama, gpt2, bert, vit, Seq2Seq]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", list(sf.PRESETS))
@pytest.mark.parametrize("build", MODELS)
def test_a_transformers_model_trains_as_in_plain_pytorch(ranks: Ranks, build: Any, layout: str) -> None:
    check(ranks, build, layout, 4 if layout in ("hsdp", "hpz") else 2, 6, accumulate=2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("build", "layout", "world"),  # each two values meet
    [
        (build, layout, 1 + (i + j) % 4)
        for i, build in enumerate(MODELS)
        for j, layout in enumerate(sf.PRESETS)
    ],
)  # fmt: skip
def test_a_transformers_model_trains_for_30_steps_at_every_world_size(
    ranks: Ranks, build: Any, layout: str, world: int
) -> None:
    check(ranks, build, layout, world, 30, accumulate=1 + MODELS.index(build) % 2)


def _from_meta(layout: str) -> tuple[list[str], float]:
    with sf.meta_init():
        model = llama()
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout)
    losses = []
    for tokens, labels in batches(llama):
        losses.append(token_loss(engine(tokens), (tokens, labels)))
        engine.backward(losses[-1])
        engine.step()
    names = [unit.name for unit in engine.units]
    engine.close()
    return names, losses[0].item()


@pytest.mark.soak
def test_a_transformers_model_is_cut_at_its_layers_and_built_from_meta(ranks: Ranks) -> None:
    answers = ranks.run(_from_meta, "zero3", world_size=2) + ranks.run(_from_meta, "ddp", world_size=2)
    for names, loss in answers:
        assert [name for name in names if "layers" in name] == [f"model.layers.{i}" for i in range(3)]
        assert loss == pytest.approx(answers[0][1], rel=1e-6)
        assert 4.3 < loss < 4.9  # about ln(97): the weights are as from_config would draw them


def _from_pretrained(path: str) -> tuple[float, int]:
    import transformers

    if dist.get_rank() == 0:
        llama().save_pretrained(path)
    dist.barrier()
    stored = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    with sf.meta_init():
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
    hollow = sum(p.is_meta for p in model.parameters())
    engine = sf.Engine(model, optimizer=ADAMW, layout="zero3")
    worst = max(float((value - stored[name]).abs().max()) for name, value in engine.state_dict().items())
    engine.close()
    return worst, hollow


def test_from_pretrained_under_meta_init_keeps_the_stored_values(ranks: Ranks, tmp_path: Path) -> None:
    """No parameter is left without the values that were loaded, and none gets random ones in their place."""
    assert ranks.run(_from_pretrained, str(tmp_path), world_size=2) == [(0.0, 0)] * 2
