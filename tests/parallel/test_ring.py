"""Attention over ranks against attention of whole sequences on one process, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardfold as sf
from shardfold.comm.mesh_group import MeshGroup
from shardfold.errors import UsageError
from shardfold.nn.axis_group import AxisGroup, Shift
from shardfold.parallel import kernels
from shardfold.parallel.cut import CONTIGUOUS, ZIGZAG, CutBatch
from shardfold.parallel.kernels import CPU_FLASH, MATH, kernel_for
from shardfold.parallel.ring import ring_attention
from shardfold.parallel.ulysses import ulysses_attention
from shardfold.testing import Ranks
from tests.parallel.test_cut import mask_of, permuted, tokens_of


class Own(nn.Module):
    """A model with an attention, of which an engine is made for its group."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = sf.parallel.Attention()
        self.linear = nn.Linear(2, 2)


class Case(NamedTuple):
    cut: CutBatch
    causal: bool
    heads: int
    key_heads: int
    dim: int = 4
    value_dim: int = 4
    window: int | None = None
    softcap: float | None = None


PACKED = [(0, 5, 6, 29), (0, 1, 17, 18, 29)]


def ring_cases(ranks: int) -> list[Case]:
    return [
        Case(CutBatch.of(29, ranks, ZIGZAG, None, 2), True, 4, 2),
        Case(CutBatch.of(29, ranks, CONTIGUOUS, None, 2), False, 3, 3),
        Case(CutBatch.of(29, ranks, ZIGZAG, PACKED[:1], 2), True, 4, 1),
        Case(permuted(29, ranks, PACKED, 2, 1), True, 2, 2),
        Case(permuted(29, ranks, PACKED, 2, 2), False, 4, 2, 4, 3),
        Case(CutBatch.of(29, ranks, ZIGZAG, None, 2), True, 4, 2, window=3),
        Case(permuted(29, ranks, PACKED, 2, 1), True, 2, 2, 4, 3, window=7),
        Case(CutBatch.of(29, ranks, ZIGZAG, None, 2), True, 4, 2, softcap=0.5),
        Case(permuted(29, ranks, PACKED, 2, 1), True, 2, 1, 4, 3, window=7, softcap=1.5),
    ]


def ulysses_cases(ranks: int) -> list[Case]:
    return [
        Case(CutBatch.of(29, ranks, CONTIGUOUS, None, 2), True, 12, 12),
        Case(CutBatch.of(29, ranks, CONTIGUOUS, None, 2), True, 12, 1),
        Case(CutBatch.of(29, ranks, CONTIGUOUS, PACKED, 2), True, 12, 6, 4, 3),
        Case(CutBatch.of(29, ranks, CONTIGUOUS, PACKED[:1], 2), False, 12, 4),
        Case(CutBatch.of(29, ranks, CONTIGUOUS, PACKED, 2), True, 12, 12, window=6),
        Case(CutBatch.of(29, ranks, CONTIGUOUS, None, 2), False, 12, 4, softcap=0.5),
    ]


