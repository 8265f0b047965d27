"""What programs that start DeepSpeed's launcher import from it; the launcher is ``shardfold run``."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from shardfold.launch.hosts import fetch_hostfile, parse_inclusion_exclusion, parse_resource_filter

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "encode_world_info",
    "fetch_hostfile",
    "parse_inclusion_exclusion",
    "parse_resource_filter",
]

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"


def encode_world_info(world_info: Mapping[str, list[int]]) -> str:
    """Hosts and their slots as one word of a command line: URL-safe base64 of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
