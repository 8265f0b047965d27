"""Saving: every rank writes what it owns, and one rank makes it a checkpoint when all have said that theirs is there.

    each rank    copies its part (async) -> writes its file -> writes what it wrote, as JSON, beside it -> says so
    rank 0       hears all -> merges the JSON into the index -> renames the folder -> moves ``latest`` -> says so

Ranks talk through the key-value store (``messages``), so nothing of it is a collective and it runs in a thread beside
the training. A rank that fails says with what; one that dies is missed. Either way nobody waits for ever, the draft is
removed, and what was there before is as it was.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.checkpoint.collect import collect, header
from shardfold.checkpoint.files import Part, write_file
from shardfold.checkpoint.folders import Draft, prune, write_synced
from shardfold.checkpoint.format import INDEX, ITEMSIZES, Index, Piece
from shardfold.checkpoint.messages import SILENCE_AT_EXIT, Messages, ask
from shardfold.checkpoint.verify import gaps, missing_files
from shardfold.errors import CheckpointError, ConfigError, UsageError
from shardfold.loans import refuse_during
from shardfold.report import MemoryRow
from shardfold.stores.exact import exact, huge

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["SaveReport", "Saver", "Saving"]

LOG = getLogger("shardfold")


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


class Saving:
    """A save that is under way.

    Attributes:
        path: where the checkpoint will be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report: SaveReport | None = None
        self.error: BaseException | None = None
        self.told = False  # whether the training knows of the error
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

    def _end(self, report: SaveReport | None, error: BaseException | None) -> None:
        self.report, self.error = report, error
        self._over.set()


class Saver:
    """An engine's saves, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.last: Saving | None = None
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        # Kept from save to save: to write into fresh memory takes four times as long as into this.
        self._block: Tensor | None = None

    def save(
        self,
        path: str | Path,
        *,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        wait: bool,
        busy: str,
        keep: int | None,
        nonfinite: str,
        left_out: Mapping[str, str],
        latest: bool,
        gradients: str,
    ) -> Saving | None:
        """See :meth:`Engine.save`."""
        begun = perf_counter()
        engine, target = self._engine, Path(os.path.abspath(path))
        _check_options(busy, keep, nonfinite, gradients)
        refuse_during(engine.loans, "engine.save()")
        if engine.micro_batch and gradients == "refuse":
            raise UsageError(
                f"engine.save() while gradients of {engine.micro_batch} micro-batches wait for engine.step(): they "
                "would be lost on resuming; save after the step, or call engine.zero_grad() first."
            )
        token = self._agree(target, f"keep={keep}, nonfinite={nonfinite!r}, latest={latest}", busy == "skip")
        if token is None:
            return None
        self.finish()
        job = _Job(engine, Draft(target, token, latest=latest), keep, nonfinite, begun)
        try:
            said = self._everyone(f"save/{token}/ready", job.prepare(engine, state, rank_state, left_out))
            if job.error is not None and not isinstance(job.error, Exception):
                raise job.error
            if any(said):
                raise job.failure(_by_rank(dict(enumerate(said)))) from job.error
            job.begin()
        except BaseException as error:
            job.give_up(error)
            raise
        saving = self.last = Saving(target)
        if wait:
            job.run(saving)
            saving.wait()
            return saving
        if self._memory not in engine.more_memory:
            engine.more_memory.append(self._memory)
        try:
            self._block = job.copy(self._block)
            job.stall = perf_counter() - begun
            thread = threading.Thread(target=job.run, args=(saving,), name="shardfold-save", daemon=True)
            thread.start()
        except BaseException as error:
            job.give_up(error)
            saving._end(None, error)
            raise
        self._job, self._thread = job, thread
        atexit.register(self._at_exit)
        return saving

    def _agree(self, target: Path, options: str, skip: bool) -> str | None:
        """The token of a save that all ranks make to the same place; None if it is skipped, as another is under way.

        Raises:
            ConfigError: on all ranks: they were given different ones.
        """
        engine = self._engine
        text = f"{target}, {options}"
        code = float(int.from_bytes(sha256(text.encode()).digest()[:6], "big"))
        token = float(int.from_bytes(os.urandom(6), "big")) if engine.rank == 0 else 0.0
        under_way = self.last is not None and not self.last.done
        flags = engine.actions.control([float(skip and under_way), token, code, -code], dist.ReduceOp.MAX)
        if flags[0]:
            return None
        name = f"{int(flags[1]):012x}"
        if flags[2] != -flags[3]:
            said = self._everyone(f"save/{name}/place", text)
            raise ConfigError(
                f"engine.save() was given different places or options: {_by_rank(dict(enumerate(said)))}; give every "
                "rank the same."
            )
        return name

    def _everyone(self, key: str, text: str) -> list[str]:
        """What every rank says, by rank; a rank that is gone is an error at once, and not after a long wait."""
        engine, store = self._engine, self._engine.mesh.store
        if store is None:
            return [text]
        if text:
            ask(store, "set", f"{key}/{engine.rank}", text)
        if not engine.actions.control([float(bool(text))], dist.ReduceOp.MAX)[0]:
            return [""] * engine.world_size
        keys = [f"{key}/{rank}" for rank in range(engine.world_size)]
        return [ask(store, "get", each).decode() if ask(store, "check", [each]) else "" for each in keys]

    def finish(self) -> None:
        """Waits for the save that is under way, and tells of its failure if nobody has."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self._job = None
            atexit.unregister(self._at_exit)
        self.tell()

    def close(self) -> None:
        """Waits for the save that is under way and gives back the memory of copies."""
        self.finish()
        if self._memory in self._engine.more_memory:
            self._engine.more_memory.remove(self._memory)
        self._block = None

    def _memory(self) -> MemoryRow:
        held = self._block.nbytes if self._block is not None else 0
        return MemoryRow("checkpoint", "host", held, 0.0, held)

    def _at_exit(self) -> None:
        if self._job is not None:
            self._job.messages.silence = SILENCE_AT_EXIT
        self.finish()

    def tell(self) -> None:
        """Logs a failure that nobody has heard of; training goes on, as the checkpoints before it are there."""
        last = self.last
        if last is not None and last.error is not None and not last.told:
            last.told = True
            LOG.error("%s", last.error)


