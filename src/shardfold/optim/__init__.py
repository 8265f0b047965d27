"""Optimizers on flat shards, and learning-rate schedules.

Any element-wise ``torch.optim`` class works under every layout; these do too, though most are not element-wise. All are
ordinary ``torch.optim.Optimizer`` and ``LRScheduler`` classes, which also work without an engine.

    adafactor         Adafactor: the second moment of a matrix as one value per row and one per column
    adamw             one step of AdamW on one tensor, by torch's fused kernel
    adamw8bit         AdamW with both moments in 8 bits
    average           an exponential moving average of the master shards
    class_optimizer   any class on shards: it steps by itself, and what it keeps it keeps by piece
    compiled          Adam's update of host memory as one compiled pass
    copied_shard      what a rank holds for another of a segment: the copy of its states, and their next gradients
    fused             AdamW, Adam and SGD in one pass over a shard, block by block while a block is in cache
    galore            GaLore: AdamW whose moments are of gradients that are projected to a low rank
    global_weights    the weights that all groups of ranks share, and how outer steps change them
    guard             methods of an engine's optimizer that users must not call
    lamb              LAMB
    lion              Lion: the sign of an interpolation of gradient and momentum
    master_ranks      the ranks that hold the other parts of this rank's parameters, as an optimizer of ours asks them
    muon              Muon: momentum whose singular values are made equal, for the matrices of hidden layers
    onebit            1-bit Adam
    onebit_lamb       1-bit LAMB
    parts             what an optimizer of ours sees: parts of parameters, and the ranks that have the other parts
    present_groups    what groups of ranks send each other while some are away
    requirements      what an engine requires of an optimizer
    schedules         learning-rate schedules
    shard_optimizer   which kind of optimizer over shards stands for the user's
    sharded           any element-wise ``torch.optim`` optimizer on shards
    sign_exchange     momentum that the ranks of an axis average by signs, with an error on each side
    signed            what optimizers have in common whose momentum may be averaged by signs
    speculation       updates in host memory before it is known whether the step is finite
    threads           threads that update blocks in host memory beside each other, each with one thread of torch's
    zero_one_adam     0/1 Adam
    _fused_optimizer  AdamW, Adam and SGD on shards, which the fused pass updates
    _hidden_matrices  which parameters are matrices of hidden layers
    _owners           whole matrices on one rank each
    _parts_optimizer  an optimizer of ours on shards, which is told where its pieces lie
"""

from shardfold.optim.adafactor import Adafactor
from shardfold.optim.adamw8bit import AdamW8bit
from shardfold.optim.galore import GaLore, galore_groups
from shardfold.optim.lamb import LAMB
from shardfold.optim.lion import Lion
from shardfold.optim.muon import Muon, muon_groups
from shardfold.optim.onebit import OneBitAdam
from shardfold.optim.onebit_lamb import OneBitLamb
from shardfold.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, warmup_cosine
from shardfold.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "LAMB",
    "Adafactor",
    "AdamW8bit",
    "GaLore",
    "LRRangeTest",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroOneAdam",
    "galore_groups",
    "muon_groups",
    "warmup_cosine",
]
