"""Weights by dtype, and the cache of keys and values, are those of the model."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.generation import Continuation, Generation, SamplingRule
from shardfold.plan import presets
from shardfold.planner.division import Division
from shardfold.planner.hardware import Device
from shardfold.planner.inference import RESERVE, cache_bytes, generating, largest_batch_of, sizes_of
from shardfold.planner.setting import Subject
from shardfold.sharding.materialize import meta_init
from shardfold.tools.answering.open_config import table_of_weights
from shardfold.tools.bench._process_memory import held_bytes
from tests.tools.tune.support import tiny_config

LAYERS, HEADS, WIDTH, WORDS, LENGTH = 3, 2, 16, 50, 12


@pytest.fixture(scope="module")
def subject() -> Subject:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=4 * WIDTH, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, max_position_embeddings=64,
    )  # fmt: skip
    with meta_init():
        model = transformers.LlamaForCausalLM(config)
    tokens = torch.empty((2, LENGTH), dtype=torch.int64, device="meta")
    return Subject(model, {"input_ids": tokens, "labels": tokens})


def test_weights_by_dtype(subject: Subject) -> None:
    """fp32, and its half, quarter and eighth; training is 16 and 18 bytes a parameter; a block is the largest layer."""
    numel = sum(p.numel() for p in subject.hollow.parameters())
    buffers = sum(b.numel() for b in subject.hollow.buffers())
    found = {size.dtype: size for size in sizes_of(subject)}
    for dtype, size in (("fp32", 4), ("16-bit", 2), ("int8", 1), ("int4", 0.5)):
        assert found[dtype].weights == (numel + buffers) * size
    block = sum(p.numel() for p in subject.hollow.get_submodule("model.layers.0").parameters())
    assert found["fp32"].largest == 4 * block
    assert found["fp32"].training == 16 * numel and found["16-bit"].training == 18 * numel
    assert not found["int8"].training


def test_the_cache_has_keys_and_values_of_each_token(subject: Subject) -> None:
    """In 16 bits: 2 x layers x heads of keys x their width x tokens."""
    one = 2 * 2 * LAYERS * HEADS * WIDTH * LENGTH
    assert cache_bytes(subject, 1) == one
    assert cache_bytes(subject, 5) == 5 * one


def test_the_largest_batch_is_within_the_budget(subject: Subject) -> None:
    """With the reserve it fits, and one more does not."""
    size, one = sizes_of(subject)[1], cache_bytes(subject, 1)
    budget = 3 * size.weights
    most = largest_batch_of(size, one, budget)
    assert size.needed(most * one) <= budget < size.needed((most + 1) * one)
    assert largest_batch_of(size, one, size.weights * (1 + RESERVE) - 1) == 0


def test_ranks_that_share_layers_have_parts_of_weights_and_cache(subject: Subject) -> None:
    """Half of what blocks multiply, and of keys and values; norms are whole."""
    part = replace(subject, division=Division(tensor=2))
    assert cache_bytes(part, 1) == cache_bytes(subject, 1) / 2
    whole, half = (sizes_of(each)[0] for each in (subject, part))
    norms = 4 * 4 * WIDTH  # bytes of one
    assert half.largest == (whole.largest - 2 * norms) / 2 + 2 * norms
    assert whole.weights / 2 < half.weights < 0.6 * whole.weights


def _device() -> Device:
    return Device(
        name="given", memory=1e12, flops={"fp32": 1e12}, bandwidth=1e10, disk=1e8, reached=0.5, streams=False,
        codecs={"int8/64": (0.0, 1e-8, 0.0, 0.0)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "block", "weight"), [(1, 1e-4, 1e-9), (5, 3e-4, 2e-9), (9, 5e-4, 3e-9), (17, 9e-4, 5e-9)]
)
def test_a_forward_takes_what_one_of_as_many_texts_was_seen_to_take(
    subject: Subject, rows: int, block: float, weight: float
) -> None:
    """On the line between the numbers of texts that were measured, and beyond the last on that which leads there;
    weights as codes by their own, and all others but embeddings by those of fp32; keys and values by their bytes, which
    come as fast as the memory gives them where nothing was measured. A drive's reads are what it reads."""
    seen = {"fp32": [[1.0, 1e-4, 1e-9], [9.0, 5e-4, 3e-9]], "nf4/64": [[1.0, 2e-4, 7e-9], [9.0, 6e-4, 9e-9]]}
    device = replace(_device(), forwards=seen, kept=5e-10, reads=1e3)
    said = {"rows": rows, "length": LENGTH, "page": 4}
    whole = sum(each.numel() for each in subject.hollow.parameters()) - WORDS * 4 * WIDTH
    kept = rows * LENGTH * 4 * 2 * LAYERS * HEADS * WIDTH * 5e-10
    found = generating(subject, presets.named("ddp"), "fp32", device, **said)
    assert found.seconds == pytest.approx(LAYERS * block + whole * weight + kept, rel=1e-9)
    found = generating(subject, presets.named("ddp"), "fp32", replace(device, kept=0.0), **said)
    assert found.seconds == pytest.approx(LAYERS * block + whole * weight + kept / 5, rel=1e-9)
    coded = sum(layer.weight.numel() for layer in subject.hollow.modules() if type(layer) is torch.nn.Linear)
    coded -= subject.hollow.lm_head.weight.numel()
    found = generating(subject, table_of_weights("ddp", 4, "memory"), "fp32", device, **said)
    rest = (whole - coded) * weight + coded * (weight + 6e-9) + LAYERS * (block + 1e-4) + kept
    assert found.seconds == pytest.approx(rest, rel=1e-9)
    found = generating(subject, table_of_weights("ddp", None, "disk"), "fp32", device, **said)
    assert found.limit == "disk" and found.seconds == found.moved / 1e3


