"""What launchers say to each other, through the store that all of them share.

    to one     under a number that its counter gives
    to many    once, for all to read: in the first place that is free

With hosts by the hundred one of them is told something by all others, and tells all others the same. So it is written
once for all, what one has been told meanwhile is read at once, and a look at whether there is anything is one call.
Whoever is gone amid its words holds up nobody: what it has counted and not written is left open.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardfold.launch._voter import Message

__all__ = ["Log", "Mail"]

TO, ALL = "shardfold/epochs/to", "shardfold/epochs/all"


class Log:
    """What several say, each of it under the number that a counter gives; who reads it, does that once. What was
    counted and is not written is left open.

    Args:
        store: that all have.
        key: of the counter.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._counted, self._open = 0, list[int]()

    def say(self, text: str) -> int:
        """As which of all."""
        number = self._store.add(self._key, 1)
        self._store.set(f"{self._key}/{number}", text)
        return number

    def read(self, counted: int | None = None) -> list[bytes]:
        """What was said since; ``counted``: what the counter is, if that is known."""
        before, self._counted = self._counted, self._store.add(self._key, 0) if counted is None else counted
        self._open += range(before + 1, self._counted + 1)
        if not self._open:
            return []
        keys = {number: f"{self._key}/{number}" for number in self._open}
        if not self._store.check(list(keys.values())):
            keys = {number: key for number, key in keys.items() if self._store.check([key])}
        self._open = [number for number in self._open if number not in keys]
        return list(self._store.multi_get(list(keys.values()))) if keys else []


class Mail:
    """Of one node, in one store.

    Args:
        store: that all have.
        me: the node.
    """

    def __init__(self, store: Any, me: int) -> None:
        self._store, self._me = store, me
        self._own = f"{TO}/{me}"
        self._log = Log(store, self._own)
        self._counted_for_all = self._read_of_all = self._said = 0
        for counter in (self._own, ALL):
            store.add(counter, 0)

    def send(self, messages: Iterable[Message]) -> None:
        """Says what is for others."""
        for message, targets in _together(messages):
            if len(targets) == 1:
                Log(self._store, f"{TO}/{message.target}").say(message.to_json())
                continue
            self._said += 1
            text = json.dumps([self._me, self._said, _ranges(targets), message.to_json()])
            place = self._read_of_all + 1
            while self._store.compare_set(f"{ALL}/{place}", "", text) != text.encode():
                place += 1
            self._store.add(ALL, 1)

    def read(self) -> list[Message]:
        """What others have said since."""
        counted, for_all = map(int, self._store.multi_get([self._own, ALL]))
        texts = self._log.read(counted)
        if for_all > self._counted_for_all:
            texts += self._read_for_all(for_all)
        return [Message.from_json(text) for text in texts]

    def _read_for_all(self, counted: int) -> list[str]:
        """As many as were counted are there, and one more where who has written it is gone before it was counted."""
        self._counted_for_all = counted
        keys = [f"{ALL}/{place}" for place in range(self._read_of_all + 1, counted + 1)]
        found = list(self._store.multi_get(keys)) if keys else []
        self._read_of_all += len(found)
        while self._store.check([key := f"{ALL}/{self._read_of_all + 1}"]):
            found.append(self._store.get(key))
            self._read_of_all += 1
        said = [json.loads(text) for text in found]
        return [text for _, _, targets, text in said if any(low <= self._me < high for low, high in targets)]


def _together(messages: Iterable[Message]) -> Iterator[tuple[Message, list[int]]]:
    """Messages, each with all that it is for."""
    found: list[tuple[Message, list[int]]] = []
    for message in messages:
        if found and replace(found[-1][0], target=message.target) == message:
            found[-1][1].append(message.target)
        else:
            found.append((message, [message.target]))
    return iter(found)


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Rising numbers, as those from one up to another."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found
