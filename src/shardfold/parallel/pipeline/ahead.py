"""Orders in which a rank does not wait for the end of a batch: some of its backwards are of batches before.

    pipedream   as 1f1b, but a stage goes on with the next batch at once: behind each forward comes the backward of as
                many micro-batches before as stages follow (asynchronous 1F1B, arXiv 1806.03377). With one micro-batch
                in a batch these are weights of so many steps before; with several, of one at most
    2bw         forwards of this batch, backwards of the one before, on all stages alike, so that a gradient is always
                one of weights one step old (arXiv 2006.09503). Each rank takes what is there first, backwards before
                forwards

Both change what is trained: a backward has the weights of its forward, which updates have changed since.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardfold.parallel.pipeline.action import Action

__all__ = ["AHEAD", "ahead"]

AHEAD = ("pipedream", "2bw")


def ahead(name: str, ranks: int, batches: int) -> list[list[Action]]:
    """What each rank does in a batch that others were before."""
    if name == "2bw":
        return [list(row) for row in _both_ways(ranks, batches)]
    return [
        [action for i in range(batches) for action in (Action("F", p, i), Action("B", p, i - (ranks - 1 - p)))]
        for p in range(ranks)
    ]


@lru_cache(maxsize=8)
def _both_ways(ranks: int, batches: int) -> Sequence[Sequence[Action]]:
    """Forwards go down the stages while backwards come up: always the action that can begin first."""
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    free, took = [0.0] * ranks, {"F": 1.0, "B": 2.0}
    done = {("F", -1): [0.0] * batches, ("B", ranks): [0.0] * batches}  # by the stage, when each of them is over
    done |= {(verb, p): [] for verb in "FB" for p in range(ranks)}
    for _ in range(2 * ranks * batches):
        found: list[tuple[float, str, int]] = []
        for p in range(ranks):
            for verb, before in (("B", p + 1), ("F", p - 1)):
                i = len(done[verb, p])
                if i < len(done[verb, before]):
                    found.append((max(free[p], done[verb, before][i]), verb, p))
        begin, verb, p = min(found)
        i = len(done[verb, p])
        rows[p].append(Action(verb, p, i - batches if verb == "B" else i))
        free[p] = begin + took[verb]
        done[verb, p].append(free[p])
    return rows
