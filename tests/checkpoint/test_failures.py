"""Saves that fail: what was there before is there and whole, every rank says what happened, and training goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.checkpoint import draft as drafts
from shardfold.checkpoint import folders, messages, opened, run_lock
from shardfold.checkpoint.folders import resolve
from shardfold.checkpoint.run_lock import LOCK, Holder
from shardfold.checkpoint.standing_thread import StandingThread
from shardfold.comm import launcher_notes
from shardfold.errors import CheckpointError, CollectiveError, ConfigError, UsageError
from shardfold.testing import Ranks, RanksFailed
from tests.support.saving import Disk, die, engine, expect, failing, left_over, train, whole

NO_ROOM = "No space left on device"


class Raises:
    """A state that cannot be given."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("the sampler has no epoch")


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """No file of this process may be larger: the kernel refuses, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def never(condition: bool) -> Iterator[None]:
    yield


def broken_saves(folder: str) -> dict[str, list[str]]:
    """Saves step 1; then each way to fail; after each of them what is there is as it was, and a step is trained."""
    root = Path(folder)
    rank = int(os.environ["RANK"])
    trained = engine()
    train(trained)
    expect(trained, root)
    trained.save(root / "a", wait=True)
    if rank == 0:
        (root / "taken").mkdir()
        (root / "taken" / "thesis.tex").write_text("mine")
        (root / "file").write_text("mine")
    before = sf.Checkpoint(root).digest
    said: dict[str, list[str]] = {}

    def attempt(
        name: str,
        target: Path = root / "b",
        *,
        on: int = 0,
        broken: Any = None,
        wait: bool = True,
        step: bool = True,
        **more: Any,
    ) -> None:
        said[name] = []
        with broken if broken is not None and rank == on else never(True):
            try:
                saving = trained.save(target, wait=wait, **more)
                saving.wait()
            except (CheckpointError, ConfigError) as error:
                said[name].append(f"{type(error).__name__}: {error}")
        assert sf.Checkpoint(root).digest == before, name
        assert not (root / "b").exists(), name
        train(trained, int(step))

    full = errno.ENOSPC
    attempt("disk full on rank 1", on=1, broken=failing(root, "pwrite", 1, full))
    attempt("in the background", on=1, broken=failing(root, "pwrite", 1, full), wait=False)
    attempt("at the index", broken=failing(root, "write", 2, full))
    attempt("at the name of the latest", broken=failing(root, "write", 3, full))
    attempt("at the sync of rank 1", on=1, broken=failing(root, "fsync", 1, errno.EIO))
    attempt("too large a file", on=1, broken=limited(16384))
    attempt("rename", broken=failing(root, "rename", 1, errno.EACCES))
    attempt("latest", broken=failing(root, "replace", 1, errno.EACCES))
    attempt("latest of one of that name", root / "a", broken=failing(root, "replace", 1, errno.EACCES))
    exchange, drafts._swap = drafts._swap, lambda one, other: False
    attempt("latest, no exchange", root / "a", broken=failing(root, "replace", 1, errno.EACCES))
    attempt("second rename, no exchange", root / "a", broken=failing(root, "rename", 2, errno.EIO))
    drafts._swap = exchange
    attempt("below a file", root / "file" / "b")
    attempt("no checkpoint", root / "taken")
    attempt("a file", root / "file")
    attempt("named latest", root / "latest")
    attempt("raises on rank 0", state={"sampler": Raises()})
    attempt("raises on rank 1", rank_state={"sampler": Raises()} if rank == 1 else {})
    attempt("not encodable", rank_state={"data": {"lock": threading.Lock()}} if rank == 1 else {})
    attempt("other places", root / f"b{rank}")
    attempt("other options", keep=rank + 1)
    with trained.gathered("norm.bias", write=True) as bias, torch.no_grad():
        bias[3] = float("inf")
    attempt("not finite", step=False, nonfinite="raise")
    with trained.gathered("norm.bias", write=True) as bias, torch.no_grad():
        bias[3] = 0.0
    if rank == 0:
        assert left_over(root) == ["file", "taken"]
        assert (root / "taken" / "thesis.tex").read_text() == (root / "file").read_text() == "mine"
        (root / "file").unlink()
        (root / "taken" / "thesis.tex").unlink()  # an empty folder is a place
    expect(trained, root)
    trained.save(root / "taken", wait=True)
    trained.close()
    return said


def told_launcher(folder: str, bad: int, wait: bool) -> tuple[bool, bool]:
    """Whether this rank leaves word that it would fail by another's fault: behind a save that failed on ``bad``, and
    behind the step after it."""
    root, rank = Path(folder), int(os.environ["RANK"])
    note = root / f"note-{rank}"
    note.touch()
    os.environ[launcher_notes.FILE] = str(note)
    trained = engine("zero1")
    with failing(root / "run", "pwrite", 1, errno.EIO) if rank == bad else never(True):
        saving = trained.save(root / "run" / "a", wait=False)
        assert saving is not None
        with pytest.raises(CheckpointError, match=f"rank {bad}: Input/output error"):
            saving.wait() if wait else trained.save(root / "run" / "b", wait=True)
    behind = note.read_bytes().startswith(b"1")
    train(trained)
    after = note.read_bytes().startswith(b"1")
    trained.close()
    os.close(launcher_notes._file.pop())
    return behind, after


@pytest.mark.parametrize(("bad", "wait"), [(0, True), (1, False), pytest.param(2, True, marks=pytest.mark.soak)])
def test_the_launcher_is_told_whose_disk_failed(ranks: Ranks, tmp_path: Path, bad: int, wait: bool) -> None:
    """So that it names that rank, and not the first one that ends; who goes on has not failed."""
    told = ranks.run(told_launcher, str(tmp_path), bad, wait, world_size=3)
    assert told == [(rank != bad, False) for rank in range(3)]


SAID = {
    "disk full on rank 1": ["rank 1: No space left on device", "rank-00001-of-00002.safetensors"],
    "in the background": ["rank 1: No space left on device", "rank-00001-of-00002.safetensors"],
    "at the index": ["No space left on device", "index.json"],
    "at the name of the latest": ["No space left on device", "latest"],
    "at the sync of rank 1": ["rank 1: Input/output error"],
    "too large a file": ["rank 1: File too large", "rank-00001-of-00002.safetensors"],
    "rename": ["Permission denied"],
    "latest": ["Permission denied"],
    "latest of one of that name": ["Permission denied"],
    "latest, no exchange": ["Permission denied"],
    "second rename, no exchange": ["Input/output error"],
    "below a file": ["rank 0: ", "/file is a file, where a folder is needed"],
    "no checkpoint": ["rank 0: ", "taken exists and is not a checkpoint"],
    "a file": ["rank 0: ", "file exists and is not a checkpoint"],
    "named latest": ["not named 'latest'", "choose another"],
    "raises on rank 0": ["rank 0: ValueError: the sampler has no epoch"],
    "raises on rank 1": ["rank 1: ValueError: the sampler has no epoch"],
    "not encodable": ["rank 1: rank_state['data']['lock'] is a lock, which a checkpoint does not take"],
    "other places": ["ConfigError: ", "rank 0: ", "/b0", "rank 1: ", "/b1", "give every rank the same"],
    "other options": ["ConfigError: ", "rank 0: ", "keep=1", "rank 1: ", "keep=2"],
    "not finite": ["inf or NaN in norm.bias"],
}


@pytest.mark.soak
def test_every_rank_says_why_and_the_checkpoint_before_stays(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever fails on one rank: both raise one sentence with the reason, and nothing of the attempt is left."""
    root = tmp_path / "run"
    root.mkdir()
    said = ranks.run(broken_saves, str(root), world_size=2)
    assert said[0] == said[1]
    assert said[0].keys() == SAID.keys()
    for name, words in SAID.items():
        (text,) = said[0][name]
        assert all(word in text for word in words), (name, text)
        if "ConfigError" not in words[0]:
            assert text.startswith("CheckpointError: /") and "was not written: " in text, text
            assert text.endswith("Checkpoints before it are as they were."), text
    assert whole(root) == len(SAID)
    assert left_over(root) == []


