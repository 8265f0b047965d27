"""``deepspeed.utils.numa``: which cores a rank is bound to, with the program ``numactl``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

__all__ = ["check_for_numactl_pkg", "get_numa_cores", "get_numactl_cmd", "parse_range", "parse_range_list"]


def get_numa_cores() -> list[list[int]]:
    """The cores of each NUMA node; nothing without ``numactl``."""
    try:
        said = subprocess.run(["numactl", "--hardware"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    nodes = {int(node): cores for node, cores in re.findall(r"^node (\d+) cpus:(.*)$", said, re.MULTILINE)}
    return [[int(core) for core in nodes[node].split()] for node in sorted(nodes)]


def check_for_numactl_pkg() -> bool:
    """Whether ``numactl`` is installed; says so if not."""
    found = shutil.which("numactl") is not None
    if not found:
        print("please install the numactl package")
    return found


def parse_range(rng: str) -> range:
    """``"3"`` or ``"3-5"``, both ends included.

    Raises:
        ValueError: it is neither, or ends before it begins.
    """
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", rng)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ValueError(f"Bad range {rng!r}: it is a number, or two with a dash between them, the smaller one first.")
    return range(first, last + 1)


def parse_range_list(range_str: str) -> list[int]:
    """``"0-2,5"`` -> ``[0, 1, 2, 5]``.

    Raises:
        ValueError: a range is none, or begins before the end of the one in front of it.
    """
    found: list[int] = []
    for part in range_str.split(","):
        numbers = parse_range(part)
        if found and numbers[0] <= found[-1]:
            raise ValueError(f"Bad range {range_str!r}: its parts may not overlap and stand in ascending order.")
        found += numbers
    return found


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """How many cores each rank of this host gets, and the beginning of the command that binds one rank to its own.

    Args:
        bind_core_list: cores for all ranks, as :func:`parse_range_list` takes them; None: the host's.
        num_local_procs: ranks of this host.
        local_rank: of the rank.

    Raises:
        ValueError: ``KMP_AFFINITY`` is set, which binds threads in another way.
        AssertionError: there are fewer cores than ranks.
    """
    if "KMP_AFFINITY" in os.environ:
        raise ValueError("KMP_AFFINITY is set and conflicts with numactl: unset it before ranks are bound to cores.")
    check_for_numactl_pkg()
    cores = parse_range_list(bind_core_list) if bind_core_list is not None else list(range(_physical_cores()))
    each = len(cores) // num_local_procs
    if each < 1:
        raise AssertionError(f"{len(cores)} cores are not enough for {num_local_procs} ranks: each needs one.")
    own = cores[each * local_rank : each * (local_rank + 1)]
    return each, ["numactl", *_memory(own, get_numa_cores()), "-C", _spelled(own)]


def _physical_cores() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _memory(own: Sequence[int], nodes: list[list[int]]) -> list[str]:
    """Where memory is to come from if all cores are of one node: nodes without cores are its fast memory, nodes with
    the very same cores are one."""
    home = next((i for i, cores in enumerate(nodes) if cores and set(own) <= set(cores)), None)
    if home is None:
        return []
    bare = [i for i, cores in enumerate(nodes) if not cores]
    full = [i for i, cores in enumerate(nodes) if cores]
    if bare and len(bare) == len(full):
        return ["-p", str(bare[full.index(home)])]
    return ["-m", ",".join(str(i) for i in full if nodes[i] == nodes[home])]


def _spelled(cores: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2,5"``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
