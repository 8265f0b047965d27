"""Files on drives: whatever is stored comes back, in the order in which it was asked for; host memory is what was set
aside; what the system counts is what the tier counts; nothing stays behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardfold import accelerator
from shardfold.tiers import _drive as drives
from shardfold.tiers import disk
from shardfold.tiers.disk import CHUNK, STAGING, DiskRegion, DiskTier
from shardfold.tiers.staging import BLOCK

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)


@contextlib.contextmanager
def tier(*folders: Path, **options: Any) -> Iterator[DiskTier]:
    """One whose chunks and buffers are small, so that regions have many and wait for each other."""
    made = DiskTier(CPU, [str(folder) for folder in folders], **{"chunk": 2 * BLOCK, "staging": 10 * BLOCK, **options})
    try:
        yield made
    finally:
        made.close()


def folders_in(root: Path, count: int) -> list[Path]:
    made = [root / str(i) for i in range(count)]
    for folder in made:
        folder.mkdir(exist_ok=True)
    return made


def values_of(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Random bytes: of bools 0 or 1."""
    made = torch.randint(
        0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return made.view(dtype) if dtype is not torch.bool else made > 127


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit, also where numbers are not."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@contextlib.contextmanager
def short(seed: int) -> Iterator[None]:
    """The system does a part of what it is asked for, as it may: of reads and writes a random number of bytes."""
    pwrite, preadv, draw = os.pwrite, os.preadv, random.Random(seed)

    def part(size: int) -> int:
        return draw.choice([size, size, draw.randint(1, size), size // 512 * 512 or size])

    def write(file: int, data: Any, place: int) -> int:
        if len(data) < BLOCK:
            return pwrite(file, data, place)
        pwrite(file, data, place)  # all is there, but it says less
        return part(len(data))

    def read(file: int, into: Any, place: int) -> int:
        got = preadv(file, into, place)
        said = part(got) if got else 0
        into[0][said:got] = bytes(got - said)  # what it does not say is not there
        return said

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "pwrite", write)
        patched.setattr(os, "preadv", read)
        yield


class Mirror:
    """A tier, and what it should have."""

    def __init__(self, made: DiskTier, seed: int) -> None:
        self.tier, self.draw = made, random.Random(seed)
        self.regions: list[tuple[DiskRegion, Tensor]] = []
        self.coming: dict[int, Tensor | None] = {}  # by region, what was given to a fetch

    def allocate(self) -> None:
        dtype = self.draw.choice(DTYPES)
        numel = self.draw.choice([0, 1, 7, 1000, BLOCK, 2 * BLOCK, self.draw.randint(1, 12 * BLOCK)])
        region = self.tier.allocate((numel,), dtype, zero=True)
        self.regions.append((region, torch.zeros(numel, dtype=dtype)))

    def act(self) -> None:
        """One of what a region can be asked for."""
        if not self.regions or self.draw.random() < 0.2:
            return self.allocate()
        i = self.draw.randrange(len(self.regions))
        region, expected = self.regions[i]
        what = self.draw.choice(["store", "store", "fetch", "fetch", "get", "values", "flush", "drop", "lose"])
        if what == "store":
            values = values_of(self.draw.getrandbits(32), expected.numel(), expected.dtype)
            region.store(values.clone())
            self.regions[i] = region, values
            if (into := self.coming.pop(id(region), None)) is not None:
                into.zero_()  # it is another's now
                self.zeros = into
        elif what == "fetch" and id(region) not in self.coming:
            into = torch.empty_like(expected) if self.draw.random() < 0.5 else None
            region.fetch(into)
            self.coming[id(region)] = into
        elif what == "get":
            got, into = region.get(), self.coming.pop(id(region), None)
            assert same(got, expected) and (into is None or got.data_ptr() == into.data_ptr())
        elif what == "values":
            a, b = sorted(self.draw.randint(0, expected.numel()) for _ in range(2))
            assert same(region.values(slice(a, b)), expected[a:b])
        elif what == "flush":
            region.flush()
        elif what in ("drop", "lose"):
            self.coming.pop(id(region), None)
            del self.regions[i]
            if what == "drop":
                region.drop()
        assert not getattr(self, "zeros", torch.zeros(1)).view(torch.uint8).any()

    def check(self) -> None:
        for region, expected in self.regions:
            assert same(region.values(), expected) and same(region.get(), expected)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3), direct=st.booleans(), threads=st.integers(1, 3))
