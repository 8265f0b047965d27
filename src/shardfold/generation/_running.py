"""Text from a model where its weights live, whatever layout they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardfold.engine.engine import Engine, engine_of
from shardfold.engine.fitting import memory_of
from shardfold.errors import ConfigError, ModelError, NonFiniteError, UsageError
from shardfold.generation._decoders import decoder_of
from shardfold.generation.batch_scheduler import BatchScheduler, ForwardPlan
from shardfold.generation.page_books import PageBooks
from shardfold.generation.page_pool import PagePool
from shardfold.generation.paged_attention import PagedAttention
from shardfold.generation.sampling import SamplingRule, choose, prompt_seed
from shardfold.generation.texts import Continuation, Generated
from shardfold.plan.checks import described, is_flag, is_integer, known_arguments

__all__ = ["Generation", "generate"]


class Generation:
    """Texts that are generated together: added at any time, a token each with every step.

    Where ranks share parameters all of them make one, step equally or not, and end it: a rank whose texts are whole
    takes part in the others' forwards from :meth:`close` on.

    Args:
        target: an engine, or a module, which may be of an engine.
        pages: of keys and values, at most, all made at once; None: as many as texts fill.
        page_size: tokens of a page.
        rows: texts under way at once, at most.
        chunk: tokens of texts that begin in one forward, at most: bounds what a forward takes.
        gather: under an engine: the whole model is gathered on each rank until the end, instead of each unit in each
            forward; "auto": where half of the memory that is left on each rank holds it.
        keep: full pages of texts that are over that stay, so that texts which begin alike find them, at most; those
            that nobody found for longest are given to others who need one. None: any with ``pages``, else none.

    Raises:
        ConfigError: an argument is of a wrong type or value.
        ModelError: text cannot be generated with the model.
        UsageError: the engine has stages or an axis of sequence, or the model generates already.
    """

    def __init__(
        self,
        target: Engine | nn.Module,
        *,
        pages: int | None = None,
        page_size: int = 16,
        rows: int = 256,
        chunk: int = 2048,
        gather: bool | Literal["auto"] = False,
        keep: int | None = None,
    ) -> None:
        _check_sizes(pages=pages, gather=gather, page_size=page_size, rows=rows, chunk=chunk)
        self._engine, self._module = _parts(target)
        self._decoder = decoder_of(self._module)
        longest = self._decoder.longest
        if longest is not None:
            rows, chunk = min(rows, longest // 2), min(chunk, longest - longest // 2)
        if keep is not None and not is_integer(keep, 0):
            raise ConfigError(f"Generation(keep={described(keep)}): it is a whole number from 0 on, or None.")
        keep = 0 if pages is None and keep is None else keep
        self.books = PageBooks(pages, page_size, keep, apart=self._device.type == "cpu")
        self.pool = PagePool(page_size, pages)
        self._scheduler = BatchScheduler(self.books, rows=rows, chunk=chunk)
        self._reads = PagedAttention(self.pool)
        self._asked = False
        #: Forwards so far, and tokens that went through them.
        self.forwards, self.seen = 0, 0
        with ExitStack() as held:
            if self._engine is not None:
                whole = _fits_whole(self._engine) if gather == "auto" else gather
                held.enter_context(self._engine.gathered() if whole else self._engine.reads_ahead())
            self._decoder.open(self._reads, held)
            training = [part for part in self._module.modules() if part.training]
            held.callback(_set_training, training)
            self._module.eval()
            self._held = held.pop_all()

    def add(self, text: Continuation) -> None:
        """
        Raises:
            ConfigError: its tokens do not fit the pages or the model's context.
        """
        longest, context = text.start + text.most, self._decoder.context
        if context is not None and longest > context:
            raise ConfigError(
                f"request {text.request} has {text.start} tokens and max_tokens={text.most}, but the model's context "
                f"is of {context}: give a shorter prompt, or fewer tokens."
            )
        self._scheduler.add(text)

    def drop(self, texts: Iterable[Continuation]) -> None:
        """Nobody waits for these any more: their pages are others'."""
        self._scheduler.end(texts)

    def forget(self) -> None:
        """Weights are others now: keys and values that stay are found no more. Texts under way go on with theirs."""
        self.books.forget()

    @property
    def busy(self) -> bool:
        """Whether there are texts that are not whole."""
        return self._scheduler.busy

    def step(self, *, along: bool = False) -> list[Continuation]:
        """One forward, and a token more of each text that it drew for; those that are whole now.

        Args:
            along: also with nothing to do here, as other ranks, which share parameters, have something.

        Raises:
            NonFiniteError: the logits of a text are inf or NaN, or -inf for all tokens.
        """
        if not self.busy:
            if along:
                self._forward(ForwardPlan([], []))
            return []
        step = self._scheduler.plan()
        self.pool.make(self.books.end, self.books.stretches, self.books.made)
        logits = self._forward(step)
        drawn = step.under_way + [part.text for part in step.parts if part.draws]
        if not drawn:
            return []
        chosen = choose(
            logits,
            [text.rule for text in drawn],
            [text.sample for text in drawn],
            [text.number for text in drawn],
            [text.tokens for text in drawn],
        )
        whole = []
        for text, token, log_prob, tops in zip(drawn, *chosen, strict=True):
            if not log_prob > -torch.inf:
                raise NonFiniteError(
                    f"logits of request {text.request} are inf or NaN at token {text.number}, or -inf for all tokens, "
                    "so that none can come: look at the weights, the precision and what the model masks."
                )
            text.take(token, log_prob, tops)
            if text.finish is not None:
                whole.append(text)
        self._scheduler.end(whole)
        return whole

    def close(self) -> None:
        """Gives the model back as it was; where ranks share parameters all of them call it, and go on together."""
        if self._engine is not None and self._engine.world_size > 1:
            if not self._asked:
                self._forward(ForwardPlan([], []))
            self._engine.max_over_ranks([0.0])
        self._held.close()

    def abandon(self) -> None:
        """Gives the model back after an error, without a word to other ranks."""
        self._held.close()

    @property
    def _device(self) -> torch.device:
        if self._engine is not None:
            return self._engine.device
        first = next(self._module.parameters(), next(self._module.buffers(), torch.empty(0)))
        return first.device

    def _forward(self, step: ForwardPlan) -> Tensor:
        call = self._module if self._engine is None else self._engine
        tokens, positions, draws = self._reads.begin(step, self._device)
        self._reads.open = True
        try:
            with torch.no_grad():
                logits = self._decoder.logits(call, tokens, positions, draws)
        finally:
            self._reads.open = False
        self.forwards += 1
        self.seen += tokens.numel()
        if not self._asked and self._decoder.layers is not None and self.pool.layers:
            self._asked = True
            if (stored := len(self.pool.layers)) != self._decoder.layers:
                raise ModelError(
                    f"{type(self._module).__name__} cannot generate in pages: {stored} of its {self._decoder.layers} "
                    "layers keep keys and values there. Call its own generate()."
                )
        self._asked = True
        return logits


