"""Units are updated one by one, each as soon as what its update needs is there; a second cursor may do it beside."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from threading import Event, Thread, get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.engine.cursor import Cursor
from shardfold.engine.track import Track
from shardfold.errors import ConfigError
from shardfold.plan.layout import PRECISIONS, Tier
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.program import Op, lower, parse
from shardfold.plan.rewrites import Overlap, apply
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
BESIDE = Overlap(update_thread=True)
PATIENCE = 60.0  # seconds after which a test that would hang fails


def make(layout: Any, optimizer: Any = ADAMW, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(models.Small(layers=3), optimizer=optimizer, **grouped(layout=layout, **options))


def train(engine: sf.Engine, steps: int) -> list[float]:
    losses: list[float] = []
    for tokens, targets in models.batches(steps):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


# -- one by one


def update(engine: sf.Engine, unit: Any, coefficient: Tensor | None) -> None:
    assert engine._updater is not None
    unit.gradients.complete()
    used = [[True] * len(segment.parameters) for segment in unit.trainable]
    with torch.no_grad():
        engine._updater.update(unit, used, coefficient)


def test_the_order_in_which_units_are_updated_does_not_matter() -> None:
    """An update reads its own unit's gradients, and what it is called with."""
    found: list[dict[str, Tensor]] = []
    for backwards in (False, True):
        engine = make("zero2")
        engine.backward(engine(*models.batches(1)[0]))
        for number, unit in sorted(enumerate(engine.units), reverse=backwards):
            update(engine, unit, torch.tensor(0.5) if number == 1 else None)
        found.append(engine.state_dict())
        engine.close()
    assert_same(*found)


def test_a_unit_is_updated_by_its_own_operands() -> None:
    """A coefficient acts on the unit that it is given for; other units stay as they are."""
    engine = make("zero2", partial(torch.optim.SGD, lr=0.1))
    before = engine.state_dict()
    engine.backward(engine(*models.batches(1)[0]))
    grads = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    engine._runner.visible.hide()
    first, second, *others = engine.units
    update(engine, first, torch.tensor(0.5))
    update(engine, second, None)
    after = engine.state_dict()
    for unit, factor in ((first, 0.5), (second, 1.0), *((unit, 0.0) for unit in others)):
        for name, _ in unit.parameters():
            torch.testing.assert_close(after[name], before[name] - 0.1 * factor * grads[name], rtol=1e-6, atol=1e-8)
    engine.close()


# -- the second cursor


def test_the_program_says_what_is_done_beside() -> None:
    """Updates and what brings their states go to a section of their own, which has no collectives; the first cursor
    joins each unit before it gathers it. The text reads back."""
    units = [
        UnitSpec(name, (SegmentSpec((Slot("w", (8,), 0),), 8, "bf16"),), name == "(root)") for name in ("(root)", "a")
    ]
    mesh = {"inter": 1, "intra": 2}
    layout = sf.PRESETS["zero2"].edit("moments", tier=Tier.HOST).bind(PRECISIONS["bf16"], mesh)
    made = apply(lower(layout, units, mesh, clip=True), BESIDE)
    assert parse(str(made)) == made
    gathers = [op for op in apply(lower(layout, units, mesh, clip=True), Overlap()).step if op.verb == "ALL_GATHER"]
    waits = [Op("WAIT", name, target="params") for name in ("(root)", "a")]
    joined = [Op("JOIN", "(root)"), gathers[0], Op("JOIN", "a"), gathers[1]]
    assert list(made.step) == [Op("NORM"), Op("STEP"), *joined, *waits]
    assert [(op.verb, op.unit) for op in made.beside] == [
        ("FETCH", "(root)"), ("FETCH", "a"),
        ("UPDATE", "(root)"), ("STORE", "(root)"), ("UPDATE", "a"), ("STORE", "a"),
    ]  # fmt: skip
    assert "beside:" not in str(apply(lower(layout, units, mesh, clip=True), Overlap()))


