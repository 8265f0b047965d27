"""What a row says, told by its columns: a prompt, answers to it, and what else there is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from shardfold.errors import ConfigError, did_you_mean
from shardfold.tools.tune.data.rows import Kind
from shardfold.tools.tune.data.sources import Raw

__all__ = ["FORMATS", "Example", "Message", "Words", "read_example"]

Message = dict[str, Any]
"""One turn: ``role``, ``content``, and what else templates know, such as ``tool_calls``."""

Words = str | list[Message]
"""Plain text, or turns for a template."""


@dataclass(frozen=True)
class Example:
    """A row, whatever its format was.

    Attributes:
        where: file and line, as messages name it.
        prompt: what stands in front of the answer; text or turns, as the answers are.
        answers: none, one, or the chosen and the rejected one.
        good: whether the answer was found good; None: nobody was asked.
        fields: all columns of the row.
        tools: functions that a template tells the model of.
        settings: further values for the template.
    """

    where: str
    prompt: Words
    answers: tuple[Words, ...] = ()
    good: bool | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to train on, or no prompt where that is all."""
        if self.answers:
            return any(not each or (isinstance(each, str) and not each.strip()) for each in self.answers)
        return not self.prompt or (isinstance(self.prompt, str) and not self.prompt.strip())


SPEAKERS = ("system", "developer", "user", "assistant", "tool")
"""Roles that every template may be given."""

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
"""Who speaks in ShareGPT's files, by the role that templates know."""
_KNOWN_ROLES = {*SPEAKERS, *_ROLES}


def read_example(raw: Raw, format: str | None, kind: Kind, columns: Mapping[str, str] | None = None) -> Example | None:
    """Read a row.

    Args:
        raw: as it lies in its file.
        format: one of ``FORMATS``; None: told by the columns.
        kind: what it is read for, which decides between formats that share columns.
        columns: the file's name of a column, by the name that the format knows.

    Returns:
        What it says; None: it is blank.

    Raises:
        ConfigError: it is of no format, or not what its format asks for; names file and line.
    """
    if raw.value is None:
        return None
    if isinstance(raw.value, str):
        if kind != "text":
            _refuse(raw.where, f"plain text has no {_NEEDS[kind]}: give a file of rows, as {_SHAPES[kind]}")
        return Example(raw.where, "", (raw.value,))
    row = raw.value
    if columns or None in row.values():
        row = {name: value for name, value in row.items() if value is not None}
    for name, theirs in (columns or {}).items():
        if theirs in row:
            row[name] = row.pop(theirs)
    if not row:
        return None
    name = format or _tell(row, kind, raw.where)
    if name not in FORMATS:
        raise ConfigError(f"data: there is no format {name!r}.{did_you_mean(name, FORMATS)}")
    example = FORMATS[name](row, raw.where)
    return _fit(example, kind, name)


_NEEDS = {"text": "text", "chat": "answer", "pair": "chosen and rejected answer", "label": "label", "prompt": "prompt"}
_SHAPES = {
    "text": '{"text": ...}',
    "chat": '{"messages": [...]}',
    "pair": '{"prompt": ..., "chosen": ..., "rejected": ...}',
    "label": '{"prompt": ..., "completion": ..., "label": true}',
    "prompt": '{"prompt": ...}',
}


def _tell(row: Mapping[str, Any], kind: Kind, where: str) -> str:
    """The format that has these columns."""
    has = row.keys()
    if {"chosen", "rejected"} <= has:
        return "pair"
    if "label" in has and ("completion" in has or "messages" in has):
        return "label"
    if "messages" in has:
        return "messages"
    if "conversations" in has:
        return "sharegpt"
    if "instruction" in has and ("output" in has or kind == "prompt"):
        return "alpaca"
    if {"prompt", "completion"} <= has:
        return "completion"
    if "prompt" in has:
        return "prompt"
    if "text" in has:
        return "text"
    known = ["messages", "conversations", "instruction", "output", "prompt", "completion", "chosen", "rejected", "text"]
    near = next((each for name in has if "Did you mean" in (each := did_you_mean(name, known))), "")
    if not near:
        columns = 'columns = { prompt = "question", completion = "answer" }'
        near = f' Other names are told in a config file: data = [{{ path = "...", {columns} }}].'
    _refuse(where, f"columns {', '.join(map(repr, has))} are of no known format; {kind} reads {_SHAPES[kind]}.{near}")


