"""How a model is asked for the next tokens, and how its attention comes to read pages.

A model of transformers chooses its attention by a name in its config: ours is registered there, and named while a
generation runs. It keeps keys and values itself, so transformers' caches are not used. Models of one's own call a
:class:`shardfold.parallel.Attention`, and take ``positions``, as ``shardfold.tools.recipes.gpt.GPT`` does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError, UsageError
from shardfold.generation._products import multiplies, product
from shardfold.generation.paged_attention import PagedAttention
from shardfold.parallel import Attention
from shardfold.parallel.split import cut_forward
from shardfold.torch_internals import untraced

__all__ = ["Decoder", "decoder_of"]

NAME = "shardfold_pages"
"""Of our attention in the registry of transformers."""

_READ: WeakKeyDictionary[nn.Module, PagedAttention] = WeakKeyDictionary()

PLAIN_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Whose angles depend on a token's position alone, not on the longest text of the batch."""


STRAIGHT = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers differ in what :class:`_StraightLayer` reads of them, and in nothing else."""


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
        turns = _Turns()
        for part in self._model.modules():
            _READ[part] = reads
            held.callback(_READ.pop, part, None)
            if _is_straight(part):
                held.callback(vars(part).pop, "forward", None)
                vars(part)["forward"] = _StraightLayer(part, reads, turns)
        _multiply(module=self._model, held=held)
        if _is_straight_model(self._model):
            held.callback(vars(self._model).pop, "forward", None)
            vars(self._model)["forward"] = _StraightModel(self._model, reads)

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
    reads = _open(module, _READ.get(module))
    for name in ("position_bias", "s_aux"):
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} has attention with {name!r}, which generation in pages lacks.")
    rows = (each[0].transpose(0, 1) for each in (query, key, value))
    return reads.attend(module, *rows, scale=scaling, window=sliding_window, softcap=softcap)[None], None


def _is_straight(layer: nn.Module) -> bool:
    """Whether it is a layer of a known family, of whose parts nobody hears or changes a call."""
    home, family = type(layer).__module__, _family(layer)
    if family not in STRAIGHT or home != f"transformers.models.{family}.modeling_{family}":
        return False
    if not type(layer).__name__.endswith("DecoderLayer") or "forward" in vars(layer):
        return False
    parts = [part for name, part in layer.named_modules() if name and not isinstance(part, nn.Linear)]
    own = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    return all(type(getattr(layer, name)).__module__ == home for name in own) and all(map(_is_plain, parts))


def _is_straight_model(model: Any) -> bool:
    """Whether it is no more than an embedding, straight layers, a norm and a head."""
    home, family = type(model).__module__, _family(model)
    base: Any = getattr(model, "model", None)
    if family not in STRAIGHT or home != f"transformers.models.{family}.modeling_{family}" or "forward" in vars(model):
        return False
    names = type(model).__name__.endswith("ForCausalLM") and type(base).__name__ == f"{type(model).__name__[:-11]}Model"
    if not names or type(base).__module__ != home or not _is_plain(base):
        return False
    layers = [vars(layer).get("forward") for layer in base.layers]
    return len(layers) == base.config.num_hidden_layers and all(type(each) is _StraightLayer for each in layers)


def _is_plain(part: nn.Module) -> bool:
    hooks: Any = part
    return not (hooks._forward_hooks or hooks._forward_pre_hooks or "forward" in vars(part))


class _Turns:
    """Cosines and sines of one forward, as all its layers take them."""

    def __init__(self) -> None:
        self._of: Any = None
        self._made = torch.empty(0), torch.empty(0)

    def of(self, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of transformers' ``(1, tokens, dim)``: ``(tokens, 1, dim)``, sines of the first half with their sign."""
        if self._of is not embeddings:
            cosines, sines = (each[0, :, None] for each in embeddings)
            first, second = sines.chunk(2, -1)
            self._of, self._made = embeddings, (cosines, torch.cat([-first, second], -1))
        return self._made


class _Logits(NamedTuple):
    logits: Tensor


class _StraightModel:
    """The forward of a model of straight layers, for :meth:`_OfTransformers.logits`."""

    def __init__(self, model: Any, reads: PagedAttention) -> None:
        self._model, self._reads = model, reads

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        use_cache: bool = False,
        **options: Any,
    ) -> _Logits:
        base = self._model.model
        _open(self._model, self._reads)
        hidden = base.embed_tokens(input_ids)
        turns = base.rotary_emb(hidden, position_ids=position_ids)
        for layer in base.layers:
            hidden = layer(hidden, position_embeddings=turns)
        row = base.norm(hidden[0] if logits_to_keep is None else hidden[0, logits_to_keep])
        return _Logits(_output(row, self._model.lm_head)[None])