def _check_options(busy: str, keep: int | None, nonfinite: str, gradients: str) -> None:
    if busy not in ("wait", "skip"):
        raise ConfigError(
            f"engine.save(busy={busy!r}): a save under way is waited for ('wait') or this one left out ('skip')."
        )
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ConfigError(
            f"engine.save(keep={keep!r}): it is how many checkpoints stay in the folder, >= 1, or None for all."
        )
    if nonfinite not in ("warn", "raise"):
        raise ConfigError(f"engine.save(nonfinite={nonfinite!r}): it is 'warn' or 'raise'.")
    if gradients not in ("refuse", "leave"):
        raise ConfigError(f"engine.save(gradients={gradients!r}): it is 'refuse' or 'leave'.")


class _Job:
    """One save, as one rank sees it."""

    def __init__(self, engine: Engine, draft: Draft, keep: int | None, nonfinite: str, begun: float) -> None:
        self._rank, self._ranks = engine.rank, engine.world_size
        self._others = range(1, engine.world_size)
        self._draft, self._keep, self._nonfinite = draft, keep, nonfinite
        self.messages = Messages(engine.mesh.store, f"save/{draft.token}", engine.rank)
        self._begun, self.stall = begun, 0.0
        self._held = 0
        self._parts: list[Part] = []
        self._index = Index()  # this rank's
        self._header = Index()  # rank 0's
        self._problem = ""
        self._owes = False
        self.error: BaseException | None = None

    def prepare(
        self, engine: Engine, state: Mapping[str, Any], rank_state: Mapping[str, Any], left_out: Mapping[str, str]
    ) -> str:
        """Finds what this rank writes; what went wrong, or nothing."""
        try:
            tensors: dict[str, Tensor] = {}
            if self._rank == 0:
                self._draft.begin()
                self._header, tensors = header(engine, state, left_out)
            self._parts, self._index = collect(engine, rank_state, tensors, left_out)
        except BaseException as error:  # also an interruption: the others are about to ask
            self.error = error
            return _words(error)
        return ""

    def begin(self) -> None:
        """All are ready: from now on this rank owes the others a word."""
        self._owes = True
        self.messages.begin()

    def copy(self, block: Tensor | None) -> Tensor | None:
        """Takes what is to be written out of the memory that training goes on to change, into a block if it fits."""
        try:
            self._parts, block = _copied(self._parts, block)
            self._held = block.nbytes
        except Exception as error:  # told with the outcome: the others are past the question
            self._problem = _words(error)
        return block

    def run(self, saving: Saving) -> None:
        """Writes, and waits until all ranks have; never raises."""
        try:
            problem, written = self._write()
            nonfinite = self._commit(problem) if self._rank == 0 else self._hear_outcome(problem)
            seconds = perf_counter() - self._begun
            stall = self.stall or seconds
            report = SaveReport(self._draft.target, written, self._held, stall, seconds, tuple(nonfinite))
        except BaseException as error:
            self.give_up(error)
            saving._end(None, error)
        else:
            self.messages.end()
            saving._end(report, None)

    def give_up(self, error: BaseException) -> None:
        """Leaves the save; whoever waits for this rank hears so at once."""
        self._parts = []
        if self._owes:
            self._owes = False
            with suppress(CheckpointError):  # the store is gone: they find out by themselves
                if self._rank:
                    self.messages.say("written", f"!{_words(error)}")
                    self.messages.say("heard", "+")  # it will not ask
                else:
                    self.messages.say("outcome", f"!rank 0: {_words(error)}")
        self._draft.discard()
        self.messages.end()

    def _write(self) -> tuple[str, int]:
        """This rank's file and its JSON: what went wrong, and the bytes written."""
        name = f"rank-{self._rank:05d}-of-{self._ranks:05d}"
        problem, num_bytes = self._problem, 0
        try:
            if not problem:
                done = write_file(self._draft.path / f"{name}.safetensors", self._parts)
                num_bytes = done.num_bytes
                self._index.pieces, self._index.files = done.pieces, {f"{name}.safetensors": num_bytes}
                bad = {p.of for p in done.nonfinite if p.kind == "buffer" or p.state == "weight"}
                self._index.nonfinite = sorted(bad)
                write_synced(self._draft.path / f"{name}.json", self._index.to_bytes())
        except Exception as error:
            problem = _words(error)
        self._parts = []
        return problem, num_bytes

    # -- the outcome

    def _commit(self, problem: str) -> list[str]:
        """Rank 0: makes it a checkpoint, or removes it; names of what is not finite in it."""
        lost: list[int] = []
        try:
            wrong = {0: problem}
            said = self.messages.hear("written", self._others)
            lost = [rank for rank in self._others if rank not in said]
            wrong |= {rank: text[1:] for rank, text in said.items()}
            wrong |= dict.fromkeys(lost, self._unheard())
            if any(wrong.values()):
                raise CheckpointError(_by_rank(wrong))
            index = self._merge()
            if index.nonfinite:
                names = ", ".join(index.nonfinite[:8]) + (", ..." if len(index.nonfinite) > 8 else "")
                words = f"inf or NaN in {names} of step {index.step}"
                if self._nonfinite == "raise":
                    raise CheckpointError(words)
                LOG.warning("%s holds %s", self._draft.target, words)
            self._draft.commit(index.to_bytes())
        except Exception as error:
            self._draft.discard()
            self._tell_outcome(f"!{_words(error)}", lost)
            raise self.failure(_words(error)) from error
        self._tell_outcome("+" + json.dumps(index.nonfinite), lost)
        if self._keep is not None:
            try:
                prune(self._draft.target, self._keep)
            except OSError as error:
                LOG.warning("%s was written, but keep=%d: %s", self._draft.target, self._keep, _words(error))
        return index.nonfinite

    def _tell_outcome(self, text: str, lost: Sequence[int]) -> None:
        """Says it, and stays until the others have heard it: the store may be this process's."""
        self._owes = False
        with suppress(CheckpointError):
            self.messages.say("outcome", text)
            self.messages.hear("heard", [rank for rank in self._others if rank not in lost])

    def _merge(self) -> Index:
        """The index of all: rank 0's words and everybody's pieces."""
        merged = self._header
        pieces: list[Piece] = []
        names = [self._draft.path / f"rank-{rank:05d}-of-{self._ranks:05d}.json" for rank in range(self._ranks)]
        for rank, name in enumerate(names):
            try:
                part = Index.from_bytes(name.read_bytes(), str(name))
            except OSError as error:
                raise CheckpointError(
                    f"rank {rank} wrote its part, but rank 0 does not find it ({error.strerror}: {name.name}): a "
                    "checkpoint needs a folder that all hosts share"
                ) from None
            pieces += part.pieces
            merged.files |= part.files
            merged.once |= part.once
            merged.ranks += part.ranks
            merged.nonfinite += part.nonfinite
        merged.pieces = pieces
        merged.nonfinite = sorted(set(merged.nonfinite))
        merged.written["save"] = self._draft.token
        if damage := [*gaps(merged), *missing_files(self._draft.path, merged)]:
            more = f" and {len(damage) - 4} more" * (len(damage) > 4)
            raise CheckpointError(f"what the ranks wrote is not whole: {'; '.join(map(str, damage[:4]))}{more}")
        for name in names:
            name.unlink()
        return merged

    def _hear_outcome(self, problem: str) -> list[str]:
        """The other ranks: what became of it; the folder itself tells if rank 0 does not."""
        gone: CheckpointError | None = None
        text, why = None, self._unheard()
        self._owes = False
        try:
            self.messages.say("written", f"!{problem}" if problem else "+")
            text = self.messages.hear("outcome", [0]).get(0)
        except CheckpointError as error:
            gone, why = error, str(error)
        if text is None:
            if not self._draft.committed:
                raise self.failure(f"rank 0, which completes it: {why}") from gone
            LOG.warning("%s is complete, but rank 0 did not say so: %s", self._draft.target, why)
            return Index.from_bytes((self._draft.target / INDEX).read_bytes(), str(self._draft.target)).nonfinite
        with suppress(CheckpointError):
            self.messages.say("heard", "+")
        if text.startswith("!"):
            self._draft.sweep()
            raise self.failure(text[1:])
        return json.loads(text[1:])

    def _unheard(self) -> str:
        return f"it was not heard of for {self.messages.silence:.3g} s, so it has probably died"

    def failure(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._draft.target} was not written: {problem.rstrip('.')}. Checkpoints before it are as they were."
        )


