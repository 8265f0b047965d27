"""The agent on one of several hosts, for the process that started it there.

It runs as ``python -m shardfold.launch.remote_agent``.

Standard input is the line to that process. First comes what to do; then names of signals, as ssh carries none; its end
means that the other process, or the connection, is gone: then the ranks are ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import IO

from shardfold.errors import ShardfoldError
from shardfold.launch.decision import Node
from shardfold.launch.options import Options
from shardfold.launch.process import SAID, end_process
from shardfold.launch.run_script import become_deepspeed, quietly_imported

__all__ = ["main"]


def main() -> int:
    line = sys.stdin.buffer
    node, options, command = json.loads(line.readline())
    node["slots"] = None if node["slots"] is None else tuple(node["slots"])
    node["nodes"] = tuple(node["nodes"])
    threading.Thread(target=listen, args=(line,), daemon=True).start()
    # The ranks find the modules of this folder, as from any launcher; this process finds only what is installed.
    paths = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    try:
        if options["as_deepspeed"]:
            become_deepspeed(elastic=options["elastic"])
        return quietly_imported()(Node(**node), Options(**options), command)
    except ShardfoldError as error:
        print(f"Error: host {node['name']}: {error}", file=sys.stderr)
        return SAID


def listen(line: IO[bytes]) -> None:
    for word in line:
        os.kill(os.getpid(), signal.Signals[word.decode().strip()])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    status = main()
    end_process(1 if status == 255 else status)  # 255 is ssh's own word for a host that is lost
