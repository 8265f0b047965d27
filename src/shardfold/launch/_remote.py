"""Starts an agent on each of several hosts, and sees all of them to their end: by ssh, srun or mpirun.

By ssh one command runs on each host; what it is to do, the environment included, is written to its standard input, so
that no shell reads it and no process list shows it. That line stays open: signals go over it, and should this process
die, its end tells the host.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import IO

import shardfold
from shardfold.errors import ConfigError
from shardfold.launch.decision import Hosts, Node, exported
from shardfold.launch.options import Options
from shardfold.launch.process import INTERRUPTED, die_with_parent, exit_status, python_module
from shardfold.plan.patience import Patience

__all__ = ["run_hosts", "scheduler_command"]

CHECK_TIMEOUT = 60.0
GRACE = 12.0  # seconds for the other hosts to end; each kills what is left there after 5
UNREACHABLE = 255  # ssh's own exit status
FIRST_PORT, LAST_PORT = 20000, 29999

# What every host runs first: sets what is read from standard input, byte by byte, as the rest is for its successor.
BOOT = """
import sys
sys.path[:] = [each for each in sys.path if each]
import json, os
line = b""
while not line.endswith(b"\\n"):
    byte = os.read(0, 1)
    if not byte:
        sys.exit(1)
    line += byte
folder, environment, command = json.loads(line)
try:
    os.chdir(folder)
except OSError as error:
    sys.exit("there is no folder %s (%s)" % (folder, error.strerror))
os.environ.update(environment)
os.execv(sys.executable, [sys.executable] + command)
"""

# Prints what has to agree between hosts.
CHECK = """
import sys
sys.path[:] = [each for each in sys.path if each]
import json, random, socket, subprocess
from importlib import metadata, util
facts = {"Python": "%d.%d" % sys.version_info[:2], "shardfold": None, "torch": None}
if util.find_spec("shardfold"):
    import shardfold
    facts["shardfold"] = shardfold.__version__
if util.find_spec("torch"):
    facts["torch"] = metadata.version("torch")
def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
wanted, first, last, script = json.loads(sys.argv[1])
ports = [wanted] if wanted else random.sample(range(first, last), 50)
facts["port"] = next((port for port in ports if is_free(port)), None)
import os
facts["script"] = script is None or os.path.isfile(script)
try:
    said = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
except OSError:
    said = []
