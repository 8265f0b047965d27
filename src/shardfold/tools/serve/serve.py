"""The command `shardfold serve`: the model, the ranks, the signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from shardfold.checkpoint.folders import IN_RUN
from shardfold.errors import ConfigError
from shardfold.launch import GRACE_AFTER_SIGTERM
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.recipes.train_config import read_settings
from shardfold.tools.serve._endpoint import endpoint
from shardfold.tools.serve._newest import NewestWeights
from shardfold.tools.serve._web_app import WebApp
from shardfold.tools.serve.answer_loop import AnswerLoop
from shardfold.tools.serve.serve_config import ServeConfig, read_keys
from shardfold.tools.serve.text_ranks import TextRanks
from shardfold.tools.serve.web_side import WebSide

__all__ = ["serve"]

MARGIN = 3.0  # seconds of the time after SIGTERM in which what was cut is told


def serve(config: ServeConfig) -> None:
    """Serve a model on this rank, together with the others if a launcher started several, until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: there is no such model, or the address is taken.
        ModelError: text cannot be generated with the model.
    """
    keys = read_keys(config.key_file) if config.key_file is not None else []
    newest = NewestWeights(_followed(config.model.expanduser())) if config.follow else lambda: None
    model = OpenedModel.open(config, config.adapters)
    try:
        ranks = TextRanks(model.engine, cache=config.cache_bytes, rows=config.rows, context=model.context)
        ranks.start()
        if model.engine.rank:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # rank 0 says when this is the end
            ranks.follow()
            return
        web, app, answers = endpoint(
            ranks,
            model.tokenizer,
            names=(config.served_name, *config.adapters),
            template=config.template,
            stops=model.stops,
            most=config.rows * ranks.num_places + config.queue,
            address=(config.host, config.port),
            keys=keys,
            cors=config.cors,
            newest=newest,
        )
        _run(web, app, answers, ranks)
    finally:
        model.close()


def _followed(run: Path) -> Path:
    """
    Raises:
        ConfigError: there are no checkpoints to follow.
    """
    said = read_settings(run / "config.json") if (run / "config.json").is_file() else {}
    if said.get("adapter") is not None:
        raise ConfigError(f"--follow takes whole models, but {str(run)!r} trains an adapter: leave --follow out.")
    if not (run / IN_RUN).is_dir():
        raise ConfigError(
            f"--follow takes newer checkpoints of a run, and {str(run)!r} has none: train with --save-every, or leave "
            "--follow out."
        )
    return run


def _run(web: WebSide, app: WebApp, answers: AnswerLoop, ranks: TextRanks) -> None:
    web.start()
    try:
        with _ended_by_signals(app, answers):
            print(f"{web.url} answers (texts of {ranks.capacity} tokens at most); Ctrl-C ends it.", flush=True)
            answers.run()
    except BaseException:
        app.failed = "failed"
        raise
    finally:
        web.stop()
    ranks.end()


@contextmanager
def _ended_by_signals(app: Any, answers: AnswerLoop) -> Iterator[None]:
    """The first SIGTERM or SIGINT: no new answers; those under way have some time. The second: at once."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if app.drains:
            os._exit(128 + number)
        app.drains = True
        answers.put("end")
        late = threading.Timer(GRACE_AFTER_SIGTERM - MARGIN, answers.put, ["cut"])
        late.daemon = True
        late.start()

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
