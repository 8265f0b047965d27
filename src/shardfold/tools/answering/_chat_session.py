"""A conversation on the terminal: `shardfold chat`."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from shardfold.errors import ConfigError
from shardfold.generation import Continuation, Generation
from shardfold.tools.answering.answer_config import ChatConfig
from shardfold.tools.answering.batch_answers import rule_of, template_of
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.answering.text_stream import TextStream

__all__ = ["ChatSession", "chat"]

HELP = """\
/reset         begin anew
/system TEXT   begin anew, with what the model is told first; without TEXT, with nothing
/help          this
Ctrl-C         stops an answer
Ctrl-D         ends the chat"""

KEPT = 4096
"""Pages of keys and values that stay for the next turn."""


class ChatSession:
    """What was said, and the model that goes on with it. Keys and values of earlier turns stay in their pages.

    Args:
        model: that answers. One without a chat template goes on with the text as it is.
        config: how.

    Attributes:
        stopped: set by whoever wants no more of the answer that is under way.
    """

    def __init__(self, model: OpenedModel, config: ChatConfig) -> None:
        self._model, self._config = model, config
        self._template = template_of(model, config.template)
        if config.system is not None and self._template is None:
            raise ConfigError("the model has no chat template, so there is no place for --system: leave it out.")
        self._running = Generation(model.engine, keep=KEPT)
        self.system = config.system
        self.stopped = False
        self.reset()

    @property
    def seen(self) -> int:
        """Tokens that went through the model."""
        return self._running.seen

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def reset(self) -> None:
        """Forget what was said."""
        self._turns: list[dict[str, Any]] = []
        if self.system:
            self._turns.append({"role": "system", "content": self.system})
        self._tokens: list[int] = []  # of a model without a template
        self._answers = 0

    def say(self, words: str) -> Any:
        """Yields the answer's text as it comes.

        Raises:
            ConfigError: the conversation fills the model's context.
        """
        tokens = self._asked(words)
        most = min(self._config.max_tokens, self._model.context - len(tokens))
        if most < 1:
            raise ConfigError(
                f"the conversation has {len(tokens)} tokens, and the model reads {self._model.context}: begin anew "
                "with /reset."
            )
        rule, stops = rule_of(self._config, self._answers), frozenset(self._model.stops)
        text = Continuation(self._answers, 0, list(tokens), len(tokens), most, rule, stops)
        stream, said, self.stopped = TextStream(self._model.tokenizer, self._config.stop), "", False
        self._running.add(text)
        while text.finish is None and not stream.stopped and not self.stopped:
            before = len(text.tokens)
            self._running.step()
            for token in text.tokens[before:]:
                if token not in text.stop:
                    said += (part := stream.push(token))
                    yield part
        if text.finish is None:
            self._running.drop([text])
        said += (part := stream.rest())
        yield part
        self._answers += 1
        self._turns += [{"role": "user", "content": words}, {"role": "assistant", "content": said}]
        self._tokens = text.tokens

    def _asked(self, words: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if self._template is None:
            if not self._tokens:
                return tokenizer(words).input_ids
            return [*self._tokens, *tokenizer(words, add_special_tokens=False).input_ids]
        text = self._template.render(
            [*self._turns, {"role": "user", "content": words}], where="the conversation", prompt=True
        )
        return tokenizer(text, add_special_tokens=False).input_ids

    def close(self) -> None:
        self._running.close()


def chat(config: ChatConfig) -> None:
    """Talk until the end of the input.

    Raises:
        ConfigError: there is no such model.
    """
    model = OpenedModel.open(config)
    try:
        session = ChatSession(model, config)
        try:
            _talk(session, shown=sys.stdin.isatty())
        finally:
            session.close()
    finally:
        model.close()


def _talk(session: ChatSession, *, shown: bool) -> None:
    asks = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        session.stopped = True
        if asks:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    if shown:
        how = "" if session.has_template else " The model has no chat template: it goes on with the text as it is."
        print(f"Ctrl-C stops an answer, Ctrl-D ends; /help tells more.{how}")
    try:
        while True:
            try:
                asks = True
                words = input("> " if shown else "")
            except EOFError:
                break
            except KeyboardInterrupt:
                print("\nCtrl-D ends the chat.")
                continue
            finally:
                asks = False
            try:
                _answer(session, words)
            except ConfigError as error:
                print(f"Error: {error}", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, before)
    if shown:
        print()


def _answer(session: ChatSession, words: str) -> None:
    """Do what a line asks for."""
    command, _, rest = words.strip().partition(" ")
    if command == "/help":
        print(HELP)
    elif command == "/reset":
        session.reset()
    elif command == "/system":
        if rest and not session.has_template:
            raise ConfigError("the model has no chat template, so there is no place for what it is told first.")
        session.system = rest.strip() or None
        session.reset()
    elif command.startswith("/") and command[1:].isalpha():
        raise ConfigError(f"there is no {command}: /help lists what there is.")
    elif words.strip():
        for part in session.say(words):
            print(part, end="", flush=True)
        print(" ..." if session.stopped else "")
