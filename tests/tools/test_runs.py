"""What a run is at is told rightly, however it ends and at whichever moment: never "training" of what is dead."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.launch.run_records import SIZE, STATUS, OwnRecord, read_records
from shardfold.tools.observe.run_status import OVER, RunStatus, runs_in

MOMENTS = ("starting", "training", "saving")
LIMIT = 5.0  # seconds within which a state is to be right
PATIENCE = "2"
SCRIPT = """
import os, sys, time
from shardfold.tools.observe.run_folder import Run
folder, moment, dies = sys.argv[1:]
rank = int(os.environ["RANK"])
while rank and not os.path.exists(folder):
    time.sleep(0.01)
run = Run(folder, steps=1000)

def here():
    if os.path.exists(folder + "/now"):
        if rank == 1 and dies == "raise": raise ValueError("no such weather")
        if rank == 1 and dies == "nan":
            from shardfold.errors import NonFiniteError
            raise NonFiniteError("the loss is nan")
        if rank == 1 and dies == "exit": os._exit(3)
        if rank == 1 and dies == "oom": b"x" * 2**30
        if rank == 0 and dies == "full": open(folder + "/large", "wb", buffering=0).write(b"x" * 2**24)
        if rank == 0 and dies == "full": raise OSError(28, os.strerror(28))  # what did not fit of that is left out
        if rank == 1 and dies == "hang":
            while True: time.sleep(1)
        if dies == "stops": run.close("stopped"); sys.exit(130)
        if dies == "ends": run.close(); sys.exit(0)

for step in range(1, 1000):
    if moment == "starting":
        while True: here(); time.sleep(0.01)
    run.log(step, loss=1.0)
    if moment == "saving" and step == 3:
        with run.during("saving"):
            while True: here(); time.sleep(0.01)
    here()
    # Ranks go in step, as those of an engine do.
    mine = f"{folder}/step-{rank}"
    with open(mine + "x", "w") as file: file.write(str(step))
    os.replace(mine + "x", mine)
    while not os.path.exists(f"{folder}/step-{1 - rank}") or int(open(f"{folder}/step-{1 - rank}").read()) < step - 1:
        time.sleep(0.005)
    time.sleep(0.01)
"""
LAUNCHER = "import sys; from shardfold import launch; sys.exit(launch.launch([sys.executable, *sys.argv[1:]], 2))"


@contextmanager
def running(folder: Path, moment: str, dies: str, patience: str = PATIENCE) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks under the launcher, at the moment."""
    script = folder.parent / "loop.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "SHARDFOLD_PATIENCE": patience}
    command = [sys.executable, "-c", LAUNCHER, str(script), str(folder), moment, dies]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        wait_for(folder, lambda found: found.state == moment and len(found.ranks) == 2 and at(found, moment))
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for each in [process, *children]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.kill()
        process.wait()


def at(found: RunStatus, moment: str) -> bool:
    return all(each.phase == moment for each in found.ranks) and (moment != "training" or found.step >= 3)


def wait_for(folder: Path, right: Any, limit: float = 60.0) -> RunStatus:
    until = time.monotonic() + limit
    while not right(found := RunStatus.of(folder)):
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return found


