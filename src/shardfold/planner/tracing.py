"""Runs a model on tensors without memory, and notes what the engine's hooks would hear."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardfold.activations.recompute import KEPT, without_filling
from shardfold.activations.selective import Selection
from shardfold.errors import ConfigError, ModelError, ShardfoldError
from shardfold.numerics.fp8_layers import Fp8Layers
from shardfold.parallel.pipeline.deferred import DeferredWeightGrads, Splits
from shardfold.parallel.pipeline.stages import Borders, Stages
from shardfold.plan.format import dtype_name
from shardfold.plan.layout import Precision
from shardfold.plan.rules import EVERYTHING, Patterns
from shardfold.planner.given import fill, hollow, hollow_values, not_run
from shardfold.planner.live import LiveBytes
from shardfold.planner.moved import MOVED, SMALLEST, PaperMovers
from shardfold.planner.staged import Stage
from shardfold.planner.trace import BATCH, SMALL, Computation, Event, Lane, Sends, Trace
from shardfold.sharding.autograd import inside_checkpoint, tensors_in
from shardfold.sharding.partition import Cut
from shardfold.sharding.segment import TORCH_DTYPES
from shardfold.sharding.tree import cast_floats, widened
from shardfold.torch_internals import (
    SELECTS,
    FakeMode,
    in_backward,
    storage_key,
    tree_flatten,
    tree_iter,
    tree_unflatten,
)

__all__ = [
    "MODES",
    "Compute",
    "Connect",
    "Moving",
    "call",
    "loss_of",
    "runs_with_memory",
    "silent",
    "trace_model",
    "trace_stage",
]

MODES = ("keep", "recompute", "select", *MOVED)
"""Of activations, which a trace can follow."""

Compute = Callable[[nn.Module, Any], Tensor]
"""Calls the model on a micro-batch and gives the loss."""
Connect = Callable[[nn.Module, Any, list[Sends]], tuple[Any, Callable[[], None]]]
"""Gives the layers of the copy that runs their ways to other ranks: called with it, a batch and a list that gets what
is sent, it gives the batch of this rank, and what undoes it."""


class Moving(NamedTuple):
    """What modes that move go by.

    Attributes:
        streams: the device has memory of its own.
        smallest: bytes of the smallest tensor that is moved.
    """

    streams: bool = False
    smallest: float = SMALLEST


HERE = Moving()

NO_LOSS = "the mean square of its first output"
"""What is taken for the loss of a model that gives none, where there is no ``compute`` that does."""
SMALL_MODEL = 1 << 30
"""Bytes of parameters and batch of the largest model that is run with memory where it does not run without."""
CPU = torch.device("cpu")
ONLY_INPUTS = (nn.Embedding, nn.Linear)
PRODUCTS = {str(operation).split(".")[1] for operation in KEPT} | {
    "convolution_backward",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
}
"""Names of operations whose work is counted by what they multiply."""


def call(model: nn.Module, batch: Any) -> Any:
    """What a model gives for a micro-batch: a dict of arguments by name, a tuple or list of them, or the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The model's own loss, or the mean square of its first output, which traces have as :data:`NO_LOSS`."""
    output = call(model, batch)
    loss = _own_loss(output)
    if loss is not None:
        return loss
    if isinstance(output, Tensor):
        return output.float().square().mean()
    first = next((value for value in tensors_in(output) if value.requires_grad), None)
    if first is None:
        raise ModelError(f"{type(model).__name__} gives nothing that backward could begin at: pass compute= that does.")
    return first.float().square().mean()


