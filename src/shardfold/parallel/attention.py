"""How a model's attention comes to cross an axis of sequence.

Models of transformers choose their attention by a name in their config: an engine registers one, and sets it while it
is open. Models of one's own call an :class:`Attention` in place of ``F.scaled_dot_product_attention``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardfold.comm.comm import Comm
from shardfold.comm.mesh_group import MeshGroup
from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.nn.axis_group import OneRank
from shardfold.parallel.sequence import SequenceAxis, whole_attention
from shardfold.plan.axes import Role

__all__ = ["Attention", "follow", "open_sequence", "refuse_options"]

NAME = "shardfold_sequence"
"""Of our attention in the registry of transformers."""

_CROSSES = "_shardfold_sequence"


class _Crosses:
    """Which axis the attention of a module of transformers crosses; a copy, or what comes of a pickle, crosses none."""

    def __init__(self, axis: SequenceAxis | None = None) -> None:
        self.axis = axis

    def __reduce__(self) -> Any:
        return _Crosses, ()


class Attention:
    """``F.scaled_dot_product_attention`` that sees the tokens of all ranks, where an engine has an axis of sequence.

    Make one in a module's constructor, as an attribute; an engine of the model finds it there. Before that, and on one
    rank, it is the plain function. A copy, or what comes of a pickle, is not bound to an engine.

    Args:
        heads: of queries, by which ``attention="auto"`` chooses.

    Examples:
        >>> attention = sf.parallel.Attention(heads=2)
        >>> query = torch.randn(1, 2, 6, 4)  # batch, heads, tokens, width
        >>> tuple(attention(query, query, query, is_causal=True).shape)
        (1, 2, 6, 4)
    """

    def __init__(self, heads: int | None = None) -> None:
        self.heads = heads
        self.axis: SequenceAxis | None = None

    def follow(self, axis: SequenceAxis | None) -> None:
        """It crosses ``axis`` from now on; None: none."""
        self.axis = axis

    def __reduce__(self) -> Any:
        return Attention, (self.heads,)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """
        Args:
            query: ``(batch, heads, tokens, head_dim)``.
            key: ``(batch, key_heads, tokens, head_dim)``, where ``key_heads`` divides ``heads``.
            value: ``(batch, key_heads, tokens, value_dim)``.
            is_causal: tokens see none behind them.
            scale: of the scores; None: ``head_dim ** -0.5``.
            dropout_p: of the weights.
            window: tokens see the last so many, themselves included; None: all. Only where ``is_causal``.
            softcap: scores are ``softcap * tanh(scores / softcap)`` before they are masked, as in Gemma 2 (arXiv
                2408.00118); None: as they are.

        Returns:
            ``(batch, heads, tokens, value_dim)``.

        Raises:
            ConfigError, UsageError: see :meth:`SequenceAxis.attend`.
        """
        if self.axis is None:
            attend = whole_attention
        else:
            attend = self.axis.attend
        return attend(
            query, key, value, causal=is_causal, scale=scale, dropout=dropout_p, window=window, softcap=softcap
        )


def open_sequence(
    model: nn.Module,
    comm: Comm,
    attention: str | None,
    *,
    shares: int,
    apart: Callable[[], bool],
    group: type[MeshGroup] = MeshGroup,
) -> SequenceAxis | None:
    """The axis of sequence of an engine's mesh, which the model's attention crosses from now on; None: it has none.
    ``shares``: among how many ranks heads are divided already; ``apart``: see :class:`MeshGroup`, which ``group`` is.

    Raises:
        ConfigError: ``attention`` was chosen but there is no such axis, there are two, or heads do not divide.
        ModelError: the model's attention cannot be followed.
    """
    axes = [axis for axis in comm.mesh.sizes.axes if axis.role is Role.SEQUENCE]
    if not axes:
        if attention is not None:
            raise ConfigError(
                f"Parallel(attention={attention!r}) says how attention crosses an axis of sequence, which parallel= "
                "does not have: add it, as in parallel={'sequence': 2}, or leave Parallel(attention=...) out."
            )
        return None
    if len(axes) > 1:
        raise ConfigError(f"parallel= has two axes of role sequence, {axes[0].name!r} and {axes[1].name!r}: give one.")
    own = list(_own(model))
    theirs = list(_of_transformers(model))
    if not own and not theirs and axes[0].size > 1:
        raise ModelError(
            f"the axis {axes[0].name!r} cuts sequences, but {type(model).__name__} has no attention that can cross it: "
            "it is not a model of transformers, and no module has a shardfold.parallel.Attention, which replaces "
            "F.scaled_dot_product_attention."
        )
    heads = [each.heads for each in own if each.heads] + [n for each in theirs if (n := _heads(each.config))]
    made = group(axes[0].name, comm, apart) if axes[0].size > 1 else OneRank(axes[0].name)
    return SequenceAxis(made, attention or "auto", [max(n // shares, 1) for n in heads], comm.memory.device)


def follow(model: nn.Module, axis: SequenceAxis) -> Callable[[], None]:
    """The model's attention crosses ``axis`` from now on; returns what undoes it.

    Raises:
        ModelError: a model of transformers does not choose its attention by name.
    """
    undo: list[Callable[[], None]] = [axis.close]
    for each in _own(model):
        each.follow(axis)
        undo.append(partial(each.follow, None))
    for each in _of_transformers(model):
        undo.append(_rename(each))
        for part in each.modules():
            vars(part)[_CROSSES] = _Crosses(axis)
            if hasattr(part, "create_position_ids_from_input_ids"):
                axis.count_behind(part.padding_idx)

    def undone() -> None:
        for call in reversed(undo):
            call()

    return undone


def _own(model: nn.Module) -> Iterator[Attention]:
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Attention):
                yield value


def _of_transformers(model: nn.Module) -> Iterator[Any]:
    """Models of transformers in it, the outermost ones."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None:
        return
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module not in inside:
            inside.update(module.modules())
            yield module


