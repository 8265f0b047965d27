"""What ranks read together in a step does not depend on how many they are, nor on which of them end amid it."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import shardfold as sf
from shardfold.data import seed_of
from shardfold.engine._virtual_ranks import MicroBatch, VirtualRanks
from shardfold.errors import CollectiveError, ConfigError, StepError
from shardfold.plan.report import Straggler
from shardfold.testing import Ranks

STEPS, ACCUMULATE, VIRTUAL, WIDTH = 6, 2, 3, 6


def sampler(rank: int = 0, *, length: int = 50, shuffle: bool = True) -> sf.Sampler:
    return sf.Sampler(length, 2, seed=4, shuffle=shuffle, rank=rank, num_ranks=VIRTUAL, fill_last=True)


def test_which_virtual_ranks_a_rank_reads_for() -> None:
    shared = VirtualRanks(sampler(), 1)

    def of_ranks(ranks: int) -> list[list[tuple[int, float | None]]]:
        return [shared.of_rank(rank, shared.shares(ranks)) for rank in range(ranks)]

    assert of_ranks(3) == [[(0, None)], [(1, None)], [(2, None)]]
    assert of_ranks(2) == [[(0, 1.0), (2, 1.0)], [(1, 1.0), (1, 0.0)]]
    assert of_ranks(1) == [[(0, None), (1, None), (2, None)]]
    assert of_ranks(5)[3:] == [[(0, 0.0)], [(1, 0.0)]]
    wide = VirtualRanks(sf.Sampler(50, 8, rank=0, num_ranks=VIRTUAL), 1)
    assert [(len(each.batch), each.weight) for each in islice(wide.reads(1, wide.shares(2)), 2)] == [(8, 1.0), (2, 0.0)]


def undisturbed(steps: int, *, length: int, shuffle: bool) -> list[list[int]]:
    """The samples of each step, by a sampler for each virtual rank."""
    ranks = [sampler(rank, length=length, shuffle=shuffle) for rank in range(VIRTUAL)]
    found: list[list[int]] = []
    for _ in range(steps):
        found.append([])
        for _ in range(ACCUMULATE):
            for each in ranks:
                found[-1] += next(each.batches())
                each.advance()
    return [sorted(each) for each in found]


class Simulated:
    """A rank of a run, without an engine: what it has read of the step that it is in, and how many it has taken."""

    def __init__(self, length: int, shuffle: bool) -> None:
        self.read = VirtualRanks(sampler(length=length, shuffle=shuffle), ACCUMULATE)
        self.steps = 0
        self.seen: list[list[int]] = []  # by step

    def begin(self, rank: int, ranks: int, slow: Straggler | None) -> None:
        shares = self.read.shares(ranks)
        if slow is not None and ranks > 1:
            shares.follow(slow._replace(rank=(slow.rank or 0) % ranks), 1)
        self.reads = self.read.reads(rank, shares)
        self.number = ACCUMULATE * max(shares.counts)

    def go(self, micro_batches: int) -> None:
        """Reads so many micro-batches of the next step."""
        self.read.begin(self.steps)
        got: list[MicroBatch] = list(islice(self.reads, micro_batches))
        del self.seen[self.steps :]
        self.seen.append([index for each in got if each.weight != 0 for index in each.batch])
        assert [each.is_last for each in got[-1:]] == [micro_batches == self.number][: len(got)]


def committed(
    faults: int, *, seed: int, length: int = 50, shuffle: bool, slow: Straggler | None = None
) -> list[list[int]]:
    """The samples of each step that was taken, of a run with so many faults: in each a rank ends at any moment, and
    ranks that are left, or that come, go on from what the first one has that came farthest."""
    dice, found = random.Random(seed), list[list[int]]()
    ranks = [Simulated(length, shuffle)]
    while faults:
        for rank, each in enumerate(ranks):
            each.begin(rank, len(ranks), slow)
        for _ in range(dice.randrange(3)):
            for each in ranks:
                each.go(each.number)
                each.steps += 1
            found.append([index for each in ranks for index in each.seen[-1]])
        faults, steps = faults - 1, len(found)
        sent = dice.random() < 0.5
        for each in ranks:  # whoever has gradients of all may have updated, and be in the step behind
            each.go(each.number if sent else dice.randrange(each.number))
            if sent and dice.random() < 0.6:
                each.steps += 1
                if dice.random() < 0.5:
                    each.go(dice.randrange(each.number + 1))
        left = ranks.copy()
        if len(left) > 1:
            left.pop(dice.randrange(len(left)))
        first = max(left, key=lambda each: each.steps)
        if first.steps > steps:
            found.append([index for each in ranks for index in each.seen[steps]])
        state = first.read.at(first.steps).state_dict()
        new = [Simulated(length, shuffle) for _ in range(dice.randrange(3))]
        ranks = [*left, *new][: VIRTUAL + 2]
        for each in ranks:
            each.read.at(0).load_state_dict(state)
            assert each.read.at(first.steps - 1).state_dict() == state  # a second fault, before anything is read
            each.seen = [[]] * first.steps
            each.steps = first.steps
    return [sorted(each) for each in found]


@pytest.mark.parametrize("faults", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_samples_of_many_faults_are_each_in_one_step(faults: int) -> None:
    steps = committed(faults, seed=0, shuffle=False)
    assert len(steps) > faults and steps == undisturbed(len(steps), length=50, shuffle=False)
    read = Counter(index for each in steps for index in each)
    assert max(read.values()) - min(read.values()) <= 1 and len(read) == 50


def test_samples_are_each_in_one_step_where_a_rank_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has less of each step than the others, also where there are few micro-batches."""
    monkeypatch.setattr("tests.engine.test_virtual_ranks.VIRTUAL", 9)
    slow = Straggler(1, "", "computation", 3.0)
    steps = committed(30, seed=2, shuffle=True, slow=slow)
    assert len(steps) > 30 and steps == undisturbed(len(steps), length=50, shuffle=True)


