"""Faults of ranks, launchers and hosts: the first cause is named and no survivor, nobody waits past the patience, and
no process is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from shardfold import launch
from shardfold.comm.launcher_notes import DIGITS, FILE, MARK, MEETS, STEP
from shardfold.errors import ConfigError
from shardfold.launch import _agent as agent
from shardfold.launch import _rendezvous as rendezvous
from shardfold.launch import process, workers
from shardfold.launch._agent import Notice, SignalException, signals
from shardfold.launch.death import OomWatch
from shardfold.launch.leftovers import Leftovers, has_group
from shardfold.launch.namespaces import Namespaces, why_not
from shardfold.launch.options import Options
from shardfold.launch.run_records import OwnRecord, read_records
from shardfold.launch.workers import Outlet
from shardfold.plan.patience import PATIENCE, Patience
from tests.launch.test_run import command, run, write

FOREVER = "import time\nwhile True: time.sleep(0.05)\n"
AWAY = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
"""Starts a process that no signal to its rank's group reaches."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "OMPI_", "PMI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def await_(there: Path) -> str:
    deadline = time.monotonic() + 150
    while not (there.exists() and there.read_text()):
        assert time.monotonic() < deadline, f"{there} was not written"
        time.sleep(0.02)
    return there.read_text()


# -- one number


def test_every_limit_follows_from_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, twice = Patience(10.0).limits(), Patience(20.0).limits()
    assert all(limits[what] <= 10.0 and limits[what] < twice[what] <= 20.0 for what in limits)
    monkeypatch.setenv(PATIENCE, "2.5")
    assert Patience.of_environment() == Patience(2.5)
    for nonsense in ("", "soon", "-1", "nan"):
        monkeypatch.setenv(PATIENCE, nonsense)
        assert Patience.of_environment() == Patience()
    assert "--patience=3.0" in Options(patience=3.0).argv()


# -- a rank that is stopped


@pytest.mark.parametrize("train", [True, False])
def test_a_stopped_rank_is_named_and_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    """Both launchers; the others, which wait for it, are not blamed."""
    stops = f"if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n{FOREVER}"
    begins = "import os, signal; rank = int(os.environ['RANK'])\n"
    if train:
        monkeypatch.setenv(PATIENCE, "1")
        status = launch.launch([sys.executable, "-c", begins + stops], 2)
    else:
        status = run("--nproc-per-node=2", "--patience=1", write("stop.py", begins + stops))
    assert status == 128 + signal.SIGKILL
    error = capfd.readouterr().err
    assert "its process was stopped (SIGSTOP, state T) for " in error and "; so rank 1 o" in error


LIVES = """
import ctypes, os, signal, sys, threading, time
from shardfold.comm import launcher_notes as notes
def beats():  # as an engine does
    while True:
        notes.beat()
        time.sleep(0.05)
notes.offer_stack()
notes.beat()
threading.Thread(target=beats, daemon=True).start()
def hangs():
    if sys.argv[1] == "holds":
        ctypes.PyDLL(None).sleep(30)  # which keeps the interpreter, till a signal comes
    elif sys.argv[1] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)  # it had done all of its work
    elif "loops" in sys.argv[1]:
        if "deaf" in sys.argv[1]:
            signal.pthread_sigmask(signal.SIG_BLOCK, [notes.STACK])
            open("deaf", "w").close()
        while True:
            pass
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, [notes.STACK])
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            notes.refuse_without_lease("what it writes")
            open("late", "w").close()
        except notes.CollectiveError:
            time.sleep(30)
if os.environ["RANK"] == "1":
    hangs()
notes.note_awaited([1])
if "loops" in sys.argv[1]:  # as an engine that has waited as long as it does
    while "deaf" in sys.argv[1] and not os.path.exists("deaf"):
        time.sleep(0.02)
    time.sleep("deaf" not in sys.argv[1])
    notes.tell_launcher("rank 1 did not come.", follows=True)
    notes.note_given_up([1])
    sys.exit(1)
time.sleep(30)  # not for ever, should nobody end it
"""


@pytest.mark.parametrize("how", ["holds", "stops"])
@pytest.mark.parametrize("train", [True, False])
def test_a_rank_without_a_sign_of_life_is_ended_and_its_stack_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, train: bool, how: str
) -> None:
    """Its process lives, but no thread of its interpreter runs. One that is stopped says where it is, and goes on with
    nothing."""
    monkeypatch.setattr(workers, "ANSWER", 30.0)  # on a busy machine
    script = write("lives.py", LIVES)
    if train:
        monkeypatch.setenv(PATIENCE, "1")
        status = launch.launch([sys.executable, script, how], 2)
    else:
        status = run("--nproc-per-node=2", "--patience=1", script, how)
    assert status == 128 + signal.SIGKILL
    error, said = capfd.readouterr().err, {"holds": "gave no sign of life for ", "stops": "stopped"}[how]
    assert said in error and "; so rank 1 o" in error
    assert ", at lives.py:" in error and " in hangs, called at lives.py:" in error and " in <module>, and was" in error


