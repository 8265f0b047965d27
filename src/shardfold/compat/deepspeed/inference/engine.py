"""``deepspeed.init_inference``: a model that is only asked, cut over ranks, in fewer bits, from a checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.checkpoint.pickled import load_pickled
from shardfold.compat.deepspeed import comm
from shardfold.compat.deepspeed.config_text import said
from shardfold.compat.deepspeed.inference.config import DeepSpeedInferenceConfig
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.compat.deepspeed.takeover import made_here, take_over
from shardfold.compat.deepspeed.together import together
from shardfold.compat.deepspeed.utils.logging import log_dist
from shardfold.engine.engine import Engine
from shardfold.parallel.parallel import Parallel
from shardfold.plan.layout import Layout, Precision
from shardfold.plan.offload import offloaded
from shardfold.plan.presets import named
from shardfold.sharding.init import Init
from shardfold.sharding.materialize import meta_init

__all__ = ["InferenceEngine", "init_inference"]

COMPUTE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def init_inference(model: Any, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Makes an engine that only runs ``model`` forward.

    Args:
        model: a ``torch.nn.Module``, which becomes the engine's; one without memory (``deepspeed.OnDevice``) needs a
            checkpoint.
        config: a dict, the path of a JSON file, or a :class:`DeepSpeedInferenceConfig`.
        kwargs: keys of the config.

    Raises:
        WrongArgument: a ``ValueError``: an argument cannot be honoured.
        ModelError: the checkpoint does not fit the model; what is missing or too much is named.
    """
    comm.init_distributed()
    with together("deepspeed.init_inference()"):
        if not isinstance(model, nn.Module):
            raise WrongArgument(
                f"init_inference(model=...) was given a {type(model).__name__}: it requires a torch.nn.Module."
            )
        if isinstance(config, DeepSpeedInferenceConfig):
            config = config.raw
        settings = DeepSpeedInferenceConfig(config, **kwargs)
        ranks = comm.get_world_size()
        if ranks % settings.tensor:
            raise WrongArgument(
                f"init_inference(tensor_parallel.tp_size={settings.tensor}): the {ranks} ranks that there are cannot "
                "be shared out by it: give a divisor."
            )
        weights = None if settings.checkpoint is None else CheckpointTensors.found(model, settings)
        if weights is None and any(p.is_meta for p in model.parameters()):
            raise WrongArgument("init_inference(model=...) has no memory: give checkpoint=, with its values.")
    engine = InferenceEngine(model, settings, weights)
    if settings.notes:
        log_dist(said(settings.notes), ranks=[0], level=logging.WARNING)
    return engine


class InferenceEngine(nn.Module):
    """What ``deepspeed.init_inference`` returns. Attributes that it does not have are the model's.

    Args:
        model: as it came; ``engine.module`` is that object.
        config: as it was read.
        weights: values for it; None: it has them.

    Attributes:
        module: the model.
        mp_world_size: ranks that share each layer.
    """

    def __init__(
        self, model: nn.Module, config: DeepSpeedInferenceConfig, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.module, self.settings = model, config
        self.mp_world_size = config.tensor
        take_over(model)
        model.requires_grad_(False)
        _compute_buffers(model)
        kind = config.dtype if config.dtype in COMPUTE else _own_dtype(model)
        self.dtype = kind
        self._core = Engine(
            model,
            layout=_table(config),
            precision=Precision(compute=COMPUTE[kind], outputs="compute"),
            parallel=Parallel(
                mesh={"tensor": config.tensor} if config.tensor > 1 else None,
                tensor="auto" if config.tensor > 1 else None,
            ),
            init=Init(weights=weights) if weights is not None else Init(),
        )
        made_here(self._core)
        model.eval()
        self.device = self._core.device
        self._seconds: list[float] | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model gives, without gradients."""
        begun = perf_counter()
        with torch.no_grad():
            given = self.module(*inputs, **kwargs)
        if self._seconds is not None:
            self._seconds.append(perf_counter() - begun)
        return given

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's own; what parts of weights other ranks have comes as each forward needs it."""
        with torch.no_grad(), self._core.reads_ahead():
            return self.module.generate(*inputs, **kwargs)  # pyright: ignore[reportCallIssue]

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """From now on the time of each forward is kept."""
        self._seconds = []

    def model_times(self) -> list[float]:
        """Milliseconds of each forward since :meth:`profile_model_time`, or since it was asked for them.

        Raises:
            WrongArgument: they are not kept.
        """
        if self._seconds is None:
            raise WrongArgument("engine.model_times(): call engine.profile_model_time() before.")
        found, self._seconds = [seconds * 1e3 for seconds in self._seconds], []
        return found

    def destroy(self) -> None:
        """The engine is no more."""
        self._core.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)


