"""What becomes of a save whose parts are written: a checkpoint on every host, or none on any.

    each rank            says that its part is written, and what is in it
    rank 0               hears all -> merges the index -> its host's folder takes its place
    first of each other  hears the index -> its host's folder takes its place -> says so
    host
    rank 0               hears all -> it is decided -> moves ``latest`` -> says so
    first of each other  moves ``latest``
    host

So what a ``latest`` names is on every host. Who dies is missed, and what took its place goes back where it was; if it
is rank 0 that dies, the others see from each other's words whether it was decided.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from logging import getLogger

from shardfold.checkpoint.draft import Draft, Host
from shardfold.checkpoint.folders import INDEX, older, remove
from shardfold.checkpoint.index import Index
from shardfold.checkpoint.messages import Messages, words
from shardfold.checkpoint.verify import gaps, missing_files
from shardfold.comm.launcher_notes import refuse_without_lease
from shardfold.errors import CheckpointError, CollectiveError, by_rank

__all__ = ["Outcome", "failure"]

LOG = getLogger("shardfold")
SAYS = 0.5
"""Seconds that rank 0 has to say what became of a save, where some rank is gone, and it may be another one."""


class Outcome:
    """The end of one save, on one rank.

    Args:
        draft: that this rank writes into.
        messages: of the save.
        hosts: that have a draft each, rank 0's first.
        rank: this one.
        keep: checkpoints that stay; None: all.
        nonfinite: what to do with a checkpoint that holds inf or NaN: ``"warn"`` or ``"raise"``.
    """

    def __init__(
        self, draft: Draft, messages: Messages, hosts: Sequence[Host], rank: int, keep: int | None, nonfinite: str
    ) -> None:
        self._draft, self._messages, self._rank = draft, messages, rank
        self._hosts, self._keep, self._nonfinite = hosts, keep, nonfinite
        self._host = next(host for host in hosts if rank in host.ranks)
        self._others = [other for host in hosts for other in host.ranks if other]
        self._owed: list[str] = ["written", "heard"] if rank else ["outcome"]  # words that others wait for
        self._decided = ""  # rank 0's word, when nothing can go wrong any more
        self._problem = ""  # that this rank had

    @property
    def _follows(self) -> bool:
        """Whether another rank is why, if it fails."""
        return not self._problem or self._messages.gone.is_set()

    @property
    def _alone(self) -> bool:
        return len(self._hosts) == 1

    def abandon(self, why: str) -> None:
        """This rank leaves the save; whoever waits for its words hears so at once.

        Raises:
            CheckpointError: the store is gone.
        """
        owed, self._owed = self._owed, []
        if not owed:
            return
        if self._rank == 0:
            if not self._decided:
                self._messages.say("place", f"!{why}")
            self._messages.say("outcome", self._decided or f"!rank 0: {why}")
            return
        for word in owed:
            self._messages.say(word, f"!{why}")

    # -- rank 0

    def complete(self, header: Index, part: Index, problem: str) -> list[str]:
        """Makes it a checkpoint, or removes it.

        Args:
            header: what all ranks share.
            part: of this rank.
            problem: that it had; or empty.

        Returns:
            Names of what is not finite in it.

        Raises:
            CheckpointError: there is none; what was there before is as it was.
        """
        lost: list[int] = []
        self._problem = problem
        try:
            said = self._messages.hear("written", self._others)
            lost = [rank for rank in self._others if rank not in said]
            wrong = {0: problem} | {rank: text[1:] for rank, text in said.items() if text.startswith("!")}
            wrong |= dict.fromkeys(lost, self._messages.why_unheard)
            if any(wrong.values()):
                raise _told(wrong | {rank: "" for rank in said if rank not in wrong}, follows=self._follows)
            index = self._merged(header, part, said)
            self._check_finite(index)
            data = index.to_bytes()
            self._draft.place(data)
            if self._alone:
                self._draft.name()
            else:
                self._place_elsewhere(data)
        except Exception as error:
            self._draft.discard()
            self._messages_end(f"!{words(error)}", lost)
            follows = isinstance(error, CheckpointError) and error.follows
            raise failure(self._draft, words(error), follows=follows) from error
        gone = self._older()
        self._decided = "+" + json.dumps([index.nonfinite, gone])
        self._settle(gone)
        self._messages_end(self._decided, lost)
        return index.nonfinite

    def _older(self) -> list[str]:
        lock = self._draft.lock
        if self._keep is None or lock is None:
            return []
        return older(self._draft.target, self._keep, lock.owns)

    def _check_finite(self, index: Index) -> None:
        if index.nonfinite:
            names = ", ".join(index.nonfinite[:8]) + (", ..." if len(index.nonfinite) > 8 else "")
            said = f"inf or NaN in {names} of step {index.step}"
            if self._nonfinite == "raise":
                raise CheckpointError(said)
            LOG.warning("%s holds %s", self._draft.target, said)

    def _merged(self, header: Index, part: Index, said: dict[int, str]) -> Index:
        """The index of all: what they share and everybody's pieces."""
        files: dict[int, list[str]] = {}
        for rank in (0, *sorted(said)):
            if rank:
                part = Index.from_bytes(
                    self._messages.receive("written", rank, said[rank]), f"the index of rank {rank}"
                )
                self._messages.drop("written", rank, said[rank])
            header.join(part)
            files[rank] = list(part.files)
        header.written["save"] = self._draft.token
        if self._draft.lock is not None:
            header.written["run"] = self._draft.lock.run
        hosts = [
            replace(host, files=tuple(name for rank in host.ranks for name in files[rank])) for host in self._hosts
        ]
        if not self._alone:
            header.written["hosts"] = [host.to_json() for host in hosts]
        _refuse_damage([*gaps(header), *missing_files(self._draft.path, header, hosts[0].files)])
        return header

    def _place_elsewhere(self, data: bytes) -> None:
        """The folders of the other hosts take their places.

        Raises:
            CheckpointError: one did not.
        """
        firsts = [host.ranks[0] for host in self._hosts[1:]]
        self._messages.say("placed", "+")
        self._messages.send("place", data)
        said = self._messages.hear("placed", firsts)
        lost = dict.fromkeys((rank for rank in firsts if rank not in said), self._messages.why_unheard)
        self._messages.drop("place", 0, self._messages.told("place", [0])[0])
        wrong = {rank: text[1:] for rank, text in said.items() if text != "+"} | lost
        if wrong:
            raise _told(wrong | {0: ""}, follows=True)

    def _messages_end(self, text: str, lost: Sequence[int]) -> None:
        """Says it, and stays until the others have heard it: the store may be this process's."""
        self._owed = []
        with suppress(CheckpointError):
            if not self._alone and text.startswith("!"):
                self._messages.say("place", text)
            self._messages.say("outcome", text)
            self._messages.hear("heard", [rank for rank in self._others if rank not in lost])

    # -- the other ranks

    def follow(self, part: Index, problem: str) -> list[str]:
        """Says what became of this rank's part, and hears what became of all; the folder itself tells if rank 0 does
        not.

        Returns:
            Names of what is not finite in the checkpoint.

        Raises:
            CheckpointError: there is none, or that is not known.
        """
        gone: CheckpointError | None = None
        text, take_back = None, None
        self._problem = problem
        try:
            self._say_written(part, problem)
            if self._rank == self._host.ranks[0]:
                take_back = self._place()
            text = self._messages.hear("outcome", [0], besides=SAYS).get(0)
            why = self._messages.why_unheard
        except CheckpointError as error:
            gone, why = error, str(error)
        if text is None:
            return self._unsaid(why, gone, placed=take_back is not None)
        if text.startswith("!"):
            if take_back is not None:
                take_back()
            self._draft.discard()
            self._draft.sweep()
            self._heard()
            raise failure(self._draft, text[1:], follows=self._follows)
        nonfinite, gone_names = json.loads(text[1:])
        if self._rank == self._host.ranks[0]:
            self._settle(gone_names)
        elif self._host.ranks[0]:  # the checkpoint of this host is there when its first rank has heard
            with suppress(CheckpointError):
                self._messages.hear("heard", [self._host.ranks[0]])
        self._heard()
        return nonfinite

    def _say_written(self, part: Index, problem: str) -> None:
        if problem:
            self._messages.say("written", f"!{problem}")
        else:
            self._messages.send("written", part.to_bytes())
        self._owed = ["placed", "heard"] if self._rank == self._host.ranks[0] else ["heard"]

    def _place(self) -> Callable[[], None] | None:
        """The first rank of a host: its folder takes its place when rank 0 says so; what takes that back."""
        text = self._messages.hear("place", [0]).get(0)
        if text is None or text.startswith("!"):
            self._owed = ["heard"]
            self._draft.discard()
            return None
        take_back: Callable[[], None] | None = None
        answer = "+"
        try:
            data = self._messages.receive("place", 0, text)
            _refuse_damage(missing_files(self._draft.path, Index.from_bytes(data, INDEX), self._own_files(data)))
            self._draft.place(data)
            take_back = self._draft.pledge()
        except Exception as error:
            self._draft.discard()
            self._problem = words(error)
            answer = f"!{self._problem}"
        self._owed = ["heard"]
        self._messages.say("placed", answer)
        return take_back

    def _own_files(self, data: bytes) -> Sequence[str]:
        hosts = [Host.from_json(said) for said in Index.from_bytes(data, INDEX).written["hosts"]]
        return next(host.files for host in hosts if self._rank in host.ranks)

    def _unsaid(self, why: str, gone: CheckpointError | None, *, placed: bool) -> list[str]:
        """What became of it, where rank 0 did not say."""
        decided = self._draft.committed
        if decided and not self._alone:
            try:
                firsts = [host.ranks[0] for host in self._hosts]
                decided = self._messages.told("placed", firsts) == dict.fromkeys(firsts, "+")
            except CheckpointError:
                raise CheckpointError(
                    f"{self._draft.target} has its place on this host, but it is not known whether it has on the "
                    f"others: rank 0, which completes it: {why}. Checkpoints before it are as they were."
                ) from gone
        if not decided:
            if not placed:
                self._draft.discard()
            raise failure(self._draft, f"rank 0, which completes it: {why}", follows=True) from gone
        if placed:
            self._settle([])
        LOG.warning("%s is complete, but rank 0 did not say so: %s", self._draft.target, why)
        return Index.from_bytes((self._draft.target / INDEX).read_bytes(), str(self._draft.target)).nonfinite

    def _heard(self) -> None:
        self._owed = []
        with suppress(CheckpointError):
            self._messages.say("heard", "+")

    # -- both

    def _settle(self, gone: Sequence[str]) -> None:
        """The checkpoint is there: ``latest`` names it on this host, and what it replaces is removed."""
        draft = self._draft
        draft.decide()
        if not self._alone:
            try:
                draft.name()
            except OSError as error:  # it is complete, and may be named by others
                LOG.warning("%s was written, but is not named as the latest: %s", draft.target, words(error))
        draft.finish(alone=self._alone)
        try:
            refuse_without_lease(f"what keep={self._keep} removes")
            remove(draft.target.parent, gone)
        except (OSError, CollectiveError) as error:
            LOG.warning("%s was written, but keep=%s: %s", draft.target, self._keep, words(error))


def failure(draft: Draft, problem: str, *, follows: bool = False) -> CheckpointError:
    """The sentence of a save that failed, by what this rank had or by what ``follows`` from others' words."""
    error = CheckpointError(
        f"{draft.target} was not written: {problem.rstrip('.')}. Checkpoints before it are as they were."
    )
    error.follows = follows
    return error


def _told(wrong: Mapping[int, str], *, follows: bool) -> CheckpointError:
    error = CheckpointError(by_rank(wrong))
    error.follows = follows
    return error


def _refuse_damage(damage: Sequence[object]) -> None:
    if damage:
        more = f" and {len(damage) - 4} more" * (len(damage) > 4)
        raise CheckpointError(f"what the ranks wrote is not whole: {'; '.join(map(str, damage[:4]))}{more}")
