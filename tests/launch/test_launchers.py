"""Real launchers: ssh daemons, Slurm, Open MPI, and a container's process 1, on network namespaces as hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from shardfold.launch.namespaces import Namespaces
from tests.launch.test_faults import await_, gone
from tests.launch.test_run import command, write
from tests.support.clusters import Cluster, Slurm, Sshd, lacks, waited

pytestmark = pytest.mark.soak

DOCS = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
PATIENCE = 3
SECONDS = 150.0
"""For imports of all ranks and some steps, on a busy machine."""

TRAINS = """
import os, sys, torch, shardfold as sf
from functools import partial
rank = os.environ["RANK"]
engine = sf.Engine(torch.nn.Linear(4, 4), optimizer=partial(torch.optim.AdamW, lr=0.01), layout="zero2")
if os.path.exists("saved/latest"):
    engine.load("saved")
first = engine.steps
print(f"begins at {first} on {os.environ['WORLD_SIZE']}", flush=True)
while first == 0 or engine.steps < first + 10:  # until it is ended, and, behind a restart, for ten steps more
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    if engine.leaving or engine.steps % 5 == 0:
        engine.save(f"saved/{engine.steps}", keep=2, wait=True)
    if engine.leaving:
        print(f"leaves at {engine.steps}", flush=True)
        break
    if engine.steps == 7:
        with open("now" + rank, "w") as file:
            file.write(str(os.getpid()))
        os.rename("now" + rank, "at7-" + rank)
    if engine.steps == 8 and "short" in sys.argv:
        break
engine.close()
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "OMPI_", "PMI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)


def documented(section: str, language: str) -> str:
    """The first block of this language in a section of docs/launch.md."""
    return DOCS.partition(f"\n### {section}\n")[2].partition(f"```{language}\n")[2].partition("```")[0]


def needs(*programs: str) -> None:
    if missing := lacks(*programs):
        pytest.skip(missing)


