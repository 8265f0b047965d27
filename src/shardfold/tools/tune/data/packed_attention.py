"""Attention of packed samples, one by one, in models of transformers; and the question whether a model can be packed.

Samples that share a row of tokens are told apart by positions that begin anew. Each attends to itself alone: queries,
keys and values of a sample are cut out, and no mask of the whole row is ever made. Work and memory are those of the
samples, in place of those of the row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardfold.parallel.sequence import whole_attention
from shardfold.torch_internals import untraced

__all__ = ["PackedRows", "attend_samples", "find_edges", "pack_attention", "why_not_packed"]

NAME = "shardfold_packed"
"""Of this attention in the registry of transformers."""

_ROWS: WeakKeyDictionary[nn.Module, PackedRows] = WeakKeyDictionary()
_RUNNING: list[PackedRows] = []
"""Models whose forward is under way, the innermost last: a mask is asked for without saying by whom."""


def find_edges(positions: Tensor) -> list[tuple[int, ...]] | None:
    """Where samples begin and end, by row.

    Args:
        positions: (B, L) integers that begin anew with each sample.

    Returns:
        Ascending places from 0 to L for each row; None: each row is one sample.
    """
    ends = (positions.diff(dim=1) != 1).nonzero().tolist()
    if not ends:
        return None
    edges = [[0] for _ in range(positions.shape[0])]
    for row, place in ends:
        edges[row].append(place + 1)
    return [(*row, positions.shape[1]) for row in edges]


@dataclass(eq=False)
class PackedRows:
    """What a model's forward was last called with.

    Attributes:
        before: the name of the attention that it would take by itself.
        masked: it always asks transformers for a mask, as what it does cannot be told from its attention's arguments.
    """

    before: str
    masked: bool
    _given: Tensor | None = field(default=None, repr=False)
    _edges: list[tuple[int, ...]] | None = field(default=None, repr=False)

    def edges(self, positions: Any) -> list[tuple[int, ...]] | None:
        """Where samples are, by what a layer was given, or else by what the model was."""
        if isinstance(positions, Tensor) and positions.dim() == 2 and positions is not self._given:
            self._given, self._edges = positions, find_edges(positions)
        return self._edges

    def enter(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """A forward begins."""
        _RUNNING.append(self)
        self._given = self._edges = None
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if mask is None and kwargs.get("past_key_values") is None:
            self.edges(positions)

    def leave(self, _module: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        """It ended, or raised."""
        if self in _RUNNING:
            _RUNNING.remove(self)


def attend_samples(
    query: Tensor, key: Tensor, value: Tensor, edges: Sequence[Sequence[int]], attend: Callable[..., Tensor]
) -> Tensor:
    """Attention within samples.

    Args:
        query: (B, heads, L, head_dim).
        key, value: (B, key_heads, L, head_dim).
        edges: see :func:`find_edges`.
        attend: of the queries, keys and values of one sample.

    Returns:
        (B, heads, L, value_dim).
    """
    rows = []
    # Splits, as the gradient of each slice would be a whole row of zeros, to be added up.
    for places, *whole in zip(edges, *(each.split(1) for each in (query, key, value)), strict=True):
        sizes = [stop - start for start, stop in pairwise(places)]
        parts = zip(*(each.split(sizes, dim=2) for each in whole), strict=True)
        rows.append(torch.cat([attend(*part) for part in parts], dim=2))
    return torch.cat(rows)


@untraced
def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls an attention: ``(batch, heads, tokens, dim)`` to ``(batch, tokens, heads, dim)``."""
    rows = _ROWS.get(module)
    edges = None if rows is None or attention_mask is not None else rows.edges(options.get("position_ids"))
    if edges is None or query.shape[2] != key.shape[2]:
        return _usual(rows, module)(module, query, key, value, attention_mask, **options)
    given = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if given is None else given
    window = options.get("sliding_window")
    if (rows is not None and rows.before == "eager") or any(options.get(name) is not None for name in _OWN):
        usual, masked = _usual(rows, module, eager=True), {**options, "position_ids": None}

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mask = _sample_mask(query, causal, window)
            return usual(module, query, key, value, mask, **masked)[0].transpose(1, 2)
    else:

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return whole_attention(
                query,
                key,
                value,
                causal=causal,
                scale=options.get("scaling"),
                dropout=options.get("dropout", 0.0),
                window=window,
                softcap=options.get("softcap"),
            )

    return attend_samples(query, key, value, edges, attend).transpose(1, 2).contiguous(), None