class _StraightLayer:
    """The forward of a decoder layer by fewer calls: its modules are not called one by one, and matrices that lie
    behind each other in memory, as an engine puts them, are multiplied at once.

    What is no plain ``nn.Linear``, such as an adapter or a part of a layer that is cut, is called as it is.
    """

    def __init__(self, layer: Any, reads: PagedAttention, turns: _Turns) -> None:
        self._layer, self._reads, self._turns = layer, reads, turns
        attention = layer.self_attn
        self._norms: tuple[Any, Any] = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        of = attention if hasattr(attention, "layer_type") else attention.config
        self._window: int | None = None if _family(layer) == "llama" else getattr(of, "sliding_window", None)

    def __call__(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **options: Any
    ) -> Tensor:
        layer, attention = self._layer, self._layer.self_attn
        reads = _open(attention, self._reads)
        row = hidden_states[0]
        query, key, value = self._asked(_normed(layer.input_layernorm, row), self._turns.of(position_embeddings))
        seen = reads.attend(attention, query, key, value, scale=attention.scaling, window=self._window)
        row = _added(row, seen.reshape(len(row), -1), attention.o_proj)
        return _added(row, self._gated(_normed(layer.post_attention_layernorm, row)), layer.mlp.down_proj)[None]

    def _asked(self, row: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        attention = self._layer.self_attn
        parts, width = (attention.q_proj, attention.k_proj, attention.v_proj), attention.head_dim
        whole = _joined(parts)
        if whole is None:
            query, key, value = (_output(row, each).view(len(row), -1, width) for each in parts)
        else:
            counts = [len(each.weight) // width for each in parts]
            heads = product(row, whole).view(len(row), -1, width)
            if self._norms[0] is None:
                turned = _turned(heads[:, : -counts[2]], *turns)
                return turned[:, : counts[0]], turned[:, counts[0] :], heads[:, -counts[2] :]
            query, key, value = heads.split(counts, 1)
        if self._norms[0] is not None:
            query, key = self._norms[0](query), self._norms[1](key)
        return _turned(query, *turns), _turned(key, *turns), value

    def _gated(self, row: Tensor) -> Tensor:
        mlp = self._layer.mlp
        whole = _joined((mlp.gate_proj, mlp.up_proj))
        if whole is None:
            return mlp.act_fn(_output(row, mlp.gate_proj)) * _output(row, mlp.up_proj)
        gate, up = product(row, whole).chunk(2, -1)
        return mlp.act_fn(gate) * up


def _family(layer: nn.Module) -> str:
    return type(layer).__module__.rpartition(".modeling_")[2]


def _normed(norm: Any, row: Tensor) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019)."""
    if row.dtype != torch.float32 or norm.weight.dtype != torch.float32:
        return norm(row)
    return F.rms_norm(row, (row.shape[-1],), norm.weight, norm.variance_epsilon)


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of ``(tokens, heads, dim)``."""
    swapped = heads.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(heads * cosines, swapped, sines)


def _is_matrix(layer: nn.Module) -> bool:
    """Whether it gives no more than the product with its weight: whole, or this rank's columns of a tensor axis."""
    if type(layer) is not nn.Linear or layer.bias is not None or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    own, cut = vars(layer).get("forward"), cut_forward(layer)
    if cut is not None:
        return cut.is_product and cut.word == "column"
    return own is None or isinstance(own, _Multiplied)


class _Multiplied:
    """The forward of a linear layer whose module is called."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        layer: Any = self._layer
        if torch.compiler.is_compiling():
            return F.linear(input, layer.weight, layer.bias)
        made = product(input.reshape(-1, input.shape[-1]), layer.weight).view(*input.shape[:-1], len(layer.weight))
        return made if layer.bias is None else made + layer.bias


def _multiply(module: nn.Module, held: ExitStack) -> None:
    """Linear layers multiply as is fastest here, until ``held`` closes."""
    for part in module.modules() if multiplies() else ():
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward and "forward" not in vars(part):
            held.callback(vars(part).pop, "forward", None)
            vars(part)["forward"] = _Multiplied(part)


def _output(row: Tensor, layer: Any) -> Tensor:
    if _is_matrix(layer):
        return product(row, layer.weight)
    cut = cut_forward(layer)
    if cut is not None and cut.is_product and cut.word == "gathered" and layer.bias is None:
        return cut.group.all_gather(product(row, layer.weight), -1, cut.sizes)
    return layer(row[None])[0]


def _added(row: Tensor, more: Tensor, layer: Any) -> Tensor:
    """``row`` and the layer's output."""
    if _is_matrix(layer):
        return product(more, layer.weight).add_(row)
    cut = cut_forward(layer)
    if cut is not None and cut.is_product and cut.word == "row" and layer.bias is None:
        return cut.group.all_reduce(product(more, layer.weight)) + row
    return row + layer(more[None])[0]


def _joined(layers: Sequence[nn.Module]) -> Tensor | None:
    """The matrices of layers with the same input as one, if they lie behind each other in memory."""
    if not all(map(_is_matrix, layers)):
        return None
    weights: list[Any] = [each.weight for each in layers]
    first, end = weights[0], weights[0].data_ptr()
    for each in weights:
        if each.data_ptr() != end or not each.is_contiguous() or each.dtype != first.dtype:
            return None
        end += each.nbytes
    kept = first.untyped_storage()
    if end > kept.data_ptr() + kept.nbytes():  # they are neighbours by chance
        return None
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _open(module: nn.Module, reads: PagedAttention | None) -> PagedAttention:
    """
    Raises:
        UsageError: nothing is being generated with the module now.
    """
    if reads is None or not reads.open:
        raise UsageError(
            f"{type(module).__name__} is asked while a generation with it is under way: take all answers of "
            "generate() first, or close() it."
        )
    return reads


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
        _multiply(module=self._module, held=held)
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
        rows = (each[0].transpose(0, 1) for each in (query, key, value))
        out = self._reads.attend(self._layer, *rows, scale=scale, window=window, softcap=softcap)
        return out.transpose(0, 1)[None]
