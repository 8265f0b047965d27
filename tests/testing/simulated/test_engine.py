"""The engine on the simulated device: the same losses as on the CPU, no race, no wait of the host in a step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.accelerator import GRANULE
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.testing.simulated import RacesFound, is_supported, simulated
from tests.support.simulated import AdamW, Block, Gpt, line_of, on_device, train

pytestmark = pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")

CLOSE = 1e-6  # relative: sums of a few hundred fp32 numbers in another order


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_trains_as_on_the_cpu(layout: str, ranks: Ranks, sim_ranks: Ranks) -> None:
    """Two ranks of the device train as two of the CPU do; from the third step on the host never waits for it."""
    expected = ranks.run(train, "cpu", layout, world_size=2)
    found = sim_ranks.run(train, "sim", layout, world_size=2)
    for (losses, races, waits), (wanted, _, _) in zip(found, expected, strict=True):
        assert races == []
        assert waits == {}
        assert losses == pytest.approx(wanted, rel=CLOSE)


def _least(device: str) -> int:
    """Bytes that a budget needs at least."""
    with pytest.raises(ConfigError, match="takes at least") as refused:
        train(device, "zero3", steps=12, model=partial(Gpt, depth=1), activations="fit:1KiB")
    return int(str(refused.value).partition(" bytes)")[0].rpartition("(")[2])


@pytest.mark.soak
@on_device()
def test_a_budget_counts_what_the_allocator_takes() -> None:
    """Tensors whose bytes are no multiples of what the allocator gives count as more on a device than on the CPU."""
    on_cpu, on_the_device = _least("cpu"), _least("sim")
    assert on_cpu % GRANULE
    assert on_the_device > on_cpu and on_the_device % GRANULE == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["hsdp", "hpz"])
def test_trains_in_two_groups_of_two(layout: str, ranks: Ranks, sim_ranks: Ranks) -> None:
    """So do four, in two groups of two."""
    expected = ranks.run(train, "cpu", layout, mesh={"intra": 2}, world_size=4)
    found = sim_ranks.run(train, "sim", layout, mesh={"intra": 2}, world_size=4)
    for (losses, races, waits), (wanted, _, _) in zip(found, expected, strict=True):
        assert races == []
        assert waits == {}
        assert losses == pytest.approx(wanted, rel=CLOSE)


def _again(depth: int = 3) -> Gpt:
    """Goes through its blocks twice."""
    return Gpt(depth=depth, again=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "units that run twice": dict(model=_again),
    "units asked for, sums at once": dict(overlap=sf.Overlap(order="any", reduces_in_flight=0), accumulate=2),
    "accumulation and clipping": dict(accumulate=2, clip_norm=0.5),
    "three units ahead": dict(overlap=sf.Overlap(prefetch=3)),
    "updates beside the computation": dict(overlap=sf.Overlap(update_thread=True)),
    "activations in host memory": dict(activations=sf.Activations(mode="host", smallest=0)),
    "activations made again": dict(activations="recompute"),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", OPTIONS)
def test_trains_with_options_as_on_the_cpu(name: str, ranks: Ranks, sim_ranks: Ranks) -> None:
    """Options that move memory or order work otherwise change neither losses nor order."""
    options = dict(OPTIONS[name])
    expected = ranks.run(train, "cpu", "zero3", world_size=2, **options)
    found = sim_ranks.run(train, "sim", "zero3", world_size=2, **options)
    for (losses, races, waits), (wanted, _, _) in zip(found, expected, strict=True):
        assert races == []
        assert waits == {}
        assert losses == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.soak
def test_memory_that_is_spoiled_for_debugging_is_filled_in_order(ranks: Ranks, sim_ranks: Ranks) -> None:
    """With debug=True a unit's memory is NaN between two runs of it in one pass; the next gather comes behind that.
    (The host waits there, to look for what was written into parameters unseen.)"""
    options: dict[str, Any] = dict(debug=True, model=partial(_again, 1))
    expected = ranks.run(train, "cpu", "zero3", world_size=2, **options)
    found = sim_ranks.run(train, "sim", "zero3", world_size=2, **options)
    for (losses, races, _), (wanted, _, _) in zip(found, expected, strict=True):
        assert races == []
        assert losses == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["zero3", "zero1"])
def test_trains_in_any_legal_order(layout: str, ranks: Ranks, sim_ranks: Ranks) -> None:
    """A device that stays behind, and takes its streams in a random order, gives the same losses."""
    expected = ranks.run(train, "cpu", layout, world_size=2, steps=3)
    found = sim_ranks.run(train, "sim", layout, mode="lazy", lag=2000, steps=3, world_size=2)
    for (losses, races, _), (wanted, _, _) in zip(found, expected, strict=True):
        assert races == []
        assert losses == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_trains_in_many_legal_orders(layout: str, seed: int, ranks: Ranks, sim_ranks: Ranks) -> None:
    """So do other orders, under every layout."""
    expected = ranks.run(train, "cpu", layout, world_size=2, steps=3)
    found = sim_ranks.run(train, "sim", layout, mode="lazy", seed=100 * seed, lag=3000, steps=3, world_size=2)
    for (losses, races, _), (wanted, _, _) in zip(found, expected, strict=True):
        assert races == []
        assert losses == pytest.approx(wanted, rel=CLOSE)


class Hasty(nn.Module):
    """Reads its weight on a stream of its own, which waits for nothing."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.weight, self.waits = nn.Parameter(torch.eye(16)), waits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here, own = torch.sim.current_stream(), torch.sim.Stream()  # type: ignore[attr-defined]
        if self.waits:
            own.wait_stream(here)
        with torch.sim.stream(own):  # type: ignore[attr-defined]
            size = self.weight.detach().abs().sum()  # the hasty line
        if self.waits:
            here.wait_stream(own)
        return x @ self.weight * size.clamp(max=1.0)


