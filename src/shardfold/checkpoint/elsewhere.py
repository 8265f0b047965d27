"""Files of a checkpoint that lie on other hosts, read over the network: a few MiB at a time, while a load goes on.

Every rank answers the others from a thread of its own: ``(file, where, how many bytes)`` comes in, these bytes go out.
A Gloo group of its own carries that, as a load has collectives under way at the same time, and as a rank that nobody
asks for a long while must not take the others' groups with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.checkpoint.folders import open_regular
from shardfold.checkpoint.index import SUM_BYTES
from shardfold.comm.mesh import DataMesh
from shardfold.errors import CheckpointError

__all__ = ["Elsewhere"]

ASK, STATUS, BYTES = 1, 2, 3  # tags of the messages
READ, STOP = 0, 1  # what is asked for
SHORT, STRANGE = -1, -2  # in place of the number of an error
WHY = {SHORT: "it is cut short", STRANGE: "it cannot be opened, or is not a regular file of the checkpoint's folder"}
LONG = timedelta(days=1)  # nobody may ask a rank for anything in a long load
SOON = timedelta(seconds=60)


class Elsewhere:
    """What other ranks can read and this one cannot, and the other way round. Every rank makes one at the same time.

    Args:
        mesh: the ranks.
        limit: seconds until a rank that does not answer is an error.
        folder: of the checkpoint on this rank's host; None: it has none.
        holders: by the name of a file, the ranks that can read it; the same on all ranks.
    """

    def __init__(self, mesh: DataMesh, limit: float, folder: Path | None, holders: Mapping[str, Sequence[int]]) -> None:
        self._mesh, self._limit, self._folder = mesh, limit, folder
        self._files, self._holders = sorted(holders), holders
        self._numbers = {name: number for number, name in enumerate(self._files)}
        self._group = mesh.open_group(LONG)
        self.num_bytes = 0  # that came from others
        self._thread: threading.Thread | None = threading.Thread(
            target=self._serve, name="shardfold-files", daemon=True
        )
        self._thread.start()

    def __contains__(self, file: str) -> bool:
        """Whether others have to be asked for a file."""
        return self._mesh.rank not in self._holders[file]

    def holder(self, file: str) -> int:
        """The rank that this one asks; ranks ask different ones."""
        return self._holders[file][self._mesh.rank % len(self._holders[file])]

    def read(self, file: str, at: int, out: Tensor) -> None:
        """Bytes of a file from ``at`` on into ``out``, uint8 ``(n,)`` with ``n`` up to ``SUM_BYTES``.

        Raises:
            CheckpointError: the rank that has it cannot read it, or is gone.
        """
        holder, limit = self.holder(file), timedelta(seconds=self._limit)
        question = torch.tensor([READ, self._numbers[file], at, out.numel()])
        status, values = torch.zeros(1, dtype=torch.int64), out if out.is_contiguous() else torch.empty_like(out)
        try:
            self._send(question, holder, ASK, limit)
            self._receive(status, holder, STATUS, limit)
            if not status.item():
                self._receive(values, holder, BYTES, limit)
        except RuntimeError as error:
            raise CheckpointError(f"{file}: rank {holder}, whose host has it, is gone ({_line(error)}).") from error
        if code := int(status.item()):
            why = WHY.get(code) or os.strerror(code)
            raise CheckpointError(f"{file}: rank {holder}, whose host has it, cannot read it ({why}).")
        if values is not out:
            out.copy_(values)
        self.num_bytes += out.numel()

    def close(self) -> None:
        """Ends it, when no rank reads any more; may be called twice. Each rank ends the thread of the next one."""
        if self._thread is None:
            return
        with suppress(RuntimeError):  # it is gone
            self._send(torch.tensor([STOP, 0, 0, 0]), (self._mesh.rank + 1) % self._mesh.world, ASK, SOON)
        self._thread.join(SOON.total_seconds())
        if not self._thread.is_alive():
            self._mesh.close_group(self._group)
        self._thread = None

    # -- answering

    def _serve(self) -> None:
        opened: dict[int, int] = {}
        question, buffer = torch.zeros(4, dtype=torch.int64), torch.empty(SUM_BYTES, dtype=torch.uint8)
        try:
            while True:
                who = dist.recv(question, group=self._group, tag=ASK)
                what, number, at, length = map(int, question.tolist())
                if what == STOP:
                    return
                values = buffer[:length]
                code = self._look(opened, number, at, values) if 0 < length <= SUM_BYTES else SHORT
                self._send(torch.tensor([code]), who, STATUS, LONG)
                if not code:
                    self._send(values, who, BYTES, LONG)
        except RuntimeError:  # who asks finds out by itself
            return
        finally:
            for fd in opened.values():
                os.close(fd)

    def _look(self, opened: dict[int, int], number: int, at: int, out: Tensor) -> int:
        """Reads a range of a file; 0, or the number of an error, or SHORT where the file ends early, or STRANGE."""
        view, done = memoryview(out.numpy()), 0  # pyright: ignore[reportArgumentType]
        try:
            if number not in opened:
                assert self._folder is not None
                opened[number] = open_regular(self._folder, self._files[number])
            while done < len(view) and (got := os.preadv(opened[number], [view[done:]], at + done)):
                done += got
        except CheckpointError:
            return STRANGE
        except OSError as error:
            return error.errno or SHORT
        return 0 if done == len(view) else SHORT

    # -- messages

    def _send(self, values: Tensor, to: int, tag: int, limit: timedelta) -> None:
        work = dist.isend(values, to, group=self._group, tag=tag)
        assert work is not None
        work.wait(limit)

    def _receive(self, values: Tensor, source: int, tag: int, limit: timedelta) -> None:
        work = dist.irecv(values, source, group=self._group, tag=tag)
        assert work is not None
        work.wait(limit)


def _line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
