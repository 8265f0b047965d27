"""Each sample once per epoch, in one order, on whatever ranks a run goes on; and the generators of a rank continue."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import shardfold as sf
from shardfold.data import shuffled
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support.gpu.setting import GivenDevice

LEG = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 12))  # ranks, batch size, batches until the next

COMPUTED = settings(max_examples=50, deadline=None)  # an example walks up to 60 global batches


def order(length: int, seed: int, epoch: int) -> list[int]:
    return shuffled(np.arange(length), length, seed, epoch).tolist()


def team(length: int, num_ranks: int, batch_size: int, **options: Any) -> list[sf.Sampler]:
    return [sf.Sampler(length, batch_size, rank=rank, num_ranks=num_ranks, **options) for rank in range(num_ranks)]


def endless(sampler: sf.Sampler) -> Any:
    return itertools.chain.from_iterable(itertools.repeat(sampler))


def walk(length: int, legs: list[tuple[int, int, int]], **options: Any) -> list[tuple[int, list[list[int]]]]:
    """Each global batch, as (the epoch it starts in, the ranks' shares); each leg continues the state of the last."""
    state, seen = None, []
    for num_ranks, batch_size, number in legs:
        samplers = team(length, num_ranks, batch_size, **options)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(json.loads(state))
        streams = [endless(sampler) for sampler in samplers]
        for _ in range(number):
            epoch = samplers[0].epoch
            seen.append((epoch, [next(stream) for stream in streams]))
        (state,) = {json.dumps(sampler.state_dict()) for sampler in samplers}
    return seen


# -- the order


@given(length=st.integers(1, 3000), seed=st.integers(), epoch=st.integers(0, 2**40))
def test_the_order_is_a_permutation(length: int, seed: int, epoch: int):
    assert sorted(order(length, seed, epoch)) == list(range(length))


@given(length=st.integers(1, 2**62), seed=st.integers(0, 9), draw=st.data())
def test_any_position_of_any_length_is_found_at_once(length: int, seed: int, draw: st.DataObject):
    """Distinct positions have distinct elements within bounds, the same in whatever company they are asked for."""
    asked = draw.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=50, unique=True))
    found = shuffled(np.array(asked), length, seed, 0).tolist()
    assert len(set(found)) == len(asked) and all(0 <= each < length for each in found)
    assert shuffled(np.array(asked[-1:]), length, seed, 0).tolist() == found[-1:]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_every_permutation_is_as_likely(length: int):
    """Pearson's chi-squared over 2,000 epochs is within 4 standard deviations of its mean."""
    counts = dict.fromkeys(itertools.permutations(range(length)), 0)
    for epoch in range(2000):
        counts[tuple(order(length, 0, epoch))] += 1
    expected, freedom = 2000 / len(counts), len(counts) - 1
    chi = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(chi - freedom) < 4 * math.sqrt(2 * freedom)


