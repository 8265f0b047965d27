"""Lightning's DeepSpeedStrategy trains as its DDP does, and validates again behind that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.clients import FP32_TOL, apart, needs, on_ranks

pytestmark = needs("lightning")

STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 1))


def fit(folder: Path, stage: int | None, resume: Path | None = None) -> tuple[list[float], float, float]:
    """Losses on this rank by step, the loss of the validation, and that of ``trainer.validate`` behind it."""
    import lightning as L
    import lightning.pytorch.strategies.deepspeed as strategies
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
    from torch.utils.data import DataLoader, TensorDataset

    strategies._validate_device_index_selection = lambda devices: None  # CUDA's, and the strategy insists on them

    class OnCPU(DeepSpeedStrategy):
        """What else stands in its way on a CPU."""

        def setup_environment(self) -> None:
            self.parallel_devices = [torch.device("cpu", rank) for rank in range(2)]
            super(DeepSpeedStrategy, self).setup_environment()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.network = network() if stage is None or stage < 3 else None

        def configure_model(self) -> None:
            if self.network is None:  # under stage 3 Lightning calls this where parameters are made in shards
                self.network = network()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.network(x), y)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            x, y = batch
            self.log("held_out", nn.functional.mse_loss(self.network(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    os.environ.setdefault("TORCHELASTIC_RUN_ID", "test")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")  # nobody connects: the group is there already
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=draw).repeat(STEPS, 1)
    rows = TensorDataset(x, x[:, :1] * x[:, 1:2])
    strategy = (
        DDPStrategy()
        if stage is None
        else OnCPU(stage=stage, zero_allow_untested_optimizer=True, allgather_bucket_size=1000, reduce_bucket_size=1000)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_steps=STEPS,
        gradient_clip_val=0.5,
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        use_distributed_sampler=True,
    )
    module = Module()
    loader = DataLoader(rows, batch_size=4)
    trainer.fit(module, loader, loader, ckpt_path=None if resume is None else str(resume))
    trainer.save_checkpoint(str(folder / "saved.ckpt"))
    held_out = float(trainer.callback_metrics["held_out"])
    (again,) = trainer.validate(module, loader, verbose=False)  # of the module as it is: no checkpoint is loaded
    return module.losses, held_out, float(again["held_out"])


def runs(folder: Path) -> dict[Any, Any]:
    return {stage: fit(folder / str(stage), stage) for stage in (None, 2, 3)}


@pytest.mark.soak
def test_lightning_trains_as_over_ddp(tmp_path: Path) -> None:
    told = on_ranks(runs, tmp_path)
    for rank in told:
        losses, held_out, again = rank[None]
        assert len(losses) == STEPS == len(set(losses))
        for stage in (2, 3):
            assert apart(rank[stage][0], losses) <= FP32_TOL, stage
            assert abs(rank[stage][1] - held_out) <= FP32_TOL, stage
            assert abs(rank[stage][2] - again) <= FP32_TOL, stage
