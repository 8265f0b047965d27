"""Axes have roles, and what is summed, divided, counted and compared follows from them.

The proof is a small model whose linear layers are split over an axis of tensor by hand: it trains like the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.comm.mesh import resolve_mesh
from shardfold.errors import ConfigError, LayoutError, ModelError, ShardfoldError
from shardfold.plan.axes import Mesh, Role
from shardfold.plan.cost import Sent, state_bytes, traffic
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.program import lower
from shardfold.testing import Ranks
from tests.support.slices import TENSOR, batches, build, connect, sliced

ADAM = partial(torch.optim.AdamW, lr=0.05, betas=(0.5, 0.9))
LIMIT = 0.3  # of norms between 0.4 and 2, so that every step clips


def plain(clip: sf.Clip | None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of the whole model on one process."""
    model, losses, norms = build(), [], []
    optimizer = ADAM(model.parameters())
    for batch in batches():
        loss = model(*batch)
        loss.backward()
        if clip is not None and clip.norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip.norm, clip.p).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def trains_like_the_whole(
    layout: str, mesh: Any = TENSOR, clip: sf.Clip | None = None, accumulate: int = 1, weighed: bool = False
) -> None:
    place = resolve_mesh(dist.get_world_size(), mesh)
    rank, slices = place.coords(dist.get_rank()).get("tensor", 0), place.get("tensor", 1)
    engine = sf.Engine(
        build(rank, slices),
        optimizer=ADAM,
        layout=layout,
        parallel=mesh,
        clip_norm=clip,
        accumulate=accumulate,
        runtime=sf.Runtime(debug=True),
    )
    if slices > 1:
        connect(engine)
    losses, norms = [], []
    for batch in batches():
        loss = torch.zeros((), dtype=torch.float64)
        for micro in range(accumulate):
            part = [t.chunk(engine.data_ranks * accumulate)[engine.data_rank * accumulate + micro] for t in batch]
            one = engine(*part)
            loss += one.detach() / accumulate
            engine.backward(one, weight=float(len(part[0])) if weighed else None)
            report = engine.step()
        losses.append(engine.mean(loss.item()))
        norms.append(report.grad_norm)
    expected, expected_norms, whole = plain(clip)
    assert losses == pytest.approx(expected, rel=1e-12)
    if clip is not None:
        assert min(expected_norms) > LIMIT  # or nothing was clipped
        assert norms == pytest.approx(expected_norms, rel=1e-12)
    for name, value in engine.state_dict().items():
        assert torch.allclose(value, sliced(name, whole[name], rank, slices), rtol=1e-12, atol=1e-12), name
    sent = engine.traffic()
    assert all(row.sent == row.program for row in sent.rows), sent
    engine.close()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("world", [2, 4])
def test_slices_train_like_the_whole_model(ranks: Ranks, layout: str, world: int) -> None:
    """Two ranks along an axis of tensor, by one or two of data: losses, norms and weights are those of plain PyTorch
    with the whole model on one process, where every step clips."""
    ranks.run(trains_like_the_whole, layout, TENSOR, sf.Clip(norm=LIMIT), world_size=world)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("p", [1.0, inf])
def test_norms_count_slices_once(ranks: Ranks, p: float) -> None:
    """Other norms over slices are those of the whole model too."""
    ranks.run(_clips_by, p, world_size=4)


def _clips_by(p: float) -> None:
    model = build(dist.get_rank() % 2, 2)
    engine = sf.Engine(model, optimizer=ADAM, layout="zero2", parallel=TENSOR, clip_norm=sf.Clip(norm=1e9, p=p))
    connect(engine)
    batch = batches()[0]
    engine.backward(engine(*[t.chunk(2)[engine.data_rank] for t in batch]))
    found = engine.step().grad_norm
    whole = build()
    whole(*batch).backward()
    assert found == pytest.approx(nn.utils.clip_grad_norm_(whole.parameters(), inf, p).item(), rel=1e-12)
    engine.close()


