"""Optimizers on shards equal the same optimizers on the full model, element-wise or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardfold as sf
from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.testing import Ranks, same_training
from tests.support import models

pytestmark = pytest.mark.product


class Lion(torch.optim.Optimizer):
    """A user's class (arXiv 2302.06675): element-wise, with state of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    # tanh in place of sign: a sign flips on a rounding error and could not be compared
                    p.add_(torch.tanh(1e3 * torch.lerp(p.grad, momentum, group["beta"])), alpha=-group["lr"])
                    momentum.lerp_(p.grad, 1 - group["beta"])


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam with L2": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.01),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "Lion-like": partial(Lion, lr=1e-3),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3", "fsdp2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_element_wise_optimizer_updates_shards_as_whole_parameters(ranks: Ranks, name: str, layout: str) -> None:
    same_training(
        models.small, models.batches(6), layout=layout, world_size=2, optimizer=OPTIMIZERS[name], steps=6,
        clip_norm=0.1, parameter_tol=1e-4, ranks=ranks, reference="parts",
    )  # fmt: skip


def muon(parameters: Iterable[nn.Parameter], ns_dtype: torch.dtype | None = torch.float32) -> torch.optim.Optimizer:
    """In fp32: in bf16, rounding of the gradients decides about bits that the iteration carries on."""
    every = list(parameters)
    hidden = [p for p in every if p.dim() == 2 and p.shape[0] != models.VOCAB]
    rest = [p for p in every if all(p is not other for other in hidden)]
    groups = [{"params": hidden}, {"params": rest, "adamw": True, "lr": 1e-3}]
    return sf.optim.Muon(groups, lr=0.02, ns_dtype=ns_dtype)


