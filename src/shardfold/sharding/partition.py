"""Cuts a model into units: which parameters move together.

Units are found in this order; the first that applies wins.

1. ``units=`` names modules, by path patterns (``"encoder.layers.*"``) or classes.
2. Classes in a ``_no_split_modules`` of the model or of a part of it (transformers models have one).
3. Repeated blocks: children of one ``ModuleList``, ``Sequential`` or ``ModuleDict`` that share their class with a
   sibling. The outermost win, so a block's own lists stay inside it.

Then every ``Embedding`` and ``Linear`` outside of these that holds at least as much as 1/16 of all parameters is a
unit of its own (an embedding, a head), and the rest is the root, which is held through a whole pass. A parameter
that several units share belongs to the root too.

Where the table lets small parameters rest whole, those of all units are a unit of their own beside the root; a unit
that has no others is whole itself. Parameters of experts are not small, nor those that several stages of a pipeline
have.

Small blocks that were found, and follow each other in a list, are one unit together (see ``_buckets``).

Modules of experts, parameters of which are distinct on an axis on which ranks read other things, are units of their
own inside of these: their gradients are summed over other ranks, and their table divides them over other ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from math import lcm, prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardfold.errors import LayoutError, ModelError, did_you_mean
from shardfold.plan.axes import Axes, Mesh
from shardfold.plan.format import dtype_name
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import ITEMSIZE, Sizes
from shardfold.plan.offload import with_staying
from shardfold.plan.placement import ALIGN_BYTES, SegmentSpec, UnitSpec, pack, rest_itemsize
from shardfold.plan.rules import Rules
from shardfold.sharding._buckets import LEAST, LEAST_WHOLE, FoundBlock, buckets, joint_name
from shardfold.sharding._coded import coded_parameters
from shardfold.sharding.freed import FreedParameter
from shardfold.sharding.slices import Slice, places_of, slices_on

__all__ = ["ROOT", "Cut", "cut", "main_dtypes"]

ROOT, SMALL = "(root)", "(small)"
WHOLE = Slice((), None)
"""What is not marked."""


@dataclass(frozen=True)
class FoundUnit:
    """One unit to be: its modules, the unit whose modules these are inside of, if any, and its parameters, as they are
    found; of one that is made of several, their paths."""

    name: str
    modules: list[nn.Module]
    inside: str = ""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """One unit to be, laid out: ``by_segment`` has its parameters in the order of their slots."""

    name: str
    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter]
    spec: UnitSpec
    by_segment: list[list[nn.Parameter]]


def cut(
    model: nn.Module,
    units: Sequence[str | type[nn.Module]] | None,
    groups: dict[int, int],
    rules: Rules,
    mesh: Sizes,
    keeps: Callable[[nn.Parameter, int], bool] | None = None,
    align: int = 1,
    coords: Mapping[str, int] | None = None,
    bucket: int = 0,
    known: Mapping[int, str] | None = None,
) -> list[Cut]:
    """The units of a model in definition order, with their places laid out.

    Args:
        model: the whole model.
        units: paths or classes of the modules that are units; None: found as the module's docstring says.
        groups: hyper-parameter group of each parameter that has states, by ``id``; others are frozen.
        rules: of precision. Of the parameters that follow one, those of the main dtype take its dtypes; others keep
            their own (see :func:`main_dtypes`).
        mesh: axis sizes.
        keeps: whether a parameter, which follows that rule, keeps its own dtype; None: if it has another than the
            main one.
        align: a power of 2; no rank boundary cuts so many elements of a trainable parameter, counted from its start.
        coords: this rank's place on each axis; None: the first.
        bucket: bytes up to which blocks that were found, and not named, are put together (see ``_buckets``); 0: none
            are. Of a pipeline none are: a unit is in one stage.
        known: what parameters rest as that are cut anew, by ``id``: a format of codes, or nothing.

    Raises:
        ConfigError: a parameter is no longer of a shape in which its slice lies.
        ModelError: a pattern matches nothing, units nest, a parameter has a dtype that cannot be split or no shape
            yet, elements share memory, or a tied parameter follows several rules.
    """
    _check_memory(model)
    slices = slices_on(model, Mesh.of(mesh), coords or dict.fromkeys(mesh, 0))
    chosen = _named(model, units) if units is not None else _found(model, slices, Mesh.of(mesh).reading)
    drafts = _with_experts(model, [FoundUnit(name, [module]) for name, module in chosen], slices, Mesh.of(mesh))
    root, small = FoundUnit(ROOT, [model]), FoundUnit(SMALL, [])
    _assign(model, drafts, root)
    number = rule_numbers(model, rules)
    if bucket and units is None and not Mesh.of(mesh).stages:
        table = rules.layouts[-1]
        whole = Mesh.of(mesh).size > 1 and not table.comes_and_goes and not table.buffered
        least = LEAST_WHOLE if whole else LEAST
        drafts = _put_together(model, drafts, groups, rules, number, slices, bucket, least)
    whole = {SMALL}
    if rules.small:
        whole |= _take_small((root, *drafts), small, rules.small, slices, Mesh.of(mesh).reading)
    found = [c for c in (root, small, *drafts) if c.parameters]
    main = main_dtypes(model, rules)
    keeps = keeps or (lambda p, rule: p.dtype != main.get(rule))
    base = rules.layouts[-1].base
    coded = dict.fromkeys(coded_parameters(model, base, groups), base.format if base is not None else "")
    coded.update(known or {})
    laid_out = [_lay_out(c, c.name in whole, groups, rules, number, mesh, keeps, align, slices, coded) for c in found]
    specs = [spec for spec, _ in laid_out]
    if rules.near:
        specs = _let_stay(specs, rules)
    return [
        Cut(c.name, c.modules, c.parameters, spec, by_segment)
        for c, spec, (_, by_segment) in zip(found, specs, laid_out, strict=True)
    ]


def _put_together(
    model: nn.Module,
    drafts: list[FoundUnit],
    groups: dict[int, int],
    rules: Rules,
    number: dict[int, int],
    slices: Mapping[int, Slice],
    most: int,
    least: int,
) -> list[FoundUnit]:
    """The same with small blocks that follow each other in one (see ``_buckets``). Units that have others inside of
    them, and those, stay."""
    inside = {c.inside for c in drafts}

    def block(c: FoundUnit) -> FoundBlock:
        kinds: set[Any] = set()
        size = 0
        for p in c.parameters.values():
            own = slices.get(id(p), WHOLE)
            kinds.add((p.dtype, groups.get(id(p)), number[id(p)], own.axes))
            size += _numel(p, own) * ITEMSIZE[rules.table(number[id(p)], own.axes).buffer]
        return FoundBlock(c.name, size, frozenset(kinds))

    by_name = {c.name: c for c in drafts}
    blocks = [block(c) for c in drafts if not c.inside and c.name not in inside and c.parameters]
    for paths in buckets(model, blocks, most, least):
        members = [by_name.pop(path) for path in paths]
        joint = FoundUnit(joint_name(paths), [module for c in members for module in c.modules], paths=tuple(paths))
        for c in members:
            joint.parameters.update(c.parameters)
        by_name[joint.name] = joint
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    return sorted(by_name.values(), key=lambda c: order[c.paths[0] if c.paths else c.name])


def _take_small(
    drafts: Iterable[FoundUnit], small: FoundUnit, most: int, slices: Mapping[int, Slice], reading: Axes
) -> set[str]:
    """Moves parameters of at most so many elements to the unit ``small``; those that have no others are whole
    themselves: the names of these."""

    def is_small(parameter: nn.Parameter) -> bool:
        own = slices.get(id(parameter), WHOLE)
        apart = any(axis in reading for axis in own.axes) or places_of(parameter)
        return not apart and _numel(parameter, own) <= most

    whole: set[str] = set()
    for c in drafts:
        taken = [name for name, p in c.parameters.items() if is_small(p)]
        if c.name != ROOT and len(taken) == len(c.parameters):
            whole.add(c.name)
        else:
            small.parameters.update({name: c.parameters.pop(name) for name in taken})
    return whole


def _numel(parameter: nn.Parameter, own: Slice) -> int:
    """Of the whole: ranks may have slices of other sizes, and have to cut alike."""
    return parameter.numel() if own.box is None else prod(own.box[0])


def _let_stay(specs: list[UnitSpec], rules: Rules) -> list[UnitSpec]:
    """Those whose optimizer's states stay on the device have the tables that say so."""
    apart = {segment.distinct for spec in specs for segment in spec.segments}
    near = {
        rules.table(i, axes, whole=whole): rules.table(i, axes, near=True, whole=whole)
        for i in range(len(rules.near))
        for axes in apart
        for whole in ((False, True) if rules.small else (False,))
    }
    return with_staying(specs, rules.layouts[-1], lambda table: near[table])


