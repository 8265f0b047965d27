"""Habits of loops written for plain PyTorch or DDP do what they do there, or raise one sentence that says what does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.errors import UsageError
from shardfold.testing import Ranks
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
LAYOUTS = list(sf.PRESETS)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()


def make_engine(layout: str = "zero3", optimizer: Any = ADAMW, **options: Any) -> Any:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    mesh = {"inter": 1, "intra": ranks} if layout in ("hsdp", "hpz") else None
    return sf.Engine(make_model(), optimizer=optimizer, **grouped(layout=layout, mesh=mesh, **options))


def rows(seed: int, engine: Any = None) -> Tensor:
    """The global batch, or this rank's part of it."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x if engine is None else x.chunk(engine.world_size)[engine.rank]


def assert_weights(engine: Any, model: nn.Module) -> None:
    state = engine.state_dict()
    for name, p in model.named_parameters():
        torch.testing.assert_close(state[name], p.detach(), rtol=1e-9, atol=1e-11)


# -- gradients of earlier backwards -----------------------------------------------------------------------------------


def _constant_gradients(layout: str, accumulate: int) -> list[float]:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    engine = sf.Engine(model, optimizer=partial(torch.optim.SGD, lr=0.0), layout=layout, accumulate=accumulate)
    seen = []
    for _ in range(4):
        for _ in range(accumulate):
            model[0](torch.ones(1, 1)).sum().backward()
        with engine.gathered("0.weight", of="grads") as grad:
            seen.append(grad.item())
        engine.step()
        assert model[0].weight.grad is None
    engine.backward(engine(torch.ones(1, 1)).sum())
    for _ in range(2 * accumulate - 1):
        engine.backward(model[0].weight.sum())
    with engine.gathered("0.weight", of="grads") as grad:
        seen.append(grad.item())
    engine.close()
    return seen


@pytest.mark.sampled(6)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2"])
def test_gradients_of_earlier_backwards_are_not_added_again(ranks: Ranks, layout: str, accumulate: int) -> None:
    """Backwards that come through no forward of the model give a gradient of 1 in each step, and two of them 2."""
    for size in (1, 2):
        for seen in ranks.run(_constant_gradients, layout, accumulate, world_size=size):
            assert seen == [1.0] * 4 + [2.0]


# -- dropping gradients -----------------------------------------------------------------------------------------------

DROPS: dict[str, Any] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "a part": lambda model, optimizer: model[0].zero_grad(),
    "one parameter": lambda model, optimizer: setattr(model[1].weight, "grad", None),
    "one parameter, deleted": lambda model, optimizer: delattr(model[1].weight, "grad"),
}


def _dropped(layout: str, how: str) -> None:
    engine, plain = make_engine(layout, SGD), make_model()
    optimizer = SGD(plain.parameters())
    for step, bad in enumerate([False, True, False, True]):
        if bad:
            engine.backward(engine(rows(90 + step, engine)).mean() * float("nan"))
            (plain(rows(90 + step)).mean() * float("nan")).backward()
            DROPS["optimizer"](engine.module, engine.optimizer)
            DROPS["optimizer"](plain, optimizer)
        engine.backward(engine(rows(step, engine)).square().mean())
        plain(rows(step)).square().mean().backward()
        DROPS[how](engine.module, engine.optimizer)
        DROPS[how](plain, optimizer)
        if step % 2:  # else the step is that of what was left
            engine.backward(engine(rows(10 + step, engine)).mean())
            plain(rows(10 + step)).mean().backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_weights(engine, plain)
    engine.close()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_dropped_as_in_plain_pytorch(ranks: Ranks, layout: str) -> None:
    """``zero_grad`` of optimizer, model and part, and ``p.grad = None``, behind a backward: the weights are plain
    PyTorch's, which skips what has no gradient and decays what has a zero."""
    for how in DROPS:
        ranks.run(_dropped, layout, how, world_size=2)


