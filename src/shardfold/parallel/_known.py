"""The plans of models that bring one, and of some that do not.

A model has its own: an attribute ``tensor_plan``, or, as models of transformers have, ``config.base_model_tp_plan`` for
its body and ``_tp_plan`` for its head. A model that peft wrapped has the plan of the one inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardfold.errors import ConfigError
from shardfold.parallel.stream import DROPOUTS

__all__ = ["adapted_words", "divided_of", "is_adapted", "known_plan", "unknown_style"]

Plan = dict[str, Any]

STYLES: Mapping[str, Any] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "vocabulary",
    "embedding_rowwise": "vocabulary",
    "moe_tp_experts": "experts",
    "packed_colwise": ("column", 2),
    "replicated_with_grad_allreduce": "partial",
    "replicate": "replicated",
    "sequence_parallel": "sequence",
}
"""Words for the styles of transformers."""

HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")

EXPERT: Mapping[str, str] = {
    "w1": "column",
    "w3": "column",
    "w2": "row",
    "gate_proj": "column",
    "up_proj": "column",
    "down_proj": "row",
}
"""Names of the linear layers of an expert that is a module."""

KNOWN: Mapping[str, tuple[Plan, Mapping[str, Sequence[str]]]] = {
    "gpt2": (
        {
            "*h.*.attn.c_attn": ("column", 3),
            "*h.*.attn.c_proj": "row",
            "*h.*.mlp.c_fc": "column",
            "*h.*.mlp.c_proj": "row",
        },
        {"*h.*.attn": ("split_size", "num_heads")},
    ),
    "bert": (
        {
            "*layer.*.attention.self.query": "column",
            "*layer.*.attention.self.key": "column",
            "*layer.*.attention.self.value": "column",
            "*layer.*.attention.output.dense": "row",
            "*layer.*.intermediate.dense": "column",
            "*layer.*.output.dense": "row",
        },
        {"*layer.*.attention.self": ("num_attention_heads", "all_head_size")},
    ),
    "t5": (
        {
            "*block.*.layer.*Attention.[qkv]": "column",
            "*block.*.layer.*Attention.o": "row",
            "*block.*.layer.*.relative_attention_bias": "column",
            "*block.*.layer.*.DenseReluDense.wi*": "column",
            "*block.*.layer.*.DenseReluDense.wo": "row",
        },
        {"*block.*.layer.*Attention": ("n_heads", "inner_dim")},
    ),
    "vit": (
        {
            "*layers.*.attention.[qkv]_proj": "column",
            "*layers.*.attention.o_proj": "row",
            "*layers.*.mlp.fc1": "column",
            "*layers.*.mlp.fc2": "row",
        },
        {},
    ),
}
"""By ``config.model_type``: words, and numbers of a module's own that are divided."""


BODIES: Mapping[str, tuple[str, str]] = {"gpt2": ("h", "ln_f"), "bert": ("encoder.layer", "{last}.output.LayerNorm")}
"""By ``config.model_type``: the blocks in a body, and the norm behind the last one."""
OTHER_BODIES = ("layers", "norm")


def known_plan(model: nn.Module, *, sequence_parallel: bool = False) -> Plan | None:
    """The plan of a model. None: it has none.
    ``sequence_parallel``: with words for what is between columns and rows.

    Raises:
        ConfigError: what is between is not known.
    """
    path, inner = _inside(model)
    if path:
        found = known_plan(inner, sequence_parallel=sequence_parallel)
        return None if found is None else {f"{path}.{pattern}": word for pattern, word in found.items()}
    own: Any = getattr(model, "tensor_plan", None)
    if own is not None:
        return dict(own)
    found = _plan_of_transformers(model)
    if found is None or not sequence_parallel:
        return found
    return {**found, **_between(model, found)}


def divided_of(model: nn.Module) -> Mapping[str, Sequence[str]]:
    """What modules of a known model keep that is divided with the columns inside of them, by patterns of paths."""
    _, divided = KNOWN.get(getattr(getattr(model, "config", None), "model_type", ""), ({}, {}))
    return divided


def is_adapted(module: nn.Module | None) -> bool:
    """Whether it is a layer of peft around another layer."""
    return hasattr(module, "adapter_layer_names") and isinstance(getattr(module, "base_layer", None), nn.Module)


def adapted_words(path: str, layer: Any, word: str) -> Mapping[str, str]:
    """Words of the modules inside of a layer of peft with matrices of LoRA, ``W x + B A x``, of which the plan says
    ``word``: B has columns where W has, and A has rows.

    Raises:
        ConfigError: how to cut it is not known.
    """
    if word == "replicated":
        return {}
    matrices = ("base_layer.", "lora_A.", "lora_B.")
    others = [name for name, _ in layer.named_parameters() if not name.startswith(matrices)]
    if others or getattr(layer, "lora_variant", None) or not hasattr(layer, "lora_A"):
        more = f" ({others[0]})" if others else ""
        raise ConfigError(
            f"Parallel(tensor=...): {path!r} is {word!r} and has an adapter that is more than the matrices of LoRA"
            f"{more}, which cannot be cut: give such layers plain LoRA, or leave the axis of tensor out."
        )
    along = {"column": "lora_B", "row": "lora_A"}.get(word)
    found = {f"{path}.base_layer": word}
    if along is not None:
        found |= {f"{path}.{along}.{name}": word for name in getattr(layer, along)}
    return found


def _inside(model: nn.Module) -> tuple[str, nn.Module]:
    """The path and the module of the model that peft wrapped; of another, the model itself, at ``""``."""
    base: Any = getattr(model, "get_base_model", None)
    inner = base() if callable(base) else model
    return next(((path, module) for path, module in model.named_modules() if module is inner), ("", model))


