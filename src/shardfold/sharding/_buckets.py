"""WHICH blocks travel together: small ones that follow each other in a list are one unit.

A collective has a price that does not depend on its bytes: ranks meet for it, and the host begins it, awaits it and
updates what came. Of blocks of some hundred KiB it is most of the step. DDP copies gradients into buckets for that
(arXiv 2006.15704, section 3.2.3). Here the blocks themselves are put together before they are laid out, so that one
flat has the parameters of all: nothing is copied, gathers and updates are fewer too, and what is held and sent is
planned, printed and counted like that of any other unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from torch import nn

__all__ = ["LEAST", "LEAST_WHOLE", "FoundBlock", "buckets", "joint_name"]

LEAST, LEAST_WHOLE = 4, 2
"""Units that a list of blocks is left with at least: with fewer a small model that is split would be whole on each rank
for most of a step. Where parameters and gradients rest whole, one of two is reduced while the other computes."""


class FoundBlock(NamedTuple):
    """A unit to be.

    Attributes:
        path: of its module.
        num_bytes: of its gradients.
        kind: of the segments that it has; blocks of different kinds would not have more in common than one collective.
    """

    path: str
    num_bytes: int
    kind: Hashable


def buckets(model: nn.Module, blocks: Iterable[FoundBlock], most: int, least: int = LEAST) -> Iterator[list[str]]:
    """Paths of blocks that are to be one unit, in order; of those that stay alone nothing is said.

    Args:
        model: whose modules they are.
        blocks: in definition order.
        most: bytes of a unit that is made of several.
        least: units that a list is left with.
    """
    modules = dict(model.named_modules())
    lists = {parent: [*of] for parent, of in groupby(blocks, key=lambda block: _parent(block.path))}
    beside = Counter((_parent(parent), len(of)) for parent, of in lists.items() if parent)
    for parent, of in lists.items():
        # Lists of one length in one module may take turns, layer by layer: together, neighbours of one would be
        # gathered for each.
        in_turns = parent and beside[_parent(parent), len(of)] > 1
        if isinstance(modules.get(parent), (nn.ModuleList, nn.Sequential)) and not in_turns:
            yield from _packed(of, most, len(of) // least)


def _packed(blocks: Sequence[FoundBlock], most: int, count: int) -> Iterator[list[str]]:
    """Runs of blocks with at most so many bytes, and so many of them."""
    run: list[FoundBlock] = []
    for block in (*blocks, None):
        fits = block is not None and len(run) < count and all(block.kind == other.kind for other in run)
        if fits and block is not None and sum(other.num_bytes for other in run) + block.num_bytes <= most:
            run.append(block)
            continue
        if len(run) > 1:
            yield [other.path for other in run]
        run = [block] if block is not None else []


def joint_name(paths: Sequence[str]) -> str:
    """Of a unit that is made of these blocks of a list: ``blocks.0-5``."""
    return f"{paths[0]}-{paths[-1].rpartition('.')[2]}"


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
