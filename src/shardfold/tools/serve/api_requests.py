"""What a request of OpenAI's API asks, checked. What would change an answer and is not done is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from shardfold.errors import did_you_mean
from shardfold.generation.sampling import MOST_SEED
from shardfold.tools.serve.api_refusal import ApiRefusal

__all__ = ["AskedAnswer", "read_chat", "read_completion"]

MOST_STOPS = 16
MOST_STOP = 256
"""Characters of a stop string."""
MOST_N = 128
MOST_TOPS = 20

UNUSED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store")
"""What says nothing of the answer."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters of OpenAI's that are not supported, with the values under which they do nothing; ``null`` always is."""

COMMON = ("model", "n", "stop", "seed", "stream", "stream_options", "temperature", "top_p", "top_k", "logprobs")
COMMON = (*COMMON, "max_tokens", "repetition_penalty", "min_p")
CHAT = (*COMMON, "messages", "max_completion_tokens", "top_logprobs")
COMPLETION = (*COMMON, "prompt")
PROMPTS = "a text or a list of texts, or token numbers or a list of lists of these"

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, kw_only=True)
class AskedAnswer:
    """What is to be generated, as it was asked.

    Attributes:
        is_chat: whether it is a conversation that goes on.
        model: by which name.
        messages: of a conversation.
        prompts: texts, or token numbers.
        n: answers to each.
        most: tokens of one, at most; None: as many as there is room for.
        stops: strings that end one.
        seed: of the draws; None: any.
        log_probs: whether those of the tokens are told.
        tops: how many of the likeliest tokens are told beside each.
        stream: in pieces, as they come.
        usage: whether pieces end with the count of tokens.
    """

    is_chat: bool
    model: str
    messages: tuple[Mapping[str, str], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    n: int = 1
    most: int | None = None
    stops: tuple[str, ...] = ()
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition: float = 1.0
    min_p: float = 0.0
    log_probs: bool = False
    tops: int = 0
    stream: bool = False
    usage: bool = False


def read_chat(given: Mapping[str, Any]) -> AskedAnswer:
    """
    Raises:
        ApiRefusal: what is asked is unknown, wrong or not supported.
    """
    fields = _Fields(given, CHAT)
    tops = fields.whole("top_logprobs", 0, 0, MOST_TOPS)
    log_probs = fields.flag("logprobs")
    if tops and not log_probs:
        raise ApiRefusal("'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
    newer = fields.most("max_completion_tokens")
    older = fields.most("max_tokens")
    if None not in (newer, older) and newer != older:
        raise ApiRefusal(
            "'max_tokens' is the old name of 'max_completion_tokens', and both are given with other values: leave the "
            "old one out.",
            "max_tokens",
            "invalid_value",
        )
    return AskedAnswer(
        is_chat=True,
        messages=tuple(_message(number, each) for number, each in enumerate(fields.items("messages"))),
        most=newer if newer is not None else older,
        log_probs=log_probs,
        tops=tops,
        **fields.common(),
    )


def read_completion(given: Mapping[str, Any]) -> AskedAnswer:
    """
    Raises:
        ApiRefusal: what is asked is unknown, wrong or not supported.
    """
    fields = _Fields(given, COMPLETION)
    log_probs = given.get("logprobs") is not None and given["logprobs"] is not False
    tops = 0 if isinstance(given.get("logprobs"), bool) else fields.whole("logprobs", 0, 0, MOST_TOPS)
    most = fields.most("max_tokens")
    return AskedAnswer(
        is_chat=False,
        prompts=_prompts(given.get("prompt")),
        most=16 if most is None else most,  # as OpenAI's does
        log_probs=log_probs,
        tops=tops,
        **fields.common(),
    )


class _Fields:
    """Parameters by their names; each is checked as it is taken."""

    def __init__(self, given: Mapping[str, Any], known: Sequence[str]) -> None:
        self._given = given
        for name, value in given.items():
            if name in known or name in UNUSED:
                continue
            if name not in NEUTRAL:
                near = did_you_mean(name[:64], [*known, *NEUTRAL])
                raise ApiRefusal(f"there is no parameter {name[:64]!r}.{near}", name[:64], "unknown_parameter")
            if value is not None and not any(_same(value, each) for each in NEUTRAL[name]):
                raise ApiRefusal(
                    f"the parameter {name!r} is not supported by this server: leave it out.",
                    name,
                    "unsupported_parameter",
                )

    def common(self) -> dict[str, Any]:
        stream = self.flag("stream")
        options = self._taken("stream_options", {}, lambda value: isinstance(value, dict), "an object")
        if options and not stream:
            raise ApiRefusal("'stream_options' needs 'stream': true.", "stream_options", "invalid_value")
        for name in options:
            if name not in ("include_usage", "include_obfuscation"):
                near = did_you_mean(name[:64], ["include_usage"])
                raise ApiRefusal(
                    f"there is no parameter 'stream_options.{name[:64]}'.{near}", "stream_options", "unknown_parameter"
                )
        usage = options.get("include_usage")
        if usage is not None and not isinstance(usage, bool):
            self._wrong("stream_options.include_usage", "true or false")
        return {
            "model": self._taken("model", None, lambda value: isinstance(value, str), "a text"),
            "n": self.whole("n", 1, 1, MOST_N),
            "stops": self._stops(),
            "seed": self._seed(),
            "temperature": self.number("temperature", 1.0, 0, 2),
            "top_p": self.number("top_p", 1.0, 0, 1, open_at_least=True),
            "top_k": max(0, self.whole("top_k", 0, -1, 10**9)),
            "repetition": self.number("repetition_penalty", 1.0, 0, 10, open_at_least=True),
            "min_p": self.number("min_p", 0.0, 0, 1),
            "stream": stream,
            "usage": bool(usage),
        }

    def most(self, name: str) -> int | None:
        return self._taken(name, None, lambda value: _is_whole(value) and value >= 1, "a whole number from 1 on")

    def flag(self, name: str) -> bool:
        return self._taken(name, False, lambda value: isinstance(value, bool), "true or false")

    def whole(self, name: str, usual: int, least: int, most: int) -> int:
        words = f"a whole number from {least} to {most}"
        return self._taken(name, usual, lambda value: _is_whole(value) and least <= value <= most, words)

    def number(self, name: str, usual: float, least: float, most: float, *, open_at_least: bool = False) -> float:
        def fits(value: Any) -> bool:
            real = isinstance(value, int | float) and not isinstance(value, bool)
            return real and least <= value <= most and not (open_at_least and value == least)

        words = f"a number {'above' if open_at_least else 'from'} {least:g} {'and at most' if open_at_least else 'to'}"
        return float(self._taken(name, usual, fits, f"{words} {most:g}"))

    def items(self, name: str) -> list[Any]:
        return self._taken(name, None, lambda value: isinstance(value, list) and value, "a list that is not empty")

    def _seed(self) -> int | None:
        seed = self._taken("seed", None, _is_whole, "a whole number")
        return None if seed is None else seed & MOST_SEED

    def _stops(self) -> tuple[str, ...]:
        def fits(value: Any) -> bool:
            values = value if isinstance(value, list) else [value]
            texts = all(isinstance(each, str) and 0 < len(each) <= MOST_STOP for each in values)
            return texts and len(values) <= MOST_STOPS

        words = f"a text, or up to {MOST_STOPS} of them, of 1 to {MOST_STOP} characters each"
        found = self._taken("stop", [], fits, words)
        return tuple(found) if isinstance(found, list) else (found,)

    def _taken(self, name: str, usual: Any, fits: Callable[[Any], Any], words: str) -> Any:
        value = self._given.get(name)
        if value is None:
            if usual is None and name in ("model", "messages", "prompt"):
                raise ApiRefusal(f"the body has no {name!r}: give {words}.", name, "missing_required_parameter")
            return usual
        if not fits(value):
            self._wrong(name, words)
        return value

    def _wrong(self, name: str, words: str) -> NoReturn:
        value: Any = self._given
        for part in name.split("."):
            value = value[part]
        raise ApiRefusal(f"{name!r} is {_shown(value)}, but it has to be {words}.", name, "invalid_value")


def _message(number: int, given: Any) -> Mapping[str, str]:
    where = f"messages[{number}]"
    if not isinstance(given, dict):
        raise ApiRefusal(f"{where} is {_shown(given)}, but it has to be an object.", where, "invalid_value")
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        near = f"{did_you_mean(role[:64], ROLES)}" if isinstance(role, str) else ""
        raise ApiRefusal(
            f"{where}.role is {_shown(role)}, which this server does not know.{near}", f"{where}.role", "invalid_value"
        )
    for name, value in given.items():
        if name not in ("role", "content") and value not in (None, []):
            raise ApiRefusal(
                f"{where}.{name[:64]} is not supported by this server: a message has a role and a content.",
                f"{where}.{name[:64]}",
                "unsupported_parameter",
            )
    content = given.get("content")
    if isinstance(content, list):
        parts = [_part(f"{where}.content[{place}]", each) for place, each in enumerate(content)]
        content = "".join(parts)
    if not isinstance(content, str):
        raise ApiRefusal(
            f"{where}.content is {_shown(content)}, but it has to be a text.", f"{where}.content", "invalid_value"
        )
    return {"role": ROLES[role], "content": content}


def _part(where: str, given: Any) -> str:
    if isinstance(given, dict) and given.get("type") == "text" and isinstance(given.get("text"), str):
        return given["text"]
    kind = given.get("type") if isinstance(given, dict) else given
    raise ApiRefusal(f"{where} is {_shown(kind)}, but only text is supported.", where, "unsupported_parameter")


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    def is_tokens(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(_is_whole(each) and each >= 0 for each in value)

    if given is None:
        raise ApiRefusal(f"the body has no 'prompt': give {PROMPTS}.", "prompt", "missing_required_parameter")
    if isinstance(given, str):
        return (given,)
    if is_tokens(given):
        return (tuple(given),)
    if isinstance(given, list) and given and all(isinstance(each, str) for each in given):
        return tuple(given)
    if isinstance(given, list) and given and all(is_tokens(each) for each in given):
        return tuple(tuple(each) for each in given)
    raise ApiRefusal(
        f"'prompt' is {_shown(given)}, but it has to be {PROMPTS}.",
        "prompt",
        "invalid_value",
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _shown(value: Any) -> str:
    said = json.dumps(value)
    return said if len(said) <= 60 else said[:57] + "..."
