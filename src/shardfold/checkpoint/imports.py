"""Others' files as a checkpoint: weights of any of them, and the optimizer's state where it says whose it is.

hf      safetensors files, or the ``pytorch_model.bin`` before them
torch   a file of ``torch.save``: a state dict, or a dict that has one under a usual name
dcp     a folder of ``torch.distributed.checkpoint``, alike
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shardfold.checkpoint.files import check_dense
from shardfold.checkpoint.folders import check_apart, check_regular
from shardfold.checkpoint.names import Rename, renamer
from shardfold.checkpoint.stored import Later, Stored, form_of, of_safetensors
from shardfold.checkpoint.trees import strangers
from shardfold.checkpoint.trust import load_object, trusted
from shardfold.checkpoint.writer import Writer
from shardfold.errors import CheckpointError, ConfigError, did_you_mean
from shardfold.plan.checks import known_arguments
from shardfold.sharding.stand_ins import EXTRA

__all__ = ["SOURCES", "ImportReport", "import_from"]

SOURCES = ("hf", "torch", "dcp", "deepspeed")
MODEL = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
OTHERS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)
#: Buffers that are floating; what is not floating is a buffer anyway. A reader takes either for the other.
BUFFERS = ("running_mean", "running_var", "inv_freq")


@dataclass
class ImportReport:
    """What became of others' files.

    Attributes:
        path: the checkpoint.
        source: what was read: one of :data:`SOURCES`.
        num_tensors: weights and buffers, tied ones once.
        num_bytes: of all that was written.
        optimizer: whether the optimizer's state is in it.
        notes: what was left out and why, a sentence each.

    Examples:
        >>> torch.save(engine.state_dict(), f"{folder}/weights.pt")
        >>> report = sf.checkpoint.import_from(f"{folder}/weights.pt", f"{folder}/step-0")
        >>> report.num_tensors
        4
    """

    path: Path
    source: str
    num_tensors: int = 0
    num_bytes: int = 0
    optimizer: bool = False
    notes: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        what = f"{self.num_tensors} tensors" + (" and the optimizer's state" if self.optimizer else "")
        return "\n".join([f"{self.path}: {what}, {self.num_bytes / 2**20:.1f} MiB, from {self.source}", *self.notes])


@known_arguments
def import_from(
    source: str | Path,
    target: str | Path,
    form: str = "auto",
    *,
    key: str | None = None,
    rename: Rename | None = None,
    trust: bool = False,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> ImportReport:
    """Writes a checkpoint from others' files, one tensor in memory at a time.

    ``engine.load(target, weights_only=True)`` takes it, and ``engine.load(target)`` if it has the optimizer's state:
    by names of parameters, as ``torch.distributed.checkpoint.state_dict`` gives it, or by numbers if the optimizer's
    parameters are named or are all of the model's, in one group.

    Args:
        source: a file or folder.
        target: the checkpoint's folder; a checkpoint that is there is replaced.
        form: ``"hf"``, ``"torch"``, ``"dcp"``, ``"deepspeed"``, or ``"auto"``, which looks.
        key: where in the file the weights are, if not at a usual place: ``"ema.model"``.
        rename: from the names there to those of the model: regular expressions and what they are replaced with, in
            order, or a function. ``{r"^module\\.": ""}`` takes away what DDP puts in front.
        trust: objects in files of ``torch`` and ``dcp`` are unpickled, whatever code that runs: only for files whose
            writers you would let run a program here. False refuses them. In those of ``deepspeed`` no object runs.
        tick: called with the bytes done so far and those of all, every few MiB.

    Raises:
        ConfigError: ``form`` is unknown, or another option has no meaning for what is there.
        CheckpointError: it is of another form, is damaged, or has no weights where they are looked for; ``target`` is
            inside of it, or around it. Nothing is left of what was written.

    Examples:
        >>> torch.save(engine.state_dict(), f"{folder}/weights.pt")
        >>> report = sf.checkpoint.import_from(f"{folder}/weights.pt", f"{folder}/step-0")
        >>> report.num_tensors
        4
    """
    path = Path(source)
    if form not in ("auto", *SOURCES):
        raise ConfigError(f"there is no form {form!r} to import from.{did_you_mean(form, SOURCES)}")
    if not path.exists():
        raise CheckpointError(f"there is no {path}.")
    check_apart(path, Path(target))
    if not path.is_dir():
        check_regular(path)
    found = form_of(path) if form == "auto" else form
    if found == "shardfold":
        raise CheckpointError(f"{path} is a checkpoint of Shardfold already.")
    if not found:
        inside = ", ".join(sorted(p.name for p in path.iterdir())[:8])
        raise CheckpointError(f"{path} is not a folder of {', '.join(SOURCES)}: it has {inside or 'nothing'}.")
    if key is not None and found in ("hf", "deepspeed"):
        raise ConfigError(
            f"import_from(key={key!r}): it says where in a file of torch or dcp the weights are, and {path} is of "
            f"{found!r}: leave it out (--key)."
        )
    if trust:
        with trusted():
            return import_from(path, target, found, key=key, rename=rename, tick=tick)
    new, notes = renamer(rename, "import_from"), list[str]()
    try:
        if found == "deepspeed":
            read = _of_deepspeed(path, target, new, notes)
        else:
            read = _of_weights(path, target, new, key, found, notes)
    except OTHERS as error:  # others' files may hold anything in any place
        words = str(error).partition("\n")[0][:100]
        raise CheckpointError(
            f"{path} does not hold what files of {found!r} do: it cannot be read ({type(error).__name__}: {words})."
        ) from error
    total = read.writer.num_bytes
    written = read.writer.commit(lambda done: tick(done, total))
    return ImportReport(written, found, read.num_tensors, total, read.optimizer, notes)


class _Given(NamedTuple):
    """What was found: in a checkpoint that is to be written, weights and buffers, and whether the optimizer's state."""

    writer: Writer
    num_tensors: int
    optimizer: bool


