"""What the library uses of PyTorch's inside is in one file, is there, and is missed in words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.optim.lr_scheduler import LambdaLR

import shardfold
from shardfold import torch_internals
from shardfold.errors import ShardfoldError
from shardfold.torch_internals import ATTRIBUTES, INTERNALS, TRIED, Internal, check, missing
from tests.support.sources import nodes, trees

SOURCES = Path(shardfold.__file__).parent

OTHERS = {  # names with an underscore that are Python's or other libraries'
    "_asdict", "_fields", "_make", "_replace",  # of named tuples, documented
    "_current_frames", "_exit", "_getframe",  # of os and sys, documented
    "_run_exitfuncs",  # of atexit, for tests as its source says, from Python 3.0 on
    "_attn_implementation", "_init_weights", "_is_stateful", "_no_split_modules", "_supports_attention_backend",  # of
    # transformers
    "_import_structure", "_object_missing_backend",  # of its packages, which are read once
    "_apply_gate",  # of its modules of experts
    "_disable_adapters",  # of peft's layers
    "_get_num_items_in_batch", "_set_sync_gradients",  # of the Trainer's loop, which elastic runs go on with
    "_AutomaticOptimization", "_EvaluationLoop", "_TrainingEpochLoop", "_combined_loader", "_make_closure",  # of
    "_on_before_batch_transfer", "_optimizer_step", "_should_accumulate", "_zero_grad_fn",  # Lightning's loop, too
}  # fmt: skip


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own(path: Path) -> Iterator[str]:
    """Names that a file of ours defines."""
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _used(path: Path) -> Iterator[str]:
    """Private names that a file reads of something, by attribute, by import, or by a string."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id == "ATEN"):  # operations have such names
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            yield from [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            yield from (
                part for alias in node.names for part in alias.name.split(".") if alias.name.startswith("torch")
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if node.func.id in ("getattr", "hasattr") and isinstance(name, ast.Constant):
                yield str(name.value)


def test_every_private_name_of_pytorch_is_in_one_file() -> None:
    """What no file of ours defines and has an underscore is a row of the tables."""
    known = OTHERS | {name for path in trees() for name in _own(path)}
    known |= {part for internal in ATTRIBUTES for part in internal.path.split(".")}
    found = {
        f"{path.relative_to(SOURCES)}: {name}"
        for path in trees()
        if path.name != "torch_internals.py"
        for name in _used(path)
        if _private(name) and name not in known
    }
    assert not found


def test_every_name_is_used() -> None:
    """A row that nothing needs any more goes."""
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py") if path.name != "torch_internals.py")
    for name in torch_internals.__all__:
        if name not in ("ATTRIBUTES", "INTERNALS", "TRIED", "Internal", "check", "missing"):
            assert name in text, name
    for internal in ATTRIBUTES:
        assert internal.path.rsplit(".", 1)[1] in text, internal.path


def test_this_version_has_every_name() -> None:
    """All functions and classes are there, and objects have the attributes."""
    assert missing() == []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.step()
    schedule = LambdaLR(optimizer, float)
    optimizer.step()
    objects: dict[str, Any] = {
        "Tensor": torch.ones(1), "Module": nn.Module(), "RNNBase": nn.LSTM(1, 1), "LRScheduler": schedule,
        "Optimizer": optimizer, "OpOverload": torch.ops.aten.add.Tensor, "mkldnn": torch.ops.mkldnn,
    }  # fmt: skip
    for internal in ATTRIBUTES:
        *_, owner, name = internal.path.split(".")
        if owner in objects:
            assert hasattr(objects[owner], name), internal.path
        elif owner == "SimpleElasticAgent":
            made = SimpleElasticAgent.__init__.__code__.co_names
            assert hasattr(SimpleElasticAgent, name) or name in made, internal.path


def test_what_is_missing_is_said_once_with_what_it_means() -> None:
    lost = [Internal("torch._gone", "something", "nothing works"), Internal("torch._left", "more", "little")]
    with pytest.warns(UserWarning, match=r"PyTorch 9\.9 does not have 2 of the names .*torch\._gone \(without it: "):
        check(lost, "9.9")
    check([], "9.9")


def test_what_is_missing_raises_a_sentence_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Internal("torch._gone", "something", "nothing works")
    monkeypatch.setattr(torch_internals, "INTERNALS", (*INTERNALS, gone))
    assert missing() == [gone]
    with pytest.raises(ShardfoldError, match=r"has no torch\._gone, which is needed for something: install one of"):
        torch_internals._get("torch._gone")()


def test_this_version_was_tried() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in TRIED
