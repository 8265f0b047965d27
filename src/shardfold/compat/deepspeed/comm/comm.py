"""All of ``deepspeed.comm`` by the name that its own modules import it."""

from shardfold.compat.deepspeed.comm.collectives import *  # noqa: F403
from shardfold.compat.deepspeed.comm.world import *  # noqa: F403
