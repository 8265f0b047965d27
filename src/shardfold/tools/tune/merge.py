"""An adapter of peft merged into its base in fp32, some rows at a time, rounded once and written as transformers does.

The mathematics are peft's own, of every kind of adapter that it can merge. It wraps a model without memory, which gets
the adapter's tensors; when the tensor of a layer is asked for, the layer is given its base's values and one call of
``merge()``. Rows of a linear layer have nothing to do with each other, in LoRA and in DoRA, so such layers are merged
by parts of :data:`AT_ONCE`: a merge needs the adapter and one tensor in memory, in the dtype that is asked for; the
base's stays in its mapped file. Other layers are merged as a whole.

A head that is tied to the embedding cannot have a sum that the embedding has not: where an adapter changes one of them,
both are written, and the config says that they are no longer tied.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.checkpoint import ExportReport, write_folder
from shardfold.checkpoint.stored import Later, Stored, of_safetensors
from shardfold.errors import ConfigError
from shardfold.plan.formats import FORMATS, format_named
from shardfold.sharding.materialize import meta_init
from shardfold.tools.tune.models import FolderTensors, ModelPlace, hollow_model, quiet, read_object

__all__ = ["MergeReport", "MergedTensors", "merge"]

ADAPTER = "adapter_model.safetensors"
NAME = "default"  # peft's, of an adapter
AT_ONCE = 1 << 19
"""Elements of a layer that are merged together: 2 MiB in fp32, of which DoRA needs some more."""
BY_ROW = ("lora_B", "lora_magnitude_vector", "base_layer")
"""What has a row for each output of a linear layer."""
TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "spiece.model",
    "sentencepiece*.model",
)
BESIDE = ("*processor_config.json",)


class MergedTensors(Mapping[str, Tensor]):
    """Values of a base with an adapter of peft merged into them, by the base's names: fp32 of what the adapter changes,
    and as they are kept of everything else.

    Args:
        model: the base, without memory; it stays as it is.
        given: its values.
        adapter: a folder of peft's.

    Raises:
        ConfigError: the adapter cannot be merged, or its tensors are not those that its config says.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor], adapter: Path) -> None:
        self._given = given
        ties: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            ties.setdefault(id(parameter), []).append(name)
        self._names = {name: names for names in ties.values() for name in names}
        base = _wrapped(copy.deepcopy(model), adapter)
        self._layers, self._saved = _parts(base, adapter)

    def changed(self, name: str) -> bool:
        """Whether the adapter may change that parameter."""
        path, _, own = name.rpartition(".")
        if path in self._layers:
            base: Any = self._layers[path]
            return own in dict(base.get_base_layer().named_parameters())
        return path in self._saved

    @property
    def untied(self) -> list[str]:
        """Names under which a tied parameter has values of its own."""
        groups = {tuple(names) for names in self._names.values() if len(names) > 1}
        return [name for names in groups if any(map(self.changed, names)) for name in names]

    def tied_with(self, name: str) -> list[str]:
        """All names of a parameter."""
        return self._names.get(name, [name])

    def base(self, name: str) -> Tensor:
        """The value without the adapter."""
        for other in (name, *self.tied_with(name)):
            if other in self._given:
                return self._given[other]
        raise KeyError(name)

    def __getitem__(self, name: str) -> Tensor:
        return self.rounded(name, torch.float32) if self.changed(name) else self.base(name)

    def rounded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The value in a dtype."""
        if not self.changed(name):
            return self.base(name).to(dtype)
        path, _, own = name.rpartition(".")
        if path in self._saved:
            return self._saved[path].get_parameter(own).detach().to(dtype)
        layer: Any = self._layers[path]
        given = {  # a bias may be the adapter's
            inner: value.detach() if not value.is_meta else self.base(f"{path}.{inner}")
            for inner, value in layer.get_base_layer().named_parameters(recurse=False)
        }
        if not _has_rows(layer):
            return self._merged(copy.deepcopy(layer), given, own).to(dtype)
        found = torch.empty(given[own].shape, dtype=dtype)
        step = max(1, AT_ONCE // max(1, given["weight"].shape[1]))
        for start in range(0, len(found), step):
            rows = slice(start, start + step)
            some = {inner: value[rows] for inner, value in given.items()}
            found[rows] = self._merged(_some_rows(layer, rows), some, own)
        return found

    @staticmethod
    def _merged(layer: Any, given: Mapping[str, Tensor], own: str) -> Tensor:
        """What peft makes of a layer's values; the layer is changed."""
        base = layer.get_base_layer()
        for name, value in given.items():
            base.register_parameter(name, nn.Parameter(value.to(torch.float32, copy=True), requires_grad=False))
        with torch.no_grad():
            layer.float().merge()
        return base.get_parameter(own).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._given, *filter(self.changed, self._names)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _wrapped(model: nn.Module, adapter: Path) -> nn.Module:
    """The model with peft's layers, whose own tensors have memory and the adapter's values."""
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    config: Any = PeftConfig.from_pretrained(str(adapter))
    if config.is_prompt_learning:
        raise ConfigError(
            f"the adapter in {str(adapter)!r} is of the type {config.peft_type.value}: a prefix is no change of "
            "weights, so it cannot be merged; load it beside its base with peft."
        )
    if getattr(config, "trainable_token_indices", None):
        raise ConfigError(
            f"the adapter in {str(adapter)!r} trains single tokens (trainable_token_indices): merge it with peft."
        )
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False  # the values come from the file
    config.inference_mode = True
    theirs = {id(parameter) for parameter in model.parameters()}
    with meta_init(), quiet():
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)  # pyright: ignore[reportArgumentType]
    tensors, own = load_file(adapter / ADAPTER), set[str]()
    for path, module in wrapped.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in theirs or f"{path}.{name}" in tensors:  # a bias of the base may be trained
                own.add(f"{path}.{name}")
                empty = torch.empty(parameter.shape, dtype=torch.float32)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    try:
        found = set_peft_model_state_dict(wrapped, tensors)
    except (KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"{str(adapter / ADAPTER)!r} does not fit its base: {first}") from None
    wrong = [f"has {name!r}, which its config does not say" for name in found.unexpected_keys]
    wrong += [f"has no {name!r}" for name in found.missing_keys if name in own]
    if wrong:
        raise ConfigError(f"{str(adapter / ADAPTER)!r} {wrong[0]}{f', and {len(wrong) - 1} more' * (len(wrong) > 1)}.")
    return wrapped.get_base_model()


