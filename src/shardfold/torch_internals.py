"""Every name of PyTorch's own inside that this library uses, what for, and what happens in a version without it.

PyTorch promises nothing about names that begin with an underscore. They are used here where no public name does the
work, and they are all in this file: functions and classes under public names, attributes of PyTorch's objects as rows
of ``ATTRIBUTES``. A test compares the sources with both tables, and the matrix of versions (``make matrix``) runs the
tests under each version that ``TRIED`` names.

``import shardfold.torch_internals`` looks whether everything is there. What is not is said in one warning, with what it
means, and raises a sentence of its own where it is used.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import reduce, wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardfold.errors import ShardfoldError

Pack = Callable[[Tensor], Any]

COMPILER = "torch._dynamo"
"""The module that is imported once something is to be compiled."""
HIDDEN = "_torchdynamo_disable"
"""The mark of a function that it does not look into."""

__all__ = [
    "ATTRIBUTES",
    "AUTOCAST_KEYS",
    "COMPILER",
    "CPU_KEYS",
    "INTERNALS",
    "PRIVATE_DEVICE",
    "SELECTS",
    "SIMULATED",
    "TRIED",
    "BatchNormBase",
    "DeviceGuard",
    "DispatchMode",
    "ExcludeKeys",
    "FakeMode",
    "FakeTensor",
    "Internal",
    "NormBase",
    "Pack",
    "abort_groups",
    "alias",
    "all_gather_single",
    "all_groups",
    "at_end_of_backward",
    "autograd_node",
    "backward_without_context",
    "below_autograd",
    "call_instead",
    "callback_handler",
    "check",
    "copies_shallowly",
    "count_groups_anew",
    "counted_together",
    "cuda_lazy_call",
    "default_store",
    "expired",
    "flatten_dense",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_zero_",
    "free_weak",
    "function_modes_are_on",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "graph_errors",
    "in_backward",
    "keeps_graph",
    "lacking_for",
    "made_of_others",
    "missing",
    "modes_are_on",
    "negative_view",
    "no_subclass_functions",
    "pop_saved_hooks",
    "profiler_config",
    "profiler_is_on",
    "push_saved_hooks",
    "rebuild_tensor",
    "rebuild_typed_tensor",
    "reduce_scatter_single",
    "register_device",
    "register_in_torchscript",
    "replace_backward",
    "replace_data_check",
    "scaled_mm",
    "set_group_timeout",
    "set_versions",
    "spare_compiler",
    "step_pre_hooks",
    "storage_key",
    "swap_impl",
    "top_saved_hooks",
    "tree_flatten",
    "tree_iter",
    "tree_unflatten",
    "unflatten_dense",
    "untraced",
    "weak_storage",
    "when_groups_end",
    "without_user_modes",
]

TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of PyTorch that were tried; docs/versions.md says with what."""


def untraced(function: Any) -> Any:
    """torch.compile neither looks into such a function nor unrolls its loops.

    As torch.compiler.disable, which imports the compiler for that; that takes as long as torch itself. As long as it is
    not there nothing is compiled, and nothing has to be hidden.
    """
    if COMPILER in sys.modules:
        return torch.compiler.disable(function)
    hidden: list[Any] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not hidden:
            if COMPILER not in sys.modules:
                return function(*args, **kwargs)
            hidden.append(torch.compiler.disable(function))
        return hidden[0](*args, **kwargs)

    # The compiler does not look into functions that say so, and begins no graph in files of its own.
    made: Any = run
    setattr(made, HIDDEN, True)
    made.__code__ = made.__code__.replace(co_filename=torch.compiler.__file__)
    return made


def spare_compiler() -> None:
    """Methods of PyTorch's optimizers hide from the compiler, and import it for that when one is first called; from now
    on they hide as :func:`untraced` functions do. In a version that hides them in another way they stay as they are."""
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(vars(torch.optim.Optimizer).get(name), "__wrapped__", None)
        if method is not None and not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", untraced(method))


