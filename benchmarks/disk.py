"""What the disk tier reaches of a drive: against a bare loop of direct I/O, and under a limit of the kernel's.

python benchmarks/disk.py                     # both, in the system's folder for temporary files
python benchmarks/disk.py rate --folder /mnt/nvme --gib 4 --rounds 7
python benchmarks/disk.py throttled --rates 50 100

    rate        rounds in which two take turns: threads that write, and then read, aligned buffers by ``os.pwrite`` and
                ``os.preadv`` with O_DIRECT into a file that has its space already; and regions of the tier that are
                stored, and then fetched into memory of the caller's. Same bytes, same sizes, same threads. The ratio
                is the median over rounds of the ratio in a round.
    throttled   a loop that computes while the next region is read and the last one written, as an update of states on
                disk does. The kernel lets a group of processes read and write so many bytes per second (cgroup v1,
                ``blkio.throttle``) and counts them. Reads and writes have a limit each, so the loop should take the
                larger of the computation and bytes / rate; a computation of a fourth, of as much and of twice as much
                is tried. (Above that are the first read and the last write, which nothing can be beside.) The
                bytes that the kernel counted are the tier's own count. Needs root.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from shardfold.tiers.disk import CHUNK, DiskTier

CPU = torch.device("cpu")
GROUPS = Path("/sys/fs/cgroup/blkio")
MB = 1_000_000


def seconds(do: Callable[[], object]) -> float:
    begun = perf_counter()
    do()
    return perf_counter() - begun


# -- the rate


class Bare:
    """A file with its space, and threads that move aligned chunks."""

    def __init__(self, folder: str, nbytes: int, threads: int) -> None:
        self.file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.file, 0, nbytes)
        self.places = range(0, nbytes, CHUNK)
        self.threads = ThreadPoolExecutor(threads)
        self.buffers = [memoryview(mmap.mmap(-1, CHUNK)) for _ in range(threads)]
        for buffer in self.buffers:
            buffer[:] = os.urandom(CHUNK)

    def all(self, move: Callable[[memoryview, int], int]) -> None:
        free = list(self.buffers)

        def one(place: int) -> None:
            buffer = free.pop()
            assert move(buffer, place) == CHUNK
            free.append(buffer)

        list(self.threads.map(one, self.places))

    def write(self) -> None:
        self.all(lambda buffer, place: os.pwrite(self.file, buffer, place))

    def read(self) -> None:
        self.all(lambda buffer, place: os.preadv(self.file, [buffer], place))

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.file)


class Ours:
    """Regions of a tier."""

    def __init__(self, folder: str, nbytes: int, threads: int, size: int) -> None:
        self.tier = DiskTier(CPU, folder, threads=threads)
        self.regions = [self.tier.allocate((size // 4,), torch.float32) for _ in range(nbytes // size)]
        self.values, self.back = torch.rand(size // 4), [torch.zeros(size // 4) for _ in range(2)]

    def write(self) -> None:
        for region in self.regions:
            region.store(self.values)
        for region in self.regions:
            region.flush()

    def read(self) -> None:
        """One ahead, as programs do."""
        self.regions[0].fetch(self.back[0])
        for i, region in enumerate(self.regions):
            if i + 1 < len(self.regions):
                self.regions[i + 1].fetch(self.back[(i + 1) % 2])
            region.get()

    def close(self) -> None:
        assert torch.equal(self.back[0], self.values) and torch.equal(self.back[1], self.values)
        self.tier.close()


def rate(folder: str, gib: float, rounds: int, threads: int, mib: int) -> None:
    size = mib * 1024 * 1024
    nbytes = max(int(gib * 1024**3) // size, 2) * size
    bare, ours = Bare(folder, nbytes, threads), Ours(folder, nbytes, threads, size)
    if not ours.tier.drives[0].direct:
        print(f"{folder} takes no direct I/O: there is nothing to compare with.")
        return
    bare.write()  # a first time, as fresh space is slower
    ours.write()
    found: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}
    for _ in range(rounds):
        for what, each in found.items():
            each.append((seconds(getattr(bare, what)), seconds(getattr(ours, what))))
    print(f"{nbytes / 1e9:.2f} GB in regions of {mib} MiB, {threads} threads, {rounds} rounds, MB/s (median)")
    print("| | bare direct I/O | the tier | ratio |\n|---|---|---|---|")
    for what, each in found.items():
        theirs, own = (nbytes / MB / median(times) for times in zip(*each, strict=True))
        print(f"| {what} | {theirs:.0f} | {own:.0f} | {median(a / b for a, b in each):.2f} |")
    bare.close()
    ours.close()


# -- under a limit


def limited(folder: str, rate: float, share: float, size: int, count: int) -> None:
    """In the group from its start, so that its threads are too: prints what was found."""
    group = GROUPS / os.environ["SHARDFOLD_BENCH_GROUP"]
    (group / "tasks").write_text(str(os.getpid()))
    tier = DiskTier(CPU, folder, staging=4 * size)
    torch.set_num_threads(1)
    a = torch.rand(128, 128)
    regions = [tier.allocate((size // 4,), torch.float32) for _ in range(count)]
    back = [torch.zeros(size // 4) for _ in range(2)]
    for region in regions:
        region.store(back[0])
    for region in regions:
        region.flush()
    compute = share * size / rate

    def update(values: torch.Tensor) -> None:
        end = perf_counter() + compute
        while perf_counter() < end:
            torch.mm(a, a)
        values += 1

    def loop() -> None:
        regions[0].fetch(back[0])
        for i, region in enumerate(regions):
            if i + 1 < count:
                regions[i + 1].fetch(back[(i + 1) % 2])
            values = region.get()
            update(values)
            region.store(values)
        for region in regions:
            region.flush()

    before = served(group), tier.bytes_read, tier.bytes_written
    taken = seconds(loop)
    kernel = [now - then for now, then in zip(served(group), before[0], strict=True)]
    own = [tier.bytes_read - before[1], tier.bytes_written - before[2]]
    assert all(torch.equal(region.values(slice(3)), torch.ones(3)) for region in regions)
    print(json.dumps({"seconds": taken, "kernel": kernel, "own": own}))
    tier.close()


def served(group: Path) -> list[int]:
    """Bytes that the group has read and written, by the kernel's count."""
    text = (group / "blkio.throttle.io_service_bytes").read_text()
    return [
        sum(int(line.split()[2]) for line in text.splitlines() if line.split()[1:2] == [what])
        for what in ("Read", "Write")
    ]


