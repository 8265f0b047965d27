"""Architectures of the transformers library, small and with random weights, and what each is trained on.

An entry says how to make the configuration and the model, what a batch is, and what the loss is. Everything is reached
by name, so that it can be pickled. Batches are keyword arguments of the model's forward. Every loss is a mean over
slices of equal size: what is right for the global batch is the mean of what is right for the ranks' slices.

Nothing in a forward may be random, or the slices could not be told from the whole: `settle` sets every dropout, jitter
and masking in a configuration to zero. What takes statistics of the whole batch (batch normalization) runs on its
running statistics for the same reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ZOO", "Architecture", "batches", "build", "loss"]

VOCAB, LENGTH, LABELS, SIDE = 61, 8, 5, 32
ROWS = 12  # of a global batch: divides by 2, 3 and 4 ranks


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """``make`` gives the model, ``batch`` a global batch of a generator; ``routed``: small differences of the weights
    can change which expert or code a token gets, so that losses of later steps are not comparable."""

    kind: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]]
    output: str = "loss"  # which parts of the output make the loss, separated by spaces
    routed: bool = False
    lr: float = 1e-3


ZOO: dict[str, Architecture] = {}


def build(name: str) -> nn.Module:
    return ZOO[name].make()


def batches(name: str, count: int = 3) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [ZOO[name].batch(generator) for _ in range(count)]


def loss(name: str, output: Any, batch: dict[str, Any]) -> Tensor:
    """The model's own loss, or how far its outputs are from a fixed wave."""
    if ZOO[name].output == "loss":
        return output.loss
    values = [getattr(output, part) for part in ZOO[name].output.split()]
    targets = [torch.arange(value[0].numel()).sin().view(value.shape[1:]) for value in values]
    return torch.stack([(v - t).square().mean() for v, t in zip(values, targets, strict=True)]).sum()


def settle(config: Any) -> Any:
    """Takes what is random out of a configuration and the configurations in it."""
    for key, value in vars(config).items():
        if isinstance(value, float) and any(word in key for word in ("drop", "pdrop", "jitter", "mask_time_prob")):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict"):
            settle(value)
    for key in ("apply_spec_augment", "output_router_logits"):
        if hasattr(config, key):
            setattr(config, key, False)
    return config


def add(
    name: str, kind: str, model: str, config: str, batch: Callable[[torch.Generator], dict[str, Any]],
    output: str = "loss", *, change: Callable[[nn.Module], nn.Module] | None = None, routed: bool = False,
    lr: float = 1e-3, **sizes: Any,
) -> None:  # fmt: skip
    """Enters ``model(config(**sizes))``, both named as in `transformers`; ``change`` wraps or alters the model."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(settle(getattr(transformers, config)(**_configs(sizes))))
        made.train()  # some constructors leave it in eval mode
        return change(made) if change is not None else made

    ZOO[name] = Architecture(kind=kind, make=make, batch=batch, output=output, routed=routed, lr=lr)


def _configs(sizes: dict[str, Any]) -> dict[str, Any]:
    """``sizes`` with each (name, arguments) pair made the configuration of that name."""
    import transformers

    return {
        key: getattr(transformers, value[0])(**value[1]) if isinstance(value, tuple) else value
        for key, value in sizes.items()
    }


# -- batches


def tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (ROWS, length), generator=generator)  # the first few are special


def text(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": tokens(generator), "labels": tokens(generator)}


def plain_text(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": tokens(generator)}


def masked_text(generator: torch.Generator) -> dict[str, Any]:
    """With padding in the input, the same in every row: rows must weigh the same in the loss."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[:, -2:] = 0
    return {"input_ids": tokens(generator), "attention_mask": mask, "labels": tokens(generator)}


