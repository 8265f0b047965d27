"""Conversations as text, by a tokenizer's chat template, and which of it the assistant says.

A token is trained exactly where the model writes it when it answers. So an assistant's turn begins where the rendering
of the turns in front of it, with the prompt for an answer, ends; it ends where the rendering with it ends. No template
has to be known for that: it is rendered with and without each turn. Where a template marks the assistant's words by
``{% generation %}``, its marks are taken.

Most conversations are rendered once for that, or not at all. What a template puts around the words of turns is
learned for each shape of conversations (who speaks, in which order), and tried on some of them. Of one whose text is
these words with what was learned around them, it is known where turns begin and end. Where the template writes all
words as they are, that is its text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.tune.data._template_words import words_looked_for
from shardfold.tools.tune.data.row_formats import SPEAKERS, Message

__all__ = ["TEMPLATES", "ChatTemplate", "Rendered", "TrainOn", "chat_template"]

TrainOn = Literal["assistant", "last", "completion", "all"]
"""All turns of the assistant, its last one, all behind the prompt, or all tokens."""

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
        "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "plain": (
        "{{ bos_token or '' }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ '### Response:\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n\n' }}"
        "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
        "{% else %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
}
"""Templates by name, for tokenizers that bring none. Answers end with the tokenizer's own stop token."""

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_PROBE = "zq7probe"
"""Words that no template alters, and that are in none."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: of all of it.
        spans: [start, stop) of characters that are trained, ascending.
        answers: those of ``spans`` that are whole turns of the assistant, which have to end with a stop token.
        altered: turns of the assistant that are not trained, as the template renders them otherwise once others follow.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    answers: tuple[tuple[int, int], ...]
    altered: int = 0


def chat_template(tokenizer: Any, template: str) -> str | None:
    """The text of a template: the tokenizer's own (``"model"``), one of ``TEMPLATES``, or a file's.

    Returns:
        The text; None: the tokenizer brings none, and it was not said otherwise.

    Raises:
        ConfigError: there is no such name or file.
    """
    if template == "model":
        own = tokenizer.chat_template
        return own.get("default") if isinstance(own, Mapping) else own
    if template in TEMPLATES:
        return TEMPLATES[template]
    if os.path.isfile(template):
        return Path(template).read_text(encoding="utf-8")
    raise ConfigError(
        f"template={template!r} is no file, and not 'model', which is the tokenizer's own."
        f"{did_you_mean(template, [*TEMPLATES, 'model'])}"
    )


def _alike(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


@dataclass
class _Shape:
    """What a template puts around the words of turns, in conversations of the same turns.

    Attributes:
        around: in front of each turn's words, and behind the last ones.
        spans: of each trained span, in front of which words it begins, by how many characters, and behind which ones it
            ends, by how many.
        answers: whether spans are whole turns, see :class:`Rendered`.
        altered: see :class:`Rendered`.
        bare: whether no words begin or end with a blank.
        trials: conversations that have to agree yet, before one is believed.
    """

    around: tuple[str, ...]
    spans: tuple[tuple[int, int, int, int], ...]
    answers: bool
    altered: int
    bare: bool = False
    trials: int = 3

    @classmethod
    def learn(cls, words: Sequence[str], rendered: Rendered) -> _Shape | None:
        """From a conversation whose words stand nowhere else; None: it cannot be told by places of words."""
        around, at = [], 0
        for each in words:
            if (place := rendered.text.find(each, at)) < 0 or rendered.text.count(each) != 1:
                return None
            around.append(rendered.text[at:place])
            at = place + len(each)
        around.append(rendered.text[at:])
        places = cls._places(around, words)
        spans = []
        for start, stop in rendered.spans:
            first = next((k for k, (begin, _) in enumerate(places) if start <= begin), None)
            last = next((k for k, (_, end) in reversed(list(enumerate(places))) if end <= stop), None)
            if first is None or last is None or (first and start < places[first - 1][1]):
                return None
            if last + 1 < len(places) and stop > places[last + 1][0]:
                return None
            spans.append((first, places[first][0] - start, last, stop - places[last][1]))
        return cls(tuple(around), tuple(spans), bool(rendered.answers), rendered.altered)

    @staticmethod
    def _places(around: Sequence[str], words: Sequence[str]) -> list[tuple[int, int]]:
        found, at = [], 0
        for before, each in zip(around, words, strict=False):
            start = at + len(before)
            at = start + len(each)
            found.append((start, at))
        return found

    def fits(self, words: Sequence[str], text: str) -> Rendered | None:
        """What is trained in ``text``; None: it is not these words, as they are or without blanks at their ends, with
        what stands around them."""
        if (found := self.filled(words)).text == text:
            return found
        found = self.filled([each.strip() for each in words])
        return found if found.text == text else None

    def filled(self, words: Sequence[str]) -> Rendered:
        """Words with what stands around them."""
        text = "".join(chain(*zip(self.around, words, strict=False), self.around[-1:]))
        places = self._places(self.around, words)
        spans = tuple((places[a][0] - before, places[b][1] + behind) for a, before, b, behind in self.spans)
        return Rendered(text, spans, spans if self.answers else (), self.altered)


_SHAPES = 1024  # that are kept
_NEVER = -1  # trials of a shape that is not believed
_KEPT = {"strip", "lstrip", "rstrip", "join", "get", "append", "items"}
"""Methods that do nothing to a text for what is in its middle, or that are none of texts."""
_MEASURES = {"length", "count", "wordcount"}


def _is_content(node: Any) -> bool:
    """Whether an expression of a template is a turn's words."""
    name = (
        getattr(node, "name", None) or getattr(node, "attr", None) or getattr(getattr(node, "arg", None), "value", None)
    )
    return name == "content"


