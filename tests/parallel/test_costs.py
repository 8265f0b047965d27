"""What layers send is what their list says; counts of a model of 1.3 billion parameters, without memory or ranks."""

from __future__ import annotations

from typing import Any

import pytest

import shardfold as sf
from shardfold.parallel.layer_traffic import collectives, described, other_products
from shardfold.parallel.plan import split_model
from shardfold.plan.axes import Axis, Mesh
from shardfold.plan.cost import ring_bytes
from shardfold.testing import Ranks
from tests.parallel.models import ADAM, ROWS, TIME, batches, loss_of, make

EIGHT = Mesh([Axis("tensor", 8)])


def gpt3() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=2048, n_layer=24, n_head=16, vocab_size=50257, n_positions=2048)
    with sf.meta_init():
        return GPT2LMHeadModel(config)


def test_gpt3_of_1_3_billion() -> None:
    """16 x 2048 tokens through 24 blocks of width 2048: 96 all-reduces of 67 million elements, 6.4 billion in all,
    besides one for the embedding and one for the head; data parallelism sums 1.3 billion gradients."""
    model = gpt3()
    parameters = sum(p.numel() for p in model.parameters())
    split_model(model, "auto", EIGHT, {"tensor": 0})
    tokens, found = 16 * 2048, collectives(model)
    blocks = [each for each in found if ".h." in each.path]
    assert [each.verb for each in blocks] == ["ALL_REDUCE"] * 96
    assert {each.elements * tokens for each in blocks} == {67_108_864}
    assert sum(each.elements * tokens for each in blocks) == 6_442_450_944
    assert sum(each.section == "forward" for each in blocks) == sum(each.section == "backward" for each in blocks) == 48
    ends = [(each.path, each.section, each.verb, each.elements) for each in found if ".h." not in each.path]
    assert ends == [
        ("transformer.wte", "forward", "ALL_REDUCE", 2048),
        ("lm_head", "forward", "ALL_GATHER", 50257),
        ("lm_head", "backward", "ALL_REDUCE", 2048),
    ]
    assert parameters == 1_315_723_264
    lines = described(model, 2)
    assert lines[0] == "cut along 'tensor' over 8 ranks; what is sent is for each token:"
    assert any("24 x transformer.h.*.mlp.c_proj" in line and "ALL_REDUCE 2,048 elements" in line for line in lines)
    assert "  in all: forward 50 calls, 439,182 bytes sent" in lines
    assert any("transformer.wpe" in line and "whole" in line for line in lines)


def test_other_products() -> None:
    """A block of that model on 8 ranks, by each paper's formula: what 1D, 2.5D and 3D products send in forward."""
    found = other_products(16 * 2048, 2048, 8)
    assert {name: round(elements / 1e6, 1) for name, elements in found.items()} == {
        "1D": 234.9, "2.5D": 71.3, "3D": 140.5,
    }  # fmt: skip
    assert list(other_products(8, 8, 4)) == ["1D", "2D"]


def _sends(name: str, cut: bool) -> tuple[list[tuple[Any, ...]], list[Any], str]:
    engine = sf.Engine(
        make(name),
        optimizer=ADAM,
        layout="ddp",
        parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto", sequence_parallel=cut),
    )
    engine.backward(loss_of(engine, *batches(1)[0]))
    engine.step()
    rows = [tuple(row) for row in engine.traffic().rows if row.purpose == "layers"]
    found, text = collectives(engine.module), engine.explain()
    engine.close()
    return rows, found, text


SOAK = pytest.mark.soak


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "cut"), [("gpt2", False), pytest.param("llama", False, marks=SOAK), pytest.param("llama", True)]
)
def test_the_list_is_what_is_sent(ranks: Ranks, name: str, cut: bool) -> None:
    """Calls and bytes of a step are those of the list, and ``explain`` prints it. Where sequences are cut, gradients of
    norms are summed besides."""
    given = ranks.run(_sends, name, cut, world_size=2)
    _, found, text = given[0]
    for verb in ("REDUCE_SCATTER", "ALL_GATHER") if cut else ("ALL_REDUCE", "ALL_GATHER"):
        mine = [each for each in found if each.verb == verb]
        num_bytes = sum(2 * ring_bytes(verb, each.elements * ROWS * TIME * 8, 2) for each in mine)
        rows = [row for each in given for row in each[0] if row[1] == verb]
        assert [row[3] for row in rows] == [len(mine)] * 2
        assert sum(row[5] for row in rows) == num_bytes  # one rank has a word more than the other
    assert "cut along 'tensor' over 2 ranks" in text and (name != "gpt2" or "transformer.h.*.attn.c_attn" in text)