def _own_loss(output: Any) -> Tensor | None:
    """What a model gives as its loss; None: it gives none."""
    if isinstance(output, Tensor):
        return None if output.dim() else output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def trace_model(
    model: nn.Module,
    cuts: Sequence[Cut],
    batch: Any,
    *,
    precision: Precision,
    mode: str = "keep",
    compute: Compute = loss_of,
    real: bool | None = None,
    connect: Connect | None = None,
    zeros: str = "that was asked for",
    moving: Moving = HERE,
) -> Trace:
    """The trace of one micro-batch.

    Args:
        model: with or without memory; it stays as it is.
        cuts: its units.
        batch: as ``compute`` takes it, with or without memory.
        precision: of the whole model.
        mode: of the activations of each unit, one of :data:`MODES`.
        compute: gives the loss.
        real: runs on zeros with memory, for a forward that asks for values; None: where it has to and the model is
            small.
        connect: see :data:`Connect`.
        zeros: why it runs on them, where ``real`` is true.
        moving: see :class:`Moving`.

    Raises:
        ConfigError: the mode is none that a trace follows.
        ModelError: the forward or backward fails, or asks for values, which there are none of.
    """
    if mode not in MODES:
        raise ConfigError(f"activations={mode!r}: a plan follows {', '.join(MODES)}.")
    try:
        with silent():
            found = _trace(model, cuts, batch, precision, mode, compute, connect, moving, real=bool(real))
            return replace(found, zeros=zeros) if real else found
    except ConfigError:
        raise
    except Exception as error:
        if real is None and runs_with_memory(model, batch):
            return trace_model(
                model,
                cuts,
                batch,
                precision=precision,
                mode=mode,
                compute=compute,
                real=True,
                connect=connect,
                zeros="its forward asks for values" if _asks_for_values(error) else "it does not run without",
                moving=moving,
            )
        if isinstance(error, ShardfoldError):
            raise
        if real or not _asks_for_values(error):
            raise not_run(model, batch, error) from error
        raise ModelError(
            f"the forward of {type(model).__name__} asks for values of tensors, which a plan has none of "
            f"({type(error).__name__}): plan it on zeros with real=True, or `shardfold plan --real`, which takes the "
            "memory of one micro-batch."
        ) from error


def runs_with_memory(model: nn.Module, batch: Any) -> bool:
    """Whether a model and a micro-batch are so small that they may be run on zeros."""
    return sum(p.numel() * p.itemsize for p in model.parameters()) + _nbytes(batch) <= SMALL_MODEL


@contextmanager
def silent() -> Iterator[None]:
    """What fails without values is tried with some: PyTorch need not say so."""
    log = logging.getLogger(FakeMode.__module__)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _trace(
    model: nn.Module,
    cuts: Sequence[Cut],
    batch: Any,
    precision: Precision,
    mode: str,
    compute: Compute,
    connect: Connect | None,
    moving: Moving,
    *,
    real: bool,
) -> Trace:
    """See :func:`trace_model`."""
    fake = nullcontext() if real else FakeMode(allow_non_fake_inputs=True)
    make = partial(_zeros, fake)
    names = {slot.name: s for c in cuts if c.spec is not None for s in c.spec.segments for slot in s.slots}
    dtypes = {name: TORCH_DTYPES[segment.dtype] for name, segment in names.items()}
    compute_dtype = TORCH_DTYPES[precision.compute]
    if precision.buffers == "compute":
        dtypes |= {n: compute_dtype for n, b in model.named_buffers() if b.is_floating_point()}
    made = hollow(model, make, dtypes)
    listener = _Listener(made, cuts)
    with ExitStack() as held:
        if connect is not None:
            batch, undo = connect(made, batch, listener.sent)
            held.callback(undo)
        _multiply_in_fp8(made, precision)
        values = hollow_values(batch, make)
        held.enter_context(fake)
        held.enter_context(listener.hooked(mode, precision, moving))
        listener.run(compute, values)
    return listener.trace(values, mode)


