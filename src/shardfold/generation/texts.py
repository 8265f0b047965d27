"""A text that is being generated, and the answer that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardfold.generation.sampling import SamplingRule, Tops

__all__ = ["Continuation", "Generated"]


@dataclass(frozen=True)
class Generated:
    """What a prompt was continued with.

    Attributes:
        request: the prompt's number in ``prompts``.
        sample: which of its ``n`` answers this is, from 0.
        tokens: behind the prompt; with ``finish="stop"`` the stop token is the last.
        log_probs: of each token, given all before it, in nats: of ``logits / temperature`` over the whole vocabulary
            (at temperature 0 of the logits).
        finish: ``"stop"``: at a stop token; ``"length"``: at ``max_tokens``.
        tops: with ``top_log_probs``: of each token the likeliest that might have stood there, each with its
            log-probability, the likeliest first.
    """

    request: int
    sample: int
    tokens: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]
    tops: list[Tops] = field(default_factory=list)


@dataclass(eq=False)
class Continuation:
    """One sample of one request.

    Attributes:
        tokens: the prompt's and those generated.
        start: tokens of the prompt.
        most: tokens to be generated, at most.
        stop: tokens that end it.
        log_probs: of the tokens generated.
        tops: of each of these the likeliest alternatives, where its rule asks for them.
        pages: of its keys and values, in order.
        runs: of these, as far as they were read: ``[first, pages]`` of each run of pages that stand behind each other.
        stored: tokens whose keys and values are in its pages, or will be after the step that is planned.
        evicted: how often its pages were taken from it.
    """

    request: int
    sample: int
    tokens: list[int]
    start: int
    most: int
    rule: SamplingRule
    stop: frozenset[int]
    log_probs: list[float] = field(default_factory=list)
    tops: list[Tops] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    stored: int = 0
    evicted: int = 0
    finish: Literal["stop", "length"] | None = None

    @property
    def number(self) -> int:
        """Of the next token, from 0."""
        return len(self.tokens) - self.start

    @property
    def prompt(self) -> Sequence[int]:
        return self.tokens[: self.start]

    def take(self, token: int, log_prob: float, tops: Tops | None = None) -> None:
        """One more token."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if tops:
            self.tops.append(tops)
        if token in self.stop:
            self.finish = "stop"
        elif self.number >= self.most:
            self.finish = "length"

    def answer(self) -> Generated:
        assert self.finish is not None
        return Generated(self.request, self.sample, self.tokens[self.start :], self.log_probs, self.finish, self.tops)
