"""`shardfold run`: what a script's ranks are given, what is said of a death, restarts, several hosts, that all ends.

Runs whose ranks need no torch are made in this process, which has it imported; the others in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardfold.launch import _agent as agent
from shardfold.launch.workers import watch
from shardfold.tools import cli

NOTE = """
import json, os, sys
with open(os.path.join(os.environ["NOTES"], os.environ["RANK"]), "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""

# Ranks that meet as any script does, add up their ranks, and of which one kills itself in each of the first attempts.
MEETING = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
total = torch.tensor([rank])
dist.all_reduce(total)
print(f"attempt {attempt} total {total.item()}", flush=True)
if attempt < int(sys.argv[1]) and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""

# The same by the library's own way in.
ENGINE = """
import os, signal, sys
import torch, shardfold as sf
from torch.optim import SGD
model = torch.nn.Linear(2, 2)
engine = sf.Engine(model, optimizer=SGD(model.parameters(), lr=0.1), layout="zero1")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
engine.backward(engine(torch.ones(1, 2)).sum())
if attempt < int(sys.argv[1]) and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
engine.step()
print(f"attempt {attempt} total 1", flush=True)
engine.close()
"""

# Two hosts on this machine: `ssh` runs the command here, or in the host's network namespace if there is one.
SSH = """#!/bin/sh
while :; do case "$1" in -o|-p) shift 2;; --) shift; break;; *) break;; esac; done
host=$1; shift
case $host in
    gone) echo "connect to host gone port 22: No route to host" >&2; exit 255;;
    bare) exec sh -c "$(echo "$*" | sed 's|exec [^ ]*|exec /no/such/python|')";;
esac
[ -e /run/netns/$host ] && exec ip netns exec $host sh -c "$*"
exec sh -c "$*"
"""

# Starts as many tasks as asked for, and tells each what srun does.
SRUN = """#!/bin/sh
for word; do case $word in
    --ntasks=*) tasks=${word#*=};;
    --*) ;;
    *) break;;
esac; shift; done
rank=0; pids=
while [ $rank -lt $tasks ]; do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank \\
    SLURM_NODEID=$((rank / ${PER_NODE:-1})) SLURM_LOCALID=$((rank % ${PER_NODE:-1})) \\
    SLURM_NTASKS=$tasks SLURM_STEP_NODELIST=localhost${SECOND:+,$SECOND} SLURM_STEP_TASKS_PER_NODE="${SHAPE}" "$@" &
    pids="$pids $!"; rank=$((rank + 1))
done
status=0
for pid in $pids; do wait $pid || status=$?; done
exit $status
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder for what ranks note, and nothing from a scheduler of ours."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "OMPI_", "PMI_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "CUDA_VISIBLE_DEVICES",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NOTES", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str, *, program: bool = False) -> str:
    path = Path(name).absolute()
    path.write_text(text if program else textwrap.dedent(text))
    path.chmod(0o755)
    return str(path)


def run(*words: str) -> int:
    """Run in this process and return the exit status."""
    with pytest.raises(SystemExit) as end:
        cli.main(["run", *words])
    return int(end.value.code or 0)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "shardfold", "run", *words]


def finished(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own."""
    return subprocess.run(
        command(*words), env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def notes(count: int) -> list[tuple[list[str], dict[str, str]]]:
    return [json.loads(Path(str(rank)).read_text()) for rank in range(count)]


def test_ranks_are_told_what_torchrun_tells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    script = write("note.py", NOTE)
    assert run("--nproc_per_node", "3", "--max-restarts=2", script, "--debug", "-h", "--", "x") == 0
    told = notes(3)
    assert all(arguments == ["--debug", "-h", "--", "x"] for arguments, _ in told)
    for rank, (_, environment) in enumerate(told):
        assert environment["RANK"] == environment["LOCAL_RANK"] == environment["ROLE_RANK"] == str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_SIZE"):
            assert environment[name] == "3"
        for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "CROSS_RANK"):
            assert environment[name] == "0"
        assert environment["GROUP_WORLD_SIZE"] == environment["CROSS_SIZE"] == "1"
        assert environment["TORCHELASTIC_MAX_RESTARTS"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1" and environment["TORCH_CPP_LOG_LEVEL"] == "ERROR"
        assert int(environment["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert len({environment["MASTER_PORT"] for _, environment in told}) == 1


def test_by_default_there_is_one_process(capfd: pytest.CaptureFixture[str]):
    script = write("note.py", NOTE)
    assert run(script) == 0
    assert notes(1)[0][1]["WORLD_SIZE"] == "1"
    assert "one process, as there is no GPU" in capfd.readouterr().err
    assert run("--quiet", script) == 0
    assert capfd.readouterr().err == ""


def test_a_file_holds_the_launchers_number():
    """DeepSpeed's --save_pid: while it runs, and no longer."""
    script = write(
        "pid.py", "import os, tempfile\nprint(open(f'{tempfile.gettempdir()}/{os.getppid()}.deepspeed').read())\n"
    )
    assert run("--save_pid", "-r", "1", "--log-dir", "logs", script) == 0
    (log,) = Path("logs").glob("*/attempt_0/0/stdout.log")
    assert log.read_text() == f"{os.getpid()}\n"
    assert not Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed").exists()


def test_modules_programs_and_torchruns_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    write("note.py", NOTE)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert run("-m", "note", "a") == 0
    assert [arguments for arguments, _ in notes(2)] == [["a"], ["a"]]
    program = write("program", f"#!{sys.executable}\n{NOTE}", program=True)
    assert run("--no_python", "--nproc-per-node=1", program, "b") == 0
    assert notes(1)[0][0] == ["b"]


def test_chosen_gpus_and_cores(monkeypatch: pytest.MonkeyPatch):
    """Slots count among the devices that are visible; each rank has cores of its own, and as many threads."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    core = min(os.sched_getaffinity(0))
    script = write("note.py", NOTE + "os.environ['CORES'] = str(sorted(os.sched_getaffinity(0)))\nexec(NOTED)\n")
    Path(script).write_text("import os\nos.environ['CORES'] = str(sorted(os.sched_getaffinity(0)))\n" + NOTE)
    binding = ("--bind_cores_to_rank", f"--bind_core_list={core}")
    assert run("--include", "localhost:0,2", "--virtual-local-rank", script) == 0
    assert [(each["CUDA_VISIBLE_DEVICES"], each["LOCAL_RANK"]) for _, each in notes(2)] == [("4", "0"), ("6", "0")]
    assert run("--include", "localhost:2", *binding, script) == 0
    ((_, environment),) = notes(1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment["CORES"] == f"[{core}]" and environment["OMP_NUM_THREADS"] == "1"


def test_each_rank_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Ranks share the cores in equal parts of neighbours; what is left over belongs to none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    assert [agent.share_of_cores(None, rank, 3) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [agent.share_of_cores("1-2,5", rank, 3) for rank in range(3)] == [[1], [2], [5]]


def test_a_port_that_is_asked_for(capfd: pytest.CaptureFixture[str]):
    import socket

    script = write("note.py", NOTE)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run(f"--master_port={port}", script) == 2
        assert f"port {port} of 127.0.0.1 is in use: give another --master-port" in capfd.readouterr().err
    assert run(f"--master_port={port}", script) == 0
    assert notes(1)[0][1]["MASTER_PORT"] == str(port)


def test_output_goes_where_it_is_asked_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = write("say.py", "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n")
    two = ("--nproc-per-node=2", "--log-dir", "logs")
    assert run(*two, "-t", "3", "-r", "0:1", "--role", "r", script) == 0
    out, error = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[r0]: out 0", "[r1]: out 1"]
    assert error.count("[r0]: err") == error.count("[r1]: err") == 1 and "logs are in logs/none_" in error
    (job,) = Path("logs").iterdir()
    assert (job / "attempt_0/1/stdout.log").read_text() == "out 1\n"
    shutil.rmtree("logs")
    assert run(*two, "-r", "1:3", "--local-ranks-filter", "1", script) == 0
    out, error = capfd.readouterr()
    assert out == "" and "err" not in error.replace("--", "")
    (job,) = Path("logs").iterdir()
    assert (job / "attempt_0/1/stderr.log").read_text() == "err\n" and not (job / "attempt_0/0").exists()
    assert run("--num_gpus=2", "--enable_each_rank_log", "each", script) == 0
    assert capfd.readouterr().out == ""
    texts = {path.name.split("_")[1]: path.read_text() for path in Path("each").iterdir()}
    assert {name: sorted(text.split()) for name, text in texts.items()} == {
        "rank0.log": ["0", "err", "out"],
        "rank1.log": ["1", "err", "out"],
    }


def test_the_first_failure_is_named_and_ends_the_others(capfd: pytest.CaptureFixture[str]):
    script = write(
        "fail.py",
        """
        import os, signal, sys, subprocess
        if os.environ["RANK"] == "1":
            sys.exit(int(open("fifo").read()))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))  # an echo, not the cause
        open("fifo", "w").write("3")
        while True: signal.pause()
        """,
    )
    os.mkfifo("fifo")
    assert run("--nproc-per-node=2", script) == 3
    host = os.uname().nodename
    assert f"Error: rank 1 on host {host}: exited with status 3; the other rank was ended.\n" in capfd.readouterr().err


EXTRA = """
import torch, shardfold as sf
from torch.optim import SGD
model = torch.nn.Linear(2, 2)
engine = sf.Engine(model, optimizer=SGD(model.parameters(), lr=0.1), layout="zero3")
engine(torch.ones(1, 2)).sum().backward()
engine.step()
if engine.rank == 0:
    engine(torch.ones(1, 2))
engine.close()
"""


@pytest.mark.soak
def test_the_last_line_says_why_a_rank_waited_in_vain(capfd: pytest.CaptureFixture[str]):
    """Rank 0 runs a forward more than rank 1, which closes its engine and ends in good order before."""
    assert run("--nproc-per-node=2", write("extra.py", EXTRA)) == 1
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"Error: rank 1 on host {os.uname().nodename}: ended with status 0 while others still trained (rank 1 has "
        "closed its engine, and the meeting before a forward pass in training takes all ranks); the other "
        "rank was ended."
    )


@pytest.mark.soak
def test_the_rank_that_an_engine_lost_is_named_though_its_process_ends_last(capfd: pytest.CaptureFixture[str]):
    """Rank 1 leaves as one does whose script raised, and its process is slow to end: rank 0's is gone before."""
    script = write(
        "lost.py",
        """
        import os, sys
        import torch, shardfold as sf
        from torch.optim import SGD
        model = torch.nn.Linear(2, 2)
        engine = sf.Engine(model, optimizer=SGD(model.parameters(), lr=0.1), layout="zero3")
        if engine.rank == 1:
            engine.close()
            open("fifo").read()  # until rank 0's process is gone
            os._exit(3)
        hold = open("fifo", "w")
        engine(torch.ones(1, 2))
        """,
    )
    os.mkfifo("fifo")
    assert run("--nproc-per-node=2", script) == 3
    error = capfd.readouterr().err
    assert "CollectiveError: rank 0" in error and ": exited with status 3; the other rank was ended.\n" in error


def test_a_killed_rank_is_named_with_its_memory_and_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]):
    """What a rank has started goes with it; one that will not hear is killed; the status is the shell's."""
    script = write(
        "killed.py",
        """
        import os, signal, subprocess, sys
        held = bytearray(50_000_000)
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open("fifo", "w").write("x")
            while True: signal.pause()
        open("fifo").read()
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        open("child", "w").write(str(child.pid))
        import time; time.sleep(0.5)  # long enough to be looked at
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    os.mkfifo("fifo")
    assert run("--nproc-per-node=2", "--shutdown-timeout=0.2", script) == 128 + signal.SIGKILL
    error = capfd.readouterr().err
    assert "rank 1 on host" in error and ": killed by SIGKILL, RSS 0.1 of " in error
    child = int(Path("child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.soak
def test_a_rank_that_will_not_hear_of_a_death_is_killed_after_the_default_grace():
    """Nobody gave ``--shutdown-timeout``: the documented 5 seconds, which this waits for, are in force."""
    script = write(
        "deaf.py",
        """
        import os, signal, sys
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open("fifo", "w").write("x")
            while True: signal.pause()
        open("fifo").read()
        sys.exit(3)
        """,
    )
    os.mkfifo("fifo")
    assert run("--nproc-per-node=2", script) == 3


def test_the_grace_is_the_documented_one():
    """What docs/launch.md promises after a death and after a signal is what the agent has."""
    text = " ".join((Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8").split())
    assert f"They get SIGTERM, and after {agent.AFTER_DEATH:g} seconds SIGKILL" in text
    assert f"which have {agent.AFTER_SIGNAL:g} seconds (`--shutdown-timeout`)" in text


def test_a_script_that_can_not_run_is_refused(capfd: pytest.CaptureFixture[str]):
    for words, says in (
        (["absent.py"], "there is no script 'absent.py'"),
        (["--quiet", "--no-python", "./absent"], "'./absent' cannot be run: No such file"),
        (["--autotuning", "tune", "x.py"], "--autotuning is not supported"),
        (["--elastic_training", "x.py"], "--elastic-training is not supported"),
        (["--hostfile", "absent", __file__], "there is no host file 'absent'"),
    ):
        assert run(*words) == 2
        error = capfd.readouterr().err
        assert error.startswith("Error: ") and says in error and error.count("\n") == 1


def test_help_and_refusals_need_no_torch():
    code = (
        "import sys; from shardfold.tools import cli\n"
        "for words in (['run', '--help'], ['run', '--nnodes', '2', 'x.py']):\n"
        "    try: cli.main(words)\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_killed_ranks_are_started_again(capfd: pytest.CaptureFixture[str]):
    """Each attempt finds a store of its own, without the dead attempt's addresses: no special word in the script."""
    assert run("--nproc-per-node=2", "--max-restarts=1", write("meeting.py", MEETING), "1") == 0
    out, error = capfd.readouterr()
    assert [out.count(f"attempt {attempt} total 1") for attempt in range(2)] == [2, 2]
    assert "all ranks are started again (restart 1 of 1)." in error


def test_restarts_end(capfd: pytest.CaptureFixture[str]):
    script = write("fail.py", "import os, sys; print(os.environ['TORCHELASTIC_RESTART_COUNT']); sys.exit(7)")
    assert run("--max-restarts=2", "--quiet", script) == 7
    out, error = capfd.readouterr()
    assert out.split() == ["0", "1", "2"]
    assert error.count("started again") == 2 and error.rstrip().endswith("exited with status 7.")


class Running:
    """A run in a process of its own, all of whose ranks have said that they are ready."""

    def __init__(self, ranks: int, *words: str, script: str = "") -> None:
        os.mkfifo("ready")
        path = write(
            "wait.py",
            f"import os, signal, time\n{script}\n"
            "with open('ready', 'w') as f: f.write(f'{os.getpid()}\\n')\n"
            "while True: time.sleep(0.05)\n",  # pause() misses what comes just before it
        )
        self.process = subprocess.Popen(
            command(*words, path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        pids: list[int] = []
        while len(pids) < ranks:
            pids += [int(pid) for pid in Path("ready").read_text().split()]
        self.ranks = [psutil.Process(pid) for pid in pids]

    def finish(self) -> tuple[int, str]:
        """Return status and errors, after checking that no rank is left."""
        _, error = self.process.communicate(timeout=60)
        _, alive = psutil.wait_procs(self.ranks, timeout=15)
        for rank in alive:
            rank.kill()
        assert not alive
        return self.process.returncode, error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_and_awaited(number: signal.Signals, capfd: pytest.CaptureFixture[str]):
    """The launcher, this process, gets it from a rank when both are ready; each may end in its own way."""
    script = write(
        "signalled.py",
        f"""
        import os, signal
        rank = os.environ["RANK"]
        signal.pthread_sigmask(signal.SIG_BLOCK, {{{int(number)}}})  # it waits for who waits for it
        with open("fifo", "r" if rank == "0" else "w") as fifo:
            fifo.read() if rank == "0" else fifo.write("ready")
        if rank == "0":
            os.kill(os.getppid(), {int(number)})
        signal.sigwait({{{int(number)}}})
        open("got" + rank, "w").close()
        """,
    )
    os.mkfifo("fifo")
    assert run("--nproc-per-node=2", script) == 128 + number
    assert sorted(path.name for path in Path().glob("got*")) == ["got0", "got1"]
    assert capfd.readouterr().err == ""


def test_a_signal_waits_until_ranks_are_watched(monkeypatch: pytest.MonkeyPatch):
    """Else nobody would note their ends."""
    watched: list[None] = []

    def interrupted(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        watched.append(watch(*given))

    monkeypatch.setattr(agent, "watch", interrupted)
    assert run("--no-python", "sleep", "1000") == 128 + signal.SIGTERM
    assert watched


@pytest.mark.soak
def test_no_rank_outlives_a_killed_launcher():
    running = Running(2, "--nproc-per-node=2")
    running.process.kill()
    assert running.finish()[0] == -signal.SIGKILL


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Options for two hosts, one with two slots and one with one."""
    ssh = write("ssh", SSH, program=True)
    Path("hosts").write_text("sf-a slots=2\nsf-b slots=1\n")
    yield ["--ssh", ssh, "--hostfile", "hosts", "--master-addr", "127.0.0.1"]


@pytest.mark.soak
def test_hosts_by_ssh_a_death_is_told_once_with_its_host(hosts: list[str]):
    """Lines carry host and rank; a restart is of all hosts; the environment file's variables are there."""
    Path(".deepspeed_env").write_text("OF_FILE=1\n")
    script = write(
        "kill.py",
        """
        import os, signal, sys
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        print(attempt, os.environ["OF_FILE"], os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[1], flush=True)
        if rank == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        while True: signal.pause()
        """,
    )
    done = finished(*hosts, "--max-restarts", "1", script, "it's $HOME")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    lines = [f"[sf-{'b' if rank == 2 else 'a'}:{rank}] {attempt} 1 {'0' if rank == 2 else '0,1'} it's $HOME"
             for attempt in range(2) for rank in range(3)]  # fmt: skip
    assert sorted(done.stdout.splitlines()) == sorted(lines)
    first, second = (line for line in done.stderr.splitlines() if line.startswith("Error"))
    assert first.startswith("Error: rank 2 on host sf-b: killed by SIGKILL") and "restart 1 of 1" in first
    assert second.startswith("Error: rank 2 on host sf-b: killed by SIGKILL") and "the other 2 ranks were" in second


@pytest.mark.soak
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL])
def test_hosts_by_ssh_all_end_with_the_launcher(hosts: list[str], number: signal.Signals):
    """A signal is forwarded over ssh's standard input; the end of that tells of the launcher's own death."""
    running = Running(3, *hosts, "--no_ssh_check")
    running.process.send_signal(number)
    status, _ = running.finish()
    assert status == (-number if number == signal.SIGKILL else 128 + number)


def test_hosts_that_are_not_fit_are_named(hosts: list[str], capfd: pytest.CaptureFixture[str]):
    Path("hosts").write_text("sf-a slots=1\ngone slots=1\nbare slots=1\n")
    script = write("note.py", NOTE)
    assert run(*hosts, script) == 2
    gone, bare = capfd.readouterr().err.splitlines()
    assert "host gone cannot be reached by" in gone and "No route to host" in gone
    assert "host bare has no" in bare and "install the same environment" in bare
    assert not Path("0").exists()


@pytest.mark.soak
def test_slurm_with_a_task_for_each_rank_becomes_the_script(monkeypatch: pytest.MonkeyPatch):
    script, srun = write("note.py", NOTE), write("srun", SRUN, program=True)
    slurm = {"SLURM_JOB_ID": "9", "PER_NODE": "2", "SHAPE": "2(x2)", "SECOND": "b"}
    words = [srun, "--ntasks=4", *command(script, "a")]
    done = subprocess.run(words, env={**os.environ, **slurm}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told = notes(4)
    assert [(arguments, each["LOCAL_RANK"], each["GROUP_RANK"], each["MASTER_ADDR"]) for arguments, each in told] == [
        (["a"], str(rank % 2), str(rank // 2), "localhost") for rank in range(4)
    ]


@pytest.mark.soak
def test_slurm_launcher_starts_an_agent_on_each_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = write("note.py", NOTE)
    write("srun", SRUN, program=True)
    done = finished(
        "--launcher=slurm", "--num_nodes=2", "--nproc-per-node=1", script, "a",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", SLURM_JOB_ID="9", SHAPE="1(x2)", SECOND="127.0.0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(each["RANK"], each["GROUP_RANK"], each["LOCAL_RANK"]) for _, each in notes(2)] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
    ]


@pytest.mark.soak
def test_as_deepspeed_means_the_face_in_all_that_is_started():
    script = write(
        "uses.py",
        """
        import shutil, subprocess, sys
        import deepspeed
        child = subprocess.run([sys.executable, "-c", "import deepspeed; print(deepspeed.__name__)"],
                               capture_output=True, text=True)
        print(deepspeed.__name__, child.stdout.strip(), shutil.which("deepspeed"), sys.argv[1:])
        """,
    )
    done = finished("--as-deepspeed", "--num_gpus=1", script, "x")
    assert done.returncode == 0, done.stderr
    parent, child, executable, *arguments = done.stdout.split(maxsplit=3)
    assert parent == child == "shardfold.compat.deepspeed"
    assert arguments == ["['--local_rank=0', 'x']\n"]
    assert executable.endswith("launch/bin/deepspeed")
    said = subprocess.run([executable, "--help"], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, "PYTHON_EXEC": sys.executable})  # fmt: skip
    assert said.returncode == 0 and "shardfold run" in said.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)  # twenty launches, each of which imports torch
@pytest.mark.parametrize("script", [MEETING, ENGINE], ids=["plain", "engine"])
def test_ten_restarts_of_ten(script: str):
    """Ten runs, of each a rank killed in the first attempt: all ten end well."""
    path = write("meeting.py", script)
    for _ in range(10):
        done = finished("--nproc-per-node=2", "--max-restarts=1", path, "1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("attempt 1 total 1") == 2
        assert "(restart 1 of 1)" in done.stderr


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Network namespaces sf-a and sf-b, joined by a bridge, for the `ssh` above; skipped where they cannot be made."""
    words = [
        "link add sf-bridge type bridge", "link set sf-bridge up",
        *(word for number, name in enumerate(("sf-a", "sf-b"), 1) for word in (
            f"netns add {name}", f"link add {name} type veth peer name eth0 netns {name}",
            f"link set {name} master sf-bridge up", f"-n {name} addr add 10.99.7.{number}/24 dev eth0",
            f"-n {name} link set eth0 up", f"-n {name} link set lo up",
        )),
    ]  # fmt: skip
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs the right to make network namespaces")
    try:
        for word in words:
            made = subprocess.run(["ip", *word.split()], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"ip {word}: {made.stderr.strip()}")
        yield
    finally:
        for word in ("netns del sf-a", "netns del sf-b", "link del sf-bridge"):
            subprocess.run(["ip", *word.split()], capture_output=True, check=False)


@pytest.mark.soak
@pytest.mark.usefixtures("namespaces")
def test_hosts_with_networks_of_their_own(hosts: list[str]):
    """Two network namespaces that see each other only: address and port are found, ranks meet, a death restarts all."""
    script = write("meeting.py", MEETING)
    where = hosts[: hosts.index("--master-addr")]
    done = finished(*where, "--max-restarts=3", script, "3", GLOO_SOCKET_IFNAME="eth0")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"attempt {attempt} total 3") for attempt in range(4)] == [3, 3, 3, 3]


@pytest.mark.soak
def test_nodes_may_come_and_go(tmp_path: Path):
    """--nnodes 1:2: two agents meet by c10d; when one is killed, the other goes on alone, with its own ranks."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = write(
        "elastic.py",
        """
        import os, signal
        open(os.path.join(os.environ["NOTES"], f"{os.getppid()}-of-{os.environ['WORLD_SIZE']}"), "w").close()
        if os.environ["WORLD_SIZE"] == "1" and os.path.exists("killed"):
            raise SystemExit(0)
        while True: signal.pause()
        """,
    )
    words = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=3"]
    conf = "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"
    agents = [subprocess.Popen(command(*words, conf, script)) for _ in range(2)]
    try:
        while len(list(tmp_path.glob("*-of-2"))) < 2:
            with pytest.raises(subprocess.TimeoutExpired):
                agents[0].wait(0.1)
        host, other = agents if host_of(port) == agents[0].pid else agents[::-1]
        Path("killed").touch()
        other.kill()
        other.wait()
        assert host.wait(120) == 0
        assert (tmp_path / f"{host.pid}-of-1").exists()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def host_of(port: int) -> int | None:
    """The process that listens at a port of this machine."""
    connections = psutil.net_connections("tcp")
    return next(each.pid for each in connections if each.status == "LISTEN" and each.laddr.port == port)


@pytest.mark.soak
def test_the_kernels_killer_is_named(capfd: pytest.CaptureFixture[str]):
    """A rank that the kernel kills for want of memory, in a control group of its own."""
    parent = Path("/sys/fs/cgroup/memory")
    parent = parent if parent.is_dir() else Path("/sys/fs/cgroup")
    group = parent / f"shardfold-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if parent.name == "memory" else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text("700M")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    script = write(
        "eat.py", "import time\neaten = []\nwhile True:\n eaten.append(b'x' * 10_000_000)\n time.sleep(0.02)\n"
    )
    try:
        shell = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        words = ["sh", "-c", shell, "sh", *command("--nproc-per-node=1", script)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 128 + signal.SIGKILL
        assert "rank 0 on host" in done.stderr and "killed by SIGKILL, kernel OOM (" in done.stderr
        assert " of 0.7 GB" in done.stderr
    finally:
        group.rmdir()
