"""Answers to all prompts of a file, as they end: `shardfold generate`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError
from shardfold.generation import Continuation, Generation, SamplingRule
from shardfold.generation.sampling import prompt_seed
from shardfold.plan.checks import parse_bytes
from shardfold.tools.answering.answer_config import AnswerConfig, GenerateConfig
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.answering.text_stream import TextStream
from shardfold.tools.observe.working_line import working
from shardfold.tools.tune.data.templates import ChatTemplate, chat_template

__all__ = ["PromptRow", "answer_prompts", "read_prompts", "rule_of", "template_of"]


PAGE = 16
"""Tokens of a page of keys and values."""
FREE = {
    "prompts",
    "out",
    "n",
    "cache",
    "rows",
    "gather",
    "procs",
    "layout",
    "tensor",
    "memory",
    "weights_folder",
    "weights",
}
"""Settings that no answer depends on."""


@dataclass(frozen=True)
class PromptRow:
    """A line of a file of prompts.

    Attributes:
        line: its number, from 1.
        prompt: text, or turns.
    """

    line: int
    prompt: str | list[dict[str, Any]]


def read_prompts(path: Path) -> list[PromptRow]:
    """
    Raises:
        ConfigError: a line is no prompt, or there is none.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}: give --prompts a file.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is no JSON ({error}): write a prompt as a JSON string.") from None
        if isinstance(said, dict):
            said = said.get("messages", said.get("prompt"))
        if said == "":
            raise ConfigError(f"{path}:{number} is an empty prompt: leave the line out, or begin a text.")
        turns = isinstance(said, list) and all(isinstance(each, dict) and "role" in each for each in said)
        if not said or not (isinstance(said, str) or turns):
            raise ConfigError(
                f"{path}:{number} is no prompt: write a JSON string, or an object with prompt (text, or a list of "
                "messages with role and content) or messages."
            )
        found.append(PromptRow(number, said))
    if not found:
        raise ConfigError(f"{str(path)!r} has no prompts.")
    return found


def template_of(model: OpenedModel, template: str) -> ChatTemplate | None:
    """The chat template that answers are asked by; None: the model has none."""
    source = None if model.is_bytes else chat_template(model.tokenizer, template)
    return None if source is None else ChatTemplate(model.tokenizer, source)


def rule_of(config: AnswerConfig, number: int) -> SamplingRule:
    """How the answer to the prompt of that number is chosen."""
    return SamplingRule(
        config.temperature,
        config.top_p,
        config.top_k,
        prompt_seed(config.seed, number),
        config.repetition,
        config.min_p,
    )


