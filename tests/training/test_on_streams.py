"""Faults that only a device with streams shows, each seen on the simulated one before it was mended."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.checkpoint import save
from shardfold.optim.adamw8bit import AdamW8bit
from shardfold.testing import Ranks
from shardfold.testing.simulated import is_supported, simulated
from tests.support.simulated import AdamW, Block, Gpt, on_device, train

pytestmark = pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")

CLOSE = 1e-6  # relative: sums of a few hundred fp32 numbers in another order
CODES = 1e-4  # where such a sum turns a moment's code of 8 bits, which moves a weight by a hundredth of its step
TWICE = partial(Gpt, again=True)


def _both(ranks: Ranks, sim_ranks: Ranks, layout: str, close: float = CLOSE, **options: Any) -> list[Any]:
    """What two ranks of the device find, once their losses are those of two on the CPU."""
    expected = ranks.run(train, "cpu", layout, world_size=2, **options)
    found = sim_ranks.run(train, "sim", layout, world_size=2, **options)
    for (losses, _, _), (wanted, _, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(wanted, rel=close)
    return found


@pytest.mark.soak
def test_what_debug_fills_with_nan_is_behind_what_is_gathered_into_it(ranks: Ranks, sim_ranks: Ranks) -> None:
    """``debug=True`` frees nothing, and a block that runs twice in a pass is gathered again into the same memory."""
    overlap = sf.Overlap(
        prefetch=3
    )  # what debug compares when it frees the next unit stops the host: far ahead of that
    for _, races, _ in _both(ranks, sim_ranks, "zero3", debug=True, model=TWICE, overlap=overlap):
        assert races == []


@pytest.mark.soak
def test_sums_are_read_before_their_memory_is_given_out_again(ranks: Ranks, sim_ranks: Ranks) -> None:
    """With no reduction in flight, sums that are added to earlier ones are in memory of the side stream: the next
    gather may not have it while they are still to be read."""
    overlap = sf.Overlap(order="any", reduces_in_flight=0)
    for _, races, _ in _both(ranks, sim_ranks, "zero3", accumulate=2, overlap=overlap, steps=3):
        assert races == []


class FrozenGpt(Gpt):
    """Matrices of its blocks are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.blocks.named_parameters():
            parameter.requires_grad_(parameter.dim() == 1 or ".out." in name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["zero3+nf4/64", "ddp+nf4/64+double", "infinity+int8/64+double"])
def test_codes_are_there_when_they_are_decoded(ranks: Ranks, sim_ranks: Ranks, layout: str) -> None:
    """They come from the host, or other ranks, beside the computation, which decodes them and waits for no host."""
    for _, races, waits in _both(ranks, sim_ranks, layout, model=FrozenGpt, steps=4):
        assert races == []
        assert [what for what in waits if "codebooks" in what or "decode" in what] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [16, 256])
def test_tables_of_8bit_moments_are_copied_once(ranks: Ranks, sim_ranks: Ranks, block: int) -> None:
    """From the third step on, steps with 8-bit moments do not stop the host."""
    optimizer = partial(AdamW8bit, lr=1e-2, block=block, min_8bit_size=64)
    for _, races, waits in _both(ranks, sim_ranks, "zero2", CODES, optimizer=optimizer):
        assert races == [] and waits == {}


ROUNDED = 2.0**-7  # relative: parameters of bf16 that fall to the other side, and losses that are rounded to it


@pytest.mark.parametrize("layout", ["zero2", pytest.param("zero3", marks=pytest.mark.soak)])
def test_an_update_in_one_pass_stops_no_host(ranks: Ranks, sim_ranks: Ranks, layout: str) -> None:
    """The norm that gradients are clipped by stays on the device, and what is the same for all elements comes there
    from pinned memory. Losses are those of blocks on the CPU."""
    options: dict[str, Any] = {"precision": "bf16", "clip_norm": 0.5}
    expected = ranks.run(train, "cpu", layout, world_size=2, **options)
    overlap = sf.Overlap(compiled_update=True)
    found = sim_ranks.run(train, "sim", layout, world_size=2, overlap=overlap, **options)
    for (losses, races, waits), (wanted, _, _) in zip(found, expected, strict=True):
        assert races == [] and waits == {}
        assert losses == pytest.approx(wanted, rel=ROUNDED)


