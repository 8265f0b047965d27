"""Rows as tokens, those that are trained in colour: what a run is about to learn."""

from __future__ import annotations

import json
from collections.abc import Iterable
from io import StringIO
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from shardfold.errors import ConfigError
from shardfold.tools.tune.config import Source, Text
from shardfold.tools.tune.data.prepared import prepare
from shardfold.tools.tune.data.rows import Kind, Labelled, Pair, Prompt, Row, Tokens
from shardfold.tools.tune.data.sources import SourceFile, find_files, read_block, scan

__all__ = ["left_out", "show", "show_file"]

TRAINED, GIVEN = "black on green", "dim"
_SHOWN = {"\n": "↵\n", "\t": "→"}


def show(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    facts: dict[str, Any] | None = None,
    color: bool = True,
    width: int = 100,
    most: int = 600,
) -> str:
    """Rows as text for a terminal.

    Args:
        rows: some of a data set.
        tokenizer: that they were made with.
        facts: of the data set, see :class:`Prepared`; shown below.
        color: False: trained words stand in brackets instead.
        width: of a line, in characters.
        most: tokens of a sequence that are shown; of longer ones both ends.
    """
    from rich.console import Console
    from rich.text import Text

    out = StringIO()
    system = "standard" if color else None
    console = Console(file=out, force_terminal=color, width=width, highlight=False, color_system=system, soft_wrap=True)
    for number, row in enumerate(rows):
        for name, tokens in _sequences(row):
            what = (
                f"{len(tokens)} tokens, {tokens.targets} trained"
                if not isinstance(row, Prompt)
                else (f"{len(tokens)} tokens of a prompt")
            )
            console.print(Text(f"row {number}{name}: {what}", style="bold"))
            line = Text()
            for text, trained in _runs(tokens, tokenizer, most):
                for character, shown in _SHOWN.items():
                    text = text.replace(character, shown)
                if color:
                    line.append(text, style=TRAINED if trained else GIVEN)
                else:
                    line.append(f"[[{text}]]" if trained else text)
            console.print(line)
    if facts is not None:
        console.print(Text(_said(facts), style="bold"))
    return out.getvalue()


def show_file(path: Path, model: Path, *, number: int = 5, color: bool = True, width: int = 100) -> str:
    """The first rows of a file or folder, by the tokenizer of a model's folder, and what all its rows come to.

    Raises:
        ConfigError: the data or the tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    if not (model / "tokenizer.json").is_file():
        raise ConfigError(f"model: {model} has no tokenizer.json: give the folder of a model with a fast tokenizer.")
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = Text.load({})
    config = model / "config.json"
    most = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings") if config.is_file() else None
    if isinstance(most, int) and most < text.length:  # as a run does
        text = text.model_copy(update={"length": most})
    with TemporaryDirectory() as folder:
        rows = prepare([Source.load({"path": path})], tokenizer, text, _kind(path), cache=folder)
        return show(islice(rows, number), tokenizer, facts=rows.facts, color=color, width=width)


def _kind(path: Path) -> Kind:
    """What the first row is for, by its columns."""
    for name, form in find_files(path):
        for block in scan(name, form).blocks[:1]:
            for raw in read_block(SourceFile(name, form, "", (block,)), block):
                if isinstance(raw.value, str):
                    return "text"
                columns = (raw.value or {}).keys()
                if {"chosen", "rejected"} <= columns:
                    return "pair"
                if "label" in columns:
                    return "label"
                if columns & {"messages", "conversations", "completion", "output"}:
                    return "chat"
                if columns:
                    return "text" if "text" in columns else "prompt"
    raise ConfigError(f"data: {path} has no rows.")


def _sequences(row: Row) -> list[tuple[str, Tokens]]:
    if isinstance(row, Pair):
        return [(", chosen", row.chosen), (", rejected", row.rejected)]
    if isinstance(row, Labelled):
        return [(", good" if row.good else ", bad", row.tokens)]
    if isinstance(row, Prompt):
        return [("", Tokens(row.ids, np.zeros(len(row.ids), np.bool_)))]
    return [("", row)]


def _runs(tokens: Tokens, tokenizer: Any, most: int) -> Iterable[tuple[str, bool]]:
    """Neighbours that are trained, or not, as text."""
    length = len(tokens)
    if length > most:
        half = most // 2
        yield from _runs(Tokens(tokens.ids[:half], tokens.trained[:half]), tokenizer, most)
        yield f" ... {length - 2 * half} tokens ... ", False
        yield from _runs(Tokens(tokens.ids[-half:], tokens.trained[-half:]), tokenizer, most)
        return
    edges = [0, *(np.flatnonzero(np.diff(tokens.trained)) + 1).tolist(), length]
    for start, stop in pairwise(edges):
        if start < stop:
            yield _text(tokens.ids[start:stop], tokenizer), bool(tokens.trained[start])


def _text(ids: npt.NDArray[np.int32], tokenizer: Any) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _said(facts: dict[str, Any]) -> str:
    """One sentence of what there is, and what was left out."""
    said = f"{facts['rows']:,} rows, {facts['tokens']:,} tokens, {facts['trained']:,} of them trained"
    return "; ".join([said, *left_out(facts)]) + "."


def left_out(facts: dict[str, Any]) -> list[str]:
    """What of the data is not trained, in words; of nothing, no words.

    Args:
        facts: see :class:`Prepared`.
    """
    words = {
        "cut": ("row", "cut at the length"),
        "too_long": ("row", "left out, as nothing trained is within the length"),
        "empty": ("row", "left out as empty"),
        "untrained": ("row", "left out, as nothing in it is trained"),
        "altered_turns": ("turn", "of the assistant not trained, as the template alters it once others follow"),
    }
    return [
        f"{facts[name]:,} {noun}{'s' * (facts[name] > 1)} {text}"
        for name, (noun, text) in words.items()
        if facts.get(name)
    ]
