"""How well scores of pairs tell whether two images are of one identity.

Precision at a false-accept rate f, written ``96.78@0.01``, is here what the report calls it: the share of genuine pairs
that is accepted (TP / (TP + FN)) at the lowest threshold at which at most f of the impostor pairs are (FP / (FP + TN)).
All pairs count. They are scored a chunk of rows at a time, and never kept: a score of fp32 is 32 bits in order, of
which a first pass counts impostors by the upper 16, and a second by the lower 16 in those places that hold a threshold.
So thresholds are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PairVerification", "cosine_scores", "identification", "verify"]

Scores = Callable[[int, int], npt.NDArray[np.float32]]
"""``scores(start, stop)``: of images ``[start, stop)`` against all, ``(stop - start, n)``; the same in each call."""

CHUNK = 512
MOST_PAIRS = 3_000_000
"""Impostor pairs of which intervals are made; of more, the highest scores if they suffice."""


@dataclass(frozen=True)
class PairVerification:
    """What was found.

    Attributes:
        rates: false-accept rates, as asked.
        accepted: Precision at each, from 0 to 1.
        thresholds: scores above which a pair is accepted.
        intervals: 95 % intervals of ``accepted`` over identities; none where they were not asked for or there are too
            many pairs.
        genuine, impostor: numbers of pairs.
        curve: of false-accept rates and Precision, in rising order, for pictures.
    """

    rates: list[float]
    accepted: list[float]
    thresholds: list[float]
    intervals: list[tuple[float, float]]
    genuine: int
    impostor: int
    curve: list[tuple[float, float]]

    def __str__(self) -> str:
        return ", ".join(f"{100 * a:.2f}@{rate:g}" for a, rate in zip(self.accepted, self.rates, strict=True))


def cosine_scores(embeddings: npt.NDArray[np.float32]) -> Scores:
    """Cosines of embeddings ``(n, d)``."""
    length = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = (embeddings / np.maximum(length, 1e-12)).astype(np.float32)
    return lambda start, stop: unit[start:stop] @ unit.T


def verify(
    scores: Scores,
    labels: npt.NDArray[np.int64],
    rates: Sequence[float],
    *,
    bootstrap: int = 0,
    seed: int = 0,
    chunk: int = CHUNK,
) -> PairVerification:
    """Over all pairs of images.

    Args:
        scores: of pairs; the higher, the more alike.
        labels: ``(n,)``, identities.
        rates: false-accept rates between 0 and 1.
        bootstrap: how often identities are drawn anew, for intervals.
        seed: of these draws.
        chunk: rows that are scored at once.
    """
    n = len(labels)
    together = np.bincount(np.unique(labels, return_inverse=True)[1]).astype(np.int64)
    num_genuine = int((together * (together - 1) // 2).sum())
    num_impostor = n * (n - 1) // 2 - num_genuine
    drawn = np.geomspace(max(1 / max(num_impostor, 1), 1e-7), 1.0, 200)
    wanted = [*rates, *drawn]
    ranks = np.array([_allowed(rate, num_impostor) for rate in wanted], dtype=np.int64)
    keys = _largest(scores, labels, ranks, num_impostor, chunk)
    genuine = np.sort(np.concatenate([s for s, same, _ in _pairs(scores, labels, chunk) for s in [s[same]]]))
    above = [num_genuine - int(np.searchsorted(genuine, key, side="right")) for key in keys]
    accepted = [found / max(num_genuine, 1) for found in above]
    count = len(rates)
    intervals = _intervals(scores, labels, rates, bootstrap, seed, chunk, num_impostor) if bootstrap else []
    return PairVerification(
        list(rates),
        accepted[:count],
        [float(key) for key in keys[:count]],
        intervals,
        num_genuine,
        num_impostor,
        list(zip(drawn.tolist(), accepted[count:], strict=True)),
    )


def identification(
    scores: Scores, labels: npt.NDArray[np.int64], ranks: Sequence[int] = (1, 5), chunk: int = CHUNK
) -> list[float]:
    """The share of images whose identity is among the ``r`` identities that are most alike, where the first image of
    each is enrolled and the others are looked up."""
    _, enrolled = np.unique(labels, return_index=True)
    probes = np.setdiff1d(np.arange(len(labels)), enrolled)
    found = np.zeros(len(ranks))
    for start in range(0, len(labels), chunk):
        rows = np.arange(start, min(start + chunk, len(labels)))
        mine = np.isin(rows, probes)
        part = scores(start, int(rows[-1]) + 1)[mine][:, enrolled]
        own = np.searchsorted(labels[enrolled], labels[rows[mine]])
        better = (part > np.take_along_axis(part, own[:, None], 1)).sum(1)
        found += [(better < rank).sum() for rank in ranks]
    return (found / max(len(probes), 1)).tolist()


def _allowed(rate: float, impostors: int) -> int:
    """The most impostors that may be accepted: ``k / impostors <= rate``, in the same floats as that is computed in."""
    k = min(int(rate * impostors), impostors)
    while k < impostors and (k + 1) / impostors <= rate:
        k += 1
    while k > 0 and k / impostors > rate:
        k -= 1
    return k


def _pairs(
    scores: Scores, labels: npt.NDArray[np.int64], chunk: int
) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], npt.NDArray[np.int64]]]:
    """Of each pair once: its score, whether it is genuine, and the two images ``(2, pairs)``."""
    n = len(labels)
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        rows, columns = np.nonzero(np.arange(n)[None, :] > np.arange(start, stop)[:, None])
        found = np.asarray(scores(start, stop), dtype=np.float32)[rows, columns]
        yield found, labels[start + rows] == labels[columns], np.stack([start + rows, columns])


def _ordered(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Whole numbers in the order of the values."""
    bits = (values + np.float32(0)).view(np.uint32)  # -0 is 0
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint32)


