"""Ranks for a test: processes with torch already imported, in a Gloo group over a file, in about a tenth of a second.

Python's fork server imports torch once and forks a worker per rank. `run_ranks` uses workers once; `Ranks` keeps them
warm between calls and replaces them after a failure. A worker has one torch thread, the caller's environment,
directory, import path and warning filters, and RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE as `torchrun` sets
them.

Functions, arguments and results are pickled. As with all of `multiprocessing`, a script that calls this from its top
level needs the ``if __name__ == "__main__":`` guard, since workers import the script.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

from shardfold.errors import ShardfoldError, UsageError, did_you_mean
from shardfold.plan.checks import keywords, known_arguments, unknown
from shardfold.testing import _worker as worker

# Imported once by the fork server. The first step of a torch optimizer imports `torch._dynamo`, a second of its own;
# pytest's start script is imported again by each worker.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "shardfold",
    "shardfold.engine.engine",
    "shardfold.testing._worker",
)

SETTLE = 5.0  # seconds that the other ranks have to report after the first failure, and a process to die of a signal
SHOWN_STACK_LINES = 60  # of each rank that hung


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """Why one rank has no result.

    ``kind`` is ``"raised"``, ``"died"`` (a signal or an exit), ``"hung"`` (the time was over) or ``"stopped"`` (it was
    still busy after another rank had failed). ``text`` is its traceback or stacks, where there is one.

    Examples:
        >>> RankFailure(rank=1, kind="exception", summary="ValueError: no").rank
        1
    """

    rank: int
    kind: str
    summary: str
    text: str = ""
    time: float = 0.0  # time.monotonic()

    @property
    def _order(self) -> tuple[int, float]:
        # A peer's death or exit shows up here as a lost connection, sometimes before the death itself is noticed.
        consequence = self.kind == "raised" and any(
            sign in self.text for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
        )
        late = self.kind == "stopped" or consequence
        return (1 if late else 0, self.time)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.summary}" + (f"\n{self.text.rstrip()}" if self.text else "")


class RanksFailed(ShardfoldError, RuntimeError):
    """Some ranks of a call failed. ``failures`` has one entry per rank without a result, the first to fail first.

    Examples:
        >>> failure = RankFailure(rank=0, kind="exception", summary="ValueError: no")
        >>> RanksFailed([failure], 2).failures[0].summary
        'ValueError: no'
    """

    def __init__(self, failures: Sequence[RankFailure], world_size: int) -> None:
        self.failures = tuple(sorted(failures, key=lambda failure: failure._order))
        self.world_size = world_size
        heading = f"{len(self.failures)} of {world_size} ranks failed; the first was rank {self.failures[0].rank}"
        super().__init__("\n\n".join([heading, *map(str, self.failures)]))


class _Worker:
    """One live process and our end of its pipe."""

    def __init__(self, folder: Path, number: int, device: str | None, preload: Sequence[str]) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.conn: connection.Connection = ours
        self.stacks = folder / f"stacks-{number}"
        context = _context(preload)
        self.process = context.Process(
            target=worker.serve, args=(theirs, str(self.stacks), device), name=f"shardfold-rank-worker-{number}"
        )
        self.process.start()
        theirs.close()  # else the end of the process would not be the end of the pipe

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def ready(self) -> bool:
        """Whether it waits for a call; asked between calls, when nothing comes from one that does.

        The end of a process ends its pipe at once; that it is not ``alive`` is known only when the fork server, which
        may be slow, has reaped it and said so.
        """
        return self.alive and not self.conn.poll()

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it died meanwhile: whoever waits for its answer finds that
            self.conn.send_bytes(message)

    def answer(self) -> worker.Answer | None:
        """The answer waiting in the pipe; None if the process ended without one."""
        try:
            return pickle.loads(self.conn.recv_bytes()) if self.conn.poll() else None
        except (EOFError, OSError):
            return None

    def stack_text(self) -> str:
        """What the process wrote about its stacks, the innermost call first."""
        try:
            lines = self.stacks.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        cut = [f"... {len(lines) - SHOWN_STACK_LINES} more lines"] if len(lines) > SHOWN_STACK_LINES else []
        return "\n".join(lines[:SHOWN_STACK_LINES] + cut)

    def ask_for_stacks(self) -> None:
        """Have the process write where each of its threads stands, and end."""
        if self.alive:
            os.kill(self.pid, signal.SIGUSR1)

    def asked_stacks(self) -> str:
        self.process.join(SETTLE)
        return self.stack_text() or "(it did not answer the request for its stacks)"

    def kill(self) -> None:
        if self.alive:
            self.process.kill()
        self.process.join()
        self.process.close()
        self.conn.close()

    def quit(self) -> None:
        self.send(worker.QUIT)
        self.process.join(SETTLE)  # a thread that the last call left behind may keep it: then it is killed
        self.kill()


def _context(more: Sequence[str]) -> ForkServerContext:
    if sys.platform == "win32":
        raise UsageError("shardfold.testing needs a fork server, which Windows does not have: use Linux or macOS.")
    context = multiprocessing.get_context("forkserver")
    preload = [*PRELOAD, *more, *(["pytest"] if "pytest" in sys.modules else [])]
    context.set_forkserver_preload(preload)  # without effect if a fork server runs already: slower, not wrong
    return context


@known_arguments
class Ranks:
    """Up to ``num_ranks`` warm worker processes, started when first needed; a context manager.

        with Ranks(4) as ranks:
            ranks.run(fn, *args)                     # on 4 ranks
            ranks.run(other, *args, world_size=2)    # the same processes, a new group

    With ``device="sim"`` each process has the simulated device (:mod:`shardfold.testing.simulated`), and the group is
    one of its own, with NCCL's semantics.

    ``preload`` names modules that are slow to import and that ranks will need: they are imported once, by the process
    that the workers are forked from (of the first pool of a program: later ones fork from the same process).

    Each call has its own process group. Module globals, torch's default dtype and the like do survive from call to call
    in a worker: a function that changes them changes them back, or runs under `run_ranks`.

    Examples:
        >>> with Ranks(2) as ranks:
        ...     ranks.run(os.getpid, world_size=2)[0] != os.getpid()
        True
    """

    def __init__(self, num_ranks: int, *, device: str | None = None, preload: Sequence[str] = ()) -> None:
        _check_count("num_ranks", num_ranks)
        self.num_ranks = num_ranks
        self._preload = _checked_modules(preload)
        self._device = _checked_device(device)
        self._workers: list[_Worker] = []
        self._started = 0
        self._calls = 0
        self._folder = Path(tempfile.mkdtemp(prefix="shardfold-ranks-"))
        self._closed = False
        atexit.register(self.close)  # before multiprocessing's own exit, which would wait for the workers for ever

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers now alive, by rank."""
        return [each.pid for each in self._workers if each.ready]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 120.0,
        group_timeout: float | None = None,
        distributed: bool = True,
        warnings_as_errors: bool | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ``world_size`` ranks (default: all) and return the results by rank.

        The default process group is a Gloo group (or one of the device), made before the call, unless
        ``distributed=False``. ``timeout`` is in seconds and bounds the call; ``group_timeout`` (default: beyond
        ``timeout``) bounds one collective. ``warnings_as_errors``: True or False; by default the ranks have the
        caller's warning filters.

        Raises `RanksFailed` if any rank raised, died or hung, and `UsageError` for arguments that cannot be used.
        """
        if self._closed:
            raise UsageError("These Ranks are closed: make new ones with Ranks(num_ranks).")
        world_size = self.num_ranks if world_size is None else world_size
        _check_count("world_size", world_size)
        if world_size > self.num_ranks:
            raise UsageError(f"world_size={world_size} is more than the {self.num_ranks} ranks of this pool.")
        _check_keywords(fn, kwargs)
        function = _pickled_function(fn, args, kwargs)
        filters = pickle.dumps(_filters(warnings_as_errors))
        self._calls += 1
        store = self._folder / f"store-{self._calls}"
        workers = self._ready(world_size)
        try:
            for rank, each in enumerate(workers):
                call = worker.Call(
                    function=function,
                    rank=rank,
                    world_size=world_size,
                    store=str(store) if distributed else None,
                    group_timeout=timeout + 60 if group_timeout is None else group_timeout,
                    filters=filters,
                    environment=dict(os.environ),
                    path=list(sys.path),
                    directory=os.getcwd(),
                )
                each.send(pickle.dumps(call))
            results = _collect(workers, timeout)
        except BaseException:
            for each in workers:
                each.kill()
            self._workers = self._workers[world_size:]
            raise
        finally:
            store.unlink(missing_ok=True)
        for each in workers:
            each.send(worker.END)
        return [pickle.loads(result) for result in results]

    def close(self) -> None:
        """End the workers and remove their files; may be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for each in self._workers:
            each.send(worker.QUIT)
        for each in self._workers:
            each.quit()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ready(self, world_size: int) -> list[_Worker]:
        """The first ``world_size`` workers, ready: those that died between calls are replaced."""
        for each in [each for each in self._workers if not each.ready]:
            each.kill()
            self._workers.remove(each)
        while len(self._workers) < world_size:
            self._started += 1
            self._workers.append(_Worker(self._folder, self._started, self._device, self._preload))
        return self._workers[:world_size]