def test_what_is_asked_for_in_any_order_is_right(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, direct: bool, threads: int
) -> None:
    """Regions of any size and dtype, on one drive or several, stored, fetched, read in parts and dropped at random:
    each value is the last one that was stored, and memory that a fetch was given is left alone from the next store on.
    Half of all are with a system that does less than it is asked for."""
    places = folders_in(tmp_path_factory.getbasetemp(), count)
    with tier(*places, direct=direct, threads=threads) as made:
        with short(seed) if seed % 2 else contextlib.nullcontext():
            mirror = Mirror(made, seed)
            for _ in range(60):
                mirror.act()
            mirror.check()
        mirror.regions.clear()
    for each in made.drives:
        each._sort_in()
        assert each._free in ([], [(0, each.size)]), "all of it is free, in one piece"
    assert all(not list(place.iterdir()) for place in places)


def test_bytes_are_those_of_the_system(tmp_path: Path) -> None:
    """What the tier has counted is what the system has, past the page cache: whole blocks, each once; what is still in
    a buffer, or zero, is not read."""

    def system() -> list[int]:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
        return [int(lines["read_bytes"]), int(lines["write_bytes"])]

    first, second = folders_in(tmp_path, 2)
    with tier(first, second, staging=64 * BLOCK) as made:
        if not all(each.direct for each in made.drives) or drives._in_memory(made.drives[0].fileno()):
            pytest.skip("the folder for temporary files takes no direct I/O, which is what the system counts")
        sizes = [1, BLOCK, 2 * BLOCK + 1, 7 * BLOCK + 5]
        regions = [made.allocate((size,), torch.uint8, zero=True) for size in sizes]
        assert not any(region.get().any() for region in regions) and made.bytes_read == 0
        before = system()
        for region, size in zip(regions, sizes, strict=True):
            region.store(values_of(1, size, torch.uint8))
            region.flush()
        for region in regions:
            region.get()
        regions[3].values(slice(BLOCK - 1, BLOCK + 1))
        whole = sum(drives.blocks(size) for size in sizes)
        assert made.bytes_written == whole and made.bytes_read == whole + 2 * BLOCK
        assert [now - then for now, then in zip(system(), before, strict=True)] == [made.bytes_read, made.bytes_written]
        assert [each.bytes_written for each in made.drives] == [
            # in turn, chunks of two blocks: 1 | 1 | 2, 1 | 2, 2, 2, 2
            (1 + 2 + 2 + 2) * BLOCK,
            (1 + 1 + 2 + 2) * BLOCK,
        ]


def test_host_memory_is_what_was_set_aside(tmp_path: Path) -> None:
    """However much is stored: as many buffers as there are, and a store waits for the drive where none is left."""
    with tier(tmp_path, chunk=BLOCK, staging=8 * BLOCK) as made:
        assert made.incoming._spare and len(made.incoming._spare) + len(made.outgoing._spare) == 8
        gate = threading.Event()
        for _ in range(2):
            made.drives[0].writers.submit(gate.wait)
        region = made.allocate((6 * BLOCK,), torch.uint8)
        region.store(values_of(1, 6 * BLOCK, torch.uint8))  # all there are
        other, stored = made.allocate((1,), torch.uint8), threading.Event()

        def store() -> None:
            other.store(torch.ones(1, dtype=torch.uint8))
            stored.set()

        thread = threading.Thread(target=store)
        thread.start()
        assert same(region.get(), values_of(1, 6 * BLOCK, torch.uint8)), "reads have buffers of their own"
        assert not stored.is_set()
        gate.set()
        thread.join()
        assert other.get().tolist() == [1]
    assert STAGING % CHUNK == 0 and CHUNK % BLOCK == 0


