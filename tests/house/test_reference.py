"""The reference: every public name has an example that runs, and every sentence that can be raised is on its page."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
import shardfold.errors
import shardfold.testing
from tests.support.sources import nodes, trees

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs/site"
ROOMS = ("optim", "nn", "numerics", "parallel", "checkpoint", "errors", "testing", "compat")
MODULES = ["shardfold", *(f"shardfold.{room}" for room in ROOMS)]


def public() -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for each in module.__all__:
            value = getattr(module, each)
            if (inspect.isclass(value) or inspect.isroutine(value)) and id(value) not in seen:
                seen.add(id(value))
                yield f"{name}.{each}", value


PUBLIC = dict(public())


@pytest.mark.sampled(105)
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_that_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `engine`, an engine of a small model, a batch `x`, a folder, and `adam`, an optimizer to be made."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    adam = partial(torch.optim.AdamW, lr=1e-3)
    engine = sf.Engine(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), optimizer=adam)
    space = {"sf": sf, "torch": torch, "nn": nn, "partial": partial, "os": os, "adam": adam, "engine": engine}
    (tmp_path / "run").mkdir()
    space |= {"x": torch.randn(4, 8), "folder": str(tmp_path / "run")}
    if name.startswith("shardfold.testing"):
        space |= {each: getattr(shardfold.testing, each) for each in shardfold.testing.__all__}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(PUBLIC[name]) or "", space, name, None, 0)
    assert test.examples, f"{name} has no example: add `Examples:` with a line of `>>>` to its docstring"
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed
    engine.close()
    assert not failed, capsys.readouterr().out


def _fixed(node: ast.expr) -> Iterator[str]:
    """The runs of words in a text that do not vary."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for part in (node.left, node.right) if isinstance(node, ast.BinOp) else getattr(node, "values", ()):
        if isinstance(part, ast.Constant | ast.BinOp | ast.JoinedStr):
            yield from _fixed(part)


@pytest.fixture(scope="module")
def messages() -> Any:
    """The module of the site that lists what can be raised."""
    spec = importlib.util.spec_from_file_location("messages", SITE / "messages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sources(messages: Any) -> Any:
    return messages.Package(trees())


@pytest.fixture(scope="module")
def page(messages: Any, sources: Any) -> str:
    return messages.page(sources)


def test_every_sentence_that_is_raised_is_on_the_page(page: str) -> None:
    """Each `raise` of an error of ours with a text of its own, looked up by the longest run of its fixed words."""
    errors = set(shardfold.errors.__all__)
    count = 0
    for path in trees():
        for node in nodes(path):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not (isinstance(call, ast.Call) and call.args and getattr(call.func, "id", "") in errors):
                continue
            text = max((" ".join(each.split()) for each in _fixed(call.args[0])), key=len, default="")
            if len(text) > 12:
                count += 1
                assert text.replace("`", "'") in page, (
                    f"{path}:{node.lineno} raises what the page does not have: {text}"
                )
    assert count > 500


PASSED_ON = 12
"""At most so many calls only pass on what another package, another rank or the system has said."""


def test_sentences_that_are_made_elsewhere_are_on_the_page_too(sources: Any, page: str) -> None:
    """By functions, in variables and in attributes: what ranks report of each other, for one. Each class is there."""
    for words in (
        "the ranks are about to do different things", "no rank can go on", "did not finish within",
        "so ranks cannot pair their operations any more", "while only this rank's shard of it is in memory",
        "times in a row although the loss scale is at its floor", "takes at least", "it was interrupted (",
    ):  # fmt: skip
        assert words in page
    raised = [each for each in shardfold.errors.__all__ if each.endswith("Error") and each != "ShardfoldError"]
    assert [each for each in raised if f"\n## {each}\n" not in page] == []
    silent = [
        f"{file}:{node.lineno}"
        for error in raised
        for node, file in sources.calls(error)
        if node.args and not sources.texts(node.args[0])
    ]
    assert len(silent) <= PASSED_ON, silent


def test_what_troubleshooting_quotes_can_be_raised(page: str) -> None:
    """What is quoted in the first column: `...` stands for what varies."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    quoted = [each for cell in cells for each in re.findall(r"`([^`]+)`", cell) if len(each.split()) > 2]
    parts = [part.strip() for each in quoted for part in each.split("...") if part.strip()]
    assert len(quoted) > 15
    raised = "\n".join(line for line in page.splitlines() if line.startswith("- "))  # without what classes say
    assert [part for part in parts if part not in raised] == []
