"""The files of a release: what is in them, and that the same sources give the same bytes.

The wheel, installed into fresh environments with and without extras: each holds what the extra promises, no more.
"""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardfold
from tests.support import release

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]  # each build takes seconds, or a minute beside other tests

ROOT = Path(__file__).parents[2]
TRAIN = [
    "--size",
    "tiny",
    "--context",
    "32",
    "--micro-batch",
    "2",
    "--sample",
    "9",
    "--eval-windows",
    "4",
    "--steps",
    "2",
]
SCRIPT = """
from functools import partial
import importlib.metadata, torch, shardfold as sf
assert importlib.metadata.version('shardfold') == sf.__version__
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=0.1), layout="zero3")
for step in range(20):
    loss = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
print(sf.__version__, sf.__file__, loss.item() < 0.1)
engine.close()
"""


LEFT_OUT = (".git", ".venv", ".matrix", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
EPOCH = 1_700_000_000


def sources(folder: Path) -> Path:
    """A copy of what a checkout has, which would otherwise hold what setuptools leaves behind."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from what is in it."""
    folder = tmp_path_factory.mktemp("release")
    return release.build(sources(folder / "sources"), folder / "dist", epoch=EPOCH)


@pytest.fixture(scope="module")
def wheel(made: tuple[Path, Path]) -> Path:
    return made[1]


def test_the_same_sources_give_the_same_bytes(made: tuple[Path, Path], tmp_path: Path) -> None:
    """At another time, in another folder, written by another user with another umask."""
    copy = sources(tmp_path / "elsewhere")
    for path in copy.rglob("*"):
        os.utime(path, (1, EPOCH - 10_000))
        if path.is_file():
            path.chmod(path.stat().st_mode & ~0o077)
    again = release.build(copy, tmp_path / "dist", epoch=EPOCH)
    assert [file.name for file in again] == [file.name for file in made]
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in made]


def test_the_sdist_has_what_make_needs(made: tuple[Path, Path]) -> None:
    """Tests, docs, examples and their settings; nothing that a tool left behind."""
    with tarfile.open(made[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = {"Makefile", "constraints.txt", "mkdocs.yml", "CHANGELOG.md", "CITATION.cff", "LICENSE", "CONTRIBUTING.md"}
    assert kept <= names
    for folder in ("tests", "docs", "examples", "benchmarks", "src/shardfold", ".ci", ".github"):
        here = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert here and not [path for path in here if path.relative_to(ROOT).as_posix() not in names]
    assert not [name for name in names if name.endswith((".pyc", ".so")) or "/runs/" in name]


def test_what_is_uploaded_says_what_it_is(made: tuple[Path, Path]) -> None:
    """Version, licence and its file, the README; the code and nothing else."""
    with zipfile.ZipFile(made[1]) as archive:
        names = archive.namelist()
        folder = f"shardfold-{shardfold.__version__}.dist-info"
        said = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert (said["Version"], said["License-Expression"]) == (shardfold.__version__, "Apache-2.0")
    assert said["Description-Content-Type"] == "text/markdown" and "# Shardfold" in str(said.get_payload())
    assert {name.partition("/")[0] for name in names} == {"shardfold", folder}
    if importlib.util.find_spec("twine"):
        check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, made)]
        subprocess.run(check, check=True, timeout=120)


def needed(extras: frozenset[str]) -> set[str]:
    """Names of all distributions that `shardfold[extras]` brings."""
    found: set[str] = set()
    left = [("shardfold", extras)]
    while left:
        name, asked = left.pop()
        for text in importlib.metadata.requires(name) or ():
            each = Requirement(text)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in (asked or {""})):
                key = canonicalize_name(each.name)
                if key not in found or each.extras:
                    found.add(key)
                    left.append((key, frozenset(each.extras)))
            elif asked and each.marker.evaluate({"extra": ""}):
                left.append((canonicalize_name(each.name), frozenset()))
    return found - {"shardfold"}


def entries(names: set[str]) -> Iterator[Path]:
    """What these distributions have in site-packages."""
    for name in names:
        found = importlib.metadata.distribution(name)
        for first in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            yield Path(str(found.locate_file(first)))


@pytest.fixture
def environment(wheel: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The `bin` of a fresh environment: the wheel, and links to the packages that its extras bring."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=120)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "env" / "lib" / version / "site-packages"
    for entry in set(entries(needed(request.param))):
        (packages / entry.name).symlink_to(entry)
    install = [sys.executable, "-m", "pip", "--python", str(tmp_path / "env/bin/python"), "install", "--no-deps"]
    subprocess.run([*install, "--quiet", "--no-index", str(wheel)], check=True, timeout=300)
    return tmp_path / "env" / "bin"


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RANK", "WORLD_SIZE"))}
    return subprocess.run(command, cwd=folder, env=clean, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("environment", "command", "picture"),
    [
        (frozenset[str](), False, False),
        (frozenset({"cli"}), True, False),
        (frozenset({"report"}), False, False),
        (frozenset({"all"}), True, True),
    ],
    ids=["none", "cli", "report", "all"],
    indirect=["environment"],
)
def test_an_installation_does_what_its_extras_promise(environment: Path, tmp_path: Path, command: bool, picture: bool):
    """A script trains in each; the command trains, or names the extra that it lacks; so does the picture."""
    script = run(tmp_path, environment / "python", "-c", SCRIPT)
    assert script.returncode == 0, script.stderr
    version, place, learned = script.stdout.split()
    assert version == shardfold.__version__ and place.startswith(str(tmp_path)) and learned == "True"
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} and {number} make {number + number}. " * 200)
    done = run(tmp_path, environment / "shardfold", "train", *TRAIN, "--data", "text", "--out", "run")
    if not command:
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "pip install 'shardfold[cli]'" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert ("There is no picture" in done.stdout) == (not picture)
    assert (tmp_path / "run" / "loss.png").exists() == picture
