"""Answers jobs with a model: a token of each text with every step, pieces of text to whoever waits for them."""

from __future__ import annotations

import itertools
import json
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardfold.generation import Continuation, SamplingRule
from shardfold.tools.answering.text_stream import TextStream
from shardfold.tools.serve.api_requests import AskedAnswer
from shardfold.tools.serve.text_ranks import HEARTBEAT, NoNumber, TextRanks

__all__ = ["AnswerJob", "AnswerLoop", "AnswerPiece", "ShownToken"]

LOOK = 1.0  # seconds between two looks for newer weights

Tops = tuple[tuple[str, bytes, float], ...]


@dataclass(frozen=True)
class ShownToken:
    """A token as log-probabilities tell it.

    Attributes:
        text: its own; a broken character where it is a part of one.
        raw: its bytes.
        log_prob: in nats, at the answer's temperature.
        tops: the likeliest tokens in its place: text, bytes, log-probability.
    """

    text: str
    raw: bytes
    log_prob: float
    tops: Tops = ()


@dataclass(frozen=True)
class AnswerPiece:
    """What has come of one answer.

    Attributes:
        index: of the answer, from 0, over all prompts of the job.
        text: behind what came before.
        tokens: those of the text, if log-probabilities were asked for.
        count: tokens that were generated for it.
        finish: why it is whole; None: it is not.
    """

    index: int
    text: str
    tokens: tuple[ShownToken, ...]
    count: int
    finish: Literal["stop", "length"] | None


@dataclass(eq=False)
class AnswerJob:
    """What is asked, with its prompts as tokens.

    Attributes:
        most: tokens of an answer, of each prompt.
        adapter: which one the model has for it; None: none.
        weights: which weights answer it; None: not known yet.
        failure: why there is no answer; None: there is one.
        pieces: that came and were not taken yet.
        wake: called where pieces are taken, once there are more, or a failure.
    """

    asked: AskedAnswer
    prompts: list[list[int]]
    most: list[int]
    adapter: str | None = None
    weights: int | None = None
    failure: str | None = None
    pieces: deque[AnswerPiece] = field(default_factory=deque)
    wake: Callable[[], None] = lambda: None

    @property
    def texts(self) -> int:
        return len(self.prompts) * self.asked.n


class _Choice:
    """One answer under way."""

    def __init__(self, job: AnswerJob, index: int, text: Continuation, stream: TextStream) -> None:
        self.job, self.index, self.text, self.stream = job, index, text, stream
        self.seen = self.shown = 0
        self.waiting: deque[tuple[int, ShownToken]] = deque()
        self.untold: list[AnswerPiece] = []


