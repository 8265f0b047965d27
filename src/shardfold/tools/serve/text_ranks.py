"""Texts that all ranks generate together: rank 0 says what begins and what ends, the others follow.

Before each step ranks exchange words once: rank 0 says what is to be done, each other one which tokens it has drawn
since. So no rank waits longer for another than a step takes, or, where there is nothing to do, than ``HEARTBEAT``.
A text is of one rank, or of the ranks of one place along the axes of data, if others share its layers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardfold.engine.engine import Engine
from shardfold.errors import CheckpointError, ConfigError, NonFiniteError
from shardfold.generation import Continuation, Generation, SamplingRule
from shardfold.tools.answering._named_adapters import choose_adapter

__all__ = ["HEARTBEAT", "NoNumber", "TextRanks"]

LOG = logging.getLogger("shardfold")
HEARTBEAT = 1.0
"""Seconds after which rank 0 says at the latest that there is nothing to do."""
PAGE = 16


class NoNumber(Exception):
    """The model gave no number: texts under way have no end, the next ones may have one."""


class TextRanks:
    """All ranks make one and :meth:`start` it; rank 0 calls :meth:`begin` to :meth:`end`, the others :meth:`follow`.

    Args:
        engine: of a model that generates.
        cache: bytes of keys and values on each rank.
        rows: texts that each rank generates at once.
        context: tokens of a text.

    Raises:
        ConfigError: the cache is less than a page.

    Attributes:
        capacity: tokens that a text has at most: of the context, and of the cache.
        adapter: which one the model has now; None: none.
        weights: how often others came into their place.
    """

    def __init__(self, engine: Engine, *, cache: int, rows: int, context: int) -> None:
        self._engine, self._rows = engine, rows
        self.adapter: str | None = None
        self.weights = 0
        page = self._page_bytes()
        if cache < page:
            raise ConfigError(f"cache: {cache:,} bytes are less than a page of {PAGE} tokens takes, {page:,} bytes.")
        self.pages = cache // page
        self.capacity = min(context, self.pages * PAGE)
        self.page_bytes = page
        self._running: Generation | None = None
        self._order: dict[str, Any] = {}
        self._texts: dict[int, Continuation] = {}
        self._mine: dict[int, Continuation] = {}
        self._place: dict[int, int] = {}
        self._reported: dict[int, int] = {}
        self._failed = False
        self._reports: list[list[Any]] = []
        said = self._exchange({"place": engine.data_rank})
        self._places = [each["place"] for each in said]
        self._speakers = sorted({place: rank for rank, place in reversed(list(enumerate(self._places)))}.values())

    def start(self) -> None:
        """Takes the model, until :meth:`end`: all ranks call it."""
        self._running = Generation(self._engine, pages=self.pages, page_size=PAGE, rows=self._rows)

    @property
    def running(self) -> Generation:
        """What has the model now."""
        assert self._running is not None, "start() comes first"
        return self._running

    def _page_bytes(self) -> int:
        """Of keys and values, as the first token shows it; that the model can generate shows then, too."""
        running = Generation(self._engine, pages=1, page_size=PAGE, rows=1)
        try:
            running.add(Continuation(0, 0, [0], 1, 1, SamplingRule(temperature=0), frozenset()))
            running.step()
            found = running.pool.page_nbytes
        except BaseException:
            running.abandon()
            raise
        running.close()
        return found

    @property
    def num_places(self) -> int:
        """Ranks that generate texts of their own."""
        return len(self._speakers)

    @property
    def used_pages(self) -> int:
        """On this rank."""
        return self._running.books.used if self._running is not None else 0

    def vocabulary(self, tokenizer: Any) -> int:
        """Token numbers are less: some tokenizers have tokens that the model has no row for."""
        config: Any = getattr(self._engine.module, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        return min(len(tokenizer), getattr(config, "vocab_size", None) or len(tokenizer))

    @property
    def alone(self) -> bool:
        return self._engine.world_size == 1

    # -- rank 0

    def begin(self, text: Continuation) -> None:
        """It is generated from the next step on; its request is a number that no other has."""
        self._texts[text.request] = text
        loads = [sum(each == place for each in self._place.values()) for place in range(max(self._places) + 1)]
        self._place[text.request] = place = min(set(self._places), key=lambda each: (loads[each], each))
        rule = asdict(text.rule)
        begun = [text.request, place, text.sample, text.tokens, text.most, rule, sorted(text.stop)]
        if self.alone:
            self.running.add(text)
        else:
            self._order.setdefault("begin", []).append(begun)

    def drop(self, texts: Iterable[Continuation]) -> None:
        """Nobody waits for these any more."""
        left = [text for text in texts if self._texts.pop(text.request, None) is not None]
        numbers = {text.request for text in left}
        for number in numbers:
            self._place.pop(number)
        if self.alone:
            self.running.drop(left)
            return
        begun = self._order.get("begin", [])
        begun[:] = [each for each in begun if each[0] not in numbers]
        self._order.setdefault("drop", []).extend(numbers)

    def step(self) -> None:
        """A token more of texts, which have them then: those of this rank at once, those of others a step later.

        Raises:
            NoNumber: logits are inf or NaN; no text is under way any more.
        """
        if self.alone:
            self._forward(along=False)
        else:
            self._order["step"] = True
            self._round()
        if self._failed:
            self._failed = False
            texts, self._texts, self._place = list(self._texts.values()), {}, {}
            if not self.alone:
                self._order.setdefault("drop", []).extend(text.request for text in texts)
            raise NoNumber
        for number in [number for number, text in self._texts.items() if text.finish is not None]:
            del self._texts[number], self._place[number]

    def beat(self) -> None:
        """There is nothing to do: the others are told so, and go on waiting."""
        if not self.alone:
            self._round()

    def renew(self, *, adapter: str | None, load: Path | None = None) -> None:
        """With other weights from now on; only while no text is under way.

        Args:
            adapter: which one the model has then.
            load: a checkpoint, whose weights take the place of those that are there.
        """
        order = {"adapter": adapter, "load": None if load is None else str(load)}
        if self.alone:
            self._renew(order)
        else:
            self._order["renew"] = order
            self._round()

    def end(self) -> None:
        """Gives the model back; the others' :meth:`follow` ends."""
        if not self.alone:
            self._order["end"] = True
            self._round()
        else:
            self._close()

    # -- every rank

    def follow(self) -> None:
        """Do what rank 0 says, until it says that this is the end."""
        while self._round():
            pass

    def _round(self) -> bool:
        order, self._order = self._order, {}
        reports, self._reports = self._reports, []
        said = self._exchange({"order": order, "reports": reports, "failed": self._failed})
        order = said[0]["order"]
        if self._engine.rank == 0:
            self._failed = any(each["failed"] for each in said)
            for rank in self._speakers:
                if rank:
                    self._take(said[rank]["reports"])
        else:
            self._failed = False
        self._obey(order)
        return not order.get("end")

    def _obey(self, order: dict[str, Any]) -> None:
        for number in order.get("drop", ()):
            self._reported.pop(number, None)
            if (text := self._mine.pop(number, None)) is not None:
                self.running.drop([text])
        place = self._engine.data_rank
        for number, of, sample, tokens, most, rule, stop in order.get("begin", ()):
            if of == place:
                text = self._texts.get(number) if self._engine.rank == 0 else None
                text = text or Continuation(
                    number, sample, tokens, len(tokens), most, SamplingRule(**rule), frozenset(stop)
                )
                self._mine[number] = text
                self.running.add(text)
        if "renew" in order:
            self._renew(order["renew"])
        if order.get("step"):
            self._forward(along=True)
        if order.get("end"):
            self._close()

    def _close(self) -> None:
        running, self._running = self.running, None
        running.close()

    def _forward(self, *, along: bool) -> None:
        try:
            whole = self.running.step(along=along)
        except NonFiniteError:
            self.running.abandon()
            self._mine.clear()
            self.start()
            self._failed = True
            return
        if self._engine.rank and self._engine.rank in self._speakers:
            for number, text in self._mine.items():
                if len(fresh := text.tokens[text.start + self._reported.get(number, 0) :]):
                    first = self._reported.get(number, 0)
                    self._reported[number] = first + len(fresh)
                    tops = text.tops[first:]
                    self._reports.append([number, fresh, text.log_probs[first:], tops, text.finish])
        for text in whole:
            self._mine.pop(text.request, None)
            self._reported.pop(text.request, None)

    def _take(self, reports: Sequence[Sequence[Any]]) -> None:
        for number, tokens, log_probs, tops, finish in reports:
            if (text := self._texts.get(number)) is not None:
                text.tokens += tokens
                text.log_probs += log_probs
                text.tops += [[(token, log_prob) for token, log_prob in each] for each in tops]
                text.finish = finish

    def _renew(self, order: dict[str, Any]) -> None:
        self.running.close()
        try:
            if order["load"] is not None:
                self._engine.load(order["load"], weights_only=True)
                self.weights += 1
        except CheckpointError as error:  # on all ranks
            LOG.warning("the weights of %s are not taken, those before stay: %s", order["load"], error)
        if order["adapter"] != self.adapter:
            choose_adapter(self._engine.module, order["adapter"])
            self.adapter = order["adapter"]
        self.start()

    def _exchange(self, words: dict[str, Any]) -> list[dict[str, Any]]:
        said = self._engine.sharded.comm.job.exchange("what serving ranks do next", json.dumps(words))
        return [json.loads(each) for each in said]