@pytest.mark.soak
def test_inter_axes_and_micro_batches(ranks: Ranks) -> None:
    """The same with an axis of data between nodes, with micro-batches, with weights of micro-batches, and with an axis
    of data that no table names."""
    ranks.run(trains_like_the_whole, "hsdp", {"inter": 2, "tensor": 2}, sf.Clip(norm=LIMIT), 2, world_size=4)
    ranks.run(trains_like_the_whole, "zero1", [sf.Axis("tensor", 2)], None, 3, True, world_size=4)
    replicas = [sf.Axis("intra", 2), sf.Axis("replica", 2, "data")]
    ranks.run(trains_like_the_whole, "zero3", replicas, sf.Clip(norm=LIMIT), world_size=4)


def _replicas(layout: str) -> dict[str, bytes]:
    engine = sf.Engine(
        build(dist.get_rank() % 2, 2, torch.float32), optimizer=ADAM, layout=layout, parallel=TENSOR, clip_norm=LIMIT
    )
    connect(engine)
    for batch in batches(torch.float32):
        engine.backward(engine(*[t.chunk(2)[engine.data_rank] for t in batch]))
        engine.step()
    state = {name: value.numpy().tobytes() for name, value in engine.state_dict().items()}
    engine.close()
    return state


def test_replicas_stay_equal_to_the_bit(ranks: Ranks) -> None:
    """What is replicated on an axis of tensor is equal to the bit on it after steps in fp32; what is not, is not."""
    state = ranks.run(_replicas, "zero1")
    for name, value in state[0].items():
        assert state[2][name] == value  # along data
        assert (state[1][name] == value) == ("up." not in name and not name.endswith("down.weight")), name


def _initial(layout: str) -> tuple[dict[str, Tensor], int]:
    with sf.meta_init():
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    sf.mark_slice(model[0], "weight", axis="tensor")
    engine = sf.Engine(model, layout=layout, parallel=TENSOR, init=sf.Init(seed=3))
    state = engine.state_dict()
    engine.close()
    return state, engine.data_rank


def test_first_values_follow_from_the_mark(ranks: Ranks) -> None:
    """Built under ``meta_init``, slices differ along the axis of tensor and nothing else does."""
    said = ranks.run(_initial, "zero3")
    for rank, (state, data_rank) in enumerate(said):
        assert data_rank == rank // 2
        for name, value in state.items():
            same = torch.equal(value, said[0][0][name])
            assert same == (name != "0.weight" or rank % 2 == 0), (rank, name)


def _refused(make: Callable[[], Any], kind: type[ShardfoldError]) -> str:
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)


def _forgets_a_mark() -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
    return _refused(lambda: sf.Engine(model, parallel=TENSOR), ModelError)


def test_unmarked_parameters_must_be_equal(ranks: Ranks) -> None:
    """A parameter that differs along an axis of tensor and is not marked is refused by name on every rank."""
    for text in ranks.run(_forgets_a_mark, world_size=2):
        assert "'weight' differs between ranks along the axis 'tensor'" in text
        assert "mark_slice(module, 'name', axis='tensor'" in text


def _what_is_not_built() -> list[str]:
    texts = [
        _refused(lambda: sf.Engine(nn.Linear(2, 2), parallel={"pipeline": 2}), ModelError),
        _refused(lambda: sf.Engine(nn.Linear(2, 2), parallel={"expert": 2}), ConfigError),
    ]
    lamb = partial(sf.optim.LAMB, lr=0.1)
    part = nn.Linear(4, 4)
    sf.mark_slice(part, "weight", axis="tensor")
    texts.append(_refused(lambda: sf.Engine(part, optimizer=lamb, parallel=TENSOR), ConfigError))
    with sf.sharded_init():
        early = nn.Linear(4, 4)
    sf.mark_slice(early, "weight", axis="tensor", dim=0)
    texts.append(_refused(lambda: sf.Engine(early, parallel=TENSOR), ModelError))
    engine = sf.Engine(nn.Sequential(nn.LayerNorm(4)), optimizer=ADAM, parallel=TENSOR)
    sampler = sf.Sampler(range(8), batch_size=2)
    assert (sampler.rank, sampler.num_ranks) == (0, 1)
    engine.close()
    assert sf.Sampler(range(8), batch_size=2).num_ranks == 2
    return texts


