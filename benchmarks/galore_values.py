"""What galore-torch makes of given matrices and gradients, as `tests/golden/galore.json`: what ours is held to.

pip install galore-torch==1.0 bitsandbytes     # in an environment of its own
python benchmarks/galore_values.py tests/golden/galore.json

Each case takes steps of galore-torch's ``AdamW`` on three matrices and a vector, whose gradients are their distances
from targets, and writes where they end. A singular vector has no sign of its own, and galore-torch takes LAPACK's: its
numbers say something only where a new projector points to where the old one did, which is looked at here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = ((8, 6), (6, 8), (6, 6), (5,))
STEPS, GAP = 36, 12
OPTIONS = {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-12, "weight_decay": 1e-3}
KINDS = ("std", "reverse_std", "left", "right", "full")


def drawn() -> tuple[list[Tensor], list[Tensor]]:
    """Where parameters begin, and their targets, of which matrices have singular values that lie apart."""
    draw = torch.Generator().manual_seed(1)
    starts, targets = [], []
    for shape in SHAPES:
        starts.append(torch.randn(shape, generator=draw) * 0.02)
        target = torch.randn(shape, generator=draw)
        if len(shape) == 2:
            u, s, vh = torch.linalg.svd(target, full_matrices=False)
            target = u @ torch.diag(2.0 ** -torch.arange(len(s))) @ vh
        targets.append(target)
    return starts, targets


def trained(kind: str, starts: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    from galore_torch.adamw import AdamW  # pyright: ignore[reportMissingImports]

    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:3], "rank": 2, "update_proj_gap": GAP, "scale": 0.5, "proj_type": kind},
        {"params": parameters[3:]},
    ]
    optimizer = AdamW(groups, no_deprecation_warning=True, **OPTIONS)
    before: list[list[Tensor]] = []
    for step in range(STEPS):
        for parameter, target in zip(parameters, targets, strict=True):
            parameter.grad = parameter.detach() - target
        optimizer.step()
        if step % GAP == 0:
            kept = [optimizer.state[p]["projector"].ortho_matrix for p in parameters[:3]]
            now = [m if isinstance(m, list) else [m] for m in kept]
            vectors = [[x if x.shape[0] > x.shape[1] else x.T for x in each] for each in now]
            for old, new in zip(before, vectors, strict=False):
                assert all(((a * b).sum(0) > 0.5).all() for a, b in zip(old, new, strict=True)), (kind, step)
            before = [[x.clone() for x in each] for each in vectors]
    return [p.detach() for p in parameters]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    starts, targets = drawn()
    said = {
        "made by": "python benchmarks/galore_values.py tests/golden/galore.json",
        "versions": {name: importlib.metadata.version(name) for name in ("galore-torch", "torch")},
        "steps": STEPS, "update_proj_gap": GAP, "rank": 2, "scale": 0.5, "options": OPTIONS,
        "starts": [x.tolist() for x in starts], "targets": [x.tolist() for x in targets],
        "ends": {kind: [x.tolist() for x in trained(kind, starts, targets)] for kind in KINDS},
    }  # fmt: skip
    file.write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
