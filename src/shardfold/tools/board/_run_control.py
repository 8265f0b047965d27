"""Runs are started, stopped and gone on with: as by a person at a terminal, and as their own process groups."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from shardfold.launch.run_records import ENDS, LAUNCHER, STATUS, Record, note_end, read_records
from shardfold.tools.board.known_runs import KnownRuns, recipe_of_settings
from shardfold.tools.board.recipe_forms import RecipeForm
from shardfold.tools.observe.run_files import opened, read_object, read_text
from shardfold.tools.observe.run_status import RunStatus
from shardfold.tools.recipes.folder import PRINTS_INTO_FOLDER
from shardfold.tools.serve.api_refusal import ApiRefusal

__all__ = ["RunControl", "acts_of", "chat_of"]

NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}", re.ASCII)
MOST_NAME = 80  # characters of a name that one is made from
BEGINS = 60.0
"""Seconds in which a started process claims its folder, on a loaded machine."""
GONE = 5.0  # seconds in which what is killed is gone
LOOK = 0.05
CHAT, CHAT_LOG = "chat.key", "chat.log"
CHECKPOINTS = "checkpoints"
WRITTEN = ("adapter", "model", "merged")
"""Folders in a run folder with weights and their tokenizer."""


def acts_of(row: Mapping[str, Any], folder: Path) -> list[str]:
    """What can be done with a run that is at that."""
    chat = ["chat"] if _has_weights(folder, row["recipe"]) and _template_of(folder) is not None else []
    if not row["is_over"]:
        return [] if row["state"] == "unknown" else ["stop", "stop-now", *chat]
    saved = (folder / CHECKPOINTS / "latest").is_file()
    return ["resume"] * (saved and bool(row["recipe"])) + ["repeat"] * bool(row["recipe"]) + chat


def _has_weights(folder: Path, recipe: str) -> bool:
    """That answer."""
    places = (folder / CHECKPOINTS / "latest", *(folder / name for name in WRITTEN))
    return recipe not in ("", "face", "reward") and any(each.exists() for each in places)


def _template_of(folder: Path) -> str | None:
    """The chat template that its server needs: the one that it was trained with, else the tokenizer's own, "model".
    None: there is none, as of models of bytes, so there are no conversations."""
    config = read_object(folder / "config.json")
    text = config.get("text")
    named = text.get("template") if isinstance(text, dict) else None
    if isinstance(named, str) and named != "model" and (named.isalpha() or os.path.isabs(named)):
        return named
    model = config.get("model")
    places = [*(folder / name for name in WRITTEN), *([Path(model)] if isinstance(model, str) else [])]
    for place in places:
        if (place / "chat_template.jinja").is_file() or read_object(place / "tokenizer_config.json").get(
            "chat_template"
        ):
            return "model"
    return None


class RunControl:
    """Starts processes and sends signals; it keeps nothing that a run or a later board needs.

    Args:
        root: the folder in which new runs get theirs.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._started: dict[Path, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    # -- start

    def start(
        self, recipe: str, nested: Mapping[str, Any], name: str | None = None, hostfile: str | None = None
    ) -> Path:
        """Start a run, and return its folder once it has one.

        Raises:
            ApiRefusal: the run was refused, or the name is none.
        """
        form = RecipeForm(recipe)
        folder = self.free(name)
        words = form.command({**nested, "out": str(folder)})
        stdin = b""
        if words is None:
            words, stdin = [*form.words, "--config", "/dev/stdin", f"--out={folder}"], form.toml(nested).encode()
        command = [sys.executable, "-m", "shardfold"]
        if hostfile is not None:
            if stdin:
                raise ApiRefusal(
                    "some of these settings have no options, and hosts are told options only: start it by hand.",
                    "settings",
                    "invalid_value",
                )
            path = Path(hostfile).expanduser()
            if not path.is_file():
                raise ApiRefusal(f"there is no host file {str(path)!r}.", "hostfile", "invalid_value")
            command += ["run", f"--hostfile={path.resolve()}", "-m", "shardfold"]
        return self._begin(folder, [*command, *words], stdin, is_here=hostfile is None)

    def rest_name(self, folder: Path) -> str | None:
        """What the rest of a run is called, if nobody says: after it."""
        name = re.sub(r"-rest(-\d+)?$", "", folder.name)[:MOST_NAME] + "-rest"
        free = (each for number in range(1, 1000) if not os.path.lexists(self._root / (each := _nth(name, number))))
        return next(free, None) if NAME.fullmatch(name) else None

    def free(self, name: str | None) -> Path:
        """A folder of a new run.

        Raises:
            ApiRefusal: the name is none, or taken.
        """
        if name is None:
            first = time.strftime("%Y%m%d-%H%M%S")
            paths = (self._root / _nth(first, number) for number in range(1, 1000))
            return next(path for path in paths if not os.path.lexists(path))
        if not NAME.fullmatch(name):
            raise ApiRefusal(
                "a run's name has letters, digits, '_', '-' and '.', and begins with none of the last two.",
                "name",
                "invalid_value",
            )
        if os.path.lexists(self._root / name):
            raise _taken(name)
        return self._root / name

    def _begin(self, folder: Path, command: Sequence[str], stdin: bytes, *, is_here: bool) -> Path:
        printed = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, PRINTS_INTO_FOLDER: "1", "PYTHONUNBUFFERED": "1"}
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

        def has_begun() -> bool:
            """Also in the eyes of who has just started another one of the same name."""
            return any(each.rank == LAUNCHER and (each.pid == process.pid or not is_here) for each in _records(folder))

        try:
            self._wait_for(process, has_begun, folder, printed)
        except ApiRefusal:
            printed.close()
            raise
        self._reap()
        self._started[folder] = process, printed
        return folder

    @staticmethod
    def _wait_for(
        process: subprocess.Popen[bytes], has_begun: Callable[[], bool], folder: Path, printed: IO[bytes]
    ) -> None:
        """
        Raises:
            ApiRefusal: the process ended, or does not claim its folder.
        """
        until = time.monotonic() + BEGINS
        while not has_begun():
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK)
                if not has_begun():
                    if folder.exists():  # of a run that was started at the same time
                        raise _taken(folder.name)
                    raise ApiRefusal(_last_words(printed), "settings", "refused")
            if time.monotonic() > until:
                process.send_signal(signal.SIGINT)
                raise ApiRefusal(f"the run did not begin within {BEGINS:g} s.", code="refused", status=500)

    def _reap(self) -> None:
        for folder, (process, printed) in list(self._started.items()):
            if process.poll() is not None and folder.is_dir():
                self._started.pop(folder, None)
                printed.close()

    def refusal(self, run: str) -> str | None:
        """Why a run that this board started is gone with its folder, by its id; None: it is not."""
        for folder, (process, printed) in list(self._started.items()):
            if KnownRuns.id_of(folder) == run and not folder.is_dir():
                with suppress(subprocess.TimeoutExpired):  # its sentence comes behind the folder's end
                    process.wait(GONE)
                return _last_words(printed)
        return None

    # -- go on

    def rest_of(self, folder: Path, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The recipe and the settings of the rest of a run, with others where they may be others.

        Raises:
            ApiRefusal: it goes on still, has no checkpoint, or nothing is left of it.
        """
        if not (status := RunStatus.of(folder)).is_over:
            raise ApiRefusal("the run goes on: stop it first.", code="not_over", status=409)
        recipe = recipe_of_settings(config := read_object(folder / "config.json"))
        latest = Path(read_text(folder / CHECKPOINTS / "latest")).name
        if not recipe or not latest:
            raise ApiRefusal("the run has no checkpoint to go on from.", code="no_checkpoint", status=409)
        form = RecipeForm(recipe)
        done, steps = latest.rpartition("-")[2], form.nested(given).get("steps", 0 if "epochs" in given else None)
        if steps is None:
            steps = status.steps or config.get("steps")
        if done.isdecimal() and isinstance(steps, int) and 0 < steps <= int(done):
            raise ApiRefusal(
                f"the run has done {int(done)} steps, and 'steps', which counts them, is {steps}: give more than "
                f"{int(done)}.",
                "steps",
                "nothing_left",
                status=409,
            )
        if recipe == "face":  # whose checkpoints do not bring the settings with them
            return recipe, {**form.form_values(config), **given, "resume": str(folder / CHECKPOINTS / latest)}
        return recipe, {**given, "resume": str(folder)}

    # -- stop

    def stop(self, folder: Path, *, now: bool) -> str:
        """Ask a run to end in good order, as Ctrl-C does; ``now``: without waiting for it.

        Raises:
            ApiRefusal: it is over, or its processes are not on this machine.
        """
        alive = [each for each in _records(folder) if each.lives is not False and each.phase not in ENDS]
        first = [each for each in alive if each.rank == LAUNCHER] or alive
        if not first or RunStatus.of(folder).is_over:
            raise ApiRefusal("the run is over.", code="is_over", status=409)
        here = [each for each in first if each.host == socket.gethostname()]
        if not here:
            raise ApiRefusal(
                f"its processes are on host {first[0].host[:100]!r}: stop it there.", code="elsewhere", status=409
            )
        told = [pidfd for each in here if (pidfd := _handle(each.pid, folder / STATUS)) is not None]
        if not told:
            raise ApiRefusal(
                "the processes that its records name do not have this run: they are in another container, or gone.",
                code="elsewhere",
                status=409,
            )
        try:
            for number in (signal.SIGINT, signal.SIGTERM) if now else (signal.SIGINT,):
                for pidfd in told:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, number)
            if now:
                self._see_off(folder, told, here)
        finally:
            for pidfd in told:
                os.close(pidfd)
        return "It ends at once." if now else "It ends after the present step, evaluates and saves."

    @staticmethod
    def _see_off(folder: Path, told: Sequence[int], records: Sequence[Record]) -> None:
        """What does not end by two signals is killed; and the folder says that somebody asked for it."""
        until = time.monotonic() + GONE
        for pidfd in told:
            if not select.select([pidfd], [], [], max(0.0, until - time.monotonic()))[0]:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [], GONE)
        if RunStatus.of(folder).state not in ("stopped", "done"):
            note_end(folder, "stopped", max(0, records[0].rank), "it was ended at once, as somebody asked")

    # -- chat

    def chat(self, folder: Path) -> dict[str, str]:
        """A server that answers with the run's weights: the one that runs, or a new one.

        Raises:
            ApiRefusal: it does not start.
        """
        if not _has_weights(folder, recipe_of_settings(read_object(folder / "config.json"))):
            raise ApiRefusal("the run has no weights yet that answer.", code="no_checkpoint", status=409)
        return chat_of(folder) or self._begin_chat(folder)

    def _begin_chat(self, folder: Path) -> dict[str, str]:
        key = secrets.token_urlsafe(24)
        log = os.open(folder / CHAT_LOG, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the server has until it ends
            except OSError:
                raise ApiRefusal("its server is starting: ask again.", code="starting", status=409) from None
            os.ftruncate(log, 0)
            place = folder / CHAT
            with suppress(FileNotFoundError):
                place.unlink()
            with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(key + "\n")
            words = [
                "serve",
                str(folder),
                "--port=0",
                f"--key-file={place}",
                f"--template={_template_of(folder) or 'model'}",
            ]
            process = subprocess.Popen(
                [sys.executable, "-m", "shardfold", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        until = time.monotonic() + 2 * BEGINS
        while (found := chat_of(folder)) is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK)
                with opened(folder / CHAT_LOG) as file:
                    text = os.pread(file, 64 * 1024, 0) if file is not None else b""
                raise ApiRefusal(_sentence(text), code="refused", status=409)
            if time.monotonic() > until:
                process.terminate()
                raise ApiRefusal("its server did not start in time.", code="refused", status=500)
        return found


def chat_of(folder: Path) -> dict[str, str] | None:
    """The address and key of the server that has the run's weights; None: none runs."""
    with opened(folder / CHAT_LOG) as file:
        if file is None or os.fstat(file).st_uid != os.getuid():
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            found = re.search(rb"^(http://127\.0\.0\.1:\d{1,5}) answers", os.pread(file, 64 * 1024, 0), re.MULTILINE)
            key = read_text(folder / CHAT)
            if found and key:
                url = found[1].decode()
                return {"url": url, "key": key, "page": f"{url}/#key={quote(key)}"}
    return None


def _taken(name: str) -> ApiRefusal:
    return ApiRefusal(f"there is something called {name!r} already: give another name.", "name", "name_taken")


def _nth(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _records(folder: Path) -> list[Record]:
    return read_records(folder)[0]


def _handle(pid: int, path: Path) -> int | None:
    """A process that has this very file open, as a handle that no other process ever gets; None: there is none."""
    with suppress(OSError, ValueError):
        handle = os.pidfd_open(pid)
        with suppress(OSError):
            wanted = path.stat()
            for each in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{each}")
                    if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                        return handle
        os.close(handle)
    return None


def _last_words(printed: IO[bytes]) -> str:
    printed.seek(0)
    return _sentence(printed.read(2**20))


def _sentence(text: bytes) -> str:
    """The last error of what a command printed."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error: ")]
    return (errors or lines or ["it ended without a word"])[-1].removeprefix("Error: ")[:2000]
