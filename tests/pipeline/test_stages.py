"""What flows between stages is found in one run without values, and cut at the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError
from shardfold.parallel.pipeline.flow import TensorOrigin
from shardfold.parallel.pipeline.pieces import cut_by_cost, find_pieces
from shardfold.parallel.pipeline.stages import Stages
from tests.parallel.models import make
from tests.pipeline.training import Skipping, batches, compute

CPU = torch.device("cpu")


def _borders(model: nn.Module, count: int, given: list[str] | None = None, how: Any = compute) -> Any:
    stages = Stages(model, count, [0], given, CPU)
    return stages, stages.borders("", lambda m: how(m, batches(1)[0]), dict, training=True)


def test_pieces_are_what_is_called_as_a_whole() -> None:
    assert [piece.path for piece in find_pieces(make("gpt"))] == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    llama = [piece.path for piece in find_pieces(make("llama"))]
    assert llama == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    t5 = [piece.path for piece in find_pieces(make("t5"))]
    assert t5[0] == "shared" and t5[-1] == "lm_head" and "decoder.block.1" in t5


def test_a_chain_sends_one_tensor_and_what_is_made_of_inputs_is_not_sent() -> None:
    _, borders = _borders(make("gpt"), 3)
    assert [len(crossing) for crossing in borders.crossing] == [1, 1]


def test_a_skip_crosses_every_border_on_its_way() -> None:
    _, borders = _borders(Skipping().double(), 3)
    first = TensorOrigin(0, 0)
    assert all(first in crossing for crossing in borders.crossing)
    assert [len(crossing) for crossing in borders.crossing] == [2, 2]


def test_encoder_states_are_carried_to_the_decoder() -> None:
    stages, borders = _borders(make("t5"), 4)
    calls = [stages.pieces[call.piece].path for call in borders.trace.calls]
    norm = calls.index("encoder.final_layer_norm")
    reach = [i for i, crossing in enumerate(borders.crossing) if any(origin.call == norm for origin in crossing)]
    assert len(reach) > 1


def test_placeholders_take_no_memory_and_the_model_is_as_it_was() -> None:
    model = make("gpt")
    before = {name: p.clone() for name, p in model.named_parameters()}
    stages, _ = _borders(model, 2)
    assert all(p.untyped_storage().nbytes() <= 8 for p in stages.skeleton.module.parameters())
    stages.drop_foreign()
    assert set(dict(model.named_parameters())) == {n for n in before if n.startswith(("embedding", "blocks.0"))}
    assert model.head.weight.shape == before["head.weight"].shape  # type: ignore[union-attr]
    stages.put_back()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class _Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x) + self.shift)


class _Backwards(nn.Module):
    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads:
            return self.layers[1](self.layers[0](x)) @ self.layers[0].weight
        return self.layers[0](self.layers[1](x))


class _Peeks(_Backwards):
    """Code between pieces that asks for a value: what it gets from a placeholder would be a wrong branch, unseen."""

    def __init__(self, asks: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        return self.layers[1](y + x if self.asks(y) else y)


class _Counts(nn.Module):
    """Reads a buffer of a piece beside the pieces."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers, self.number = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2)), number

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum() + self.layers[self.number].running_mean.sum()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    "asks",
    [lambda y: y.sum() > 0, lambda y: y.sum().item(), lambda y: y.tolist(), lambda y: y.detach().numpy().any(),
     lambda y: torch.equal(y, y), lambda y: torch.allclose(y, y), lambda y: int(y.sum() * 0)],
)  # fmt: skip
def test_values_of_what_pieces_give_are_not_handed_out(asks: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ModelError, match=r"behind the piece 'layers.0' \(ValueError: it asks for a value"):
        _borders(_Peeks(asks), 2, how=lambda m, b: m(torch.ones(2, 3)))
    _borders(_Peeks(lambda y: len(y) > 1 and y.dtype.is_floating_point), 2, how=lambda m, b: m(torch.ones(2, 3)))


def test_a_buffer_is_read_where_it_is() -> None:
    with pytest.raises(ModelError, match=r"stage 1 reads 'layers\.0\.running_mean' outside"):
        _borders(_Counts(0), 2, how=lambda m, b: m(torch.ones(2, 3)))
    _borders(_Counts(1), 2, how=lambda m, b: m(torch.ones(2, 3)))


def test_what_is_made_of_other_parameters_is_one_piece() -> None:
    """As ``torch.nn.utils.parametrize`` has it, which keeps them in lists."""
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    model.head = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert [piece.path for piece in find_pieces(model)] == ["blocks.0", "blocks.1", "head"]


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'shift' belongs to a module whose parts"):
        find_pieces(_Loose())
    for model, words in (
        (_Backwards(), "'layers.0' of stage 0 needs what 'layers.1' of stage 1 gives.*pipeline_pieces"),
        (_Backwards(reads=True), "stage 1 reads 'layers.0.weight' outside"),
    ):
        with pytest.raises(ModelError, match=words):
            _borders(model, 2, how=lambda m, b: m(torch.ones(2, 3)))
    with pytest.raises(ConfigError, match=r"5 stages, but the model has 2 pieces .*: give at most \{'pipeline': 2\}\."):
        cut_by_cost([1.0, 2.0], 5)
    with pytest.raises(ConfigError, match=r"give an order with one stage on each rank\."):
        cut_by_cost([1.0, 2.0], 4, 2)


def test_the_dearest_stage_is_as_cheap_as_it_can_be() -> None:
    assert cut_by_cost([1, 1, 1, 1, 4], 2) == [0, 0, 0, 0, 1]
    assert cut_by_cost([5, 1, 1, 1, 1], 3)[:2] == [0, 1]
    assert cut_by_cost([0, 0, 0], 3) == [0, 1, 2]