def galore(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Three projectors in 20 steps."""
    every = list(parameters)
    hidden = [p for p in every if p.dim() == 2 and p.shape[0] != models.VOCAB]
    rest = [p for p in every if all(p is not other for other in hidden)]
    groups = [{"params": hidden, "rank": 6, "update_proj_gap": 7}, {"params": rest}]
    return sf.optim.GaLore(groups, lr=1e-3, weight_decay=0.1)


#: What is ours, with how far parameters may be apart after 20 steps. 8-bit codes can fall to the other side.
OURS: dict[str, tuple[Callable[[Iterable[Any]], torch.optim.Optimizer], float]] = {
    "LAMB": (partial(sf.optim.LAMB, lr=1e-2), 1e-4),
    "Lion": (partial(sf.optim.Lion, lr=1e-3, weight_decay=0.1), 1e-4),
    "Adafactor": (partial(sf.optim.Adafactor, lr=1e-2, weight_decay=0.1), 1e-4),
    "Muon": (muon, 1e-4),
    "GaLore": (galore, 1e-4),
    "AdamW8bit": (partial(sf.optim.AdamW8bit, lr=1e-3, block=256, min_8bit_size=256), 5e-3),
}


def exactly(name: str, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Lion takes a sign, and a sum near zero has another one in another order: its models are in fp64."""
    return partial(models.double, build) if name == "Lion" else build


PLACES = [("ddp", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("fsdp2", 3), ("hpz", 4), ("hsdp", 4)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("layout", "world"), [*PLACES, pytest.param("zero3", 2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", OURS)
def test_an_optimizer_of_ours_updates_parts_as_whole_parameters(
    ranks: Ranks, name: str, layout: str, world: int
) -> None:
    """20 steps; of a model whose parameters are not all used, too: what no rank used stays as it is."""
    make, tolerance = OURS[name]
    build = models.backwards if (layout, world) == ("zero3", 3) else models.small
    same_training(
        exactly(name, build), models.batches(20), layout=layout, world_size=world,
        parallel={"inter": 2, "intra": 2} if world == 4 else None, optimizer=make, steps=20, clip_norm=0.1,
        parameter_tol=tolerance, ranks=ranks,
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", OURS)
def test_a_hundred_steps_of_ours(ranks: Ranks, name: str, world: int) -> None:
    make, tolerance = OURS[name]
    same_training(
        exactly(name, models.small), models.batches(20), layout="zero3", world_size=world, optimizer=make, steps=100,
        tol=5e-6, parameter_tol=10 * tolerance, ranks=ranks,
    )  # fmt: skip


def _on_unlike_ranks(layout: str, fast: list[torch.dtype]) -> tuple[Any, list[torch.Tensor], int, str]:
    """Three steps of Muon with the dtype left open, on ranks whose devices are fast in dtypes of their own: in what
    they multiply, the parameters, bytes that the exchange of matrices sent, and what a checkpoint would have."""
    before = accelerator.product_dtype
    accelerator.product_dtype = lambda device: fast[dist.get_rank()]  # as ranks on CPUs of several kinds
    try:
        torch.manual_seed(0)
        engine = sf.Engine(models.small(), optimizer=partial(muon, ns_dtype=None), layout=layout)
        for batch in models.batches(3):
            engine.backward(engine(*(each.chunk(engine.world_size)[engine.rank] for each in batch)))
            engine.step()
        optimizer = engine.optimizer
        assert isinstance(optimizer, sf.optim.Muon)
        sent = sum(row.sent for row in engine.traffic().rows if row.purpose == "update")
        weights = list(engine.state_dict().values())
        kept = str(optimizer.param_groups[0]["ns_dtype"])
        engine.close()
        return optimizer.products, weights, sent, kept
    finally:
        accelerator.product_dtype = before


def test_ranks_with_unlike_devices_multiply_in_one_dtype(ranks: Ranks) -> None:
    """If one rank is not fast in bf16, all multiply in fp32: replicas that each updates for itself (``ddp``) stay equal
    bit for bit. Matrices travel in 2 bytes either way, and what is saved leaves the dtype open for other machines."""
    wide, narrow = torch.float32, torch.bfloat16
    for layout in ("ddp", "zero3"):
        found = {}
        for fast in ((wide, wide, wide), (narrow, wide, wide), (narrow, narrow, narrow)):
            said = found[fast] = ranks.run(_on_unlike_ranks, layout, list(fast), world_size=3)
            products = narrow if wide not in fast else wide
            assert [(each[0], each[3]) for each in said] == [(products, "None")] * 3
            assert all(map(torch.equal, said[0][1], said[1][1]))
        one, mixed, other = (found[fast][0][1] for fast in found)
        assert all(map(torch.equal, one, mixed)) and not all(map(torch.equal, one, other))
        sent = {tuple(each[2] for each in said) for said in found.values()}
        assert len(sent) == 1 and (layout == "ddp" or sum(*sent))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OURS)
def test_ours_under_bf16_compute_updates_an_fp32_master(ranks: Ranks, name: str) -> None:
    """The reference stays in fp32, so what differs is forward's and backward's rounding, which turns signs of Lion."""
    optimizer = partial(muon, ns_dtype=torch.bfloat16) if name == "Muon" else OURS[name][0]
    same_training(
        models.small, models.batches(20), layout="zero2", precision="bf16", world_size=2, optimizer=optimizer, steps=20,
        tol=1e-2, way_tol=0.25 if name == "Lion" else 0.08, ranks=ranks,
    )  # fmt: skip


class Mixed(models.Small):
    """Of several dtypes, which parameters keep in every state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.double()
        self.blocks[1].bfloat16()

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x.to(block.up.weight.dtype)).float()
        return self.norm(x.double()).float()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OURS)
def test_ours_update_parameters_of_several_dtypes(ranks: Ranks, name: str) -> None:
    """As alone on the whole model; bf16 gradients are summed in another order, so that last bits may differ, of which
    Adafactor's steps on weights near 1 have few."""
    same_training(
        Mixed, models.batches(6), layout="zero3", world_size=2, optimizer=OURS[name][0], steps=6, tol=1e-3,
        way_tol=0.6 if name == "Adafactor" else 0.15, ranks=ranks,
    )  # fmt: skip


def _books(layout: str, name: str) -> tuple[list[tuple[float, int]], tuple[float, int], tuple[int, int], int]:
    """Of the optimizer's states, (table, held) before and after a step; bytes of the exchange; what tensors take; what
    the state of the whole model takes."""
    torch.manual_seed(0)
    engine = sf.Engine(models.small(), optimizer=OURS[name][0], layout=layout)
    plain = models.small()
    alone = OURS[name][0](plain.parameters())
    whole = sum(alone.state_bytes(group, place, 4) for group, _, place in alone.parts())  # type: ignore[attr-defined]
    rows = [engine.memory().rows[-1]]
    for tokens, targets in models.batches(2):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
        engine.step()
    rows.append(engine.memory().rows[-1])
    assert all(row.state == "moments" and not row.padding for row in rows)
    states = engine.optimizer.state.values()  # type: ignore[union-attr]
    held = sum(v.untyped_storage().size() for state in states for v in state.values() if isinstance(v, torch.Tensor))
    moved = [row for row in engine.traffic().rows if row.purpose == "update"]
    sent = (sum(row.program for row in moved), sum(row.sent for row in moved))
    assert f"moments  {rows[0].table:>18,.0f}" in engine.explain()
    engine.close()
    return [(row.table, row.held) for row in rows], sent, (held, len(moved)), whole


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize("name", OURS)
def test_what_ours_keep_and_send_is_what_the_books_say(ranks: Ranks, name: str, layout: str) -> None:
    """Bytes held equal the table from the first moment on; over the ranks they add up to the whole state, but for
    the rows and columns of Adafactor, which every rank has; an exchange of matrices sends what was said."""
    said = ranks.run(_books, layout, name, world_size=3)
    for books, (program, sent), (held, kinds), _ in said:
        assert all(table == row_held == held for table, row_held in books)
        assert program == sent and kinds == (name in ("Muon", "GaLore") and layout == "zero3") == (sent > 0)
    each, whole = [held for _, _, (held, _), _ in said], said[0][3]
    if layout == "ddp":
        assert each == [whole] * 3
    elif name == "Adafactor":
        assert all(held < whole for held in each) and sum(each) > whole
    else:
        assert sum(each) == whole


def _states(layout: str, name: str) -> list[float]:
    """Whole states beside those of the same optimizer alone; written, and used by the next step."""
    torch.manual_seed(0)
    model, plain = models.small(), models.small()
    plain.load_state_dict(model.state_dict())
    engine = sf.Engine(model, optimizer=OURS[name][0](model.parameters()), layout=layout)
    alone = OURS[name][0](plain.parameters())
    batches = models.batches(5)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))
        engine.step()
        plain(*batch).backward()
        alone.step()
        alone.zero_grad()

    worst: list[float] = []
    for batch in batches[:3]:
        step(batch)
    parameters = dict(plain.named_parameters())
    for state in alone.per_element:  # type: ignore[attr-defined]
        if not any(state in alone.dtypes(p) for p in parameters.values()):  # type: ignore[attr-defined]
            continue
        with engine.gathered(of=state, write=True) as values:
            for key, p in parameters.items():
                has = state in alone.dtypes(p)  # type: ignore[attr-defined]
                assert (values[key] is not None) == has
                if has:
                    wanted = alone.value(p, state)  # type: ignore[attr-defined]
                    worst.append(((values[key] - wanted).norm() / wanted.norm().clamp(min=1e-20)).item())
                    with torch.no_grad():
                        values[key].mul_(0.5)
                        alone.take_value(p, state, wanted * 0.5)  # type: ignore[attr-defined]
    for batch in batches[3:]:
        step(batch)
    with engine.gathered() as values:
        worst += [((v - p).norm() / p.norm()).item() for v, p in zip(values.values(), parameters.values(), strict=True)]
    with pytest.raises(ConfigError, match="no such state"):
        engine.gathered(of="row_var").__enter__()
    engine.close()
    return worst


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("name", OURS)
def test_whole_states_of_ours_can_be_read_and_written(ranks: Ranks, name: str, layout: str) -> None:
    for worst in ranks.run(_states, layout, name, world_size=2):
        assert max(worst) < (2e-3 if name == "AdamW8bit" else 5e-5)


def _changed(layout: str, name: str) -> float:
    """A layer of every block is unfrozen in the middle of training, so that their units are cut anew."""

    def build() -> Any:
        torch.manual_seed(0)
        model: Any = models.small()
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    def change(model: Any) -> None:
        torch.manual_seed(1)
        for block in model.blocks:
            block.up.requires_grad_(True)

    model, plain = build(), build()
    engine = sf.Engine(model, optimizer=OURS[name][0](model.parameters()), layout=layout)
    optimizer = OURS[name][0](plain.parameters())
    for i, batch in enumerate(models.batches(8)):
        if i == 4:
            change(model)
            change(plain)
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))
        engine.step()
        plain(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    row = engine.memory().rows[-1]
    assert row.table == row.held
    state, wanted = engine.state_dict(), copy.deepcopy(plain.state_dict())
    engine.close()
    return max(((state[key] - wanted[key]).norm() / wanted[key].norm()).item() for key in wanted)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("name", OURS)
def test_states_of_ours_survive_a_change_of_the_model(ranks: Ranks, name: str, layout: str) -> None:
    """Quantized moments are carried over without loss: their codes are found again."""
    assert max(ranks.run(_changed, layout, name, world_size=3)) < (1e-4 if name == "AdamW8bit" else 1e-5)


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay for matrices only and a smaller rate for them."""
    every = list(parameters)
    matrices, rest = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3, "lr": 3e-3}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )


def _small_groups(layout: str, kind: type[torch.optim.Optimizer]) -> list[list[list[int]]]:
    """The shapes of the parameters of groups, of which one has none, before and behind a step; a group joins later."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False), nn.Linear(1, 1, bias=False))
    groups: list[Any] = [{"params": list(layer.parameters())} for layer in model[:2]]
    optimizer = kind([*groups[:1], {"params": []}, *groups[1:]])
    engine = sf.Engine(model, optimizer=optimizer, layout=layout)
    found = []
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": list(model[2].parameters())})
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        found.append([[p.numel() for p in group["params"]] for group in optimizer.param_groups])
    assert all(p.dtype == torch.float32 for group in optimizer.param_groups for p in group["params"])
    engine.close()
    return found


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Rprop, sf.optim.Lion])
def test_a_group_that_has_parameters_is_empty_on_no_rank(ranks: Ranks, kind: type[torch.optim.Optimizer]) -> None:
    """Else ``[group for group in optimizer.param_groups if group["params"]]`` has another length on each rank."""
    found = ranks.run(_small_groups, "zero3", kind, world_size=2)
    assert found[0] != found[1]
    for shapes in found:
        assert [len(group) for group in shapes[0]] == [1, 0, 1]
        assert [len(group) for group in shapes[2]] == [1, 0, 1, 1]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero2", "zero3", "hsdp"])
