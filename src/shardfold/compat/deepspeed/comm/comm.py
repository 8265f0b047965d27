"""All of ``deepspeed.comm`` by the name that its own modules import it."""

from shardfold.compat.deepspeed.comm.collectives import *  # noqa: F403
from shardfold.compat.deepspeed.comm.constants import *  # noqa: F403
from shardfold.compat.deepspeed.comm.environment import *  # noqa: F403
from shardfold.compat.deepspeed.comm.world import *  # noqa: F403
from shardfold.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout  # noqa: F401
from shardfold.compat.deepspeed.utils.comms_logging import comms_logger  # noqa: F401