def _by_rank(said: Mapping[int, str]) -> str:
    """``rank 0, 1: one text; rank 2: another``; the text alone where there is one rank."""
    texts: dict[str, list[str]] = {}
    for rank, text in said.items():
        if text:
            texts.setdefault(text, []).append(str(rank))
    if len(said) == 1:
        return next(iter(texts))
    return "; ".join(f"rank {', '.join(numbers)}: {text.rstrip('.')}" for text, numbers in texts.items())


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    if not isinstance(error, Exception):
        return f"it was interrupted ({type(error).__name__})"
    return str(error) or type(error).__name__


def _copied(parts: list[Part], block: Tensor | None) -> tuple[list[Part], Tensor]:
    """The parts with their values in one block of host memory (pinned, for a GPU): the one given, if it has room."""
    ordered = sorted(parts, key=lambda part: -ITEMSIZES[part.piece.dtype])
    total = max(1, sum(part.piece.nbytes for part in ordered))
    cuda = any(isinstance(part.values, Tensor) and part.values.is_cuda for part in ordered)
    if block is None or block.nbytes < total:
        with exact():
            block = torch.empty(total, dtype=torch.uint8, pin_memory=cuda)
        if not cuda:
            huge(block.data_ptr(), block.nbytes)
    copies: list[Part] = []
    at = 0
    with torch.no_grad():
        for part in ordered:
            values = part.values if isinstance(part.values, Tensor) else part.values()
            target = block[at : at + part.piece.nbytes].view(values.dtype)
            target.copy_(values.detach().reshape(-1), non_blocking=values.is_cuda)
            copies.append(Part(part.piece, target))
            at += part.piece.nbytes
    if cuda:
        torch.cuda.synchronize()
    return copies, block
