"""Who is slower than the others, and by what, from the times of steps that ranks tell each other on the way.

Each rank puts what its last step took of it into messages that are sent anyway: its computation, what it did outside of
passes (its data, as a rule), and its waiting. All read the same and come to the same verdict; nothing more is sent.

A rank's excess is what its computation, or that and its data, takes beyond the median of the others, as a logarithm of
the factor by which a step gets longer for it. Excesses are added up less what noise explains, and never below 0 (the
CUSUM test: Page, Biometrika 1954): a lasting small one is found as well as a large one, and one slow step is neither.
What noise explains is measured (the median of absolute deviations). Waiting of which even the least of all ranks has
more than it had is the link's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, exp, log
from statistics import median
from typing import NamedTuple

from shardfold.plan.report import Straggler

__all__ = ["Pace", "Spent"]

TALKERS, WIDTH = 16, 6
"""Ranks that tell their times in one step, as others take turns; bytes of each."""
LEAST, CODES, SPAN = 1e-5, 65534, 20.72
"""Seconds of the least code; codes, and how many powers of e they span."""
WARM, KNOWN, WINDOW = 4, 16, 50
"""Steps that tell nothing, as caches fill; until noise is known; that noise and what was usual are taken of."""
SLACK, ALARM, MOST = 0.05, 1.25, 0.3
"""Of the logarithm: what is taken off in each step, what sums are reported, and what one step adds or takes at most."""
LINK = (0.1, 1.1)
"""Slack and alarm of the link. Its usual is its own past, and that of all ranks at once: a host's load shows there."""
OF_NOISE = (0.5, 14.0)
"""Slack and alarm where the deviation is so large that these times it are more."""
RECENT, OVER = 8, 0.04
"""Steps whose median is the factor, and below what (of twice as many) it is over."""
KINDS = ("computation", "data", "link")


class Spent(NamedTuple):
    """Seconds of one step on one rank: ``computation`` in passes and the step, ``data`` between them, ``waiting`` for
    other ranks."""

    computation: float
    data: float
    waiting: float


class _Drift:
    """Of one rank, or of the link."""

    def __init__(self, slack: float = SLACK, alarm: float = ALARM) -> None:
        self._least = slack, alarm
        self.values: deque[float] = deque(maxlen=WINDOW)
        self.data: deque[float] = deque([0.0], maxlen=RECENT)  # what of the last ones is data
        self.total = self.noise = 0.0
        self.alarmed = False

    def add(self, value: float) -> None:
        self.values.append(value)
        slack, alarm = (max(least, times * self.noise) for least, times in zip(self._least, OF_NOISE, strict=True))
        if len(self.values) < KNOWN:
            alarm *= 2
        self.total = min(max(0.0, self.total + max(min(value, MOST), -MOST) - slack), 2 * alarm)
        if self.alarmed:
            self.alarmed = median(list(self.values)[-2 * RECENT :]) > OVER
            self.total *= self.alarmed
        else:
            self.alarmed = self.total > alarm and self.recent > OVER

    def measure(self) -> None:
        """What of the values is noise."""
        middle = median(self.values)
        self.noise = 1.4826 * median(abs(value - middle) for value in self.values)

    @property
    def recent(self) -> float:
        return median(list(self.values)[-RECENT:])