def told_once(folder: str) -> tuple[list[str], str]:
    """A save that fails in the background while training goes on."""
    root, records = Path(folder), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("shardfold").addHandler(handler)
    trained = engine()
    train(trained)
    broken = failing(root, "pwrite", 1, errno.ENOSPC) if trained.rank == 1 else never(True)
    with broken:
        saving = trained.save(root / "a")
        saving._over.wait()
    train(trained, 3)
    first = list(records)
    with pytest.raises(CheckpointError, match="was not written") as error:
        saving.wait()
    expect(trained, root)
    trained.save(root / "b")
    trained.close()
    logging.getLogger("shardfold").removeHandler(handler)
    assert records == first
    return records, str(error.value)


def test_a_failure_in_the_background_is_logged_once_and_raised_by_wait(ranks: Ranks, tmp_path: Path) -> None:
    """Training goes on; every rank logs one line; the next save is written, and closing waits for it."""
    root = tmp_path / "run"
    root.mkdir()
    for records, error in ranks.run(told_once, str(root), world_size=2):
        assert records == [error] and NO_ROOM in error
    assert whole(root) == 4


def one_after_the_other(folder: str) -> list[Any]:
    """Saves while one is under way: it is held until the next is asked for."""
    root = Path(folder)
    go = threading.Event()
    trained = engine()
    train(trained)
    with pytest.raises(UsageError, match="micro-batches"):
        tokens = torch.zeros(2, 8, dtype=torch.long)
        trained.accumulate, accumulate = 2, trained.accumulate
        trained.backward(trained(tokens, tokens))
        trained.save(root / "between")
    trained.zero_grad()
    trained.accumulate = accumulate
    finish = trained.saver.finish

    def finishing() -> None:
        go.set()
        finish()

    def at(_: int, name: str) -> None:
        if name == "pwrite" and trained.rank == 1:
            go.wait()

    with Disk(root, at).watched():
        first = trained.save(root / "a")
        train(trained)
        skipped = trained.save(root / "b", busy="skip")
        under_way = first.done
        trained.saver.finish = finishing
        expect(trained, root)
        second = trained.save(root / "c", busy="wait")
        order = first.done
        second.wait()
    for number in range(5):
        train(trained)
        expect(trained, root)
        trained.save(root / f"kept-{number}", wait=True, keep=2)
    trained.close()
    return [skipped, under_way, order]


