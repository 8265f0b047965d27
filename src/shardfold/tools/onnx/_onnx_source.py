"""What is exported: a model with its values on this host, in fp32, and how it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.checkpoint import load_model
from shardfold.checkpoint.folders import IN_RUN
from shardfold.errors import ConfigError, ModelError
from shardfold.sharding.materialize import meta_init
from shardfold.tools.answering.byte_tokenizer import ByteTokenizer
from shardfold.tools.answering.opened_model import USUAL_LENGTH, settings_of_train
from shardfold.tools.onnx._layer_graph import ModelCall
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from shardfold.tools.recipes.train_config import read_settings
from shardfold.tools.tune.adapters import merged_tensors
from shardfold.tools.tune.merge import generation_config
from shardfold.tools.tune.models import ModelPlace, blocks_of, hollow_model, quiet

__all__ = ["OnnxSource", "as_llama"]

BATCH, LENGTH, PAST = 3, 5, 7
"""Sizes that a model is exported with; no two are the same, so that no axis is taken for another."""

PACKED = 11
"""Tokens that an encoder is exported with; another size, too."""
PACKED_ATTENTION = "shardfold_packed"

EAGER = "eager"
"""Attention out of operators that every runtime has."""

BATCHED = "batched_mm"
"""Experts as one product of matrices, which depends on no values."""


@dataclass
class OnnxSource:
    """A model to export.

    Attributes:
        kind: decoder, which continues texts; encoder, which reads them; image, which reads images.
        model: with values, in fp32, ready to be asked.
        config: transformers' config; None: there is none.
        tokenizer: of texts; None: there is none.
        files: a folder with what lies beside a model, such as a tokenizer; None: there is none.
        inputs: an example of each input of an encoder, or the images.
    """

    kind: str
    model: nn.Module
    config: Any = None
    tokenizer: Any = None
    files: ModelPlace | None = None
    inputs: Mapping[str, Tensor] | None = None

    @classmethod
    def open(cls, path: Path) -> OnnxSource:
        """Of a run of shardfold tune or shardfold train, a folder of transformers, or an adapter of peft.

        Raises:
            ConfigError: it is none of these, or it cannot be exported; says why.
        """
        path = path.expanduser()
        said = read_settings(path / "config.json") if (path / "config.json").is_file() else {}
        if "model_type" not in said and "identity" not in said and "backbone" in said:
            return _of_face(path, said)
        if "model_type" not in said and "size" in said and "recipe" not in said:
            return _of_train(path, said)
        if said.get("recipe") == "reward":
            raise ConfigError(
                f"{str(path)!r} is a reward model, which gives one number for an answer and no tokens: --to hf exports "
                "it for transformers."
            )
        place = ModelPlace.find(path)
        config = place.config
        if getattr(config, "quantization_config", None):
            raise ConfigError(
                f"the model in {str(place.folder)!r} is quantized (quantization_config in its config.json): export the "
                "one that it was made of, with --bits."
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{str(path)!r} is an encoder with a decoder ({config.model_type}): only decoders, encoders and models "
                "of images are exported to ONNX."
            )
        return _of_transformers(path, place)

    @property
    def layers(self) -> tuple[str, nn.ModuleList] | None:
        """Where the list of layers is, and that list; None: there is none."""
        try:
            return blocks_of(self.model)
        except ModelError:
            return None

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values; of other models those of the longest list."""
        if self.kind == "decoder":
            return int(self.config.get_text_config().num_hidden_layers)
        return len(self.layers[1]) if self.layers else 0

    @property
    def context(self) -> int:
        """Tokens that a decoder reads at most."""
        if self.kind != "decoder":
            return 0
        return getattr(self.config.get_text_config(), "max_position_embeddings", None) or USUAL_LENGTH

    def generation(self) -> dict[str, Any]:
        """transformers' generation config of a decoder: it ends where the tokenizer's turns do."""
        if self.files is not None:
            return generation_config(self.files)
        return {"eos_token_id": self.config.eos_token_id}

    @property
    def positions(self) -> bool:
        """Whether the decoder is told the tokens' positions."""
        return "position_ids" in signature(self.model.forward).parameters

    def call(self, *, packed: bool = False) -> ModelCall:
        """How it is called where it is exported.

        Args:
            packed: an encoder whose layers have no tokens that the mask leaves out.
        """
        if self.kind == "decoder":
            return self._decoder_call()
        assert self.inputs is not None
        axes = {0: "batch_size"} if self.kind == "image" else {0: "batch_size", 1: "sequence_length"}
        names = tuple(self.inputs)
        outputs = self.outputs(self.inputs)
        wide = {
            name: axes if value.dim() > 2 and self.kind == "encoder" else {0: "batch_size"}
            for name, value in outputs.items()
        }
        given, dynamic = tuple(self.inputs.values()), (axes,) * len(names)
        if packed and self.layers is not None:
            packing = _PackedReader(self.model, self.layers[0].rpartition(".")[0], names, tuple(outputs))
            return ModelCall(
                packing, names, (*given, torch.arange(PACKED)), (*dynamic, {0: "tokens"}), wide, packed=True
            )
        return ModelCall(_PlainReader(self.model, names, tuple(outputs)), names, given, dynamic, wide)

    def outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What an encoder, or a model of images, gives."""
        with torch.no_grad():
            found: Any = self.model(**inputs)
        if isinstance(found, Tensor):
            return {"embeddings": found}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _decoder_call(self) -> ModelCall:
        length, whole = {0: "batch_size", 1: "sequence_length"}, {0: "batch_size", 1: "total_sequence_length"}
        ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % self.config.get_text_config().vocab_size
        named = {
            "input_ids": (ids, length),
            "attention_mask": (torch.ones(BATCH, PAST + LENGTH, dtype=torch.int64), whole),
        }
        if self.positions:
            named["position_ids"] = torch.arange(PAST, PAST + LENGTH).repeat(BATCH, 1), length
        with torch.no_grad():
            seen = self.model(
                input_ids=ids[:, :1], attention_mask=torch.ones_like(ids[:, :1]), use_cache=True
            ).past_key_values.layers[0]
        past = tuple(part.new_zeros(BATCH, part.shape[1], PAST, part.shape[3]) for part in (seen.keys, seen.values))
        return ModelCall(
            _PlainStepper(self.model, tuple(named)),
            tuple(named),
            tuple(value for value, _ in named.values()),
            tuple(axes for _, axes in named.values()),
            {"logits": length},
            (past[0], past[1]),
        )


class _PlainStepper(nn.Module):
    """A decoder that takes and gives keys and values as plain tensors."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: Any) -> tuple[Tensor, list[Tensor]]:
        from transformers.cache_utils import DynamicCache, DynamicLayer

        *inputs, past = given
        cache = DynamicCache()
        for keys, values in past:
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        found: Any = self.model(**dict(zip(self.names, inputs, strict=True)), past_key_values=cache, use_cache=True)
        layers: list[Any] = cache.layers
        return found.logits, [part for layer in layers for part in (layer.keys, layer.values)]


