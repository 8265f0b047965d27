"""What nothing can be planned of is refused in one sentence that names it: models, micro-batches, devices, axes."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError, ModelError
from shardfold.plan.checks import human
from shardfold.plan.layout import Tier
from shardfold.planner.best import best, largest_batch
from shardfold.planner.choice import option
from shardfold.planner.division import Division
from shardfold.planner.hardware import cluster
from shardfold.planner.inference import activation_bytes, cache_bytes
from shardfold.planner.ranking import rank
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.planner.tracing import NO_LOSS
from shardfold.tools.planning.show import advice, notes

ROWS = torch.zeros(2, 4)
PAIR = PlannedRank(mesh={"intra": 2}, budget=1e9)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows).detach()


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (nn.ReLU(), ROWS, "has no parameter that is trained, as it has none"),
        (nn.Linear(4, 4).requires_grad_(False), ROWS, "requires_grad is False of all"),
        (Detached(), ROWS, "depends on no parameter that is trained"),
        (nn.Linear(4, 4), torch.zeros(2, 5), r"does not train on this micro-batch \(\[2, 5\] float32\)"),
        (nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.int64), "int64.*dtype"),
        (nn.Embedding(4, 4), ROWS, r"does not train on this micro-batch \(\[2, 4\] float32\)"),
        (nn.Linear(4, 4), {"tokens": ROWS}, r"\(tokens \[2, 4\] float32\).*unexpected keyword"),
    ],
)
def test_what_does_not_train_is_refused(model: nn.Module, batch: Any, said: str) -> None:
    """Whether PyTorch fails without values, with some, or not at all."""
    with pytest.raises(ModelError, match=said):
        Subject(model, batch).trace()


def test_the_micro_batch_is_named_as_it_was_given() -> None:
    """Though one of other sizes is planned; and a model that does not train on one sample is planned from two on."""
    with pytest.raises(ConfigError, match=r"\(\[2, 5\] float32\): mat1 and mat2 shapes cannot be multiplied \(2x5"):
        best(nn.Linear(4, 4), torch.zeros(2, 5), gpus="1xL4", layouts=("zero1",))
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = rank(Subject(normed, ROWS), cluster("1xL4"), layouts=("zero1",), modes=("keep",), most=8)
    assert sorted(each.candidate.micro_batch for each in found.found) == [2, 4, 8]
    with pytest.raises(ConfigError, match=r"\[1, 4\]"):
        best(normed, ROWS, gpus="1xL4", layouts=("zero1",), samples=1)


class Asks(nn.Module):
    """Its forward asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        found = self.inner(rows)
        return found * 2 if found.abs().max().item() > 0.5 else found


def test_a_run_on_zeros_says_so_and_a_large_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trace, the plan, what is found and a note; where it takes much memory, by `real=True` only."""
    plan = option([Subject(Asks(), ROWS)], PAIR, "zero1", micro_batch=2).plan
    assert plan.trace.zeros == plan.zeros == "its forward asks for values"
    found = best(Asks(), ROWS, gpus="1xL4", layouts=("zero1",), modes=("keep",))
    assert found.zeros in notes([found.zeros, found.zeros, ""]) and notes([found.zeros] * 2).count("\n") == 0
    assert Subject(nn.Linear(4, 4), ROWS).trace().zeros == notes([""]) == ""
    monkeypatch.setattr("shardfold.planner.tracing.SMALL_MODEL", 0)
    with pytest.raises(ModelError, match=r"plan it on zeros with real=True, or `shardfold plan --real`"):
        Subject(Asks(), ROWS).trace()
    assert Subject(Asks(), ROWS, real=True).trace().zeros == "that was asked for"
    assert largest_batch(Asks(), ROWS, gpus="1xL4", real=True) > 2
    with pytest.raises(ConfigError, match="real= is 'yes'"):
        best(Asks(), ROWS, gpus="1xL4", real="yes")  # pyright: ignore[reportArgumentType]
    assert activation_bytes(Subject(Asks(), ROWS, real=True), 2) > 0
    with pytest.raises(ModelError, match="does not run on this micro-batch"):
        activation_bytes(Subject(Asks(), ROWS), 2)


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "offload"])
def test_at_rest_is_one_number_wherever_it_is_said(layout: str) -> None:
    """In a plan, in the refusal of one, and of a search; neither a micro-batch nor a library's workspace is in it."""
    subject = Subject(nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)), torch.zeros(512, 4))
    small = option([subject], replace(PAIR, budget=1.0), layout, micro_batch=2)
    large = option([subject], PAIR, layout, micro_batch=512)
    assert small.plan.rest == large.plan.rest < large.plan.base - 512 * 4 * 4
    assert small.plan.rest == subject.resting(layout, "bf16", {"intra": 2}, 2)[Tier.DEVICE]
    assert f"what rests takes {human(small.plan.rest)} of" in small.why
    found = rank(subject, cluster("2xL4", memory="1KiB"), layouts=(layout,), modes=("keep",))
    assert [f"what rests takes {human(small.plan.rest)} of" in each.why for each in found.refused] == [True]