@pytest.mark.parametrize("train", [True, False])
def test_a_rank_that_computes_for_ever_is_ended_when_others_give_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    """It gives signs of life, and those that waited for it fail first: it is the cause, and where it was is told."""
    monkeypatch.setattr(workers, "ANSWER", 30.0)  # on a busy machine
    monkeypatch.setattr(OomWatch, "witness", lambda *_: "of another process")
    script = write("lives.py", LIVES)
    if train:
        monkeypatch.setenv(PATIENCE, "60")
        status = launch.launch([sys.executable, script, "loops"], 2)
    else:
        status = run("--nproc-per-node=2", "--patience=60", script, "loops")
    assert status == 128 + signal.SIGKILL
    error = capfd.readouterr().err
    assert "its process did not come to where others waited for it until they gave up (state " in error
    assert ", at lives.py:" in error and " in hangs, called at lives.py:" in error and "; so rank 1 o" in error
    assert "rank 0 o" not in error and "kernel OOM" not in error


@pytest.mark.parametrize("train", [True, False])
def test_who_gave_up_is_not_named_as_long_as_the_one_it_waited_for_is_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    """To end that one takes longer than one that failed because of another is held back: it does not say where it is,
    and is killed when it has had its time."""
    monkeypatch.setattr(workers, "ANSWER", 1.5)
    script = write("lives.py", LIVES)
    if train:
        monkeypatch.setenv(PATIENCE, "1")
        status = launch.launch([sys.executable, script, "deaf loops"], 2)
    else:
        status = run("--nproc-per-node=2", "--patience=1", script, "deaf loops")
    error = capfd.readouterr().err
    assert status == 128 + signal.SIGKILL and "; so rank 1 o" in error and "rank 0 o" not in error


OWN = """
import os, sys
import torch.distributed as dist
import torch.nn as nn
import shardfold as sf
dist.init_process_group("gloo")
engine = sf.Engine(nn.Linear(2, 2), runtime=sf.Runtime(timeout=4.0))
while engine.rank == 1:
    pass
if engine.rank == 2:
    dist.barrier()
engine.mean(1.0)
"""


@pytest.mark.soak
def test_who_waited_in_a_collective_of_its_own_is_not_named(capfd: pytest.CaptureFixture[str]) -> None:
    """It is waked when another one has given up, which is for whom that one waited."""
    status = run("--nproc-per-node=3", write("own.py", OWN))
    error = capfd.readouterr().err
    assert status == 128 + signal.SIGKILL and "; so rank 1 on host" in error and "; so rank 2 on" not in error


def test_the_one_that_others_waited_for_is_named_if_all_failed_because_of_another() -> None:
    """Whoever ended first: it came late, and raised what they had given up with."""
    begins = f"import os, sys\nos.pwrite(os.open(os.environ[{FILE!r}], os.O_RDWR), b'1', 0)\nsys.exit(1)"
    failed = [workers.Worker(n, [sys.executable, "-c", begins], dict(os.environ), (Outlet(), Outlet())) for n in (0, 1)]
    for rank in failed:  # one behind the other
        workers.watch([rank])
        rank.join(60.0)
    assert workers.caused(failed, False, 1.0) is failed[0]
    assert workers.caused(failed, False, 1.0, failed[1:]) is failed[1]


def test_a_stopped_rank_that_is_deaf_writes_nothing_more(capfd: pytest.CaptureFixture[str]) -> None:
    """It goes on when it is told to say where it is, does not hear that, and has a second until it is killed."""
    assert run("--nproc-per-node=2", "--patience=1", write("lives.py", LIVES), "deaf") == 128 + signal.SIGKILL
    assert "stopped (SIGSTOP, state T)" in capfd.readouterr().err
    assert not Path("late").exists()


def test_a_rank_that_nobody_waits_for_may_be_silent(capfd: pytest.CaptureFixture[str]) -> None:
    alone = (
        LIVES.replace("awaited([1])", "awaited([])")
        .replace("None).sleep(30)", "None).sleep(2)")
        .replace("time.sleep(30)  #", "#")
    )
    assert run("--nproc-per-node=2", "--patience=0.5", write("alone.py", alone), "holds") == 0, capfd.readouterr().err


def test_without_word_of_the_launcher_a_rank_writes_nothing() -> None:
    """The launcher, this process, is stopped for longer than a lease lasts, and goes on. Then so does the rank."""
    script = write(
        "lease.py",
        """
        import os, signal, time
        from shardfold.comm import launcher_notes as notes
        from shardfold.errors import CollectiveError
        def written():
            try:
                notes.refuse_without_lease("x")
            except CollectiveError as error:
                return str(error)
        while notes._lease() is None:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGSTOP)
        until = time.monotonic() + 30
        while (refused := written()) is None and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGCONT)
        while written() is not None and time.monotonic() < until:
            pass
        with open("told", "w") as file:
            file.write(str(refused))
        """,
    )
    assert run("--nproc-per-node=1", "--patience=0.5", "--monitor-interval=0.1", script) == 0
    assert Path("told").read_text().startswith("x is not written: this process was stopped or cut off")


