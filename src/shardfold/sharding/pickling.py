"""Copies and pickles of a model under an engine: plain modules with values of their own, and no engine in them.

``copy.deepcopy`` and ``pickle`` (so ``torch.save`` too) ask an object for its ``__reduce_ex__``, on the instance first.
Two things would go wrong with the usual answer: hooks of the engine, and a forward that it put in place of the
module's, would be copied with the module, or shared with the copy; and a parameter is a view of its unit's flat, whose
whole storage would be written for each parameter. So hooked modules and parameters answer for themselves. Dictionaries
of hooks cannot be replaced or filtered where they are: the handles of the user's own hooks refer to them.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardfold.sharding.freed import FreedParameter

__all__ = ["copy_alone", "copy_without_hooks", "forget_alone", "forget_hooks", "replace_forward", "restore_forward"]

_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OWN_ANSWERS = ("__reduce_ex__", "__deepcopy__")


class _Answers:
    """What a hooked module says when it is to be copied: itself, without the hooks whose ids are in ``hooks`` and
    without the forwards that were put in place of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.hooks: set[int] = set()
        # Forwards that were put there, each with what it stands in place of: None, or what the module itself, and not
        # its class, had; the last runs, and may call the ones before.
        self.forwards: list[tuple[Any, Any]] = []

    def reduce(self, protocol: Any) -> Any:
        module = _alive(self._module)
        kind: Any = type(module)
        with _without(module, self):
            made = kind.__reduce_ex__(module, protocol)
            if isinstance(made, tuple) and len(made) > 2 and made[2] is vars(module):
                made = (*made[:2], dict(vars(module)), *made[3:])
        return made

    def deepcopy(self, memo: dict[int, Any]) -> Any:
        module = _alive(self._module)
        with _without(module, self):
            return type(module).__deepcopy__(module, memo)  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def find(module: nn.Module) -> _Answers | None:
        answer = module.__dict__.get("__reduce_ex__")
        found = getattr(answer, "__self__", None)
        return found if isinstance(found, _Answers) else None

    @staticmethod
    def of(module: nn.Module) -> _Answers:
        """Those of the module, which has them from now on."""
        answers = _Answers.find(module)
        if answers is None:
            answers = _Answers(module)
            module.__dict__["__reduce_ex__"] = answers.reduce
            if hasattr(type(module), "__deepcopy__"):  # torch.fx.GraphModule has one
                module.__dict__["__deepcopy__"] = answers.deepcopy
        return answers

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """The module runs ``forward`` in place of its own."""
        self.forwards.append((forward, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    def restore(self, module: nn.Module, forward: Any) -> None:
        """It runs what was there before ``forward`` again, or what was put there since then."""
        own = next(own for each, own in self.forwards if each is forward)
        if module.__dict__.get("forward") is forward:
            _put(module, own)
        self.forwards = [each for each in self.forwards if each[0] is not forward]
        self.leave(module)

    def leave(self, module: nn.Module) -> None:
        """Takes the answers off a module that has nothing left to hide."""
        if not self.hooks and not self.forwards:
            for name in _OWN_ANSWERS:
                module.__dict__.pop(name, None)


def copy_without_hooks(module: nn.Module, hooks: Iterable[int]) -> None:
    """From now on copies and pickles of ``module`` lack the hooks with these ids too."""
    _Answers.of(module).hooks.update(hooks)


def forget_hooks(module: nn.Module, hooks: Iterable[int]) -> None:
    """Takes back :func:`copy_without_hooks`: these hooks are no more."""
    answers = _Answers.find(module)
    if answers is not None:
        answers.hooks.difference_update(hooks)
        answers.leave(module)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """From now on ``module`` runs ``forward`` in place of its own; copies and pickles of it run their own."""
    _Answers.of(module).replace(module, forward)


def restore_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Takes back :func:`replace_forward` by ``forward``; one that was put there since then stays."""
    _Answers.of(module).restore(module, forward)


def _put(module: nn.Module, forward: Any) -> None:
    """The module itself has this forward; None: that of its class."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def copy_alone(parameter: nn.Parameter) -> None:
    """From now on a pickle of ``parameter`` holds its own elements only, not the flat that it is a view of."""
    this = weakref.ref(parameter)

    def reduce(protocol: Any) -> Any:
        parameter = _alive(this)
        kind: Any = type(parameter)
        if isinstance(parameter, FreedParameter):
            return kind.__reduce_ex__(parameter, protocol)
        alone = copy.deepcopy(parameter)
        alone.__dict__.update({name: value for name, value in vars(parameter).items() if name != "__reduce_ex__"})
        return kind.__reduce_ex__(alone, protocol)

    state: Any = parameter.__dict__
    state["__reduce_ex__"] = reduce


def forget_alone(parameter: nn.Parameter) -> None:
    """Takes back :func:`copy_alone`: the parameter has memory of its own."""
    vars(parameter).pop("__reduce_ex__", None)


def _alive(reference: Callable[[], Any]) -> Any:
    found = reference()
    assert found is not None  # it is the object that was asked
    return found


@contextmanager
def _without(module: nn.Module, answers: _Answers) -> Iterator[None]:
    """Inside, ``vars(module)`` is what it would be without the engine."""
    state = module.__dict__
    replaced = bool(answers.forwards) and state.get("forward") is answers.forwards[-1][0]
    names = (*_HOOK_DICTS, *_OWN_ANSWERS, *(("forward",) if replaced else ()))
    kept = {name: state[name] for name in names if name in state}
    for name in _OWN_ANSWERS:
        state.pop(name, None)
    for name in _HOOK_DICTS:
        if name in kept:
            state[name] = OrderedDict((key, hook) for key, hook in kept[name].items() if key not in answers.hooks)
    if replaced:
        _put(module, answers.forwards[0][1])
    try:
        yield
    finally:
        state.update(kept)
