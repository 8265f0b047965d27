"""Events out of PyTorch: the only file that touches the internals of ``nn.Module`` and autograd.

Hooks do nothing but deliver: which unit is about to run forward, which is about to run backward, which parameter has
its gradient, when a pass begins and ends. What follows from an event is the engine's business.

    forward  of the model            begin_forward(context)    end_forward
    forward  of a unit's module        enter_forward(unit)    leave_forward(unit)
    backward of the model            begin_backward(context)  (gradient of an output of it, or of any unit, arrives)
    backward of a unit's module        enter_backward(unit)  (gradient of one of its outputs arrives)
    backward by another way            enter_aside(unit)     (a weight it saved is needed; see ``remembers``)
    gradient of a parameter            gradient(unit, place, grad)   (gradient_dropped, if a user's hook took it)
    end of the outermost backward    end_backward
    an exception leaves either       interrupt
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardfold.engine.announced import Announced
from shardfold.engine.pass_context import PassContext
from shardfold.parallel.pipeline.stages import StageDone
from shardfold.sharding.autograd import Kept, hear, inside_checkpoint, keep, tensors_in
from shardfold.sharding.pickling import copy_alone, copy_without_hooks, forget_hooks
from shardfold.sharding.tree import cast_floats, widened
from shardfold.sharding.unit import Life, Unit
from shardfold.torch_internals import (
    at_end_of_backward,
    in_backward,
    modes_are_on,
    pop_saved_hooks,
    push_saved_hooks,
    storage_key,
    top_saved_hooks,
    untraced,
    without_user_modes,
)

UP_TO_32 = (torch.float32, torch.bfloat16, torch.float16)

__all__ = ["UP_TO_32", "Hooks", "Listener", "Replaced", "cast_inputs", "inside_checkpoint", "tensors_in"]


class Listener(Protocol):
    """Who the events are delivered to."""

    def begin_forward(self, context: PassContext) -> None: ...
    def end_forward(self) -> None: ...
    def interrupt(self) -> None: ...
    def enter_forward(self, unit: Unit) -> None: ...
    def leave_forward(self, unit: Unit, *, interrupted: bool = False, aliased: bool = False) -> None: ...
    def begin_backward(self, context: PassContext, *, create_graph: bool = False) -> None: ...
    def remembers(self, unit: Unit | None = None) -> bool: ...
    def saved(self, unit: Unit) -> None: ...
    def enter_backward(self, unit: Unit) -> None: ...
    def enter_aside(self, unit: Unit) -> None: ...
    def gradient(self, unit: Unit, place: tuple[int, int], grad: Tensor) -> None: ...
    def gradient_dropped(self) -> None: ...
    def end_backward(self) -> None: ...


class Replaced(Protocol):
    """What puts forwards of its own in place of modules' (see ``activations``)."""

    def attach(self, units: Sequence[Unit], needs: Callable[[Unit], None]) -> None:
        """``needs`` is to be called with a unit whose forward runs again inside of a backward."""
        ...

    def remove(self) -> None: ...
    def begin_forward(self, inputs: Any) -> bool:
        """Of the model, in training; whether to :meth:`look`."""
        ...

    def look(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Any]]:
        """What is done with what autograd saves in it, on top of what is done already."""
        ...

    def end_forward(self, output: Any) -> None: ...
    def end_backward(self) -> None: ...


def _is_early() -> bool:
    """Whether what leaves a forward is the end of a stage."""
    return isinstance(sys.exc_info()[1], StageDone)


def _storage(tensor: Tensor) -> int | None:
    """What identifies a tensor's memory; None for tensors that have none of their own kind (sparse, fake)."""
    return storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else None


def cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    made = {name: cast_floats(value, dtype, UP_TO_32) for name, value in kwargs.items()}  # as torch.compile can trace
    return tuple([cast_floats(value, dtype, UP_TO_32) for value in args]), made