def whole(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    draw = torch.Generator().manual_seed(5)
    shapes = [(case.heads, case.dim), (case.key_heads, case.dim), (case.key_heads, case.value_dim)]
    shapes.append((case.heads, case.value_dim))
    made = [torch.randn(2, heads, 29, dim, generator=draw, dtype=torch.float64) for heads, dim in shapes]
    return [each.to(dtype).double() for each in made]


def dense(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    groups = case.heads // case.key_heads
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * 0.3
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~mask_of(case.cut, case.causal, case.window).unsqueeze(1), -inf)
    return scores.softmax(-1) @ value


def worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, by the largest value expected of that tensor."""
    return max(
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in zip(found, expected, strict=True)
    )


def compared(kind: Any, case: Case, group: AxisGroup, dtype: torch.dtype) -> float:
    """The worst of outputs, and of the gradients of each block: those that the queries of one rank give alone."""
    full = whole(case, dtype)
    mine = torch.tensor(tokens_of(case.cut, group.rank))
    inputs = [each[:, :, mine].to(dtype).requires_grad_() for each in full[:3]]
    reference = [each.clone().requires_grad_() for each in full[:3]]
    expected = dense(case, *reference)
    found = kind(
        *inputs, group, case.cut, causal=case.causal, scale=0.3, window=case.window, softcap=case.softcap
    )  # fmt: skip
    assert found.dtype == dtype
    errors = [worst([found], [expected[:, :, mine]])]
    for rank in range(group.size):
        of_rank = torch.zeros(29, 1, dtype=torch.float64)
        of_rank[tokens_of(case.cut, rank)] = 1
        wanted = torch.autograd.grad(expected, reference, full[3] * of_rank, retain_graph=True)
        grad = (full[3] * of_rank)[:, :, mine].to(dtype)
        got = torch.autograd.grad(found, inputs, grad, retain_graph=True)
        errors.append(worst(got, [each[:, :, mine] for each in wanted]))
    return max(errors)


def _engine() -> sf.Engine:
    return sf.Engine(
        Own(), parallel=sf.Parallel(mesh={"sequence": dist.get_world_size()}, attention="ring"), layout="ddp"
    )


def _compare() -> dict[str, float]:
    engine = _engine()
    assert engine.sequence is not None
    group, ranks, found = engine.sequence.group, dist.get_world_size(), {}
    for kind, cases in ((ring_attention, ring_cases(ranks)), (ulysses_attention, ulysses_cases(ranks))):
        for dtype in (torch.float64, torch.float32):
            errors = [compared(kind, case, group, dtype) for case in cases]
            found[f"{kind.__name__} in {dtype}"] = max(errors)
    engine.close()
    return found


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_each_block_is_that_of_whole_sequences(ranks: Ranks, world: int) -> None:
    """Outputs, and the gradients that the queries of each single rank give queries, keys and values of each, are those
    of plain attention: causal and not, fewer heads of keys, packed documents (also other ones in each row), sliding
    windows, soft caps, lengths that do not divide, ranges of tokens in any order; to 1e-12 in fp64 and 1e-6 in fp32."""
    for said in ranks.run(_compare, world_size=world):
        for name, error in said.items():
            assert error < (1e-12 if "64" in name else 1e-6), (name, error)


class Losing(MeshGroup):
    """A group on which one hop brings what was sent."""

    def __init__(self, group: MeshGroup, lost: int) -> None:
        super().__init__(group.axis, group._comm)
        self.lost, self.hops = lost, 0

    def shift(self, tensors: Sequence[Tensor], to: int = 1, shapes: Sequence[Sequence[int]] | None = None) -> Shift:
        came = super().shift(tensors, to, shapes)
        self.hops += 1
        return Shift([each.clone() for each in tensors], came.wait) if self.hops - 1 == self.lost else came


def _lose() -> list[tuple[int, float]]:
    engine = _engine()
    assert engine.sequence is not None
    group, found = engine.sequence.group, []
    assert isinstance(group, MeshGroup)
    case = Case(CutBatch.of(30, 3, CONTIGUOUS, None, 2), False, 2, 2)
    full = [torch.randn(2, 2, 30, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)]
    mine = torch.tensor(tokens_of(case.cut, group.rank))

    def run(group: AxisGroup) -> list[Tensor]:
        inputs = [each[:, :, mine].clone().requires_grad_() for each in full[:3]]
        out = ring_attention(*inputs, group, case.cut, causal=False)
        return [out, *torch.autograd.grad(out, inputs, full[3][:, :, mine])]

    right = run(group)
    for lost in range(7):
        losing = Losing(group, lost)
        found.append((losing.hops, worst(run(losing), right)))
        assert losing.hops == 6  # 2 in forward, 2 of keys in backward and 2 of their gradients
    engine.close()
    return [(hop, error) for hop, (_, error) in enumerate(found)]


def test_each_hop_that_is_lost_shows(ranks: Ranks) -> None:
    """Of N - 1 hops in forward, and as many of keys and of their gradients in backward, none can be left out: outputs
    or gradients are others then; with a hop that there is not, they are the same."""
    for said in ranks.run(_lose, world_size=3):
        assert all(error > 1e-3 for _, error in said[:6]), said
        assert said[6][1] == 0


@pytest.mark.parametrize("kernel", [CPU_FLASH, MATH], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False])
def test_kernels_give_the_share_of_a_tile(kernel: Any, dtype: torch.dtype, dense: bool) -> None:
    """Given the output and the logsumexp over all keys, the gradients of two tiles add up to those of both together,
    however tensors lie in memory."""
    draw = torch.Generator().manual_seed(2)
    made = (torch.randn(2, 3, 12, 8, generator=draw, dtype=torch.float64).to(dtype) for _ in range(4))
    q, k, v, grad = (each if dense else each.transpose(1, 3).contiguous().transpose(1, 3) for each in made)
    reference = [each.double().requires_grad_() for each in (q, k, v)]
    scores = reference[0] @ reference[1].transpose(-1, -2) * 0.4
    expected = scores.softmax(-1) @ reference[2]
    wanted = torch.autograd.grad(expected, reference, grad.double())
    out, lse = kernel.attend(q, k, v, False, 0.4)
    tiles = [(slice(0, 5), kernel), (slice(5, 12), kernel)]
    shares = [kernel.differentiate(grad, q, k[:, :, at], v[:, :, at], out, lse, False, 0.4) for at, kernel in tiles]
    got = [
        shares[0][0] + shares[1][0],
        *(torch.cat([a, b], dim=2) for a, b in zip(shares[0][1:], shares[1][1:], strict=True)),
    ]
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert worst([lse], [scores.logsumexp(-1).detach()]) < min(limit, 1e-4)
    assert worst([out, *got], [expected.detach(), *wanted]) < limit


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("causal", [True, False])
def test_plain_products_go_by_queries(monkeypatch: pytest.MonkeyPatch, causal: bool, softcap: float | None) -> None:
    """Some queries after the other, of which the last are fewer, give what all at once give: outputs, the logsumexp
    and the gradients of autograd, to 1e-14 in fp64; no more than the scores of that many are held at once."""
    monkeypatch.setattr(kernels, "QUERIES", 5)
    made = torch.randn(4, 2, 3, 12, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    q, k, v = (each.clone().requires_grad_() for each in made[:3])
    scores = q @ k.transpose(-1, -2) * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        scores = scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -inf)
    expected = scores.softmax(-1) @ v
    wanted = torch.autograd.grad(expected, (q, k, v), made[3])
    kernel = MATH if softcap is None else kernel_for(q, v, softcap)
    with torch.no_grad(), Largest() as largest:
        out, lse = kernel.attend(q, k, v, causal, 0.4)
        got = kernel.differentiate(made[3], q, k, v, out, lse, causal, 0.4)
    assert worst([out, lse, *got], [expected.detach(), scores.logsumexp(-1).detach(), *wanted]) < 1e-14
    assert largest.elements == q.numel()  # 12 tokens of width 8, and not 12 by 12 scores


class Largest(TorchDispatchMode):
    """How many elements the largest tensor that is made has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def _twice() -> str:
    engine = _engine()
    assert engine.sequence is not None
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    out = ring_attention(q, q, q, engine.sequence.group, CutBatch.of(4, 2), causal=True)
    with pytest.raises(UsageError, match="no gradients of its gradients"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    engine.close()
    return ""


def test_gradients_of_gradients_are_refused(ranks: Ranks) -> None:
    """``create_graph=True`` is refused, with one sentence."""
    ranks.run(_twice, world_size=2)