def _has_rows(layer: Any) -> bool:
    """Whether outputs of a layer are merged each by itself."""
    from peft.tuners.lora.layer import Linear
    from peft.tuners.lora.variants import DoraLinearVariant

    variants = layer.lora_variant.values() if type(layer) is Linear else ()
    plain = type(layer) is Linear and type(layer.get_base_layer()) is nn.Linear and not layer.fan_in_fan_out
    return plain and all(isinstance(each, DoraLinearVariant) for each in variants)


def _some_rows(layer: nn.Module, rows: slice) -> nn.Module:
    """The layer of some outputs, which shares its values with the whole."""
    parts: dict[int, Any] = {}
    for name, value in layer.named_parameters():
        by_row = name.startswith(BY_ROW)
        parts[id(value)] = nn.Parameter(value.detach()[rows], requires_grad=False) if by_row else value
    return copy.deepcopy(layer, parts)


def _parts(base: nn.Module, adapter: Path) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The outermost of peft's layers by the paths of what they wrap, and the modules that were trained whole."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers: dict[str, nn.Module] = {}
    saved: dict[str, nn.Module] = {}
    for path, module in base.named_modules():
        if any(path.startswith(f"{outer}.") for outer in (*layers, *saved)):
            continue
        if isinstance(module, BaseTunerLayer):
            assert isinstance(module, nn.Module)
            if type(module).__name__ == "ParamWrapper":
                raise ConfigError(
                    f"the adapter in {str(adapter)!r} is of parameters that are no layers (target_parameters): merge "
                    "it with peft."
                )
            layers[path] = module
        elif isinstance(module, ModulesToSaveWrapper):
            saved[path] = module.modules_to_save[NAME]
    return layers, saved


@dataclass(frozen=True)
class MergeReport:
    """What was merged and written.

    Attributes:
        written: the folder.
        layers: parameters that the adapter changed.
        untied: names of parameters that were tied and are no longer.
        resting: the format in which the base rested beside the adapter; empty: its own dtype.
        error: how far the weights of adapted layers in that format are from those that were merged into, root of the
            mean square over that of the weights.
    """

    written: ExportReport
    layers: int
    untied: tuple[str, ...] = ()
    resting: str = ""
    error: float = 0.0

    def __str__(self) -> str:
        said = f"{self.written}; {self.layers} of them merged in fp32 and rounded once"
        if self.untied:
            said += f"\n{' and '.join(self.untied)} differ now: tie_word_embeddings is false"
        if self.resting:
            said += (
                f"\nThe adapter was trained beside a base in {self.resting}, whose weights are {self.error:.2%} away "
                "from these: answers may differ by that."
            )
        return said


