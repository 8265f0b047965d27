"""Folders that DeepSpeed wrote under ZeRO 1, 2 or 3, as a checkpoint. DeepSpeed need not be installed.

    latest                                                    the name of the folder below
    global_step10/
        mp_rank_00_model_states.pt                            stages 1, 2: names, shapes, buffers, rounded weights
        zero_pp_rank_R_mp_rank_00_model_states.pt             stage 3: the same of each rank, without the weights
        [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt      rank R's part of the fp32 weights and of the moments

Which elements those are, ``deepspeed_ranks`` says. Under stages 1 and 2 the weights are compared with the rounded ones
of the model's file as they are written, so that a layout that is not known here cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardfold.checkpoint.deepspeed_ranks import FlatPlace, RankFile, cut_each, cut_together, is_plain, rank_files
from shardfold.checkpoint.folders import deepspeed_folder
from shardfold.checkpoint.pickled import Foreign, load_pickled
from shardfold.checkpoint.writer import Writer
from shardfold.errors import CheckpointError
from shardfold.sharding.stand_ins import EXTRA

__all__ = ["DeepSpeedFolder"]

#: What DeepSpeed itself puts beside the user's own state.
OWN_KEYS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "num_experts",
    "ds_autoep_layers",
    "autoep_layers",
    "universal_checkpoint_info",
    "csr_tensor_module_names",
    "sparse_tensor_module_names",
}
ROUNDING = 2.0**-7
"""Of a vector's norm, what rounding to bf16 may change: each element by 2^-9 of it at most."""


