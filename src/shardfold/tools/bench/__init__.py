"""The benchmark: one job under each layout and under each peer that is installed, in rounds in which they take turns.

    bench            what `shardfold bench` does: choose, run, report
    contenders       who can run a job: bare loops, PyTorch's own, DeepSpeed, and the layouts of this library
    jobs             the jobs: a model whose forward gives the loss, and each rank's batches
    planned          peaks as planned beside peaks as measured: live storages of real steps, on real ranks
    rank             a process that is one rank of one contender: ``python -m shardfold.tools.bench.rank NAME RANK``
    results          what was measured, and what follows from it: medians, ratios, losses compared
    settings         what is run, how large and how often
    teams            the ranks of one contender, seen from outside: started, given orders, given up
    traces           one step under PyTorch's profiler, sorted into lanes
    turns            who runs when
    _process_memory  what this process holds: storages of tensors, resident sets, page faults
    _sides           the contenders: what each makes of the model, as forward and backward and as an optimizer step
    _tables          the benchmark on a terminal: interim medians while it runs, tables at its end, in Markdown too
    _timeline        one step of two contenders as a picture: lanes of one time axis

``settings`` and ``contenders`` import no torch; ``models``, ``sides``, ``measure`` and ``rank`` run in the ranks.
"""
