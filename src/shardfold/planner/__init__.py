"""KNOW before you run: a model's memory and time on ranks that need not be there.

    live         bytes of storages while they live          hollow       a model without memory
    tracing      a forward and backward on such a model     trace        what that gave, as values
    setting      units, orders and program of a rank        memory       bytes over time along the program
    hardware     what devices and links can do              choice       what fits
    seconds      the time of a step                         search       all that fits, ranked
    best         the door: shardfold.plan.best              figures      what papers print, computed
    allocator    blocks and segments of device memory

It runs the model without values and walks the program that the engine would bind. It knows no engine.
"""
