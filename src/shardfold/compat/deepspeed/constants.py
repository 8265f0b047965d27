"""DeepSpeed's constants that users import."""

import os
from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))

# Environment variables that a launcher sets
LOCAL_RANK, CROSS_RANK, CROSS_SIZE = "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE"

INFERENCE_GENERIC_MODE, INFERENCE_SPECIALIZED_MODE = "generic", "specialized"
