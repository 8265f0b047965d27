"""Which modules are cut along an axis of tensor, by words.

    column       rows of the weight: each rank has some of the outputs
    row          columns of the weight: each rank has some of the inputs, as columns give them; outputs are summed
    vocabulary   of an embedding or of a head: each rank has some of the words
    gathered     as column; the outputs are put side by side again
    experts      of all experts in two parameters: each rank has some of the hidden units of every expert
    partial      nothing is cut, but it works on parts: gradients of its parameters are summed over the axis
    replicated   nothing is cut

Under sequence parallelism (see ``stream``), and otherwise as ``replicated``:

    sequence     as partial: it works on some of the tokens, as norms and dropout between columns and rows
    scattered    its first argument is cut along the sequence: the first block. In a plan without one embeddings are cut
    collected    its first argument is made whole: what is around columns and reads its shape. Other columns do it alone
    joined       its result is made whole: the last norm

A plan is ``{pattern of paths: word}``; the first pattern that matches a module holds. ``("column", 3)`` is a matrix of
three, one behind the other, each of which is divided: queries, keys and values in one, or gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardfold.errors import ConfigError, did_you_mean
from shardfold.parallel._guess import guessed
from shardfold.parallel._known import STYLES, adapted_words, divided_of, is_adapted, known_plan, unknown_style
from shardfold.parallel.draws import Parts, look_at_draws
from shardfold.parallel.following import Expected, follow_calls
from shardfold.parallel.head import split_heads
from shardfold.parallel.infer import infer
from shardfold.parallel.lengths import is_transposed
from shardfold.parallel.model_trace import leaf_of
from shardfold.parallel.module_group import group_of
from shardfold.parallel.shared_input import SharedInput
from shardfold.parallel.split import AxisPart, ModuleCut, Owners, cut_module, is_cut, is_streamed
from shardfold.parallel.stream import DROPOUTS, SequenceParallel
from shardfold.plan.axes import Mesh, Role
from shardfold.plan.checks import described, is_integer

__all__ = ["AUTO", "WORDS", "Given", "TensorPlan", "Traced", "split_model"]

AUTO = "auto"


class Traced:
    """``"auto"`` for a model that brings no plan, with arguments of its forward as it gets them, of which shapes and
    dtypes are read: ``tensor=Traced(tokens, mask=mask)``.

    Examples:
        >>> plan = sf.parallel.Traced(torch.randn(2, 8))  # what forward is called with
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


SEQUENCE_WORDS = ("sequence", "scattered", "collected", "joined")
WORDS = ("column", "row", "vocabulary", "gathered", "experts", "partial", "replicated", *SEQUENCE_WORDS)
Given = str | Traced | Mapping[str, str | tuple[str, int]]
"""What users say: ``"auto"``, alone or with inputs, or a plan."""


@dataclass(frozen=True)
class Word:
    """What one module has in a plan."""

    name: str
    blocks: int = 1

    def __str__(self) -> str:
        return self.name if self.blocks == 1 else f"{self.name} of {self.blocks}"


