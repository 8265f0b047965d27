"""`import deepspeed` and its metadata mean the face, here and in child processes, and little is imported for it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import shardfold as sf
from shardfold.compat import VERSION, environment
from shardfold.compat.deepspeed.absent import ABSENT
from shardfold.errors import ShardfoldError, UsageError

HEAVY = ("transformers", "matplotlib", "pydantic", "typer", "rich", "tensorboard", "wandb", "accelerate", "pandas")

# What libraries reach as attributes after `import deepspeed` alone.
REACHED = (
    "DeepSpeedEngine",
    "checkpointing.configure",
    "comm.is_initialized",
    "init_distributed",
    "initialize",
    "runtime.lr_schedules.VALID_LR_SCHEDULES",
    "utils.logging.logger",
    "utils.safe_get_full_grad",
    "zero.GatheredParameters",
    "zero.Init",
)


@pytest.fixture(autouse=True)
def face() -> Iterator[None]:
    sf.compat.install()
    yield
    sf.compat.uninstall()


def real(folder: Path) -> Path:
    """A DeepSpeed of another version, as one that is installed."""
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '9.9'\n")
    (folder / "deepspeed-9.9.dist-info").mkdir()
    (folder / "deepspeed-9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9\n"
    )
    return folder


def child(code: str, *, extra: str = "") -> str:
    """What a new Python prints whose environment is this one's and the face's."""
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + extra if extra else ""
    status, out, error = run([sys.executable, "-c", code], variables)
    assert status == 0, error
    return out


def run(command: list[str], variables: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, output and errors of a program."""
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_modules_are_the_face_s_own():
    """A module is the same object under both names, with the name, spec and file that it has."""
    import deepspeed
    import deepspeed.runtime.lr_schedules
    from deepspeed.comm import get_rank  # pyright: ignore[reportMissingImports]

    ours = importlib.import_module("shardfold.compat.deepspeed")
    schedules = importlib.import_module("shardfold.compat.deepspeed.runtime.lr_schedules")
    assert deepspeed is ours and sys.modules["deepspeed"] is ours
    assert deepspeed.runtime.lr_schedules is schedules is sys.modules["deepspeed.runtime.lr_schedules"]
    assert deepspeed.comm.comm.get_rank is get_rank
    assert ours.__spec__ is not None and ours.__spec__.name == ours.__name__ == "shardfold.compat.deepspeed"
    assert schedules.__spec__ is not None and schedules.__spec__.name == schedules.__name__
    assert deepspeed.__version__ == VERSION and importlib.reload(schedules) is schedules


def test_what_looks_for_the_package_finds_it():
    """`find_spec` and all of `importlib.metadata` know a package of that name and version."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.submodule_search_locations
    assert importlib.util.find_spec("deepspeed.runtime.lr_schedules") is not None
    assert importlib.util.find_spec("deepspeed.no_such") is None
    assert importlib.metadata.version("deepspeed") == VERSION
    metadata = importlib.metadata.metadata("deepspeed")
    assert (metadata["Name"], metadata["Version"]) == ("deepspeed", VERSION)
    assert "torch" in (importlib.metadata.requires("deepspeed") or [])
    assert importlib.metadata.distribution("DeepSpeed").version == VERSION
    assert set(importlib.metadata.packages_distributions()["deepspeed"]) == {"deepspeed"}


def test_no_such_module_is_an_ordinary_error():
    """What DeepSpeed does not have either is not found."""
    with pytest.raises(ModuleNotFoundError, match=r"deepspeed\.no_such"):
        importlib.import_module("deepspeed.no_such")
    with pytest.raises(ImportError, match="no_such"):
        exec("from deepspeed import no_such")


def test_install_twice_is_install_once_and_uninstall_undoes_it():
    """The second call changes nothing, and all of it can be taken back."""
    before = [*sys.meta_path], [*sys.path], dict(os.environ)
    sf.compat.install()
    assert ([*sys.meta_path], [*sys.path], dict(os.environ)) == before
    import deepspeed  # noqa: F401  # pyright: ignore[reportUnusedImport]

    sf.compat.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
    assert not [entry for entry in [*sys.path, os.environ.get("PYTHONPATH", "")] if "compat" in entry]
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "shardfold.compat.finder"]


def test_the_real_one_that_is_imported_already_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    """Classes of two packages would be mixed up, so that is refused with a sentence."""
    sf.compat.uninstall()
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    with pytest.raises(UsageError, match=r"imported already.*before the first import of deepspeed"):
        sf.compat.install()
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "shardfold.compat.finder"]


def test_an_installed_deepspeed_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Even one that stands before everything on the path; in a child, one that stands behind the face."""
    monkeypatch.syspath_prepend(str(real(tmp_path)))
    import deepspeed

    assert deepspeed.__version__ == importlib.metadata.version("deepspeed") == VERSION
    code = "import deepspeed, importlib.metadata as m; print(deepspeed.__version__, m.version('deepspeed'))"
    assert child(code, extra=str(tmp_path)) == f"{VERSION} {VERSION}"