def test_a_region_larger_than_all_buffers_passes_through_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, in chunks, as often as it is asked for, beside others that are as large: the buffers that were made at
    first are all the host memory there is, each is one thread's at a time, and all come back."""
    made_bytes: list[int] = []
    real = accelerator.host_memory

    def counted(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        made_bytes.append(shape[0] * dtype.itemsize)
        return real(shape, dtype, device)

    monkeypatch.setattr(accelerator, "host_memory", counted)
    staging, numel = 10 * BLOCK, 25 * BLOCK + 3
    with tier(*folders_in(tmp_path, 2), chunk=BLOCK, staging=staging) as made:
        at_first, sides = list(made_bytes), (made.incoming, made.outgoing)
        everyone = [sorted(buffer.address for buffer in side._spare) for side in sides]
        held = sum(side._spare[0].memory.untyped_storage().nbytes() for side in sides)
        assert staging <= held <= staging + 2 * BLOCK and sum(map(len, everyone)) == staging // BLOCK
        regions = [made.allocate((numel,), torch.uint8) for _ in range(3)]
        values, into = [values_of(i, numel, torch.uint8) for i in range(3)], torch.empty(numel, dtype=torch.uint8)
        with Memory() as taken:
            for _ in range(2):
                for region, value in zip(regions, values, strict=True):
                    region.store(value)
                for region, value in zip(regions, values, strict=True):
                    region.fetch(into)
                    assert region.get().data_ptr() == into.data_ptr() and same(into, value)
        assert taken.most <= numel, "nothing but what the comparison makes"
        made.look(patient=True)
        assert made_bytes == at_first
        for side, addresses in zip(sides, everyone, strict=True):
            while not side._back.empty():
                side._spare.append(side._back.get_nowait())
            assert sorted(buffer.address for buffer in side._spare) == addresses, "each is back, once"


class Memory(TorchDispatchMode):
    """The most bytes that an operation of torch on this thread has made at once."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        old = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in old:
            self.most = max(self.most, found.untyped_storage().nbytes())
        return found


def test_what_is_overwritten_or_dropped_is_not_written(tmp_path: Path) -> None:
    """Writes that have not begun are taken back; one that has begun keeps its place until it is over."""
    with tier(tmp_path, threads=1, staging=64 * BLOCK) as made:
        gate = threading.Event()
        made.drives[0].writers.submit(gate.wait)
        region, other = (made.allocate((3 * BLOCK,), torch.uint8) for _ in range(2))
        for seed in range(3):
            region.store(values_of(seed, 3 * BLOCK, torch.uint8))
        other.store(values_of(4, 3 * BLOCK, torch.uint8))
        other.drop()
        gate.set()
        region.flush()
        assert made.bytes_written == 3 * BLOCK and same(region.get(), values_of(2, 3 * BLOCK, torch.uint8))


def test_a_place_is_kept_until_its_last_write_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would be written over what its next owner stored."""
    begun, gate, pwrite = threading.Event(), threading.Event(), os.pwrite
    with tier(tmp_path, staging=64 * BLOCK) as made:

        def slow(file: int, data: Any, place: int) -> int:
            if not begun.is_set():
                begun.set()
                gate.wait()
            return pwrite(file, data, place)

        monkeypatch.setattr(os, "pwrite", slow)
        region = made.allocate((BLOCK,), torch.uint8)
        region.store(torch.ones(BLOCK, dtype=torch.uint8))
        begun.wait()
        (write,) = region._writes
        region.drop()
        other = made.allocate((BLOCK,), torch.uint8)
        other.store(torch.full((BLOCK,), 2, dtype=torch.uint8))
        other.flush()
        gate.set()
        wait([write.future])
        assert other.get().unique().tolist() == [2]
        third = made.allocate((BLOCK,), torch.uint8)
        assert made.drives[0].size == 2 * BLOCK and third.nbytes, (
            "it is free now, whether or not somebody has looked at the write"
        )


def test_what_was_stored_last_is_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store waits for a write of its region that has begun, or the two would be in the file in any order."""
    begun, gate, pwrite = threading.Event(), threading.Event(), os.pwrite
    with tier(tmp_path, staging=64 * BLOCK) as made:
        region = made.allocate((BLOCK,), torch.uint8)

        def slow(file: int, data: Any, place: int) -> int:
            first = not begun.is_set()
            begun.set()
            if first:
                gate.wait()
            return pwrite(file, data, place)

        def waits(futures: list[Any]) -> None:
            if futures:
                gate.set()
            wait(futures)

        monkeypatch.setattr(os, "pwrite", slow)
        monkeypatch.setattr(disk, "wait", waits)
        region.store(torch.ones(BLOCK, dtype=torch.uint8))
        begun.wait()
        region.store(torch.full((BLOCK,), 2, dtype=torch.uint8))
        region.flush()
        gate.set()
        made.look(patient=True)
        assert region.get().unique().tolist() == [2]


# -- where direct I/O is refused


@pytest.mark.parametrize("where", ["opened", "written"])
def test_without_direct_io_it_is_said_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Some file systems refuse it when it is turned on, others at the first write. One warning names the folder and
    what it means; values are right."""
    control, pwrite = fcntl.fcntl, os.pwrite

    def refused(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT and where == "opened":
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, flags)

    def aligned(file: int, data: Any, place: int) -> int:
        if control(file, fcntl.F_GETFL) & os.O_DIRECT and where == "written":
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, data, place)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    monkeypatch.setattr(os, "pwrite", aligned)
    monkeypatch.setattr(drives, "_in_memory", lambda file: False)
    with caplog.at_level(logging.WARNING, "shardfold"), tier(tmp_path) as made:
        assert not made.drives[0].direct
        mirror = Mirror(made, 3)
        for _ in range(60):
            mirror.act()
        mirror.check()
        mirror.regions.clear()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"The file system of {tmp_path} takes no direct I/O, so what is stored there passes through")
    assert "fills the memory of the host" in said


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="there is no folder that is known to be in memory")
def test_a_folder_in_memory_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The system's folder for temporary files is one on many machines."""
    with caplog.at_level(logging.WARNING, "shardfold"), tier(Path("/dev/shm")):
        pass
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("The folder /dev/shm is in memory (tmpfs), so what is stored there fills the memory")


