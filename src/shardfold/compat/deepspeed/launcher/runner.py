"""What programs that start DeepSpeed's launcher import from it; the launcher is ``shardfold run``."""

from shardfold.compat.deepspeed.lazy import attach

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
DLTS_HOSTFILE = "/job/hostfile"

__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(
        ("fetch_hostfile", "parse_inclusion_exclusion", "parse_resource_filter"),
        "shardfold.launch.hosts",
    ),
)


def encode_world_info(world_info: dict[str, list[int]]) -> str:
    """Hosts and their slots as one word of a command line: URL-safe base64 of JSON."""
    import base64
    import json

    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
