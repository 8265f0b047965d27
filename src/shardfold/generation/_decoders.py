"""How a model is asked for the next tokens, and how its attention comes to read pages.

A model of transformers chooses its attention by a name in its config: ours is registered there, and named while a
generation runs. It keeps keys and values itself, so transformers' caches are not used. Models of one's own call a
:class:`shardfold.parallel.Attention`, and take ``positions``, as ``shardfold.tools.recipes.gpt.GPT`` does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.generation.paged_attention import PagedAttention
from shardfold.parallel import Attention
from shardfold.torch_internals import untraced

__all__ = ["Decoder", "decoder_of"]

NAME = "shardfold_pages"
"""Of our attention in the registry of transformers."""

_READ: WeakKeyDictionary[nn.Module, PagedAttention] = WeakKeyDictionary()

PLAIN_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Whose angles depend on a token's position alone, not on the longest text of the batch."""


class Decoder(Protocol):
    """A model as a generation sees it.

    Attributes:
        context: tokens that it takes at most; None: it does not say.
        longest: tokens that one forward takes at most; None: any.
        layers: with attention; None: not known before they were asked.
    """

    context: int | None
    longest: int | None
    layers: int | None

    def open(self, reads: PagedAttention, held: ExitStack) -> None:
        """Its attention reads pages until ``held`` closes."""
        ...

    def logits(self, call: Callable[..., Any], tokens: Tensor, positions: Tensor, draws: Tensor) -> Tensor:
        """``(texts, vocabulary)`` of the tokens that draw; tokens and positions are ``(1, tokens)``."""
        ...


def decoder_of(module: nn.Module) -> Decoder:
    """
    Raises:
        ModelError: text cannot be generated with it.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is not None:
        for part in module.modules():
            if isinstance(part, transformers.PreTrainedModel):
                return _OfTransformers(module, part)
    if any(isinstance(value, Attention) for part in module.modules() for value in vars(part).values()):
        return _OfOwn(module)
    raise ModelError(
        f"{type(module).__name__} cannot generate: it is neither a decoder of transformers, nor has a "
        "shardfold.parallel.Attention, which would read the keys and values of earlier tokens."
    )


class _OfTransformers:
    def __init__(self, module: nn.Module, model: Any) -> None:
        self._model = model
        config = model.config.get_text_config(decoder=True)
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.longest: int | None = None
        self.layers: int | None = getattr(config, "num_hidden_layers", None)
        names = inspect.signature(model.forward).parameters
        self._picks = "logits_to_keep" in names
        self._check(module, config, names)

    def _check(self, module: nn.Module, config: Any, names: Any) -> None:
        why = ""
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
        kinds = [each.get("rope_type", each.get("type", "default")) for each in ropes if isinstance(each, dict)]
        layers = set(getattr(config, "layer_types", None) or ())
        if any(_is_prefixed(each) for each in module.modules()):
            why = "peft puts a prefix before its keys"
        elif getattr(self._model.config, "is_encoder_decoder", False):
            why = "it has an encoder"
        elif not getattr(self._model, "_supports_attention_backend", False):
            why = "its attention does not come from transformers' registry"
        elif "position_ids" not in names:
            why = "its forward takes no position_ids"
        elif getattr(self._model, "_is_stateful", False) or layers - {"full_attention", "sliding_attention"}:
            why = "some of its layers keep other states than keys and values"
        elif getattr(config, "num_kv_shared_layers", None):
            why = "some of its layers read the keys of others"
        elif bad := [kind for kind in kinds if kind not in PLAIN_ROPE]:
            why = f"its positions ({bad[0]!r}) depend on the longest text of a batch"
        if why:
            raise ModelError(f"{type(self._model).__name__} cannot generate in pages: {why}. Call its own generate().")

    def open(self, reads: PagedAttention, held: ExitStack) -> None:
        transformers: Any = sys.modules["transformers"]
        transformers.AttentionInterface.register(NAME, _attend)
        config, before = self._model.config, self._model.config._attn_implementation
        if before == NAME:
            raise UsageError("the model generates already: take the answers of the first generation before another.")
        held.callback(setattr, config, "_attn_implementation", before)
        config._attn_implementation = NAME
        for part in self._model.modules():
            _READ[part] = reads
            held.callback(_READ.pop, part, None)

    def logits(self, call: Callable[..., Any], tokens: Tensor, positions: Tensor, draws: Tensor) -> Tensor:
        more: dict[str, Any] = {"logits_to_keep": draws} if self._picks else {}
        out = call(input_ids=tokens, position_ids=positions, use_cache=False, **more)
        logits = getattr(out, "logits", None)
        if logits is None:
            raise ModelError(
                f"{type(self._model).__name__} gives no logits: take its class for causal language models."
            )
        return logits[0] if self._picks else logits[0, draws]


def _is_prefixed(module: nn.Module) -> bool:
    given = getattr(module, "peft_config", None)
    return isinstance(given, dict) and any(each.is_prompt_learning for each in given.values())


@untraced
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention: ``(batch, heads, tokens, dim)`` to ``(batch, tokens, heads, dim)``.

    Raises:
        UsageError: nothing is being generated with the module now.
        ModelError: the attention has what is not built.
    """
    reads = _READ.get(module)
    if reads is None or not reads.open:
        raise UsageError(
            f"{type(module).__name__} is asked while a generation with it is under way: take all answers of "
            "generate() first, or close() it."
        )
    for name in ("position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} has attention with {name!r}, which generation in pages lacks.")
    return reads.attend(module, query, key, value, scale=scaling, window=sliding_window, softcap=softcap), None


class _OfOwn:
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.context: int | None = getattr(getattr(module, "config", None), "context", None)
        self.longest = self.context
        self.layers: int | None = None
        if "positions" not in inspect.signature(module.forward).parameters:
            raise ModelError(
                f"{type(module).__name__} cannot generate: its forward takes no positions, (batch, time), those of "
                "the tokens in their texts."
            )

    def open(self, reads: PagedAttention, held: ExitStack) -> None:
        self.layers = 0
        for part in self._module.modules():
            for value in vars(part).values():
                if isinstance(value, Attention):
                    if value.axis is not None:
                        raise UsageError("the model generates already, or its attention crosses an axis of sequence.")
                    self.layers += 1
                    own: Any = _Read(part, reads)
                    value.follow(own)
                    held.callback(value.follow, None)

    def logits(self, call: Callable[..., Any], tokens: Tensor, positions: Tensor, draws: Tensor) -> Tensor:
        return call(tokens, positions=positions)[0, draws]


class _Read:
    """In the place of an axis of sequence."""

    def __init__(self, layer: nn.Module, reads: PagedAttention) -> None:
        self._layer, self._reads = layer, reads

    def attend(
        self,
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
        if not causal:
            raise ConfigError("attention that is not causal cannot generate: tokens would see those behind them.")
        out = self._reads.attend(self._layer, query, key, value, scale=scale, window=window, softcap=softcap)
        return out.transpose(1, 2)