def _compute_buffers(model: nn.Module) -> None:
    """Buffers that a constructor computes, as angles of positions, and that have no memory: a model of transformers
    says by its config how it is constructed."""
    if not any(buffer.is_meta for buffer in model.buffers()) or not hasattr(type(model), "config_class"):
        return
    with meta_init():
        twin = type(model)(model.config)
    for path, module in twin.named_modules():
        model.get_submodule(path)._buffers.update(module._buffers)


def _own_dtype(model: nn.Module) -> torch.dtype:
    """In which weights that rest as codes are computed with."""
    kinds = {p.dtype for p in model.parameters() if p.dtype in COMPUTE}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def _table(config: DeepSpeedInferenceConfig) -> Layout:
    table = named("zero3" if config.stage == 3 else "ddp")
    if config.base is not None:
        table = table.replace(base=config.base)
    if config.tier is None:
        return table
    offload = {"params": config.tier, "optimizer": "host", "grads": "host"}  # of the last two there are none
    if config.tier == "disk" and config.folder is not None:
        offload["folder"] = config.folder
    return offloaded(table, offload)


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of files by the names of a model's parameters, read when they are asked for. No code of a file runs.

    Args:
        files: ``.safetensors``, or of ``torch.save``.
        model: whose names they are; those of its inner model alone, or with ``module.`` before them, are too.
    """

    def __init__(self, files: list[Path], model: nn.Module) -> None:
        stored: dict[str, Path] = {}
        self._pickled: dict[Path, Mapping[str, Any]] = {}
        for file in files:
            stored.update(dict.fromkeys(self._names(file), file))
        prefix = getattr(model, "base_model_prefix", "") or "module"
        bare = {name.removeprefix("module."): name for name in stored}
        self._places: dict[str, tuple[Path, str]] = {}
        used: set[str] = set()
        for name in (*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())):
            for other in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if other in bare:
                    self._places[name] = stored[bare[other]], bare[other]
                    used.add(bare[other])
                    break
        # What the model has no place for stays, so that the engine names it.
        self._places.update({name: (stored[name], name) for name in stored if name not in used})

    @classmethod
    def found(cls, model: nn.Module, config: DeepSpeedInferenceConfig) -> CheckpointTensors:
        """Of what a config calls the checkpoint: a folder, a file, or a JSON file or dict with ``checkpoints``, a list
        of files.

        Raises:
            WrongArgument: it is none.
        """
        given, base = config.checkpoint, Path(config.base_dir)
        if isinstance(given, (str, Path)):
            path = base / given
            if path.is_dir():
                files = sorted(path.glob("*.safetensors")) or sorted([*path.glob("*.bin"), *path.glob("*.pt")])
                if not files:
                    raise WrongArgument(f"init_inference(checkpoint={str(path)!r}) has no .safetensors, .bin or .pt.")
                return cls(files, model)
            if path.suffix != ".json":
                return cls([_there(path)], model)
            given, base = _object(path), path.parent if not config.base_dir else base
        if not isinstance(given, Mapping) or not isinstance(given.get("checkpoints"), (list, tuple, str)):
            raise WrongArgument(
                f"init_inference(checkpoint={given!r}): it is a folder, a file, or a dict with a list of 'checkpoints'."
            )
        if given.get("parallelization") in ("tp", "pp") and given.get("tp_size", given.get("mp_size", 1)) != 1:
            raise WrongArgument(
                "init_inference(checkpoint=...) names files with parts of single ranks, which are not read: give those "
                "of the whole model."
            )
        listed = given["checkpoints"]
        base = base / str(given.get("base_dir") or "")
        return cls([_there(base / str(name)) for name in ([listed] if isinstance(listed, str) else listed)], model)

    def _names(self, file: Path) -> list[str]:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        values: Any = load_pickled(file)
        for inner in ("module", "model", "state_dict"):
            if isinstance(values.get(inner), Mapping):
                values = values[inner]
                break
        self._pickled[file] = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return list(self._pickled[file])

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self._places[name]
        if file in self._pickled:
            return self._pickled[file][stored]
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _there(path: Path) -> Path:
    if not path.is_file():
        raise WrongArgument(f"init_inference(checkpoint=...) names {str(path)!r}, which is no file.")
    return path


def _object(path: Path) -> Any:
    try:
        return json.loads(_there(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise WrongArgument(f"init_inference(checkpoint={str(path)!r}) is no JSON: {error}.") from None
