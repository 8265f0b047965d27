"""WHERE what autograd saves for backward is meanwhile.

    modes        keep, recompute, select, host, disk, fit     recompute   forwards that run again
    replaced     a module whose forward is replaced           offload     what is moved out, and counted
    fit          one mode per unit by what is measured        profile     what measuring passes learn; knapsack

It imports ``sharding`` and what that may import.
"""
