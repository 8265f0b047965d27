"""What is trained instead of all parameters: peft's LoRA and prefix, the last layers, or new blocks.

peft wraps a model that has no memory. The first values of an adapter are those that peft itself gives: each layer is
made once, alone and with memory, peft puts its adapter around it, and what came out is what the engine is given. So the
variants that decompose a layer's weight (PiSSA, OLoRA, LoftQ) need the memory of one layer, on any layout.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError, did_you_mean
from shardfold.sharding.materialize import meta_init
from shardfold.tools.tune._loftq import loftq
from shardfold.tools.tune.config import Adapter
from shardfold.tools.tune.merge import MergedTensors
from shardfold.tools.tune.models import (
    FolderTensors,
    FreshTensors,
    ModelPlace,
    blocks_of,
    hollow_model,
    of_block,
    quiet,
    seeded,
)

__all__ = [
    "BASE_CHANGES",
    "AdaptedTensors",
    "ExpandedTensors",
    "adapted",
    "beginning",
    "expanded_config",
    "merged_tensors",
    "optimizer_groups",
    "without_adapter",
]

BASE_CHANGES = ("pissa", "olora", "loftq")
"""Variants that take their first matrices out of the base, whose weights are others then."""

NAME = "default"  # peft's, of an adapter

OUTPUTS = ("o_proj", "out_proj", "c_proj", "down_proj", "fc2", "dense_4h_to_h", "wo", "w2")
"""Layers that write into the residual stream, as decoders call them."""


def lora_config(adapter: Adapter, model: nn.Module, task: str) -> Any:
    """peft's config of these settings."""
    from peft import LoraConfig

    variant = adapter.variant
    targets: Any = adapter.targets if adapter.targets == "all-linear" else adapter.targets.split(",")
    last = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in targets if isinstance(targets, list) else ():
        if name not in last and not any(path.endswith(f".{name}") for path, _ in model.named_modules()):
            raise ConfigError(f"targets: the model has no layer {name!r}.{did_you_mean(name, last)}")
    modules = [name for name in adapter.modules.split(",") if name]
    if task == "score" and "score" not in modules:
        modules.append("score")
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=2 * adapter.rank if adapter.alpha is None else adapter.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=adapter.dropout,
        target_modules=targets,
        use_rslora=variant == "rslora",
        use_dora=variant == "dora",
        init_lora_weights=variant if variant in ("pissa", "olora") else True,  # pyright: ignore[reportArgumentType]
        modules_to_save=modules or None,
        task_type="SEQ_CLS" if task == "score" else "CAUSAL_LM",
    )


