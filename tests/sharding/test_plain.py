"""Values beside tensors as JSON, which ranks and checkpoints exchange in place of pickles."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.sharding.plain import StrangeValue, from_text, to_text
from shardfold.testing import Ranks

VALUES: dict[str, Any] = {
    "nothing": None,
    "numbers": [True, -3, 0.1, 2**70, float("inf")],
    "a dict of numbers": {3: (1, {"step": 7}), 0: ("x", {})},
    "a name like ours": {"$tuple": [1]},
    "dtypes": (torch.bfloat16, torch.int64),
    "bytes": b"\x00\xff",
    "small": torch.tensor([0.1, -0.0], dtype=torch.float32),
    "a number": torch.tensor(3.0),
    "none": torch.empty(0, 3, dtype=torch.float16),
    "large": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "turned": torch.arange(24, dtype=torch.int16).view(4, 6).t(),
    "flags": torch.arange(20) % 3 == 0,
    "array": np.arange(30.0).reshape(5, 6),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", VALUES)
def test_what_is_said_is_what_is_heard(name: str) -> None:
    """Types, dtypes, shapes and bits, also inside of lists and dicts; the text is JSON."""
    for value in (VALUES[name], [VALUES[name]], {"x": (VALUES[name], 1)}):
        text = to_text(value)
        assert json.loads(text) and same(value, from_text(text))


STRANGE = [
    object(), {1, 2}, lambda: 1, torch.eye(3).to_sparse(), torch.empty(2, device="meta"), np.array(["a"]),
    np.array([None]), np.arange(3.0).astype(">f4"), np.longdouble(1),
]  # fmt: skip


@pytest.mark.parametrize("value", STRANGE)
def test_what_is_no_plain_value_is_refused(value: Any) -> None:
    """By the name of its type; arrays by their dtype."""
    name = f"array of dtype {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    with pytest.raises(StrangeValue, match=name):
        to_text({"x": [value]})


class Kept(torch.optim.RMSprop):
    """Keeps, of each parameter, more than tensors."""

    more: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["more"] = self.more


def _followed(more: Any) -> Any:
    torch.manual_seed(0)
    Kept.more = more
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = sf.Engine(model, optimizer=partial(Kept, lr=0.01), layout="zero3")

    def train() -> None:
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()

    train()
    model[0].register_parameter("new", nn.Parameter(torch.ones(700)))
    try:
        engine.state_dict()
    except ConfigError as error:
        return str(error)
    found = [state["more"] for state in engine.optimizer.state.values()]  # type: ignore[union-attr]
    train()
    engine.close()
    return found


def test_an_optimizer_s_own_values_follow_a_change(ranks: Ranks) -> None:
    """Of a class of the user's: plain values arrive as they are where the parameters are cut anew; what is none raises
    on every rank, with what to do."""
    more = (1, "a", {"b": [0.5]})
    for found in ranks.run(_followed, more, world_size=2):
        assert found and all(value == more for value in found)
    said, other = ranks.run(_followed, {1, 2}, world_size=2)
    assert said == other
    assert said == (
        "the state of Kept cannot follow a change of the model (rank 0, 1: it keeps a set beside its tensors): let it "
        "keep numbers, strings, tensors, and lists or dicts of these."
    )