def test_of_a_shuffled_set_too() -> None:
    steps = committed(40, seed=1, shuffle=True)
    assert steps == undisturbed(len(steps), length=50, shuffle=True)


class Drawn(Dataset[torch.Tensor]):
    """Samples that are changed by what is drawn for them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + 0.1 * torch.rand(WIDTH) + random.random() + np.random.random()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH)).double()


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-4)  # pyright: ignore


def loss_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (module(rows.double()) - 1).square().mean()


def on_ranks(layout: str, *, weighed: bool) -> list[torch.Tensor]:
    """The weights that ranks come to who share the virtual ones out, as ``ElasticRun.batches`` does it."""
    rows = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
    with closing(sf.Engine(model(), optimizer=adamw, layout=layout)) as engine:
        read = VirtualRanks(sf.Loader(Drawn(rows), sampler()), ACCUMULATE)
        shares = read.shares(engine.data_ranks)
        micro_batches = ACCUMULATE * len(read.of_rank(engine.data_rank, shares))
        for each in read.reads(engine.data_rank, shares):
            engine.set_micro_batches(micro_batches, each.weight)
            engine.backward(loss_of(engine.module, each.batch), weight=len(each.batch) if weighed else None)
            engine.step()
            if engine.steps == STEPS:
                break
        found = list(engine.state_dict().values())
    return [*found, *together_on_ranks()] if weighed else found


def normed(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def together_on_ranks() -> list[torch.Tensor]:
    """Of a model that normalizes over all ranks, who read even parts of the global batch."""
    rows = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
    with closing(sf.Engine(normed(sf.nn.SyncBatchNorm), optimizer=adamw, layout="ddp")) as engine:
        read = VirtualRanks(sf.Loader(TensorDataset(rows), sampler()), ACCUMULATE)
        for each in read.reads_together(engine.data_rank, engine.data_ranks):
            engine.set_micro_batches(ACCUMULATE, each.weight, alone=each.samples)
            engine.backward(loss_of(engine.module, *each.batch))
            engine.step()
            if engine.steps == STEPS:
                break
        return list(engine.state_dict().values())


def plain_together() -> list[torch.Tensor]:
    rows, module = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1)), normed(nn.BatchNorm1d)
    optimizer, whole = (
        adamw(module.parameters()),
        sf.Sampler(50, 2 * VIRTUAL, seed=4, fill_last=True, rank=0, num_ranks=1),
    )
    for _ in range(STEPS):
        for indices in islice(whole.batches_of([0]), ACCUMULATE):
            (loss_of(module, rows[indices]) / ACCUMULATE).backward()
        whole.advance(ACCUMULATE)
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in module.state_dict().values()]


def plain() -> list[torch.Tensor]:
    rows, module = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1)), model()
    optimizer, ranks, dataset = adamw(module.parameters()), [sampler(rank) for rank in range(VIRTUAL)], Drawn(rows)
    for _ in range(STEPS):
        place = (ranks[0].epoch, ranks[0].consumed)
        for number in range(ACCUMULATE):
            for virtual, each in enumerate(ranks):
                seed = seed_of(4, *place, number, virtual)
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
                batch = torch.stack([dataset[index] for index in next(each.batches())])
                each.advance()
                (loss_of(module, batch) / (ACCUMULATE * VIRTUAL)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in module.state_dict().values()]


@pytest.mark.parametrize(("count", "layout"), [(2, "ddp"), (2, "zero3"), (3, "ddp"), (4, "ddp")])
def test_training_is_the_same_on_any_number_of_ranks(count: int, layout: str, ranks: Ranks) -> None:
    weighed = layout == "ddp"
    of_one = [*plain(), *plain_together()] if weighed else plain()
    for found in ranks.run(partial(on_ranks, weighed=weighed), layout, world_size=count):
        for mine, expected in zip(found, of_one, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


# -- as a loop, on one rank


def make(_: int) -> sf.Engine:
    return sf.Engine(model(), optimizer=adamw, layout="ddp", accumulate=ACCUMULATE)


def test_the_loop_of_a_run() -> None:
    rows = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = sf.Loader(Drawn(rows), sampler())
    with closing(sf.ElasticRun(make)) as run:
        for batch in run.batches(loader, steps=STEPS):
            with run.attempt() as engine:
                engine.backward(loss_of(engine.module, batch))
                if engine.step().updated:  # so a save here has the position behind the step
                    consumed = engine.steps * ACCUMULATE * VIRTUAL * 2
                    assert divmod(consumed, 50) == (loader.follows.epoch, loader.follows.consumed)
        for mine, expected in zip(run.engine.state_dict().values(), plain(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
        assert run.engine.accumulate == ACCUMULATE and run.engine.micro_batch_weight is None
        assert not list(run.batches(loader, steps=STEPS)) and not list(run.batches(loader, epochs=1))
        sizes: list[int] = []
        for indices in run.batches(sampler(), steps=STEPS + 1, together=True):
            run.engine.backward(loss_of(run.engine.module, rows[indices]))
            run.engine.step()
            sizes.append(len(indices))
        assert sizes == [2 * VIRTUAL] * ACCUMULATE


def test_a_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    rows, found = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1)), dict[str, torch.Tensor]()
    for until in (2, STEPS):
        loader = sf.Loader(Drawn(rows), sampler())
        with closing(sf.ElasticRun(make)) as run:
            if until == STEPS:
                run.engine.load(tmp_path, state={"data": loader})
            for batch in run.batches(loader, steps=until):
                with run.attempt() as engine:
                    engine.backward(loss_of(engine.module, batch))
                    if engine.step().updated and engine.steps == 2:
                        engine.save(tmp_path / "two", state={"data": loader}, wait=True)
            found = run.engine.state_dict()
    for mine, expected in zip(found.values(), plain(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_a_step_that_a_loop_has_left_begins_anew() -> None:
    source = sampler()
    with closing(sf.ElasticRun(make)) as run:
        for _ in run.batches(source):
            run.engine.backward(run.engine.module(torch.ones(1, WIDTH).double()).sum())
            break
        assert run.engine.micro_batch == 1 and source.consumed == 0
        first = next(run.batches(source))
        assert run.engine.micro_batch == 0 and first == next(sampler().batches())


def test_what_no_batches_are_of() -> None:
    with closing(sf.ElasticRun(make)) as run:
        with pytest.raises(ConfigError, match=r"give a shardfold\.Loader"):
            run.batches(TensorDataset(torch.ones(3)))  # pyright: ignore
        with pytest.raises(ConfigError, match=r"may have 3 samples, and there are 4 ranks.*fill_last=True"):
            next(VirtualRanks(sf.Sampler(50, 2, rank=0, num_ranks=VIRTUAL), 1).reads_together(0, 4))
        with pytest.raises(ConfigError, match="steps=-1"):
            run.batches(sampler(), steps=-1)
        with pytest.raises(ConfigError, match=r"set_micro_batches\(weight=-1"):
            run.engine.set_micro_batches(1, -1.0)


def test_what_ends_ranks_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[int] = []
    with closing(sf.ElasticRun(make)) as run:
        monkeypatch.setattr(run, "_may_be_lost", lambda error: True)  # as under a launcher
        monkeypatch.setattr(run, "_go_on", lambda error, steps: went.append(run.engine.steps))
        reads = run.batches(sampler(), steps=9)
        with pytest.raises(StepError, match=r"at step 2 ended .*12 samples from position 12 of epoch 0"):
            for _ in reads:
                with run.attempt() as engine:
                    engine.backward(engine.module(torch.ones(1, WIDTH).double()).sum())
                    engine.step()
                    if engine.steps == 1 and engine.micro_batch:
                        raise CollectiveError("a rank is gone")
    assert went == [1, 1]