def _dropped_in_a_hook(layout: str) -> None:
    engine, plain = make_engine(layout, SGD), make_model()
    optimizer = SGD(plain.parameters())
    for model in (engine.module, plain):
        model[1].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for step in range(3):
        engine.backward(engine(rows(step, engine)).square().mean())
        plain(rows(step)).square().mean().backward()
        assert engine.module[1].weight.grad is None
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_weights(engine, plain)
    engine.close()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_a_hook_drops_as_it_arrives_counts_as_none(ranks: Ranks, layout: str) -> None:
    """``register_post_accumulate_grad_hook`` with ``p.grad = None``: the parameter is not updated, all others are."""
    ranks.run(_dropped_in_a_hook, layout, world_size=2)


def _dropped_on_one_rank(layout: str, how: str) -> str:
    engine = make_engine(layout)
    engine.backward(engine(rows(0, engine)).mean())
    before = copy.deepcopy(engine.state_dict())
    if engine.rank == 0:
        DROPS[how](engine.module, engine.optimizer)
    with pytest.raises(UsageError) as caught:
        engine.step()
    engine.zero_grad()
    for name, value in engine.state_dict().items():
        assert torch.equal(value, before[name])
    engine.backward(engine(rows(0, engine)).mean())
    assert engine.step().updated
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("how", ["optimizer", "model", "one parameter"])
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3"])
def test_gradients_dropped_on_one_rank_only_raise_on_every_rank(ranks: Ranks, layout: str, how: str) -> None:
    """Under DDP the ranks would go on with different weights. Nothing is updated, and training can go on."""
    first, second = ranks.run(_dropped_on_one_rank, layout, how, world_size=2)
    assert first == second and "rank 0 dropped" in first and "rank 1 did not" in first


def _dropped_where_used(layout: str) -> None:
    """Each rank uses another layer, and all drop what they have."""
    engine, plain = make_engine(layout, SGD), make_model()
    optimizer = SGD(plain.parameters())
    x = rows(0)
    for _ in range(2):
        with engine.gathered():
            engine.module[engine.rank](x).sum().backward()
        engine.module.zero_grad()
        assert engine.step().updated  # of nothing: no decay, no momentum
    engine.backward(engine(x.chunk(2)[engine.rank]).mean())
    plain(x).mean().backward()
    engine.step()
    optimizer.step()
    assert_weights(engine, plain)
    engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["ddp", "zero2"])
def test_what_only_other_ranks_used_is_dropped_with_it(ranks: Ranks, layout: str) -> None:
    """Where ranks use different parameters, ``model.zero_grad()`` on every rank leaves nothing anywhere."""
    ranks.run(_dropped_where_used, layout, world_size=2)


def _asked_for_where_dropped(layout: str) -> None:
    engine = make_engine(layout, partial(torch.optim.SGD, lr=1.0))
    before = copy.deepcopy(engine.state_dict())
    with engine.gathered():
        engine.module[engine.rank](rows(0)).sum().backward()
    engine.module.zero_grad(set_to_none=False)
    with engine.gathered(of="grads", write=True) as grads:
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())
        for grad in grads.values():
            grad.fill_(2.0)
    assert engine.step().updated
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, before[name] - 2.0, rtol=1e-12, atol=0)
    with engine.gathered():
        engine.module[engine.rank](rows(0)).sum().backward()
    engine.module.zero_grad()
    with engine.gathered(of="grads") as grads:
        assert set(grads.values()) == {None}
    if engine.rank == 0:
        engine.optimizer.zero_grad()
    differs = r"gathered\(of='grads'\): rank 0 dropped all gradients .* rank 1 did not"
    with pytest.raises(UsageError, match=differs), engine.gathered(of="grads"):
        pass
    engine.zero_grad()
    engine.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3"])
def test_what_was_dropped_is_gone_when_gradients_are_asked_for(ranks: Ranks, layout: str) -> None:
    """Also of what only another rank used; what is written into them then is what the step uses, and where ranks did
    not do the same all of them are told."""
    ranks.run(_asked_for_where_dropped, layout, world_size=2)


# -- clipping ---------------------------------------------------------------------------------------------------------


