"""The wheel, installed into fresh environments with and without extras: each holds what the extra promises, no more."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardfold

pytestmark = pytest.mark.soak

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
import torch, shardfold as sf
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, which would otherwise hold what setuptools leaves behind."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(folder)], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


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
