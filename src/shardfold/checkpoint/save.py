"""Saving: every rank writes what it owns, and one rank makes it a checkpoint when all have said that theirs is there.

    each rank    copies its part (async) -> writes its file -> says what is in it
    rank 0       hears all -> merges the index -> renames the folder -> moves ``latest`` -> says so

Ranks talk through the key-value store (``messages``), so nothing of it is a collective and it runs in a thread beside
the training. A rank that fails says with what; one that dies is missed. Either way nobody waits for ever, the draft is
removed, and what was there before is as it was. On hosts that share no disk each writes into a folder of its own
(``draft``), and all of these take their places, or none (``_outcome``).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold import accelerator
from shardfold.checkpoint._outcome import Outcome, failure
from shardfold.checkpoint.collect import collect, header, sums_of_lost
from shardfold.checkpoint.draft import Draft, Host, find_hosts
from shardfold.checkpoint.files import UnwrittenPiece, write_file
from shardfold.checkpoint.index import ITEMSIZES, Index, checksum
from shardfold.checkpoint.lent import Lending, LentShard
from shardfold.checkpoint.messages import SILENCE_AT_EXIT, SILENCE_OF_DEAD, Messages, ask, words
from shardfold.checkpoint.run_lock import RunLock
from shardfold.checkpoint.standing_thread import StandingThread
from shardfold.comm.agreement import Claim
from shardfold.comm.coalesced import as_bytes
from shardfold.comm.launcher_notes import tell_launcher
from shardfold.errors import CheckpointError, ConfigError, UsageError, by_rank
from shardfold.plan.checks import known_arguments
from shardfold.plan.report import MemoryRow
from shardfold.sharding.model import ShardedModel, refuse_during
from shardfold.sharding.shard import Shard, values_of
from shardfold.sharding.whole_state import buffers_of
from shardfold.tiers.pages import exact, huge

__all__ = ["Job", "SaveReport", "Saver", "Saving", "check_options"]


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
            raise self._tell(self.error)
        assert self.report is not None
        return self.report

    def _untold(self) -> BaseException | None:
        """Its failure, if no call has raised that; from now on one has."""
        return None if self.error is None or self.told else self._tell(self.error)

    def _tell(self, error: BaseException) -> BaseException:
        """It is raised now, and may end this rank: then the launcher is to know whether by others' fault."""
        self.told = True
        if isinstance(error, CheckpointError) and error.follows:
            tell_launcher(str(error), follows=True)
        return error

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

    def __init__(
        self,
        model: ShardedModel,
        draft: Draft,
        keep: int | None,
        nonfinite: str,
        begun: float,
        gone: threading.Event,
        pulse: StandingThread,
    ) -> None:
        self._rank, self._ranks = model.rank, model.world_size
        self.draft, self._keep, self._nonfinite = draft, keep, nonfinite
        self.messages = Messages(model.comm.mesh.asked, f"save/{draft.token}", model.rank, gone, pulse)
        self._begun, self._stall = begun, 0.0
        self._held = 0
        self._parts: list[UnwrittenPiece] = []
        self._index = Index()  # this rank's
        self._header = Index()  # rank 0's
        self._problem = ""
        self._lending: Lending | None = None  # of copies, which are read as they lie
        self._outcome: Outcome | None = None
        self.error: BaseException | None = None

    def prepare(
        self,
        model: ShardedModel,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        left_out: Mapping[str, str],
        lost: Mapping[int, Tensor],
        lending: Lending | None,
    ) -> str:
        """Finds what this rank writes, with a ``lending`` of copies; what went wrong, or nothing."""
        self._lending = lending
        try:
            tensors: dict[str, Tensor] = {}
            if self._rank == 0:
                self.draft.begin()
                self._header, tensors = header(model, state, left_out)
            self._parts, self._index = collect(model, rank_state, tensors, left_out, lost, lending=lending)
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
        return any(isinstance(each.values, Shard) and not isinstance(each.values, LentShard) for each in self._parts)

    def copy(self, blocks: list[Tensor]) -> list[Tensor]:
        """Takes what is to be written out of the memory that training goes on to change, into blocks if it fits."""
        try:
            lent = [part for part in self._parts if isinstance(part.values, LentShard)]
            parts, blocks = _copied([part for part in self._parts if not isinstance(part.values, LentShard)], blocks)
            self._parts = [*parts, *lent]
            self._held = sum(block.nbytes for block in blocks)
            self._stall = perf_counter() - self._begun
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
            stall = self._stall or seconds
            self._held += self._lending.taken if self._lending is not None else 0
            report = SaveReport(self.draft.target, written, self._held, stall, seconds, tuple(nonfinite))
        except BaseException as error:
            self.give_up(error)
            saving._end(None, error)
        else:
            self.messages.end()
            saving._end(report, None)

    def give_up(self, error: BaseException) -> None:
        """Leaves the save; whoever waits for this rank hears so at once."""
        self._end_lending()
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
                done = write_file(self.draft.path / name, self._parts, lambda _: self.messages.check_gone())
                num_bytes = done.num_bytes
                self._index.add_file(name, *done)
        except Exception as error:
            problem = words(error)
        finally:
            self._end_lending()
        self._parts = []
        return problem, num_bytes

    def _end_lending(self) -> None:
        if self._lending is not None:
            self._lending.end()


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


