"""What autograd saves may be made again or rest elsewhere: losses, gradients and traffic stay, to the bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.testing import Ranks, RanksFailed
from tests.activations.test_product import CHANGED, as_mode, differences, job, train
from tests.support import models
from tests.training import test_loops

SGD = partial(torch.optim.SGD, lr=0.1)


# -- what else happens to a model


class Net(nn.Module):
    """Blocks, which the model's own code may checkpoint; each counts its forwards."""

    def __init__(self, own: str = "", norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Counted(norm) for _ in range(3))
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.own:
                x = checkpoint(block, x, use_reentrant=self.own == "reentrant")
            else:
                x = block(x)
        return x.square().mean()


class Counted(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.norm = nn.BatchNorm1d(24) if norm else nn.Identity()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def _step(engine: sf.Engine, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    engine.backward(engine(torch.randn(6, 12, generator=draw, requires_grad=True)))
    engine.step()


def _own_checkpoints(layout: str, own: str) -> tuple[list[int], str]:
    engine = sf.Engine(Net(own), optimizer=SGD, layout=layout, activations="recompute")
    _step(engine)
    explained = engine.explain()
    engine.close()
    return [block.count for block in engine.module.blocks], explained


@pytest.mark.sampled(3)
@pytest.mark.parametrize("own", ["", "new", "reentrant"])
def test_a_models_own_checkpoints_are_not_doubled(ranks: Ranks, own: str) -> None:
    for counts, explained in ranks.run(_own_checkpoints, "zero3", own, world_size=2):
        assert counts == [2, 2, 2]
        assert ("left to the model's own checkpointing" in explained) == bool(own)


def _own_program(own: str) -> list[str]:
    engine = sf.Engine(Net(own), optimizer=SGD, layout="zero3")
    for seed in range(3):
        _step(engine, seed)
    lines = engine.explain().splitlines()
    engine.close()
    return lines[lines.index("forward:") : lines.index("step:")]


def test_a_unit_whose_forward_runs_in_backward_first_is_gathered_as_late_and_freed_as_early(ranks: Ranks) -> None:
    """Under a re-entrant checkpoint no gradient announces a unit's backward: its forward, run again, does."""
    assert ranks.run(_own_program, "reentrant", world_size=2) == ranks.run(_own_program, "new", world_size=2)


def _of_transformers() -> list[str]:
    model, batch, loss = job("llama", dropout=True)
    expected = train(model, batch, loss, layout="zero3")
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    found = train(model, batch, loss, layout="zero3", activations="recompute")
    assert "left to the model's own checkpointing" in found["explained"]
    return differences(expected, found)


@pytest.mark.soak
def test_gradient_checkpointing_of_transformers_keeps_working(ranks: Ranks) -> None:
    assert ranks.run(_of_transformers, world_size=2) == [[], []]


def _filled_cache() -> list[str]:
    """Keys and values from before, which layers have to see and add to."""
    import transformers

    model, batch, loss = job("llama", dropout=False)
    found = []
    for mode in ("keep", *CHANGED):
        torch.manual_seed(0)
        engine = sf.Engine(copy.deepcopy(model), optimizer=SGD, layout="zero3", activations=as_mode(mode))
        cache = transformers.DynamicCache()
        with torch.no_grad():
            engine(batch["input_ids"], past_key_values=cache)
        value = loss(engine(**batch, past_key_values=cache))
        engine.backward(value)
        with engine.gathered(of="grads") as grads:
            found.append({"loss": value.detach(), "length": cache.get_seq_length(), **grads})
        engine.close()
    return [key for other in found[1:] for key in differences(found[0], other)]


@pytest.mark.soak
def test_a_cache_that_holds_something_is_seen(ranks: Ranks) -> None:
    assert ranks.run(_filled_cache, world_size=2) == [[], []]


def _changing() -> list[list[int]]:
    engine = sf.Engine(Net(), optimizer=SGD, layout="zero3", activations="recompute")
    _step(engine)
    old: Any = engine.module.blocks[1]
    engine.module.blocks[1] = Counted(norm=False)
    _step(engine)
    counts = [block.count for block in engine.module.blocks]
    engine.close()
    return [counts, [old.count], [int("forward" in vars(old))]]


def test_a_block_that_is_replaced_is_followed(ranks: Ranks) -> None:
    assert ranks.run(_changing, world_size=2) == [[[4, 2, 4], [2], [0]]] * 2


def _statistics(mode: str, compiled: bool) -> list[dict[str, Tensor]]:
    torch._dynamo.reset()
    found = []
    for activations in ("keep", mode):
        model = Net(norm=True)
        for block in model.blocks if compiled else ():
            block.compile(backend="eager")
        engine = sf.Engine(model, optimizer=SGD, layout="zero3", activations=as_mode(activations))
        for seed in range(3):
            _step(engine, seed)
        found.append(engine.state_dict())
        engine.close()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", CHANGED)
def test_running_statistics_count_a_batch_once(ranks: Ranks, mode: str, compiled: bool) -> None:
    for kept, changed in ranks.run(_statistics, mode, compiled, world_size=2):
        assert kept["blocks.0.norm.num_batches_tracked"] == 3
        for name, value in kept.items():
            assert torch.equal(value, changed[name]), name


def _copies(mode: str) -> list[str]:
    engine = sf.Engine(Net(), optimizer=SGD, layout="zero3", activations=as_mode(mode))
    _step(engine)
    problems = []
    with engine.gathered():
        block: Any = engine.module.blocks[0]
        copied: list[Any] = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
    for made in copied:
        count = block.count
        made(torch.randn(2, 12)).sum().backward()
        if vars(made).get("forward") or block.count != count or made.up.weight.grad is None:
            problems.append("a copy is not a plain module")
    _step(engine)
    engine.close()
    if vars(block).keys() != vars(Counted(norm=False)).keys():
        problems.append(f"close() leaves {vars(block).keys()}")
    return problems


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", CHANGED)
def test_copies_and_closed_models_are_plain(ranks: Ranks, mode: str) -> None:
    assert ranks.run(_copies, mode, world_size=2) == [[], []]


def _compiled(layout: str, mode: str) -> list[str]:
    torch._dynamo.reset()
    model = models.Small(layers=2)
    tokens, targets = models.batches(1)[0]
    batch = {"tokens": tokens, "targets": targets}
    for block in model.blocks:
        block.compile(backend="aot_eager")
    again = partial(train, model, batch, lambda output: output, layout=layout)
    return differences(again(), again(activations=as_mode(mode)))


@pytest.mark.sampled(5)
@pytest.mark.product
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("mode", CHANGED)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_compiled_blocks(ranks: Ranks, layout: str, mode: str) -> None:
    assert ranks.run(_compiled, layout, mode, world_size=2) == [[], []]


def _loop(loop: Callable[[Any], list[Any]], mode: str) -> list[dict[str, Tensor]]:
    def make(model: nn.Module, optimizer: Any = test_loops.ADAMW) -> sf.Engine:
        return sf.Engine(
            model, optimizer=optimizer, layout="zero3", init=sf.Init(units=["blocks.*"]), activations=as_mode(mode)
        )

    engines = loop(make)
    states = [engine.state_dict() for engine in engines]
    for engine in engines:
        assert engine.memory().transient == 0
        engine.close()
    return states


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mode", CHANGED)
@pytest.mark.parametrize(
    "loop",
    [test_loops.losses_on_the_side, test_loops.several_losses]
    + [
        pytest.param(loop, marks=pytest.mark.soak)
        for loop in test_loops.LOOPS
        if loop not in (test_loops.losses_on_the_side, test_loops.several_losses)
    ],
)
def test_training_loops(ranks: Ranks, loop: Callable[[Any], list[Any]], mode: str) -> None:
    """Among them: losses that reach a unit by another way than its outputs, and a graph that two backwards read."""
    expected = ranks.run(_loop, loop, "keep", world_size=2)
    for mine, kept in zip(ranks.run(_loop, loop, mode, world_size=2), expected, strict=True):
        for state, other in zip(mine, kept, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in state.items())


class Failing(Net):
    """Raises behind its second block when told to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if self.fails:
            raise ArithmeticError("told to")
        return self.blocks[2](x).square().mean()


def _after_an_exception(mode: str) -> list[dict[str, Tensor]]:
    found = []
    for fails in (False, True):
        model = Failing()
        engine = sf.Engine(model, optimizer=SGD, layout="zero3", activations=as_mode(mode))
        _step(engine)
        if fails:
            model.fails = True
            with pytest.raises(ArithmeticError):
                _step(engine)
            model.fails = False
        _step(engine)
        found.append(engine.state_dict())
        engine.close()
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", CHANGED)
def test_an_exception_in_forward_leaves_nothing_behind(ranks: Ranks, mode: str) -> None:
    for plain, failed in ranks.run(_after_an_exception, mode, world_size=2):
        assert all(torch.equal(value, failed[name]) for name, value in plain.items())


# -- the file


def _into(folder: str) -> None:
    engine = sf.Engine(Net(), optimizer=SGD, activations=sf.Activations(mode="disk", smallest=0, folder=folder))
    try:
        _step(engine)
        assert list(Path(folder).iterdir()) == []  # the file has no name
    finally:
        engine.close()


def test_the_folder_of_the_file_is_a_choice(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_into, str(tmp_path), world_size=1)
    with pytest.raises(RanksFailed, match="No such file or directory"):
        ranks.run(_into, str(tmp_path / "missing"), world_size=1)


# -- rules


def _explained(activations: Any) -> list[str]:
    engine = sf.Engine(models.small(), activations=activations)
    lines = engine.explain().partition("activations (of all others: keep):\n")[2].partition("\n\n")[0].split("\n")
    engine.close()
    return [line.strip() for line in lines if line]


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        ("keep", {}),
        ({"blocks.1": "recompute", "blocks": "select", "*": "keep"}, {0: "select", 1: "recompute", 2: "select"}),
        ([(models.Block, "select"), ("*", "recompute")], {0: "select", 1: "select", 2: "select"}),
        ({"blocks.0.up": "keep", "*": "keep"}, {}),
        ({"blocks.2.norm": sf.Activations(mode="recompute"), "*": "keep"}, {2: "blocks.2.norm: recompute"}),
    ],
)
def test_rules_choose_by_path_and_class(ranks: Ranks, activations: Any, expected: dict[int, str]) -> None:
    lines = [f"{f'blocks.{i}':<28}  {mode}" for i, mode in expected.items()]
    assert ranks.run(_explained, activations, world_size=1) == [lines]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ("recomputed", "Did you mean 'recompute'"),
        ({"blocks": "recompute"}, "end them with '\\*'"),
        ({"*": "keep", "blocks": "recompute"}, "put '\\*' last"),
        ({"block": "recompute", "*": "keep"}, "matches no module. Did you mean 'blocks'"),
        ({"blocks.*.up": "select", "blocks": "recompute", "*": "keep"}, "made again as a whole"),
        (3, "it is a mode, its name, or ordered rules"),
    ],
)
def test_rules_that_can_not_hold_are_refused(ranks: Ranks, activations: Any, message: str) -> None:
    with pytest.raises(RanksFailed, match=message):
        ranks.run(_explained, activations, world_size=1)


def _in_table(layout: Any, activations: Any) -> tuple[str, list[str]]:
    engine = sf.Engine(models.small(), layout=layout, activations=activations)
    modes = engine.explain().partition("activations (of all others: keep):\n")[2]
    row = str(engine.layout).split("\n")[-2]
    engine.close()
    return row.split()[-1], [line.split()[1] for line in modes.partition("\n\n")[0].split("\n") if "blocks" in line]


@pytest.mark.parametrize(
    ("cell", "argument", "row", "modes"),
    [
        ("keep", None, "device", []),
        ("host", None, "host", ["host"] * 3),
        (sf.Activations(mode="host"), None, "host", ["host"] * 3),
        ("host", "keep", "device", []),
        ("keep", "recompute", "recomputed", ["recompute"] * 3),
        ("host", {"blocks.1": "recompute", "*": "disk"}, "disk", ["disk", "recompute", "disk"]),
    ],
)
def test_the_argument_is_short_for_the_cell_of_the_layout(
    ranks: Ranks, cell: Any, argument: Any, row: str, modes: list[str]
) -> None:
    layout = sf.PRESETS["zero2"].replace(activations=cell)
    assert ranks.run(_in_table, layout, argument, world_size=1) == [(row, modes)]


def _modes_of_ranks() -> list[Tensor]:
    """One rank recomputes."""
    engine = sf.Engine(Net(), optimizer=SGD, layout="zero3", activations=["keep", "recompute"][dist.get_rank()])
    _step(engine)
    values = list(engine.state_dict().values())
    engine.close()
    return values


def test_ranks_may_differ_in_modes(ranks: Ranks) -> None:
    one, other = ranks.run(_modes_of_ranks, world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_values_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(sf.ShardfoldError, match="folder is for 'disk'"):
        sf.Activations(mode="host", folder="/tmp")
    with pytest.raises(sf.ShardfoldError, match="a number of bytes"):
        sf.Activations(mode="host", smallest=-1)
    with pytest.raises(sf.ShardfoldError, match="what 'select' keeps"):
        sf.Activations(mode="recompute", kept=(torch.ops.aten.silu.default,))
