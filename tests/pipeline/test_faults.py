"""What goes wrong on one stage is told on all, by name, and nobody waits for ever."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import CollectiveError, OrderError, UsageError
from shardfold.testing import Ranks, RanksFailed
from tests.parallel.models import ADAM
from tests.pipeline.training import batches, compute, model_of
from tests.support.options import grouped


def _engine(**options: Any) -> sf.Engine:
    return sf.Engine(model_of("gpt"), optimizer=ADAM, **grouped(**{"layout": "zero1", "accumulate": 4} | options))


class _Raises(torch.autograd.Function):
    """Its backward breaks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ValueError("a bad gradient")


class _Breaks(nn.Module):
    """A piece of stage 1 that breaks in its third micro-batch."""

    def __init__(self, inner: nn.Module, how: str, rank: int) -> None:
        super().__init__()
        self.inner, self.how, self.rank, self.calls = inner, how, rank, 0

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.calls += not x.is_meta
        if self.calls == 3 and self.rank == 1:
            if self.how == "dies":
                os._exit(9)
            if self.how == "raises":
                raise ValueError("a bad sample")
            made: Any = _Raises.apply(x)
            return self.inner(made, *more)
        return self.inner(x, *more)


def _breaks(how: str, folder: str) -> None:
    rank = torch.distributed.get_rank()
    model: Any = model_of("gpt")
    model.blocks[0] = _Breaks(model.blocks[0], how, rank)
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        layout="zero1",
        accumulate=4,
        parallel=sf.Parallel(mesh={"pipeline": 3}, stages=["blocks.0", "blocks.1"]),
    )
    said = []
    for number in range(2):
        with pytest.raises((ValueError, OrderError, CollectiveError)) as raised:
            engine.train_batch(batches(4)[0], compute)
        said.append(f"{raised.type.__name__}: {raised.value}")
        Path(folder, f"{rank}-{number}").write_text(said[-1])
    Path(folder, f"{rank}").write_text("\n".join(said))
    engine.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "failed on rank 1 in F stage 1 batch 2 (ValueError: a bad sample)"),
        pytest.param("backward", "failed on rank 1 in B stage 1 batch 2 (ValueError: a bad gradient)",
                     marks=pytest.mark.soak),
        ("dies", " between the stages "),
    ],
)  # fmt: skip
def test_a_stage_that_breaks_in_its_third_micro_batch_is_named_on_all(
    ranks: Ranks, tmp_path: Path, how: str, words: str
) -> None:
    """The engine is given up: later calls raise the same sentence. Of one that died the others know from whom they
    waited for what."""
    if how == "dies":
        with pytest.raises(RanksFailed, match="rank 1: exited with code 9"):
            ranks.run(_breaks, how, str(tmp_path), world_size=3)
        told = [tmp_path / f"{rank}-0" for rank in (0, 2)]  # whoever is slow is ended before it comes to that
        said = [path.read_text() for path in told if path.exists()]
        assert any(words in each and ", from rank 1, failed" in each for each in said), said
        return
    ranks.run(_breaks, how, str(tmp_path), world_size=3)
    assert (tmp_path / "1").read_text().startswith(f"ValueError: a bad {'sample' if how == 'raises' else 'gradient'}\n")
    for rank in (0, 2):
        first, again = (tmp_path / f"{rank}").read_text().splitlines()
        assert words in first and first == again


def _beside(folder: str) -> str:
    """The loss of one of two data ranks breaks, in its third micro-batch."""
    engine = _engine(mesh={"pipeline": 2, "intra": 2}, layout="zero2")
    calls = 0

    def bad(model: Any, batch: Any) -> Tensor:
        nonlocal calls
        loss = compute(model, batch)
        calls += 1
        if calls == 4 and engine.rank == 3:  # in the first call shapes are computed only
            raise ValueError("a bad label")
        return loss

    mine = tuple(t.chunk(2)[engine.data_rank] for t in batches(8)[0])
    with pytest.raises((ValueError, OrderError)) as raised:
        engine.train_batch(mine, bad)
        engine.step()
    engine.close()
    return str(raised.value)