class Heard:
    """What a process writes, line by line, with the time at which it came."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        streams = (process.stdout, process.stderr)
        self._threads = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in streams]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Iterator[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line))

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def when(self, words: str) -> float:
        """The time at which a line with these words came."""
        waited(lambda: words in self.text or self.process.poll() is not None, f"a line with {words!r}", SECONDS)
        found = [at for at, line in self.lines if words in line]
        assert found, self.text
        return found[0]

    def end(self) -> int:
        status = self.process.wait(SECONDS)
        for thread in self._threads:
            thread.join(10)
        return status


def ranks_at_7(count: int) -> list[int]:
    """Process numbers of the ranks, once each of them has taken seven steps."""
    return [int(await_(Path(f"at7-{rank}"))) for rank in range(count)]


def went_on(text: str, ranks: int) -> None:
    """All ranks began anew from a checkpoint, of five steps at least."""
    # What mpirun carries comes without regard to lines.
    again = [words for words in re.findall(r"begins at (\d+) on (\d+)", text) if words[0] != "0"]
    assert len(again) == ranks and {words[1] for words in again} == {str(ranks)}, text
    assert all(int(words[0]) >= 5 and int(words[0]) % 5 == 0 for words in again), text


# -- ssh


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    needs("sshd", "ssh", "ssh-keygen")
    with Sshd(tmp_path / "daemons") as cluster:
        (tmp_path / "hosts").write_text("sf0 slots=1\nsf1 slots=1\n")
        yield cluster


def by_ssh(sshd: Sshd, *words: str) -> Heard:
    script = write("trains.py", TRAINS)
    options = ["--hostfile", "hosts", "--ssh", sshd.ssh, f"--patience={PATIENCE}", *words]
    return Heard(sshd.begin(0, *command(*options, script)))


def test_ssh_starts_ranks_again_when_one_is_killed(sshd: Sshd) -> None:
    running = by_ssh(sshd, "--max-restarts=1")
    os.kill(ranks_at_7(2)[1], signal.SIGKILL)
    assert running.end() == 0, running.text
    assert "rank 1 on host sf1: killed by SIGKILL" in running.text and "(restart 1 of 1)" in running.text
    assert "[sf1:1] begins at " in running.text
    went_on(running.text, 2)


@pytest.mark.parametrize("fault", ["connection", "link"])
def test_a_host_that_ssh_loses_is_named_and_all_are_started_again(sshd: Sshd, fault: str) -> None:
    """What serves the connection is killed, or nothing comes through any more, until it does again."""
    running = by_ssh(sshd, "--max-restarts=1")
    pids = ranks_at_7(2)
    began = time.monotonic()
    if fault == "connection":
        sshd.end_sessions(1)
        assert running.when("host sf1 is lost") - began < PATIENCE + 3
    else:
        sshd.spaces.cut(1)
        assert running.when("Error: ") - began < PATIENCE + 3, running.text
        waited(lambda: all(map(gone, pids)), "ranks on both sides of a cut end", 40)
        sshd.spaces.heal(1)
    assert running.end() == 0, running.text
    said = [line for line in running.text.splitlines() if "Error: " in line]
    assert "sf1" in "".join(said) and "rank 0 on" not in "".join(said), running.text
    assert "all hosts are started again (restart 1 of 1)" in running.text
    assert all(map(gone, pids))
    went_on(running.text, 2)


def test_a_host_that_stays_away_ends_the_run(sshd: Sshd) -> None:
    """With restarts left: it is looked for, and named."""
    running = by_ssh(sshd, "--max-restarts=3")
    pids = ranks_at_7(2)
    sshd.spaces.cut(1)
    assert running.end() == 2, running.text
    assert "host sf1 cannot be reached by" in running.text and all(map(gone, pids))


def test_a_rank_that_ends_with_the_status_of_ssh_is_no_lost_host(sshd: Sshd) -> None:
    """255 is what ssh says of a host that is lost, and Python of ``sys.exit(-1)``."""
    script = write("ends.py", "import sys; sys.exit(-1)")
    done = sshd.do(0, *command("--hostfile", "hosts", "--ssh", sshd.ssh, "--max-restarts=1", script))
    assert done.returncode == 1 and "exited with status 255" in done.stderr, done.stderr
    assert "is lost" not in done.stderr and "all hosts are started again" not in done.stderr


# -- Slurm


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    needs("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "scancel")
    with Slurm(tmp_path / "daemons") as cluster:
        yield cluster


FORMS = {
    "agents": (["--ntasks-per-node=1"], ["--nproc-per-node=2"]),
    "ranks": (["--ntasks-per-node=2"], []),
}
"""A task on each node, which starts ranks there, or one for each rank."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("killed", [False, True])
def test_srun_starts_ranks(slurm: Slurm, form: str, killed: bool) -> None:
    """A rank that is killed ends the step; agents start all again."""
    tasks, own = FORMS[form]
    script = write("trains.py", TRAINS)
    own = [*own, f"--patience={PATIENCE}", *(["--max-restarts=1"] if form == "agents" else [])]
    words = ["srun", "-N2", *tasks, "--kill-on-bad-exit=1", *command(*own, script), *([] if killed else ["short"])]
    running = Heard(slurm.begin(0, *words))
    pids = ranks_at_7(4)
    if killed:
        began = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        if form == "ranks":
            # srun's status is the highest of all tasks', also of those that it has ended itself.
            assert running.end() in (128 + signal.SIGKILL, 128 + signal.SIGTERM), running.text
            assert time.monotonic() - began < 30 and "sf1: task 2: Killed" in running.text, running.text
        else:
            assert running.end() == 0, running.text
            assert (
                running.text.count("rank 2 on host sf1: killed by SIGKILL") == 1 and "(restart 1 of 1)" in running.text
            )
            went_on(running.text, 4)
    else:
        assert running.end() == 0, running.text
        assert running.text.count("begins at 0 on 4") == 4
    waited(lambda: all(map(gone, pids)), "all ranks end")


