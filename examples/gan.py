"""A generator and a discriminator, each with an engine and a layout of its own.

    python examples/gan.py
    torchrun --nproc-per-node 2 examples/gan.py

The generator learns to put points on a circle. A step of one model goes through the other, so two engines take part in
one backward.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import shardfold as sf

STEPS, BATCH, NOISE = 300, 128, 8
ADAM = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.99))


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


torch.manual_seed(0)
generator = sf.Engine(network(NOISE, 2), optimizer=ADAM, layout="zero3")
critic = sf.Engine(network(2, 1), optimizer=ADAM, layout="zero1")
device = generator.device
draw = torch.Generator().manual_seed(generator.data_rank)


def circle() -> torch.Tensor:
    angle = torch.rand(BATCH, generator=draw) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1).to(device)


def made() -> torch.Tensor:
    return generator(torch.randn(BATCH, NOISE, generator=draw).to(device))


for _ in range(STEPS):
    with torch.no_grad():
        points = made()
    loss = F.softplus(-critic(circle())).mean() + F.softplus(critic(points)).mean()
    critic.backward(loss)
    critic.step()

    critic.module.requires_grad_(False)  # the generator's step asks the critic, and does not train it
    loss = F.softplus(-critic(made())).mean()
    generator.backward(loss)
    generator.step()
    critic.module.requires_grad_(True)

with torch.no_grad():
    radius = made().norm(dim=1)
error = generator.mean((radius - 1).abs().mean().item())
if generator.rank == 0:
    print(f"points are {error:.2f} from the circle, on average")
generator.close()
critic.close()
