"""What plain PyTorch makes of micro-batches, beside stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.parallel.models import ADAM, VOCAB, loss_of, make
from tests.support.options import grouped

__all__ = ["STEPS", "batches", "compute", "model_of", "plain", "trains"]

STEPS, ROWS, TIME = 5, 4, 6
WIDTH = 8


class Skipping(nn.Module):
    """A model with a skip connection over all blocks, an activation in place, and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(TIME, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens.double() / VOCAB)
        kept = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 3:
                x = x + kept * 0.5
        return self.head(x)


def model_of(name: str) -> nn.Module:
    """Of some models, in fp64."""
    if name not in ("skipping", "sequential"):
        return make(name)
    torch.manual_seed(0)
    if name == "skipping":
        return Skipping().double().train()
    layers = [nn.Linear(TIME, WIDTH)]
    for _ in range(3):
        layers += [nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, VOCAB)).double()


def compute(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a micro-batch."""
    tokens, targets = batch
    if not isinstance(model, (Skipping, nn.Sequential)):
        return loss_of(model, tokens, targets)
    given = tokens.double() / VOCAB if isinstance(model, nn.Sequential) else tokens
    return nn.functional.cross_entropy(model(given), targets[:, 0])


def batches(parts: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """For so many micro-batches over all ranks."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(VOCAB, (2, ROWS * parts, TIME), generator=generator)) for _ in range(steps)]  # type: ignore[misc]


def plain(name: str, parts: int, steps: int = STEPS) -> tuple[list[list[float]], list[float], list[Any], Any]:
    """Losses of micro-batches, norms before clipping, gradients and values behind it, on one process."""
    model = model_of(name)
    optimizer = ADAM(model.parameters())
    losses, norms, grads = [], [], []
    for batch in batches(parts, steps):
        losses.append([])
        for part in zip(*(t.chunk(parts) for t in batch), strict=True):
            loss = compute(model, part)
            loss.backward()
            losses[-1].append(loss.item())
        for p in model.parameters():  # as the engine does: norms of transformers compute in fp32, where the order shows
            if p.grad is not None:
                p.grad /= parts
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, grads, model.state_dict()


def trains(name: str, count: int, layout: str, order: str, micro: int, **options: Any) -> None:
    """On each rank: all of it equals plain PyTorch's to 1e-12; there may be ranks along axes of data, too."""
    model = options.pop("model", None) or model_of(name)
    engine = sf.Engine(
        model,
        optimizer=ADAM,
        **grouped(layout=layout, mesh={"pipeline": count}, clip_norm=0.1, pipeline=order, debug=True, **options),
        accumulate=micro,
    )
    parts = micro * engine.data_ranks
    losses, norms, grads, whole = plain(name, parts)
    for step, batch in enumerate(batches(parts)):
        mine = tuple(t.chunk(engine.data_ranks)[engine.data_rank] for t in batch)
        loss = engine.train_batch(mine, compute)
        here = losses[step][engine.data_rank * micro :][:micro]
        torch.testing.assert_close(loss.item(), sum(here) / micro, rtol=1e-12, atol=0)
        with engine.gathered(of="grads") as found:
            assert len(found) < len(grads[step]) or count == 1
            for key, grad in found.items():
                expected = grads[step].get(key)
                if expected is not None:
                    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-13, msg=f"{key} in step {step}")
        report = engine.step()
        torch.testing.assert_close(report.grad_norm, norms[step], rtol=1e-12, atol=0)
    state = engine.state_dict()
    assert list(state) and state.keys() == whole.keys()
    for key, value in state.items():
        if engine.data_ranks == 1 or not key.endswith(("_mean", "_var", "_tracked")):  # statistics are rank 0's
            torch.testing.assert_close(value, whole[key], rtol=1e-12, atol=1e-12, msg=key)
    engine.close()


def run(ranks: Ranks, name: str, count: int, data: int, *args: Any, **options: Any) -> None:
    """:func:`trains` on so many stages by so many ranks of data."""
    ranks.run(trains, name, count, *args, world_size=count * data, **options)
