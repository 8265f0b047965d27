"""A script of Lightning's Trainer, as users write them, but for what stands in the way of its strategy on a CPU; what
kills its ranks is in a callback.

python elastic_lightning_script.py FOLDER STAGE ACCUMULATE STEPS RANK:STEP:MILLISECONDS ...

A rank dies so many milliseconds behind the beginning of a step: at once, or by a timer, wherever it is then; if they
are below 0, so many behind the end of that many steps, of which each fifth is saved, and a validation follows each
eighth. What a training step of its reads is written into FOLDER/read-RANK.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.strategies.deepspeed as strategies
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.launch.elastic_script import end

ROWS = 48
strategies._validate_device_index_selection = lambda devices: None  # CUDA's


class OnCPU(DeepSpeedStrategy):
    """Lightning wants CUDA for it."""

    def setup_environment(self) -> None:
        self.parallel_devices = [torch.device("cpu", rank) for rank in range(3)]
        super(DeepSpeedStrategy, self).setup_environment()


class Module(L.LightningModule):
    """A network whose dropout is drawn."""

    def __init__(self, folder: Path, total: int) -> None:
        super().__init__()
        self.total = total
        self.network: Any = None
        self.log_file = os.open(folder / f"read-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.said: list[dict[str, Any]] = []
        self.held_out: list[float] = []

    def configure_model(self) -> None:
        if self.network is None:
            torch.manual_seed(0)
            self.network = nn.Sequential(
                nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 1)
            )

    def elastic(self) -> Any:
        """What is underneath the engine."""
        model: Any = self.trainer.model
        return model.elastic

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        elastic = self.elastic()
        said = [elastic.run.engine.steps, len(elastic.run.recoveries), batch[2].tolist(), elastic.factor]
        os.write(self.log_file, (json.dumps(said) + "\n").encode())
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        elastic = self.elastic()
        step = elastic.run.engine.steps
        assert step == self.trainer.global_step
        if step and (not self.said or self.said[-1]["step"] != step):
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.said.append({"step": step, "loss": elastic.mean, "learning_rate": rate})

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("held_out", nn.functional.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True)

    def on_validation_end(self) -> None:
        self.held_out.append(float(self.trainer.callback_metrics["held_out"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Ends(L.Callback):
    """This rank, at those of the moments that are its own."""

    def __init__(self, moments: list[tuple[int, ...]]) -> None:
        self.moments = {step: later for rank, step, later in moments if rank == int(os.environ["RANK"])}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        later = self.moments.pop(trainer.global_step, None)
        if later and later > 0:
            threading.Timer(later / 1e3, end).start()
        elif later == 0:
            end()
        elif later:
            self.moments[trainer.global_step] = later

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.moments.get(trainer.global_step, 0) < 0:
            threading.Timer(-self.moments.pop(trainer.global_step) / 1e3, end).start()


def main(folder: Path, stage: int, accumulate: int, steps: int, moments: list[tuple[int, ...]]) -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=draw)
    rows = TensorDataset(x, x[:, :1] * x[:, 1:2], torch.arange(ROWS))
    saves = ModelCheckpoint(dirpath=str(folder / "saved"), every_n_train_steps=5, save_top_k=-1)
    trainer: Any = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=OnCPU(stage=stage, zero_allow_untested_optimizer=True, logging_level=40),
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        default_root_dir=str(folder),
        logger=False,
        callbacks=[saves, Ends(moments)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(folder, steps)
    shuffled = DataLoader(rows, batch_size=2, shuffle=True)
    trainer.fit(module, shuffled, DataLoader(Subset(rows, range(30)), batch_size=5))
    with trainer.model._core.gathered():
        weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    if trainer.is_global_zero:
        found = {"log": module.said, "weights": weights, "held_out": module.held_out, "ranks": trainer.world_size}
        torch.save(found, folder / "found")


if __name__ == "__main__":
    place, *numbers = sys.argv[1:]
    first, rest = [int(each) for each in numbers[:3]], [tuple(map(int, each.split(":"))) for each in numbers[3:]]
    main(Path(place), *first, rest)