def test_a_flag_is_a_flag() -> None:
    """Anything else is refused by name."""
    with pytest.raises(ConfigError, match=r"update_thread= is .yes.: it is True or False"):
        Overlap(update_thread="yes")  # type: ignore[arg-type]


CASES: list[tuple[Any, dict[str, Any]]] = [
    ("ddp", {}),
    ("zero1", {"clip_norm": 0.05}),
    ("zero2", {"precision": "bf16", "clip_norm": 0.05}),
    ("zero3", {"precision": "fp16", "loss_scale": 4.0}),
    (sf.PRESETS["zero1"].edit("moments", tier=Tier.HOST), {"precision": "bf16"}),
    (sf.PRESETS["zero2"].edit("moments", tier=Tier.DISK), {"clip_norm": 0.05}),
    ("zero2", {"optimizer": partial(torch.optim.RMSprop, lr=1e-3)}),
    ("zero1", {"optimizer": partial(sf.optim.Adafactor, lr=1e-3)}),
]  # fmt: skip


def _equal() -> int:
    for layout, options in CASES:
        one, two = make(layout, **options), make(layout, overlap=BESIDE, **options)
        assert train(one, 4) == train(two, 4)
        assert_same(one.state_dict(), two.state_dict())
        assert one.traffic() == two.traffic()
        one.close()
        two.close()
    return len(CASES)


@pytest.mark.soak
def test_training_is_the_same_with_an_update_thread(ranks: Ranks) -> None:
    """To the bit, with moments on the device and elsewhere, and for optimizers that step as a whole."""
    assert ranks.run(_equal, world_size=2) == [len(CASES)] * 2


def _overlapping() -> list[str]:
    engine = make("zero1", overlap=BESIDE)
    train(engine, 1)
    names = [unit.name for unit in engine.units]
    gathered = {name: Event() for name in names}
    handlers, log = engine._runner.handlers, list[str]()
    real_update: Callable[..., None] = engine._updater.update  # type: ignore[union-attr]
    real_collective: Callable[..., None] = handlers.comm.collective
    main = get_ident()

    def update(unit: Any, *operands: Any) -> None:
        assert get_ident() != main
        number = names.index(unit.name)
        if number and not gathered[names[number - 1]].wait(PATIENCE):
            log.append(f"{unit.name} waited in vain")
        real_update(unit, *operands)
        log.append(f"updated {unit.name}")

    def collective(op: Op, *args: Any, **kwargs: Any) -> None:
        if op.verb == "ALL_GATHER":
            assert get_ident() == main
            log.append(f"gathered {op.unit}")
        real_collective(op, *args, **kwargs)
        gathered[op.unit].set()

    engine.backward(engine(*(t.chunk(2)[engine.rank] for t in models.batches(1)[0])))
    engine._updater.update, handlers.comm.collective = update, collective  # type: ignore
    for event in gathered.values():
        event.clear()
    engine.step()
    engine.close()
    return log


