"""A head whose classes are split over ranks that read other samples, against plain PyTorch with all of both."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.parallel import MarginHead
from shardfold.testing import Ranks

CLASSES, WIDTH, ROWS, STEPS = 23, 6, 12, 4
ADAM = partial(torch.optim.AdamW, lr=0.05, betas=(0.5, 0.9))
LIMIT = 0.3
ARC: dict[str, Any] = {"scale": 8.0, "angle": 0.5}
COS: dict[str, Any] = {"scale": 8.0, "angle": 0.0, "cosine": 0.35}


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self, dtype: torch.dtype = torch.float64, classes: int = CLASSES, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.head = MarginHead(WIDTH, classes, **options)
        self.to(dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.backbone(x), y)


def batches(dtype: torch.dtype = torch.float64, classes: int = CLASSES) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, 5, generator=draw, dtype=torch.float64).to(dtype),
            torch.randint(classes, (ROWS,), generator=draw),
        )
        for _ in range(STEPS)
    ]


def angular(
    features: Tensor, weight: Tensor, targets: Tensor, scale: float, angle: float, cosine: float = 0.0
) -> Tensor:
    """ArcFace and CosFace as their papers write them, with angles."""
    cosines = F.normalize(features) @ F.normalize(weight).t()
    own = F.one_hot(targets, len(weight)).bool()
    theta = cosines.clamp(-1 + 1e-15, 1 - 1e-15).acos()
    far = theta + angle > math.pi
    bent = torch.where(far, cosines - angle * math.sin(angle), (theta + angle).cos()) - cosine
    return F.cross_entropy(scale * torch.where(own, bent, cosines), targets)


def plain(margin: dict[str, Any], dtype: torch.dtype) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of one process with plain PyTorch."""
    model, losses, norms = Net(dtype), [], []
    optimizer = ADAM(model.parameters())
    for x, y in batches(dtype):
        loss = angular(model.backbone(x), model.head.weight, y, **margin)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def _part(t: Tensor, uneven: bool) -> Tensor:
    """This rank's samples, as many as the others', or more on the first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if not uneven:
        return t.chunk(ranks)[rank]
    least = ROWS // ranks - 1
    return t.split([ROWS - least * (ranks - 1), *[least] * (ranks - 1)])[rank]


def trains_like_the_dense(
    layout: str,
    margin: dict[str, Any],
    dtype: torch.dtype,
    rel: float,
    uneven: bool = False,
    mesh: dict[str, int] | None = None,
    **options: Any,
) -> None:
    engine = sf.Engine(
        Net(dtype, **margin, **options), optimizer=ADAM, layout=layout, clip_norm=LIMIT, parallel=mesh,
        runtime=sf.Runtime(debug=dtype == torch.float64),
    )  # fmt: skip
    losses, norms = [], []
    for batch in batches(dtype):
        x, y = (_part(t, uneven) for t in batch)
        loss = engine(x, y)
        engine.backward(loss, weight=float(len(x)) if uneven else None)
        norms.append(engine.step().grad_norm)
        losses.append(engine.mean(loss.item(), weight=len(x)))
    expected, expected_norms, whole = plain(margin, dtype)
    assert min(expected_norms) > LIMIT
    assert losses == pytest.approx(expected, rel=rel)
    assert norms == pytest.approx(expected_norms, rel=rel)
    ranks = dist.get_world_size() if "axis" not in options else (mesh or {}).get(options["axis"], 1)
    rank = dist.get_rank() % ranks  # "intra" is the last axis
    for name, value in engine.state_dict().items():
        mine = whole[name].tensor_split(ranks)[rank] if name == "head.weight" else whole[name]
        assert torch.allclose(value, mine, rtol=rel, atol=rel), name
    assert all(row.sent == row.program for row in engine.traffic().rows), engine.traffic()
    engine.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("layout", "world", "margin", "uneven"),
    [
        ("ddp", 2, ARC, False), ("zero1", 3, COS, False), ("zero2", 4, ARC, False), ("zero3", 2, COS, True),
        ("fsdp2", 3, ARC, True), ("zero2", 1, ARC, False),
    ],
)  # fmt: skip
def test_split_classes_train_like_the_dense_head(
    ranks: Ranks, layout: str, world: int, margin: dict[str, Any], uneven: bool
) -> None:
    """23 classes over 1 to 4 ranks: losses, norms of gradients and weights are those of one process with all classes
    and all samples, to 1e-12 in fp64, also where ranks have other numbers of samples."""
    ranks.run(trains_like_the_dense, layout, margin, torch.float64, 1e-12, uneven, world_size=world)


@pytest.mark.parametrize(
    ("layout", "nodes", "world", "uneven", "axis"),
    [
        ("zero2", 2, 2, True, None), ("hsdp", 2, 4, True, None), ("zero3", 2, 4, False, None),
        ("zero2", 2, 4, False, "intra"),
    ],
)  # fmt: skip
def test_classes_are_split_over_nodes_and_within(
    ranks: Ranks, layout: str, nodes: int, world: int, uneven: bool, axis: str | None
) -> None:
    """On 2 nodes of one rank and of two, over all ranks by default and over those of a node where that is asked for:
    losses, norms and weights are the dense head's, and what is sent is what the table says."""
    options = {} if axis is None else {"axis": axis}
    trains = partial(trains_like_the_dense, mesh={"inter": nodes, "intra": world // nodes}, **options)
    ranks.run(trains, layout, ARC, torch.float64, 1e-12, uneven, world_size=world)


def _sent_between() -> dict[str, list[str]]:
    engine = sf.Engine(Net(**ARC), optimizer=ADAM, layout="zero2", parallel={"inter": 2, "intra": 1})
    for x, y in batches()[:2]:
        engine.backward(engine(_part(x, False), _part(y, False)))
        engine.step()
    units = {unit.name: [str(s.distinct) for s in unit.spec.segments] for unit in engine.units}
    engine.close()
    return units


def test_one_rank_per_node_has_its_part_of_the_classes(ranks: Ranks) -> None:
    """No gradient of a split head crosses the link between nodes: for the layout it is distinct there."""
    units = ranks.run(_sent_between, world_size=2)[0]
    assert units["head"] == ["('inter',)"]
    assert {each for name, of in units.items() if name != "head" for each in of} == {"()"}


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "offload", "infinity"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("margin", [ARC, COS])
def test_all_layouts(ranks: Ranks, layout: str, world: int, margin: dict[str, Any]) -> None:
    """The same under every layout, also with even and uneven batches."""
    for uneven in (False, True)[:world]:
        ranks.run(trains_like_the_dense, layout, margin, torch.float64, 1e-12, uneven, world_size=world)


def test_same_curve_in_fp32(ranks: Ranks) -> None:
    """In fp32 the losses are those of the dense head to 1e-5, and so are a replicated head's."""
    ranks.run(trains_like_the_dense, "zero2", ARC, torch.float32, 1e-5, world_size=2)
    ranks.run(partial(trains_like_the_dense, axis=None), "zero2", ARC, torch.float32, 1e-5, world_size=2)


def test_all_classes_sampled_is_the_full_head(ranks: Ranks) -> None:
    """Partial FC that takes every class, through the sampling, is the full head."""
    ranks.run(partial(trains_like_the_dense, sample=0.999), "zero2", COS, torch.float64, 1e-12, world_size=3)


def _means() -> Tensor:
    engine = sf.Engine(Net(**ARC), optimizer=partial(torch.optim.SGD, lr=1.0), layout="zero3")
    x, y = (_part(t, True) for t in batches()[0])
    engine.backward(engine(x, y))
    engine.step()
    state = engine.state_dict()
    engine.close()
    return torch.cat([value.flatten() for value in state.values()])


def test_ranks_with_other_numbers_of_rows_count_alike(ranks: Ranks) -> None:
    """Without weights the gradient is that of the mean of the ranks' own means, as under DDP."""
    model = Net()
    x, y = batches()[0]
    for part in (slice(0, 7), slice(7, 12)):
        (angular(model.backbone(x[part]), model.head.weight, y[part], **ARC) / 2).backward()
    expected = {name: p.detach() - p.grad for name, p in model.named_parameters()}
    for rank, found in enumerate(ranks.run(_means, world_size=2)):
        mine = {**expected, "head.weight": expected["head.weight"].tensor_split(2)[rank]}
        assert torch.allclose(found, torch.cat([value.flatten() for value in mine.values()]), rtol=1e-12, atol=1e-12)


def _sampled() -> tuple[Tensor, Tensor]:
    engine = sf.Engine(Net(sample=0.25), optimizer=partial(torch.optim.SGD, lr=1.0), layout="ddp")
    before = engine.state_dict()["head.weight"].clone()
    x, y = (_part(t, False) for t in batches()[0])
    engine.backward(engine(x, y))
    engine.step()
    changed = (engine.state_dict()["head.weight"] != before).any(1)
    engine.close()
    return changed, batches()[0][1]


def test_sampling_takes_targets_and_some_others(ranks: Ranks) -> None:
    """Partial FC gives gradients to the classes of the targets of all ranks, and to no more than its share besides."""
    said = ranks.run(_sampled, world_size=2)
    changed = torch.cat([mine for mine, _ in said])
    targets = said[0][1].unique()
    assert changed[targets].all()
    for mine, own in zip([mine for mine, _ in said], (targets[targets < 12], targets[targets >= 12]), strict=True):
        assert int(mine.sum()) == max(len(own), round(len(mine) * 0.25))


def _write(path: Path) -> None:
    engine = sf.Engine(Net(), optimizer=ADAM, layout="zero2")
    for x, y in batches()[:2]:
        engine.backward(engine(_part(x, False), _part(y, False)))
        engine.step()
    engine.save(path, wait=True)
    engine.close()


def _go_on(path: Path, layout: str, mesh: dict[str, int] | None = None) -> list[float]:
    engine = sf.Engine(Net(), optimizer=ADAM, layout=layout, parallel=mesh)
    engine.load(path)
    losses = []
    for x, y in batches()[2:]:
        loss = engine(_part(x, False), _part(y, False))
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    engine.close()
    return losses


def test_checkpoints_load_on_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """What 3 ranks wrote, whose parts of the classes are 8, 8 and 7, goes on on 2, 4 and 1 as where nothing was
    stopped."""
    ranks.run(_write, tmp_path / "ckpt", world_size=3)
    expected = ranks.run(_go_on, tmp_path / "ckpt", "zero2", world_size=3)[0]
    for world, layout, mesh in ((2, "zero3", None), (4, "ddp", {"inter": 2, "intra": 2}), (1, "zero1", None)):
        found = ranks.run(_go_on, tmp_path / "ckpt", layout, mesh, world_size=world)[0]
        assert found == pytest.approx(expected, rel=1e-12), world


def _mixed() -> tuple[dict[str, str], dict[str, str], float, list[str]]:
    precision = {"head": "fp32", "*": "fp16"}
    engine = sf.Engine(Net(torch.float32), optimizer=ADAM, layout="zero2", precision=precision, loss_scale=1024.0)
    x, y = (_part(t, False) for t in batches(torch.float32)[0])
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()
    dtypes = {name: str(p.dtype) for name, p in engine.module.named_parameters()}
    tables = {unit.name: str(unit.spec.table_or(engine.layout).grads.over) for unit in engine.units}
    sent = [row.op for row in engine.traffic().rows if row.purpose == "reduce"]
    engine.close()
    return dtypes, tables, loss.item(), sent


def test_precision_and_layout_of_its_own(ranks: Ranks) -> None:
    """Under zero2 in fp16 the head is fp32, and split over nothing: each rank has its classes complete."""
    dtypes, tables, loss, _ = ranks.run(_mixed, world_size=2)[0]
    assert dtypes["head.weight"] == "torch.float32" and dtypes["backbone.0.weight"] == "torch.float16"
    assert tables["head"] == "()" and any("intra" in each for each in tables.values()), tables
    assert math.isfinite(loss)


def _memory(axis: str | None) -> tuple[float, int]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": MarginHead(64, 1001, axis=axis)})
    engine = sf.Engine(model, optimizer=ADAM, layout="ddp")
    report = engine.memory()
    engine.close()
    return sum(row.held for row in report.rows), sum(row.table + row.padding for row in report.rows)


def test_memory_is_divided(ranks: Ranks) -> None:
    """Of states of the head each of two ranks holds half, and the table says so."""
    (split, said), (whole, _) = (ranks.run(_memory, axis, world_size=2)[0] for axis in ("intra", None))
    assert split == said
    assert 0.5 <= split / whole < 0.51


def _refused(options: dict[str, Any], mesh: Any, shapes: tuple[int, int]) -> str:
    with pytest.raises(ConfigError) as error:
        engine = sf.Engine(Net(**options), optimizer=ADAM, parallel=mesh)
        rows = shapes[dist.get_rank()]
        engine(torch.zeros(rows, 5, dtype=torch.float64), torch.zeros(abs(rows - 1), dtype=torch.long))
    return str(error.value)


def _refuses_rare() -> str:
    with pytest.raises(ConfigError) as error:
        sf.Engine(
            Net(axis="inter"),
            optimizer=ADAM,
            parallel={"inter": 2, "intra": 1},
            layout=sf.PRESETS["zero3"].replace(outer=sf.Outer(every=2)),
        )
    return str(error.value)


def _refuses_optimizer() -> str:
    with pytest.raises(ConfigError) as error:
        sf.Engine(Net(), optimizer=partial(sf.optim.LAMB, lr=0.1))
    return str(error.value)


@pytest.mark.soak
def test_refusals(ranks: Ranks) -> None:
    """One sentence on every rank: targets that do not fit on one of them, an axis whose ranks read the same, too few
    classes."""
    said = ranks.run(_refused, {}, None, (1, 3), world_size=2)
    assert all("one target for each row; they are other on rank 0 of 2" in each for each in said)
    said = ranks.run(_refused, {"axis": "tensor"}, {"tensor": 2}, (1, 1), world_size=2)
    assert "axis='tensor', on which ranks read the same samples" in said[0]
    said = ranks.run(_refused, {"axis": "intre"}, None, (1, 1), world_size=2)
    assert "axis='intre', which the mesh does not have. Did you mean 'intra'" in said[0]
    with_outer = ranks.run(_refuses_rare, world_size=2)
    assert "axis='inter', on which ranks come together now and then only" in with_outer[0]
    said = ranks.run(_refuses_optimizer, world_size=2)
    assert "LAMB needs all of 'head.weight'" in said[0] and "the ranks that have the rest read other samples" in said[0]
    said = ranks.run(_refused, {"classes": 1}, None, (1, 1), world_size=2)
    assert "1 class and axis='data', over 2 ranks: each needs one at least. Give it axis=None" in said[0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"angle": 2.0}, "angle is 2.0, but must be from 0 to pi / 2"),
        ({"scale": 0.0}, "scale is 0.0, but must be more than 0 and finite"),
        ({"scale": math.inf}, "scale is inf, but must be more than 0 and finite"),
        ({"sample": 0.0}, "sample is 0.0, but must be more than 0 and at most 1"),
        ({"classes": 0}, "classes is 0, but must be a whole number"),
        ({"cosine": -1.0}, "cosine is -1.0, but must be 0 or more, and finite"),
        ({"cosine": math.inf}, "cosine is inf, but must be 0 or more, and finite"),
        ({"axis": 3}, "axis is 3, but must be None or an axis's name. Known: data, expert"),
        ({"axis": ""}, "axis is '', but must be None or an axis's name"),
    ],
)
def test_options_that_are_none(wrong: dict[str, Any], words: str) -> None:
    """Each is refused with a sentence; an axis of another name is the engine's to know, whose mesh may have it."""
    with pytest.raises(ConfigError, match=words):
        MarginHead(WIDTH, **{"classes": 3, **wrong})


