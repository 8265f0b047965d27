"""``deepspeed.comm``: initialization and collectives, over ``torch.distributed``."""

from shardfold.compat.deepspeed.comm.comm import *  # noqa: F403
from shardfold.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout  # noqa: F401
from shardfold.compat.deepspeed.utils.comms_logging import comms_logger  # noqa: F401