class TensorPlan:
    """The words of a model's modules, by path.

    Args:
        model: whole.
        given: ``"auto"`` takes the model's own, or else traces it.
        ranks: that it is for. A model is only traced for several.
        sequence_parallel: activations between pairs of layers are cut along their sequence.

    Attributes:
        words: by path.
        divided: names of whole numbers that modules keep, which are divided with them, by patterns of paths.
        followed: of a trace: modules whose calls on parts of tensors are followed, and these calls.
        left: of a trace: linear layers that stay whole, and why.
        traced: there was one.
        own: paths whose words are those of the model's attribute ``tensor_plan``, which knows what its modules compute.

    Raises:
        ConfigError: nothing of the model can be cut, a pattern matches nothing, or a word is unknown; or the plan
            leaves open where sequences are cut and where they are whole.
    """

    def __init__(self, model: nn.Module, given: Given, ranks: int = 2, *, sequence_parallel: bool = False) -> None:
        said: Any = given
        self.divided = divided_of(model)
        self.followed: Mapping[str, tuple[Expected, ...]] = {}
        self.left: Mapping[str, str] = {}
        self.words: dict[str, Word] = {}
        self.own: set[str] = set()
        self.traced = False
        adapted = next((path for path, module in model.named_modules() if is_adapted(module)), None)
        if sequence_parallel and adapted is not None:
            raise ConfigError(
                f"Parallel(sequence_parallel=True): {adapted!r} has an adapter, whose matrices work on whole "
                "sequences: leave sequence_parallel out."
            )
        if isinstance(said, str):
            if said != AUTO:
                raise ConfigError(
                    f"Parallel(tensor={said!r}) is unknown: give 'auto', or a plan, as "
                    "{'*.up': 'column', '*.down': 'row'}."
                )
            known = known_plan(model, sequence_parallel=sequence_parallel)
            if known is None:
                self._trace_unknown(model, ranks, sequence_parallel)
                return
            said = known
        elif isinstance(said, Traced):
            _refuse_traced(model, sequence_parallel)
            self._trace(model, said, ranks)
            return
        self._read(model, said, sequence_parallel)

    def _trace_unknown(self, model: nn.Module, ranks: int, sequence_parallel: bool) -> None:
        """
        Raises:
            ConfigError: it does not run, or nothing can be cut; with what its own plan has that is not known.
        """
        try:
            _refuse_traced(model, sequence_parallel)
            self._trace(model, None, ranks)
        except ConfigError as error:
            style = unknown_style(model)
            if style is None:
                raise
            raise ConfigError(
                f"{error} Its plan of transformers has the style {style[0]!r} for {style[1]!r}, for which there is no "
                f"word; there are words for {', '.join(STYLES)}."
            ) from error

    def _trace(self, model: nn.Module, given: Traced | None, ranks: int) -> None:
        """
        Raises:
            ConfigError: it does not run, or nothing can be cut.
        """
        if ranks == 1:
            return
        name, why = type(model).__name__, ""
        give = "give one, as Parallel(tensor={'*.up': 'column', '*.down': 'row'})"
        if given is None:
            found, why = guessed(model, ranks)
        else:
            try:
                found = infer(model, given.args, given.kwargs, ranks, inner=False)
            except Exception as error:
                raise ConfigError(
                    f"Parallel(tensor=Traced(...)): {name} does not run on these inputs without memory, on the meta "
                    f"device: {type(error).__name__}: {error}; no plan of it is known otherwise: {give}."
                ) from error
        if not found.words:
            if why:
                raise ConfigError(
                    f"Parallel(tensor='auto'): no plan of {name} is known, and it cannot be traced on inputs that are "
                    f"guessed ({why}): give inputs as it gets them, Parallel(tensor=shardfold.parallel.Traced(...)), "
                    "or a plan, as Parallel(tensor={'*.up': 'column', '*.down': 'row'})."
                )
            path, reason = next(iter(found.left.items()), ("", "it has no linear layers"))
            raise ConfigError(
                f"Parallel(tensor='auto'): no plan of {name} is known, and a trace of it finds nothing to "
                f"cut{f'; {path!r}' if path else ''}: {reason}: {give}."
            )
        self.words = {path: Word(*word) for path, word in found.words.items()}
        self.followed, self.left, self.traced = found.followed, found.left, True

    def _read(self, model: nn.Module, said: Any, sequence_parallel: bool) -> None:
        """
        Raises:
            ConfigError: it is no plan of this model.
        """
        if not isinstance(said, Mapping) or not said:
            given = "has no words" if said == {} else f"is {described(said)}"
            raise ConfigError(
                f"Parallel(tensor=...) {given}: it is 'auto', or words by patterns of module paths, as "
                "{'*.q_proj': 'column', '*.o_proj': 'row'}."
            )
        words = {pattern: _word(pattern, word) for pattern, word in said.items()}
        modules = dict(model.named_modules())
        paths = [path for path in modules if path]
        unused = dict.fromkeys(words)
        for path in paths:
            for pattern, word in words.items():
                if fnmatchcase(path, pattern):
                    if sequence_parallel or word.name not in SEQUENCE_WORDS:
                        self._take(path, modules[path], word)
                    unused.pop(pattern, None)
                    break
        for pattern, word in getattr(model, "tensor_plan", {}).items():
            same = _word(pattern, word)
            self.own |= {path for path, mine in self.words.items() if mine == same and fnmatchcase(path, pattern)}
        for pattern in unused:
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise ConfigError(
                    f"Parallel(tensor=...) names {pattern!r}, which matches no module.{did_you_mean(pattern, paths)}"
                )
        if sequence_parallel:
            self._check_stream(model)

    def _take(self, path: str, module: nn.Module, word: Word) -> None:
        """A module has this word, or those have it that an adapter of peft is made of."""
        if is_adapted(module):
            inside = adapted_words(path, module, word.name)
            self.words.update((each, Word(name, word.blocks)) for each, name in inside.items())
        else:
            self.words[path] = word

    def _check_stream(self, model: nn.Module) -> None:
        """
        Raises:
            ConfigError: it is not known what of the sequence some module works on.
        """
        words = [word.name for word in self.words.values()]
        if not {"scattered", "vocabulary"} & {*words} or "joined" not in words:
            raise ConfigError(
                "Parallel(sequence_parallel=True): the plan has to say where sequences are cut, by the word "
                "'scattered' for the first block (or 'vocabulary' for an embedding), and by 'joined', for the last "
                "norm, where they are whole again."
            )
        for path, module in model.named_modules():
            own = [name for name, parameter in module._parameters.items() if parameter is not None]
            word = self.words[path].name if path in self.words else None
            where = f"{path!r}" if path else f"{type(model).__name__} itself"
            if own and word in (None, "collected"):
                raise ConfigError(
                    f"Parallel(sequence_parallel=True): {where} has parameters ({', '.join(own)}), and the plan does "
                    "not say what it works on: give it a word, as 'sequence' if it works on each token by itself, or "
                    "'replicated' if it works on whole sequences."
                )
            if word == "scattered" and isinstance(module, nn.Embedding):
                raise ConfigError(
                    f"the plan calls the embedding {where} 'scattered', which is for a block behind it: the word of an "
                    "embedding is 'vocabulary', or 'replicated' before a block that is 'scattered'."
                )
            if word == "gathered":
                raise ConfigError(
                    f"Parallel(sequence_parallel=True): {where} is 'gathered', which cannot be where sequences are "
                    "cut: give it the word 'column', before a 'row', or 'sequence', if it works on each token by "
                    "itself."
                )

    def leave(self, name: str) -> None:
        """Modules with this word stay whole."""
        self.words = {path: word for path, word in self.words.items() if word.name != name}

    def __str__(self) -> str:
        return "\n".join(f"{path}: {word}" for path, word in self.words.items())