class _PlainReader(nn.Module):
    """A model without a past, whose outputs are plain tensors."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names, self.outputs = model, names, outputs

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        found: Any = self.model(**dict(zip(self.names, given, strict=True)))
        return (found,) if isinstance(found, Tensor) else tuple(found[name] for name in self.outputs)


class _PackedReader(_PlainReader):
    """An encoder of texts of unequal lengths: its layers have the tokens of all texts one behind the other, and none
    that the mask leaves out. Attention, which is of single texts, has them as rows of one length.

    Args:
        owner: the module that has the layers.
    """

    def __init__(self, model: nn.Module, owner: str, names: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__(model, names, outputs)
        self.owner = owner

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        from transformers import AttentionInterface

        *inputs, there = given
        mask = dict(zip(self.names, inputs, strict=True))["attention_mask"]
        rows = _PackedRows(mask, there)
        config: Any = self.model.config
        owner = self.model.get_submodule(self.owner)
        hooks = (
            owner.register_forward_pre_hook(rows.enter, with_kwargs=True),
            owner.register_forward_hook(rows.leave),
        )
        AttentionInterface.register(PACKED_ATTENTION, rows.attend)
        before, config._attn_implementation = config._attn_implementation, PACKED_ATTENTION
        try:
            return super().forward(*inputs)
        finally:
            config._attn_implementation = before
            for hook in hooks:
                hook.remove()


class _PackedRows:
    """Where tokens of texts are, packed and as rows of one length.

    Args:
        mask: (B, L), 1 where a token is.
        there: (T,), the places of the tokens among B * L.
    """

    def __init__(self, mask: Tensor, there: Tensor) -> None:
        self.shape, self.there = mask.shape, there
        flat = (mask != 0).long().flatten()
        #: Of each place of a row its token among the packed; where there is none, any.
        self.places = (flat.cumsum(0) - 1).clamp(min=0)
        self.bias = torch.where(mask != 0, 0.0, torch.finfo(torch.float32).min)[:, None, None, :]

    def enter(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given:
            return (self.packed(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": self.packed(named["hidden_states"])}

    def leave(self, module: nn.Module, given: Any, found: Any) -> Any:
        found.last_hidden_state = self.in_rows(found.last_hidden_state)
        return found

    def packed(self, values: Tensor) -> Tensor:
        """(B, L, ...) to (1, T, ...)."""
        return values.flatten(0, 1)[self.there][None]

    def in_rows(self, values: Tensor) -> Tensor:
        """(1, T, ...) to (B, L, ...)."""
        return values[0][self.places].unflatten(0, self.shape)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        query, key, value = (self.in_rows(each.transpose(1, 2)).transpose(1, 2) for each in (query, key, value))
        scores = (query @ key.transpose(2, 3) * scaling + self.bias).softmax(-1)
        return self.packed((scores @ value).transpose(1, 2)), None


def _of_transformers(path: Path, place: ModelPlace) -> OnnxSource:
    import transformers

    config = place.config
    named = (getattr(config, "architectures", None) or [""])[0]
    causal = named.endswith(("ForCausalLM", "LMHeadModel")) or place.adapter is not None
    if named.endswith("ForSequenceClassification") and _continues_texts(config):
        raise ConfigError(
            f"{str(path)!r} has a {named}, which rates texts as a reward model does: decoders are exported with their "
            "head of words, encoders with any."
        )
    kind: Any = transformers.AutoModelForCausalLM if causal else getattr(transformers, named, transformers.AutoModel)
    with quiet(), _no_bars():
        try:
            model, report = kind.from_pretrained(
                place.folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=EAGER,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"transformers cannot load the model in {str(place.folder)!r}: {first}") from None
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"the safetensors in {str(place.folder)!r} have no {missing[0]!r}"
            f"{f' and {len(missing) - 1} more' * (len(missing) > 1)} of a {type(model).__name__}: nothing is exported "
            "that was not trained."
        )
    if place.adapter is not None:
        with quiet():
            hollow = hollow_model(config, "lm")
            values = merged_tensors(hollow, place, "lm")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
    model = model.eval().requires_grad_(False)
    if any(getattr(config.get_text_config(), name, 0) for name in ("num_local_experts", "num_experts")):
        model.set_experts_implementation(BATCHED)
    if causal:
        return OnnxSource("decoder", model, model.config, place.tokenizer(), place)
    return _of_readers(path, model, place)


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers shows no bars of its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _continues_texts(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()


def _of_readers(path: Path, model: Any, place: ModelPlace) -> OnnxSource:
    """An encoder of texts, or a model of images."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        rows, columns = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        return OnnxSource("image", model, config, None, place, {"pixel_values": _drawn(channels, rows, columns)})
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{str(path)!r} has a {type(model).__name__}, which reads {model.main_input_name}: only models of texts "
            "(input_ids) and of images (pixel_values) are exported to ONNX."
        )
    taken = signature(model.forward).parameters
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % config.vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "token_type_ids" in taken:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return OnnxSource("encoder", model, config, None, place, inputs)


