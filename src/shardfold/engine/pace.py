"""Who is slower than the others, and by what, from the times of steps that ranks tell each other on the way.

Each rank puts what its last steps took of it into messages that are sent anyway: its computation, what it did outside
of passes (its data, as a rule), and its waiting. All read the same and come to the same verdict; nothing more is sent.
A record is of one step, or of as many short ones as take a tenth of a second: their median, and what a quota of
processor time has taken, as that stops a rank in one of them for long.

A rank's excess is what its computation, or that and its data, takes beyond the median of the others, as a logarithm of
the factor by which a step gets longer for it. Its medians over 8 records, and over 40, are compared with how much such
medians of this rank, and of ranks in general, have differed so far (the middle half of them, which odd records do not
move): noise that hangs on from step to step widens these as well, so a rank is named only for what is far beyond
it. Medians over 40 are few for long, so how much less they differ than those over 8 is taken from all ranks, and the
more from the rank itself the more it has. Where ranks share cores, one may have to wait for others to compute, in each
step the same one: only what is beyond that counts. Waiting of which even the least of all ranks has more than it had is
the link's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import ceil, exp, log
from statistics import fmean
from typing import Any, NamedTuple

from shardfold.plan.report import Straggler

__all__ = ["Pace", "Spent"]

TALKERS, WIDTH = 16, 7
"""Ranks that tell their times in one record, as others take turns; bytes of each."""
LEAST, CODES, SPAN = 1e-5, 65534, 20.72
"""Seconds of the least code; codes, and how many powers of e they span."""
CROWDED = 32
"""Codes of a power of e of how many ranks share a core."""
RECORD, MOST = 0.1, 32
"""Seconds of steps in a record, and how many steps it has at most."""
WARM = 4
"""Records that tell nothing, as caches fill."""
SHORT, LONG, HISTORY = 8, 5, 128
"""Records in a block; blocks that the long median is over; blocks that noise is measured of."""
FEWEST, KNOWN = 2, 4
"""Blocks until somebody is named; and until noise is measured of blocks alone, and not of single records too."""
BEYOND, FEW = (7.0, 6.0), 26
"""Times the noise of the short and of the long median that a rank is named for; and of how many medians it is twice as
much, as those of a few blocks, in which noise hangs on, say little. Of 2, 4 and 8 ranks without a slow one none was
named in 810,000 records, where the short median was 6.3 times its noise once, and the long one never more than 5.2."""
OF_RANKS, OF_LINKS = (0.13, 0.05), (0.13, 0.13)
"""What the two medians have to be at least, of the logarithm."""
LARGE = 0.7
"""Up to which that little is known of noise makes it more."""
APART, UNSURE = 0.5, 1.36
"""How far ranks are apart, as a rule, in the logarithm of the long median's noise over the short one's; and the
variance of what a rank has of it, times the medians without a record in common that it has it from: of normally
distributed ones, by their middle half."""
OVER = 0.04
"""Below what the median of twice as many records is over."""
KINDS = ("computation", "data", "link")
ASKED, AGAIN = 8, 2**15
"""How often ranks look for whose link is slow, and in how many records once more."""


class Spent(NamedTuple):
    """Seconds of one step on one rank: ``computation`` in passes and the step, ``data`` between them, ``waiting`` for
    other ranks."""

    computation: float
    data: float
    waiting: float


class _Noise(NamedTuple):
    """How far medians go by themselves: of the short, and of the long one."""

    short: float
    long: float


class _History:
    """The last values, and how they are spread."""

    def __init__(self, most: int = HISTORY) -> None:
        self._values, self._ordered = deque[float](), list[float]()
        self._most = most

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if len(self._values) == self._most:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)

    @property
    def middle(self) -> float:
        return self._at(0.5)

    @property
    def spread(self) -> float:
        """The standard deviation of a normal distribution whose middle half is as wide."""
        return (self._at(0.75) - self._at(0.25)) / 1.349

    def _at(self, part: float) -> float:
        place = part * (len(self._ordered) - 1)
        low = int(place)
        high = min(low + 1, len(self._ordered) - 1)
        return self._ordered[low] + (place - low) * (self._ordered[high] - self._ordered[low])


class _Excess:
    """Of one rank, or of the link.

    Args:
        least: what the short and the long median have to be.
        alike: how many others noise is measured of too.
    """

    def __init__(self, least: tuple[float, float], alike: int = 1) -> None:
        self._least, self._alike, self._count = least, alike, 0
        self._values, self._data = deque[float](maxlen=LONG * SHORT), deque[float](maxlen=SHORT)
        self._singles, self._shorts, self._longs = _History(2 * SHORT), _History(), _History()
        self._since = self._alarmed_at = 0  # the last record for which something was reported, and the first of these
        self._noises = deque[_Noise](maxlen=LONG + 1)
        self.alarmed = False

    def add(self, value: float, data: float = 0.0) -> bool:
        """``data``: the part of it that is data. Whether a block has ended, so that noise is to be measured."""
        self._values.append(value)
        self._data.append(data)
        self._count += 1
        if self.alarmed:
            return False
        if self._count <= SHORT * KNOWN:
            self._singles.add(value)
        if self._count % SHORT:
            return False
        self._shorts.add(self.recent)
        if self._lasts:
            self._longs.add(_middle(self._values))
        return True

    @property
    def _lasts(self) -> bool:
        """Whether the long median is known, and over none of what was reported."""
        return self._count - self._since >= LONG * SHORT

    @property
    def recent(self) -> float:
        return _middle(list(self._values)[-SHORT:])

    @property
    def noise(self) -> _Noise | None:
        """As it is known now, or as it was before the blocks that are judged, if that was less: who gets slow widens
        it, and would hide in it."""
        if not self._noises:
            return None
        return _Noise(*map(min, self._noises[0], self._noises[-1]))

    @property
    def usual(self) -> float:
        return self._shorts.middle if len(self._shorts) else 0.0

    @property
    def is_data(self) -> bool:
        return _middle(self._data) > 0.5

    @property
    def shape(self) -> float | None:
        """The logarithm of the long median's noise over the short one's; None: too little is known of it."""
        if len(self._longs) < KNOWN * LONG or not (short := self._shorts.spread) or not (long := self._longs.spread):
            return None
        return log(long / short)

    def measure(self, shape: float | None) -> None:
        """Noise, as a block has ended; ``shape``: that of ranks as a rule."""
        count, longs = len(self._shorts), len(self._longs)
        if count < FEWEST:
            return
        spread = self._shorts.spread
        short = long = self._doubted(spread if count >= KNOWN else max(spread, self._singles.spread), count)
        if shape is not None and (own := self.shape) is not None:
            sure = APART**2 / (APART**2 + UNSURE * LONG / longs)
            long = self._doubted(spread * exp(shape + sure * (own - shape)), longs)
        self._noises.append(_Noise(short, long))

    def _doubted(self, spread: float, count: int) -> float:
        """With what it may be more, as it is known of so many values."""
        return max(spread, min(spread * (1 + FEW / (count * self._alike)), LARGE / BEYOND[0]))

    def judge(self, others: _Noise, beyond: float = 0.0) -> None:
        """Whether it is far from noise, its own and that of ``others``, and from what is ``beyond`` that explained."""
        if self.alarmed:
            # At first most of twice as many are from before it got slow.
            known = min(SHORT + self._count - self._alarmed_at, 2 * SHORT)
            self.alarmed = _middle(list(self._values)[-known:]) > OVER + beyond
            self._since = self._count
            return
        is_new = self._count % SHORT == 0 and self._lasts
        if self._values[-1] <= self._least[0] + beyond and not is_new:
            return  # one more such value makes no median greater
        short, long = (
            max(low, times * max(own, theirs)) + beyond
            for low, times, own, theirs in zip(self._least, BEYOND, self.noise or others, others, strict=True)
        )
        # Most of the short ones have to be: pages that are lost in just half of them come together now and then.
        last = sorted(list(self._values)[-SHORT:])
        most = last[(len(last) - 1) // 2]
        self.alarmed, self._alarmed_at = most > short or (is_new and _middle(self._values) > long), self._count


class Pace:
    """Of the ranks that run one program.

    Args:
        ranks: these, by their number in the job.
        me: which of them this one is.
        links: there are links between them, and not the memory of one host only.
        crowd: how many ranks a core of this one has, at least 1.
        throttled: for how many seconds this one was kept from computing so far.

    Attributes:
        slowest: what makes steps longer; None: nothing does, or it is not known yet.
        asks: a link does since the last record, and ranks may look for whose; the same on all of them.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        me: int,
        *,
        links: bool = True,
        crowd: float = 1.0,
        throttled: Callable[[], float] = float,
    ) -> None:
        self._throttled, self._lost = throttled, throttled()
        self._ranks, self._me = tuple(ranks), list(ranks).index(me)
        self._crowd = min(round(CROWDED * log(max(crowd, 1.0))), 255)
        self._turns = ceil(len(self._ranks) / TALKERS)
        self._records, self._length = 0, 1  # records so far, and steps of the next one
        self._spent: list[Spent | None] = []  # of this rank, since the last one
        self._is_told = False  # a record comes with the next message
        self._ranked = [_Excess(OF_RANKS, len(ranks) - 1) for _ in self._ranks]
        self._link = _Excess(OF_LINKS) if links else None
        self._noise: _Noise | None = None  # of ranks as a rule
        self.slowest: Straggler | None = None
        self.asks, self._asked = False, 0

    @classmethod
    def among(cls, ranks: Sequence[int], me: int, **how: Any) -> Pace | None:
        """None: there is one rank. ``how``: what else it is given."""
        return cls(ranks, me, **how) if len(ranks) > 1 else None

    @property
    def room(self) -> int:
        """Bytes of a message that it takes."""
        return WIDTH * min(len(self._ranks), TALKERS)

    def told(self, spent: Spent | None) -> bytes | None:
        """What this rank tells from now on, behind the step that took so much of it (None: that is not known), or
        nothing new (None). Behind :meth:`hear`."""
        self._spent.append(spent)
        if len(self._spent) < self._length:
            return None
        known, place = [each for each in self._spent if each is not None], bytearray(self.room)
        self._spent, self._is_told = [], True
        lost, self._lost = self._lost, self._throttled()
        if known and self._me // TALKERS == self._records % self._turns:
            at = WIDTH * (self._me % TALKERS)
            spent = Spent(*map(_middle, zip(*known, strict=True)))
            beyond = fmean(each.computation for each in known) - spent.computation
            stopped = min((self._lost - lost) / len(known), max(beyond, 0.0))
            told = spent._replace(computation=spent.computation + stopped)
            codes = (_code(seconds).to_bytes(2, "big") for seconds in told)
            place[at : at + WIDTH] = b"".join(codes) + bytes([self._crowd])
        return bytes(place)

    def hear(self, said: bytes, host: Callable[[int], str]) -> bool:
        """A step is over, in which ranks may have told their times of those before. Whether what makes steps longer is
        now another; ``host``: the name of a rank's, which is asked then."""
        if not self._is_told:
            return False
        turn, self._is_told = self._records % self._turns, False
        self._records += 1
        first = TALKERS * turn
        each, crowd = dict[int, Spent](), 0
        for place, at in enumerate(range(0, len(said), WIDTH)):
            if any(mine := said[at : at + WIDTH]):
                each[first + place] = Spent(*(_seconds(mine[i : i + 2]) for i in range(0, WIDTH - 1, 2)))
                crowd = max(crowd, mine[-1])
        if not each:
            return False
        step = _middle([sum(spent) for spent in each.values()])
        self._length = min(MOST, max(1, ceil(RECORD / step)))
        if self._records <= WARM * self._turns or len(each) < 2:
            return False
        self._compare(each)
        before, self.slowest = self.slowest, self._judge(each, crowd / CROWDED)
        if self.slowest is None or before is None:
            changed = self.slowest is not before
        else:
            changed = (before.rank, before.kind) != (self.slowest.rank, self.slowest.kind)
        if self.slowest is not None:
            rank, known = self.slowest.rank, before.host if before is not None and not changed else None
            self.asks = changed and rank is None and self._asked < ASKED + self._records // AGAIN
            name = known if known is not None else host(rank) if rank is not None else ""
            self.slowest = self.slowest._replace(host=name)
        return changed

    def answer(self, host: str) -> None:
        """Whose link it is; empty: that cannot be told."""
        self.asks, self._asked = False, self._asked + 1
        if self.slowest is not None:
            self.slowest = self.slowest._replace(host=host)

    def _compare(self, each: dict[int, Spent]) -> None:
        computing = sorted(spent.computation for spent in each.values())
        busy = sorted(spent.computation + spent.data for spent in each.values())
        ended: list[_Excess] = []
        for rank, spent in each.items():
            usual = _middle_without(busy, spent.computation + spent.data)
            more = spent.computation - _middle_without(computing, spent.computation)
            whole = spent.computation + spent.data - usual
            # A rank that waits in a collective of the user's own is busy as well: only together with computation, which
            # the slow one alone has more of, does data count.
            excess = max(more, whole)
            value = log(max(1 + excess / usual, 1e-3)) if usual > 0 else 0.0
            if self._ranked[rank].add(value, (whole - more) / excess if excess > 0 else 0.0):
                ended.append(self._ranked[rank])
        shapes = [shape for one in self._ranked if (shape := one.shape) is not None] if ended else []
        for one in ended:
            one.measure(_middle(shapes) if shapes else None)
        if ended and (noises := [excess.noise for excess in self._ranked if excess.noise is not None]):
            self._noise = _Noise(*map(_middle, zip(*noises, strict=True)))
        if self._link is not None and (typical := _middle(busy)) > 0:
            waiting = min(spent.waiting for spent in each.values())
            if self._link.add(log(1 + waiting / typical)):
                self._link.measure(self._link.shape)

    def _judge(self, each: Iterable[int], crowd: float) -> Straggler | None:
        """The greatest of what is reported."""
        if self._noise is None:
            return None
        for rank in each:
            self._ranked[rank].judge(self._noise, crowd)
        if slow := [(excess.recent, rank) for rank, excess in enumerate(self._ranked) if excess.alarmed]:
            value, rank = max(slow)
            return Straggler(self._ranks[rank], "", KINDS[self._ranked[rank].is_data], exp(value))
        if (link := self._link) is None or link.noise is None:
            return None
        link.judge(link.noise, link.usual)
        return Straggler(None, "", "link", exp(link.recent - link.usual)) if link.alarmed else None


def _middle(values: Iterable[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _middle_without(ordered: Sequence[float], one: float) -> float:
    """Of the others."""
    at, left = bisect_left(ordered, one), len(ordered) - 1
    half = left // 2
    high = ordered[half + (half >= at)]
    return high if left % 2 else (ordered[half - 1 + (half - 1 >= at)] + high) / 2


def _code(seconds: float) -> int:
    return 1 + round(CODES * min(max(log(max(seconds, LEAST) / LEAST) / SPAN, 0.0), 1.0))


def _seconds(code: bytes) -> float:
    return LEAST * exp(SPAN * (int.from_bytes(code, "big") - 1) / CODES)
