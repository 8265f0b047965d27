"""Optimizers on flat shards, and learning-rate schedules.

Any element-wise ``torch.optim`` class works under every layout; these do too, though most are not element-wise. All are
ordinary ``torch.optim.Optimizer`` and ``LRScheduler`` classes, which also work without an engine.
"""

from shardfold.optim.adafactor import Adafactor
from shardfold.optim.adamw8bit import AdamW8bit
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
    "muon_groups",
    "warmup_cosine",
]
