"""Which samples share a row of tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["best_fit"]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put samples into bins of ``capacity`` tokens: the longest first, each into the bin it leaves least space in.

    "Best-fit decreasing" (Johnson, "Near-Optimal Bin Packing Algorithms", 1973; for language models Ding et al., arXiv
    2404.10830). It needs at most 11/9 of the fewest bins, and nearly none too many for lengths that are mixed. A sample
    longer than a bin gets one of its own.

    Args:
        lengths: of samples, in tokens.
        capacity: of a bin.

    Returns:
        Numbers of samples, bin by bin; ascending within a bin.
    """
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # bins by the space they have left
    spaces = 0  # bit s is set where some bin has s tokens left
    for number in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[number]
        fitting = spaces >> length
        if fitting and length <= capacity:
            space = length + (fitting & -fitting).bit_length() - 1  # the least one that is enough
            place = open_bins[space].pop()
            if not open_bins[space]:
                spaces ^= 1 << space
            bins[place].append(number)
        else:
            space, place = max(capacity, length), len(bins)
            bins.append([number])
        if left := space - length:
            open_bins.setdefault(left, []).append(place)
            spaces |= 1 << left
    return [sorted(each) for each in bins]