def _drawn(channels: int, rows: int, columns: int, batch: int = BATCH) -> Tensor:
    return torch.rand(batch, channels, rows, columns, generator=torch.Generator().manual_seed(0))


def _of_train(path: Path, said: Mapping[str, Any]) -> OnnxSource:
    """A GPT of `shardfold train`, as the LLaMA that it is."""
    shape = settings_of_train(path, said).model_shape()
    if shape.experts:
        raise ConfigError(f"the run {str(path)!r} trained a mixture of experts, which is not exported to ONNX.")
    gpt = load_model(path / IN_RUN, lambda: GPT(shape), dtype=torch.float32)
    assert isinstance(gpt, GPT)
    model = as_llama(gpt)
    ids = torch.arange(min(64, shape.context))[None]
    with torch.no_grad():
        apart = (model(input_ids=ids).logits - gpt(ids)).abs().max().item()
    if apart > 1e-3:
        raise ConfigError(f"the GPT in {str(path)!r} is no LLaMA: logits are {apart:.1e} apart.")
    return OnnxSource("decoder", model, model.config, ByteTokenizer())


def as_llama(gpt: GPT) -> Any:
    """A GPT of `shardfold train` as transformers' LLaMA: the same computation under other names.

    Queries, keys and values are one matrix there, and so are gate and up.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: GPTConfig = gpt.config
    blocks: Any = gpt.blocks
    settings: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.d_model,
        "intermediate_size": blocks[0].feed_forward.down.weight.shape[1],
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": gpt.norm.eps,
        "tie_word_embeddings": shape.tied,
        "attn_implementation": EAGER,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    config = LlamaConfig(**settings)
    config.architectures = [LlamaForCausalLM.__name__]
    values: dict[str, Tensor] = {"model.embed_tokens.weight": gpt.embedding.weight, "lm_head.weight": gpt.head.weight}
    values["model.norm.weight"] = gpt.norm.weight
    for number, block in enumerate(blocks):
        at = f"model.layers.{number}"
        attention, forward = block.attention, block.feed_forward
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        values |= {f"{at}.{n}.weight": w for n, w in zip(names, attention.qkv.weight.chunk(3), strict=True)}
        values |= {
            f"{at}.{n}.weight": w
            for n, w in zip(("mlp.gate_proj", "mlp.up_proj"), forward.gate_up.weight.chunk(2), strict=True)
        }
        values[f"{at}.self_attn.o_proj.weight"] = attention.out.weight
        values[f"{at}.mlp.down_proj.weight"] = forward.down.weight
        values[f"{at}.input_layernorm.weight"] = block.attention_norm.weight
        values[f"{at}.post_attention_layernorm.weight"] = block.feed_forward_norm.weight
    with meta_init():
        model = LlamaForCausalLM(config)
    model.load_state_dict({name: value.detach() for name, value in values.items()}, assign=True)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class _FaceEmbedder(nn.Module):
    """What a face model is without its head: images to embeddings."""

    def __init__(self, config: FaceConfig) -> None:
        from shardfold.tools.recipes.face.vit import Neck, backbone_of

        super().__init__()
        self.backbone, width = backbone_of(config)
        self.neck = Neck(width, config.embedding)

    def forward(self, images: Tensor) -> Tensor:
        return self.neck(self.backbone(images))


def _of_face(path: Path, said: Mapping[str, Any]) -> OnnxSource:
    """The backbone and the neck of a run of `shardfold train face`; statistics of its BatchNorm are fp32."""
    config = FaceConfig.load(dict(said), where=str(path / "config.json"), inherited=said.keys())
    if not (path / IN_RUN).is_dir():
        raise ConfigError(f"the run {str(path)!r} has no checkpoint to export: train with --save-every.")
    if config.backbone == "vit":
        with meta_init():
            made = _FaceEmbedder(config)
    else:
        made = _FaceEmbedder(config)
    model = load_model(path / IN_RUN, made, dtype=torch.float32, strict=False).requires_grad_(False)
    rows, columns = config.image_size()
    return OnnxSource("image", model, inputs={"images": _drawn(config.channels, rows, columns)})
