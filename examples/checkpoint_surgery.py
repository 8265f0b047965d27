"""Open a checkpoint without an engine, change it, and go on: a wider head, another name, weights from elsewhere.

python examples/checkpoint_surgery.py
"""

import tempfile
from functools import partial

import torch
from torch import nn

import shardfold as sf

ADAM = partial(torch.optim.AdamW, lr=1e-3)


class Model(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    engine = sf.Engine(Model(classes=10), optimizer=ADAM, layout="zero2")
    engine.backward(engine(torch.randn(4, 8, device=engine.device)).square().mean())
    engine.step()
    engine.save(f"{folder}/old/step-1", wait=True)
    engine.close()

    # Read tensor by tensor, and write a checkpoint whose head has twelve classes; the two new ones begin at zero.
    writer = sf.checkpoint.Writer(f"{folder}/new/step-1", step=1, source="ten classes became twelve")
    with sf.Checkpoint(f"{folder}/old") as old:
        for name in ("body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "head.weight", "head.bias"):
            value = old.parameter(name)
            if name.startswith("head."):
                value = torch.cat([value, torch.zeros(2, *value.shape[1:])])
            writer.parameter(name, value)
        writer.commit()

    # Any layout loads it. Weights only: the moments of the old head would not fit the new one.
    engine = sf.Engine(Model(classes=12), optimizer=ADAM, layout="zero3")
    report = engine.load(f"{folder}/new", weights_only=True)
    print("head:", tuple(engine.state_dict()["head.weight"].shape))
    engine.close()

    # Another model, with other names: patterns say which is which, and what lacks is listed.
    engine = sf.Engine(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32)), optimizer=ADAM)
    report = engine.load(f"{folder}/old", weights_only=True, strict=False, rename={r"^body\.": ""})
    print("left out:", sorted(report.unexpected))
    engine.close()
