"""What an installation without extras can do: train from Python. The command line asks for what it lacks by name."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import shardfold
from shardfold.tools.extras import EXTRAS, MODULES

# As where they are not installed. What they bring with them goes too. PyTorch's compiler, which asks whether there is
# ONNX, may hear that there is.
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        asked = name.startswith("onnx") and sys._getframe(2).f_code.co_name == "find_spec"
        if name.partition(".")[0] in {absent!r} and not asked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
BROUGHT = (*MODULES, "click", "typing_inspection", "pydantic_core", "pygments", "shellingham", "hjson", "psutil")

TRAIN = """
from functools import partial
import torch
import shardfold as sf
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=0.1), layout="zero3")
for step in range(3):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
engine.save({path!r}, wait=True)
engine.load({path!r})
assert engine.explain() and engine.memory() and engine.traffic()
engine.close()
"""

FACE = """
import shardfold.compat
shardfold.compat.install()
import deepspeed, torch
model = torch.nn.Linear(4, 1)
config = {{"train_batch_size": 2, "optimizer": {{"type": "AdamW"}}, "zero_optimization": {{"stage": 2}}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.ones(2, 4)).square().mean())
engine.step()
engine.destroy()
"""


def without(packages: tuple[str, ...], code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = ABSENT.format(absent=packages) + code
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        cwd=folder, check=False, capture_output=True, text=True, timeout=400,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    )  # fmt: skip


def test_training_from_python_needs_no_extra(tmp_path: Path):
    """With torch, numpy, safetensors and xxhash alone: every public name is there, a run trains, saves and loads."""
    names = "import shardfold\nfor name in shardfold.__all__: getattr(shardfold, name)\n"
    done = without((*EXTRAS, *BROUGHT), TRAIN.format(path=str(tmp_path / "ck")) + names, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_deepspeeds_interface_needs_no_extra(tmp_path: Path):
    """A script of `deepspeed.initialize` trains without the packages of the command line."""
    done = without((*EXTRAS, *BROUGHT), FACE.format(), folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [name for name, extra in EXTRAS.items() if extra == "cli"])
def test_the_command_says_in_one_sentence_what_it_lacks(tmp_path: Path, package: str):
    code = "import sys; sys.argv = ['shardfold', 'train']\nfrom shardfold.tools.entry import main\nmain()"
    done = without((package,), code, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"Error: the command shardfold needs {package}, which is not installed: "
        "pip install 'shardfold[cli]' (in a checkout: '.[cli]')\n"
    )


FOLDER = """
from pathlib import Path
from shardfold.errors import ConfigError
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.images import sources
from shardfold.tools.recipes.face._transforms import change_of
from shardfold.tools.recipes.face.vit import FaceModel
from shardfold.tools.planning.known_models import planned_model
folder = Path("images")
for name in "abcd":
    (folder / name).mkdir(parents=True)
    for shot in range(2):
        (folder / name / f"{shot}.png").write_bytes(b"")
table = Path("table.parquet")
table.write_bytes(b"")
config = FaceConfig.load({"transforms": "torchvision", "size": "16"})
for tried in (
    lambda: sources(config.model_copy(update={"data": folder})),
    lambda: sources(config.model_copy(update={"data": table})),
    lambda: change_of(config), lambda: FaceModel(config.model_copy(update={"backbone": "timm:resnet18"}), 3),
    lambda: planned_model("timm:resnet18"), lambda: planned_model("transformers:llama"),
):
    try:
        tried()
    except ConfigError as error:
        print(error)
"""


@pytest.mark.soak
def test_images_say_in_one_sentence_what_they_lack(tmp_path: Path):
    """Each of the recipe's packages, where it is missing: what needs it, and the extra."""
    done = without(("PIL", "pyarrow", "torchvision", "timm", "transformers"), FOLDER, folder=tmp_path)
    assert [line.partition(" (in a checkout")[0] for line in done.stdout.splitlines()] == [
        "a folder of images needs pillow, which is not installed: pip install 'shardfold[face]'",
        "a folder of parquet files needs pyarrow, which is not installed: pip install 'shardfold[face]'",
        "--transforms torchvision needs torchvision, which is not installed: pip install 'shardfold[vision]'",
        "backbone timm:resnet18 needs timm, which is not installed: pip install 'shardfold[vision]'",
        "--model timm:resnet18 needs timm, which is not installed: pip install 'shardfold[vision]'",
        "--model transformers:llama needs transformers: pip install transformers.",
    ], done.stderr


def test_any_other_missing_module_is_not_explained_away(tmp_path: Path):
    done = without(("safetensors",), "from shardfold.tools.entry import main\nimport safetensors", folder=tmp_path)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_the_extras_are_those_of_the_package():
    """The packages that are asked for by name come with the extra that is named, and none of them comes without."""
    wanted = [Requirement(each) for each in importlib.metadata.requires("shardfold") or ()]
    always = {each.name for each in wanted if each.marker is None or "extra" not in str(each.marker)}
    assert always - {"tomli"} == {"torch", "numpy", "safetensors", "xxhash"}
    for package, extra in EXTRAS.items():
        (each,) = [each for each in wanted if each.name == package]
        assert each.marker is not None and each.marker.evaluate({"extra": extra})


def test_there_is_one_version():
    """The installed package, the module and `shardfold --version` say the same.

    Not what an editable install says of itself: that is the version of the day on which it was made.
    """
    said = importlib.metadata.distribution("shardfold")
    if '"editable"' not in (said.read_text("direct_url.json") or ""):
        assert said.version == shardfold.__version__
    done = subprocess.run(
        [sys.executable, "-m", "shardfold", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(rf"shardfold {re.escape(shardfold.__version__)}\n", done.stdout)


@pytest.mark.soak
def test_tables_and_programs_are_read_without_torch() -> None:
    """The package, its presets and `plan` take no second to import: torch comes with the first name that needs it."""
    code = (
        "import sys, shardfold as sf, shardfold.plan.cost, shardfold.plan.explain\n"
        "sf.PRESETS['zero3'].replace(gather='bf16')\n"
        "assert 'torch' not in sys.modules\n"
        "sf.Engine\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)