def seq2seq(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": tokens(generator), "labels": tokens(generator, LENGTH - 2)}


def pixels(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, SIDE, SIDE, generator=generator)


def classified_images(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": pixels(generator), "labels": torch.randint(LABELS, (ROWS,), generator=generator)}


def images(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": pixels(generator)}


def segmented_images(generator: torch.Generator) -> dict[str, Any]:
    labels = torch.randint(LABELS, (ROWS, SIDE, SIDE), generator=generator)
    return {"pixel_values": pixels(generator), "labels": labels}


def captioned_images(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": pixels(generator), "input_ids": tokens(generator)}


def waves(generator: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 800, generator=generator)}


def clips(generator: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 1, 1920, generator=generator)}


def spectra(generator: torch.Generator) -> dict[str, Any]:
    return {"input_features": torch.randn(ROWS, 16, 40, generator=generator), "labels": tokens(generator)}


# -- changes


def with_running_statistics(model: nn.Module) -> nn.Module:
    """Batch normalization by running statistics: those of a batch differ from those of its slices, in plain PyTorch
    under data parallelism too."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def with_lora(targets: list[str], **options: Any) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, **options)
        with warnings.catch_warnings():  # peft reads a property that transformers has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted = get_peft_model(model, config)  # type: ignore[arg-type]
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros would keep the gradients of A at zero in the first step
                nn.init.normal_(parameter, std=0.1)
        return adapted

    return change


# -- the zoo

DIMS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LM: dict[str, Any] = {**TEXT, **DIMS, "max_position_embeddings": 32}
GROUPED: dict[str, Any] = {**LM, "num_key_value_heads": 2}
BERT: dict[str, Any] = {**LM, "type_vocab_size": 2}
BART: dict[str, Any] = {
    **TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
}  # fmt: skip
IMAGE: dict[str, Any] = {"image_size": SIDE, "num_labels": LABELS}
AUDIO: dict[str, Any] = {
    **DIMS, "vocab_size": VOCAB, "conv_dim": [16, 16, 16], "conv_kernel": [8, 4, 3], "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3,
}  # fmt: skip
EXPERTS: dict[str, Any] = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

add("llama", "decoder", "LlamaForCausalLM", "LlamaConfig", text, **GROUPED)
add("mistral", "decoder", "MistralForCausalLM", "MistralConfig", text, **GROUPED, sliding_window=4)
add("qwen2_tied", "decoder", "Qwen2ForCausalLM", "Qwen2Config", text, **GROUPED, tie_word_embeddings=True)
add("qwen3_tied", "decoder", "Qwen3ForCausalLM", "Qwen3Config", text, **GROUPED, head_dim=8, tie_word_embeddings=True)
add("gemma_tied", "decoder", "GemmaForCausalLM", "GemmaConfig", text, **GROUPED, head_dim=8)
add("gpt2_tied", "decoder", "GPT2LMHeadModel", "GPT2Config", text, **TEXT, n_embd=32, n_layer=2, n_head=4,
    n_positions=32)  # fmt: skip
add("gpt_neox", "decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", text, **LM)
add("opt_tied", "decoder", "OPTForCausalLM", "OPTConfig", text, **TEXT, hidden_size=32, ffn_dim=64,
    num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=16)  # fmt: skip
add("falcon", "decoder", "FalconForCausalLM", "FalconConfig", text, **TEXT, hidden_size=32, num_hidden_layers=2,
    num_attention_heads=4)  # fmt: skip
add("phi", "decoder", "PhiForCausalLM", "PhiConfig", text, **LM)
add("bloom_tied", "decoder", "BloomForCausalLM", "BloomConfig", text, **TEXT, hidden_size=32, n_layer=2, n_head=4)

add("bert", "encoder", "BertForMaskedLM", "BertConfig", masked_text, **BERT)
add("roberta", "encoder", "RobertaForMaskedLM", "RobertaConfig", masked_text, **BERT)
# Its encoder reads the weight of an embedding that is large enough to be a unit.
add("deberta_v2", "encoder", "DebertaV2ForMaskedLM", "DebertaV2Config", text, **BERT, relative_attention=True,
    pos_att_type=["p2c", "c2p"], position_buckets=64, norm_rel_ebd="layer_norm", share_att_key=True)  # fmt: skip
add("albert_one_block", "encoder", "AlbertForMaskedLM", "AlbertConfig", text, **{**BERT, "num_hidden_layers": 4},
    embedding_size=16)  # fmt: skip
add("distilbert", "encoder", "DistilBertForMaskedLM", "DistilBertConfig", text, vocab_size=VOCAB, dim=32,
    hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32)  # fmt: skip
add("modernbert", "encoder", "ModernBertForMaskedLM", "ModernBertConfig", text, **LM, cls_token_id=1, sep_token_id=2,
    global_attn_every_n_layers=2, local_attention=4)  # fmt: skip
# Its encoder calls `layer.forward(...)`, which runs no hook.
add("squeezebert", "encoder", "SqueezeBertForMaskedLM", "SqueezeBertConfig", text, **BERT, embedding_size=32)
# Its layers are reversible: backward runs parts of them again, and a backward inside of backward.
add("reformer", "encoder", "ReformerModelWithLMHead", "ReformerConfig", text, vocab_size=VOCAB, hidden_size=32,
    num_attention_heads=2, attention_head_size=16, feed_forward_size=64, attn_layers=["local", "local"],
    axial_pos_shape=[2, 4], axial_pos_embds_dim=[16, 16], local_attn_chunk_length=4, is_decoder=True,
    max_position_embeddings=32)  # fmt: skip

add("t5_tied", "encoder-decoder", "T5ForConditionalGeneration", "T5Config", seq2seq, **T5)
add("mt5", "encoder-decoder", "MT5ForConditionalGeneration", "MT5Config", seq2seq, **T5, tie_word_embeddings=False)
add("bart", "encoder-decoder", "BartForConditionalGeneration", "BartConfig", seq2seq, **BART)
add("pegasus", "encoder-decoder", "PegasusForConditionalGeneration", "PegasusConfig", seq2seq, **BART)
add("m2m_100", "encoder-decoder", "M2M100ForConditionalGeneration", "M2M100Config", seq2seq, **BART)

add("vit", "vision", "ViTForImageClassification", "ViTConfig", classified_images, **DIMS, **IMAGE, patch_size=8)
add("swin", "vision", "SwinForImageClassification", "SwinConfig", classified_images, **IMAGE, patch_size=4,
    embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)  # fmt: skip
add("convnext", "vision", "ConvNextForImageClassification", "ConvNextConfig", classified_images, **IMAGE,
    hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)  # fmt: skip
add("resnet", "vision", "ResNetForImageClassification", "ResNetConfig", classified_images, num_labels=LABELS,
    embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic",
    change=with_running_statistics)  # fmt: skip
add("segformer", "vision", "SegformerForSemanticSegmentation", "SegformerConfig", segmented_images, num_labels=LABELS,
    num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[4, 2],
    num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=16, change=with_running_statistics)  # fmt: skip
add("detr", "vision", "DetrForObjectDetection", "DetrConfig", images, "logits", num_labels=LABELS, num_queries=4,
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
    backbone_config=("ResNetConfig", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
                                      "layer_type": "basic", "out_features": ["stage2"]}),
    change=with_running_statistics)  # fmt: skip
add("clip", "vision and text", "CLIPModel", "CLIPConfig", captioned_images, "image_embeds text_embeds",
    lr=3e-4, text_config={**LM, "eos_token_id": VOCAB - 1}, vision_config={**DIMS, "image_size": SIDE, "patch_size": 8},
    projection_dim=16)  # fmt: skip

add("wav2vec2", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", waves, "logits", **AUDIO)
add("hubert", "audio", "HubertModel", "HubertConfig", waves, "last_hidden_state", **AUDIO)
add("whisper", "audio", "WhisperForConditionalGeneration", "WhisperConfig", spectra, **BART, num_mel_bins=16,
    max_source_positions=20, max_target_positions=32)  # fmt: skip
# Of one part that must not be split it calls methods other than forward.
add("mimi", "audio", "MimiModel", "MimiConfig", clips, "audio_values", routed=True, num_filters=4, hidden_size=16,
    vector_quantization_hidden_dimension=8, codebook_dim=8, codebook_size=16, num_quantizers=2,
    num_semantic_quantizers=1, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    intermediate_size=32, upsample_groups=16)  # fmt: skip

add("mixtral", "mixture of experts", "MixtralForCausalLM", "MixtralConfig", text, routed=True, **GROUPED,
    num_local_experts=4, num_experts_per_tok=2)  # fmt: skip
add("qwen3_moe", "mixture of experts", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", text, routed=True, **EXPERTS,
    num_experts=4, head_dim=8)  # fmt: skip
add("olmoe", "mixture of experts", "OlmoeForCausalLM", "OlmoeConfig", text, routed=True, **GROUPED, num_experts=4,
    num_experts_per_tok=2)  # fmt: skip
add("switch_transformers", "mixture of experts", "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersConfig", seq2seq, routed=True, **T5, num_experts=2, num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1)  # fmt: skip

add("mamba", "state space", "MambaForCausalLM", "MambaConfig", text, **TEXT, hidden_size=32, num_hidden_layers=2,
    state_size=4)  # fmt: skip
add("mamba2", "state space", "Mamba2ForCausalLM", "Mamba2Config", text, **TEXT, hidden_size=32, num_hidden_layers=2,
    state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4)  # fmt: skip
add("rwkv", "state space", "RwkvForCausalLM", "RwkvConfig", text, **TEXT, hidden_size=32, num_hidden_layers=2,
    attention_hidden_size=32, context_length=32)  # fmt: skip

add("llama_lora", "adapter", "LlamaForCausalLM", "LlamaConfig", text, **GROUPED, lr=1e-2,
    change=with_lora(["q_proj", "v_proj"], task_type="CAUSAL_LM"))  # fmt: skip
add("gpt2_lora_and_whole_modules", "adapter", "GPT2LMHeadModel", "GPT2Config", text, **TEXT, n_embd=32, n_layer=2,
    n_head=4, n_positions=32, lr=1e-2,
    change=with_lora(["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, modules_to_save=["wpe"]))  # fmt: skip
