"""Frozen matrices that rest and travel as codes train their adapters as plain PyTorch does over the decoded values."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError, ModelError
from shardfold.plan.format import typed
from shardfold.plan.formats import FORMATS
from shardfold.plan.program import parse
from shardfold.testing import Ranks
from tests.support.adapted import Adapted, batches, quantized
from tests.support.clients import needs

ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
"""Sums over ranks, and products of fp32, are taken in another order, by which a gradient may be off by 1e-8. A step of
the default eps divides that by the gradient, however small; this one by 1e-3 at least."""
STEPS = 4
RELATIVE, ABSOLUTE = 1e-5, 1e-6
TWO = [
    ("zero3", "nf4/64", {}),
    ("ddp", "nf4/64+double", {}),
    ("zero2", "int8/64", {"activations": "recompute"}),
    ("fsdp2", "int4/64+double", {}),
    ("offload", "int2/32", {}),
    ("infinity", "nf4/64+double", {}),
    ("zero3", "int8/64+double", {"held": sf.Cell(dtype="compute")}),
]
FOUR = [
    ("hsdp", "nf4/64", {}),
    ("hpz", "int8/64+double", {"activations": "recompute"}),
    ("zero3", "nf4/64", {"gather": sf.Wire(format="compute", hops=2)}),
]


def _plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = quantized(Adapted(), typed(name))
    optimizer, losses = ADAM([p for p in model.parameters() if p.requires_grad]), list[float]()
    for batch in batches(STEPS):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def _layout(layout: str, base: str, changes: dict[str, Any], folder: str) -> sf.Layout:
    table = sf.PRESETS[layout].replace(base=base, **changes)
    return table.edit("params", "master", "moments", tier="disk", folder=folder) if folder else table


def _train(cases: list[tuple[str, str, dict[str, Any]]], mesh: dict[str, int] | None, folder: str) -> list[str]:
    """What is wrong with them on this rank."""
    wrong = list[str]()
    for layout, base, changes in cases:
        case = f"{layout}+{base} {changes}"
        torch.manual_seed(0)
        table = _layout(layout, base, changes, folder)
        engine = sf.Engine(Adapted(), optimizer=ADAM, layout=table, parallel=mesh)
        losses = list[torch.Tensor]()
        for batch in batches(STEPS):
            loss = engine(batch.chunk(engine.world_size)[engine.rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        whole = torch.stack(losses)
        if engine.world_size > 1:
            torch.distributed.all_reduce(whole)
        expected, state = _plain(base)
        for what, found, should in (
            ("losses", whole / engine.world_size, torch.tensor(expected)),
            *((name, value, state[name]) for name, value in engine.state_dict().items()),
        ):
            coded = ".base.weight" in what
            if not (torch.equal(found, should) if coded else torch.allclose(found, should, RELATIVE, ABSOLUTE)):
                wrong.append(f"{case}: {what} off by {(found - should).abs().max()}")
        wrong += [
            f"{case}: {row} is not as planned" for row in engine.memory().rows if row.table + row.padding != row.held
        ]
        wrong += [f"{case}: {row} is not as sent" for row in engine.traffic().rows if row.program != row.sent]
        decoded, freed = ({op.unit for op in engine.program.forward if op.verb == verb} for verb in ("DECODE", "FREE"))
        if decoded - freed:
            wrong.append(f"{case}: {decoded - freed} stay decoded")
        if parse(str(engine.program)) != engine.program:
            wrong.append(f"{case}: the program does not read back")
        engine.close()
    return wrong


@pytest.mark.parametrize("case", TWO, ids=lambda case: f"{case[0]}-{case[1]}")
def test_adapters_train_on_one_rank_as_over_the_decoded_values(case: Any) -> None:
    assert _train([case], None, "") == []


def test_they_do_on_two_ranks(ranks: Ranks) -> None:
    """Losses and adapters to rounding, coded matrices to the bit, memory and traffic to the byte, under every kind of
    layout."""
    assert ranks.run(_train, TWO, None, "", world_size=2) == [[], []]


def test_they_do_on_a_mesh_of_two_nodes(ranks: Ranks) -> None:
    assert ranks.run(_train, FOUR, {"inter": 2, "intra": 2}, "", world_size=4) == [[]] * 4


def test_they_do_from_files(ranks: Ranks, tmp_path: Path) -> None:
    cases = [("infinity", "nf4/64", {}), ("infinity", "int4/64+double", {})]
    assert ranks.run(_train, cases, None, str(tmp_path), world_size=2) == [[], []]


def test_a_rank_holds_and_sends_what_the_papers_count() -> None:
    """Of matrices of whole blocks 0.5625 bytes a parameter over the ranks, and gathers 3.56 times below bf16's."""
    from shardfold.plan.cost import state_bytes
    from shardfold.plan.layout import Precision
    from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec

    numel, mesh = 2**20, {"inter": 1, "intra": 4}
    for base, each in (("nf4/64", 0.5625), ("nf4/64+double", 0.51611328125), ("int8/64", 1.0625)):
        table = sf.PRESETS["zero3"].replace(base=base)
        assert table.base is not None
        segment = SegmentSpec((Slot("w", (numel,), 0),), numel, "bf16", trainable=False, codes=table.base.format)
        bound = table.bind(Precision.named("bf16"), mesh)
        assert state_bytes(bound, [UnitSpec("w", (segment,))], mesh, padded=True) == {"params": each * numel / 4}
        assert FORMATS[table.base.format].nbytes(numel) == each * numel
    assert 2 / 0.5625 > 3.55


