"""What the model said before it was tuned, without a second model.

With LoRA or a prefix that is the model without it. Else it is computed once, before the first step, kept by row in the
cache under a hash of model and data, and in checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.tools.tune.adapters import BASE_CHANGES, without_adapter

if TYPE_CHECKING:
    from shardfold.tools.tune.data.batches import Batch
    from shardfold.tools.tune.run import TuneRun

__all__ = ["Reference"]


class Reference:
    """Values of the model as it was, for each row of the data.

    Args:
        columns: how many values a row has.
        values: of a batch, by the model as it is: ``(rows, columns)``.
    """

    def __init__(self, columns: int, values: Callable[[TuneRun, Batch], Tensor]) -> None:
        self._columns, self._values = columns, values
        self._saved: dict[str, Tensor] = {}

    def begin(self, run: TuneRun) -> None:
        """Compute what the model without its adapter cannot say later; every rank calls it."""
        if _adapter_is_apart(run):
            return
        for split, rows in (("train", run.rows), ("eval", run.held_out)):
            if rows is not None and split not in self._saved:
                self._saved[split] = self._of_rows(run, split, len(rows), rows.fingerprint)

    def of(self, run: TuneRun, batch: Batch) -> Tensor:
        """``(rows, columns)`` of a batch, on the device."""
        if run.split in self._saved:
            return self._saved[run.split][batch.rows].to(run.engine.device)
        with without_adapter(run.model), _as_evaluated(run):
            return self._values(run, batch)

    def state_dict(self) -> dict[str, Any]:
        """What was computed before the first step."""
        return dict(self._saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same."""
        self._saved = dict(state)

    def _of_rows(self, run: TuneRun, split: str, rows: int, fingerprint: str) -> Tensor:
        path = run.config.cache_folder() / "reference" / f"{_key(run, fingerprint, self._columns)}.npy"
        found = torch.full((rows, self._columns), -torch.inf, dtype=torch.float32)
        if run.leads and (kept := _read(path, found.shape)) is not None:
            found = kept
        has = run.engine.max_over_ranks([float(run.leads and found.isfinite().all())])[0] > 0
        if not has and run.done:
            raise ConfigError("the checkpoint has no reference of these rows: begin a new run without --resume.")
        if not has:
            run.split = split
            with _as_evaluated(run):
                data = run.rows if split == "train" else run.held_out
                assert data is not None
                for window in run.batches_of(data, accumulate=1, shuffle=False).epoch():
                    for batch in window.batches:
                        values = self._values(run, batch)
                        found[batch.rows] = values.float().cpu()[: len(batch.rows)]
            run.split = "train"
        found = _most(found.to(run.engine.device)).cpu()
        if not has and run.leads:
            _write(path, found)
        return found


def _adapter_is_apart(run: TuneRun) -> bool:
    """Whether the model without its adapter is the model as it was."""
    adapter = run.config.adapter
    return adapter is not None and adapter.kind in ("lora", "prefix") and adapter.variant not in BASE_CHANGES


@contextmanager
def _as_evaluated(run: TuneRun) -> Iterator[None]:
    """Inside, nothing is dropped out, and there are no gradients."""
    training = run.model.training
    run.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        run.model.train(training)


def _key(run: TuneRun, fingerprint: str, columns: int) -> str:
    """A hash of all that the values depend on."""
    import xxhash

    weights = xxhash.xxh3_128()
    for folder in (run.place.folder, run.place.adapter):
        for file in sorted(folder.glob("*.safetensors")) if folder is not None else ():
            with file.open("rb") as opened:
                while chunk := opened.read(2**24):
                    weights.update(chunk)
    config = run.config
    depends = {
        "weights": weights.hexdigest(),
        "rows": fingerprint,
        "columns": columns,
        "recipe": config.recipe,
        "text": config.text.model_dump(mode="json", exclude={"noise", "pack"}),
        "adapter": None if config.adapter is None else config.adapter.model_dump(mode="json"),
        "precision": config.precision,
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]


def _most(found: Tensor) -> Tensor:
    """The largest of all ranks: a rank has -inf where it computed nothing."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def _read(path: Path, shape: torch.Size) -> Tensor | None:
    try:
        found = torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError):
        return None
    return found if found.shape == shape and found.isfinite().all() else None


def _write(path: Path, values: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        np.save(file, values.numpy(), allow_pickle=False)
    draft.replace(path)