def test_what_is_not_built_is_refused(ranks: Ranks) -> None:
    """Roles, optimizers for slices of what nothing says, and slices that were split already are refused, each with
    a sentence; a sampler made beside such an engine gives ranks that read alike the same samples."""
    said = ranks.run(_what_is_not_built, world_size=2)
    assert said[0] == said[1] or said[0][3] == said[1][3]
    for text, words in zip(
        said[0],
        (
            "belong to a module whose parts go to several stages",
            "has no experts that are known",
            "and nothing says of what",
            "sharded_init()",
        ),
        strict=True,
    ):
        assert words in text


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"tensr": 2}, "did you mean 'tensor'"),
        ({"tensor": 0}, "leave the axis out"),
        ({"intra": 0}, "parallel= has 0 for 'intra'"),
        ({"intra": -2}, "parallel= has -2 for 'intra'"),
        ({"inter": True}, "parallel= has True for 'inter'"),
        ({"intra": "8"}, "parallel= has '8' for 'intra'"),
        ({"intra": 8.0}, "parallel= has 8.0 for 'intra'"),
        ({"intra": None}, "parallel= has None for 'intra'"),
        ({1: 8}, "names the axis 1"),
        ({}, "parallel= is empty"),
        ([], "parallel= is empty"),
        (
            {"intra": 3},
            "intra=3 does not multiply up to the 8 ranks there are: change the sizes, as to intra=4 x "
            "inter=2, or the number of ranks, as to 6 or 9.",
        ),
        ({"inter": 2, "intra": 2}, "inter=2 x intra=2 does not multiply up"),
        ({"pipeline": 3}, "change the sizes, as to pipeline=4 x intra=2, or the number of ranks, as to 6 or 9."),
        ({"pipeline": 3, "tensor": 4}, "as to pipeline=2 x tensor=4, or the number of ranks, as to 12."),
        ({"pipeline": 2, "intra": 2, "inter": 3}, "as to pipeline=2 x intra=2 x inter=2, or the number of ranks"),
        ({"pipeline": 2, "intra": [1, 3]}, "all stages have as many ranks along each of the other axes: give one"),
        ({"tensor": 1.5}, "is a number of ranks"),
        ({"tensor": 3}, "tensor=3 does not multiply up to the 8 ranks"),
        ({"inter": 2, "intra": 2, "tensor": 4}, "does not multiply up"),
        (8, "sizes by axis"),
        ([("tensor", 2)], "a list of Axis"),
        ([sf.Axis("tensor", 2), sf.Axis("tensor", 2)], "two axes of one name"),
    ],
)
def test_a_mesh_that_is_none(mesh: Any, words: str) -> None:
    """What is no mesh of so many ranks is refused with one sentence, which names what is near."""
    assert words in _refused(lambda: resolve_mesh(8, mesh), LayoutError).lower() or words in _refused(
        lambda: resolve_mesh(8, mesh), LayoutError
    )


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (("tensor", 2, "tensr"), "mean 'tensor'"),
        (("rows", 2), "has no role"),
        (("tensor", 2, "data"), "its name says 'tensor'"),
        (("tensor", 0), "number of ranks"),
        (("a b", 2), "a word"),
    ],
)
def test_an_axis_that_is_none(axis: Any, words: str) -> None:
    """An axis needs a word, a number of ranks and a role."""
    assert words in _refused(lambda: sf.Axis(*axis), LayoutError)


def test_the_fastest_link_goes_to_tensor() -> None:
    """However a mesh is given, ranks count from the slowest link to the fastest, and what is left out is filled."""
    mesh = resolve_mesh(16, {"tensor": 2, "pipeline": 2, "intra": 2})
    assert list(mesh.items()) == [("pipeline", 2), ("inter", 2), ("intra", 2), ("tensor", 2)]
    assert mesh.coords(13) == {"pipeline": 1, "inter": 1, "intra": 0, "tensor": 1}
    assert mesh.rows(("tensor",))[:2] == [[0, 1], [2, 3]]
    named = resolve_mesh(8, [sf.Axis("columns", 2, "tensor"), sf.Axis("replica", 2, "data")])
    assert list(named.items()) == [("inter", 1), ("intra", 2), ("replica", 2), ("columns", 2)]