@pytest.mark.soak
def test_a_child_process_has_the_face():
    """By its environment alone: submodules first, metadata, the same modules under both names, pickles."""
    said = child(
        "import importlib.metadata as m, importlib.util as u, json, sys\n"
        "found = [m.version('deepspeed'), u.find_spec('deepspeed') is not None]\n"
        "import deepspeed.checkpoint.utils as names, deepspeed, shardfold.compat.deepspeed as ours\n"
        "found += [deepspeed is ours, deepspeed.__spec__.name, names.__name__, 'torch' in sys.modules]\n"
        "print(json.dumps(found))"
    )
    face = "shardfold.compat.deepspeed"
    assert json.loads(said) == [VERSION, True, True, face, f"{face}.checkpoint.utils", True]


def _name_of_deepspeed(_: int) -> str:
    import deepspeed

    return deepspeed.__name__


def test_a_spawned_process_has_the_face(monkeypatch: pytest.MonkeyPatch):
    """`multiprocessing`'s children take the path from this process, not from the environment."""
    monkeypatch.delenv("PYTHONPATH")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_name_of_deepspeed, [0]) == ["shardfold.compat.deepspeed"]
        pool.close()
        pool.join()


@pytest.mark.soak
def test_a_program_is_run_with_the_face():
    """`python -m shardfold.compat PROGRAM` is for what is not to be edited; a module of it can be run by `-m`."""
    sf.compat.uninstall()
    command = [sys.executable, "-m", "shardfold.compat"]
    _, said, error = run([*command, sys.executable, "-m", "deepspeed.env_report"])
    assert f"{VERSION}, the compatibility layer of shardfold" in said, error
    assert run([*command, "no-such-program"]) == (1, "", "'no-such-program' cannot be run: No such file or directory.")


def test_pickles_name_deepspeed_s_classes():
    """A class that was pickled as DeepSpeed's is the face's; the face's own pickles need no `install()`."""
    from deepspeed.runtime.lr_schedules import WarmupLR  # pyright: ignore[reportMissingImports]

    assert pickle.loads(b"cdeepspeed.runtime.lr_schedules\nWarmupLR\n.") is WarmupLR
    pickled = pickle.dumps(WarmupLR)
    sf.compat.uninstall()
    assert pickle.loads(pickled) is WarmupLR


@pytest.mark.soak
def test_what_is_imported():
    """`import deepspeed` imports not even torch; all that libraries reach through it, no more than torch and numpy."""
    said = child(
        "import json, sys, deepspeed, shardfold\n"
        "early = 'torch' in sys.modules\n"
        "from operator import attrgetter\n"
        f"for name in {REACHED!r}: attrgetter(name)(deepspeed)\n"
        "print(json.dumps([early, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    early, modules = json.loads(said)
    assert not early
    assert not set(HEAVY) & set(modules)


def test_every_name_is_there():
    """Each name that the face's packages say they have can be had."""
    import deepspeed

    for package in (deepspeed, *(getattr(deepspeed, name) for name in ("utils", "runtime", "ops", "accelerator"))):
        assert not [name for name in dir(package) if not hasattr(package, name)]


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_absent_says_so_when_it_is_used(name: str):
    """It can be imported, inherited from and asked about; using it raises one sentence with something else to do."""
    module, _, short = f"deepspeed.{name}".rpartition(".")
    thing = getattr(importlib.import_module(module), short)
    with pytest.raises(ShardfoldError, match=rf"^deepspeed\.{name}: .*; .*\.$"):
        thing(object())
    if isinstance(thing, type):
        assert not isinstance(object(), thing)