class Internal(NamedTuple):
    """A name of PyTorch's own inside.

    Attributes:
        path: where it is.
        need: what it is used for.
        without: what does not work in a version that does not have it.
        seen: the versions that were seen to have it.
    """

    path: str
    need: str
    without: str
    seen: str = f"{TRIED[0]} to {TRIED[-1]}"


_NOTHING = "no engine can train"
SIMULATED = "shardfold.testing.simulated"
"""What does not work without the names that only that package needs."""

INTERNALS: tuple[Internal, ...] = (
    Internal("torch._C._current_graph_task_id", "knowing that autograd runs on this thread", _NOTHING),
    Internal("torch.autograd.Variable._execution_engine", "a call when a backward is over", _NOTHING),
    Internal(
        "torch._C._autograd._unsafe_set_version_counter",
        "filling freed memory again without a change of value",
        "layouts that split parameters",
    ),
    Internal(
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "what autograd saves in one module only",
        "layouts that split parameters, activations in host memory or on disk",
    ),
    Internal("torch._C._autograd._pop_saved_tensors_default_hooks", "the end of these", "as for the push"),
    Internal(
        "torch._C._autograd._top_saved_tensors_default_hooks", "whether a checkpoint is around", "as for the push"
    ),
    Internal(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "whether a backward may come a second time",
        "chunked_cross_entropy",
    ),
    Internal("torch._C.DisableTorchFunctionSubclass", "metadata of freed parameters", _NOTHING),
    Internal("torch._C.DisableTorchFunction", "modes of the user's do not see the engine's inside", _NOTHING),
    Internal("torch._C._len_torch_dispatch_stack", "whether a mode of the user's is on", _NOTHING),
    Internal("torch._C._len_torch_function_stack", "whether a mode of the user's is on", _NOTHING),
    Internal(
        "torch.utils._python_dispatch._disable_current_modes", "switching it off for the engine's inside", _NOTHING
    ),
    Internal(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "seeing each operation",
        "selective recomputation; measuring of activations",
    ),
    Internal("torch._C._SetExcludeDispatchKeyGuard", "changes of what is kept are counted", "selective recomputation"),
    Internal("torch._C.DispatchKey.ADInplaceOrView", "changes of what is kept are counted", "selective recomputation"),
    Internal("torch._subclasses.fake_tensor.FakeTensorMode", "a forward and backward without memory", "shardfold plan"),
    Internal("torch.utils._pytree.tree_flatten", "arguments of checkpointed modules", "activations='recompute'"),
    Internal("torch.utils._pytree.tree_unflatten", "arguments of checkpointed modules", "activations='recompute'"),
    Internal("torch.utils._pytree.tree_iter", "outputs of operations", "shardfold.testing.HeldBytes"),
    Internal("torch.UntypedStorage._cdata", "which tensors share memory", _NOTHING),
    Internal("torch.UntypedStorage._weak_ref", "when memory dies", "activations='fit:...'"),
    Internal("torch.UntypedStorage._expired", "when memory dies", "activations='fit:...'"),
    Internal("torch.UntypedStorage._free_weak_ref", "when memory dies", "activations='fit:...'"),
    Internal("torch._foreach_copy_", "many small gradients in one call", _NOTHING),
    Internal("torch._foreach_mul_", "many small gradients in one call", _NOTHING),
    Internal("torch._foreach_zero_", "many small gradients in one call", _NOTHING),
    Internal("torch._scaled_mm", "products in fp8", "precision='fp8'"),
    Internal("torch._fused_adamw_", "the blocked update", "AdamW"),
    Internal("torch._fused_adam_", "the blocked update", "Adam"),
    Internal("torch._fused_sgd_", "the blocked update", "SGD"),
    Internal("torch._utils._rebuild_tensor_v2", "reading and writing files of torch.save", "export to torch.save"),
    Internal("torch._utils._rebuild_tensor_v3", "writing newer dtypes as torch.save does", "export to torch.save"),
    Internal("torch._utils._flatten_dense_tensors", "deepspeed.utils' names for it", "these names"),
    Internal("torch._utils._unflatten_dense_tensors", "deepspeed.utils' names for it", "these names"),
    Internal("torch.nn.modules.batchnorm._BatchNorm", "which modules are batch norms", "SyncBatchNorm"),
    Internal(
        "torch.nn.modules.batchnorm._NormBase",
        "statistics that a recomputation must not count twice",
        "activations='recompute'",
    ),
    Internal(
        "torch.distributed.distributed_c10d._get_default_store", "the one store that every rank shares", "several ranks"
    ),
    Internal(
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "groups that are made in less time than their collectives may take",
        "going on without a rank that died",
    ),
    Internal("torch.distributed.distributed_c10d._world", "waking ranks that wait in groups of the user's", "that"),
    Internal(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "whether hooks of the user's see pieces before a step",
        "Overlap(speculate=...)",
    ),
    Internal("torch.autograd.profiler._is_profiler_enabled", "names for collectives in traces", "several ranks"),
    Internal("torch._C._profiler._ExperimentalConfig", "all threads in a trace", "shardfold bench --timeline"),
    Internal("torch.cuda._lazy_call", "deepspeed's accelerator interface", "that call"),
    Internal("torch._has_compatible_shallow_copy_type", "assigning `.data` of a freed parameter", "that assignment"),
    Internal("torch._C._acc.DeviceGuard", "a device written in Python", SIMULATED),
    Internal("torch._C._autograd.DeviceType.PrivateUse1", "the type of such a device", SIMULATED),
    Internal("torch.utils.backend_registration._setup_privateuseone_for_python_backend", "registering it", SIMULATED),
    Internal("torch._C.DispatchKeySet", "kernels of the CPU for views of its tensors", SIMULATED),
    Internal("torch._C.DispatchKey.CPU", "kernels of the CPU for views of its tensors", SIMULATED),
    Internal("torch._C.DispatchKey.AutocastPrivateUse1", "autocast on it", SIMULATED),
    Internal("torch._C._ExcludeDispatchKeyGuard", "autocast on it", SIMULATED),
    Internal("torch._C._AutoDispatchBelowAutograd", "kernels of the CPU without autograd", SIMULATED),
    Internal("torch._C._swap_tensor_impl", "moving a parameter to it in place", SIMULATED),
    Internal("torch._C._is_torch_function_mode_enabled", "functions of PyTorch's that it replaces", SIMULATED),
    Internal("torch._C.DispatchKey.CompositeExplicitAutograd", "moving its tensors", SIMULATED),
    Internal("torch._neg_view", "views of complex numbers", SIMULATED),
    Internal("torch.jit._builtins._register_builtin", "functions of PyTorch's that it replaces", SIMULATED),
    Internal("torch._C._current_autograd_node", "naming what runs in a backward", SIMULATED),
    Internal("torch.autograd._engine_run_backward", "the stream of a backward", SIMULATED),
)

