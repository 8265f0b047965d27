"""DeepSpeed's options on a script's command line."""

from __future__ import annotations

from argparse import ArgumentParser

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config FILE`` (and their older names) to a command line."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="for the script itself to read")
    group.add_argument("--deepspeed_config", default=None, type=str, help="configuration, a JSON file")
    group.add_argument("--deepscale", default=False, action="store_true", help="older name of --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="older name of --deepspeed_config")
    return parser
