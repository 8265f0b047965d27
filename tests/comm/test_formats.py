"""Formats turn values into bytes and back; transports carry the bytes, and neither shows in the other."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardfold.comm._boards import possible
from shardfold.comm._encoded import gather_encoded, scatter_encoded
from shardfold.comm._near import NearTransport
from shardfold.comm.dtypes import TORCH_DTYPES
from shardfold.comm.mesh import DataMesh
from shardfold.comm.transport import GlooTransport, Pending
from shardfold.plan.formats import FORMATS, Format
from shardfold.testing import Ranks
from shardfold.tiers.device import DeviceTier
from tests.support.formats import BLOCK, Blocks, add_blocks

LIMIT = timedelta(seconds=30)
FLOATS = ("fp64", "fp32", "bf16", "fp16")


@pytest.fixture
def toy() -> Iterator[None]:
    before = dict(FORMATS)
    add_blocks()
    yield
    FORMATS.clear()
    FORMATS.update(before)


def _coded(form: Format, values: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
    payload = torch.empty(len(values), form.nbytes(values.shape[1]), dtype=torch.uint8)
    form.encode(values, payload, state)
    decoded = torch.full_like(values, float("nan"))
    form.decode(payload, decoded)
    return decoded


@given(st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.integers(1, 4), st.integers(1, 40), st.integers(0, 99))
def test_a_format_of_a_dtype_rounds_to_it_once_and_takes_what_is_not_narrower(
    name: str, dtype: str, rows: int, length: int, seed: int
) -> None:
    form, wide = FORMATS[name], TORCH_DTYPES[dtype]
    assert form.carries(dtype) == (name == dtype or TORCH_DTYPES[name].itemsize < wide.itemsize)
    assert not form.carries("int32") and form.nbytes(rows * length) == rows * form.nbytes(length)
    if form.carries(dtype):
        values = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)).to(wide)
        decoded = _coded(form, values)
        assert torch.equal(decoded, values.to(TORCH_DTYPES[name]).to(wide))
        assert torch.equal(_coded(form, decoded), decoded)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_a_format_of_blocks_counts_what_it_writes_and_errs_by_half_a_step(rows: int, blocks: int, seed: int) -> None:
    """Payloads of rows lie one behind the other, so that many shards count as many times one; what is lost is kept."""
    form = Blocks("feedback", feedback=True)
    values = torch.randn(rows, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    assert form.nbytes(values.numel()) == rows * form.nbytes(blocks * BLOCK) == rows * blocks * (BLOCK + 4)
    state = torch.zeros_like(values)
    decoded = _coded(form, values, state)
    step = values.unflatten(1, (-1, BLOCK)).abs().amax(-1, keepdim=True) / 127
    errors = (values - decoded).unflatten(1, (-1, BLOCK)).abs()
    assert bool((errors <= step * (0.5 + 1e-4)).all())
    torch.testing.assert_close(decoded + state, values, atol=1e-6, rtol=0)


class _Late(GlooTransport):
    """Puts everything in place when it is waited for, and not before."""

    def all_gather(self, full: torch.Tensor, group: Any, **_: Any) -> Pending:
        parts = [torch.empty_like(part) for part in full.chunk(dist.get_world_size(group))]
        mine = full.chunk(len(parts))[dist.get_rank(group)].clone()
        full.fill_(0xEE)

        def finish() -> None:
            dist.all_gather(parts, mine, group=group)
            torch.cat(parts, out=full)

        return Pending([], finish)


def _transports(device: torch.device) -> tuple[list[GlooTransport | NearTransport], DeviceTier, Any]:
    mesh, memory = DataMesh(None, device, LIMIT), DeviceTier(device)
    gloo = GlooTransport(memory.empty, memory.recycle)

    def exchange(_: str, text: str) -> list[str]:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, text)
        return said

    near = [NearTransport(gloo, mesh.groups(), mesh.rank, exchange, _wait)] if possible() else []
    return [gloo, _Late(memory.empty, memory.recycle), *near], memory, mesh.everyone


def _wait(work: Any) -> None:
    work.wait(LIMIT)


def _values(rank: int, round_: int = 0) -> torch.Tensor:
    return torch.randn(4 * BLOCK * 2, generator=torch.Generator().manual_seed(100 * round_ + rank))


def _each_way(name: str) -> list[str]:
    """Gathers and sums of encoded values over each transport, beside what each rank can compute by itself."""
    add_blocks()
    form, wrong = FORMATS[name], list[str]()
    transports, memory, group = _transports(torch.device("cpu"))
    world, rank = dist.get_world_size(), dist.get_rank()
    chunks = [_values(0).chunk(world)[r] for r in range(world)]
    gathered = torch.cat([_coded(form, chunk.view(1, -1)).view(-1) for chunk in chunks])
    mine = slice(rank * len(chunks[0]), (rank + 1) * len(chunks[0]))
    summed = torch.zeros(len(chunks[0]))
    for r in range(world):
        summed += _coded(form, _values(r).view(world, -1))[rank]
    for transport in transports:
        who = type(transport).__name__
        full = torch.full_like(_values(0), float("nan"))
        full[mine] = chunks[rank]
        for pending in gather_encoded(transport, memory, form, full, group):
            pending.wait(_wait)
        if not torch.equal(full, gathered):
            wrong.append(f"{who} gathers something else in {name}")
        for add, expected in ((False, summed), (True, 1 + summed)):
            full, out = _values(rank), torch.ones_like(summed)
            out = out if add else full[mine]  # where gradients rest whole, the sum is written among them
            for pending in scatter_encoded(transport, memory, form, full, out, group, add=add, state=None):
                pending.wait(_wait)
            if not torch.equal(out, expected):
                wrong.append(f"{who} sums something else in {name}")
    dist.barrier()
    return wrong


@pytest.mark.parametrize("name", ["bf16", "blocks"])
def test_values_are_decoded_when_they_have_arrived_and_summed_in_fp32_over_any_transport(
    ranks: Ranks, name: str
) -> None:
    """To the bit what each rank computes by itself: own chunks are rounded like all others."""
    assert ranks.run(_each_way, name, world_size=2) == [[], []]


def _with_feedback(rounds: int) -> tuple[float, float]:
    """The greatest error of a sum over many reductions, without what the formats still keep, and with it."""
    add_blocks()
    form = FORMATS["feedback"]
    (transport, *_), memory, group = _transports(torch.device("cpu"))
    world, rank = dist.get_world_size(), dist.get_rank()
    state = torch.zeros_like(_values(0))
    applied, true = (torch.zeros(len(state) // world) for _ in range(2))
    for i in range(rounds):
        for pending in scatter_encoded(
            transport, memory, form, _values(rank, i), applied, group, add=True, state=state
        ):
            pending.wait(_wait)
        for r in range(world):
            true += _values(r, i).chunk(world)[rank]
    kept = state.clone()
    dist.all_reduce(kept)
    error = applied - true
    return float(error.abs().max()), float((error + kept.chunk(world)[rank]).abs().max())


def test_what_a_format_keeps_is_exactly_what_its_reductions_have_lost(ranks: Ranks) -> None:
    """Error feedback telescopes: with the kept errors the sum over all rounds is the true one, up to fp32's rounding
    of 20 sums of two numbers below 4."""
    for lost, left in ranks.run(_with_feedback, 20, world_size=2):
        assert lost > 1e-3 and left < 2e-5


@pytest.mark.usefixtures("toy")
def test_no_format_joins_names_as_a_program_does() -> None:
    assert all(name == form.name and "+" not in name for name, form in FORMATS.items())