def _fit(example: Example, kind: Kind, name: str) -> Example:
    """The example as ``kind`` takes it."""
    answers = len(example.answers)
    if kind == "prompt":
        last = example.answers[-1] if answers and name in ("messages", "sharegpt") else None
        if isinstance(last, list) and last and last[-1]["role"] != "assistant":  # a question that nobody answered yet
            return Example(**{**vars(example), "prompt": [*example.prompt, *last], "answers": ()})
        return Example(**{**vars(example), "answers": ()})
    if kind == "text":
        if name != "text":
            _refuse(example.where, f"format {name!r} has no column 'text', which documents are read from")
        return example
    if kind == "pair" and answers != 2:
        _refuse(example.where, f"format {name!r} has no 'chosen' and 'rejected': give {_SHAPES[kind]}")
    if kind == "label" and example.good is None:
        _refuse(example.where, f"format {name!r} has no 'label': give {_SHAPES[kind]}")
    if kind == "chat":
        if not answers:
            _refuse(example.where, f"format {name!r} has no answer to train on: give {_SHAPES[kind]}")
        return example if answers == 1 else Example(**{**vars(example), "answers": example.answers[:1]})
    return example


def _refuse(where: str, why: str) -> NoReturn:
    raise ConfigError(f"data: {where}: {why.rstrip('.')}." if not why.endswith("?") else f"data: {where}: {why}")


def _listed(value: Any) -> Any:
    """Turns that a file keeps as JSON in a text, as csv has to."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _turns(value: Any, where: str, name: str) -> list[Message]:
    """Turns with ``role`` and ``content``, of ShareGPT's ``from`` and ``value`` too."""
    value = _listed(value)
    if not isinstance(value, Sequence) or isinstance(value, str):
        _refuse(where, f"{name!r} is {value!r:.60}, but a list of turns, as [{{'role': 'user', 'content': '...'}}]")
    turns = [_turn(each, where, f"{name}[{number}]") for number, each in enumerate(value)]
    return turns


def _turn(value: Any, where: str, name: str) -> Message:
    if not isinstance(value, Mapping):
        _refuse(where, f"{name} is {value!r:.60}, but a turn, {{'role': ..., 'content': ...}}")
    turn = dict(value)
    if None in turn.values():
        turn = {key: each for key, each in value.items() if each is not None}
    if "role" in turn:
        if not isinstance(turn["role"], str):
            _refuse(where, f"{name}: 'role' is {turn['role']!r:.60}, but has to be text")
        if turn["role"] not in _KNOWN_ROLES:
            near = did_you_mean(turn["role"], SPEAKERS)
            if "Did you mean" in near:  # else it may be one of a template's own
                _refuse(where, f"{name}: there is no role {turn['role']!r}.{near}")
        if "content" not in turn:
            others = [key for key in turn if key != "role"]
            if not {"tool_calls", "reasoning_content", "thinking", "function_call"} & turn.keys():
                near = did_you_mean(others[0], ["content"]) if others else ""
                _refuse(where, f"{name} has no 'content'.{near}")
            turn["content"] = ""
        _said(turn["content"], where, f"{name}: 'content'")
        return turn
    if "from" in turn:
        role = _ROLES.get(str(turn["from"]))
        if role is None:
            _refuse(where, f"{name}: 'from' is {turn['from']!r:.60}.{did_you_mean(str(turn['from']), _ROLES)}")
        if "value" not in turn:
            _refuse(where, f"{name} has no 'value'")
        if role == "function_call":
            return {"role": "assistant", "content": "", "tool_calls": _calls(turn["value"], where, name)}
        _said(turn["value"], where, f"{name}: 'value'")
        return {"role": role, "content": turn["value"]}
    near = did_you_mean(next(iter(turn), ""), ["role", "content", "from", "value"])
    if "Did you mean" not in near:
        near += " An answer that is JSON itself is written as text, by json.dumps."
    _refuse(where, f"{name} has neither 'role' nor 'from'.{near}")


