"""Checkpoints of ranks that have slices along an axis of tensor: of any number of them, and of the whole."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.checkpoint.verify import verify
from shardfold.comm.mesh import resolve_mesh
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support.slices import TENSOR, Net, batches, build, connect, joined

ADAM = partial(torch.optim.AdamW, lr=0.05, betas=(0.5, 0.9))
Values = dict[str, Tensor]


def _engine(layout: str, mesh: Any, seed: int = 0) -> sf.Engine:
    world = dist.get_world_size() if dist.is_initialized() else 1
    place = resolve_mesh(world, mesh)
    rank, ranks = place.coords(dist.get_rank() if world > 1 else 0).get("tensor", 0), place.get("tensor", 1)
    model = build(rank, ranks, torch.float32)
    if seed:  # values that a load has to replace
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(seed)
    engine = sf.Engine(model, optimizer=ADAM, layout=layout, parallel=mesh)
    if ranks > 1:
        connect(engine)
    return engine


def _train(engine: sf.Engine, steps: int) -> None:
    for batch in batches(torch.float32)[:steps]:
        engine.backward(engine(*[t.chunk(engine.data_ranks)[engine.data_rank] for t in batch]))
        engine.step()


def _values(engine: sf.Engine) -> Values:
    """Weights and moments as ``STATE/PARAMETER``, of what this rank has; and how many steps each parameter has seen."""
    found = {f"weight/{name}": value for name, value in engine.state_dict().items()}
    update = engine.sharded.updater
    assert update is not None
    for state in update.state_dtypes():
        with engine.gathered(of=state) as values:
            found |= {f"{state}/{name}": value.clone() for name, value in values.items() if value is not None}
    for segment in engine.sharded.segments():
        for i, slot in enumerate(segment.spec.slots):
            if once := update.kept_once(segment, i):
                found[f"step/{slot.name}"] = torch.as_tensor(float(once["step"]))
    return found


def _save(folder: str, layout: str, mesh: Any) -> tuple[int, Values, Values]:
    """This rank's place on the axis of tensor; what was saved; what the run went on to."""
    engine = _engine(layout, mesh)
    _train(engine, 3)
    saved = _values(engine)
    saving = engine.save(folder)
    assert saving is not None
    saving.wait()
    _train(engine, 2)
    after = _values(engine)
    place = engine.mesh.coords.get("tensor", 0)
    engine.close()
    return place, saved, after


def _load(folder: str, layout: str, mesh: Any) -> tuple[int, Values, Values]:
    engine = _engine(layout, mesh, seed=7)
    report = engine.load(folder)
    assert (report.missing, report.unexpected) == ((), ())
    loaded = _values(engine)
    _train(engine, 2)
    after = _values(engine)
    place = engine.mesh.coords.get("tensor", 0)
    engine.close()
    return place, loaded, after


def _whole(said: list[tuple[int, Values, Values]], which: int) -> Values:
    """What ranks have together, of whom those that share slices have to have the same to the bit."""
    by_place: dict[int, Values] = {}
    for place, *values in said:
        mine = by_place.setdefault(place, values[which - 1])
        _same(values[which - 1], mine)
    slices = [by_place[place] for place in sorted(by_place)]
    return {
        key: slices[0][key] if key.startswith("step/") or len(slices) == 1 else joined(key, [s[key] for s in slices])
        for key in slices[0]
    }


