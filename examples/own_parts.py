"""An optimizer of your own, and a layout of your own.

python examples/own_parts.py
torchrun --nproc-per-node 2 examples/own_parts.py
"""

from functools import partial

import torch
from torch import nn

import shardfold as sf


class SignSGD(torch.optim.Optimizer):
    """Moves every weight by the sign of its averaged gradient: element by element, so it needs shards only."""

    def __init__(self, params, lr=1e-3, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(average.sign(), alpha=group["lr"])


# Gradients, masters and moments are split within a node; parameters are whole. Each line of the table is a cell.
within_nodes = sf.PRESETS["ddp"].edit("grads", "master", "moments", over=("intra",))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
engine = sf.Engine(model, optimizer=partial(SignSGD, lr=3e-3), layout=within_nodes)
draw = torch.Generator().manual_seed(engine.data_rank)
for step in range(60):
    x = torch.randn(64, 16, generator=draw)
    loss = (engine(x.to(engine.device)) - x.sum(1, keepdim=True).to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    if step % 20 == 0 or step == 59:
        mean = engine.mean(loss.item())
        if engine.rank == 0:
            print(f"step {step + 1:3}  loss {mean:.4f}")
if engine.rank == 0:
    print(engine.layout)
    print(engine.memory())
engine.close()
