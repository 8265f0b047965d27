"""Units that are updated in host memory before their step is known, and what that step turns out to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import inf
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, NonFiniteError, UsageError
from shardfold.optim import speculation
from shardfold.optim.fused import FusedShard
from shardfold.plan.program import parse
from shardfold.sharding.shard import values_of
from shardfold.testing import Ranks
from tests.support import models
from tests.tiers.test_offload import ADAMW, ALL, SUMS, make, states

AHEAD = sf.Overlap(speculate="1GiB")
PATIENCE = 60.0  # seconds after which a test that would hang fails
NARROW = sf.Precision(compute="bf16", grads="bf16", reduce="bf16")
CASES: list[tuple[str, Mapping[str, str], dict[str, Any]]] = [
    ("zero2", SUMS, {"precision": "bf16", "accumulate": 2}),
    ("zero3", ALL, {}),
    ("zero3", ALL, {"precision": NARROW, "overlap": sf.Overlap(update_thread=True)}),
    ("zero3", SUMS, {"precision": "fp16", "loss_scale": 4.0}),
    ("fsdp2", SUMS, {"precision": "bf16", "overlap": sf.Overlap(order="any")}),
    ("ddp", SUMS, {"optimizer": partial(torch.optim.SGD, lr=1e-2, momentum=0.9)}),
    ("zero2", SUMS, {"precision": sf.Precision(compute="bf16", master="bf16", moments="bf16", rounding="stochastic")}),
]


@contextmanager
def verdicts() -> Iterator[list[bool]]:
    """Whether each update that was begun before its step stood."""
    found, stands = list[bool](), speculation.Speculation.stands

    def told(self: speculation.Speculation, terms: speculation.Terms) -> bool:
        found.append(stands(self, terms))
        return found[-1]

    speculation.Speculation.stands = told
    try:
        yield found
    finally:
        speculation.Speculation.stands = stands


def train(engine: sf.Engine, factors: list[float], between: Callable[[sf.Engine], object] | None = None) -> list[float]:
    """A step for each factor, which its losses are multiplied by; in the second ``between`` is called before it."""
    losses: list[float] = []
    for i, (factor, batch) in enumerate(zip(factors, models.batches(len(factors)), strict=True)):
        for micro in range(engine.accumulate):
            part = engine.rank + micro * engine.world_size
            loss = engine(*(t.chunk(engine.world_size * engine.accumulate)[part] for t in batch))
            engine.backward(loss * factor)
            losses.append(loss.item())
        if i == 1 and between is not None:
            between(engine)
        engine.step()
    return losses


def _pair(layout: str, **options: Any) -> tuple[sf.Engine, sf.Engine]:
    """Two engines, of which the second begins updates before their step."""
    overlap = dataclasses.replace(options.pop("overlap", sf.Overlap()), speculate="1GiB")
    return make(layout, **options), make(layout, overlap=overlap, **options)


def _differences(one: sf.Engine, two: sf.Engine, run: Callable[[sf.Engine], object]) -> list[str]:
    same = run(one) == run(two)
    a, b = states(one), states(two)
    one.close()
    two.close()
    return ["what it said"] * (not same) + [name for name in a if not torch.equal(a[name], b[name])]


def _clipped(case: int) -> tuple[list[str], int, int]:
    layout, tiers, options = CASES[case]
    factors = [1.0, 1e3, 1.0, 1e3, 1.0]
    one, two = _pair(layout, offload=tiers, clip_norm=20.0, **options)
    num = sum(len(unit.trainable) for unit in two.units)
    with verdicts() as found:
        wrong = _differences(one, two, partial(train, factors=factors))
    return wrong, found.count(True) - 3 * num, found.count(False) - 2 * num


@pytest.mark.sampled(8)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", [pytest.param(i, marks=[pytest.mark.soak] * (i > 3)) for i in range(len(CASES))])
def test_steps_that_clip_and_others_are_as_with_two_passes(ranks: Ranks, case: int, world: int) -> None:
    """Losses, values, moments and counts equal to the bit. Of five steps two clip: in these each unit is restored and
    updated again, in the others its update stands."""
    assert ranks.run(_clipped, case, world_size=world) == [([], 0, 0)] * world


# -- an overflow


def raw(engine: sf.Engine) -> list[Any]:
    """Bytes of masters, moments and of what forward reads, and counts: looked at from below, which restores nothing."""
    assert engine._updater is not None
    found: list[Any] = []
    for shard in engine._updater._fused.values():
        tensors = [shard.segment._master, shard.segment._rest, *(m.resting for m in shard.moments.values())]
        found += [t.clone() for t in tensors if t is not None]
        found.append(list(shard.steps))
    return found


def changed(before: list[Any], after: list[Any]) -> int:
    """How many of them are others."""
    pairs = zip(before, after, strict=True)
    return sum(not (torch.equal(a, b) if isinstance(a, Tensor) else a == b) for a, b in pairs)


def all_done(engine: sf.Engine) -> int:
    """Waits for all updates that were begun before their step; how many those are."""
    assert engine._updater is not None
    begun = [shard.segment.under_way for shard in engine._updater._fused.values()]
    for each in begun:
        if isinstance(each, speculation.Speculation):
            each._run.result()
    return sum(each is not None for each in begun)


def _overflow(precision: str, layout: str, tiers: dict[str, str]) -> list[Any]:
    clip = sf.Clip(norm=1e9, error_if_nonfinite=True)
    options = {"loss_scale": 2.0} if precision == "fp16" else {"clip": clip}
    engine = make(layout, offload=tiers, precision=precision, overlap=AHEAD, **options)
    train(engine, [1.0, 1.0])
    before = raw(engine)
    tokens, targets = (t.chunk(engine.world_size)[engine.rank] for t in models.batches(1)[0])
    poison = inf if engine.rank == engine.world_size - 1 else 1.0
    last = engine.module.get_submodule("embedding").register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: grad * poison) and None
    )
    engine.backward(engine(tokens, targets))
    last.remove()
    begun = all_done(engine)
    meanwhile = changed(before, raw(engine))
    try:
        said = engine.step().skipped
    except NonFiniteError:
        said = "refused"
    behind = changed(before, raw(engine))
    engine.zero_grad()
    losses = train(engine, [1.0, 1.0])  # it goes on
    engine.close()
    return [begun, meanwhile > 0, said, behind, all(loss == loss for loss in losses)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("precision", "said"), [("fp16", True), ("bf16", "refused"), ("fp32", "refused")])
@pytest.mark.parametrize("world", [1, 2])
def test_an_inf_in_the_last_gradient_leaves_no_trace(ranks: Ranks, precision: str, said: Any, world: int) -> None:
    """Units were updated before the last one's gradient came: masters, moments, counts and parameters are those of
    before, to the bit, whether a loss scale skips the step or the norm is refused."""
    tiers = ALL if precision == "fp32" else SUMS
    layout = "zero3" if precision == "fp32" else "zero2"
    assert ranks.run(_overflow, precision, layout, dict(tiers), world_size=world) == [[6, True, said, 0, True]] * world


# -- what happens between backward and step


def _lower(engine: sf.Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"] *= 0.5


def _other_betas(engine: sf.Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def _scaled_pieces(engine: sf.Engine) -> None:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for piece in optimizer.param_groups[0]["params"]:
                piece.mul_(0.5)
        handle.remove()

    assert engine.optimizer is not None
    handle = engine.optimizer.register_step_pre_hook(hook)


def _once_more(engine: sf.Engine) -> None:
    engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in models.batches(1)[0])))


def _start_again(engine: sf.Engine) -> None:
    engine.zero_grad()
    _once_more(engine)


def _drop(engine: sf.Engine) -> None:
    """One gradient is dropped."""
    next(p for name, p in engine.module.named_parameters() if name == "blocks.0.up.weight").grad = None


def _write(engine: sf.Engine) -> None:
    with engine.gathered("head.bias", write=True) as bias:
        bias.data.fill_(0.25)


def _read(engine: sf.Engine) -> list[Tensor]:
    found = list(states(engine).values())
    with torch.no_grad():
        tokens, targets = models.batches(1)[0]
        return [*found, engine(tokens, targets)]


def _evaluate(engine: sf.Engine) -> None:
    with torch.no_grad():
        assert engine(*models.batches(1)[0]) > 0


def _look(engine: sf.Engine) -> None:
    with engine.gathered(of="grads") as grads:
        assert grads["head.bias"] is not None


def _set(engine: sf.Engine) -> None:
    with engine.gathered("head.bias", of="grads", write=True) as grad:
        grad.mul_(2.0)


BETWEEN: dict[str, tuple[Callable[[sf.Engine], Any], int]] = {  # and how many of 4 steps stand
    "another learning rate": (_lower, 3),
    "other betas": (_other_betas, 3),
    "a hook before the step": (_scaled_pieces, 3),
    "another backward": (_once_more, 4),
    "dropped and done again": (_start_again, 4),
    "one gradient is dropped": (_drop, 3),
    "a parameter is written": (_write, 3),
    "states are read": (_read, 3),
    "an evaluation": (_evaluate, 4),
    "gradients are read": (_look, 4),
    "a gradient is written": (_set, 3),
}


def _between(name: str) -> tuple[list[str], int]:
    action, stand = BETWEEN[name]
    seen: list[list[Tensor]] = []

    def between(engine: sf.Engine) -> None:
        all_done(engine)
        found = action(engine)
        if found is not None:
            seen.append(found)

    one, two = _pair("zero2", offload=SUMS, precision="bf16")
    num = len(two.units)
    with verdicts() as found:
        wrong = _differences(one, two, partial(train, factors=[1.0] * 4, between=between))
    if seen:
        wrong += ["what was read"] * (not all(torch.equal(a, b) for a, b in zip(*seen, strict=True)))
    most = num if name.endswith("is written") else 0  # of the other units it may stand or not
    return wrong, max(0, abs(found.count(True) - stand * num) - most)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2])
def test_what_comes_between_backward_and_step_counts(ranks: Ranks, world: int) -> None:
    """Users may change hyper-parameters, drop or add to gradients, write parameters and read states: everything is as
    if no unit had been updated yet, and the steps around it stand."""
    for name in BETWEEN:
        assert ranks.run(_between, name, world_size=world) == [([], 0)] * world, name


def _moments() -> list[bool]:
    """Whether each way to read a state without its master gives what it was before."""
    engine = make("zero2", offload=SUMS, precision="bf16", overlap=AHEAD)
    train(engine, [1.0])
    updater = engine._updater
    assert updater is not None
    segment = engine.units[0].trainable[0]
    before = updater.state_shard(segment, "exp_avg", torch.float32).clone(), updater.kept_once(segment, 0)
    seen: list[bool] = []
    for way in range(3):
        _once_more(engine)
        all_done(engine)
        if way == 0:
            seen.append(torch.equal(updater.state_shard(segment, "exp_avg", torch.float32), before[0]))
        elif way == 1:
            seen.append(updater.kept_once(segment, 0) == before[1])
        else:
            values = next(v for name, _, v in updater.stored(segment, 0) if name == "exp_avg")
            seen.append(torch.equal(values_of(values), before[0][: values.numel()]))
        engine.zero_grad()
    engine.close()
    return seen


def test_a_state_is_read_as_before_the_step(ranks: Ranks) -> None:
    """Moments and counts, too, that are read alone."""
    assert ranks.run(_moments, world_size=1) == [[True] * 3]


class Branches(nn.Module):
    """Two layers side by side, of which ranks may take one, or both in another order; of ``A`` and ``B`` the weights
    only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, names: str) -> Tensor:
        layers = [(getattr(self, name.lower()), name.isupper()) for name in names]
        outs = [nn.functional.linear(x, layer.weight) if weight else layer(x) for layer, weight in layers]
        return torch.stack(outs).square().mean()