def test_an_axis_that_the_mesh_does_not_have_is_refused_on_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"'head' has axis='dta', .*\. Did you mean 'data'"):
        sf.Engine(Net(axis="dta"), optimizer=ADAM)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.tensor([0, CLASSES]), f"a target is {CLASSES}, but there are {CLASSES} classes, 0 to {CLASSES - 1}"),
        (torch.tensor([-1, CLASSES]), "a target is -1, but there are"),
        (torch.tensor([0.0, 1.0]), r"as integers, one target for each row; .* and torch\.float32 \(2,\)"),
        (torch.tensor([True, False]), r"here torch\.float64 \(2, 6\) and torch\.bool \(2,\)"),
        ([0, 1], r"and \[0, 1\]"),
        (torch.zeros(0, dtype=torch.long), "are other: here"),
    ],
)
def test_targets_that_are_none(targets: Any, words: str) -> None:
    """On one rank each is refused with a sentence, and so is a batch without rows."""
    head = MarginHead(WIDTH, CLASSES).double()
    with pytest.raises(ConfigError, match=words):
        head(torch.zeros(2, WIDTH, dtype=torch.float64), targets)
    with pytest.raises(ConfigError, match="got no row that counts: there is no mean of nothing"):
        head(torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.long))


def _refused_targets() -> list[str]:
    engine, said = sf.Engine(Net(), optimizer=ADAM), []
    first: dict[str, list[Any]] = {  # of each batch of targets rank 0's, and then rank 1's
        "class": [torch.tensor([0, 1]), torch.tensor([0, CLASSES])],
        "float": [torch.tensor([0.0, 1.0]), torch.tensor([0, 1])],
        "list": [torch.tensor([0, 1]), [0, 1]],
        "none": [torch.tensor([-100, -100])] * 2,
    }
    for mine in first.values():
        with pytest.raises(ConfigError) as error:
            engine(torch.zeros(2, 5, dtype=torch.float64), mine[dist.get_rank()])
        said.append(str(error.value))
    engine.backward(engine(torch.ones(2, 5, dtype=torch.float64), torch.tensor([0, 1], dtype=torch.int32)))
    engine.close()
    return said