@pytest.mark.soak
def test_a_loss_that_breaks_ends_the_stages_of_other_data_too(ranks: Ranks, tmp_path: Path) -> None:
    """All four ranks of two pipelines raise and name the rank, its stage and its micro-batch."""
    said = ranks.run(_beside, str(tmp_path), world_size=4)
    assert said[3] == "a bad label"
    assert all("failed on rank 3 in F stage 1 batch 2 (ValueError: a bad label)" in each for each in said[:3]), said


def _not_finite() -> tuple[Any, bool]:
    """Without a loss scale, as in plain PyTorch, the step is done; what was not finite is named."""
    engine = _engine(mesh={"pipeline": 2})
    calls = 0

    def bad(model: Any, batch: Any) -> Tensor:
        nonlocal calls
        loss = compute(model, batch)
        calls += 1
        return loss * inf if calls == 4 else loss  # in the first call shapes are computed only

    engine.train_batch(batches(4)[0], bad)
    report = engine.step()
    engine.close()
    found = report.findings[0]
    return (found.kind, found.rank, found.step, found.micro_batch), report.updated


def test_a_loss_that_is_not_finite_is_named_with_rank_and_micro_batch(ranks: Ranks) -> None:
    """On all stages, and they go on."""
    assert ranks.run(_not_finite, world_size=2) == [(("loss", 1, 1, 2), True)] * 2


class _Waits(nn.Module):
    """A piece of stage 1 whose third micro-batch takes until others have raised."""

    def __init__(self, inner: nn.Module, pipe: str, rank: int) -> None:
        super().__init__()
        self.inner, self.pipe, self.rank, self.calls = inner, pipe, rank, 0

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.calls += not x.is_meta
        if self.calls == 3 and self.rank == 1:
            Path(self.pipe).read_text()
        return self.inner(x, *more)


def _waits(pipe: str) -> str:
    rank = torch.distributed.get_rank()
    model: Any = model_of("gpt")
    model.blocks[0] = _Waits(model.blocks[0], pipe, rank)
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        layout="zero1",
        accumulate=4,
        parallel=sf.Parallel(mesh={"pipeline": 3}, stages=["blocks.0", "blocks.1"]),
        runtime=sf.Runtime(timeout=12.0),
    )
    with pytest.raises((OrderError, CollectiveError)) as raised:
        engine.train_batch(batches(4)[0], compute)
    if rank == 2:
        Path(pipe).write_text("go on")
    engine.close()
    return str(raised.value)


@pytest.mark.soak
def test_a_stage_that_takes_too_long_is_named_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """Behind ``timeout`` the others raise and say where it is; it raises the same when it comes."""
    os.mkfifo(tmp_path / "pipe")
    for said in ranks.run(_waits, str(tmp_path / "pipe"), world_size=3):
        assert "did not finish within 12 s" in said and "rank 1: is at test_faults.py" in said, said


def _shapes() -> str:
    engine = _engine(mesh={"pipeline": 2}, accumulate=2)
    batch = batches(4)[0]
    with pytest.raises(UsageError) as raised:
        engine.train_batch(tuple(t[: 4 if engine.rank else 8] for t in batch), compute)
    engine.train_batch(batch, compute)
    engine.step()
    engine.close()
    return str(raised.value)


def test_stages_that_have_batches_of_different_shapes_are_told(ranks: Ranks) -> None:
    """Before anything runs, and training goes on behind it."""
    for said in ranks.run(_shapes, world_size=2):
        assert "the stages on the ranks 0, 1 have batches of different shapes" in said


def _freezes() -> str:
    engine = _engine(mesh={"pipeline": 2})
    engine.train_batch(batches(4)[0], compute)
    engine.step()
    for p in engine.module.parameters() if engine.rank == 0 else ():
        p.requires_grad_(False)
    with pytest.raises(UsageError) as raised:
        engine.train_batch(batches(4)[0], compute)
    engine.close()
    return str(raised.value)


