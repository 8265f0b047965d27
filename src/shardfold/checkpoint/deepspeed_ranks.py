"""Which elements of which parameter a rank of DeepSpeed's has, under ZeRO 1, 2 and 3.

A rank's part is some *flats*: one vector for each group of parameters, in stage 3 for each sub-group, and for each flat
the optimizer's states of its length. Which elements of which parameter they are follows from ``param_shapes``, the
names and shapes in the order of the flats:

    stages 1, 2    the parameters lie one behind the other (with gaps under ``parameter_alignment``), and this whole is
                   cut into equal parts, of which rank R has the R-th: a parameter may begin on one rank and end on
                   another. What pads the last parts is cut off from the saved weights, though not from the moments.
    stage 3        each parameter is cut into equal parts, the last ones padded, and rank R has the R-th of each.

The files of stages 1 and 2 also have ``param_slice_mappings``, which is not used: DeepSpeed 0.19 makes it of another
order than that of the elements under ``round_robin_gradients``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shardfold.checkpoint.pickled import load_pickled
from shardfold.checkpoint.trees import encode
from shardfold.errors import CheckpointError

__all__ = ["FlatPlace", "RankFile", "RankRange", "cut_each", "cut_together", "is_plain", "rank_files"]

OPTIMIZER_FILE = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
#: Options of a group that say how a class computes, or count; the rest says what it computes.
NOT_KEPT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "bias_correction", "step"}


class RankRange(NamedTuple):
    """Consecutive elements of a parameter: ``[start, start + numel)`` of one of a rank's flats."""

    rank: int
    start: int
    numel: int


@dataclass(frozen=True)
class FlatPlace:
    """Where a parameter is: its elements in order, stretch by stretch, all in the flat of the same number."""

    flat: int
    shape: tuple[int, ...]
    stretches: tuple[RankRange, ...]


class RankFile:
    """One rank's ``*_optim_states.pt``.

    Attributes:
        stage: of ZeRO; 1 stands for 2 too.
        ranks: how many the state was cut for.
        flats: fp32 weights, 1-D.
        states: of each flat what the optimizer keeps, by name.
        groups: options and numbers of flats of each group; none where the file does not say.
        gaps: elements left free behind each parameter, by flat; none where there are none.
        scaler: the loss scaler, an object of DeepSpeed's, or None.
        clip: the norm that gradients were clipped at, or None.
        corrected: False: the optimizer did not correct the bias of its moments.
    """

    def __init__(self, path: Path) -> None:
        kept = load_pickled(path).get("optimizer_state_dict")
        kept = kept if isinstance(kept, dict) else {}
        self.path = path
        self.stage = 3 if "fp32_flat_groups" in kept else 1
        flats = kept.get("fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups")
        inner = kept.get("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if not isinstance(flats, list) or not all(isinstance(each, Tensor) for each in flats) or inner is None:
            raise CheckpointError(
                f"{path} has no fp32 weights and optimizer state as ZeRO 1, 2 or 3 keeps them in memory; if they were "
                "on NVMe, export them with DeepSpeed's own tools."
            )
        self.flats: list[Tensor] = [flat.detach() for flat in flats]
        count = kept.get("partition_count", 1)
        self.ranks: int = max(count) if isinstance(count, list | tuple) else int(count)
        self.groups: list[tuple[dict[str, Any], list[int]]] = []
        self.corrected = True
        if isinstance(inner, list):  # elastic: states of flats, without the groups
            states, step = inner, kept.get("base_optimizer_state_step")
            self.states = [dict(each) | ({"step": step} if step is not None else {}) for each in states]
        else:
            self.states = []
            for group in inner["param_groups"]:
                first = len(self.states)
                for number in group["params"]:
                    found = dict(inner["state"].get(number, {}))
                    self.states.append({"step": group["step"]} | found if "step" in group else found)
                self.corrected = self.corrected and group.get("bias_correction") is not False
                options = {k: v for k, v in group.items() if k not in NOT_KEPT and is_plain(v)}
                self.groups.append((options, list(range(first, len(self.states)))))
        if len(self.states) != len(self.flats):
            raise CheckpointError(f"{path} has {len(self.flats)} flats of weights and states of {len(self.states)}.")
        self.gaps: list[list[int]] | None = kept.get("param_alignment_paddings")
        self.scaler: Any = kept.get("loss_scaler")
        self.clip: float | None = kept.get("clip_grad")


# -- files


def rank_files(folder: Path) -> list[RankFile]:
    """Of all ranks, in their order."""
    inside = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if any("expert" in name for name in inside):
        raise CheckpointError(f"{folder} is of a model with experts, which is not read.")
    if "zero" in inside and (folder / "zero").is_dir():
        raise CheckpointError(f"{folder} is a universal checkpoint: import the folder that it was made from.")
    found: dict[int, Path] = {}
    for name in inside:
        match = OPTIMIZER_FILE.fullmatch(name)
        if match is None:
            continue
        if int(match[2]):
            raise CheckpointError(f"{folder} is of a run with tensor or pipeline parallelism, which is not read.")
        if int(match[1]) in found:
            raise CheckpointError(
                f"{folder} has two optimizer files of rank {match[1]} ({found[int(match[1])].name}, {name}): remove "
                "the one of the older run."
            )
        found[int(match[1])] = folder / name
    if not found:
        raise CheckpointError(
            f"{folder} has no *_optim_states.pt: it is of a run without ZeRO, or not all of it is there; weights alone "
            "are imported from its model file with --from torch --key module."
        )
    ranks = {rank: RankFile(path) for rank, path in sorted(found.items())}
    first = next(iter(ranks.values()))
    if sorted(ranks) != list(range(first.ranks)):
        missing = sorted(set(range(first.ranks)) - set(ranks))
        what = f"those of {', '.join(map(str, missing))} are missing" if missing else "there are more"
        raise CheckpointError(
            f"{folder} was written by {first.ranks} ranks and has optimizer files of {len(ranks)}: {what}."
        )
    odd = [one for one in ranks.values() if (one.stage, one.ranks) != (first.stage, first.ranks)]
    if odd:
        raise CheckpointError(f"{odd[0].path} is of another run than {first.path.name}: its stage or its ranks differ.")
    return list(ranks.values())


# -- where elements are


def cut_together(
    flat: int, shapes: Mapping[str, tuple[int, ...]], gaps: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[str, FlatPlace]]:
    """Stages 1 and 2: parameters one behind the other, cut into a part of ``lengths`` elements for each rank."""
    bounds = list(pairwise(accumulate(lengths, initial=0)))
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        stop = at + math.prod(shape)
        cuts = [(rank, max(at, low), min(stop, high), low) for rank, (low, high) in enumerate(bounds)]
        stretches = tuple(RankRange(rank, a - low, b - a) for rank, a, b, low in cuts if a < b)
        yield name, FlatPlace(flat, shape, stretches)
        at = stop + gap


def cut_each(flat: int, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Iterator[tuple[str, FlatPlace]]:
    """Stage 3: of each parameter an equal part for each rank."""
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // ranks)
        sizes = [min(part, numel - rank * part) for rank in range(ranks)]
        yield name, FlatPlace(flat, shape, tuple(RankRange(rank, at, n) for rank, n in enumerate(sizes) if n > 0))
        at += part


def is_plain(value: Any) -> bool:
    """Whether a checkpoint keeps it."""
    try:
        encode(value, "", {})
    except CheckpointError:
        return False
    return True
