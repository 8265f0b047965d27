"""Orders in which ranks do a forward and a backward in turn, behind some forwards ahead of them."""

from __future__ import annotations

from collections.abc import Sequence

from shardfold.parallel.pipeline.action import Action

__all__ = ["in_turn"]


def in_turn(ranks: int, chunks: int, batches: int, place: int, *, split: bool = False) -> list[Action]:
    """What the rank at a place does. With several stages, ``chunks``, on each rank it takes ``batches`` in rounds, all
    of a round through one stage before the next (arXiv 2104.04473); where they do not divide into rounds of about as
    many as there are ranks, some of the last round are left out.

    Args:
        split: backwards are in two parts; that of weights comes ``place`` backwards later, so that a rank keeps no more
            micro-batches than without, and fills the end, where ranks otherwise wait (ZB-H1 of arXiv 2401.10241).
    """
    rounds = max(1, batches // ranks)
    several = chunks > 1
    whole = batches if not several or batches % rounds == 0 else -(-batches // ranks) * ranks
    group = whole if not several else whole // max(1, whole // ranks)
    numbers = [(k // group % chunks, k // (group * chunks) * group + k % group) for k in range(whole * chunks)]
    onward = [(chunk * ranks + place, batch) for chunk, batch in numbers]
    back = [((chunks - 1 - chunk) * ranks + place, batch) for chunk, batch in numbers]
    hop = 2 if several and not split else 1
    ahead = min(len(onward), (ranks - place - 1) * hop + (chunks - 1) * group)
    actions = _alternate(onward, back, ahead, place if split else None)
    return [action for action in actions if action.batch < batches]


def _alternate(
    onward: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]], ahead: int, lag: int | None
) -> list[Action]:
    """So many forwards ``ahead``, then one forward and one backward in turn, then the rest of the backwards; with
    ``lag`` the part for weights of each so many backwards later."""
    actions = [Action("F", *each) for each in onward[:ahead]]
    for i, each in enumerate(back):
        actions += [Action("F", *one) for one in onward[ahead + i : ahead + i + 1]]
        actions.append(Action("B" if lag is None else "I", *each))
        if lag is not None and i >= lag:
            actions.append(Action("W", *back[i - lag]))
    if lag is not None:
        actions += [Action("W", *each) for each in back[max(0, len(back) - lag) :]]
    return actions
