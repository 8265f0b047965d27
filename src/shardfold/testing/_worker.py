"""The life of one worker process: wait for a call, become a rank, run it, answer, and become nobody again.

Messages to a worker are a pickled `Call`, `END` (every rank has answered: the group may go) or `QUIT`; the end of the
pipe counts as `QUIT`. Answers are `Answer` values. Everything that a call needs of the caller's surroundings travels in
the call: a worker is forked from a server that was started earlier, with another environment and import path.

A worker that fails answers first and exits at once, because that closes its connections: its peers stop waiting for it
and report in their turn. Ranks leave the group only after `END`, so none closes a connection that another still reads.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any

import torch
import torch.distributed as dist

END = b"end"
QUIT = b"quit"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One function call on one rank; ``function`` is the pickle of ``(fn, args, kwargs)``."""

    function: bytes
    rank: int
    world_size: int
    store: str | None  # the path of the FileStore; None: no process group
    group_timeout: float  # seconds
    filters: bytes  # the pickle of the caller's `warnings.filters`
    environment: dict[str, str]
    path: list[str]  # the caller's `sys.path`
    directory: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank reports: the pickle of its result, or the text of its traceback."""

    result: bytes | None = None
    summary: str = ""  # "ValueError: boom"
    traceback: str = ""
    time: float = 0.0  # time.monotonic() of the failure: comparable between the processes of one machine


def serve(conn: connection.Connection, stacks: str, device: str | None = None) -> None:
    """Answer calls until told to quit.

    Args:
        conn: where they come from.
        stacks: the path that receives this process's stacks on SIGUSR1.
        device: ``sim`` installs the simulated device, which stays; None: there is the CPU only.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: the caller decides
    # chain=True: the stacks are written and then the signal's default action ends the process, so the caller
    # learns from its exit that the text is complete.
    stacks_file = open(stacks, "w", encoding="utf-8")  # noqa: SIM115 (open for as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True, chain=True)
    faulthandler.enable(file=stacks_file)  # a segmentation fault leaves its stack in the same place
    _exit_with_parent()
    torch.set_num_threads(int(os.environ.get("SHARDFOLD_TEST_THREADS", "1")))
    if device is not None:
        _install()
    gc.freeze()  # the modules imported so far never die: collecting after each call then costs a millisecond
    while (message := _receive(conn)) != QUIT:
        answer = _answer(pickle.loads(message), device)
        conn.send_bytes(pickle.dumps(answer))
        if answer.result is None:
            _flush()
            os._exit(1)
        if _receive(conn) != END:
            break
        _leave()
        if device is not None:
            _reset()


def _install() -> None:
    from shardfold.testing.simulated.install import install

    install()


def _reset() -> None:
    from shardfold.testing.simulated.device import the_device

    the_device().reset()


def _answer(call: Call, device: str | None) -> Answer:
    try:
        os.environ.clear()
        os.environ.update(call.environment)
        os.environ.update(_rank_environment(call))
        sys.path[:] = call.path
        os.chdir(call.directory)
        with warnings.catch_warnings():
            _set_filters(pickle.loads(call.filters))
            if call.store is not None:
                _join(call, call.store, "gloo" if device is None else "simccl")
            fn, args, kwargs = pickle.loads(call.function)
            return Answer(result=_pickled_result(fn(*args, **kwargs)))
    except BaseException as error:  # SystemExit and pytest's outcomes too: a rank that stops is a rank that failed
        now = time.monotonic()
        # The first entry is this function: the reader's code begins below it.
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, shown or error.__traceback__))
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        return Answer(summary=summary, traceback=text, time=now)


def _rank_environment(call: Call) -> Mapping[str, str]:
    rank, world_size = str(call.rank), str(call.world_size)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in call.environment:
        names["GLOO_SOCKET_IFNAME"] = "lo"  # else Gloo looks up the host's name, which may not resolve
    return names


def _join(call: Call, path: str, backend: str) -> None:
    timeout = timedelta(seconds=call.group_timeout)
    store = dist.FileStore(path, call.world_size)  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=call.rank, world_size=call.world_size, timeout=timeout)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)  # a call begins as in a fresh process
    gc.collect()  # what the call left in cycles (models with hooks) must not live into the next call
    gc.freeze()  # nor need what it imported be looked at after each: a tenth of a second with transformers


def _pickled_result(result: Any) -> bytes:
    try:
        # Plain pickle, not `Connection.send`: that would share tensors through file descriptors which die with us.
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the function's result, a {type(result).__name__}, cannot be pickled: {error}") from error


def _set_filters(filters: Sequence[Any]) -> None:
    """Make ``filters`` (entries of the caller's `warnings.filters`, first match wins) this process's own."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)


def _pattern(matcher: str | re.Pattern[str] | None) -> str:
    if isinstance(matcher, str):  # Python's own start-up filters match whole strings
        return re.escape(matcher) + r"\Z"
    return matcher.pattern if matcher else ""


def _receive(conn: connection.Connection) -> bytes:
    try:
        return conn.recv_bytes()
    except (EOFError, OSError):
        return QUIT


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _exit_with_parent() -> None:
    """End this process when the caller's dies, even in the middle of a call; the server it was forked from does not."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="shardfold-testing-parent", daemon=True).start()
