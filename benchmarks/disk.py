"""What the disk tier reaches of a drive: against a bare loop of direct I/O, and under a limit of the kernel's.

python benchmarks/disk.py                     # rate, throttled and step, in the system's folder for temporary files
python benchmarks/disk.py rate --folder /mnt/nvme --gib 4 --rounds 7
python benchmarks/disk.py throttled --rates 50 100
python benchmarks/disk.py step --rates 100
python benchmarks/disk.py striped --rates 50

    rate        rounds in which two take turns: threads that write, and then read, aligned buffers by ``os.pwrite`` and
                ``os.preadv`` with O_DIRECT into a file that has its space already; and regions of the tier that are
                stored, and then fetched into memory of the caller's. Same bytes, same sizes, same threads. The ratio
                is the median over rounds of the ratio in a round.
    throttled   a loop that computes while the next region is read and the last one written, as an update of states on
                disk does. The kernel lets a group of processes read and write so many bytes per second (cgroup v1,
                ``blkio.throttle``) and counts them. Reads and writes have a limit each, so the loop should take the
                larger of the computation and bytes / rate; a computation of a fourth, of as much and of twice as much
                is tried. Nothing can be beside the first read and the last write, so what can be reached is that of a
                pipeline of three stages: (regions - 1) x the longest stage + one of each. The bytes that the kernel
                counted are the tier's own count. Needs root.
    step        steps of training with moments and master on disk under the same limits: forward and backward, beside
                which what is left of the last step's writes goes on, and updates, beside which states are read and
                written; or, with ``delayed_update``, beside all of it. Its computation, next to none and as long as
                bytes / rate, is measured with states in host memory. The bytes that the kernel counted are those of
                ``traffic()``.
    striped     two drives (images of ext4 on loop devices) with a limit each: a loop without computation, on each alone
                and on both. Needs root and loop devices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import shardfold as sf
from shardfold.tiers.disk import CHUNK, DiskTier

CPU = torch.device("cpu")
GROUPS = Path("/sys/fs/cgroup/blkio")
MB = 1_000_000
GROUP = "SHARDFOLD_BENCH_GROUP"
CHILDREN = ["limited", "stepping"]


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


class Group:
    """A group of processes whose I/O the kernel limits and counts, on some drives.

    Raises:
        PermissionError: this needs root, and blkio of cgroup v1.
    """

    def __init__(self) -> None:
        if os.geteuid() != 0 or not (GROUPS / "blkio.throttle.io_service_bytes").exists():
            raise PermissionError("A limit of the kernel's needs root and blkio of cgroup v1: skipped.")
        self.path = GROUPS / f"shardfold-bench-{os.getpid()}"
        self.path.mkdir()

    def limit(self, folder: str, rate: float) -> None:
        for which in ("read", "write"):
            (self.path / f"blkio.throttle.{which}_bps_device").write_text(f"{drive_of(folder)} {rate:.0f}")

    def run(self, what: str, **options: Any) -> dict[str, Any]:
        """What a child of this program says that does ``what`` in the group."""
        words = [what, *(word for name, value in options.items() for word in (f"--{name}", *map(str, listed(value))))]
        done = subprocess.run(
            [sys.executable, __file__, *words], env={**os.environ, GROUP: str(self.path)}, stdout=subprocess.PIPE,
            check=True,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    def close(self) -> None:
        with suppress(OSError):
            self.path.rmdir()


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def drive_of(folder: str) -> str:
    """The drive of a folder, as the kernel numbers it; limits are of whole drives."""
    device = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if (place / "partition").exists():
        place = place.resolve().parent
    return (place / "dev").read_text().strip()


def joined() -> Path:
    """In a child: in the group from now on, and so are all threads that it makes."""
    group = Path(os.environ[GROUP])
    (group / "tasks").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    return group


def served(group: Path, folders: list[str]) -> list[int]:
    """Bytes that the group has read from and written to the drives of these folders, by the kernel's count."""
    drives = {drive_of(folder) for folder in folders}
    lines = [line.split() for line in (group / "blkio.throttle.io_service_bytes").read_text().splitlines()]
    return [sum(int(w[2]) for w in lines if w[0] in drives and w[1:2] == [what]) for what in ("Read", "Write")]