@pytest.mark.parametrize("how", ["requeued", "drained", "notice"])
def test_a_job_goes_on_where_it_was(slurm: Slurm, how: str) -> None:
    """The script of docs/launch.md. Requeued by hand; with a node less, as one is drained; and by itself behind notice,
    where no step is lost."""
    write("train.py", TRAINS)
    batch = documented("Slurm", "sh").replace("#SBATCH --gpus-per-node=8\n", "").replace("=2-4", "=1-2")
    assert batch.count(" shardfold run ") == 1
    job = slurm.batch(batch.replace("shardfold run", " ".join(command("--nproc-per-node=1", f"--patience={PATIENCE}"))))
    pids = ranks_at_7(2)
    if how == "notice":
        assert slurm.do(0, "scancel", "--signal=USR1", job).returncode == 0
    else:
        if how == "drained":
            slurm.do(0, "scontrol", "update", "NodeName=sf1", "State=DRAIN", "Reason=test")
        assert slurm.do(0, "scontrol", "requeue", job).returncode == 0
    waited(lambda: slurm.state(job) == "PENDING", "the job is queued again")
    assert all(map(gone, pids))
    # Slurm would keep it for two minutes, for nodes to become clean. They refuse what is started in the second in which
    # they end what it was before: "Job credential revoked".
    waited(lambda: not slurm.do(0, "scontrol", "update", f"JobId={job}", "StartTime=now+5").returncode, "it may start")
    waited(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), "the job ends", SECONDS)
    text = slurm.output(job)
    assert slurm.state(job) == "COMPLETED", text
    if how == "notice":
        left = set(re.findall(r"leaves at (\d+)", text))
        assert len(left) == 1 and text.count(f"begins at {left.pop()} on 2") == 2, text
    else:
        went_on(text, 1 if how == "drained" else 2)


# -- Open MPI


@pytest.mark.parametrize("killed", [False, True])
def test_mpirun_starts_ranks(tmp_path: Path, killed: bool) -> None:
    needs("mpirun")
    script = write("trains.py", TRAINS)
    with Cluster(tmp_path / "cluster", hosts=1) as cluster:
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3", *command(script)]
        running = Heard(cluster.begin(0, *words, *([] if killed else ["short"]), GLOO_SOCKET_IFNAME="lo"))
        pids = ranks_at_7(3)
        if killed:
            os.kill(pids[1], signal.SIGKILL)
        assert running.end() == (128 + signal.SIGKILL if killed else 0), running.text
        assert running.text.count("begins at 0 on 3") == 3
        waited(lambda: all(map(gone, pids)), "all ranks end")


def test_mpirun_starts_agents_on_hosts(tmp_path: Path) -> None:
    """A rank that is killed: the agents start all again."""
    needs("mpirun")
    script = write("trains.py", TRAINS)
    with Cluster(tmp_path / "cluster") as cluster:
        # What mpirun calls in place of ssh: the name of a host, and a command for its shell.
        reach = "\n".join(
            f"{name}) space={space};;" for name, space in zip(cluster.names, cluster.spaces.spaces, strict=True)
        )
        begin = 'exec ip netns exec "$space" unshare -u sh -c "hostname $host; $*"'
        words = f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{reach}\nesac\n{begin}\n"
        away = write("away.sh", words, program=True)
        ways = ["--mca", "plm_rsh_agent", away, "--mca", "oob_tcp_if_include", "eth0", "--host", "sf0:1,sf1:1"]
        own = [f"--master-addr={Namespaces.address(0)}", "--nproc-per-node=1", "--max-restarts=1"]
        words = ["mpirun", "--allow-run-as-root", *ways, "-np", "2", "-x", "GLOO_SOCKET_IFNAME", *command(*own, script)]
        running = Heard(cluster.begin(0, *words))
        os.kill(ranks_at_7(2)[1], signal.SIGKILL)
        assert running.end() == 0, running.text
        assert running.text.count("rank 1 on host sf1: killed by SIGKILL") == 1, running.text
        went_on(running.text, 2)


