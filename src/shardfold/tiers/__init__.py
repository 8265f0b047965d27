"""Memory of each kind: ``device``, ``host`` and ``disk``, by one protocol.

    collection  what is done when an object is collected
    device      the device's own memory: regions that are always there, and flats whose memory comes and goes
    disk        files on drives: threads write them behind the computation and read ahead of who needs it
    host        host memory: values go out beside the computation, and come back when they are asked for
    limit       how much memory the processes here may hold: the machine's, or what a control group leaves them of it;
                and for how long one keeps this process from computing
    pages       host memory that goes back to the system the moment it is freed
    staging     host memory of a fixed size through which values go to drives and come from them
    tier        one protocol for memory of every kind
    tiers       the tiers of one rank, each made when it is first asked for
    waits       how long threads of the host have waited for values on their way to or from a tier
    _drive      one file in one folder, read and written by parallel threads, past the system's page cache
    _slabs      pinned memory for what rests there as long as an engine

It imports ``plan`` and what knows PyTorch's devices.
"""
