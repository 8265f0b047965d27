"""Tools for testing distributed code on one machine, ours and yours.

    from shardfold.testing import run_ranks, same_training

    def total():                                   # module level, so that it can be pickled
        t = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(t)
        return t.item()

    assert run_ranks(total, 4) == [6.0] * 4        # four fresh processes, one Gloo group

`run_ranks` starts fresh processes; `Ranks` keeps them warm between calls; `same_training` asserts that a layout trains
exactly as plain PyTorch does. When a rank fails, `RanksFailed` shows the traceback of every rank that failed, and
when ranks hang it shows where each one stood. With ``device="sim"`` ranks have a simulated accelerator
(:mod:`shardfold.testing.simulated`), on which stream code is tested without a GPU.

    links           nodes on this machine, with links between them that are really slow, counted and cut
    ranks           ranks for a test, as warm processes
    simulated       a simulated asynchronous accelerator
    slow_transport  a transport that delays and drops: a slow or broken link on any machine, without root
    _training       a layout trains as plain PyTorch does
    _worker         the life of one worker process
"""

from shardfold.testing._training import TrainingMatch, same_training
from shardfold.testing.ranks import RankFailure, Ranks, RanksFailed, run_ranks

__all__ = ["RankFailure", "Ranks", "RanksFailed", "TrainingMatch", "run_ranks", "same_training"]