def test_a_unit_is_gathered_while_the_next_is_updated(ranks: Ranks) -> None:
    """Each update but the first waits here until the unit before it is being gathered: with one cursor that would
    never come. No unit is gathered before it is updated."""
    for log in ranks.run(_overlapping, world_size=2):
        assert [line.split()[0] for line in log] == ["updated", "gathered"] * (len(log) // 2)
        assert len(log) >= 6 and all(a.split()[1] == b.split()[1] for a, b in zip(log[::2], log[1::2], strict=True))


class _Clamped(nn.Module):
    """Writes into a weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.2, 0.2)
        return self.last(torch.tanh(self.first(x))).square().mean()


def _given_back() -> list[tuple[float, int]]:
    """By case, how far weights are from plain PyTorch's, and how many updates began while a unit was still kept."""
    found: list[tuple[float, int]] = []
    once = sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute", until="step"))
    options: list[dict[str, Any]] = [{}, {"accumulate": 2, "debug": True}]
    for case in [*options, {"debug": True, "overlap": Overlap(update_thread=True, reduce_once=True)}]:
        torch.manual_seed(0)
        plain = _Clamped().double()
        optimizer = ADAMW(plain.parameters())
        engine = sf.Engine(
            deepcopy(plain),
            optimizer=ADAMW,
            **grouped(units=["*"], layout=once, patience=5, **{"overlap": BESIDE, **case}),
        )
        kept, cursor = list[bool](), engine._runner.handlers.cursor

        def begin(track: Track, engine: sf.Engine = engine, kept: list[bool] = kept, real: Any = cursor.begin) -> None:
            kept += [unit.kept for unit in engine.units]
            real(track)

        cursor.begin = begin  # type: ignore[method-assign]
        for step in range(4):
            rows = torch.randn(4 * engine.accumulate, 6, generator=torch.Generator().manual_seed(step)).double()
            for part in rows.chunk(2 * engine.accumulate):
                (plain(part) / (2 * engine.accumulate)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for micro in range(engine.accumulate):
                engine.backward(engine(rows.chunk(2 * engine.accumulate)[2 * micro + engine.rank]))
                engine.step()
        state = engine.state_dict()
        found.append((max((state[n] - p).abs().max().item() for n, p in plain.state_dict().items()), sum(kept)))
        engine.close()
    return found


def test_what_was_gathered_once_is_given_back_before_an_update_writes(ranks: Ranks) -> None:
    """Under ``debug=True`` what is given back is compared with shards, and what forward wrote goes there."""
    for found in ranks.run(_given_back, world_size=2):
        assert len(found) == 3 and all(off < 1e-12 and kept == 0 for off, kept in found)


def track(**calls: Callable[[], None]) -> Track:
    ops = [Op("UPDATE", unit) for unit in calls]
    return Track("beside", ops, lambda op: calls[op.unit])


@pytest.fixture
def cursor() -> Any:
    made = Cursor(torch.device("cpu"))
    yield made
    made.close()


def test_join_waits_for_its_unit(cursor: Cursor) -> None:
    """And for no other: the second unit's update ends only after the first was joined."""
    joining, joined, log = Event(), Event(), list[str]()

    def first() -> None:
        assert joining.wait(PATIENCE)
        log.append("a")

    def second() -> None:
        assert joined.wait(PATIENCE)
        log.append("b")

    with cursor.following(track(a=first, b=second)):
        Thread(target=joining.set).start()
        cursor.join("a")
        assert log == ["a"]
        joined.set()
        cursor.join("b")
        cursor.join("no unit of the track")
        assert log == ["a", "b"]


def test_all_is_done_at_the_end(cursor: Cursor) -> None:
    """Also what nobody joined, and where what was done meanwhile raised."""
    log: list[str] = []
    for error in (None, ValueError("of the first cursor")):
        gate = Event()

        def wait(gate: Event = gate) -> None:
            assert gate.wait(PATIENCE)
            for _ in range(20):  # long beside what follows the end
                torch.ones(300, 300) @ torch.ones(300, 300)
            log.append("done")

        log.clear()
        try:
            with cursor.following(track(a=wait)):
                Thread(target=gate.set).start()
                if error is not None:
                    raise error
        except ValueError as raised:
            assert raised is error
        assert log == ["done"]


@pytest.mark.parametrize("joins", [True, False])
def test_what_an_update_raises_ends_the_step(cursor: Cursor, joins: bool) -> None:
    """Whoever joins hears it, or the end of the step does; nothing behind it is done, and the next step is as new."""
    log: list[str] = []

    def fail() -> None:
        log.append("a")
        raise OSError("the disk is full")

    def end() -> None:
        log.append("b")

    with pytest.raises(OSError, match="the disk is full"), cursor.following(track(a=fail, b=end)):
        if joins:
            cursor.join("b")
            raise AssertionError("b is not done")
    assert log == ["a"]
    with cursor.following(track(b=end)):
        cursor.join("b")
    assert log == ["a", "b"]