@known_arguments
def generate(
    target: Engine | nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop: Sequence[int] = (),
    n: int = 1,
    top_log_probs: int = 0,
    pages: int | None = None,
    page_size: int = 16,
    rows: int = 256,
    chunk: int = 2048,
    gather: bool | Literal["auto"] = False,
) -> Iterator[Generated]:
    """Continues prompts of any lengths together, without padding, and yields answers as they end.

    Each gets the tokens that it would get alone. Weights are read where they are: nothing is copied, and under a
    layout that splits parameters each forward gathers a unit once for all texts. Then every rank calls it with its own
    prompts, as many as it has, and takes all answers before it does anything else with the engine; along an axis of
    tensor parallelism ranks give the same prompts.

    Args:
        target: an engine, or a module: a decoder of transformers, also inside of peft's wrapper, or a model whose
            attention is a :class:`shardfold.parallel.Attention` and whose forward takes ``positions``. It is in
            evaluation mode until the last answer, or until the iterator is closed.
        prompts: token numbers, at least one each.
        max_tokens: to generate, for each prompt; or a number for each.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: of the likeliest tokens, those whose probabilities sum to it; 1 keeps all.
        top_k: the likeliest so many tokens; 0 keeps all.
        min_p: tokens at least so many times as likely as the likeliest; 0 keeps all.
        repetition: logits of tokens that a text has already are divided by it if positive, else multiplied; 1 changes
            none.
        seed: of all draws, or one for each prompt. What a prompt gets depends on its seed (and, with one for all, on
            its number) and on nothing else that is generated beside it.
        stop: tokens that end an answer.
        n: answers for each prompt; they share the pages of its full pages of tokens.
        top_log_probs: how many of the likeliest tokens are told beside each token, in ``tops``.
        pages: of keys and values, at most, all made at once; None: as many as are filled. With too few for all, texts
            wait, or give theirs back and are computed again, with the same result.
        page_size: tokens of a page.
        rows: texts under way at once, at most.
        chunk: prompt tokens in one forward, at most: bounds what activations take.
        gather: under an engine: the whole model is gathered on each rank meanwhile, instead of each unit in each
            forward; "auto": where half of the memory that is left on each rank holds it.

    Raises:
        ConfigError: an argument is of a wrong type or value, or a prompt fits neither the pages nor the context.
        ModelError: text cannot be generated with the model: the sentence says why.
        NonFiniteError: logits are inf or NaN, or -inf for all tokens of the vocabulary.
        UsageError: the engine has stages or an axis of sequence, or the model generates already.
    """
    prompts = [_prompt(number, prompt) for number, prompt in enumerate(prompts)]
    most = _each("max_tokens", max_tokens, len(prompts), 1)
    given = _each("seed", seed, len(prompts), 0)
    seeds = [prompt_seed(one, number) for number, one in enumerate(given)] if is_integer(seed) else given
    ends = _tokens("stop", stop)
    if not is_integer(n, 1):
        raise ConfigError(f"generate(): n={described(n)}: it is a whole number from 1 on.")
    rules = [SamplingRule(temperature, top_p, top_k, each, repetition, min_p, top_log_probs) for each in seeds]
    texts = [
        Continuation(number, sample, list(prompt), len(prompt), most[number], rules[number], ends)
        for number, prompt in enumerate(prompts)
        for sample in range(n)
    ]
    _check_sizes(pages=pages, gather=gather, page_size=page_size, rows=rows, chunk=chunk)
    options: dict[str, Any] = dict(pages=pages, page_size=page_size, rows=rows, chunk=chunk, gather=gather)
    decoder_of(_parts(target)[1])
    return _answers(target, texts, options)


