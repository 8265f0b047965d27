"""From a folder to a model without memory, and to its values, which are read one tensor at a time.

No rank ever has a copy of the whole: the model is built under :func:`shardfold.meta_init`, and an engine that is made
with ``Init(weights=...)`` asks these mappings for one tensor after the other, of which it keeps its own part.
"""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError
from shardfold.sharding.materialize import meta_init
from shardfold.tools.observe.working_line import Tick, working

__all__ = [
    "FolderTensors",
    "FreshTensors",
    "ModelPlace",
    "blocks_of",
    "hollow_model",
    "loading",
    "of_block",
    "quiet",
    "seeded",
]

TASKS = {"lm": "AutoModelForCausalLM", "score": "AutoModelForSequenceClassification"}
"""What a recipe needs: the class of transformers that makes it."""

FRESH_HEADS = ("score",)
"""Modules that a model of language lacks and a recipe adds."""

FIRST_OF_MANY = "the first of {} that have none is {!r}"


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """PyTorch's generator begins with a seed for that name, and is afterwards as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out a warning that transformers has of its own name, which peft asks for."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        yield


@dataclass(frozen=True)
class ModelPlace:
    """Where a model is.

    Attributes:
        folder: of transformers, with a config, weights and a tokenizer.
        adapter: of peft, which is merged into the weights as they are read; None: there is none.
    """

    folder: Path
    adapter: Path | None = None

    @classmethod
    def find(cls, path: Path) -> ModelPlace:
        """Of a folder of transformers, a run, or an adapter of peft.

        Raises:
            ConfigError: it is none of these.
        """
        path = path.expanduser()
        if not path.is_dir():
            raise ConfigError(
                f"there is no folder {str(path)!r}: a model is a folder of transformers (config.json and safetensors), "
                "a run of shardfold tune, or an adapter of peft. Nothing is downloaded."
            )
        if (path / "adapter_config.json").is_file():
            return cls._adapted(path)
        if (path / "index.json").is_file():
            raise ConfigError(
                f"{str(path)!r} is a checkpoint: go on with it by --resume, or make a folder of transformers of it by "
                f"shardfold ckpt export {path} out/ --to hf --config BASE."
            )
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{str(path)!r} has neither config.json nor adapter_config.json: give a folder of transformers, a run, "
                "or an adapter."
            )
        config = read_object(path / "config.json")
        if "model_type" in config:
            return cls(path)
        if "recipe" not in config:
            raise ConfigError(
                f"{str(path)!r} is no model: its config.json has no model_type. If it is a run of shardfold train, "
                "export it first."
            )
        for inside in ("model", "merged"):
            if (path / inside / "config.json").is_file():
                return cls(path / inside)
        if (path / "adapter" / "adapter_config.json").is_file():
            return cls._adapted(path / "adapter")
        raise ConfigError(
            f"the run {str(path)!r} has no model yet, as it is under way or ended early: let it end, or go on with "
            "--resume."
        )

    @classmethod
    def _adapted(cls, adapter: Path) -> ModelPlace:
        config = read_object(adapter / "adapter_config.json")
        named = Path(str(config.get("base_model_name_or_path") or ""))
        for base in (named, adapter / named):
            if str(named) != "." and (base / "config.json").is_file():
                break
        else:
            raise ConfigError(
                f"the adapter in {str(adapter)!r} is of the model {str(named)!r}, which is no folder here: write the "
                "folder of its base into base_model_name_or_path of its adapter_config.json."
            )
        if config.get("peft_type") != "LORA":
            raise ConfigError(
                f"the adapter in {str(adapter)!r} is of the type {config.get('peft_type')}, which cannot be merged "
                "into its base: give --model that base, or go on with its run by --resume."
            )
        inner = cls.find(base)
        if inner.adapter is not None:
            raise ConfigError(f"the adapter in {str(adapter)!r} is on another adapter: merge that one first.")
        return cls(inner.folder, adapter)

    @cached_property
    def config(self) -> Any:
        """transformers' config. No code of the folder runs."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except (ValueError, KeyError, OSError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"transformers cannot read the config in {str(self.folder)!r}: {first} Code that a folder brings is "
                "not run."
            ) from None

    def tokenizer(self) -> Any:
        """Raises ConfigError: there is none."""
        from transformers import AutoTokenizer

        for folder in (self.adapter, self.folder):
            if folder is not None and any(folder.glob("tokenizer*")):
                made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
                if not made.is_fast:
                    raise ConfigError(f"the tokenizer in {str(folder)!r} has no tokenizer.json: save it as a fast one.")
                return made
        raise ConfigError(f"{str(self.folder)!r} has no tokenizer: copy the files of the model's beside its config.")


def read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} holds no object.")
    return found