def is_gone(pid: int) -> bool:
    """Whether a process runs no more; it may still wait for its parent to hear of that."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def die(dies: str, folder: Path, process: subprocess.Popen[bytes], found: RunStatus) -> None:
    pids = [each.pid for each in found.ranks]
    if dies.startswith("kill rank"):
        os.kill(pids[int(dies[-1])], signal.SIGKILL)
    elif dies == "kill launcher":
        process.kill()
    elif dies == "kill all":
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
    elif dies == "stop rank 1":
        os.kill(pids[1], signal.SIGSTOP)
    elif dies == "oom":
        (group := GROUPS / f"shardfold-dies-{pids[1]}").mkdir()
        (group / "cgroup.procs").write_text(str(pids[1]))
        (group / MOST).write_text(str(2**28))
        (folder / "now").touch()
    elif dies == "move":
        folder.rename(folder.with_name("elsewhere"))
        (folder.with_name("elsewhere") / "now").touch()
    else:
        (folder / "now").touch()


GROUPS = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
MOST = "memory.limit_in_bytes" if GROUPS.name == "memory" else "memory.max"
ENDS = {
    "oom": ("failed", 1, "SIGKILL"),
    "full": ("failed", 0, "No space left"),
    "kill rank 0": ("failed", 0, "SIGKILL"),
    "kill rank 1": ("failed", 1, "SIGKILL"),
    "kill launcher": ("lost", None, "processes are gone"),
    "kill all": ("lost", None, "processes are gone"),
    "raise": ("failed", 1, "no such weather"),
    "nan": ("failed", 1, "the loss is nan"),
    "exit": ("failed", 1, "status 3"),
    "stop rank 1": ("failed", 1, "stopped"),
    "stops": ("stopped", None, ""),
    "ends": ("done", None, ""),
}


@contextmanager
def placed(folder: Path, dies: str) -> Iterator[Path]:
    """A folder for a run that dies so: on a disk that will be full, beside what kills who takes too much memory."""
    if dies in ("oom", "full") and (os.geteuid() or not shutil.which("mount") or not os.access(GROUPS, os.W_OK)):
        pytest.skip("it needs root, and control groups")
    if dies != "full":
        yield folder
        for group in GROUPS.glob("shardfold-dies-*"):
            with suppress(OSError):
                group.rmdir()
        return
    disk = folder.with_name("disk")
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield disk / "run"
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def check(place: Path, moment: str, dies: str) -> None:
    with placed(place, dies) as folder, running(folder, moment, dies) as process:
        found = RunStatus.of(folder)
        die(dies, folder, process, found)
        state, rank, words = ENDS[dies]
        seen: list[str] = []

        def is_right(now: RunStatus) -> bool:
            seen.append(now.state)
            # Of processes that are killed one after the other the first is gone alone for a moment.
            return now.is_over and (state != "lost" or now.state == state)

        ended = wait_for(folder, is_right, LIMIT + float(PATIENCE) * (dies == "stop rank 1"))
        assert ended.state == state and (rank is None or ended.rank == rank), (ended, seen)
        wait_for(folder, lambda now: re.search(words, now.words), LIMIT)
        process.wait()
        # It stays so, also when the last of its processes is gone.
        wait_for(folder, lambda _: all(is_gone(each.pid) for each in found.ranks))
        last = RunStatus.of(folder)
        assert (last.state, last.rank) == (ended.state, ended.rank) and re.search(words, last.words), last


@pytest.mark.parametrize("dies", ["kill rank 0", "kill launcher", "raise"])
def test_a_run_that_dies_in_training_is_told_as_such(dies: str, tmp_path: Path) -> None:
    check(tmp_path / "run", "training", dies)


@pytest.mark.soak
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("dies", sorted(ENDS))
def test_a_run_that_ends_anyhow_is_told_as_such(dies: str, moment: str, tmp_path: Path) -> None:
    check(tmp_path / "run", moment, dies)


@pytest.mark.parametrize("dies", ["hang", pytest.param("stop rank 1", marks=pytest.mark.soak)])
def test_a_run_whose_ranks_wait_in_vain_is_stalled(dies: str, tmp_path: Path) -> None:
    """Its processes live; when a step comes it trains again."""
    folder = tmp_path / "run"
    with running(folder, "training", dies, patience="60") as process:
        found = RunStatus.of(folder)
        die(dies, folder, process, found)
        stalled = wait_for(folder, lambda now: now.state == "stalled", LIMIT)
        assert stalled.rank in (None, 1) and stalled.words and not stalled.is_over
        if dies == "stop rank 1":
            os.kill(found.ranks[1].pid, signal.SIGCONT)
            wait_for(folder, lambda now: now.state == "training")


@pytest.mark.soak
def test_a_folder_may_be_moved_while_it_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with running(folder, "saving", "move") as process:
        die("move", folder, process, RunStatus.of(folder))
        moved = folder.with_name("elsewhere")
        assert RunStatus.of(moved).state == "saving"
        process.kill()
        assert wait_for(moved, lambda now: now.is_over, LIMIT).state == "lost"


@pytest.mark.parametrize("gone", ["folder", "figures", "moved"])
def test_a_run_whose_folder_is_removed_ends(gone: str, tmp_path: Path) -> None:
    """It would go on unseen, and what it saves would be no run. Without its figures alone, or where it was moved, it
    goes on."""
    run = sf.observe.Run(folder := tmp_path / "a", config={}, steps=9)
    run.log(1, loss=1.0)
    if gone == "folder":
        shutil.rmtree(folder)
        folder.mkdir()  # as by a checkpoint
        with pytest.raises(ConfigError, match=r"was removed while the run went on, so it ends behind step 1: start"):
            run.log(2, loss=1.0)
    else:
        if gone == "figures":
            (folder / "metrics.jsonl").unlink()
        else:
            folder = folder.rename(tmp_path / "b")
        run.log(2, loss=1.0)
        assert RunStatus.of(folder).step == 2
    run.close()


def test_a_loop_writes_what_it_is_at_and_figures_that_are_json(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    run = sf.observe.Run(folder, config={"lr": 3e-4, "place": tmp_path}, steps=3)
    assert RunStatus.of(folder).state == "starting"
    run.log(1, loss=2.5, bad=float("nan"))
    with run.during("evaluating"):
        assert RunStatus.of(folder).state == "evaluating"
    now = RunStatus.of(folder)
    assert (now.state, now.step, now.steps) == ("training", 1, 3)
    assert now.last_figures["loss"] == 2.5 and now.last_figures["bad"] is None
    with pytest.raises(ConfigError, match="another process writes this run"):
        sf.observe.Run(folder)
    assert RunStatus.of(folder).state == "training"  # which the refusal has not ended
    run.close()
    run.close()
    assert RunStatus.of(folder).state == "done" and json.loads((folder / "config.json").read_text())["lr"] == 3e-4
    assert list(runs_in([tmp_path])) == [folder]
    with pytest.raises(ValueError, match="who"), sf.observe.Run(folder) as again:
        again.log(2, loss=1.0)
        raise ValueError("who\nknows")
    failed = RunStatus.of(folder)
    assert (failed.state, failed.rank, failed.words) == ("failed", 0, "ValueError: who\nknows")
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_rank_that_comes_before_the_folder_is_known_from_its_first_step(tmp_path: Path) -> None:
    early = sf.observe.Run(tmp_path / "run", rank=1, ranks=2)
    with sf.observe.Run(tmp_path / "run", rank=0, ranks=2) as lead:
        lead.log(1)
        early.log(1)
        assert [(each.rank, each.step) for each in RunStatus.of(lead.folder).ranks] == [(0, 1), (1, 1)]
        early.close()


def test_a_run_is_at_and_ends_as_what_there_is(tmp_path: Path) -> None:
    with sf.observe.Run(tmp_path) as run:
        with pytest.raises(ConfigError, match=r"no phase 'savng'.*saving"), run.during("savng"):
            pass
        with pytest.raises(ConfigError, match="no phase 'done'"), run.during("done"):
            pass
        with pytest.raises(ConfigError, match='as "done" or "stopped"'):
            run.close("finished")
        assert RunStatus.of(tmp_path).state == "starting"


@pytest.mark.parametrize(("status", "state"), [(0, "done"), (None, "done"), (3, "failed")])
def test_who_leaves_by_sys_exit_is_told_by_its_status(status: int | None, state: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit), sf.observe.Run(tmp_path):
        sys.exit(status)
    assert RunStatus.of(tmp_path).state == state


def test_who_begins_first_keeps_its_record_when_rank_0_forgets(tmp_path: Path) -> None:
    other = OwnRecord(tmp_path, 1, 2)
    other.write(phase="starting")
    own = OwnRecord(tmp_path, 0, 2)
    own.write(phase="starting")
    assert [each.rank for each in RunStatus.of(tmp_path).ranks] == [0, 1]
    for each in (own, other):
        each.close()


LEAVES = """
import sys, time
from shardfold.comm.launcher_notes import is_given_notice
from shardfold.tools.observe.run_folder import Run
with Run(sys.argv[1], steps=10**9) as run:
    for step in range(1, 10**9):
        run.log(step, loss=1.0)
        time.sleep(0.01)
        if is_given_notice(): break
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("notice", [("--notice", "20"), ()], ids=["notice", "sigterm"])
def test_a_run_that_its_launcher_was_asked_to_end_is_stopped(notice: tuple[str, ...], tmp_path: Path) -> None:
    script, folder = tmp_path / "loop.py", tmp_path / "run"
    script.write_text(LEAVES)
    command = [sys.executable, "-m", "shardfold", "run", *notice, "--nproc-per-node", "1", str(script), str(folder)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_for(folder, lambda found: found.step >= 3)
        process.terminate()
        process.wait()
    assert RunStatus.of(folder).state == "stopped"


def test_a_record_has_room_for_any_words(tmp_path: Path) -> None:
    own = OwnRecord(tmp_path, 0, 1)
    for words in ("é" * 5000, '"' * 999, ""):
        own.write(phase="failed", words=words)
        assert RunStatus.of(tmp_path).words == words[-len(RunStatus.of(tmp_path).words or " ") :]
    own.write(phase="training", step=10**2000)  # which no loop counts to
    assert RunStatus.of(tmp_path).state == "unknown" or RunStatus.of(tmp_path).step == 0
    own.close()


def test_an_attempt_forgets_what_an_earlier_one_of_more_ranks_left(tmp_path: Path) -> None:
    earlier = [OwnRecord(tmp_path, rank, 3) for rank in range(3)]
    for each in earlier:
        each.write(phase="failed", words="it was so")
        each.close()
    assert RunStatus.of(tmp_path).state == "failed"
    own = OwnRecord(tmp_path, 0, 1)
    own.write(phase="training", step=4)
    now = RunStatus.of(tmp_path)
    assert (now.state, now.step, len(now.ranks)) == ("training", 4, 1)
    own.close()


def test_a_child_that_outlives_its_rank_does_not_hold_its_lock(tmp_path: Path) -> None:
    """As a worker of a data loader does for a while, which is forked off."""
    own = OwnRecord(tmp_path, 0, 1)
    own.write(phase="training")
    (read, write), (hears, says) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.write(says, b".")
        os.read(read, 1)
        os._exit(0)
    try:
        os.read(hears, 1)
        assert RunStatus.of(tmp_path).state == "training"
        own.close()
        assert RunStatus.of(tmp_path).state == "lost"
    finally:
        os.write(write, b".")
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"boot": "another"}, "lost", "restarted"),
        ({"host": "elsewhere", "boot": "another"}, "training", ""),  # as it wrote just now, and no lock is told
        ({"host": "elsewhere", "boot": "another", "clock": 0.0}, "lost", "gone"),
        ({"clock": 4e9}, "lost", "gone"),  # a clock that somebody has set
    ],
)
def test_what_is_gone_with_its_machine_is_lost(changes: dict[str, Any], state: str, words: str, tmp_path: Path) -> None:
    own = OwnRecord(tmp_path, 0, 1)
    own.write(phase="training", step=7)
    own.close()
    said = json.loads((tmp_path / STATUS).read_bytes()[SIZE:])
    with (tmp_path / STATUS).open("r+b") as file:
        file.seek(SIZE)
        file.write(json.dumps({**said, **changes}).encode().ljust(SIZE))
    if changes.get("clock") == 0.0:
        os.utime(tmp_path / STATUS, (0, 0))
    found = RunStatus.of(tmp_path)
    assert found.state == state and words in found.words, found


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "noise": bytes(range(256)) * 64,
    "list": b"[1]".ljust(SIZE) * 3,
    "kinds": json.dumps({"rank": "0", "ranks": [], "phase": {}}).encode().ljust(SIZE) * 3,
    "deep": (b"[" * 1000).ljust(SIZE) * 3,
    "another's": (b" " * SIZE) + json.dumps({"rank": 5, "ranks": 2, "phase": "training"}).encode().ljust(SIZE),
    "beyond floats": (b" " * SIZE)
    + json.dumps({"rank": 0, "ranks": 1, "phase": "training", "at": 10**400}).encode().ljust(SIZE),
    "code": (b" " * SIZE)
    + json.dumps({"rank": 0, "ranks": 1, "phase": "\x1b[2J", "step": 10**30}).encode().ljust(SIZE),
}


