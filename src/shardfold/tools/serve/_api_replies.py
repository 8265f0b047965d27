"""Answers in OpenAI's form, whole or in pieces."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardfold.tools.serve.answer_loop import AnswerJob, AnswerPiece, ShownToken

__all__ = ["ApiReply"]


class ApiReply:
    """Of one job, which takes its pieces as they come.

    Args:
        model: its name for clients.
    """

    def __init__(self, job: AnswerJob, model: str) -> None:
        self._job, self._chat = job, job.asked.is_chat
        self._id = ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12)
        self._created, self._model = int(time.time()), model
        self._begun: set[int] = set()
        self._lengths = [0] * job.texts
        self._taken: list[list[AnswerPiece]] = [[] for _ in range(job.texts)]
        self.whole, self.tokens = 0, 0

    def take(self, piece: AnswerPiece, *, keep: bool) -> None:
        """It has come; kept for :meth:`body`."""
        self.tokens += piece.count
        self.whole += piece.finish is not None
        if keep:
            self._taken[piece.index].append(piece)

    @property
    def is_whole(self) -> bool:
        return self.whole == self._job.texts

    def events(self, piece: AnswerPiece) -> bytes:
        """What a piece becomes in a stream: no, one or several events."""
        said = b""
        if self._chat and piece.index not in self._begun:
            self._begun.add(piece.index)
            said += self._event([self._delta(piece.index, {"role": "assistant", "content": ""}, None, None)])
        tokens = piece.tokens if self._job.asked.log_probs else None
        if not self._chat:
            if piece.text or piece.tokens or piece.finish:
                said += self._event([self._completion(piece.index, piece.text, tokens, piece.finish)])
            return said
        if piece.text or piece.tokens:
            told = None if tokens is None else _chat_log_probs(tokens)
            said += self._event([self._delta(piece.index, {"content": piece.text}, told, None)])
        if piece.finish is not None:
            said += self._event([self._delta(piece.index, {}, None, piece.finish)])
        return said

    def last_events(self) -> bytes:
        """The end of a stream."""
        used = self._event([], usage=self._usage()) if self._job.asked.usage else b""
        return used + b"data: [DONE]\n\n"

    def body(self) -> bytes:
        """All answers at once."""
        choices = [self._choice(index, pieces) for index, pieces in enumerate(self._taken)]
        return _json(self._head(choices, self._usage(), piece=False))

    def _choice(self, index: int, pieces: Sequence[AnswerPiece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens] if self._job.asked.log_probs else None
        finish = pieces[-1].finish
        if not self._chat:
            return self._completion(index, text, tokens, finish)
        told = None if tokens is None else _chat_log_probs(tokens)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": told, "finish_reason": finish}

    def _completion(
        self, index: int, text: str, tokens: Sequence[ShownToken] | None, finish: str | None
    ) -> dict[str, Any]:
        told = None if tokens is None else self._completion_log_probs(index, tokens)
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish}

    def _completion_log_probs(self, index: int, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(token.text)
        tops = [{text: log_prob for text, _, log_prob in token.tops} for token in tokens]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": tops if self._job.asked.tops else None,
            "text_offset": offsets,
        }

    @staticmethod
    def _delta(index: int, delta: Mapping[str, Any], told: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}

    def _usage(self) -> dict[str, int]:
        asked = sum(len(prompt) for prompt in self._job.prompts)
        return {"prompt_tokens": asked, "completion_tokens": self.tokens, "total_tokens": asked + self.tokens}

    def _event(self, choices: Iterable[Mapping[str, Any]], usage: Any = None) -> bytes:
        return b"data: " + _json(self._head(list(choices), usage, piece=True)) + b"\n\n"

    def _head(self, choices: list[Any], usage: Any, *, piece: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if piece else "chat.completion") if self._chat else "text_completion"
        head: dict[str, Any] = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"weights-{self._job.weights}",
            "choices": choices,
        }
        if usage is not None or (piece and self._job.asked.usage):
            head["usage"] = usage
        return head


def _chat_log_probs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    def told(text: str, raw: bytes, log_prob: float) -> dict[str, Any]:
        return {"token": text, "logprob": log_prob, "bytes": list(raw)}

    content = [
        {**told(each.text, each.raw, each.log_prob), "top_logprobs": [told(*top) for top in each.tops]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
