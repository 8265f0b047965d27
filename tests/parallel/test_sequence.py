"""Models whose sequences are cut over ranks train as they do on one process with whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ModelError, ShardfoldError, UsageError
from shardfold.parallel.batch import read_batch
from shardfold.parallel.cut import CONTIGUOUS, ZIGZAG
from shardfold.testing import Ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.parallel.models import widen

# With Adam's usual eps of 1e-8, rounding errors in gradients of nearly 0 would come to 1e9 times as much in weights.
ADAM = partial(torch.optim.AdamW, lr=0.01, betas=(0.5, 0.9), eps=1e-3)
LIMIT = 0.3  # of norms, so that every step clips
TOKENS, ROWS, VOCAB = 25, 4, 32
DOCUMENTS = [0, 4, 5, 19, TOKENS]


def gpt(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=VOCAB, d_model=24, layers=2, heads=12, context=64, d_ff=32)).to(dtype)


def of_transformers(name: str) -> nn.Module:
    import transformers

    few: Any = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 12}
    wide: Any = {"intermediate_size": 32, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config: Any
    if name == "llama":
        config = transformers.LlamaConfig(**few, **wide, num_key_value_heads=2)
    elif name == "qwen3":
        config = transformers.Qwen3Config(**few, **wide, num_key_value_heads=4, head_dim=2)
    elif name == "mistral":  # of whose 25 tokens each sees the last 7
        config = transformers.MistralConfig(**few, **wide, num_key_value_heads=4, sliding_window=7)
    elif name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=12, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
    elif name == "gemma2":  # capped scores, in layers with a window and without
        config = transformers.Gemma2Config(
            **few, **wide, num_key_value_heads=4, head_dim=2, sliding_window=7, attn_logit_softcapping=1.0
        )  # fmt: skip
        return widen(transformers.Gemma2ForCausalLM(config).double())
    else:
        config = transformers.BertConfig(**few, **wide, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    kinds = {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "gpt2": "GPT2LMHeadModel",
    }
    model = getattr(transformers, kinds.get(name, "BertForMaskedLM"))(config).double()
    for path, norm in list(model.named_modules()):
        if type(norm).__name__.endswith("RMSNorm"):  # which computes in fp32, whatever it gets
            own = nn.RMSNorm(norm.weight.shape, eps=1e-6).double()
            own.load_state_dict(norm.state_dict())
            model.set_submodule(path, own)
    return model


def batches(name: str, steps: int = 5) -> list[dict[str, Tensor]]:
    """Labels that count are few, and others in each row."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=draw)
        labels = tokens.masked_fill(torch.rand(ROWS, TOKENS, generator=draw) < 0.3, -100)
        labels[:, 8 : 8 + 2 * len(found)] = -100
        if name == "gpt":
            found.append({"tokens": tokens, "targets": F.pad(labels[:, 1:], (0, 1), value=-100)})
        else:
            found.append({"input_ids": tokens, "labels": labels})
    return found