ATTRIBUTES: tuple[Internal, ...] = (
    Internal("torch.Tensor._version", "whether values were changed", _NOTHING),
    Internal(
        "torch.Tensor._is_view", "copies of a storage that several views share", "activations= on the host or disk"
    ),
    Internal("torch.Tensor._backward_hooks", "whether a hook wants a gradient", "gathers of layers before a copy"),
    Internal("torch.nn.Module._parameters", "parameters as a module has them", _NOTHING),
    Internal("torch.nn.Module._buffers", "buffers as a module has them", _NOTHING),
    Internal("torch.nn.Module._modules", "changes of the structure", _NOTHING),
    Internal("torch.nn.Module._non_persistent_buffers_set", "which buffers are saved", _NOTHING),
    Internal("torch.nn.Module._load_from_state_dict", "which modules load by code of their own", "state dicts"),
    Internal("torch.nn.Module._load_state_dict_pre_hooks", "which modules load by hooks", "state dicts"),
    Internal("torch.nn.Module._load_state_dict_post_hooks", "which modules load by hooks", "state dicts"),
    Internal("torch.nn.Module.state_dict._metadata", "versions in state dicts", "state dicts of old forms"),
    Internal("torch.nn.Module._forward_hooks", "the engine's hook stays the last one", _NOTHING),
    Internal("torch.nn.Module._forward_hooks_with_kwargs", "copies without the engine's hooks", "copies of a model"),
    Internal("torch.nn.Module._forward_hooks_always_called", "copies without the engine's hooks", "copies of a model"),
    Internal("torch.nn.Module._forward_pre_hooks", "copies without the engine's hooks", "copies of a model"),
    Internal(
        "torch.nn.Module._forward_pre_hooks_with_kwargs", "copies without the engine's hooks", "copies of a model"
    ),
    Internal(
        "torch.nn.Module._call_impl", "whether a model's forward is on the stack", "a reset inside of a pass is refused"
    ),
    Internal(
        "torch.nn.Module._compiled_call_impl", "blocks compiled in place", "refusing them under activations='fit:...'"
    ),
    Internal("torch.nn.RNNBase._flat_weights", "recurrent modules built without memory", "recurrent modules"),
    Internal("torch.nn.RNNBase._flat_weight_refs", "recurrent modules built without memory", "recurrent modules"),
    Internal("torch._dynamo.list_backends", "deepspeed's accelerator interface", "that call"),
    Internal("torch._dynamo.exc", "units that cannot be one graph are compiled in pieces", "Runtime(compile='blocks')"),
    Internal("torch._dynamo.callback.callback_handler", "how long graphs are compiled", "the log does not say it"),
    Internal(
        "torch.optim.lr_scheduler.LRScheduler._update_lr",
        "schedules with a rate for each group",
        "DeepSpeed's schedules",
    ),
    Internal(
        "torch.optim.Optimizer._optimizer_step_pre_hooks",
        "whether hooks of the user's see pieces before a step",
        "Overlap(speculate=...)",
    ),
    Internal(
        "torch.optim.Optimizer._opt_called", "no false warning of a schedule that runs ahead", "that warning comes"
    ),
    Internal("torch.ops.mkldnn._linear_pointwise", "products of a few rows on CPUs without AVX-512", "they are slower"),
    Internal("torch._ops.OpOverload._schema", "which operations write into their arguments", "selective recomputation"),
    Internal(
        "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._worker_group",
        "ranks and restarts",
        "shardfold run",
    ),
    Internal(
        "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._remaining_restarts", "restarts", "shardfold run"
    ),
    Internal(
        "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._start_workers",
        "starting ranks",
        "shardfold run",
    ),
    Internal(
        "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._exit_barrier",
        "the end of a run",
        "shardfold run",
    ),
)
"""Attributes of objects that PyTorch makes, which are used where the objects are."""