def _check_memory(model: nn.Module) -> None:
    """Every parameter must have a shape, and every element its own memory: flats would silently untie them."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name!r} has no shape yet, because its lazy module has not run: run the model once before making the "
                "engine."
            )
    ranges: list[tuple[str, int, int, str]] = []  # device, first byte, last byte + 1, name
    for name, p in model.named_parameters():
        if p.is_meta or isinstance(p, FreedParameter) or not p.numel():
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise ModelError(
                f"{name!r} is an expanded tensor, so its elements share memory and cannot be updated one by one: give "
                "it memory of its own with nn.Parameter(tensor.clone())."
            )
        extent = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
        if extent == p.numel():  # of others, elements may lie between those of another parameter
            ranges.append((str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes, name))
    for (device, _, end, name), (other_device, start, _, other) in pairwise(sorted(ranges)):
        if device == other_device and start < end:
            raise ModelError(
                f"{name!r} and {other!r} share memory but are two parameters: to tie them assign the parameter itself "
                "(head.weight = embedding.weight), else clone one."
            )


def _named(model: nn.Module, units: Sequence[str | type[nn.Module]]) -> list[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for wanted in units:
        if isinstance(wanted, str):
            hits = {name: m for name, m in modules.items() if name and fnmatchcase(name, wanted)}
        else:
            hits = {name: m for name, m in modules.items() if isinstance(m, wanted)}
        if not hits:
            text = wanted if isinstance(wanted, str) else wanted.__name__
            raise ModelError(
                f"Init(units=...) names {text!r}, which matches no module.{did_you_mean(text, list(modules)[1:12])}"
            )
        depth = min(name.count(".") for name in hits) if isinstance(wanted, str) else None
        chosen.update({name: m for name, m in hits.items() if depth is None or name.count(".") == depth})
    ordered = [(name, module) for name, module in modules.items() if name in chosen]
    for outer, _ in ordered:
        for inner, _ in ordered:
            if inner.startswith(outer + "."):
                raise ModelError(
                    f"Init(units=...) names {inner!r} inside {outer!r}: units cannot nest; name only one of them."
                )
    return ordered


def _found(model: nn.Module, slices: Mapping[int, Slice], reading: Axes) -> list[tuple[str, nn.Module]]:
    whole = {name for module in model.modules() for name in _as_names(getattr(module, "_no_split_modules", None))}
    chosen: list[tuple[str, nn.Module]] = []
    taken: set[int] = set()

    def visit(prefix: str, module: nn.Module) -> None:
        repeated: Counter[type] = Counter()
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            repeated.update(type(child) for child in module.children())
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if id(child) in taken:
                continue
            has_parameters = next(child.parameters(), None) is not None
            container = isinstance(child, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
            block = type(child).__name__ in whole if whole else repeated[type(child)] > 1 and not _is_plain_list(child)
            if has_parameters and block:
                chosen.append((path, child))
                taken.add(id(child))
            elif has_parameters or container:
                visit(path, child)

    visit("", model)
    chosen.extend(_large_leaves(model, chosen, slices, reading))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(chosen, key=lambda pair: order[pair[0]])


def _with_experts(
    model: nn.Module, drafts: list[FoundUnit], slices: Mapping[int, Slice], mesh: Mesh
) -> list[FoundUnit]:
    """Behind the units that modules of experts are inside of, these as units, in the order of the model."""
    known = {id(module) for c in drafts for module in c.modules}
    found: list[FoundUnit] = []
    for path, module in model.named_modules():
        own = (slices.get(id(p), WHOLE).axes for p in module._parameters.values() if p is not None)
        if path and id(module) not in known and any(axis in mesh.reading for axes in own for axis in axes):
            outer = next((c.name for c in drafts if path.startswith(f"{c.name}.")), "")
            found.append(FoundUnit(path, [module], outer))
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted([*drafts, *found], key=lambda c: order[c.name]) if found else drafts


def _as_names(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else [v for v in (value or ()) if isinstance(v, str)]


def _is_plain_list(module: nn.Module) -> bool:
    """A list has no forward of its own, so no event says when it runs."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _large_leaves(
    model: nn.Module, chosen: list[tuple[str, nn.Module]], slices: Mapping[int, Slice], reading: Axes
) -> list[tuple[str, nn.Module]]:
    """Those outside of the chosen; and, of any size, what ranks that read other things have other parameters of, which
    are summed over other ranks than the rest."""

    def numel(p: nn.Parameter) -> int:
        return _numel(p, slices.get(id(p), WHOLE))

    inside = {id(m) for _, unit in chosen for m in unit.modules()}
    total = sum(map(numel, model.parameters()))
    leaves = []
    for name, module in model.named_modules():
        plain = type(module) in (nn.Embedding, nn.Linear)  # a subclass may be used in another way than by its forward
        size = sum(map(numel, module.parameters(recurse=False)))
        own = [slices.get(id(p), WHOLE).axes for p in module._parameters.values() if p is not None]
        apart = any(axis in reading for axes in own for axis in axes)
        if name and id(module) not in inside and (apart or (plain and size * 16 >= total)):
            leaves.append((name, module))
    return leaves