def _of_deepspeed(path: Path, target: str | Path, rename: Callable[[str], str], notes: list[str]) -> _Given:
    from shardfold.checkpoint.deepspeed import DeepSpeedFolder

    folder = DeepSpeedFolder.open(path)
    if Path(target).resolve().parent in (folder.path.resolve(), folder.path.resolve().parent):
        raise CheckpointError(
            f"{target} is in the folder of DeepSpeed's run, whose 'latest' is DeepSpeed's: choose another folder."
        )
    writer = Writer(target, step=folder.step, source=f"deepspeed: {folder.path.name}")
    folder.write(writer, rename)
    notes += folder.notes
    return _Given(writer, len(folder.names), True)


def _of_weights(
    path: Path, target: str | Path, new: Callable[[str], str], key: str | None, found: str, notes: list[str]
) -> _Given:
    """Of every other form: weights, and perhaps an optimizer's state."""
    optimizer: Any = None
    rest: dict[str, Any] = {}
    bins = sorted(path.glob("pytorch_model*.bin")) if path.is_dir() and found == "hf" else []
    if found == "hf" and not (bins and form_of(path / "model.safetensors") == ""):
        stored = of_safetensors(path)
    elif found == "hf":
        stored = _stored({name: value for file in bins for name, value in _unpickled(file).items()}, path, notes)
    else:
        from shardfold.checkpoint.dcp import read_dcp

        tree = read_dcp(path) if found == "dcp" else _unpickled(path)
        weights, optimizer, rest = _sorted_out(tree, key, path)
        stored = _stored(weights, path, notes)
    stored = stored.renamed(new, str(path))
    moments = _Moments(optimizer, stored, new, found, notes) if optimizer is not None else None
    trained = moments.names if moments is not None and moments.names else None
    writer = Writer(target, step=moments.step if moments is not None else 0, source=f"{found}: {path.name}")
    for name, later in stored.tensors.items():
        also = [other for other, first in stored.also.items() if first == name]
        if _is_buffer(name, later):
            writer.buffer(name, later.read, also=also, shape=later.shape, dtype=later.dtype)
        else:
            kept = trained is None or name in trained
            writer.parameter(name, later.read, also=also, trainable=kept, shape=later.shape, dtype=later.dtype)
    if trained is not None and moments is not None:
        moments.write(writer)
    state = {name: value for name, value in rest.items() if _keeps(value)}
    if state or stored.extra:
        extra = {"extra": stored.extra} if stored.extra else {}
        writer.run({"schedule": None, "loss_scale": None, "averages": [], "state": state, **extra})
    if left := sorted(set(rest) - set(state)):
        notes.append(f"Left out, being neither weights nor numbers: {', '.join(left)}.")
    return _Given(writer, len(stored.tensors), trained is not None)


# -- what the files hold