def _find(path: str) -> Any:
    """What is there, or None."""
    try:
        return reduce(getattr, path.split(".")[1:], torch)
    except AttributeError:  # of a module that its package does not show
        module, _, name = path.rpartition(".")
        return getattr(sys.modules.get(module), name, None)


def missing() -> list[Internal]:
    """The rows of ``INTERNALS`` that this version of PyTorch does not have."""
    return [internal for internal in INTERNALS if _find(internal.path) is None]


def lacking_for(what: str) -> list[str]:
    """The names that are missing and without which ``what`` does not work."""
    return [internal.path for internal in missing() if internal.without == what]


def check(lost: Sequence[Internal], version: str = torch.__version__) -> None:
    """Says in one warning what is not there and what that means; where nothing is missing, nothing."""
    if lost:
        names = "; ".join(f"{internal.path} (without it: {internal.without})" for internal in lost)
        tried = f"{TRIED[0]} to {TRIED[-1]}"
        warnings.warn(
            f"PyTorch {version} does not have {len(lost)} of the names that Shardfold uses, which was tried with "
            f"{tried}: {names}. Use one of these versions, or expect these parts to fail.",
            stacklevel=2,
        )


def _get(path: str) -> Any:
    """The name's object; one that raises a sentence when it is called, where there is none."""
    found = _find(path)
    if found is not None:
        return found

    def absent(*_: Any, **__: Any) -> Any:
        need = next(internal.need for internal in INTERNALS if internal.path == path)
        raise ShardfoldError(
            f"PyTorch {torch.__version__} has no {path}, which is needed for {need}: install one of {', '.join(TRIED)}."
        )

    return absent


