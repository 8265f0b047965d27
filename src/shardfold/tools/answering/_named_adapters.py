"""Several adapters of peft over one base, of which the model has one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardfold.errors import ConfigError
from shardfold.sharding.materialize import meta_init
from shardfold.tools.tune.merge import ADAPTER
from shardfold.tools.tune.models import quiet

__all__ = ["NamedAdapters", "choose_adapter"]

PEFT = "base_model.model."
"""In front of the names of a model that peft has wrapped."""


class NamedAdapters(Mapping[str, Tensor]):
    """Values of a model with its adapters, read when they are asked for.

    Args:
        model: without memory; peft wraps it.
        given: values of the base.
        folders: of the adapters, by name.

    Attributes:
        module: the wrapped model, which has the adapters, all of them at rest.

    Raises:
        ConfigError: one is no LoRA of that base, or changes more than layers' weights.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor], folders: Mapping[str, Path]) -> None:
        from peft import PeftModel
        from safetensors.torch import load_file

        self._given, self._own = given, dict[str, Tensor]()
        wrapped: Any = None
        for name, folder in folders.items():
            if not name.isidentifier():
                raise ConfigError(f"--adapter {name}={folder}: a name has letters, digits and _ only.")
            config = _config(folder)
            with meta_init(), quiet():
                if wrapped is None:
                    plain: Any = model
                    wrapped = PeftModel(plain, config, adapter_name=name, autocast_adapter_dtype=False)
                else:
                    wrapped.add_adapter(name, config)
            for key, tensor in load_file(folder / ADAPTER).items():
                owner, _, last = key.rpartition(".")
                if ".lora_" not in key:
                    raise ConfigError(
                        f"the adapter in {str(folder)!r} holds {key.removeprefix(PEFT)!r} whole, as peft does beside "
                        "matrices of an embedding, so it cannot take turns with others: merge it (shardfold ckpt "
                        "export), and serve what comes out."
                    )
                # Matrices are of modules by the adapter's name, other tensors parameters by it.
                self._own[f"{owner}.{name}.{last}" if last == "weight" else f"{key}.{name}"] = tensor
        names = dict(wrapped.named_parameters(remove_duplicate=False))
        if wrong := next((name for name in self._own if name not in names), None):
            raise ConfigError(f"an adapter has {wrong!r}, which its base has not: was it trained on another model?")
        self.module: nn.Module = wrapped
        self._names = {name: name.removeprefix(PEFT).replace(".base_layer.", ".") for name in names}
        if wrong := next((name for name in names if ".lora_" in name and name not in self._own), None):
            raise ConfigError(f"an adapter lacks {wrong!r}, which its config says that it has.")

    def __getitem__(self, name: str) -> Tensor:
        own = self._own.get(name)
        return own if own is not None else self._given[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return (name for name, inner in self._names.items() if name in self._own or inner in self._given)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _config(folder: Path) -> Any:
    from peft import PeftConfig

    if not (folder / "adapter_config.json").is_file() or not (folder / ADAPTER).is_file():
        raise ConfigError(f"there is no adapter of peft in {str(folder)!r}: it has adapter_config.json and {ADAPTER}.")
    config: Any = PeftConfig.from_pretrained(str(folder))
    whole = getattr(config, "modules_to_save", None) or getattr(config, "trainable_token_indices", None)
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or whole or config.bias != "none":
        raise ConfigError(
            f"the adapter in {str(folder)!r} is not of LoRA's matrices alone, so it cannot take turns with others: "
            "merge it (shardfold ckpt export), and serve what comes out."
        )
    config.init_lora_weights, config.inference_mode = False, True  # the values come from the file
    return config


def choose_adapter(module: nn.Module, name: str | None) -> None:
    """The model has this adapter from now on, of those that it was opened with; None: none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.enable_adapters(name is not None)
            if name is not None:
                part.set_adapter(name, inference_mode=True)
    module.requires_grad_(False)
