"""The launcher among others' files, names and processes: nothing in them becomes a command, an option or code."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shardfold.comm import _boards as boards
from shardfold.comm import _neighbours as neighbours
from shardfold.errors import ConfigError
from shardfold.launch._agent import pid_file
from shardfold.launch._remote import RemoteAgent, answer, check_hosts, scheduler_command
from shardfold.launch.hosts import parse_environment_file, parse_hostfile
from shardfold.launch.options import Options
from shardfold.launch.process import python_module
from shardfold.tools import cli
from shardfold.tools.observe.printable import printable
from shardfold.tools.recipes._corpus import load_corpus
from tests.checkpoint.test_hostile import refused

pytestmark = pytest.mark.timeout(120)

#: Runs the command here, and notes what it was given.
SSH = """#!/bin/sh
printf '%s\\n' "$@" > {notes}
while :; do case "$1" in -o|-p) shift 2;; --) shift; break;; *) exit 9;; esac; done
shift
exec sh -c "$*"
"""
NAMES = ("random", "json", "socket", "subprocess", "typing", "torch", "numpy", "tempfile", "sitecustomize")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(SSH.format(notes=tmp_path / "notes"))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def planted(tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules named as Python's own and others'."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"import os; os.makedirs({str(canary)!r}, exist_ok=True)\n")
    monkeypatch.chdir(folder)
    return folder


# -- host files

HOSTS: dict[str, tuple[bytes, str]] = {
    "an option": (b"-oProxyCommand=touch${IFS}canary slots=1\n", "touch${IFS}canary' is not a name of a host"),
    "a short option": (b"-v slots=1\n", "'-v' is not a name of a host"),
    "a command": (b"a;touch\tcanary slots=1\n", "is not of the form"),
    "a substitution": (b"$(touch${IFS}canary) slots=1\n", "is not a name of a host"),
    "a backquote": (b"`id` slots=1\n", "'`id`' is not a name of a host"),
    "a list": (b"a,b slots=1\n", "'a,b' is not a name of a host"),
    "no name": (b"@host slots=1\n", "'@host' is not a name of a host"),
    "two users": (b"a@b@c slots=1\n", "'a@b@c' is not a name of a host"),
    "an option of a user": (b"a@-v slots=1\n", "'a@-v' is not a name of a host"),
    "a user of options": (b"-lroot@b slots=1\n", "'-lroot@b' is not a name of a host"),
    "a path": (b"../../etc slots=1\n", "'../../etc' is not a name of a host"),
    "control codes": (b"a\x1b[2Jb slots=1\n", "is not a name of a host"),
    "another script's letters": ("\u0430dmin slots=1\n".encode(), "is not a name of a host"),
    "a new line of another kind": ("a\u2028-v slots=1\n".encode(), "is not of the form"),
    "no text": (b"\xff\xfe\x01 slots=1\n", "is not text in UTF-8: byte 0 is 0xff"),
    "zeros": (b"a slots=1\n\0\0", "is not text: it has bytes that are 0"),
    "a huge file": (b"#" * (5 * 2**20), "it is no such file"),
    "many slots": (b"a slots=99999999999\n", "has more than 4096 slots"),
    "slots of many digits": (b"a slots=" + b"9" * 5000 + b"\n", "has more than 4096 slots"),
    "a long line": (b"x" * 100_000 + b"\n", "is not of the form"),
}  # fmt: skip


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", HOSTS)
def test_a_host_file(
    name: str, tmp_path: Path, ssh: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence; ssh is never called."""
    monkeypatch.chdir(tmp_path)
    content, says = HOSTS[name]
    Path("hosts").write_bytes(content)
    Path("x.py").touch()
    refused(capsys, "run", "--ssh", ssh, "--hostfile", "hosts", "x.py", says=says)
    assert not Path("notes").exists() and not Path("canary").exists()


