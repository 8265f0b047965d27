"""Ulysses in DeepSpeed's words: models of transformers, loaders that cut sequences, an attention of one's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.compat import deepspeed
from shardfold.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF as Attention
from shardfold.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter as Adapter
from shardfold.compat.deepspeed.sequence.layer import DistributedAttention
from shardfold.compat.deepspeed.utils import groups
from shardfold.errors import ConfigError, UsageError
from shardfold.testing import Ranks
from tests.support.clients import CONTEXT, FP32_TOL, VOCAB, llama, needs, on_ranks, sequences

STEPS, TOLERANCE = 4, 1e-12
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {"stage": stage},
        "steps_per_print": None, **SGD, **more,
    }  # fmt: skip


def build(attention: str = "sdpa", gemma: bool = False) -> Any:
    """Of 4 heads of queries and 1 of keys, which ranks repeat; a Gemma 2 caps scores, and has a window in one of two
    layers."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

    torch.manual_seed(0)
    if gemma:
        config = Gemma2Config(
            hidden_size=16, intermediate_size=40, num_hidden_layers=2, vocab_size=VOCAB, num_attention_heads=4,
            num_key_value_heads=1, head_dim=4, max_position_embeddings=64, sliding_window=4,
            attn_logit_softcapping=1.0, attn_implementation="eager", pad_token_id=None,
        )  # fmt: skip
        model = Gemma2ForCausalLM(config)
        model.config._attn_implementation = attention  # not in the config, which refuses what cannot cap
        return model
    its = llama()
    its.num_attention_heads, its.head_dim, its._attn_implementation = 4, 4, attention
    return LlamaForCausalLM(its)


def batches(packed: bool) -> list[dict[str, Tensor]]:
    """One row each, with some labels that do not count; packed, the row is two documents."""
    rows: list[dict[str, Tensor]] = []
    for row in sequences(STEPS):
        labels = row.clone()
        labels[:5] = -100
        whole = torch.arange(CONTEXT)
        positions = torch.where(whole < 7, whole, whole - 7) if packed else whole
        rows.append({"input_ids": row[None], "labels": labels[None], "position_ids": positions[None]})
    return rows


def plain(packed: bool, gemma: bool = False) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of one process with whole sequences."""
    model = build("eager", gemma)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    norms: list[float] = []
    for batch in batches(packed):
        loss = model(**batch, use_cache=False).loss  # with a cache, transformers takes documents for one
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


def loop(
    stage: int, packed: bool, attention: str, gemma: bool = False
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The training loop of DeepSpeed's tutorial; each rank reads half of the batches, and works on a half of each."""
    model: Any = build(attention, gemma)
    mpu = Attention.register_with_transformers(
        model_name_or_path=model, core_attn_implementation=attention, sequence_parallel_size=2, micro_batch_size=1,
        seq_length=CONTEXT, seq_length_is_variable=not packed,
    )  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(
        config=config(stage, sequence_parallel_size=2), model=model, model_parameters=model.parameters(), mpu=mpu
    )
    group = groups._get_sequence_parallel_group()
    ranks, rank = groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()
    loader = Adapter(batches(packed)[rank::ranks], sp_rank=rank, sp_group=group, sp_world_size=ranks, device="cpu")
    assert len(loader) == STEPS and engine.train_batch_size() == 1 == engine.dp_world_size
    assert (engine.sequence_parallel_size, engine.seq_dp_world_size, engine.seq_parallel_group) == (2, 2, group)
    losses: list[float] = []
    norms: list[float] = []
    for batch in loader:
        assert batch["input_ids"].shape == (1, CONTEXT // 2) and "labels" not in batch
        shifted = batch["shift_labels"]
        logits = engine(**batch).logits
        loss = engine.module.loss_function(
            logits=logits, labels=None, shift_labels=shifted, vocab_size=logits.shape[-1]
        )
        of_ranks = torch.distributed.nn.functional.all_gather(loss, group=group)
        good = torch.distributed.nn.functional.all_gather((shifted != -100).sum(), group=group)
        loss = sum(a * b for a, b in zip(of_ranks, good, strict=True)) / sum(good)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    assert next(iter(loader))["input_ids"].shape == (1, CONTEXT // 2)  # begins anew
    for _ in range(STEPS - 1):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)
    sent = engine._core.traffic()
    state = engine.module_state_dict()
    state = {name: value.clone() for name, value in state.items()}
    engine.destroy()
    assert "ALL_TO_ALL" in str(sent), sent
    return losses, norms, state


def _beside_tensor(stage: int) -> tuple[Any, ...]:
    """The loop on ranks that share layers as well; losses, norms and weights, and what is said of other groups."""
    deepspeed.init_distributed()
    model = build().double()
    mpu: Any = Attention.register_with_transformers(model, "sdpa", 2, 1)
    before = mpu.get_sequence_parallel_group()
    engine = deepspeed.initialize(
        config=config(stage, tensor_parallel={"autotp_size": 2}, gradient_clipping=0.1), model=model, mpu=mpu
    )[0]
    group, rank = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_rank()
    assert (engine.dp_world_size, engine.sequence_parallel_size, engine.mp_world_size) == (
        dist.get_world_size() // 4,
        2,
        2,
    )
    of_ranks = dist.get_process_group_ranks(group)
    assert of_ranks[1] - of_ranks[0] == 2 and mpu.get_sequence_parallel_rank() == rank == dist.get_rank() // 2 % 2
    with pytest.raises(ConfigError) as caught:
        next(iter(Adapter(batches(True), sp_rank=rank, sp_group=before, sp_world_size=2, device="cpu")))
    rows = batches(True)[engine.get_data_parallel_rank() :: engine.dp_world_size]
    losses: list[float] = []
    norms: list[float] = []
    for batch in Adapter(rows[rank::2], sp_rank=rank, sp_group=group, sp_world_size=2, device="cpu"):
        shifted = batch["shift_labels"]
        logits = engine(**batch, use_cache=False).logits
        summed = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
        good = (shifted != -100).sum()
        dist.all_reduce(good, group=group)
        # all_gather, as in the tutorial, has no backward over Gloo in groups without rank 0.
        loss = torch.distributed.nn.functional.all_reduce(summed / good, group=group)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    shapes = tuple(engine.module.model.layers[0].self_attn.q_proj.weight.shape)
    sent = {row.op for row in engine._core.traffic().rows if row.purpose == "layers"}
    engine.destroy()
    return losses, norms, state, shapes, sent, str(caught.value)


@needs("transformers")
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_beside_ranks_that_share_layers(stage: int) -> None:
    """Two ranks of tensor and two of sequence: losses, norms and weights of one process with whole sequences, packed
    ones; a group from before the engine was made is refused."""
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    norms: list[float] = []
    for batch in batches(True):
        logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])  # the model's own is in fp32
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    for its_losses, its_norms, state, shape, sent, said in on_ranks(_beside_tensor, stage, ranks=4):
        assert its_losses == pytest.approx(losses, rel=TOLERANCE)
        assert its_norms == pytest.approx(norms, rel=TOLERANCE)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=TOLERANCE, atol=TOLERANCE)
        assert shape == (8, model.config.hidden_size) and {"ALL_TO_ALL", "ALL_REDUCE"} <= sent
        assert "behind deepspeed.initialize()" in said


