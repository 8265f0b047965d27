"""Which hosts, and which of their slots: host files, filters, environment files and visible devices. Pure functions.

A host file has a line for each host, in the style of MPI, and may have comments and blank lines:

    worker-0 slots=4
    worker-1 slots=4   # slot i is the host's GPU i

:func:`fetch_hostfile`, :func:`parse_resource_filter` and :func:`parse_inclusion_exclusion` answer in the forms that
DeepSpeed documents for its functions of these names.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardfold.errors import ConfigError, did_you_mean

__all__ = [
    "apply_num_nodes_and_gpus",
    "count_visible",
    "fetch_hostfile",
    "parse_cores",
    "parse_environment_file",
    "parse_hostfile",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
    "visible_devices",
]

FILE_BYTES = 4 * 2**20
"""Of a host file or a file of variables, at most: 100,000 hosts."""

MOST_SLOTS = 4096

#: A name of DNS, an address, or an alias of ssh's config, and perhaps a user's name: nothing that is an option to ssh,
#: to srun or mpirun, or a list to them.
HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_\[:][A-Za-z0-9_.:%\]-]*")
HOST_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)(?P<more>(\s+[\w-]+=\S+)*)")


def fetch_hostfile(hostfile_path: str | Path | None) -> OrderedDict[str, int] | None:
    """Return the number of slots of each host, in the file's order, or None if there is no such file.

    Raises:
        ConfigError: a line is not ``HOST slots=NUMBER``, a host is there twice, or no host is there at all.
    """
    if hostfile_path is None or not Path(hostfile_path).is_file():
        return None
    return parse_hostfile(read_lines(Path(hostfile_path)), name=str(hostfile_path))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a small text file.

    Raises:
        ConfigError: it cannot be read, is no text, or is far larger than such a file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    if len(data) > FILE_BYTES:
        raise ConfigError(f"{path} has more than {FILE_BYTES} bytes: it is no such file.")
    if b"\0" in data:
        raise ConfigError(f"{path} is not text: it has bytes that are 0.")
    try:
        return data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: byte {error.start} is {data[error.start]:#04x}.") from None


def parse_hostfile(lines: Iterable[str], *, name: str = "the host file") -> OrderedDict[str, int]:
    """Return the number of slots of each host of the ``lines`` of a host file; see :func:`fetch_hostfile`."""
    pool: OrderedDict[str, int] = OrderedDict()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = HOST_LINE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{name}, line {number}: {text[:200]!r} is not of the form `worker-0 slots=4`.")
        host = match["host"]
        if HOST.fullmatch(host) is None:
            raise ConfigError(
                f"{name}, line {number}: {host!r} is not a name of a host: it is of letters, digits, '.', '-' and '_', "
                "and begins with none of '-' and '.'; what else ssh needs to know belongs into its own config."
            )
        if len(match["slots"]) > 4 or int(match["slots"]) > MOST_SLOTS:
            raise ConfigError(
                f"{name}, line {number}: {host} has more than {MOST_SLOTS} slots: write its number of GPUs."
            )
        if host in pool:
            raise ConfigError(
                f"{name}, line {number}: there are multiple entries for {host}: write one, with all slots."
            )
        pool[host] = int(match["slots"])
    if not pool:
        raise ConfigError(f"{name} is empty: write a line such as `worker-0 slots=4` for each host.")
    return pool


def parse_filter(text: str) -> dict[str, list[int]]:
    """Read ``HOST[:SLOT[,SLOT ...]][@HOST...]`` as the slots named of each host; an empty list stands for all."""
    named: dict[str, list[int]] = {}
    for node in text.split("@"):
        host, colon, slots = node.strip().partition(":")
        numbers = slots.split(",") if colon else []
        if not host or not all(number.strip().isdecimal() for number in numbers):
            raise ConfigError(f"the filter {text!r} is not of the form `worker-0@worker-1:0,2`: {node!r} is not in it.")
        named.setdefault(host, []).extend(int(number) for number in numbers)
    return {host: sorted(set(slots)) for host, slots in named.items()}


def parse_resource_filter(
    host_info: Mapping[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> OrderedDict[str, list[int]]:
    """Return the hosts and slots of ``host_info`` that a filter leaves, in the order of ``host_info``.

    Args:
        host_info: the slots of each host.
        include_str: ``worker-0@worker-1:0,2`` takes all slots of worker-0, and slots 0 and 2 of worker-1.
        exclude_str: of the same form: takes all but these. Hosts without a slot left are left out.

    Raises:
        ConfigError: both filters are given, or one names a host or slot that is not there.
    """
    if include_str and exclude_str:
        raise ConfigError("--include and --exclude are mutually exclusive: give one of them.")
    named = parse_filter(include_str or exclude_str) if include_str or exclude_str else {}
    for host, slots in named.items():
        if host not in host_info:
            raise ConfigError(f"Hostname '{host}' not found in hostfile.{did_you_mean(host, host_info)}")
        for slot in slots:
            if slot not in host_info[host]:
                has = ", ".join(map(str, host_info[host])) or "none"
                raise ConfigError(f"No slot '{slot}' specified on host '{host}', which has: {has}.")
    left: OrderedDict[str, list[int]] = OrderedDict()
    for host, slots in host_info.items():
        if include_str:
            kept = (named[host] or slots) if host in named else []
        elif host in named:
            kept = [slot for slot in slots if slot not in named[host]] if named[host] else []
        else:
            kept = slots
        if kept or not named:
            left[host] = list(dict.fromkeys(kept))
    return left


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """Return the slots that take part of hosts with ``resource_pool`` slots: see :func:`parse_resource_filter`."""
    slots = OrderedDict((host, list(range(count))) for host, count in resource_pool.items())
    return parse_resource_filter(slots, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, list[int]], num_nodes: int, num_gpus: int
) -> OrderedDict[str, list[int]]:
    """Return the first ``num_nodes`` hosts with the first ``num_gpus`` slots of each; a number below 1 takes all.

    Raises:
        ConfigError: there are fewer hosts, or a host has fewer slots.
    """
    hosts = list(active_resources.items())
    if num_nodes > len(hosts):
        raise ConfigError(f"--num-nodes is {num_nodes}, but there are {len(hosts)} hosts: give a smaller number.")
    taken: OrderedDict[str, list[int]] = OrderedDict()
    for host, slots in hosts[:num_nodes] if num_nodes > 0 else hosts:
        if num_gpus > len(slots):
            raise ConfigError(f"--num-gpus is {num_gpus}, but host {host!r} has {len(slots)} slots.")
        taken[host] = slots[:num_gpus] if num_gpus > 0 else slots
    return taken


def parse_environment_file(lines: Iterable[str], *, name: str = ".deepspeed_env") -> dict[str, str]:
    """Return the variables of a file of lines ``NAME=VALUE``, to be set on every host.

    Blank lines and comments are skipped; quotes around a whole value are taken off.

    Raises:
        ConfigError: a line is not of that form.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        key, equals, value = text.partition("=")
        key = key.strip().removeprefix("export ").strip()
        if not equals or not re.fullmatch(r"\w+", key):
            raise ConfigError(f"{name}, line {number}: {text[:200]!r} is not of the form `NCCL_DEBUG=INFO`.")
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        variables[key] = value[1:-1] if quoted else value
    return variables