def mean_loss(name: str, model: Callable[..., Any], batch: dict[str, Tensor], *, shifted: bool) -> Tensor:
    """The mean over the labels that count, of logits in fp64 (models of transformers take theirs in fp32)."""
    if name == "gpt":
        return model(**batch)
    inputs = {key: value for key, value in batch.items() if "labels" not in key}
    logits = model(**inputs, use_cache=False).logits if name != "bert" else model(**inputs).logits
    labels = batch["shift_labels" if shifted and name != "bert" else "labels"]
    if not shifted and name != "bert":
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def documents_apart(name: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over whole rows of which each document goes forward by itself."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    if name != "gpt":  # labels look over the ends of documents
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        batch = {"input_ids": batch["input_ids"], "targets": labels}
    for a, b in pairwise(DOCUMENTS):
        part = {key: value[:, a:b] for key, value in batch.items()}
        logits = model(part["tokens"]) if name == "gpt" else model(part["input_ids"], use_cache=False).logits
        total = total + F.cross_entropy(logits.flatten(0, 1), part["targets"].flatten(), reduction="sum")
        count += int((part["targets"] != -100).sum())
    return total / count


def made(name: str) -> nn.Module:
    return gpt() if name == "gpt" else of_transformers(name)


def plain(name: str, packed: bool) -> tuple[list[float], list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses, norms before clipping, gradients and weights, of whole sequences on one process."""
    model, losses, norms, grads = made(name), [], [], []
    optimizer = ADAM(model.parameters())
    for batch in batches(name):
        loss = documents_apart(name, model, batch) if packed else mean_loss(name, model, batch, shifted=False)
        loss.backward()
        grads.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, grads, model.state_dict()


def trains_like_whole_sequences(
    name: str, attention: str, mesh: dict[str, int], layout: str = "zero3", packed: bool = False, accumulate: int = 1,
    activations: Any = None,
) -> dict[str, float]:  # fmt: skip
    engine = sf.Engine(
        made(name),
        optimizer=ADAM,
        layout=layout,
        parallel=sf.Parallel(mesh=mesh, attention=attention),
        clip_norm=LIMIT,
        accumulate=accumulate,
        activations=activations,
        runtime=sf.Runtime(debug=True),
    )
    assert engine.sequence is not None and engine.sequence.choice == attention
    losses, norms, grads = [], [], []
    for batch in batches(name):
        total = weights = 0.0
        for micro in range(accumulate):
            number = engine.data_rank * accumulate + micro
            part: dict[str, Any] = {k: v.chunk(engine.data_ranks * accumulate)[number] for k, v in batch.items()}
            if packed:
                part["cu_seqlens"] = DOCUMENTS
            mine = sf.sequence_shard(part, shift=name != "bert")
            loss = mean_loss(name, engine, mine, shifted=True)
            engine.backward(loss)
            valid = (mine[next(k for k in ("shift_labels", "targets", "labels") if k in mine)] != -100).sum().item()
            total += loss.item() * valid if valid else 0.0
            weights += valid
        losses.append(engine.mean(total / weights if weights else 0.0, weight=weights))
        counted = engine.mean(weights) * engine.world_size
        with engine.gathered(of="grads") as found:  # each multiplied by its weight, and divided by ranks
            scale = engine.world_size * accumulate / counted
            grads.append({key: value * scale for key, value in found.items() if value is not None})
        norms.append(engine.step().grad_norm)
    expected, expected_norms, expected_grads, whole = plain(name, packed)
    assert min(expected_norms) > LIMIT  # or nothing was clipped
    assert losses == pytest.approx(expected, rel=1e-12)
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        for key, value in theirs.items():
            assert (mine[key] - value).abs().max() <= 1e-12 * value.abs().max().clamp(min=1), key
    for key, value in engine.state_dict().items():
        assert torch.allclose(value, whole[key].to(value.dtype), rtol=1e-12, atol=1e-12), key
    sent = engine.traffic()
    assert all(row.sent == row.program for row in sent.rows), sent
    engine.close()
    return {row.op: float(row.sent) for row in sent.rows if row.purpose == "layers"}


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize(("queries", "window"), [(9, None), (9, 4), (3, None), (3, 4), (1, None)])
def test_attention_of_one_rank(queries: int, window: int | None, softcap: float | None) -> None:
    """Without an engine, and of a rank by itself as in generation, the last tokens see those up to themselves, through
    a window or without, and scores are capped before the mask, as an explicit softmax of them has it."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, queries, 6, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 9, 6, generator=draw, dtype=torch.float64)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 6**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    places, seen = torch.arange(9 - queries, 9).unsqueeze(1), torch.arange(9)
    hidden = (seen > places) | (seen <= places - (window or 9))
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    found = sf.parallel.Attention()(query, key, value, is_causal=True, window=window, softcap=softcap)
    assert (found - expected).abs().max() < 1e-14


@pytest.mark.parametrize("softcap", [0, -1.0, torch.inf, "30", True])
def test_caps_that_are_none(softcap: Any) -> None:
    """A cap that is not a number above 0 is refused."""
    one = torch.ones(1, 1, 2, 2)
    with pytest.raises(ConfigError, match="give a number above 0, or None"):
        sf.parallel.Attention()(one, one, one, softcap=softcap)


SOAK = pytest.mark.soak
TILES = {"*.feed_forward": "tile:5", "*": "recompute"}  # ranks have other numbers of tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "attention", "world", "options"),
    [
        ("gpt", "ring", 3, {"mesh": {"sequence": 3}, "packed": True}),
        (
            "gpt",
            "ulysses",
            4,
            {"mesh": {"intra": 2, "sequence": 2}, "layout": "zero2", "accumulate": 2, "activations": TILES},
        ),
        ("llama", "ulysses", 3, {"mesh": {"sequence": 3}, "layout": "ddp"}),
        ("llama", "ring", 2, {"mesh": {"sequence": 2}, "packed": True, "activations": "recompute"}),
        ("bert", "ring", 2, {"mesh": {"sequence": 2}, "layout": "zero1"}),
        ("gpt2", "ulysses", 2, {"mesh": {"sequence": 2}, "packed": True}),
        ("mistral", "ring", 3, {"mesh": {"sequence": 3}}),
        pytest.param("mistral", "ulysses", 2, {"mesh": {"sequence": 2}, "packed": True}, marks=SOAK),
        ("gemma2", "ring", 2, {"mesh": {"sequence": 2}, "packed": True}),
        ("gemma2", "ulysses", 2, {"mesh": {"sequence": 2}, "activations": "recompute"}),
    ],
)
def test_trains_like_whole_sequences(
    ranks: Ranks, name: str, attention: str, world: int, options: dict[str, Any]
) -> None:
    """Losses, each gradient, norms before clipping, and weights after five steps that clip, are those of plain PyTorch
    on one process to 1e-12, though ranks and rows have other numbers of labels that count."""
    ranks.run(trains_like_whole_sequences, name, attention, **options, world_size=world)


@SOAK
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("name", ["gpt", "llama", "qwen3", "gpt2", "bert"])
def test_every_model_with_every_layout(ranks: Ranks, name: str, attention: str, layout: str) -> None:
    """The same for each model under each layout over two more ranks, and on two, three and four ranks of sequence."""
    mesh = {"inter": 2, "sequence": 2} if layout == "hsdp" else {"intra": 2, "sequence": 2}
    ranks.run(trains_like_whole_sequences, name, attention, mesh, layout, world_size=4)
    for world in (2, 3, 4):
        ranks.run(
            trains_like_whole_sequences, name, attention, {"sequence": world}, layout, name != "bert", world_size=world
        )


# -- bytes


def _sent(name: str, attention: str) -> dict[str, float]:
    engine = sf.Engine(
        made(name), optimizer=ADAM, layout="ddp", parallel=sf.Parallel(mesh={"sequence": 2}, attention=attention)
    )
    batch = batches(name, 1)[0]
    batch = {key: value[:, :24] for key, value in batch.items()}
    engine.backward(mean_loss(name, engine, sf.sequence_shard(batch), shifted=True))
    engine.step()
    sent = {row.op: float(row.sent) for row in engine.traffic().rows if row.purpose == "layers"}
    engine.close()
    return sent


@pytest.mark.soak
def test_bytes_are_those_of_the_papers(ranks: Ranks) -> None:
    """Ulysses sends (N - 1) / N of queries, keys, values and outputs, in forward and in backward; a ring N - 1 times
    the keys and values in forward, and in backward them and their gradients."""
    layers, ranks_of, tokens, dim, size = 2, 2, ROWS * 24 // 2, 24, 8
    each = tokens * dim * size  # bytes of queries, or of an output, on one rank
    for name, keys in (("gpt", each), ("llama", each * 2 // 12)):  # of two heads, none is repeated
        [ulysses, _] = ranks.run(_sent, name, "ulysses", world_size=2)
        assert ulysses["ALL_TO_ALL"] == layers * 2 * (ranks_of - 1) / ranks_of * (2 * each + 2 * keys)
        [ring, _] = ranks.run(_sent, name, "ring", world_size=2)
        assert ring["SHIFT"] == layers * 3 * (ranks_of - 1) * 2 * keys


# -- batches


def test_batches_are_cut() -> None:
    """Labels are shifted before the cut, positions are those of whole sequences or of their documents, what tells of
    documents is taken out, and other values stay."""
    tokens = torch.arange(20).view(2, 10)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    parts = [read_batch(batch, 2, rank, ZIGZAG, True, (), ())[1] for rank in range(2)]
    assert parts[0]["input_ids"][0].tolist() == [0, 1, 7, 8, 9]
    assert parts[0]["shift_labels"][0].tolist() == [1, 2, 8, 9, -100]
    assert parts[1]["shift_labels"][1].tolist() == [13, 14, 15, 16, 17]  # the last one is another rank's token
    assert parts[0]["position_ids"][1].tolist() == [0, 1, 7, 8, 9] and parts[0]["use_cache"] is False
    packed = {**batch, "cu_seqlens": torch.tensor([0, 4, 10])}
    sharded, part = read_batch(packed, 2, 1, CONTIGUOUS, True, (), ())
    assert part["position_ids"][0].tolist() == [1, 2, 3, 4, 5] and "cu_seqlens" not in part
    assert sharded.cut.documents == ((0, 4, 10),) and sharded.valid == 8.0
    again = {**batch, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])}
    sharded, part = read_batch(again, 2, 1, CONTIGUOUS, True, (), ())
    assert sharded.cut.documents == ((0, 4, 10),) and part["position_ids"].tolist() == [[1, 2, 3, 4, 5]]
    mask = torch.ones(2, 10)
    mask[1, 7:] = 0
    sharded, part = read_batch({**batch, "attention_mask": mask}, 2, 1, CONTIGUOUS, True, (), ())
    assert sharded.cut.documents == ((0, 10), (0, 7, 10)) and part["position_ids"][1].tolist() == [5, 6, 7, 8, 9]
    behind = [read_batch({"input_ids": tokens + 1}, 2, 1, CONTIGUOUS, True, (), (), padding=n)[1] for n in (1, 18)]
    assert behind[0]["position_ids"].tolist() == [[6, 7, 8, 9, 10], [7, 8, 9, 10, 11]]  # the first token is padding
    assert behind[1]["position_ids"][1].tolist() == [24, 25, 18, 26, 27]
    unshifted, part = read_batch(batch, 2, 0, CONTIGUOUS, False, (), ())
    assert "shift_labels" not in part and unshifted.valid == 10.0
    extra = read_batch(
        {"tokens": tokens, "weight": tokens, "image": tokens}, 2, 0, CONTIGUOUS, True, ["weight"], ["image"]
    )
    assert extra[1]["weight"].shape == (2, 5) and extra[1]["image"].shape == (2, 10) and "positions" in extra[1]
    assert extra[0].valid is None


@pytest.mark.parametrize(
    ("batch", "options", "words"),
    [
        ([1], {}, "takes tensors by name"),
        ({"ids": torch.ones(2, 4)}, {}, "whether 'ids' lies along the sequence"),
        ({"input_id": torch.ones(2, 4)}, {}, "mean 'input_ids'"),
        ({"labels": torch.ones(2, 4)}, {}, "under one of input_ids"),
        ({"tokens": torch.ones(2, 4), "targets": torch.ones(2, 5)}, {}, "'targets' has the shape (2, 5)"),
        ({"tokens": torch.ones(2, 4), "cu_seqlens": [0, 5]}, {}, "from 0 to the 4 tokens"),
        ({"tokens": torch.ones(2, 4), "document_ids": torch.ones(3, 4)}, {}, "'document_ids' is (3, 4)"),
        ({"tokens": torch.ones(2, 4)}, {"also": "targets"}, "also=['targets']"),
        ({"tokens": torch.ones(2, 4)}, {"whole": ["token"]}, "mean 'tokens'"),
        ({"tokens": torch.ones(2, 1)}, {}, "1 tokens is not cut over 2 ranks"),
    ],
)
def test_batches_that_are_none(batch: Any, options: dict[str, Any], words: str) -> None:
    """What cannot be cut is refused with one sentence."""
    with pytest.raises(ConfigError) as caught:
        read_batch(batch, 2, 0, CONTIGUOUS, True, options.get("also", ()), options.get("whole", ()))
    assert words in str(caught.value)


# -- refusals


def _refused(call: Callable[[], Any], kind: type[ShardfoldError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def _misused() -> list[str]:
    import torch.distributed as dist

    mesh = {"sequence": 2}
    texts = [
        _refused(lambda: sf.Engine(gpt(), parallel=sf.Parallel(attention="ring")), ConfigError),
        _refused(lambda: sf.Engine(gpt(), parallel=sf.Parallel(mesh=mesh, attention="rings")), ConfigError),
        _refused(lambda: sf.Engine(nn.Linear(2, 2), parallel=mesh), ModelError),
    ]
    odd = GPT(GPTConfig(vocab=VOCAB, d_model=12, layers=1, heads=3, context=64, d_ff=32))
    texts.append(_refused(lambda: sf.Engine(odd, parallel=sf.Parallel(mesh=mesh, attention="ulysses")), ConfigError))
    engine = sf.Engine(odd, parallel=mesh, optimizer=ADAM)
    assert engine.sequence is not None and engine.sequence.choice == "ring"  # two ranks do not divide three heads
    assert (engine.data_rank, engine.data_ranks, sf.Sampler(8, batch_size=1).num_ranks) == (0, 1, 1)
    tokens = torch.randint(0, VOCAB, (1, 8), generator=torch.Generator().manual_seed(0))
    texts.append(_refused(lambda: engine(tokens), UsageError))
    apart = {"tokens": tokens + dist.get_rank()}
    texts.append(_refused(lambda: engine(**sf.sequence_shard(apart)), ConfigError))
    engine.reset()
    mine = sf.sequence_shard({"tokens": tokens, "targets": tokens})
    texts.append(_refused(lambda: engine(tokens), UsageError))
    engine(**mine).backward()
    texts.append(_refused(engine.step, UsageError))
    engine.zero_grad()
    engine(**sf.sequence_shard({"tokens": tokens, "targets": tokens}))
    loss = engine(**sf.sequence_shard({"tokens": tokens, "targets": tokens}))
    texts.append(_refused(lambda: engine.backward(loss), UsageError))
    engine.reset()
    with engine.gathered(), engine.sequence.local(), torch.no_grad():
        assert engine.module(tokens).shape == (1, 8, VOCAB)
    engine.close()
    texts.append(_refused(lambda: sf.sequence_shard({"tokens": tokens}), UsageError))
    return texts


def test_misuse_is_told(ranks: Ranks) -> None:
    """What would train on something else is refused on every rank, with one sentence."""
    said = ranks.run(_misused, world_size=2)
    words = (
        "add it, as in parallel={'sequence': 2}", "mean 'ring'", "no attention that can cross it", "3 heads are not",
        "call batch = sf.sequence_shard(batch)", "have different batches", "cut each batch right before its forward",
        "call that instead of loss.backward()", "batches went forward since the last backward", "no engine has one",
    )  # fmt: skip
    for texts in said:
        for text, word in zip(texts, words, strict=True):
            assert word in text, text
