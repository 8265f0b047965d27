"""What becomes of the loss where DiLoCo's groups come and go, over many drawn timelines.

    python benchmarks/outer_seeds.py [--seconds 45] [--quorum 2] [--away 0.2] [--seeds 8] [--dies]

Timelines are those of outer_away.py in simulated time: four groups ask the engine's own ``Quorum`` behind each step
which outer step they take part in, and rest 52 ms a step. So a timeline of 45 s takes a tenth of one. With ``--dies`` a
group that leaves is killed, and comes back as a run that is started again: with what it had behind its last outer step,
as if it had saved there.

Of each timeline a GPT is trained in plain loops, and one whose groups are never away and learn from as many tokens;
printed is by how much the first one's loss on other text is above the second one's.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Thread

from outer_away import AWAY, DILOCO, GROUPS, PADDED, Met, even, loss
from torch.distributed import HashStore

from shardfold.comm import polling
from shardfold.engine import _quorum

STEP, LATER, TAKES, LEAST = 1.03 * PADDED, 0.002, 0.004, 1e-4
"""Seconds that a step takes, and may take more; that an outer step takes; that a rest takes at least."""


class Clock:
    """Of threads of which one runs at a time, until it rests: then the one does whose rest ends first."""

    def __init__(self) -> None:
        self.now, self._rests, self._number = 0.0, list[tuple[float, int, Event]](), 0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        over = self._until(self.now + max(seconds, LEAST))
        self._next()
        over.wait()

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        threads = [Thread(target=self._call, args=(call, self._until(0.0))) for call in calls]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()

    def _call(self, call: Callable[[], None], begins: Event) -> None:
        begins.wait()
        try:
            call()
        finally:
            self._next()

    def _until(self, at: float) -> Event:
        self._number += 1
        heapq.heappush(self._rests, (at, self._number, over := Event()))
        return over

    def _next(self) -> None:
        if self._rests:
            self.now, _, over = heapq.heappop(self._rests)
            over.set()


class Timeline:
    """Who was there when.

    Attributes:
        met: by group, the outer steps that it came to.
        steps: by group, that it learned from.
        gone: seconds that groups were away, all together.
    """

    def __init__(self, seed: int, seconds: float, quorum: int, away: float, *, dies: bool) -> None:
        self.met: list[list[Met]] = [[] for _ in range(GROUPS)]
        self.steps, self.gone = [0] * GROUPS, 0.0
        self._seed, self._seconds, self._away, self._dies = seed, seconds, away, dies
        self._outer, self._store, self._clock = DILOCO(deadline=10.0, quorum=quorum), HashStore(), Clock()
        self._at_end = 0
        _quorum.monotonic = polling.monotonic = self._clock.time
        _quorum.sleep = polling.sleep = self._clock.sleep
        self._clock.run([partial(self._group, group) for group in range(GROUPS)])

    def _begun(self, group: int, version: int) -> _quorum.Quorum:
        if not self._dies:
            return _quorum.Quorum(self._store, group, GROUPS, self._outer, leads=True)
        quorum = _quorum.Quorum(HashStore(), group, GROUPS, self._outer, leads=True)
        quorum.meet_runs(self._store, 1, "")
        quorum.begin_anew(version)
        return quorum

    def _group(self, group: int) -> None:
        clock, met = self._clock, self.met[group]
        dice, more = random.Random(f"{self._seed} {group}"), random.Random(f"j{self._seed} {group}")
        rate = self._away / (AWAY - AWAY * self._away)
        quorum, done, steps, tokens, kept = self._begun(group, 0), 0, 0, 0.0, (0, 0)
        leaves = dice.expovariate(rate)
        while True:
            ends = clock.now >= self._seconds
            if ends:
                self._at_end += 1
                while self._at_end < GROUPS:
                    clock.sleep(0.01)
            elif clock.now > leaves:
                length = min(dice.expovariate(1 / AWAY), self._seconds - clock.now)
                clock.sleep(length)
                self.gone, leaves = self.gone + length, clock.now + dice.expovariate(rate)
                if self._dies:
                    (done, steps), tokens, quorum = kept, 0.0, self._begun(group, quorum.version)
            if not ends:
                clock.sleep(STEP + abs(more.gauss(0.0, LATER)))
                done, steps, tokens = done + 1, steps + 1, tokens + 1.0
            due = ends or self._outer.due(steps, 0)
            if (meeting := quorum.turn(due=due, everyone=ends, steps=steps, tokens=tokens)) is not None:
                clock.sleep(TAKES)
                assert quorum.settled(meeting, whole=True)
                met.append(Met(quorum.version, done, meeting))
                steps, tokens = meeting.steps, 0.0
                kept = done, steps
            if ends:
                self.steps[group] = done
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--away", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="of the seeds")
    parser.add_argument("--dies", action="store_true")
    parser.add_argument("--as-many", action="store_true", help="outer steps too, where groups are never away")
    options = parser.parse_args()
    found: list[float] = []
    for seed in range(options.first, options.first + options.seeds):
        line = Timeline(seed, options.seconds, options.quorum, options.away, dies=options.dies)
        learned, there = (STEP + LATER * 0.8) * sum(line.steps), GROUPS * options.seconds - line.gone
        number = max(of[-1].number for of in line.met)
        beside = even(round(sum(line.steps) / GROUPS), number if options.as_many else None)
        away, undisturbed = loss(line.met, seed), loss(beside, seed)
        found.append(away / undisturbed - 1)
        print(
            f"seed {seed:3}  there {learned / there:6.1%}  away {1 - there / (GROUPS * options.seconds):6.1%}  steps "
            f"{' '.join(map(str, line.steps))}  outer steps {number} "
            f"(not away {len(beside[0])})  loss {away:.4f}, not away {undisturbed:.4f}: {found[-1]:+.2%}",
            flush=True,
        )
    if len(found) > 1:
        spread = statistics.stdev(found)
        print(f"mean {statistics.mean(found):+.2%}, sd {spread:.2%}, standard error {spread / len(found) ** 0.5:.2%}")


if __name__ == "__main__":
    main()
