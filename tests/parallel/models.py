"""Small models that are cut along an axis of tensor, in fp64, and what plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardfold as sf
from shardfold.plan.placement import Box, Slot
from shardfold.tools.recipes.gpt import GPT, GPTConfig

__all__ = ["ADAM", "MODELS", "STEPS", "batches", "loss_of", "loss_on", "make", "part", "plain", "widen"]

# With Adam's usual eps of 1e-8, rounding errors in gradients of nearly 0 would come to 1e6 times as much in weights.
ADAM = partial(torch.optim.AdamW, lr=0.02, betas=(0.5, 0.9), eps=1e-3)
STEPS, ROWS, TIME, VOCAB = 5, 4, 6, 23


def _gpt(heads: int, tied: bool = False) -> nn.Module:
    config = GPTConfig(
        layers=2, d_model=4 * heads, heads=heads, d_ff=6 * heads, context=2 * TIME, vocab=VOCAB, tied=tied
    )
    return GPT(config)


def _llama(heads: int, kv: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4 * heads, intermediate_size=6 * heads, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv or heads // 2, vocab_size=VOCAB, max_position_embeddings=16, attention_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _qwen3(heads: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=4 * heads, intermediate_size=6 * heads, num_hidden_layers=2, num_attention_heads=heads, head_dim=4,
        num_key_value_heads=heads // 2, vocab_size=VOCAB, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def _gpt2(heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=4 * heads, n_layer=2, n_head=heads, vocab_size=VOCAB, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _bert(heads: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=4 * heads, intermediate_size=6 * heads, num_hidden_layers=2, num_attention_heads=heads,
        vocab_size=VOCAB, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _gemma2(heads: int) -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=4 * heads, intermediate_size=6 * heads, num_hidden_layers=2, num_attention_heads=heads, head_dim=4,
        num_key_value_heads=heads // 2, vocab_size=VOCAB, max_position_embeddings=16, sliding_window=3,
        attn_logit_softcapping=1.0, final_logit_softcapping=2.0, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def _t5(heads: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=4 * heads, d_kv=4, d_ff=6 * heads, num_layers=2, num_heads=heads, vocab_size=VOCAB, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _vit(heads: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=4 * heads, intermediate_size=6 * heads, num_hidden_layers=2, num_attention_heads=heads,
        image_size=8, patch_size=4, num_labels=VOCAB, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


class PlainExperts(nn.Module):
    """A layer of experts, each of which is a module, where each token goes to the best two."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {
                    "w1": nn.Linear(width, hidden, bias=False),
                    "w3": nn.Linear(width, hidden, bias=False),
                    "w2": nn.Linear(hidden, width, bias=False),
                }
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, at = (chosen == number).nonzero(as_tuple=True)
            part: Any = expert
            hidden = nn.functional.silu(part["w1"](flat[rows])) * part["w3"](flat[rows])
            out = out.index_add(0, rows, part["w2"](hidden) * weights[rows, at, None])
        return out.view_as(x)


def _mixtral(heads: int, plain: bool = False) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=4 * heads, intermediate_size=6 * heads, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=VOCAB, max_position_embeddings=16, num_local_experts=4,
        experts_implementation="eager", use_cache=False,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config)
    for layer in model.model.layers if plain else ():
        layer.mlp = PlainExperts(4 * heads, 6 * heads, 4)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": _gpt,
    "gpt-tied": partial(_gpt, tied=True),
    "llama": _llama,
    "llama-1kv": partial(_llama, kv=1),
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "bert": _bert,
    "gemma2": _gemma2,
    "t5": _t5,
    "vit": _vit,
    "mixtral": _mixtral,
    "mixtral-plain": partial(_mixtral, plain=True),
}


def make(name: str, heads: int = 4) -> nn.Module:
    torch.manual_seed(0)
    model = widen(MODELS[name](heads).double())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # no parameter is 0 or 1, so that none of them can be lost
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.05)
    return model.train()


def batches(steps: int = STEPS, time: int = TIME) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(VOCAB, (2, ROWS, time), generator=generator)) for _ in range(steps)]  # type: ignore[misc]


class Wide(TorchFunctionMode):
    """Leaves fp64 as it is where models of transformers compute in fp32, as in norms and in routers: two numbers that
    differ in the last digit of fp64 may be two numbers of fp32, which differ by 1e-7."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float or (func is Tensor.to and args[1:] == (torch.float32,)):
                return first
            if kwargs.get("dtype") in (torch.float32, torch.float):
                kwargs.pop("dtype")
        return func(*args, **kwargs)


@cache
def _wide(kind: Any) -> type:
    @wraps(kind.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with Wide():
            return kind.forward(*args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def widen(model: nn.Module) -> nn.Module:
    """Its norms, routers and attention of transformers compute in fp64."""
    eager = getattr(getattr(model, "config", None), "_attn_implementation", "") == "eager"
    for module in model.modules():
        kind = type(module)
        narrow = any(word in kind.__name__ for word in ("Norm", "Router", *(["Attention"] if eager else [])))
        if narrow and kind.__module__.startswith("transformers."):
            module.__class__ = _wide(kind)
    return model


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of a model, or of an engine of one; in fp64, which the losses of transformers are not."""
    kind = type(getattr(model, "module", model)).__name__
    if kind == "GPT":
        return model(tokens, targets)
    if kind == "ViTForImageClassification":
        pixels = torch.sin(torch.arange(8 * 8 * 3) * (1.0 + tokens.double().mean(1, keepdim=True)))
        return nn.functional.cross_entropy(model(pixel_values=pixels.view(-1, 3, 8, 8)).logits, targets[:, 0])
    if kind == "T5ForConditionalGeneration":
        logits = model(input_ids=tokens, decoder_input_ids=targets.roll(1, 1)).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_on(engine: sf.Engine, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of this rank's samples, and tokens where there is an axis of sequence."""
    tokens, targets = (each.chunk(engine.data_ranks)[engine.data_rank] for each in (tokens, targets))
    if engine.sequence is None:
        return loss_of(engine, tokens, targets)
    if isinstance(engine.module, GPT):
        return engine(**sf.sequence_shard({"tokens": tokens, "targets": targets}))
    given = sf.sequence_shard({"input_ids": tokens, "shift_labels": targets})
    logits = engine(input_ids=given["input_ids"], position_ids=given["position_ids"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), given["shift_labels"].flatten())


def plain(
    name: str, heads: int, steps: int = STEPS, time: int = TIME
) -> tuple[list[float], list[float], list[dict[str, Tensor]], Any]:
    """Losses, norms before clipping, gradients of each step and the weights, on one process."""
    model, losses, norms, grads = make(name, heads), [], [], []
    optimizer = ADAM(model.parameters())
    for batch in batches(steps, time):
        loss = loss_of(model, *batch)
        loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, grads, model.state_dict()


def part(engine: sf.Engine, name: str, whole: Tensor) -> Tensor:
    """Of a parameter's whole what this rank has."""
    slots: dict[str, Slot] = {s.name: s for unit in engine.units for seg in unit.spec.segments for s in seg.slots}
    slot = slots.get(name)
    if slot is None:
        same = {id(p): n for n, p in engine.module.named_parameters()}
        slot = slots.get(same.get(id(engine.module.get_parameter(name)), ""))
    box: Box | None = None if slot is None else slot.box
    return (
        whole if slot is None or box is None else whole.reshape(box.view(whole.shape))[box.slices].reshape(slot.shape)
    )
