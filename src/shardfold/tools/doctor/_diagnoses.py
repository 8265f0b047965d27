"""What is wrong with an installation, or costs speed: one line each, with how to mend it."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardfold import accelerator
from shardfold.comm.backend import device_backend
from shardfold.errors import ConfigError
from shardfold.launch.leftovers import has_group
from shardfold.launch.process import leads_home
from shardfold.plan.axes import Mesh
from shardfold.plan.holders import holders, lost_of, spare_told
from shardfold.plan.layout import PRECISIONS
from shardfold.plan.patience import Patience
from shardfold.plan.presets import PRESETS
from shardfold.plan.version import __version__
from shardfold.tiers.limit import memory_limit
from shardfold.tools.extras import EXTRAS, MODULES
from shardfold.tools.observe.readable import format_bytes

__all__ = ["Check", "checks"]

NEEDED = (2, 11)  # of PyTorch
FEW_FILES, SMALL_SHM = 1024, 2**26
QUICK, ASKED = 0.5, 3.0  # seconds for the name of an address
SKEW = 2.0  # seconds that a file's time may be from the clock's


class Check(NamedTuple):
    """One thing that was looked at.

    Attributes:
        state: ``ok``; ``none``: what can be installed on request is not; ``slow``: it works and costs speed; ``bad``:
            something will not work.
        what: what was looked at.
        said: what was found.
        mend: what to do; empty where it is ``ok``.
    """

    state: str
    what: str
    said: str
    mend: str = ""


def checks() -> Iterator[Check]:
    """All of them, one after the other."""
    yield from _software()
    yield from _devices()
    yield from _processes()
    yield from _folders()
    yield from _cpu()


def _software() -> Iterator[Check]:
    yield Check(
        "ok", "versions", f"shardfold {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdecimal())
    if version < NEEDED:
        yield Check(
            "bad", "torch", f"{torch.__version__} is older than {NEEDED[0]}.{NEEDED[1]}", "pip install --upgrade torch"
        )
    if platform.system() != "Linux":
        yield Check("bad", "system", f"{platform.system()} is not supported", "run on Linux")
    imported = {package: module for module, package in MODULES.items()}
    for package, extra in EXTRAS.items():
        if importlib.util.find_spec(imported.get(package, package)) is None:
            yield Check(
                "none", "packages", f"{package} is not installed", f"pip install 'shardfold[{extra}]' for what needs it"
            )


def _devices() -> Iterator[Check]:
    device = accelerator.found()
    if device is None:
        yield Check("ok", "devices", "none: training runs on the CPU, over Gloo")
    else:
        memory = accelerator.total_memory(device)
        sized = "" if memory is None else f" of {format_bytes(memory)}"
        yield Check(
            "ok", "devices", f"{accelerator.count(device)} of {device.type}{sized}: {accelerator.identity(device)}"
        )
        for name in accelerator.lacking(device):
            yield Check("bad", "devices", f"PyTorch's module for {device.type} has no {name}", "update PyTorch")
        try:
            backend = device_backend(device)
        except ConfigError as error:
            yield Check("bad", "backend", str(error), "register one, or train on one rank")
        else:
            if not dist.is_backend_available(backend):
                yield Check("bad", backend, "this PyTorch was built without it", f"install a build for {device.type}")
        if torch.get_float32_matmul_precision() == "highest":
            yield Check(
                "slow",
                "TF32",
                "is off for products of fp32 tensors, as PyTorch leaves it",
                "sf.Precision(tf32=True) if 10 bits are enough, or precision='bf16'",
            )
    if not dist.is_gloo_available():
        yield Check("bad", "Gloo", "this PyTorch was built without it", "install a build that has it")


def _processes() -> Iterator[Check]:
    with socket.socket() as listening:
        try:
            listening.bind(("127.0.0.1", 0))
            yield Check("ok", "ports", "a port of 127.0.0.1 can be opened")
        except OSError as error:
            yield Check(
                "bad", "ports", f"no port of 127.0.0.1 can be opened: {error}", "allow ranks to listen on loopback"
            )
    name = socket.gethostname()
    if not leads_home(name):
        yield Check(
            "ok",
            "host name",
            f"{name!r} leads to no address by which other hosts find this one: `shardfold run` on several tells ranks "
            "the interface on the way to node 0; for other launchers set GLOO_SOCKET_IFNAME",
        )
    if (asked := _seconds_for_no_name()) > QUICK:
        yield Check(
            "slow",
            "names of addresses",
            f"the name server takes {'more than ' * (asked >= ASKED)}{asked:.1f} s to say that it has none for an "
            "address, and PyTorch's store asks for that of each connection, one behind the other: ranks start later",
            "export RES_OPTIONS='timeout:1 attempts:1', or mend /etc/resolv.conf",
        )
    group = "its control group" if has_group() else "no control group, as this process may make none of version 2"
    yield Check(
        "ok",
        "what ranks leave",
        f"is found by its environment, as orphans of the launcher, and by {group}; an empty SHARDFOLD_RUN lets it stay",
    )
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope not in ("", "0") and os.geteuid() != 0:
        yield Check(
            "slow",
            "memory of other ranks",
            f"kernel.yama.ptrace_scope is {scope}: ranks here send by sockets",
            "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE",
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < FEW_FILES:
        yield Check("bad", "open files", f"at most {files} per process", f"ulimit -n {4 * FEW_FILES}")
    patience = Patience.of_environment()
    limits = ", ".join(f"{what} {seconds:g} s" for what, seconds in patience.limits().items())
    yield Check("ok", "patience", f"{patience.seconds:g} s without a sign of life (shardfold run --patience): {limits}")
    yield Check("ok", "one rank's loss", _lost(max(2, accelerator.count(accelerator.found()))))
    limit = memory_limit()
    yield Check(
        "ok", "host memory", f"{format_bytes(limit)} for all ranks of this host" if limit else "no limit is known"
    )


def _seconds_for_no_name() -> float:
    """How long the C library takes for the name of the loopback as a store that listens on IPv6 sees it; /etc/hosts has
    none. At most ``ASKED``: it may wait for a name server that is not there for a minute."""
    begun = time.monotonic()
    asking = threading.Thread(target=socket.getnameinfo, args=(("::ffff:127.0.0.1", 1), 0), daemon=True)
    asking.start()
    asking.join(ASKED)
    return ASKED if asking.is_alive() else time.monotonic() - begun


def _lost(ranks: int) -> str:
    """What each preset loses with a rank of this host, and with this host."""
    mesh, said = Mesh.of({"inter": 1, "intra": ranks}), dict[str, list[str]]()
    for name, table in PRESETS.items():
        on = Mesh(mesh.axes, table.rare)
        found = holders(table.bind(PRECISIONS["bf16"], on), on, ranks)
        said.setdefault(lost_of({state: each.ranks for state, each in found.items()}), []).append(name)
    each = "; ".join(f"{lost} under {', '.join(names)}" for lost, names in said.items())
    return (
        f"of {ranks} in bf16 takes with it {each}. With a host that is alone all goes but checkpoints elsewhere. A "
        f"spare (shardfold run --spares 1) reads what that rank had; {spare_told()}"
    )


def _folders() -> Iterator[Check]:
    shm = Path("/dev/shm")
    room = shutil.disk_usage(shm).total if shm.is_dir() else 0
    if room < SMALL_SHM:
        yield Check(
            "bad", "/dev/shm", f"has {format_bytes(room)}: loader workers and NCCL need more", "docker: --shm-size=8g"
        )
    folder = Path(tempfile.gettempdir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
            skew = abs(os.stat(file.name).st_mtime - time.time())
    except OSError as error:
        yield Check("bad", "temporary files", f"{folder} cannot be written: {error}", "set TMPDIR to a folder that can")
        return
    yield Check("ok", "temporary files", f"{folder}, {format_bytes(shutil.disk_usage(folder).free)} free")
    if skew > SKEW:
        yield Check(
            "bad", "clock", f"the time of a new file is {skew:.0f} s from the clock's", "synchronize clocks (NTP)"
        )


def _cpu() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    said = (
        f"{cores} cores, {torch.get_num_threads()} threads of this process, {torch.backends.cpu.get_cpu_capability()}"
    )
    if accelerator.product_dtype(torch.device("cpu")) is torch.float32:
        said += ", no instructions for products in bf16: models train faster in fp32 on it"
    yield Check("ok", "CPU", said)
    if (set_to := os.environ.get("OMP_NUM_THREADS")) and set_to.isdecimal() and int(set_to) > cores:
        yield Check(
            "slow",
            "threads",
            f"OMP_NUM_THREADS is {set_to}, on {cores} cores",
            "unset it: the launcher shares cores out",
        )
    pages = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in pages:
        yield Check(
            "slow",
            "huge pages",
            "are off: memory that comes and goes costs page faults",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