check(missing())

# -- optimizers

step_pre_hooks: Any = _get("torch.optim.optimizer._global_optimizer_pre_hooks")
"""What is called before the step of every optimizer."""

# -- autograd

_task = _get("torch._C._current_graph_task_id")
keeps_graph: Callable[[], bool] = _get("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the backward under way was told to keep its graph."""
pop_saved_hooks: Callable[[], object] = _get("torch._C._autograd._pop_saved_tensors_default_hooks")
_top = _get("torch._C._autograd._top_saved_tensors_default_hooks")
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = _get(
    "torch._C._autograd._unsafe_set_version_counter"
)
"""Sets what counts the changes of each tensor."""


def in_backward() -> bool:
    """Whether autograd runs on this thread (activation checkpointing runs forwards inside backward)."""
    return _task() != -1


def push_saved_hooks(pack: Pack, unpack: Callable[[Any], Tensor]) -> None:
    """From now on both apply to what autograd saves on this thread."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # pyright: ignore


def top_saved_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The ``(pack, unpack)`` that apply to what autograd saves now."""
    return _top(False)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward that runs on this thread is over."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore
    engine.queue_callback(callback)


def backward_without_context(loss: Tensor) -> None:
    """A backward for which PyTorch keeps no context of Python's: unless the graph has some, its threads hold no object
    of Python's."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore
    gradient = torch.ones_like(loss)
    engine.run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def autograd_node() -> str:
    """The name of the node of autograd's graph that runs on this thread; empty where none does."""
    node = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]
    return "" if node is None else node.name()


def replace_backward(around: Callable[[Any], Any]) -> None:
    """Every backward is run by what ``around`` makes of the function that runs one."""
    autograd: Any = torch.autograd
    autograd._engine_run_backward = around(autograd._engine_run_backward)


# -- modes and subclasses

_no_functions: Any = _get("torch._C.DisableTorchFunction")
"""A context in which no ``__torch_function__`` is called."""
no_subclass_functions: Any = _get("torch._C.DisableTorchFunctionSubclass")
"""The same for those of tensor subclasses."""
copies_shallowly: Any = _find("torch._has_compatible_shallow_copy_type") or torch.numel
"""What an assignment of ``.data`` asks, or a function that nobody else asks."""


def replace_data_check(around: Callable[[Any], Any]) -> None:
    """Whether ``.data`` of a tensor can be another one is asked of what ``around`` makes of the function for it."""
    module: Any = torch
    module._has_compatible_shallow_copy_type = around(module._has_compatible_shallow_copy_type)


_disable_modes: Any = _get("torch.utils._python_dispatch._disable_current_modes")
"""A context in which no dispatch mode acts."""
DispatchMode: Any = _get("torch.utils._python_dispatch.TorchDispatchMode")
_dispatch_modes = _get("torch._C._len_torch_dispatch_stack")
_function_modes = _get("torch._C._len_torch_function_stack")


def modes_are_on() -> bool:
    """Whether any mode sees operations."""
    return _dispatch_modes() > 0 or _function_modes() > 0


_NO_MODES = nullcontext()


def without_user_modes() -> AbstractContextManager[object]:
    """Modes of the user's (that count operations, fake them, or make them fail) do not see the engine's inside."""
    if _dispatch_modes() == 0 and _function_modes() == 0:
        return _NO_MODES
    stack = ExitStack()
    stack.enter_context(_disable_modes())
    stack.enter_context(_no_functions())
    return stack


function_modes_are_on: Callable[[], bool] = _get("torch._C._is_torch_function_mode_enabled")
"""Whether a mode sees calls of PyTorch's functions."""
register_in_torchscript: Callable[[Any, str], None] = _get("torch.jit._builtins._register_builtin")
"""The function is the operation of that name in TorchScript."""

