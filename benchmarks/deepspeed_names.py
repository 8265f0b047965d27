"""The names of DeepSpeed beside those of this layer: modules, objects, members, parameters with defaults, fields.

``record`` walks the DeepSpeed that is installed where it runs and writes what it finds beside this file; ``shorten``
leaves out what is not compared; ``compare`` asks this layer for each of these, in its own process, and prints the page
of the docs that lists what differs::

    python -m venv /tmp/real && /tmp/real/bin/pip install deepspeed==0.19.8
    /tmp/real/bin/python benchmarks/deepspeed_names.py record
    .venv/bin/python benchmarks/deepspeed_names.py shorten
    .venv/bin/python benchmarks/deepspeed_names.py compare > docs/deepspeed-names.md

A name is a module's own where its source defines it, or where a package imports it from its own modules. Names that
begin with an underscore do not count, nor does what a module imports for its own use.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import enum
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
Described = dict[str, Any]
FEW = 12  # members that are listed one by one


# -- what a module of an installed package has


def own_names(module: ModuleType) -> list[str]:
    """The public names that the module's source defines, or that a package imports from its own modules."""
    path = getattr(module, "__file__", None) or ""
    if not path.endswith(".py"):
        return []
    found: set[str] = set()
    for node in _at_import(ast.parse(Path(path).read_text(encoding="utf-8")).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        elif isinstance(node, ast.ImportFrom) and hasattr(module, "__path__"):
            found.update(_imported(module, node))
    return sorted(name for name in found if not name.startswith("_") and hasattr(module, name))


def _imported(package: ModuleType, node: ast.ImportFrom) -> Iterator[str]:
    """What a package takes from its own modules."""
    place = importlib.util.resolve_name("." * node.level + (node.module or ""), package.__name__)
    if place.partition(".")[0] == package.__name__.partition(".")[0]:
        for alias in node.names:
            yield from own_names(sys.modules[place]) if alias.name == "*" else [alias.asname or alias.name]


def _at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, with those inside of ``if`` and ``try``."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            for part in (node.body, *(handler.body for handler in getattr(node, "handlers", ())), node.orelse):
                yield from _at_import(part)


def record() -> dict[str, dict[str, Described]]:
    """``{module below deepspeed: {name: what it is}}`` of the package that is installed; of a module that cannot be
    imported here, ``{"!": why}``."""
    package = importlib.import_module("deepspeed")
    found: dict[str, dict[str, Described]] = {"": _module(package)}
    for info in pkgutil.walk_packages(package.__path__, "deepspeed.", onerror=lambda name: None):
        short = info.name.partition(".")[2]
        if any(part.startswith("_") for part in short.split(".")):
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                found[short] = _module(importlib.import_module(info.name))
            except BaseException as why:  # an optional library is missing, or a script runs and exits
                found[short] = {"!": {"why": f"{type(why).__name__}: {why}".splitlines()[0][:120]}}
    return dict(sorted(found.items()))


def _module(module: ModuleType) -> dict[str, Described]:
    return {name: described(getattr(module, name)) for name in own_names(module)}


# -- what an object is


def described(value: Any) -> Described:
    """What can be compared of an object: its kind, parameters, members or value."""
    if isinstance(value, ModuleType):
        return {"kind": "module"}
    if inspect.isclass(value):
        return {"kind": "class", **_parameters(value), "members": dict(_members(value))}
    if callable(value) and not isinstance(value, enum.Enum):
        return {"kind": "callable", **_parameters(value)}
    text = _plain(value)
    return {"kind": "value", **({} if text is None else {"value": text})}


def _plain(value: Any) -> str | None:
    """A value's text where it is the same in every process."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value).replace(str(Path.home()), "~")
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_plain(part) for part in (sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value)]
        return None if None in parts else f"{type(value).__name__}({', '.join(map(str, parts))})"
    if isinstance(value, dict):
        pairs = [(_plain(key), _plain(part)) for key, part in value.items()]
        return None if any(None in pair for pair in pairs) else "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    text = str(value)
    return text if text.startswith("torch.") else None


def _parameters(value: Any) -> Described:
    """``{"parameters": [[name, default], ...]}``, the default null where there is none and "?" where it has no text."""
    try:
        if inspect.isclass(value) and issubclass(value, enum.Enum):
            return {}  # it follows the version of Python
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return {}
    return {"parameters": [[_starred(p), _default(p)] for p in signature.parameters.values() if p.name != "self"]}


def _starred(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


def _default(parameter: inspect.Parameter) -> str | None:
    if parameter.default is inspect.Parameter.empty:
        return None
    text = _plain(parameter.default)
    return "?" if text is None else text


def _members(cls: type) -> Iterator[tuple[str, Described]]:
    """Public members that the package's own classes in the hierarchy have, and what their methods set on ``self``."""
    fields = getattr(cls, "model_fields", None)
    own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in ("deepspeed", "shardfold")]
    names = {name for base in own for name in (*vars(base), *_set_on_self(base))} | set(fields or ())
    for name in sorted(names):
        if name.startswith("_") or name == "model_config":
            continue
        if fields and name in fields:
            text = _plain(fields[name].get_default(call_default_factory=not fields[name].is_required()))
            yield name, {"kind": "field", **({} if text is None else {"value": text})}
            continue
        value = inspect.getattr_static(cls, name, None)
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if callable(value) and not inspect.isclass(value):
            yield name, {"kind": "method", **_parameters(value)}
        else:
            yield name, {"kind": "attribute"}