def test_targets_are_refused_on_every_rank(ranks: Ranks) -> None:
    """Where those of one rank do not do, both ranks are told alike, with the rank and the value, and go on together."""
    for said in ranks.run(_refused_targets, world_size=2):
        assert f"a target on rank 1 of 2 along 'data' is {CLASSES}, but there are {CLASSES} classes" in said[0]
        assert "they are other on rank 0 of 2" in said[1] and "they are other on rank 1 of 2" in said[2]
        assert "got on no rank along 'data' a row that counts" in said[3]


def _one_without_rows(ignored: bool) -> tuple[float, dict[str, Tensor]]:
    engine = sf.Engine(Net(**ARC), optimizer=partial(torch.optim.SGD, lr=1.0), layout="zero2")
    (x, y), mine = batches()[0], dist.get_rank() == 0
    if not mine:
        x, y = (x, torch.full_like(y, -100)) if ignored else (x[:0], y[:0])
    loss = engine(x, y)
    engine.backward(loss, weight=float(mine))
    engine.step()
    state = engine.state_dict()
    engine.close()
    return loss.item(), state


@pytest.mark.parametrize("ignored", [False, True])
def test_a_rank_without_rows_adds_nothing(ranks: Ranks, ignored: bool) -> None:
    """Of two ranks one has no rows, or none that counts: its loss is 0, and the step is the other rank's alone."""
    model = Net()
    x, y = batches()[0]
    expected = angular(model.backbone(x), model.head.weight, y, **ARC)
    expected.backward()
    whole = {name: p.detach() - p.grad for name, p in model.named_parameters()}
    (loss, _), (none, _) = said = ranks.run(_one_without_rows, ignored, world_size=2)
    assert loss == pytest.approx(expected.item(), rel=1e-12) and none == 0.0
    for rank, (_, state) in enumerate(said):
        mine = {**whole, "head.weight": whole["head.weight"].tensor_split(2)[rank]}
        assert all(torch.allclose(state[name], mine[name], rtol=1e-12, atol=1e-12) for name in mine)


@pytest.mark.parametrize("sample", [1.0, 0.999])
def test_rows_that_do_not_count_on_one_rank(sample: float) -> None:
    """Targets of -100 on one rank, which has all classes: the loss is that of the other rows."""
    head = MarginHead(WIDTH, CLASSES, **ARC, sample=sample).double()
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(6, WIDTH, generator=draw, dtype=torch.float64), torch.tensor([0, -100, 3, 22, -100, 7])
    loss, expected = head(x, y), angular(x[y >= 0], head.weight, y[y >= 0], **ARC)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    mine, theirs = (torch.autograd.grad(each, head.weight)[0] for each in (loss, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_without_an_engine() -> None:
    """It is a module of plain PyTorch too."""
    model = Net(**ARC)
    x, y = batches()[0]
    loss = model(x, y)
    loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = angular(model.backbone(x), model.head.weight, y, **ARC)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    for mine, p in zip(found, model.parameters(), strict=True):
        assert torch.allclose(mine, p.grad, rtol=1e-11, atol=1e-13)
