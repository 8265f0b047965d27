"""`shardfold bench`: what it runs and reports. Nothing here asserts a time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shardfold.errors import ConfigError
from shardfold.launch.namespaces import why_not
from shardfold.tools import cli
from shardfold.tools.bench import _tables as show
from shardfold.tools.bench import contenders, results, traces
from shardfold.tools.bench.bench import usual_precision
from shardfold.tools.bench.results import MeasuredRounds, Turn
from shardfold.tools.bench.settings import Settings, gpt_shape
from shardfold.tools.bench.turns import Callbacks, compare

TINY = Settings(params=2e5, context=16, rounds=3, steps=2)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.soak
def test_a_benchmark_measures_time_memory_and_bytes(tmp_path: Path):
    """DDP and two layouts of ours on two ranks: the file has every step of every rank, and the losses are the same."""
    file = tmp_path / "bench.json"
    command = ["gpt", "--params", "2e5", "--context", "16", "--rounds", "2", "--steps", "2", "--json", str(file)]
    command += ["--only", "torch-ddp,ddp,zero3", "--markdown"]
    done = subprocess.run(
        [sys.executable, "-m", "shardfold", "bench", *command], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["torch-ddp", "ddp", "zero3"] and record["reference"] == "torch-ddp"
    assert rows["torch-ddp"]["ratio"] == 1
    params = gpt_shape(2e5, 16).num_parameters
    for name, row in rows.items():
        assert row["ratio"] > 0 and 0 < row["low"] <= row["step"] <= row["high"], row
        sent = row["handed"] or row["sent"]  # what is read from another's memory does not pass through a socket
        assert sent > params * 4, row  # of two ranks each sends at least its gradients
        turns = record["turns"][name]
        assert [turn["round"] for turn in turns] == [0, 1]
        assert all(len(rank["seconds"]) == 2 for turn in turns for rank in turn["ranks"]), turns
        assert [rank["last_step"] for rank in turns[-1]["ranks"]] == [9, 9]  # 3 to warm up, 2 turns of 1 + 2
    assert rows["zero3"]["held"] < rows["ddp"]["held"]
    assert rows["ddp"]["held"] > 16 * params > rows["torch-ddp"]["held"] > 12 * params  # it drops its gradients
    assert rows["zero3"]["handed"] > rows["ddp"]["handed"] and rows["torch-ddp"]["handed"] is None
    assert record["loss"]["step"] == 9 and record["loss"]["largest_relative_difference"] < 1e-5
    assert record["environment"]["versions"]["torch"] and record["failures"] == {}
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 5 and len({line.count("|") for line in lines}) == 1  # head, rule, a row each
    assert lines[2].startswith("| torch-ddp |") and lines[4].startswith("| `zero3` |")


@pytest.mark.soak
def test_offload_is_in_bf16_where_that_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has no instructions for it would only show how slow they are."""
    for fast, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        monkeypatch.setattr("shardfold.accelerator.product_dtype", lambda device, fast=fast: fast)
        assert usual_precision("offload", "cpu") == name
        assert (usual_precision("gpt", "cpu"), usual_precision("offload", "cuda")) == ("fp32", "bf16")


@pytest.mark.soak
def test_offloading_is_measured_beside_the_bytes_that_it_moves():
    """Two ranks of ours: what is counted is the program's, gradients down in fp32 and parameters up in bf16; moments on
    disk go up and down; nothing of ``zero2`` moves."""
    settings = replace(TINY, job="offload", precision="bf16", rounds=1, steps=1, warm=1, clip_norm=1.0)
    assert "clipped at 1" in settings.title()
    chosen, _ = contenders.choose(settings, ["zero2", "zero2-host", "zero2-moments-disk"])
    measured = compare(settings, chosen)
    rows = {row.name: row for row in results.rows(measured, "zero2")}
    assert list(rows) == ["zero2", "zero2-host", "zero2-moments-disk"] and not measured.failures
    held = gpt_shape(2e5, 16).num_parameters / 2
    for name, per_element in (("zero2", 0), ("zero2-host", 4 + 2), ("zero2-moments-disk", 8 + 8)):
        row = rows[name]
        assert row.moved == row.program or (row.program is None and not row.moved), row
        assert per_element * held <= row.moved <= 1.01 * per_element * held, row  # padding
        assert row.master == "float32" and row.cpu > 0 and 0 < row.update < row.step
    assert results.loss_difference(measured)[1] == 0  # pyright: ignore[reportOptionalSubscript]


