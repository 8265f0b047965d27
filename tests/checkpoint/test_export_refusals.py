"""What `shardfold ckpt export` and `import` refuse before they write: places inside of each other, strange tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shardfold.checkpoint import Writer
from shardfold.tools import cli


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The sentence with which a command ends, whose status is 2."""
    with pytest.raises(SystemExit) as end:
        cli.main(["ckpt", *map(str, arguments)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("Error: ") and said.count("\n") == 1, said
    return said.removeprefix("Error: ").rstrip("\n")


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a checkpoint, a folder of safetensors, and a link to each."""
    writer = Writer(tmp_path / "step")
    writer.parameter("w", torch.ones(3))
    writer.commit()
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "hf" / "model.safetensors")
    for name in ("step", "hf"):
        (tmp_path / f"link-{name}").symlink_to(tmp_path / name)
    return tmp_path


@pytest.mark.sampled(5)
@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
@pytest.mark.parametrize("target", ["step/in", "step/a/b", "step/../step/in", "link-step/in"])
@pytest.mark.parametrize("source", ["step", "link-step"])
def test_an_export_does_not_write_into_what_it_reads(
    run: Path, capsys: pytest.CaptureFixture[str], source: str, target: str, to: str
):
    """Links count for what they lead to; the source is as it was, to the last file."""
    before = tree(run)
    said = refusal(capsys, "export", run / source, run / target, "--to", to)
    assert f"is inside of {run / source}, which is read: nothing was written" in said
    assert tree(run) == before


@pytest.mark.parametrize(
    "source, target, how",
    [
        ("hf", "hf", "is"),
        ("hf", "link-hf", "is"),
        ("hf", "hf/new", "is inside of"),
        ("link-hf", "hf/new", "is inside of"),
        ("hf/model.safetensors", "hf/model.safetensors", "is"),
        ("hf/model.safetensors", "hf", "is around"),
        ("step/part-00001-of-00001.safetensors", "step", "is around"),
    ],
)
def test_an_import_does_not_write_into_or_over_what_it_reads(
    run: Path, capsys: pytest.CaptureFixture[str], source: str, target: str, how: str
):
    """Nor over a checkpoint whose file it reads; all is as it was."""
    before = tree(run)
    said = refusal(capsys, "import", run / source, run / target)
    assert said.startswith(f"{run / target} {how} {run / source}, which is read: nothing was written")
    assert tree(run) == before


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


FILES: dict[str, tuple[Callable[[], Any], str]] = {
    "weights": (lambda: {"w": torch.ones(2), "s": sparse()}, "'s' of {path} is a sparse tensor"),
    "rows": (lambda: {"s": torch.eye(3).to_sparse_csr()}, "'s' of {path} is a sparse tensor"),
    "meta": (lambda: {"s": torch.empty(3, device="meta")}, "'s' of {path} is a tensor on the meta device"),
    "moments": (
        lambda: {
            "model": {"w": torch.ones(3, 3)},
            "optimizer": {"state": {0: {"exp_avg": sparse()}}, "param_groups": [{"params": [0], "lr": 1.0}]},
        },
        "'exp_avg' of 'w', of the optimizer, is a sparse tensor",
    ),
    "rows of moments": (
        lambda: {
            "model": {"w": torch.ones(3, 3)},
            "optimizer": {"state": {0: {"exp_avg": nested()}}, "param_groups": [{"params": [0], "lr": 1.0}]},
        },
        "'exp_avg' of 'w', of the optimizer, is a nested tensor",
    ),
    "nothing": (dict[str, Any], "{path} has no weights: it holds an empty dict."),
    "none under a key": (lambda: {"model": {}}, "has no weights"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("case", FILES)
def test_what_is_no_dense_tensor_is_not_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str):
    """One sentence names the tensor; nothing is left behind."""
    make, words = FILES[case]
    path = tmp_path / "x.pt"
    torch.save(make(), path)
    said = refusal(capsys, "import", path, tmp_path / "new")
    assert words.format(path=path) in said and "it has ;" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]
