"""A packed step is the step of its samples one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfold as sf
from shardfold.testing import Ranks
from shardfold.tools.tune.data.batches import Batch, collate
from shardfold.tools.tune.data.packed_attention import attend_samples, pack_attention, why_not_packed
from shardfold.tools.tune.data.packing import best_fit
from shardfold.tools.tune.data.rows import Tokens

transformers = pytest.importorskip("transformers")

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": {**COMMON, "sliding_window": 5},
    "qwen2": COMMON,
    "qwen3": {**COMMON, "head_dim": 8},
    "gemma": {**COMMON, "head_dim": 8},
    "gemma2": {**COMMON, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gpt2": GPT2,
    "gpt_neox": COMMON,
    "phi": COMMON,
    "olmo": COMMON,
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mixtral": {**COMMON, "num_local_experts": 4},
    "gpt_oss": {
        **COMMON, "num_local_experts": 4, "head_dim": 8, "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
FAST = ("llama", "gemma2", "gpt2", "opt")
EPS = 1e-6


def model_of(kind: str) -> Any:
    """A random model with weights large enough that attention matters, in fp32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **MODELS.get(kind, COMMON))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model.eval()


def samples(seed: int = 0, number: int = 9) -> list[Tokens]:
    """Of 1 to 12 tokens, of which some are trained."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        length = int(draw.integers(1, 13))
        made.append(Tokens(draw.integers(3, VOCAB, length).astype(np.int32), draw.random(length) < 0.6))
    return made


def packed(rows: list[list[Tokens]]) -> Batch:
    return collate([[(0, [each]) for each in row] for row in rows], padded=False)


def loss_of(model: Any, batch: Batch, targets: int) -> Tensor:
    logits = model(**batch.inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum") / targets


def one_by_one(model: Any, rows: list[Tokens]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the mean over all targets, each sample in a forward of its own, without positions."""
    model.zero_grad(set_to_none=True)
    targets, total = sum(each.targets for each in rows), 0.0
    for each in rows:
        ids = torch.from_numpy(each.ids.astype(np.int64))[None]
        labels = torch.where(torch.from_numpy(np.array(each.trained)), ids[0], -100)[1:]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, labels, reduction="sum") / targets
        loss.backward()
        total += loss.item()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return total, grads


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = EPS) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(each.abs().max()) for each in wanted.values())
    for name, each in wanted.items():
        apart = float((found[name] - each).abs().max())
        assert apart <= tolerance * max(largest, 1.0), f"{name}: {apart} of {largest}"


def check_model(kind: str) -> None:
    model, rows = model_of(kind), samples()
    loss, grads = one_by_one(model, rows)
    undo = pack_attention(model)
    assert undo is not None
    for seed in range(3):
        order = list(rows)
        random.Random(seed).shuffle(order)
        batch = packed([order[:4], order[4:]])
        model.zero_grad(set_to_none=True)
        found = loss_of(model, batch, sum(each.targets for each in rows))
        found.backward()
        assert found.item() == pytest.approx(loss, rel=EPS)
        assert_same({name: each.grad for name, each in model.named_parameters() if each.grad is not None}, grads)
        with torch.no_grad():  # evaluation
            assert loss_of(model, batch, batch.trained).item() == pytest.approx(loss, rel=EPS)
    undo()
    assert one_by_one(model, rows)[0] == pytest.approx(loss, rel=EPS)


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.soak) for kind in MODELS]
)
def test_packed_is_one_by_one(kind: str) -> None:
    """Loss and every gradient, in any order of samples; also with windows, soft caps, sinks and learned positions."""
    check_model(kind)


def test_padded_batches_and_generation_go_on_as_before() -> None:
    model, rows = model_of("llama"), samples()
    batch = collate([[(0, [each])] for each in rows], padded=True)
    ids = torch.arange(3, 13)[None]
    plain = loss_of(model, batch, batch.trained), model.generate(ids, max_new_tokens=6, do_sample=False)
    undo = pack_attention(model)
    assert undo is not None
    again = loss_of(model, batch, batch.trained), model.generate(ids, max_new_tokens=6, do_sample=False)
    assert again[0].item() == pytest.approx(plain[0].item(), rel=EPS)
    assert again[1].tolist() == plain[1].tolist()
    assert plain[0].item() == pytest.approx(one_by_one(model, rows)[0], rel=EPS)


