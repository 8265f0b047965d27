"""Which layers of a model can be cut, found by following what they give through a run of it without memory.

Each linear layer that is given whole tensors is taken for a column: each rank would have a part of what it gives. The
parts are followed through the operations behind it (``rules``). Where they come to another linear layer along its
inputs, that one is a row, and behind it tensors are whole again. Where an operation cannot be followed, the columns
that it began at stay whole, and it is tried again. What is left is run once more with the lengths that one rank would
have; every operation has to be the same one, on the part of what it was on. Sizes that the model's own code says of the
whole (``x.view(batch, time, self.heads, -1)``) are found there, and are changed when it runs (``following``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import nn

from shardfold.parallel.following import Expected
from shardfold.parallel.model_trace import Leaf, Step, TracedRun, leaf_of, record
from shardfold.parallel.numbers import localized, numbers_in, replaced
from shardfold.parallel.sharding_rules import ALIKE, RULES, Follower, TensorPart, UnfollowedOperation, follow

__all__ = ["CuttableLayers", "infer"]

RESHAPES = {
    f"aten.{name}" for name in ("view", "_unsafe_view", "expand", "split", "split_with_sizes", "_reshape_alias")
}
"""Operations whose sizes say nothing that the shapes of their outputs do not."""
SAME_ORDER = {"aten.view", "aten._unsafe_view", "aten._reshape_alias"}


@dataclass
class CuttableLayers:
    """What can be cut.

    Attributes:
        words: by path, with how many blocks.
        followed: modules in which parts are made and used up, with the calls in them that work on parts.
        left: linear layers that stay whole, and why.
    """

    words: dict[str, tuple[str, int]] = field(default_factory=dict)
    followed: dict[str, tuple[Expected, ...]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def infer(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: int, *, inner: bool
) -> CuttableLayers:
    """
    Args:
        args, kwargs: of its forward, of which shapes and dtypes are read.
        ranks: along the axis.
        inner: it is a part of a model, so gradients go back into what it is given.

    Raises:
        Exception: whatever the module raises on such arguments.
    """
    run = record(module, args, kwargs, differentiable=inner)
    search = _Search(module, run, ranks)
    while True:
        try:
            found = search.attempt(args, kwargs, inner)
            break
        except _Again:
            continue
    if not inner:
        words = _words_of(module, run, found, ranks)
        if words and not _read_lengths(module, run, args, kwargs, words, ranks):
            found.words.update(words)
    for path in found.words:
        found.left.pop(path, None)
    return found


class _Again(Exception):
    """Another layer stays whole, or is taken for something else."""


class _Search:
    """What is supposed of each layer so far."""

    def __init__(self, module: nn.Module, run: TracedRun, ranks: int) -> None:
        self._module, self._run, self._ranks = module, run, ranks
        self._leaves = {path: leaf for path, each in module.named_modules() if (leaf := leaf_of(each)) is not None}
        self._left = _tied_or_read(module, run, self._leaves)
        self._blocks: dict[str, int] = {}
        self._vectors: dict[str, bool] = {}  # embeddings whose vectors are divided, while that is supposed

    def attempt(self, args: Sequence[Any], kwargs: Mapping[str, Any], inner: bool) -> CuttableLayers:
        at = self._at = Follower(self._run, self._ranks, {}, {})
        self._roles: dict[str, str] = {}
        self._groups: list[int] = []
        self._began: list[str] = []
        self._origins: dict[int, str] = {}
        try:
            for step in self._run.steps:
                self._join(at.parts[value].group for value in step.ins if value in at.parts)
                if step.leaf:
                    self._leaf(step)
                else:
                    follow(step, at)
                    self._follow_origin(step)
            self._check_ends()
            found = CuttableLayers(self._words(), {}, dict(self._left))
            if self._roles:
                self._follow_calls(found, self._check_parts(args, kwargs, inner))
        except UnfollowedOperation as refused:
            self._blame(refused)
            raise _Again from refused
        called = {step.op for step in self._run.steps if step.leaf}
        for path in self._leaves:
            if path not in found.words:
                found.left.setdefault(path, "no row takes what it gives" if path in called else "it is not called")
        return found

    # -- one run of suppositions

    def _join(self, groups: Iterable[int]) -> None:
        roots = {self._root(group) for group in groups}
        for root in roots:
            self._groups[root] = min(roots)

    def _root(self, group: int) -> int:
        while self._groups[group] != group:
            group = self._groups[group]
        return group

    def _leaf(self, step: Step) -> None:
        path, value, out = step.op, step.ins[0], step.outs[0]
        leaf, part = self._leaves[path], self._at.parts.get(value)
        role = "row" if part is not None else "column"
        if part is not None and (not leaf.inputs or path in self._left):
            raise UnfollowedOperation(f"what it gives goes into {path!r}, which stays whole", step.ins)
        if part is None and not leaf.inputs:
            self._origins[out] = path
        if part is None and (path in self._left or (not leaf.inputs and not self._vectors.get(path))):
            return
        if self._roles.setdefault(path, role) != role:
            self._leave(path, "it is given parts in one place and whole tensors in another")
        if part is not None:
            if part.dim != len(self._at.shape(value)) - 1 or part.blocks != 1 or leaf.inputs % self._ranks:
                raise UnfollowedOperation(f"{path!r} gets parts that are divided along another dimension", step.ins)
            return
        blocks = self._blocks.get(path, 1)
        if leaf.outputs % (blocks * self._ranks):
            each = f"{leaf.outputs}" if blocks == 1 else f"{leaf.outputs} / {blocks}"
            self._leave(path, f"its {each} outputs cannot be divided over {self._ranks} ranks")
        self._groups.append(len(self._groups))
        self._began.append(path)
        self._at.parts[out] = TensorPart(len(self._at.shape(out)) - 1, blocks, self._groups[-1])

    def _follow_origin(self, step: Step) -> None:
        if step.pointwise or step.op in ALIKE or step.op in RULES:
            origin = next((self._origins[value] for value in step.ins if value in self._origins), None)
            if origin is not None:
                self._origins.update(dict.fromkeys(step.outs, origin))

    def _check_ends(self) -> None:
        """
        Raises:
            UnfollowedOperation: parts leave the module, no row takes them, or parameters have gradients of two kinds.
        """
        at = self._at
        for value in self._run.results:
            if value in at.parts:
                raise UnfollowedOperation("what it gives leaves the model", [value])
        taken = {
            self._root(at.parts[step.ins[0]].group) for step in self._run.steps if step.leaf and step.ins[0] in at.parts
        }
        useful = {path for number, path in enumerate(self._began) if self._root(number) in taken}
        for value, part in at.parts.items():
            if self._began[part.group] not in useful:
                raise UnfollowedOperation("no row takes what it gives", [value])
        for step in self._run.steps:
            if not step.leaf and not at.given(step):
                for value in step.ins:
                    name = self._run.parameters.get(value)
                    if name in at.partial:
                        raise UnfollowedOperation(f"{name!r} works on parts and on whole tensors", at.partial[name])
        for name, values in at.partial.items():
            owner = self._module.get_submodule(name.rpartition(".")[0])
            for own, parameter in owner._parameters.items():
                full = ".".join(filter(None, (name.rpartition(".")[0], own)))
                if parameter is not None and full not in at.partial:
                    raise UnfollowedOperation(
                        f"{name!r} works on parts, and {full!r} of the same module does not", values
                    )

    def _words(self) -> dict[str, tuple[str, int]]:
        words = {path: (role, self._blocks.get(path, 1)) for path, role in self._roles.items()}
        for name in self._at.partial:
            words[name.rpartition(".")[0]] = "partial", 1
        return words

    # -- what was wrong

    def _leave(self, path: str, why: str) -> None:
        self._left[path] = why
        self._vectors.pop(path, None)
        raise _Again

    def _blame(self, refused: UnfollowedOperation) -> None:
        """Supposes something else of what the refused tensors came from."""
        at = self._at
        wanted = self._origins.get(refused.wanted) if refused.wanted is not None else None
        if wanted is not None and wanted not in self._vectors and wanted not in self._left:
            self._vectors[wanted] = True
            return
        groups = {self._root(at.parts[value].group) for value in refused.values if value in at.parts}
        begun = {path for number, path in enumerate(self._began) if not groups or self._root(number) in groups}
        if refused.blocks > 1 and len(begun) == 1 and not begun & self._blocks.keys():
            self._blocks[begun.pop()] = refused.blocks
            return
        if not begun:
            raise AssertionError(f"nothing is a part, and {refused.why}")
        for path in begun:
            self._left[path] = refused.why
            self._vectors.pop(path, None)

    # -- the run with one rank's lengths

    def _check_parts(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], inner: bool
    ) -> dict[int, tuple[tuple[int, int, int], ...]]:
        """
        Returns:
            By the number of a call, of numbers among its arguments: which, what it is, and what it has to be.

        Raises:
            UnfollowedOperation: it does something else than its part.
        """
        at, recipes = self._at, dict[int, tuple[tuple[int, int, int], ...]]()
        last: list[int] = []

        def rewrite(number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            call = self._run.calls[number] if number < len(self._run.calls) else None
            if call is None or call.name != name:  # it gives no tensor, or is found to be another one below
                return args, kwargs
            if not any(value in at.parts for value in (*call.ins, *call.outs)):
                return args, kwargs
            last[:] = (*call.ins, *call.outs)
            given, whole, recipe = numbers_in((args, kwargs)), numbers_in((call.args, call.kwargs)), []
            for place, local in localized(call, at).items():
                if len(given) != len(whole) or given[place] not in (local, whole[place]):
                    raise UnfollowedOperation(f"on parts the model calls {name} with other sizes", last)
                if given[place] != local:
                    recipe.append((place, given[place], local))
            recipes[number] = tuple(recipe)
            return replaced((args, kwargs), {place: local for place, _, local in recipe}) if recipe else (args, kwargs)

        leaves = {path: self._length(path, role) for path, role in self._roles.items()}
        try:
            local = record(self._module, args, kwargs, differentiable=inner, leaves=leaves, rewrite=rewrite)
        except UnfollowedOperation:
            raise
        except Exception as error:
            raise UnfollowedOperation(f"on parts the model raises: {str(error).splitlines()[0]}", last) from error
        self._compare(local)
        return recipes

    def _length(self, path: str, role: str) -> Leaf:
        leaf = self._leaves[path]
        if role == "row":
            return Leaf(leaf.outputs, leaf.inputs // self._ranks)
        return Leaf(leaf.outputs // self._ranks, leaf.inputs)

    def _compare(self, local: TracedRun) -> None:
        """
        Raises:
            UnfollowedOperation: an operation is not the same on its part.
        """
        at = self._at
        names = [[call.name for call in run.calls] for run in (self._run, local)]
        pairs = list(zip_longest(_ordered(self._run), _ordered(local)))
        if names[0] != names[1]:
            raise UnfollowedOperation("on parts the model does other operations")
        for ours, theirs in pairs:
            if ours is None or theirs is None:
                raise UnfollowedOperation("on parts the model does other operations")
            (step, op, numbers), (mine, *same) = ours, theirs
            values = (*step.ins, *step.outs)
            if [op, numbers] != same or step.stack != mine.stack:
                raise UnfollowedOperation("on parts the model does other operations", values)
            for value, its in zip(step.outs, mine.outs, strict=True):
                part, shape = at.parts.get(value), self._run.shapes[value]
                if local.shapes[its] != (part.shape(shape, self._ranks) if part else shape):
                    raise UnfollowedOperation(f"on parts {op} gives other shapes", values)
            if not self._same_numbers(step, mine):
                raise UnfollowedOperation(f"on parts {op} gets other numbers", values)

    def _same_numbers(self, ours: Step, theirs: Step) -> bool:
        first, second = list(_plain((ours.args, ours.kwargs))), list(_plain((theirs.args, theirs.kwargs)))
        part = self._at.parts.get(ours.ins[0]) if ours.ins else None
        if ours.op in RESHAPES:
            return True
        if ours.op == "aten.slice" and part is not None and len(first) > 1 and first[0] == second[0]:
            length = self._run.shapes[ours.ins[0]][part.dim]
            if first[0] % len(self._run.shapes[ours.ins[0]]) == part.dim:
                begin = [_index(each[1], size) for each, size in ((first, length), (second, length // self._ranks))]
                return begin[0] == begin[1] * self._ranks
        return first == second

    def _follow_calls(self, found: CuttableLayers, recipes: Mapping[int, tuple[tuple[int, int, int], ...]]) -> None:
        """Finds the modules in which parts are made and used up, and the calls on parts in each.

        Raises:
            UnfollowedOperation: a module does other calls when it is called again.
        """
        at, paths = self._at, set[str]()
        by_group: dict[int, list[tuple[tuple[str, int], ...]]] = {}
        for step in self._run.steps:
            for value in (*step.ins, *step.outs):
                if value in at.parts:
                    by_group.setdefault(self._root(at.parts[value].group), []).append(step.stack)
        for stacks in by_group.values():
            shared = _common(stacks)
            paths.add(shared[-1][0] if shared else "")
        paths = {path for path in paths if not any(_inside(path, other) for other in paths if other != path)}
        for path in paths:
            by_time: dict[int, list[Expected]] = {}
            for number, call in enumerate(self._run.calls):
                time = next((time for name, time in call.stack if name == path), None)
                if time is not None and number in recipes:
                    by_time.setdefault(time, []).append(Expected(call.name, recipes[number]))
            first, *others = by_time.values() or [[]]
            if any(other != first for other in others):
                values = [value for value in at.parts]
                raise UnfollowedOperation(f"{path!r} does other operations on parts when it is called again", values)
            found.followed[path] = tuple(first)


def _ordered(run: TracedRun) -> Iterator[tuple[Step, str, list[int]]]:
    """Steps, what they do and with which tensors, in a form in which it makes no difference whether a reshape copies:
    of fewer heads it may not have to. Where something is written to, it does make one."""
    writes = any(step.op.endswith("_") for step in run.steps)
    known: dict[int, int] = {}
    for step in run.steps:
        if step.op == "aten.clone" and not writes:
            known[step.outs[0]] = known.get(step.ins[0], step.ins[0])
    order: dict[int, int] = {}
    for step in run.steps:
        if step.op != "aten.clone" or writes:
            values = [known.get(value, value) for value in (*step.ins, *step.outs)]
            op = "aten.view" if step.op in SAME_ORDER else step.op
            yield step, op, [order.setdefault(value, len(order)) for value in values]


def _tied_or_read(module: nn.Module, run: TracedRun, leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Leaves whose parameters are used in other places too."""
    owners: dict[int, list[str]] = {}
    for path, each in module.named_modules():
        for parameter in each._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(path)
    read = {name.rpartition(".")[0] for name in run.parameters.values()}
    left: dict[str, str] = {}
    for path in leaves:
        own = module.get_submodule(path)._parameters.values()
        tied = {other for p in own if p is not None for other in owners[id(p)]} - {path}
        if tied:
            left[path] = f"it shares a parameter with {min(tied)!r}"
        elif read & {path, *tied}:
            left[path] = "its parameters are also read outside of it"
    return left


