"""WHERE what autograd saves for backward is meanwhile.

    modes               where saved tensors are until backward: kept, recomputed, on the host, on disk
    partitioned_inputs  inputs of recomputed units, divided over ranks that have the same ones
    profile             what measuring passes say of units: bytes of each mode, and times
    recompute           forwards that run again in backward, equal to the bit
    replaced            a module whose forward is replaced for an activation mode
    saved_tensors       saved tensors moved out behind a forward and back ahead of backward; and counted
    selective           results of a forward that ``select`` keeps for the recomputation
    unit_graphs         forwards of units as compiled graphs, which units of one kind share
    _encoded            saved tensors that stay on the device in fewer bits
    _fit                fit: measuring passes, then one mode per unit within a budget of bytes
    _knapsack           one mode per unit: least time within a budget of bytes
    _tiles              token-wise forwards, computed and recomputed for some tokens at a time

It imports ``sharding`` and what that may import.
"""