def hollow_model(config: Any, task: str) -> nn.Module:
    """The model of a config, without memory.

    Args:
        config: transformers'.
        task: of ``TASKS``.

    Raises:
        ConfigError: transformers has no such model for the task.
    """
    import transformers

    if task == "score":
        config.num_labels = 1
    try:
        with meta_init(), quiet():
            made = getattr(transformers, TASKS[task]).from_config(config, dtype=torch.float32)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ConfigError(
            f"transformers has no {TASKS[task].removeprefix('AutoModelFor')} of the type {config.model_type!r}."
        ) from None
    config.architectures = [type(made).__name__]
    return made


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of modules of one class, with its path: the blocks of a decoder.

    Raises:
        ModelError: there is none.
    """
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(each) for each in module}) == 1
    ]
    if not found:
        raise ModelError(f"a {type(model).__name__} has no list of blocks: freeze and expand do not know its layers.")
    return max(found, key=lambda each: len(each[1]))


class FolderTensors(Mapping[str, Tensor]):
    """The tensors of a folder of transformers by the names of a model's parameters, read when they are asked for.

    Args:
        folder: with safetensors, one file or several and an index.
        model: whose names they are.

    Raises:
        ModelError: there are no safetensors, or parameters without a tensor; the first is named.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        files = self._files(folder)
        prefix = getattr(model, "base_model_prefix", "")
        self._places: dict[str, tuple[Path, str]] = {}
        tied: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
            for stored in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if stored in files:
                    self._places[name] = files[stored], stored
                    break
        left = [names[0] for names in tied.values() if not any(name in self._places for name in names)]
        left = [name for name in left if name.split(".")[0] not in FRESH_HEADS]
        if left:
            raise ModelError(
                f"the safetensors in {str(folder)!r} do not have all parameters of a {type(model).__name__}: "
                f"{FIRST_OF_MANY.format(len(left), left[0])}. Where the file has them under other names, load the "
                "model with transformers and save it again."
            )

    def stored_names(self) -> dict[str, str]:
        """The names of parameters by those that the files have for them."""
        return {stored: name for name, (_, stored) in self._places.items()}

    @staticmethod
    def _files(folder: Path) -> dict[str, Path]:
        from safetensors import safe_open

        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return {name: folder / file for name, file in read_object(index).get("weight_map", {}).items()}
        found: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file))
        if not found:
            raise ModelError(
                f"{str(folder)!r} has no safetensors: load the model with transformers and save it again. Files that "
                "may run code when they are read (.bin, .pt) are not read."
            )
        return found

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        file, stored = self._places[name]
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class FreshTensors(Mapping[str, Tensor]):
    """The first values of parameters that no file has, such as a new head, by the model's own rule and a seed."""

    def __init__(self, model: nn.Module, known: Mapping[str, Tensor], seed: int) -> None:
        self._rule: Any = getattr(model, "_init_weights", None)
        self._seed = seed
        self._owners: dict[str, tuple[str, nn.Module]] = {}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for group in names.values():
            if not any(name in known for name in group):
                path, _, own = group[0].rpartition(".")
                self._owners[group[0]] = own, copy.deepcopy(model.get_submodule(path))

    def __getitem__(self, name: str) -> Tensor:
        own, hollow = self._owners[name]
        made = copy.deepcopy(hollow).to_empty(device="cpu")
        with seeded(self._seed, name), torch.no_grad():
            self._rule(made)
        return getattr(made, own).detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def of_block(name: str, path: str) -> tuple[int, str] | None:
    """The number of the block that a parameter is of, and its name in there; ``path``: of the list of blocks."""
    found = re.fullmatch(re.escape(path) + r"\.(\d+)\.(.+)", name)
    return (int(found[1]), found[2]) if found else None


class CountedTensors(Mapping[str, Tensor]):
    """The tensors of a mapping, and of how many elements somebody has asked for so far.

    Args:
        tick: called with that number and ``numel``, that of all.
    """

    def __init__(self, given: Mapping[str, Tensor], numel: int, tick: Tick) -> None:
        self._given, self._numel, self._tick = given, numel, tick
        self._done = 0

    def __getitem__(self, name: str) -> Tensor:
        found = self._given[name]
        self._done += found.numel()
        self._tick(min(self._done, self._numel), self._numel)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


@contextmanager
def loading(weights: Mapping[str, Tensor] | None, model: nn.Module) -> Iterator[Mapping[str, Tensor] | None]:
    """Inside, a line says how much of a model has been loaded by who reads the mapping that is given."""
    if weights is None:
        yield None
        return
    with working("loading", unit="parameters") as line:
        yield CountedTensors(weights, sum(each.numel() for each in model.parameters()), line.amount)
