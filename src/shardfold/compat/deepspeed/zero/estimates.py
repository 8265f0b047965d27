"""DeepSpeed's estimates of the memory that model states need, by its own formulas (its page "Memory Requirements").

They are of DeepSpeed: 18 bytes per parameter that is split, and a factor for buffers in host memory. What an engine of
ours holds, ``engine.memory()`` and ``shardfold explain`` say to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import nn

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of host memory per node and of each GPU's under stage 2."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    gpu = 2 * total_params + int(18 * total_params / gpus)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), gpu


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of host memory per node, of each GPU's, and of the largest layer among these, under stage 3."""
    gpus, layer = num_nodes * num_gpus_per_node, 4 * largest_layer_params
    copies = 4 * num_gpus_per_node  # what each process builds where nothing is split from the start
    if not cpu_offload:
        built = largest_layer_params if zero_init else total_params
        return int(built * copies * additional_buffer_factor), layer + int(18 * total_params / gpus), layer
    each = (18 if cpu_offload_params else 16) / num_nodes
    host = total_params * (each if zero_init else max(copies, each)) * additional_buffer_factor
    gpu = layer if cpu_offload_params else layer + int(2 * total_params / gpus)
    return int(host), gpu, layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of stage 2 for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _total(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of stage 2 for a number of parameters."""
    _say_setup(num_gpus_per_node, num_nodes, f"{int(total_params / 1e6)}M total params")
    for offload in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _say(host, gpu, f"offload_optimizer={_device(offload)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the estimates of stage 3 for a model."""
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(
        _total(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the estimates of stage 3 for numbers of parameters, of all and of the largest layer."""
    sizes = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    _say_setup(num_gpus_per_node, num_nodes, sizes)
    for offload, offload_params, zero_init in _options():
        host, gpu, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            offload,
            offload_params,
            zero_init,
            additional_buffer_factor,
        )
        _say(
            host,
            gpu,
            f"offload_param={_device(offload_params)}, offload_optimizer={_device(offload)}, "
            f"zero_init={int(zero_init)}",
        )


def _options() -> Iterator[tuple[bool, bool, bool]]:
    """Whether the optimizer's states are offloaded, parameters too, and whether the model is built split."""
    return ((a, b, c) for a, b, c in product((True, False), repeat=3) if a or not b)


def _total(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _device(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _say_setup(gpus: int, nodes: int, sizes: str) -> None:
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node.\n"
        f"SW: Model with {sizes}.\n"
        "  per CPU  |  per GPU |   Options"
    )


def _say(host: int, gpu: int, options: str) -> None:
    print(f" {host / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | {options}")