def _set_on_self(cls: type) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == "self"
    }  # fmt: skip


# -- what differs

#: ``{beginnings of modules: why nothing under them is here}``; of these only the number of names is recorded.
AREAS = {
    "inference module_inject model_implementations ops.transformer": "kernels and layers for inference",
    "autotuning": "the autotuner",
    "compression runtime.weight_quantizer ops.quantizer ops.fp_quantizer linear runtime.comm": "compression and "
    "quantized layers",
    "compile runtime.compiler": "DeepCompile: torch.compile is used as it is",
    "io nvme runtime.swap_tensor ops.aio ops.gds ops.pin_memory utils.pin_memory": "reading and writing NVMe, and "
    "pinned buffers",
    "runtime.superoffload runtime.zenflow ops.adam.zenflow": "optimizers on the host beside the device",
    "runtime.data_pipeline ops.random_ltd": "data efficiency: sort the data in a sampler",
    "runtime.domino runtime.tensor_parallel": "AutoTP's own layers and parser: a plan cuts modules as they are",
    "runtime.rollout runtime.hybrid_engine": "generation by kernels: gather and call generate()",
    "sequence runtime.sequence_parallel runtime.chunked_cross_entropy": "parts of Ulysses that its classes call, tiles "
    "and chunks of long sequences, FPDT and AutoSP",
    "moe": "how DeepSpeed sends tokens, its AutoEP and its groups: layers of MoE act, without",
    "ops.op_builder ops.compile ops.deepspeed4science ops.triton_ops ops.csrc": "compiled operators: builders answer, "
    "and nothing is built",
    "accelerator": "devices other than CUDA and the CPU, and names of their own streams",
    "datastates runtime.checkpoint_engine runtime.model_checkpointing runtime.state_dict_factory": "writers of "
    "checkpoints: there is one here",
    "checkpoint": "parts of DeepSpeed's own checkpoint files: checkpoints here have another form",
    "runtime.fp16.onebit runtime.zero.muon": "optimizers with compressed communication, and Muon's own modules",
    "runtime.pipe pipe": "pipelines: what trains in stages is here",
    "comm": "backends of communication: torch.distributed's are used, and collectives name their parameters",
    "runtime.zero.stage runtime.fp16.fused runtime.fp16.unfused runtime.bf16 runtime.base_optimizer": "buffers, "
    "partitions and hooks of DeepSpeed's own optimizers: the engine has its own",
    "runtime.zero": "how DeepSpeed partitions and gathers: the engine has its own way",
    "runtime.activation_checkpointing": "state that DeepSpeed's checkpointing keeps in its module",
    "ops": "state of compiled optimizers, and those on the host beside the device",
    "runtime.config runtime.constants runtime.precision_config profiling.constants": "texts of DeepSpeed's own "
    "messages, and sections of what is refused",
    "runtime.fp16.loss_scaler runtime.lr_schedules": "helpers of DeepSpeed's own scalers and schedules",
    "monitor profiling": "helpers of DeepSpeed's own monitors and profiler",
    "launcher env_report git_version_info compat": "helpers of DeepSpeed's own launcher and report",
    "utils.zero_to_fp32 utils.zero_to_torch utils.tensor_fragment utils.mixed_precision": "how DeepSpeed finds a "
    "part of a parameter in its flat buffers",
    "runtime.engine runtime.dataloader runtime.utils runtime utils": "helpers that DeepSpeed's engine calls",
}


def compare(recorded: dict[str, dict[str, Described]]) -> dict[str, dict[str, str]]:
    """``{module: {name: how it differs}}``, and ``{module: {"!": number of names}}`` of a module that is not here."""
    from shardfold.compat.deepspeed.absent import ABSENT

    found: dict[str, dict[str, str]] = {}
    for path, objects in recorded.items():
        try:
            module = importlib.import_module(f"shardfold.compat.deepspeed.{path}".rstrip("."))
        except ModuleNotFoundError:
            found[path] = {"!": str(len(objects))}
            continue
        lines: dict[str, str] = {}
        for name, wanted in objects.items():
            if f"{path}.{name}".lstrip(".") in ABSENT:
                lines[name] = "refused when used"
            elif not hasattr(module, name):
                lines[name] = "absent"
            else:
                value = getattr(module, name)
                lines |= dict(_differences(name, wanted, described(value), _made(value)))
        if lines:
            found[path] = lines
    return found


