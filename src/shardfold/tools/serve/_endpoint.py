"""An endpoint: the sockets, what they say, and who answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shardfold.tools.serve._web_app import ServedModel, WebApp
from shardfold.tools.serve.answer_loop import AnswerLoop
from shardfold.tools.serve.text_ranks import TextRanks
from shardfold.tools.serve.web_side import WebSide
from shardfold.tools.tune.data.templates import chat_template

__all__ = ["endpoint"]


def endpoint(
    ranks: TextRanks,
    tokenizer: Any,
    *,
    names: Sequence[str],
    template: str,
    stops: Iterable[int],
    most: int,
    address: tuple[str, int],
    keys: Sequence[bytes],
    cors: Sequence[str] = (),
    newest: Callable[[], Path | None] = lambda: None,
) -> tuple[WebSide, WebApp, AnswerLoop]:
    """The sockets, what they say, and who answers, on the rank that has them.

    Args:
        names: of the model, and of its adapters.
        template: of conversations, by name.
        stops: tokens that end an answer.
        most: texts that are under way or wait, at most.

    Raises:
        ConfigError: the address is taken, or there is no such template.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    served = ServedModel(
        tuple(names),
        tokenizer,
        chat_template(tokenizer, template),
        begin if begin is not None else end,
        ranks.vocabulary(tokenizer),
        ranks.capacity,
    )
    app = WebApp(served, ranks, most=most, host=address[0], keys=keys, cors=cors)
    answers = AnswerLoop(ranks, tokenizer, stops, app.tell, newest)
    app.connect(answers)
    return WebSide(app, *address), app, answers
