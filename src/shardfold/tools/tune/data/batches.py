"""Batches of rows: windows of them, of which each is one step of the optimizer.

A window is the next ``micro_batch * accumulate * data_ranks`` rows of tokens, whoever reads which of them. Its gradient
is the mean over all of its targets, so it is the same for every way to share it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardfold.data import seed_of
from shardfold.errors import ConfigError
from shardfold.plan.checks import described, is_integer
from shardfold.tools.tune.data._sampling import Reached, Sample, SampleOrder
from shardfold.tools.tune.data.prepared import Prepared
from shardfold.tools.tune.data.rows import Labelled, Pair, Prompt, Tokens

__all__ = ["Batch", "Batches", "Window", "collate"]

IGNORED = -100
"""The label of what is no target, as in PyTorch."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples of one forward pass, packed or padded.

    Attributes:
        inputs: for the model: ``input_ids`` (B, L) int64; ``position_ids`` (B, L) int64, which begin anew with each
            sample; and, where samples are padded, ``attention_mask`` (B, L) int64.
        labels: (B, L) int64: what is predicted *at* a place, so they are shifted already; -100: nothing.
        documents: (B, L) int32, the number of the sample in this batch; -1: padding. The chosen and the rejected
            sequence of pair k are samples 2k and 2k + 1.
        rows: the number in the data of each sample; of each pair.
        trained: how many targets there are. A batch of a rank for which nothing is left has none, and no rows.
        good: (samples,) bool, of ``kind="label"``.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    documents: Tensor
    rows: list[int]
    trained: int
    good: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device."""
        inputs = {name: value.to(device, non_blocking=True) for name, value in self.inputs.items()}
        labels, documents = (each.to(device, non_blocking=True) for each in (self.labels, self.documents))
        good = None if self.good is None else self.good.to(device, non_blocking=True)
        return Batch(inputs, labels, documents, self.rows, self.trained, good)


@dataclass(frozen=True, eq=False)
class Window:
    """What one step of the optimizer reads.

    Attributes:
        batches: of this rank, ``accumulate`` of them, or of several ranks.
        trained: targets in them.
        epoch: from 0.
        last: whether it is the last one of its epoch.
        seeds: one for each batch, the same whoever reads it.
    """

    batches: list[Batch]
    trained: int
    epoch: int = 0
    last: bool = False
    seeds: Sequence[int] = ()


def collate(
    bins: Sequence[Sequence[tuple[int, Sequence[Tokens]]]], *, padded: bool, pad: int = 0, rows: int | None = None
) -> Batch:
    """Make a batch.

    Args:
        bins: for each row of tokens its items: a number and its sequences, two for a pair.
        padded: each sequence has a row of its own, and there is an ``attention_mask``.
        pad: the token that fills rows up; it is never a target, and no sample sees it.
        rows: at least so many rows of tokens; None: as many as there are.
    """
    lines: list[list[tuple[int, Tokens]]] = []
    numbers: list[int] = []
    sample = 0
    for each in bins:
        line: list[tuple[int, Tokens]] = []
        for number, sequences in each:
            numbers.append(number)
            for tokens in sequences:
                line.append((sample, tokens))
                sample += 1
        lines += [[one] for one in line] if padded else [line]
    height = max(len(lines), rows or 1)
    length = max((sum(len(tokens) for _, tokens in line) for line in lines), default=1)
    ids = np.full((height, length), pad, dtype=np.int64)
    labels = np.full((height, length), IGNORED, dtype=np.int64)
    positions = np.tile(np.arange(length, dtype=np.int64), (height, 1))
    documents = np.full((height, length), -1, dtype=np.int32)
    for row, line in enumerate(lines):
        at = 0
        for sample, tokens in line:
            stop = at + len(tokens)
            ids[row, at:stop] = tokens.ids
            labels[row, at : stop - 1] = np.where(tokens.trained[1:], tokens.ids[1:], IGNORED)
            positions[row, at:stop] = np.arange(len(tokens))
            documents[row, at:stop] = sample
            at = stop
        if not padded:
            positions[row, at:] = np.arange(length - at)  # what fills up is a sample that nobody sees
    inputs = {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(positions)}
    if padded:
        inputs["attention_mask"] = torch.from_numpy((documents >= 0).astype(np.int64))
        if not lines:
            inputs["attention_mask"][:, 0] = 1
    trained = int((labels != IGNORED).sum())
    return Batch(inputs, torch.from_numpy(labels), torch.from_numpy(documents), numbers, trained)


class Batches:
    """Windows of a data set, epoch after epoch, without end.

    Args:
        prepared: rows.
        length: the most tokens of a row of the batch.
        pack: several samples share a row of tokens; else each has its own, filled up to the longest of its batch.
        micro_batch: rows of tokens per batch; without packing samples, or pairs of samples.
        accumulate: batches per window and rank.
        seed: of the order.
        data_rank, data_ranks: this one of so many ranks that read other data.
        shuffle: False: rows come in their order.
        pad: the token that fills rows up.

    Raises:
        ConfigError: a number is out of range, or there is no row to train on.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        length: int,
        pack: bool,
        micro_batch: int,
        accumulate: int = 1,
        seed: int = 0,
        data_rank: int = 0,
        data_ranks: int = 1,
        shuffle: bool = True,
        pad: int = 0,
    ) -> None:
        given = {"micro_batch": micro_batch, "accumulate": accumulate, "data_ranks": data_ranks}
        for name, value in given.items():
            if not is_integer(value, 1):
                raise ConfigError(f"{name} is {described(value)}, but has to be an integer of at least 1.")
        if not is_integer(length, 2):
            raise ConfigError(f"length is {described(length)}, but has to be an integer of at least 2.")
        if not is_integer(data_rank, 0, data_ranks - 1):
            raise ConfigError(f"data_rank is {described(data_rank)}, but ranks count from 0 to {data_ranks - 1}.")
        self.prepared = prepared
        self.pack = pack and prepared.kind != "prompt"
        self.micro_batch, self.accumulate = micro_batch, accumulate
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.pad = pad
        self.order = SampleOrder(prepared, length=length, pack=self.pack, seed=seed, shuffle=shuffle)
        self._at = Reached()
        prepared.ahead([block for group in self.order.groups(0) for block in group])

    @property
    def bins_per_window(self) -> int:
        """Rows of tokens of a window, over all ranks; without packing samples or pairs."""
        return self.micro_batch * self.accumulate * self.data_ranks

    @property
    def epoch_windows(self) -> int:
        """Windows of the first epoch; with packing others may differ by a few. It waits until all rows are prepared."""
        bins = sum(len(self.order.bins(0, group)) for group in range(len(self.order.groups(0))))
        return -(-bins // self.bins_per_window)

    def fill(self) -> float:
        """Which part of the first group's rows of tokens are tokens of samples, if each were filled to the length."""
        bins = self.order.bins(0, 0)
        tokens = sum(item.length for each in bins for item in each)
        return tokens / max(len(bins) * self.order.length, 1)

    def __iter__(self) -> Iterator[Window]:
        """Yield windows from the present position on; it is behind a window as soon as that is handed out."""
        while True:
            yield self.window_of([self.data_rank], 1)

    @property
    def virtual_ranks(self) -> int:
        """The ranks for which windows are cut."""
        return self.data_ranks

    def share_among(self, num_ranks: int) -> None:
        """From the next window on each is cut for so many ranks, at least 1."""
        self.data_ranks, self.data_rank = num_ranks, min(self.data_rank, num_ranks - 1)

    def window_of(self, ranks: Sequence[int], count: int) -> Window:
        """What these ranks read of the next window, one behind the other, and batches without rows for as many as are
        missing to ``count``; the position is behind the window then."""
        at, found = self._at, self._take()
        return self._window(found, ranks, count, at, self._at.epoch != at.epoch)

    def epoch(self) -> Iterator[Window]:
        """Yield the windows that are left of the present epoch."""
        for window in self:
            yield window
            if window.last:
                return

    def _take(self) -> list[list[Sample]]:
        for _ in range(2):
            found, self._at = self.order.take(self._at, self.bins_per_window)
            if found:
                return found
        raise ConfigError("data: no row is left to train on: all are empty, too long, or have nothing that is trained.")

    def _window(self, bins: list[list[Sample]], ranks: Sequence[int], count: int, at: Reached, last: bool) -> Window:
        """The shares of some ranks. What is long comes together with what is long, at all ranks at once: less is
        filled up."""
        if not self.pack:
            bins = sorted(bins, key=lambda each: -each[0].length)
        shares = [bins[rank :: self.data_ranks] for rank in ranks] + [[]] * (count - len(ranks))
        size, numbers = self.micro_batch, range(self.accumulate)
        batches = [self._batch(share[k * size : (k + 1) * size]) for share in shares for k in numbers]
        readers = [*ranks, *[self.data_ranks] * (count - len(ranks))]
        seeds = [seed_of(self.order.seed, at.epoch, at.group, at.done, rank, k) for rank in readers for k in numbers]
        return Window(batches, sum(each.trained for each in batches), at.epoch, last, seeds)

    def _batch(self, bins: list[list[Sample]]) -> Batch:
        read = [[(item.row, self._sequences(item)) for item in each] for each in bins]
        batch = collate(read, padded=not self.pack, pad=self.pad)
        if self.prepared.kind != "label":
            return batch
        good = [bool(getattr(self.prepared[row], "good", False)) for row in batch.rows]
        return Batch(**{**vars(batch), "good": torch.tensor(good, dtype=torch.bool)})

    def _sequences(self, item: Sample) -> list[Tokens]:
        row = self.prepared[item.row]
        if isinstance(row, Pair):
            return [row.chosen, row.rejected]
        if isinstance(row, Labelled):
            return [row.tokens]
        if isinstance(row, Prompt):
            return [Tokens(row.ids, np.zeros(len(row.ids), np.bool_))]
        return [Tokens(row.ids[item.start : item.stop], row.trained[item.start : item.stop])]

    # -- position

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in; it holds for any ranks, ``micro_batch`` and ``accumulate``."""
        order = self.order
        return {
            "fingerprint": self.prepared.fingerprint,
            "length": order.length,
            "pack": order.pack,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "epoch": self._at.epoch,
            "group": self._at.group,
            "done": self._at.done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ConfigError: it is one in other data, or in another order of them.
        """
        own = self.state_dict()
        if missing := sorted(own.keys() - state.keys()):
            raise ConfigError(f"the position in the data lacks {', '.join(missing)}: load what state_dict() returned.")
        for name in ("fingerprint", "length", "pack", "seed", "shuffle"):
            if state[name] != own[name]:
                what = (
                    "of other data (sources, weights, tokenizer, template or settings)"
                    if name == "fingerprint"
                    else (f"with {name}={state[name]!r}, but this run has {own[name]!r}")
                )
                raise ConfigError(f"the position in the data is one {what}: rows would come twice or not at all.")
        self._at = Reached(*(int(state[name]) for name in ("epoch", "group", "done")))
