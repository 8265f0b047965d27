"""What a model gives in 16 bits comes back in fp32, as if the user had called ``.float()``, unless
``Precision(outputs=)`` says otherwise."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.errors import LayoutError, ShardfoldError
from shardfold.plan.layout import PRECISIONS, Precision
from shardfold.planner.setting import Subject
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.sharding.tree import widened
from shardfold.testing import Ranks
from shardfold.tools.bench.planned import compare

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CLASSES = 11
BF16 = Precision(compute="bf16")
AS_GIVEN = replace(BF16, outputs="compute")


class Net(nn.Module):
    """Notes the dtypes of what it gives and of the gradient that comes for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.give(self.head(x))

    def give(self, logits: Tensor) -> Any:
        self.seen.append(logits.dtype)
        if logits.requires_grad:
            logits.register_hook(lambda grad: self.seen.append(grad.dtype))
        return logits


def made(kind: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def batches(count: int = 2, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return [(torch.randn(rows, 8, generator=draw), torch.randint(CLASSES, (rows,), generator=draw))
            for _ in range(count)]  # fmt: skip


def trained(precision: Precision, layout: str, cast: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Of some steps whose loss is computed from what ``cast`` makes of the engine's outputs."""
    engine = sf.Engine(made(), optimizer=SGD, layout=layout, precision=precision)
    found: dict[str, Any] = {"losses": [], "grads": []}
    for x, y in batches():
        out = engine(x)
        loss = F.cross_entropy(cast(out), y)
        engine.backward(loss)
        found["dtypes"] = out.dtype, loss.dtype
        found["losses"].append(loss.detach())
        with engine.gathered(of="grads") as grads:
            found["grads"] += [grad.clone() for grad in grads.values()]
        engine.step()
    with torch.inference_mode():
        engine.module.eval()
        found["evaluated"] = engine(batches()[0][0]), engine.module(batches()[0][0])
    found["seen"], found["state"] = engine.module.seen, engine.state_dict()
    engine.close()
    return found


def plain_loss(precision: Precision) -> Tensor:
    """Of plain PyTorch's first forward, in fp32 from its outputs in 16 bits."""
    x, y = batches()[0]
    if precision.autocast:
        with torch.autocast("cpu", TORCH_DTYPES[precision.autocast]):
            out = made()(x)
    else:
        dtype = TORCH_DTYPES[precision.compute]
        out = made().to(dtype)(x.to(dtype))
    return F.cross_entropy(out.float(), y)


def losses_are_those_of_float_outputs(layout: str) -> None:
    for name in ("bf16", "bf16-autocast", "fp16"):
        precision = PRECISIONS[name]
        narrow = TORCH_DTYPES[precision.autocast or precision.compute]
        mine = trained(precision, layout, lambda out: out)
        theirs = trained(replace(precision, outputs="compute"), layout, Tensor.float)
        assert mine["dtypes"] == (torch.float32, torch.float32), name
        assert theirs["dtypes"] == (narrow, torch.float32), name
        assert mine["losses"][0] == plain_loss(precision), name
        for what in ("losses", "grads"):
            assert all(map(torch.equal, mine[what], theirs[what])), (name, what)
        assert all(torch.equal(mine["state"][key], value) for key, value in theirs["state"].items()), name
        assert set(mine["seen"]) == {narrow}, name  # outputs before the cast, and gradients behind it
        for ours, given in zip(mine["evaluated"], theirs["evaluated"], strict=True):
            assert (ours.dtype, given.dtype) == (torch.float32, narrow) and torch.equal(ours, given.float()), name


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_losses_gradients_and_weights_are_those_of_a_user_who_calls_float(ranks: Ranks, layout: str) -> None:
    ranks.run(losses_are_those_of_float_outputs, layout, world_size=2)


@pytest.mark.parametrize("name", ["bf16-pure", "fp16-autocast"])
def test_every_policy_of_16_bits_has_its_loss_in_fp32_unless_it_says_otherwise(name: str) -> None:
    x, y = batches()[0]
    found = []
    for outputs in ("fp32", "compute"):
        engine = sf.Engine(made(), precision=replace(PRECISIONS[name], outputs=outputs))
        found.append(F.cross_entropy(engine(x), y))
        engine.close()
    assert found[0].dtype == torch.float32 and found[1].dtype in (torch.bfloat16, torch.float16)
    assert found[0] != found[1].float() and torch.allclose(found[0], found[1].float(), rtol=2.0**-7)


def test_fp32_and_fp64_are_not_touched() -> None:
    x = batches()[0][0]
    for dtype, precision in ((torch.float32, "fp32"), (torch.float64, "bf16")):
        engine = sf.Engine(made().to(dtype), precision=precision)
        out = engine(x.to(dtype))
        assert out.dtype == dtype and torch.equal(out, made().to(dtype)(x.to(dtype)))
        engine.close()

    class Half(Net):
        def give(self, logits: Tensor) -> Tensor:
            return logits.bfloat16()

    engine = sf.Engine(made(Half))  # what is not computed in 16 bits by the policy is the model's own doing
    assert engine(x).dtype == torch.bfloat16
    engine.close()


# -- containers

Pair = namedtuple("Pair", ["logits", "others"])


@dataclass
class Output:
    logits: Tensor
    loss: Any = None


def _transformers(out: Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(loss=out.square().mean(), logits=out, hidden_states=(out, out * 2))  # type: ignore[arg-type]


PACKS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda out: (None, out), lambda given: given[1]),
    "list": (lambda out: ["text", [out]], lambda given: given[1][0]),
    "dict": (lambda out: {"a": {"logits": out}, "n": 3}, lambda given: given["a"]["logits"]),
    "named tuple": (lambda out: Pair(out, []), lambda given: given.logits),
    "dataclass": (lambda out: Output(out), lambda given: given.logits),
    "transformers": (_transformers, lambda given: given.logits),
}


class Packs(Net):
    kind = ""

    def give(self, logits: Tensor) -> Any:
        return PACKS[self.kind][0](logits)


@pytest.mark.parametrize("kind", list(PACKS))
def test_outputs_are_cast_inside_of_containers(kind: str) -> None:
    x, y = batches()[0]
    found = []
    for precision in (BF16, AS_GIVEN):
        engine = sf.Engine(made(Packs), optimizer=SGD, precision=precision)
        engine.module.kind = kind  # type: ignore[assignment]
        given = engine(x)
        out = PACKS[kind][1](given)
        assert out.dtype == (torch.float32 if precision is BF16 else torch.bfloat16)
        engine.backward(F.cross_entropy(out.float(), y))
        with engine.gathered(of="grads") as grads:
            found.append((type(given), [grad.clone() for grad in grads.values()]))
        engine.close()
    assert found[0][0] is found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


def test_all_of_a_transformers_output_is_cast_and_what_is_one_tensor_stays_one() -> None:
    engine = sf.Engine(made(Packs), precision="bf16-autocast")
    engine.module.kind = "transformers"  # type: ignore[assignment]
    given = engine(batches()[0][0])
    dtypes = {each.dtype for each in (given.loss, given["loss"], given.logits, *given.hidden_states, given[1])}
    assert dtypes == {torch.float32}
    assert given.hidden_states[0] is given.logits and given["logits"] is given.logits
    engine.close()


def test_other_dtypes_and_objects_stay_the_very_same() -> None:
    same = [torch.arange(3), torch.ones(2, dtype=torch.float64), torch.ones(2), torch.ones(2, dtype=torch.bool), "text"]
    assert widened(same) is same
    for value in same:
        assert widened(value) is value
    made = widened({"ids": same[0], "narrow": torch.ones(2, dtype=torch.float16)})
    assert made["ids"] is same[0] and made["narrow"].dtype == torch.float32


# -- what says so


def test_what_outputs_cannot_be_is_refused_in_a_sentence() -> None:
    for wrong in ("bf16", "fp64", None, True):
        with pytest.raises(LayoutError, match=r"Precision.outputs is .*: it is 'fp32', or 'compute' for what"):
            Precision(outputs=wrong)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"the rules of precision= differ in outputs \('compute', 'fp32'\)"):
        sf.Engine(Net(), precision={"head": "bf16", "*": AS_GIVEN})


def test_parts_in_16_bits_are_enough_and_those_in_fp32_have_no_say() -> None:
    x = batches()[0][0]
    for rules, dtype in (
        ({"head": "bf16", "*": "fp32"}, torch.float32),
        ({"head": AS_GIVEN, "*": "fp32"}, torch.bfloat16),
        ({"head": "fp32", "*": AS_GIVEN}, torch.float32),  # a head in fp32 gives that
        ({"blocks": "fp32", "*": "fp16"}, torch.float32),
    ):
        engine = sf.Engine(Net(), precision=rules)
        assert engine(x).dtype == dtype, rules
        engine.close()


def ranks_that_differ() -> None:
    precision = AS_GIVEN if dist.get_rank() else BF16
    with pytest.raises(ShardfoldError, match=r"precision\.outputs"):
        sf.Engine(Net(), optimizer=SGD, precision=precision)


def test_ranks_say_the_same(ranks: Ranks) -> None:
    ranks.run(ranks_that_differ, world_size=2)


# -- calls of other kinds


def whole_model_in_a_checkpoint() -> None:
    (x, y), mixed = batches()[0], torch.eye(CLASSES) + 0.1
    for precision in ("bf16", "bf16-autocast"):
        found = []
        for way in (None, False, True):
            engine = sf.Engine(made(), optimizer=SGD, layout="zero3", precision=precision)

            def loss_of(given: Tensor, engine: Any = engine) -> Tensor:
                return F.cross_entropy(engine(given) @ mixed, y)  # in fp32, outside of autocast

            given = x.clone().requires_grad_(way is not None)
            loss = loss_of(given) if way is None else checkpoint(loss_of, given, use_reentrant=way)
            assert loss.dtype == torch.float32
            engine.backward(loss)
            with engine.gathered(of="grads") as grads:
                found.append([grad.clone() for grad in grads.values()])
            assert not torch.is_autocast_enabled("cpu")
            engine.close()
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_checkpoint_around_the_model_runs_it_again_with_the_same_casts(ranks: Ranks) -> None:
    ranks.run(whole_model_in_a_checkpoint, world_size=2)


class Coder(Net):
    def features(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


def test_registered_methods_are_cast_and_submodules_give_what_they_compute_in() -> None:
    model = made(Coder)
    sf.register_forward(model, "features")
    engine = sf.Engine(model, precision="bf16")
    x = batches()[0][0]
    assert model.features(x).dtype == torch.float32
    assert model.head(x.bfloat16()).dtype == torch.bfloat16
    engine.close()


class Around(nn.Module):
    """Asks another engine within its own forward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, 8)
        self.inner = [inner]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner[0](x))


def test_engines_one_behind_the_other_and_one_inside_of_the_other() -> None:
    x, y = batches()[0]
    plain, top = made().bfloat16(), made(lambda: nn.Linear(CLASSES, CLASSES)).bfloat16()
    expected = F.cross_entropy(top(plain(x.bfloat16())).float(), y)
    expected.backward()
    one = sf.Engine(made(), optimizer=SGD, precision="bf16")
    two = sf.Engine(made(lambda: nn.Linear(CLASSES, CLASSES)), optimizer=SGD, precision="bf16")
    loss = F.cross_entropy(two(one(x)), y)
    loss.backward()
    assert torch.equal(loss, expected)
    with one.gathered(of="grads") as grads:
        assert all(torch.equal(grads[name], p.grad.float()) for name, p in plain.named_parameters())
    for engine in (one, two):
        engine.close()
    inner = sf.Engine(made(), precision=AS_GIVEN)
    outer = sf.Engine(Around(inner), optimizer=SGD, precision="bf16")
    assert outer(x).dtype == torch.float32
    for engine in (outer, inner):
        engine.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_gives_fp32_too() -> None:
    found = []
    x, y = batches()[0]
    for compiles in (False, True):
        engine = sf.Engine(made(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, CLASSES))), optimizer=SGD,
                           precision="bf16")  # fmt: skip
        if compiles:
            engine.module.compile(backend="eager")
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        assert loss.dtype == torch.float32
        with engine.gathered(of="grads") as grads:
            found.append([loss.detach(), *(grad.clone() for grad in grads.values())])
        engine.close()
    torch._dynamo.reset()
    assert all(map(torch.equal, *found))


# -- stages


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Stages(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, CLASSES))


def last_stage() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 8, generator=draw), torch.randint(CLASSES, (8,), generator=draw)
    plain = made(Stages).bfloat16()
    for precision, cast in ((BF16, Tensor.float), (AS_GIVEN, Tensor.bfloat16)):
        logits = cast(plain(x.bfloat16()))
        losses = [F.cross_entropy(logits[i : i + 4], y[i : i + 4]).double().item() for i in (0, 4)]
        engine = sf.Engine(
            made(Stages), optimizer=SGD, layout="zero1", precision=precision, parallel={"pipeline": 2}, accumulate=2
        )
        with torch.no_grad():
            given = engine(x)
            assert torch.equal(given, logits) and given.dtype == logits.dtype
        assert engine.eval_batch((x, y), _loss).item() == sum(losses) / 2
        assert engine.train_batch((x, y), _loss).item() == sum(losses) / 2
        engine.step()
        engine.close()


def test_the_last_stage_of_a_pipeline_gives_fp32(ranks: Ranks) -> None:
    ranks.run(last_stage, world_size=2)


# -- plans


class Wide(nn.Module):
    """Gives logits that are much of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize(("name", "outputs"), [("bf16", "fp32"), ("bf16", "compute"), ("bf16-autocast", "fp32")])
def test_a_plan_counts_the_cast_to_the_byte(name: str, outputs: str) -> None:
    batch = torch.randn(64, 16), torch.randint(1024, (64,))
    precision = replace(PRECISIONS[name], outputs=outputs)
    found = compare(Wide, batch, layout="zero1", precision=precision, compute=_loss)
    assert found.planned == pytest.approx(found.measured, abs=64)


def test_both_are_there_when_the_forward_ends() -> None:
    batch, elements = (torch.randn(64, 16), torch.randint(1024, (64,))), 64 * 1024
    kept = {}
    for outputs in ("fp32", "compute"):
        subject = Subject(Wide(), batch, compute=_loss)
        trace = subject.trace(replace(BF16, outputs=outputs), exact=True)
        kept[outputs] = next(event.level for event in trace.events if event.kind == "end_forward")
    assert kept["fp32"] - kept["compute"] == 4 * elements