def _words_of(module: nn.Module, run: TracedRun, found: CuttableLayers, ranks: int) -> dict[str, tuple[str, int]]:
    """Embeddings that stayed whole and have a head, with what is tied to them: a linear layer with as many outputs as
    they have words, which is the last one or has their weight."""
    read = {name.rpartition(".")[0] for name in run.parameters.values()}
    called = [step.op for step in run.steps if step.leaf]
    free = {
        path: each
        for path, each in module.named_modules()
        if path in called and path not in found.words and path not in read and leaf_of(each) is not None
    }
    heads = {path: each.weight for path, each in free.items() if isinstance(each, nn.Linear)}
    chosen: dict[str, tuple[str, int]] = {}
    for path, each in free.items():
        rows = len(each.weight) if isinstance(each, nn.Embedding) else 0
        own = each.weight
        mine = [
            head
            for head, weight in heads.items()
            if len(weight) == rows and rows >= ranks and (weight is own or head == called[-1])
        ]
        tied = [name for name, other in module.named_modules() if any(p is own for p in other._parameters.values())]
        if mine and all(name in free for name in tied):
            chosen.update(dict.fromkeys([path, *mine, *tied], ("vocabulary", 1)))
    return chosen


def _read_lengths(
    module: nn.Module, run: TracedRun, args: Sequence[Any], kwargs: Mapping[str, Any], words: Iterable[str], ranks: int
) -> bool:
    """Whether the model does something else where embeddings and heads say that they have one rank's words."""
    weights = {path: module.get_submodule(path)._parameters["weight"] for path in words}
    rows = {path: len(weight) // ranks for path, weight in weights.items() if weight is not None}
    try:
        other = record(module, args, kwargs, differentiable=False, words=rows)
    except Exception:  # the module's own, on lengths that it does not expect
        return True
    done = [[(each.op, each.args, dict(each.kwargs)) for each in one.steps] for one in (run, other)]
    return done[0] != done[1] or run.shapes != other.shapes


def _common(stacks: Sequence[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...]:
    first = stacks[0]
    length = min(map(len, stacks))
    while any(stack[:length] != first[:length] for stack in stacks):
        length -= 1
    return first[:length]


def _inside(path: str, other: str) -> bool:
    return other == "" or path.startswith(f"{other}.")


def _index(start: int | None, length: int) -> int:
    start = start or 0
    return min(start + length if start < 0 else start, length)


def _plain(tree: Any) -> Iterable[Any]:
    """What is no tensor, in order."""
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _plain(each)
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from _plain(each)
    elif isinstance(tree, (int, float, bool, str)) or tree is None:
        yield tree
