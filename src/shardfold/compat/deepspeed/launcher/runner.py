"""What programs that start DeepSpeed's launcher import from it; the launcher is ``shardfold run``."""

from __future__ import annotations

import argparse
import base64
import json
import os
import runpy
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from shardfold.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from shardfold.compat.deepspeed.launcher.constants import PDSH_LAUNCHER, PDSH_MAX_FAN_OUT
from shardfold.launch.hosts import (
    apply_num_nodes_and_gpus,
    fetch_hostfile,
    parse_filter,
    parse_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
)

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "PDSH_MAX_FAN_OUT",
    "apply_num_nodes_and_gpus",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
]

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
DLTS_HOSTFILE = "/job/hostfile"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]

#: ``{option with a value: its default}``; those of None stand in the order of DeepSpeed's help too.
VALUES: dict[str, str | int | None] = {
    "hostfile": DLTS_HOSTFILE,
    "include": "",
    "exclude": "",
    "num_nodes": -1,
    "num_gpus": -1,
    "master_port": TORCH_DISTRIBUTED_DEFAULT_PORT,
    "master_addr": "",
    "node_rank": -1,
    "launcher": PDSH_LAUNCHER,
    "launcher_args": "",
    "enable_each_rank_log": "None",
    "autotuning": "",
    "bind_core_list": None,
    "ssh_port": None,
    "venv_script": None,
    "log_level": "info",
}
SWITCHES = (
    "module",
    "no_python",
    "no_local_rank",
    "no_ssh",
    "no_ssh_check",
    "force_multi",
    "save_pid",
    "bind_cores_to_rank",
    "quiet",
)
SHORT = {"hostfile": "-H", "include": "-i", "exclude": "-e", "quiet": "-q"}
NUMBERS = ("num_nodes", "num_gpus", "master_port", "node_rank", "ssh_port")
CHOICES = {"autotuning": ("tune", "run"), "log_level": ("debug", "info", "warning", "error", "critical")}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of DeepSpeed's launcher as its options, ``user_script`` and ``user_args``."""
    parser = argparse.ArgumentParser("deepspeed", description="Its options; `shardfold run --help` explains them.")
    for name, default in VALUES.items():
        names = [f"--{name}", *(["--num_accelerators"] if name == "num_gpus" else [])]
        kind = int if name in NUMBERS else str
        parser.add_argument(*_short(name), *names, dest=name, type=kind, default=default, choices=CHOICES.get(name))
    for name in SWITCHES:
        parser.add_argument(*_short(name), f"--{name}", action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def _short(name: str) -> list[str]:
    return [SHORT[name]] if name in SHORT else []


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Starts the script as ``shardfold run --as-deepspeed`` does, and ends the process with its status."""
    sys.argv[1:] = ["run", "--as-deepspeed", *(sys.argv[1:] if args is None else args)]
    runpy.run_module("shardfold", run_name="__main__", alter_sys=True)
    sys.exit()


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """``"worker-0:1,2"`` -> ``("worker-0", [1, 2])``; without slots the list is empty."""
    ((host, slots),) = parse_filter(node_config).items()
    return host, slots


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """``"worker-0@worker-1:0,2"`` -> ``{"worker-0": [], "worker-1": [0, 2]}``."""
    return parse_filter(node_config_list)


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    return parse_hostfile(hostfile_lines)


def encode_world_info(world_info: Mapping[str, list[int]]) -> str:
    """Hosts and their slots as one word of a command line: URL-safe base64 of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


if __name__ == "__main__":
    main()