class AnswerFile:
    """Where answers go: a line each, written whole, so that ranks do not mix them.

    Args:
        path: of the file; None: standard output.
        rows: that are asked.
        settings: that an answer depends on; they lie in a file beside it.

    Attributes:
        answered: (line, sample) of what is there already.

    Raises:
        ConfigError: the file has answers to other prompts, or of other settings.
    """

    def __init__(self, path: Path | None, rows: Sequence[PromptRow], settings: Mapping[str, Any]) -> None:
        self.answered: set[tuple[int, int]] = set()
        self._file = sys.stdout.fileno()
        if path is None:
            return
        path = path.expanduser()
        prompts = {row.line: row.prompt for row in rows}
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            try:
                said = json.loads(line)
                key, prompt = (said["line"], said["sample"]), said["prompt"]
            except (ValueError, KeyError, TypeError):
                if not line.endswith(b"\n"):
                    break  # it was being written when the run ended
                raise ConfigError(f"{str(path)!r} is no file of answers: give --out another.") from None
            if prompts.get(key[0]) != prompt:
                raise ConfigError(
                    f"{str(path)!r} has answers to other prompts (line {key[0]} of --prompts is another now): give "
                    "--out another file."
                )
            self.answered.add(key)
            whole += len(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_settings(path, settings, begun=bool(whole))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        if os.fstat(self._file).st_size > whole:
            os.truncate(path, whole)

    def write(self, row: PromptRow, text: Continuation, words: str, *, log_probs: bool) -> None:
        said: dict[str, Any] = {"line": row.line, "sample": text.sample, "prompt": row.prompt, "text": words}
        said |= {"tokens": text.number, "finish": text.finish or "stop"}
        if log_probs:
            said["log_probs"] = [round(each, 6) for each in text.log_probs]
        os.write(self._file, (json.dumps(said, ensure_ascii=False) + "\n").encode())


def _check_settings(path: Path, settings: Mapping[str, Any], *, begun: bool) -> None:
    """Answers of a file are of one model and one way to ask it.

    Raises:
        ConfigError: those that are there are of others.
    """
    beside = path.with_name(f"{path.name}.settings.json")
    if begun and beside.is_file():
        before = json.loads(beside.read_text(encoding="utf-8"))
        if other := [name for name in settings if before.get(name) != settings[name]]:
            raise ConfigError(
                f"{str(path)!r} has answers of other settings ({other[0]} was {before.get(other[0])!r} and is "
                f"{settings[other[0]]!r}): give --out another file."
            )
    else:
        beside.write_text(json.dumps(dict(settings), indent=1) + "\n", encoding="utf-8")


def answer_prompts(config: GenerateConfig) -> None:
    """Answer on this rank, together with the others if a launcher started several; each rank has every n-th prompt.

    Raises:
        ConfigError: there is no such model, or a prompt cannot be answered by it.
    """
    rows = read_prompts(config.prompts)
    asked = config.model_dump(mode="json", exclude=FREE)
    file = AnswerFile(config.out, rows, {**asked, "model": str(config.model.expanduser().resolve())})
    model = OpenedModel.open(config)
    try:
        engine = model.engine
        texts = _texts(model, config, rows, file)
        running = Generation(
            engine, pages=_pages(model, config), page_size=PAGE, rows=config.rows, gather=config.gather
        )
        for text in texts:
            running.add(text)
        _write_answers(running, texts, model, config, rows, file if engine.rank % config.tensor == 0 else None)
        running.close()
    finally:
        model.close()


def _texts(
    model: OpenedModel, config: GenerateConfig, rows: Sequence[PromptRow], file: AnswerFile
) -> list[Continuation]:
    engine, stops = model.engine, frozenset(model.stops)
    template = template_of(model, config.template)
    found = []
    for number in range(engine.data_rank, len(rows), engine.data_ranks):
        row = rows[number]
        missing = [sample for sample in range(config.n) if (row.line, sample) not in file.answered]
        if not missing:
            continue
        where = f"{config.prompts}:{row.line}"
        if isinstance(row.prompt, str):
            tokens = model.tokenizer(row.prompt).input_ids
        elif template is None:
            raise ConfigError(
                f"{where} is a conversation, but the model has no chat template: give --template chatml or plain or a "
                "file, or write prompts as text."
            )
        else:
            text = template.render(row.prompt, where=where, prompt=True)
            tokens = model.tokenizer(text, add_special_tokens=False).input_ids
        most = min(config.max_tokens, model.context - len(tokens))
        if most < 1 or not tokens:
            raise ConfigError(
                f"{where} has {len(tokens)} tokens, and the model reads {model.context}, of which one at least is the "
                "answer's."
            )
        rule = rule_of(config, number)
        found += [Continuation(number, each, list(tokens), len(tokens), most, rule, stops) for each in missing]
    return found


def _pages(model: OpenedModel, config: GenerateConfig) -> int | None:
    """Pages that the memory for keys and values is; a forward of one token says what a page takes."""
    if config.cache is None:
        return None
    probe = Generation(model.engine, pages=1, page_size=PAGE)
    probe.add(Continuation(0, 0, [model.first or 0], 1, 1, SamplingRule(0), frozenset()))
    probe.step()
    size = probe.pool.page_nbytes
    probe.close()
    pages = (parse_bytes(config.cache) or 0) // size
    if not pages:
        raise ConfigError(f"cache: {config.cache} is less than a page of {PAGE} tokens takes, {size:,} bytes.")
    return pages


def _begun(row: PromptRow, text: Continuation) -> list[int]:
    """What an answer goes on with: a prompt that is text, and no turn of somebody else's."""
    return text.tokens[: text.start] if isinstance(row.prompt, str) else []


def _write_answers(
    running: Generation,
    texts: Sequence[Continuation],
    model: OpenedModel,
    config: GenerateConfig,
    rows: Sequence[PromptRow],
    file: AnswerFile | None,
) -> None:
    """Until all are whole; a text that meets a stop string ends there."""
    streams = {text: TextStream(model.tokenizer, config.stop, _begun(rows[text.request], text)) for text in texts}
    words = dict.fromkeys(texts, "")
    read = dict.fromkeys(texts, 0)

    def take(text: Continuation) -> bool:
        """Whether it is over, with what it said since."""
        stream = streams[text]
        said = text.tokens[text.start + read[text] :]
        read[text] += len(said)
        for token in said:
            if token not in text.stop:
                words[text] += stream.push(token)
        if text.finish is not None:
            words[text] += stream.rest()
        return stream.stopped or text.finish is not None

    live = set(texts)
    # On a terminal answers themselves say how far it is.
    with working("answering", unit="answers", enabled=config.out is not None or not sys.stdout.isatty()) as line:
        while running.busy:
            line.amount(len(texts) - len(live), len(texts))
            whole = running.step()
            ended = [text for text in (live if config.stop else whole) if take(text)]
            running.drop([text for text in ended if text.finish is None])
            for text in ended:
                live.discard(text)
                if file is not None:
                    file.write(rows[text.request], text, words.pop(text), log_probs=config.log_probs)
                del streams[text], read[text]