@dataclass
class DeepSpeedFolder:
    """What such a folder holds; tensors stay in its files until they are read.

    Attributes:
        path: the folder of one step.
        names: of parameters and buffers, in the order of the model; tied ones by the first.
        also: further names of tied parameters, by the first.
        places: of the parameters that were trained.
        frozen: readers of those that were not, with shape and dtype.
        buffers: persistent ones.
        extra: extra state of modules, by its names in a state dict.
        step: updates done.
        notes: what is left out and why, and what the run had that the engine must be given, a sentence each.

    Raises:
        CheckpointError: from :meth:`open`: files are missing, damaged or of different runs, or of a kind that is not
            read: pipeline or tensor parallel, experts, universal, without ZeRO.
    """

    path: Path
    names: list[str] = field(default_factory=list[str])
    also: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    places: dict[str, FlatPlace] = field(default_factory=dict[str, FlatPlace])
    frozen: dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]] = field(
        default_factory=dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]]
    )
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int = 0
    notes: list[str] = field(default_factory=list[str])
    _ranks: list[RankFile] = field(default_factory=list[RankFile])
    _model: dict[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def open(path: str | Path) -> DeepSpeedFolder:
        """Reads what the files say, and no tensor; ``path`` is the folder of a run or of one step."""
        folder = DeepSpeedFolder(deepspeed_folder(Path(path)) or Path(path))
        folder._ranks = rank_files(folder.path)
        folder._read_model()
        folder._read_places()
        folder._read_rest()
        return folder

    def read(self, name: str, state: str = "weight") -> Tensor:
        """A state of a trained parameter, in its shape."""
        place = self.places[name]
        parts: list[Tensor] = []
        for rank, start, numel in place.stretches:
            one = self._ranks[rank]
            flat = one.flats[place.flat] if state == "weight" else one.states[place.flat][state]
            parts.append(flat[start : start + numel])
        whole = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(place.shape)
        if state == "weight" and self._ranks[0].stage < 3:
            self._compare(name, whole)
        return whole

    def _compare(self, name: str, values: Tensor) -> None:
        """
        Raises:
            CheckpointError: weights are not those of the model's file, but for rounding.
        """
        rounded = self._model["module"][name]
        apart, size = (torch.linalg.vector_norm(v, dtype=torch.float32) for v in (values - rounded, rounded))
        if apart > ROUNDING * size:
            raise CheckpointError(
                f"{self.path}: the fp32 weights of {name} are not those that its model's file has in {rounded.dtype}: "
                "files of two runs are mixed, or this DeepSpeed lays them out in a way that is not known here."
            )

    def states(self, flat: int) -> dict[str, torch.dtype]:
        """States with a value for each element that every rank has of a flat, with their dtypes."""
        found: dict[str, torch.dtype] = {}
        for name, value in self._ranks[0].states[flat].items():
            everywhere = all(
                isinstance(values := one.states[flat].get(name), Tensor)
                and values.dim() == 1
                and values.numel() >= one.flats[flat].numel()
                for one in self._ranks
            )
            if everywhere:
                found[name] = value.dtype
        return found

    def write(self, writer: Writer, rename: Callable[[str], str] = str) -> None:
        """Gives all of it to a writer, under names that ``rename`` makes of those here."""
        members: dict[int, list[str]] = {}
        for name in self.names:
            new, also = rename(name), [rename(other) for other in self.also.get(name, ())]
            if name in self.buffers:
                writer.buffer(new, self.buffers[name])
            elif name in self.frozen:
                shape, dtype, read = self.frozen[name]
                writer.parameter(new, read, also=also, trainable=False, shape=shape, dtype=dtype)
            else:
                place = self.places[name]
                members.setdefault(place.flat, []).append(new)
                dtype = self._ranks[0].flats[place.flat].dtype
                writer.parameter(new, lambda n=name: self.read(n), also=also, shape=place.shape, dtype=dtype)
                for state, dtype in self.states(place.flat).items():
                    writer.state(new, state, lambda n=name, s=state: self.read(n, s), dtype=dtype)
                writer.once(new, _numbers(self._ranks[0].states[place.flat]))
        groups = self._ranks[0].groups or [({}, [flat]) for flat in range(len(self._ranks[0].flats))]
        kind = _section(self._model.get("ds_config"), "optimizer").get("type")
        writer.optimizer(
            f"deepspeed.{kind or 'optimizer'}",
            [(options, [name for flat in flats for name in members.get(flat, ())]) for options, flats in groups],
        )
        extra = {"extra": {rename(name): value for name, value in self.extra.items()}} if self.extra else {}
        writer.run({**self._run(), **extra})

    # -- what the files say

    def _read_model(self) -> None:
        stage, path = self._ranks[0].stage, self.path
        name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        self._model = load_pickled(path / name)
        lacking = [key for key in ("module", "buffer_names", "param_shapes") if self._model.get(key) is None]
        if lacking:
            raise CheckpointError(f"{path / name} has no {', '.join(lacking)}: it is of no run under ZeRO 1, 2 or 3.")
        world, ranks = self._model.get("dp_world_size"), len(self._ranks)
        if world not in (None, ranks):
            raise CheckpointError(
                f"{path}: {name} is of a run on {world} ranks and the optimizer's files are of one that cut its state "
                f"for {ranks}: files of two runs are mixed, or the state was cut within a part of the ranks (MiCS, "
                "hpZ), which is not read."
            )
        if self._model.get("ds_autoep_layers") or self._model.get("autoep_layers"):
            raise CheckpointError(f"{path} is of a model with experts, which is not read.")
        self.step = int(self._model.get("global_steps", 0)) - int(self._model.get("skipped_steps", 0))

    def _read_places(self) -> None:
        shapes: list[dict[str, tuple[int, ...]]] = [
            {name: tuple(shape) for name, shape in group.items()} for group in self._model["param_shapes"]
        ]
        first = self._ranks[0]
        if any(len(one.flats) != len(shapes) for one in self._ranks):
            raise CheckpointError(
                f"{self.path}: param_shapes has {len(shapes)} groups and {first.path.name} has {len(first.flats)}."
            )
        for flat, group in enumerate(shapes):
            lengths = [one.flats[flat].numel() for one in self._ranks]
            if first.stage == 3:
                placed = dict(cut_each(flat, group, len(lengths)))
                fits = all(sum(-(-math.prod(s) // len(lengths)) for s in group.values()) == each for each in lengths)
            else:
                gaps = first.gaps[flat] if first.gaps is not None else [0] * len(group)
                placed = dict(cut_together(flat, group, gaps, lengths))
                used, there = sum(map(math.prod, group.values())) + sum(gaps), sum(lengths)
                fits = used <= there < used + 2 * len(lengths)  # flats of BF16_Optimizer are saved with their padding
            if not fits:
                raise CheckpointError(
                    f"{self.path}: flat {flat} has {lengths} elements on the ranks, which is not how ZeRO "
                    f"{first.stage} cuts its {len(group)} parameters: files of two runs are mixed, or this DeepSpeed "
                    f"({self._model.get('ds_version')}) lays them out in a way that is not known here."
                )
            self.places |= placed

    def _read_rest(self) -> None:
        """Frozen parameters, buffers and ties, the order of names, and what modules keep beside them."""
        module: dict[str, Any] = {n: v for n, v in self._model["module"].items() if not self._keep_extra(n, v)}
        buffers = set(self._model["buffer_names"])
        self._read_frozen(module)
        families: dict[str, list[str]] = {}
        for name, home in (self._model.get("shared_params") or {}).items():
            # ZeRO 1 and 2 know them by their address, which all empty ones share.
            if self._ranks[0].stage == 3 or (module[name].numel() and module[name].shape == module[home].shape):
                families.setdefault(home, [home]).append(name)
        tied: set[str] = set()
        for family in families.values():
            first = next((name for name in family if name in self.places or name in self.frozen), family[0])
            self.also[first] = [name for name in family if name != first]
            tied |= set(self.also[first])
        left: list[str] = []
        strange: list[str] = []
        for name, value in module.items():
            if not isinstance(value, Tensor):
                strange.append(f"{name} ({value.kind if isinstance(value, Foreign) else type(value).__name__})")
                continue
            if name in buffers:
                self.buffers[name] = value
            if name in tied:
                continue
            if name not in self.places and name not in self.frozen and name not in self.buffers:
                left.append(name)
            else:
                self.names.append(name)
        self.names += [name for name in (*self.places, *self.frozen) if name not in module]
        if left:
            self.notes.append(f"Left out, as the folder does not have their values: {', '.join(left)}.")
        if strange:
            self.notes.append(
                f"Left out of the model, being neither tensors nor plain extra state of modules: {', '.join(strange)}."
            )

    def _keep_extra(self, name: str, value: Any) -> bool:
        """Whether it is extra state of a module that a checkpoint keeps."""
        if name.rpartition(".")[2] != EXTRA or not is_plain(value):
            return False
        self.extra[name] = value
        return True

    def _read_frozen(self, module: Mapping[str, Any]) -> None:
        fragments: Mapping[str, Tensor] = self._model.get("frozen_param_fragments") or {}
        shapes = {n: tuple(s) for n, s in (self._model.get("frozen_param_shapes") or {}).items()}
        if fragments and self._ranks[0].stage == 3:
            everyone = [self._model]
            for rank in range(1, len(self._ranks)):
                everyone.append(load_pickled(self.path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
            for name, shape in shapes.items():
                parts = [one["frozen_param_fragments"][name].reshape(-1) for one in everyone]
                self.frozen[name] = (shape, parts[0].dtype, lambda p=parts, s=shape: _joined(p, s))
            return
        shared = self._model.get("shared_params") or {}
        known = {*self.places, *self._model["buffer_names"], *shared}
        rest = {n: v for n, v in module.items() if isinstance(v, Tensor) and n not in known}
        if self._ranks[0].stage == 3:
            rest = {}  # placeholders
        for name, value in {**rest, **fragments}.items():
            self.frozen[name] = (tuple(value.shape), value.dtype, lambda v=value: v)

    # -- the run

    def _run(self) -> dict[str, Any]:
        """The schedule, the loss scale and the user's own state, in our words."""
        model, first = self._model, self._ranks[0]
        state: dict[str, Any] = {}
        left: list[str] = []
        for name, value in model.items():
            if name in OWN_KEYS:
                continue
            if is_plain(value):
                state[name] = value
            else:
                left.append(name)
        if left:
            self.notes.append(f"Left out of the user's state, being objects: {', '.join(left)}.")
        said = model.get("lr_scheduler")
        schedule = _schedule(said, len(first.groups)) if isinstance(said, dict) else None
        if said is not None and schedule is None:
            self.notes.append("The schedule's state is left out: it is not known here.")
        scale = _loss_scale(first.scaler, int(model.get("skipped_steps", 0)))
        self._tell_settings(schedule is not None, scale is not None)
        return {"schedule": schedule, "loss_scale": scale, "averages": [], "state": state}

    def _tell_settings(self, scheduled: bool, scaled: bool) -> None:
        config = self._model.get("ds_config")
        said: list[str] = []
        optimizer = _section(config, "optimizer")
        if str(optimizer.get("type")).lower() in ("adam", "adamw"):
            # DeepSpeed's Adam decouples the decay, unless told not to.
            coupled = optimizer["type"].lower() == "adam" and optimizer.get("params", {}).get("adam_w_mode") is False
            said.append(f"optimizer=torch.optim.{'Adam' if coupled else 'AdamW'}")
        if not self._ranks[0].corrected:
            self.notes.append("The optimizer ran with bias_correction=False, which those of PyTorch do not have.")
        clip = self._ranks[0].clip
        if clip is None and isinstance(config, dict):
            clip = config.get("gradient_clipping")
        if clip:
            said.append(f"clip_norm={clip:g}")
        if scheduled:
            kind, options = _section(config, "scheduler").get("type"), _section(config, "scheduler").get("params", {})
            arguments = ", ".join([str(kind), *(f"{k}={v!r}" for k, v in options.items())])
            said.append(f"lr_schedule=partial({arguments})" if kind else "the schedule that it had")
        narrow = next((name for name in ("bf16", "fp16") if _section(config, name).get("enabled")), "")
        if narrow or scaled:
            said.append(f"precision={narrow or 'fp16'!r}")
        if said:
            self.notes.append(f"To go on in the same way the engine needs {'; '.join(said)}.")


# -- in our words


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.cat(list(parts))[: math.prod(shape)].view(shape)


def _numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the optimizer keeps of a flat once, and so of each of its parameters."""
    kept: dict[str, Any] = {}
    for name, value in state.items():
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.dim() else value
        if isinstance(number, bool | int | float):
            kept[name] = int(number) if name == "step" else number
    return kept


def _schedule(said: dict[str, Any], groups: int) -> dict[str, Any] | None:
    """The state of a schedule of PyTorch's, from one of DeepSpeed's or of PyTorch's."""
    if "last_batch_iteration" in said:
        done = int(said["last_batch_iteration"]) + 1
        # LambdaLR, which DeepSpeed's are not but what goes on here may be, does not do without its functions' states.
        return {"last_epoch": done, "_step_count": done + 1, "lr_lambdas": [None] * groups}
    kept = {name: value for name, value in said.items() if is_plain(value)}
    return kept if "last_epoch" in kept else None


def _loss_scale(scaler: Any, skipped: int) -> dict[str, Any] | None:
    """The state of our loss scale that grows and falls when DeepSpeed's would; None: there was none."""
    if not isinstance(scaler, Foreign) or "cur_scale" not in scaler.attributes:
        return None
    said = scaler.attributes
    scale = float(said["cur_scale"])
    if "scale_window" not in said:
        static = {"scale": scale, "growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 1}
        return static | {"_growth_tracker": 0, "skipped": skipped} if scale != 1.0 else None
    window, factor = int(said["scale_window"]), float(said["scale_factor"])
    # DeepSpeed's grows in the update before which a multiple of the window, and not 0, had gone well.
    good = int(said["cur_iter"]) - int(said["last_overflow_iter"]) - 1
    left = 1 if good and good % window == 0 else window - good % window + 1
    return {
        "scale": scale,
        "growth_factor": factor,
        "backoff_factor": 1 / factor,
        "growth_interval": window,
        "_growth_tracker": window - left,
        "hysteresis_left": int(said["cur_hysteresis"]),
        "skipped": skipped,
    }


def _section(config: Any, name: str) -> dict[str, Any]:
    found = config.get(name) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}
