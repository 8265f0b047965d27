"""Documented behaviours of DeepSpeed, one expression each, have on the face the values that the real package gave.

``benchmarks/deepspeed_behaviours.py`` has the expressions and records the values.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


def script(name: str) -> Any:
    """A script of ``benchmarks/`` as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


behaviours = script("deepspeed_behaviours")
GOLDEN: dict[str, str] = json.loads(behaviours.GOLDEN.read_text(encoding="utf-8"))


def test_each_expression_has_a_recorded_value():
    """And each recorded value an expression; at least 80."""
    assert [f"{path}: {line}" for path, line in behaviours.expressions()] == list(GOLDEN) and len(GOLDEN) >= 80


@pytest.mark.parametrize("path", behaviours.CHECKS)
def test_a_module_does_what_deepspeed_s_does(path: str):
    """Values are equal, and exceptions are of DeepSpeed's kind, but for what is listed with its reason."""
    differ = []
    for module, line in behaviours.expressions():
        wanted = GOLDEN[f"{module}: {line}"]
        if module == path:
            found = behaviours.value(module, line, "shardfold.compat.deepspeed")
            known = any(line.startswith(each) for each in behaviours.KNOWN)
            if behaviours.agree(wanted, found) is known:
                differ.append(f"{line}\n  {wanted}\n  {found}")
    assert not differ, "\n".join(differ)


@pytest.mark.soak
def test_the_page_of_names_is_what_differs():
    """Modules, names, kinds, values, parameters and members beside those recorded of DeepSpeed, each with a reason."""
    names = script("deepspeed_names")
    recorded = json.loads(names.RECORD.read_text(encoding="utf-8"))
    page = (Path(__file__).parents[2] / "docs" / "deepspeed-names.md").read_text(encoding="utf-8")
    assert names.markdown(recorded) == page, (
        "docs/deepspeed-names.md is behind: write it with benchmarks/deepspeed_names.py compare"
    )
    if dist.is_initialized():  # by `zero.Init()`, which is made to see its members
        dist.destroy_process_group()
