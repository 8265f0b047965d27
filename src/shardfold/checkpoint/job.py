"""One save, as one rank sees it: what it copies and writes, what it tells the others, and the report of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.checkpoint._outcome import Outcome, failure
from shardfold.checkpoint.collect import collect, header
from shardfold.checkpoint.draft import Draft
from shardfold.checkpoint.files import UnwrittenPiece, write_file
from shardfold.checkpoint.hosts import Host
from shardfold.checkpoint.index import ITEMSIZES, Index
from shardfold.checkpoint.messages import Messages, words
from shardfold.errors import CheckpointError
from shardfold.plan.known_arguments import known_arguments
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.shard import Shard, values_of
from shardfold.tiers.pages import exact, huge

LOG = getLogger("shardfold")
__all__ = ["Job", "SaveReport", "Saving"]

PINNED = 1 << 30
"""Bytes of the largest block of pinned memory: PyTorch rounds what is asked for up to a power of 2, and keeps it."""


@dataclass(frozen=True)
class SaveReport:
    """What one save took.

    Attributes:
        path: the checkpoint.
        num_bytes: written by this rank.
        held_bytes: of host memory that the copy took until it was written; 0 for a save that waits.
        stall_seconds: for which training stood still on this rank.
        seconds: until the checkpoint was there.
        nonfinite: names of weights and buffers that have inf or NaN.

    Examples:
        >>> report = engine.save(f"{folder}/step-0").wait()
        >>> report.nonfinite
        ()
    """

    path: Path
    num_bytes: int
    held_bytes: int
    stall_seconds: float
    seconds: float
    nonfinite: tuple[str, ...] = ()

    def __str__(self) -> str:
        held = f", {self.held_bytes / 2**20:.0f} MiB of host memory meanwhile" if self.held_bytes else ""
        return (
            f"{self.path}: {self.num_bytes / 2**20:.1f} MiB by this rank in {self.seconds:.2f} s, of which training "
            f"stood still for {self.stall_seconds:.2f} s{held}"
        )


@known_arguments
class Saving:
    """A save that is under way.

    Attributes:
        path: where the checkpoint will be.

    Examples:
        >>> saving = engine.save(f"{folder}/step-0")  # beside the training
        >>> report = saving.wait()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report: SaveReport | None = None
        self.error: BaseException | None = None
        self.told = False  # whether a call has raised the error
        self._logged = False
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> SaveReport:
        """Waits until the checkpoint is there, on all ranks alike.

        Raises:
            CheckpointError: it was not written, and why; the checkpoints before it are as they were.
            TimeoutError: not within ``timeout`` seconds.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"the save to {self.path} is not over after {timeout} s.")
        if self.error is not None:
            self.told = True
            raise self.error
        assert self.report is not None
        return self.report

    def _untold(self) -> BaseException | None:
        """Its failure, if no call has raised that; from now on one has."""
        if self.error is None or self.told:
            return None
        self.told = True
        return self.error

    def _log(self) -> None:
        """Logs a failure that no call has raised, once."""
        if self.error is not None and not (self.told or self._logged):
            self._logged = True
            LOG.error("%s", self.error)

    def _end(self, report: SaveReport | None, error: BaseException | None) -> None:
        self.report, self.error = report, error
        self._over.set()


class Job:
    """One save, as one rank sees it."""

    def __init__(self, model: ShardedModel, draft: Draft, keep: int | None, nonfinite: str, begun: float) -> None:
        self._rank, self._ranks = model.rank, model.world_size
        self.draft, self._keep, self._nonfinite = draft, keep, nonfinite
        self.messages = Messages(model.comm.mesh.asked, f"save/{draft.token}", model.rank)
        self._begun, self.stall = begun, 0.0
        self._held = 0
        self._parts: list[UnwrittenPiece] = []
        self._index = Index()  # this rank's
        self._header = Index()  # rank 0's
        self._problem = ""
        self._outcome: Outcome | None = None
        self.error: BaseException | None = None

    def prepare(
        self,
        model: ShardedModel,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        left_out: Mapping[str, str],
        lost: Mapping[int, Tensor],
    ) -> str:
        """Finds what this rank writes; what went wrong, or nothing."""
        try:
            tensors: dict[str, Tensor] = {}
            if self._rank == 0:
                self.draft.begin()
                self._header, tensors = header(model, state, left_out)
            self._parts, self._index = collect(model, rank_state, tensors, left_out, lost)
        except BaseException as error:  # also an interruption: the others are about to ask
            self.error = error
            return words(error)
        return ""

    def begin(self, hosts: Sequence[Host]) -> None:
        """All are ready: from now on this rank owes the others a word."""
        self._outcome = Outcome(self.draft, self.messages, hosts, self._rank, self._keep, self._nonfinite)
        self.messages.begin()

    @property
    def reads_files(self) -> bool:
        """Whether some of it rests on disk: a copy of that would be memory as large as what does not fit into it."""
        return any(isinstance(part.values, Shard) for part in self._parts)

    def copy(self, blocks: list[Tensor]) -> list[Tensor]:
        """Takes what is to be written out of the memory that training goes on to change, into blocks if it fits."""
        try:
            self._parts, blocks = _copied(self._parts, blocks)
            self._held = sum(block.nbytes for block in blocks)
        except Exception as error:  # told with the outcome: the others are past the question
            self._problem = words(error)
        return blocks

    def run(self, saving: Saving) -> None:
        """Writes, and waits until all ranks have; never raises."""
        try:
            assert self._outcome is not None
            problem, written = self._write()
            if self._rank == 0:
                nonfinite = self._outcome.complete(self._header, self._index, problem)
            else:
                nonfinite = self._outcome.follow(self._index, problem)
            seconds = perf_counter() - self._begun
            stall = self.stall or seconds
            report = SaveReport(self.draft.target, written, self._held, stall, seconds, tuple(nonfinite))
        except BaseException as error:
            self.give_up(error)
            saving._end(None, error)
        else:
            self.messages.end()
            saving._end(report, None)

    def give_up(self, error: BaseException) -> None:
        """Leaves the save; whoever waits for this rank hears so at once."""
        self._parts = []
        if self._outcome is not None:
            with suppress(CheckpointError):  # the store is gone: they find out by themselves
                self._outcome.abandon(words(error))
        self.draft.discard()
        self.messages.end()

    def failure(self, problem: str) -> CheckpointError:
        """The sentence of a save that failed."""
        return failure(self.draft, problem)

    def _write(self) -> tuple[str, int]:
        """This rank's file: what went wrong, and the bytes written."""
        name = f"rank-{self._rank:05d}-of-{self._ranks:05d}.safetensors"
        problem, num_bytes = self._problem, 0
        try:
            if not problem:
                done = write_file(self.draft.path / name, self._parts)
                num_bytes = done.num_bytes
                self._index.add_file(name, *done)
        except Exception as error:
            problem = words(error)
        self._parts = []
        return problem, num_bytes