def test_neighbours_do_not_stay_together():
    """Distances between successive elements are uniform, and epochs and seeds are unlike each other."""
    length = 20_000
    first = order(length, 0, 0)
    assert all(sum(map(int.__eq__, first, order(length, *other))) < 10 for other in [(0, 1), (1, 0)])
    distances = np.bincount(np.diff(first) % length * 50 // length, minlength=50)
    chi = float(((distances - length / 50) ** 2 / (length / 50)).sum())
    assert abs(chi - 49) < 4 * math.sqrt(2 * 49)
    assert abs(np.corrcoef(first, np.arange(length))[0, 1]) < 4 / math.sqrt(length)


# -- the position


@pytest.mark.soak
@COMPUTED
@given(length=st.integers(1, 40), legs=st.lists(LEG, max_size=5), fill=st.booleans(), seed=st.integers(0, 5))
def test_each_sample_once_per_epoch_over_any_change_of_ranks(
    length: int, legs: list[tuple[int, int, int]], fill: bool, seed: int
):
    """What all ranks read, batch by batch, is the order of epoch 0, then that of epoch 1, ...: nothing else."""
    seen = walk(length, legs, fill_last=fill, seed=seed)
    flat = [index for _, shares in seen for share in shares for index in share]
    orders = [order(length, seed, epoch) for epoch in range(len(flat) // length + 1)]
    assert flat == [index for each in orders for index in each][: len(flat)]
    for _, shares in seen:
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.soak
@COMPUTED
@given(length=st.integers(30, 60), legs=st.lists(LEG, max_size=5))
def test_drop_last_leaves_out_less_than_a_global_batch(length: int, legs: list[tuple[int, int, int]]):
    seen = walk(length, legs, drop_last=True)
    for epoch, batches in itertools.groupby(seen, key=lambda batch: batch[0]):
        shares = [share for _, shares in batches for share in shares]
        flat = [index for share in shares for index in share]
        assert flat == order(length, 0, epoch)[: len(flat)]
        if epoch < seen[-1][0]:
            assert length - len(flat) < max(num_ranks * batch_size for num_ranks, batch_size, _ in legs)


@COMPUTED
@given(length=st.integers(1, 60), split=st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)]), fill=st.booleans())
def test_global_batches_do_not_depend_on_the_ranks(length: int, split: tuple[int, int], fill: bool):
    """With 12 samples per global batch, every full one has the same samples in the same order."""

    def batches(num_ranks: int, batch_size: int) -> list[list[int]]:
        seen = walk(length, [(num_ranks, batch_size, length // 12 + (8 if fill else 0))], fill_last=fill)
        return [[index for share in shares for index in share] for _, shares in seen]

    assert batches(*split) == batches(1, 12)


def test_a_pass_is_what_is_left_of_an_epoch():
    """14 samples by 2 ranks of 4: a full batch and a short one, which 4 ranks of 2 share in halves unequal by one."""
    for num_ranks, batch_size, last in [(2, 4, [3, 3]), (4, 2, [1, 2, 1, 2])]:
        samplers = team(14, num_ranks, batch_size)
        assert [len(sampler) for sampler in samplers] == [2] * num_ranks
        passes = [list(sampler) for sampler in samplers]
        assert [[len(batch) for batch in one] for one in passes] == [[batch_size, size] for size in last]
        assert [(sampler.epoch, sampler.consumed) for sampler in samplers] == [(1, 0)] * num_ranks
    assert len(sf.Sampler(14, 4, rank=0, num_ranks=2, drop_last=True)) == 1


def test_fewer_samples_than_ranks_are_filled_from_the_next_epoch():
    samplers = team(10, 3, 3, shuffle=False)
    assert [list(sampler) for sampler in samplers] == [[[0, 1, 2], [9]], [[3, 4, 5], [0]], [[6, 7, 8], [1]]]
    assert {(sampler.epoch, sampler.consumed) for sampler in samplers} == {(1, 2)}
    assert [next(iter(sampler)) for sampler in samplers] == [[2, 3], [4, 5, 6], [7, 8, 9]]


def test_set_epoch_keeps_the_position_in_the_present_epoch():
    (sampler,) = team(10, 1, 3)
    next(iter(sampler))
    sampler.set_epoch(0)
    assert (sampler.epoch, sampler.consumed) == (0, 3)
    sampler.set_epoch(4)
    assert next(iter(sampler)) == order(10, 0, 4)[:3]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"dataset": 0}, "length is 0"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"rank": 2, "num_ranks": 2}, "rank 2 is not one of 2"),
    ({"rank": 1}, "give both"),
    ({"drop_last": True, "fill_last": True}, "give one"),
    ({"drop_last": True, "batch_size": 11}, "drops every sample"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_unusable_arguments_are_one_sentence(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        sf.Sampler(**{"dataset": 10, "batch_size": 2, **options})


def test_a_state_of_another_order_is_refused():
    state = sf.Sampler(10, 2).state_dict()
    for other in (sf.Sampler(11, 2), sf.Sampler(10, 2, seed=1), sf.Sampler(10, 2, shuffle=False)):
        with pytest.raises(ConfigError, match="twice or not at all"):
            other.load_state_dict(state)
    del state["epoch"]
    with pytest.raises(ConfigError, match="lacks epoch"):
        sf.Sampler(10, 2).load_state_dict(state)


def _read(folder: Path, number: int) -> tuple[list[list[int]], dict[str, Any]]:
    engine = sf.Engine(nn.Linear(4, 4), optimizer=torch.optim.SGD)
    sampler = sf.Sampler(50, 3, seed=7)  # rank and number of ranks are the process group's
    if folder.exists():
        engine.load(folder, state={"data": sampler})
    batches = list(itertools.islice(sampler, number))
    engine.save(folder, state={"data": sampler}, wait=True)
    engine.close()
    return batches, sampler.state_dict()


@pytest.mark.soak
def test_a_checkpoint_goes_on_with_the_next_sample(ranks: Ranks, tmp_path: Path):
    """50 samples, begun on 2 ranks, continued on 3, ended on 1."""
    seen, state = [], {}
    for world_size, number in [(2, 3), (3, 2), (1, 99)]:
        results = ranks.run(_read, tmp_path / "checkpoint", number, world_size=world_size)
        assert all(result[1] == results[0][1] for result in results)
        state = results[0][1]
        global_batches = zip(*(batches for batches, _ in results), strict=True)
        seen += [index for shares in global_batches for share in shares for index in share]
    assert seen == order(50, 7, 0)
    assert state["epoch"] == 1


# -- loaders


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_what_it_handed_out(workers: int):
    """Left in the middle of an epoch with batches under way, it goes on with the next; another loader does too."""
    options: dict[str, Any] = {"multiprocessing_context": "forkserver"} if workers else {}
    samplers = [sf.Sampler(23, 4) for _ in range(2)]
    first, second = (sf.Loader(range(23), sampler, num_workers=workers, **options) for sampler in samplers)  # type: ignore[arg-type]
    assert len(first) == 6
    seen: list[int] = []
    for number, batch in enumerate(first):
        seen += batch.tolist()
        assert first.state_dict()["consumed"] == len(seen)
        if number == 1:
            break
    second.load_state_dict(first.state_dict())
    rest = [index for batch in second for index in batch.tolist()]
    assert seen + rest == order(23, 0, 0)
    assert rest == [index for batch in first for index in batch.tolist()]
    assert samplers[0].state_dict() == samplers[1].state_dict() and second.state_dict()["epoch"] == 1


class Drawing(Dataset):  # type: ignore[type-arg]
    """A sample is what a random transform draws in the process that reads it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


def drawn(rank: int, consumed: int, seed: int = 0, epoch: int = 0) -> float:
    """The first draw of the worker of a rank that goes on at that position."""
    sampler = sf.Sampler(12, 2, rank=rank, num_ranks=2, seed=seed)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": consumed})
    loader = sf.Loader(Drawing(), sampler, num_workers=1, multiprocessing_context="forkserver")
    return next(iter(loader))[0].item()


def test_workers_draw_other_numbers_on_each_rank_and_at_each_position():
    """Ranks whose workers drew the same would augment their samples alike, and a resumed epoch would repeat itself; the
    same place draws the same again."""
    places: list[dict[str, int]] = [
        {"rank": 0, "consumed": 0}, {"rank": 1, "consumed": 0}, {"rank": 0, "consumed": 4},
        {"rank": 0, "consumed": 0, "seed": 1}, {"rank": 0, "consumed": 0, "epoch": 1},
    ]  # fmt: skip
    draws = [drawn(**place) for place in places]
    assert len(set(draws)) == len(draws), draws
    assert drawn(rank=0, consumed=4) == draws[2]


def test_a_plain_dataloader_takes_the_sampler():
    batches = list(DataLoader(torch.arange(10) * 10, batch_sampler=sf.Sampler(10, 4)))  # type: ignore[arg-type]
    assert torch.cat(batches).tolist() == [10 * index for index in order(10, 0, 0)]


def test_a_loader_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    for _ in sf.Loader(range(8), sf.Sampler(8, 2)):  # type: ignore[arg-type]
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_of_another_dataset_is_refused():
    with pytest.raises(ConfigError, match="9 samples, its sampler 8"):
        sf.Loader(range(9), sf.Sampler(8, 2))  # type: ignore[arg-type]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        yield from range(9)


def test_an_iterable_dataset_is_refused_in_a_sentence():
    """It has no samples by index, so that a position in it means nothing to other ranks."""
    for make in (
        lambda: sf.Sampler(Stream(), 2),  # type: ignore[arg-type]
        lambda: sf.Sampler(iter([1, 2]), 2),  # type: ignore[arg-type]
        lambda: sf.Loader(Stream(), sf.Sampler(9, 2)),
    ):
        with pytest.raises(ConfigError, match=r"has no samples by index.*give a map-style dataset"):
            make()


# -- generators


def draws(device: str = "cpu") -> list[Any]:
    values = [random.random(), random.gauss(0, 1), random.randrange(10**9), np.random.rand(), np.random.randn()]
    return [*values, *torch.randn(3, device=device).tolist(), torch.rand(1, device=device).item()]


def saved(state: Any) -> Any:
    """A copy through plain values, as JSON would have it, and tensors."""
    if isinstance(state, dict):
        assert all(isinstance(name, str) for name in state)
        return {name: saved(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return torch.tensor(state.tolist(), dtype=state.dtype)
    return json.loads(json.dumps(state))


def _streams(rank_seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    seed = rank_seed + torch.distributed.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    begun = draws()  # one Gaussian each: the second of its pair is part of the state
    state = saved(sf.rng_state())
    expected = draws()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    sf.set_rng_state(state)
    return begun, expected, draws()


def test_streams_continue_on_each_rank(ranks: Ranks):
    results = ranks.run(_streams, 5, world_size=2)
    for begun, expected, continued in results:
        assert continued == expected != begun
    assert results[0] != results[1]


def test_a_state_that_does_not_fit_is_refused():
    state = sf.rng_state()
    with pytest.raises(ConfigError, match="lacks torch"):
        sf.set_rng_state({name: value for name, value in state.items() if name != "torch"})
    with pytest.raises(ConfigError, match="PCG64"):
        sf.set_rng_state({**state, "numpy": {"bit_generator": "PCG64"}})


@pytest.mark.gpu
def test_the_stream_of_this_ranks_device_continues(gpu: GivenDevice):
    """The state of a device's generator is saved without its number, and only that of the device in use."""
    draws(gpu.type)
    state = saved(sf.rng_state())
    assert set(state["device"]) == {"type", "state"}
    expected = draws(gpu.type)
    sf.set_rng_state(state)
    assert draws(gpu.type) == expected