def _refuse_traced(model: nn.Module, sequence_parallel: bool) -> None:
    """
    Raises:
        ConfigError: what is between columns and rows is to be divided too.
    """
    if sequence_parallel:
        raise ConfigError(
            f"Parallel(sequence_parallel=True): no plan of {type(model).__name__} is known, and a trace finds columns "
            "and rows alone; give a plan with the words 'scattered' for the first block, 'collected' for attention, "
            "'sequence' for norms and 'joined' for the last one."
        )


def _check_read(cuts: Sequence[tuple[str, str]]) -> None:
    """
    Raises:
        ConfigError: there are columns, and nothing reads what they give.
    """
    column = next((path for path, word in cuts if word in ("column", "kv")), None)
    if column is not None and all(word != "row" for _, word in cuts):
        raise ConfigError(
            f"Parallel(tensor=...) has columns and no row: of what {column!r} gives, each rank has its part alone. "
            "Give the linear layer that reads it the word 'row', or this one the word 'gathered'."
        )


def _word(pattern: Any, given: Any) -> Word:
    """
    Raises:
        ConfigError: it is none.
    """
    if not isinstance(pattern, str):
        raise ConfigError(
            f"Parallel(tensor=...) names {described(pattern)}: give patterns of module paths, as '*.q_proj'."
        )
    if isinstance(given, tuple) and len(given) == 2 and given[0] == "column" and is_integer(given[1], 1):
        return Word(given[0], given[1])
    if not isinstance(given, str):
        raise ConfigError(
            f"Parallel(tensor=...) calls {pattern!r} {described(given)}: give a word, or ('column', n) for n matrices "
            "in one."
        )
    if given not in WORDS:
        raise ConfigError(
            f"Parallel(tensor=...) calls {pattern!r} {given!r}, which is unknown.{did_you_mean(given, WORDS)}"
        )
    return Word(given)