def adapted(model: nn.Module, adapter: Adapter | None, task: str, base: Path) -> nn.Module:
    """The model, which has no memory, with what is trained of it.

    Args:
        model: of transformers.
        adapter: None: everything is trained.
        task: ``"lm"`` or ``"score"``.
        base: the folder that peft's config is to name.

    Returns:
        peft's wrapper, or the model itself.

    Raises:
        ConfigError: the adapter does not go with the model.
    """
    if adapter is None:
        return model
    if adapter.kind in ("freeze", "expand"):
        _train_blocks(model, adapter, task)
        return model
    from peft import PrefixTuningConfig, get_peft_model

    if adapter.kind == "lora":
        config = lora_config(adapter, model, task)
    else:
        if task == "score":
            raise ConfigError("a reward model is trained whole, with --lora, --freeze or --expand: not with a prefix.")
        config = PrefixTuningConfig(
            num_virtual_tokens=adapter.pre_seq_len, prefix_projection=adapter.prefix_projection, task_type="CAUSAL_LM"
        )
    with meta_init(), quiet():
        made = get_peft_model(model, config, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    made.peft_config[NAME].base_model_name_or_path = str(base.resolve())
    if adapter.variant == "dora":
        _with_quick_dora(made)
    return made


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Norms of the rows of ``weight + scaling * b @ a``, ``(out,)``, by the norms and products of the parts: no matrix
    of that size is made. They are in fp32, of fp64 in that.

    Args:
        weight: ``(out, in)``.
        a: ``(rank, in)``.
        b: ``(out, rank)``.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    wide_a, wide_b = a.to(wide), b.to(wide)
    across = ((weight @ a.to(weight.dtype).T).to(wide) * wide_b).sum(1)
    change_squares = ((wide_b @ (wide_a @ wide_a.T)) * wide_b).sum(1)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    return (squares + 2 * scaling * across + scaling**2 * change_squares).clamp(min=0).sqrt()


def _with_quick_dora(model: nn.Module) -> None:
    """DoRA needs the norms of a whole weight with its change in each forward, for which peft forms both; here they are
    found from the factors, and the sum of both outputs is scaled at once."""
    from peft.tuners.lora.variants import DoraLinearVariant

    class QuickDora(DoraLinearVariant):
        @staticmethod
        def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
            base, scaling = module.get_base_layer(), module.scaling[active_adapter]
            a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
            dropout = module.lora_dropout[active_adapter]
            if isinstance(dropout, nn.Identity) or not module.training:
                rest = base.bias
                plain = result if rest is None else result - rest
            else:
                x = dropout(x)
                plain = nn.functional.linear(x, base.weight)
                rest = result - plain
            with torch.no_grad():  # norms count as constants (arXiv 2402.09353, section 4.3)
                norms = row_norms(base.weight, a.weight, b.weight, scaling)
            factor = (module.lora_magnitude_vector[active_adapter].weight / norms).to(plain.dtype)
            scaled = factor * torch.add(plain, b(a(x)), alpha=scaling)
            return scaled if rest is None else scaled + rest

    for module in model.modules():
        variants = getattr(module, "lora_variant", {})
        for name, variant in variants.items():
            if type(variant) is DoraLinearVariant and not module.fan_in_fan_out:
                variants[name] = QuickDora()


def _train_blocks(model: nn.Module, adapter: Adapter, task: str) -> None:
    path, blocks = blocks_of(model)
    count = len(blocks)
    if adapter.kind == "freeze":
        if adapter.layers > count:
            raise ConfigError(f"freeze leaves {adapter.layers} layers trained, but the model has {count}.")
        trained = set(range(count - adapter.layers, count))
    else:
        trained = {number for number, new in enumerate(new_blocks(count - adapter.layers, adapter.layers)) if new}
    for name, parameter in model.named_parameters():
        place = of_block(name, path)
        head = task == "score" and name.startswith("score.")
        parameter.requires_grad_(head or (place is not None and place[0] in trained))


def new_blocks(old: int, more: int) -> list[bool]:
    """Of each block of an expanded model whether it is new: one behind each of ``more`` groups of old ones.

    Raises:
        ConfigError: old blocks do not divide into so many groups.
    """
    if old < 1 or old % more:
        raise ConfigError(
            f"expand puts a block behind each of {more} equal groups of the model's {old}: it is no divisor."
        )
    return [new for _ in range(more) for new in (*[False] * (old // more), True)]


def expanded_config(config: Any, more: int) -> Any:
    """transformers' config with so many more blocks (LLaMA Pro, arXiv 2401.02415)."""
    config = copy.deepcopy(config)
    count = config.num_hidden_layers
    news = new_blocks(count, more)
    olds = [number - sum(news[: number + 1]) for number in range(len(news))]  # a new one is made of the one before it
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == count and name.startswith(("layer", "mlp_layer", "no_rope")):
            setattr(config, name, [value[old] for old in olds])
    config.num_hidden_layers = count + more
    return config


class ExpandedTensors(Mapping[str, Tensor]):
    """Values of an expanded model: new blocks are the one before them, and what they add to the stream is zero.

    Args:
        given: of the model as it was.
        model: the expanded one.
        more: how many blocks are new.

    Raises:
        ModelError: no layer of a block is known to write into the residual stream.
    """

    def __init__(self, given: Mapping[str, Tensor], model: nn.Module, more: int) -> None:
        self._given = given
        self._path, blocks = blocks_of(model)
        self._news = new_blocks(len(blocks) - more, more)
        outputs = {name.rpartition(".")[2] for name, _ in blocks[0].named_modules()} & set(OUTPUTS)
        if not outputs:
            raise ModelError(
                f"a {type(blocks[0]).__name__} has none of the layers {', '.join(OUTPUTS)}: expand does not know what "
                "to set to zero."
            )
        self._names: dict[str, tuple[str, bool]] = {}
        for name, _ in model.named_parameters(remove_duplicate=False):
            place = of_block(name, self._path)
            source, zero = name, False
            if place is not None:
                number, inner = place
                source = f"{self._path}.{number - sum(self._news[: number + 1])}.{inner}"
                zero = self._news[number] and inner.split(".")[-2] in outputs
            if source in given:
                self._names[name] = source, zero

    def __getitem__(self, name: str) -> Tensor:
        source, zero = self._names[name]
        value = self._given[source]
        return torch.zeros_like(value) if zero else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def clean(name: str) -> str:
    """The name that a parameter had before peft wrapped its module."""
    name = re.sub(rf"\.(original_module|modules_to_save\.{NAME})\.", ".", name)
    return name.replace(".base_layer.", ".")


class LoneLayers:
    """Layers of a model, each made alone and with memory, with peft's adapter around it.

    Args:
        model: that peft has wrapped, without memory.
        given: values of the base.
        seed: of the first values.
        finish: changes a layer that peft has made; None: nothing does.
    """

    def __init__(
        self, model: Any, given: Mapping[str, Tensor], seed: int, finish: Callable[[Any], None] | None = None
    ) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        config = copy.copy(model.peft_config[NAME])
        config.target_modules, config.modules_to_save, config.exclude_modules = {"layer"}, None, None
        config.inference_mode = False
        self._config, self._given, self._seed, self._finish = config, given, seed, finish
        self._hollow = {
            path: copy.deepcopy(module.get_base_layer())
            for path, module in model.get_base_model().named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        self._last: tuple[str, nn.Module] | None = None

    def __contains__(self, path: str) -> bool:
        return path in self._hollow

    def make(self, path: str) -> nn.Module:
        """The layer, whose parameters have their first values."""
        if self._last is None or self._last[0] != path:
            self._last = path, self._made(path)
        return self._last[1]

    def _made(self, path: str) -> nn.Module:
        from peft import inject_adapter_in_model

        layer = copy.deepcopy(self._hollow[path]).to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(self._given[f"{path}.{name}"])
        holder = nn.Module()
        holder.layer = layer
        with seeded(self._seed, path), quiet():
            inject_adapter_in_model(self._config, holder)
        made = holder.get_submodule("layer")
        if self._finish is not None:
            self._finish(made)
        return made


def _round_base(format: str, layer: Any) -> None:
    """Makes of a layer what LoftQ begins with."""
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    weight = layer.get_base_layer().weight
    with torch.no_grad():
        for parameter, value in zip((weight, a, b), loftq(weight, len(a), layer.scaling[NAME], format), strict=True):
            parameter.copy_(value)


class AdaptedTensors(Mapping[str, Tensor]):
    """First values of a model that peft has wrapped, by its names: the base's, and the adapter's.

    Args:
        model: that peft has wrapped, without memory.
        given: values of the base, by the names of the base.
        adapter: the settings that peft's config was made of.
        seed: of the adapter's.
        resting: the format in which the base is to rest; None: it is not rounded, but by LoftQ as nf4.
    """

    def __init__(
        self, model: Any, given: Mapping[str, Tensor], adapter: Adapter, seed: int, resting: str | None = None
    ) -> None:
        self._given, self._seed = given, seed
        self._config = model.peft_config[NAME]
        self._changes = adapter.kind == "lora" and adapter.variant in BASE_CHANGES
        lora = adapter.kind == "lora"
        finish = partial(_round_base, resting or "nf4/64") if adapter.variant == "loftq" else None
        self._layers = LoneLayers(model, given, seed, finish) if lora else None
        self._makes_prefix = None if lora else partial(type(model.prompt_encoder[NAME]), self._config)
        base: dict[int, str] = {}
        for name, parameter in model.get_base_model().named_parameters(remove_duplicate=False):
            if id(parameter) not in base or clean(name) in given:  # of tied ones, the name that has a value
                base[id(parameter)] = name
        self._places: dict[str, tuple[str, str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            inner = base.get(id(parameter))
            if inner is None:  # of a prefix
                self._places[name] = "", name.partition(f".{NAME}.")[2]
            elif (place := self._of_layer(inner)) is not None:
                self._places[name] = place
            elif clean(inner) in given:
                self._places[name] = "", clean(inner)

    def _of_layer(self, inner: str) -> tuple[str, str] | None:
        """The layer and the name in it of a parameter that is, or was changed by, an adapter's."""
        parts = inner.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path, own = ".".join(parts[:end]), ".".join(parts[end:])
            if self._layers is not None and path in self._layers:
                return (path, own) if self._changes or not own.startswith("base_layer.") else None
        return None

    @property
    def layers(self) -> LoneLayers | None:
        """Of LoRA; None for a prefix."""
        return self._layers

    def base(self) -> Mapping[str, Tensor]:
        """Values of the base alone, by the names of the base, as the adapter's variant has changed them."""
        prefix = "base_model.model."
        return RenamedTensors(self, {clean(name.removeprefix(prefix)): name for name in self if ".lora_" not in name})

    def __getitem__(self, name: str) -> Tensor:
        path, own = self._places[name]
        if path:
            assert self._layers is not None
            return self._layers.make(path).get_parameter(own).detach()
        if own in self._given:
            return self._given[own]
        assert self._makes_prefix is not None
        with seeded(self._seed, "prefix"):
            return self._makes_prefix().get_parameter(own).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def merged_tensors(model: nn.Module, place: ModelPlace, task: str) -> Mapping[str, Tensor]:
    """Values of the model at a place, which has no memory, by its names; adapters are merged."""
    given: Mapping[str, Tensor] = FolderTensors(place.folder, model)
    if place.adapter is not None:
        given = MergedTensors(model, given, place.adapter)
    return given


class RenamedTensors(Mapping[str, Tensor]):
    """Some tensors of a mapping by other names; ``names``: the mapping's, by the new one."""

    def __init__(self, given: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._given, self._from = given, names

    def __getitem__(self, name: str) -> Tensor:
        return self._given[self._from[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._from)

    def __len__(self) -> int:
        return len(self._from)


class JoinedTensors(Mapping[str, Tensor]):
    """The tensors of several mappings; of a name that several have, the first's."""

    def __init__(self, *parts: Mapping[str, Tensor]) -> None:
        self._of = {name: part for part in reversed(parts) for name in part}

    def __getitem__(self, name: str) -> Tensor:
        return self._of[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


def beginning(
    model: nn.Module, place: ModelPlace, adapter: Adapter | None, task: str, seed: int, resting: str | None = None
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """The model with its adapter, and what an engine is given as ``Init(weights=...)``.

    Args:
        model: without memory, already with the blocks that ``expand`` adds.
        place: where its values are.
        resting: the format in which frozen parameters are to rest; None: their own.
    """
    if adapter is not None and adapter.kind == "expand":
        before = hollow_model(copy.deepcopy(place.config), task)
        given: Mapping[str, Tensor] = ExpandedTensors(merged_tensors(before, place, task), model, adapter.layers)
    else:
        given = merged_tensors(model, place, task)
    given = JoinedTensors(given, FreshTensors(model, given, seed))
    wrapped = adapted(model, adapter, task, place.folder)
    if wrapped is model or adapter is None:
        return model, given
    return wrapped, AdaptedTensors(wrapped, given, adapter, seed, resting)


def optimizer_groups(model: Any, adapter: Adapter, kind: type, lr: float, decay: float, **options: Any) -> Any:
    """An optimizer with LoRA+'s groups of rates, which peft makes (arXiv 2402.12354)."""
    from peft.optimizers import create_loraplus_optimizer

    made = create_loraplus_optimizer(
        model=model,
        optimizer_cls=kind,
        lr=lr,
        loraplus_lr_ratio=adapter.lr_ratio,  # pyright: ignore
        loraplus_weight_decay=decay,
        **options,
    )
    made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return made


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Inside, the model is its base: LoRA adds nothing, and there is no prefix.

    What is trained stays what it is: peft's own ``disable_adapter`` of LoRA says that adapters need no gradients, which
    an engine would take for a change of the model.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if model.peft_config[NAME].is_prompt_learning:
        with model.disable_adapter():
            yield
        return
    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer | ModulesToSaveWrapper)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