def _differences(name: str, wanted: Described, here: Described, instance: Any) -> Iterator[tuple[str, str]]:
    """``(name, how)`` of each aspect."""
    if not wanted:  # of an area of which names alone are recorded
        return
    if wanted["kind"] != here["kind"]:
        yield name, f"{wanted['kind']} there, {here['kind']} here"
    elif wanted["kind"] == "value":
        if wanted.get("value") != here.get("value"):
            yield name, "another value"
    else:
        told = _parameters_differ(wanted.get("parameters"), here.get("parameters"))
        if told:
            yield name, told
        missing = [each for each in wanted.get("members", {}) if each not in here.get("members", {})]
        missing = [each for each in missing if not hasattr(instance, each)]
        for each in missing if len(missing) <= FEW else ():
            yield f"{name}.{each}", "absent"
        if len(missing) > FEW:
            yield f"{name}.*", f"{len(missing)} members absent"


def _made(value: Any) -> Any:
    """One of a class that needs no arguments, which may have more attributes than the class."""
    if inspect.isclass(value) and value.__module__.startswith("shardfold"):
        with contextlib.suppress(Exception):
            return value()
    return value


def _parameters_differ(wanted: Any, here: Any) -> str:
    """Nothing where every parameter there is one here with the same default, in the same order."""
    if wanted is None or here is None or any(name.startswith("*") for name, _ in [*wanted, *here]):
        return ""
    if [name for name, _ in here][: len(wanted)] != [name for name, _ in wanted]:
        return "other parameters"
    return (
        "" if all(w[1] in (h[1], "?") or h[1] == "?" for w, h in zip(wanted, here, strict=False)) else "other defaults"
    )


def reason(path: str) -> str:
    """Why a module differs."""
    for beginnings, why in AREAS.items():
        if any(path.startswith(each) for each in beginnings.split()):
            return why
    return "the package itself"


def markdown(recorded: dict[str, dict[str, Described]]) -> str:
    """The page of the docs."""
    found = compare(recorded)
    names = sum(len(objects) for objects in recorded.values())
    out = [PAGE.format(modules=len(recorded), names=names)]
    for why in dict.fromkeys([*AREAS.values(), "the package itself"]):
        modules = {path: lines for path, lines in found.items() if reason(path) == why}
        if not modules:
            continue
        out += [f"## {why[0].upper()}{why[1:]}", "", "| module | what differs |", "|---|---|"]
        for path, lines in modules.items():
            out.append(f"| `{f'deepspeed.{path}'.rstrip('.')}` | {'; '.join(_said(lines))} |")
        out.append("")
    return "\n".join(out)


def _said(lines: dict[str, str]) -> Iterator[str]:
    if "!" in lines:
        yield f"absent ({lines['!']} name{'' if str(lines['!']) == '1' else 's'})"
        return
    for how in sorted(set(lines.values())):
        yield f"{how}: " + ", ".join(f"`{name}`" for name, what in lines.items() if what == how)


PAGE = """# DeepSpeed's names, one by one

Look a name up here if `import deepspeed` does not give it, or gives another than DeepSpeed 0.19.8 does. The tables
list every difference; a name that is not listed agrees.

`benchmarks/deepspeed_names.py` compares {modules} modules and {names} public names with [this
layer](import-deepspeed.md): the name, its kind, its value, its parameters in order with their defaults, and the
members of a class. Each heading says why the names under it differ. "Refused when used" means: the name can be
imported, and its use raises one sentence that says what to use in its place.
"""


def small(recorded: dict[str, dict[str, Described]]) -> dict[str, dict[str, Described]]:
    """Without what is not compared: of modules that are not here, of values and defaults that are long."""
    from shardfold.compat.finder import PACKAGE

    kept: dict[str, dict[str, Described]] = {}
    for path, objects in recorded.items():
        here = importlib.util.find_spec(f"{PACKAGE}.{path}".rstrip(".")) if _parents_are_here(PACKAGE, path) else None
        kept[path] = objects if here else {name: {} for name in objects}
    return kept


def _parents_are_here(package: str, path: str) -> bool:
    parts = path.split(".")
    return all(importlib.util.find_spec(".".join([package, *parts[:i]])) for i in range(1, len(parts)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=("record", "shorten", "compare"))
    what = parser.parse_args().what
    if what == "compare":
        print(markdown(json.loads(RECORD.read_text(encoding="utf-8"))), end="")
    else:
        kept = record() if what == "record" else small(json.loads(RECORD.read_text(encoding="utf-8")))
        lines = (f"{json.dumps(name)}: {json.dumps(objects)}" for name, objects in kept.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
