"""GaLore: the numbers of galore-torch, what the owner of a matrix keeps, and that it goes where the matrix goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ShardfoldError
from shardfold.testing import Ranks, same_training
from tests.support import models

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "galore.json").read_text())
RANK, GAP = 6, 4


def groups(parameters: Iterable[nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    every = list(parameters)
    hidden = [p for p in every if p.dim() == 2 and p.shape[0] != models.VOCAB]
    rest = [p for p in every if all(p is not other for other in hidden)]
    return [{"params": hidden, "rank": RANK, "update_proj_gap": GAP, **options}, {"params": rest}]


def low(parameters: Iterable[nn.Parameter], **options: Any) -> sf.optim.GaLore:
    return sf.optim.GaLore(groups(parameters), lr=1e-3, **options)


def galore_torch(kind: str) -> list[Tensor]:
    """Where the parameters of the file end with ours."""
    parameters = [nn.Parameter(torch.tensor(x)) for x in GOLDEN["starts"]]
    targets = [torch.tensor(x) for x in GOLDEN["targets"]]
    given = {name: GOLDEN[name] for name in ("rank", "update_proj_gap", "scale")}
    optimizer = sf.optim.GaLore(
        [{"params": parameters[:3], "proj_type": kind, **given}, {"params": parameters[3:]}], **GOLDEN["options"]
    )
    for _ in range(GOLDEN["steps"]):
        for parameter, target in zip(parameters, targets, strict=True):
            parameter.grad = parameter.detach() - target
        optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("kind", GOLDEN["ends"])
def test_thirty_six_steps_equal_galore_torch(kind: str) -> None:
    """With two projectors after the first; the file says how it was made."""
    assert GOLDEN["steps"] > 2 * GOLDEN["update_proj_gap"]
    # Both sides of a matrix projected on its own singular vectors leave a diagonal: what stands beside it is rounding,
    # which Adam divides by its own size and its epsilon. So parameters differ by a part of the rate, by the CPU.
    limit = 0.03 * GOLDEN["options"]["lr"] if kind == "full" else 1e-6
    for ours, theirs in zip(galore_torch(kind), GOLDEN["ends"][kind], strict=True):
        assert (ours - torch.tensor(theirs)).abs().max() < limit


@pytest.mark.parametrize("kind", ["std", "full"])
def test_signs_of_singular_vectors_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """LAPACK may give any; moments that were kept fit the new projector all the same."""
    svd, draw = torch.linalg.svd, torch.Generator().manual_seed(0)

    def flipped(matrix: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = svd(matrix, **options)
        signs = torch.randint(2, s.shape, generator=draw).mul(2).sub(1).to(s.dtype)
        return u * signs, s, vh * signs[:, None]

    before = galore_torch(kind)
    monkeypatch.setattr(torch.linalg, "svd", flipped)
    assert all(map(torch.allclose, galore_torch(kind), before))


@pytest.mark.parametrize(("shape", "kind"), [((40, 16), "std"), ((16, 40), "std"), ((40, 16), "reverse_std")])
def test_moments_take_the_part_of_adamws_that_the_rank_is(shape: tuple[int, int], kind: str) -> None:
    """To the byte: ``rank / min(m, n)`` of them under ``"std"``, and a projector of that rank; with 8 bits a byte per
    value and 4 per block."""
    weight = nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn(shape)
    projected, other = (min(shape), max(shape)) if kind == "std" else (max(shape), min(shape))
    for bits, moment in ((32, 4 * 4 * other), (8, 4 * other + 4 * (4 * other // 16))):
        optimizer = sf.optim.GaLore([weight], rank=4, proj_type=kind, bits=bits, block=16, min_8bit_size=0)
        optimizer.step()
        held = {name: value.nbytes for name, value in optimizer.state[weight].items() if isinstance(value, Tensor)}
        ((group, _, place),) = optimizer.parts()
        assert sum(held.values()) == optimizer.state_bytes(group, place, 4) == 2 * moment + 4 * 4 * projected
        if bits == 32 and kind == "std":
            assert sum(size for name, size in held.items() if "exp_avg" in name) == 4 / min(shape) * 8 * weight.numel()


def _trained(optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = models.small()
    made = optimizer(model.parameters())
    for batch in models.batches(steps):
        model(*batch).backward()
        made.step()
        made.zero_grad()
    return model


def test_eight_bit_moments_follow_those_of_32_bits() -> None:
    """The parameters end nearer than 15 % of the way that they went."""
    start, wide, narrow = (
        _trained(partial(low, bits=bits, min_8bit_size=64, block=64), steps)
        for bits, steps in ((32, 0), (32, 20), (8, 20))
    )
    for a, b, c in zip(narrow.parameters(), wide.parameters(), start.parameters(), strict=True):
        assert (a - b).norm() <= 0.15 * (b - c).norm()


def test_a_rank_that_changes_begins_anew() -> None:
    weight = nn.Parameter(torch.randn(16, 8))
    optimizer = sf.optim.GaLore([weight], rank=4, update_proj_gap=100)
    for rank in (4, 2, 6):
        optimizer.param_groups[0]["rank"] = rank
        weight.grad, before = torch.randn(16, 8), weight.detach().clone()
        optimizer.step()
        assert torch.linalg.matrix_rank(weight.detach() - before, rtol=1e-3) == rank


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["zero3", "zero1", "infinity", "zero2"])
def test_four_ranks_train_as_one(ranks: Ranks, layout: str) -> None:
    """Owners see the whole gradient, whose sum over ranks alone is rounded otherwise; over 9 steps and three projectors
    that comes to less than 1e-5 of a parameter's largest element, and in fp64 to nothing that could be seen."""
    for build, tolerance in ((models.small, 1e-5), (partial(models.double, models.small), 1e-12)):
        same_training(
            build, models.batches(9), layout=layout, world_size=4, optimizer=low, steps=9, parameter_tol=tolerance,
            ranks=ranks,
        )  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_states_in_host_memory(ranks: Ranks, layout: str) -> None:
    same_training(
        models.small, models.batches(9), layout=layout, world_size=2, optimizer=low, steps=9, parameter_tol=1e-5,
        offload="host", ranks=ranks,
    )  # fmt: skip


