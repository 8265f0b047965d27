"""What a DeepSpeed config asks to be built and shown: optimizers, schedules, monitors, profiles, progress."""

from __future__ import annotations

import csv
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, read
from shardfold.compat.deepspeed.monitor.config import get_monitor_config
from shardfold.compat.deepspeed.monitor.monitor import MonitorMaster
from shardfold.compat.deepspeed.observers import Observers
from shardfold.compat.deepspeed.optimizers import make_optimizer, make_scheduler
from shardfold.compat.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile, number_to_string
from shardfold.testing import Ranks


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


# -- optimizers and schedules


@pytest.mark.parametrize(
    "name, params, same",
    [
        ("Adam", {"lr": 0.1, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}, lambda p: torch.optim.Adam(p, weight_decay=0.1)),
        ("AdamW", {"betas": [0.8, 0.9]}, lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9), weight_decay=0.0)),
        ("AdamW", {"adam_w_mode": False}, lambda p: torch.optim.AdamW(p, weight_decay=0.0)),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW),
        ("Lion", {"lr": 0.1}, lambda p: sf.optim.Lion(p, lr=0.1, betas=(0.9, 0.999))),
        ("Lamb", {"lr": 0.1}, lambda p: sf.optim.LAMB(p, lr=0.1, eps=1e-8, weight_decay=0.0, trust_range=(0.01, 10.0))),
        ("Adagrad", {"lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ],
)
def test_optimizers_are_what_deepspeed_means_by_them(name: str, params: dict[str, Any], same: Any):
    models = mlp(), mlp()
    both = make_optimizer(name, params, models[0].parameters()), same(list(models[1].parameters()))
    for step in range(3):
        for model, optimizer in zip(models, both, strict=True):
            x = torch.linspace(-1, 1, 24).view(3, 8) + step
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def test_muon_takes_matrices_and_adamw_the_rest():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "up": nn.Linear(4, 8), "lm_head": nn.Linear(8, 5)})
    model["up"].bias.use_muon = False
    optimizer = make_optimizer("Muon", {"lr": 0.1, "muon_lr": 0.2, "momentum": 0.9}, model.parameters(), model=model)
    halves = {group["use_muon"]: group for group in optimizer.param_groups}
    assert [p is model["up"].weight for p in halves[True]["params"]] == [True]
    assert (halves[True]["lr"], halves[False]["lr"], halves[True]["momentum"]) == (0.2, 0.1, 0.9)
    assert halves[False]["adamw"] and len(halves[False]["params"]) == 4
    groups = [{"params": [model["up"].weight], "weight_decay": 0.5, "lr": 0.3}]
    own = make_optimizer("Muon", {"lr": 0.1}, groups, model=model).param_groups
    assert (own[0]["lr"], own[0]["weight_decay"]) == (0.3, 0.5)
    with pytest.raises(DeepSpeedConfigError, match="use_muon"):
        make_optimizer("Muon", {}, mlp().parameters())