def _heads(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "num_attention_heads", None)


def _rename(model: Any) -> Callable[[], None]:
    """The model's config names our attention; returns what puts back what it named.

    Raises:
        ModelError: its modules do not ask the registry.
    """
    transformers: Any = sys.modules["transformers"]
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(model).__name__} does not take its attention from transformers' registry, so it cannot cross an "
            "axis of sequence: take a model that does, or another axis."
        )
    transformers.AttentionInterface.register(NAME, _attend)
    config, before = model.config, model.config._attn_implementation
    _name_attention(config, NAME)

    def put_back() -> None:
        _name_attention(config, before)
        for part in model.modules():
            vars(part).pop(_CROSSES, None)

    return put_back


def _name_attention(config: Any, name: Any) -> None:
    """The modules of a model of transformers with this config ask the registry for ``name``."""
    config._attn_implementation = name


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention: ``(batch, heads, tokens, dim)`` to ``(batch, tokens, heads, dim)``.

    Raises:
        UsageError: the module is of no engine, or gets a mask of its own.
        ConfigError: the attention has what is not built.
    """
    crosses: _Crosses | None = getattr(module, _CROSSES, None)
    axis = None if crosses is None else crosses.axis
    if axis is None:
        raise UsageError(
            f"{type(module).__name__} names the attention {NAME!r} but no engine holds it (it is a copy, or was added "
            "later): set config._attn_implementation, as to 'sdpa'."
        )
    if attention_mask is not None:
        raise UsageError(
            "attention over an axis of sequence gets a mask, which is not cut: give attention_mask (batch, tokens) or "
            "document_ids to sequence_shard()."
        )
    refuse_options(module, options)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not module.training:
        dropout = 0.0
    out = axis.attend(
        query,
        key,
        value,
        causal=causal,
        scale=scaling,
        dropout=dropout,
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
    )
    return out.transpose(1, 2).contiguous(), None


def refuse_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the attention of a model of transformers has what is not built.
    """
    for name in ("position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} has attention with {name!r}, which does not cross an axis of sequence yet: "
                "take another axis."
            )
