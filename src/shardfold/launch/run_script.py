"""``shardfold run``: decides what to do and does it. torch is imported only where ranks are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from shardfold.errors import ConfigError
from shardfold.launch.decision import Hosts, Node, Rank, decide, script_command
from shardfold.launch.options import Options
from shardfold.launch.process import QUIET, die_with_parent, end_at_signals
from shardfold.launch.scheduler import find_task

__all__ = ["become_deepspeed", "quietly_imported", "run"]


def run(options: Options, script: str, arguments: list[str]) -> int:
    """Run a script as ranks and return the exit status to end with.

    Raises:
        ConfigError: the options contradict each other or the environment, or there is no such script.
    """
    if not options.module and not options.no_python and not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r}: give its path, or -m for a module.")
    plan = decide(options, os.environ)
    if isinstance(plan, Hosts):
        from shardfold.launch._remote import run_hosts

        return run_hosts(plan, options, [script, *arguments])
    if not options.standalone and find_task(os.environ) is not None:
        die_with_parent()  # also what this process becomes: what Slurm or mpirun has started ends with it
    if options.as_deepspeed:
        become_deepspeed(elastic=options.elastic)
    if isinstance(plan, Rank):
        command = script_command(options, script, arguments, plan.local_rank)
        sys.stdout.flush()
        os.execvpe(command[0], command, {**os.environ, **plan.environment})
    end_at_signals()
    run_node = quietly_imported()
    return run_node(plan, options, [script, *arguments])


def quietly_imported() -> Callable[[Node, Options, list[str]], int]:
    """Import torch for this process without the warnings that its stores write about nodes that end."""
    name, level = QUIET
    mine = name not in os.environ
    os.environ.setdefault(name, level)
    from shardfold.launch._agent import run_node

    if mine:
        del os.environ[name]  # of this process
    return run_node


def become_deepspeed(*, elastic: bool) -> None:
    """Let `deepspeed` mean this layer, the module and the command, in all processes that are started from now on;
    ``elastic``: whose engines go on without a rank that is killed."""
    from shardfold import compat

    os.environ.update(compat.environment())
    if elastic:
        os.environ[compat.ELASTIC] = "1"
    os.environ.setdefault("PYTHON_EXEC", sys.executable)  # for the command
    os.environ["PATH"] = os.pathsep.join([str(Path(__file__).with_name("bin")), os.environ.get("PATH", os.defpath)])
