"""``with simulated() as sim``: what the program inside does to the device, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardfold.errors import ShardfoldError, UsageError, did_you_mean
from shardfold.plan.checks import is_integer, parse_bytes
from shardfold.testing.simulated.device import PROCESS, SimulatedDevice, the_device
from shardfold.testing.simulated.findings import Findings, Found, Race
from shardfold.testing.simulated.install import install
from shardfold.testing.simulated.queues import PromptQueues

__all__ = ["RacesFound", "Simulation", "simulated"]

MODES = ("check", "lazy")
SHOWN = 10  # races in one message


class RacesFound(ShardfoldError, AssertionError):
    """What :meth:`Simulation.expect_clean` found.

    Attributes:
        found: all of it.
    """

    def __init__(self, message: str, found: Found) -> None:
        super().__init__(message)
        self.found = found


class Simulation:
    """What was found on the device since the block began, or since :meth:`take`.

    Attributes:
        mode: ``check`` or ``lazy``.
    """

    def __init__(self, device: SimulatedDevice, mode: str, findings: Findings) -> None:
        self._device, self.mode, self._findings = device, mode, findings
        self._peak = 0
        self._open = True

    @property
    def races(self) -> list[Race]:
        """Uses of memory that nothing orders, each pair of places once."""
        return list(self._findings.races)

    @property
    def host_syncs(self) -> Counter[tuple[str, str]]:
        """How often the host waited for the device: by what, as in ``item``, and where."""
        return self._findings.host_syncs

    @property
    def mixed(self) -> Counter[tuple[str, str]]:
        """Operations that were given tensors of two devices, which raised: by operation and place."""
        return self._findings.mixed

    @property
    def memory_peak(self) -> int:
        """The most bytes that tensors of the device had, since the block began: of each a multiple of 512."""
        return self._device.allocator.arena.peak if self._open else self._peak

    @property
    def operations(self) -> int:
        """How many operations this process has queued, of all blocks."""
        return self._device.checker.uses

    def synchronize(self) -> None:
        """Waits until all that is queued is done; this is not counted.

        Raises:
            Exception: what an operation or a collective raised meanwhile.
        """
        the_device().synchronize()

    def take(self) -> Found:
        """Everything found so far, once the device is done; it is forgotten here."""
        the_device().synchronize()
        return self._findings.take()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, nothing is noted."""
        self._findings.silent += 1
        try:
            yield
        finally:
            self._findings.silent -= 1

    def expect_clean(self, *, may_wait: bool = True) -> None:
        """Nothing was found.

        Args:
            may_wait: whether the host may wait for the device.

        Raises:
            RacesFound: of each race both places, and how to mend it; of each operation on tensors of two devices, and
                of each wait of the host that is not allowed, its place.
        """
        the_device().synchronize()
        found = Found(self.races, Counter(self.host_syncs), Counter(self.mixed))
        said: list[str] = []
        if found.races:
            said.append(f"{len(found.races)} race(s):")
            said += [f"  {race}" for race in found.races[:SHOWN]]
            if len(found.races) > SHOWN:
                said.append(f"  and {len(found.races) - SHOWN} more")
        if found.mixed:
            said.append("operations on tensors of two devices (move one with .to(device) first):")
            said += [f"  {times} x {what} at {where}" for (what, where), times in found.mixed.items()]
        if found.host_syncs and not may_wait:
            said.append(
                "waits of the host for the device (none is needed for copies with non_blocking=True from and to pinned "
                "memory, and for values that stay on the device):"
            )
            said += [f"  {times} x {what} at {where}" for (what, where), times in found.host_syncs.items()]
        if said:
            raise RacesFound("\n".join(["the simulated device found", *said]), found)

    def _end(self) -> None:
        self._peak, self._open = self._device.allocator.arena.peak, False


@contextmanager
def simulated(
    mode: str = "check", seed: int = 0, lag: int = 64, memory: int | str | None = None
) -> Iterator[Simulation]:
    """Inside, the device ``sim`` of this process runs in ``mode``, and what is wrong is found.

        with simulated() as sim:
            x = torch.ones(4, device="sim")
            side = torch.sim.Stream()
            with torch.sim.stream(side):
                y = x * 2                    # nothing lets `side` wait for what made x
            sim.expect_clean()               # raises, and names both lines

    The device is installed when this is first entered, for the rest of the process, and its tensors live on behind the
    block.

    Args:
        mode: ``check`` runs operations at once, so that numbers are always right, and finds races by happens-before;
            ``lazy`` also puts them off, and runs them in a random legal order, so that races show in the numbers.
        seed: of that order.
        lag: how many operations the device may stay behind the host, in ``lazy``.
        memory: how many bytes the device has, as a number or as in ``"64MiB"``: an allocation beyond them raises
            :class:`torch.OutOfMemoryError`. None: as many as somebody asks for.

    Raises:
        UsageError: an unknown mode, a seed that is no number, a lag below 1, memory that is no number of bytes or
            less than tensors of the device have already, or a version of PyTorch without what the device is made of.
    """
    if mode not in MODES:
        raise UsageError(f"simulated(mode={mode!r}): it is 'check' or 'lazy'.{did_you_mean(mode, MODES)}")
    if not isinstance(seed, int):
        raise UsageError(f"simulated(seed={seed!r}): it is a whole number.")
    if not isinstance(lag, int) or lag < 1:
        raise UsageError(f"simulated(lag={lag!r}): it is a number of operations, at least 1.")
    limit = _bytes_of(memory)
    device = install()
    device.allocator.collect()
    if limit is not None and (held := device.allocator.arena.allocated) > limit:
        raise UsageError(
            f"simulated(memory={memory!r}): tensors that are there already have {held:,} bytes: let them go first, or "
            "give more."
        )
    findings = Findings()
    queues = device.lagging(seed, lag) if mode == "lazy" else PromptQueues()
    before = device.use(queues, findings, limit)
    sim = Simulation(device, mode, findings)
    try:
        yield sim
    except BaseException:
        if PROCESS.forked:
            raise
        with suppress(Exception):  # of the device: the block's own is raised
            device.synchronize()
        raise
    finally:
        sim._end()
        if not PROCESS.forked:
            try:
                device.use(*before)
            finally:
                queues.close()


def _bytes_of(memory: int | str | None) -> int | None:
    """
    Raises:
        UsageError: it names no number of bytes.
    """
    found = parse_bytes(memory) if isinstance(memory, str) else memory
    if memory is not None and not is_integer(found, 1):
        raise UsageError(f"simulated(memory={memory!r}): it is a number of bytes, as in '64MiB' or 1 << 26, or None.")
    return found