class Pace:
    """Of the ranks that run one program.

    Args:
        ranks: these, by their number in the job.
        me: which of them this one is.
        links: there are links between them, and not the memory of one host only.

    Attributes:
        slowest: what makes steps longer; None: nothing does, or it is not known yet.
    """

    def __init__(self, ranks: Sequence[int], me: int, *, links: bool = True) -> None:
        self._ranks, self._me = tuple(ranks), list(ranks).index(me)
        self._links = links
        self._turns = ceil(len(self._ranks) / TALKERS)
        self._steps = 0
        self._drifts = [_Drift() for _ in self._ranks]
        self._link, self._waits = _Drift(*LINK), deque[float](maxlen=WINDOW)
        self._usual: float | None = None  # waiting that is what links take
        self.slowest: Straggler | None = None

    @classmethod
    def among(cls, ranks: Sequence[int], me: int, *, links: bool = True) -> Pace | None:
        """None: there is one rank."""
        return cls(ranks, me, links=links) if len(ranks) > 1 else None

    @property
    def room(self) -> int:
        """Bytes of a message that it takes."""
        return WIDTH * min(len(self._ranks), TALKERS)

    def told(self, spent: Spent | None) -> bytes:
        """What this rank tells of the step that is over; nothing, where it is others' turn or that is not known. Behind
        :meth:`hear`."""
        place = bytearray(self.room)
        if spent is not None and self._me // TALKERS == self._steps % self._turns:
            at = WIDTH * (self._me % TALKERS)
            place[at : at + WIDTH] = b"".join(_code(seconds).to_bytes(2, "big") for seconds in spent)
        return bytes(place)

    def hear(self, said: bytes, host: Callable[[int], str]) -> bool:
        """A step is over, in which ranks have told their times of the one before. Whether what makes steps longer is
        now another; ``host``: the name of a rank's, which is asked then."""
        turn = self._steps % self._turns
        self._steps += 1
        first = TALKERS * turn
        each = {
            first + place: Spent(*(_seconds(said[at + i : at + i + 2]) for i in range(0, WIDTH, 2)))
            for place, at in enumerate(range(0, len(said), WIDTH))
            if any(said[at : at + WIDTH])
        }
        if self._steps <= WARM * self._turns or len(each) < 2:
            return False
        self._compare(each)
        before, self.slowest = self.slowest, self._judge()
        if self.slowest is None or before is None:
            changed = self.slowest is not before
        else:
            changed = (before.rank, before.kind) != (self.slowest.rank, self.slowest.kind)
        if self.slowest is not None and self.slowest.rank is not None:
            name = host(self.slowest.rank) if changed or before is None else before.host
            self.slowest = self.slowest._replace(host=name)
        return changed

    def _compare(self, each: dict[int, Spent]) -> None:
        computing = sorted(spent.computation for spent in each.values())
        busy = sorted(spent.computation + spent.data for spent in each.values())
        for rank, spent in each.items():
            usual = _median_without(busy, spent.computation + spent.data)
            more = spent.computation - _median_without(computing, spent.computation)
            whole = spent.computation + spent.data - usual
            # A rank that waits in a collective of the user's own is busy as well: only together with computation, which
            # the slow one alone has more of, does data count.
            excess = max(more, whole)
            self._drifts[rank].data.append((whole - more) / excess if excess > 0 else 0.0)
            self._drifts[rank].add(log(max(1 + excess / usual, 1e-3)) if usual > 0 else 0.0)
        measured = list(each)[self._steps // self._turns % len(each)]
        self._drifts[measured].measure()
        least = min(spent.waiting for spent in each.values())
        if self._links and self._usual is not None and (typical := median(busy) + self._usual) > 0:
            self._link.add(log(max(1 + (least - self._usual) / typical, 1e-3)))
            if self._steps % RECENT == 0:
                self._link.measure()
        self._waits.append(least)
        if len(self._waits) >= KNOWN and not self._link.alarmed:
            now = median(self._waits)
            self._usual = now if self._usual is None else min(self._usual, now)

    def _judge(self) -> Straggler | None:
        """The greatest of what is reported."""
        slow = [(drift.recent, rank) for rank, drift in enumerate(self._drifts) if drift.alarmed]
        if slow:
            value, rank = max(slow)
            kind = KINDS[median(self._drifts[rank].data) > 0.5]
            return Straggler(self._ranks[rank], "", kind, exp(value))
        return Straggler(None, "", "link", exp(self._link.recent)) if self._link.alarmed else None


def _median_without(ordered: Sequence[float], one: float) -> float:
    """Of the others."""
    at = ordered.index(one)
    return median([*ordered[:at], *ordered[at + 1 :]])


def _code(seconds: float) -> int:
    return 1 + round(CODES * min(max(log(max(seconds, LEAST) / LEAST) / SPAN, 0.0), 1.0))


def _seconds(code: bytes) -> float:
    return LEAST * exp(SPAN * (int.from_bytes(code, "big") - 1) / CODES)