WAITS = """
import os, time
rank = os.environ["RANK"]
with open("now" + rank, "w") as file:
    file.write(str(os.getpid()))
os.rename("now" + rank, "at7-" + rank)
time.sleep(600)
"""


@pytest.mark.parametrize("launcher, form", [("srun", "ranks"), ("srun", "agents"), ("mpirun", "ranks")])
def test_ranks_end_with_what_has_started_them(tmp_path: Path, launcher: str, form: str) -> None:
    """Slurm's process on a node is killed, or mpirun: it ends what it has started with one process for each rank, and
    the agent with its ranks else."""
    needs(launcher, *(["slurmctld", "slurmd", "munged"] if launcher == "srun" else []))
    tasks, words = FORMS[form]
    own = command(*words, write("waits.py", WAITS))
    with (Slurm if launcher == "srun" else Cluster)(tmp_path / "daemons") as cluster:
        words = ["srun", "-N2", *tasks] if launcher == "srun" else ["mpirun", "-np", "2"]
        words += ["--allow-run-as-root", "--oversubscribe"] if launcher == "mpirun" else []
        cluster.begin(0, *words, *own)
        pids = ranks_at_7(4 if launcher == "srun" else 2)[-2:]
        above = psutil.Process(pids[0]).parent()
        while form == "agents" and above is not None and above.name() != "slurmstepd":
            above = above.parent()
        assert above is not None
        above.kill()
        waited(lambda: all(map(gone, pids)), "ranks end", 10)


# -- process 1 of a container


CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def first_of(container: subprocess.Popen[str]) -> psutil.Process:
    """Process 1 of a container, as it is seen from here."""
    inside: list[psutil.Process] = []

    def there() -> bool:
        outer = psutil.Process(container.pid)
        inside[:] = [each for each in outer.children(recursive=True) if nspid(each.pid) == "1"]
        return bool(inside)

    waited(there, "process 1 of a container begins")
    return inside[0]