facts["address"] = said[0] if said else socket.gethostbyname(socket.gethostname())
print(json.dumps(facts))
"""


class RemoteAgent:
    """The agent on one host, as a process of ssh here.

    Attributes:
        killed: ssh was, from here.
    """

    def __init__(self, name: str, options: Options, lines: Sequence[str]) -> None:
        self.name, self.killed = name, False
        prepare = f". {shlex.quote(options.venv_script)} && " if options.venv_script else ""
        program = f"{prepare}exec {shlex.quote(sys.executable)} -c {shlex.quote(BOOT)}"
        port = ["-p", str(options.ssh_port)] if options.ssh_port is not None else []
        more = shlex.split(options.launcher_args)
        # The name is no option: host files are checked for that, and behind `--` ssh takes none.
        command = [*shlex.split(options.ssh), *more, "-o", "BatchMode=yes", *alive(options), *port, "--", name, program]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's signals go over the line, not to ssh
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        self.say(*lines)

    def say(self, *lines: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write("".join(f"{line}\n" for line in lines).encode())
            self.process.stdin.flush()

    def carry(self, ended: queue.Queue[RemoteAgent]) -> None:
        """Carry its output here, and put it into ``ended`` when it ends."""
        pumps = [
            threading.Thread(target=carry_lines, args=(stream, into), daemon=True)
            for stream, into in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]

        def wait() -> None:
            self.process.wait()
            for pump in pumps:
                pump.join(timeout=2.0)
            ended.put(self)

        for thread in (*pumps, threading.Thread(target=wait, daemon=True)):
            thread.start()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def alive(options: Options) -> list[str]:
    """Options of ssh by which it notices that a host, or the way to it, is gone. ``--launcher-args`` stands in front of
    them, and of an option that is given twice ssh takes the first."""
    seconds = Patience(options.patience).keep_alive
    given = {"ServerAliveInterval": seconds, "ServerAliveCountMax": 3, "ConnectTimeout": 3 * seconds}
    return [word for name, value in given.items() for word in ("-o", f"{name}={value}")]


def carry_lines(stream: IO[bytes], into: IO[str]) -> None:
    with stream:
        for line in stream:
            with suppress(ValueError, OSError):
                into.write(line.decode(errors="replace"))
                into.flush()


def run_hosts(plan: Hosts, options: Options, command: list[str]) -> int:
    """Run an agent on each host and return the exit status of the first that failed, or 0.

    Raises:
        ConfigError: a host is not fit (one sentence for each), or the launcher is not installed.
    """
    environment = exported(os.environ, [Path.home(), Path.cwd()])
    if plan.launcher not in ("ssh", "pdsh"):
        return run_scheduler(plan, options, command, environment)
    if shutil.which(shlex.split(options.ssh)[0]) is None:
        raise ConfigError(
            f"{shlex.split(options.ssh)[0]!r} is not installed here: install it, or give another --launcher."
        )
    if options.venv_script:
        environment.pop("PATH", None)
    folder = str(Path.cwd())
    # Found as it is here: from a source tree too.
    source = str(Path(shardfold.__file__).parents[1])
    paths = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), source]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    there = replace(
        options,
        hostfile=None,
        include="",
        exclude="",
        num_nodes=None,
        nnodes=None,
        num_gpus=None,
        nproc_per_node=None,
        launcher=None,
        launcher_args="",
        no_ssh=False,
        force_multi=False,
        standalone=False,
        node_rank=None,
    )
    restart, total = 0, options.max_restarts
    while True:
        # How often agents start ranks again is counted there; a host that is lost ends its agent, and counts here.
        there = replace(there, max_restarts=total - restart)
        status, lost = start_hosts(plan, options, there, command, (folder, environment))
        if not lost or restart == total:
            return status
        restart += 1
        print(f"shardfold run: all hosts are started again (restart {restart} of {total}).", file=sys.stderr)


def start_hosts(
    plan: Hosts, options: Options, there: Options, command: list[str], setting: tuple[str, dict[str, str]]
) -> tuple[int, bool]:
    """Look at the hosts, run an agent on each and return the exit status of the first that failed, or 0, and whether
    one was lost.

    Args:
        plan: the hosts.
        options: as given.
        there: those of the agents.
        command: the script and its arguments.
        setting: folder and variables on each host.

    Raises:
        ConfigError: a host is not fit.
    """
    names = list(plan.slots)
    script = None if options.module or options.no_python else command[0]
    checked = names[:1] if options.no_ssh_check else names
    address, port = check_hosts(checked, options, *setting, script, agree=not options.no_ssh_check)
    started: list[RemoteAgent] = []
    ended: queue.Queue[RemoteAgent] = queue.Queue()
    with forwarded(started) as received:
        try:
            for rank, (name, slots) in enumerate(plan.slots.items()):
                count = len(names)
                node = Node(str(len(slots)), tuple(slots), (count, count), rank, "static", address, port, name)
                header = json.dumps([*setting, python_module("shardfold.launch.remote_agent")[1:]])
                started.append(RemoteAgent(name, options, (header, instructions(node, there, command))))
            for host in started:
                host.carry(ended)
            grace = max(GRACE, 3.0 * Patience(options.patience).keep_alive + 1.0)
            status = see_to_end(started, ended, received, grace)
            return status, not received and any(is_lost(host) for host in started)
        finally:
            for host in started:
                host.kill()


def is_lost(host: RemoteAgent) -> bool:
    """Whether ssh, which has ended, says so, or was killed, but not from here. It says 255 also if the agent was
    killed."""
    returncode = host.process.returncode
    return returncode == UNREACHABLE or (returncode < 0 and not host.killed)


def instructions(node: Node, options: Options, command: list[str]) -> str:
    """The line that tells a host what to do; see :mod:`shardfold.launch.remote_agent`."""
    return json.dumps([asdict(node), asdict(options), command])


def see_to_end(
    hosts: list[RemoteAgent], ended: queue.Queue[RemoteAgent], received: list[int], grace: float = GRACE
) -> int:
    """Wait for all hosts; once one has failed, the others get ``grace`` seconds: as long as ssh takes to find that one
    is lost, which then is no host that only does not end."""
    status, deadline, told = 0, None, False
    left = len(hosts)
    while left:
        try:
            host = ended.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            if told:
                for each in hosts:
                    each.kill()
                deadline = None
                continue
            # The agents hear of a death from each other; these did not.
            for each in hosts:
                each.say("SIGTERM")
            told, deadline = True, time.monotonic() + grace
            continue
        left -= 1
        returncode = host.process.returncode
        if returncode and not status:
            status = exit_status(returncode)
            lost = is_lost(host)
            if lost and not received:
                print(
                    f"Error: host {host.name} is lost, or the launcher there was killed; the other hosts are ended.",
                    file=sys.stderr,
                )
            deadline = time.monotonic() + (0.0 if lost else 2.0)
    return exit_status(-received[0]) if received else status


@contextmanager
def forwarded(hosts: list[RemoteAgent]) -> Iterator[list[int]]:
    """Forward the first signal to all hosts; at the second give up on them. Yields the list of those that came."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for host in hosts:
            if len(received) == 1:
                host.say(signal.Signals(number).name)
            else:
                host.kill()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_hosts(
    names: list[str], options: Options, folder: str, environment: dict[str, str], script: str | None, *, agree: bool
) -> tuple[str, int]:
    """Look at each host before anything is started there; return address and port for all to meet.

    Raises:
        ConfigError: one sentence for each host that is not fit.
    """
    here = {
        "Python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "shardfold": shardfold.__version__,
        "torch": metadata.version("torch"),
    }
    asked = json.dumps([options.master_port, FIRST_PORT, LAST_PORT, script])
    header = json.dumps([folder, environment, ["-c", CHECK, asked]])
    looking = [(name, RemoteAgent(name, options, [header])) for name in names]
    deadline = time.monotonic() + CHECK_TIMEOUT
    wrong: list[str] = []
    facts: dict[str, dict[str, str | int | bool | None]] = {}
    for name, host in looking:
        try:
            out, said = host.process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            host.kill()
            host.process.communicate()
            wrong.append(f"host {name} does not answer within {CHECK_TIMEOUT:.0f} s.")
            continue
        words = (said.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
        if host.process.returncode == UNREACHABLE:
            wrong.append(f"host {name} cannot be reached by {options.ssh}: {words}")
        elif host.process.returncode == 127:
            wrong.append(
                f"host {name} has no {sys.executable}: install the same environment there, or give --venv-script."
            )
        elif host.process.returncode:
            wrong.append(f"host {name} cannot start: {words}.")
        else:
            found = answer(out)
            if found is None:
                wrong.append(f"host {name} answers with something else: look at what its shell prints when it starts.")
                continue
            facts[name] = found
            differs = [
                f"{what} {found[what] or 'missing'}, not {here[what]}" for what in here if found[what] != here[what]
            ]
            if differs:
                wrong.append(f"host {name} has another environment: {'; '.join(differs)}.")
            elif not found["script"]:
                wrong.append(f"host {name} has no script {script!r} in {folder}: copy it there, or share the folder.")
    first = facts.get(names[0])
    if first is not None and first["port"] is None:
        wrong.append(f"host {names[0]} has no free port {options.master_port or 'at all'}: give another --master-port.")
    if wrong and (agree or first is None or first["port"] is None):
        raise ConfigError("\n".join(wrong))
    assert first is not None
    return options.master_addr or str(first["address"]), int(first["port"] or 0)


def answer(out: bytes) -> dict[str, str | int | bool | None] | None:
    """What a host says of itself; None: it says something else."""
    try:
        found = json.loads((out.splitlines() or [b""])[-1])
    except (ValueError, RecursionError):
        return None
    known = {"Python", "shardfold", "torch", "port", "script", "address"}
    fits = isinstance(found, dict) and set(found) == known and isinstance(found["address"], str)
    return found if fits and isinstance(found["port"], int | None) else None


def scheduler_command(plan: Hosts, options: Options, command: list[str], variables: Sequence[str] = ()) -> list[str]:
    """Return the command line by which srun or mpirun starts an agent on each node.

    Args:
        plan: the hosts, and which launcher.
        options: as given; those that say where things start are left out there.
        command: the script and its arguments.
        variables: names to hand on, where the launcher has to be told.
    """
    count, names = len(plan.slots), list(plan.slots)
    dropped = ["launcher", "launcher_args", "nnodes", "num_nodes", "force_multi", "save_pid"]
    more: list[str] = []
    if count == 1:  # a step of one task is none of several: it is told all
        dropped += ["hostfile", "include", "exclude", "num_gpus", "nproc_per_node"]
        slots = ",".join(map(str, plan.slots[names[0]]))
        more = ["--standalone", *([f"--include=localhost:{slots}"] if slots else [])]
        if not slots and options.procs is not None:
            more.append(f"--nproc-per-node={options.procs}")
    elif plan.launcher != "slurm" and options.master_addr is None:
        more = [f"--master-addr={names[0]}"]
    there = [*python_module("shardfold"), "run", *options.argv(*dropped), *more, *command]
    extra = shlex.split(options.launcher_args)
    if plan.launcher == "slurm":
        nodes = [f"--nodelist={','.join(names)}"] if plan.given_slots else []
        shape = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        return ["srun", *shape, *nodes, *extra, *there]
    if plan.launcher in ("mpi", "openmpi"):
        handed = [word for name in variables for word in ("-x", name)]
        hosts = ",".join(f"{name}:1" for name in names)
        return ["mpirun", "-np", str(count), "--host", hosts, "--map-by", "ppr:1:node", *handed, *extra, *there]
    return ["mpirun", "-n", str(count), "-ppn", "1", "-hosts", ",".join(names), "-genvall", *extra, *there]


def run_scheduler(plan: Hosts, options: Options, command: list[str], environment: dict[str, str]) -> int:
    if options.hostfile is not None:
        options = replace(options, hostfile=str(Path(options.hostfile).absolute()))
    words = scheduler_command(plan, options, command, sorted(environment))
    if shutil.which(words[0]) is None:
        raise ConfigError(f"--launcher {plan.launcher} needs {words[0]}, which is not installed here.")
    received: list[int] = []
    process = subprocess.Popen(words, env={**os.environ, **environment}, start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        returncode = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        return INTERRUPTED if received[0] == signal.SIGINT else exit_status(-received[0])
    return exit_status(returncode)