def _value(key: int) -> np.float32:
    bits = np.uint32(key ^ (1 << 31) if key >> 31 else ~key & (2**32 - 1))
    return bits.view(np.float32)


def _largest(
    scores: Scores, labels: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64], number: int, chunk: int
) -> list[np.float32]:
    """Of impostors the score that so many are above, for each of ``ranks``; -inf where all may be accepted."""
    upper = np.zeros(1 << 16, np.int64)
    for found, same, _ in _pairs(scores, labels, chunk):
        upper += np.bincount(_ordered(found[~same]) >> 16, minlength=1 << 16)
    behind = np.concatenate([np.cumsum(upper[::-1])[::-1], [0]])  # impostors in this place or above
    places = {int(r): int(np.searchsorted(-behind, -int(r), side="left")) - 1 for r in ranks if r < number}
    lower = {place: np.zeros(1 << 16, np.int64) for place in set(places.values())}
    if lower:
        chosen = np.zeros(1 << 16, bool)
        chosen[list(lower)] = True
        for found, same, _ in _pairs(scores, labels, chunk):
            keys = _ordered(found[~same])
            keys = keys[chosen[keys >> 16]]
            for place, counts in lower.items():
                counts += np.bincount(keys[keys >> 16 == place] & 0xFFFF, minlength=1 << 16)
    out: list[np.float32] = []
    for rank in ranks.tolist():
        if rank >= number:
            out.append(np.float32(-np.inf))
            continue
        place = places[rank]
        from_top = np.cumsum(lower[place][::-1])  # within the place
        inside = int(np.searchsorted(from_top, rank - int(behind[place + 1]), side="right"))
        out.append(_value(place << 16 | 0xFFFF - inside))
    return out


def _intervals(
    scores: Scores,
    labels: npt.NDArray[np.int64],
    rates: Sequence[float],
    times: int,
    seed: int,
    chunk: int,
    number: int,
) -> list[tuple[float, float]]:
    """Identities are drawn with replacement; a pair counts as often as its two were, one identity's as often as it."""
    if number > MOST_PAIRS:
        return []
    parts = list(_pairs(scores, labels, chunk))
    found = np.concatenate([p[0] for p in parts])
    same = np.concatenate([p[1] for p in parts])
    number_of = np.unique(labels, return_inverse=True)[1]
    who = number_of[np.concatenate([p[2] for p in parts], axis=1)]
    order = np.argsort(-found[~same], kind="stable")
    impostors, first, second = found[~same][order], who[0][~same][order], who[1][~same][order]
    genuine_order = np.argsort(-found[same], kind="stable")
    genuine, owner = found[same][genuine_order], who[0][same][genuine_order]
    draw = np.random.default_rng(seed)
    classes = int(number_of.max()) + 1
    samples: list[list[float]] = []
    for _ in range(times):
        weight = np.bincount(draw.integers(classes, size=classes), minlength=classes)
        wrong = np.cumsum(weight[first] * weight[second])
        right = np.concatenate([[0], np.cumsum(weight[owner])])
        if not wrong[-1] or not right[-1]:
            continue
        row: list[float] = []
        for rate in rates:
            at = min(int(np.searchsorted(wrong, rate * wrong[-1], side="right")), len(impostors) - 1)
            row.append(float(right[np.searchsorted(-genuine, -impostors[at], side="left")] / right[-1]))
        samples.append(row)
    low, high = np.quantile(np.array(samples), [0.025, 0.975], axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))