# -- storages

weak_storage: Callable[[torch.UntypedStorage], Any] = _get("torch.UntypedStorage._weak_ref")
expired: Callable[[Any], bool] = _get("torch.UntypedStorage._expired")
free_weak: Callable[[Any], None] = _get("torch.UntypedStorage._free_weak_ref")


def call_instead(module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Calls of the module are calls of ``call``, with none of its hooks; None: its own again. What they were."""
    before = vars(module).get("_compiled_call_impl")
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        module._compiled_call_impl = call  # pyright: ignore
    return before


def graph_errors() -> tuple[type[Exception], ...]:
    """What ``torch.compile`` raises where it cannot make one graph of a function, or another one of it."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def callback_handler() -> Any:
    """What is told as ``torch.compile`` begins and ends to compile; None: nobody is."""
    return _find("torch._dynamo.callback.callback_handler")


def version_of(tensor: Tensor) -> int | None:
    """How often the tensor was changed; None where nobody counts: it was made under ``torch.inference_mode``."""
    return None if tensor.is_inference() else tensor._version


def counted_together(a: Tensor, b: Tensor) -> bool:
    """Whether a change of one is counted as one of the other, so that versions of both can be compared. Views have the
    counter of their base; those of ``unsafe_chunk``, ``unsafe_split`` and ``.data`` have one of their own."""
    before = a._version
    if a is b or b._version != before:
        return a is b
    torch.autograd.graph.increment_version(a)
    together = b._version != before
    set_versions((a,), (before,))
    return together


def alias(tensor: Tensor) -> Tensor:
    """The same memory with the same counter of changes, of which autograd knows nothing; for dispatch modes, in which
    ``detach`` alone gives it a counter of its own."""
    with _exclude(_find("torch._C.DispatchKey.ADInplaceOrView"), False):
        return tensor.detach()


def storage_key(storage: torch.UntypedStorage) -> int:
    """What identifies memory as long as it lives, also while it has no bytes."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


# -- kernels

foreach_copy_: Callable[..., None] = _get("torch._foreach_copy_")
foreach_mul_: Callable[..., None] = _get("torch._foreach_mul_")
foreach_zero_: Callable[..., None] = _get("torch._foreach_zero_")
scaled_mm: Callable[..., Tensor] = _get("torch._scaled_mm")
fused_adamw_: Callable[..., None] = _get("torch._fused_adamw_")
fused_adam_: Callable[..., None] = _get("torch._fused_adam_")
fused_sgd_: Callable[..., None] = _get("torch._fused_sgd_")

# -- tensors without memory

FakeMode: Any = _get("torch._subclasses.fake_tensor.FakeTensorMode")
FakeTensor: Any = _get("torch._subclasses.fake_tensor.FakeTensor")

# -- values in and out

tree_flatten: Any = _get("torch.utils._pytree.tree_flatten")
tree_unflatten: Any = _get("torch.utils._pytree.tree_unflatten")
tree_iter: Any = _get("torch.utils._pytree.tree_iter")
rebuild_tensor: Callable[..., Tensor] = _get("torch._utils._rebuild_tensor_v2")
rebuild_typed_tensor: Callable[..., Tensor] = _get("torch._utils._rebuild_tensor_v3")
flatten_dense: Callable[..., Tensor] = _get("torch._utils._flatten_dense_tensors")
unflatten_dense: Callable[..., Any] = _get("torch._utils._unflatten_dense_tensors")

# -- modules, profiler, devices

BatchNormBase: Any = _get("torch.nn.modules.batchnorm._BatchNorm")
NormBase: Any = _get("torch.nn.modules.batchnorm._NormBase")
profiler_config: Any = _get("torch._C._profiler._ExperimentalConfig")


def profiler_is_on() -> bool:
    """Whether a profiler records."""
    return torch.autograd.profiler._is_profiler_enabled  # pyright: ignore


# -- a device written in Python

DeviceGuard: Any = _get("torch._C._acc.DeviceGuard")
PRIVATE_DEVICE: Any = _find("torch._C._autograd.DeviceType.PrivateUse1")
register_device: Callable[..., None] = _get("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
swap_impl: Callable[[Tensor, Tensor], None] = _get("torch._C._swap_tensor_impl")
"""Each of both is from now on what the other was."""
below_autograd: Any = _get("torch._C._AutoDispatchBelowAutograd")
"""A context in which operations go to the kernels of devices, past autograd."""
negative_view: Callable[[Tensor], Tensor] = _get("torch._neg_view")
"""A view that stands for the negative numbers."""
_exclude: Any = _get("torch._C._SetExcludeDispatchKeyGuard")
ExcludeKeys: Any = _get("torch._C._ExcludeDispatchKeyGuard")
"""A context in which operations go past the given keys."""


def _keys(name: str) -> Any:
    kind, key = _find("torch._C.DispatchKeySet"), _find(f"torch._C.DispatchKey.{name}")
    return None if kind is None or key is None else kind(key)


CPU_KEYS: Any = _keys("CPU")
AUTOCAST_KEYS: Any = _keys("AutocastPrivateUse1")


def made_of_others(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation by PyTorch's kernel for all devices, which calls others."""
    return op._op_dk(_find("torch._C.DispatchKey.CompositeExplicitAutograd"), *args, **kwargs)


def cuda_lazy_call(callback: Callable[[], Any]) -> None:
    """Calls back when CUDA is initialized."""
    torch.cuda._lazy_call(callback)  # pyright: ignore[reportPrivateUsage]


# -- what has another name or another default in other versions

SELECTS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": False} if "respect_saved_tensors_hooks" in signature(checkpoint).parameters else {}
)
"""Arguments of a selective ``torch.utils.checkpoint.checkpoint``: what it keeps goes past the hooks of saved tensors.
From 2.15 on PyTorch warns of a caller that does not say so."""

