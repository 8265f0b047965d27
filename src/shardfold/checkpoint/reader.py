"""A checkpoint on disk, read in pieces: any range of any state of any parameter, without the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfold.checkpoint.files import DTYPES, Reader
from shardfold.checkpoint.folders import INDEX, check_place, resolve
from shardfold.checkpoint.index import Index, Parameter, Piece, checksum, overlaps
from shardfold.checkpoint.trees import decode
from shardfold.checkpoint.verify import index_bytes, missing_files
from shardfold.errors import CheckpointError, did_you_mean
from shardfold.plan.checks import known_arguments
from shardfold.plan.format import Format
from shardfold.plan.formats import FORMATS
from shardfold.plan.placement import Box, Extent, shared

if TYPE_CHECKING:
    from shardfold.checkpoint.elsewhere import Elsewhere

__all__ = ["Checkpoint"]

AT_ONCE = 256 * 1024  # elements of an 8-bit state that are in fp32 at a time


@known_arguments
class Checkpoint:
    """A complete checkpoint.

    Args:
        path: its folder, or a folder of checkpoints, of which the latest is taken.
        verify: compares every byte that is used with its checksum.

    Attributes:
        path: its folder.
        index: what it says of itself.
        digest: of its index: two ranks that read the same checkpoint have the same.
        parameters: by name, in the order of the model; tied ones by their first name.
        buffers: the same of persistent buffers.

    Raises:
        ConfigError: ``path`` is none.
        CheckpointError: there is none, it is not complete, or its index is damaged.

    Examples:
        >>> saved = engine.save(f"{folder}/step-0", wait=True)
        >>> with sf.Checkpoint(folder) as checkpoint:
        ...     print(tuple(checkpoint.parameter("0.weight").shape))
        (8, 8)
    """

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        check_place("Checkpoint()", path, "a checkpoint or of a folder of checkpoints")
        folder = resolve(path)
        self._take(folder, index_bytes(folder), verify, None)
        if damage := missing_files(self.path, self.index):
            more = f" and {len(damage) - 8} more" * (len(damage) > 8)
            raise CheckpointError(
                f"{self.path} is not complete: {'; '.join(map(str, damage[:8]))}{more}; take another checkpoint."
            )

    @classmethod
    def at(cls, folder: Path, data: bytes, elsewhere: Elsewhere | None = None) -> Checkpoint:
        """A checkpoint of which it is known what is where.

        Args:
            folder: with all of its files, or with a host's part of them.
            data: its index.
            elsewhere: reads the files that are not there; is closed with the checkpoint.
        """
        checkpoint = cls.__new__(cls)
        checkpoint._take(folder, data, True, elsewhere)
        return checkpoint

    def _take(self, folder: Path, data: bytes, verify: bool, elsewhere: Elsewhere | None) -> None:
        self.path = folder
        self._elsewhere = elsewhere
        self.index = Index.from_bytes(data, str(self.path / INDEX))
        self.digest = checksum(data)
        self.parameters: dict[str, Parameter] = {p.name: p for p in self.index.parameters}
        self.buffers: dict[str, Parameter] = {b.name: b for b in self.index.buffers}
        self._first = {other: p.name for p in self.index.parameters for other in p.also}
        self._reader = Reader(self.path, verify=verify, elsewhere=elsewhere)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        self._reader.close()
        if self._elsewhere is not None:
            self._elsewhere.close()

    @property
    def num_bytes_read(self) -> int:
        return self._reader.num_bytes

    @property
    def num_bytes_fetched(self) -> int:
        """Of them, those that other hosts' disks have."""
        return self._elsewhere.num_bytes if self._elsewhere is not None else 0

    @cached_property
    def _by_state(self) -> dict[tuple[str, str], list[Piece]]:
        found: dict[tuple[str, str], list[Piece]] = {}
        for piece in self.index.pieces:
            if piece.kind in ("element", "block"):
                found.setdefault((piece.of, piece.state), []).append(piece)
            elif piece.kind == "buffer":  # others' files do not say what is one: either is read as the other
                found.setdefault((piece.of, "weight"), []).append(replace(piece, stop=piece.numel))
        return found

    @cached_property
    def _states(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, state in self._by_state:
            found.setdefault(name, []).append(state)
        return found

    @cached_property
    def _single(self) -> dict[tuple[str, str, str, int | None], Piece]:
        """Pieces that are a tensor of their own, by kind, state, name and rank."""
        return {(p.kind, p.state, p.of, p.rank): p for p in self.index.pieces if p.kind not in ("element", "block")}

    @cached_property
    def _once(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for piece in self.index.pieces:
            if piece.kind == "once":
                found.setdefault(piece.of, []).append(piece)
        return found

    def first_name(self, name: str) -> str:
        """The name under which a tied parameter is kept; any other name as it is."""
        return self._first.get(name, name)

    def states(self, name: str) -> list[str]:
        """States that a parameter has for each element: ``weight``, the optimizer's, 8-bit ones by their own name."""
        kept = self._states.get(name, [])
        coded = [
            s.removesuffix("_scales") for s in kept if self._by_state[(name, s)][0].kind == "block" and s != "weight"
        ]
        parts = {f"{s}_{part}" for s in coded for part in ("codes", "scales")}
        return [s for s in kept if s not in parts] + coded

    def dtype(self, name: str, state: str = "weight") -> torch.dtype:
        """The dtype that :meth:`read` gives by itself."""
        pieces = self._by_state.get((name, state))
        if pieces and pieces[0].width == 1:
            return DTYPES[pieces[0].dtype]
        return DTYPES[self.parameters[name].dtype] if state == "weight" else torch.float32

    def read(
        self,
        name: str,
        state: str = "weight",
        start: int = 0,
        stop: int | None = None,
        *,
        out: Tensor | None = None,
        box: Box | None = None,
    ) -> Tensor:
        """Elements ``[start, stop)`` of a state in row-major order, whatever boxes of it were written.

        Args:
            name: of a parameter, as the checkpoint has it.
            state: see :meth:`states`.
            start: first element.
            stop: behind the last; None: the end.
            out: 1-D, contiguous, of any dtype and device, is written to; None makes one of the state's own dtype.
            box: of the parameter, whose elements ``start`` and ``stop`` count; None: the whole.

        Returns:
            ``out``, ``(stop - start,)``.

        Raises:
            CheckpointError: there is no such state, elements are missing, or the file is damaged there.
        """
        parameter = self.parameters.get(name) or self.buffers.get(name)
        if parameter is None:
            raise CheckpointError(f"{self.path} has no parameter {name!r}.{did_you_mean(name, self.parameters)}")
        if box is not None and box == Box.of(parameter.shape):
            box = None
        stop = (parameter.numel if box is None else box.numel) if stop is None else stop
        if (name, state) not in self._by_state and (name, f"{state}_codes") in self._by_state:
            return self._decoded(parameter, state, start, stop, out, box)
        found = self._found(parameter, state, start, stop, box)
        if out is None:
            out = torch.empty(stop - start, dtype=self.dtype(name, state))
        for piece, extents in found:
            for extent in extents:
                a = extent.one - start
                if piece.width == 1:
                    self._reader.read(piece, extent.other, out[a : a + extent.numel])
                else:
                    self._read_codes(parameter, piece, extent.other, out[a : a + extent.numel])
        return out

    def codes(self, name: str, start: int, stop: int, *, out: Tensor, box: Box | None = None) -> None:
        """The codes of elements ``[start, stop)``, ``start`` and ``stop`` of whole blocks or the end, of a parameter
        whose weights are codes, into ``out``, uint8, behind which nothing is written.

        Raises:
            CheckpointError: elements are missing, or the file is damaged there.
        """
        parameter = self.parameters[name]
        box = None if box is not None and box == Box.of(parameter.shape) else box
        for piece, extents in self._found(parameter, "weight", start, stop, box):
            for one, other, numel in extents:
                a, b = (one - start) // piece.block, -(-(one - start + numel) // piece.block)
                part = out[a * piece.width : b * piece.width]
                self._reader.read(piece, other // piece.block * piece.width, part)

    def has_codes(self, name: str, form: str, box: Box | None) -> bool:
        """Whether the weights of a parameter are codes of that format, of this box or the whole."""
        parameter = self.parameters[name]
        box = None if box is not None and box == Box.of(parameter.shape) else box
        pieces = self._by_state.get((name, "weight"), ())
        return parameter.codes == form and all(piece.box == box for piece in pieces)

    def _read_codes(self, parameter: Parameter, piece: Piece, start: int, out: Tensor) -> None:
        """What codes of a piece stand for, from its element ``start`` on."""
        form, block = self._form(parameter, piece), piece.block
        step = max(AT_ONCE // block, 1) * block
        first, stop = start // block * block, start + out.numel()
        for a in range(first, stop, step):
            b = min(a + step, -(-stop // block) * block)
            codes = torch.empty((b - a) // block * piece.width, dtype=torch.uint8)
            self._reader.read(piece, a // block * piece.width, codes)
            values = torch.empty(b - a, dtype=DTYPES[parameter.dtype])
            form.decode(codes.view(1, -1), values.view(1, -1))
            low, high = max(a, start), min(b, stop)
            out[low - start : high - start].copy_(values[low - a : high - a])

    def _form(self, parameter: Parameter, piece: Piece) -> Format:
        name = parameter.codes or ""
        form = FORMATS[name] if name in FORMATS else None  # noqa: SIM401 (they are made when they are first asked for)
        if form is None or (form.block, form.nbytes(form.block)) != (piece.block, piece.width):
            raise CheckpointError(
                f"{self.path}: {parameter.name!r} was saved as codes of {parameter.codes!r}, {piece.width} bytes for "
                f"{piece.block} elements, which this version does not know."
            )
        return form

    def _found(
        self, parameter: Parameter, state: str, start: int, stop: int, box: Box | None
    ) -> list[tuple[Piece, list[Extent]]]:
        """The pieces that have elements ``[start, stop)`` of a box, and where.

        Raises:
            CheckpointError: elements are missing.
        """
        name = parameter.name
        found = [
            (piece, list(overlaps(piece, parameter.shape, start, stop, box)))
            for piece in self._by_state.get((name, state), ())
        ]
        read, behind = 0, start
        for first, _, numel in sorted(extent for _, extents in found for extent in extents):
            read += max(0, first + numel - max(behind, first))  # each element once: what no file has is not made up
            behind = max(behind, first + numel)
        if read != stop - start:
            if state == "weight" and parameter.digest is not None:
                raise CheckpointError(
                    f"{self.path} was saved with frozen='skip' and has no values of {name!r}: they are in the model "
                    "that was trained on; load the checkpoint into an engine that holds it."
                )
            raise CheckpointError(
                f"{self.path} has {read} of the elements {start} to {stop} of {state!r} of {name!r}"
                + ("; it keeps " + ", ".join(self.states(name)) if not read else "")
                + "."
            )
        return found

    def _decoded(
        self, parameter: Parameter, state: str, start: int, stop: int, out: Tensor | None, box: Box | None
    ) -> Tensor:
        """Values of an 8-bit state (arXiv 2110.02861); blocks are counted in the box that they were written of."""
        self._found(parameter, f"{state}_codes", start, stop, box)
        whole = Box.of(parameter.shape)
        out = torch.empty(stop - start) if out is None else out
        by_box: dict[Box, list[Piece]] = {}
        for piece in self._by_state[(parameter.name, f"{state}_scales")]:
            by_box.setdefault(piece.box or whole, []).append(piece)
        for theirs, scales in by_box.items():
            mine, within = box or whole, (start, stop)
            extents = list(shared(mine, within, theirs, (0, theirs.numel)))
            if not extents:
                continue
            low, high = extents[0].other, extents[-1].other + extents[-1].numel
            for first, values in self._decoded_blocks(parameter, state, low, high, theirs, scales):
                for a, b, numel in shared(mine, within, theirs, (first, first + values.numel())):
                    out[a - start : a - start + numel].copy_(values[b - first : b - first + numel])
        return out

    def _decoded_blocks(
        self, parameter: Parameter, state: str, start: int, stop: int, box: Box, scales: Sequence[Piece]
    ) -> Iterator[tuple[int, Tensor]]:
        """The blocks of a box that have its elements ``[start, stop)``: the first element, and values in fp32."""
        from shardfold.optim.adamw8bit import dequantize

        block = scales[0].block
        low, high = start // block * block, min(-(-stop // block) * block, box.numel)
        codes = self.read(parameter.name, f"{state}_codes", low, high, box=box)
        factors = torch.full((-(-(high - low) // block),), float("nan"))
        for piece in scales:
            a, b = max(low, piece.start), min(high, piece.stop)
            if a < b:
                part = factors[(a - low) // block : -(-(b - low) // block)]
                self._reader.read(piece, (a - piece.start) // block, part)
        step = max(AT_ONCE // block, 1) * block
        for a in range(low, high, step):
            b = min(a + step, high)
            some = factors[(a - low) // block : -(-(b - low) // block)]
            yield a, dequantize(codes[a - low : b - low], some, block, signed=state == "exp_avg")

    def parameter(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter's weights, in its shape."""
        name = self.first_name(name)
        values = self.read(name).view(self.parameters[name].shape)
        return values if dtype is None else values.to(dtype)

    def buffer(self, name: str) -> Tensor:
        """A buffer, in its shape and dtype."""
        return self.read(name).view((self.buffers.get(name) or self.parameters[name]).shape)

    def once(self, name: str, without: Collection[str] = ()) -> dict[str, Any]:
        """What the optimizer keeps of a parameter once: numbers and tensors, by name; some tensors are not read."""
        said = {key: decode(value, self._no_tensor) for key, value in self.index.once.get(name, {}).items()}
        for piece in self._once.get(name, ()):
            if piece.state not in without:
                said[piece.state] = self._reader.tensor(piece)
        return said

    def run(self) -> dict[str, Any]:
        """What all ranks share: the schedule, the loss scale, averages, the user's own."""
        return decode(self.index.run, self._of_run)

    def extra_names(self) -> set[str] | None:
        """Names of the extra state of modules, as a state dict has them; None: whoever wrote it, kept none of any.

        Raises:
            CheckpointError: it is damaged.
        """
        said = self.index.run.get("extra")
        if said is not None and not isinstance(said, dict):
            raise CheckpointError(f"{self.path} is damaged: its extra state of modules is not an object.")
        return None if said is None else set(said)

    def extra(self) -> dict[str, Any]:
        """Extra state of modules, by these names, as plain values and tensors."""
        return {name: decode(self.index.run["extra"][name], self._of_run) for name in self.extra_names() or ()}

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Of each group of the optimizer: its options, and the names of its parameters."""
        if self.index.optimizer is None:
            return []
        return [(decode(g["options"], self._of_run), g["parameters"]) for g in self.index.optimizer["groups"]]

    def rank(self, rank: int) -> dict[str, Any]:
        """What one rank kept: ``{"rng": its random numbers, "state": the user's own}``."""
        return {part: self.of_rank(rank, part) for part in self.index.ranks[rank]}

    def of_rank(self, rank: int, part: str) -> Any:
        """One part of :meth:`rank`; nothing else is read."""
        return decode(self.index.ranks[rank][part], lambda name: self._tensor("rank", name, rank))

    def _of_run(self, name: str) -> Tensor:
        return self._tensor("run", name, None)

    def _tensor(self, kind: str, name: str, rank: int | None) -> Tensor:
        """A tensor that a tree refers to."""
        piece = self._single.get((kind, "", name, rank))
        return self._reader.tensor(piece) if piece is not None else self._no_tensor(name)

    def _no_tensor(self, name: str) -> Tensor:
        raise CheckpointError(f"{self.path}: {name!r} is not where it should be; the index is damaged.")
