"""The notes of a report on face recognition with DeepSpeed, one by one: what failed there is shown, where plain PyTorch
can show it, and does not fail here. A note that another test holds is in ``ELSEWHERE``."""

from __future__ import annotations

import ast
import copy
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfold as sf
from shardfold.plan.cost import state_bytes
from shardfold.plan.layout import Tier
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.presets import PRESETS
from shardfold.testing import Ranks
from shardfold.tools.recipes.face import study
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.needs import SETTINGS, Need
from shardfold.tools.recipes.face.train import FaceRun

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "identities": 40, "shots": 4, "held_out": 4, "size": "16", "patch": 8, "width": 32, "layers": 2, "heads": 2,
    "embedding": 64, "batch": 8, "steps": 6, "warmup": 2, "far": "0.1", "augment": False,
}  # fmt: skip

ELSEWHERE: dict[str, list[str]] = {
    "1: a warm-up that starts too high explodes in fp16": [
        "numerics/test_scaling.py::test_a_warm_up_from_a_rate_that_is_too_high_recovers_by_a_lower_scale",
        "numerics/test_scaling.py::test_at_the_floor_the_advice_of_the_error_works",
    ],
    "2: an fp16 backbone with an fp32 head cures the infinite loss": [
        "training/test_precision.py::test_an_fp16_backbone_with_an_fp32_head_trains_in_one_engine",
        "parallel/test_head.py::test_precision_and_layout_of_its_own",
    ],
    "4: ZeRO with tensor and pipeline parallelism in one engine": [
        "parallel/test_tensor.py::test_models",
        "training/test_axes.py::test_slices_train_like_the_whole_model",
    ],
    "6: 16 bytes a parameter, 1/4, 1/8 and 1/N of it, 1.5 times as much sent by stage 3": [
        "plan/test_cost.py::test_bytes_at_rest_equal_the_papers_formula",
        "plan/test_cost.py::test_bytes_sent_equal_the_papers_formula",
    ],
    "7: consecutive batches that explode do not sink the loss scale": [
        "numerics/test_scaling.py::test_hysteresis_and_floor_are_deepspeeds",
        "numerics/test_scaling.py::test_at_the_floor_the_tenth_skipped_step_stops",
    ],
    "11: a checkpoint of 10 ranks loads on 8": [
        "parallel/test_head.py::test_checkpoints_load_on_other_numbers_of_ranks",
        "checkpoint/test_load.py::test_what_one_layout_saves_every_other_loads",
    ],
    "13: all ways of loading for inference have the statistics": [
        "training/test_precision.py::test_a_running_variance_beyond_fp16_is_kept_saved_and_evaluated",
    ],
    "17: a running variance beyond 65504 survives": [
        "training/test_precision.py::test_a_running_variance_beyond_fp16_is_kept_saved_and_evaluated",
    ],
    "19: statistics in fp32, training unchanged": [
        "nn/test_batchnorm.py::test_statistics_of_16_bits_are_fp32_and_a_rank_may_have_no_rows",
    ],
    "20: two groups under WarmupDecayLR keep their ratio": [
        "optim/test_schedules.py::test_every_update_has_the_rate_of_the_formula",
    ],
}
"""Notes, and the tests that hold them; the numbers are those of the report's notes as they are counted here."""


def config(**options: Any) -> FaceConfig:
    return FaceConfig.load({**SMALL, **options})


def test_notes_that_other_tests_hold_have_these_tests() -> None:
    """Each test that is named is there."""
    for note, tests in ELSEWHERE.items():
        for test in tests:
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (note, test)