def _zeros(mode: AbstractContextManager[Any], tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In place of a tensor, made in that mode."""
    with mode:
        return torch.zeros(tensor.shape, dtype=dtype, device="cpu")


def trace_stage(
    model: nn.Module,
    stages: Stages,
    cuts: Sequence[Cut],
    batch: Any,
    *,
    lane: Lane,
    precision: Precision,
    mode: str,
    compute: Compute,
    connect: Connect,
    borders: Borders | None = None,
) -> tuple[Trace, Borders]:
    """The trace of one micro-batch in one stage, and what crosses borders.

    Args:
        model: without memory, cut into ``stages``, in the dtypes that it computes in; it gets fake tensors.
        stages: of it.
        cuts: its units.
        batch: with or without memory.
        lane: the stage, and whether its backward is in two parts.
        precision, mode, compute, connect: as of :func:`trace_model`.
        borders: of a trace of as many samples in another mode; None: they are found.
    """
    fake = FakeMode(allow_non_fake_inputs=True)
    make = partial(_zeros, fake)
    fill(model, make)
    listener = _Listener(model, cuts)
    with ExitStack() as held:
        batch, undo = connect(model, batch, listener.sent)
        held.callback(undo)
        if borders is None:
            borders = _borders(stages, batch, compute, precision, fake, make)
        stage = Stage(stages, lane.stage, borders)
        held.callback(stages.close)
        _multiply_in_fp8(model, precision)
        values = hollow_values(batch, make)
        held.enter_context(fake)
        held.enter_context(listener.hooked(mode, precision, HERE))
        listener.run_stage(stage, compute, values, split=lane.split)
    return listener.trace(values, mode), borders


def _borders(
    stages: Stages,
    batch: Any,
    compute: Compute,
    precision: Precision,
    fake: Any,
    make: Callable[[Tensor, torch.dtype], Tensor],
) -> Borders:
    """What crosses borders, found without memory; on zeros where code around the pieces asks for values."""

    def zeros(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(tensor.shape, dtype=dtype)

    def found(values: Any) -> Borders:
        with _autocast(precision):
            narrow = _narrow(precision)
            given = cast_floats(values, narrow) if narrow is not None else values
            skeleton = stages.skeleton.module
            wide = skeleton.register_forward_hook(partial(_wide, precision))
            try:
                return stages.borders("plan", lambda skeleton: compute(skeleton, given), dict, training=True)
            finally:
                wide.remove()

    try:
        with silent(), fake:
            return found(hollow_values(batch, make))
    except ModelError:
        return found(hollow_values(batch, zeros))


def _multiply_in_fp8(model: nn.Module, precision: Precision) -> None:
    """Linear layers compute as under an engine of a device that has products in fp8."""
    Fp8Layers(model, Patterns([EVERYTHING], "precision"), [precision]).attach()


def _narrow(precision: Precision) -> torch.dtype | None:
    """What inputs are cast to."""
    return TORCH_DTYPES[precision.input_dtype] if precision.input_dtype else None


def _wide(precision: Precision, module: nn.Module, args: Any, output: Any) -> Any:
    """What the engine makes of what a model gives: a hook."""
    return widened(output) if precision.widens else output


def _autocast(precision: Precision) -> AbstractContextManager[Any]:
    name = precision.autocast
    return torch.autocast("cpu", TORCH_DTYPES[name], cache_enabled=False) if name else nullcontext()


def _asks_for_values(error: Exception) -> bool:
    return any(word in type(error).__name__ for word in ("DataDependent", "DynamicOutput", "UnsupportedFakeTensor"))


def _nbytes(values: Any) -> int:
    return sum({id(v): v.nbytes for v in tree_iter(values) if isinstance(v, Tensor)}.values())


def _tokens(values: Any) -> int:
    """Of what looks like token numbers: the elements of the first tensor of integers."""
    for value in tree_iter(values):
        if isinstance(value, Tensor) and not value.is_floating_point() and value.dim() > 1:
            return value.numel()
    return 0


class _Listener:
    """Notes events of one model that has no memory."""

    def __init__(self, model: nn.Module, cuts: Sequence[Cut]) -> None:
        self.events: list[Event] = []
        self._model, self._modules = model, dict(model.named_modules())
        self._cuts = cuts
        self._live = LiveBytes([*model.parameters(), *model.buffers()], self._count)
        self._work: dict[str, float] = {}
        self._bytes, self._others, self._calls, self._attention, self._products = 0.0, 0.0, 0, 0.0, 0
        self._running_again = False
        self._again = 0.0, 0.0  # products that are recomputed, and those of attention
        self.sent: list[Sends] = []
        self._in_backward = False
        self._left: dict[str, int] = {}
        self._owners: dict[int, str] = {}  # units that are no roots, by the storages of their parameters
        self._running: dict[str, int] = {}
        self.touched: set[str] = set()
        self.loss = ""  # as of a trace
        self._lossless = False  # the model's forward gave none
        self._waiting: list[Tensor] = []
        self._waiting_bytes = 0
        self._deferred: DeferredWeightGrads | None = None  # of a backward in two parts, from the first
        self._weights = False  # the second is under way
        self._units: dict[int, str] = {}  # of parameters, by ``id``
        self._movers: PaperMovers | None = None
        self._quiet = False

    def trace(self, values: Any, mode: str) -> Trace:
        """What was noted of a run on these values."""
        return Trace(
            tuple(self.events),
            batch=_nbytes(values),
            buffers=_nbytes([*self._model.buffers()]),
            mode=mode,
            tokens=_tokens(values),
            touched=frozenset(self.touched),
            loss=self.loss,
        )

    # -- events

    def note(self, kind: str, unit: str = "", size: float = 0, slot: str = "") -> None:
        sent = tuple(
            Sends(axis, sum(s.num_bytes for s in self.sent if s.axis == axis), sum(s.axis == axis for s in self.sent))
            for axis in dict.fromkeys(s.axis for s in self.sent)
        )
        self.sent.clear()
        work = Computation(
            tuple(self._work.items()),
            self._bytes,
            self._others,
            self._calls,
            self._attention,
            sent,
            self._products,
            *self._again,
            *(() if self._movers is None else (self._movers.taken(),)),
        )
        self._again = 0.0, 0.0
        self._work, self._bytes, self._others, self._calls, self._attention, self._products = {}, 0.0, 0.0, 0, 0.0, 0
        level = self._live.level
        tops = tuple(top - level for top in self._live.tops())
        away = 0.0 if self._movers is None else self._movers.level
        self.events.append(Event(kind, unit, self._live.mark(), level, size, slot, work, tops, away))

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """What is done inside is not the model's work."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self._quiet or func.namespace == "prim":  # a tensor without memory is asked for its device
            return
        if not self._in_backward:
            self._look_for_weights(args)
        moved = sum(v.nbytes for v in tree_iter((args, out)) if isinstance(v, Tensor) and v.layout is torch.strided)
        name = str(func).split(".")[1].rstrip("_")
        self._calls += 1
        if name not in PRODUCTS:
            self._others += moved if not func.is_view else 0
            return
        self._products += 1
        self._bytes += moved
        _check_dtypes(name, args)
        flops, attention = _flops(name, args, out)
        first = next((v for v in tree_iter(args) if isinstance(v, Tensor)), None)
        dtype = "fp8" if name == "_scaled_mm" else (dtype_name(first.dtype) if first is not None else None) or "fp32"
        self._work[dtype] = self._work.get(dtype, 0.0) + flops
        self._attention += attention
        if self._in_backward and (self._running_again or _is_forward(name)):
            self._again = self._again[0] + flops, self._again[1] + attention

    def _look_for_weights(self, args: Any) -> None:
        """Weights that are read outside of their unit's forward are held to the end of each pass."""
        for value in tree_iter(args):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                unit = self._owners.get(storage_key(value.untyped_storage()))
                if unit is not None and not self._running[unit]:
                    self.touched.add(unit)

    # -- the run

    def run(self, compute: Compute, batch: Any) -> None:
        self._live.leave_out(batch)
        with self._live:
            loss = compute(self._model, batch)
            self._takes(compute)
            del batch
            self._trains(loss)
            loss.backward()
            self._flush()
            self.note("end")

    def _takes(self, compute: Compute) -> None:
        """Notes where the loss is none of the model's."""
        self.loss = NO_LOSS if compute is loss_of and self._lossless else ""

    def _trains(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise ModelError(
                f"the loss of {type(self._model).__name__} depends on no parameter that is trained: look for detach() "
                "or no_grad() in its forward."
            )

    def run_stage(self, stage: Stage, compute: Compute, batch: Any, *, split: bool) -> None:
        """A forward and a backward of one stage; ``split``: in two parts."""
        self._live.leave_out(batch)
        self._deferred = DeferredWeightGrads() if split else None
        plain = next((type(parameter) for parameter in self._model.parameters()), nn.Parameter)
        splits = Splits(self._deferred, CPU, plain) if self._deferred is not None else nullcontext()
        with nullcontext() if stage.handed else self._live:
            came = stage.receive()
        received = list(came.values())
        if stage.handed:
            self._live.leave_out(received)
        with self._live:
            with splits:
                loss, sent = stage.forward(came, partial(compute, self._model, batch))
            del batch, came
            crosses = _nbytes(sent)
            if loss is None:
                sent = [tensor for tensor in sent if tensor.requires_grad]
                self._hear(sent)
                self.note("end_forward")
            self.note("sent", size=crosses)
            if loss is not None:
                self._takes(compute)
                self._trains(loss)
                loss.backward()
            else:
                torch.autograd.backward(sent, [torch.empty_like(tensor) for tensor in sent])
            del loss, sent
            self._flush()
            self.note("end", size=_nbytes([x.grad for x in received if x.grad is not None]))
            del received
            if self._deferred is not None:
                self._run_weights(self._deferred)

    def _hear(self, tensors: Sequence[Tensor]) -> None:
        """The gradient of the first of these to come begins a backward."""
        for tensor in tensors:
            tensor.register_hook(lambda grad: self._begin_backward())

    def _run_weights(self, deferred: DeferredWeightGrads) -> None:
        """The second part of a backward, as :meth:`~shardfold.engine.backward.Backward.run_weights` has it."""
        self._live.mark()
        self.note("inputs")
        reached = list(dict.fromkeys(event.unit for event in self.events if event.kind == "enter_backward"))
        places = {name: n for n, name in enumerate(reached)}
        numbers = {key: places.get(unit, len(places)) for key, unit in self._units.items()}
        roots = deferred.roots(numbers, CPU)
        self._weights = True
        self.note("begin_backward")
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        del roots
        self._take_kept(None)
        self._flush()
        self.note("end")

    @contextmanager
    def hooked(self, mode: str, precision: Precision, moving: Moving) -> Iterator[None]:
        model = self._model
        if mode in MOVED:
            self._movers = PaperMovers(
                model, mode, streams=moving.streams, smallest=int(moving.smallest), quiet=self._unseen
            )
        before = partial(self._before_model, _narrow(precision))
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        model.register_forward_hook(partial(self._after_model, precision))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for c in self._cuts:
            assert c.spec is not None
            names = [slot.name for s in c.spec.segments if s.trainable for slot in s.slots]
            self._left[c.name] = len({id(parameters[name]) for name in names})
            self._units |= {id(parameters[name]): c.name for name in names}
            for name in names:
                parameters[name].register_post_accumulate_grad_hook(partial(self._gradient, c.name, name))
            if not c.spec.root:
                every = [slot.name for s in c.spec.segments for slot in s.slots]
                self._owners |= {storage_key(parameters[name].untyped_storage()): c.name for name in every}
                self._running[c.name] = 0
                self._hook_unit(c.name, self._modules[c.name], mode, inside=bool(c.spec.inside))
        forward = model.forward

        def run(*args: Any, **kwargs: Any) -> Any:  # the loss is computed outside, as it is with an engine
            with _autocast(precision):
                return forward(*args, **kwargs)

        model.forward = run
        yield

    @contextmanager
    def _again_in(self) -> Iterator[None]:
        """Around a forward of a unit that is run for the second time where it runs in a backward."""
        before, self._running_again = self._running_again, in_backward()
        try:
            yield
        finally:
            self._running_again = before

    def _hook_unit(self, name: str, module: nn.Module, mode: str, *, inside: bool) -> None:
        if self._movers is not None:
            if not inside:  # the unit around moves it
                module.forward = _moving(module.forward, name, self._movers)
        elif mode != "keep" and not isinstance(module, ONLY_INPUTS):
            module.forward = _recomputed(module.forward, self._again_in, select=mode == "select")

        def before(module: nn.Module, args: Any) -> None:
            if not in_backward():
                self.note("enter", name)
            self._running[name] += 1

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._running[name] -= 1
            inputs = {id(tensor) for tensor in tensors_in((args, kwargs))}
            for tensor in tensors_in(output):
                if tensor.requires_grad and id(tensor) not in inputs:
                    tensor.register_hook(lambda grad: self._reached(name))
            if not in_backward():
                self.note("leave", name)

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)  # a stage ends by an exception

    def _before_model(self, narrow: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not any(event.kind == "begin" for event in self.events):
            self.note("begin")
        return None if narrow is None else (cast_floats(args, narrow), cast_floats(kwargs, narrow))

    def _after_model(self, precision: Precision, module: nn.Module, args: Any, output: Any) -> Any:
        self._lossless = _own_loss(output) is None
        given = _wide(precision, module, args, output)
        self._hear([tensor for tensor in tensors_in(given) if tensor.requires_grad])
        self.note("end_forward")
        return given

    def _begin_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            self.note("begin_backward")

    def _reached(self, unit: str) -> None:
        self._begin_backward()
        self.note("enter_backward", unit)

    def _gradient(self, unit: str, slot: str, parameter: Tensor) -> None:
        """A gradient is taken as the engine takes it: it is copied at once, or, if it is small, a little later; that of
        a weight, which the first part of a backward gives, with the first of its unit that the second does."""
        self._begin_backward()
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        if grad.is_sparse:  # as the engine takes it
            grad = grad.to_dense()
        if self._deferred is not None and not self._weights:
            self._deferred.kept.append((unit, slot, grad, id(parameter)))
            return
        if self._deferred is not None:
            self._take_kept(unit)
        self._accept(unit, slot, grad)
        self._left[unit] -= 1  # the last one lives, in the hook, until its unit's are on their way
        if not self._left[unit] or self._waiting_bytes >= BATCH:
            self._flush()
        if not self._left[unit]:
            self.note("complete", unit)

    def _take_kept(self, unit: str | None) -> None:
        """Gradients of a unit, or all, that the first part of this backward gave, each of which is given back then."""
        assert self._deferred is not None
        kept = self._deferred.take_kept()
        before = unit
        while kept:
            other, slot, grad, key = kept.popleft()
            if unit is not None and other != unit:
                self._deferred.kept.append((other, slot, grad, key))
                continue
            if other != before:
                self._flush()
            before = other
            self._accept(other, slot, grad)
            self._left[other] -= key not in self._deferred.coming

    def _accept(self, unit: str, slot: str, grad: Tensor) -> None:
        self.note("gradient", unit, grad.nbytes, slot)
        if grad.nbytes <= SMALL:
            self._waiting.append(grad)
            self._waiting_bytes += grad.nbytes

    def _flush(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0


def _recomputed(
    forward: Callable[..., Any], inside: Callable[[], AbstractContextManager[None]], *, select: bool
) -> Callable[..., Any]:
    """As :func:`shardfold.activations.recompute.recomputing`, of what has no values; ``inside``: around each run."""
    own = without_filling(forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or inside_checkpoint():
            return forward(*args, **kwargs)
        leaves, shape = tree_flatten((args, kwargs))
        selection = Selection(KEPT, random=False) if select else None
        contexts: dict[str, Any] = {"context_fn": selection.contexts, **SELECTS} if selection is not None else {}

        def again(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), shape)
            with inside():
                result = own(*args, **kwargs)
            if selection is not None and not selection.over:
                selection.end(result)
            return result

        return checkpoint(again, *leaves, use_reentrant=False, preserve_rng_state=False, **contexts)

    return run


def _moving(forward: Callable[..., Any], unit: str, movers: PaperMovers) -> Callable[..., Any]:
    """As ``activations.modes`` has it."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        begun = movers.enter(unit, (args, kwargs)) if torch.is_grad_enabled() else None
        if begun is None:
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            movers.end(begun, unit)

    return run


def _is_forward(name: str) -> bool:
    """Whether only a forward has such a product, or one that autograd listens to."""
    return torch.is_grad_enabled() or ("attention" in name and "backward" not in name)


def _check_dtypes(name: str, args: Any) -> None:
    """Tensors without values may be multiplied by those of other dtypes, which those with values may not."""
    if name in ("mm", "addmm", "bmm", "baddbmm", "convolution"):
        dtypes = [v.dtype for v in tree_iter(args) if isinstance(v, Tensor)]
        first, second = dtypes[-2:] if "add" in name else dtypes[:2]  # behind what is added, before a bias
        if first != second:
            raise ModelError(
                f"the forward multiplies {str(first).removeprefix('torch.')} by {str(second).removeprefix('torch.')} "
                f"({name}), which PyTorch does not: give a micro-batch of the dtype that the model takes."
            )


def _flops(name: str, args: Any, out: Any) -> tuple[float, float]:
    """Floating-point operations of a product, and those of them that are between tokens in attention."""
    shapes = [v.shape for v in tree_iter(args) if isinstance(v, Tensor)]
    if name in ("mm", "_int_mm", "_scaled_mm"):
        return 2.0 * shapes[0].numel() * shapes[1][-1], 0.0
    if name == "addmm":
        return 2.0 * shapes[1].numel() * shapes[2][-1], 0.0
    if name == "bmm":
        return 2.0 * shapes[0].numel() * shapes[1][-1], 0.0
    if name in ("_grouped_mm", "_scaled_grouped_mm"):  # rows of one, or what is summed over, are shared out to groups
        groups = shapes[0][0] if len(shapes[0]) == 3 and len(shapes[1]) == 2 else 1
        return 2.0 * shapes[0].numel() / groups * shapes[1][-1], 0.0
    if name == "baddbmm":
        return 2.0 * shapes[1].numel() * shapes[2][-1], 0.0
    if name == "convolution":
        first = next(v for v in tree_iter(out) if isinstance(v, Tensor))
        return 2.0 * first.numel() * prod(shapes[1][1:]), 0.0
    if name == "convolution_backward":
        return 4.0 * shapes[0].numel() * prod(shapes[2][1:]), 0.0
    if name.startswith("mkldnn_rnn_layer"):  # gates of what comes in, and of what was given before
        weights = shapes[1].numel() + shapes[2].numel()
        return (4.0 if name.endswith("backward") else 2.0) * prod(shapes[0][:2]) * weights, 0.0
    if "attention" in name:
        q, k = (shapes[1], shapes[2]) if "backward" in name else (shapes[0], shapes[1])
        products = 5 if "backward" in name else 2
        flops = 2.0 * products * q.numel() * k[-2]
        return flops, flops
    return 0.0, 0.0
