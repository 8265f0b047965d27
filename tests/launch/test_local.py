"""The local launcher: what ranks are given, whose output is shown, and that all of them end, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardfold import launch
from shardfold.launch import local, workers

# `signal.pause()` would miss a signal that comes just before it, and wait for another one.
FOREVER = "import time\nwhile True: time.sleep(0.05)\n"


def run(script: str, num_procs: int = 2) -> int:
    """Run a script as ranks; `rank` is theirs to read."""
    prelude = "import os, sys, signal; rank = int(os.environ['RANK'])\n"
    return launch.launch([sys.executable, "-c", prelude + script], num_procs)


def test_ranks_are_told_who_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every rank has torchrun's variables, one address for all, its share of the cores, and no lines of C++ code."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    script = f"import json; open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(json.dumps(dict(os.environ)))"
    assert run(script, 3) == 0
    environments = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    for rank, environment in enumerate(environments):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["OMP_NUM_THREADS"] == str(max(1, launch.num_cores() // 3))
        assert environment["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in environments} == {
        ("127.0.0.1", environments[0]["MASTER_PORT"])
    }


def test_a_chosen_number_of_threads_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(f"open({str(tmp_path / 'threads')!r}, 'w').write(os.environ['OMP_NUM_THREADS'])", 1) == 0
    assert (tmp_path / "threads").read_text() == "7"


def test_only_rank_0_is_heard(capfd: pytest.CaptureFixture[str]):
    """Rank 0 writes to the terminal; the others' output and warnings are not shown when all goes well."""
    assert run("print('out', rank); print('err', rank, file=sys.stderr)", 3) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_names_its_rank_and_ends_the_others(capfd: pytest.CaptureFixture[str], failing: int):
    """The message says which rank, how, and its last lines, once; the rank that waited for it does not wait on."""
    began = time.monotonic()
    script = f"if rank == {failing}: print('it broke', file=sys.stderr); sys.exit(3)\n{FOREVER}"
    assert run(script) == 3
    error = capfd.readouterr().err
    assert f"Error: rank {failing} of 2 exited with status 3; the other rank was ended." in error
    assert error.count("it broke") == 1
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("alone", [False, True])
def test_a_failure_that_another_rank_caused_is_not_the_one_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, alone: bool
):
    """Rank 0's process ends first, as an engine's does that lost a rank; rank 1 ends behind it, by itself or not at
    all (then the only one that failed is named, once the time for rank 1 is over)."""
    os.mkfifo(fifo := tmp_path / "fifo")
    waits = FOREVER if alone else f"open({str(fifo)!r}).read(); print('it broke', file=sys.stderr); sys.exit(3)"
    writes = "" if alone else f"hold = open({str(fifo)!r}, 'w'); "  # open as long as rank 0 is there
    begins = f"if rank == 0: {writes}open(os.environ['SHARDFOLD_FOLLOWS'], 'w').write('1'); sys.exit(1)\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDFOLD_PATIENCE", "1" if alone else "120")  # of which half is waited for an echo's cause
        assert run(begins + waits) == (1 if alone else 3)
    named = "rank 0 of 2 exited with status 1" if alone else "rank 1 of 2 exited with status 3"
    assert f"Error: {named}" in capfd.readouterr().err


@pytest.mark.parametrize("missed", [True, False])
def test_who_ends_with_status_0_is_named_if_another_fails_because_of_that(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, missed: bool
):
    """Rank 1 has ended when rank 0 fails: as it needs that one, or by itself, as with something of its own behind what
    ranks do together."""
    os.mkfifo(fifo := tmp_path / "fifo")
    script = (
        f"if rank == 1: hold = open({str(fifo)!r}, 'w'); sys.exit()\n"
        f"open({str(fifo)!r}).read()\n"
        f"open(os.environ['SHARDFOLD_FOLLOWS'], 'w').write('{int(missed)}it waited for rank 1. Look there.')\n"
        "sys.exit(3)"
    )
    assert run(script) == (1 if missed else 3)
    named = "it waited for rank 1; so rank 0 of 2 exited with status 3"
    if missed:
        named = "rank 1 of 2 ended with status 0 while others still trained (it waited for rank 1)"
    assert f"Error: {named}; the other rank was ended." in capfd.readouterr().err