def _answers(target: Engine | nn.Module, texts: list[Continuation], options: dict[str, Any]) -> Iterator[Generated]:
    running = Generation(target, **options)
    try:
        for text in texts:
            running.add(text)
        while running.busy:
            for text in running.step():
                yield text.answer()
    except BaseException:
        running.abandon()
        raise
    running.close()


def _parts(target: Any) -> tuple[Engine | None, nn.Module]:
    if isinstance(target, Engine):
        engine, module = target, target.module
    elif isinstance(target, nn.Module):
        first = next(target.parameters(), None)
        engine, module = engine_of(first) if isinstance(first, nn.Parameter) else None, target
        if engine is not None and engine.module is not module:
            raise UsageError("generate(): the module is a part of an engine's model: give the engine.")
    else:
        raise ConfigError(f"generate(): the target is {described(target)}: give an engine or a module.")
    if engine is not None and engine.mesh.sizes.stages:
        raise UsageError("generate(): the engine's model is cut into stages: generate under another mesh.")
    if engine is not None and engine.sequence is not None and engine.sequence.group.size > 1:
        raise UsageError("generate(): the engine has an axis of sequence: generate under another mesh.")
    return engine, module


def _fits_whole(engine: Engine) -> bool:
    """Whether half of what each rank's memory has beside the engine's states holds the parameters that are split."""
    whole = sum(part.spec.length * part.dtype.itemsize for part in engine.sharded.segments() if part.split)
    elsewhere = {"disk"} if engine.device.type == "cpu" else {"disk", "host"}
    left = memory_of(engine.device) - sum(n for tier, n in engine.memory().tiers.items() if tier not in elsewhere)
    return not engine.max_over_ranks([float(whole > left / 2)])[0]


def _set_training(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        part.training = True


def _check_sizes(*, pages: Any, gather: Any, **sizes: Any) -> None:
    if not is_flag(gather) and gather != "auto":
        raise ConfigError(f'generate(): gather={described(gather)}: it is True, False or "auto".')
    if pages is not None and not is_integer(pages, 1):
        raise ConfigError(f"generate(): pages={described(pages)}: it is a whole number from 1 on, or None.")
    for name, value in sizes.items():
        if not is_integer(value, 1):
            raise ConfigError(f"generate(): {name}={described(value)}: it is a whole number from 1 on.")


def _tokens(what: str, given: Any) -> frozenset[int]:
    try:
        values: list[Any] = list(given)
    except TypeError:
        values = [None]
    if not all(is_integer(value, 0) for value in values):
        raise ConfigError(f"generate(): {what}={described(given)}: it is a list of token numbers.")
    return frozenset(map(int, values))


def _prompt(number: int, prompt: Any) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(is_integer(v, 0) for v in values):
        raise ConfigError(f"generate(): prompt {number} is {described(prompt)}: it is a list of token numbers.")
    if not values:
        raise ConfigError(f"generate(): prompt {number} has no tokens: begin it with one, such as that of the begin.")
    return [int(value) for value in values]


def _each(name: str, given: Any, count: int, least: int) -> list[int]:
    values: list[Any] = [given] * count if is_integer(given) else list(given) if isinstance(given, Sequence) else [None]
    if len(values) != count or not all(is_integer(value, least) for value in values):
        raise ConfigError(
            f"generate(): {name}={described(given)}: it is a whole number from {least} on, or one for each of "
            f"{count} prompts."
        )
    return [int(value) for value in values]
