"""Starting ranks: Shardfold's own commands on this machine (:mod:`local`), a user's script anywhere (:mod:`run`)."""

from shardfold.launch.local import GRACE_AFTER_SIGTERM, launch, launch_local, rank_environment
from shardfold.launch.process import INTERRUPTED, SAID, die_with_parent, free_port, how, is_rank, num_cores

__all__ = [
    "GRACE_AFTER_SIGTERM",
    "INTERRUPTED",
    "SAID",
    "die_with_parent",
    "free_port",
    "how",
    "is_rank",
    "launch",
    "launch_local",
    "num_cores",
    "rank_environment",
]