def _assign(model: nn.Module, drafts: list[FoundUnit], root: FoundUnit) -> None:
    """Gives each parameter object to the one unit whose modules use it, or to the root if several do."""
    owner: dict[int, FoundUnit] = {}
    inner = {id(m): c for c in drafts if c.inside for module in c.modules for m in module.modules()}
    for c in drafts:
        for module in c.modules:
            for m in module.modules():
                if inner.get(id(m), c).inside == c.name:
                    continue
                owner[id(m)] = c if owner.get(id(m), c) is c else root  # a module that two units share
    users: dict[int, list[FoundUnit]] = defaultdict(list)
    names: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            names.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
            c = owner.get(id(module), root)
            if c not in users[id(parameter)]:
                users[id(parameter)].append(c)
    for key, (name, parameter) in names.items():
        home = users[key][0] if len(users[key]) == 1 else root
        home.parameters[name] = parameter


def rule_numbers(model: nn.Module, rules: Rules) -> dict[int, int]:
    """The number of the rule that each parameter follows, by ``id``.

    Raises:
        ModelError: a tied parameter is in parts of several policies.
    """
    of_module = rules.assign(model)
    found: dict[int, tuple[int, str]] = {}
    for path, module in model.named_modules():
        rule = of_module[id(module)]
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            first, other = found.setdefault(id(parameter), (rule, full))
            if rules.precisions[first] != rules.precisions[rule]:
                raise ModelError(
                    f"{other!r} and {full!r} are one parameter, but precision= has different policies for them: give "
                    "both modules the same."
                )
    return {key: rule for key, (rule, _) in found.items()}