class Hooks:
    """The hooks of one engine on one model.

    Args:
        model: its forward is a pass.
        units: with ``modules`` set; units whose values never leave memory need no module hooks.
        listener: receives the events.
        announced: what kind of pass it is that begins.
        cast: floating-point inputs of the model are cast to it; None leaves them.
        casts: whether every module with parameters of its own gets its floating-point inputs in their dtype, as the
            parts of the model compute in several.
        autocast: dtype and type of device of the ``torch.autocast`` that forward runs under; None: without.
        replaced: follows the units.
        widens: whether what the model gives in 16 bits is cast to fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[Unit],
        listener: Listener,
        announced: Announced,
        cast: torch.dtype | None = None,
        casts: bool = False,
        autocast: tuple[torch.dtype, str] | None = None,
        replaced: Replaced | None = None,
        widens: bool = False,
    ) -> None:
        self._listener, self._model, self._replaced, self._announced = listener, model, replaced, announced
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, tuple[nn.Module, list[int]]] = {}  # modules and the ids of their hooks
        self._accumulators: list[Any] = []  # a parameter refers to its node weakly
        # What autograd calls when the backward under way is over, and lets go of if an exception ends that.
        self._queued: ref[Callable[[], None]] | None = None
        self._cast, self._casts, self._autocast, self._widens = cast, casts, autocast, widens
        self._casting: torch.autocast | None = None  # of the forward under way
        self._again = 0  # forwards of the model under way in a backward: it calls itself
        self._inside: list[tuple[Any, BaseException | None]] = []  # forwards under way, what was handled as they began
        self._pushed: list[nn.Module] = []  # those of them that remember what they save for backward
        self._early = False  # the last forward of the model ended behind the pieces of a stage
        try:
            self.attach(units)
        except BaseException:
            self.remove()
            raise

    def attach(self, units: Iterable[Unit]) -> None:
        """Hooks for these units, in place of those that there are."""
        self.remove()
        model = self._model
        units = list(units)
        if self._replaced is not None:
            self._replaced.attach(units, self._needs)
        self._units = [unit for unit in units if unit.split]  # whose memory comes and goes
        if self._casts:  # first, because ``_stay_last`` looks for a module's last one
            self._cast_between_parts(units)
        # torch.compile runs what is disabled as it is and compiles what lies between: the units' own work.
        self._on(model, model.register_forward_pre_hook(untraced(self._before_model), with_kwargs=True, prepend=True))
        self._on(model, model.register_forward_hook(untraced(self._after_model), always_call=True))
        for unit in units:
            if unit.split and not unit.spec.root:
                for module in unit.modules:
                    before, after = untraced(self._before_unit(unit)), untraced(self._after_unit(unit))
                    self._on(module, module.register_forward_pre_hook(before, prepend=True))
                    self._on(module, module.register_forward_hook(after, with_kwargs=True, always_call=True))
            for _, parameter in unit.parameters():
                copy_alone(parameter)
            for i, segment in enumerate(unit.trainable):
                for j, parameter in enumerate(segment.parameters):
                    # On the node that accumulates, because its hooks run after all of the parameter's: a hook of the
                    # user's that is registered later still finds ``parameter.grad``.
                    node = hear(parameter)
                    self._accumulators.append(node)
                    self._add(node.register_prehook(self._before_gradient))
                    self._add(node.register_hook(self._on_gradient(parameter, unit, i, j)))

    def _cast_between_parts(self, units: Sequence[Unit]) -> None:
        """Modules whose parameters keep a dtype of their own are left to the model's code."""
        dtypes = {id(p): s.dtype for unit in units for s in unit.segments if not s.spec.own for p in s.parameters}
        for module in self._model.modules():
            own = [dtypes[id(p)] for p in module._parameters.values() if p is not None and id(p) in dtypes]
            if own:
                cast = partial(cast_inputs, own[0])
                self._on(module, module.register_forward_pre_hook(cast, with_kwargs=True))

    def remove(self) -> None:
        """Takes every hook off the model, and off autograd, if its forward is under way."""
        self.forget()
        if self._replaced is not None:
            self._replaced.remove()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, ids in self._hooked.values():
            forget_hooks(module, ids)
        self._hooked.clear()
        self._accumulators.clear()

    def forget(self) -> None:
        """After an exception: what was under way is no longer, and the final callback of a backward will not come."""
        self._queued = None
        self._inside.clear()
        for _ in self._pushed:
            pop_saved_hooks()
        self._pushed.clear()
        self._again = 0
        self._stop_casting()

    def _stop_casting(self) -> None:
        if self._casting is not None:
            self._casting.__exit__(None, None, None)
            self._casting = None

    def _add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def _on(self, module: nn.Module, handle: RemovableHandle) -> None:
        """Keeps a hook of a module, which copies of the module will not have."""
        self._add(handle)
        self._hooked.setdefault(id(module), (module, []))[1].append(handle.id)
        copy_without_hooks(module, self._hooked[id(module)][1])

    def _stay_last(self, module: nn.Module) -> None:
        """What is behind the forward hook may give the values back: the user's own hooks run before, whenever they were
        registered."""
        own = self._hooked[id(module)][1][-1]
        if next(reversed(module._forward_hooks)) != own:
            module._forward_hooks.move_to_end(own)  # pyright: ignore[reportAttributeAccessIssue]

    # -- forward

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward():  # a checkpoint around the whole model runs it again, before any gradient came
            self._ensure_backward()
            self._again += 1
            return self._begin_casting(args, kwargs) if self._again == 1 else None
        self._stay_last(module)
        if self._calls(2):  # the model calls itself: a part of the pass that is under way
            self._inside.append((module, sys.exc_info()[1]))
            return None
        with without_user_modes():
            self._listener.begin_forward(self._announced.context)
        self._inside.append((module, sys.exc_info()[1]))
        if torch.is_grad_enabled():
            looks = self._replaced is not None and self._replaced.begin_forward((args, kwargs))
            if looks or self._listener.remembers():  # that of a unit would find the other's hooks and leave it to them
                self._remember(self._units, module)
            if looks and self._replaced is not None:
                push_saved_hooks(*self._replaced.look())
                self._pushed.append(module)
        return self._begin_casting(args, kwargs)

    def _begin_casting(self, args: Any, kwargs: Any) -> Any:
        if self._autocast is not None:
            # No cache of cast weights: it would keep all of them, also of units that are freed, until forward ends.
            dtype, device = self._autocast
            self._casting = torch.autocast(device, dtype, cache_enabled=False)
            self._casting.__enter__()
        if self._cast is None:
            return None
        return cast_floats(args, self._cast), cast_floats(kwargs, self._cast)

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> Any:
        """What the model gives from then on; None: what it gave."""
        if in_backward():
            return self._leave_again(output)
        if (left := self._leave(module)) is None:
            return None
        if any(other is module for other, _ in self._inside):
            return None
        self._stop_casting()
        self._early = _is_early()
        if self._early:
            return None
        if not left:
            self._listener.interrupt()
            return None
        given = widened(output) if self._widens else output
        self._watch(given, self._model_backward)
        if self._replaced is not None and torch.is_grad_enabled():
            self._replaced.end_forward(given)
        with without_user_modes():
            self._listener.end_forward()
        return given

    def _leave_again(self, output: Any) -> Any:
        """The model has run in a backward, as :meth:`_after_model` has it."""
        if not self._again:
            return None
        self._again -= 1
        if self._again:
            return None
        self._stop_casting()
        return widened(output) if self._widens else None

    def end_early(self, sent: Sequence[Tensor]) -> None:
        """The forward of a stage is over, which has given ``sent``: if it left the model's by a :class:`StageDone`,
        what is done behind that is done now, as a hook that is called for an exception cannot raise another."""
        early, self._early = self._early, False
        self._watch(list(sent), self._model_backward)
        if early:
            with without_user_modes():
                self._listener.end_forward()

    def enter(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs another method of the model than its forward as the model's forward is run."""
        given = self._before_model(self._model, args, kwargs)
        args, kwargs = (args, kwargs) if given is None else given
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._after_model(self._model, args, None)
            raise
        given = self._after_model(self._model, args, output)
        return output if given is None else given

    def left_by(self, error: BaseException) -> None:
        """An exception has come out of a call of the model. One that is none of ``Exception`` calls no hooks of modules
        on its way, so that what they began goes on around what the user does next."""
        if not isinstance(error, Exception) and self._inside and not self.inside():
            self.forget()
            self._listener.interrupt()

    def inside(self) -> bool:
        """Whether this thread is inside of the model's forward, or of a backward."""
        return in_backward() or self._calls(1)

    def _calls(self, count: int) -> bool:
        """Whether the model's forward is on the stack that many times. What was noted when forwards began does not do:
        an exception that is none of ``Exception`` leaves them without a word."""
        if not any(module is self._model for module, _ in self._inside):
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and count:
            owner = {"_call_impl": self._model, "enter": self}.get(frame.f_code.co_name)
            if owner is not None and frame.f_locals.get("self") is owner:
                count -= 1
            frame = frame.f_back
        return count == 0

    def _leave(self, module: nn.Module) -> bool | None:
        """Whether a forward ended well, or with an exception; None if it never began (its own begin raised)."""
        if not self._inside or self._inside[-1][0] is not module:
            return None
        while self._pushed and self._pushed[-1] is module:
            pop_saved_hooks()
            self._pushed.pop()
        return sys.exc_info()[1] is self._inside.pop()[1]

    def _remember(self, units: Iterable[Unit], module: nn.Module) -> None:
        """Until the module's forward is over, each weight that autograd saves is marked as its unit's.

        A backward that reaches it by another way than the unit's outputs (a loss of something kept on the side) then
        gathers the unit. Hooks that are already there (activation checkpointing) take precedence.
        """
        if top_saved_hooks() is not None:
            return
        owners = {storage: unit for unit in units for storage in unit.storages()}

        def pack(tensor: Tensor) -> tuple[Kept, Unit | None]:
            storage = _storage(tensor)
            unit = owners.get(storage) if storage is not None else None
            with without_user_modes():
                if unit is None:
                    return keep(tensor), None
                self._listener.saved(unit)
            return Kept(tensor, tensor._version), unit

        def unpack(packed: tuple[Kept, Unit | None]) -> Tensor:
            kept, unit = packed
            if unit is None:
                return kept.get()
            if unit.life is not Life.GATHERED:
                self._ensure_backward()
                with without_user_modes():
                    self._listener.enter_aside(unit)
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    f"a weight of {unit.name!r} needed for gradient computation has been modified by an inplace "
                    "operation between forward and backward."
                )
            return kept.tensor

        push_saved_hooks(pack, unpack)
        self._pushed.append(module)

    def _before_unit(self, unit: Unit) -> Callable[[nn.Module, Any], None]:
        listener = self._listener

        def hook(module: nn.Module, args: Any) -> None:
            self._stay_last(module)
            if in_backward():
                self._ensure_backward()
                with without_user_modes():
                    listener.enter_backward(unit)
            else:
                with without_user_modes():
                    listener.enter_forward(unit)
                self._inside.append((module, sys.exc_info()[1]))
                if torch.is_grad_enabled() and listener.remembers(unit):
                    self._remember([unit], module)

        return hook

    def _after_unit(self, unit: Unit) -> Callable[[nn.Module, Any, Any, Any], None]:
        listener = self._listener

        storages = unit.storages()

        def backward(grad: Tensor) -> None:
            self._ensure_backward(create_graph=torch.is_grad_enabled())
            with without_user_modes():
                listener.enter_backward(unit)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not in_backward():
                if (left := self._leave(module)) is None:
                    return
                if not left and not _is_early():  # an exception leaves the unit; the model may catch it
                    listener.leave_forward(unit, interrupted=True)
                    return
            # What a unit only passes through is not its own: its gradient says nothing about this unit's backward.
            inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
            outputs = [tensor for tensor in tensors_in(output) if id(tensor) not in inputs]
            self._watch(outputs, backward)
            if not in_backward():
                weights = any(_storage(tensor) in storages for tensor in outputs)  # what it gives is a view of a weight
                with without_user_modes():
                    listener.leave_forward(unit, aliased=weights)

        return hook

    # -- backward

    def begin_backward(self, grad: Tensor) -> None:
        """A hook on what a backward begins from that is none of the model's outputs."""
        self._model_backward(grad)

    def _needs(self, unit: Unit) -> None:
        """A unit's forward runs again: it was gathered for its backward, unless that came by another way."""
        if unit.split and unit.life is not Life.GATHERED:
            self._ensure_backward()
            with without_user_modes():
                self._listener.enter_aside(unit)

    @staticmethod
    def _watch(output: Any, hook: Callable[[Tensor], None]) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(hook)

    def _model_backward(self, grad: Tensor) -> None:
        self._ensure_backward(create_graph=torch.is_grad_enabled())

    def _ensure_backward(self, *, create_graph: bool = False) -> None:
        """The first event of a backward announces it and asks autograd to call back when all of it is done."""
        if self._queued is not None:
            return
        done = partial(self._done)
        at_end_of_backward(done)
        queued = self._queued = ref(done, self._let_go)
        del done  # autograd alone has it
        with without_user_modes():
            # Of one that is refused autograd lets go.
            self._listener.begin_backward(self._announced.context, create_graph=create_graph)
        self._queued = queued  # what begins may have forgotten an interrupted one

    def _let_go(self, queued: ref[Callable[[], None]]) -> None:
        """Autograd has ended a backward and has not called what it was to call then: an exception has left it."""
        if queued is self._queued:
            self._queued = None
            self._listener.interrupt()

    def _done(self) -> None:
        self._queued = None
        try:
            with without_user_modes():
                self._listener.end_backward()
        except BaseException:
            self._listener.interrupt()
            raise
        if self._replaced is not None:
            self._replaced.end_backward()

    def _before_gradient(self, arriving: Sequence[Tensor | None]) -> None:
        """The first gradient of a backward may be all that tells of it: a loss of a method, of a submodule, of weights.
        It has to begin before autograd adds to what ``parameter.grad`` shows."""
        if self._queued is None and arriving[0] is not None:
            self._ensure_backward()

    def _on_gradient(
        self, parameter: nn.Parameter, unit: Unit, segment: int, slot: int
    ) -> Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]:
        deliver, dropped, place = self._listener.gradient, self._listener.gradient_dropped, (segment, slot)

        def hook(_: Sequence[Tensor | None], arrived: Sequence[Tensor | None]) -> None:
            if arrived[0] is None:  # a node above had no gradient to give
                return
            grad, parameter.grad = parameter.grad, None
            if grad is None:  # a hook of the user's has dropped it
                dropped()
                return
            if not modes_are_on():  # asked here: to enter and leave nothing costs as much as to copy a small gradient
                deliver(unit, place, grad)
                return
            with without_user_modes():
                deliver(unit, place, grad)

        return hook
