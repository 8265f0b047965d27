"""Whole values in the places of a model's parameters, for as long as its own code makes or reads a state dict.

What a module keeps is its own affair: hooks, versions, ``get_extra_state`` and overrides of ``_save_to_state_dict`` and
``_load_from_state_dict`` make of values what a state dict has, and the other way round. They run here as in plain
PyTorch, on values that are whole, on the CPU and nobody else's; the engine's are not touched until all went well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardfold.comm.device_mesh import is_dtensor
from shardfold.errors import ModelError
from shardfold.torch_internals import NormBase

__all__ = ["EXTRA", "Read", "metadata_of", "own_state", "reads_values", "takes_extra", "with_metadata"]

EXTRA = "_extra_state"
"""What PyTorch calls a module's extra state, behind its path."""


class _Receiver(nn.Parameter):
    """Stands for a parameter that PyTorch's code alone loads: without memory, it remembers what is copied into it."""

    given: Tensor | None

    @staticmethod
    def like(parameter: Tensor) -> _Receiver:
        empty = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
        made = _Receiver(empty, requires_grad=parameter.requires_grad)
        made.receive(None)
        return made

    def receive(self, value: Tensor | None) -> None:
        """This is what it was given."""
        self.given = value

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], _Receiver):
            args[0].receive(args[1])
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


class _Place:
    """Where a tensor of the model is, what stands there meanwhile, and what was found there in the end."""

    def __init__(self, held: dict[str, Any], name: str, stands: Tensor) -> None:
        self.held, self.name, self.own, self.stands = held, name, held[name], stands
        self.version = stands._version
        self.found: Any = stands
        held[name] = stands

    def put_back(self) -> None:
        self.found = self.held.get(self.name)
        self.held[self.name] = self.own

    @property
    def written(self) -> bool:
        return self.found is not self.stands or self.stands._version != self.version


@contextmanager
def _standing(module: nn.Module, values: Mapping[int, Tensor], hollow: Iterable[str]) -> Iterator[list[_Place]]:
    """Inside, ``values`` stand for parameters, by ``id``, copies on the CPU for buffers, and modules ``hollow`` are
    not there."""
    places: list[_Place] = []
    away: list[tuple[dict[str, Any], str, nn.Module]] = []
    made: dict[int, Tensor] = {}
    try:
        for path in hollow:
            parent, _, name = path.rpartition(".")
            held = module.get_submodule(parent)._modules
            if (child := held.get(name)) is not None:
                away.append((held, name, child))
        for held, name, _ in away:
            held[name] = None
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    places.append(_Place(part._parameters, name, _stands_for(parameter, values, made)))
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    if id(buffer) not in made:
                        made[id(buffer)] = buffer.detach().cpu().clone()
                    places.append(_Place(part._buffers, name, made[id(buffer)]))
        yield places
    finally:
        for place in places:
            place.put_back()
        for held, name, child in away:
            held[name] = child


def _stands_for(parameter: nn.Parameter, values: Mapping[int, Tensor], made: dict[int, Tensor]) -> Tensor:
    if id(parameter) not in made:
        value = values.get(id(parameter))
        if value is None:
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        is_one = isinstance(value, nn.Parameter)
        made[id(parameter)] = value if is_one else nn.Parameter(value, requires_grad=parameter.requires_grad)
    return made[id(parameter)]


def own_state(module: nn.Module, whole: Mapping[int, Tensor], hollow: Iterable[str] = ()) -> OrderedDict[str, Any]:
    """What ``module.state_dict()`` gives where parameters have the values ``whole``, by ``id``, on the CPU, or in parts
    as DTensors; nothing of parameters that are not in it. Buffers that hooks write are written.

    Args:
        hollow: paths of modules that are not on this rank, of which it has nothing.

    Raises:
        ModelError: a hook wrote into a parameter; or it raised where some values are not there.
    """
    with _standing(module, whole, hollow) as places:
        try:
            state = module.state_dict()
        except Exception as error:
            if not hollow and all(not place.stands.is_meta for place in places):
                raise
            raise ModelError(
                f"a hook of the model's state dict failed ({type(error).__name__}: {error}) where some values are not: "
                "frozen ones that were left out, or those of other stages; let it read only what its own module has, "
                "or ask for the whole with frozen='keep' and without stages."
            ) from error
    for place in _written(module, places, "state dict"):
        with torch.no_grad():
            place.own.copy_(place.found)
    once: dict[Any, Any] = {}  # tied names have one tensor
    found = OrderedDict((name, _told(value, once)) for name, value in state.items() if not _is_meta(value))
    return with_metadata(found, getattr(state, "_metadata", metadata_of(module)))