@pytest.mark.parametrize("place", ["a pipe", "a folder"])
def test_a_host_file_that_is_none(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not waited for."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    os.mkfifo("hosts") if place == "a pipe" else os.mkdir("hosts")
    refused(capsys, "run", "--hostfile", "hosts", "x.py", says="there is no host file 'hosts'")


@pytest.mark.parametrize("host", ["worker-0", "me@node1.example.org", "10.0.0.7", "fe80::1%eth0", "[::1]", "node_7"])
def test_a_name_of_a_host_is_taken(host: str) -> None:
    """Names, addresses, and a user's name in front."""
    assert list(parse_hostfile([f"{host} slots=2"])) == [host]


def test_a_host_is_no_option_of_ssh(ssh: str, tmp_path: Path) -> None:
    """Whatever its name, it stands behind the end of options."""
    host = RemoteAgent("-v", Options(ssh=ssh), [])
    host.process.communicate(timeout=60)
    said = (tmp_path / "notes").read_text().splitlines()
    end = said.index("--")
    assert said[end + 1] == "-v" and "-v" not in said[:end] and said[:2] == ["-o", "BatchMode=yes"]


# -- what other hosts are given


@pytest.mark.soak
def test_variables_and_arguments_pass_no_shell(
    ssh: str, tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotes, substitutions and the like in variables, in the folder's name and in arguments arrive as they are."""
    hard = f"a'b\"c $(mkdir {canary}) `mkdir {canary}` ; mkdir {canary} \\ * é"
    folder = tmp_path / f"it's $(mkdir {canary.name})"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHARDFOLD_TWO_LINES", "a\nexport X=1")
    Path(".deepspeed_env").write_text(f"HARD={hard}\n")
    Path("hosts").write_text("here slots=1\n")
    Path("x.py").write_text(
        "import json, os, sys\n"
        "said = [os.environ['HARD'], os.environ['SHARDFOLD_TWO_LINES'], sys.argv[1:]]\n"
        f"json.dump(said, open({str(tmp_path / 'got')!r}, 'w'))\n"
    )
    run = subprocess.run(
        [*python_module("shardfold"), "run", "--ssh", ssh, "--hostfile", "hosts", "--master-addr", "127.0.0.1",
         "--force-multi", "x.py", hard, "--", "$HOME"],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "got").read_text()) == [hard, "a\nexport X=1", [hard, "--", "$HOME"]]
    assert not canary.exists()
    assert "HARD" not in (tmp_path / "notes").read_text(), "a variable stood in a list of processes"


@pytest.mark.parametrize("line", ["A B=1", "A;B=1", "$(x)=1", "=1", "export", "A", "-x=1", "A\x1b=1"])
def test_a_variable_of_no_name(line: str) -> None:
    """A line of the file of variables is NAME=VALUE."""
    with pytest.raises(ConfigError, match="is not of the form"):
        parse_environment_file([line])


def test_a_value_is_never_a_second_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a new line ends one: marks that other readers take for one are part of the value."""
    from shardfold.launch.decision import exported

    (tmp_path / ".deepspeed_env").write_text("A=1\u2028B=2\x0bC=3\n")
    assert exported({}, [tmp_path]) == {"A": "1\u2028B=2\x0bC=3"}
    (tmp_path / ".deepspeed_env").write_bytes(b"A=\xff\n")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        exported({}, [tmp_path])


@pytest.mark.parametrize("said", [b"", b"hello", b"[1]", b"{}", b"[" * 100_000, b'{"port": 1}'])
def test_a_host_that_answers_something_else(said: bytes) -> None:
    """What a login shell prints is not taken for facts."""
    assert answer(said) is None


def test_a_host_that_prints_when_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence for the host."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="host a answers with something else"):
        check_hosts(["a"], Options(ssh="echo"), str(tmp_path), {}, None, agree=True)


# -- modules of the current folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_option", [sys.version_info >= (3, 11), False])
def test_python_s_own_modules_are_python_s_own(has_option: bool, planted: Path, canary: Path) -> None:
    """Ranks of `shardfold train` and what srun and mpirun start find no module of the current folder."""
    for arguments in (["--help"], ["train", "--steps", "x"]):
        run = subprocess.run(
            [*python_module("shardfold", has_option=has_option), *arguments],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert run.returncode == (2 if len(arguments) > 1 else 0), run.stderr
    assert not canary.exists()
    subprocess.run([sys.executable, "-m", "shardfold", "--help"], check=False, capture_output=True, timeout=60)
    assert canary.exists(), "without it they would be found"


def test_what_starts_on_a_host_finds_no_module_of_its_folder(ssh: str, planted: Path, canary: Path) -> None:
    """Neither in the folder that ssh begins in nor in that of the run."""
    address, port = check_hosts(["a"], Options(ssh=ssh), str(planted), dict(os.environ), None, agree=True)
    assert address and port and not canary.exists()
    words = scheduler_command(_plan(), Options(), ["x.py"])
    assert python_module("shardfold") == words[words.index(sys.executable) :][: len(python_module("shardfold"))]


def _plan() -> Any:
    from collections import OrderedDict

    from shardfold.launch.decision import Hosts

    return Hosts(OrderedDict(a=[0], b=[0]), "slurm", given_slots=True)


@pytest.mark.soak
def test_a_script_finds_the_modules_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `python script.py`: the user's own folder is the user's own."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/beside.py").write_text("X = 7\n")
    Path("sub/x.py").write_text("import beside; print('found', beside.X)\n")
    run = subprocess.run(
        [*python_module("shardfold"), "run", "--standalone", "--nproc-per-node", "1", "sub/x.py"],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert "found 7" in run.stdout, run.stderr


# -- other users of this machine


def test_the_file_of_the_process_id_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that somebody has put there leaves its target as it was; the file is its owner's alone, and goes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "precious").write_text("precious")
    path = tmp_path / f"{os.getpid()}.deepspeed"
    path.symlink_to("precious")
    with pid_file(True):
        assert not path.is_symlink() and path.read_text() == str(os.getpid())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "precious").read_text() == "precious" and not path.exists()
    path.write_text("another's")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(ConfigError, match="cannot be made: File exists"), pid_file(True):
            pass
        assert path.read_text() == "another's"


@pytest.mark.skipif(
    not boards.possible() or os.geteuid() != 0, reason="needs process_vm_readv, and root to be two users"
)
def test_memory_of_another_user_is_not_read() -> None:
    """Also where this user might: a rank of the job runs under the same one."""
    board = mmap.mmap(-1, mmap.PAGESIZE)
    word = ctypes.c_int64.from_buffer(board)
    word.value = 77
    process = os.fork()
    if not process:
        os.setuid(65534)
        signal.pause()
        os._exit(0)
    try:
        while os.stat(f"/proc/{process}").st_uid == 0:
            pass
        entry = {"place": "x", "process": process, "probe": ctypes.addressof(word), "token": 77, "door": None}
        into = ctypes.c_int64()
        boards.read(process, entry["probe"], ctypes.addressof(into), 8)
        assert into.value == 77, "root may read it"
        for mine in (process, os.getpid()):  # whose door is its own is not asked for one
            assert neighbours._found({"place": "x", "process": mine}, entry) is None
        mine = {"place": "x", "process": os.getpid()}
        assert neighbours._found(mine, {**entry, "process": os.getpid()}) is not None
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_temporary_files_are_their_owner_s(tmp_path: Path) -> None:
    """Activations on disk have no name; a folder of logs is closed to others."""
    import torch

    from shardfold.launch._agent import log_folder
    from shardfold.tiers.disk import DiskTier

    store = DiskTier(torch.device("cpu"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(store.drives[0].fileno()).st_mode) & 0o077 == 0
    store.close()
    folder = log_folder(Options(log_dir=str(tmp_path / "logs"), redirects="3"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# -- the terminal


def test_what_does_not_print_is_a_dot() -> None:
    """Control codes, marks that turn the direction of writing, halves of pairs; letters of all scripts stay."""
    assert printable("a\x1b[2J\x07\u202eb\udc80\u2066é漢\t|") == "a·[2J··b··é漢    |"
    assert printable(b"a\x9b\xff\nb") == "a��\nb" and printable("a\nb\rc", lines=False) == "a·b·c"


def test_names_of_skipped_files(tmp_path: Path) -> None:
    """They are shown when a run begins."""
    (tmp_path / "text.txt").write_text("some text " * 100)
    (tmp_path / "x\x1b]0;pwned\x07").write_bytes(b"\0")
    assert load_corpus(tmp_path).skipped == ("x·]0;pwned·: binary",)


def test_errors_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """What was typed or read is quoted in them."""
    for arguments in (["train", "--data", "\x1b[2J"], ["ckpt", "inspect", "a\x1b]0;x\x07"], ["tr\x1bain"]):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert "Error: " in said and not [c for c in said if not c.isprintable() and c != "\n"], said
