"""``deepspeed.comm``: initialization and collectives, over ``torch.distributed``."""

from shardfold.compat.deepspeed.comm.comm import *  # noqa: F403