@pytest.mark.parametrize(
    ("bits", "weights", "share"),
    [
        (None, "memory", 1.0),
        (8, "disk", 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                (4, "disk", 0.6),
                (None, "disk", 1.0),
                (None, "host", 1.0),
                (4, "memory", 1.0),
                (8, "host", 0.5),
            )
        ),
    ],
)
def test_a_plan_of_generation_is_what_a_generation_holds(
    request: pytest.FixtureRequest, bits: int | None, weights: str, share: float
) -> None:
    """Weights by tier are those that an engine's memory() says, keys and values those of a generation's pages; with
    what is read and decoded they are all storages that live before a block, but a few activations and a disk's
    staging."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    config = tiny_config("llama", max_position_embeddings=64, **sizes)
    with meta_init():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    length, rows, page = 22, 3, 4
    tokens = torch.empty((2, length), dtype=torch.int64, device="meta")
    table = table_of_weights("ddp", bits, weights, share)
    said = {"rows": rows, "length": length, "page": page}
    found = generating(Subject(model, {"input_ids": tokens}), table, "fp32", _device(), **said)

    gc.collect()
    request.addfinalizer(gc.unfreeze)
    gc.freeze()  # what is there already is not looked at
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False)
    engine = sf.Engine(made, layout=table)
    staging = 0
    if weights == "disk":
        disk: Any = engine.sharded.tiers.named("disk")
        staging = sum(each._spare[0].memory.untyped_storage().nbytes() for each in (disk.incoming, disk.outgoing))
    running = Generation(engine, pages=rows * -(-length // page), page_size=page)
    rule = SamplingRule(0.0, 1.0, 0, 0)
    texts = [Continuation(i, 0, [5 + i, 6, 7], 3, length - 3, rule, frozenset()) for i in range(rows)]
    for text in texts:
        running.add(text)
    for _ in range(4):
        running.step()
    lives: list[int] = []
    hooks = [each.register_forward_pre_hook(lambda *_: lives.append(held_bytes())) for each in made.model.layers]
    running.step()
    for hook in hooks:
        hook.remove()
    while running.busy:
        running.step()
    held = {row.tier: row.held for row in engine.memory().rows if row.state == "params"}
    buffers = sum(buffer.nbytes for buffer in made.buffers())
    pages = running.pool.nbytes
    running.close()
    moved = [row for row in engine.traffic().evaluated if row.op == "READ"]
    engine.close()
    resting = {str(tier): num_bytes for tier, num_bytes in found.resting.items() if num_bytes}
    assert resting.pop("device", 0) - held.pop("device", 0) == buffers
    assert resting == held and found.pages == pages
    assert max(lives) - staging == pytest.approx(found.memory, rel=0.03)
    if moved:
        assert found.moved == moved[0].moved / running.forwards


def test_ranks_that_share_layers_take_what_such_were_seen_to_take(subject: Subject) -> None:
    """Of a rank's own weights, keys and values; what one process was seen to take alone says nothing of them."""
    part = replace(subject, division=Division(tensor=2, streams=False))
    device = replace(_device(), forwards={"fp32": [[1.0, 1.0, 0.0], [9.0, 1.0, 0.0]]}, kept=1.0)
    device = replace(device, cut_forwards={"fp32": [[1.0, 1e-4, 1e-9], [9.0, 1e-4, 1e-9]]}, cut_kept=5e-10)
    found = generating(part, presets.named("ddp"), "fp32", device, rows=2, length=LENGTH, page=4)
    own = sum(each.numel() for each in part.hollow.parameters())
    own -= part.hollow.get_submodule("model.embed_tokens").get_parameter("weight").numel()
    kept = 2 * LENGTH * 4 * LAYERS * HEADS * WIDTH * 5e-10
    assert found.seconds == pytest.approx(LAYERS * 1e-4 + own * 1e-9 + kept, rel=1e-9)


def test_the_seconds_of_a_forward_are_those_of_what_takes_longest(subject: Subject) -> None:
    """Worked out: the drive's time, where that is longer than to copy, decode and compute; else those, one after the
    other; weights that are read once serve all rows, keys and values each its own."""
    numel = sum(p.numel() for p in subject.hollow.parameters()) - WORDS * 4 * WIDTH  # rows of which are looked up
    one = LENGTH * 2 * LAYERS * HEADS * WIDTH  # keys and values of a text
    at_rest = generating(subject, presets.ddp, "fp32", _device(), rows=1, length=LENGTH, page=16)
    assert at_rest.limit == "memory" and at_rest.seconds == pytest.approx(4 * (numel + one) / 1e10)
    wide = replace(_device(), bandwidth=1e12)
    many = generating(subject, presets.ddp, "fp32", wide, rows=1000, length=LENGTH, page=16)
    assert many.limit == "products" and many.seconds == pytest.approx(2 * numel * 1000 / 0.5e12)
    streamed = generating(
        subject, table_of_weights("ddp", None, "disk"), "fp32", _device(), rows=8, length=LENGTH, page=16
    )
    assert streamed.limit == "disk" and streamed.seconds == streamed.moved / 1e8
    assert streamed.tokens_per_second == 8 / streamed.seconds
    fast = replace(_device(), disk=1e12)
    coded = generating(subject, table_of_weights("ddp", 8, "disk"), "fp32", fast, rows=8, length=LENGTH, page=16)
    matrices = LAYERS * (2 * 64 * 64 + 2 * 64 * HEADS * WIDTH + 3 * 64 * 96)
    assert coded.seconds == pytest.approx(4 * (numel + 8 * one) / 1e10 + matrices * 1e-8 + 4 * coded.moved / 1e10)
