"""An endpoint over the weights that train: `sf.serving`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardfold.engine.engine import Engine
from shardfold.errors import ConfigError, UsageError
from shardfold.plan.checks import described, is_integer, is_number, known_arguments, parse_bytes
from shardfold.tools.extras import sentence

if TYPE_CHECKING:
    from shardfold.tools.serve.answer_loop import AnswerLoop
    from shardfold.tools.serve.text_ranks import TextRanks
    from shardfold.tools.serve.web_side import WebSide

__all__ = ["TrainingServer", "serving"]

USUAL_CONTEXT = 2048


class TrainingServer:
    """What `sf.serving` gives.

    Attributes:
        url: where clients ask; None on ranks that have no sockets, all but the first.
    """

    def __init__(self, engine: Engine, ranks: TextRanks, web: WebSide | None, answers: AnswerLoop | None) -> None:
        self._engine, self._ranks, self._answers = engine, ranks, answers
        self.url = web.url if web is not None else None

    @property
    def waiting(self) -> int:
        """Requests that wait for :meth:`answer`; 0 on ranks that have no sockets."""
        return self._answers.waiting if self._answers is not None else 0

    def answer(self, seconds: float = 0.0) -> None:
        """Answer what has come, with the weights as they are now; between steps, on all ranks at the same place.

        Requests that come within `seconds` are answered too; those that come later wait for the next call. Returns
        once every answer that was begun is whole, so each is of one set of weights.

        Args:
            seconds: rank 0's counts; 0: only what waits already.

        Raises:
            ConfigError: it is no number from 0 on.
        """
        if not is_number(seconds, 0, 1e9):
            raise ConfigError(f"server.answer({described(seconds)}): it is a number of seconds, from 0 on.")
        self._ranks.weights = self._engine.steps
        self._ranks.start()
        if self._answers is None:
            self._ranks.follow()
        else:
            self._answers.run(seconds)
            self._ranks.end()


@known_arguments
@contextmanager
def serving(
    engine: Engine,
    tokenizer: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    name: str = "model",
    keys: Sequence[str] = (),
    template: str = "model",
    stop: Sequence[int] | None = None,
    context: int | None = None,
    cache: str = "256MiB",
    rows: int = 64,
    queue: int = 256,
) -> Iterator[TrainingServer]:
    """An OpenAI endpoint over the weights that train, inside of a ``with`` on all ranks.

    Requests are taken at any time, by a thread of rank 0, and answered where the loop calls :meth:`TrainingServer
    .answer`: there is one copy of the weights, and between two steps nothing trains. What is trained is what it would
    be without a server, to the bit.

    Args:
        engine: of a model that generates, see :func:`shardfold.generate`.
        tokenizer: a fast one of transformers.
        host: an address; one that other machines reach needs ``keys``.
        port: 0: one that is free.
        name: the model's, for clients.
        keys: that clients have to have one of.
        template: of conversations: ``"model"`` is the tokenizer's own; a file, or a name.
        stop: tokens that end an answer; None: the tokenizer's.
        context: tokens of a text at most; None: what the model's config says.
        cache: memory of keys and values, on each rank, while it answers.
        rows: texts that each rank generates at once.
        queue: texts that wait behind them; who comes then is told to come again.

    Raises:
        ConfigError: an argument is wrong, or the address is taken.
        ModelError: text cannot be generated with the model.
        UsageError: the engine has stages or an axis of sequence.

    Examples:
        >>> with sf.serving(engine, tokenizer) as server:
        ...     for step, batch in enumerate(loader):
        ...         engine.backward(engine(**batch).loss)
        ...         engine.step()
        ...         server.answer()
    """
    try:  # none of which comes without an extra
        from shardfold.tools.serve._endpoint import endpoint
        from shardfold.tools.serve.serve_config import SHORTEST_KEY, is_loopback
        from shardfold.tools.serve.text_ranks import TextRanks
    except ModuleNotFoundError as error:
        raise ConfigError(sentence("sf.serving", error) or str(error)) from None
    size = _checked(engine, tokenizer, cache, rows=rows, queue=queue)
    if not keys and not is_loopback(host):
        raise ConfigError(f"serving(host={host!r}) lets other machines ask: give keys, which they have to have.")
    if any(len(key) < SHORTEST_KEY for key in keys):
        raise ConfigError(f"serving(keys=...): a key has {SHORTEST_KEY} characters at least.")
    own: Any = getattr(engine.module, "config", None)
    longest = context or getattr(own, "max_position_embeddings", None) or getattr(own, "context", USUAL_CONTEXT)
    ranks = TextRanks(engine, cache=size, rows=rows, context=longest)
    if engine.rank:
        yield TrainingServer(engine, ranks, None, None)
        return
    web, app, answers = endpoint(
        ranks,
        tokenizer,
        names=(name,),
        template=template,
        stops=[each for each in [tokenizer.eos_token_id] if each is not None] if stop is None else stop,
        most=rows * ranks.num_places + queue,
        address=(host, port),
        keys=[key.encode() for key in keys],
    )
    web.start()
    try:
        yield TrainingServer(engine, ranks, web, answers)
    finally:
        app.drains = True
        answers.close("training ended.")
        web.stop()


def _checked(engine: Engine, tokenizer: Any, cache: Any, **counts: Any) -> int:
    """Bytes of the cache."""
    size = parse_bytes(cache) if isinstance(cache, str) else None
    if size is None:
        raise ConfigError(f"serving(cache={described(cache)}): it is a size, as '1GiB'.")
    for what, value in counts.items():
        if not is_integer(value, 1):
            raise ConfigError(f"serving({what}={described(value)}): it is a whole number from 1 on.")
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"serving(): the tokenizer is {described(tokenizer)}: give a fast one of transformers.")
    if engine.closed:
        raise UsageError("serving(): the engine is closed.")
    return size