def test_1_fp16_with_a_rate_that_is_too_high_explodes_in_plain_pytorch() -> None:
    """What note 1 saw: the first steps at a high rate end in inf, and at a low one they do not."""
    losses: dict[float, float] = {}
    for rate in (1e3, 1e-3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        x, y = torch.randn(16, 8).half(), torch.randint(4, (16,))
        for _ in range(6):
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[rate] = loss.item()
    assert not losses[1e3] < float("inf") and losses[1e-3] < 2


def test_2_a_head_in_fp16_gives_an_infinite_loss() -> None:
    """In plain fp16 the products of long features pass 65504; with the head alone in fp32 the loss is finite."""
    torch.manual_seed(0)
    features, centres = 30 * torch.randn(4, 512), 30 * torch.randn(100, 512)
    labels = torch.arange(4)
    assert not F.cross_entropy((features.half() @ centres.half().t()), labels).isfinite()
    assert F.cross_entropy(features.half().float() @ centres.t(), labels).isfinite()
    model = nn.ModuleDict({"head": sf.parallel.MarginHead(512, 100)})
    with torch.no_grad():
        model["head"].weight.copy_(centres)
    assert model["head"](features.half(), labels).isfinite()


@pytest.mark.soak
def test_3_and_8_offload_leaves_room_for_more_images_without_tuning() -> None:
    """3: stage 3 with offload takes less of the device than stage 2, with no option set besides. 8: offload under
    stage 2 raises the largest batch; both train on more images than the base."""
    needs = study.needs_of(config(), SMALL["identities"], 2)
    mine = {name: needs[name, "sharded"] for name in SETTINGS}
    assert mine["stage 3 + offload"].of(1) < mine["stage 2 + offload"].of(1) < mine["stage 2"].of(1)
    allowed = mine["base"].of(4)
    batch = {name: need.largest(allowed) for name, need in mine.items()}
    assert batch["base"] <= batch["stage 2"] < min(batch["stage 2 + offload"], batch["stage 3 + offload"])


def test_5_the_first_rate_of_a_warm_up_is_small() -> None:
    """With backbone and head both under the engine the first update has a fraction of the peak, for both groups."""
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    groups = [{"params": list(model["backbone"].parameters()), "lr": 0.1}, {"params": list(model["head"].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    schedule = sf.optim.warmup_cosine(warmup=50, total=100)(optimizer)
    first = [group["lr"] for group in optimizer.param_groups]
    assert first[0] <= 0.1 / 50 and first[1] <= 0.01 / 50
    for _ in range(99):
        optimizer.step()
        schedule.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates[0] == pytest.approx(10 * rates[1])


def test_6_gpt_2_takes_24_gb_of_states_beside_3_gb_of_weights() -> None:
    """1.5 billion parameters: 3 GB in fp16 and 24 GB with Adam; stages take it to 1/4, 1/8 and 1/N for many ranks."""
    numel, ranks = 1_500_000_000, 1000
    half = sf.Precision(compute="fp16", grads="fp16", reduce="fp16")
    segment = SegmentSpec((Slot("w", (numel,), 0),), numel, "fp16")

    def held(name: str, n: int) -> float:
        mesh = {"inter": 1, "intra": n}
        return sum(state_bytes(PRESETS[name].bind(half, mesh), [UnitSpec("w", (segment,))], mesh).values())

    whole = held("ddp", 1)
    assert whole == 24e9 and numel * 2 == 3e9
    for name, part in (("zero1", 1 / 4), ("zero2", 1 / 8), ("zero3", 1 / ranks)):
        assert held(name, ranks) / whole == pytest.approx(part, rel=0.01 if name != "zero3" else 1e-9)


def test_7_a_few_batches_that_explode_leave_the_scale_above_1() -> None:
    """Five overflows in a row halve the scale five times and no more; PyTorch's scaler does the same from a high one,
    and
    from a low one sinks below the smallest number of fp16, where gradients vanish. Here there is a floor."""
    plain = 2.0
    for _ in range(30):
        plain *= 0.5  # what GradScaler's update does for each
    assert plain < 2**-24
    engine = sf.Engine(nn.Linear(2, 1), optimizer=partial(torch.optim.SGD, lr=0.1), precision="fp16")
    for _ in range(5):
        engine.backward(engine(torch.ones(1, 2)).sum() * float("inf"))
        assert not engine.step().updated
    assert engine.loss_scale is not None and engine.loss_scale.scale >= 65536 / 2**5
    engine.backward(engine(torch.ones(1, 2)).sum())
    assert engine.step().updated
    engine.close()


def test_9_a_rank_more_leaves_each_more_room() -> None:
    """Why a tenth card raises each card's rate: states of a rank shrink, so that its batch grows, and what it sends is
    bounded by twice the parameters."""
    room = [Need(((1e8 * (2 + 14 / n), 1e7),)).largest(2e9) for n in (8, 9, 10)]
    assert room == sorted(room) and room[0] < room[2]
    assert all(2 * (n - 1) / n < 2 for n in (8, 9, 10))


def _curve(batch: int, images: int, **options: Any) -> list[float]:
    run = FaceRun(config(batch=batch, steps=images // batch, identities=20, warmup=0, lr=3e-4, **options))
    batches = run.batches()
    for _ in range(images // batch):
        run.step(batches)
    run.engine.close()
    return run.losses


@pytest.mark.soak
def test_10_smaller_batches_lower_the_loss_faster() -> None:
    """Against the number of images, at one rate: in the last quarter a batch of 8 has the lower loss than one of 64."""
    small, large = _curve(8, 3200), _curve(64, 3200)
    assert sum(small[-100:]) / 100 < sum(large[-12:]) / 12


def _saved(folder: Path) -> tuple[list[float], bool]:
    run = FaceRun(config())
    batches = run.batches()
    for _ in range(4):
        run.step(batches)
    run.save(folder, wait=True)
    embeddings = run.embeddings(run.held_out)
    run.engine.close()
    return embeddings[0].tolist(), run.leads


def _loaded(folder: Path) -> list[float]:
    run = FaceRun(config())
    run.engine.load(folder)
    embeddings = run.embeddings(run.held_out)
    run.engine.close()
    return embeddings[0].tolist()


@pytest.mark.soak
def test_11_a_checkpoint_of_10_ranks_loads_on_8(tmp_path: Path) -> None:
    """And gives the same embeddings."""
    path = tmp_path / "checkpoints" / "step-000004"
    with Ranks(10) as ranks:
        wrote = ranks.run(_saved, tmp_path, world_size=10)[0][0]
        assert ranks.run(_loaded, path, world_size=8)[0] == pytest.approx(wrote, rel=1e-4, abs=1e-5)


def _both_saves(folder: Path) -> list[str]:
    """Names that differ between `torch.save` of the module and the engine's checkpoint."""
    run = FaceRun(config(layout="zero3", head="replicated"))
    batches = run.batches()
    for _ in range(3):
        run.step(batches)
    stream = io.BytesIO()
    with run.engine.gathered():
        torch.save(run.engine.module.state_dict(), stream)
        whole = copy.deepcopy(run.engine.module)
    run.engine.save(folder, wait=True)
    images = torch.zeros(2, 1, 16, 16)
    run.engine.module.eval()
    with torch.no_grad():
        trained = run.engine(images)
    run.engine.close()
    stream.seek(0)
    by_torch = torch.load(stream, weights_only=True)
    checkpoint = sf.Checkpoint(folder)
    named = {name: checkpoint.parameter(name) for name in checkpoint.parameters}
    named |= {name: checkpoint.buffer(name) for name in checkpoint.buffers}
    assert named.keys() == by_torch.keys()
    assert torch.equal(whole.eval()(images), trained)
    return [name for name, value in named.items() if value.numpy().tobytes() != by_torch[name].numpy().tobytes()]


@pytest.mark.soak
def test_12_and_18_both_saves_are_equal_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    """12: `torch.save` of the module tests as trained: its embeddings are the engine's. 18: it and the engine's
    checkpoint
    have the same weights and statistics, to the bit."""
    assert ranks.run(_both_saves, tmp_path, world_size=2) == [[], []]


def _fine_tuned(folder: Path) -> tuple[float, float]:
    run = FaceRun(config(steps=40, warmup=4))
    batches = run.batches()
    for _ in range(30):
        run.step(batches)
    run.engine.save(folder, wait=True)
    before = sum(run.losses[-5:]) / 5
    run.engine.close()
    again = FaceRun(config(steps=40, warmup=20))
    again.engine.load(folder, weights_only=True)
    batches = again.batches()
    for _ in range(10):
        again.step(batches)
    again.engine.close()
    return before, max(again.losses)


@pytest.mark.soak
def test_14_fine_tuning_does_not_begin_by_climbing(tmp_path: Path) -> None:
    """From weights alone, with a new optimizer that warms up: no loss of the first ten steps is far above those that
    training ended with, where the report climbed from 3.5 to 5.2."""
    before, after = _fine_tuned(tmp_path)
    assert after < before * 5.2 / 3.5


@pytest.mark.soak
def test_15_fine_tuning_with_a_frozen_backbone_or_not_for_few_steps_or_many() -> None:
    """The head of a trained model, trained on with the backbone frozen or not, for 40 or 400 steps: all lower the
    loss."""
    run = FaceRun(config(steps=400, identities=20))
    batches = run.batches()
    for _ in range(200):
        run.step(batches)
    state = {name: value.clone() for name, value in run.engine.state_dict().items()}
    start = sum(run.losses[-20:]) / 20
    run.engine.close()
    for frozen in (False, True):
        for steps in (40, 400):
            again = FaceRun(config(steps=max(steps, 40), identities=20, lr=5e-4))
            again.engine.load_state_dict(state)
            again.engine.module.backbone.requires_grad_(not frozen)
            batches = again.batches()
            for _ in range(steps):
                again.step(batches)
            assert sum(again.losses[-20:]) / 20 < start * 1.05, (frozen, steps)
            again.engine.close()


def test_16_loading_for_inference_changes_weights_or_raises(tmp_path: Path) -> None:
    """What `init_inference(checkpoint=)` did silently: nothing. A load here changes every weight, or says why not."""
    engine = sf.Engine(nn.Linear(3, 2), optimizer=partial(torch.optim.SGD, lr=0.1))
    saved = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.save(tmp_path / "ckpt", wait=True)
    engine.close()
    other = sf.Engine(nn.Linear(3, 2))
    assert not torch.equal(other.state_dict()["weight"], saved["weight"])
    other.load(tmp_path / "ckpt", weights_only=True)
    assert torch.equal(other.state_dict()["weight"], saved["weight"])
    with pytest.raises(sf.ShardfoldError):
        other.load(tmp_path / "none", weights_only=True)
    other.close()
    model = nn.Linear(3, 2)
    sf.load_model(tmp_path / "ckpt", model)
    assert torch.equal(model.weight, saved["weight"])
    wrong = nn.Linear(4, 2)
    with pytest.raises(sf.ShardfoldError):
        sf.load_model(tmp_path / "ckpt", wrong)


def test_13_and_17_a_variance_beyond_fp16_takes_features_to_0() -> None:
    """Why inference failed and resuming looked fine: 70,000 is inf in fp16, by which evaluation divides, and training
    does
    not read it. What is inf is told when it is saved; here statistics stay fp32 under fp16."""
    norm = nn.BatchNorm1d(4)
    assert norm.running_var is not None
    norm.running_var.fill_(70_000.0)
    x = 265 * torch.randn(64, 4)
    lost = copy.deepcopy(norm).half().float()
    assert torch.equal(lost.train()(x), copy.deepcopy(norm).train()(x))  # resuming looks fine
    assert lost.eval()(x).abs().max() == 0 < norm.eval()(x).abs().max()
    engine = sf.Engine(nn.Sequential(norm), precision="fp16")
    assert engine.module[0].running_var.dtype == torch.float32 and engine.module[0].running_var.max() == 70_000
    engine.close()


def _groups() -> tuple[list[float], list[float]]:
    model = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    groups = [{"params": list(model["backbone"].parameters()), "lr": 0.1}, {"params": list(model["head"].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    schedule = sf.optim.WarmupDecayLR(optimizer, 20, warmup_max_lr=[0.1, 0.01], warmup_num_steps=6)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(20):
        for kept, group in zip(rates, optimizer.param_groups, strict=True):
            kept.append(group["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_20_two_groups_under_warmup_decay_lr_keep_their_ratio() -> None:
    """Backbone and head, of which one has ten times the other's rate, keep that in every step."""
    one, other = _groups()
    assert [a for a in one if a] == pytest.approx([10 * b for b in other if b])


def test_every_note_is_here() -> None:
    """The twenty notes are tests of this file, by the numbers that their names begin with, or named in ELSEWHERE."""
    found = [re.match(r"test_(\d+)_(?:and_(\d+)_)?", name) for name in globals()]
    here = {int(number) for each in found if each for number in each.groups() if number}
    assert here | {int(note.partition(":")[0]) for note in ELSEWHERE} >= set(range(1, 21))


def _losses(layout: str, offload: str | None) -> list[float]:
    run = FaceRun(config(layout=layout, offload=offload))
    batches = run.batches()
    for _ in range(3):
        run.step(batches)
    rows: list[Any] = [row for row in run.engine.memory().rows if row.tier == Tier.HOST]
    assert bool(rows and sum(row.held for row in rows)) == (offload is not None)
    run.engine.close()
    return run.losses


@pytest.mark.soak
def test_losses_of_the_five_settings_are_within_noise(ranks: Ranks) -> None:
    """On the same batches, to 1e-4 in fp32."""
    base = ranks.run(_losses, "ddp", None, world_size=2)[0]
    for layout, offload in SETTINGS.values():
        assert ranks.run(_losses, layout, offload, world_size=2)[0] == pytest.approx(base, rel=1e-4)
