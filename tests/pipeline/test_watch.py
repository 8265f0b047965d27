"""What a rank does of its time, and what is said of it before and after, on a clock that is counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.parallel.pipeline._vshape import V_SHAPED
from shardfold.parallel.pipeline.action import Action
from shardfold.parallel.pipeline.flow import Made
from shardfold.parallel.pipeline.point_to_point import Parcel, PointToPoint
from shardfold.parallel.pipeline.simulate import Times, timeline
from shardfold.parallel.pipeline.watch import Watch
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of
from tests.support.options import grouped


class _Counted(Watch):
    """Every action takes as long as ``times`` say; what arrives cannot do so before it was sent."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.now, self._times = 0.0, times
        self.clock = lambda: self.now

    def start(self) -> None:
        self.now = 0.0
        super().start()

    def end(self, action: Action) -> None:
        if action.verb in "FBIW":
            self.now += self._times.of(action)
        super().end(action)


class _Stamped(PointToPoint):
    """Sends with everything when that was."""

    watch: _Counted

    def begin(self, coming: dict[int, list[Parcel]], forms: Mapping[Parcel, Sequence[Made]]) -> None:
        super().begin(coming, {parcel: [*made, Made((1,), torch.float64, False)] for parcel, made in forms.items()})

    def send(self, tensors: Sequence[Tensor], place: int, parcel: Parcel) -> None:
        super().send([*tensors, torch.tensor([self.watch.now], dtype=torch.float64)], place, parcel)

    def receive(self, place: int, parcel: Parcel) -> list[Tensor]:
        *found, sent = super().receive(place, parcel)
        self.watch.now = max(self.watch.now, sent.item())
        return found


def _model(count: int) -> str:
    """One that can be cut into two stages for each of so many ranks."""
    return "gpt" if count < 4 else "sequential"


def _waits(order: str, count: int, micro: int, times: Times) -> tuple[Any, str]:
    options: dict[str, Any] = {"mesh": {"pipeline": count}, "accumulate": micro, "pipeline": order}
    engine = sf.Engine(model_of(_model(count)), optimizer=ADAM, **grouped(layout="zero1", **options))
    assert engine.stats().pipeline is not None and engine.stats().pipeline.bubble is None
    runs: Any = engine._pipelined
    runs.watch = _Counted(times)
    runs._wire = _Stamped(engine.sharded.comm, "pipeline")
    runs._wire.watch = runs.watch
    batch = batches(micro, 1)[0]
    told = engine.explain(batch, compute)
    engine.train_batch(batch, compute)
    engine.step()
    assert engine.stats().exposed_seconds is not None
    assert engine.explain() == told
    found = engine.stats().pipeline
    engine.close()
    return found, told


UNEQUAL = Times(forward=[1.0, 2.0, 1.5, 1.0], inputs=[1.0, 1.5, 2.0, 1.0], weights=[0.5, 1.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("order", "count", "micro", "times"),
    [
        ("zbv", 2, 3, UNEQUAL),
        ("1f1b", 3, 4, Times()),
        *(
            pytest.param(order, 2, 6, times, marks=pytest.mark.soak)
            for order in ("gpipe", "1f1b", "interleaved:2", "looped-bfs:2", "zb-h1", "zbv", "v-half", "dualpipev")
            for times in (Times(), UNEQUAL)
        ),
        *(
            pytest.param(order, 4, each * 4, Times(), marks=pytest.mark.soak)
            for order, each in (("1f1b", 4), ("1f1b", 8), ("interleaved:2", 4), ("zb-h1", 4), ("zbv", 4), ("v-half", 4))
        ),
    ],
)
def test_ranks_wait_as_long_as_the_simulator_says(
    ranks: Ranks, order: str, count: int, micro: int, times: Times
) -> None:
    """Bubble, times and what is kept, where an action takes as long as it is said to."""
    from shardfold.parallel.pipeline.stage_order import choose_order, make_order

    choice = choose_order(order)
    rows = make_order(choice, count, micro)
    line, slots = timeline(rows, count * choice.chunks, times), timeline(rows, count * choice.chunks)
    found = ranks.run(_waits, order, count, micro, times, world_size=count)
    for rank, (measured, _) in enumerate(found):
        assert measured.order == order and measured.kept == line.kept[rank]
        assert measured.bubble == pytest.approx(line.shares[rank], abs=1e-9)
        assert measured.planned == pytest.approx(slots.shares[rank], abs=1e-9)
        assert measured.batch_seconds - measured.waited_seconds == pytest.approx(line.busy[rank])
        split = any(action.verb == "W" for action in rows[rank])
        assert (measured.weights_seconds is None) != split and measured.forward_seconds is not None
    seconds = [(measured.batch_seconds, measured.waited_seconds) for measured, _ in found]
    assert max(taken for taken, _ in seconds) == pytest.approx(line.end)
    if order == "1f1b" and times == Times():  # efficiency: 0.80 and more at 4 times as many micro-batches as stages
        busy = sum(taken - waited for taken, waited in seconds) / (count * max(taken for taken, _ in seconds))
        assert busy == pytest.approx(micro / (micro + count - 1))
    told = found[0][1]
    assert f"bubble {slots.bubble:.1%}" in told and "activations of pieces, at most, by rank, bytes:" in told
    hidden = 4 * (6 * 16 if count < 4 else 8) * 8  # samples of a micro-batch, positions, width, bytes of fp64
    assert f"from stage 0 to 1: {hidden:,} bytes, and {hidden:,} back" in told, told
    assert ("stays on its rank" in told) == (choice.name in V_SHAPED)


def _others(rank_order: Sequence[str]) -> str:
    order = rank_order[torch.distributed.get_rank()]
    with pytest.raises(ConfigError) as raised:
        sf.Engine(
            model_of("gpt"), optimizer=ADAM, parallel=sf.Parallel(mesh={"pipeline": 2}, pipeline=order), accumulate=2
        )
    return str(raised.value)


def test_ranks_that_are_given_different_orders_are_refused(ranks: Ranks) -> None:
    own = "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1\n"
    for said in ranks.run(_others, ["1f1b", own], world_size=2):
        assert "pipeline=" in said