# -- files


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is taken away at once; one that a process which was killed in between left there goes too, and what is
    not ours, or may still be in use, stays."""
    opened = os.open

    def refused(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refused)
    for name, age in (("shardfold-disk-old", 3600), ("shardfold-disk-new", 0), ("another", 3600)):
        (tmp_path / name).touch()
        then = os.stat(tmp_path).st_mtime - age
        os.utime(tmp_path / name, (then, then))
    with tier(tmp_path) as made:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "shardfold-disk-new"]
        region = made.allocate((100,), torch.uint8)
        region.store(torch.ones(100, dtype=torch.uint8))
        region.flush()
        assert region.get().all() and os.fstat(made.drives[0].fileno()).st_mode & 0o077 == 0


KILLED = """
import os, random, signal, sys
import torch
from shardfold.tiers.disk import DiskTier

places, times, draw = sys.argv[2:], int(sys.argv[1]), random.Random(1)
values = torch.ones(300_000)

def work(out):
    tier = DiskTier(torch.device("cpu"), places, chunk=65536, staging=1 << 20)
    tier.reserve(64 << 20)
    regions = [tier.allocate(values.shape, values.dtype) for _ in range(8)]
    while True:
        for region in regions:
            os.write(out, b".")
            region.store(values)
            region.fetch()