@pytest.mark.parametrize("kind", ["llama", "falcon", "bloom", pytest.param("mamba", marks=pytest.mark.soak)])
def test_models_that_cannot_be_packed_are_found_out(kind: str) -> None:
    """What they compute, not their names, decides; a model that can is not refused, one whose attention is plain is."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    MODELS.setdefault("falcon", {**sizes, "alibi": False})
    MODELS.setdefault("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4})
    MODELS.setdefault("mamba", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4})
    model = model_of(kind)
    undo = pack_attention(model)
    why = why_not_packed(lambda **batch: model(**batch, use_cache=False).logits, VOCAB)
    assert (why is None) == (kind == "llama")
    if why is not None:
        assert "position_ids" in why or "than alone" in why
    if undo is not None:
        undo()


def engine_run(kind: str, layout: str, mesh: dict[str, int] | None, rows: list[list[Tokens]]) -> Any:
    """Loss and gradients of one packed window, shared out over the ranks that read other data."""
    model = model_of(kind)
    assert pack_attention(model) is not None
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    parallel = sf.Parallel(mesh=mesh, tensor="auto" if mesh and "tensor" in mesh else None)
    engine = sf.Engine(model, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), layout=layout, parallel=parallel)
    batch = packed(rows[engine.data_rank :: engine.data_ranks])
    inputs, labels = dict(batch.inputs), batch.labels
    if engine.sequence is not None:
        inputs = sf.sequence_shard({**inputs, "shift_labels": labels}, engine=engine)
        labels = inputs.pop("shift_labels")
    count = int((labels != -100).sum())
    logits = engine(**inputs, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / max(count, 1)
    engine.backward(loss, weight=count)
    engine.step()  # what weighs the loss is in the step, not in gradients in front of it
    after = engine.state_dict()
    whole = all(after[name].shape == each.shape for name, each in before.items())
    found = {name: each - after[name] for name, each in before.items()} if whole else {}
    mean = engine.mean(loss.item(), weight=count)
    with torch.no_grad():
        logits = engine(**inputs, use_cache=False).logits
    again = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / max(count, 1)
    later = engine.mean(again.item(), weight=count)
    engine.close()
    return mean, later, found


COVER = [
    ("llama", "zero3", None),
    ("qwen3", "zero2", {"sequence": 2}),
    ("llama", "ddp", {"tensor": 2}),
]
ALL = [(kind, layout, None) for kind in MODELS for layout in ("ddp", "zero1", "zero2", "zero3")] + [
    (kind, layout, mesh)
    for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma")
    for layout in ("ddp", "zero3")
    for mesh in ({"sequence": 2}, {"tensor": 2})
]


@pytest.mark.parametrize(
    ("kind", "layout", "mesh"),
    [*COVER, *(pytest.param(*each, marks=pytest.mark.soak) for each in ALL if each not in COVER)],
)
def test_layouts_and_axes_keep_it(ranks: Ranks, kind: str, layout: str, mesh: dict[str, int] | None) -> None:
    """On two ranks, with parameters that are split, layers that are cut or sequences that are cut."""
    rows = samples()
    bins = [rows[:4], rows[4:7], rows[7:]]
    model = model_of(kind)
    loss, grads = one_by_one(model, rows)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= grads[name]
    after, _ = one_by_one(model, rows)
    for mean, later, found in ranks.run(engine_run, kind, layout, mesh, bins, world_size=2):
        assert mean == pytest.approx(loss, rel=EPS)
        assert later == pytest.approx(after, rel=1e-5)  # the step was the same too
        assert bool(found) != bool(mesh and "tensor" in mesh)  # there ranks hold parts of layers
        if not found:
            continue
        assert_same({name: found[name] for name in grads}, grads, 2 * EPS)  # and the rounding of an update


def test_bins_are_filled() -> None:
    """Nothing is lost or comes twice, no bin is over-full, and mixed lengths leave nearly nothing free."""
    draw = random.Random(0)
    for capacity, most in ((512, 512), (64, 80), (7, 9)):
        lengths = [draw.randint(1, most) for _ in range(2000)]
        bins = best_fit(lengths, capacity)
        assert sorted(k for each in bins for k in each) == list(range(2000))
        assert all(sum(lengths[k] for k in each) <= capacity or len(each) == 1 for each in bins)
        long = sum(length > capacity for length in lengths)
        fewest = long + -(-sum(length for length in lengths if length <= capacity) // capacity)
        assert len(bins) <= 1.02 * fewest + 1


def test_gradients_of_samples_are_put_together_once() -> None:
    """A slice's gradient is as long as all samples: a row of many would take the square of their number."""
    query, key, value = (torch.randn(2, 2, 12, 4, requires_grad=True) for _ in range(3))
    found = attend_samples(query, key, value, [(0, 3, 7, 12), (0, 12)], F.scaled_dot_product_attention)
    names: set[str] = set()
    nodes = [found.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None:
            names.add(node.name())
            nodes += [each for each, _ in node.next_functions]
    assert not any("Slice" in name or "Select" in name for name in names), names