@pytest.mark.parametrize(
    "name, params, word",
    [
        ("Adam", {"bias_correction": False, "torch_adam": True}, "bias_correction"),
        ("Lamb", {"amsgrad": True}, "amsgrad"),
        ("Muon", {"per_head_muon": True}, "per_head_muon"),
        ("Muon", {"ns_method": "newton"}, "ns_method"),
        ("SGD", {"lrr": 1.0}, "lrr"),
        ("MuAdam", {}, "pip install mup"),
    ],
)
def test_what_an_optimizer_does_not_have_is_told(
    name: str, params: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(DeepSpeedConfigError, match=word):
        make_optimizer(name, params, mlp().parameters(), model=mlp())


def test_schedules_are_deepspeeds_or_pytorchs():
    optimizer = torch.optim.SGD(mlp().parameters(), lr=1.0)
    made = make_scheduler("warmuplr", {"warmup_num_steps": 4, "warmup_type": "linear"}, optimizer)
    assert isinstance(made, sf.optim.WarmupLR) and made.get_last_lr() == [0.0]
    assert isinstance(make_scheduler("StepLR", {"step_size": 3}, optimizer), torch.optim.lr_scheduler.StepLR)
    with pytest.raises(DeepSpeedConfigError, match="stepsize"):
        make_scheduler("StepLR", {"stepsize": 3}, optimizer)
    with pytest.raises(DeepSpeedConfigError, match="total_num_steps"):
        make_scheduler("WarmupDecayLR", {}, optimizer)


# -- monitors


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_csv_files_are_laid_out_as_deepspeeds(tmp_path: Path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = DeepSpeedConfig({"train_batch_size": 1, "csv_monitor": section})
    monitor = MonitorMaster(config.monitor_config)
    monitor.write_events([("Train/Samples/lr", 0.5, 4), ("Own name", torch.tensor(2.0), 4)])
    monitor.write_events([("Train/Samples/lr", 0.25, 8)])
    assert rows(tmp_path / "job" / "Train_Samples_lr.csv") == [["step", "lr"], ["4", "0.5"], ["8", "0.25"]]
    assert rows(tmp_path / "job" / "Own_name.csv") == [["step", "Own name"], ["4", "2.0"]]


@pytest.mark.parametrize(
    "name, module", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_monitor_without_its_package_is_one_sentence(name: str, module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DeepSpeedConfigError, match=f"{name}.enabled is true.*pip install"):
        MonitorMaster(get_monitor_config({name: {"enabled": True}}))
    assert not MonitorMaster(get_monitor_config({name: {"enabled": False}})).enabled


# -- the flops profiler


def test_operations_of_a_small_network():
    flops, macs, params = get_model_profile(mlp(), (3, 8), print_profile=False, as_string=False)
    assert macs == 3 * (8 * 16 + 16 * 4)
    assert flops == 2 * macs + 3 * 16  # and one for each element of the activation
    assert params == 8 * 16 + 16 + 16 * 4 + 4
    assert get_model_profile(mlp(), (3, 8), print_profile=False) == ("1.2 K", "576 MACs", "212")
    without = get_model_profile(mlp(), (3, 8), print_profile=False, as_string=False, ignore_modules=[nn.ReLU])
    assert without[0] == 2 * macs


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_counted(kind: Any, gates: int) -> None:
    """In each time step each gate multiplies inputs and state by a matrix, in each direction of each layer."""
    rows, time, wide, hidden = 2, 7, 3, 5
    for layers, directions in ((1, 1), (2, 2)):
        model = kind(wide, hidden, num_layers=layers, bidirectional=directions == 2, batch_first=True)
        inputs = [wide] + [directions * hidden] * (layers - 1)
        _, macs, _ = get_model_profile(model, (rows, time, wide), print_profile=False, as_string=False)
        assert macs == sum(directions * time * rows * gates * (n * hidden + hidden * hidden) for n in inputs)


def test_a_profile_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    get_model_profile(mlp(), args=[torch.zeros(3, 8)], top_modules=2)
    out = capsys.readouterr().out
    for word in ("fwd MACs per GPU:", "576 MACs", "depth 1: MACs", "0 384 MACs, 2 192 MACs", "66.67%"):
        assert word in out
    get_model_profile(mlp(), kwargs={"input": torch.zeros(3, 8)}, output_file=str(tmp_path / "a" / "profile.txt"))
    assert "576 MACs" in (tmp_path / "a" / "profile.txt").read_text() and not capsys.readouterr().out
    with pytest.raises(sf.ShardfoldError, match="input_shape"):
        get_model_profile(mlp())


def test_a_profiler_counts_between_start_and_stop():
    model = mlp()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.zeros(3, 8))
    model(torch.zeros(3, 8))
    profiler.stop_profile()
    model(torch.zeros(3, 8))
    assert profiler.get_total_macs() == 2 * 576 and profiler.get_total_macs(as_string=True) == "1.15 KMACs"
    assert profiler.get_total_duration() > 0 and profiler.get_total_params() == 212
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_numbers_have_metric_prefixes():
    said = [number_to_string(number) for number in (0, 7, 1234, 2.5e6, 3e9, 4e12, 0.002)]
    assert said == ["0 ", "7 ", "1.23 K", "2.5 M", "3 G", "4 T", "2 m"]
    assert number_to_string(2.5e6, units="K", precision=0) == "2500 K"


# -- on an engine


def _observed(folder: str) -> tuple[list[str], list[str]]:
    """A training of three steps with everything on; what was logged, and what was printed."""
    settings = read({
        "train_batch_size": 8, "steps_per_print": 2, "wall_clock_breakdown": True, "memory_breakdown": True,
        "dump_state": True, "comms_logger": {"enabled": True, "verbose": True, "prof_all": False,
                                             "prof_ops": ["reduce_scatter"]},
        "flops_profiler": {"enabled": True, "output_file": f"{folder}/flops.txt"},
        "csv_monitor": {"enabled": True, "output_path": folder}, "zero_optimization": {"stage": 2},
    })  # fmt: skip
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # pyright: ignore
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = mlp()
    engine = sf.Engine(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), layout=settings.layout)
    observers = Observers(settings, engine)
    for step in range(1, 4):
        with observers.phase("forward"):
            loss = engine(torch.full((4, 8), float(step))).square().mean()
        observers.note_loss(loss)
        with observers.phase("backward"):
            engine.backward(loss)
        with observers.phase("step"):
            report = engine.step()
        observers.after_step(report, step=step, samples=8 * step, rates=[0.1], momenta=[0.0])
    return logged, str(observers.traffic_log).splitlines()


def test_everything_that_can_be_observed(ranks: Ranks, tmp_path: Path):
    (logged, table), (silent, _) = ranks.run(_observed, str(tmp_path), world_size=2)
    assert not silent  # rank 0 writes
    lines = [line.split("\n")[0] for line in logged]
    assert lines[0].startswith("comm op: reduce_scatter (reduce, intra) | calls: 2 | sent: ")
    assert len([line for line in lines if line.startswith("comm op")]) == 3
    assert "step=2, skipped=0, lr=[0.1], mom=[0.0]" in lines and not any("step=3" in line for line in lines)
    assert any(line.startswith("time (ms) | fwd: ") for line in lines)
    assert any("params " in line for line in logged if line.startswith("bytes held"))
    assert [line.split()[0] for line in table] == ["operation", "reduce_scatter"] and " 6 " in table[1]
    job = tmp_path / "DeepSpeedJobName"
    assert [row[0] for row in rows(job / "Train_Samples_train_loss.csv")] == ["step", "8", "16", "24"]
    assert rows(job / "Train_Samples_lr.csv")[1] == ["8", "0.1"]
    assert [row[0] for row in rows(job / "Train_Samples_elapsed_time_ms_backward.csv")] == ["step", "16"]
    assert not (job / "Train_Samples_loss_scale.csv").exists()
    profile = (tmp_path / "flops.txt").read_text()
    assert "Profile Summary at step 1:" in profile and "768 MACs" in profile


def test_bf16_skips_a_step_that_is_not_finite_and_plain_backward_stays_legal():
    settings = read({"train_batch_size": 4, "bf16": {"enabled": True}})
    model = mlp()
    engine = sf.Engine(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), layout=settings.layout,
        precision=settings.precision, loss_scale=settings.loss_scale,
    )  # fmt: skip
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    engine(torch.full((4, 8), float("inf"), dtype=torch.bfloat16)).square().mean().backward()
    assert engine.step().skipped
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
    assert engine.step().updated
