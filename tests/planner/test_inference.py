"""Weights by dtype, and the cache of keys and values, are those of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardfold.planner.division import Division
from shardfold.planner.inference import RESERVE, cache_bytes, largest_batch_of, sizes_of
from shardfold.planner.setting import Subject
from shardfold.sharding.materialize import meta_init

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