@pytest.mark.parametrize("content", sorted(HOSTILE))
def test_a_file_that_no_run_has_written_is_read_without_harm(
    content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STATUS).write_bytes(HOSTILE[content])
    (tmp_path / "metrics.jsonl").write_bytes(b'{"loss": "\x1b[31m"}\n{"step":')
    found = RunStatus.of(tmp_path)
    assert found.state in (*OVER, "unknown"), found
    from rich.console import Console

    from shardfold.tools.observe.tables import runs_table

    Console(force_terminal=False, width=300).print(runs_table([found]))
    assert "\x1b" not in capfd.readouterr().out
    (tmp_path / "metrics.jsonl").write_bytes(b'{"loss": 1' + b"0" * 400 + b"}\n" + b"[" * 60000 + b"\n")
    assert "loss" in found.last_figures
    Console(force_terminal=False, width=300).print(runs_table([found]))


def test_pipes_and_links_are_no_files_of_a_run(tmp_path: Path) -> None:
    """Nobody waits for who writes into a pipe."""
    for name in (STATUS, "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    assert read_records(tmp_path) == ([], 0.0)
    assert RunStatus.of(tmp_path).last_figures == {}
    shutil.copy(__file__, tmp_path / "file")
    (tmp_path / STATUS).unlink()
    (tmp_path / STATUS).symlink_to(tmp_path / "file")
    assert read_records(tmp_path) == ([], 0.0)


def test_a_full_disk_takes_a_last_word(tmp_path: Path) -> None:
    """The file has its whole size from the start on, so that who fails for want of room can say so."""
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("a file system of its own needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(OSError, match="No space"), sf.observe.Run(disk) as run:
            for step in range(10**6):
                run.log(step, loss=0.0)
        found = RunStatus.of(disk)
        assert found.state == "failed" and "No space left" in found.words
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_command_lists_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with sf.observe.Run(tmp_path / name, steps=2) as run:
            run.log(1, loss=0.5)
    command = [sys.executable, "-m", "shardfold", "runs", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"first\s+done\s+1/2\s+0.5", said) and "second" in said
    lines = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["done", "done"]
    refused = subprocess.run([*command[:-1], "nowhere"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and refused.stderr.startswith("Error: there is no folder 'nowhere'")