def _same(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("world", "layout"), [(2, "zero3"), (2, "ddp"), (4, "zero1"), (4, "zero2"), (4, "zero3")])
def test_slices_are_saved_as_one_parameter_and_loaded_anywhere(
    ranks: Ranks, tmp_path: Path, world: int, layout: str
) -> None:
    """Two slices, by one or two ranks of data: the checkpoint is whole and has the shapes of the whole; one rank and
    two of data load all of it, and two slices their own, by any number of ranks of data, with moments and step counts,
    to the bit; ranks on the same mesh go on as the run that was not interrupted, to the bit."""
    folder = str(tmp_path / "step-3")
    said = ranks.run(_save, folder, layout, TENSOR, world_size=world)
    saved = _whole(said, 1)
    assert verify(folder).ok
    with sf.Checkpoint(folder) as checkpoint:
        for name, parameter in Net().named_parameters():
            assert checkpoint.parameters[name].shape == tuple(parameter.shape)
            for state in ("weight", "exp_avg", "exp_avg_sq"):
                assert torch.equal(checkpoint.read(name, state), saved[f"{state}/{name}"].view(-1))
    again = ranks.run(_load, folder, layout, TENSOR, world_size=world)
    _same(_whole(again, 1), saved)
    _same(_whole(again, 2), _whole(said, 2))
    _same(_whole([_load(folder, "zero3", None)], 1), saved)
    _same(_whole(ranks.run(_load, folder, "zero2", None, world_size=2), 1), saved)
    _same(_whole(ranks.run(_load, folder, "zero3", TENSOR, world_size=6 - world), 1), saved)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "layout"), [(1, "zero3"), (2, "zero2")])
def test_a_whole_model_is_loaded_into_slices_and_back(ranks: Ranks, tmp_path: Path, world: int, layout: str) -> None:
    """Out of a run without slices, by one or two ranks of data, into two slices; they save it, and one rank has what
    there was, to the bit."""
    first, second = str(tmp_path / "a" / "step-3"), str(tmp_path / "b" / "step-3")
    said = [_save(first, layout, None)] if world == 1 else ranks.run(_save, first, layout, None, world_size=world)
    saved = _whole(said, 1)
    _same(_whole(ranks.run(_pass_on, first, second, world_size=4), 1), saved)
    _same(_whole([_load(second, "zero1", None)], 1), saved)


def _from_weights(folder: str) -> tuple[int, Values]:
    with sf.meta_init():
        model = build(dist.get_rank() % 2, 2, torch.float32)
    engine = sf.Engine(model, layout="zero3", parallel=TENSOR, init=sf.Init(weights=folder))
    values = {f"weight/{name}": value for name, value in engine.state_dict().items()}
    engine.close()
    return dist.get_rank() % 2, values


def test_weights_of_the_whole_are_read_into_slices(ranks: Ranks, tmp_path: Path) -> None:
    """``weights=`` with the shapes of the whole gives each rank its slice, as of a model that was trained elsewhere."""
    folder = str(tmp_path / "step-3")
    _, saved, _ = _save(folder, "zero3", None)
    found = _whole(ranks.run(_from_weights, folder, world_size=4), 1)
    _same(found, {key: value for key, value in saved.items() if key.startswith("weight/")})


def _pass_on(first: str, second: str) -> tuple[int, Values]:
    engine = _engine("zero3", TENSOR, seed=7)
    engine.load(first)
    engine.save(second, wait=True)
    values = _values(engine)
    place = engine.mesh.coords["tensor"]
    engine.close()
    return place, values


# -- slices that are not equal ----------------------------------------------------------------------------------------

CUTS = ((0, 5), (5, 7))