def test_which_matrices_are_coded() -> None:
    """Linear layers but the last outside of a list; what is named, or kept, in their place."""

    def coded(base: Any) -> set[str]:
        engine = sf.Engine(Adapted(layers=1), optimizer=ADAM, layout=sf.PRESETS["ddp"].replace(base=base))
        found = {slot.name for unit in engine.units for s in unit.segments if s.spec.codes for slot in s.spec.slots}
        engine.close()
        return found

    first, second = "blocks.0.first.base.weight", "blocks.0.second.base.weight"
    assert coded("nf4") == {first, second}
    assert coded(sf.Quantized(format="nf4", keep="*.second")) == {first}
    assert coded(sf.Quantized(format="nf4", modules=("head", "*.first"))) == {"head.weight", first}
    assert coded(sf.Quantized(format="nf4", modules=torch.nn.Linear)) == {first, second, "head.weight"}
    with pytest.raises(ModelError, match=r"names '\*\.third', which matches no module"):
        coded(sf.Quantized(format="nf4", keep="*.third"))
    with pytest.raises(ModelError, match=r"no frozen matrix that it is for"):
        sf.Engine(torch.nn.Embedding(8, 8).requires_grad_(False), layout="ddp+nf4")


def test_what_no_table_has_is_refused_with_a_word_that_helps() -> None:
    with pytest.raises(LayoutError, match=r"base rests as 'nf5'.*'nf4'"):
        sf.PRESETS["zero3"].replace(base="nf5")
    with pytest.raises(LayoutError, match="no format that parameters can rest in"):
        sf.PRESETS["zero3"].replace(base="bf16")
    with pytest.raises(LayoutError, match="no format that parameters can rest in"):
        sf.PRESETS["zero3"].replace(base="int8/64+error")
    with pytest.raises(LayoutError, match=r"Quantized\.keep is 3"):
        sf.Quantized(format="nf4", keep=3)  # pyright: ignore
    with pytest.raises(LayoutError, match="layout 'zero4\\+nf4' is unknown"):
        sf.Engine(Adapted(), layout="zero4+nf4")


def test_a_coded_matrix_stays_frozen() -> None:
    """Unfreezing one is refused; what was trained and is frozen later keeps its dtype."""
    engine = sf.Engine(Adapted(layers=1), optimizer=ADAM, layout="zero3+nf4/64")
    parameters, batch = dict(engine.module.named_parameters()), batches(1)[0]
    parameters[late := "blocks.0.first.down.weight"].requires_grad_(False)
    engine.backward(engine(batch))
    engine.step()
    specs = [s.spec for unit in engine.units for s in unit.segments]
    assert [spec.codes for spec in specs if late in [slot.name for slot in spec.slots]] == [""]
    parameters["blocks.0.first.base.weight"].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'blocks\.0\.first\.base\.weight' rests as nf4/64"):
        engine(batch)
    engine.close()


def _on_axes(
    build: Any, axes: dict[str, Any] | None, base: str, folder: str = ""
) -> tuple[list[float], list[str], bool]:
    """Losses over all ranks, what of memory and traffic is not as planned, and whether coded matrices are cut; a
    checkpoint goes to the folder."""
    engine = sf.Engine(build(), optimizer=ADAM, layout=f"zero3+{base}", parallel=sf.Parallel(**axes) if axes else None)
    generator, losses = torch.Generator().manual_seed(1), list[float]()
    for _ in range(3):
        ids = torch.randint(0, 128, (4, 16), generator=generator).chunk(engine.data_ranks)[engine.data_rank]
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(float(loss.detach())))
    wrong = [f"{row} is not as planned" for row in engine.memory().rows if row.table + row.padding != row.held]
    wrong += [f"{row} is not as sent" for row in engine.traffic().rows if row.program != row.sent]
    cut = any(s.spec.codes and s.spec.distinct for unit in engine.units for s in unit.segments)
    if folder:
        engine.save(folder, wait=True)
    engine.close()
    return losses, wrong, cut


SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def _frozen(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "embed" in name)
    return model


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return _frozen(MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return _frozen(LlamaForCausalLM(LlamaConfig(**SIZES)))


@pytest.mark.soak
@needs("transformers")
@pytest.mark.parametrize(
    ("build", "axes"),
    [(mixtral, {"mesh": {"expert": 2}}), (llama, {"mesh": {"tensor": 2}, "tensor": "auto"})],
    ids=["expert", "tensor"],
)
def test_codes_are_cut_along_axes(ranks: Ranks, tmp_path: Path, build: Any, axes: dict[str, Any]) -> None:
    """Matrices whose parts are of whole blocks have the codes of the whole, and so the losses of one rank; a checkpoint
    has each code once, whichever ranks have it."""
    expected, _, _ = _on_axes(build, None, "nf4/64")
    for losses, wrong, cut in ranks.run(_on_axes, build, axes, "nf4/64", str(tmp_path / "saved"), world_size=2):
        assert cut
        assert not wrong
        assert losses == pytest.approx(expected, rel=RELATIVE)
    with sf.Checkpoint(tmp_path / "saved") as checkpoint:
        pieces = [each for each in checkpoint.index.pieces if each.of.endswith("layers.0.self_attn.q_proj.weight")]
    assert sum(piece.nbytes for piece in pieces) == 0.5625 * 128**2