def test_what_follows_from_roles() -> None:
    """Each of the derived values, on a mesh that has every role."""
    mesh = Mesh([sf.Axis(name, 2) for name in ("pipeline", "inter", "intra", "expert", "sequence", "tensor")])
    assert mesh.summed() == ("inter", "intra", "expert", "sequence")
    assert mesh.summed(("expert",)) == ("inter", "intra", "sequence")  # an expert is not summed with other experts
    assert mesh.summed(("tensor",)) == mesh.summed()
    assert mesh.divisor == 16  # for an expert too
    assert mesh.replicas() == ("tensor",)
    assert mesh.replicas(("tensor",)) == ()
    assert mesh.normed(("intra",)) == ("intra",)
    assert mesh.normed(("intra",), ("tensor",)) == ("intra", "tensor")
    assert mesh.meeting == ("inter", "intra", "expert", "sequence", "tensor")
    assert mesh.of_role(Role.PIPELINE) == ("pipeline",)


def test_a_unit_with_its_own_table() -> None:
    """A unit of experts has a table and sums of its own in one program: what is distinct on an axis is not summed over
    it, and a table of fewer axes gathers over these only."""
    mesh = resolve_mesh(8, {"inter": 2, "intra": 2, "expert": 2})
    table = sf.PRESETS["zero3"].bind(sf.Precision(), mesh)
    ours = sf.PRESETS["zero3"].edit("params", "grads", "master", "moments", over=("intra",)).bind(sf.Precision(), mesh)
    ours = ours.shared(("expert",), "fp32")
    slot = Slot("w", (64,), 0)
    shared = UnitSpec("attention", (SegmentSpec((slot,), 64, "fp32"),))
    experts = UnitSpec("experts", (SegmentSpec((slot,), 64, "fp32", table=ours, distinct=("expert",)),))
    units = [shared, experts]
    program = lower(table, units, mesh)
    ran = {unit.name: [(op.verb, op.axes) for op in program.last if op.axes and op.unit == unit.name] for unit in units}
    assert ran == {
        "attention": [
            ("ALL_GATHER", ("inter", "intra", "expert")),  # carved out of intra
            ("REDUCE_SCATTER", ("inter", "intra", "expert")),
        ],
        "experts": [("ALL_GATHER", ("intra",)), ("REDUCE_SCATTER", ("intra",)), ("ALL_REDUCE", ("inter",))],
    }
    sent = traffic(program, table, units, mesh)
    assert sent[Sent("gather", "ALL_GATHER", ("intra",))] == (2, 2 * 64 * 4 / 2)  # in forward and in backward
    # Of the half that this rank keeps of it: to one other rank, and back.
    assert sent[Sent("reduce", "ALL_REDUCE", ("inter",))] == (1, 64 * 4 / 2)
    assert state_bytes(table, units, mesh)["params"] == 64 * 4 * (1 / 8 + 1 / 2)


def test_a_table_over_an_axis_of_slices_is_refused() -> None:
    """A table splits over axes whose ranks sum gradients; others are refused with the axis' name."""
    table = sf.PRESETS["zero3"].edit("params", "grads", "master", "moments", over=("tensor",))
    text = _refused(lambda: table.bind(sf.Precision(), resolve_mesh(4, TENSOR)), LayoutError)
    assert "'tensor', whose ranks do not sum gradients" in text


def test_marks_are_checked() -> None:
    """A mark names a parameter of its module and an axis on which parameters can be distinct."""
    for axis, words in (("tenser", "mean 'tensor'"), ("sequence", "train the same parameters")):
        layer = nn.Linear(2, 2)
        sf.mark_slice(layer, "weight", axis=axis, dim=0)
        assert words in _refused(lambda layer=layer: sf.Engine(layer), LayoutError)
