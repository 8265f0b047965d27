"""DeepSpeed's constants that users import."""

import os
from datetime import timedelta

__all__ = ["TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"]

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