@pytest.mark.soak
def test_a_stage_that_is_frozen_on_the_way_is_refused(ranks: Ranks) -> None:
    """Other ranks do not see it, and would send gradients that nobody takes."""
    for said in ranks.run(_freezes, world_size=2):
        assert "frozen or unfrozen since the engine was made" in said


def _overflows(where: int, order: str, last: str = "norm.weight") -> list[tuple[bool, bool]]:
    torch.set_default_dtype(torch.float32)
    model = model_of("gpt").float()
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        parallel=sf.Parallel(mesh={"pipeline": 2, "intra": 2}, pipeline=order),
        layout="zero2",
        precision="fp16",
        clip_norm=1.0,
        accumulate=4,
    )
    found = []
    own = dict(engine.module.named_parameters())
    for step, batch in enumerate(batches(8, 3)):
        mine = tuple(t.chunk(2)[engine.data_rank] for t in batch)
        handle = None
        if step == where and engine.data_rank == 1 and last in own:  # a gradient of the last stage, on one rank of two
            handle = own[last].register_hook(lambda grad: grad * inf)
        if step == 1 and where != 1 and engine.data_rank == 1:
            calls = 0

            def bad(model: Any, batch: Any) -> Tensor:
                nonlocal calls
                loss = compute(model, batch)
                calls += 1
                return loss * inf if calls == 3 else loss

            engine.train_batch(mine, bad)
        else:
            engine.train_batch(mine, compute)
        if handle is not None:
            handle.remove()
        report = engine.step()
        found.append((report.updated, report.skipped))
    engine.close()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("where", "order"),
    [(1, "1f1b"), (-1, "1f1b"), (-1, "zb-h1"), (1, "zbv"),
     *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, "zb-h1"), (-1, "zbv")))],
)  # fmt: skip
def test_what_is_not_finite_on_one_rank_skips_the_step_of_all_stages(ranks: Ranks, where: int, order: str) -> None:
    """A gradient of the last stage (1), which other stages do not see, or the loss of a micro-batch (-1)."""
    found = ranks.run(_overflows, where, order, world_size=4)
    assert found == [[(True, False), (False, True), (True, False)]] * 4


def _refused() -> dict[str, str]:
    engine = _engine(mesh={"pipeline": 2})
    batch, said, own = batches(4)[0], dict[str, str](), cast(Any, engine.module)
    calls: dict[str, Any] = {
        "call": lambda: engine(*batch),
        "backward": lambda: engine.backward(torch.zeros((), requires_grad=True)),
        "length": lambda: engine.train_batch(tuple(t[:6] for t in batch), compute),
        "list": lambda: engine.train_batch([batch], compute),
        "release": engine.release,
        "no_grad": lambda: torch.no_grad()(engine.train_batch)(batch, compute),
        "piece": lambda: own.head(torch.zeros(1)) if engine.rank == 0 else _raise(UsageError("stage 1")),
        "order": lambda: engine.train_batch(batch, compute) if engine.rank else engine.mean(1.0),
    }
    for name, call in calls.items():
        with pytest.raises((UsageError, OrderError)) as raised:
            call()
        said[name] = str(raised.value)
    return said


def _raise(error: Exception) -> None:
    raise error


def test_what_a_stage_cannot_do_is_refused_in_a_sentence(ranks: Ranks) -> None:
    for said in ranks.run(_refused, world_size=2):
        assert "engine.train_batch(batch)" in said["call"] and "engine.eval_batch(batch)" in said["backward"]
        assert "divides by accumulate=4" in said["length"]
        assert "a list of 1 micro-batch" in said["list"] and "engine.state_dict()" in said["release"]
        assert "stage 1" in said["piece"] and "inside of torch.no_grad()" in said["no_grad"]
        assert "engine.train_batch()" in said["order"] and "engine.mean()" in said["order"]