_OWN = ("s_aux", "position_bias")
"""Arguments of attentions that only a model's own code reads."""


def _sample_mask(query: Tensor, causal: bool, window: int | None) -> Tensor | None:
    """Of one sample, (1, 1, n, n), as a model's own code adds it to scores; None: it sees all of itself."""
    if not causal:
        return None
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    mask = torch.zeros(length, length, dtype=query.dtype, device=query.device)
    return mask.masked_fill_(~seen, torch.finfo(query.dtype).min)[None, None]


def _usual(
    rows: PackedRows | None, module: nn.Module, eager: bool = False
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention that the model would take by itself; ``eager``: its own code."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    wanted = eager or (rows is not None and rows.before == "eager")
    return own if wanted and own is not None else ALL_ATTENTION_FUNCTIONS["sdpa"]


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of a forward: none where samples are cut out, else the usual one; it keeps packed samples apart too."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    rows = _RUNNING[-1] if _RUNNING else None
    if rows is not None and not rows.masked and not kwargs.get("use_vmap") and rows.edges(None) is not None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[rows.before if rows is not None else "sdpa"](*args, **kwargs)


def pack_attention(model: nn.Module) -> Callable[[], None] | None:
    """The attention of a model of transformers goes through packed samples one by one from now on.

    Call it before an engine is made: an axis of sequence puts its own attention in this one's place, which keeps
    samples apart as well. Batches that are padded, and generation, go on as before.

    Args:
        model: a model of transformers, or what has one in it, as peft's.

    Returns:
        What undoes it; None: the model does not take its attention from transformers' registry, so it is as it was.
    """
    import transformers

    inner = next((each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)), None)
    if inner is None or not getattr(inner, "_supports_attention_backend", False):
        return None
    config: Any = inner.config
    before = config._attn_implementation
    if before not in ("sdpa", "eager"):
        return None
    transformers.AttentionInterface.register(NAME, _attend)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    text = config.get_text_config()
    # Chunks of attention are told by masks alone, not by the attention's arguments.
    rows = PackedRows(before, masked=bool(getattr(text, "attention_chunk_size", None)))
    handles = [
        inner.register_forward_pre_hook(rows.enter, with_kwargs=True),
        inner.register_forward_hook(rows.leave, with_kwargs=True, always_call=True),
    ]
    for part in inner.modules():
        _ROWS[part] = rows
    config._attn_implementation = NAME

    def undo() -> None:
        config._attn_implementation = before
        for handle in handles:
            handle.remove()
        for part in inner.modules():
            _ROWS.pop(part, None)

    return undo


LENGTH = 7
"""Of the two samples that :func:`why_not_packed` tries."""


@torch.no_grad()
def why_not_packed(forward: Callable[..., Tensor], vocab: int, device: torch.device | str = "cpu") -> str | None:
    """Try whether samples that share a row of tokens are seen as they are alone.

    Two samples are put into two rows, once in either order, and once alone. All ranks call it together.

    Args:
        forward: of ``input_ids`` and ``position_ids``, (2, L) int64, to logits (2, L, vocabulary), without dropout.
        vocab: tokens that there are.
        device: where the model takes tokens.

    Returns:
        None: they are seen alike. Else why samples have to be padded, as "..., so" goes on.
    """
    draw = torch.Generator().manual_seed(0)
    alone = torch.randint(min(3, vocab - 1), vocab, (2, LENGTH), generator=draw).to(device)
    count = torch.arange(LENGTH, device=device).expand(2, LENGTH)
    packed, counts = torch.cat([alone, alone.flip(0)], dim=1), torch.cat([count, count], dim=1)
    try:
        logits, single = (
            forward(input_ids=ids, position_ids=positions)
            for ids, positions in ((packed, counts.contiguous()), (alone, count.contiguous()))
        )
    except (TypeError, ValueError) as error:
        if "position_ids" in str(error):
            return "it takes no position_ids"
        raise
    wanted = torch.cat([single, single.flip(0)], dim=1).double()
    apart, scale = float((logits.double() - wanted).abs().max()), float(wanted.abs().max())
    if apart <= 32 * torch.finfo(logits.dtype).eps * scale:
        return None
    return f"a sample beside another one has other logits than alone (by {apart / scale:.0e} of the largest)"