def merge(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> MergeReport:
    """Writes a base with an adapter merged into it, as a folder of transformers with config, tokenizer, chat template
    and a generation config that ends where the tokenizer's turns do.

    One tensor is in memory at a time, as it is written, and the adapter; the base is read from mapped files.

    Args:
        source: a run of ``shardfold tune`` with an adapter, or an adapter of peft, whose config names the base.
        target: a folder that does not exist yet.
        dtype: of what is written; None: of each tensor as the base has it.
        shard_bytes: of a file, at most, unless one tensor has more.
        tick: called with the bytes done so far and those of all, every few MiB.

    Raises:
        ConfigError: the adapter cannot be merged, or does not fit its base.
        CheckpointError: the target exists, or the disk is full; nothing is left of what was written.
    """
    place = ModelPlace.find(Path(source))
    if place.adapter is None:
        raise ConfigError(f"{str(source)!r} has no adapter to merge.")
    if getattr(place.config, "quantization_config", None):
        raise ConfigError(
            f"the base in {str(place.folder)!r} is quantized (quantization_config in its config.json), and a sum would "
            "be rounded to its codes: name the model that it was made of in the adapter's base_model_name_or_path."
        )
    said = read_object(place.adapter / "adapter_config.json")
    task = "score" if said.get("task_type") == "SEQ_CLS" else "lm"
    model = hollow_model(copy.deepcopy(place.config), task)
    given = FolderTensors(place.folder, model)
    values = MergedTensors(model, given, place.adapter)
    stored = _stored(place.folder, given, values, dtype)
    resting, error = _resting(place.adapter, values)
    files = _files(place, dtype, tied=not values.untied)
    written = write_folder(stored, target, files, shard_bytes=shard_bytes, tick=tick)
    return MergeReport(written, sum(map(values.changed, stored.tensors)), tuple(values.untied), resting, error)


def _stored(folder: Path, given: FolderTensors, values: MergedTensors, dtype: torch.dtype | None) -> Stored:
    """What is written, in the order of the base's files; what is no parameter of the model stays as it is."""
    stored = of_safetensors(folder)
    names = given.stored_names()
    tensors: dict[str, Later] = {}
    for kept, later in stored.tensors.items():
        name = names.get(kept)
        if name is None or not values.changed(name):
            tensors[kept] = later.cast(dtype)
        else:
            tensors[kept] = _rounded(name, values, later.shape, dtype or later.dtype)
    have = set(names.values())
    kept_as = {name: kept for kept, name in names.items()}
    for name in values.untied:
        if name not in have:
            like = next(stored.tensors[kept_as[n]] for n in values.tied_with(name) if n in kept_as)
            tensors[name] = _rounded(name, values, like.shape, dtype or like.dtype)
    return Stored(tensors)


def _rounded(name: str, values: MergedTensors, shape: tuple[int, ...], dtype: torch.dtype) -> Later:
    return Later(shape, dtype, lambda: values.rounded(name, dtype))


def _resting(adapter: Path, values: MergedTensors) -> tuple[str, float]:
    """In what the base rested where the adapter was trained, and how far that is from the base itself."""
    from shardfold.tools.tune.config import Base

    run = adapter.parent / "config.json"
    base = read_object(run).get("base") if run.is_file() else None
    resting = Base.load(dict(base), where=str(run)).resting if isinstance(base, Mapping) else None
    if resting is None:
        return "", 0.0
    form = FORMATS[format_named(resting, "the base")]
    squares = apart = 0.0
    for name in values:
        if values.changed(name) and (weight := values.base(name)).dim() == 2:
            flat = weight.reshape(-1)
            payload = torch.empty(form.nbytes(-(-flat.numel() // form.block) * form.block), dtype=torch.uint8)
            form.encode_tensor(flat, payload)
            step = form.block * max(1, AT_ONCE // form.block)
            for start in range(0, flat.numel(), step):
                wide = flat[start : start + step].float()
                length = -(-wide.numel() // form.block) * form.block
                at, back = form.nbytes(start), torch.empty(1, length)
                form.decode(payload[at : at + form.nbytes(length)][None], back)
                squares += wide.square().sum().item()
                apart += (back[0, : wide.numel()] - wide).square().sum().item()
    return resting, (apart / squares) ** 0.5 if squares else 0.0


def _files(place: ModelPlace, dtype: torch.dtype | None, *, tied: bool) -> dict[str, bytes]:
    """What lies beside the weights."""
    assert place.adapter is not None
    config = read_object(place.folder / "config.json")
    if not tied:
        config["tie_word_embeddings"] = False
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    source = place.adapter if any(place.adapter.glob("tokenizer*")) else place.folder
    found = [file for pattern in TOKENIZER for file in source.glob(pattern)]
    found += [file for pattern in BESIDE for file in place.folder.glob(pattern)]
    files = {file.name: file.read_bytes() for file in found if file.is_file()}
    said = {"config.json": config, "generation_config.json": generation_config(place)}
    return files | {name: json.dumps(value, indent=2).encode() + b"\n" for name, value in said.items() if value}


def generation_config(place: ModelPlace) -> dict[str, Any]:
    """The base's, or one made of its config; it ends at the tokens where the base's ends, and the tokenizer's."""
    config = place.folder / "generation_config.json"
    said = read_object(config) if config.is_file() else {}
    every = read_object(place.folder / "config.json")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if said.get(name) is None and every.get(name) is not None:
            said[name] = every[name]
    tokenizer = place.tokenizer()
    ends = said.get("eos_token_id")
    ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.insert(0, tokenizer.eos_token_id)
    if ends:
        said["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if said.get("pad_token_id") is None and tokenizer.pad_token_id is not None:
        said["pad_token_id"] = tokenizer.pad_token_id
    return said
