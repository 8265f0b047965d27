"""Two models in one loop, as in PPO: a policy under one engine, a value function under another.

    python examples/ppo.py
    torchrun --nproc-per-node 2 examples/ppo.py

The task is a bandit with contexts: the right one of four actions follows from the signs of two numbers.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import shardfold as sf

ROUNDS, EPOCHS, BATCH, CLIP = 30, 3, 256, 0.2


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


torch.manual_seed(0)
policy = sf.Engine(network(4), optimizer=partial(torch.optim.Adam, lr=3e-3), layout="zero3", clip_norm=0.5)
value = sf.Engine(network(1), optimizer=partial(torch.optim.Adam, lr=3e-3), layout="zero2")
draw = torch.Generator().manual_seed(policy.data_rank)

for number in range(ROUNDS):
    state = torch.randn(BATCH, 2, generator=draw)
    best = (state[:, 0] > 0).long() * 2 + (state[:, 1] > 0).long()
    with torch.no_grad():  # what was done, under the policy as it was
        chances = policy(state.to(policy.device)).log_softmax(1).cpu()
        action = torch.multinomial(chances.exp(), 1, generator=draw)
        old, reward = chances.gather(1, action).squeeze(1), (action.squeeze(1) == best).float()
        advantage = reward - value(state.to(value.device)).squeeze(1).cpu()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    state, action, old, advantage, target = (each.to(policy.device) for each in (state, action, old, advantage, reward))
    for _ in range(EPOCHS):
        ratio = (policy(state).log_softmax(1).gather(1, action).squeeze(1) - old).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy.backward(-torch.minimum(ratio * advantage, clipped * advantage).mean())
        policy.step()
        value.backward(F.mse_loss(value(state).squeeze(1), target))
        value.step()
    if number % 10 == 0 or number == ROUNDS - 1:
        mean = policy.mean(reward.mean().item())
        if policy.rank == 0:
            print(f"round {number + 1:3}  reward {mean:.2f}")
policy.close()
value.close()
