"""State dicts of DTensors: what they are, and that ``torch.distributed.checkpoint`` and FSDP2 read and write them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError, ModelError, UsageError
from shardfold.testing import Ranks
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=0.1)
FOUR = {"inter": 2, "intra": 2}


class Odd(nn.Module):
    """Rows that no number of ranks divides, fewer than ranks, none, a single number, ties, frozen ones and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(67, 3)  # the only one in which shards end
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.one = nn.Parameter(torch.randn(1, 3))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.number = nn.Parameter(torch.randn(()))
        self.still = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.head = nn.Linear(3, 67, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = (self.inner(self.table(x)) + self.one) * self.number + self.still(self.one) + self.none.sum()
        self.seen += x.detach().float().mean(0)  # other values on each rank
        self.count += 1
        return self.head(x)


def made(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd()


def trained(**options: Any) -> sf.Engine:
    """One step, so that values are no longer those that a seed gives."""
    engine = sf.Engine(made(), optimizer=ADAMW, **grouped(**options))
    draw = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    engine.backward(engine(torch.randint(7, (4,), generator=draw)).square().mean())
    engine.step()
    return engine


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}


def fsdp2(seed: int) -> Any:
    model = made(seed)
    fully_shard(model.inner, mesh=(mesh := init_device_mesh("cpu", (dist.get_world_size(),))))
    fully_shard(model, mesh=mesh, ignored_params={model.number})  # FSDP2 takes no single numbers
    return model


# -- to torch.distributed.checkpoint and FSDP2, and back ----------------------------------------------------------


def _write(folder: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    engine = trained(**options)
    dcp.save(engine.state_dict(sharded=True), checkpoint_id=folder)
    state = engine.state_dict()
    engine.close()
    return {name: value.clone() for name, value in state.items()}


def _read_by_fsdp2(folder: Path) -> dict[str, Tensor]:
    model = fsdp2(1)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return whole(model.state_dict())


OPTIONS: list[Any] = [
    pytest.param(2, {"layout": "zero3"}, 3, id="zero3"),
    pytest.param(2, {"layout": "zero1", "precision": "bf16"}, 1, id="zero1-bf16"),
    pytest.param(3, {"layout": "zero3", "precision": "bf16", "offload": "host"}, 2, id="host-bf16"),
    pytest.param(2, {"layout": "ddp"}, 1, id="ddp", marks=pytest.mark.soak),
    pytest.param(4, {"layout": "hsdp", "mesh": FOUR}, 3, id="hsdp", marks=pytest.mark.soak),
    pytest.param(4, {"layout": "zero3", "mesh": FOUR}, 1, id="zero3-nodes", marks=pytest.mark.soak),
    pytest.param(4, {"layout": "hpz", "mesh": FOUR}, 2, id="hpz", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("world", "options", "other"), OPTIONS)
def test_fsdp2_reads_what_an_engine_wrote(
    ranks: Ranks, tmp_path: Path, world: int, options: dict[str, Any], other: int
) -> None:
    """To the bit, on another number of ranks: what is written are the master's values, and of frozen ones their own."""
    wrote = ranks.run(_write, tmp_path, options, world_size=world)[0]
    for read in ranks.run(_read_by_fsdp2, tmp_path, world_size=other):
        assert equal(read, wrote)


def _write_by_fsdp2(folder: Path) -> dict[str, Tensor]:
    model = fsdp2(2)
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder)
    return whole(state)


def _read(folder: Path, options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    engine = trained(**options)
    state = engine.state_dict(sharded=True)
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state)
    found = engine.state_dict()
    with engine.gathered() as params:
        shown = all(torch.equal(p, found[name].to(p.dtype)) for name, p in params.items())
    engine.close()
    return {name: value.clone() for name, value in found.items()}, shown


@pytest.mark.parametrize(("other", "options", "world"), OPTIONS)
def test_an_engine_reads_what_fsdp2_wrote(
    ranks: Ranks, tmp_path: Path, other: int, options: dict[str, Any], world: int
) -> None:
    """Into masters and into what is computed with."""
    wrote = ranks.run(_write_by_fsdp2, tmp_path, world_size=world)[0]
    for read, shown in ranks.run(_read, tmp_path, options, world_size=other):
        assert equal(read, {name: value.to(read[name].dtype) for name, value in wrote.items()}) and shown


# -- what they are ------------------------------------------------------------------------------------------------


def _described(options: dict[str, Any]) -> dict[str, Any]:
    engine = trained(**options)
    state, plain = engine.state_dict(sharded=True), engine.state_dict()
    found: dict[str, Any] = {"equal": equal(whole(state), plain), "asked": engine.sharded.comm.meter.asked}
    for name, value in state.items():
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            found[name] = mesh.mesh_dim_names, mesh.mesh.tolist(), value.placements, tuple(value.to_local().shape)
            assert torch.equal(value.to_local(), distribute_tensor(plain[name], mesh, value.placements).to_local())
    found["buffers"] = state["seen"].tolist(), state["count"].item()
    found["skipped"] = sorted(state.keys() - engine.state_dict(sharded=True, frozen="skip").keys())
    engine.close()
    return found


def test_rows_are_torch_chunks(ranks: Ranks) -> None:
    """As FSDP2's, also where there are fewer rows than ranks; a single number is everywhere, buffers are plain."""
    described = ranks.run(_described, {"layout": "zero3"}, world_size=3)
    assert all(found["buffers"] == described[0]["buffers"] for found in described)  # rank 0's, as in a checkpoint
    for rank, found in enumerate(described):
        assert found["equal"] and found["skipped"] == ["still.weight"]
        names, ranks_of, placements, shape = found["table.weight"]
        assert (names, ranks_of, placements, shape) == (("intra",), [0, 1, 2], (Shard(0),), (23 if rank < 2 else 21, 3))
        assert found["head.weight"] == found["table.weight"]
        assert found["one"][2:] == ((Shard(0),), (1 if rank == 0 else 0, 3))
        assert found["none"][2:] == ((Shard(0),), (0, 3))
        assert found["number"][2:] == ((Replicate(),), ())
        assert "seen" not in found and "count" not in found


@pytest.mark.soak
def test_placements_over_two_axes(ranks: Ranks) -> None:
    for found in ranks.run(_described, {"layout": "hsdp", "mesh": FOUR}):
        assert found["equal"] and found["table.weight"][:2] == (("inter", "intra"), [[0, 1], [2, 3]])
        assert found["table.weight"][2] == (Replicate(), Shard(0))
    for rank, found in enumerate(ranks.run(_described, {"layout": "zero3", "mesh": FOUR})):
        assert found["equal"] and found["table.weight"][2:] == ((Shard(0), Shard(0)), ([17, 17, 17, 16][rank], 3))


def _sent(layout: str, precision: str) -> tuple[int, int, int]:
    """Bytes that this rank is asked to send, what its rows have, and how many."""
    engine = sf.Engine(nn.Linear(64, 64, bias=False), optimizer=ADAMW, layout=layout, precision=precision)
    before = engine.sharded.comm.meter.asked[1]
    state = engine.state_dict(sharded=True)
    sent = engine.sharded.comm.meter.asked[1] - before
    local = state["weight"].to_local() if isinstance(state["weight"], DTensor) else state["weight"]
    engine.close()
    return sent, local.nbytes, local.numel()


def test_only_what_crosses_borders_is_sent(ranks: Ranks) -> None:
    """Rows that a rank has already are not, and nothing where parameters are whole; masters that are split come."""
    assert ranks.run(_sent, "zero3", "fp32", world_size=2) == [(0, 64 * 64 * 2, 64 * 32)] * 2
    assert ranks.run(_sent, "zero2", "fp32", world_size=2) == [(0, 64 * 64 * 4, 64 * 64)] * 2
    assert ranks.run(_sent, "zero2", "bf16", world_size=2) == [(64 * 64 * 2, 64 * 64 * 4, 64 * 64)] * 2


class Sliced(nn.Module):
    """Rows of one matrix and columns of another by rank of tensor, each the slice of what a seed gives."""

    def __init__(self, place: int, shares: int, *, blocks: int = 1) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        up, down = torch.randn(4, 3, generator=draw), torch.randn(3, 4, generator=draw)
        self.up = nn.Parameter(up.chunk(shares)[place].clone())
        self.down = nn.Parameter(down.chunk(shares, 1)[place].clone())
        self.plain = nn.Parameter(torch.randn(3, generator=draw))
        if shares > 1:
            sf.mark_slice(self, "up", axis="tensor", dim=0, blocks=blocks)
            sf.mark_slice(self, "down", axis="tensor", dim=1)


def _slices(folder: Path) -> tuple[Any, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("intra", "tensor"))
    engine = sf.Engine(Sliced(dist.get_rank() % 2, 2), optimizer=ADAMW, layout="zero3", parallel=mesh)
    state, before = engine.state_dict(sharded=True), engine.state_dict()
    placed = {name: (v.device_mesh.mesh_dim_names, v.placements) for name, v in state.items()}
    dcp.save(state, checkpoint_id=folder)
    full = whole(state)
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    rows = {name: distribute_tensor(v, init_device_mesh("cpu", (4,)), [Shard(v.dim() - 1)]) for name, v in full.items()}
    engine.load_state_dict(rows)
    same = equal(engine.state_dict(), before)
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    engine.load_state_dict(state)
    same &= equal(engine.state_dict(), before)
    engine.close()
    return placed, same


def _whole_slices(folder: Path) -> bool:
    plain = dict(Sliced(0, 1).state_dict())
    state = {name: torch.zeros_like(value) for name, value in plain.items()}
    dcp.load(state, checkpoint_id=folder)
    return equal(state, plain)


def test_slices_along_an_axis_of_tensor(ranks: Ranks, tmp_path: Path) -> None:
    """The axis that divides rows first comes first, so that no stride is needed; a file has the whole matrices."""
    for placed, same in ranks.run(_slices, tmp_path):
        assert same
        assert placed == {
            "up": (("tensor", "intra"), (Shard(0), Shard(0))),
            "down": (("tensor", "intra"), (Shard(1), Shard(0))),
            "plain": (("intra", "tensor"), (Shard(0), Replicate())),
        }
    assert ranks.run(_whole_slices, tmp_path, world_size=1) == [True]


def _pipelined(folder: Path) -> tuple[list[str], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 2))
    engine = sf.Engine(
        model, optimizer=ADAMW, layout="zero3", parallel=sf.Parallel(mesh={"pipeline": 2, "intra": 2}, stages=["2"])
    )
    state, before = engine.state_dict(sharded=True), engine.state_dict()
    dcp.save(state, checkpoint_id=folder)
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    engine.load_state_dict(state)
    same = equal(engine.state_dict(), before)
    everywhere = {name: distribute_tensor(v, init_device_mesh("cpu", (4,)), [Shard(0)]) for name, v in before.items()}
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    engine.load_state_dict(everywhere)
    same &= equal(engine.state_dict(), before)
    engine.close()
    assert same
    return list(state), {name: value.clone() for name, value in before.items()}


def _read_plain(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    state = {name: torch.zeros_like(value) for name, value in like.items()}
    dcp.load(state, checkpoint_id=folder)
    return state


@pytest.mark.soak
def test_stages_have_their_own_names(ranks: Ranks, tmp_path: Path) -> None:
    """Together they write all; what is divided over other ranks than a stage's is read too."""
    (first, state), _, (last, _), _ = ranks.run(_pipelined, tmp_path)
    assert first == ["0.weight", "0.bias"] and last == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert equal(ranks.run(_read_plain, tmp_path, state, world_size=1)[0], state)


# -- what is loaded -----------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Keeps its weight doubled in a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[prefix + "weight"] / 2)


def _placed(folder: Path) -> list[bool]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("any",))
    back = DeviceMesh("cpu", list(range(world))[::-1])
    want, found = torch.arange(35.0).view(7, 5), []
    place = back.get_coordinate()
    assert place is not None
    rows = want.chunk(world)[place[0]]
    model = nn.ModuleDict({"plain": nn.Linear(5, 7, bias=False), "own": Hooked(), "norm": nn.BatchNorm1d(2)})
    offload = {"optimizer": "disk", "params": "disk", "folder": str(folder)}
    engine = sf.Engine(model, optimizer=ADAMW, precision="bf16", offload=offload)
    state = engine.state_dict(sharded=True)
    found.append(torch.equal(state["own.weight"].full_tensor(), torch.arange(15.0).view(5, 3) * 2))
    for one in (
        distribute_tensor(want, mesh, [Shard(0)]),
        distribute_tensor(want, mesh, [Shard(1)]),
        DTensor.from_local(rows, back, [Shard(0)], shape=want.shape, stride=want.stride()),
        distribute_tensor(want, mesh, [Replicate()]),
        DTensor.from_local(want / world, mesh, [Partial()]),
        want,
    ):
        engine.load_state_dict({**state, "plain.weight": torch.zeros(7, 5)})
        engine.load_state_dict({**state, "plain.weight": one})
        found.append(torch.allclose(engine.state_dict()["plain.weight"], want, rtol=0, atol=1e-5))
        with engine.gathered("plain.weight") as shown:
            found.append(torch.allclose(shown.float(), want, rtol=0.01))
    state["norm.running_mean"] = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
    engine.load_state_dict({**state, "own.weight": distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])})
    after = engine.state_dict()
    found += [bool((after["own.weight"] == 1).all()), after["norm.running_mean"].tolist() == [3.0, 4.0]]
    engine.close()
    return found