def test_who_is_asked_to_end_may_write_as_long_as_it_has_time() -> None:
    """Longer than a lease lasts and is waited for, as a large checkpoint takes."""
    script = write(
        "saves.py",
        """
        import os, signal, sys, time
        from shardfold.comm import launcher_notes as notes
        def saves(number, frame):
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                time.sleep(0.01)
            notes.refuse_without_lease("x")
            open("saved", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, saves)
        while notes._lease() is None:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            time.sleep(0.05)
        """,
    )
    said = subprocess.run(
        command("--nproc-per-node=1", "--patience=0.5", "--monitor-interval=0.1", script),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert Path("saved").exists(), said.stderr


def test_a_rank_that_goes_on_in_time_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """Stopped twice, each time for less than the patience: the times are not added up."""
    script = write(
        "short.py",
        """
        import os, signal, subprocess
        for _ in range(4):
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
    )
    assert run("--nproc-per-node=1", "--patience=3", script) == 0, capfd.readouterr().err


# -- what ranks have started


@pytest.mark.sampled(3)
@pytest.mark.parametrize("end", ["killed launcher", "well", "fails"])
def test_nothing_that_ranks_have_started_is_left(end: str, tmp_path: Path) -> None:
    """A process in a session of its own ends with the run, however that ends; the launcher's own environment stays."""
    script = write(
        "leaves.py",
        f"""
        import os, subprocess, sys, time
        away = {AWAY}
        with open("now", "w") as file:
            file.write(f"{{away.pid}}")
        os.rename("now", "left" + os.environ["RANK"])
        if sys.argv[1] == "killed launcher":
            while True: time.sleep(0.05)
        sys.exit(3 if sys.argv[1] == "fails" else 0)
        """,
    )
    running = subprocess.Popen(command("--nproc-per-node=1", script, end), stderr=subprocess.DEVNULL)
    try:
        left = int(await_(tmp_path / "left0"))
        if end == "killed launcher":
            running.kill()
        assert running.wait(60) == {"well": 0, "fails": 3, "killed launcher": -signal.SIGKILL}[end]
        deadline = time.monotonic() + 15
        while not gone(left) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert gone(left)
    finally:
        running.kill()
        running.wait()


def test_leftovers_of_another_run_are_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found is what carries the mark, also within a launcher's own; this process's other children are its own."""
    leftovers, other = Leftovers(), Leftovers()
    monkeypatch.setenv(MARK, other.mark)
    inner = Leftovers()
    waits = [sys.executable, "-c", FOREVER]
    made = [
        subprocess.Popen(waits, env={**os.environ, MARK: mark}) if mark else subprocess.Popen(waits, env={})
        for mark in (leftovers.mark, other.mark, inner.mark, "")
    ]
    pids = [each.pid for each in made]
    try:
        assert leftovers.found() == pids[:1] and sorted(other.found()) == sorted(pids[1:3])
        assert inner.found() == pids[2:3]
        assert leftovers.end(5.0) == pids[:1] and made[0].wait(10) == -signal.SIGTERM
        assert [each.poll() for each in made[1:]] == [None] * 3
        assert sorted(other.end(5.0)) == sorted(pids[1:3]) and made[3].poll() is None
    finally:
        for each in made:
            each.kill()
            each.wait()
        for each in (leftovers, other, inner):
            each.close()


GROUP = """
import os, subprocess, sys, time
from shardfold.launch.leftovers import Leftovers
leftovers = Leftovers()
waits = [sys.executable, "-c", "import time; time.sleep(600)"]
rank = subprocess.Popen(waits, env={**os.environ, "SHARDFOLD_RUN": leftovers.mark}, start_new_session=True)
os.write(leftovers.door, str(rank.pid).encode())
print(leftovers._group.folder, rank.pid, leftovers._watcher.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux" or not has_group(), reason="no control group can be made here")
@pytest.mark.parametrize("alone", [True, False])
def test_a_control_group_goes_with_its_launcher_or_with_the_next_one(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that is killed, alone or with all processes of its run; the group of one that lives stays."""
    monkeypatch.setattr("shardfold.launch.leftovers.NEW", 0.0)
    lives = Leftovers()
    killed = subprocess.Popen([sys.executable, "-c", GROUP], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    group, *pids = killed.stdout.readline().split()
    for pid in [] if alone else map(int, pids):
        os.kill(pid, signal.SIGKILL)
    killed.kill()
    killed.communicate()
    deadline = time.monotonic() + 40  # before any other launcher on this machine removes it
    while not alone and "populated 1" in (Path(group) / "cgroup.events").read_text():
        assert time.monotonic() < deadline
    if not alone:
        Leftovers().close()
    while Path(group).exists():
        assert time.monotonic() < deadline, "its group is left"
    assert lives._group.folder is not None and lives._group.folder.exists()
    lives.close()
    assert not lives._group.folder.exists()


ORPHAN = """
import os, subprocess, sys
from pathlib import Path
away = "import os, time; open(os.environ['NAME'] + '.now', 'w').write(str(os.getpid())); "
away += "os.rename(os.environ['NAME'] + '.now', os.environ['NAME']); time.sleep(600)"
for name, more in (("hidden", {}), ("stays", {"SHARDFOLD_RUN": ""})):
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", away], start_new_session=True, env={"NAME": name, **more})
        os._exit(0)
    os.wait()
    while not os.path.exists(name):
        pass
if sys.argv[1] == "killed launcher":
    open("there", "w").write("1")
    while True: pass
"""
"""A rank that leaves two processes without a parent, a session or an environment of its own."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", ["killed launcher", "well"])
def test_orphans_end_with_a_run_if_they_are_not_to_stay(end: str, tmp_path: Path) -> None:
    """Forked twice, in a session of its own and with another environment, a process still ends with the run, and the
    run's control group is gone; who has an empty variable stays. Where the launcher is killed it takes such a group."""
    if end == "killed launcher" and not has_group():
        pytest.skip("this process may make no control group of version 2")
    running = subprocess.Popen(command("--nproc-per-node=1", write("orphan.py", ORPHAN), end))
    pids, group = list[int](), ""
    try:
        pids = [int(await_(tmp_path / name)) for name in ("hidden", "stays")]
        said = Path(f"/proc/{pids[1]}/cgroup").read_text().splitlines()
        group = next((line.rpartition("/")[2] for line in said if line.startswith("0::")), "")
        assert group.startswith("shardfold-") or not has_group()
        if end == "killed launcher":
            await_(tmp_path / "there")
            running.kill()
        assert running.wait(60) == (0 if end == "well" else -signal.SIGKILL)
        deadline = time.monotonic() + 15
        while end != "well" and time.monotonic() < deadline and not (gone(pids[0]) and not is_there(group)):
            time.sleep(0.02)
        assert gone(pids[0]) and not gone(pids[1]) and not is_there(group)
    finally:
        running.kill()
        running.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_there(group: str) -> bool:
    return group.startswith("shardfold-") and any(Path("/sys/fs/cgroup").rglob(group))


def test_an_orphan_that_ends_is_waited_for() -> None:
    """Else it would be a zombie as long as the run lasts. A rank is left to its own worker, however late it ends."""
    leftovers = Leftovers()
    try:
        rank = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
        leftovers.knows(rank.pid)
        code = (
            "import subprocess; quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}; "
            "print(subprocess.Popen(['sleep', '600'], start_new_session=True, **quiet).pid)"
        )
        orphan = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        assert psutil.Process(orphan).ppid() == os.getpid()
        os.kill(orphan, signal.SIGKILL)
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        deadline = time.monotonic() + 30
        while psutil.pid_exists(orphan) and time.monotonic() < deadline:
            leftovers.reap()
        assert not psutil.pid_exists(orphan) and psutil.Process(rank.pid).status() == psutil.STATUS_ZOMBIE
        assert rank.wait() == 0
    finally:
        leftovers.close()


# -- a rank that is being ended


def test_a_rank_that_waits_for_others_to_meet_is_ended_by_ctrl_c() -> None:
    """Python does not hear of the signal there; as if it were ignored."""
    script = """
import signal, time
from shardfold.comm.launcher_notes import meeting
signal.signal(signal.SIGINT, signal.SIG_IGN)
with meeting():
    time.sleep(600)
"""
    rank = workers.Worker(0, [sys.executable, "-c", script], dict(os.environ), (Outlet(), Outlet()))
    workers.watch([rank])
    try:
        while not rank.meets:
            time.sleep(0.02)
    finally:
        workers.end_all([rank], signal.SIGINT, 5.0)
    assert rank.returncode == -signal.SIGTERM


def test_while_ranks_say_where_they_are_nobody_waits() -> None:
    """Each has a second for it, all the same one; and none of them gets a lease any more. One that crashes in it is
    ended all the same, and has not failed by that."""
    crashes = f"signal.signal({workers.STACK}, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))"
    scripts = [
        f"""
import os, signal, time
{says}
os.pwrite(os.open(os.environ[{FILE!r}], os.O_RDWR), b"%020d" % 5, {workers.BEAT})
time.sleep(600)
"""
        for says in ("", "", crashes)
    ]
    ranks = [
        workers.Worker(n, [sys.executable, "-c", each], dict(os.environ), (Outlet(), Outlet()))
        for n, each in enumerate(scripts)
    ]
    workers.watch(ranks)
    try:
        while not all(rank._noted(20, workers.BEAT).strip("0") for rank in ranks):
            time.sleep(0.02)
        for rank in ranks:
            rank.look(600.0)
            rank.lease(600.0)
        began = time.monotonic()
        for rank in ranks:
            rank.end_for("it hangs")
            rank.lease(600.0)
            assert os.pread(rank._sign or 0, 20, workers.LEASE) == workers.REVOKED
        assert time.monotonic() - began < workers.ANSWER
        while any(rank.ended is None for rank in ranks):
            for rank in ranks:
                rank.look(600.0)
            time.sleep(0.02)
        assert all(rank.why == "it hangs, and was ended" and not rank.follows for rank in ranks)
        assert {rank.returncode for rank in ranks} == {-signal.SIGKILL}
    finally:
        workers.end_all(ranks, signal.SIGKILL, 0.0)


def test_who_is_stopped_is_said_to_be_stopped_though_it_was_silent_before() -> None:
    """Its last sign of life is older than that it stands: it is ended for that, when it has stood for long enough."""
    begins = f"""
import os, signal, time
os.pwrite(os.open(os.environ[{FILE!r}], os.O_RDWR), b"%020d" % 5, {workers.BEAT})
time.sleep(0.6)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    rank = workers.Worker(0, [sys.executable, "-c", begins], dict(os.environ), (Outlet(), Outlet()))
    workers.watch([rank])
    try:
        while rank.ended is None:
            rank.look(1.0)
            workers.end_hung({0: rank}, {0}, (), 1.0)
            time.sleep(0.02)
        assert rank.why.startswith("its process was stopped (SIGSTOP, state T) for ")
    finally:
        workers.end_all([rank], signal.SIGKILL, 0.0)


def test_who_runs_on_when_others_have_ended_is_told(tmp_path: Path) -> None:
    """It is not ended, as it may do what is its own: here it waits for that to be told."""
    script = write(
        "lingers.py",
        """
        import os, sys, time
        deadline = time.monotonic() + 60
        while os.environ["RANK"] == "1" and "still runs" not in open("err").read():
            if time.monotonic() > deadline:
                sys.exit(3)
            time.sleep(0.05)
        time.sleep(1)  # in which it could be said again
        """,
    )
    with open("err", "w") as err:
        ended = subprocess.run(command("--nproc-per-node=2", "--patience=1", script), stderr=err, check=False)
    said = Path("err").read_text()
    assert ended.returncode == 0 and said.count("still runs, 1 s after the other ranks here have ended well") == 1
    assert " of local rank 1 (state " in said and "of local rank 0" not in said


# -- what runs say of themselves


def test_what_a_rank_of_an_earlier_attempt_said_last_is_forgotten(tmp_path: Path) -> None:
    """From when rank 0 of the new one comes; not what another one of it has said."""
    for rank in range(2):
        earlier = OwnRecord(tmp_path, rank, 2)
        earlier.write(phase="failed", words="long ago")
        earlier.close()
    first = OwnRecord(tmp_path, 0, 2)
    first.write(phase="training")
    assert [(each.rank, each.phase) for each in read_records(tmp_path)[0]] == [(0, "training")]
    second = OwnRecord(tmp_path, 1, 2)
    second.write(phase="failed")
    second.close()
    assert [(each.rank, each.phase) for each in read_records(tmp_path)[0]] == [(0, "training"), (1, "failed")]
    first.close()


# -- restarts in vain


def test_three_failures_at_the_same_step_end_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    """A batch that kills is not tried for ever; a run that comes farther each time is."""
    script = write(
        "batch.py",
        """
        import os, sys
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        note = os.open(os.environ["SHARDFOLD_FOLLOWS"], os.O_WRONLY)
        os.pwrite(note, b"%020d" % (2 + attempt * (sys.argv[1] == "farther")), 4096)  # as an engine does
        sys.exit(7 if attempt < 3 else 0)
        """,
    )
    assert run("--nproc-per-node=1", "--max-restarts=9", script, "same") == 7
    error = capfd.readouterr().err
    assert error.count("Error: ") == 3 and "(restart 2 of 9)" in error and "(restart 3 of 9)" not in error
    assert "3 attempts in a row have failed so behind step 2, so there is no other" in error
    assert run("--nproc-per-node=1", "--max-restarts=9", script, "farther") == 0


def test_an_engine_leaves_its_steps_and_its_reason(tmp_path: Path) -> None:
    """In the two parts of one file, which a launcher reads behind the end; a run that goes on begins where it was."""
    note = tmp_path / "note"
    note.touch()
    script = """
import torch, shardfold as sf
from shardfold.comm.launcher_notes import tell_launcher
model = torch.nn.Linear(2, 2)
engine = sf.Engine(model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
for _ in range(3):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
tell_launcher("it is long: " + "x" * 9999, follows=True)
tell_launcher("it broke. Mend it.")
"""
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "SHARDFOLD_FOLLOWS": str(note)}, check=True)
    told = note.read_bytes()
    assert told.partition(b"\0")[0] == b"0it broke. Mend it." and int(told[STEP : STEP + DIGITS]) == 3
    assert told[MEETS:] == b"0"  # it has met the others


# -- notice


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", "file", "not heard"])
def test_ranks_that_have_notice_leave_by_themselves(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The launcher, this process, gets it from a rank; who does not hear it gets the signal when the time is over."""
    script = write(
        "notice.py",
        """
        import os, signal, sys, time
        rank, how = os.environ["RANK"], sys.argv[1]
        if rank == "0":
            if how == "file":
                open("leave", "w").close()
            else:
                if how == "SIGUSR1":  # Slurm sends it to all processes of a step
                    os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getppid(), getattr(signal, how, signal.SIGTERM))
        note = os.open(os.environ["SHARDFOLD_FOLLOWS"], os.O_RDWR)
        while how == "not heard" or os.pread(note, 1, 5000) != b"1":  # as an engine does
            time.sleep(0.02)
        open("left" + rank, "w").close()
        """,
    )
    words = ["--notice-file=leave"] if how == "file" else []
    seconds = "0.5" if how == "not heard" else "60"
    status = run("--nproc-per-node=2", f"--notice={seconds}", *words, script, how)
    assert status == 128 + getattr(signal, how, signal.SIGTERM)
    left = sorted(path.name for path in Path().glob("left*"))
    assert left == ([] if how == "not heard" else ["left0", "left1"]), capfd.readouterr().err


@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1", "late"])
def test_a_failure_is_told_beside_a_signal(
    how: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rank has said why it fails when the launcher, this process, is told to end, also if it is late to end by
    that; and where it fails behind the end of the time that it had to leave. The status is the rank's."""
    monkeypatch.setattr(agent, "AFTER_DEATH", 0.1 if how == "late" else 60.0)
    script = write(
        "beside.py",
        """
        import os, signal, sys, time
        note = os.open(os.environ["SHARDFOLD_FOLLOWS"], os.O_RDWR)
        def fail(*_):
            os.pwrite(note, b"0it broke\\0", 0)  # as an engine does
            if sys.argv[1] != "SIGUSR1":
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(60 if sys.argv[1] == "late" else 0.2)  # the rank takes a while to end
            sys.exit(7)
        if os.environ["RANK"] == "1" and sys.argv[1] == "SIGUSR1":
            signal.signal(signal.SIGUSR1, fail)  # which is forwarded when the time is over
            os.kill(os.getppid(), signal.SIGUSR1)
        elif os.environ["RANK"] == "1":
            fail()
        time.sleep(0.5 if sys.argv[1] == "SIGUSR1" and os.environ["RANK"] == "0" else 60)
        """,
    )
    words = ["--notice=0.3"] if how == "SIGUSR1" else []
    assert run("--nproc-per-node=2", *words, script, how) == (143 if how == "late" else 7)
    came = "ranks had notice of an end (SIGUSR1)" if words else "SIGTERM had come"
    ended = "killed by SIGTERM.*" if how == "late" else "exited with status 7"
    told = f"Error: it broke; so rank 1 on host .*: {ended}; the other rank was ended; {re.escape(came)}\\.\n"
    assert re.search(told, capfd.readouterr().err)


def test_ranks_that_are_killed_at_once_are_all_told(capfd: pytest.CaptureFixture[str]) -> None:
    """Between two looks of the launcher, behind each of which ranks may write for longer."""
    script = write(
        "killed.py",
        """
        import os, signal, time
        from pathlib import Path
        open("pid" + os.environ["RANK"], "w").write(f"{os.getpid()} ")
        if os.environ["RANK"] != "0":
            time.sleep(60)
        pids = []
        while not all(pids) or len(pids) < 2:
            pids = [Path(each).read_text() if Path(each).exists() else "" for each in ("pid1", "pid2")]
        note = os.open(os.environ["SHARDFOLD_FOLLOWS"], os.O_RDWR)
        lease = os.pread(note, 20, 5032)
        while os.pread(note, 20, 5032) == lease:
            time.sleep(0.001)
        for pid in (*map(int, pids), os.getpid()):
            os.kill(pid, signal.SIGKILL)
        """,
    )
    assert run("--nproc-per-node=3", "--monitor-interval=1", script) == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    (told,) = re.findall(
        r"Error: rank (.) on host .*: killed by SIGKILL.*; ranks (.), (.) were .* SIGKILL too\.\n", said
    )
    assert sorted(told) == ["0", "1", "2"], "who ended first is the kernel's affair"


def test_a_file_for_notice_needs_seconds() -> None:
    with pytest.raises(ConfigError, match="--notice S"):
        Options(notice_file="x")


STEPS = """
import os, signal
from pathlib import Path
import torch, shardfold as sf
def make(ranks):
    return sf.Engine(torch.nn.Linear(4, 4), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), layout="ddp")
run, rank = sf.ElasticRun(make), os.environ["RANK"]
def steps():
    rows = torch.randn(64, 4)
    for x in run.batches(sf.Loader(rows, sf.Sampler(rows, batch_size=2))):
        with run.attempt() as engine:
            engine.backward(engine(x).square().mean())
            engine.step()
        yield run.engine.steps
"""
"""Of a script: ``steps()`` gives how many updates ranks have done that go on without one that dies."""


@pytest.mark.soak
def test_hosts_that_have_no_rank_any_more_pass_notice_on() -> None:
    """To those whose ranks went on without the one that was killed here."""
    script = write(
        "elastic.py",
        STEPS
        + """
for step in steps():
    if rank == "1" and step == 4:
        Path("launcher").write_text(str(os.getppid()))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "0" and run.engine.world_size == 2 and Path("launcher").exists():
        for _ in range(2):  # one more changes nothing
            os.kill(int(Path("launcher").read_text()), signal.SIGUSR1)
        Path("launcher").unlink()
    if run.engine.leaving:
        Path("left" + rank).write_text(str(step))
        break
run.close()
""",
    )
    hosts = [
        "--nnodes=3",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={process.free_port()}",
        "--notice=30",
    ]
    runs = [
        subprocess.Popen([sys.executable, "-m", "shardfold", "run", *hosts, f"--node-rank={node}", script])
        for node in range(3)
    ]
    assert [each.wait(120) for each in runs] == [0, 128 + signal.SIGUSR1, 0]
    assert Path("left0").read_text() == Path("left2").read_text()


@pytest.mark.soak
def test_who_is_killed_while_all_are_asked_to_end_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks that have the time to leave go on without it meanwhile."""
    script = write(
        "leaves.py",
        STEPS
        + """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
for step in steps():
    if rank == "0" and step == 4:
        os.kill(os.getppid(), signal.SIGTERM)
    if rank == "1" and asked:
        os.kill(os.getpid(), signal.SIGKILL)
    if run.engine.world_size == 1:
        break
run.close()
""",
    )
    assert run("--nproc-per-node=2", script) == 128 + signal.SIGTERM
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Error")]
    assert len(told) == 1 and "rank 1 on host" in told[0] and "killed by SIGKILL" in told[0]
    assert "the others went on" in told[0] and told[0].endswith("SIGTERM had come.")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_is_not_lost_where_nothing_can_be_raised() -> None:
    """As while an object is collected: the next look at the ranks raises it."""

    class Collected:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    notice = Notice(None, None)
    with signals("SIGTERM", notice):
        notice.look([])
        Collected()
        with pytest.raises(SignalException) as told:
            notice.look([])
    assert told.value.sigval == signal.SIGTERM


# -- names and addresses


def test_a_name_without_an_address_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Not that a port is in use."""

    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", unknown)
    script = write("x.py", "")
    words = ("--nnodes=2", "--node-rank=0", "--master-addr=sf-nowhere.invalid", "--nproc-per-node=1")
    assert run(*words, script) == 2
    error = capfd.readouterr().err
    assert "'sf-nowhere.invalid'" in error and "is not known" in error and "--master-addr" in error
    assert "--master-port" not in error


def test_whether_an_address_is_of_this_host_is_found_by_binding() -> None:
    """TEST-NET-1 is nobody's (RFC 5737)."""
    assert rendezvous._is_local("127.0.0.1") and not rendezvous._is_local("192.0.2.1")


# -- two launchers on one host


def test_a_name_that_leads_to_loopback_is_of_no_use_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of its addresses that is of this host counts, as Gloo takes that one."""
    answers = {
        "none": [],
        "debian": ["127.0.1.1"],
        "elsewhere": ["203.0.113.9"],
        "elsewhere, then loopback": ["203.0.113.9", "127.0.0.1"],
    }
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, port, **_: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers[name]],
    )
    assert not any(map(process.leads_home, answers))


def test_the_interface_towards_a_host_is_not_the_loopback() -> None:
    assert process.interface_towards("127.0.0.1") == ""
    assert process.interface_towards("nowhere.invalid") == ""


@pytest.mark.soak
def test_ranks_of_several_hosts_meet_though_their_names_lead_nowhere(two: Namespaces) -> None:
    """Both have the name of the machine they are on, and nobody has set an interface."""
    script = write(
        "meets.py",
        """
        import os, torch, torch.distributed as dist
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
        dist.init_process_group("gloo")
        dist.all_reduce(values := torch.ones(1))
        print("sum", values.item())
        dist.destroy_process_group()  # without which PyTorch may abort as it exits
        """,
    )
    there = agents(two, script, variables={})
    said = [each.communicate(timeout=120) for each in there]
    errors = "".join(error for _, error in said)
    assert all(each.returncode == 0 and "sum 2.0" in out for each, (out, _) in zip(there, said, strict=True)), errors


@pytest.mark.parametrize("status", [3, pytest.param(0, marks=pytest.mark.soak)])
def test_the_cause_may_end_behind_those_of_other_nodes_that_it_made_fail(tmp_path: Path, status: int) -> None:
    """A process that raises takes seconds to end where much is imported: the other node's rank is gone before, and only
    that one's launcher knows so. Both wait for the cause. So they do where it ends well, and is no cause by itself."""
    os.mkfifo(tmp_path / "ended")
    script = write(
        "late.py",
        f"""
        import os, sys, time
        if os.environ["RANK"] == "0":
            hold = open("ended", "w")  # open as long as this process is there
            note = os.open(os.environ["SHARDFOLD_FOLLOWS"], os.O_WRONLY)
            os.pwrite(note, b"1", 0)  # as an engine does that lost a rank
            sys.exit(1)
        open("ended").read()
        time.sleep(2)
        sys.exit({status})
        """,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    there = [
        "--nnodes=2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--nproc-per-node=1",
        f"--patience={60 if status else 8}",
    ]
    started = [
        subprocess.Popen(command(*there, f"--node-rank={node}", script), stderr=subprocess.PIPE, text=True)
        for node in range(2)
    ]
    try:
        for each in started:
            assert "Error: rank 1 on host " in (said := each.communicate(timeout=120)[1]), said
            assert f"status {status}" in said and each.returncode == (status or 1)
    finally:
        for each in started:
            each.kill()
            each.wait()


LATE = """
import sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from shardfold.launch.process import end_process
class Last:
    sleep = time.sleep
    def __del__(self):
        self.sleep(1.0)  # when the interpreter is about to end, and threads may run no more
last = Last()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def ask():
    asks.set()
    store.wait(["never"], timedelta(seconds=0.5))
asks = threading.Event()
threading.Thread(target=ask, daemon=True).start()
asks.wait()
end_process(5)
"""


@pytest.mark.soak
def test_a_launcher_ends_with_its_status_though_a_store_answers_late() -> None:
    """In a thread that asks, once the interpreter is about to end."""
    assert subprocess.run([sys.executable, "-c", LATE], check=False).returncode == 5


# -- hosts: network namespaces


ETH0 = {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.fixture
def two() -> Iterator[Namespaces]:
    if missing := why_not():
        pytest.skip(missing)
    spaces = Namespaces(2)
    yield spaces
    spaces.close()


def agents(
    spaces: Namespaces,
    script: str,
    *words: str,
    ranks: tuple[int, int] = (1, 1),
    variables: Mapping[str, str] = ETH0,
) -> list[subprocess.Popen[str]]:
    """The launchers of two nodes."""
    there = [f"--master-addr={Namespaces.address(0)}", "--master-port=29500", "--nnodes=2", "--patience=3", *words]
    started: list[subprocess.Popen[str]] = []
    for node, space in enumerate(spaces.spaces):
        own = [f"--node-rank={node}", f"--nproc-per-node={ranks[node]}"]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", space, *command(*there, *own, script)],
                env={**{k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


TRAINS = """
import os, torch, shardfold as sf
model = torch.nn.Linear(2, 2)
engine = sf.Engine(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), layout="zero2")
for step in range(10**9):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    if step == 3:
        with open("now" + os.environ["RANK"], "w") as file:
            file.write(str(os.getpid()))
        os.rename("now" + os.environ["RANK"], "trains" + os.environ["RANK"])
print("mesh", engine.mesh.sizes, flush=True)
engine.close()
"""


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["kill", "cut"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_node_is_named_and_nobody_waits_on(two: Namespaces, fault: str, node: int, tmp_path: Path) -> None:
    """Its launcher is killed, or its link is cut: the other names the node and no rank of its own, without waiting for
    what can not come; of a node that is cut off launcher and ranks end as well."""
    launchers = agents(two, write("trains.py", TRAINS), "--max-restarts=3")
    try:
        pids = [int(await_(tmp_path / f"trains{rank}")) for rank in range(2)]
        began = time.monotonic()
        if fault == "kill":
            launchers[node].kill()
        else:
            two.cut(node)
        other = launchers[1 - node]
        _, error = other.communicate(timeout=120)
        assert time.monotonic() - began < 40  # the patience, twice, and what ends take; a busy machine
        said = [line for line in error.splitlines() if line.startswith("Error")]
        assert said and f"rank {1 - node} " not in "".join(said), error
        assert "does not answer any more" in said[-1] or "in vain" in said[-1], error
        if fault == "cut":
            launchers[node].communicate(timeout=120)
        assert all(map(gone, pids))
    finally:
        for each in launchers:
            each.kill()
            each.communicate()


RAISES = """
import torch, shardfold as sf
model = torch.nn.Linear(2, 2)
engine = sf.Engine(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), layout="zero2")
engine.backward(engine(torch.ones(1, 2)).sum())
if engine.rank == 1:
    raise ValueError("sample 17 has no label. Look there")
engine.step()
"""


@pytest.mark.soak
def test_the_last_line_has_the_exception_of_the_rank_that_raised(two: Namespaces) -> None:
    """On each host, whose launchers tell each other."""
    there = agents(two, write("raises.py", RAISES))
    for each, error in [(each, each.communicate(timeout=200)[1]) for each in there]:
        said = "Error: ValueError: sample 17 has no label; so rank 1 on host "
        assert error.splitlines()[-1].startswith(said), error
        assert "exited with status 1" in error and each.returncode == 1


@pytest.mark.soak
def test_hosts_with_unequal_slots_train(two: Namespaces) -> None:
    """One rank on a host and two on the other: the ranks of a node are no axis, and nothing has to be given."""
    again = agents(two, write("trains.py", TRAINS.replace("range(10**9)", "range(6)")), ranks=(1, 2))
    try:
        said = [each.communicate(timeout=280) for each in again]
        assert [each.returncode for each in again] == [0, 0], said
        assert "".join(out for out, _ in said).count("mesh ") == 3
    finally:
        for each in again:
            each.kill()
            each.communicate()


HANGS = TRAINS.replace(
    "    if step == 3:",
    """    if step == 6 and os.environ["RANK"] == "1":
        ctypes.PyDLL(None).sleep(600)
    if step == 3:""",
).replace("import os,", "import ctypes, os,")


LOOPS = HANGS.replace("ctypes.PyDLL(None).sleep(600)", "while True: pass").replace(
    'layout="zero2"', 'layout="zero2", runtime=sf.Runtime(timeout=4.0)'
)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "said_of_it"),
    [(HANGS, "gave no sign of life"), (LOOPS, "did not come to where others waited for it until they gave up")],
    ids=["hangs", "loops"],
)
def test_a_hang_on_another_host_is_named(two: Namespaces, script: str, said_of_it: str) -> None:
    """The rank that waits is on one host, the one that holds its interpreter, or computes for ever, on the other, whose
    launcher ends it."""
    launchers = agents(two, write("hangs.py", script))
    try:
        said = "".join(each.communicate(timeout=200)[1] for each in launchers)
        errors = [line for line in said.splitlines() if line.startswith("Error")]
        assert any(said_of_it in line and "rank 1 on host" in line for line in errors), said
        assert not any("rank 0 on host" in line for line in errors), said
        assert any(", at hangs.py:" in line for line in errors), said
        assert all(each.returncode for each in launchers)
    finally:
        for each in launchers:
            each.kill()
            each.communicate()


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.soak
@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="there is no freezer of control groups here")
def test_a_frozen_host_writes_nothing_when_it_goes_on(two: Namespaces, tmp_path: Path) -> None:
    """Launcher and rank are frozen together, given up by the other host, and thawed: they end, and the rank, which
    tries without end, has written nothing since."""
    writes = """
import threading, time
from shardfold.comm.launcher_notes import refuse_without_lease
def writing():
    while True:
        refuse_without_lease("a line")
        with open("lines" + os.environ["RANK"], "a") as file:
            file.write("x")
        time.sleep(0.01)
threading.Thread(target=writing, daemon=True).start()
"""
    launchers = agents(two, write("writes.py", "import os\n" + writes + TRAINS))
    group = FREEZER / f"shardfold-{os.getpid()}"
    group.mkdir()
    try:
        pids = [int(await_(tmp_path / f"trains{rank}")) for rank in range(2)]
        frozen = [pids[1], *(child.pid for child in psutil.Process(launchers[1].pid).children(recursive=True))]
        for pid in {launchers[1].pid, *frozen}:
            (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        size = (tmp_path / "lines1").stat().st_size
        _, error = launchers[0].communicate(timeout=120)
        assert "does not answer any more" in error, error
        (group / "freezer.state").write_text("THAWED")
        launchers[1].communicate(timeout=60)
        assert all(map(gone, pids)) and (tmp_path / "lines1").stat().st_size == size
    finally:
        (group / "freezer.state").write_text("THAWED")
        for each in launchers:
            each.kill()
            each.communicate()
        group.rmdir()