LOG = getLogger("shardfold")


class Saver:
    """An engine's saves, one at a time.

    Args:
        model: of the engine.
        lends: whether this rank's copies of another one's states can be read in place of what that one has.

    Attributes:
        last: the last of them.
        lock: the folders that are this run's.
    """

    def __init__(self, model: ShardedModel, lends: Callable[[], bool]) -> None:
        self._model, self._lends = model, lends
        self.lock = RunLock()
        self.last: Saving | None = None
        self._thread, self._pulse = StandingThread("shardfold-save"), StandingThread("shardfold-pulse")
        self._job: Job | None = None
        self._gone = threading.Event()
        # Kept from save to save: to write into fresh memory takes four times as long as into this.
        self._blocks: list[Tensor] = []
        self._spares: list[Tensor] = []  # the same, of what was taken out of the way of updates
        self._told = False  # that hosts do not share a folder

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
        shared: bool | None,
    ) -> Saving | None:
        """See :meth:`Engine.save`."""
        begun = perf_counter()
        model, target = self._model, Path(os.path.abspath(path))
        refuse_during(model.loans, "engine.save()")
        if model.run.micro_batch and gradients == "refuse":
            raise UsageError(
                f"engine.save() while gradients of {model.run.micro_batch} micro-batches wait for engine.step(): they "
                "would be lost on resuming; save after the step, or call engine.zero_grad() first."
            )
        place = target.name if shared is False else str(target)  # each host may have its own folder around it
        check_buffers(model)
        options = f"{place}, keep={keep}, nonfinite={nonfinite!r}, latest={latest}, shared={shared}"
        plain = wait or bool(model.run.averages) or not self._lends()
        token, plain, behind = self._agree(options, skip=busy == "skip", plain=plain)
        if token is None:
            return None
        self.finish()
        if behind:
            self._refuse_after_failure(target, token)
        lost = sums_of_lost(model.comm, list(model.trainable()), "engine.save()")
        self.lock.begin(token)
        draft = Draft(target, token, latest=latest, lock=self.lock, adds=keep is None)
        job = Job(model, draft, keep, nonfinite, begun, self._gone, self._pulse)
        lending = None if plain or lost else Lending(self._spares)
        try:
            said = self._everyone(f"save/{token}/ready", job.prepare(model, state, rank_state, left_out, lost, lending))
            if job.error is not None and not isinstance(job.error, Exception):
                raise job.error
            if any(said):
                if job.error is None:
                    tell_launcher(by_rank(said), follows=True)
                raise job.failure(by_rank(said)) from job.error
            job.begin(self._hosts(job, token, shared))
        except BaseException as error:
            job.give_up(error)
            raise
        saving = self.last = Saving(target)
        if wait or job.reads_files:
            job.run(saving)
            if wait:
                saving.wait()
            return saving
        if self._memory not in model.rows:
            model.rows.append(self._memory)
        try:
            self._blocks = job.copy(self._blocks)
            self._thread.do(partial(job.run, saving))
        except BaseException as error:
            job.give_up(error)
            saving._end(None, error)
            saving.told = True
            raise
        self._job = job
        atexit.register(self._at_exit)
        return saving

    def _agree(self, text: str, *, skip: bool, plain: bool) -> tuple[str | None, bool, bool]:
        """The token of a save that all ranks make to the same place; None if it is skipped, as another is under way.
        And whether any rank has to write what is its own; and whether on any the save before may have failed.

        Raises:
            ConfigError: on all ranks: they were given different ones.
        """
        model = self._model
        code = float(int.from_bytes(sha256(text.encode()).digest()[:6], "big"))
        token = float(int.from_bytes(os.urandom(6), "big")) if model.rank == 0 else 0.0
        under_way = self.last is not None and not self.last.done
        behind = under_way or (self.last is not None and self.last.error is not None)
        mine = [float(skip and under_way), token, code, -code, float(plain), float(behind)]
        flags = model.comm.control(mine, dist.ReduceOp.MAX)
        if flags[0]:
            return None, plain, False
        name = f"{int(flags[1]):012x}"
        if flags[2] != -flags[3]:
            said = self._everyone(f"save/{name}/place", text)
            raise ConfigError(
                f"engine.save() was given different places or options: {by_rank(said)}; give every rank the same."
            )
        return name, bool(flags[4]), bool(flags[5])

    def _hosts(self, job: Job, token: str, shared: bool | None) -> list[Host]:
        """The hosts that write a folder each.

        Raises:
            CheckpointError: on all ranks: one of them cannot, or all were to share one.
        """
        model, draft = self._model, job.draft
        anyone = lambda said: bool(model.comm.control([float(said)], dist.ReduceOp.MAX)[0])  # noqa: E731
        everyone = lambda key, text: self._everyone(f"save/{token}/{key}", text)  # noqa: E731
        try:
            hosts = find_hosts(draft, model.rank, model.world_size, anyone=anyone, everyone=everyone)
        except CheckpointError as error:
            raise job.failure(str(error)) from error
        if len(hosts) == 1 or shared is False:
            return hosts
        told = " and ".join(map(str, hosts)) if len(hosts) < 5 else f"{len(hosts)} hosts, {hosts[0]} among them,"
        if shared:
            raise job.failure(
                f"{told} do not see the same folder there: give a path on a file system that all hosts share, or let "
                "each host keep its own part with shared=False"
            )
        if model.rank == 0 and not self._told:
            LOG.warning(
                "%s do not share %s: each keeps the part that its ranks wrote, and all parts are needed to load one. "
                "shared=False says that this is meant, shared=True refuses it.",
                told,
                draft.target.parent,
            )
        self._told = True
        return hosts

    def _everyone(self, key: str, text: str) -> list[str]:
        """What every rank says, by rank; a rank that is gone is an error at once, and not after a long wait."""
        model, store = self._model, self._model.comm.mesh.asked
        if store is None:
            return [text]
        if text:
            ask(store, "set", f"{key}/{model.rank}", text)
        if not model.comm.control([float(bool(text))], dist.ReduceOp.MAX)[0]:
            return [""] * model.world_size
        keys = [f"{key}/{rank}" for rank in range(model.world_size)]
        return [ask(store, "get", each).decode() if ask(store, "check", [each]) else "" for each in keys]

    def _refuse_after_failure(self, target: Path, token: str) -> None:
        """
        Raises:
            CheckpointError: on all ranks: the save before failed, or one before it did, and nobody has been told by an
                exception.
        """
        failed = self._untold()
        said = self._everyone(f"save/{token}/before", "" if failed is None else str(failed))
        if any(said):
            told = next(filter(None, said)).rstrip(".")
            if failed is None:
                tell_launcher(told, follows=True)
            raise CheckpointError(
                f"engine.save() to {target} was not begun, as the save before it failed in the background: {told}. "
                "Save again when that is mended."
            ) from failed

    def finish(self) -> None:
        """Waits for the save that is under way, and logs its failure."""
        if self._job is not None:
            assert self.last is not None
            self.last._over.wait()
            self._job = None
            atexit.unregister(self._at_exit)
        self.tell()

    def close(self) -> None:
        """Waits for the save that is under way, gives back the memory of copies and leaves the folders to others."""
        self.finish()
        for thread in (self._thread, self._pulse):  # which have nothing to do any more, but may wait for a store
            thread.end(SILENCE_OF_DEAD)
        self.lock.release()
        if self._memory in self._model.rows:
            self._model.rows.remove(self._memory)
        self._blocks, self._spares = [], []

    def break_off(self) -> None:
        """On any thread: another rank is gone, so a save that is under way ends at once, and there is no other."""
        self._gone.set()

    def leave(self) -> RunLock:
        """A next epoch comes, so a save under way ends soon; and the folders go on as the run's, whose next engine has
        :meth:`go_on`."""
        if self._job is not None:
            self._job.messages.wait_at_most(SILENCE_OF_DEAD)
        lock, self.lock = self.lock, RunLock()
        return lock

    def go_on(self, lock: RunLock) -> None:
        """Saves are those of the run that had these folders."""
        self.lock = lock

    def raise_failure(self) -> None:
        """
        Raises:
            CheckpointError: the last save failed in the background, and no call has raised that yet.
        """
        if (failed := self._untold()) is not None:
            raise failed

    def _untold(self) -> BaseException | None:
        """The failure of the last save that no call has raised; from now on one has."""
        return None if self.last is None else self.last._untold()

    def _memory(self) -> MemoryRow:
        held = sum(block.nbytes for block in (*self._blocks, *self._spares))
        return MemoryRow("checkpoint", "host", held, 0.0, held)

    def _at_exit(self) -> None:
        if self._job is not None:
            self._job.messages.wait_at_most(SILENCE_AT_EXIT)
        self.finish()

    def tell(self) -> None:
        """Logs a failure that nobody has heard of: training goes on until the next save, which raises it."""
        if self.last is not None:
            self.last._log()