def visible_devices(slots: Iterable[int], visible: str | None) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for the processes that shall see ``slots`` of what is ``visible`` now.

    A slot counts among the devices that this process may see, so a value that is set already stays honoured.

    Raises:
        ConfigError: a slot lies beyond them.
    """
    if visible is None:
        return ",".join(map(str, slots))
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    chosen = list(slots)
    for slot in chosen:
        if slot >= len(devices):
            raise ConfigError(
                f"slot {slot} is asked for, but CUDA_VISIBLE_DEVICES={visible} shows {len(devices)} devices: "
                "choose among these, or unset it."
            )
    return ",".join(devices[slot] for slot in chosen)


def count_visible(environment: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")) -> int | None:
    """Return how many GPUs a process of this environment sees, without asking the driver; None if that is unknown."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    return len(list(driver.iterdir())) if driver.is_dir() else None


def parse_cores(text: str) -> list[int]:
    """Return the cores of a list such as ``0,2-4``, in its order.

    Raises:
        ConfigError: it is not such a list, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"--bind-core-list {text!r} is not of the form `0,2-4`: {part!r} is not in it.")
        cores += range(first, last + 1)
    if len(set(cores)) < len(cores):
        raise ConfigError(f"--bind-core-list {text!r} names a core twice.")
    return cores