def _said(value: Any, where: str, name: str) -> None:
    """A turn's words: text, or a list of parts as models take them that see."""
    parts = isinstance(value, list) and all(isinstance(each, str | Mapping) for each in value)
    if not isinstance(value, str) and not parts:
        _refuse(where, f"{name} is {value!r:.60}, but has to be text")


def _calls(value: Any, where: str, name: str) -> list[Message]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        return [
            {"type": "function", "function": {"name": each["name"], "arguments": each.get("arguments", {})}}
            for each in calls
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        _refuse(where, f"{name}: a function_call is JSON with 'name' and 'arguments', not {value!r:.60}")


def _tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    tools = _listed(row.get("tools"))
    if not tools:
        return None
    if not isinstance(tools, list):
        _refuse(where, f"'tools' is {tools!r:.60}, but a list of functions")
    return tools


def _example(row: Mapping[str, Any], where: str, prompt: Words, *answers: Words, good: bool | None = None) -> Example:
    settings = row.get("chat_template_kwargs") or {}
    if not isinstance(settings, Mapping):
        _refuse(where, f"'chat_template_kwargs' is {settings!r:.60}, but names and values")
    return Example(where, prompt, answers, good, row, _tools(row, where), settings)


def _split(turns: list[Message]) -> tuple[list[Message], list[Message]]:
    """Up to the last turn that no assistant takes before its last answer, and what is behind that."""
    end = len(turns)
    while end and turns[end - 1]["role"] != "assistant":
        end -= 1
    begin = end
    while begin and turns[begin - 1]["role"] in ("assistant", "tool"):
        begin -= 1
    return (turns[:begin], turns[begin:]) if end else (turns, [])


def _messages(row: Mapping[str, Any], where: str) -> Example:
    turns = _turns(row.get("messages"), where, "messages")
    prompt, answer = _split(turns)
    return _example(row, where, prompt, answer)


def _sharegpt(row: Mapping[str, Any], where: str) -> Example:
    turns = _turns(row.get("conversations"), where, "conversations")
    if isinstance(row.get("system"), str) and row["system"]:
        turns = [{"role": "system", "content": row["system"]}, *turns]
    prompt, answer = _split(turns)
    return _example(row, where, prompt, answer)


def _alpaca(row: Mapping[str, Any], where: str) -> Example:
    turns: list[Message] = []
    if row.get("system"):
        turns.append({"role": "system", "content": _text(row, "system", where)})
    history = _listed(row.get("history")) or []
    if not isinstance(history, list):
        _refuse(where, f"'history' is {history!r:.60}, but a list of [instruction, answer]")
    for number, each in enumerate(history):
        if not isinstance(each, list) or len(each) != 2 or not all(isinstance(words, str) for words in each):
            _refuse(where, f"history[{number}] is {each!r:.60}, but [instruction, answer]")
        turns += [{"role": "user", "content": each[0]}, {"role": "assistant", "content": each[1]}]
    asked = [each for name in ("instruction", "input") if (each := _text(row, name, where, name != "instruction"))]
    turns.append({"role": "user", "content": "\n".join(asked)})
    output = _text(row, "output", where, optional=True)
    return _example(row, where, turns, *([[{"role": "assistant", "content": output}]] if output else [[]]))


def _text(row: Mapping[str, Any], name: str, where: str, optional: bool = False) -> str:
    value = row.get(name, "" if optional else None)
    if not isinstance(value, str):
        said = "is missing" if value is None else f"is {value!r:.60}"
        _refuse(
            where,
            f"{name!r} {said}, but has to be text.{did_you_mean(name, set(row) - {name}) if value is None else ''}",
        )
    return value


def _words(row: Mapping[str, Any], name: str, where: str) -> Words:
    """Text or turns; one turn may stand for a list of it."""
    value = row.get(name)
    value = _listed(value)
    if value is None:
        _refuse(where, f"{name!r} is missing")
    if isinstance(value, Mapping):
        value = [value]
    return value if isinstance(value, str) else _turns(value, where, name)


def _alike(prompt: Words, answer: Words, where: str, name: str) -> Words:
    """The answer in the form of the prompt: an answer in words to turns is the assistant's turn."""
    if isinstance(prompt, str) and not isinstance(answer, str) and prompt:
        _refuse(where, f"'prompt' is text, but {name!r} turns: give both as text or both as turns")
    if isinstance(answer, str) and not isinstance(prompt, str):
        return [{"role": "assistant", "content": answer}]
    return answer


def _completion(row: Mapping[str, Any], where: str) -> Example:
    prompt = _words(row, "prompt", where)
    answer = _words(row, "completion", where)
    return _example(row, where, prompt, _alike(prompt, answer, where, "completion"))


def _pair(row: Mapping[str, Any], where: str) -> Example:
    chosen, rejected = (_words(row, name, where) for name in ("chosen", "rejected"))
    if "instruction" in row or "conversations" in row:
        source = _alpaca(row, where) if "instruction" in row else _sharegpt(row, where)
        prompt: Words = source.prompt
    elif "prompt" in row:
        prompt = _words(row, "prompt", where)
        if not isinstance(prompt, str) and not isinstance(chosen, str) and chosen[: len(prompt)] == prompt:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]  # both were given whole
        elif isinstance(prompt, str) and not isinstance(chosen, str) and not isinstance(rejected, str):
            prompt, chosen, rejected = _shared(chosen, rejected, where)
    else:
        prompt, chosen, rejected = _shared(chosen, rejected, where)
    return _example(
        row, where, prompt, _alike(prompt, chosen, where, "chosen"), _alike(prompt, rejected, where, "rejected")
    )