def test_any_placements_are_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """Rows, columns, copies, sums, other orders of ranks, into files; what the model's own code reads is whole."""
    for found in ranks.run(_placed, tmp_path, world_size=2):
        assert all(found), found


def _raised(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def _refused() -> list[str]:
    rank, said = dist.get_rank(), []
    engine = sf.Engine(nn.Linear(4, 4), optimizer=ADAMW)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    pair = init_device_mesh("cpu", (2,))
    alone = DeviceMesh("cpu", [0])
    weight = torch.zeros(4, 4)
    tall = distribute_tensor(torch.zeros(6, 4), pair, [Shard(0)])
    rows = torch.zeros(3 - 2 * rank, 4)
    crooked = DTensor.from_local(rows, pair, [Shard(0)], shape=torch.Size((4, 4)), stride=(4, 1))
    other = distribute_tensor(weight, pair, [Shard(rank)])
    first = DTensor.from_local(weight, alone, [Replicate()], run_check=False)
    for kind, value in ((ModelError, tall), ((ModelError, ConfigError), crooked), (ConfigError, other)):
        said.append(_raised(kind, lambda value=value: engine.load_state_dict({**before, "weight": value})))
    said.append(_raised((ModelError, ConfigError), lambda: engine.load_state_dict({**before, "weight": first})))
    said.append(_raised(ConfigError, lambda: engine.state_dict(sharded="yes")))  # pyright: ignore[reportArgumentType]
    assert equal(engine.state_dict(), before)
    engine.close()
    parts = {**before, "weight": distribute_tensor(weight, pair, [Shard(0)])}
    said.append(_raised(ModelError, lambda: sf.Engine(nn.Linear(4, 4), optimizer=ADAMW, init=sf.Init(weights=parts))))
    stacked = Sliced(rank, 2, blocks=2)
    engine = sf.Engine(stacked, optimizer=ADAMW, parallel={"tensor": 2})
    said.append(_raised(ModelError, lambda: engine.state_dict(sharded=True)))
    engine.close()
    engine = sf.Engine(
        nn.Linear(4, 4),
        optimizer=ADAMW,
        parallel={"inter": 2, "intra": 1},
        layout=sf.PRESETS["zero3"].replace(outer=sf.Outer(every=2)),
    )
    said.append(_raised(UsageError, lambda: engine.state_dict(sharded=True)))
    engine.close()
    return said


def test_what_is_refused_is_one_sentence_and_changes_nothing(ranks: Ranks) -> None:
    both = ranks.run(_refused, world_size=2)
    tall, crooked, other, first, flag, weights, stacked, outer = both[0]
    assert "gives 'weight' the shape (6, 4), but the model's is (4, 4)" in tall
    assert "of which rank 0 has 12 elements and not 8: make it by distribute_tensor()" in crooked
    assert "the DTensors of the state dict of rank 1 differ from rank 0's" in other
    assert "was refused on another rank" in first
    assert first.endswith(both[1][3]) and "'weight' as a DTensor of a mesh that rank 1 is not in" in first
    assert "sharded" in flag
    assert "Init(weights=...) has 'weight' as a DTensor, which other ranks have parts of" in weights
    assert "'up' is divided over tensor into parts that are no chunks along one dimension" in stacked
    assert "call engine.outer_step() and take rank 0's" in outer


# -- mesh= --------------------------------------------------------------------------------------------------------


def _of_device_mesh() -> list[Any]:
    def mesh(*shape: int, names: Any) -> DeviceMesh:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    def engine(mesh: Any, **options: Any) -> sf.Engine:
        return sf.Engine(nn.Linear(3, 5), optimizer=ADAMW, **grouped(mesh=mesh, **options))

    given = mesh(2, 2, names=("inter", "intra"))
    made = engine(given, layout="hsdp")
    found: list[Any] = [dict(made.mesh.sizes), made.state_dict(sharded=True)["weight"].device_mesh == given]
    made.close()
    for bad in (
        mesh(2, 2, names=("inter", "intar")),
        mesh(2, 2, names=("dp", "tp")),
        mesh(4, names=None),
        mesh(2, 2, names=("tensor", "intra")),
        given["intra"],
        {"pp": 4},
    ):
        found.append(_raised(LayoutError, lambda bad=bad: engine(bad)))
    return found


def test_a_device_mesh_says_the_axes(ranks: Ranks) -> None:
    for sizes, same, slip, usual, none, order, part, word in ranks.run(_of_device_mesh):
        assert sizes == {"inter": 2, "intra": 2} and same
        assert "the dimension 'intar', which is unknown. Did you mean 'intra'?" in slip
        assert "the dimension 'dp', which is unknown. Did you mean 'intra'?" in usual
        assert "whose dimensions have no names: make it with mesh_dim_names=" in none
        assert "counts them along (intra, tensor), the last fastest" in order
        assert "but the job has 4 ranks, which all take part in an engine" in part
        assert word == "mesh names the axis 'pp', which is unknown. Did you mean 'pipeline'?"
