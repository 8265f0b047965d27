"""A freed parameter that answers: while its memory is given back, a parameter says so instead of crashing.

Reading a tensor whose storage is gone is a segmentation fault, or worse, other memory. While only a shard is here the
parameter's class is swapped: what needs no memory (shape, dtype, gradient hooks ...) answers, anything else raises one
sentence that names the parameter. The object stays the same, so optimizers, ties and users' references hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardfold.errors import FreedParameterError
from shardfold.torch_internals import copies_shallowly, no_subclass_functions, without_user_modes

__all__ = [
    "CONVERSIONS",
    "MEMORY",
    "METADATA",
    "SET_DATA",
    "FreedParameter",
    "Hollow",
    "keeps_dtype",
    "outline",
    "seal",
    "unseal",
]

_FREED = "_shardfold_freed"
"""Where a freed parameter keeps ``(name, class to give back, gather)``: in its own ``__dict__``, because a weak table
beside it costs several times as much, and would keep the parameter alive, which ``gather`` refers to."""

_OUTLINE = "_shardfold_outline"
_HOLLOW = "_shardfold_hollow"

METADATA: frozenset[Any] = (
    frozenset(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "requires_grad",
            "grad",
            "is_leaf",
            "ndim",
            "layout",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_nested",
            "is_quantized",
            "itemsize",
            "nbytes",
            "grad_fn",
            "names",
            "_version",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
            "grad_dtype",
        )
        if hasattr(Tensor, name)
    )
    | frozenset(
        getattr(Tensor, name)
        for name in (
            "size",
            "dim",
            "numel",
            "nelement",
            "stride",
            "element_size",
            "is_floating_point",
            "is_complex",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "requires_grad_",
            "__len__",
            "ndimension",
            "is_contiguous",
            "get_device",
            "has_names",
            "is_signed",
            "is_inference",
            "is_conj",
            "is_neg",
            "new_empty",
            "new_zeros",
            "new_ones",
        )
        if hasattr(Tensor, name)
    )
    | {torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like}
    | {torch.numel, torch.is_floating_point, torch.is_complex}
    | {copies_shallowly}
    | {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}
    | {getattr(Tensor, name).__delete__ for name in ("grad",)}
)  # pyright: ignore[reportAttributeAccessIssue]


CONVERSIONS: frozenset[Any] = frozenset(
    getattr(Tensor, name) for name in ("to", "cpu", "cuda", "float", "double", "half", "bfloat16")
)
SET_DATA: Any = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_COMPATIBLE: Any = copies_shallowly if copies_shallowly is not torch.numel else None
_READS: frozenset[Any] = CONVERSIONS | {
    Tensor.detach,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.type,
    Tensor.data.__get__,  # pyright: ignore[reportAttributeAccessIssue]
}
_VIEWS: frozenset[Any] = frozenset({Tensor.detach, Tensor.data.__get__})  # pyright: ignore[reportAttributeAccessIssue]
"""Of a hollow tensor these are hollow too: what is written into them is not lost in silence."""

MEMORY: frozenset[Any] = frozenset(
    getattr(Tensor, name) for name in ("untyped_storage", "storage", "storage_offset", "data_ptr")
)
"""What an outline answers too: clients look for tied weights by their memory, and it has some."""


class FreedParameter(nn.Parameter):
    """The class of a parameter while its memory is given back: metadata answers, anything else raises a sentence.

    Reading such memory would be a segmentation fault. Swapping the class keeps the very object, so optimizers, tied
    modules and users' references stay valid.
    """

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or (func in MEMORY and _OUTLINE in args[0].__dict__):
            with no_subclass_functions():
                return func(*args, **(kwargs or {}))
        if func is _COMPATIBLE and any(isinstance(arg, Hollow) for arg in args):
            return True  # `module.to(...)` is to put back what a conversion gave, which the next row takes for nothing
        if func == SET_DATA and isinstance(args[1], Hollow) and args[1].dtype == args[0].dtype:
            return None  # the whole values are made on their own device, whenever they are made
        freed = list(_freed_in([*args, *(kwargs or {}).values()]))
        gathers = [parameter.__dict__[_FREED][2] for parameter in freed]  # the first may gather all of them
        with without_user_modes():
            gathered = all([gather() for gather in gathers])
        if gathered and not any(isinstance(parameter, FreedParameter) for parameter in freed):
            return func(*args, **(kwargs or {}))  # they were gathered: they are ordinary parameters now
        if func in _READS and getattr(gathers[0], "hollow", False) and args[0] is freed[0]:
            return Hollow.of(freed[0], func, args[1:], kwargs or {})
        if func is torch.equal and len(freed) == 2 and (equals := getattr(gathers[0], "equals", None)) is not None:
            return equals(gathers[1])  # so transformers looks whether weights of a file are tied
        if func is Tensor.detach or func in CONVERSIONS:
            shape_of = getattr(gathers[0], "outline", None)
            found = shape_of(freed[0]) if shape_of is not None else None
            if found is not None and func is Tensor.detach:
                return found
            if found is not None and keeps_dtype(func, *args, **(kwargs or {})):
                return args[0]  # the whole values are made on their own device, whenever they are made
        if func == SET_DATA and args[0] is args[1]:
            return None  # `module.to(...)` puts what a conversion gave there
        _refuse(getattr(func, "__qualname__", None) or str(func), args, kwargs)

    def __reduce_ex__(self, proto: Any) -> Any:
        _refuse("pickling", (self,), None)

    def __deepcopy__(self, memo: Any) -> Any:
        copied = getattr(self.__dict__[_FREED][2], "copied", None)
        if copied is not None:
            if id(self) not in memo:
                memo[id(self)] = copied(self)
            return memo[id(self)]
        if not self.__dict__[_FREED][2]():
            _refuse(
                "copy.deepcopy (of PyTorch's AveragedModel too, in place of which there is sf.Average)", (self,), None
            )
        return self.__deepcopy__(memo)  # it is of its own class again

    def __format__(self, spec: str) -> str:
        return _refuse("formatting", (self,), None) if spec else repr(self)

    # The two methods that reach memory without asking the class.
    def set_(self, *args: Any, **kwargs: Any) -> Any:
        return _there(self, "Tensor.set_").set_(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        return _there(self, "Tensor.as_subclass").as_subclass(cls)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter {_name(self)!r} of shape {tuple(self.shape)} (only this rank's shard is in memory)"


class Hollow(Tensor):
    """What reading a freed parameter gives where it may be read: no elements, of its dtype and on its device.

    An ordinary tensor but that writing into it raises: the values would be lost.
    """

    @classmethod
    def of(cls, freed: FreedParameter, read: Callable[..., Tensor], args: Any, kwargs: Any) -> Hollow:
        """What ``read(freed, ...)`` gives: a conversion, a copy, or a view of the data."""
        with no_subclass_functions():
            empty = torch.empty(0, dtype=freed.dtype, device=freed.device)
            made = (read(empty, *args, **kwargs) if read not in _VIEWS else empty).as_subclass(cls)
        name, _, gather = freed.__dict__[_FREED]
        vars(made)[_HOLLOW] = (name, getattr(gather, "way", None))
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        into = (kwargs or {}).get("out", args[0] if args else None)
        writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in (kwargs or {})
        if writes and isinstance(into, Hollow) and func not in (Tensor.requires_grad_, Tensor.share_memory_):
            where, way = into.__dict__[_HOLLOW]
            raise FreedParameterError(_sentence(f"writing by {name}", where, way))
        with no_subclass_functions():
            made = func(*args, **(kwargs or {}))
        if func in _VIEWS:
            made = made.as_subclass(cls)
            vars(made)[_HOLLOW] = args[0].__dict__[_HOLLOW]
        return made

    def __reduce_ex__(self, proto: Any) -> Any:
        with no_subclass_functions():
            return self.as_subclass(Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: Any) -> Any:  # an ordinary tensor, as what is unpickled and what a clone is
        if id(self) not in memo:
            with no_subclass_functions():
                memo[id(self)] = self.as_subclass(Tensor).clone()
        return memo[id(self)]


def keeps_dtype(conversion: Callable[..., Tensor], parameter: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether ``parameter.to(...)``, or such, would give its dtype again; only metadata is read."""
    probe = torch.empty((), dtype=parameter.dtype, device=parameter.device)
    kwargs.pop("memory_format", None)
    return conversion(probe, *args, **kwargs).dtype == parameter.dtype