def limited(folders: list[str], rate: float, share: float, size: int, count: int, ahead: int) -> None:
    """The loop, in the group: prints what was found."""
    group = joined()
    tier = DiskTier(CPU, folders)
    a = torch.rand(128, 128)
    regions = [tier.allocate((size // 4,), torch.float32) for _ in range(count)]
    back = [torch.zeros(size // 4) for _ in range(ahead + 1)]
    compute = share * size / rate

    def update(values: torch.Tensor) -> None:
        end = perf_counter() + compute
        while perf_counter() < end:
            torch.mm(a, a)
        values += 1

    def loop(number: int) -> None:
        for i, region in enumerate(regions[:ahead]):
            region.fetch(back[i])
        for i, region in enumerate(regions[:number]):
            if i + ahead < number:
                regions[i + ahead].fetch(back[(i + ahead) % len(back)])
            values = region.get()
            update(values)
            region.store(values)
        for region in regions[:number]:
            region.flush()

    for region in regions:
        region.store(torch.zeros(size // 4))
        region.flush()
    loop(ahead)  # what the system has to read of the program itself is not counted
    before = served(group, folders), tier.bytes_read, tier.bytes_written
    taken = seconds(lambda: loop(count))
    kernel = [now - then for now, then in zip(served(group, folders), before[0], strict=True)]
    own = [tier.bytes_read - before[1], tier.bytes_written - before[2]]
    counts = [1 + (i < ahead) for i in range(count)]
    assert all(region.values(slice(1)).item() == n for region, n in zip(regions, counts, strict=True))
    print(json.dumps({"seconds": taken, "kernel": kernel, "own": own}))
    tier.close()


def throttled(folder: str, rates: list[int], mib: int, count: int, ahead: int) -> None:
    size, group = mib * 1024 * 1024, Group()
    print(f"{count} regions of {mib} MiB, each read ({ahead} ahead), computed with and written")
    print(
        "| limit, MB/s | computation, s | bytes / rate, s | larger, s | taken, s | ratio | pipeline, s | ratio "
        "| kernel's bytes = ours |\n|---|---|---|---|---|---|---|---|---|"
    )
    try:
        for rate in rates:
            group.limit(folder, rate * MB)
            for share in (0.25, 1, 2):
                found = group.run(
                    "limited", folder=folder, rates=rate, share=share, mib=mib, count=count, ahead=ahead
                )  # fmt: skip
                one = size / (rate * MB)
                larger, pipeline = max(1, share) * one * count, (max(1, share) * (count - 1) + share + 2) * one
                taken = found["seconds"]
                same = "yes" if found["kernel"] == found["own"] else f"{found['kernel']} {found['own']}"
                print(
                    f"| {rate} | {share * one * count:.2f} | {one * count:.2f} | {larger:.2f} | {taken:.2f} "
                    f"| {taken / larger:.2f} | {pipeline:.2f} | {taken / pipeline:.2f} | {same} |",
                    flush=True,
                )
    finally:
        group.close()


# -- steps of training


def stepping(folder: str, units: int, width: int, passes: float, *, delayed: bool) -> None:
    """Steps with moments and master in host memory and on disk, whose forward and backward take so many seconds, in the
    group: prints what was found."""
    group = joined()
    rows, timed = torch.rand(256, width), 4

    def made(tier: str) -> sf.Engine:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(units)])
        where = {"tier": tier, "folder": folder} if tier == "disk" else {"tier": tier}
        table = sf.PRESETS["zero2"].edit("master", "moments", **where).edit("grads", tier="host")
        overlap = sf.Overlap(delayed_update=delayed and tier == "disk")
        engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-3), layout=table, overlap=overlap)
        for _ in range(3 if delayed else 2):  # moments are zero at first, which are not read
            pass_(engine)
            engine.step()
        return engine

    def pass_(engine: sf.Engine) -> None:
        engine.backward(engine(rows).square().mean())

    near = made("host")
    once = median(seconds(lambda: pass_(near)) for _ in range(3))
    near.zero_grad()
    rows = torch.rand(max(16, int(256 * passes / once)), width)
    spent = [(seconds(lambda: pass_(near)), seconds(near.step)) for _ in range(timed)]
    near.close()
    engine = made("disk")
    tier = engine.sharded.tiers.named("disk", folder)
    assert isinstance(tier, DiskTier)

    def finish() -> None:
        engine._runner.handlers.cursor.end()  # updates behind the step
        tier.look(patient=True)

    def steps(number: int) -> None:
        for _ in range(number):
            pass_(engine)
            engine.step()

    finish()
    before = served(group, [folder])
    steps(2)  # from then on as much is on its way to the files when a step begins as when it ends
    taken = seconds(lambda: steps(timed)) / timed
    finish()
    kernel = [(now - then) / (timed + 2) for now, then in zip(served(group, [folder]), before, strict=True)]
    own = {row.op: row.moved for row in engine.traffic().moved if row.tier == "disk"}
    engine.close()
    passes, updates = (median(each) for each in zip(*spent, strict=True))
    print(json.dumps(
        {"seconds": taken, "passes": passes, "updates": updates, "kernel": kernel, "own": [own["FETCH"], own["STORE"]]}
    ))  # fmt: skip


def step(folder: str, rates: list[int], units: int, width: int) -> None:
    group, size = Group(), units * width**2 * 12
    print(f"AdamW's moments and fp32 masters of {units} layers of {width} x {width}, {size / MB:.0f} MB, one rank")
    print(
        "| limit, MB/s | updates are | forward and backward, s | updates, s | bytes / rate, s | larger, s | taken, s "
        "| ratio | kernel's bytes = the program's |\n" + "|---" * 9 + "|"
    )
    try:
        for rate in rates:
            group.limit(folder, rate * MB)
            for share, delayed in itertools.product((0, 1), (0, 1)):
                found = group.run(
                    "stepping", folder=folder, count=units, width=width, seconds=share * size / (rate * MB),
                    delayed=delayed,
                )  # fmt: skip
                io, passes, updates = max(found["own"]) / (rate * MB), found["passes"], found["updates"]
                larger, taken = max(passes + updates, io), found["seconds"]
                same = "yes" if found["kernel"] == found["own"] else f"{found['kernel']} {found['own']}"
                print(
                    f"| {rate} | {'behind' if delayed else 'in'} the step | {passes:.2f} | {updates:.2f} | {io:.2f} "
                    f"| {larger:.2f} | {taken:.2f} | {taken / larger:.2f} | {same} |",
                    flush=True,
                )
    finally:
        group.close()


# -- several drives


@contextmanager
def drives(count: int, mib: int) -> Iterator[list[str]]:
    """Folders on as many drives: images of ext4 on loop devices, which are gone behind it."""
    with ExitStack() as held:
        root = held.enter_context(tempfile.TemporaryDirectory())
        folders: list[str] = []
        for i in range(count):
            image, folder = f"{root}/{i}.img", f"{root}/{i}"
            os.mkdir(folder)
            with open(image, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, mib * 1024 * 1024)
            subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
            subprocess.run(["mount", "-o", "loop", image, folder], check=True)
            held.callback(subprocess.run, ["umount", folder], check=True)
            folders.append(folder)
        yield folders


def striped(rates: list[int], mib: int, count: int) -> None:
    group = Group()
    print(f"{count} regions of {mib} MiB, each read and written, without computation")
    print(
        "| limit of each, MB/s | first alone, MB/s | second alone, MB/s | both, MB/s | ratio | kernel's bytes = ours |"
    )
    print("|---|---|---|---|---|---|")
    try:
        with drives(2, 2 * mib * count) as folders:
            for rate in rates:
                for folder in folders:
                    group.limit(folder, rate * MB)
                speeds, same = [], True
                for those in ([folders[0]], [folders[1]], folders):
                    found = group.run("limited", folder=those, rates=rate, share=0, mib=mib, count=count, ahead=2)
                    speeds.append(mib * 1024 * 1024 * count / MB / found["seconds"])
                    same &= found["kernel"] == found["own"]
                print(
                    f"| {rate} | {speeds[0]:.1f} | {speeds[1]:.1f} | {speeds[2]:.1f} "
                    f"| {2 * speeds[2] / sum(speeds[:2]):.2f} | {'yes' if same else 'no'} |",
                    flush=True,
                )
    finally:
        group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whats = ["all", "rate", "throttled", "step", "striped", *CHILDREN]
    parser.add_argument("what", nargs="?", default="all", choices=whats, metavar="{" + ",".join(whats[:5]) + "}")
    parser.add_argument("--folder", nargs="+", default=[tempfile.gettempdir()])
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of a round of `rate`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="that read, and as many that write")
    parser.add_argument("--mib", type=int, help="of a region: 32 of `rate`, 16 of `throttled` and `striped`")
    parser.add_argument("--count", type=int, default=24, help="regions, or layers of `step`")
    parser.add_argument("--width", type=int, default=1024, help="of a layer of `step`")
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 100], help="MB/s")
    parser.add_argument("--ahead", type=int, default=2, help="regions that are read ahead, as the engine does")
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--delayed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder, mib = given.folder[0], given.mib or 16
    if given.what == "limited":
        limited(given.folder, given.rates[0] * MB, given.share, mib * 1024 * 1024, given.count, given.ahead)
    if given.what == "stepping":
        stepping(folder, given.count, given.width, given.seconds, delayed=bool(given.delayed))
    try:
        if given.what in ("all", "rate"):
            rate(folder, given.gib, given.rounds, given.threads, given.mib or 32)
        if given.what in ("all", "throttled"):
            throttled(folder, given.rates, mib, given.count, given.ahead)
        if given.what in ("all", "step"):
            step(folder, given.rates, given.count, given.width)
        if given.what == "striped":
            striped(given.rates, mib, given.count)
    except PermissionError as error:
        print(error)


if __name__ == "__main__":
    main()