def test_saves_wait_for_each_other_or_are_skipped(ranks: Ranks, tmp_path: Path) -> None:
    """One at a time: the second waits or is left out, by all ranks alike; none between micro-batches; keep=2."""
    root = tmp_path / "run"
    root.mkdir()
    assert ranks.run(one_after_the_other, str(root), world_size=2) == [[None, False, True]] * 2
    assert sorted(p.name for p in root.iterdir()) == ["kept-3", "kept-4", "latest"]
    assert whole(root) == 7


def leaving(folder: str, how: str) -> None:
    """Ends while a save is under way, whose writes wait until the end has begun."""
    root = Path(folder)
    go = threading.Event()
    trained = engine()
    train(trained)
    expect(trained, root)

    def at(_: int, name: str) -> None:
        if name == "pwrite":
            go.wait()

    with Disk(root, at).watched():
        saving = trained.save(root / "a")
        if how == "close":
            finish = trained.saver.finish
            trained.saver.finish = lambda: (go.set(), finish())
            trained.close()
        else:
            dist.destroy_process_group()
            go.set()
        saving.wait()


@pytest.mark.parametrize("how", ["close", "destroy"])
def test_a_save_outlives_its_engine_and_the_process_group(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """Closing the engine waits for the save; one who destroys the process group meanwhile does not break it."""
    root = tmp_path / "run"
    root.mkdir()
    ranks.run(leaving, str(root), how, world_size=2)
    assert whole(root) == 1


SCRIPT = """
import sys, threading
from pathlib import Path
from tests.support.saving import Disk, die, engine, expect, train
root, ending = Path(sys.argv[1]), threading.Event()
trained = engine()
train(trained)
expect(trained, root)
# Until the main thread has ended, nothing is written.
def at(number, name):
    if name == "pwrite":
        threading.main_thread().join()
Disk(root, at).watched().__enter__()
trained.save(root / "a")
print("the script has ended")
"""


@pytest.mark.soak
def test_the_interpreter_ends_after_the_save(tmp_path: Path) -> None:
    """A script that ends while a save is under way leaves it complete; also where rank 0 serves the store itself."""
    root = tmp_path / "run"
    root.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with _free_port() as port:
        here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        here |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(root)], env={**here, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("the script has ended" in text and "not written" not in text for text in outputs), outputs
    assert whole(root) == 1


@contextmanager
def _free_port() -> Iterator[int]:
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def interrupted(folder: str) -> list[str]:
    """One rank leaves a save by what is no ordinary error, in the file system or where it starts its thread."""
    root = Path(folder)
    trained = engine()
    train(trained)
    expect(trained, root)
    trained.save(root / "a", wait=True)
    said: list[str] = []
    for rank, when in ((0, "mkdir"), (0, "pwrite"), (1, "pwrite")):

        def at(_: int, name: str, when: str = when) -> None:
            if name == when:
                raise KeyboardInterrupt

        try:
            with Disk(root, at).watched() if trained.rank == rank else never(True):
                trained.save(root / "b", wait=True)
        except (KeyboardInterrupt, CheckpointError) as error:
            said.append(f"{type(error).__name__}: {error}")
        train(trained)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "shardfold-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse if trained.rank == 1 else start  # type: ignore[method-assign]
    try:
        saving = trained.save(root / "b")
        threading.Thread.start = start  # type: ignore[method-assign]
        saving.wait()
    except RuntimeError as error:
        said.append(f"{type(error).__name__}: {error}")
    threading.Thread.start = start  # type: ignore[method-assign]
    assert [path.name for path in folders.listed(root)] == ["a"]
    trained.close()
    return said


def test_a_rank_that_is_interrupted_says_so(ranks: Ranks, tmp_path: Path) -> None:
    """Ctrl-C on one rank, or no thread to be had: the other hears it at once, and the draft is gone."""
    root = tmp_path / "run"
    root.mkdir()
    first, second = ranks.run(interrupted, str(root), world_size=2)
    assert first[:2] == ["KeyboardInterrupt: "] * 2 and second[2] == "KeyboardInterrupt: "
    assert all("rank 0: it was interrupted (KeyboardInterrupt)" in each for each in second[:2])
    assert "rank 1: it was interrupted (KeyboardInterrupt)" in first[2]
    assert (
        second[3] == "RuntimeError: can't start new thread"
        and "rank 1: RuntimeError: can't start new thread" in first[3]
    )
    assert whole(root) == 1
    assert left_over(root) == []


# -- what lies on the disk


def one_engine(root: Path, *names: str) -> sf.Engine:
    """An engine of this process alone, and checkpoints of steps 1, 2, ... that it has saved."""
    root.mkdir()
    trained = engine("ddp")
    for name in names:
        train(trained)
        expect(trained, root)
        trained.save(root / name, wait=True)
    return trained


def owner(draft: Path, pid: int, **other: Any) -> None:
    draft.mkdir()
    said = Holder.here().to_json() | {"pid": pid, "started": run_lock._started(pid)} | other
    (draft / drafts.OWNER).write_text(json.dumps(said))


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """Drafts of the dead, what was being removed, what was being replaced; not what somebody may still write."""
    root = tmp_path / "run"
    trained = one_engine(root, "a", "b")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    owner(root / ".x.writing-00000000000a", dead.pid)
    owner(root / ".x.writing-00000000000b", os.getppid(), started="long ago")  # its number was given again
    owner(root / ".x.writing-00000000000c", os.getppid())
    owner(root / ".x.writing-00000000000d", dead.pid, host="another host")
    (root / ".x.writing-00000000000e").mkdir()  # no owner yet
    (root / ".x.writing-notes").mkdir()  # the user's own
    (root / ".a.removed-00000000000f").mkdir()
    os.rename(root / "a", root / ".a.shardfold-replaced")  # killed between two renames
    (root / ".b.shardfold-replaced").mkdir()
    assert resolve(root / "a") == root / ".a.shardfold-replaced"
    assert sf.Checkpoint(root / "a").index.step == 1
    train(trained)
    expect(trained, root)
    trained.save(root / "c", wait=True)
    trained.close()
    assert sorted(p.name for p in root.iterdir()) == [
        ".x.writing-00000000000c", ".x.writing-00000000000d", ".x.writing-00000000000e", ".x.writing-notes",
        "a", "b", "c", "latest",
    ]  # fmt: skip
    assert sf.Checkpoint(root / "a").index.step == 1
    assert whole(root) == 3
    for draft in (root / ".x.writing-00000000000d", root / ".x.writing-00000000000e"):
        os.utime(draft, (0, 0))
        assert drafts._dead(draft)


def test_a_checkpoint_that_is_not_there_is_explained(tmp_path: Path) -> None:
    """What was asked for, what is wrong with it, and what is there instead."""
    root = tmp_path / "run"
    trained = one_engine(root, "a", "b")
    trained.close()

    def error(path: Path) -> str:
        with pytest.raises(CheckpointError) as raised:
            sf.Checkpoint(path)
        return str(raised.value)

    assert error(root / "c") == f"there is no checkpoint {root / 'c'}. There: a, b."
    (root / "latest").write_text("gone\n")
    assert error(root) == (f"{root / 'latest'} names 'gone', but there is no checkpoint {root / 'gone'}. There: a, b.")
    for bad in ("", "..", "../elsewhere", "\x00"):
        (root / "latest").write_text(bad)
        assert "latest" in error(root) and "a, b" in error(root)
    (root / "latest").unlink()
    assert error(root) == f"{root} has no 'latest' file: name one of its checkpoints: a, b."
    (part,) = (root / "a").glob("*.safetensors")
    half = root / "half"
    half.mkdir()
    assert "has no index.json and no files of ranks" in error(half)
    (half / "rank-00001-of-00003.safetensors").write_bytes(part.read_bytes())
    assert (
        "has rank-00001-of-00003.safetensors but no index.json and no file of rank 0, 2, so not all of it was written"
        in error(half)
    )
    assert f"{part.name}: has 9 bytes instead of " in [part.write_bytes(b"too short"), error(root / "a")][1]
    part.unlink()
    assert error(root / "a").startswith(f"{root / 'a'} is not complete: {part.name}: is missing")
    assert error(part.parent / "index.json" / "x").startswith("there is no checkpoint")
    assert "is a file" in error(root / "b" / "index.json")


def bad_loads(folder: str) -> dict[str, str]:
    """Loads what is damaged, or differs from what the other rank finds."""
    root = Path(folder)
    trained = engine()
    train(trained, 2)
    trained.save(root / "a", wait=True)
    train(trained)
    trained.save(root / "b", wait=True)
    said: dict[str, str] = {}

    def attempt(name: str, path: Path) -> None:
        try:
            trained.load(path)
        except CheckpointError as error:
            said[name] = str(error)

    attempt("different", root / "ab"[trained.rank])
    attempt("one has none", root / ("a" if trained.rank else "c"))
    train(trained)  # nothing was changed
    file = root / "b" / "rank-00001-of-00002.safetensors"
    if trained.rank == 0:
        with open(file, "r+b") as opened:
            opened.seek(-40000, os.SEEK_END)
            byte = opened.read(1)
            opened.seek(-40000, os.SEEK_END)
            opened.write(bytes([byte[0] ^ 1]))
    attempt("a bit", root)
    try:
        trained.save(root / "d", wait=True)
    except UsageError as error:
        said["after it"] = str(error)
    assert trained.load(root / "a").step == 2
    train(trained)
    trained.close()
    return said


def test_ranks_that_can_not_load_say_so_together(ranks: Ranks, tmp_path: Path) -> None:
    """Different checkpoints, none on one rank, a bit that only one rank reads: an error on both, that names it."""
    said, other = ranks.run(bad_loads, str(tmp_path / "run"), world_size=2)
    for name in said:  # each names the path that it was given
        assert said[name].partition("nothing was changed")[2] == other[name].partition("nothing was changed")[2]
    assert said["a bit"] == other["a bit"] and said["after it"] == other["after it"]
    assert "do not find the same checkpoint" in said["different"] and "rank 0: finds a" in said["different"]
    assert "rank 1: finds b" in said["different"] and "nothing was changed" in said["different"]
    assert "rank 0: there is no checkpoint" in said["one has none"] and "rank 1: finds a" in said["one has none"]
    assert "rank-00001-of-00002.safetensors is damaged: bytes " in said["a bit"]
    assert "load a checkpoint" in said["after it"]


def test_keep_fails_and_the_save_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be removed is logged: the new checkpoint is there all the same."""
    root = tmp_path / "run"
    trained = one_engine(root, "a", "b")
    train(trained)
    expect(trained, root)
    with failing(root, "rename", 2, errno.EACCES):
        trained.save(root / "c", wait=True, keep=1)
    assert "c was written, but keep=1: Permission denied" in caplog.text
    assert [path.name for path in folders.listed(root)] == ["a", "b", "c"]
    train(trained)
    expect(trained, root)
    trained.save(root / "d", wait=True, keep=1)
    trained.close()
    assert [path.name for path in folders.listed(root)] == ["d"]
    assert whole(root) == 4


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk(tmp_path: Path) -> None:
    """On a file system of 1 MiB: the save that does not fit is refused, and takes nothing away."""
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        root = root / "run"
        trained = one_engine(root, "a")
        train(trained)
        ballast = torch.zeros(300_000)
        for wait in (True, False):
            with pytest.raises(CheckpointError, match=rf"{NO_ROOM} \(.*rank-00000-of-00001.safetensors\)"):
                trained.save(root / "b", state={"ballast": ballast}, wait=wait).wait()
            assert whole(root) == 1
            assert left_over(root) == []
        expect(trained, root)
        trained.save(root / "b", wait=True)
        trained.close()
        assert whole(root) == 2
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


def load_and_die(root: str) -> None:
    """Rank 1 dies when it is about to say what it has found."""
    trained = engine()
    if trained.rank == 1:
        opened.resolve = lambda path: die()
    with pytest.raises(CollectiveError, match=r"what every rank says of 'load/1/open', failed .* has probably died"):
        trained.load(root)
    trained.close()
    Path(root, "said").touch()


def test_a_rank_that_dies_as_it_loads_is_noticed(ranks: Ranks, tmp_path: Path) -> None:
    """The other one does not wait for its word for the half hour that a collective may take."""
    root = tmp_path / "run"
    one_engine(root, "a").close()
    with pytest.raises(RanksFailed) as failed:
        ranks.run(load_and_die, str(root), world_size=2)
    assert [(each.rank, "SIGKILL" in each.summary) for each in failed.value.failures] == [(1, True)], str(failed.value)
    assert (root / "said").exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_what_is_renamed_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    """After a loss of power `latest` names a checkpoint that is there, with all of its bytes: files and their folder
    are synced before the folder is renamed, the name of the folder before `latest` is moved, and that at the end."""
    root = tmp_path / "run"
    trained = one_engine(root, *(["a"] if replaced else []))
    train(trained)
    calls: list[str] = []

    def recorded(name: str, call: Any) -> Any:
        def record(*args: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
            done = call(*args)
            calls.append(f"{name} {os.path.relpath(path, root).replace(token(root, path), 'draft')}")
            return done

        return record

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    monkeypatch.setattr(drafts, "_swap", recorded("exchange", drafts._swap))
    trained.save(root / "a", wait=True)
    monkeypatch.undo()
    trained.close()
    takes_place = calls.index("exchange draft" if replaced else "rename draft")
    before, after = calls[:takes_place], calls[takes_place + 1 :]
    files = ["rank-00000-of-00001.safetensors", "index.json", "latest"]
    assert [call for call in before if "owner" not in call and LOCK not in call] == [
        *(f"fsync draft/{name}" for name in files),
        "fsync draft",
    ]
    assert after == ["fsync .", "replace a/latest", "fsync ."]


def token(root: Path, path: str) -> str:
    """The name of the draft that a path lies in."""
    return next((part for part in Path(path).relative_to(root).parts if ".writing-" in part), "no draft")


def test_a_rank_is_missed_after_20_seconds(tmp_path: Path) -> None:
    """What the documents promise is what saves use: the tests of dead ranks set shorter times."""
    trained = one_engine(tmp_path / "run")
    train(trained)
    trained.save(tmp_path / "run" / "a")
    assert trained.saver._job is not None and trained.saver._job.messages.silence == 20.0
    assert messages.SILENCE_AT_EXIT == 8.0
    trained.close()


class Counting(dist.HashStore):
    """A store to which the word of rank 1 comes when it is looked for often enough."""

    looks = 0

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        if self.looks == 20:
            self.set("save/1/outcome/1", "+")
        return super().check(keys)


def test_where_a_rank_is_gone_words_are_not_waited_for() -> None:
    """Those that are there are heard; of who decides, and may live, also what it says within some seconds."""
    store, gone, pulse = Counting(), threading.Event(), StandingThread("pulse")
    mine, theirs = (messages.Messages(store, "save/1", rank, gone, pulse) for rank in (0, 2))
    theirs.say("written", "+1")
    mine.check_gone()
    gone.set()
    assert mine.hear("written", [1, 2]) == {2: "+1"} and store.looks < 10
    assert mine.hear("outcome", [1], besides=60.0) == {1: "+"}
    with pytest.raises(CheckpointError, match="another rank is gone"):
        mine.check_gone()
    assert mine.why_unheard == "another rank is gone"


def die_in_a_save(root: str) -> str:
    """Rank 1 dies at its first write, with all times as they are by default."""
    trained = engine()
    train(trained)
    with Disk(Path(root), lambda number, name: die()).watched() if trained.rank else never(True):
        try:
            trained.save(Path(root, "a"), wait=True)
        except CheckpointError as error:
            Path(root, "said").write_text(str(error))
    return ""


@pytest.mark.soak
def test_a_rank_is_missed_at_the_default(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by a death."""
    monkeypatch.setattr("shardfold.testing.ranks.SETTLE", 60.0)
    with pytest.raises(RanksFailed):
        ranks.run(die_in_a_save, str(tmp_path), world_size=2)
    assert "rank 1: it was not heard of for 20 s" in (tmp_path / "said").read_text()