def _asks(source: str) -> list[str] | None:
    """What a template looks for in texts: words with any of it are rendered by its turns; None: it cannot be told.

    Names are left out: they are what it asks of dictionaries (``'tool_calls' in message``).
    """
    from jinja2 import Environment, TemplateError, nodes

    try:
        read = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", source))
    except TemplateError:
        return None
    found: list[nodes.Expr] = []
    for compare in read.find_all(nodes.Compare):
        sides = [compare.expr, *(each.expr for each in compare.ops)]
        filters = (each for side in sides for each in (side, *side.find_all(nodes.Filter)))
        measured = [each.node for each in filters if isinstance(each, nodes.Filter) and each.name in _MEASURES]
        if any(map(_is_content, measured)) and not any(side in (nodes.Const(0), nodes.Const(1)) for side in sides):
            return None  # whether it is longer than so many characters, say
        found += sides if compare.ops[0].op in ("eq", "ne") else sides[:1]
    for call in read.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr not in _KEPT:
            found += call.args
    for each in read.find_all(nodes.Filter):
        found += each.args if each.name in ("replace", "split") else []
    texts = {each.value for each in found if isinstance(each, nodes.Const) and isinstance(each.value, str)}
    return sorted(each for each in texts if each and not re.fullmatch("[a-z_]+", each))


