"""The log of operations that go through ``deepspeed.comm``; what an engine sends is in its own report of traffic."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shardfold.compat.deepspeed.utils.logging import print_dist

__all__ = ["CommsLogger", "calc_bw_log", "comms_logger", "configure", "convert_size", "get_caller_func", "logged"]

Function = TypeVar("Function", bound=Callable[..., Any])
UNITS = ("B", "KB", "MB", "GB", "TB")
ONTO_ALL = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
COLUMNS = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)")


def convert_size(size_bytes: float) -> str:
    """``1536`` -> ``"1.5 KB"``."""
    if size_bytes == 0:
        return "0B"
    unit = min(max(0, (int(size_bytes).bit_length() - 1) // 10), len(UNITS) - 1)
    return f"{round(size_bytes / 1024**unit, 2)} {UNITS[unit]}"


def calc_bw_log(comm_op: str, size: int, duration: float) -> tuple[float, float]:
    """``(throughput, bus bandwidth)`` in Gbit/s, as NCCL's tests define them.

    Args:
        comm_op: name of the operation.
        size: bytes of the tensor that a rank gives.
        duration: milliseconds.
    """
    n = dist.get_world_size() if dist.is_initialized() else 1
    gigabits = 8 * size / (duration or 1e-9) / 1e6
    if comm_op in ONTO_ALL:
        return gigabits * n, gigabits * (n - 1)
    if comm_op.startswith("all_to_all"):
        return gigabits, gigabits * (n - 1) / n
    if "all_reduce" in comm_op:
        return 2 * gigabits, gigabits * 2 * (n - 1) / n
    return gigabits, gigabits


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without that share of values at either end."""
    k = round(len(data) * trim_percent)
    kept = sorted(data)[k : len(data) - k]
    return sum(kept) / len(kept) if kept else 0.0


