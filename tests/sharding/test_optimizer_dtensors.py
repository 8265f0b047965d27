"""The optimizer's state as DTensors: ``torch.distributed.checkpoint`` and FSDP2 read and write it, and train on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfold as sf
from shardfold.errors import ModelError, ShardfoldError, UsageError
from shardfold.testing import Ranks
from tests.support.options import grouped

KINDS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.8, 0.95), weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
}
FOUR = {"inter": 2, "intra": 2}


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer than ranks, ties, and what is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(67, 3)  # shards end inside of it
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.still = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.head = nn.Linear(3, 67, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.still(self.inner(self.table(x))))


def made(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def in_two_groups(kind: str, model: nn.Module) -> Any:
    """Two groups of other options."""
    inner = [p for name, p in model.named_parameters() if name.startswith("inter") or name.startswith("inner")]
    rest = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("inner")]
    return KINDS[kind]([{"params": inner, "lr": 0.05}, {"params": rest, "lr": 0.02}])


def engine_of(kind: str, seed: int = 0, **options: Any) -> sf.Engine:
    model = made(seed)
    return sf.Engine(model, optimizer=in_two_groups(kind, model), **grouped(**options))


def fsdp2(kind: str, seed: int) -> tuple[Any, Any]:
    model = made(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.inner, model.still):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, in_two_groups(kind, model)


def batches(start: int, count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(67, (12,), generator=draw) for _ in range(start + count)][start:]


def mine(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train_engine(engine: sf.Engine, start: int, count: int) -> None:
    for batch in batches(start, count):
        engine.backward(engine(mine(batch)).square().mean())
        engine.step()


def train_fsdp2(model: Any, optimizer: Any, start: int, count: int) -> None:
    for batch in batches(start, count):
        optimizer.zero_grad()
        model(mine(batch)).square().mean().backward()
        optimizer.step()


def whole(value: Any) -> Any:
    """The same, with whole tensors of its own."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def differing(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two nested values are not the same to the bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{at}: {sorted(one)} and {sorted(other)}"] if one.keys() != other.keys() else []
        return found + [
            w for name in one.keys() & other.keys() for w in differing(one[name], other[name], f"{at}/{name}")
        ]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [f"{at}: {one} and {other}"]
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """With groups by their members, however these are ordered; without how an update is computed."""
    means = ("params", "foreach", "fused", "capturable", "differentiable")
    groups = {",".join(sorted(group["params"])): group for group in state["param_groups"]}
    options = {names: {n: v for n, v in group.items() if n not in means} for names, group in groups.items()}
    return {"state": state["state"], "groups": options}


Kept = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def _engine_writes(folder: Path, kind: str, options: dict[str, Any]) -> Kept:
    """Weights and states that were saved, and weights two steps later."""
    engine = engine_of(kind, **options)
    train_engine(engine, 0, 2)
    state = {"model": engine.state_dict(sharded=True), "optim": engine.optimizer_state_dict()}
    dcp.save(state, checkpoint_id=folder)
    saved = whole(state)
    train_engine(engine, 2, 2)
    found = saved["model"], by_name(saved["optim"]), whole(engine.state_dict())
    engine.close()
    return found


def _fsdp2_reads(folder: Path, kind: str) -> Kept:
    model, optimizer = fsdp2(kind, 1)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    found = whole(model.state_dict()), by_name(whole(get_optimizer_state_dict(model, optimizer)))
    train_fsdp2(model, optimizer, 2, 2)
    return *found, whole(model.state_dict())


def _fsdp2_writes(folder: Path, kind: str) -> Kept:
    model, optimizer = fsdp2(kind, 1)
    train_fsdp2(model, optimizer, 0, 2)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    saved = whole(state)
    train_fsdp2(model, optimizer, 2, 2)
    return saved["model"], by_name(saved["optim"]), whole(model.state_dict())


def _engine_reads(folder: Path, kind: str, options: dict[str, Any]) -> Kept:
    engine = engine_of(kind, **options)
    train_engine(engine, 0, 1)  # other values, other counts
    state = {"model": engine.state_dict(sharded=True), "optim": engine.optimizer_state_dict()}
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state["model"])
    engine.load_optimizer_state_dict(state["optim"])
    found = whole(engine.state_dict()), by_name(whole(engine.optimizer_state_dict()))
    train_engine(engine, 2, 2)
    after = whole(engine.state_dict())
    engine.close()
    return *found, after