def _copied(parts: list[UnwrittenPiece], blocks: list[Tensor]) -> tuple[list[UnwrittenPiece], list[Tensor]]:
    """The parts with their values in blocks of host memory (pinned, for a GPU): those given, if they have room."""
    ordered = sorted(parts, key=lambda part: -ITEMSIZES[part.piece.dtype])
    devices = {part.values.device for part in ordered if isinstance(part.values, Tensor)}
    devices = {device for device in devices if accelerator.has_streams(device)}
    places, sizes = _placed([part.piece.nbytes for part in ordered], PINNED if devices else None)
    if len(blocks) != len(sizes) or any(b.nbytes < size for b, size in zip(blocks, sizes, strict=True)):
        blocks = [_block(size, next(iter(devices), None)) for size in sizes]
    copies: list[UnwrittenPiece] = []
    with torch.no_grad():
        for part, (number, at) in zip(ordered, places, strict=True):
            given = part.values
            values = given() if callable(given) else values_of(given)
            target = blocks[number][at : at + part.piece.nbytes].view(values.dtype)
            target.copy_(values.detach().reshape(-1), non_blocking=values.device in devices)
            copies.append(UnwrittenPiece(part.piece, target))
    for device in devices:  # copies that are under way are not read: hashes would agree with whatever is there by then
        accelerator.current_stream(device).synchronize()
    return copies, blocks


def _placed(sizes: Sequence[int], most: int | None) -> tuple[list[tuple[int, int]], list[int]]:
    """The block and the offset of each of so many bytes, in order, and the bytes of each block: at most ``most``,
    unless one alone has more."""
    places: list[tuple[int, int]] = []
    blocks = [0]
    for size in sizes:
        if most is not None and blocks[-1] and blocks[-1] + size > most:
            blocks.append(0)
        places.append((len(blocks) - 1, blocks[-1]))
        blocks[-1] += size
    return places, [max(1, size) for size in blocks]


def _block(nbytes: int, device: torch.device | None) -> Tensor:
    if device is not None:
        return accelerator.host_memory((nbytes,), torch.uint8, device)
    with exact():
        block = torch.empty(nbytes, dtype=torch.uint8)
    huge(block.data_ptr(), block.nbytes)
    return block