def nspid(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
    pids = status.partition("NSpid:")[2].partition("\n")[0].split()
    return pids[-1] if len(pids) > 1 else ""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts: two pods at a time, as a restarted one has its name and another address."""
    needs("unshare")
    with Cluster(tmp_path / "pods", hosts=3) as cluster:
        yield cluster


def test_process_1_waits_for_what_ranks_leave(pods: Cluster) -> None:
    script = write(
        "leaves.py",
        """
        import subprocess, time
        from pathlib import Path
        def name(of):
            try:
                return of.read_text(errors="replace")
            except OSError:
                return ""
        def there():
            return [each for each in Path("/proc").glob("[0-9]*/stat") if "(sleep)" in name(each)]
        for _ in range(5):  # each is the child of a shell that ends first
            subprocess.run(["sh", "-c", "setsid sleep 0.2 &"], check=True)
        deadline = time.monotonic() + 20
        while there() and time.monotonic() < deadline:
            time.sleep(0.05)
        print("left", len(there()), flush=True)
        """,
    )
    done = pods.do(0, *CONTAINER, *command("--nproc-per-node=1", script))
    assert done.returncode == 0 and "left 0" in done.stdout, done


def test_sigterm_ends_process_1_before_there_are_ranks(pods: Cluster, tmp_path: Path) -> None:
    """While torch is imported, which takes its time here."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "torch.py").write_text("open('imports', 'w').write('x')\nimport time\ntime.sleep(60)\n")
    path = os.pathsep.join([str(slow), os.environ.get("PYTHONPATH", "")])
    running = pods.begin(0, *CONTAINER, *command("--nproc-per-node=1", write("x.py", "")), PYTHONPATH=path)
    await_(tmp_path / "imports")
    first_of(running).terminate()
    assert running.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("hears", [True, False])
def test_sigterm_is_notice_to_ranks_and_then_their_end(pods: Cluster, tmp_path: Path, hears: bool) -> None:
    """As Kubernetes gives it; ranks that pass over it are killed before the pod is."""
    script = write("trains.py", TRAINS if hears else TRAINS.replace("engine.leaving", "False"))
    own = ["--nproc-per-node=2", *(["--notice=60"] if hears else ["--shutdown-timeout=2"])]
    if not hears:
        script = write(
            "deaf.py", f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{Path(script).read_text()}"
        )
    running = Heard(pods.begin(0, *CONTAINER, *command(*own, script), GLOO_SOCKET_IFNAME="lo"))
    for rank in range(2):
        await_(tmp_path / f"at7-{rank}")
    inside = psutil.Process(running.process.pid).children(recursive=True)
    began = time.monotonic()
    first_of(running.process).terminate()
    assert running.end() == 128 + signal.SIGTERM, running.text
    assert time.monotonic() - began < 30 and not [each for each in inside if each.is_running()]
    assert running.text.count("leaves at ") == (2 if hears else 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_pods_that_come_back_with_another_address_go_on(pods: Cluster, lost: int) -> None:
    """As JobSet and Trainer v2 start them: variables say who is who, all are started again when one is lost, and a name
    then has another address."""
    write("train.py", TRAINS)
    jobs = yaml.safe_load(documented("Kubernetes", "yaml"))["spec"]["replicatedJobs"]
    (container,) = jobs[0]["template"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    (index,) = [each["name"] for each in container["env"] if "valueFrom" in each]
    assert container["command"][:2] == ["shardfold", "run"]
    own = [*CONTAINER, *command(f"--patience={PATIENCE}", *container["command"][2:])]

    def start(hosts: list[int]) -> list[Heard]:
        # JobSet's names of pods: that of the set, of the job, its number and the pod's; and the set's as domain.
        names = [f"train-node-0-{pod}" for pod in range(jobs[0]["template"]["spec"]["completions"])]
        pods.place({f"{name}.train": Namespaces.address(host) for name, host in zip(names, hosts, strict=True)})
        started: list[Heard] = []
        for pod, (name, host) in enumerate(zip(names, hosts, strict=True)):
            started.append(Heard(pods.begin(host, *own, name=name, **variables, **{index: str(pod)})))
        return started

    first = start([0, 1])
    for rank in range(2):
        await_(Path(f"at7-{rank}"))
    began = time.monotonic()
    first_of(first[lost].process).kill()
    other = first[1 - lost]
    assert other.end() != 0 and time.monotonic() - began < 2 * PATIENCE + 10, other.text
    assert f"on host train-node-0-{lost}" in other.text or "node 0" in other.text, other.text
    assert f"rank {1 - lost} on" not in other.text, other.text
    again = start([2, 1] if lost == 0 else [0, 2])
    assert [each.end() for each in again] == [0, 0], [each.text for each in again]
    went_on("".join(each.text for each in again), 2)


# -- Ray Train


RAY = """
import os, signal, torch, ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=True)
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
def loss(engine, step):
    if step == 12 and os.environ["RANK"] == "1" and not os.path.exists(MARK):
        with open(MARK, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    print("step", step, flush=True)
    return engine(torch.full((2, 4), 0.1 * (step % 7))).square().mean()
"""


def test_ray_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """The program of docs/launch.md, of which a worker is killed: the loop goes on, and each step was taken."""
    if importlib.util.find_spec("ray") is None:  # which, imported, sets variables
        pytest.skip("ray is not installed here")
    block = documented("Ray Train", "python no-run")
    assert block.count("/shared/run/") == 2
    script = write(
        "trains.py", RAY.replace("MARK", repr(str(tmp_path / "killed"))) + block.replace("/shared/run", str(tmp_path))
    )
    variables = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    variables |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}  # else a busy machine starves its workers
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:  # names of sockets are
        done = subprocess.run(
            [sys.executable, script],
            env={**os.environ, **variables, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0 and (tmp_path / "killed").exists(), done.stdout + done.stderr
    steps = [int(step) for step in re.findall(r"\bstep (\d+)", done.stdout)]
    assert set(range(20)) <= set(steps) and steps.count(0) == 2 and steps.count(11) >= 3, steps
    assert (tmp_path / "checkpoints" / "latest").exists()
