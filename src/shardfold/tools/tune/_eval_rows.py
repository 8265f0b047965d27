"""Rows as an evaluation takes them: texts and conversations to score, prompts to answer, questions with choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from shardfold.errors import ConfigError
from shardfold.tools.tune.config import Source
from shardfold.tools.tune.data.row_formats import Example, Message, Words, read_example
from shardfold.tools.tune.data.sources import Raw, find_files, read_block, scan

__all__ = ["ChoiceQuestion", "EvalRows", "read_rows"]


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question, answers to choose from, and which of them is right.

    Attributes:
        prompt: as text, or as turns for the chat template.
        choices: texts; behind a prompt of text, with the blank in front of them.
        right: number of the right one.
    """

    where: str
    prompt: Words
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class EvalRows:
    """What the data are.

    Attributes:
        texts: to be scored from their first token on.
        chats: to be scored where an assistant speaks; those without an answer are only answered.
        questions: with choices.
    """

    texts: list[Example] = field(default_factory=list)
    chats: list[Example] = field(default_factory=list)
    questions: list[ChoiceQuestion] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts) + len(self.chats) + len(self.questions)


def read_rows(sources: Sequence[Source], *, chat: bool) -> EvalRows:
    """Read all rows of all sources.

    Besides the formats of tuning there are ``{"question", "choices", "answer"}``, with the number of the right choice
    or its text, and ``{"question", "answer"}``, as GSM8K has them: a turn of the user and one of the assistant.

    Args:
        chat: whether the model has a chat template; without, a question stands in a line by itself.

    Raises:
        ConfigError: a row is of no format; names file and line. Or there are none.
    """
    found = EvalRows()
    for source in sources:
        for path, form in find_files(source.path):
            file = scan(path, form)
            for block in file.blocks:
                for raw in read_block(file, block):
                    _sort(raw, source.format, chat, found)
    if not len(found):
        raise ConfigError(f"data: {', '.join(str(each.path) for each in sources)}: there are no rows.")
    return found


def _sort(raw: Raw, format: str | None, chat: bool, found: EvalRows) -> None:
    row = raw.value
    if isinstance(row, Mapping) and format is None:
        if "choices" in row:
            found.questions.append(_question(row, raw.where))
            return
        if {"chosen", "rejected"} <= row.keys():
            found.questions.append(_of_pair(raw))
            return
        if {"question", "answer"} <= row.keys():
            found.chats.append(_problem(row, raw.where, chat))
            return
    if format == "text" or isinstance(row, str) or (format is None and row is not None and _is_text(row)):
        kind = "text"
    elif format == "prompt" or (row is not None and _is_prompt(row)):
        kind = "prompt"
    else:
        kind = "chat"
    example = read_example(raw, format, kind)
    if example is not None and not example.empty:
        (found.texts if kind == "text" else found.chats).append(example)


def _is_text(row: Mapping[str, Any]) -> bool:
    return "text" in row and not {"prompt", "messages", "conversations", "instruction"} & row.keys()


def _is_prompt(row: Mapping[str, Any]) -> bool:
    return "prompt" in row and not {"completion", "chosen", "rejected"} & row.keys()


def _question(row: Mapping[str, Any], where: str) -> ChoiceQuestion:
    name = next((each for each in ("question", "prompt", "query") if each in row), None)
    prompt, choices, answer = row.get(name or "question"), row["choices"], row.get("answer")
    if not isinstance(prompt, str | list) or not prompt:
        _refuse(where, "a row with 'choices' has a 'question' too, as text or as turns")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        _refuse(where, f"'choices' is {choices!r:.60}, but a list of two texts or more")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        _refuse(where, f"'answer' is {answer!r:.60}, but the number of a choice, from 0 on, or its text")
    turns: Words = prompt if isinstance(prompt, str) else [dict(each) for each in prompt]
    blank = " " if isinstance(prompt, str) and not prompt[-1].isspace() else ""
    return ChoiceQuestion(where, turns, tuple(blank + each for each in choices), answer)


def _of_pair(raw: Raw) -> ChoiceQuestion:
    example = read_example(raw, "pair", "pair")
    assert example is not None
    answers = [each if isinstance(each, str) else str(each[-1].get("content", "")) for each in example.answers]
    return ChoiceQuestion(raw.where, example.prompt, tuple(answers), 0)


def _problem(row: Mapping[str, Any], where: str, chat: bool) -> Example:
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        _refuse(where, "'question' and 'answer' are texts")
    if not chat:
        return Example(where, f"{question}\n", (answer,), fields=row)
    asked: list[Message] = [{"role": "user", "content": question}]
    return Example(where, asked, ([{"role": "assistant", "content": answer}],), fields=row)


def _refuse(where: str, why: str) -> NoReturn:
    raise ConfigError(f"data: {where}: {why}.")