def _shared(chosen: Words, rejected: Words, where: str) -> tuple[Words, Words, Words]:
    """The prompt that two whole conversations, or texts, begin with, and what each goes on with."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        _refuse(where, "one of 'chosen' and 'rejected' is text, the other turns: give both as text or both as turns")
    alike = next((k for k, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if alike is None:
        alike = min(len(chosen), len(rejected))
    if isinstance(chosen, str):
        alike = chosen.rfind(" ", 0, alike) if " " in chosen[:alike] else 0  # whole words
    if not isinstance(chosen, str) and alike == 0:
        _refuse(where, "'chosen' and 'rejected' begin with other turns, so there is no prompt: add a column 'prompt'")
    return chosen[:alike], chosen[alike:], rejected[alike:]


_GOOD = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def _label(row: Mapping[str, Any], where: str) -> Example:
    label = row.get("label")
    good = _GOOD.get(label.strip().lower() if isinstance(label, str) else label) if _plain(label) else None
    if good is None:
        _refuse(where, f"'label' is {label!r:.60}, but true or false")
    source = _messages(row, where) if "messages" in row else _completion(row, where)
    return Example(**{**vars(source), "good": good})


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _prompt(row: Mapping[str, Any], where: str) -> Example:
    return _example(row, where, _words(row, "prompt", where))


def _document(row: Mapping[str, Any], where: str) -> Example:
    return _example(row, where, "", _text(row, "text", where))


FORMATS: dict[str, Callable[[Mapping[str, Any], str], Example]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "completion": _completion,
    "pair": _pair,
    "label": _label,
    "prompt": _prompt,
    "text": _document,
}
"""Formats by name, as ``format=`` of a source takes them."""