def _clipped(layout: str, precision: str) -> tuple[str, float]:
    model = make_model().float()
    engine = sf.Engine(model, optimizer=SGD, layout=layout, precision=precision)
    engine.backward(engine(rows(0, engine).float()).float().square().mean())
    assert model[0].weight.grad is not None and model[0].weight.grad.shape == (4, 4)
    try:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-6))
        said = ""
    except UsageError as error:
        norm, said = -1.0, str(error)
    engine.step()
    engine.close()
    return said, norm


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "precision"), [("zero1", "fp32"), ("zero2", "fp32"), ("zero3", "fp32"), ("ddp", "bf16")]
)
def test_clipping_gradients_that_are_not_there_raises_and_names_clip_norm(
    ranks: Ranks, layout: str, precision: str
) -> None:
    """``clip_grad_norm_`` would find a norm of 0 and clip nothing."""
    for said, _ in ranks.run(_clipped, layout, precision, world_size=2):
        assert "clip_norm=" in said and "engine.gathered('0.weight', of='grads')" in said


@pytest.mark.soak
def test_clipping_by_hand_works_where_a_rank_has_all_gradients(ranks: Ranks) -> None:
    """Under ``ddp``, and on one rank, the norm is that of plain PyTorch."""
    plain = make_model()
    plain(rows(0)).square().mean().backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e-6))
    for layout, size in (("ddp", 2), ("zero3", 1)):
        for said, norm in ranks.run(_clipped, layout, "fp32", world_size=size):
            assert not said and norm == pytest.approx(expected, rel=1e-5)


def test_a_stand_in_for_a_gradient_answers_what_needs_no_values(ranks: Ranks) -> None:
    """Shape, dtype and device answer, ``module.to`` passes it by; values, pickles and copies raise."""
    ranks.run(_stand_in, world_size=2)


def _stand_in() -> None:
    engine = make_engine("zero2")
    weight = engine.module[0].weight
    engine.backward(engine(rows(0, engine)).mean())
    grad = weight.grad
    assert (grad.shape, grad.dtype, grad.numel(), grad.requires_grad) == ((4, 4), torch.float64, 16, False)
    assert "0.weight" in repr(grad) and grad.detach() is grad and grad.data is grad
    engine.module.to("cpu")
    for use in (torch.sum, Tensor.item, copy.deepcopy, Tensor.clone, lambda g: torch.stack([g, g]), lambda g: g * 2):
        with pytest.raises(UsageError, match="lies in pieces on 2 ranks"):
            use(grad)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UsageError, match="was set by hand"):
        engine.step()
    weight.grad = None
    engine.zero_grad()
    engine.close()


def test_a_stand_in_says_where_the_gradient_is_now(ranks: Ranks) -> None:
    """Before the last backward of a step it is not summed yet, behind it the gradient is kept in another dtype."""
    ranks.run(_where_it_is, world_size=2)


def _where_it_is() -> None:
    engine = sf.Engine(make_model().float(), optimizer=ADAMW, layout="ddp", precision="bf16", accumulate=2)
    weight = engine.module[0].weight
    for _ in range(2):
        for where in ("summed over ranks in the last backward", "kept in float32"):
            engine.backward(engine(rows(0, engine).float()).mean())
            with pytest.raises(UsageError, match=where):
                weight.grad.sum()
        engine.step()
    engine.close()