def test_parameter_groups_keep_their_hyper_parameters(ranks: Ranks, layout: str) -> None:
    same_training(
        models.small, models.batches(8), layout=layout, world_size=2, optimizer=grouped, steps=8, parameter_tol=1e-4,
        ranks=ranks,
    )  # fmt: skip


def _instance(layout: str, kind: str) -> tuple[bool, bool, float, list[float | None]]:
    """An existing optimizer with a schedule made before the engine, against the same in plain PyTorch."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
        torch.manual_seed(0)
        model = models.small()
        optimizer = grouped(model.parameters()) if kind == "fused" else Lion(model.parameters())
        return model, optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    model, optimizer, schedule = build()
    groups = [id(group) for group in optimizer.param_groups]
    engine = sf.Engine(model, optimizer=optimizer, layout=layout)
    plain, reference, plain_schedule = build()
    rates = []
    for tokens, targets in models.batches(5):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
        rates.append(engine.step().lr)
        plain(tokens, targets).backward()
        reference.step()
        reference.zero_grad()
        optimizer._opt_called = True  # type: ignore[attr-defined]
        schedule.step()
        plain_schedule.step()
    state, expected = engine.state_dict(), plain.state_dict()
    worst = max((state[k] - expected[k]).abs().max().item() for k in state)
    same_groups = groups == [id(group) for group in optimizer.param_groups]
    engine.close()
    return engine.optimizer is optimizer, same_groups, worst, rates


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["fused", "own"])
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_an_existing_optimizer_keeps_its_object_groups_and_schedule(ranks: Ranks, layout: str, kind: str) -> None:
    for same, groups, worst, rates in ranks.run(_instance, layout, kind, world_size=2):
        assert same and groups and worst < 1e-5
        assert rates[1] == pytest.approx(rates[0] / 2)


def _scheduled() -> list[float | None]:
    schedule = sf.optim.warmup_cosine(warmup=2, total=6, floor=0.1)
    engine = sf.Engine(models.small(), optimizer=partial(torch.optim.AdamW, lr=1.0), lr_schedule=schedule)
    rates = []
    for batch in models.batches(7):
        engine.backward(engine(*batch))
        rates.append(engine.step().lr)
    return rates


def test_the_schedule_warms_up_from_the_first_step_and_ends_at_its_floor() -> None:
    rates = _scheduled()
    assert rates[:2] == [0.5, 1.0] and rates[2] == 1.0 and rates[6] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="warmup <= total"):
        sf.optim.warmup_cosine(warmup=5, total=2)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("AdamW", "neither a torch.optim.Optimizer"),
        (lambda parameters: None, "made a NoneType"),
        (torch.optim.LBFGS, "LBFGS is not element-wise"),
        (torch.optim.Adafactor, "shardfold.optim.Adafactor"),
    ],
)
def test_what_can_not_update_shards_is_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sf.Engine(models.small(), optimizer=optimizer)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = models.small()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*models.batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="already stepped"):
        sf.Engine(model, optimizer=optimizer)


def _norm(layout: str, scale: float) -> tuple[float, float]:
    torch.manual_seed(0)
    engine = sf.Engine(
        models.frozen(), optimizer=partial(torch.optim.SGD, lr=0.1), layout=layout, clip_norm=scale, accumulate=2
    )
    torch.manual_seed(0)
    plain = models.frozen()
    (tokens, targets), count = models.batches(1)[0], engine.world_size * 2
    for i in range(2):
        part = engine.rank * 2 + i
        engine.backward(engine(tokens.chunk(count)[part], targets.chunk(count)[part]))
        report = engine.step()
    plain(tokens, targets).backward()
    expected = torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], scale).item()
    engine.close()
    assert report.grad_norm is not None
    return report.grad_norm, expected


@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_the_norm_over_all_shards_is_clip_grad_norms(ranks: Ranks, layout: str) -> None:
    for got, expected in ranks.run(_norm, layout, 0.1, world_size=3):
        assert got == pytest.approx(expected, rel=1e-6)