for _ in range(times):
    said, out = os.pipe()
    child = os.fork()
    if not child:
        work(out)
    os.close(out)
    for _ in range(draw.randint(1, 100)):
        assert os.read(said, 1) == b"."
    mine = [os.stat(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
    held = [file.st_size for file in mine if file.st_nlink == 0 and file.st_dev == os.stat(places[0]).st_dev]
    assert held == [32 << 20] * 2, held
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(said)
    assert not [name for place in places for name in os.listdir(place)]
print("done")
"""


@pytest.mark.soak
@pytest.mark.parametrize("times", [5, pytest.param(100, marks=pytest.mark.soak)])
def test_nothing_stays_behind_a_killed_process(tmp_path: Path, times: int) -> None:
    """Its files have no names while it stores and reads, and its folders are empty, at whatever moment it was killed:
    so its space is free again."""
    command = [sys.executable, "-c", KILLED, str(times), *map(str, folders_in(tmp_path, 2))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout == "done\n", done.stderr


# -- room


def test_what_does_not_fit_is_refused_before_anything_is_stored(tmp_path: Path) -> None:
    """In one sentence: how much is needed, how much is there, and where; what fits is not refused afterwards."""
    with tier(tmp_path) as made:
        free = made.drives[0].free_space()
        for ask in (made.reserve, lambda size: made.allocate((size,), torch.uint8)):
            with pytest.raises(OSError, match=r" free: .*; make room there, or name another folder$") as error:
                ask(2 * free + 2**40)
            assert error.value.errno in (errno.ENOSPC, errno.EFBIG)
            assert f"a file in {tmp_path} needs " in str(error.value)
        assert made.drives[0].size == 0 and os.fstat(made.drives[0].fileno()).st_blocks == 0
        made.reserve(100 * BLOCK)
        assert os.fstat(made.drives[0].fileno()).st_blocks * 512 >= 100 * BLOCK, "it is taken, not only looked up"
        regions = [made.allocate((BLOCK,), torch.uint8) for _ in range(100)]
        assert made.drives[0].size == 100 * BLOCK
        del regions


def test_where_room_cannot_be_taken_it_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without ``fallocate``."""
    monkeypatch.setattr(drives, "_system_fallocate", None)
    with tier(tmp_path) as made:
        with pytest.raises(OSError, match="No space left on device; make room there"):
            made.reserve(2 * made.drives[0].free_space() + 2**40)
        region = made.allocate((3 * BLOCK,), torch.uint8)
        region.store(values_of(1, 3 * BLOCK, torch.uint8))
        assert same(region.get(), values_of(1, 3 * BLOCK, torch.uint8))


# -- faults


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_chunks_that_cannot_be_written_stay_in_memory(tmp_path: Path, code: int) -> None:
    """Of a region that is larger than all buffers, on one of two drives: nothing is lost, buffers come back, the next
    store hears of it, and all is on the drives once they take it."""
    pwrite = os.pwrite
    places = folders_in(tmp_path, 2)
    size = 40 * BLOCK + 77
    with tier(*places) as made:
        bad = made.drives[1].fileno()

        def fail(file: int, data: Any, place: int) -> int:
            if file == bad:
                raise OSError(code, "")
            return pwrite(file, data, place)

        region, other = made.allocate((size,), torch.uint8), made.allocate((1,), torch.uint8)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "pwrite", fail)
            said = f"8,192 bytes .* written to a file in {places[1]} "
            region.store(values_of(1, size, torch.uint8))
            wait([write.future for write in made.pending])  # a store does not wait for what others write
            for store in (
                lambda: other.store(torch.ones(1, dtype=torch.uint8)),  # who stores next
                lambda: region.store(values_of(2, size, torch.uint8)),  # its own
                region.flush,
            ):
                with pytest.raises(OSError, match=said) as error:
                    store()
                assert error.value.errno == code
            assert same(region.get(), values_of(2, size, torch.uint8))
            assert same(region.values(slice(5000, 150000)), values_of(2, size, torch.uint8)[5000:150000])
            assert made.is_refused
        region.store(values_of(3, size, torch.uint8))
        assert made.is_refused, "the other is still in memory"
        other.store(torch.ones(1, dtype=torch.uint8))
        assert made.look(patient=True) is None
        before = made.bytes_read
        assert same(region.get(), values_of(3, size, torch.uint8)) and not made.is_refused
        assert made.bytes_read - before == drives.blocks(size)


def test_a_region_that_is_dropped_is_missed_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written of it keeps no store waiting."""
    pwrite = os.pwrite
    with tier(tmp_path) as made:
        region = made.allocate((BLOCK,), torch.uint8)

        def fail(file: int, data: Any, place: int) -> int:
            raise OSError(errno.EIO, "")

        monkeypatch.setattr(os, "pwrite", fail)
        region.store(values_of(1, BLOCK, torch.uint8))
        assert "Input/output error" in str(made.look(patient=True)) and made.is_refused
        region.drop()
        assert not made.is_refused
        monkeypatch.setattr(os, "pwrite", pwrite)


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much, from where and why; a drive that gives less than a block over and over ends too."""
    with tier(tmp_path) as made:
        region = made.allocate((3 * BLOCK,), torch.uint8)
        region.store(values_of(1, 3 * BLOCK, torch.uint8))
        region.flush()

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, "")

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", fail)
            for ask in (region.get, region.values):
                with pytest.raises(OSError, match=r"could not be read from a file in .*: Input/output error"):
                    ask()
            patched.setattr(os, "preadv", lambda *_: 1)
            if made.drives[0].direct:
                with pytest.raises(OSError, match="100 times in a row the drive took or gave less than 4096 bytes"):
                    region.get()
        assert same(region.get(), values_of(1, 3 * BLOCK, torch.uint8))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: needs root")
def test_a_small_disk_that_fills(tmp_path: Path) -> None:
    """Files of sixteen blocks: what does not fit is refused, what was there before stays right."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={16 * BLOCK}", "none", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        with tier(tmp_path) as made:
            region = made.allocate((10 * BLOCK,), torch.uint8)
            region.store(values_of(1, 10 * BLOCK, torch.uint8))
            with pytest.raises(
                OSError, match=r"needs 40,960 bytes more than the 40,960 it has, and there are 24,576 free"
            ):
                made.allocate((10 * BLOCK,), torch.uint8)
            small = made.allocate((6 * BLOCK,), torch.uint8)
            small.store(values_of(2, 6 * BLOCK, torch.uint8))
            region.flush()
            small.flush()
            assert same(region.get(), values_of(1, 10 * BLOCK, torch.uint8))
            assert same(small.get(), values_of(2, 6 * BLOCK, torch.uint8))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
