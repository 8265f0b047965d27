"""What an engine promises besides equal losses: accumulation, access to whole values, clean states, honest reports."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError, FreedParameterError, LayoutError, ModelError, UsageError
from shardfold.testing import Ranks, RanksFailed
from tests.support import models
from tests.support.options import grouped

pytestmark = pytest.mark.product

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)  # linear: it hides no factor, and rounding stays rounding
LAYOUTS = list(sf.PRESETS)


def make(layout: Any = "zero3", build: Callable[[], nn.Module] = models.small, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(build(), **grouped(layout=layout, **{"optimizer": ADAMW, **options}))


def train(engine: sf.Engine, steps: int, seed: int = 0) -> list[float]:
    """Steps on global batches of which this rank takes its slice; the mean losses."""
    losses = []
    for tokens, targets in models.batches(steps, seed=seed):
        loss = engine(tokens.chunk(engine.world_size)[engine.rank], targets.chunk(engine.world_size)[engine.rank])
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    return losses


def mesh_for(layout: str, world: int) -> dict[str, int] | None:
    return {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world % 2 == 0 else None


# -- gradients ----------------------------------------------------------------------------------------------------


def _no_sync_equals_sync(layout: str) -> float:
    mesh = mesh_for(layout, dist.get_world_size())
    parts = [b for pair in models.batches(2) for b in [pair]]
    results = []
    for quiet in (False, True):
        engine = make(layout, mesh=mesh, accumulate=2, optimizer=SGD)
        for _ in range(2):
            for i, (tokens, targets) in enumerate(parts):
                mine = [t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets)]
                if quiet and i == 0:
                    with engine.no_sync():
                        engine.backward(engine(*mine))
                else:
                    engine.backward(engine(*mine))
                engine.step()
        results.append(engine.state_dict())
        reduced = [row for row in engine.traffic().rows]
        assert all(row.program == row.sent for row in reduced), engine.traffic()
        engine.close()
    return max((results[0][k] - results[1][k]).abs().max().item() for k in results[0])


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_sync_is_legal_at_every_stage_and_changes_nothing(ranks: Ranks, layout: str) -> None:
    assert max(ranks.run(_no_sync_equals_sync, layout, world_size=4)) < 1e-6


def _two_backwards(layout: str) -> tuple[float, float]:
    """Two losses, two backwards, one step; how far that is from plain PyTorch's accumulated gradients, and how far
    training went."""
    engine = make(layout, mesh=mesh_for(layout, dist.get_world_size()), optimizer=SGD)
    torch.manual_seed(0)
    plain = models.small()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = SGD(plain.parameters())
    for step in range(3):
        for tokens, targets in models.batches(2, seed=step):
            plain(tokens, targets).backward()
            engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    state, reference = engine.state_dict(), plain.state_dict()
    worst = max((state[k] - reference[k]).abs().max().item() for k in state)
    engine.close()
    return worst, min((start[k] - reference[k]).abs().max().item() for k in state)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_backwards_before_a_step_add_up_as_in_plain_pytorch(ranks: Ranks, layout: str) -> None:
    for worst, went in ranks.run(_two_backwards, layout, world_size=4):
        assert worst < 2e-6 and went > 1e-3, (worst, went)


def _plain_backward(layout: str) -> bool:
    one, two = make(layout), make(layout)
    for tokens, targets in models.batches(3):
        mine = [t.chunk(one.world_size)[one.rank] for t in (tokens, targets)]
        one.backward(one(*mine))
        two(*mine).backward()
        one.step(), two.step()
    first, second = one.state_dict(), two.state_dict()
    one.close(), two.close()
    return all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.soak
def test_a_plain_loss_backward_is_as_good_and_two_engines_live_together(ranks: Ranks) -> None:
    assert all(ranks.run(_plain_backward, "zero3", world_size=2))


# -- determinism, precision ------------------------------------------------------------------------------------------


def _losses(layout: str, precision: str, steps: int) -> list[float]:
    engine = make(layout, precision=precision, mesh=mesh_for(layout, dist.get_world_size()), clip_norm=1.0)
    losses = train(engine, steps)
    engine.close()
    return losses


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_agree_bit_for_bit(ranks: Ranks, layout: str) -> None:
    first = ranks.run(_losses, layout, "fp32", 4, world_size=4)
    assert first == ranks.run(_losses, layout, "fp32", 4, world_size=4)


def _learned(layout: str, precision: str) -> list[float]:
    """Losses on one batch, again and again: they fall by a fifth, so that whoever learns less is seen."""
    engine = make(layout, precision=precision, mesh=mesh_for(layout, dist.get_world_size()))
    losses = [train(engine, 1)[0] for _ in range(8)]
    engine.close()
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_follows_fp32(ranks: Ranks, layout: str, precision: str) -> None:
    """What a step adds is the same to a tenth, and all steps together to a twentieth."""
    wide = ranks.run(_learned, layout, "fp32", world_size=2)[0]
    narrow = ranks.run(_learned, layout, precision, world_size=2)[0]
    fell = wide[0] - wide[-1]
    assert fell > 0.15 * wide[0]
    assert max(abs(a - b) for a, b in zip(wide, narrow, strict=True)) < 0.05 * fell, (wide, narrow)


# -- whole values ----------------------------------------------------------------------------------------------------


def _round_trip(layout: str, precision: str) -> list[str]:
    wrong = []
    mesh = mesh_for(layout, dist.get_world_size())
    engine = make(layout, mesh=mesh, precision=precision)
    train(engine, 2)
    state = engine.state_dict()
    other = make(layout, mesh=mesh, precision=precision)
    other.load_state_dict(state)
    if not all(torch.equal(a, state[k]) for k, a in other.state_dict().items()):
        wrong.append("load_state_dict")
    plain = models.small()
    plain.load_state_dict(state)  # strict: complete, no size-0 tensors
    with engine.gathered("head.weight") as weight:
        if not torch.equal(weight.detach().float(), state["head.weight"].to(weight.dtype).float()):
            wrong.append("gathered read")
    with engine.gathered("head.weight", write=True) as weight, torch.no_grad():
        weight.fill_(0.5 + engine.rank)  # rank 0's values win
    if not (engine.state_dict()["head.weight"] == 0.5).all():
        wrong.append("gathered write")
    with engine.gathered() as every:
        if set(every) != {name for name, _ in engine.module.named_parameters()}:
            wrong.append("gathered all")
        if engine.rank == 0:  # a forward on one rank alone: nothing is sent
            with torch.no_grad():
                engine(*models.batches(1)[0])
    train(engine, 1)
    engine.close(), other.close()
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_values_can_be_read_written_saved_and_loaded(ranks: Ranks, layout: str, precision: str) -> None:
    assert ranks.run(_round_trip, layout, precision, world_size=4) == [[]] * 4


def _wrong_names() -> list[str]:
    engine = make("zero3")
    said = []
    for call in (
        lambda: engine.gathered("hed.weight").__enter__(),
        lambda: engine.load_state_dict({"head.weight": torch.zeros(50, 24)}),
        lambda: engine.load_state_dict({**engine.state_dict(), "head.weight": torch.zeros(1)}),
    ):
        try:
            call()
        except ModelError as error:
            said.append(str(error))
    engine.close()
    return said


def test_wrong_names_and_shapes_are_named(ranks: Ranks) -> None:
    for unknown, missing, shape in ranks.run(_wrong_names, world_size=2):
        assert "Did you mean 'head.weight'?" in unknown
        assert "missing blocks.0.down.bias" in missing
        assert "'head.weight' the shape (1,)" in shape


# -- freed parameters ------------------------------------------------------------------------------------------------


def _touch() -> list[str]:
    engine = make("zero3")
    weight = engine.module.blocks[1].up.weight  # type: ignore[union-attr,index]
    metadata = (tuple(weight.shape), weight.dtype, weight.numel(), weight.dim(), weight.device.type, weight.grad)
    assert metadata == ((96, 24), torch.float32, 96 * 24, 2, "cpu", None)
    assert "blocks.1.up.weight" in repr(weight) and isinstance(weight, nn.Parameter)
    said = []
    for touch in (
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.detach(),
        lambda: weight.sum(),
        lambda: weight[0],
        lambda: weight.data_ptr(),
        lambda: weight.clone(),
        lambda: weight.copy_(torch.zeros(96, 24)),
        lambda: torch.cat([weight, weight]),
        lambda: weight.numpy(),
        lambda: weight.tolist(),
        lambda: copy.deepcopy(weight),
        lambda: pickle.dumps(weight),
        lambda: engine.module.state_dict(),
        lambda: weight.cpu(),
    ):
        try:
            touch()
            said.append("nothing was raised")
        except FreedParameterError as error:
            said.append(str(error))
    engine.close()
    return said


def test_touching_a_freed_parameter_raises_one_sentence_that_names_it(ranks: Ranks) -> None:
    for said in ranks.run(_touch, world_size=2):
        assert all("with engine.gathered('" in line and "only this rank's shard" in line for line in said), said
        assert sum("'blocks.1.up.weight'" in line for line in said) == len(said) - 1  # state_dict meets another first


# -- clean states ----------------------------------------------------------------------------------------------------


class Fragile(models.Small):
    """Raises in forward or backward when told to."""

    fail: str | None = None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.fail == f"forward {i}":
                raise RuntimeError("asked for")
            if self.fail == f"backward {i}":
                x.register_hook(self._raise)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    @staticmethod
    def _raise(grad: torch.Tensor) -> None:
        raise RuntimeError("asked for")


def _after_failures(layout: str) -> list[float]:
    mesh = mesh_for(layout, dist.get_world_size())
    engine = make(layout, Fragile, mesh=mesh)
    fresh = make(layout, Fragile, mesh=mesh)
    for where in ("forward 0", "backward 1", "forward 2", "backward 0", "backward 2"):
        engine.module.fail = where  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="asked for"):
            train(engine, 1)
        if where == "forward 2":
            engine.reset()  # asked for, or done by the next forward: both must do
        engine.module.fail = None  # type: ignore[assignment]
    difference = [abs(a - b) for a, b in zip(train(engine, 2), train(fresh, 2), strict=True)]
    assert engine.memory().transient == 0
    engine.close(), fresh.close()
    return difference


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exception_in_forward_or_backward_is_followed_by_correct_steps(ranks: Ranks, layout: str) -> None:
    for difference in ranks.run(_after_failures, layout, world_size=4):
        assert difference == [0.0, 0.0]


def test_a_wrong_call_gets_one_sentence() -> None:
    with pytest.raises(UsageError, match="no backward since the last step"):
        make().step()
    with pytest.raises(UsageError, match="needs an optimizer"):
        sf.Engine(models.small()).step()
    with pytest.raises(ConfigError, match="accumulate=0"):
        make(accumulate=0)
    with pytest.raises(ConfigError, match="clip_norm= is -1"):
        make(clip_norm=-1)
    with pytest.raises(LayoutError, match="Did you mean 'zero3'"):
        make("zero33")
    with pytest.raises(LayoutError, match="does not multiply up"):
        make(mesh={"inter": 2, "intra": 3})
    with pytest.raises(ModelError, match="matches no module"):
        make(units=["block.*"])
    with pytest.raises(ModelError, match="cannot nest"):
        make(units=["blocks.0", "blocks.0.up"])


def _outside() -> str:
    engine = make("zero3")
    try:
        engine.module.blocks[0](torch.zeros(2, 3, models.WIDTH))  # type: ignore[union-attr,index,operator]
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_block_called_outside_of_its_model_says_what_to_do(ranks: Ranks) -> None:
    assert all("'blocks.0' ran outside of its model's forward" in said for said in ranks.run(_outside, world_size=2))


def test_changing_weights_between_forward_and_backward_raises_as_in_plain_pytorch() -> None:
    engine = make("zero3")
    batch = models.batches(1)[0]
    engine.backward(engine(*batch))
    loss = engine(*batch)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


# -- reports ----------------------------------------------------------------------------------------------------


def _reports(layout: str, precision: str, accumulate: int, world: int) -> dict[str, Any]:
    engine = make(layout, mesh=mesh_for(layout, world), precision=precision, accumulate=accumulate)
    for tokens, targets in models.batches(2):
        for i in range(accumulate):
            part = engine.rank * accumulate + i
            count = engine.world_size * accumulate
            engine.backward(engine(tokens.chunk(count)[part], targets.chunk(count)[part]))
            engine.step()
    with torch.no_grad():
        engine(*models.batches(1)[0])  # evaluation is not part of a step's traffic
    memory, traffic, text = engine.memory(), engine.traffic(), engine.explain()
    numel = sum(p.numel() for p in engine.module.parameters())
    engine.close()
    return {"memory": memory, "traffic": traffic, "text": text, "numel": numel}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_and_traffic_are_what_table_and_program_say(
    ranks: Ranks, layout: str, precision: str, world: int
) -> None:
    for accumulate in (1, 4):
        for said in ranks.run(_reports, layout, precision, accumulate, world, world_size=world):
            memory, traffic = said["memory"], said["traffic"]
            for row in memory.rows:
                assert row.held == pytest.approx(row.table + row.padding, abs=1), (row, memory)
            assert memory.transient == 0
            assert bool(traffic.rows) == (world > 1)
            assert all(row.sent == row.program and row.calls for row in traffic.rows), traffic
            assert said["text"].count("UPDATE") == 6  # root, embedding, three blocks, head


def test_reports_read_well(ranks: Ranks) -> None:
    said = ranks.run(_reports, "zero2", "bf16", 1, 2, world_size=2)[0]
    assert str(said["memory"]).splitlines()[0].split() == ["state", "memory", "table", "padding", "measured"]
    assert "REDUCE_SCATTER  intra" in str(said["traffic"])
    assert "ALL_GATHER blocks.0 master -> params [intra] bf16" in said["text"]


# -- failures reach the test -----------------------------------------------------------------------------------------


def _dies() -> None:
    engine = make("zero3")
    if engine.rank == 1:
        raise ValueError("rank 1 gives up")
    train(engine, 1)


def test_a_rank_that_dies_is_named_by_the_others(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="rank 1 gives up"):
        ranks.run(_dies, world_size=2, timeout=60)


def _dropped(layout: str) -> tuple[bool, bool, list[str]]:
    """Drops an engine that has trained and that nobody closed."""
    model = models.small()
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), layout=layout)
    engine.backward(engine(*models.batches(1)[0]))
    engine.step()
    references = weakref.ref(engine), weakref.ref(model)
    del engine, model
    gc.collect()
    watching = [thread for thread in threading.enumerate() if thread.name == "shardfold-watch"]
    for thread in watching:
        thread.join(10)
    return references[0]() is None, references[1]() is None, [thread.name for thread in watching if thread.is_alive()]


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_an_engine_that_nobody_closes_is_collected_with_its_model_and_its_thread(ranks: Ranks, layout: str) -> None:
    assert ranks.run(_dropped, layout, world_size=2) == [(True, True, [])] * 2