@known_arguments
def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float | None = None,
    distributed: bool = True,
    warnings_as_errors: bool | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``world_size`` fresh processes and return the results by rank.

    ``fn`` must be defined at the top level of a module. ``device="sim"``: each process has the simulated device
    (:mod:`shardfold.testing.simulated`), and the group is one of its own. Other options and errors are those of
    `Ranks.run`.

    Examples:
        >>> run_ranks(os.getpid, 2)[0] != os.getpid()
        True
    """
    with Ranks(world_size, device=device) as ranks:
        return ranks.run(
            fn,
            *args,
            timeout=timeout,
            group_timeout=group_timeout,
            distributed=distributed,
            warnings_as_errors=warnings_as_errors,
            **kwargs,
        )


def _collect(workers: Sequence[_Worker], timeout: float) -> list[bytes]:
    """The pickled results by rank; raises `RanksFailed`. Ranks that do not answer in time are stopped here."""
    results: dict[int, bytes] = {}
    failures: list[RankFailure] = []
    waiting = dict(enumerate(workers))
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        # The sentinel too: a process that the rank started may hold the pipe open after the rank is gone.
        sources = [source for each in waiting.values() for source in (each.conn, each.process.sentinel)]
        ready = connection.wait(sources, left)
        for rank, each in list(waiting.items()):
            if each.conn not in ready and each.process.sentinel not in ready:
                continue
            del waiting[rank]
            answer = each.answer()
            if answer is not None and answer.result is not None:
                results[rank] = answer.result
                continue
            if not failures:
                deadline = min(deadline, time.monotonic() + SETTLE)
            failures.append(_failure(rank, each, answer))
    if waiting:
        kind = "stopped" if failures else "hung"
        summary = (
            "still busy after another rank failed; it was stopped here, innermost call first"
            if failures
            else f"did not return within {timeout:g} s; it stood here, innermost call first"
        )
        for each in waiting.values():  # all before any has ended, else the others lose their connections to it
            each.ask_for_stacks()
        failures += [
            RankFailure(rank=rank, kind=kind, summary=summary, text=each.asked_stacks(), time=time.monotonic())
            for rank, each in waiting.items()
        ]
    if failures:
        raise RanksFailed(failures, len(workers))
    return [results[rank] for rank in range(len(workers))]


def _failure(rank: int, each: _Worker, answer: worker.Answer | None) -> RankFailure:
    if answer is not None:
        return RankFailure(rank=rank, kind="raised", summary=answer.summary, text=answer.traceback, time=answer.time)
    noticed = time.monotonic()
    each.process.join(SETTLE)
    code = each.process.exitcode
    if code is not None and code < 0:
        try:
            summary = f"killed by {signal.Signals(-code).name} (exit code {code})"
        except ValueError:
            summary = f"killed by signal {-code} (exit code {code})"
    else:
        summary = f"exited with code {code} before its function returned"
    return RankFailure(rank=rank, kind="died", summary=summary, text=each.stack_text(), time=noticed)


def _pickled_function(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise UsageError(
            f"{name} or its arguments cannot be pickled for the ranks ({error}): "
            "define functions at the top level of a module."
        ) from error


def _filters(warnings_as_errors: bool | None) -> list[Any]:
    if warnings_as_errors is None:
        return list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if warnings_as_errors else "default")
        return list(warnings.filters)


OPTIONS = ("world_size", "timeout", "group_timeout", "distributed", "warnings_as_errors", "device")
"""Arguments of a call on ranks that are not the function's."""


def _check_keywords(fn: Callable[..., Any], given: dict[str, Any]) -> None:
    try:
        known = keywords(fn)
    except (TypeError, ValueError):  # no function, or one of C, which tells nothing
        return
    call = f"run_ranks() of {getattr(fn, '__name__', 'a function')}()"
    if known is not None and (said := unknown(call, given, [*known, *OPTIONS])):
        raise UsageError(said)


def _checked_device(device: Any) -> str | None:
    if device in (None, "cpu"):
        return None
    if device != "sim":
        raise UsageError(
            f"device={device!r}: ranks of a test have the CPU (None) or the simulated device ('sim')."
            f"{did_you_mean(str(device), ('cpu', 'sim'))}"
        )
    return "sim"


def _checked_modules(preload: Any) -> tuple[str, ...]:
    if not isinstance(preload, list | tuple) or not all(isinstance(name, str) for name in preload):
        raise UsageError(f"preload must be names of modules, as in preload=['transformers'], not {preload!r}.")
    for name in preload:
        if importlib.util.find_spec(name.partition(".")[0]) is None:  # of a package alone: more would import it here
            raise UsageError(f"preload={name!r}: no such module is installed.")
    return tuple(preload)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a positive integer, not {value!r}.")
