"""A simulated asynchronous accelerator: code with streams, events and freed memory, proven without a GPU.

    with simulated() as sim:
        train(device="sim")
        sim.expect_clean()

The device ``sim`` has tensors with true storages, streams, events, a caching allocator with a pool per stream, pinned
memory and, with several ranks, a process group that behaves as NCCL does (``run_ranks(fn, 2, device="sim")``). What
runs is the CPU's arithmetic; what is checked is order: nothing may use memory before, or after, another stream has it.

    arena        bytes of the device that are taken
    clocks       vector clocks: what each stream, and the host, knows to have happened
    device       the simulated device of this process: streams that compute beside the host, and memory of its own
    findings     what is found: races, stops of the host, tensors of two devices in one operation
    install      makes the device of this process, once
    memory       allocations, and an allocator with a pool per stream
    nested       arguments and results of operations: values, and lists of them
    operation    one call of one operation: what it reads and writes, computed on the CPU on the same memory
    queues       how queued work runs: at once, or later in a random legal order
    regions      which bytes of an allocation a tensor has
    signature    what an operation's schema says of it: what it reads, what it writes, what its results are
    simulation   ``with simulated() as sim``: what the program inside does to the device, and what is wrong with it
    sites        where the caller stands
    special      operations that are the device's own
    streams      streams and events, as ``torch.cuda`` has them
    unwinding    exceptions of hooks inside a backward
    _autocast    automatic mixed precision
    _checker     the happens-before checker: every use of memory is compared with those that nothing orders it behind
    _collective  one collective on its way, and the work that a program holds of it
    _dlpack      DLPack: the one door through which Python can make a tensor of a PrivateUse1 device that has memory
    _group       the process group ``simccl``
    _lag         operations of a device that lags: their results have shapes at once and values later
    _layers      layers for which PyTorch expects kernels of the device's own
    _module      ``torch.sim``
    _operations  one fallback that runs each operation on the CPU
    _patches     functions of PyTorch that are replaced
    _replaced    a function of PyTorch's that is replaced, and that PyTorch still knows
"""

from shardfold.testing.simulated.findings import Access, Found, Race
from shardfold.testing.simulated.install import is_supported
from shardfold.testing.simulated.simulation import RacesFound, Simulation, simulated
from shardfold.testing.simulated.sites import Site

__all__ = ["Access", "Found", "Race", "RacesFound", "Simulation", "Site", "is_supported", "simulated"]
