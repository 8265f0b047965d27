"""Checkpoints by DeepSpeed's calls: ours, in a folder per tag beside DeepSpeed's file ``latest``."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from shardfold.checkpoint.deepspeed import DeepSpeedFolder
from shardfold.checkpoint.deepspeed_ranks import is_plain
from shardfold.checkpoint.folders import INDEX, LATEST, deepspeed_folder, read_name
from shardfold.checkpoint.imports import import_from
from shardfold.checkpoint.opened import open_together
from shardfold.checkpoint.reader import Checkpoint
from shardfold.checkpoint.rng import rng_state, set_rng_state
from shardfold.checkpoint.trees import check_states, encode
from shardfold.checkpoint.trust import dump_object, load_object
from shardfold.compat.deepspeed.checkpoint.ds_to_universal import LATEST_UNIVERSAL
from shardfold.compat.deepspeed.git_version_info import version
from shardfold.compat.deepspeed.refused import WrongArgument, WrongCall, check_client_state, check_folder, loading_state
from shardfold.compat.deepspeed.tensor import Joining
from shardfold.compat.deepspeed.utils.logging import log_dist
from shardfold.compat.deepspeed.whole_files import written_whole
from shardfold.engine.engine import Engine
from shardfold.errors import CheckpointError, ShardfoldError, by_rank
from shardfold.sharding.autograd import outside_inference
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.sharding.stand_ins import own_state
from shardfold.sharding.whole_segments import whole_segments

__all__ = [
    "client_state_of",
    "consolidated",
    "give_back",
    "load_checkpoint",
    "load_module_state_dict",
    "module_state_dict",
    "save_16bit_model",
    "save_checkpoint",
]

TOLD = ("ds_version", "ds_config", "buffer_names")
"""What a checkpoint tells of itself beside the user's own: as it was when that was saved."""
COUNTS = ("global_steps", "skipped_steps", "global_samples")
OWN = "deepspeed"  # of what the compatibility layer keeps beside the user's own
SCRIPT = '''#!/usr/bin/env python
"""Writes the fp32 weights of this checkpoint as files of PyTorch: python zero_to_fp32.py . OUTPUT_DIR"""

from shardfold.compat.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


class SavedEngine(Protocol):
    """What of a ``DeepSpeedEngine`` a checkpoint keeps, or is told by."""

    _core: Engine
    _settings: Any
    _messages: int
    module: nn.Module
    basic_optimizer: Any
    lr_scheduler: Any
    observers: Any
    global_rank: int
    global_steps: int
    global_samples: int
    micro_steps: int
    _begun: int
    skipped_steps: int
    dp_world_size: int
    mp_world_size: int
    loaded_checkpoint_dp_world_size: int | None
    loaded_checkpoint_mp_world_size: int | None

    def _setting(self, path: str) -> Any: ...
    def _tell_boundary(self) -> None: ...
    def train_batch_size(self) -> int: ...
    def zero_optimization_stage(self) -> int: ...
    def zero_optimization_partition_weights(self) -> bool: ...


# -- saving


@outside_inference()
def save_checkpoint(
    engine: SavedEngine,
    save_dir: Any,
    tag: Any,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> bool:
    """Writes a checkpoint that any stage and number of ranks loads; every rank calls it.

    It is there, and ``latest`` names it, when all ranks have written their part, or never.

    Args:
        save_dir: a folder that all hosts share; with ``checkpoint.use_node_local_storage`` one on each of them.
        tag: the name of the checkpoint's folder in it; None: ``global_step<N>``.
        client_state: more to keep, rank 0's. What is no number, string, list, dict or tensor is pickled: objects of
            classes that are not known to do no harm are saved and read only inside of
            ``shardfold.checkpoint.trusted()``.
        save_latest: False leaves the file ``latest`` as it is.
        exclude_frozen_parameters: leaves out what the optimizer does not have.

    Returns:
        True.

    Raises:
        CheckpointError: it cannot be written, or ``client_state`` has what is not saved; what was there before is as it
            was.
        WrongCall: ranks give different tags, and the config's ``checkpoint.tag_validation`` is ``"Fail"``.
    """
    call, state = "engine.save_checkpoint()", dict[str, Any]()

    def pack() -> None:
        check_client_state(client_state)
        if not save_dir:
            raise WrongArgument(f"engine.save_checkpoint(save_dir={save_dir!r}): it is the path of a folder.")
        check_folder(call, save_dir, "a folder for checkpoints")
        check_states(call, client_state=client_state)
        if engine.global_rank == 0:  # whose are saved
            state.update(_packed(client_state or {}) | {OWN: _own_state(engine)})

    engine._core.sharded.gate.meet(call, check=pack)
    tag = _one_tag(engine, f"global_step{engine.global_steps}" if tag is None else str(tag))
    folder = Path(save_dir)
    if Path(tag).name != tag:
        raise WrongArgument(f"engine.save_checkpoint(tag={tag!r}): it is the name of one folder, without slashes.")
    local = bool(engine._setting("checkpoint.use_node_local_storage"))
    frozen = "skip" if exclude_frozen_parameters and engine.basic_optimizer is not None else "keep"
    if engine._core.micro_batch:
        log_dist(
            f"{folder / tag} will have no gradients: those of {engine._core.micro_batch} micro-batches since the last "
            "update are not in it, so a run that goes on from it begins with the first micro-batch of a step.",
            ranks=[0],
            level=logging.WARNING,
        )
    engine._core.saver.lock.replaces = True  # as DeepSpeed does, whose callers name each checkpoint
    engine._core.save(
        folder / tag,
        state=state,
        wait=True,
        frozen=frozen,
        latest=save_latest,
        gradients="leave",
        shared=False if local else None,
    )
    if engine.global_rank == 0 or (local and int(os.environ.get("LOCAL_RANK", "0")) == 0):
        script = folder / "zero_to_fp32.py"
        script.write_text(SCRIPT)
        script.chmod(0o755)
    engine._core.sharded.gate.meet("the end of engine.save_checkpoint()")
    return True


def _one_tag(engine: SavedEngine, tag: str) -> str:
    """Rank 0's tag; ranks that differ are told, or refused, as the config says."""
    mode = engine._settings.tag_validation
    said = _everyone(engine, tag)
    if len(set(said)) > 1 and mode != "ignore":
        told = (
            f"the checkpoint tag name is not consistent across all ranks: {', '.join(dict.fromkeys(said))}; give every "
            "rank the same."
        )
        if mode == "fail":
            raise WrongCall(told)
        log_dist(told + f" {said[0]!r} of rank 0 is used.", ranks=[0], level=logging.WARNING)
    return said[0]


def _everyone(engine: SavedEngine, text: str) -> list[str]:
    """What every rank says, by rank."""
    engine._core.sharded.gate.meet("engine.save_checkpoint() or engine.load_checkpoint()")
    engine._messages += 1
    return engine._core.sharded.comm.job.exchange(f"{OWN}/{engine._messages}", text)


def _own_state(engine: SavedEngine) -> dict[str, Any]:
    schedule = engine.lr_scheduler.state_dict() if hasattr(engine.lr_scheduler, "state_dict") else None
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "dp_world_size": engine.dp_world_size,
        "mp_world_size": engine.mp_world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "lr_scheduler": _packed({"state": schedule}, "lr_scheduler") if schedule is not None else None,
        "ds_version": version,
        "ds_config": json.loads(json.dumps(engine._settings.raw, default=str)),  # which may have any object
        "buffer_names": _buffer_names(engine.module),
    }


def _buffer_names(module: nn.Module) -> list[str]:
    """Of those that are saved."""
    return [
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    ]


def _with_own(client: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What the user kept, beside what DeepSpeed's interface adds to it; the user's win."""
    names = (*COUNTS, "dp_world_size", "mp_world_size", *TOLD)
    return {name: own[name] for name in names if name in own} | dict(client)


def _packed(state: Mapping[str, Any], what: str = "client_state") -> dict[str, Any]:
    """The entries that a checkpoint keeps as they are, and the pickles of the others.

    Raises:
        CheckpointError: an entry cannot be saved, or would be refused when it is read.
    """
    plain: dict[str, Any] = {}
    pickled: dict[str, Tensor] = {}
    for name, value in state.items():
        try:
            encode(value, name, {})
        except CheckpointError:
            data = dump_object(value, f"{what}[{name!r}]")
            pickled[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            plain[name] = value
    return {"plain": plain, "pickled": pickled}


def _unpacked(state: Mapping[str, Any], where: Path, what: str = "client_state") -> dict[str, Any]:
    """
    Raises:
        CheckpointError: an entry is an object that only those read who trust the checkpoint.
    """
    plain, pickled = state.get("plain", {}), state.get("pickled", {})
    if not isinstance(plain, Mapping) or not isinstance(pickled, Mapping):
        raise CheckpointError(f"{where} is damaged: its {what} is not a mapping.")
    said = dict(plain)
    for name, data in pickled.items():
        if not isinstance(data, Tensor) or data.dtype != torch.uint8:
            raise CheckpointError(f"{where} is damaged: {what}[{name!r}] is no bytes.")
        said[name] = load_object(data.numpy().tobytes(), f"{what}[{name!r}] of {where}")
    return said


# -- loading


@outside_inference()
def load_checkpoint(
    engine: SavedEngine,
    load_dir: Any,
    tag: Any,
    *,
    strict: bool,
    optimizer: bool,
    scheduler: bool,
    module_only: bool,
    custom: Callable[..., Any] | None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Goes on from a checkpoint of ours or of DeepSpeed's, written under any stage and number of ranks.

    Args:
        load_dir: the folder that checkpoints were saved in.
        tag: which one; None: the one that the file ``latest`` names, or with ``checkpoint.load_universal``
            ``latest_universal``, if that is there.
        strict: False loads the parameters that fit.
        optimizer: False: the optimizer's state stays.
        scheduler: False: the schedule's state stays.
        module_only: parameters and buffers only.
        custom: loads the model by itself: ``custom(src=state dict, dst=model)``; the optimizer's state stays.

    Returns:
        The checkpoint's path and the ``client_state`` that it was saved with, beside ``global_steps``,
        ``global_samples``, ``skipped_steps``, ``dp_world_size``, ``mp_world_size``, ``ds_version``, ``ds_config`` and
        ``buffer_names`` as they were then; ``(None, None)`` without a tag and a file ``latest``.

    Raises:
        CheckpointError: on all ranks: it is not there, not complete or damaged, or does not fit.
    """
    call = "engine.load_checkpoint()"
    engine._core.sharded.gate.meet(call, check=lambda: check_folder(call, load_dir, "a folder of checkpoints"))
    folder = Path(load_dir)
    names = (LATEST_UNIVERSAL, LATEST) if engine._setting("checkpoint.load_universal") else (LATEST,)
    named = next((folder / name for name in names if (folder / name).is_file()), None)
    if tag is None and named is not None:
        tag = read_name(named)
        if tag is None:
            raise CheckpointError(f"{named} is damaged: it does not name a folder beside it.")
    said = _everyone(engine, "" if tag is None else str(tag))
    if len(set(said)) > 1:
        raise CheckpointError(
            f"engine.load_checkpoint({str(folder)!r}): ranks would load different tags: "
            f"{', '.join(repr(one or None) for one in dict.fromkeys(said))}; give every rank the same."
        )
    if tag is None:
        log_dist(
            f"there is no file {folder / LATEST}, so nothing was loaded: give the tag of a checkpoint.",
            ranks=[0],
            level=logging.WARNING,
        )
        return None, None
    path = folder / str(tag)
    weights_only = module_only or not optimizer or engine.basic_optimizer is None
    foreign = not (path / INDEX).is_file() and deepspeed_folder(path) is not None
    with _imported(engine, path) if foreign else _as_it_is(path) as source:
        client, own = _states(engine, path, source, scheduler=scheduler and not module_only)  # before any is changed
        random = rng_state()
        if custom is not None:
            with _opened(engine, source) as checkpoint:
                state = {n: checkpoint.parameter(n) for p in checkpoint.index.parameters for n in (p.name, *p.also)}
                state |= {name: checkpoint.buffer(name) for name in checkpoint.buffers} | checkpoint.extra()
            load_module_state_dict(engine, state, strict, custom)
        else:
            engine._core.load(source, weights_only=weights_only, strict=strict)
            engine.micro_steps -= engine._begun  # gradients of a step begun are dropped
            engine._begun = 0
        set_rng_state(random)  # DeepSpeed's checkpoints have none
    if not module_only:
        engine.global_steps, engine.skipped_steps = own["global_steps"], own["skipped_steps"]
        engine.global_samples = own.get("global_samples", engine.global_steps * engine.train_batch_size())
        if scheduler and engine.lr_scheduler is not None and own.get("lr_scheduler") is not None:
            engine.lr_scheduler.load_state_dict(own["lr_scheduler"])
    engine.loaded_checkpoint_dp_world_size = own.get("dp_world_size")
    engine.loaded_checkpoint_mp_world_size = own.get("mp_world_size")
    engine.observers.step = engine.global_steps
    engine._tell_boundary()
    return str(path), _with_own(client, own)


def _states(engine: SavedEngine, path: Path, source: Path, *, scheduler: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """See :func:`client_state_of`; of a checkpoint ``source`` that was made of DeepSpeed's ``path``, what that has.

    Raises:
        CheckpointError: on all ranks, if any of them cannot read it.
    """
    client, own, problem = dict[str, Any](), dict[str, Any](), None
    try:
        with _opened(engine, source) as checkpoint:
            client, own = _client_state(checkpoint, scheduler=scheduler)
        if source != path:
            own = _foreign_state(path)
    except (CheckpointError, OSError) as error:
        problem = error
    said = _everyone(engine, "" if problem is None else str(problem))
    if any(said):
        alike = len(set(said)) == 1
        raise CheckpointError(said[0] if alike else f"{path} is not loaded: {by_rank(said)}.") from problem
    return client, own


def client_state_of(path: Path, *, scheduler: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``client_state`` of a checkpoint of ours, and what the compatibility layer kept beside it.

    Args:
        path: of the checkpoint.
        scheduler: False leaves out the schedule's state.

    Raises:
        CheckpointError: it is not complete or damaged, or has objects that only those read who trust it.
    """
    with Checkpoint(path) as checkpoint:
        return _client_state(checkpoint, scheduler=scheduler)


def _opened(engine: SavedEngine, path: Path) -> Checkpoint:
    """A checkpoint of ours, of which each host may have a part; every rank calls it."""
    engine._core.sharded.gate.meet("engine.load_checkpoint()")
    engine._messages += 1
    return open_together(engine._core.sharded, path, f"{OWN}/{engine._messages}")


def _client_state(checkpoint: Checkpoint, *, scheduler: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    path = checkpoint.path
    state, step = checkpoint.run().get("state", {}), checkpoint.index.step
    if not isinstance(state, Mapping) or not isinstance(state.get(OWN) or {}, Mapping):
        raise CheckpointError(f"{path} is damaged: what it keeps of the run is not a mapping.")
    own: dict[str, Any] = {"global_steps": step, "skipped_steps": 0} | dict(state.get(OWN) or {})
    kept = own.pop("lr_scheduler", None)
    if kept is not None and scheduler:
        own["lr_scheduler"] = _unpacked(kept, path, "lr_scheduler").get("state")
    if OWN in state:
        return _unpacked(state, path), _counted(own, path)
    return dict(state), own  # saved by shardfold.Engine


def _counted(own: dict[str, Any], path: Path) -> dict[str, Any]:
    """
    Raises:
        CheckpointError: what counts is no number.
    """
    for name in COUNTS:
        if name in own and type(own[name]) is not int:
            raise CheckpointError(f"{path} is damaged: {name} of its run is not a number.")
    return own


@contextmanager
def _as_it_is(path: Path) -> Iterator[Path]:
    yield path


@contextmanager
def _imported(engine: SavedEngine, path: Path) -> Iterator[Path]:
    """A checkpoint of ours, made by rank 0 of one of DeepSpeed's, beside its run until all have read it.

    Raises:
        CheckpointError: on all ranks: it cannot be read, or there is no room beside it.
    """
    said, problem = "", None
    if engine.global_rank == 0:
        try:
            target = tempfile.mkdtemp(prefix=f".{path.parent.name}-", dir=path.parent.parent)
            said = f"+{import_from(path, Path(target) / path.name).path}"
        except (CheckpointError, OSError) as error:
            said, problem = f"!{error}", error
    said = _everyone(engine, said)[0]
    if said.startswith("!"):
        raise CheckpointError(said[1:]) from problem
    try:
        yield Path(said[1:])
        _everyone(engine, "read")
    finally:
        if engine.global_rank == 0:
            shutil.rmtree(Path(said[1:]).parent, ignore_errors=True)


def _foreign_state(path: Path) -> dict[str, Any]:
    """What the compatibility layer keeps, of one of DeepSpeed's folders."""
    model = DeepSpeedFolder.open(path)._model
    names = ("global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size", "lr_scheduler")
    own = {"global_steps": 0, "skipped_steps": 0} | {name: model[name] for name in names if name in model}
    own |= {name: model[name] for name in TOLD if name in model and is_plain(model[name])}
    if not is_plain(own.get("lr_scheduler")):
        log_dist(
            f"the schedule's state in {path} is left out: it has objects, of which nothing runs here.",
            ranks=[0],
            level=logging.WARNING,
        )
        del own["lr_scheduler"]
    return _counted(own, path)


# -- the model's values


@outside_inference()
def module_state_dict(
    engine: SavedEngine,
    destination: dict[str, Any] | None,
    prefix: str,
    keep_vars: bool,
    exclude_frozen_parameters: bool,
) -> dict[str, Any]:
    """See :meth:`DeepSpeedEngine.module_state_dict`."""
    if engine._settings.sizes.pipeline > 1:
        return _of_stages(engine, destination, prefix, exclude_frozen_parameters)
    if engine.zero_optimization_partition_weights() or engine.mp_world_size > 1:
        whole = _whole(engine, exclude_frozen_parameters, everywhere=True)
        assert whole is not None
        return _prefixed(_begun(destination), whole, prefix)
    state = engine.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # pyright: ignore
    if exclude_frozen_parameters:
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                state.pop(prefix + name, None)
    return state


def _of_stages(
    engine: SavedEngine, destination: dict[str, Any] | None, prefix: str, exclude_frozen: bool
) -> dict[str, Any]:
    """The whole model's, on every rank, in the dtype that forward reads; each value is on one stage."""
    whole = engine._core.state_dict(frozen="skip" if exclude_frozen else "keep")
    dtype = engine._core.precision.compute
    for name, value in whole.items():
        wide = isinstance(value, Tensor) and value.dtype == torch.float32
        whole[name] = value.to(TORCH_DTYPES[dtype]) if wide else value
    return _prefixed(_begun(destination), whole, prefix)


def _begun(destination: dict[str, Any] | None) -> dict[str, Any]:
    """The state dict to add to: the user's, or one that has versions."""
    if destination is not None:
        return destination
    begun: OrderedDict[str, Any] = OrderedDict()
    cast(Any, begun)._metadata = OrderedDict()
    return begun


def _prefixed(state: dict[str, Any], whole: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Adds a state dict to ``state`` below ``prefix``, with the versions of its modules."""
    state.update({prefix + name: value for name, value in whole.items()})
    versions: Any = getattr(state, "_metadata", None)
    if versions is not None:
        versions.update({(prefix + path).rstrip("."): said for path, said in cast(Any, whole)._metadata.items()})
    return state


@outside_inference()
def consolidated(engine: SavedEngine, exclude_frozen_parameters: bool) -> dict[str, Tensor] | None:
    """Whole values in the dtype that forward reads, on the CPU of rank 0; None on others."""
    if engine._settings.sizes.pipeline > 1:
        whole = _of_stages(engine, None, "", exclude_frozen_parameters)
        return whole if engine.global_rank == 0 else None
    return _whole(engine, exclude_frozen_parameters, everywhere=False)


def _whole(engine: SavedEngine, exclude_frozen: bool, *, everywhere: bool) -> dict[str, Any] | None:
    """16 MiB, or one segment, are whole on the device at a time, and one parameter of which ranks have parts."""
    core = engine._core
    core.sharded.gate.meet("a consolidated state dict", follow=True)
    keeps = everywhere or core.rank == 0
    segments = [s for unit in core.units for s in unit.segments]
    segments = [s for s in segments if not exclude_frozen or any(p.requires_grad for p in s.parameters)]
    shards = [
        (s, rest, s.table.rest.over)
        if (rest := s.shard("params")) is not None
        else (s, s.shard("master"), s.table.master.over)
        for s in segments
    ]
    joining = Joining(core, lambda text: _everyone(engine, text))
    values: dict[int, Tensor] = {}
    for segment, flat in whole_segments(core.sharded.comm, shards, "a consolidated state dict"):  # pyright: ignore
        for parameter, view in zip(segment.parameters, segment.views_of(flat), strict=True):
            if parameter.requires_grad or not exclude_frozen:
                whole = joining.whole(parameter, view)
                if keeps:
                    values[id(parameter)] = whole.cpu().clone()
    return own_state(engine.module, values) if keeps else None


@outside_inference()
def load_module_state_dict(
    engine: SavedEngine,
    state: Mapping[str, Tensor],
    strict: bool,
    custom: Callable[..., Any] | None,
    may_miss: Iterable[str] | None = None,
) -> None:
    """See :meth:`DeepSpeedEngine.load_module_state_dict`."""
    if engine.mp_world_size > 1 and engine._settings.sizes.pipeline == 1:
        joining = Joining(engine._core, lambda text: _everyone(engine, text))
        named = dict(engine.module.named_parameters(remove_duplicate=False))
        state = {
            name: joining.part(named[name], value) if name in named and isinstance(value, Tensor) else value
            for name, value in state.items()
        }
    if custom is None:
        names = set(engine.module.state_dict()) if may_miss is not None else set()
        allowed = {name for name in may_miss or () if name in names and name not in state}
        if strict and allowed and not set(state) - names and not names - set(state) - allowed:
            strict = False
        with loading_state():
            engine._core.load_state_dict(state, strict=strict)
        return
    with engine._core.gathered(write=True):
        custom(src=state, dst=engine.module)


def save_16bit_model(engine: SavedEngine, save_dir: Any, save_filename: str, exclude_frozen_parameters: bool) -> bool:
    """Writes the weights that forward reads as one file of ``torch.save``; every rank calls it.

    Args:
        save_dir: is made if it is not there.
        save_filename: of the file, which rank 0 writes.
        exclude_frozen_parameters: leaves out what needs no gradient.

    Returns:
        Whether it was written: at stage 3 not without ``stage3_gather_16bit_weights_on_model_save``.
    """
    target = Path(save_dir) / save_filename
    if engine.zero_optimization_partition_weights() and not engine._settings.gather_16bit_on_save:
        log_dist(
            f"{target} was not written, as stage3_gather_16bit_weights_on_model_save is false.",
            ranks=[0],
            level=logging.WARNING,
        )
        return False
    state = consolidated(engine, exclude_frozen_parameters)
    if state is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as draft:
            torch.save(state, draft)
    engine._core.sharded.gate.meet("the end of engine.save_16bit_model()")
    return True


def give_back(engine: SavedEngine) -> None:
    """Closes the engine underneath; if its values cannot be had any more, without them."""
    if engine._settings.sizes.pipeline > 1:  # values of other stages are on other ranks
        engine._core.close()
        return
    try:
        engine._core.close_split()
    except ShardfoldError as error:
        log_dist(f"the model is left without its values: {error}", ranks=[-1], level=logging.WARNING)
        engine._core.close()