def of_the_tutorial() -> dict[str, Any]:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    deepspeed.init_distributed()
    AttentionInterface.register("mine", sdpa_attention_forward)
    told: dict[str, Any] = {
        "sdpa at 1": loop(1, False, "sdpa"), "sdpa at 3": loop(3, False, "sdpa"), "packed": loop(2, True, "sdpa"),
        "mine": loop(3, False, "mine"), "gemma": loop(2, False, "sdpa", True),
    }  # fmt: skip
    told["refused"], told["alone"] = refused(), in_evaluation()
    return told


def in_evaluation() -> bool:
    """With ``disable_in_eval`` a model that no engine has reads whole sequences."""
    batch = batches(False)[0]
    expected = loss_of_eval(build("eager"), batch)
    model = build()
    Attention.register_with_transformers(model, "sdpa", 2, 1, disable_in_eval=True)
    return abs(loss_of_eval(model, batch) - expected) < FP32_TOL


def loss_of_eval(model: Any, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return model.eval()(**batch).loss.item()


def refused() -> list[str]:
    """What is said, in the order of `SAID`; every rank is told."""
    model, group = build(), groups._get_sequence_parallel_group()
    rank, batch = dist.get_rank(), batches(False)[0]

    def read(given: dict[str, Any] | None) -> Any:
        rows = [given] if given is not None else []
        return next(iter(Adapter(rows, sp_rank=rank, sp_group=group, sp_world_size=2, device="cpu")))

    def register(of: Any, name: str, **more: Any) -> Any:
        return Attention.register_with_transformers(of, name, more.pop("size", 2), 1, **more)

    odd, padded = batch["input_ids"][:, 1:], torch.tensor([[0] * 3 + [1] * (CONTEXT - 3)])
    calls: list[Callable[[], Any]] = [
        lambda: register(build("eager"), "sdpa"), lambda: register(build("eager"), "eager"),
        lambda: register(model, "sdpa", seq_length_is_variable=False),
        lambda: register(model, "sdpa", size=3),
        lambda: read({"input_ids": odd if rank == 0 else batch["input_ids"]}),
        lambda: read({**batch, "attention_mask": padded}),
        lambda: read({**batch, "more": torch.ones(3)}),
        lambda: read(batch if rank == 0 else None),
        lambda: model(**{name: value[:, : CONTEXT // 2] for name, value in batch.items()}),
        lambda: loop(2, False, "mine", True),
    ]  # fmt: skip
    said: list[str] = []
    for call in calls:
        with pytest.raises((ConfigError, UsageError)) as caught:
            call()
        said.append(str(caught.value))
    return said


SAID = [
    "the model's config has attn_implementation='eager'", "'eager' attention takes a mask",
    "give seq_length_is_variable=True", "it is a number of ranks, from 2 on, that divides the 2",
    "sequences of 11 tokens are not divisible by the 2 ranks", "padding before tokens", "'more' has the shape (3,)",
    "different numbers of batches", "no engine has it that knows of them",
    "with core_attn_implementation='sdpa' and without disable_in_eval alone",
]  # fmt: skip


@pytest.mark.soak
@needs("transformers")
def test_the_loop_of_the_tutorial() -> None:
    """Losses, gradient norms and weights are those of one process with whole sequences: at stages 1 and 3, for packed
    documents, with an implementation of attention that is called, with capped scores and windows. What is refused is
    one sentence on every rank.
    """
    for told in on_ranks(of_the_tutorial):
        for case in ("sdpa at 1", "sdpa at 3", "packed", "mine", "gemma"):
            losses, norms, weights = plain(case == "packed", case == "gemma")
            its_losses, its_norms, its_weights = told[case]
            assert its_losses == pytest.approx(losses, abs=FP32_TOL), case
            assert its_norms == pytest.approx(norms, rel=FP32_TOL), case
            assert max(float((its_weights[name] - weights[name]).abs().max()) for name in weights) < FP32_TOL, case
        assert told["alone"]
        for text, word in zip(told["refused"], SAID, strict=True):
            assert word in text and not re.search(r"[.] [A-Z]", text), text


# -- an attention of one's own


class Local(nn.Module):
    """Causal attention of ``(tokens, batch, heads, dim)``, or with batches first."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, first: bool) -> Tensor:
        order = (0, 2, 1, 3) if first else (1, 2, 0, 3)
        q, k, v = (each.permute(order) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute((0, 2, 1, 3) if first else (2, 0, 1, 3))


class Block(nn.Module):
    def __init__(self, group: Any, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.qkv, self.out = first, nn.Linear(8, 16).double(), nn.Linear(8, 8).double()
        self.attend = DistributedAttention(Local(), group, 2, 1 if first else 0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 2)).split([4, 2, 2], dim=2)
        out = self.attend(q, k, v, 0 if self.first else 1, None, self.first)
        return self.out(out.flatten(2)).square().mean()


def tokens(step: int, of: int, first: bool) -> Tensor:
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + of))
    return x if first else x.transpose(0, 1).contiguous()


def _own(first: bool, stage: int, how: str) -> Any:
    deepspeed.init_distributed()
    ranks = dist.get_world_size()
    pairs = [dist.new_group([2 * n, 2 * n + 1]) for n in range(ranks // 2)]
    model = Block(pairs[dist.get_rank() // 2], first)
    said = {"sequence_parallel_size": 2, "data_parallel_size": ranks // 2} if how == "config" else {}
    engine = deepspeed.initialize(
        model=model, config=config(stage, **said), mesh_param=(ranks // 2, 2) if how == "mesh" else None
    )[0]
    norms: list[float] = []
    for step in range(STEPS):
        x = tokens(step, engine.get_data_parallel_rank(), first)
        part = x.chunk(2, dim=1 if first else 0)[groups._get_sequence_parallel_rank()]
        engine.backward(engine(part))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    mesh = None if engine.mesh_device is None else tuple(engine.mesh_device.shape)
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return norms, state, mesh, (engine.dp_world_size, engine.sequence_parallel_size)


@pytest.mark.parametrize(
    "first, stage, how, world",
    [(True, 3, "mesh", 2), (False, 2, "config", 2), pytest.param(True, 3, "config", 4, marks=pytest.mark.soak)],
)
def test_distributed_attention(ranks: Ranks, first: bool, stage: int, how: str, world: int) -> None:
    """Around an attention of a model's own, with tokens or batches first and fewer heads of keys than of queries:
    norms and weights of one process in fp64."""
    model = Block(None, first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms: list[float] = []
    for step in range(STEPS):
        for of in range(world // 2):
            (model(tokens(step, of, first)) / (world // 2)).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    for its_norms, state, mesh, sizes in ranks.run(_own, first, stage, how, world_size=world):
        assert its_norms == pytest.approx(norms, rel=TOLERANCE)
        assert max(float((state[name] - weights[name]).abs().max()) for name in weights) < TOLERANCE
        assert mesh == ((world // 2, 2) if how == "mesh" else None) and sizes == (world // 2, 2)