class _Ways(nn.Module):
    """Blocks that run in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()

    def forward(self, x: Tensor, way: Sequence[int], *, again: bool = False) -> Tensor:
        for i in way:
            x = checkpoint(self.blocks[i], x, use_reentrant=True) if again else torch.tanh(self.blocks[i](x))
        return x.square().mean()


WAYS = {
    "as before": [(0, 1, 2), (0, 1, 2)],
    "the other way round": [(2, 1, 0), (2, 1, 0)],
    "more": [(0, 1, 2, 3), (3, 0, 1, 2)],
    "the other way round on one rank": [(0, 1, 2), (2, 1, 0)],
    "each another part": [(1,), (0, 2)],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
def test_whole_gradients_are_there_in_whatever_order_a_backward_runs(ranks: Ranks, way: str) -> None:
    """Under ``ddp`` a gradient that came in another order than before is in the sums that ``.grad`` shows: those of
    plain PyTorch, and so is what clipping by hand makes of them."""
    ranks.run(_another_order, WAYS[way], world_size=2)


def _another_order(ways: Sequence[Sequence[int]]) -> None:
    plain = _Ways()
    engine = sf.Engine(_Ways(), optimizer=SGD, layout="ddp", init=sf.Init(units=["blocks.*"]))
    for several in ([(0, 1, 2)] * 2, ways, [(0, 1, 2)] * 2, ways):
        plain.zero_grad()
        engine.backward(engine(rows(0, engine), several[engine.rank]))
        for way, part in zip(several, rows(0).chunk(2), strict=True):
            (plain(part, way) / 2).backward()
        for (name, p), expected in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
            found = torch.zeros_like(expected) if p.grad is None else p.grad
            wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15, msg=name)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (plain, engine.module)]
        assert norms[0] == pytest.approx(float(norms[1]), rel=1e-12)
        engine.zero_grad()
    engine.close()


def test_a_gradient_that_came_behind_its_sum_says_so(ranks: Ranks) -> None:
    """A block that runs in two re-entrant checkpoints gets its gradient in two parts; the second is in the sums of
    ``gathered`` and of the step, and ``.grad`` says that it does not show them."""
    ranks.run(_in_two_parts, world_size=2)


def _in_two_parts() -> None:
    plain = _Ways()
    engine = sf.Engine(_Ways(), optimizer=SGD, layout="ddp", init=sf.Init(units=["blocks.*"]))
    weight = engine.module.blocks[1].weight
    x = rows(0).requires_grad_()
    plain(x, (1, 0, 1), again=True).backward()
    expected = plain.blocks[1].weight.grad
    engine.backward(engine(x.detach().chunk(2)[engine.rank].requires_grad_(), (1, 0, 1), again=True))
    with pytest.raises(UsageError, match="of which more came, from a re-entrant checkpoint"):
        weight.grad.sum()
    with engine.gathered("blocks.1.weight", of="grads") as grad:
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-15)
    engine.zero_grad()
    engine.close()


# -- gradients set by hand --------------------------------------------------------------------------------------------


def test_a_step_that_refuses_a_gradient_set_by_hand_keeps_all_others() -> None:
    """Once it is as it was shown, the step is that of a loop in which nobody set it; parameters before it are not taken
    for dropped ones."""

    def weights(refused: bool) -> dict[str, Tensor]:
        engine = sf.Engine(make_model().float(), optimizer=ADAMW, precision="bf16")
        engine.backward(engine(rows(0).float()).square().mean())
        last = engine.module[1].bias
        shown, last.grad = last.grad, torch.ones_like(last) if refused else last.grad
        if refused:
            with pytest.raises(UsageError, match="was set by hand"):
                engine.step()
        last.grad = shown
        assert engine.step().updated
        state = engine.state_dict()
        engine.close()
        return state

    torch.testing.assert_close(weights(True), weights(False), rtol=0, atol=0)


def _set_by_hand(layout: str) -> None:
    engine, plain = make_engine(layout, SGD), make_model()
    optimizer = SGD(plain.parameters())
    for step in range(2):
        engine.backward(engine.module[1](rows(step, engine)).mean())
        plain[1](rows(step)).mean().backward()
        for model in (engine.module, plain):
            model[1].weight.grad = model[1].weight.grad * 2 + 1
            model[0].bias.grad = torch.full_like(model[0].bias, 0.5)  # what has none so far
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_weights(engine, plain)
    engine.close()


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("zero3", 1), ("ddp", 1)])
def test_gradients_set_by_hand_are_those_of_the_step(ranks: Ranks, layout: str, size: int) -> None:
    """A gradient that is replaced, and one that is given to a parameter that has none."""
    ranks.run(_set_by_hand, layout, world_size=size)


def _only_by_hand(layout: str) -> str:
    """What a step says of gradients without a backward. The weights are plain PyTorch's behind steps of gradients that
    were set before a backward, which adds to them, and in place of those of a loss of zero."""
    model, engine = make_model(), make_engine(layout, SGD)
    plain = SGD(model.parameters())
    for p in engine.module.parameters():
        p.grad = torch.ones_like(p)
    try:
        engine.step()
        said = "nothing"
    except UsageError as error:
        said = str(error)
    model(rows(0)).square().mean().backward()
    engine.backward(engine(rows(0)).square().mean())
    for p in model.parameters():
        assert p.grad is not None
        p.grad += 1
    engine.step(), plain.step()
    engine.backward(sum((0 * p.sum() for p in engine.module.parameters()), torch.zeros(())))
    for p in (*engine.module.parameters(), *model.parameters()):
        p.grad = torch.full_like(p, 2.0)
    engine.step(), plain.step()
    assert_weights(engine, model)
    engine.close()
    return said


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("zero3", 1)])
def test_gradients_set_by_hand_need_a_backward(ranks: Ranks, layout: str, size: int) -> None:
    """Without one the step refuses and says so; they are kept, and one of a loss of zero makes way for them."""
    for said in ranks.run(_only_by_hand, layout, world_size=size):
        assert said.startswith("engine.step() with no backward") and "by hand counts with a backward only" in said


def _swap(a: Tensor, b: Tensor) -> None:
    a.grad, b.grad = b.grad, a.grad


def _swap_data(a: Tensor, b: Tensor) -> None:
    assert a.grad is not None and b.grad is not None
    a.grad.data, b.grad.data = b.grad.data, a.grad.data


def _swap_aliases(a: Tensor, b: Tensor) -> None:
    assert a.grad is not None and b.grad is not None
    a.grad, b.grad = b.grad.detach(), a.grad.view_as(a)


def _move(a: Tensor, b: Tensor) -> None:
    a.grad, b.grad = b.grad, None


EDITS: dict[str, Any] = {
    "swapped": _swap,
    "swapped, the other way": lambda a, b: _swap(b, a),
    "swapped data": _swap_data,
    "swapped aliases": _swap_aliases,
    "moved": _move,
    "moved back": lambda a, b: _move(b, a),
    "shared": lambda a, b: setattr(a, "grad", b.grad),
    "other data": lambda a, b: setattr(a.grad, "data", torch.full_like(a, 5.0)),
    "other memory": lambda a, b: a.grad.set_(torch.full_like(a, 5.0)),
    "transposed": lambda a, b: setattr(a, "grad", a.grad.t()),
    "transposed in place": lambda a, b: a.grad.t_(),
    "transposed data": lambda a, b: setattr(b.grad, "data", b.grad.data.t()),
    "turned": lambda a, b: setattr(a, "grad", a.grad.flip(0)),
    "an alias of itself": lambda a, b: setattr(a, "grad", a.grad.detach()),
}


def _edited(layout: str, width: int, accumulate: int) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, width)).double()

    plain = make()
    engine = sf.Engine(make(), optimizer=SGD, layout=layout, accumulate=accumulate)
    optimizer = SGD(plain.parameters())
    for step, edit in enumerate([*EDITS.values(), None]):
        for micro in range(accumulate):
            engine.backward(engine(rows(2 * step + micro, engine)).square().mean())
            (plain(rows(2 * step + micro)).square().mean() / accumulate).backward()
        kept = engine.module[1].weight.grad
        if edit is not None:
            for model in (engine.module, plain):
                edit(model[1].weight, model[2].weight)
        engine.step()
        kept.t_()  # what is kept of a step is the user's
        kept.data = torch.zeros_like(kept)
        optimizer.step()
        optimizer.zero_grad()
        assert_weights(engine, plain)
    engine.close()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("width", [4, 48])  # gradients that are copied together, and that stay as autograd made them
@pytest.mark.parametrize(
    ("layout", "size", "accumulate"), [("ddp", 1, 1), ("ddp", 1, 2), ("zero2", 1, 1), ("zero3", 1, 1), ("ddp", 2, 1)]
)
def test_gradients_swapped_moved_or_pointed_elsewhere_are_those_of_the_step(
    ranks: Ranks, layout: str, size: int, accumulate: int, width: int
) -> None:
    """Whatever ``.grad`` holds at the step counts, also where it is another gradient's memory, or the tensor that was
    shown over other memory; in the steps behind it gradients are shown and used as ever."""
    ranks.run(_edited, layout, width, accumulate, world_size=size)


# -- the optimizer's own methods --------------------------------------------------------------------------------------


def _own_calls(layout: str, given: bool, kind: Any) -> list[str]:
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1) if given else partial(kind, lr=0.1)
    engine = sf.Engine(model, optimizer=optimizer, layout=layout)
    engine.backward(engine(rows(0, engine)).mean())
    said = []
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for call in (
        lambda: engine.optimizer.step(),
        lambda: engine.optimizer.state_dict(),
        lambda: engine.optimizer.load_state_dict({}),
        lambda: scaler.step(engine.optimizer),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        said.append(str(caught.value))
    assert engine.step().updated
    engine.close()
    return said


@pytest.mark.sampled(6)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, sf.optim.Lion])
def test_methods_of_an_engines_optimizer_raise_and_name_the_engines(ranks: Ranks, kind: Any, given: bool) -> None:
    """``step``, ``state_dict``, ``load_state_dict`` and a ``GradScaler`` would do nothing, or a part, in silence."""
    for said in ranks.run(_own_calls, "zero1", given, kind, world_size=2):
        for sentence, names in zip(
            said, ("engine.step()", "engine.save(path)", "engine.load(path)", 'precision="fp16"'), strict=True
        ):
            assert names in sentence


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_schedule_of_the_users_own_steps_behind_the_engine_without_a_warning(kind: Any, when: str) -> None:
    """Made before the engine or after it; torch warns of a schedule that steps ahead of its optimizer."""
    model = make_model()
    optimizer = kind(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if when == "before" else None
    engine = sf.Engine(model, optimizer=optimizer)
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        engine.backward(engine(rows(0)).mean())
        engine.step()
        schedule.step()
    assert engine.optimizer.param_groups[0]["lr"] == 0.25
    engine.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, sf.optim.Lion])
@pytest.mark.parametrize("how", ["close", "release"])
def test_a_closed_engines_optimizer_refuses_to_step(how: str, kind: Any) -> None:
    """Its groups hold nothing of the model any more, so that it would do nothing in silence; its other methods are its
    own again, also where a schedule has wrapped ``step``."""
    engine = make_engine(optimizer=partial(kind, lr=0.1))
    optimizer = engine.optimizer
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    getattr(engine, how)()
    assert not {"zero_grad", "state_dict", "load_state_dict"} & vars(optimizer).keys()
    model = engine.module
    del engine
    model(rows(0)).mean().backward()
    with pytest.raises(UsageError, match=f"{kind.__name__}.step.. updates nothing, because its engine is closed: make"):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, sf.optim.Lion])
def test_step_hooks_of_an_optimizer_run_around_each_update(kind: Any) -> None:
    """Before and behind it, once each, as in plain PyTorch, those of all optimizers too; a rate that the first sets is
    that of the update."""

    def train(make: Any) -> tuple[list[Any], dict[str, Tensor]]:
        calls: list[Any] = []
        model = make_model()
        optimizer = kind(model.parameters(), lr=5.0)
        engine = make(model, optimizer)

        def before(given: Any, args: Any, kwargs: Any) -> None:
            given.param_groups[0]["lr"] = 0.125
            calls.append(("before", given is optimizer, len(args), kwargs, model[1].bias.tolist()))

        def behind(given: Any, args: Any, kwargs: Any) -> None:
            calls.append(("behind", given is optimizer, len(args), kwargs, model[1].bias.tolist()))

        optimizer.register_step_pre_hook(before)
        handle = optimizer.register_step_post_hook(behind)
        for step in range(3):
            if step == 2:
                handle.remove()
            model(rows(step)).square().mean().backward()
            if engine is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.step()
        if engine is not None:
            engine.close()
        return calls, model.state_dict()

    said: list[str] = []
    everywhere = register_optimizer_step_pre_hook(lambda *_: said.append("all"))
    calls, weights = train(lambda model, optimizer: sf.Engine(model, optimizer=optimizer, layout="ddp"))
    expected, plain = train(lambda model, optimizer: None)
    everywhere.remove()
    assert len(calls) == 5 and len(said) == 6
    for mine, theirs in zip(calls, expected, strict=True):
        assert mine[:4] == theirs[:4] and mine[4] == pytest.approx(theirs[4], rel=1e-9)
    torch.testing.assert_close(weights, plain, rtol=1e-9, atol=1e-11)


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another that does not initialize its base class, as Accelerate's is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(
        lambda self: self.inner.param_groups, lambda self, to: setattr(self.inner, "param_groups", to)
    )
    state = property(lambda self: self.inner.state, lambda self, to: setattr(self.inner, "state", to))
    defaults = property(lambda self: self.inner.defaults, lambda self, to: setattr(self.inner, "defaults", to))

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.inner.add_param_group(group)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_an_optimizer_that_wraps_another_is_stepped(kind: Any, layout: str) -> None:
    """It takes no hooks of its own; the one inside does, and they run once in each step."""

    def weights(wrap: Any) -> dict[str, Tensor]:
        model, calls = make_model(), []
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        engine = sf.Engine(model, optimizer=wrap(optimizer), layout=layout)
        for step in range(3):
            engine.backward(engine(rows(step)).square().mean())
            assert engine.step().updated
        state = engine.state_dict()
        engine.close()
        assert calls == ["before"] * 3
        return state

    torch.testing.assert_close(weights(Wrapping), weights(lambda it: it), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, sf.optim.Lion])
def test_a_hook_that_raises_before_the_step_leaves_all_as_it_was(kind: Any) -> None:
    """A class with a step of its own, too; the hook that a user registers last is heard as well."""

    def fail(*_: Any) -> None:
        raise ValueError("not now")

    def weights(times: int) -> dict[str, Tensor]:
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.1)
        engine = sf.Engine(model, optimizer=optimizer, layout="zero1")
        for step in range(3):
            for _ in range(times if step == 1 else 0):
                handle = optimizer.register_step_pre_hook(fail)
                engine.backward(engine(rows(9)).square().mean())
                with pytest.raises(ValueError, match="not now"):
                    engine.step()
                handle.remove()
                engine.reset()
            engine.backward(engine(rows(step)).square().mean())
            assert engine.step().updated
        state = engine.state_dict()
        engine.close()
        return state

    torch.testing.assert_close(weights(2), weights(0), rtol=0, atol=0)


KEPT = {  # what a forward leaves whole for its backward
    "held": {"layout": sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute"))},
    "once": {"layout": sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute", until="step"))},
    "hpz": {"layout": "hpz", "mesh": {"inter": 2, "intra": 1}},
    "delayed": {
        "layout": sf.PRESETS["offload"].replace(held=sf.Cell(dtype="compute")),
        "overlap": sf.Overlap(delayed_update=True),
    },
    "outer": {
        "layout": sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute")),
        "mesh": {"inter": 2, "intra": 2},
        "outer": sf.Outer(every=3),
    },
}


def _forward_whose_backward_never_comes(kind: str) -> tuple[list[float], list[float]]:
    said: list[list[float]] = []
    for extra in (False, True):
        engine = sf.Engine(make_model(), optimizer=partial(torch.optim.SGD, lr=0.3), **grouped(**KEPT[kind]))
        losses: list[float] = []
        for step in range(4):
            loss = engine(rows(step, engine)).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            left = engine(rows(9, engine)).square().mean() if extra else None
            engine.step()
            if extra and kind in ("held", "hpz"):
                assert left is not None
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    left.backward()
                engine.reset()
        left = engine(rows(9, engine)).square().mean() if extra else None
        engine.outer_step()
        with engine.gathered():
            losses += [p.sum().item() for p in engine.module.parameters()]
        losses.append(engine(rows(5, engine)).sum().item())
        engine.close()
        said.append(losses)
    return said[0], said[1]


@pytest.mark.parametrize("kind", KEPT)
def test_a_forward_whose_backward_never_comes_keeps_no_old_weights(ranks: Ranks, kind: str) -> None:
    """Between a backward and its step; a backward that comes behind the step raises, as in plain PyTorch."""
    for without, with_it in ranks.run(
        _forward_whose_backward_never_comes, kind, world_size=4 if kind == "outer" else 2
    ):
        assert with_it == without


# -- traffic ----------------------------------------------------------------------------------------------------------


def _unpaired() -> tuple[Any, Any]:
    engine = make_engine("zero3", overlap=sf.Overlap())
    reports = []
    for before in (True, False):
        for _ in range(3):  # until orders are known
            if before:
                engine(rows(0, engine))
            engine.backward(engine(rows(0, engine)).mean())
            if not before:
                engine(rows(0, engine))
            engine.step()
        report = engine.traffic()
        reports.append((report.asked, report.asked_calls))
    engine.close()
    return reports[0], reports[1]


def test_a_forward_without_backward_counts_its_calls_wherever_it_comes(ranks: Ranks) -> None:
    """Ahead of a backward or right before the step: the same bytes by as many collectives."""
    for first, second in ranks.run(_unpaired, world_size=2):
        assert first == second and first[0] > 0 and first[1] > 0


# -- weights of another block -----------------------------------------------------------------------------------------


class _ReadsAnother(nn.Module):
    """Blocks of which the second reads the matrix of the first, which it does not contain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), _Reads()])
        self.blocks[1].other = (self.blocks[0],)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class _Reads(nn.Module):
    other: tuple[nn.Linear]

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * nn.functional.linear(x, self.other[0].weight)