class HastyGpt(Gpt):
    """With such a block."""

    def __init__(self, waits: bool) -> None:
        super().__init__(depth=1)
        self.hasty = Hasty(waits)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.hasty(self.blocks[0](self.emb(ids)))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("waits", [False, True])
@on_device(ranks=2)
def test_a_model_that_reads_its_weights_too_early_is_told(waits: bool) -> None:
    """A weight that is gathered for the computation is not there yet for a stream of the user's: the report names the
    model's line, the engine's, and what to do."""
    with simulated() as sim:
        engine = sf.Engine(
            HastyGpt(waits),
            optimizer=AdamW,
            layout="zero3",
            runtime=sf.Runtime(device="sim"),
            init=sf.Init(units=[Block, Hasty]),
        )
        try:
            for _ in range(2):
                ids = torch.ones(2, 8, dtype=torch.long, device="sim")
                engine.backward(engine(ids).square().mean())
                engine.step()
            if waits:
                sim.expect_clean()
                return
            with pytest.raises(RacesFound) as told:
                sim.expect_clean()
        finally:
            engine.close()
    mine = [race for race in told.value.found.races if "tests/testing/simulated/test_engine.py" in race.sites[0]]
    assert mine, told.value
    assert f"test_engine.py:{line_of(__file__, 'the hasty line')}" in str(told.value)
    assert any("shardfold/" in race.sites[1] for race in mine)
    assert "stream.wait_stream" in str(told.value)


def _raises_in_backward() -> Any:
    """Rank 1's backward raises in a hook of the model's."""
    with simulated():
        model = Gpt()
        engine = sf.Engine(
            model, optimizer=AdamW, layout="zero3", runtime=sf.Runtime(device="sim"), init=sf.Init(units=[Block])
        )
        try:
            ids = torch.ones(2, 8, dtype=torch.long, device="sim")
            out = engine(ids)
            if dist.get_rank() == 1:
                out.register_hook(_boom)
            engine.backward(out.square().mean())
        except ValueError as error:
            return str(error)
        except Exception as error:
            return type(error).__name__
        finally:
            engine.close()
    return "nothing"


def _boom(grad: torch.Tensor) -> None:
    raise ValueError("boom")


def test_a_hook_that_raises_in_backward_ends_no_process() -> None:
    """What a hook raises in the backward of one rank reaches its caller there; the others hear of it."""
    from shardfold.testing import run_ranks

    told = run_ranks(_raises_in_backward, 2, device="sim")
    assert told[1] == "boom"
    assert told[0] in ("OrderError", "CollectiveError", "UsageError")
