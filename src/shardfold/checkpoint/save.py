"""Saving: every rank writes what it owns, and one rank makes it a checkpoint when all have said that theirs is there.

    each rank    copies its part (async) -> writes its file -> writes what it wrote, as JSON, beside it -> says so
    rank 0       hears all -> merges the JSON into the index -> renames the folder -> moves ``latest`` -> says so

Ranks talk through the key-value store, so nothing of it is a collective and it runs in a thread beside the training. A
rank that fails says with what; one that dies is missed, because it no longer counts its seconds in the store. Either
way nobody waits for ever, the draft is removed, and what was there before is as it was.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.checkpoint.collect import collect, header
from shardfold.checkpoint.files import Part, write_file
from shardfold.checkpoint.folders import Draft, prune, write_synced
from shardfold.checkpoint.format import ITEMSIZES, Index, Piece
from shardfold.errors import CheckpointError, ConfigError, UsageError
from shardfold.loans import refuse_during
from shardfold.report import MemoryRow
from shardfold.stores.exact import exact, huge

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["SaveReport", "Saver", "Saving"]

LOG = getLogger("shardfold")
BEAT = 1.0  # seconds between two signs of life of a rank
SILENCE, SILENCE_AT_EXIT = 20.0, 8.0  # seconds without one after which it counts as dead
PAUSE = 0.02  # seconds between two looks


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
        self._number = 0
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
    ) -> Saving | None:
        """See :meth:`Engine.save`."""
        begun = perf_counter()
        engine, target = self._engine, Path(os.path.abspath(path))
        _check_options(busy, keep, nonfinite)
        refuse_during(engine.loans, "engine.save()")
        if engine.micro_batch:
            raise UsageError(
                f"engine.save() while gradients of {engine.micro_batch} micro-batches wait for engine.step(): they "
                "would be lost on resuming; save after the step, or call engine.zero_grad() first."
            )
        under_way = self.last is not None and not self.last.done
        token = int.from_bytes(os.urandom(6), "big") if engine.rank == 0 else 0
        flags = engine.actions.control([float(under_way and busy == "skip"), float(token)], dist.ReduceOp.MAX)
        if flags[0]:
            return None
        self.finish()
        draft = Draft(target, f"{int(flags[1]):012x}")
        engine.agreement.same(f"the path of save {self._number}", f"{target}/{keep}/{nonfinite}")
        job = _Job(engine, draft, self._number, keep, nonfinite, begun)
        self._number += 1
        try:
            problem = job.prepare(engine, state, rank_state, left_out)
            self._ready(job, problem)
        except BaseException:
            if engine.rank == 0:
                draft.discard()
            raise
        saving = self.last = Saving(target)
        if wait:
            job.run(saving)
            saving.wait()
            return saving
        if self._block is None:
            engine.more_memory.append(self._memory)
        self._block = job.copy(self._block)
        job.stall = perf_counter() - begun
        self._job, self._thread = (
            job,
            threading.Thread(target=job.run, args=(saving,), name="shardfold-save", daemon=True),
        )
        atexit.register(self._at_exit)
        self._thread.start()
        return saving

    def _ready(self, job: _Job, problem: str) -> None:
        """Nobody writes before rank 0 has made the folder and everybody has found what to write.

        Raises:
            CheckpointError: on all ranks, with what some of them say.
        """
        engine = self._engine
        if engine.actions.control([float(bool(problem))], dist.ReduceOp.MAX)[0]:
            said = engine.agreement.exchange(f"{job.prefix}/ready", problem)
            raise job.failure(_by_rank(dict(enumerate(said)), engine.world_size)) from job.error

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
            self._job.silence = SILENCE_AT_EXIT
        self.finish()

    def tell(self) -> None:
        """Logs a failure that nobody has heard of; training goes on, as the checkpoints before it are there."""
        last = self.last
        if last is not None and last.error is not None and not last.told:
            last.told = True
            LOG.error("%s", last.error)


def _check_options(busy: str, keep: int | None, nonfinite: str) -> None:
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


class _Job:
    """One save, as one rank sees it."""

    def __init__(
        self, engine: Engine, draft: Draft, number: int, keep: int | None, nonfinite: str, begun: float
    ) -> None:
        self._store: Any = engine.mesh.store
        self._rank, self._ranks = engine.rank, engine.world_size
        self._draft, self._keep, self._nonfinite = draft, keep, nonfinite
        self.prefix = f"save/{number}"
        self.silence = SILENCE
        self._begun, self.stall = begun, 0.0
        self._held = 0
        self._parts: list[Part] = []
        self._index = Index()  # this rank's
        self._header = Index()  # rank 0's
        self._problem = ""
        self.error: Exception | None = None

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
        except Exception as error:
            self.error = error
            return _words(error)
        return ""

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
        pulse = _Pulse(self._store, f"{self.prefix}/alive/{self._rank}")
        try:
            written = self._write()
            nonfinite = self._commit() if self._rank == 0 else self._hear_outcome()
            seconds = perf_counter() - self._begun
            stall = self.stall or seconds
            report = SaveReport(self._draft.target, written, self._held, stall, seconds, tuple(nonfinite))
        except BaseException as error:
            saving._end(None, error)
        else:
            saving._end(report, None)
        finally:
            pulse.stop()

    def _write(self) -> int:
        """This rank's file and its JSON; says how that went, and raises nothing of the file system."""
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
        self._say("written", problem)
        return num_bytes

    # -- the outcome

    def _commit(self) -> list[str]:
        """Rank 0: makes it a checkpoint, or removes it."""
        try:
            self._hear_written()
            index = self._merge()
            if index.nonfinite:
                names = ", ".join(index.nonfinite[:8]) + (", ..." if len(index.nonfinite) > 8 else "")
                said = f"inf or NaN in {names} of step {index.step}"
                if self._nonfinite == "raise":
                    raise CheckpointError(said)
                LOG.warning("%s holds %s", self._draft.target, said)
            self._draft.commit(index.to_bytes())
        except Exception as error:
            self._draft.discard()
            self._say("outcome", _words(error))
            raise self.failure(_words(error)) from error
        self._say("outcome", "", json.dumps(index.nonfinite))
        if self._keep is not None:
            prune(self._draft.target, self._keep)
        return index.nonfinite

    def _merge(self) -> Index:
        """The index of all: rank 0's words and everybody's pieces."""
        merged = self._header
        pieces: list[Piece] = []
        for rank in range(self._ranks):
            name = self._draft.path / f"rank-{rank:05d}-of-{self._ranks:05d}.json"
            try:
                part = Index.from_bytes(name.read_bytes(), str(name))
            except OSError as error:
                raise CheckpointError(
                    f"rank {rank} wrote its part, but rank 0 does not find it ({error.strerror}: {name.name}): a "
                    "checkpoint needs a folder that all hosts share."
                ) from None
            pieces += part.pieces
            merged.files |= part.files
            merged.once |= part.once
            merged.ranks += part.ranks
            merged.nonfinite += part.nonfinite
        merged.pieces = pieces
        merged.nonfinite = sorted(set(merged.nonfinite))
        for rank in range(self._ranks):
            (self._draft.path / f"rank-{rank:05d}-of-{self._ranks:05d}.json").unlink()
        return merged

    def _hear_outcome(self) -> list[str]:
        said = self._wait_for("outcome", 0)
        if said.startswith("!"):
            raise self.failure(said[1:])
        return json.loads(said)

    def failure(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self._draft.target} was not written: {problem.rstrip('.')}. Checkpoints before it are as they were."
        )

    # -- what ranks say to each other

    def _say(self, what: str, problem: str, well: str = "+") -> None:
        """Tells the others how this rank's part of something went."""
        if self._store is not None:
            self._store.set(f"{self.prefix}/{what}/{self._rank}", f"!{problem}" if problem else well)
        elif problem and what == "written":
            raise CheckpointError(problem)

    def _hear_written(self) -> None:
        """Waits until every rank has said it; raises what they say went wrong."""
        wrong: dict[int, str] = {}
        for rank in range(self._ranks if self._store is not None else 0):
            try:
                said = self._wait_for("written", rank)
            except CheckpointError as error:
                said = f"!{error}"
            if said.startswith("!"):
                wrong[rank] = said[1:]
        if wrong:
            raise CheckpointError(_by_rank(wrong, self._ranks))

    def _wait_for(self, what: str, rank: int) -> str:
        """What a rank says, unless it is not heard of for too long."""
        key, alive = f"{self.prefix}/{what}/{rank}", f"{self.prefix}/alive/{rank}"
        pause = threading.Event()
        count, heard = -1, monotonic()
        while not self._store.check([key]):
            if monotonic() - heard > 2 * BEAT:
                now = self._store.add(alive, 0)
                if now != count:
                    count, heard = now, monotonic()
                elif monotonic() - heard > self.silence:
                    raise CheckpointError(f"it was not heard of for {self.silence:.0f} s")
            pause.wait(PAUSE)
        return self._store.get(key).decode()


class _Pulse:
    """Counts in the store while a rank lives, from a thread, as a slow disk is no death."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key, self._over = store, key, threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardfold-pulse", daemon=True)
        if store is not None:
            self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._store.add(self._key, 1)
            except RuntimeError:  # the store's host is gone: who waits there finds out by itself
                return

    def stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()


def _by_rank(said: Mapping[int, str], ranks: int) -> str:
    """``rank 0, 1: one text; rank 2: another``."""
    texts: dict[str, list[str]] = {}
    for rank, text in said.items():
        if text:
            texts.setdefault(text, []).append(str(rank))
    if ranks == 1:
        return next(iter(texts))
    return "; ".join(f"rank {', '.join(numbers)}: {text.rstrip('.')}" for text, numbers in texts.items())


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
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
