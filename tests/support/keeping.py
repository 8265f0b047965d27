"""Runs that are saved and loaded: a model with everything that is hard to keep, and what is compared of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.support.options import grouped

LAYOUTS = list(sf.PRESETS)
WIDTH, WORDS = 13, 37  # primes, so that no number of ranks divides a shape


class Odd(nn.Module):
    """Tied, frozen, unused and empty parameters, one in fp64, and buffers that are kept and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 29), nn.GELU(), nn.Linear(29, WIDTH)) for _ in "ab")
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(5, 3)
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.fine = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.blocks[0][0].requires_grad_(False)  # pyright: ignore
        self.seen: Tensor
        self.mean: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.fine)
        nn.init.zeros_(self.empty)
        nn.init.normal_(self.head.weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        if self.training:
            self.seen += 1
            self.mean.lerp_(x.detach().float().mean((0, 1)), 0.5)
        x = self.norm(x) + (self.fine * 0.1).to(x.dtype)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Two groups."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def batches(steps: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Twelve rows each, for 1 to 4 ranks."""
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randint(WORDS, (12, 5), generator=draw), torch.randint(WORDS, (12, 5), generator=draw))] * steps


class Setting(NamedTuple):
    """What a run is saved or loaded under."""

    layout: str
    ranks: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.ranks}-{self.precision}"


SETTINGS = [Setting(*each) for each in product(LAYOUTS, (1, 2, 3, 4), ("fp32", "bf16", "fp16"))]


def mesh(layout: str, ranks: int) -> dict[str, int] | None:
    return {"inter": 2, "intra": 2} if ranks == 4 and layout in ("hsdp", "hpz") else None


def make(setting: Setting, build: Callable[[], nn.Module] = Odd, *, seed: int = 0, **options: Any) -> sf.Engine:
    torch.manual_seed(seed)
    model = build()
    options.setdefault("optimizer", partial(adamw, model))
    if getattr(options["optimizer"], "func", None) is adamw:
        options["optimizer"] = options["optimizer"]()
    if setting.precision == "fp16":
        options.setdefault("loss_scale", 256.0)
    return sf.Engine(
        model,
        **grouped(layout=setting.layout, mesh=mesh(setting.layout, setting.ranks), **options),
        precision=setting.precision,
    )


def train(engine: sf.Engine, steps: int, seed: int = 0) -> list[float]:
    """The mean loss of each step over all ranks."""
    losses: list[float] = []
    for batch in batches(steps, seed):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    return losses


def contents(engine: sf.Engine, *, buffers: bool = False) -> dict[str, Any]:
    """Everything of a run that has values: whole, on every rank, in the dtype in which it is kept.

    Buffers on rank 0 only, as what others make of theirs is replaced by the next forward, as in DDP; or on all.
    """
    weights = engine.state_dict()
    if engine.rank and not buffers:
        weights = {name: weights[name] for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    found: dict[str, Any] = {"weight": weights, "step": engine.steps}
    update = engine._updater
    assert update is not None and engine.optimizer is not None
    for state in sorted({*update.state_dtypes(), *(("master",) if update.fused else ())}):
        with engine.gathered(of=state) as values:
            found[state] = {name: value for name, value in values.items() if value is not None}
    if update.fused:
        found["steps"] = {
            s.spec.slots[i].name: update.kept_once(s, i)["step"]
            for unit in engine.units for s in unit.trainable for i in range(len(s.spec.slots))
        }  # fmt: skip
    found["options"] = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in engine.optimizer.param_groups
    ]
    if engine.loss_scale is not None:
        found["loss_scale"] = engine.loss_scale.state_dict()
    return found


def different(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two such values are not equal, element for element, NaN to NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        lost = [f"{where}.{key} is on one side only" for key in one.keys() ^ other.keys()]
        return lost + [
            d for key in one.keys() & other.keys() for d in different(one[key], other[key], f"{where}.{key}")
        ]
    if isinstance(one, Sequence) and not isinstance(one, str) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in different(a, b, f"{where}[{i}]")]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return [] if same and torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7)) else [f"{where} differs"]
    return [] if one == other else [f"{where}: {one} and {other}"]


# -- many runs in one call of the pool --------------------------------------------------------------------------------


def covering(settings: Sequence[Setting]) -> list[tuple[Setting, Setting]]:
    """Pairs of one precision, saved under the first and loaded under the second, such that every two values of the
    five factors (two layouts, two numbers of ranks, precision) occur together: each first one with the most new."""

    def facts(pair: tuple[Setting, Setting]) -> set[Any]:
        factors = [*enumerate(pair[0]), *((i + 3, value) for i, value in enumerate(pair[1][:2]))]
        return {(a, b) for a in factors for b in factors if a[0] < b[0]}

    every = [(a, b) for a in settings for b in settings if a.precision == b.precision]
    open_facts = set().union(*map(facts, every))
    chosen: list[tuple[Setting, Setting]] = []
    while open_facts:
        best = max(every, key=lambda pair: len(facts(pair) & open_facts))
        chosen.append(best)
        open_facts -= facts(best)
    return chosen


def by_ranks(settings: Iterable[Setting]) -> dict[int, list[Setting]]:
    found: dict[int, list[Setting]] = {}
    for setting in dict.fromkeys(settings):
        found.setdefault(setting.ranks, []).append(setting)
    return found


def save_all(folder: str, settings: list[Setting], steps: int = 2) -> None:
    """Saves a run of each setting, and beside it what it was, as this engine says."""
    for setting in settings:
        engine = make(setting)
        train(engine, steps)
        engine.save(f"{folder}/{setting.name}", wait=True, latest=False)
        kept = contents(engine)
        if engine.rank == 0:
            torch.save(kept, f"{folder}/{setting.name}.pt")
        engine.close()


def load_all(folder: str, pairs: list[tuple[Setting, Setting]]) -> list[str]:
    """Loads each into an engine that has trained otherwise; where anything is not what was saved."""
    wrong: list[str] = []
    for saved, setting in pairs:
        engine = make(setting, seed=1)
        train(engine, 1, seed=5)
        report = engine.load(f"{folder}/{saved.name}")
        expected = torch.load(f"{folder}/{saved.name}.pt", weights_only=False)
        found = different(contents(engine, buffers=True), expected)
        with engine.gathered() as values:
            found += [
                f"what forward reads of {name} differs"
                for name, value in values.items()
                if not torch.equal(value, expected["weight"][name].to(value.dtype))
            ]
        if report.missing or report.unexpected:
            found.append(str(report))
        train(engine, 1)
        engine.close()
        wrong += [f"{saved.name} -> {setting.name}: {line}" for line in found]
    return wrong


def run_matrix(ranks: Ranks, folder: Path, pairs: list[tuple[Setting, Setting]]) -> None:
    for count, settings in by_ranks(saved for saved, _ in pairs).items():
        ranks.run(save_all, str(folder), settings, world_size=count)
    for count, settings in by_ranks(setting for _, setting in pairs).items():
        inside = [pair for pair in pairs if pair[1] in settings]
        for wrong in ranks.run(load_all, str(folder), inside, world_size=count, timeout=280):
            assert not wrong, "\n".join(wrong[:20])
