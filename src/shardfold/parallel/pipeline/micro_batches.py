"""A batch as its micro-batches, and what is computed of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardfold.errors import UsageError
from shardfold.torch_internals import tree_flatten, tree_unflatten

__all__ = ["default_compute", "micro_batches"]


def micro_batches(call: str, batch: Any, count: int) -> list[Any]:
    """The micro-batches: the members of a list, or the parts of all tensors in ``batch`` along their first dimension.

    Raises:
        UsageError: there are not ``count`` of them, or tensors do not divide into that many.
    """
    if isinstance(batch, list):
        if len(batch) != count:
            many = f"{len(batch)} micro-batch{'es' * (len(batch) != 1)}"
            raise UsageError(
                f"{call}: the batch is a list of {many}, where accumulate= (or micro_batches= of eval_batch) asks for "
                f"{count}: give as many, or tensors that are cut along their first dimension."
            )
        return batch
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)  # as of a tokenizer of transformers
    leaves, spec = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    lengths = {len(tensor) for tensor in tensors}
    if len(lengths) != 1 or next(iter(lengths)) % count or not next(iter(lengths)):
        found = ", ".join(map(str, sorted(lengths))) or "no tensors"
        raise UsageError(
            f"{call}: the batch has {found} along the first dimension, which has to be one length that divides by "
            f"accumulate={count}, as each micro-batch gets an equal part; or give a list of {count} micro-batches."
        )
    cut = [leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.dim() else (leaf,) * count for leaf in leaves]
    return [tree_unflatten([parts[i] for parts in cut], spec) for i in range(count)]


def default_compute(model: nn.Module, batch: Any) -> Any:
    """The model's own loss of a micro-batch: a mapping's entries, or a tuple's members, are its arguments."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        out = model(*batch)
    else:
        out = model(batch)
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, Mapping):
        loss = out.get("loss")
    if loss is None and isinstance(out, tuple) and out and isinstance(out[0], Tensor):
        loss = out[0]
    loss = out if loss is None else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            f"the model gave {type(out).__name__} and no loss: give train_batch(batch, compute=...), a function of the "
            "model and a micro-batch that returns the loss."
        )
    return loss