class ChatTemplate:
    """A template beside its tokenizer.

    Args:
        tokenizer: of transformers.
        source: the template's text.

    Raises:
        ConfigError: it cannot render one question and one answer.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.marks = bool(_GENERATION.search(source))
        names = {*tokenizer.all_special_tokens, *(str(each) for each in tokenizer.added_tokens_decoder.values())}
        self._special = re.compile("|".join(map(re.escape, sorted(names - {""}, key=len, reverse=True))) or r"(?!)")
        asks = words_looked_for(_GENERATION.sub("", source))
        self.plain = asks is not None
        self._asks = _asks(source) if asks is None else sorted(asks)
        self._shapes: dict[Any, _Shape | None] = {}
        self.parts = False
        asked = [{"role": "user", "content": "x"}]
        told = [*asked, {"role": "assistant", "content": _PROBE}]
        try:
            whole = self.render(told, where="the template")
        except ConfigError:
            whole = ""
        if _PROBE not in whole:  # as templates of models that see, too, which take a list of parts
            self.parts, self.plain = True, False
            whole = self.render(told, where="the template")
        base, prompted = (self.render(asked, where="the template", prompt=prompt) for prompt in (False, True))
        turn = _alike(base, prompted)
        if (content := whole.find(_PROBE)) < 0:
            raise ConfigError("the chat template does not render what an assistant says: give another, template=....")
        header = whole[turn:content]
        self.header = header[: _alike(header, prompted[turn:])]  # empty: it has no prompt for an answer

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        where: str,
        prompt: bool = False,
    ) -> str:
        """The text of turns; ``prompt``: up to where an answer begins.

        Raises:
            ConfigError: the template refuses them; names file and line.
        """
        for number, each in enumerate(messages):
            if each["role"] not in SPEAKERS and each["role"] not in self.source:
                raise ConfigError(
                    f"data: {where}: the role of turn {number} is {each['role']!r}, which the chat template does not "
                    f"name.{did_you_mean(each['role'], SPEAKERS)}"
                )
        try:
            return self.tokenizer.apply_chat_template(
                self._given(messages),
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=prompt,
                tokenize=False,
                **(settings or {}),
            )
        except Exception as error:  # of jinja, and of what the template raises
            said = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"data: {where}: the chat template refuses it: {said}.") from error

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        """Turns as the template takes them: their words as text, or as a list of parts."""
        if not self.parts:
            return list(messages)
        return [
            {**each, "content": [{"type": "text", "text": each["content"]}]}
            if isinstance(each.get("content"), str)
            else each
            for each in messages
        ]

    def conversation(
        self,
        messages: Sequence[Message],
        begin: int,
        train_on: TrainOn,
        *,
        where: str,
        tools: list[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """All turns as text, and what of it is trained.

        Args:
            messages: the turns.
            begin: the number of the first turn behind the prompt.
            train_on: what is trained.
            where: file and line, for messages.
            tools, settings: see :class:`Example`.

        Raises:
            ConfigError: the template refuses them, or what the assistant says cannot be found in its text.
        """
        say = {"tools": tools, "settings": settings, "where": where}
        shape, words = self._shape(messages, begin, train_on, say)
        if self.plain and shape is not None and not shape.trials and shape.bare:
            return shape.filled(words)
        text = self.render(messages, tools, settings, where=where)
        guess = shape.fits(words, text) if shape is not None else None
        if shape is not None and guess is not None and not shape.trials:
            return guess
        found = self._searched(messages, begin, train_on, text, say)
        if shape is not None and guess is not None:
            shape.trials = shape.trials - 1 if found == guess else _NEVER
        return found

    def _shape(
        self, messages: Sequence[Message], begin: int, train_on: TrainOn, say: Mapping[str, Any]
    ) -> tuple[_Shape | None, list[str]]:
        """What is known of conversations of such turns, and the words of this one; None: nothing, or its words may
        change what the template does. A shape is learned when it comes for the second time."""
        words: list[str] = []
        turns: list[Any] = []
        for each in messages:
            text = each.get("content")
            if self._asks is None or len(each) != 2 or not isinstance(text, str) or not text or text.isspace():
                return None, []
            if any(asked in text for asked in self._asks):
                return None, []
            words.append(text)
            turns += each["role"], text[0].isspace(), text[-1].isspace()
        more = json.dumps([say["tools"], say["settings"]], default=str) if say["tools"] or say["settings"] else ""
        key = (train_on, begin, *turns, more)
        if key in self._shapes:
            if (shape := self._shapes[key]) is None:
                shape = self._shapes[key] = self._learned(messages, begin, train_on, say)
                shape.bare = True not in turns
            return shape, words
        if len(self._shapes) < _SHAPES:
            self._shapes[key] = None
        return None, words

    def _learned(self, messages: Sequence[Message], begin: int, train_on: TrainOn, say: Mapping[str, Any]) -> _Shape:
        """A shape by a conversation whose words are in no template."""
        words = [f"{_PROBE}{number}." for number in range(len(messages))]
        probes = [{**each, "content": text} for each, text in zip(messages, words, strict=True)]
        try:
            text = self.render(probes, say["tools"], say["settings"], where=say["where"])
            found = _Shape.learn(words, self._searched(probes, begin, train_on, text, say))
        except ConfigError:
            found = None
        return _Shape((), (), False, 0, trials=_NEVER) if found is None else found

    def _searched(
        self, messages: Sequence[Message], begin: int, train_on: TrainOn, text: str, say: Mapping[str, Any]
    ) -> Rendered:
        """What is trained, by rendering parts of the conversation."""
        if train_on == "all":
            return Rendered(text, ((0, len(text)),), ())
        first = self._first(messages, begin, text, say) if train_on == "completion" else 0
        if train_on == "completion":
            last = messages[-1]["role"] == "assistant" if messages else False
            return Rendered(text, ((first, len(text)),), ((first, len(text)),) if last else ())
        turns = self._marked(messages, text, say) if self.marks else list(self._found(messages, text, say))
        altered = sum(turn is None for turn in turns)
        spans = [turn for turn in turns if turn is not None]
        if train_on == "last":
            spans, altered = spans[-1:], int(turns[-1:] == [None])
        return Rendered(text, tuple(spans), tuple(spans), altered)

    def _first(self, messages: Sequence[Message], begin: int, text: str, say: Mapping[str, Any]) -> int:
        """Where what is behind the prompt begins."""
        if begin == 0:
            return 0
        prompt = self.render(messages[:begin], prompt=True, **say)
        if text.startswith(prompt):
            return len(prompt)
        base = self.render(messages[:begin], **say)
        start = _alike(base, prompt)
        if text[:start] != prompt[:start]:
            raise ConfigError(
                f"data: {say['where']}: the chat template renders the prompt otherwise once an answer follows, so "
                "where the answer begins cannot be said: give another template."
            )
        return start + (len(self.header) if text.startswith(self.header, start) else 0)

    def _marked(self, messages: Sequence[Message], text: str, say: Mapping[str, Any]) -> list[tuple[int, int] | None]:
        """What the template marks, one span for marks that touch."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {k: v for k, v in self.tokenizer.special_tokens_map.items() if isinstance(v, str)}
        _, found = render_jinja_template(
            conversations=[self._given(messages)],
            tools=say["tools"],
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **{**special, **(say["settings"] or {})},
        )
        spans: list[tuple[int, int] | None] = []
        for start, stop in cast(Any, found)[0]:
            if spans and (before := spans[-1]) is not None and before[1] == start:
                spans[-1] = (before[0], stop)
            else:
                spans.append((start, stop))
        return spans

    def _found(
        self, messages: Sequence[Message], text: str, say: Mapping[str, Any]
    ) -> Iterator[tuple[int, int] | None]:
        """The assistant's turns in ``text``, by rendering the turns up to each; None: one that the template alters."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            until = text if number == len(messages) - 1 else self.render(messages[: number + 1], **say)
            start = self._start(messages, number, until, text, say)
            if start is None:
                yield None
            elif text.startswith(until):
                yield start, len(until)
            else:  # other turns follow: what stands behind the last turn alone is gone, or the turn is another
                stop = self._stop(message, start, until, text)
                yield None if stop is None else (start, stop)

    def _start(
        self, messages: Sequence[Message], number: int, until: str, text: str, say: Mapping[str, Any]
    ) -> int | None:
        """Where the words of turn ``number`` begin, in ``until`` and in ``text`` alike; None: nowhere."""
        if number == 0:
            place = until.find(self.header)
            return place + len(self.header) if self.header and text[:place] == until[:place] else None
        prompt = self.render(messages[:number], prompt=True, **say)
        base = self.render(messages[:number], **say)
        if prompt != base and text.startswith(prompt) and until.startswith(prompt):
            return len(prompt)
        start = _alike(base, until) if prompt == base else _alike(base, prompt)
        start += _alike(until[start:], self.header)  # a turn may begin otherwise than its prompt, as with thoughts
        return start if text[:start] == until[:start] else None

    def _stop(self, message: Message, start: int, until: str, text: str) -> int | None:
        """Where the turn from ``start`` on ends in ``text``, given where it ends in ``until``; None: it is another
        there. What ends it may be another token where turns follow, so it is looked for behind the turn's words."""
        content = message.get("content")
        words = content.strip() if isinstance(content, str) else ""
        shared = start + _alike(text[start:], until[start:])
        if words:
            place = until.rfind(words)
            behind = place + len(words)
            if place < start or behind > shared:
                return None
            found = self._special.search(text, behind)
            if found is None or text[behind : found.start()].strip():
                return shared
            stop = found.end()
        else:
            ends = [each.end() for each in self._special.finditer(text, start, shared)]
            if not ends:
                return None
            stop = ends[-1]
        while stop < min(len(text), len(until)) and text[stop].isspace():
            stop += 1
        return stop
