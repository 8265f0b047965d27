"""What DeepSpeed's ``elasticity`` chooses for drawn sections: ``tests/golden/deepspeed_elasticity.json``.

pip install deepspeed==0.16.9     # in an environment of its own; 0.19 has removed it
python benchmarks/deepspeed_elasticity.py tests/golden/deepspeed_elasticity.json
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

CASES, SEED = 150, 45


def drawn(rng: random.Random) -> dict[str, Any]:
    """A section ``elasticity``."""
    section: dict[str, Any] = {
        "enabled": True,
        "max_train_batch_size": rng.choice([rng.randint(1, 64), rng.randint(8, 3000), rng.randint(1000, 20000)]),
        "micro_batch_sizes": rng.choices([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 32], k=rng.randint(1, 4)),
    }
    others = {"min_gpus": rng.randint(1, 40), "max_gpus": rng.randint(40, 2000), "prefer_larger_batch": False}
    section |= {name: value for name, value in others.items() if rng.random() < 0.5}
    section["version"] = rng.choice([0.1, 0.2])
    if section["version"] == 0.2 and rng.random() < 0.7:
        section["num_gpus_per_node"] = rng.choice([2, 4, 8])
    return section


def answer(section: dict[str, Any], ranks: int) -> list[int] | None:
    """Batch and micro-batch; None where DeepSpeed raises or its batch is empty."""
    from deepspeed.elasticity.elasticity import compute_elastic_config  # pyright: ignore[reportMissingImports]

    try:
        batch, _, micro = compute_elastic_config({"elasticity": section}, "0.16.9", world_size=ranks)
    except Exception:  # of several types, a TypeError among them
        return None
    return [int(batch), int(micro)] if batch else None


def main(path: str) -> None:
    rng, cases = random.Random(SEED), []
    while len(cases) < CASES:
        section, ranks = drawn(rng), rng.choice([1, 2, 3, 4, 6, 8, 16, 24, 32, 48, rng.randint(1, 128)])
        found = answer(section, ranks)
        if found is not None or rng.random() < 0.2:
            cases.append([section, ranks, found])
    made = {"made by": f"python benchmarks/deepspeed_elasticity.py {path}", "versions": {"deepspeed": "0.16.9"}}
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(path).write_text(json.dumps(made)[:-1] + f', "cases": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