class AnswerLoop:
    """Runs on the thread that has the model. Others hand it jobs by :meth:`put`, also from handlers of signals.

    Args:
        texts: the ranks.
        tokenizer: a fast one of transformers.
        stops: tokens at which an answer ends.
        tell: is given what came, of all jobs at once, after each step.
        newest: a checkpoint with newer weights than the model has, or None; asked every second.

    Attributes:
        steps: so far.
    """

    def __init__(
        self,
        texts: TextRanks,
        tokenizer: Any,
        stops: Iterable[int],
        tell: Callable[[list[tuple[AnswerJob, AnswerPiece | None]]], None],
        newest: Callable[[], Path | None] = lambda: None,
    ) -> None:
        self._ranks, self._tokenizer, self._stops, self._tell = texts, tokenizer, frozenset(stops), tell
        self._newest, self._newer, self._looked = newest, None, 0.0
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._waiting: deque[AnswerJob] = deque()
        self._choices: dict[int, _Choice] = {}
        self._numbers = itertools.count()
        self._ended = False
        self._names = _TokenNames(tokenizer)
        self.steps = 0

    def put(self, what: Literal["answer", "forget", "end", "cut"], job: AnswerJob | None = None) -> None:
        """``answer`` a job; ``forget`` it, as nobody waits for it; ``end`` once all are answered; ``cut`` them."""
        self._inbox.put((what, job))

    def run(self, seconds: float | None = None) -> None:
        """Until the end; or jobs begin for so many seconds, and those that began are answered."""
        try:
            self._run(None if seconds is None else time.monotonic() + seconds)
        except BaseException as error:
            self._tell([(job, None) for job in self._lost(f"the server failed: {type(error).__name__}.")])
            raise

    def _run(self, until: float | None) -> None:
        first = True  # what waits already begins, however short the time is
        while True:
            begins = first or until is None or time.monotonic() < until
            work = first or bool(self._choices or (self._waiting and begins))
            self._hear(0 if work or not begins else HEARTBEAT if until is None else until - time.monotonic())
            if not self._choices and ((self._ended and not self._waiting) or not begins):
                return
            first = False
            if not self._choices:
                self._turn()
            if begins:
                self._begin()
            if self._choices:
                self._step()
            else:
                self._ranks.beat()

    @property
    def waiting(self) -> int:
        """Jobs that were handed in and not heard of yet."""
        return self._inbox.qsize() + len(self._waiting)

    def close(self, why: str) -> None:
        """After the last :meth:`run`: who waits is told why there is no answer."""
        self._hear(0)
        self._tell([(job, None) for job in self._lost(why)])

    def _hear(self, wait: float) -> None:
        try:
            while True:
                what, job = self._inbox.get(timeout=min(wait, HEARTBEAT)) if wait > 0 else self._inbox.get_nowait()
                wait = 0
                if what == "answer":
                    self._waiting.append(job)
                elif what == "forget":
                    self._forget(job)
                elif what == "end":
                    self._ended = True
                else:
                    why = "the server ends, and the time to answer is over."
                    self._fail(why)
                    self._tell([(job, None) for job in self._lost(why)])
        except queue.Empty:
            pass

    def _forget(self, job: AnswerJob) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
        left = [number for number, choice in self._choices.items() if choice.job is job]
        self._ranks.drop([self._choices.pop(number).text for number in left])

    def _fail(self, why: str) -> None:
        """Nothing that is under way will be whole."""
        self._ranks.drop([choice.text for choice in self._choices.values()])
        self._tell([(job, None) for job in self._lost(why, waiting=False)])

    def _lost(self, why: str, *, waiting: bool = True) -> list[AnswerJob]:
        failed = {id(choice.job): choice.job for choice in self._choices.values()}
        self._choices.clear()
        if waiting:
            failed |= {id(job): job for job in self._waiting}
            self._waiting.clear()
        for job in failed.values():
            job.failure = why
        return list(failed.values())

    def _turn(self) -> None:
        """Other weights, if newer ones are there or who waits asks for them; an answer is of one set of weights."""
        self._look()
        adapter = self._waiting[0].adapter if self._waiting else self._ranks.adapter
        if self._newer is None and adapter == self._ranks.adapter:
            return
        newer, self._newer = self._newer, None
        self._ranks.renew(adapter=adapter, load=newer)

    def _look(self) -> None:
        if self._newer is None and time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            self._newer = self._newest()

    def _begin(self) -> None:
        self._look()
        while self._newer is None and self._waiting and self._waiting[0].adapter == self._ranks.adapter:
            job = self._waiting.popleft()
            job.weights = self._ranks.weights
            asked, seed = job.asked, job.asked.seed
            rule = SamplingRule(
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                seed=secrets.randbits(63) if seed is None else seed,
                repetition=asked.repetition,
                min_p=asked.min_p,
                top_log_probs=asked.tops,
            )
            for index in range(job.texts):
                number, prompt = next(self._numbers), index // asked.n
                tokens = list(job.prompts[prompt])
                text = Continuation(number, index, tokens, len(tokens), job.most[prompt], rule, self._stops)
                stream = TextStream(self._tokenizer, asked.stops, () if asked.is_chat else tokens)
                self._choices[number] = _Choice(job, index, text, stream)
                self._ranks.begin(text)

    def _step(self) -> None:
        try:
            self._ranks.step()
        except NoNumber:
            self._fail("the model gave no number (inf or NaN): its weights, or its precision, are to blame.")
            return
        self.steps += 1
        told: list[tuple[AnswerJob, AnswerPiece | None]] = []
        stopped: list[Continuation] = []
        for number, choice in list(self._choices.items()):
            piece = self._piece(choice)
            if piece is None:
                continue
            choice.untold.append(piece)
            if piece.finish is not None or choice.job.asked.stream:  # else nobody reads it before the end
                told += [(choice.job, each) for each in choice.untold]
                choice.untold.clear()
            if piece.finish is not None:
                del self._choices[number]
                if choice.text.finish is None:
                    stopped.append(choice.text)
        if stopped:
            self._ranks.drop(stopped)
        if told:
            self._tell(told)

    def _piece(self, choice: _Choice) -> AnswerPiece | None:
        text, stream, tells = choice.text, choice.stream, choice.job.asked.log_probs
        fresh = text.tokens[text.start + choice.seen :]
        if not fresh and text.finish is None:
            return None
        said, count = "", 0
        for token in fresh:
            number, count = choice.seen, count + 1
            choice.seen += 1
            if token in self._stops:
                break
            before = stream.decoded
            said += stream.push(token)
            if tells:
                tops = text.tops[number] if choice.job.asked.tops else []
                choice.waiting.append((before, self._names.shown(token, text.log_probs[number], tops)))
            if stream.stopped:
                break
        finish = "stop" if stream.stopped else text.finish
        if finish is not None:
            said += stream.rest()
            finish = "stop" if stream.stopped else finish
        choice.shown += len(said)
        return AnswerPiece(choice.index, said, self._released(choice, finish is not None), count, finish)

    def _released(self, choice: _Choice, whole: bool) -> tuple[ShownToken, ...]:
        """Tokens whose text is shown; at the end all, but those of a stop string."""
        stream, found = choice.stream, []
        while choice.waiting:
            before = choice.waiting[0][0]
            is_shown = before < choice.shown or (before == choice.shown == stream.decoded)
            if not is_shown and not (whole and not stream.stopped):
                break
            found.append(choice.waiting.popleft()[1])
        return tuple(found)