def test_only_the_last_lines_are_shown(capfd: pytest.CaptureFixture[str]):
    run("if rank == 1:\n for i in range(1000): print(f'line {i}.', file=sys.stderr)\n sys.exit(1)\n" + FOREVER)
    error = capfd.readouterr().err
    assert "line 999." in error and "line 980." in error and "line 979." not in error


def test_a_killed_rank_is_named_with_its_signal(capfd: pytest.CaptureFixture[str]):
    script = f"if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n{FOREVER}"
    assert run(script, 3) == 128 + signal.SIGKILL
    assert "Error: rank 1 of 3 was killed by SIGKILL; the other 2 ranks were ended." in capfd.readouterr().err


def test_ranks_that_are_killed_at_once_are_all_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Only those are said to be ended that were left."""

    def later(ranks: Sequence[local.LocalRank], *given: Any) -> None:
        for rank in ranks[1:]:
            rank.join(60)
        workers.end_all(ranks, *given)

    monkeypatch.setattr(local, "end_all", later)
    assert run(f"if rank: os.kill(os.getpid(), signal.SIGKILL)\n{FOREVER}", 3) == 128 + signal.SIGKILL
    told = r"Error: rank (.) of 3 was killed by SIGKILL; rank (.) was killed by SIGKILL too; the other rank was ended\."
    assert sorted(re.findall(told, capfd.readouterr().err)[0]) == ["1", "2"], "who ended first is the kernel's affair"


def test_a_rank_that_will_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "GRACE", 0.1)
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)  # rank 1 fails only after rank 0 ignores SIGTERM
    script = (
        f"if rank == 1: open({str(fifo)!r}).read(); sys.exit(4)\n"
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(fifo)!r}, 'w').close()\n{FOREVER}"
    )
    assert run(script) == 4


def test_the_last_line_begins_with_what_the_engine_said_of_the_cause(capfd: pytest.CaptureFixture[str]):
    """The first sentence of what the rank left for the launcher; how to mend it was in the rank's own message."""
    told = "0 old words"
    script = (
        f"def tell(words): open(os.environ['SHARDFOLD_FOLLOWS'], 'w').write(words)\n"
        f"tell({told!r}); tell('1rank 1 has closed its engine, v1.5. Give all ranks the same calls.')\n"
        "sys.exit(rank == 0)"
    )
    assert run(script) == 1
    assert capfd.readouterr().err == (
        "Error: rank 1 has closed its engine, v1.5; so rank 0 of 2 exited with status 1; the other rank was ended.\n"
    )


def test_one_sentence_about_bad_input_is_said_once(capfd: pytest.CaptureFixture[str]):
    """All ranks find the same fault in the same input."""
    assert run("print('Error: no such thing.', file=sys.stderr); sys.exit(2)", 3) == 2
    assert capfd.readouterr().err == "Error: no such thing.\n"


def test_it_knows_when_a_launcher_is_already_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not launch.is_rank()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch.is_rank()


class Launcher:
    """A launcher of two ranks in a process of its own, whose ranks have all said that they are ready."""

    def __init__(self, folder: Path, script: str) -> None:
        fifo = folder / "ready"
        os.mkfifo(fifo)
        ready = f"\nwith open({str(fifo)!r}, 'w') as f: f.write(f'{{os.getpid()}}\\n')\n"
        code = "import os, signal, sys\n" + script + ready + FOREVER
        main = f"from shardfold.launch import launch; raise SystemExit(launch([{sys.executable!r}, '-c', {code!r}], 2))"
        self.process = subprocess.Popen([sys.executable, "-c", main], stderr=subprocess.PIPE, text=True)
        pids: list[str] = []
        while len(pids) < 2:  # each reading lasts until the writers of that moment have closed
            pids += fifo.read_text().split()
        self.ranks = [psutil.Process(int(pid)) for pid in pids]

    def finish(self) -> tuple[int, str]:
        """Return the launcher's status and errors, after checking that no rank is left."""
        _, error = self.process.communicate(timeout=30)
        _, alive = psutil.wait_procs(self.ranks, timeout=10)
        for rank in alive:
            rank.kill()
        assert not alive
        return self.process.returncode, error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_is_forwarded_and_awaited(tmp_path: Path, number: signal.Signals):
    """Ranks get the signal once, end in their own time, and the status is that of the shell for it."""
    noted = tmp_path / "noted"
    script = (
        f"def stop(number, frame):\n"
        f"    with open({str(noted)!r}, 'a') as f: f.write(f'{{number}}\\n')\n"
        f"    sys.exit(128 + number)\n"
        f"signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)"
    )
    launcher = Launcher(tmp_path, script)
    launcher.process.send_signal(number)
    expected = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert launcher.finish() == (128 + expected, "")
    assert noted.read_text().split() == [str(int(expected))] * 2


