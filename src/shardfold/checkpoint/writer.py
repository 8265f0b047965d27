"""A checkpoint written by one process from tensors that something else made: what every import ends in."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfold.checkpoint.draft import Draft
from shardfold.checkpoint.files import NAMES, UnwrittenPiece, divided, dtype_name, write_file
from shardfold.checkpoint.index import Index, Parameter, Piece
from shardfold.checkpoint.trees import encode
from shardfold.errors import CheckpointError
from shardfold.plan.checks import known_arguments
from shardfold.plan.version import __version__

__all__ = ["Value", "Writer"]

LOG = getLogger("shardfold")
Value = Tensor | Callable[[], Tensor]
"""A tensor, or what reads it: called once, while it is written, and let go of before the next one is read."""


@known_arguments
class Writer:
    """Collects what a checkpoint is made of and writes it: nothing is read before :meth:`commit`.

    ::

        writer = Writer(Path("runs/a/step-100"), step=100)
        for name, parameter in model.named_parameters():
            writer.parameter(name, parameter)
            writer.state(name, "exp_avg", lambda n=name: read_moment(n))
            writer.once(name, {"step": 100})
        writer.optimizer("torch.optim.adamw.AdamW", [({"lr": 1e-3}, [*dict(model.named_parameters())])])
        writer.commit()

    Args:
        target: the checkpoint's folder; one that is there is replaced when the new one is complete.
        step: optimizer steps done.
        source: what it was made from, as the index says under ``layout``.
        file_bytes: of a file, about; a tensor is never split over two.

    Raises:
        CheckpointError: from every method: a name is given twice, or shape or dtype cannot be kept.

    Examples:
        >>> writer = sf.checkpoint.Writer(f"{folder}/step-0", source="a script")
        >>> writer.parameter("weight", torch.ones(2, 2))
        >>> writer.commit().name
        'step-0'
    """

    def __init__(self, target: str | Path, *, step: int = 0, source: str = "", file_bytes: int = 4 * 2**30) -> None:
        self.target = Path(os.path.abspath(target))
        self._file_bytes = file_bytes
        self._parts: list[UnwrittenPiece] = []
        self._parameters: dict[str, Parameter] = {}
        self._names: set[str] = set()
        self._keys: set[str] = set()
        self._index = Index(
            step=step,
            written={
                "shardfold": __version__,
                "torch": str(torch.__version__),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
            layout={"imported": source} if source else {},
        )

    @property
    def num_bytes(self) -> int:
        """Of the tensors so far."""
        return sum(part.piece.nbytes for part in self._parts)

    def parameter(
        self,
        name: str,
        value: Value,
        *,
        also: Iterable[str] = (),
        trainable: bool = True,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """The weights of a parameter, in the order of the model.

        Args:
            name: of the parameter.
            value: of its shape and dtype, or what reads that.
            also: further names of the same tensor (tied weights).
            trainable: whether the optimizer had it.
            shape: needed where ``value`` is no tensor; a tensor may be flat if its shape is given.
            dtype: needed where ``value`` is no tensor.
        """
        kept = self._described(name, value, shape, dtype, tuple(also), trainable)
        self._parameters[name] = kept
        self._index.parameters.append(kept)
        if kept.numel:
            self._add(UnwrittenPiece(Piece(name, "weight", "element", kept.dtype, (kept.numel,), 0, kept.numel), value))

    def state(self, name: str, state: str, value: Value, *, dtype: torch.dtype = torch.float32) -> None:
        """A state that a parameter has for each of its elements.

        Args:
            name: of a parameter that was given before.
            state: as the optimizer calls it: ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``.
            value: as many elements as the parameter, in its row-major order; of any shape.
            dtype: of what ``value`` reads, where it is no tensor.
        """
        numel = self._known(name, state).numel
        found = NAMES.get(value.dtype if isinstance(value, Tensor) else dtype)
        if found is None or (isinstance(value, Tensor) and value.numel() != numel):
            raise CheckpointError(f"{self.target}: {state!r} of {name!r} has another size, or a dtype of no file.")
        if numel:
            self._add(UnwrittenPiece(Piece(name, state, "element", found, (numel,), 0, numel), value))

    def once(self, name: str, values: Mapping[str, Any]) -> None:
        """What the optimizer keeps of a parameter once: its step count, factored moments. Numbers and tensors."""
        self._known(name, ", ".join(values))
        numbers: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                self._whole("once", key, name, value)
            else:
                numbers[key] = encode(value, f"{key} of {name}", {})
        self._index.once.setdefault(name, {}).update(numbers)

    def buffer(
        self,
        name: str,
        value: Value,
        *,
        also: Iterable[str] = (),
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A persistent buffer; the arguments are those of :meth:`parameter`."""
        kept = self._described(name, value, shape, dtype, tuple(also), True)
        self._index.buffers.append(kept)
        self._add(UnwrittenPiece(Piece(name, "", "buffer", kept.dtype, kept.shape), value))

    def optimizer(self, class_name: str, groups: Iterable[tuple[Mapping[str, Any], Sequence[str]]]) -> None:
        """The optimizer's class (``torch.optim.adamw.AdamW``) and, of each group, its options and parameters' names."""
        said: list[dict[str, Any]] = []
        for number, (options, names) in enumerate(groups):
            for name in names:
                self._known(name, f"group {number}")
            said.append({"options": self._tree(dict(options), f"group {number}"), "parameters": list(names)})
        self._index = replace(self._index, optimizer={"class": class_name, "groups": said})

    def run(self, tree: Mapping[str, Any]) -> None:
        """What the run had: ``schedule``, ``loss_scale`` (each a state dict or None), ``state`` (the user's own)."""
        self._index = replace(self._index, run=self._tree(dict(tree), "run"))

    def rank(self, tree: Mapping[str, Any]) -> None:
        """What the next rank had: ``rng``, ``state``; called once for each of them, or not at all."""
        number, tensors = len(self._index.ranks), dict[str, Tensor]()
        self._index.ranks.append(encode(dict(tree), "rank_state", tensors))
        for name, tensor in tensors.items():
            self._whole("rank", "", name, tensor, rank=number)

    def commit(self, tick: Callable[[int], None] = lambda done: None) -> Path:
        """Writes it all; the folder is there when this returns, and not before.

        Args:
            tick: called with the bytes of tensors done so far, every few MiB.

        Raises:
            CheckpointError: the target is something else, or the disk is full; nothing of it is left.
        """
        draft, index, done = Draft(self.target, os.urandom(6).hex()), self._index, 0
        files = divided(self._parts, lambda part: part.piece.nbytes, self._file_bytes)
        try:
            draft.begin()
            for number, parts in enumerate(files, 1):
                name = f"part-{number:05d}-of-{len(files):05d}.safetensors"
                written = write_file(draft.path / name, parts, lambda more, before=done: tick(before + more))
                index.add_file(name, *written)
                done += sum(part.piece.nbytes for part in parts)
            if index.nonfinite:
                LOG.warning("%s holds inf or NaN in %s", self.target, ", ".join(index.nonfinite))
            draft.commit(index.to_bytes())
        except OSError as error:
            draft.discard()
            raise CheckpointError(f"{self.target} was not written: {error.strerror} ({error.filename}).") from error
        except BaseException:
            draft.discard()
            raise
        return self.target

    # -- what was given

    def _described(
        self,
        name: str,
        value: Value,
        shape: Sequence[int] | None,
        dtype: torch.dtype | None,
        also: tuple[str, ...],
        trainable: bool,
    ) -> Parameter:
        if isinstance(value, Tensor):
            shape, dtype = value.shape if shape is None else shape, value.dtype
            if math.prod(shape) != value.numel():
                raise CheckpointError(f"{self.target}: {name!r} has {value.numel()} elements, not {tuple(shape)}.")
        if shape is None or dtype is None:
            raise CheckpointError(f"{self.target}: {name!r} is read later, so give its shape= and dtype= now.")
        for each in (name, *also):
            if each in self._names:
                raise CheckpointError(f"{self.target}: {each!r} is given twice.")
            self._names.add(each)
        return Parameter(name, tuple(shape), dtype_name(dtype, name), also, trainable)

    def _known(self, name: str, what: str) -> Parameter:
        if name not in self._parameters:
            raise CheckpointError(f"{self.target}: {what} of {name!r}, which is not a parameter given before.")
        return self._parameters[name]

    def _tree(self, tree: dict[str, Any], where: str) -> Any:
        tensors: dict[str, Tensor] = {}
        said = encode(tree, where, tensors)
        for name, tensor in tensors.items():
            self._whole("run", "", name, tensor)
        return said

    def _whole(self, kind: str, state: str, name: str, value: Tensor, rank: int | None = None) -> None:
        self._add(UnwrittenPiece.whole(kind, state, name, value, rank))

    def _add(self, part: UnwrittenPiece) -> None:
        piece = part.piece
        if piece.key in self._keys:
            raise CheckpointError(f"{self.target}: {piece.state or piece.kind} of {piece.of!r} is given twice.")
        self._keys.add(piece.key)
        self._parts.append(part)
