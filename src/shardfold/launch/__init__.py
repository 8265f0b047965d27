"""Starting ranks: Shardfold's own commands on this machine, a user's script anywhere.

death         how a rank died: signal, status, memory
decision      what a call of ``shardfold run`` is to do
hosts         which hosts, and which of their slots
leftovers     what ranks have started and what outlives them: found, and ended
local         Shardfold's own commands as ranks on this machine
namespaces    nodes on this machine, as network namespaces
options       the options of ``shardfold run``
process       ports, cores, signals, and how an end is told
remote_agent  the agent on one of several hosts, as a program
run_records   what each process of a run is at, in one file of the run folder
run_script    ``shardfold run``: decides what to do and does it
scheduler     what Slurm and MPI say of the job that this process is part of
workers       the ranks of one node as processes
_agent        the agent of one node: starts ranks, watches them, starts them again
_mail         what launchers say to each other through one store
_members      one node's part in a run that goes on without a rank that dies
_open_run     where hosts that come later find a run that is under way
_remote       starts an agent on each of several hosts, and sees all of them to their end: by ssh, srun or mpirun
_rendezvous   where agents meet, and a store of its own for each attempt
_slow_road    a road between nodes on which everything takes a while
_spares       processes that wait to take the place of ranks that die
_voter        how launchers agree who is in the next epoch
"""

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
