"""Saving: every rank writes what it owns, and one rank makes it a checkpoint when all have said that theirs is there.

    each rank    copies its part (async) -> writes its file -> says what is in it
    rank 0       hears all -> merges the index -> renames the folder -> moves ``latest`` -> says so

Ranks talk through the key-value store (``messages``), so nothing of it is a collective and it runs in a thread beside
the training. A rank that fails says with what; one that dies is missed. Either way nobody waits for ever, the draft is
removed, and what was there before is as it was. On hosts that share no disk each writes into a folder of its own
(``hosts``), and all of these take their places, or none (``outcome``).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardfold.checkpoint.draft import Draft
from shardfold.checkpoint.hosts import Host, find_hosts
from shardfold.checkpoint.index import checksum
from shardfold.checkpoint.job import Job, Saving
from shardfold.checkpoint.messages import SILENCE_AT_EXIT, ask
from shardfold.checkpoint.run_lock import RunLock
from shardfold.comm.agreement import Claim
from shardfold.comm.coalesced import as_bytes
from shardfold.errors import CheckpointError, ConfigError, UsageError, by_rank
from shardfold.plan.report import MemoryRow
from shardfold.sharding.loans import refuse_during
from shardfold.sharding.lost import sums_of_lost
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.whole_state import buffers_of

__all__ = ["Saver", "check_options"]

LOG = getLogger("shardfold")


class Saver:
    """An engine's saves, one at a time.

    Attributes:
        last: the last of them.
        lock: the folders that are this run's.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self.lock = RunLock()
        self.last: Saving | None = None
        self._thread: threading.Thread | None = None
        self._job: Job | None = None
        # Kept from save to save: to write into fresh memory takes four times as long as into this.
        self._blocks: list[Tensor] = []
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
        token = self._agree(options, busy == "skip")
        if token is None:
            return None
        self._refuse_after_failure(target, token)
        lost = sums_of_lost(model.comm, list(model.trainable()), "engine.save()")
        self.lock.begin(token)
        draft = Draft(target, token, latest=latest, lock=self.lock, adds=keep is None)
        job = Job(model, draft, keep, nonfinite, begun)
        try:
            said = self._everyone(f"save/{token}/ready", job.prepare(model, state, rank_state, left_out, lost))
            if job.error is not None and not isinstance(job.error, Exception):
                raise job.error
            if any(said):
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
            job.stall = perf_counter() - begun
            thread = threading.Thread(target=job.run, args=(saving,), name="shardfold-save", daemon=True)
            thread.start()
        except BaseException as error:
            job.give_up(error)
            saving._end(None, error)
            saving.told = True
            raise
        self._job, self._thread = job, thread
        atexit.register(self._at_exit)
        return saving

    def _agree(self, text: str, skip: bool) -> str | None:
        """The token of a save that all ranks make to the same place; None if it is skipped, as another is under way.

        Raises:
            ConfigError: on all ranks: they were given different ones.
        """
        model = self._model
        code = float(int.from_bytes(sha256(text.encode()).digest()[:6], "big"))
        token = float(int.from_bytes(os.urandom(6), "big")) if model.rank == 0 else 0.0
        under_way = self.last is not None and not self.last.done
        flags = model.comm.control([float(skip and under_way), token, code, -code], dist.ReduceOp.MAX)
        if flags[0]:
            return None
        name = f"{int(flags[1]):012x}"
        if flags[2] != -flags[3]:
            said = self._everyone(f"save/{name}/place", text)
            raise ConfigError(
                f"engine.save() was given different places or options: {by_rank(said)}; give every rank the same."
            )
        return name

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
        """Waits for the save that is under way.

        Raises:
            CheckpointError: on all ranks: it failed, or one before it did, and nobody has been told by an exception.
        """
        self.finish()
        failed = self._untold()
        said = self._everyone(f"save/{token}/before", "" if failed is None else str(failed))
        if any(said):
            told = next(filter(None, said)).rstrip(".")
            raise CheckpointError(
                f"engine.save() to {target} was not begun, as the save before it failed in the background: {told}. "
                "Save again when that is mended."
            ) from failed

    def finish(self) -> None:
        """Waits for the save that is under way, and logs its failure."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self._job = None
            atexit.unregister(self._at_exit)
        self.tell()

    def close(self) -> None:
        """Waits for the save that is under way, gives back the memory of copies and leaves the folders to others."""
        self.finish()
        self.lock.release()
        if self._memory in self._model.rows:
            self._model.rows.remove(self._memory)
        self._blocks = []

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
        held = sum(block.nbytes for block in self._blocks)
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
