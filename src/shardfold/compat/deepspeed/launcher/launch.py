"""``python -m deepspeed.launcher.launch``: the ranks of one host, as a launcher starts them; by ``shardfold run``."""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import os
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from shardfold.errors import ConfigError

__all__ = ["main", "parse_args", "run_arguments"]

SWITCHES = ("module", "no_python", "no_local_rank", "bind_cores_to_rank")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, ``training_script`` and ``training_script_args``."""
    parser = argparse.ArgumentParser("deepspeed.launcher.launch", description="Starts the ranks of one host.")
    parser.add_argument("--node_rank", type=int, default=0, help="which of the hosts this is")
    parser.add_argument("--master_addr", default="127.0.0.1", help="the address of the first host")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port of it")
    parser.add_argument("--world_info", required=True, help="hosts and slots: base64 of JSON")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help=f"as `shardfold run --{name}`")
    parser.add_argument("--bind_core_list", help="as `shardfold run --bind_core_list`")
    for name in ("enable_each_rank_log", "save_pid", "enable_elastic_training", "log_level"):
        parser.add_argument(f"--{name}", help="has no effect")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


def run_arguments(args: argparse.Namespace) -> tuple[list[str], list[int]]:
    """The arguments of ``shardfold run`` that do the same, and this host's slots.

    Raises:
        ConfigError: ``--world_info`` cannot be read, or has no host of that number.
    """
    try:
        hosts = list(json.loads(base64.urlsafe_b64decode(args.world_info)).values())
        slots = [int(slot) for slot in hosts[args.node_rank]]
    except (binascii.Error, ValueError, AttributeError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--world_info={args.world_info!r} with --node_rank={args.node_rank}: it is not a list of hosts with one "
            "of that number; deepspeed.launcher.runner.encode_world_info({'host': [0, 1]}) makes one."
        ) from error
    words = ["--nnodes", str(len(hosts)), "--node-rank", str(args.node_rank), "--nproc-per-node", str(len(slots))]
    words += ["--master-addr", args.master_addr, "--master-port", str(args.master_port)]
    words += [f"--{name.replace('_', '-')}" for name in SWITCHES if getattr(args, name)]
    if args.bind_core_list:
        words += ["--bind-core-list", args.bind_core_list]
    return [*words, args.training_script, *args.training_script_args], slots


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Starts the ranks, and ends the process with their status."""
    words, slots = run_arguments(parse_args(args))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, slots)))
    sys.argv[1:] = ["run", "--as-deepspeed", *words]
    runpy.run_module("shardfold", run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