def split_model(
    model: nn.Module, given: Given | None, mesh: Mesh, coords: Mapping[str, int], *, sequence_parallel: bool = False
) -> None:
    """Leaves of each module that the plan names, and of each head whose classes are split over ranks of data, this
    rank's part.

    Args:
        model: whole, with values or built under ``meta_init``; or cut like this before.
        given: as ``Parallel(tensor=...)``; None: nothing is cut. By ``"auto"`` experts that an axis of experts shares
            out stay whole.
        mesh: its axes of role tensor; on one rank the plan is only checked.
        coords: this rank's place.
        sequence_parallel: see :class:`TensorPlan`.

    Raises:
        ConfigError: the plan does not fit the model, or a module does not divide; or several axes have the role; or
            the model was cut with ``sequence_parallel`` and now is to be without, or the reverse.
    """
    split_heads(model, mesh, coords)
    if given is None:
        if sequence_parallel:
            raise ConfigError(
                "Parallel(sequence_parallel=True) cuts what flows between the layers that Parallel(tensor=...) cuts: "
                "give a plan, as Parallel(tensor='auto')."
            )
        return
    axes = mesh.of_role(Role.TENSOR)
    if len(axes) > 1:
        raise ConfigError(
            f"Parallel(tensor=...) cuts along one axis, but parallel= has {' and '.join(axes)} of role tensor."
        )
    cut = [module for module in model.modules() if is_cut(module)]
    if axes and cut:  # for an engine that was closed; that it was for as many ranks is seen where groups are bound
        if sequence_parallel != any(map(is_streamed, cut)):
            raise ConfigError(
                f"Parallel(sequence_parallel={sequence_parallel}), but the model was cut for an engine with "
                f"{not sequence_parallel}: give that, or build the model anew."
            )
        return
    plan = TensorPlan(model, given, mesh[axes[0]] if axes else 1, sequence_parallel=sequence_parallel)
    if given == AUTO and not sequence_parallel and mesh.of_role(Role.EXPERT):
        plan.leave("experts")
    if axes:
        place = AxisPart(axes[0], coords[axes[0]], mesh[axes[0]], mesh.size)
        Splitting(model, plan, place, SequenceParallel() if sequence_parallel else None).run()


