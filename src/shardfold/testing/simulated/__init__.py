"""A simulated asynchronous accelerator: code with streams, events and freed memory, proven without a GPU.

    with simulated() as sim:
        train(device="sim")
        sim.expect_clean()

The device ``sim`` has tensors with true storages, streams, events, a caching allocator with a pool per stream, pinned
memory and, with several ranks, a process group that behaves as NCCL does (``run_ranks(fn, 2, device="sim")``). What
runs is the CPU's arithmetic; what is checked is order: nothing may use memory before, or after, another stream has it.
"""

from shardfold.testing.simulated.findings import Access, Found, Race
from shardfold.testing.simulated.install import is_supported
from shardfold.testing.simulated.simulation import RacesFound, Simulation, simulated
from shardfold.testing.simulated.sites import Site

__all__ = ["Access", "Found", "Race", "RacesFound", "Simulation", "Site", "is_supported", "simulated"]