class CommsLogger:
    """Latencies of operations by name and bytes.

    Attributes:
        enabled: whether anything is logged.
        prof_all: all operations, or only those named in ``prof_ops`` or called with ``prof=True``.
        verbose: a line is printed for each.
        engines: what engines log of their own traffic, which is printed too.
        comms_dict: ``{name: {bytes: [count, latencies in ms, throughputs, bus bandwidths in Gbit/s]}}``.
    """

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled, self.verbose, self.debug, self.prof_all = False, False, False, True
        self.prof_ops: list[str] = []
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()

    def wants(self, name: str, prof: bool) -> bool:
        """Whether an operation of that name is logged."""
        return self.enabled and (prof or self.prof_all or name in self.prof_ops)

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        self.prof_ops = [*self.prof_ops, *(name for name in op_name_list if name not in self.prof_ops)]

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Takes down one operation: ``raw_name`` is its kind, ``latency`` in milliseconds."""
        throughput, bus = calc_bw_log(raw_name, msg_size, latency)
        entry = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], (latency, throughput, bus), strict=True):
            values.append(value)
        if self.verbose:
            print_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {throughput:.2f} | busbw (Gbps): {bus:.2f}",
                [0],
            )

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_raw_data(self) -> dict[str, Any]:
        return dict(self.comms_dict)

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """``{bytes: {"count": ..., "avg_latency_ms": ..., ...}}``; None if there was none of that name."""
        if operation_name not in self.comms_dict:
            return None
        return {
            size: {
                "count": count,
                "total_latency_ms": sum(latencies),
                "avg_latency_ms": trim_mean(latencies, 0.1),
                "tput_avg_gbps": trim_mean(throughputs, 0.1),
                "busbw_avg_gbps": trim_mean(buses, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
            for size, (count, latencies, throughputs, buses) in sorted(self.comms_dict[operation_name].items())
        }

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Prints the log on rank 0, and gives it as a dict if asked to.

        Args:
            print_log: whether to print.
            show_straggler: with the time that ranks waited for the slowest; every rank calls it then.
            return_dict: whether to give ``{"summary": ..., "straggler_analysis": ..., "metadata": ...}``.
        """
        summary = {name: self.get_operation_summary(name) or {} for name in self.comms_dict}
        waits = self._stragglers() if show_straggler else None
        if print_log:
            sent = [f"\nSent by an engine\n{log}" for log in self.engines if log.sent]
            print_dist("\n".join([self._table(summary, waits), *sent]), [0])
        if not return_dict:
            return None
        there = dist.is_initialized()
        metadata = {
            "world_size": dist.get_world_size() if there else 1,
            "rank": dist.get_rank() if there else 0,
            "timestamp": datetime.now().isoformat(),
        }
        return {"summary": summary, "straggler_analysis": waits, "metadata": metadata}

    def _stragglers(self) -> dict[str, Any]:
        """An operation's least latency over the ranks is what it takes; what it takes longer is waiting."""
        found: dict[str, Any] = {}
        for name, sizes in sorted(self.comms_dict.items()):
            for size, (count, latencies, _, _) in sorted(sizes.items()):
                own = get_accelerator().FloatTensor(latencies)
                least = own.clone()
                if dist.is_initialized():
                    dist.all_reduce(least, dist.ReduceOp.MIN)
                waited = (own - least).tolist()
                found.setdefault(name, {})[size] = {
                    "count": count,
                    "total_comm_lat_ms": float(least.sum()),
                    "total_straggler_ms": sum(waited),
                    "avg_comm_lat_ms": trim_mean(least.tolist(), 0.1),
                    "avg_straggler_ms": trim_mean(waited, 0.1),
                    "msg_size_bytes": size,
                    "msg_size_str": convert_size(size),
                }
        return found

    @staticmethod
    def _table(summary: dict[str, Any], waits: dict[str, Any] | None) -> str:
        kinds = ["msg_size_str", "count", "total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps"]
        rows = [[*COLUMNS, "busbw_avg (Gbps)"]]
        for name, sizes in summary.items():
            rows.append([name])
            rows += [["", *(_cell(entry[kind]) for kind in kinds)] for entry in sizes.values()]
        if waits is not None:
            rows += [[""], ["Straggler Effect", *COLUMNS[1:3], "Comm Latency(ms)", "Straggler Latency(ms)"]]
            for name, sizes in waits.items():
                rows.append([name])
                kinds = ["msg_size_str", "count", "total_comm_lat_ms", "total_straggler_ms"]
                rows += [["", *(_cell(entry[kind]) for kind in kinds)] for entry in sizes.values()]
        return "\n".join("".join(f"{cell:<22}" for cell in row).rstrip() for row in rows)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


comms_logger = CommsLogger()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Sets what is logged: as a configuration's ``comms_logger`` says, then as the other arguments say."""
    section = getattr(getattr(deepspeed_config, "comms_config", None), "comms_logger", None)
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    for name, value in given.items():
        chosen = getattr(section, name, None) if value is None else value
        if chosen is not None:
            setattr(comms_logger, name, chosen)


def logged(function: Function) -> Function:
    """An operation that is timed where it is wanted; its keyword ``log_name`` is what it is logged as."""
    kind = function.__name__

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("log_name", kind)
        if not comms_logger.wants(name, kwargs.get("prof", False)):
            return function(*args, **kwargs)
        synchronize = get_accelerator().synchronize
        synchronize()
        start = time.perf_counter()
        done = function(*args, **kwargs)
        if hasattr(done, "wait"):
            done.wait()
        synchronize()
        if comms_logger.debug:
            name = f"{name} | [Caller Func: {get_caller_func(2)}]"
        comms_logger.append(kind, name, (time.perf_counter() - start) * 1000, _bytes([*args, *kwargs.values()]))
        return done

    return timed  # pyright: ignore[reportReturnType]


def get_caller_func(frame: int = 3) -> str:
    """The name of the function so many calls up."""
    return sys._getframe(frame).f_code.co_name


def _bytes(arguments: Sequence[Any]) -> int:
    """Of what a rank gives: the last tensor, or list of tensors, among the arguments."""
    for argument in reversed(arguments):
        tensors = argument if isinstance(argument, (list, tuple)) else [argument]
        if tensors and all(isinstance(tensor, Tensor) for tensor in tensors):
            return sum(tensor.nbytes for tensor in tensors)
    return 0
