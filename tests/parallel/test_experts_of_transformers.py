"""Experts of transformers' models are shared out where they stand, and train like the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.testing import Ranks
from tests.parallel import models
from tests.support.options import grouped

ADAM = partial(torch.optim.AdamW, lr=0.01, betas=(0.5, 0.9))
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "experts_implementation": "eager",
    "attn_implementation": "eager", "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 12,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "head_dim": 4,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                 "shared_expert_intermediate_size": 12},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
    "DeepseekV2": {**LATENT, "topk_method": "greedy"},
    "DeepseekV3": LATENT,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_scaling": None,
               "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
}  # fmt: skip


def model_of(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 40, (4, 8), generator=generator) for _ in range(2)]


def loss_of(logits: Tensor, batch: Tensor) -> Tensor:
    """In fp64; that of transformers is in fp32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def trains_like_the_whole(kinds: list[str], layout: str, path: str) -> None:
    for kind in kinds:
        close = 1e-5 if kind.startswith("Deepseek") else 1e-12  # whose routers multiply in fp32
        engine = sf.Engine(
            model_of(kind),
            optimizer=ADAM,
            layout=layout,
            parallel={"expert": 2},
            clip_norm=0.3,
            runtime=sf.Runtime(debug=True),
        )
        place, norms, losses = engine.mesh.coords["expert"], [], []
        for batch in tokens():
            part = batch.chunk(engine.data_ranks)[engine.data_rank]
            loss = loss_of(engine(input_ids=part).logits, part)
            engine.backward(loss)
            norms.append(engine.step().grad_norm)
            losses.append(engine.mean(loss.item()))
        state = engine.state_dict()
        engine.save(f"{path}/{kind}", wait=True, latest=False)
        engine.close()
        model = model_of(kind)
        optimizer = ADAM(model.parameters())
        for batch, norm, loss in zip(tokens(), norms, losses, strict=True):
            expected = loss_of(model(input_ids=batch).logits, batch)
            expected.backward()
            assert loss == pytest.approx(expected.item(), rel=close), kind
            expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()
            assert norm == pytest.approx(expected_norm, rel=close), kind
            optimizer.step()
            optimizer.zero_grad()
        whole = model.state_dict()
        assert state.keys() == whole.keys()
        for name, value in state.items():
            mine = whole[name].chunk(2)[place] if ".experts." in name and whole[name].dim() > 1 else whole[name]
            most = close * (1e3 if ".gate." in name and close > 1e-12 else 10)  # Adam makes steps of small gradients
            assert torch.allclose(value, mine, rtol=most, atol=most), (kind, name)


def loads_on_one(kinds: list[str], path: str) -> None:
    for kind in kinds:
        engine = sf.Engine(model_of(kind), optimizer=ADAM, layout="ddp")
        engine.load(f"{path}/{kind}")
        assert engine.steps == 2
        engine.close()


def _through_stages() -> None:
    for axis, options in (("expert", {}), ("tensor", {"tensor": "auto"})):
        whole = models.make("mixtral")
        engine = sf.Engine(
            models.make("mixtral"),
            optimizer=models.ADAM,
            **grouped(layout="zero1", mesh={"pipeline": 2, axis: 2}, clip_norm=0.1, **options),
            accumulate=2,
        )
        optimizer = models.ADAM(whole.parameters())
        for batch in models.batches(2):
            own = [each.chunk(engine.data_ranks)[engine.data_rank] for each in batch]
            parts = [tuple(each.chunk(2)[micro] for each in own) for micro in range(2)]
            loss = engine.train_batch(parts, lambda model, part: models.loss_of(model, *part)).item()
            norm = engine.step().grad_norm
            expected = models.loss_of(whole, *batch)
            expected.backward()
            assert engine.mean(loss) == pytest.approx(expected.item(), rel=1e-12)
            assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item(), rel=1e-11)
            optimizer.step()
            optimizer.zero_grad()
        engine.close()


def test_they_go_through_stages(ranks: Ranks) -> None:
    """Beside an axis of experts and one of tensor: what stages send is found without values, though the forward of
    these experts asks which of them have tokens; losses and norms are those of the whole model."""
    ranks.run(_through_stages, world_size=4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kinds", [["Mixtral", "GptOss"], ["DeepseekV3"]])
def test_they_train_like_the_whole_model(ranks: Ranks, tmp_path: Path, kinds: list[str]) -> None:
    """Losses, norms and weights in fp64; names of the state dict are the model's own, and one rank loads it whole."""
    ranks.run(trains_like_the_whole, kinds, "zero3", str(tmp_path), world_size=2)
    ranks.run(loads_on_one, kinds, str(tmp_path), world_size=1)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_of_them_under_each_layout(ranks: Ranks, tmp_path: Path, kind: str, layout: str) -> None:
    """The same, by two ranks of data."""
    ranks.run(trains_like_the_whole, [kind], layout, str(tmp_path), world_size=4)
