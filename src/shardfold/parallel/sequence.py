"""The axis on which ranks read other parts of the same sequences: batches are cut for it, and attention crosses it.

    batch = sf.sequence_shard(batch)     inputs, labels (shifted before the cut) and positions of this rank
    loss = engine(**batch).loss          layers work on these tokens alone, attention sees those of all ranks
    engine.backward(loss)                the mean of this rank's tokens, weighed by how many of them count

Gradients are summed over the axis as over those of data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.errors import ConfigError, UsageError, did_you_mean
from shardfold.nn.axis_group import AxisGroup
from shardfold.parallel._graph_attention import attend_in_graph, register_axis
from shardfold.parallel.batch import Sharded, read_batch
from shardfold.parallel.cut import CONTIGUOUS, ZIGZAG, CutBatch
from shardfold.parallel.kernels import wide
from shardfold.parallel.ring import ring_attention
from shardfold.parallel.ulysses import check_heads, ulysses_attention
from shardfold.plan.checks import described, is_number, known_arguments
from shardfold.torch_internals import in_backward, untraced

__all__ = ["CHOICES", "SequenceAxis", "check_choice", "sequence_shard", "whole_attention"]

CHOICES = ("auto", "ulysses", "ring")

_OPEN: WeakSet[SequenceAxis] = WeakSet()


def check_choice(attention: Any) -> None:
    """
    Raises:
        ConfigError: it is no way of attention over an axis of sequence.
    """
    if attention is not None and attention not in CHOICES:
        near = did_you_mean(attention, CHOICES) if isinstance(attention, str) else ""
        raise ConfigError(
            f"Parallel(attention={described(attention)}): it is one of {', '.join(map(repr, CHOICES))}.{near}"
        )


class SequenceAxis:
    """The ranks of one engine along its axis of role ``sequence``.

    Attributes:
        group: to them.
        choice: ``"ulysses"`` or ``"ring"``.
        number: by which graphs find it.
        padding: the token behind whose number the model counts positions, as RoBERTa does; None: it counts from 0.

    Args:
        attention: what was asked for; ``"auto"`` is ``"ulysses"`` where the ranks divide all of ``heads``.
        heads: of the model's attention, as far as it tells.
        device: that the engine computes on.

    Raises:
        ConfigError: Ulysses was asked for and ranks do not divide heads.
    """

    def __init__(self, group: AxisGroup, attention: str, heads: Sequence[int], device: torch.device) -> None:
        self.group, self._device = group, device
        if attention == "auto":
            attention = "ulysses" if heads and all(number % group.size == 0 for number in heads) else "ring"
        if attention == "ulysses":
            for number in heads:
                check_heads(number, group.size)
        self.choice = attention
        self.number = register_axis(self)
        self.padding: int | None = None
        self._batch: Sharded | None = None
        self._compared = True  # with that of the other ranks
        self._attended: Sharded | None = None  # the last one that came to attention
        self._pending: list[Sharded] = []  # those that did in training, and that no backward has come to
        self._local = False
        _OPEN.add(self)

    def count_behind(self, padding: int) -> None:
        """The model counts positions from behind this number."""
        self.padding = padding

    def close(self) -> None:
        """The engine is closed."""
        _OPEN.discard(self)
        self.forget()
        self._batch = self._attended = None

    def forget(self) -> None:
        """Forwards so far get no backward any more."""
        self._pending.clear()

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, attention is that of each rank by itself, over the tokens that it gets: of whole sequences, as in
        generation."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    # -- batches

    def shard(self, batch: Mapping[str, Any], shift: bool, also: Sequence[str], whole: Sequence[str]) -> dict[str, Any]:
        """See :func:`sequence_shard`."""
        order = ZIGZAG if self.choice == "ring" else CONTIGUOUS
        sharded, given = read_batch(
            batch, self.group.size, self.group.rank, order, shift, also, whole, padding=self.padding
        )
        self._batch, self._compared = sharded, False
        return given

    def trust(self) -> None:
        """The batch that was cut last is not compared with that of the other ranks, as where there are none."""
        self._compared = True

    def _compare(self, sharded: Sharded) -> None:
        """Inside of a forward, where ranks have met: a rank that does something else meanwhile is told of.

        Raises:
            ConfigError: on all ranks along the axis: they do not have the same batch.
        """
        if self.group.size == 1 or self._compared:
            return
        self._compared = True
        mine = torch.tensor([sharded.checksum, -sharded.checksum], dtype=torch.int64, device=self._device)
        most, least = self.group.max(mine).tolist()
        if most != -least:
            raise ConfigError(
                f"sequence_shard(): the {self.group.size} ranks along {self.group.axis!r} have different batches, but "
                "read the same sequences: give the sampler rank=engine.data_rank and num_ranks=engine.data_ranks."
            )

    # -- passes

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        dropout: float = 0.0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of this rank's queries ``(batch, heads, tokens, dim)`` over the keys of all ranks; with a
        ``window`` tokens see the last so many, themselves included; with a ``softcap`` scores are ``softcap *
        tanh(scores / softcap)``.

        Raises:
            ConfigError: there is no such attention: dropout on the ring, a window that is not causal, a cap that is
                not above 0, or heads that do not divide.
            UsageError: the batch was not cut for this axis.
        """
        if torch.compiler.is_compiling() and not dropout and not self._local and self.group.size > 1:
            return attend_in_graph(query, key, value, self.number, causal, scale, window, softcap)
        return self._attend(
            query, key, value, causal=causal, scale=scale, dropout=dropout, window=window, softcap=softcap
        )

    @untraced
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        scale: float | None,
        dropout: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        _check(query, key, causal, window, softcap)
        if self._local:
            return whole_attention(
                query, key, value, causal=causal, scale=scale, dropout=dropout, window=window, softcap=softcap
            )
        cut, window = self._cut_for(query, key, window, grads=torch.is_grad_enabled())
        how: dict[str, Any] = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}
        if self.choice == "ulysses":
            return ulysses_attention(query, key, value, self.group, cut, dropout=dropout, **how)
        if dropout:
            raise ConfigError(
                "Parallel(attention='ring') has no dropout: set the model's dropout of attention to 0, or choose "
                "'ulysses'."
            )
        return ring_attention(query, key, value, self.group, cut, **how)

    def cut_for(
        self, query: Tensor, key: Tensor, causal: bool, window: int | None, softcap: float | None, *, grads: bool
    ) -> tuple[CutBatch, int | None]:
        """How tokens of the batch that comes to attention are divided, and the window, where it is narrower than all.

        Args:
            grads: whether a backward may come.

        Raises:
            ConfigError, UsageError: see :meth:`attend`.
        """
        _check(query, key, causal, window, softcap)
        return self._cut_for(query, key, window, grads=grads)

    def _cut_for(self, query: Tensor, key: Tensor, window: int | None, *, grads: bool) -> tuple[CutBatch, int | None]:
        cut = self._batch_of(query, key, grads=grads).cut
        return cut, None if window is not None and window >= cut.length else window

    def _batch_of(self, query: Tensor, key: Tensor, *, grads: bool) -> Sharded:
        again = in_backward()
        if again and len({each.cut for each in self._pending}) > 1:
            raise UsageError(
                "attention is recomputed in backward, but batches of several cuts went forward since the last one: run "
                "each backward right behind its forward."
            )
        batch = self._pending[0] if again and self._pending else self._batch
        if batch is None:
            raise UsageError(
                f"attention crosses the {self.group.size} ranks along {self.group.axis!r}, but the batch was not cut "
                "for them: call batch = sf.sequence_shard(batch) before the forward."
            )
        rows, tokens = query.shape[0], query.shape[2]
        expected = batch.cut.rows, batch.cut.tokens(self.group.rank)
        if (rows, tokens) != expected or key.shape[2] != tokens:
            raise UsageError(
                f"attention gets {rows} rows of {tokens} queries and {key.shape[2]} keys, but the last "
                f"sequence_shard() gave this rank {expected[0]} rows of {expected[1]} tokens: cut each batch right "
                "before its forward, and run it whole, without a cache of keys."
            )
        if not again:
            self._compare(batch)
        self._attended = batch
        if grads and not again and batch not in self._pending:
            self._pending.append(batch)
        return batch

    def weight(self) -> float | None:
        """How many tokens of this rank the loss of the last forward is the mean of; None: its batch had no labels.

        Raises:
            UsageError: it is not known which forward the loss is of, or attention did not cross the axis in it.
        """
        if len(self._pending) > 1:
            raise UsageError(
                f"engine.backward(): {len(self._pending)} batches went forward since the last backward, and which this "
                "loss is of is not known: give weight=, the number of tokens it is the mean of, to each backward, and "
                "evaluate under torch.no_grad()."
            )
        batch = self._pending[0] if self._pending else self._batch
        if batch is not self._attended:
            raise UsageError(
                f"engine.backward(): no attention crossed the ranks along {self.group.axis!r} in this forward, so "
                "tokens of this rank have not seen those of others: see docs/sequence.md for models that are followed."
            )
        return batch.valid if batch is not None else None

    def taken(self) -> Sharded | None:
        """The batch of the last forward; its backward is run inside of :meth:`again`."""
        self.forget()
        return self._batch

    @contextmanager
    def again(self, batch: Sharded | None) -> Iterator[None]:
        """Inside, a backward is of that batch, whichever went forward last."""
        self._pending = [] if batch is None else [batch]
        try:
            yield
        finally:
            self.forget()

    def check_step(self) -> None:
        """
        Raises:
            UsageError: a backward came past the engine, and its loss was not weighed.
        """
        if self._pending:
            raise UsageError(
                "engine.step(): a batch of sequence_shard() went forward, but its loss did not come through "
                "engine.backward(), which weighs it by the tokens of each rank: call that instead of loss.backward(), "
                "and evaluate under torch.no_grad()."
            )


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of the last tokens of whole sequences, on one rank.

    Raises:
        ConfigError: ``softcap`` is not above 0.
    """
    _check_softcap(softcap)
    queries, keys = query.shape[2], key.shape[2]
    band, mask = window if window is not None and window < keys else None, None
    # PyTorch's is_causal takes queries for the first tokens where there are fewer than keys.
    if band is not None or (causal and queries > 1 and (queries < keys or softcap is not None)):
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        mask = mask if band is None else mask.triu(keys - queries + 1 - band)
    if softcap is not None:
        return _capped(query, key, value, mask, query.shape[3] ** -0.5 if scale is None else scale, dropout, softcap)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and queries > 1 and mask is None,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float, softcap: float
) -> Tensor:
    """What ``F.scaled_dot_product_attention`` would give, if it could cap scores; it holds all of them."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (key, value))
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -inf)
    weights = scores.softmax(-1, dtype=wide(query.dtype)).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _check(query: Tensor, key: Tensor, causal: bool, window: int | None, softcap: float | None) -> None:
    """
    Raises:
        ConfigError: see :meth:`SequenceAxis.attend`.
    """
    if query.shape[1] % key.shape[1]:
        raise ConfigError(
            f"attention has {query.shape[1]} heads of queries and {key.shape[1]} of keys: the first have to be a "
            "multiple of the second."
        )
    if window is not None and (not causal or window < 1):
        raise ConfigError(
            f"attention has a sliding window of {window} tokens{'' if causal else ' on both sides'}: over an axis "
            "of sequence it is 1 or more, and causal."
        )
    _check_softcap(softcap)


