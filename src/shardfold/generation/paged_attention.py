"""Attention of one forward over pages: each token sees the tokens of its own text.

The forward is one row of tokens: one each of the texts under way, then parts of texts that begin. All keys and values
are stored first, then read: on a host texts under way whose pages stand behind each other where they rest, without a
copy; others are collected, in groups of about equal length, each group in one call; a part that begins a text reads
what came with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.generation.batch_scheduler import ForwardPlan, TextPart
from shardfold.generation.page_pool import PagePool
from shardfold.generation.texts import Continuation

__all__ = ["PagedAttention"]

WASTE = 64
"""Pages that a group reads in vain, at most, before another group is worth its calls."""
GROUP = 64
"""Pages that a group reads, at most: what is read stays in cache until it is used."""
FEW = 2
"""Texts under way that are read where they rest, at most, where several threads compute."""
RUNS = 4
"""Of pages behind each other, in which a text that is read where it rests has its own, at most."""


@dataclass
class ReadGroup:
    """Tokens of texts that are read in one call.

    Attributes:
        first: its first token in the row.
        texts: how many.
        queries: tokens of each text.
        tables: ``(texts, pages)``.
        seen: of each text the tokens that its first query sees, itself included.
        masks: by window, ``(texts, 1, queries, keys)``, added to scores.
    """

    first: int
    texts: int
    queries: int
    tables: Tensor
    seen: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, keys: int, like: Tensor) -> Tensor:
        made = self.masks.get(window)
        if made is None:
            at = torch.arange(keys, device=like.device)
            end = self.seen[:, None] + torch.arange(self.queries, device=like.device)
            hidden = at >= end[..., None]
            if window is not None:
                hidden |= at < end[..., None] - window
            made = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
            self.masks[window] = made = made[:, None]
        return made


class PagedAttention:
    """What a model's attention calls while it generates.

    Args:
        pool: of the pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._groups: list[ReadGroup] = []
        self._whole: list[tuple[int, int]] = []
        self._alone: list[list[tuple[int, int]]] = []  # of texts that are read where they rest, their runs
        self._where = torch.empty(0, dtype=torch.int64)
        self._copies = torch.empty(2, 0, dtype=torch.int64)
        self.open = False

    def begin(self, step: ForwardPlan, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The next forward is this.

        Returns:
            Its tokens and positions, both ``(1, tokens)``, and which of them draw, ``(texts,)``: those under way, then
            of the parts each that ends its text. ``step.under_way`` is brought into the order of its tokens.
        """
        size = self._pool.size
        self._alone = self._settle(step, device)
        rows = [(text.tokens[-1], text.stored - 1, text.pages[(text.stored - 1) // size]) for text in step.under_way]
        self._groups, self._whole = [], []
        self._group(step, device)
        pairs = [
            (source * size + place, to * size + place) for source, to, count in step.copies for place in range(count)
        ]
        self._copies = torch.from_numpy(np.array(pairs, np.int64).reshape(-1, 2).T.copy()).to(device)
        if not rows and not step.parts:  # ranks with nothing to do take part
            self._where, self._whole = torch.empty(0, dtype=torch.int64, device=device), [(0, 1)]
            zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
            return zero, zero, zero[0]
        table = np.array(rows, np.int64).reshape(-1, 3)
        ids, positions = [table[:, 0]], [table[:, 1]]
        where, draws, at = [table[:, 2] * size + table[:, 1] % size], list(range(len(rows))), len(rows)
        for part in step.parts:
            span = np.arange(part.first, part.last)
            ids.append(np.array(part.text.tokens[part.first : part.last]))
            positions.append(span)
            where.append(np.array(part.text.pages)[span // size] * size + span % size)
            self._part(part, at, device)
            at += len(span)
            if part.draws:
                draws.append(at - 1)
        self._where = torch.from_numpy(np.concatenate(where)).to(device)
        tokens = torch.from_numpy(np.stack([np.concatenate(ids), np.concatenate(positions)])).to(device)
        return tokens[:1], tokens[1:], torch.tensor(draws, dtype=torch.int64, device=device)

    def _settle(self, step: ForwardPlan, device: torch.device) -> list[list[tuple[int, int]]]:
        """Puts texts that are read where they rest in front, the others behind them, the shortest first; the runs of
        those in front. On a host a call costs less than a copy; many calls do not, where several threads wait for each
        other in each."""
        alone = torch.get_num_threads() == 1 or len(step.under_way) <= FEW
        here = device.type == "cpu" and not self._pool.is_rounded and alone
        found = {text: _runs(text, self._pool.size) for text in step.under_way} if here else {}
        kept = {text: runs for text, runs in found.items() if len(runs) <= RUNS}
        step.under_way.sort(key=lambda text: 0 if text in kept else len(text.pages))
        return [kept[text] for text in step.under_way[: len(kept)]]

    def _group(self, step: ForwardPlan, device: torch.device) -> None:
        """Cuts the texts under way that are collected, the shortest first, into groups."""
        pages = [len(text.pages) for text in step.under_way]
        begin, waste = len(self._alone), 0
        for number, count in enumerate(pages[begin:], begin):
            more = (count - pages[number - 1]) * (number - begin) if number > begin else 0
            if number > begin and (waste + more > WASTE or count * (number - begin + 1) > GROUP):
                self._close(step, begin, number, device)
                begin, waste = number, 0
            else:
                waste += more
        if len(pages) > begin:
            self._close(step, begin, len(pages), device)

    def _close(self, step: ForwardPlan, begin: int, end: int, device: torch.device) -> None:
        texts = step.under_way[begin:end]
        tables = np.zeros((len(texts), len(texts[-1].pages)), np.int64)
        for row, text in zip(tables, texts, strict=True):
            row[: len(text.pages)] = text.pages
        seen = torch.tensor([text.stored for text in texts], device=device)
        self._groups.append(ReadGroup(begin, len(texts), 1, torch.from_numpy(tables).to(device), seen))

    def _part(self, part: TextPart, at: int, device: torch.device) -> None:
        if part.first == 0:
            self._whole.append((at, at + part.last))
            return
        pages = part.text.pages[: -(-part.last // self._pool.size)]
        seen = torch.tensor([part.first + 1], device=device)
        self._groups.append(ReadGroup(at, 1, part.last - part.first, torch.tensor([pages], device=device), seen))

    def attend(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """
        Args:
            layer: whose keys and values these are.
            query: ``(tokens, heads, dim)``.
            key: ``(tokens, key_heads, dim)``, where ``key_heads`` divides ``heads``; with positions applied.
            value: ``(tokens, key_heads, value_dim)``.
            scale: of the scores; None: ``dim ** -0.5``.
            window: tokens see the last so many, themselves included.
            softcap: scores are ``softcap * tanh(scores / softcap)``.

        Returns:
            ``(tokens, heads, value_dim)``.
        """
        _, heads, width = query.shape
        if len(self._where):
            self._pool.store(layer, key, value, self._where, *self._copies)
        shared = heads // key.shape[1]  # heads of queries for one of keys
        parts: list[tuple[int, Tensor]] = []
        if self._alone:
            parts.append((0, self._read_alone(layer, query, scale, window, softcap)))
        for group in self._groups:
            last = group.first + group.texts * group.queries
            keys, values = self._pool.read(layer, group.tables)
            # Heads that share keys are more queries of these.
            asked = query[group.first : last].view(group.texts, group.queries, -1, shared, width)
            asked = asked.permute(0, 2, 3, 1, 4).reshape(group.texts, key.shape[1], -1, width)
            mask = group.mask(window, keys.shape[2], query)
            if shared > 1 and group.queries > 1:
                mask = mask.repeat(1, 1, shared, 1)
            seen = _attend(asked, keys, values, mask, scale, softcap)
            seen = seen.view(group.texts, -1, shared, group.queries, value.shape[-1]).permute(0, 3, 1, 2, 4)
            parts.append((group.first, seen.reshape(last - group.first, heads, -1)))
        for first, last in self._whole:
            asked, keys, values = (each[None, first:last].transpose(1, 2) for each in (query, key, value))
            if shared > 1:
                keys, values = (each.repeat_interleave(shared, 1) for each in (keys, values))
            band = window if window is not None and window < last - first else None
            mask = _band(last - first, band, query) if band is not None or softcap is not None else None
            seen = _attend(asked, keys, values, mask, scale, softcap, causal=mask is None)[0].transpose(0, 1)
            parts.append((first, seen))
        if len(parts) == 1:
            return parts[0][1]
        return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])])

    def _read_alone(
        self, layer: nn.Module, query: Tensor, scale: float | None, window: int | None, softcap: float | None
    ) -> Tensor:
        """Of texts each of which is read where it rests."""
        keys, values = self._pool.tokens(layer)
        keys = keys.transpose(1, 2)
        width = query.shape[-1]
        asked = query[: len(self._alone)] * (width**-0.5 if scale is None else scale)
        found = []
        for row, runs in zip(asked.view(len(self._alone), len(keys), -1, width), self._alone, strict=True):
            seen = runs if window is None else _last(runs, window)
            scores = [torch.bmm(row, keys.narrow(2, *run)) for run in seen]
            whole = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
            if softcap is not None:
                whole = torch.tanh(whole / softcap) * softcap
            parts = whole.softmax(-1).split([count for _, count in seen], -1) if len(seen) > 1 else [whole.softmax(-1)]
            out = torch.bmm(parts[0], values.narrow(1, *seen[0]))
            for part, run in zip(parts[1:], seen[1:], strict=True):
                out = torch.baddbmm(out, part, values.narrow(1, *run))
            found.append(out)
        return torch.stack(found).view(len(found), query.shape[1], -1)


def _last(runs: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The part of a text's runs with its last ``count`` tokens."""
    found: list[tuple[int, int]] = []
    for first, length in reversed(runs):
        taken = min(length, count)
        if taken > 0:
            found.insert(0, (first + length - taken, taken))
        count -= taken
    return found


def _runs(text: Continuation, size: int) -> list[tuple[int, int]]:
    """Where a text's tokens rest, in order: the first of each run, and how many."""
    for page in text.pages[sum(count for _, count in text.runs) :]:
        if text.runs and sum(text.runs[-1]) == page:
            text.runs[-1][1] += 1
        else:
            text.runs.append([page, 1])
    found = [(first * size, count * size) for first, count in text.runs]
    empty = len(text.pages) * size - text.stored
    found[-1] = found[-1][0], found[-1][1] - empty
    return found


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    causal: bool = False,
) -> Tensor:
    """Plain attention; with ``softcap`` it holds all scores."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    assert mask is not None
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def _band(tokens: int, window: int | None, like: Tensor) -> Tensor:
    """Of a text's first tokens, with what each sees."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=like.device).tril()
    seen = seen if window is None else seen.triu(1 - window)
    return torch.zeros(tokens, tokens, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)