def _branches(ways: list[tuple[str, str]]) -> tuple[list[str], list[bool]]:
    def run(engine: sf.Engine) -> list[float]:
        losses: list[float] = []
        for way in ways:
            loss = engine(torch.full((4, 8), 1.0 + engine.rank), way[engine.rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    made: list[sf.Engine] = []
    for overlap in (sf.Overlap(), AHEAD):
        torch.manual_seed(0)
        made.append(
            sf.Engine(
                Branches(),
                optimizer=ADAMW,
                layout="zero2",
                offload=SUMS,
                init=sf.Init(units=[nn.Linear]),
                overlap=overlap,
            )
        )
    with verdicts() as found:
        wrong = _differences(made[0], made[1], run)
    return wrong, found


def test_what_only_another_rank_used_is_updated_there_too(ranks: Ranks) -> None:
    """A rank learns in the step what others used: what it has not used itself, or updated as unused, is done again."""
    ways = [("ab", "ab"), ("a", "b"), ("ab", "a"), ("Ab", "ab"), ("Ab", "Ab")]
    for wrong, found in ranks.run(_branches, ways, world_size=2):
        assert not wrong and True in found


def test_late_gradients_are_in_the_step(ranks: Ranks) -> None:
    """Where ranks run units in another order, gradients come behind their unit's reduction, and behind its update."""
    for wrong, found in ranks.run(_branches, [("ab", "ab"), ("ab", "ba"), ("ab", "ba")], world_size=2):
        assert not wrong and True in found


# -- room, failures, time


def _small() -> list[Any]:
    one = make("zero2", offload=SUMS, precision="bf16")
    two = make("zero2", offload=SUMS, precision="bf16", overlap=sf.Overlap(speculate="80KiB"))
    wrong = _differences(one, two, partial(train, factors=[1.0] * 3)) if one.world_size == 1 else []
    last = [op.unit for op in two.program.last if op.verb == "SPECULATE"]
    whole = [op.unit for op in two.program.last if op.verb == "STORE"]
    assert parse(str(two.program)) == two.program
    assert not [
        op for name in ("forward", "backward", "step") for op in two.program.section(name) if op.verb == "SPECULATE"
    ]
    return [wrong, last, [name for name in whole if name in last], len(whole)]


def test_what_has_no_room_is_updated_in_the_step(ranks: Ranks) -> None:
    """The units that backward is done with first have room, and what fits besides, as the program shows; all train as
    without."""
    [[wrong, last, first, every]] = ranks.run(_small, world_size=1)
    assert not wrong
    assert last == first and last[0] == "head" and 1 < len(last) < every


def _report() -> tuple[list[Any], bool, bool]:
    engine = make("zero2", offload=SUMS, precision="bf16", overlap=sf.Overlap(speculate="80KiB"))
    [row] = [row for row in engine.memory().rows if row.state == "snapshots"]
    said = f"snapshots{row.held:>18,.0f}  (host)" in engine.explain()
    engine.close()
    return [row.tier, row.held == row.table, 0 < row.held <= 80 * 1024], said, row.held > 0


def test_snapshots_are_counted(ranks: Ranks) -> None:
    """``memory()`` and ``explain()`` say the same, which is at most what was given."""
    assert ranks.run(_report, world_size=1) == [(["host", True, True], True, True)]


def _failing() -> list[str]:
    one, two = _pair("zero2", offload=SUMS, precision="bf16")
    update, main, failed = FusedShard._update_run, get_ident(), list[int]()

    def fail(self: FusedShard, *args: Any) -> None:
        update(self, *args)
        if get_ident() != main:
            failed.append(1)
            raise RuntimeError("no memory")

    def run(engine: sf.Engine) -> list[float]:
        FusedShard._update_run = fail if engine is two else update
        try:
            return train(engine, [1.0] * 2)
        finally:
            FusedShard._update_run = update

    wrong = _differences(one, two, run)
    return wrong + ["nothing failed"] * (not failed)


def test_an_update_that_fails_before_its_step_is_done_in_it(ranks: Ranks) -> None:
    """What it wrote is restored first."""
    assert ranks.run(_failing, world_size=1) == [[]]


def _beside() -> list[bool]:
    engine = make("zero2", offload=SUMS, precision="bf16", overlap=AHEAD)
    train(engine, [1.0])
    updated, main, waited = Event(), get_ident(), list[bool]()
    update = FusedShard._update

    def told(self: FusedShard, *args: Any) -> None:
        update(self, *args)
        assert get_ident() != main
        updated.set()

    engine.module.get_submodule("blocks.0").register_full_backward_pre_hook(
        lambda module, grads: waited.append(updated.wait(PATIENCE))
    )
    FusedShard._update = told
    try:
        train(engine, [1.0])
    finally:
        FusedShard._update = update
    engine.close()
    return waited


def test_a_unit_is_updated_while_backward_still_computes(ranks: Ranks) -> None:
    """The backward of the first block waits here until a later one is updated: two passes would never come so far. No
    update runs on the main thread."""
    for waited in ranks.run(_beside, world_size=2):
        assert waited == [True]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no bytes": ({"overlap": lambda: sf.Overlap(speculate="2 gigs")}, "it is bytes as a text, such as '2GiB'"),
    "a number": ({"overlap": lambda: sf.Overlap(speculate=5)}, "it is bytes as a text"),  # type: ignore[arg-type]
    "on the device": ({"offload": None}, "but grads rest in the device tier: give offload='host'"),
    "gradients on the device": ({"offload": {"optimizer": "host"}}, "but grads rest in the device tier"),
    "a part": ({"offload": "host:0.5"}, "with share=0.5 some units' states stay on the device"),
    "on disk": ({"offload": {"optimizer": "disk", "grads": "host"}}, "but master rest in the disk tier"),
    "an optimizer": ({"optimizer": partial(torch.optim.Adagrad, lr=1e-2)}, "AdamW, Adam and SGD, but Adagrad"),
    "values": ({"clip": sf.Clip(value=1.0)}, r"before Clip\(value=...\) cuts them"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_go_together_is_refused(case: tuple[dict[str, Any], str]) -> None:
    options, words = case
    with pytest.raises(ConfigError, match=words):
        overlap = options.get("overlap", lambda: AHEAD)()
        make("zero2", **{"offload": SUMS, **options, "overlap": overlap})


def test_a_closed_engine_leaves_no_thread() -> None:
    """Closed between backward and step, too: what was updated is restored first, and the model is as before."""
    engine = make("zero2", offload=SUMS, precision="bf16", overlap=AHEAD)
    before = raw(engine)
    engine.backward(engine(*models.batches(1)[0]))
    shards = list(engine._updater._fused.values())  # type: ignore[union-attr]
    engine.close()
    assert not any(shard.segment.under_way for shard in shards)
    assert changed(before, [t for shard in shards for t in _bytes(shard)]) == 0
    with pytest.raises(UsageError, match="closed"):
        engine.step()


def _bytes(shard: FusedShard) -> list[Any]:
    tensors = [shard.segment._master, shard.segment._rest, *(m.resting for m in shard.moments.values())]
    return [*(t.clone() for t in tensors if t is not None), list(shard.steps)]