class Normed(Gpt):
    """With statistics that each forward changes, and a table that none does."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.statistics = nn.BatchNorm1d(16)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.emb(ids)) * self.table
        return self.head(self.statistics(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.soak
def test_buffers_that_follow_rank_0_do_not_stop_the_host(ranks: Ranks, sim_ranks: Ranks) -> None:
    """Batch statistics are brought to every rank in each forward, and nothing is read back for it; tables that autograd
    has kept do not count as written."""
    for _, races, waits in _both(ranks, sim_ranks, "zero2", model=Normed, accumulate=2, steps=4):
        assert races == [] and waits == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_scale_reads_the_device_once_in_a_step(sim_ranks: Ranks, clip: float | None) -> None:
    """Whether gradients overflowed and losses are finite is one number for each, read together."""
    for _, races, waits in sim_ranks.run(
        train, "sim", "zero2", precision="fp16", loss_scale=8.0, clip_norm=clip, accumulate=2, steps=6, world_size=2
    ):
        assert races == []
        assert sum(waits.values()) == 4, waits  # of the last four of six steps


@pytest.mark.parametrize("mode", ["host", "disk"])
@on_device()
def test_activations_move_on_a_device_that_was_given_without_a_number(mode: str) -> None:
    """``device="sim"`` is this rank's own device, by its number, as that of every tensor on it: what is to rest on the
    host does."""
    moved = sf.Activations(mode=mode, smallest=0)
    with simulated() as sim:
        engine = sf.Engine(
            Gpt(),
            optimizer=AdamW,
            layout="ddp",
            runtime=sf.Runtime(device="sim"),
            activations=moved,
            init=sf.Init(units=[Block]),
        )
        try:
            assert str(engine.device) == "sim:0"
            ids = torch.ones(2, 8, dtype=torch.long, device="sim")
            loss = engine(ids).square().mean()
            assert sum(row.outside for row in engine.memory().activations) > 0
            engine.backward(loss)
            engine.step()
            sim.expect_clean()
        finally:
            engine.close()


@on_device()
def test_generators_are_saved_without_the_number_of_their_device() -> None:
    """A rank that goes on as another local rank draws on from where it was, on whatever device it has."""
    with simulated():
        torch.manual_seed(1)
        torch.rand(3, device="sim")
        state = sf.rng_state()
        assert state["device"]["type"] == "sim"
        expected = torch.rand(3, device="sim").tolist()
        sf.set_rng_state(state)
        assert torch.rand(3, device="sim").tolist() == expected
        older = {**state, "device": None, "sim": {"0": state["device"]["state"]}}  # by number
        sf.set_rng_state(older)
        assert torch.rand(3, device="sim").tolist() == expected


@on_device()
def test_a_save_beside_training_has_the_values_of_its_step() -> None:
    """What is saved while training goes on is copied to pinned memory first, in blocks of bounded size, and the host
    waits for these copies and not for the device."""
    with simulated("lazy", 3, 2000), tempfile.TemporaryDirectory() as folder:
        before, save.PINNED = save.PINNED, 2048
        engine = sf.Engine(
            Gpt(), optimizer=AdamW, layout="zero2", runtime=sf.Runtime(device="sim"), init=sf.Init(units=[Block])
        )
        try:
            ids = torch.ones(2, 8, dtype=torch.long, device="sim")
            for step in range(2):
                engine.backward(engine(ids).square().mean())
                engine.step()
                if step == 0:
                    expected = {name: value.cpu().clone() for name, value in engine.state_dict().items()}
                    saving = engine.save(folder, wait=False)
            saving.wait()
            engine.load(saving.path)
            for name, value in engine.state_dict().items():
                assert torch.equal(value.cpu(), expected[name]), name
        finally:
            save.PINNED = before
            engine.close()


@pytest.mark.parametrize(
    ("sizes", "most", "blocks"),
    [([], 8, [1]), ([3, 4, 5], None, [12]), ([3, 4, 5], 8, [7, 5]), ([9, 1], 8, [9, 1]), ([4, 4, 4], 8, [8, 4])],
)
def test_blocks_of_a_save_are_bounded(sizes: list[int], most: int | None, blocks: list[int]) -> None:
    """No block is larger than allowed but for one part that is, and parts do not overlap."""
    places, found = save._placed(sizes, most)
    assert found == blocks
    ends: dict[int, int] = {}
    for (number, at), size in zip(places, sizes, strict=True):
        assert at == ends.get(number, 0)
        ends[number] = at + size