def _freed_in(values: Any) -> Iterator[FreedParameter]:
    for value in values:
        if isinstance(value, FreedParameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _freed_in(value)


def _there(parameter: Any, what: str) -> Any:
    """The parameter with its memory, of its own class; it may have got that already, from one of the arguments."""
    if isinstance(parameter, FreedParameter):
        with without_user_modes():
            gathered = parameter.__dict__[_FREED][2]()
        if not gathered or isinstance(parameter, FreedParameter):
            _refuse(what, (parameter,), None)
    return parameter


def _name(freed: FreedParameter) -> str:
    return freed.__dict__[_FREED][0]


def _refuse(what: str, args: Any, kwargs: Any) -> NoReturn:
    freed = next(_freed_in([*args, *(kwargs or {}).values()]), None)
    name = _name(freed) if freed is not None else "a parameter"
    way = getattr(freed.__dict__[_FREED][2], "way", None) if freed is not None else None
    raise FreedParameterError(_sentence(what, name, way))


def _sentence(what: str, name: str, way: str | None) -> str:
    return (
        f"{what} touched {name!r} while only this rank's shard of it is in memory: "
        f"{way or f'wrap the access in `with engine.gathered({name!r}):`, which all ranks enter'}."
    )


def outline(parameter: nn.Parameter, name: str, gate: Callable[[], bool]) -> nn.Parameter:
    """A sealed parameter that tells the shape, dtype and device of another, and has one element of memory."""
    with no_subclass_functions():
        shown = nn.Parameter(parameter.new_empty(1).expand(parameter.shape), requires_grad=False)
    vars(shown)[_OUTLINE] = True
    seal(shown, name, gate)
    return shown


def seal(parameter: nn.Parameter, name: str, gather: Callable[[], bool]) -> None:
    """From now on the parameter only answers what needs no memory.

    Args:
        parameter: whose memory is given back.
        name: for messages.
        gather: called when it is touched; True if its memory is there again. It may have an attribute ``way``, which
            ends the message; ``hollow``, True where reading the data gives a tensor of no elements instead of an error;
            a method ``outline(parameter)``, whose result, if any, is the answer to ``detach()`` where the memory is not
            there; and a method ``copied(parameter)``, whose result is the parameter's deep copy.
    """
    state: Any = parameter.__dict__
    state[_FREED] = (name, type(parameter), gather)
    parameter.__class__ = FreedParameter


def unseal(parameter: nn.Parameter) -> None:
    """Back to the class it had."""
    if type(parameter) is FreedParameter:
        state: Any = parameter.__dict__
        parameter.__class__ = state.pop(_FREED)[1]