class Lossy(nn.Module):
    """Its forward gives its loss, and wants labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = self.inner(rows)
        return {"loss": nn.functional.mse_loss(found, labels), "found": found}  # type: ignore[arg-type]


def test_a_loss_that_is_none_of_the_models_is_said() -> None:
    """By the trace, what is found and a note; where the model or `compute` gives one, nothing is said."""
    assert Subject(nn.Linear(4, 4), ROWS).trace().loss == NO_LOSS
    assert not Subject(nn.Linear(4, 4), ROWS, lambda model, rows: model(rows).sum()).trace().loss
    own = {"rows": ROWS, "labels": ROWS}
    assert not Subject(Lossy(), own).trace().loss
    for axes in ({}, {"pipeline": 2}):
        stacked = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
        found = best(stacked, ROWS, gpus="2xL4", layouts=("zero1",), modes=("keep",), axes=(axes,))
        assert found.loss == NO_LOSS and NO_LOSS in notes([], [found.loss, "", found.loss])
        assert notes([], [found.loss] * 2).count("\n") == 0
    assert not best(Lossy(), own, gpus="1xL4", layouts=("zero1",), modes=("keep",)).loss
    many = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4096))
    made = option([Subject(many, torch.zeros(512, 4))], PAIR, "zero1", micro_batch=512)
    assert made.plan.terms["temporaries"] > made.plan.peak / 4 and made.loss == NO_LOSS
    assert not any("cross_entropy" in line for line in advice(made))
    assert any("cross_entropy" in line for line in advice(replace(made, loss="")))


def test_a_model_is_served_with_labels_where_its_forward_wants_some() -> None:
    """It is not told that its micro-batch is wrong."""
    assert activation_bytes(Subject(Lossy(), {"rows": ROWS, "labels": ROWS}), 2) > 0


def test_gradients_of_sparse_tables_are_planned_as_dense_ones() -> None:
    """As the engine takes them."""

    def peak(*, sparse: bool) -> float:
        bags = nn.Sequential(nn.EmbeddingBag(100, 16, sparse=sparse), nn.Linear(16, 4))
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        plan = option([Subject(bags, tokens)], PAIR, "zero2", micro_batch=2).plan
        return plan.terms["gradients"]

    assert peak(sparse=True) == peak(sparse=False) > 0


def test_devices_without_units_for_bf16_are_said() -> None:
    """With how much faster fp16 is there; not of others, nor in fp16 or fp32."""
    for name, times in (("V100-16G", "8"), ("2080Ti", "4")):
        for precision in ("bf16", "bf16-autocast"):
            said = notes([], [], cluster(f"1x{name}"), precision)
            assert said.startswith(f"Note: a {name} has no units") and f"are {times} times as fast" in said
        assert notes([], [], cluster(f"1x{name}"), "fp16") == notes([], [], cluster(f"1x{name}"), "fp32") == ""
    assert notes([], [], cluster("1xA100-40G"), "bf16") == ""


@pytest.mark.parametrize(
    ("flops", "said"),
    [
        ({"fp32": 9e10, "bf16": 3e9, "fp16": 4e9}, "in fp32 (--precision fp32) they are 30 times as fast"),
        ({"fp32": 6e13, "bf16": 7.0e14, "fp16": 7.3e14}, ""),  # of an H100, as measured
        ({"fp32": 9e10, "bf16": 3e11, "fp16": 4e9}, ""),  # of a CPU with matrix units
        ({"fp32": 9e10}, ""),
    ],
)
def test_a_measured_device_is_said_to_be_faster_in_what_it_is_faster_in(flops: dict[str, float], said: str) -> None:
    """A CPU without instructions for bf16 multiplies faster in fp32; what a measurement is off by is no reason."""
    where = cluster("1xV100-16G")
    found = notes([], [], replace(where, device=replace(where.device, name="here", flops=flops)), "bf16")
    assert (said in found and found.startswith("Note: a here has no units")) if said else not found


def test_products_of_two_dtypes_are_refused_without_values() -> None:
    """Tensors without values may be multiplied by what PyTorch does not multiply them by."""
    with pytest.raises(ModelError, match="multiplies int64 by float32"):
        Subject(nn.Linear(4, 4), torch.zeros(2, 4, dtype=torch.int64), real=False).trace()


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (nn.Linear(4, 4), torch.zeros(0, 4), "has no samples"),
        (nn.Linear(4, 4), "rows", "without a tensor"),
        (nn.LazyLinear(4), ROWS, "gets its shape from the first batch"),
    ],
)
def test_what_has_no_samples_or_shapes_is_refused(model: nn.Module, batch: Any, said: str) -> None:
    """Before anything runs."""
    with pytest.raises((ConfigError, ModelError), match=said):
        _ = Subject(model, batch)


def test_devices_and_axes_are_named_as_they_were_given() -> None:
    """With sizes that would do."""
    for text in ("-1xL4", "0xL4", "1000001xL4"):
        with pytest.raises(ConfigError, match="names no cluster"):
            cluster(text)
    with pytest.raises(ConfigError, match="above 0"):
        cluster("1xL4", memory="0GiB")
    with pytest.raises(ConfigError, match=r"tensor=3 does not divide the 8 devices evenly: sizes .* are 2, 4"):
        Division(tensor=3).over(cluster("8xL4").mesh)
    with pytest.raises(ConfigError, match="the 4 that tensor=2 leaves of them are 2, 4"):
        Division(tensor=2, sequence=3).over(cluster("8xL4").mesh)
    with pytest.raises(ConfigError, match="tensor=2 is a number of ranks that one device cannot have"):
        Division(tensor=2).over(cluster("1xL4").mesh)


def test_no_micro_batch_fits_where_the_host_is_too_small() -> None:
    """What rests there does not grow with samples."""
    subject = Subject(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.zeros(2, 64))
    large, small = (option([subject], replace(PAIR, host=host), "offload", micro_batch=2) for host in (inf, 1000.0))
    assert large.largest > 2 and large.fits
    assert not small.largest and not small.fits and "host memory" in small.why


def test_a_model_of_images_has_activations_in_the_place_of_a_cache() -> None:
    """Of a convolution and what follows it in 16 bits, by samples; the batch is one argument."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    subject = Subject(model, torch.zeros(2, 3, 8, 8))
    assert cache_bytes(subject, 1) == 0
    inputs, made = 3 * 8 * 8 * 2, 8 * 6 * 6 * 2
    assert made <= activation_bytes(subject, 1) <= inputs + made + 10 * 2
    assert activation_bytes(subject, 6) == 6 * activation_bytes(subject, 1)