def _carried(folder: str) -> None:
    """Of 8-bit moments: what owners keep goes through a checkpoint as it is, to who owns the matrix there."""

    def engine(layout: str, **options: Any) -> sf.Engine:
        torch.manual_seed(0)
        model = models.small()
        optimizer = partial(low, min_8bit_size=64, block=64, **{"bits": 8, **options})
        return sf.Engine(model, optimizer=optimizer(model.parameters()), layout=layout)

    def step(made: sf.Engine, batch: tuple[Tensor, Tensor]) -> float:
        loss = made(*(t.chunk(made.world_size)[made.rank] for t in batch))
        made.backward(loss)
        made.step()
        return made.mean(loss.item())

    batches = models.batches(7)
    first = engine("zero3")
    for batch in batches[:5]:
        step(first, batch)
    first.save(folder, wait=True)
    expected = [step(first, batch) for batch in batches[5:]]
    first.close()
    for layout in ("ddp", "zero1"):
        second = engine(layout)
        second.load(folder)
        row = second.memory().rows[-1]
        assert row.table == row.held
        second.save(f"{folder}-{layout}", wait=True)
        one, two = sf.Checkpoint(folder), sf.Checkpoint(f"{folder}-{layout}")
        for name in one.parameters:
            a, b = one.once(name), two.once(name)
            assert a.keys() == b.keys() and (
                "blocks" not in name or name.endswith(("bias", "norm.weight")) or len(a) > 4
            )
            assert all(torch.equal(a[k], b[k]) if isinstance(a[k], Tensor) else a[k] == b[k] for k in a)
        one.close()
        two.close()
        assert [step(second, batch) for batch in batches[5:]] == pytest.approx(expected, rel=2e-4)
        second.close()
    other = engine("zero1", bits=32)
    with pytest.raises(ShardfoldError, match="kept with bits=8"):
        other.load(folder)
    other.close()


def test_what_owners_keep_goes_through_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_carried, str(tmp_path / "first"), world_size=3)


class _Projecting(torch.optim.AdamW):
    """As galore-torch's ``AdamW``, by the options of its groups."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: sf.optim.GaLore(p, rank=4), "shape .*rank=4.*galore_groups"),
        (lambda p: sf.optim.GaLore(p, rank=0), "rank=0.*from 1 on"),
        (lambda p: sf.optim.GaLore(p, update_proj_gap=-1), "update_proj_gap=-1.*from 1 on"),
        (lambda p: sf.optim.GaLore(p, proj_type="reverse"), "proj_type='reverse'.*Did you mean 'reverse_std'"),
        (lambda p: sf.optim.GaLore(p, bits=4), "bits=4.*8 or 32"),
        (lambda p: sf.optim.GaLore(p, scale=-1), "scale=-1.*number >= 0"),
        (lambda p: sf.optim.GaLore(p, block=100), "block=100.*power of 2"),
    ],
)
def test_options_are_refused_in_a_sentence(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        make(models.small().parameters())
    assert "\n" not in str(error.value)


def test_galore_torchs_own_class_is_refused() -> None:
    """Its update of a shard would project the shard."""
    with pytest.raises(ConfigError, match=r"update_proj_gap.*projects whole matrices.*sf.optim.GaLore"):
        sf.Engine(models.small(), optimizer=lambda p: _Projecting(groups(p)))


def test_groups_are_sorted_as_muons() -> None:
    model = models.small()
    projected, rest = sf.optim.galore_groups(model, rank=4, lr=1e-2)
    muons, others = sf.optim.muon_groups(model, lr=1.0, adamw_lr=1.0)
    for ours, theirs in ((projected, muons), (rest, others)):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]
    assert projected["rank"] == 4 and "rank" not in rest and rest["lr"] == 1e-2