def _check_softcap(softcap: Any) -> None:
    """
    Raises:
        ConfigError: scores cannot be capped by it.
    """
    if softcap is not None and not (is_number(softcap) and 0 < softcap < inf):
        raise ConfigError(
            f"attention has softcap={described(softcap)}, which is the most that scores come to: give a number above "
            "0, or None for scores as they are."
        )


@known_arguments
def sequence_shard(
    batch: Mapping[str, Any],
    *,
    shift: bool = True,
    also: Sequence[str] = (),
    whole: Sequence[str] = (),
    engine: Any = None,
) -> dict[str, Any]:
    """This rank's part of a batch of whole sequences, which all ranks along the axis of sequence have alike.

    Call it on each batch, right before its forward: attention goes by the last one.

    Args:
        batch: tensors ``(batch, tokens, ...)`` by name. ``input_ids``, ``tokens``, ``inputs_embeds``,
            ``token_type_ids``, ``targets``, ``shift_labels`` are cut. ``labels`` are shifted first, into
            ``shift_labels``, which causal models of transformers take. ``position_ids`` (``positions`` beside
            ``tokens``) are cut, or made. Documents packed into a row, which do not see each other, are told by
            ``cu_seqlens`` (``(documents + 1,)``, of all rows), ``document_ids`` ``(batch, tokens)``, or positions
            that begin anew; an ``attention_mask`` ``(batch, tokens)`` sets padding apart. What is no tensor stays.
        shift: False: labels are of the tokens themselves, as those of masked language models.
        also: names of more tensors to cut.
        whole: names of tensors that stay as they are.
        engine: whose axis; None: that of the one that is open.

    Returns:
        The batch as the model takes it: without what told of documents, with positions. On a mesh with one rank of
        sequence it has whole sequences.

    Raises:
        ConfigError: a tensor is unknown or of another length, there are fewer tokens than ranks, or ranks along the
            axis have different batches, which the first attention of the forward raises.
        UsageError: there is no engine with an axis of sequence, or there are several.

    Examples:
        >>> tokens = torch.arange(16).view(2, 8)
        >>> long = sf.Engine(nn.Embedding(16, 8), optimizer=adam, parallel={"sequence": 1})
        >>> part = sf.sequence_shard({"input_ids": tokens, "labels": tokens}, engine=long)  # one rank: all of it
        >>> part["input_ids"].shape
        torch.Size([2, 8])
    """
    axes = [engine.sequence] if engine is not None else list(_OPEN)
    if len(axes) != 1 or axes[0] is None:
        several = "several engines have one: give engine=" if len(axes) > 1 else "no engine has one"
        raise UsageError(
            f"sequence_shard() cuts for an axis of sequence, but {several}"
            + ("." if len(axes) > 1 else ": make it with parallel={'sequence': 2}.")
        )
    return axes[0].shard(batch, shift, also, whole)