def _two_recomputed_forwards(kind: str) -> None:
    def train(model: Any, backward: Any, step: Any, part: Any) -> None:
        for number in range(3):
            loss = model(part(number)).square().sum()
            for more in range(number):  # in the first step one forward, then more of them before one backward
                loss = loss + model(part(10 + more)).square().sum()
            backward(loss)
            step()

    plain = _ReadsAnother().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    train(plain, lambda loss: (loss / 2).backward(), step, rows)
    options: dict[str, Any] = {"layout": "zero3"} if kind == "zero3" else KEPT[kind]
    engine = sf.Engine(
        _ReadsAnother().double(), optimizer=partial(torch.optim.SGD, lr=0.1), **grouped(units=["blocks.*"], **options),
        activations="recompute",
    )  # fmt: skip
    train(engine, engine.backward, engine.step, lambda seed: rows(seed, engine))
    assert_weights(engine, plain)
    engine.close()


@pytest.mark.parametrize("kind", ["zero3", "held", "once", "hpz"])
def test_what_a_recomputed_block_reads_of_another_stays_until_its_backward(ranks: Ranks, kind: str) -> None:
    ranks.run(_two_recomputed_forwards, kind, world_size=2)


class Either(nn.Module):
    """One of its layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, which: Sequence[int]) -> Tensor:
        for number in which:
            x = x + self.layers[number](x)
        return x.square().mean()


def _off(plain: nn.Module, layout: str, optimizer: Any, calls: Sequence[Sequence[Any]]) -> float:
    """How far weights end from plain PyTorch's, behind a step for each call."""
    plain = plain.double()
    engine = sf.Engine(copy.deepcopy(plain), optimizer=optimizer, layout=layout, init=sf.Init(units=[nn.Linear]))
    update, x = optimizer(plain.parameters()), torch.ones(2, 4, dtype=torch.float64).requires_grad_()
    for given in calls:
        plain(x, *given).backward()
        update.step()
        update.zero_grad()
        engine.backward(engine(x, *given))
        engine.step()
    state = engine.state_dict()
    engine.close()
    return max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())


def what_the_last_step_left_out(layout: str) -> float:
    torch.manual_seed(0)
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    return _off(Either(), layout, adamw, [([0, 1],), ([0],), ([1],), ([0, 1],)])


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_what_a_step_leaves_out_stays_as_it_is_though_the_step_before_used_it(ranks: Ranks, layout: str) -> None:
    """No decay, no moment, no count of steps."""
    assert max(ranks.run(what_the_last_step_left_out, layout, world_size=2)) < 1e-12


class Again(nn.Module):
    """A layer in two checkpoints: its gradient comes in two parts, each of a backward inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layer, self.other, self.layer):
            x = x + torch.as_tensor(checkpoint(layer, x, use_reentrant=True))
        return x.square().mean()


def in_two_checkpoints(layout: str) -> float:
    torch.manual_seed(0)
    return _off(Again(), layout, SGD, [()] * 3)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_layer_in_two_re_entrant_checkpoints_has_both_parts_of_its_gradient(ranks: Ranks, layout: str) -> None:
    assert max(ranks.run(in_two_checkpoints, layout, world_size=2)) < 1e-12
