"""Plans that are found by tracing: whatever a model does, cut by one it gives the numbers of the whole."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, UsageError
from shardfold.parallel import Traced
from shardfold.parallel.plan import Given, TensorPlan, split_model
from shardfold.parallel.split import hear_gradients
from shardfold.plan.axes import Axis, Mesh
from shardfold.testing import Ranks
from tests.parallel.models import ADAM
from tests.parallel.threads import Threads

WIDTH, HEADS, ROWS, TIME = 24, 6, 2, 5
DIM = WIDTH // HEADS


class Fused(nn.Module):
    """Attention with queries, keys and values in one matrix, which is taken apart in one of several ways; sizes are
    written as of the whole."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.c_attn, self.proj, self.way = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), way

    def parts(self, y: Tensor) -> tuple[Tensor, ...]:
        batch, time = y.shape[:2]
        if self.way == "3hd":
            return y.view(batch, time, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "h3d":
            return y.reshape(batch, time, HEADS, 3 * DIM).transpose(1, 2).chunk(3, -1)
        if self.way == "slices":
            pieces = y[..., :WIDTH], y[..., WIDTH : 2 * WIDTH], y[:, :, 2 * WIDTH :]
        elif self.way == "narrow":
            pieces = tuple(y.narrow(-1, WIDTH * at, WIDTH) for at in range(3))
        elif self.way == "features":
            pieces = y.split(self.c_attn.out_features // 3, dim=2)
        else:
            pieces = y.split(WIDTH, dim=2) if self.way == "split" else y.chunk(3, dim=-1)
        return tuple(each.view(batch, time, HEADS, WIDTH // HEADS).transpose(1, 2) for each in pieces)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.size()
        q, k, v = self.parts(self.c_attn(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(batch, time, width))


class Apart(nn.Module):
    """Attention with matrices of any names, written out; fewer heads of keys, norms of heads, what whole heads need."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.kv = HEADS // 3 if extra == "grouped" else HEADS
        self.wq, self.wk = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, self.kv * DIM)
        self.wv, self.back, self.extra = nn.Linear(WIDTH, self.kv * DIM), nn.Linear(WIDTH, WIDTH), extra
        self.q_norm, self.scales = nn.LayerNorm(DIM), nn.Parameter(torch.rand(HEADS, 1, 1))
        self.bias = nn.Embedding(2 * TIME, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.wq(x).view(batch, time, -1, DIM).transpose(1, 2)
        k = self.wk(x).unflatten(-1, (self.kv, DIM)).transpose(1, 2)
        v = self.wv(x).reshape(batch, time, self.kv, DIM).permute(0, 2, 1, 3)
        if self.extra == "norm":
            q = self.q_norm(q)
        if self.kv != HEADS:
            k, v = (t[:, :, None].expand(batch, self.kv, 3, time, DIM).reshape(batch, HEADS, time, DIM) for t in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / DIM**0.5
        if self.extra == "scales":
            scores = scores * self.scales
        if self.extra == "bias":
            at = torch.arange(time, device=x.device)
            scores = scores + self.bias(at[None] - at[:, None] + TIME).permute(2, 0, 1)
        if self.extra == "across":
            scores = scores + scores.mean(1, keepdim=True)
        weights = scores.masked_fill(torch.ones(time, time, device=x.device).triu(1).bool(), -1e9).softmax(-1)
        return self.back((weights @ v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """Layers of all kinds between two linear ones, some of which need the whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hidden = 2 * WIDTH
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, (2 if kind == "fused" else 1) * hidden), nn.Linear(hidden, WIDTH)
        self.gate, self.norm = nn.Linear(WIDTH, hidden), nn.LayerNorm(hidden)
        self.shift, self.square = nn.Parameter(torch.rand(hidden)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "fused":
            a, b = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(a) * b)
        y = self.up(x)
        y = y.mul_(2.0).relu_() if self.kind == "inplace" else F.gelu(y)
        if self.kind == "gated":
            y = y * self.gate(x).sigmoid()
        if self.kind == "norm":
            y = self.norm(y)
        if self.kind == "shift":
            y = y + self.shift
        if self.kind == "softmax":
            y = y.softmax(-1)
        if self.kind == "whole":
            y = y * torch.cat([x, x], -1)
        if self.kind == "roll":
            y = y.roll(1, -1)
        if self.kind == "mean":
            return self.down(y) * y.mean(-1, keepdim=True)
        if self.kind == "pool":
            y = y * y.sum(1, keepdim=True)
        if self.kind == "twice":
            return self.square(F.relu(self.square(x)))
        if self.kind == "chain":
            return self.square(F.relu(self.down(y)))
        if self.kind == "gate-of-whole":
            return self.down(y * self.square(x)[..., :1].tanh())
        if self.kind == "length":
            y = y / self.up.weight.shape[0]
        if self.kind == "features":
            y = y / self.down.in_features
        if self.kind == "read":
            return self.down(y) + F.linear(y, self.gate.weight.t())
        return self.down(y)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


FEEDS = ("plain", "fused", "gated", "norm", "shift", "softmax", "whole", "roll", "mean", "pool", "twice", "chain",
         "gate-of-whole", "read", "inplace", "length", "features")  # fmt: skip
WAYS = ("3hd", "h3d", "slices", "narrow", "split", "chunk", "features")
EXTRAS = ("none", "grouped", "norm", "scales", "bias", "across")
PIECES: dict[str, Callable[[], nn.Module]] = {
    **{f"feed-{kind}": lambda kind=kind: Feed(kind) for kind in FEEDS},
    **{f"fused-{way}": lambda way=way: Fused(way) for way in WAYS},
    **{f"apart-{extra}": lambda extra=extra: Apart(extra) for extra in EXTRAS},
}
X = torch.randn(ROWS, TIME, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def cut(model: nn.Module, given: Given, group: Any) -> nn.Module:
    split_model(model, given, Mesh([Axis("tensor", group.size)]), {"tensor": group.rank})
    group.bind(model)
    hear_gradients(model)
    return model


def same(model: nn.Module, loss: Callable[[Any], Tensor], ranks: int, given: Given = "auto") -> None:
    """Loss and gradients of the model cut over so many ranks are those of the whole to 1e-12."""
    whole = copy.deepcopy(model)
    expected = loss(whole)
    expected.backward()

    def work(group: Any) -> None:
        mine = cut(copy.deepcopy(model), given, group)
        found = loss(mine)
        found.backward()
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        theirs = dict(whole.named_parameters())
        for name, parameter in mine.named_parameters():
            grad, how = theirs[name].grad, vars(parameter).get("_shardfold_split")
            if grad is not None and how is not None:
                _, dim, rows, blocks = how
                parts = [each.narrow(dim, rows[0], rows[1] - rows[0]) for each in grad.chunk(blocks, dim)]
                grad = torch.cat(parts, dim)
            torch.testing.assert_close(
                parameter.grad, grad, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )

    Threads(ranks).run(work)


WHOLE = {"feed-norm", "feed-shift", "feed-softmax", "feed-whole", "feed-roll", "feed-mean", "feed-twice",
         "feed-gate-of-whole", "feed-read", "feed-length", "feed-features", "apart-scales", "apart-across"}  # fmt: skip
"""What cannot be cut."""


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_piece(ranks: int) -> None:
    """Every way to write attention and feed-forward layers that can be cut is, and gives the numbers of the whole; what
    needs the whole of a tensor is refused, with its module's name."""
    for name, build in PIECES.items():
        torch.manual_seed(0)
        model = nn.Sequential(Residual(build())).double()
        if name in WHOLE or (name, ranks) == ("apart-grouped", 3):
            with pytest.raises(ConfigError, match=r"finds nothing to cut; '0\.inner"):
                TensorPlan(model, "auto", ranks)
        else:
            same(model, lambda m: m(X).square().sum(), ranks)


class Words(nn.Module):
    """Words, a layer that can be cut, and a head whose length the model may read."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.words, self.feed, self.head = nn.Embedding(8, WIDTH), Feed("plain"), nn.Linear(WIDTH, 8)
        self.read = read

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.feed(self.words(tokens)))
        return logits / self.head.out_features if self.read else logits


def test_words_whose_number_is_read_stay_whole() -> None:
    assert TensorPlan(Words(False), "auto", 2).words.keys() >= {"words", "head"}
    assert TensorPlan(Words(True), "auto", 2).words.keys() == {"feed.up", "feed.down"}


def stack(seed: int) -> nn.Module:
    """Pieces one behind the other, some of them in others."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 4)):
        piece = PIECES[draw.choice(list(PIECES))]()
        layers.append(Residual(piece) if draw.random() < 0.7 else piece)
        if draw.random() < 0.2:
            layers.append(draw.choice([nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.0)]))
    if draw.random() < 0.3:
        layers.append(layers[0])  # the same weights again
    return nn.Sequential(*layers).double()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.soak)])
def test_any_stack(seeds: range) -> None:
    """Of stacks made at random: each is cut and gives the numbers of the whole, or is refused; most are cut."""
    done = 0
    for seed in seeds:
        try:
            same(stack(seed), lambda m: m(X).square().mean(), 2 + seed % 2)
            done += 1
        except ConfigError as error:
            assert "finds nothing to cut" in str(error), seed
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    assert done > len(seeds) // 2


class Branching(nn.Module):
    """It does another thing to parts of what has two dimensions, and raises where there is no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        y = self.up(x * mask)
        return self.down(y.relu() if x.dim() == 3 else y.softmax(-1))


def _engine() -> tuple[list[str], str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(Fused("split")) for _ in range(2)), Residual(Feed("fused"))).double()
    whole = copy.deepcopy(model)
    optimizer = ADAM(whole.parameters())
    engine = sf.Engine(
        model, optimizer=ADAM, layout="zero1", parallel=sf.Parallel(mesh={"tensor": 2}, tensor="auto"), clip_norm=0.1
    )
    for _ in range(3):
        loss, expected = engine(X).square().mean(), whole(X).square().mean()
        engine.backward(loss)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert engine.step().grad_norm == pytest.approx(norm, rel=1e-12)
    text = engine.explain()
    engine.close()
    mask = torch.ones(ROWS, TIME, 1, dtype=torch.float64)
    engine = sf.Engine(
        Branching().double(), parallel=sf.Parallel(mesh={"tensor": 2}, tensor=Traced(X, mask=mask)), layout="ddp"
    )
    engine(X, mask=mask)
    with pytest.raises(UsageError) as caught:
        engine(X[0], mask=mask[0])
    engine.close()
    return text.splitlines(), str(caught.value)


def test_in_an_engine(ranks: Ranks) -> None:
    """A model that brings no plan trains as plain PyTorch does, and ``explain`` prints how it is cut. One that does
    something else to parts than when it was traced raises before it gives anything."""
    lines, said = ranks.run(_engine, world_size=2)[0]
    assert any("2 x *.inner.c_attn" in line and "column" in line for line in lines)
    assert any("1 x *.inner.down" in line and "row" in line for line in lines)
    assert any("1 x *.inner.gate" in line and "whole: it is not called" in line for line in lines)
    assert "its call 1 on parts of tensors was relu, and now it does softmax" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("auto", "cannot be traced on inputs that are guessed"),
        (Traced(X), "does not run on these inputs without memory"),
    ],
)
def test_what_cannot_be_traced(given: Given, words: str) -> None:
    """Inputs that cannot be guessed, or do not fit, are asked for."""
    with pytest.raises(ConfigError, match=words):
        TensorPlan(Branching(), given, 2)
