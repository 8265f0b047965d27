"""From rows to the tokens that are scored, and from scores to loss, bits per byte, accuracy and right choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardfold.errors import ConfigError
from shardfold.tools.answering.opened_model import OpenedModel
from shardfold.tools.tune._eval_rows import ChoiceQuestion, EvalRows
from shardfold.tools.tune._scoring import RowScore, score_rows, windows_of
from shardfold.tools.tune.data.encoding import Encoder
from shardfold.tools.tune.data.row_formats import Example
from shardfold.tools.tune.data.rows import Tokens
from shardfold.tools.tune.eval_config import EvalConfig

__all__ = [
    "ChoiceScores",
    "LanguageScores",
    "continued",
    "encode",
    "score_choices",
    "score_language",
    "scored",
    "split_pair",
    "windows",
]


@dataclass(frozen=True, kw_only=True)
class LanguageScores:
    """How well the tokens of texts and answers are predicted; prompts do not count.

    Attributes:
        tokens: how many are scored.
        bytes: of the text that they stand for, in UTF-8; a token that ends an answer has none.
        loss: mean over the tokens, in nats.
        bits_per_byte: bits of all tokens over the bytes; does not depend on the tokenizer.
        token_accuracy: share of tokens that were the likeliest at their place.
        cut: rows whose end was left out, because they are longer than the model reads.
    """

    tokens: int
    bytes: int
    loss: float
    bits_per_byte: float
    token_accuracy: float
    cut: int = 0


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """How often the right choice is the likeliest one, given its question.

    Attributes:
        questions: how many there are.
        accuracy: by the likelihood of a whole choice.
        accuracy_per_byte: by likelihood over the choice's bytes, which long choices are not at a disadvantage by.
    """

    questions: int
    accuracy: float
    accuracy_per_byte: float


def score_language(model: OpenedModel, rows: EvalRows, config: EvalConfig) -> LanguageScores | None:
    """Score texts from their first token on, in windows of the model's context, and conversations where an assistant
    speaks; None: there is neither."""
    sequences: list[Tokens] = []
    num_bytes = cut = 0
    for example in rows.texts:
        text = str(example.answers[0])
        ids = encode(model, text)
        sequences += windows(model, ids)
        num_bytes += len(text.encode())
    answered = [each for each in rows.chats if each.answers]
    for tokens, was_cut in _conversations(model, answered, config):
        sequences.append(tokens)
        num_bytes += scored_bytes(model.tokenizer, tokens)
        cut += was_cut
    if not any(each.targets for each in sequences):
        return None
    scores = scored(model, sequences, config)
    tokens = sum(each.tokens for each in scores)
    nats = -math.fsum(each.log_prob for each in scores)
    return LanguageScores(
        tokens=tokens,
        bytes=num_bytes,
        loss=nats / tokens,
        bits_per_byte=nats / math.log(2) / max(1, num_bytes),
        token_accuracy=sum(each.likeliest for each in scores) / tokens,
        cut=cut,
    )


def score_choices(model: OpenedModel, questions: Sequence[ChoiceQuestion], config: EvalConfig) -> ChoiceScores | None:
    """Choose by likelihood: what counts are a choice's own tokens, never the question's; None: nothing is asked."""
    if not questions:
        return None
    sequences = [tokens for each in questions for tokens in _choices(model, each, config)]
    scores = iter(scored(model, sequences, config))
    right = right_per_byte = 0
    for question in questions:
        likely = [next(scores).log_prob for _ in question.choices]
        per_byte = [value / len(text.encode()) for value, text in zip(likely, question.choices, strict=True)]
        right += likely.index(max(likely)) == question.right
        right_per_byte += per_byte.index(max(per_byte)) == question.right
    count = len(questions)
    return ChoiceScores(questions=count, accuracy=right / count, accuracy_per_byte=right_per_byte / count)


def scored(model: OpenedModel, sequences: Sequence[Tokens], config: EvalConfig) -> list[RowScore]:
    pack = model.context if config.pack and not model.is_bytes else 0
    return score_rows(model.engine, model.forward, sequences, batch_tokens=config.batch_tokens, pack=pack)


def encode(model: OpenedModel, text: str) -> list[int]:
    """The tokens of a text, and none around it."""
    return model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def split_pair(model: OpenedModel, before: str, text: str) -> tuple[list[int], list[int]]:
    """Tokens of a text behind another one, such that together they are the tokens of both joined.

    Blanks at the end of what stands before are the text's, as tokens begin with blanks and do not end with them.
    """
    bare = before.rstrip()
    blanks = before[len(bare) :]
    joined = encode(model, bare + blanks + text)
    first = encode(model, bare)
    return first, joined[len(first) :]


def continued(model: OpenedModel, before: Sequence[int], ids: Sequence[int]) -> Tokens:
    """A sequence of which the tokens behind `before` are scored; of what is too long, the begin is left out."""
    if not before:
        before = [] if model.first is None else [model.first]
    kept = [*before, *ids][-(model.context + 1) :]
    trained = np.zeros(len(kept), np.bool_)
    trained[max(0, len(kept) - len(ids)) :] = True
    return Tokens(np.array(kept, np.int32), trained)


def windows(model: OpenedModel, ids: Sequence[int]) -> list[Tokens]:
    first = model.first
    if first is None:  # the first token has nothing to be predicted from
        first, ids = ids[0], ids[1:]
    found: list[Tokens] = []
    for window, count in windows_of(ids, first, model.context):
        trained = np.zeros(len(window), np.bool_)
        trained[len(window) - count :] = True
        found.append(Tokens(np.array(window, np.int32), trained))
    return found


def _conversations(model: OpenedModel, examples: Sequence[Example], config: EvalConfig) -> list[tuple[Tokens, bool]]:
    """Of each its tokens, and whether its end was cut; what has nothing left to score is left out."""
    encoder = Encoder(model.tokenizer, "chat", config.template, config.train_on, model.context + 1)
    encoded = encoder.encode(list(examples))
    return [(each.sequences[0], bool(each.facts["cut"])) for each in encoded if len(each.sequences[0])]


def _choices(model: OpenedModel, question: ChoiceQuestion, config: EvalConfig) -> list[Tokens]:
    if isinstance(question.prompt, str):
        pairs = (split_pair(model, question.prompt, each) for each in question.choices)
        return [continued(model, *pair) for pair in pairs]
    encoder = Encoder(model.tokenizer, "chat", config.template, "completion", model.context + 1)
    examples: list[Example | None] = [
        Example(question.where, question.prompt, ([{"role": "assistant", "content": each}],))
        for each in question.choices
    ]
    found = [each.sequences[0] for each in encoder.encode(examples)]
    if not all(len(each) for each in found):
        raise ConfigError(
            f"data: {question.where}: a choice is behind the {model.context} tokens that the model reads."
        )
    return found


def scored_bytes(tokenizer: Any, tokens: Tokens) -> int:
    """Bytes of the text that the scored tokens of a sequence stand for."""
    ids = tokens.ids.tolist()
    places = np.flatnonzero(tokens.trained[1:]) + 1
    if not len(places):
        return 0
    found = 0
    edges = np.flatnonzero(np.diff(places) > 1)
    for first, last in zip([places[0], *places[edges + 1]], [*places[edges], places[-1]], strict=True):
        # Decoded with what stands before: alone, a first token may lose its blank.
        found += _length(tokenizer, ids[: last + 1]) - _length(tokenizer, ids[:first])
    return found


def _length(tokenizer: Any, ids: list[int]) -> int:
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.encode(errors="surrogatepass"))