class Uneven(nn.Module):
    """Five or two of seven outputs, or all of them."""

    def __init__(self, part: int | None) -> None:
        super().__init__()
        a, b = (0, 7) if part is None else CUTS[part]
        whole = torch.arange(21.0).view(7, 3) / 8
        self.mine = slice(a, b)
        self.weight = nn.Parameter(whole[a:b].clone())
        self.shared = nn.Parameter(torch.ones(3))
        if part is not None:
            sf.mark_slice(self, "weight", axis="tensor", whole=(7, 3), start=(a, 0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() + (self.shared * x).sum()


def _uneven(folder: str) -> tuple[Values, Values]:
    tensor = dist.get_rank() % 2
    engine = sf.Engine(Uneven(tensor), optimizer=ADAM, layout="zero3", parallel=TENSOR)
    for step in range(3):
        engine.backward(engine(torch.arange(3.0) - step))
        engine.step()
    engine.save(folder, wait=True)
    values = _values(engine)
    engine.close()
    engine = sf.Engine(Uneven(tensor), optimizer=ADAM, layout="zero2", parallel=TENSOR)
    engine.load(folder)
    loaded = _values(engine)
    engine.close()
    return values, loaded


def test_parts_of_other_sizes(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks along the axis may have parts of different sizes, with their places given: they train, save, and load."""
    said = ranks.run(_uneven, str(tmp_path / "x"), world_size=4)
    for values, loaded in said:
        _same(loaded, values)
    engine = sf.Engine(Uneven(None), optimizer=ADAM)
    engine.load(tmp_path / "x")
    for key, value in _values(engine).items():
        parts = [values[key] for values, _ in said[:2]]
        assert torch.equal(value, torch.cat(parts) if "weight" in key.split("/")[1] and value.dim() else parts[0]), key
    engine.close()


class OnOne(nn.Module):
    """All of a parameter, or nothing of it; ``has=None``: no slice."""

    def __init__(self, has: bool | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(18.0).view(6, 3)[: 6 if has is not False else 0].clone())
        if has is not None:
            sf.mark_slice(self, "weight", axis="tensor", whole=(6, 3), start=(0 if has else 6, 0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).square().sum()


def _on_one(folder: str) -> tuple[Values, Values]:
    found: list[Values] = []
    for fresh in (True, False):
        with closing(sf.Engine(OnOne(dist.get_rank() == 1), optimizer=ADAM, layout="zero2", parallel=TENSOR)) as engine:
            if fresh:
                engine.backward(engine(torch.ones(3)))
                engine.step()
                engine.save(folder, wait=True)
            else:
                engine.load(folder)
            found.append(_values(engine))
    return found[0], found[1]


def test_a_part_that_is_the_whole_beside_one_that_is_empty(ranks: Ranks, tmp_path: Path) -> None:
    """Sizes need not go up on all ranks: one may have all of a parameter and the other nothing. It is saved and loaded,
    there and on one rank."""
    nothing, everything = ranks.run(_on_one, str(tmp_path / "x"), world_size=2)
    for values, loaded in (nothing, everything):
        _same(loaded, values)
    assert nothing[0]["weight/weight"].shape == (0, 3)
    with closing(sf.Engine(OnOne(None), optimizer=ADAM)) as engine:
        engine.load(tmp_path / "x")
        _same(_values(engine), everything[0])


# -- what is refused --------------------------------------------------------------------------------------------------


class Stamped(nn.Module):
    """A buffer that may differ, beside a slice of which nothing more is said."""

    def __init__(self, stamp: float, *names: str) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)
        nn.init.ones_(self.inside.weight)
        nn.init.ones_(self.inside.bias)
        self.register_buffer("stamp", torch.tensor(stamp))
        for name in names:
            sf.mark_slice(self.inside, name, axis="tensor")

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).sum()


def _refused(folder: str) -> list[str]:
    texts: list[str] = []
    engine = sf.Engine(Stamped(0.0, "bias"), optimizer=ADAM, parallel=TENSOR)
    for call in (engine.save, engine.load):
        with pytest.raises(ConfigError) as raised:
            call(folder)
        texts.append(str(raised.value))
    engine.close()
    engine = sf.Engine(Stamped(float(dist.get_rank())), optimizer=ADAM, parallel=TENSOR)
    with pytest.raises(ConfigError) as raised:
        engine.save(folder)
    texts.append(str(raised.value))
    engine.close()
    engine = sf.Engine(
        Stamped(float(dist.get_rank() // 2)), optimizer=ADAM, parallel=TENSOR
    )  # along data: rank 0's counts
    engine.save(folder, wait=True)
    engine.close()
    return texts


def test_what_a_checkpoint_does_not_tell_apart_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """On every rank, with one sentence: a parameter that differs along the axis and of which nothing says which part it
    is, by its name; and a buffer that differs there, of which a checkpoint has one."""
    for save, load, buffer in ranks.run(_refused, str(tmp_path / "x"), world_size=4):
        for call, text in (("engine.save()", save), ("engine.load()", load)):
            assert text.startswith(f"{call}: each rank along the axis 'tensor' has another 'inside.bias'")
            assert "mark_slice(module, 'bias', axis='tensor', dim=...)" in text
        assert "the buffers of rank 1 differ from rank 0's ('stamp' with the checksum" in buffer
        assert "persistent=False" in buffer
