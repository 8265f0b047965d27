"""Counts floating-point operations of a model's forward with PyTorch's own counter, module by module.

Matrix products, convolutions and attention are counted by PyTorch's formulas, two operations for each multiply and add;
so are the matrix products inside of the kernels for recurrent layers, of which PyTorch's counter knows none.
A convolution's bias, activations, pooling, normalizations and softmax are counted too, by elements. Other element-wise
operations are not, ``tanh`` and ``sigmoid`` among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

from shardfold.compat.deepspeed.profiling.flops_profiler.words import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from shardfold.errors import ConfigError

__all__ = ["FlopsProfiler", "get_model_profile"]


def _per_element(factor: int) -> Callable[..., int]:
    def count(shape: Sequence[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return factor * int(torch.Size(shape).numel())

    return count


ATEN = torch.ops.aten
ELEMENTS: dict[Any, Callable[..., int]] = {
    **{
        op: _per_element(1)
        for op in (
            ATEN.relu,
            ATEN.relu_,
            ATEN.gelu,
            ATEN.silu,
            ATEN.silu_,
            ATEN.leaky_relu,
            ATEN.elu,
            ATEN._softmax,
            ATEN.max_pool2d_with_indices,
            ATEN.max_pool3d_with_indices,
            ATEN.avg_pool2d,
            ATEN.avg_pool3d,
            ATEN._adaptive_avg_pool2d,
            ATEN._adaptive_avg_pool3d,
            ATEN.adaptive_max_pool2d,
            ATEN.adaptive_max_pool3d,
        )
    },
    **{
        op: _per_element(5)
        for op in (
            ATEN.native_layer_norm,
            ATEN.native_batch_norm,
            ATEN.native_group_norm,
            ATEN.cudnn_batch_norm,
            ATEN._fused_rms_norm,
        )
    },
    ATEN._native_batch_norm_legit_no_training: _per_element(2),
}
#: PyTorch's counter knows the attention kernels of GPUs only.
ON_CPU: dict[Any, Callable[..., int]] = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *args, out_shape=None, **kwargs: (
        sdpa_flop_count(query, key, value)
    )
}


def _recurrent(x: Sequence[int], *weights: Any, out_shape: Any = None, **options: Any) -> int:
    """Each matrix (gates x hidden, inputs or hidden) is multiplied by one vector for each sequence and time step."""
    vectors = torch.Size(x[:-1]).numel()
    return 2 * vectors * sum(torch.Size(weight).numel() for weight in weights if len(weight) == 2)


RECURRENT: dict[Any, Callable[..., int]] = {
    ATEN.mkldnn_rnn_layer: lambda x, to_gates, between, *rest, **options: _recurrent(x, to_gates, between),
    ATEN._cudnn_rnn: lambda x, weights, *rest, **options: _recurrent(x, *weights),
}
"""Of one layer in one direction on CPUs, of all layers on GPUs."""


class FlopsProfiler:
    """Profiles forwards between :meth:`start_profile` and :meth:`stop_profile`.

    Args:
        model: whose forward is profiled.
        ds_engine: an engine of the compatibility layer, for its batch size and number of ranks in the printed profile.
        recompute_fwd_factor: how much of forward backward computes again.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self._counter: FlopCounterMode | None = None
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}
        self.reset_profile()

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Begins to count; modules of the classes in ``ignore_list`` are not timed, and what they do is not counted."""
        self.reset_profile()
        ignored = tuple(ignore_list or ())
        self._names = {id(module): name for name, module in self.model.named_modules()}
        for module in self.model.modules():
            if isinstance(module, ignored):
                self._handles += [
                    module.register_forward_pre_hook(self._pause),
                    module.register_forward_hook(self._resume),
                ]
            else:
                self._handles += [
                    module.register_forward_pre_hook(self._enter),
                    module.register_forward_hook(self._leave),
                ]
        self._counter = FlopCounterMode(
            display=False, custom_mapping={**ELEMENTS, **ON_CPU, **RECURRENT, ATEN.convolution: self._convolution}
        )
        self._counter.__enter__()
        self.started = True

    def _convolution(self, x: Any, weight: Any, bias: Any, *rest: Any, out_shape: Any, **options: Any) -> int:
        """Of one convolution, from shapes: PyTorch's figure, and an addition for each element of what has a bias."""
        added = torch.Size(out_shape).numel() if bias is not None else 0
        self._added += added
        transposed = rest[3] if len(rest) > 3 else options["transposed"]
        return conv_flop_count(x, weight, out_shape, transposed=transposed) + added

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._began.append((id(module), _now(self._device), self._total()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        key, began, (flops, macs) = self._began.pop()
        name = self._names[key]
        total_flops, total_macs = self._total()
        self.durations[name] = self.durations.get(name, 0.0) + _now(self._device) - began
        self.module_flops[name] = self.module_flops.get(name, 0) + total_flops - flops
        self.module_macs[name] = self.module_macs.get(name, 0) + total_macs - macs

    def _pause(self, module: nn.Module, args: Any) -> None:
        self._before_ignored.append(self._raw_total())

    def _resume(self, module: nn.Module, args: Any, output: Any) -> None:
        before = self._before_ignored.pop()
        if not self._before_ignored:
            after = self._raw_total()
            self._ignored = (self._ignored[0] + after[0] - before[0], self._ignored[1] + after[1] - before[1])

    def _raw_total(self) -> tuple[int, int]:
        """Operations and multiply-accumulates so far."""
        if self._counter is None:
            return self._last
        counts = self._counter.get_flop_counts().get("Global", {})
        elements = sum(n for op, n in counts.items() if op in ELEMENTS)
        whole = sum(counts.values())
        return whole, (whole - elements - self._added) // 2

    def _total(self) -> tuple[int, int]:
        flops, macs = self._raw_total()
        return flops - self._ignored[0], macs - self._ignored[1]

    @property
    def _device(self) -> torch.device | None:
        return next((p.device for p in self.model.parameters()), None)

    def stop_profile(self) -> None:
        """Stops to count; what was counted stays."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._last = self._raw_total()
            self._counter = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset_profile(self) -> None:
        """Forgets what was counted."""
        self.durations: dict[str, float] = {}
        self.module_flops: dict[str, int] = {}
        self.module_macs: dict[str, int] = {}
        self._began: list[tuple[int, float, tuple[int, int]]] = []
        self._before_ignored: list[tuple[int, int]] = []
        self._last = self._ignored = (0, 0)
        self._added = 0  # of the biases of convolutions

    def end_profile(self) -> None:
        """Stops, and forgets."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations, or e.g. ``"1.2 G"``."""
        flops = self._total()[0]
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulate operations, or e.g. ``"0.6 GMACs"``."""
        macs = self._total()[1]
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of forward, or e.g. ``"1.5 ms"``."""
        seconds = self.durations.get("", 0.0)
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the whole model, or e.g. ``"7 B"``."""
        count = sum(p.numel() for p in self.model.parameters())
        return params_to_string(count) if as_string else count

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints totals, then the heaviest modules of each depth, then with ``detailed`` every module.

        Args:
            profile_step: shown in the heading.
            module_depth: the depth whose modules are listed; -1: all depths.
            top_modules: how many of each depth.
            detailed: whether every module is listed too.
            output_file: where to write; None: standard output.
        """
        if not self.started:
            return
        with _opened(output_file) as out:
            print("\n-------------------------- DeepSpeed Flops Profiler --------------------------", file=out)
            print(f"Profile Summary at step {profile_step}:", file=out)
            for name, value in self._summary():
                print(f"{name:<60}  {value}", file=out)
            self._print_top(module_depth, top_modules, out)
            if detailed:
                print(
                    "\n------------------------------ Detailed Profile per GPU ------------------------------", file=out
                )
                print(
                    "Each module: params, MACs, share of MACs, fwd latency, share of fwd latency, fwd FLOPS", file=out
                )
                for name, module in self.model.named_modules():
                    print(f"{'  ' * _depth(name)}{name or type(module).__name__}: {self._row(name, module)}", file=out)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """The heaviest modules of each depth."""
        if self.started:
            self._print_top(module_depth, top_modules, sys.stdout)

    def _summary(self) -> Iterator[tuple[str, str]]:
        flops, seconds = self.get_total_flops(), self.get_total_duration()
        if self.ds_engine is not None:
            yield "world size:", str(self.ds_engine.world_size)
            yield "data parallel size:", str(self.ds_engine.dp_world_size)
            yield "model parallel size:", str(self.ds_engine.mp_world_size)
            yield "batch size per GPU:", str(self.ds_engine.train_micro_batch_size_per_gpu())
        yield "params per GPU:", self.get_total_params(True)
        yield "params of model = params per GPU * mp_size:", self.get_total_params(True)
        yield "fwd MACs per GPU:", self.get_total_macs(True)
        yield "fwd flops per GPU:", number_to_string(flops)
        yield "fwd flops of model = fwd flops per GPU * mp_size:", number_to_string(flops)
        yield "fwd latency:", duration_to_string(seconds)
        if seconds:
            yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency:", flops_to_string(flops / seconds)
        factor = 3 + self.recompute_fwd_factor
        yield f"fwd+bwd flops per GPU = {factor:g} * fwd flops:", number_to_string(factor * flops)

    def _print_top(self, module_depth: int, top_modules: int, out: TextIO) -> None:
        names = [name for name in self._names.values() if name in self.module_macs]
        depths = sorted({_depth(name) for name in names})
        print("\n----------------------------- Aggregated Profile per GPU -----------------------------", file=out)
        print(f"Top {top_modules} modules in terms of MACs or fwd latency at different model depths:", file=out)
        for depth in depths if module_depth == -1 else [d for d in depths if d == module_depth]:
            level = [name for name in names if _depth(name) == depth]
            for what, sizes in (("MACs", self.module_macs), ("fwd latency", self.durations)):
                top = sorted(level, key=lambda name: -sizes[name])[:top_modules]
                words = macs_to_string if what == "MACs" else duration_to_string
                shown = ", ".join(f"{name or type(self.model).__name__} {words(sizes[name])}" for name in top)
                print(f"depth {depth}: {what:<12} {shown}", file=out)

    def _row(self, name: str, module: nn.Module) -> str:
        params = params_to_string(sum(p.numel() for p in module.parameters()))
        macs, seconds = self.module_macs.get(name, 0), self.durations.get(name, 0.0)
        all_macs, all_seconds = self.get_total_macs() or 1, self.get_total_duration() or 1.0
        rate = flops_to_string(self.module_flops.get(name, 0) / seconds) if seconds else "-"
        return (
            f"{params}, {macs_to_string(macs)}, {macs / all_macs:.2%}, {duration_to_string(seconds)}, "
            f"{seconds / all_seconds:.2%}, {rate}"
        )


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-accumulates and parameters of one forward, as text or as numbers. The model goes to eval.

    Args:
        model: to profile.
        input_shape: of the one tensor that forward takes, in the parameters' dtype.
        args, kwargs: of forward, where ``input_shape`` is not given.
        print_profile, detailed, module_depth, top_modules, output_file: as of ``print_model_profile``.
        warm_up: forwards before the one that is counted.
        as_string: whether text is returned.
        ignore_modules: classes that are not counted.
        mode: ``"forward"``, or ``"generate"`` for ``model.generate``.

    Raises:
        ConfigError: there is no input, or the mode is unknown.
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(f"get_model_profile(mode={mode!r}): it is 'forward' or 'generate'.")
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(()))
        args = [torch.zeros(tuple(input_shape), dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ConfigError("get_model_profile() needs an input: give input_shape=, args= or kwargs=.")
    profiler = FlopsProfiler(model)
    model.eval()
    run: Callable[..., Any] = model if mode == "forward" else model.generate  # pyright: ignore
    for _ in range(warm_up):
        run(*args, **(kwargs or {}))
    profiler.start_profile(ignore_modules)
    run(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    figures = (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
    profiler.end_profile()
    return figures


def _now(device: torch.device | None) -> float:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


@contextmanager
def _opened(output_file: str | None) -> Iterator[TextIO]:
    if not output_file:
        yield sys.stdout
        return
    Path(output_file).resolve().parent.mkdir(parents=True, exist_ok=True)
    with open(output_file, "w", encoding="utf-8") as file:
        yield file