def _unpickled(path: Path) -> dict[str, Any]:
    """What ``torch.save`` was given; tensors stay in the file until they are read.

    Raises:
        CheckpointError: it is no such file, has more than plain values and tensors, or is no dict.
    """
    check_regular(path)
    try:
        try:
            said = load_object(path, str(path), mmap=True)
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            said = load_object(path, str(path))  # of before torch 1.6, which is no zip archive
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    except Exception:  # whatever a pickle that is none raises: its words are about the pickle's inside
        raise CheckpointError(f"{path} is not a file of torch.save, or it is damaged.") from None
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{path} holds a {type(said).__name__}, not a state dict.")
    return dict(said)


def _sorted_out(tree: dict[str, Any], key: str | None, path: Path) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Weights, the optimizer's state or None, and everything else.

    Raises:
        CheckpointError: there are no weights.
    """
    rest = dict(tree)
    optimizer = next((rest.pop(name) for name in OPTIMIZER if name in rest), None)
    if isinstance(optimizer, list) and len(optimizer) == 1:
        optimizer = optimizer[0]
    if key is not None:
        weights: Any = tree
        for step in key.split("."):
            weights = weights.get(step) if isinstance(weights, Mapping) else None
        rest.pop(key.partition(".")[0], None)
    else:
        home = next((name for name in MODEL if isinstance(rest.get(name), Mapping)), None)
        if home is not None:
            weights = rest.pop(home)
        else:
            weights = {
                name: rest.pop(name)
                for name, value in tree.items()
                if isinstance(value, Tensor | Later) or str(name).rpartition(".")[2] == EXTRA
            }
    if not isinstance(weights, Mapping) or not any(isinstance(v, Tensor | Later) for v in weights.values()):
        where = f"under {key!r}" if key is not None else f"at its top or under {', '.join(MODEL)}"
        if not tree:
            raise CheckpointError(f"{path} has no weights: it holds an empty dict.")
        there = ", ".join([str(name) for name in tree][:8]) + (", ..." if len(tree) > 8 else "")
        raise CheckpointError(f"{path} has no weights {where}: it has {there}; say where by key=.")
    return dict(weights), optimizer, rest


def _stored(weights: Mapping[str, Any], path: Path, notes: list[str]) -> Stored:
    """A state dict's tensors; those that are one in memory are tied.

    Raises:
        CheckpointError: one is sparse or quantized.
    """
    tensors, also, extra = dict[str, Later](), dict[str, str](), dict[str, Any]()
    first: dict[Any, str] = {}
    others: list[str] = []
    for name, value in weights.items():
        if name.rpartition(".")[2] == EXTRA and not isinstance(value, Later) and _is_tree(value):
            extra[name] = value
            continue
        if isinstance(value, Tensor):
            check_dense(value, f"{name!r} of {path}")
            where = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            home = first.setdefault(where, name) if value.numel() else name
            if home != name:
                also[name] = home
                continue
        elif not isinstance(value, Later):
            others.append(name)
            continue
        tensors[name] = _later(value)
    if others:
        notes.append(f"Left out of the weights, being no tensors: {', '.join(others)}.")
    return Stored(tensors, also, extra=extra or None)


def _later(value: Tensor | Later) -> Later:
    return value if isinstance(value, Later) else Later(tuple(value.shape), value.dtype, lambda: value)


def _is_buffer(name: str, later: Later) -> bool:
    return not later.dtype.is_floating_point or name.rpartition(".")[2] in BUFFERS


def _is_tree(value: Any) -> bool:
    return next(strangers(value, EXTRA), None) is None


def _keeps(value: Any) -> bool:
    """Whether a checkpoint keeps it as it is: plain values without tensors."""
    if isinstance(value, Mapping):
        return all(_keeps(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(_keeps(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str | bytes)


# -- the optimizer


class _Moments:
    """The state of a torch optimizer, whose parameters are named or can be.

    Attributes:
        names: of the parameters that it has; none if it cannot be told which they are.
        step: updates done, by the parameter that has most.
    """

    def __init__(self, saved: Any, stored: Stored, rename: Callable[[str], str], source: str, notes: list[str]) -> None:
        self._stored, self._source = stored, source
        self.names: set[str] = set()
        self.step = 0
        self._groups: list[tuple[dict[str, Any], list[str]]] = []
        self._state: dict[str, dict[str, Any]] = {}
        try:
            state, groups = _nested(saved)
            named = self._named(groups, rename)
        except _Unclear as why:
            notes.append(f"The optimizer's state is left out: {why}.")
            return
        for options, ids in groups:
            self._groups.append((options, [named[each] for each in ids]))
        self._state = {named[each]: values for each, values in state.items() if each in named}
        for name, values in self._state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):  # before it is asked for its shape, which not every kind has
                    check_dense(value, f"{key!r} of {name!r}, of the optimizer,")
        wrong = [
            f"{key} of {name}"
            for name, values in self._state.items()
            for key, value in values.items()
            if key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
            and isinstance(value, Tensor | Later)
            and tuple(value.shape) != self._stored.tensors[name].shape
        ]
        if wrong or not self._state:
            why = f"{wrong[0]} has another shape than the parameter" if wrong else "it is empty"
            notes.append(f"The optimizer's state is left out: {why}.")
            return
        self.names = {name for _, names in self._groups for name in names}
        steps = [_read(values["step"]) for values in self._state.values() if "step" in values]
        self.step = int(max((float(step) for step in steps), default=0))

    def _named(self, groups: list[tuple[dict[str, Any], list[str]]], rename: Callable[[str], str]) -> dict[str, str]:
        """The name of each parameter of the groups."""
        ids = [each for _, members in groups for each in members]
        numbered = all(each.isdigit() for each in ids)
        if not numbered:
            given = ids
        elif all("param_names" in options for options, _ in groups):
            given = [name for options, _ in groups for name in options["param_names"]]
        else:
            known = [name for name, later in self._stored.tensors.items() if not _is_buffer(name, later)]
            # A folder of DCP does not keep the model's order, and several groups have an order of their own.
            if self._source == "dcp" or len(groups) > 1 or len(ids) != len(known):
                raise _Unclear(
                    f"it numbers {len(ids)} parameters in {len(groups)} group{'s' * (len(groups) != 1)} and does not "
                    f"name them, and the weights have {len(known)}: make the optimizer of model.named_parameters()"
                )
            return dict(zip(ids, known, strict=True))
        named = {each: rename(name) for each, name in zip(ids, given, strict=True)}
        named = {each: self._stored.also.get(name, name) for each, name in named.items()}
        if unknown := [name for name in named.values() if name not in self._stored.tensors]:
            raise _Unclear(f"the weights have no {unknown[0]}")
        return named

    def write(self, writer: Writer) -> None:
        for name, values in self._state.items():
            once: dict[str, Any] = {}
            for key, value in values.items():
                whole = isinstance(value, Tensor | Later) and tuple(value.shape) == self._stored.tensors[name].shape
                if whole and key != "step" and not _is_buffer(name, self._stored.tensors[name]):
                    later = _later(value)
                    writer.state(name, key, later.read, dtype=later.dtype)
                else:
                    once[key] = _read(value)
            writer.once(name, once)
        groups = [
            ({k: _read(v) for k, v in options.items() if k != "param_names"}, names) for options, names in self._groups
        ]
        writer.optimizer("an imported optimizer", groups)


class _Unclear(Exception):
    """It cannot be told which state is whose."""


def _nested(saved: Any) -> tuple[dict[str, dict[str, Any]], list[tuple[dict[str, Any], list[str]]]]:
    """States by parameter, and groups: options and parameters, each by its name or number.

    Besides ``{"state": {id: ...}, "param_groups": [...]}`` there is the flat form of
    ``torch.distributed.checkpoint.state_dict``: ``state.NAME.exp_avg``, ``param_groups.NAME.lr``.
    """
    if not isinstance(saved, Mapping):
        raise _Unclear(f"it is a {type(saved).__name__}")
    if isinstance(saved.get("param_groups"), list):
        state = {str(each): dict(values) for each, values in saved.get("state", {}).items()}
        groups = [
            ({k: v for k, v in group.items() if k != "params"}, [str(each) for each in group["params"]])
            for group in saved["param_groups"]
        ]
        return state, groups
    state, options = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for key, value in saved.items():
        kind, _, path = key.partition(".")
        name, _, what = path.rpartition(".")
        if kind in ("state", "param_groups") and name:
            (state if kind == "state" else options).setdefault(name, {})[what] = value
    if not state or not options:
        raise _Unclear("it has no 'state' and 'param_groups'")
    alike: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, said in options.items():
        alike.setdefault(repr(sorted(said.items())), (said, []))[1].append(name)
    return state, list(alike.values())


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, Later) else value