class _TokenNames:
    """Tokens as text and bytes."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import pre_tokenizers

        self._backend = tokenizer.backend_tokenizer
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        self._of_bytes: dict[str, int] = {}
        if "ByteLevel" in json.dumps(decoder):
            # The alphabet has printed bytes as themselves, the others in order from 256 on.
            letters = pre_tokenizers.ByteLevel.alphabet()
            printed = {ord(each) for each in letters if ord(each) < 256}
            others = (byte for byte in range(256) if byte not in printed)
            self._of_bytes = {chr(byte): byte for byte in printed}
            self._of_bytes |= {chr(256 + place): byte for place, byte in enumerate(others)}
        self._known: dict[int, tuple[str, bytes]] = {}

    def shown(self, token: int, log_prob: float, tops: Iterable[tuple[int, float]]) -> ShownToken:
        text, raw = self._of(token)
        return ShownToken(text, raw, log_prob, tuple((*self._of(each), value) for each, value in tops))

    def _of(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            name = self._backend.id_to_token(token) or ""
            if self._of_bytes:
                raw = bytes(self._of_bytes[each] for each in name) if set(name) <= self._of_bytes.keys() else b""
                raw = raw or name.encode()
            elif len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
                raw = bytes([int(name[3:5], 16)])
            else:
                raw = name.replace("\u2581", " ").encode()
            self._known[token] = raw.decode("utf-8", "replace"), raw
        return self._known[token]