CASES = [
    pytest.param("adamw", 2, {"layout": "zero3"}, 3, id="zero3"),
    pytest.param("amsgrad", 3, {"layout": "zero1"}, 2, id="zero1-amsgrad"),
    pytest.param("momentum", 2, {"layout": "zero2", "offload": {"optimizer": "host"}}, 1, id="host-momentum"),
    pytest.param("sgd", 2, {"layout": "zero3"}, 1, id="sgd", marks=pytest.mark.soak),
    pytest.param("adamw", 1, {"layout": "ddp"}, 2, id="alone", marks=pytest.mark.soak),
    pytest.param("adamw", 2, {"layout": "ddp"}, 3, id="ddp", marks=pytest.mark.soak),
    pytest.param("adamw", 4, {"layout": "hsdp", "mesh": FOUR}, 3, id="hsdp", marks=pytest.mark.soak),
    pytest.param("adamw", 4, {"layout": "hpz", "mesh": FOUR}, 2, id="hpz", marks=pytest.mark.soak),
    pytest.param("amsgrad", 4, {"layout": "zero3", "mesh": FOUR}, 1, id="nodes", marks=pytest.mark.soak),
]


def same_run(wrote: Kept, read: Kept) -> None:
    """To the bit what was saved; behind it sums are over other ranks."""
    assert differing(wrote[0], read[0]) == [] and differing(wrote[1], read[1]) == []
    for name, value in wrote[2].items():
        torch.testing.assert_close(read[2][name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert name.startswith("still") or not torch.equal(value, wrote[0][name])


@pytest.mark.parametrize(("kind", "world", "options", "other"), CASES)
def test_fsdp2_goes_on_where_an_engine_was(
    ranks: Ranks, tmp_path: Path, kind: str, world: int, options: dict[str, Any], other: int
) -> None:
    wrote = ranks.run(_engine_writes, tmp_path, kind, options, world_size=world)[0]
    for read in ranks.run(_fsdp2_reads, tmp_path, kind, world_size=other):
        same_run(wrote, read)


@pytest.mark.parametrize(("kind", "other", "options", "world"), CASES)
def test_an_engine_goes_on_where_fsdp2_was(
    ranks: Ranks, tmp_path: Path, kind: str, other: int, options: dict[str, Any], world: int
) -> None:
    wrote = ranks.run(_fsdp2_writes, tmp_path, kind, world_size=world)[0]
    for read in ranks.run(_engine_reads, tmp_path, kind, options, world_size=other):
        same_run(wrote, read)


def _placed() -> list[Any]:
    """Moments of 3 rows on 2 ranks, whose masters end inside of a row: where they lie, and that any placements are
    read."""
    engine = sf.Engine(
        nn.Linear(100, 3, bias=False), optimizer=partial(torch.optim.Adam, lr=0.1), layout="zero1", precision="bf16"
    )
    engine.backward(engine(torch.ones(2, 100, dtype=torch.bfloat16)).square().mean())
    engine.step()
    state = engine.optimizer_state_dict()
    kept = state["state"]["weight"]
    found: list[Any] = [
        kept["exp_avg"].placements == (Shard(0),),
        tuple(kept["exp_avg"].to_local().shape) == ((2, 100), (1, 100))[dist.get_rank()],
        kept["exp_avg"].dtype == torch.float32 and kept["step"].item() == 1.0,
        engine.state_dict(sharded=True)["weight"].placements == (Replicate(),),
        state["param_groups"][0]["params"] == ["weight"],
    ]
    mesh, want = init_device_mesh("cpu", (2,)), torch.arange(300.0).view(3, 100)
    for one in (
        distribute_tensor(want, mesh, [Shard(0)]),
        distribute_tensor(want, mesh, [Shard(1)]),
        distribute_tensor(want, mesh, [Replicate()]),
        DTensor.from_local(want / 2, mesh, [Partial()]),
        want,
    ):
        engine.load_optimizer_state_dict(state)
        group = {**state["param_groups"][0], "lr": 0.5}
        given = {"exp_avg": one, "exp_avg_sq": kept["exp_avg_sq"], "step": torch.tensor(9.0)}
        engine.load_optimizer_state_dict({"state": {"weight": given}, "param_groups": [group]})
        back = engine.optimizer_state_dict()
        found.append(torch.equal(back["state"]["weight"]["exp_avg"].full_tensor(), want))
        found.append(differing(whole(back["state"]["weight"]["exp_avg_sq"]), whole(kept["exp_avg_sq"])) == [])
        found.append(back["state"]["weight"]["step"].item() == 9.0 and engine.optimizer.param_groups[0]["lr"] == 0.5)
    engine.close()
    return found


def test_moments_lie_where_masters_do_and_any_placements_are_read(ranks: Ranks) -> None:
    for found in ranks.run(_placed, world_size=2):
        assert all(found), found


def _raised(kind: type[ShardfoldError], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def _refused(folder: Path) -> list[str]:
    said: list[str] = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (partial(sf.optim.AdamW8bit, lr=0.1), {}),
        (partial(sf.optim.Muon, lr=0.1), {}),
        (partial(torch.optim.Adagrad, lr=0.1), {}),
        (partial(torch.optim.AdamW, lr=0.1), {"offload": {"optimizer": "disk", "folder": str(folder)}}),
        (partial(torch.optim.AdamW, lr=0.1), {"mesh": {"inter": 2, "intra": 1}, "outer": sf.Outer(every=2)}),
        (None, {}),
    ]
    for optimizer, options in cases:
        engine = sf.Engine(nn.Linear(4, 4, bias=False), optimizer=optimizer, **grouped(**options))
        said.append(_raised(UsageError, engine.optimizer_state_dict))
        loads = _raised(UsageError, lambda engine=engine: engine.load_optimizer_state_dict({}))
        assert loads == said[-1].replace("engine.optimizer_state_dict()", "engine.load_optimizer_state_dict()")
        engine.close()
    engine = sf.Engine(nn.Linear(4, 4, bias=False), optimizer=partial(torch.optim.AdamW, lr=0.1))
    state = engine.optimizer_state_dict()
    kept, before = state["state"]["weight"], whole(state)
    for given in (
        {},
        {"state": {}, "param_groups": []},
        {"state": {"weight": kept, "bias": kept}, "param_groups": []},
        {"state": {"weight": {"exp_avg": kept["exp_avg"], "step": 1}}, "param_groups": []},
        {"state": {"weight": {**kept, "max_exp_avg_sq": kept["exp_avg"]}}, "param_groups": []},
        {"state": {"weight": {**kept, "exp_avg": torch.zeros(4)}}, "param_groups": []},
    ):
        said.append(_raised(ModelError, lambda given=given: engine.load_optimizer_state_dict(given)))
    assert differing(whole(engine.optimizer_state_dict()), before) == []
    engine.close()
    return said


def test_what_cannot_be_given_is_refused_in_one_sentence(ranks: Ranks, tmp_path: Path) -> None:
    said, _ = ranks.run(_refused, tmp_path, world_size=2)
    bits, muon, adagrad, disk, outer, none, form, missing, extra, lacks, more, shape = said
    for text, name in ((bits, "AdamW8bit"), (muon, "Muon"), (adagrad, "Adagrad")):
        assert f"works for AdamW, Adam and SGD, but {name} has an update and a state of its own" in text
        assert text.endswith("or use engine.save() and engine.load().")
    assert "moments rest on disk" in disk and "states, of their own" in outer and "has no optimizer" in none
    assert 'a dict of "state" and "param_groups"' in form
    assert "it has nothing of 'weight'" in missing and "it has 'bias', which is not trained here" in extra
    assert "of 'weight' it has no 'exp_avg_sq'" in lacks
    assert "of 'weight' it has 'max_exp_avg_sq', which AdamW does not keep" in more
    assert "'exp_avg' of 'weight' is of the shape (4,) and the parameter of (4, 4)" in shape