def drive_of(folder: str) -> str:
    """The drive of a folder, as the kernel numbers it; limits are of whole drives."""
    device = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if (place / "partition").exists():
        place = place.resolve().parent
    return (place / "dev").read_text().strip()


def throttled(folder: str, rates: list[int], mib: int, count: int) -> None:
    if os.geteuid() != 0 or not (GROUPS / "blkio.throttle.io_service_bytes").exists():
        print("A limit of the kernel's needs root and blkio of cgroup v1: skipped.")
        return
    size, name = mib * 1024 * 1024, f"shardfold-bench-{os.getpid()}"
    group, drive = GROUPS / name, drive_of(folder)
    group.mkdir()
    print(f"{count} regions of {mib} MiB, each read, computed with and written")
    print("| limit, MB/s | computation, s | bytes / rate, s | larger, s | taken, s | ratio | kernel's bytes = ours |")
    print("|---|---|---|---|---|---|---|")
    try:
        for rate in rates:
            for which in ("read", "write"):
                (group / f"blkio.throttle.{which}_bps_device").write_text(f"{drive} {rate * MB}")
            for share in (0.25, 1, 2):
                words = ["limited", "--folder", folder, "--rates", str(rate), "--share", str(share)]
                words += ["--mib", str(mib), "--count", str(count)]
                done = subprocess.run(
                    [sys.executable, __file__, *words], env={**os.environ, "SHARDFOLD_BENCH_GROUP": name},
                    stdout=subprocess.PIPE, check=True,
                )  # fmt: skip
                found = json.loads(done.stdout)
                moved = count * size / (rate * MB)
                larger, taken = max(share * moved, moved), found["seconds"]
                same = "yes" if found["kernel"] == found["own"] else f"{found['kernel']} {found['own']}"
                print(
                    f"| {rate} | {share * moved:.2f} | {moved:.2f} | {larger:.2f} | {taken:.2f} "
                    f"| {taken / larger:.2f} | {same} |"
                )
    finally:
        with suppress(OSError):
            group.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "rate", "throttled", "limited"])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of a round of `rate`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="that read, and as many that write")
    parser.add_argument("--mib", type=int, help="of a region: 32 of `rate`, 16 of `throttled`")
    parser.add_argument("--count", type=int, default=24, help="regions of `throttled`")
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 100], help="MB/s")
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "limited":
        size = given.mib * 1024 * 1024
        limited(given.folder, given.rates[0] * MB, given.share, size, given.count)
        return
    if given.what in ("all", "rate"):
        rate(given.folder, given.gib, given.rounds, given.threads, given.mib or 32)
    if given.what in ("all", "throttled"):
        throttled(given.folder, given.rates, given.mib or 16, given.count)


if __name__ == "__main__":
    main()