def _written(module: nn.Module, places: Iterable[_Place], what: str) -> list[_Place]:
    """Buffers that were written.

    Raises:
        ModelError: so was a parameter; or it has another shape now.
    """
    written = [place for place in places if place.written]
    for place in written:
        if isinstance(place.own, nn.Parameter) or not _fits(place.found, place.own):
            name = next((n for n, p in module.named_parameters() if p is place.own), place.name)
            raise ModelError(
                f"a hook of the model's {what} wrote into {name!r}: it may read values; write them in "
                f"`with engine.gathered({name!r}, write=True):`."
            )
    return written


def _fits(found: Any, own: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == own.shape


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _told(value: Any, once: dict[Any, Any]) -> Any:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return value
    if is_dtensor(value):  # its memory is another tensor's
        return value
    kept = value.detach().cpu()
    return once.setdefault((kept.data_ptr(), kept.shape, kept.stride(), kept.dtype), kept)


def metadata_of(module: nn.Module) -> OrderedDict[str, dict[str, Any]]:
    """The versions of all modules, as ``state_dict()`` notes them."""
    named = module.named_modules(remove_duplicate=False)
    return OrderedDict((path, {"version": part._version}) for path, part in named)


def with_metadata(state: OrderedDict[str, Any], metadata: Any) -> OrderedDict[str, Any]:
    """``state``, from which PyTorch reads these when it loads it."""
    cast(Any, state)._metadata = metadata
    return state


# -- the other way round


def reads_values(module: nn.Module) -> set[int]:
    """Parameters, by ``id``, that code of the model's own may read or write when a state dict is loaded: those of
    modules with hooks, overrides or extra state, and of all that is inside of them."""
    found: set[int] = set()
    seen: set[int] = set()

    for part in module.modules():
        if id(part) not in seen and _loads_itself(part, root=part is module):
            for inner in part.modules():
                seen.add(id(inner))
                found |= {id(p) for p in inner._parameters.values() if p is not None}
    return found


def _loads_itself(part: nn.Module, *, root: bool) -> bool:
    kind = type(part)
    own = kind._load_from_state_dict not in (nn.Module._load_from_state_dict, NormBase._load_from_state_dict)
    if own or "_load_from_state_dict" in vars(part) or takes_extra(part):
        return True
    if root and (kind.load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(part)):
        return True
    return bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)


class Read:
    """What a state dict has for a model, by the model's own code; nothing of the model is changed but extra state.

    Args:
        module: whose ``load_state_dict()`` reads it.
        state: of all of the model.
        values: of parameters that :func:`reads_values` tells of, by ``id``, on the CPU; they are written.
        hollow: paths of modules that are not on this rank.

    Attributes:
        parameters: by ``id`` the values that they get.
        buffers: and buffers.
        missing, unexpected: names.

    Raises:
        ModelError: a value is no tensor, or has another shape.
    """

    def __init__(
        self, module: nn.Module, state: Mapping[str, Any], values: Mapping[int, Tensor], hollow: Iterable[str] = ()
    ) -> None:
        stand: dict[int, Tensor] = dict(values)
        for parameter in module.parameters():
            stand.setdefault(id(parameter), _Receiver.like(parameter))
        with _standing(module, stand, hollow) as places:
            try:
                said: Any = module.load_state_dict(state, strict=False)
            except RuntimeError as error:
                raise _misfit(module, state, error) from error
        self.missing: list[str] = sorted(getattr(said, "missing_keys", ()))
        self.unexpected: list[str] = sorted(map(str, getattr(said, "unexpected_keys", ())))
        self.parameters: dict[int, Tensor] = {}
        self.buffers: list[tuple[Tensor, Tensor]] = []
        for place in places:
            value = place.found
            if isinstance(value, _Receiver):
                value = value.given
            elif not isinstance(place.own, nn.Parameter) and not place.written:
                continue
            if value is None:
                continue
            if not _fits(value, place.own):
                raise ModelError(f"loading a state dict has replaced {place.name!r} by what has another shape.")
            if isinstance(place.own, nn.Parameter):
                self.parameters[id(place.own)] = value if value.is_meta else value.detach()
            else:
                self.buffers.append((place.own, value.detach()))


def _misfit(module: nn.Module, state: Mapping[str, Any], error: RuntimeError) -> ModelError:
    """The first thing that does not fit, in a sentence."""
    known = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    for name in sorted(state.keys() & known.keys()):
        value = state[name]
        if not isinstance(value, Tensor):
            return ModelError(f"the state dict has {name!r} of type {type(value).__name__}: give a tensor.")
        if value.shape != known[name].shape:
            return ModelError(
                f"the state dict gives {name!r} the shape {tuple(value.shape)}, but the model's is "
                f"{tuple(known[name].shape)}."
            )
    words = " ".join(line.strip() for line in str(error).splitlines()[:2])
    return ModelError(f"the state dict does not fit the model: {words.rstrip('.')}.")


# -- extra state


def takes_extra(part: nn.Module) -> bool:
    """Whether PyTorch gives the module its extra state when it loads a state dict."""
    return type(part).set_extra_state is not nn.Module.set_extra_state
