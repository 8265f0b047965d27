"""HOW: the interpreter. Events of a model come in, operations of its program go out.

    engine       what users call                              step        the optimizer step
    hooks        a model's forward and backward as events     backward    from a loss to gradients
    runner       events in, operations out                    norms       the norm of gradients, clipping
    passes       one pass: recorded, asked, or idle           visible     gradients as users see them
    orders       in which units run; track, cursor            gate        what may be done between passes
    handlers     one for each verb                            reports     memory, traffic, times; stats
    damage       updates that failed on some rank             arguments, alike, tf32: what an engine is given

It imports every room below it; nothing but the doors imports it.
"""