def test_bytes_of_a_peer_are_those_of_its_source():
    settings = replace(TINY, job="offload")
    measured = MeasuredRounds(settings=settings, contenders=[contenders.find("torch-fsdp2-host")])
    measured.turns["torch-fsdp2-host"] = turns([1.0], 1.0)
    [row] = results.rows(measured, "torch-fsdp2-host")
    assert row.program == 12 * gpt_shape(2e5, 16).num_parameters / 2 and row.moved is None


@pytest.mark.soak
def test_a_contender_that_dies_is_reported_and_the_others_go_on(capsys: pytest.CaptureFixture[str]):
    """A rank is killed after the first round: its contender has a reason and no row, the other all its turns."""
    settings = Settings(job="units", ranks=1, rounds=3, steps=2)
    killed: list[int] = []

    def kill(measured: MeasuredRounds) -> None:
        if not killed and all(measured.turns.values()):
            for child in psutil.Process().children():
                if "bare-zeros" in child.cmdline():
                    killed.append(child.pid)
                    child.send_signal(signal.SIGKILL)

    chosen, left_out = contenders.choose(settings, ["bare", "bare-zeros"])
    measured = compare(settings, chosen, Callbacks(turned=kill))
    assert killed
    assert len(measured.turns["bare"]) == 3 and len(measured.turns["bare-zeros"]) == 1
    assert measured.failures["bare-zeros"].reason == "rank 0 was killed by SIGKILL in 'turn'"
    assert [row.name for row in results.rows(measured, "bare")] == ["bare"]
    assert show.print_report(measured, None, left_out, as_markdown=False, tolerance=1e-3)
    assert "bare-zeros failed: rank 0 was killed by SIGKILL" in capsys.readouterr().out


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "zero33"], "Did you mean 'zero3'?"),
        (["--without", "torch-dpp"], "Did you mean 'torch-ddp'?"),
        (["gtp"], "Did you mean 'gpt'?"),
        (["--only", "hpz"], "hpz was asked for and cannot take part: needs a multiple of 2 ranks, at least 4."),
        (["--only", "zero2", "--reference", "torch-ddp"], "the reference 'torch-ddp' does not take part"),
        (["--params", "70e9"], "give a number in that range"),
        (["--precision", "fp8"], "Known: bf16, fp32."),
        (["--only", "zero3", "--timeline", "x.png"], "name two"),
        (["--json", "no-such-folder/x.json"], "no-such-folder"),
        (["offload", "--only", "zero3"], "zero3 was asked for and cannot take part: it does the jobs gpt, tensors"),
        (["offload", "--only", "zero2-hots"], "Did you mean 'zero2-host'?"),
        (["offload", "--folder", "no-such-folder"], "no-such-folder"),
        (["--only", "zeropp", "--ranks", "4"], "zeropp was asked for and cannot take part: rounds what it sends"),
        (["--link", "fast"], "rate='fast': it is what tc reads, as '200mbit'"),
        (["--link", "1gbit", "--ranks", "3"], "there are 3 on cpu: give --ranks 4"),
        (["--threads", "0"], "threads is 0, but must be at least 1."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    said = refusal(capsys, *arguments)
    assert says in said and said.count("\n") == 1


def test_a_peer_that_is_not_installed_is_left_out_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    absent = [
        each if each.package is None else replace(each, package="no_such_package") for each in contenders.CONTENDERS
    ]
    monkeypatch.setattr(contenders, "CONTENDERS", tuple(absent))
    chosen, left_out = contenders.choose(TINY)
    assert "deepspeed-3" not in [each.name for each in chosen] and "not installed" in left_out["deepspeed-3"]
    assert "zero3" in [each.name for each in contenders.choose(TINY, ["zero*", "torch-*"])[0]]
    with pytest.raises(ConfigError, match="deepspeed-3 was asked for and cannot take part"):
        contenders.choose(TINY, ["zero3", "deepspeed-3"])


@pytest.mark.parametrize("params", [10e6, 25e6, 46e6, 100e6, 200e6, 500e6, 1.3e9, 2.7e9, 6.5e9])
def test_shapes_are_near_the_number_asked_for(params: float):
    shape = gpt_shape(params, 64)
    assert 0.97 < shape.num_parameters / params < 1.03


def turns(seconds: Sequence[float], loss: float) -> list[Turn]:
    return [
        Turn(round=number, sent=8.0, ranks=[a_rank(each, number, loss), a_rank(each / 2, number, loss)])
        for number, each in enumerate(seconds)
    ]


def a_rank(seconds: float, number: int, loss: float) -> dict[str, Any]:
    memory = dict.fromkeys(("held", "resident", "peak", "set_up_peak", "faults"), 1)
    times = {"seconds": [seconds] * 2, "compute": [seconds / 2] * 2}
    return {**times, **memory, "handed": None, "losses": [loss] * 3, "last_step": 6 + 3 * number}


def recorded(losses: Sequence[float]) -> MeasuredRounds:
    chosen = [contenders.find(name) for name in ("torch-ddp", "zero3")]
    measured = MeasuredRounds(settings=TINY, contenders=chosen)
    measured.turns["torch-ddp"] = turns([1.0, 2.0, 8.0], losses[0])
    measured.turns["zero3"] = turns([2.0, 2.0, 8.0], losses[1])
    return measured


def test_ratios_are_taken_round_by_round_by_the_slowest_rank():
    """The median of 2, 1, 1 and not the ratio of medians; the slower rank of two decides."""
    rows = {row.name: row for row in results.rows(recorded([1.0, 1.0]), "torch-ddp")}
    assert rows["zero3"].ratio == 1.0 and rows["zero3"].step == 2.0
    assert rows["torch-ddp"].ratio == 1.0 and rows["torch-ddp"].step == 2.0


@pytest.mark.parametrize(("other", "trusted"), [(1.0005, True), (1.01, False), (float("nan"), False)])
def test_losses_that_disagree_fail_loudly(other: float, trusted: bool, capsys: pytest.CaptureFixture[str]):
    measured = recorded([1.0, other])
    assert show.print_report(measured, None, {}, as_markdown=True, tolerance=1e-3) is trusted
    assert ("THE LOSSES DISAGREE" in capsys.readouterr().out) is not trusted


def test_losses_of_who_rounds_what_it_sends_are_its_own():
    measured = recorded([1.0, 1.0])
    measured.contenders.append(contenders.find("zeropp"))
    measured.turns["zeropp"] = turns([1.0, 1.0, 1.0], 1.5)
    difference = results.loss_difference(measured)
    assert difference is not None and difference[1:] == (0.0, ("torch-ddp", "zero3"))


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.soak
def test_a_job_runs_on_two_nodes_with_a_slow_link_between_them(tmp_path: Path):
    file = tmp_path / "bench.json"
    settings = ["--params", "2e5", "--context", "16", "--rounds", "1", "--steps", "1", "--json", str(file)]
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--link", "200mbit", "--only", "zero3,zeropp", *settings])
    assert end.value.code == 0
    found = json.loads(file.read_text())
    assert found["settings"]["link"] == "200mbit" and [row["name"] for row in found["rows"]] == ["zero3", "zeropp"]


def test_time_goes_to_the_innermost_operation_and_to_waiting():
    """On the main thread a product, inside it a copy, then it waits for a gather, then sums gradients."""
    events = [
        ("forward and backward", 1, 0, 90), ("aten::mm", 1, 10, 40), ("aten::copy_", 1, 20, 30),
        ("gloo:broadcast", 2, 35, 60), ("autograd::engine::x", 1, 70, 80), ("optimizer step", 1, 90, 100),
        ("near:wait", 1, 82, 88), ("near:reduce", 1, 84, 88), ("aten::add_", 1, 85, 87),
        ("aten::_fused_adamw_", 1, 92, 100),
    ]  # fmt: skip
    trace = {"events": events, "length": 100, "thread": 1}
    assert traces.lanes(trace) == {
        "compute": [(10, 20), (30, 40)],
        "copies": [(20, 30)],
        "update": [(92, 100)],
        "waiting": [(40, 60), (82, 84)],
        "gather": [(35, 60)],
        "reduce": [(84, 88)],
    }
    assert traces.phases(trace) == {"forward": (0, 70), "backward": (70, 90), "step": (90, 100)}


def test_time_with_slower_tiers_goes_to_the_operations_of_the_program():
    """A product inside of an update is the update's, one that no operation is around is the model's; threads of drives
    have lanes of their own, beside what the main thread does."""
    events = [
        ("forward and backward", 1, 0, 50), ("aten::mm", 1, 0, 20), ("STORE blocks.0 grads @host", 1, 20, 30),
        ("WAIT blocks.1 grads", 1, 30, 50), ("near:reduce", 1, 40, 45), ("optimizer step", 1, 50, 100),
        ("FETCH blocks.0 moments @disk", 1, 50, 55), ("disk:read", 2, 40, 52), ("UPDATE blocks.0", 1, 60, 80),
        ("aten::_fused_adamw_", 1, 62, 78), ("disk:written", 3, 70, 110), ("FILL blocks.0 master -> params", 1, 80, 90),
        ("ALL_GATHER blocks.0", 1, 90, 100),
    ]  # fmt: skip
    trace = {"events": events, "length": 100, "thread": 1}
    assert traces.moves(trace) == {
        "compute": [(0, 20)],
        "collectives": [(40, 45), (90, 100)],
        "waiting": [(30, 40), (45, 50)],
        "STORE": [(20, 30)],
        "FETCH": [(50, 55)],
        "UPDATE": [(60, 80)],
        "FILL": [(80, 90)],
        "disk reads": [(40, 52)],
        "disk writes": [(70, 100)],
    }


def test_time_of_a_device_goes_to_its_kernels_and_copies():
    """Copies run beside products, so only what is left of the step is idle; the host's events are in no lane, nor the
    device's in one of the host, whatever number their thread has."""
    events = [
        ("forward and backward", 1, 0, 90, False), ("aten::mm", 1, 10, 40, False),
        ("optimizer step", 1, 90, 100, False),
        ("sm90_xmma_gemm_bf16", 1, 10, 40, True), ("nvjet_hsh_128x256", 1, 35, 50, True),
        ("pytorch_flash::flash_fwd_kernel", 1, 50, 60, True), ("Memcpy DtoH (Device -> Pinned)", 9, 20, 80, True),
        ("Memcpy HtoD (Pinned -> Device)", 9, 95, 120, True), ("triton_poi_fused_add_0", 1, 60, 62, True),
        ("FusedAdamMathFunctor", 1, 85, 90, True), ("ncclDevKernel_AllGather", 8, 5, 12, True),
    ]  # fmt: skip
    trace = {"events": events, "length": 100, "thread": 1}
    assert traces.lanes_of(trace, "gpt") is traces.DEVICE
    assert traces.kernels(trace) == {
        "products": [(10, 50)],
        "attention": [(50, 60)],
        "update": [(85, 90)],
        "other kernels": [(60, 62)],
        "idle": [(0, 5), (80, 85), (90, 95)],
        "copies up": [(95, 100)],
        "copies down": [(20, 80)],
        "sending": [(5, 12)],
    }
    assert traces.lanes(trace)["compute"] == [(10, 40)] and traces.moves(trace)["compute"] == [(10, 40)]
    alone = {**trace, "events": [each for each in events if not each[-1]]}
    assert traces.lanes_of(alone, "gpt") is traces.LAYOUTS and traces.lanes_of(alone, "offload") is traces.MOVES


def test_who_takes_part_on_request_is_no_usual_contender():
    """Neither by default, nor are its losses compared where they are its own."""
    usual = {each.name for each in contenders.choose(replace(TINY, ranks=1))[0]}
    asked = {each.name for each in contenders.choose(replace(TINY, ranks=1), ["compile-*", "fp8-zero3"])[0]}
    assert asked == {"compile-bare", "compile-fsdp2", "compile-zero3", "fp8-zero3"} and not asked & usual
    assert {each.name for each in contenders.CONTENDERS if each.differs} == {
        "zeropp", "fp8-zero3", "delayed-zero2-host",
    }  # fmt: skip


@pytest.mark.soak
def test_contenders_that_start_at_once_take_turns_as_others_do():
    """One of them cannot start: it has a reason, and the other its turns and the seconds of its first step."""
    settings = replace(TINY, ranks=1, together=2, rounds=2, steps=1, warm=1)
    broken = replace(contenders.find("bare-zeros"), environment={"PYTHONHOME": "/nowhere"})  # Python finds no library
    measured = compare(settings, [contenders.find("bare"), broken])
    assert list(measured.failures) == ["bare-zeros"] and "in 'start'" in measured.failures["bare-zeros"].reason
    assert len(measured.turns["bare"]) == 2 and list(measured.first) == ["bare"]


def test_a_limited_benchmark_says_what_it_left_out(capsys: pytest.CaptureFixture[str]):
    """Who was not started in three quarters of the time does not take part, and one round is run in any case."""
    settings = replace(TINY, ranks=1, rounds=20, within=1.0)
    measured = compare(settings, [contenders.find("bare"), contenders.find("zero3")])
    assert measured.not_started == ["zero3"] and not measured.failures
    assert len(measured.turns["bare"]) == measured.rounds < settings.rounds
    assert show.print_report(measured, None, {}, as_markdown=False, tolerance=1e-3)
    said = capsys.readouterr().out
    assert f"{measured.rounds} of 20 rounds were begun before the time was over." in said
    assert "Not started, as three quarters of the time were over: zero3." in said
    record = results.as_json(measured, None)
    assert (record["rounds"], record["not_started"]) == (measured.rounds, ["zero3"])
    with pytest.raises(ConfigError, match="within is 0, but must be at least 1"):
        replace(TINY, within=0)
