"""The command `shardfold board`: the sockets and the signals; no run hears of it."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from pathlib import Path

from shardfold.errors import ConfigError
from shardfold.tools.board._board_app import BoardApp
from shardfold.tools.board.board_config import BoardConfig
from shardfold.tools.serve.serve_config import read_keys
from shardfold.tools.serve.web_side import WebSide

__all__ = ["board"]


def board(config: BoardConfig) -> None:
    """Serve the page until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: the address is taken, or there is no token in its file.
    """
    app = BoardApp(config, token_of(config.token_file))
    web = WebSide(app, config.host, config.port)
    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    web.start()
    try:
        address = f"{web.url}{config.root_path}/#token={app.token}"
        print(f"{address}\nis the page of your runs; Ctrl-C ends it, and no run.", flush=True)
        ends.wait()
    finally:
        web.stop()
        app.close()


def token_of(path: Path | None) -> str:
    """The token in a file that only its owner reads, which is made if it is not there; without a file a new one.

    Raises:
        ConfigError: it cannot be read or written, or there is none in it.
    """
    made = secrets.token_urlsafe(24)
    if path is None:
        return made
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(made + "\n")
    except FileExistsError:
        pass  # it has a token already, or is none, which is said where it is read
    except OSError as error:
        raise ConfigError(f"--token-file {path} cannot be written: {error.strerror}.") from None
    return read_keys(path, "--token-file")[0].decode()