# torch 2.13 renamed these two; earlier versions have the old names only.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def when_groups_end(do: Callable[[], object]) -> Callable[[], None]:
    """Does it once, as soon as ``destroy_process_group()`` ends the default group, on the thread that calls that; not
    any more once what this returns was called."""
    groups: dict[Any, Any] = dist.distributed_c10d._world.pg_coalesce_state  # pyright: ignore[reportPrivateUsage]
    mark = _Sentinel()  # it lives in a table of groups, which is emptied then
    ending = weakref.finalize(mark, do)
    ending.atexit = False
    groups[mark] = []

    key = weakref.ref(mark)

    def never_mind() -> None:
        ending.detach()
        groups.pop(key(), None)

    return never_mind


class _Sentinel:
    """What is let go of at a certain moment."""


def set_group_timeout(timeout: timedelta, group: Any = None) -> None:
    """From now on collectives of a group, None: the default one, may take so long."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)  # pyright: ignore[reportPrivateUsage]


def count_groups_anew() -> None:
    """The next group is the first: ranks find each other by its number, and one that could not be made has one too."""
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]


def abort_groups(device: torch.device) -> None:
    """Ends whatever the groups of this process that carry tensors of ``device`` have under way; they cannot be used any
    more. All at once where NCCL can do that, because the end of one communicator may wait for another's."""
    groups = []
    for group in all_groups():
        parts = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
        if parts.get(device.type, "gloo") != "gloo":
            groups.append(group)
    backends = [backend for group in groups if (backend := _backend(group, device)) is not None]
    together = [backend for backend in backends[:1] if hasattr(backend, "_group_start")]
    for backend in together:
        backend._group_start()
    for group in reversed(groups):
        group.abort()
    for backend in together:
        backend._group_end()


def _backend(group: Any, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:  # a group that is one itself
        return None


def all_groups() -> list[Any]:
    """Every process group that this rank is in and that nobody destroyed, the default one among them."""
    return list(dist.distributed_c10d._world.pg_map)  # pyright: ignore[reportPrivateUsage]