def check_buffers(model: ShardedModel) -> None:
    """A checkpoint has a buffer once, as rank 0 has it, so ranks that read what rank 0 reads have to have the same.

    Raises:
        ConfigError: on all ranks: some have another one.
    """
    mesh = model.comm.mesh
    buffers = buffers_of(model.module)
    if mesh.data_ranks == mesh.world or not buffers:
        return
    texts = [
        f"{name!r} with the checksum {checksum(as_bytes(buffer.detach().cpu().contiguous()).numpy())}"
        for name, (buffer, _) in buffers.items()
        if not mesh.data_rank
    ]
    over = tuple(axis for axis in mesh.sizes if axis not in mesh.data)
    hint = (
        "a checkpoint has one for all; give them equal values, or leave it out with register_buffer(persistent=False)"
    )
    model.comm.agreement.same({"the buffers": Claim(texts, over, hint)})


def check_options(busy: str, keep: int | None, nonfinite: str, gradients: str, shared: bool | None) -> None:
    """
    Raises:
        ConfigError: one of the arguments of :meth:`Engine.save` is none of its values.
    """
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
    if shared not in (None, True, False):
        raise ConfigError(
            f"engine.save(shared={shared!r}): all hosts share the folder (True), each keeps its own part (False), or "
            "that is found out (None)."
        )
