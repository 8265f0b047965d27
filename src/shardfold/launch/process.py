"""What every launcher here needs of the operating system: ports, cores, signals, and how an end is told."""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from typing import NoReturn

__all__ = [
    "INTERRUPTED",
    "QUIET",
    "SAID",
    "adopt_orphans",
    "die_with_parent",
    "end_process",
    "exit_status",
    "free_port",
    "give_defaults",
    "how",
    "interface_towards",
    "is_rank",
    "leads_home",
    "num_cores",
    "python_module",
    "signal_main_thread",
]

INTERRUPTED = 130
"""Exit status of a run that was stopped by Ctrl-C and ended cleanly."""
SAID = 2
"""Exit status of a process that has written one readable sentence on what is wrong: there is nothing to add to it."""

QUIET = "TORCH_CPP_LOG_LEVEL", "ERROR"
"""Variable, which torch reads once as it is imported, and its value with which its C++ code writes no warnings."""

SIOCGIFADDR = 0x8915
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
# Looked up before any process is forked: the child may then only call it.
PRCTL = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
TGKILL = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None) if sys.platform == "linux" else None


# What ``-m`` does, but that modules of the current folder are not found: for Pythons that have no option for it.
BOOT = """
import sys
sys.path[:] = [each for each in sys.path if each]
sys.argv[:] = sys.argv[1:]
import runpy
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def python_module(module: str, *, has_option: bool = sys.version_info >= (3, 11)) -> list[str]:
    """Return the command that runs a module of ours: a ``random.py`` in the current folder is not Python's own there.

    A user's script is not run this way: it finds the modules beside it, as with ``python script.py``.
    """
    return [sys.executable, "-P", "-m", module] if has_option else [sys.executable, "-c", BOOT, module]


def is_rank() -> bool:
    """Return whether a launcher (this one, or torchrun) started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leads_home(name: str) -> bool:
    """Whether a host's own name has an address by which other hosts find it: the first that is of this host, which Gloo
    takes, is no loopback. Debian's installer writes ``127.0.1.1`` for the name."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return not ip_address(str(address[0]).partition("%")[0]).is_loopback
    return False


def interface_towards(host: str) -> str:
    """The name of the network interface on the way to another host; "" where there is none, or it is the loopback."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # nothing is sent
                own = probe.getsockname()[0]
                return next((name for name, theirs in _addresses(probe) if theirs == own and name != "lo"), "")
    return ""


def _addresses(probe: socket.socket) -> Iterator[tuple[str, str]]:
    """Name and address of each interface of this host (Linux): the first IPv4 address, and those of IPv6."""
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            yield name, socket.inet_ntop(socket.AF_INET, found[20:24])
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            words = line.split()
            yield words[5], str(ip_address(bytes.fromhex(words[0])))


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def give_defaults(environment: MutableMapping[str, str], ranks: int) -> None:
    """What one of so many ranks of this host has in its environment where the user has not set it.

    A share of the cores, as with more threads than cores every collective waits for the rank that is scheduled last;
    and no warnings of PyTorch's C++ code, which writes frames of its own in front of our sentence where a rank is gone.
    """
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // ranks)))
    environment.setdefault(*QUIET)


def die_with_parent() -> None:
    """Runs in the child before it becomes another program: ask Linux to kill it when the launcher dies."""
    if PRCTL is not None:
        with suppress(OSError):
            PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(adopts: bool) -> bool:
    """Whether what a child of this process leaves becomes a child of this process, and not of process 1 (Linux).

    Returns:
        What was so before.
    """
    before = ctypes.c_int(0)
    if PRCTL is not None:
        PRCTL(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        PRCTL(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(adopts), 0, 0, 0)
    return bool(before.value)


def end_at_signals() -> None:
    """In process 1 of a container, lets signals end it as they end any other one, until ranks are there: Linux passes
    over those that process 1 does not handle, and a SIGTERM while torch is imported would be lost."""
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, _: sys.exit(exit_status(-number)))


def end_process(status: int) -> NoReturn:
    """End a launcher without taking the interpreter apart: with torch imported that takes half a second of a core, and
    a thread that still waits for the answer of a store, and comes back from C++ meanwhile, would end the process by
    SIGABRT."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the terminal is gone
            stream.flush()
    os._exit(status)


def signal_main_thread(pid: int, number: int) -> None:
    """Send a signal that the main thread of a process takes: in which thread a handler runs is else left to Linux, and
    the main thread of one that was stopped may go on meanwhile.

    Raises:
        ProcessLookupError: there is no such process.
    """
    if TGKILL is None:
        os.kill(pid, number)
    elif TGKILL(pid, pid, number) and ctypes.get_errno() == errno.ESRCH:
        raise ProcessLookupError(errno.ESRCH, "no such process", pid)


def exit_status(returncode: int) -> int:
    """Return the shell's way to write an end: 128 + signal number for a signal."""
    return 128 - returncode if returncode < 0 else returncode


def how(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