def unknown_style(model: nn.Module) -> tuple[str, str] | None:
    """A style for which there is no word, and its pattern, of what the plan of transformers says of the model."""
    said: Mapping[str, str] = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    return next(((style, pattern) for pattern, style in said.items() if style not in STYLES), None)


def _plan_of_transformers(model: nn.Module) -> Plan | None:
    """None: it has none that can be followed."""
    config: Any = getattr(model, "config", None)
    kind: Any = getattr(config, "model_type", None)
    if kind in KNOWN:
        return {**KNOWN[kind][0], **_ends(model)}
    body = getattr(config, "base_model_tp_plan", None)
    if not body:
        return None
    prefix = _prefix(model)
    plan = _of_styles(model, {f"{prefix}{pattern}": style for pattern, style in body.items()})
    if not plan and plan is not None:  # it is another model than its config's
        return None
    norms = _norms_of_heads(model, plan) if plan is not None else None
    return None if plan is None or norms is None else {**plan, **norms, **_ends(model)}


def _of_styles(model: nn.Module, said: Mapping[str, str]) -> Plan | None:
    """Words for the styles of a plan of transformers. It is of all models of a kind: what this one lacks is left out.
    None: something has a style that there is no word for."""
    modules = dict(model.named_modules())
    plan: Plan = {}
    for pattern, style in said.items():
        matched = [path for path in modules if fnmatchcase(path, pattern)]
        if style not in STYLES:
            if matched:
                return None
            continue
        if STYLES[style] == "experts":
            for path in matched:
                plan.update(_of_experts(path, modules[path]))
        elif matched:  # not parameters, as of experts, which the word of their module says
            plan[pattern] = STYLES[style]
    return plan


def _norms_of_heads(model: nn.Module, plan: Plan) -> Plan | None:
    """Words for norms of queries and keys, which plans of transformers leave out for some models: each rank's works on
    its own heads. None: one has other weights for each head."""
    modules = dict(model.named_modules())
    found: Plan = {}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        head = getattr(modules.get(parent), "head_dim", None)
        named = any(fnmatchcase(path, pattern) for pattern in plan)
        if name not in HEAD_NORMS or named or head is None or not list(module.parameters()):
            continue
        cut = [plan[pattern] for pattern in plan if fnmatchcase(f"{parent}.{name[0]}_proj", pattern)]
        if cut[:1] != ["column"]:
            continue
        if any(p.shape != (head,) for p in module.parameters()):
            return None
        found[path] = "partial"
    return found


def _of_experts(path: str, module: nn.Module) -> Plan:
    """Of experts in parameters of their own, or each a module of linear layers."""
    if not isinstance(module, nn.ModuleList):
        return {path: "experts"}
    inside = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    return {f"{path}.*.{name}": word for name, word in EXPERT.items() if name in inside}


def _prefix(model: nn.Module) -> str:
    """Of the paths in the body."""
    base = getattr(model, "base_model_prefix", "")
    return f"{base}." if isinstance(base, str) and base and isinstance(getattr(model, base, None), nn.Module) else ""


def _between(model: nn.Module, plan: Plan) -> Plan:
    """Words for what ``plan`` does not name: sequences are cut before the first block of the body, and whole again
    behind its last norm; what is outside works on whole ones.

    Raises:
        ConfigError: the body has no such blocks, or a block has a layer that may look at several tokens.
    """
    prefix, modules = _prefix(model), dict(model.named_modules())
    blocks, norm = BODIES.get(getattr(model.config, "model_type", ""), OTHER_BODIES)
    inside: Any = modules.get(f"{prefix}{blocks}")
    count = len(inside) if isinstance(inside, nn.ModuleList) else 0
    last = f"{prefix}{norm.format(last=f'{blocks}.{count - 1}')}"
    if not count or last not in modules:
        raise ConfigError(
            f"Parallel(sequence_parallel=True): where {type(model).__name__} has its blocks and its last norm is not "
            "known; give a plan with the words 'scattered' for the first block, 'collected' for attention, 'sequence' "
            "for norms and 'joined' for the last one."
        )
    named = {
        path: next((word for pattern, word in plan.items() if fnmatchcase(path, pattern)), None) for path in modules
    }
    around = {path.rpartition(".")[0] for path, word in named.items() if word == "column" or isinstance(word, tuple)}
    found: Plan = {}
    for path, module in modules.items():
        if named[path] is not None or not path:
            continue
        owns, kind = bool(module._parameters), type(module).__name__
        if path in (f"{prefix}{blocks}.0", last):
            found[path] = "joined" if path == last else "scattered"
        elif not path.startswith(f"{prefix}{blocks}."):
            found.update({path: "replicated"} if owns else {})
        elif path in around and not owns:
            found[path] = "collected"
        elif isinstance(module, DROPOUTS) or (owns and "norm" in kind.lower()):
            found[path] = "sequence"
        elif owns:
            raise ConfigError(
                f"Parallel(sequence_parallel=True): {path!r} ({kind}) may look at several tokens; give a plan with a "
                "word for it, as 'sequence' if it works on each token by itself."
            )
    return found


def _ends(model: nn.Module) -> Plan:
    """The embedding of words and the head, where the model has both in the way of transformers, and what is tied to
    them."""
    weights: set[int] = set()
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        get = getattr(model, getter, None)
        module = get() if callable(get) else None
        if isinstance(module, (nn.Embedding, nn.Linear)):
            weights.add(id(module.weight))
    return {
        path: "vocabulary"
        for path, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module.weight) in weights
    }