def main_dtypes(model: nn.Module, rules: Rules) -> dict[int, torch.dtype]:
    """The floating dtype that each rule replaces, by its number: the one that most elements have that follow it.

    A parameter of another dtype was given it on purpose, and fp64 is never given up: these keep their own dtype in all
    states and on the wire, as in plain PyTorch. Rules that apply to nothing have none.
    """
    elements: defaultdict[int, Counter[torch.dtype]] = defaultdict(Counter)
    number = rule_numbers(model, rules)
    for parameter in model.parameters():
        if not is_lazy(parameter) and parameter.is_floating_point():
            elements[number[id(parameter)]][parameter.dtype] += parameter.numel()
    main = {rule: max(of, key=lambda dtype: (of[dtype], dtype.itemsize)) for rule, of in elements.items()}
    return {rule: dtype for rule, dtype in main.items() if dtype != torch.float64}


def _lay_out(
    c: FoundUnit,
    whole: bool,
    groups: dict[int, int],
    rules: Rules,
    number: dict[int, int],
    mesh: Sizes,
    own_dtype: Callable[[nn.Parameter, int], bool],
    align: int,
    slices: Mapping[int, Slice],
    coded: Mapping[int, str],
) -> tuple[UnitSpec, list[list[nn.Parameter]]]:
    """Sorts the parameters into segments by (dtype, own, trainable, group, policy, distinct axes, codes) and gives each
    its slot. ``whole``: they are small, and rest so. ``coded``: the formats of what rests as codes, by ``id``.

    Raises:
        ModelError: a parameter has a dtype that cannot be split.
        LayoutError: gradients of one unit would be summed over different axes.
    """
    mesh = Mesh.of(mesh)
    policy = [rules.layouts.index(layout) for layout in rules.layouts]  # rules may say the same
    segments: dict[tuple[str, bool, bool, int, int, Axes, Any, str], dict[str, nn.Parameter]] = defaultdict(dict)
    for name, parameter in c.parameters.items():
        own = dtype_name(parameter.dtype)
        if own is None or parameter.is_complex():
            raise ModelError(
                f"parameter {name!r} has dtype {parameter.dtype}, which cannot be split; known: {', '.join(ITEMSIZE)}."
            )
        rule = number[id(parameter)]
        precision = rules.precisions[rule]
        codes = coded.get(id(parameter), "")
        keeps = not codes and own_dtype(parameter, rule) and any(role != own for role in precision.dtypes.values())
        trainable = id(parameter) in groups
        group = groups.get(id(parameter), 0)
        shared = (name, *places) if (places := places_of(parameter)) else ()  # each in a segment of its own
        of = policy[-1 if keeps else rule], slices.get(id(parameter), WHOLE).axes, shared
        key = (own if keeps else precision.compute, keeps, trainable, group, *of, codes)
        segments[key][name] = parameter
    specs: list[SegmentSpec] = []
    for (dtype, keeps, trainable, group, rule, apart, shared, codes), members in segments.items():
        layout = rules.table(rule, apart, whole=whole)
        if layout.reduce.ordered and keeps and trainable and ITEMSIZE[dtype] < 4:
            raise ModelError(
                f"parameter {next(iter(members))!r} has dtype {dtype}, in which sums of gradients are rounded by how "
                "many ranks there are, and Runtime(exact=True) is set: make it fp32, or leave exact out."
            )
        least = ALIGN_BYTES // (ITEMSIZE[dtype] if keeps else min(ITEMSIZE[dtype], rest_itemsize(layout)))
        boxes = {name: box for name, p in members.items() if (box := slices.get(id(p), WHOLE).box) is not None}
        parts = mesh.parts(mesh.summed(apart))
        parts *= mesh.groups  # of an outer step each group takes a part of a shard
        names = [] if keeps else [layout.gather.format, layout.reduce.format]
        if not keeps and layout.outer is not None and layout.outer.format is not None:
            names.append(layout.outer.format)
        if layout.signs is not None:
            names.append(layout.signs.back)
        formats = (FORMATS[name] for name in ([codes] if codes else names))
        step = lcm(max(1, least, align if trainable else 1), *(form.block for form in formats))
        slots, length = pack({name: p.shape for name, p in members.items()}, parts, step, boxes)
        table = layout if layout != rules.layouts[-1] else None
        specs.append(SegmentSpec(slots, length, dtype, trainable, group, keeps, table, apart, tuple(shared[1:]), codes))
    summed = {(rules.table(rule, apart, whole=whole).axes, mesh.summed(apart)) for *_, rule, apart, _, _ in segments}
    if len(summed) > 1:
        raise LayoutError(
            f"gradients of {c.name!r} would be summed over different axes, because only some of its parameters are "
            "distinct on one or follow another layout: choose Init(units=...) so that those are a unit of their own."
        )
    unit = UnitSpec(c.name, tuple(specs), root=c.name in (ROOT, SMALL), inside=c.inside, blocks=c.paths)
    return unit, [list(members.values()) for members in segments.values()]