def test_an_interruption_between_two_starts_reaches_every_rank_once_and_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ready, noted = tmp_path / "ready", tmp_path / "noted"
    os.mkfifo(ready)

    class Interrupted(local.LocalRank):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            ready.read_text()
            if self.local_rank == 1:  # which the launcher has not listed yet
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(local, "LocalRank", Interrupted)
    script = (
        f"def stop(number, frame):\n"
        f"    with open({str(noted)!r}, 'a') as f: f.write(f'{{number}}\\n')\n"
        f"    sys.exit(128 + number)\n"
        f"signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)\n"
        f"open({str(ready)!r}, 'w').close()\n"
    )
    assert run(script + FOREVER) == 128 + signal.SIGTERM
    assert noted.read_text().split() == [str(int(signal.SIGTERM))] * 2


def test_a_second_interruption_kills(tmp_path: Path):
    fifo = tmp_path / "got-first"
    os.mkfifo(fifo)
    script = (
        f"def note(number, frame):\n    with open({str(fifo)!r}, 'w') as f: f.write('x')\n"
        "signal.signal(signal.SIGINT, note)"
    )
    launcher = Launcher(tmp_path, script)
    launcher.process.send_signal(signal.SIGINT)
    received = ""
    while len(received) < 2:
        received += fifo.read_text()
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGINT)
    said = "Error: interrupted before the ranks could end by themselves.\n"
    assert launcher.finish() == (launch.INTERRUPTED, said)


def test_ranks_that_are_deaf_to_an_interruption_are_killed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """SIGTERM gives all ranks a limited time, said in a sentence when it is over."""
    monkeypatch.setattr(local, "GRACE_AFTER_SIGTERM", 0.2)
    monkeypatch.setattr(local, "LOOK", 0.05)
    ready = tmp_path / "ready"
    os.mkfifo(ready)

    class Deaf(local.LocalRank):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            ready.read_text()
            if self.local_rank == 1:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(local, "LocalRank", Deaf)
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    assert run(f"{ignoring}open({str(ready)!r}, 'w').close()\n{FOREVER}") == 128 + signal.SIGTERM
    assert capfd.readouterr().err == "Error: the ranks did not end within 0.2 s of the signal and were killed.\n"


def _waited_for(pid: int) -> int:
    """How many files a process waits for by epoll."""
    count = 0
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            count += entry.read_text().count("tfd:")
    return count


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells the order in which processes ended")
@pytest.mark.parametrize("order", [(3, 1, 0, 2), (2, 0, 3, 1)])
def test_the_first_of_several_deaths_is_named_however_late_they_are_seen(tmp_path: Path, order: tuple[int, ...]):
    """The launcher is stopped while ranks die one by one; when it goes on, it names the one that died first."""
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    ready = f"with open({str(fifo)!r}, 'w') as f: f.write(f'{{os.environ[\"RANK\"]}} {{os.getpid()}}\\n')\n"
    code = "import os, signal\n" + ready + FOREVER
    main = f"from shardfold.launch import launch; raise SystemExit(launch([{sys.executable!r}, '-c', {code!r}], 4))"
    with subprocess.Popen([sys.executable, "-c", main], stderr=subprocess.PIPE, text=True) as launcher:
        with open(os.open(fifo, os.O_RDWR), encoding="utf-8") as read:  # a writer itself, so no rank is the last one
            said = [read.readline() for _ in range(4)]
        ranks = {int(rank): psutil.Process(int(pid)) for rank, pid in map(str.split, said)}
        while _waited_for(launcher.pid) < 4:  # what ends before the launcher looks has no order
            os.sched_yield()
        launcher.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)
        for rank in order:
            ranks[rank].kill()
            while ranks[rank].status() != psutil.STATUS_ZOMBIE:
                os.sched_yield()
        launcher.send_signal(signal.SIGCONT)
        _, error = launcher.communicate(timeout=60)
    assert f"rank {order[0]} of 4 was killed by SIGKILL" in error


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path):
    launcher = Launcher(tmp_path, "")
    launcher.process.kill()
    assert launcher.finish()[0] == -signal.SIGKILL