class Splitting:
    """The cutting of one model."""

    def __init__(self, model: nn.Module, plan: TensorPlan, place: AxisPart, stream: SequenceParallel | None) -> None:
        self._modules = dict(model.named_modules())
        self._plan, self._place, self._stream = plan, place, stream
        words = {path: word.name for path, word in plan.words.items()}
        self._whole = tuple(f"{path}." for path, word in words.items() if word == "collected")
        self._scatters = "scattered" in words.values()
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self._modules.values():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((module, name))
        self._owners: Owners = owners
        self._shared: dict[str, SharedInput] = {}
        self._groups: dict[str, int] = {}
        self._parts = Parts()

    def run(self) -> None:
        cuts: list[ModuleCut] = []
        for path, word in self._plan.words.items():
            module = self._modules[path]
            idle = not isinstance(module, DROPOUTS) and not list(module.parameters(recurse=False))
            if word.name == "replicated" or (word.name in ("partial", "sequence") and idle):
                continue
            self._check_ties(path, module)
            cuts.append(self._cut(path, module, word))
            cuts[-1].check(self._place)
            cuts[-1].check_forward(path in self._plan.own)
        _check_read([(cut.name, cut.word) for cut in cuts])
        for cut in cuts:
            cut_module(cut, self._place, self._of_parent(cut.name), self._owners, self._parts)
        for parent, groups in self._groups.items():
            vars(self._modules[parent])["num_key_value_groups"] = groups
        self._divide()
        for path, why in self._plan.left.items():
            vars(self._modules[path])["_shardfold_left"] = why
        self._follow({cut.name for cut in cuts if cut.word == "column"})
        callers = dict.fromkeys(self._caller(cut.name) for cut in cuts if cut.word in ("column", "kv", "row"))
        shared: dict[nn.Module, list[SharedInput]] = {}
        for parent, inputs in self._shared.items():
            shared.setdefault(self._caller(f"{parent}."), []).append(inputs)
        for caller in callers:
            inputs = shared.pop(caller, [])
            look_at_draws(caller, self._parts, group_of(caller, self._place.axis), inputs)
        for caller, others in shared.items():
            for inputs in others:
                caller.register_forward_hook(inputs.forget, always_call=True)

    def _follow(self, columns: set[str]) -> None:
        """Calls on parts of tensors, of a plan that was traced."""
        for path, calls in self._plan.followed.items():
            inside = {n: m for n, m in self._modules.items() if path in ("", n) or n.startswith(f"{path}.")}
            leaves = [m for m in inside.values() if is_cut(m) or leaf_of(m) is not None]
            follow_calls(self._modules[path], path, calls, leaves, [inside[n] for n in inside if n in columns])

    def _of_parent(self, path: str) -> SharedInput:
        """Of matrices beside an adapter's, all of its parent's; an adapter's own get what nobody else does."""
        parent = self._parent(path) if path.endswith(".base_layer") else path.rpartition(".")[0]
        if parent not in self._shared:
            self._shared[parent] = SharedInput()
        return self._shared[parent]

    def _caller(self, path: str) -> nn.Module:
        """Whose forward calls the module."""
        caller = self._parent(path)
        while caller and isinstance(self._modules[caller], (nn.ModuleList, nn.ModuleDict)):  # has no forward
            caller = caller.rpartition(".")[0]
        return self._modules[caller]

    def _parent(self, path: str) -> str:
        """Where the module is, or the layer of peft of which it is a part."""
        parent = path.rpartition(".")[0]
        around = parent.rpartition(".")[0]
        if isinstance(self._modules[parent], nn.ModuleDict) and is_adapted(self._modules[around]):
            parent, around = around, around.rpartition(".")[0]
        return around if is_adapted(self._modules[parent]) else parent

    def _check_ties(self, path: str, module: nn.Module) -> None:
        """
        Raises:
            ConfigError: the module shares its weight with one that computes with it and is not in the plan.
        """
        weight = module._parameters.get("weight")
        names = {id(module): name for name, module in self._modules.items()}
        for other, _ in self._owners.get(id(weight), ()):
            computes = isinstance(other, (nn.Embedding, nn.Linear))
            if computes and self._plan.words.get(names[id(other)], Word("replicated")).name == "replicated":
                words = [isinstance(each, nn.Embedding) for each in (module, other)]
                both = "give both the word 'vocabulary'" if any(words) else "leave both 'replicated'"
                raise ConfigError(
                    f"{path!r} shares its weight with {names[id(other)]!r}, which the plan leaves whole: {both}."
                )

    def _cut(self, path: str, module: nn.Module, word: Word) -> ModuleCut:
        """With what stays together, and for keys and values of fewer heads than ranks which of them this rank needs.

        Raises:
            ConfigError: heads do not divide.
        """
        cut = ModuleCut(
            module,
            path,
            word.name,
            word.blocks,
            stream=self._stream,
            collected=path.startswith(self._whole),
            begins=not self._scatters,
        )
        parent: Any = self._modules[self._parent(path)]
        width = getattr(parent, "head_dim", None) or getattr(parent, "attention_head_size", None)
        if width is None or word.name not in ("column", "row") or self._plan.traced:  # where views were looked at
            return cut
        rows = _lengths(module)[word.name == "row"]
        if not is_integer(width, 1) or rows % (width * word.blocks):
            return cut
        heads, size = rows // (width * word.blocks), self._place.size
        if heads % size == 0:
            return replace(cut, unit=width)
        groups = vars(parent).get("num_key_value_groups", 1)
        beside = [_lengths(self._modules[name])[0] for name in self._siblings(path)]
        if word.name == "column" and groups > 1 and rows * groups in beside and (heads * groups) % size == 0:
            chosen, self._groups[self._parent(path)] = self._needed(heads * groups // size, groups)
            return replace(cut, word="kv", rows=tuple(head * width + row for head in chosen for row in range(width)))
        raise ConfigError(
            f"{path!r} has {heads} heads, which cannot be divided over the {size} ranks along {self._place.axis!r}; "
            f"give the axis a size that divides them, as {self._place.near(heads)}."
        )

    def _siblings(self, path: str) -> list[str]:
        parent, words = self._parent(path), self._plan.words
        return [name for name in words if self._parent(name) == parent and words[name].name == "column"]

    def _needed(self, queries: int, groups: int) -> tuple[list[int], int]:
        """Heads of keys and values for this rank's so many heads of queries, and how many queries each then serves."""
        first = self._place.rank * queries
        each = [head // groups for head in range(first, first + queries)]
        heads = sorted(set(each))
        if len({each.count(head) for head in heads}) == 1:
            return heads, queries // len(heads)
        return each, 1

    def _divide(self) -> None:
        """Numbers that forwards of other modules read."""
        columns = [path for path, word in self._plan.words.items() if word.name == "column"]
        for pattern, names in self._plan.divided.items():
            for path, module in self._modules.items():
                inside = fnmatchcase(path, pattern) and any(each.startswith(f"{path}.") for each in columns)
                for name in names if inside else ():
                    vars(module)[name] = vars(module)[name] // self._place.size


def _lengths(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return 0, 0
    shape = tuple(weight.shape)
    return (shape[1], shape[0]) if is_transposed(module) else (shape[0], shape[1])
