"""What a search finds fits, is ranked by speed, and is what an engine, a DeepSpeed config and a recipe take."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest
import torch

import shardfold as sf
from shardfold.compat.deepspeed.config import read
from shardfold.errors import ConfigError
from shardfold.plan.cost import Codec, coding_seconds
from shardfold.plan.lifetimes import GPU
from shardfold.plan.program import COLLECTIVES
from shardfold.planner.candidate import Candidate, sizes_to_show
from shardfold.planner.choice import option
from shardfold.planner.division import Division
from shardfold.planner.hardware import DEVICES, Cluster, cluster, read_device
from shardfold.planner.memory import plan_memory
from shardfold.planner.ranking import LAYOUTS, layouts_for, rank
from shardfold.planner.seconds import HOST_UPDATE, Work, plan_seconds
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from shardfold.tools.recipes.train_config import TrainConfig

SHAPE = GPTConfig(d_model=64, layers=2, heads=4, context=32)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(GPT(SHAPE), (torch.randint(256, (2, 32)), torch.randint(256, (2, 32))))


def _small(memory: str, gpus: str = "8xA100-40G") -> Cluster:
    return cluster(gpus, memory=memory)


def test_all_that_is_found_fits_and_the_fastest_is_first(subject: Subject) -> None:
    """Each candidate's own plan has its peak within the budget; samples per second fall."""
    where = _small("19MiB")  # of which libraries take 16
    found = rank(subject, where, layouts=("zero1", "zero3"), modes=("keep", "recompute"), batch=1024)
    assert found.found and found.looked_at == 4 * 128
    assert [f.samples for f in found.found] == sorted((f.samples for f in found.found), reverse=True)
    for each in found.found:
        c = each.candidate
        trace = subject.trace("bf16", c.mode, c.micro_batch)
        setting = subject.setting(
            trace, layout=c.layout, precision="bf16", mesh=where.mesh, micro_batches=c.accumulate, clip=True,
            behaviour=GPU,
        )  # fmt: skip
        assert plan_memory(setting, trace).peak == pytest.approx(each.peak) and each.peak <= 19 * 2**20
        assert c.micro_batch * c.accumulate * 8 >= 1024
    for layout, mode in product(("zero1", "zero3"), ("keep", "recompute")):  # one sample more does not fit
        c = max((f.candidate for f in found.found if (f.candidate.layout, f.candidate.mode) == (layout, mode)),
                key=lambda c: c.micro_batch)  # fmt: skip
        trace = subject.trace("bf16", mode, c.micro_batch + 1)
        setting = subject.setting(
            trace, layout=layout, precision="bf16", mesh=where.mesh, micro_batches=c.accumulate, clip=True,
            behaviour=GPU,
        )  # fmt: skip
        assert c.micro_batch == 128 or plan_memory(setting, trace).peak > 19 * 2**20


def test_sizes_that_are_shown_are_powers_of_two_and_the_largest() -> None:
    """Each once."""
    assert [sizes_to_show(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


@pytest.mark.soak
def test_layouts_that_are_looked_at_are_those_that_differ(subject: Subject) -> None:
    """On one node those that treat nodes otherwise are as zero3; on several they may be the fastest."""
    assert set(LAYOUTS) - set(layouts_for(cluster("8xL4"))) == {"hsdp", "hpz"}
    assert layouts_for(cluster("4x8xL4")) == LAYOUTS
    best = sf.plan.best(GPT(SHAPE), subject.batch, gpus="4x8xL4", modes=("keep",), samples=64)
    device = replace(subject, division=Division(streams=True))
    assert best == rank(device, cluster("4x8xL4"), modes=("keep",), batch=64).best


def test_more_readers_train_more_samples(subject: Subject) -> None:
    """As many of a step as its micro-batches are on all ranks, in the seconds of one."""
    for batch in (64, None):
        for each in rank(subject, _small("1GiB"), layouts=("zero1",), modes=("keep",), batch=batch, most=4).found:
            assert each.batch == 8 * each.candidate.micro_batch * each.candidate.accumulate
            assert each.samples == pytest.approx(each.batch / each.seconds.step)


def test_a_billion_tokens_take_hours_of_devices(subject: Subject) -> None:
    """Those of all devices added up: ranks that share a model's layers train on the same tokens. The time of one
    micro-batch of given size is that which a search has for it."""
    where = _small("1GiB")
    for division in (Division(), Division(tensor=2)):
        shared = replace(subject, division=replace(division, streams=True))
        (found,) = rank(shared, where, layouts=("zero1",), modes=("keep",), most=1).found
        tokens = found.batch * SHAPE.context
        assert found.device_hours(tokens) == pytest.approx(8 * found.seconds.step / 3600)
        made = option([shared], PlannedRank.on(where, division), "zero1", micro_batch=1)
        assert made.seconds is not None and made.seconds.step == pytest.approx(found.seconds.step)
    images = Subject(torch.nn.Linear(8, 8), torch.zeros(2, 8))
    assert rank(images, where, layouts=("zero1",), modes=("keep",), most=2).best.device_hours() == inf


def test_what_does_not_fit_is_said_in_a_sentence(subject: Subject) -> None:
    """And where nothing does, asking for the best raises all of them."""
    found = rank(subject, _small("200KiB"), layouts=("ddp", "zero3"), modes=("keep",))
    assert not found.found and len(found.refused) == 2
    assert "what rests takes" in found.refused[0].why
    with pytest.raises(ConfigError, match="nothing fits"):
        _ = found.best
    host = rank(subject, _small("1GiB"), layouts=("offload",), modes=("keep",), host=1000.0)
    assert "host memory" in host.refused[0].why


def test_the_best_is_what_engines_and_configs_take(subject: Subject) -> None:
    """sf.plan.best() gives arguments with which an engine trains."""
    found = sf.plan.best(
        GPT(SHAPE), subject.batch, gpus="2xL4", precision="bf16", layouts=("zero2",), modes=("recompute",), samples=8
    )
    engine = sf.Engine(GPT(SHAPE), optimizer=partial(torch.optim.AdamW, lr=1e-3), **found.candidate.engine)
    engine.backward(engine(*subject.batch))
    engine.close()
    TrainConfig.load(found.candidate.train, where="a plan")
    assert found.candidate.deepspeed["zero_optimization"] == {"stage": 2}
    assert Candidate(layout="infinity").deepspeed["zero_optimization"]["offload_param"] == {"device": "cpu"}
    with pytest.raises(ConfigError, match="has no stage"):
        _ = Candidate(layout="hpz").deepspeed


def test_copies_take_memory_links_and_updates(subject: Subject) -> None:
    """Of each candidate of a search; the best one is what an engine and `train` take."""
    where = _small("40GiB")
    ways: dict[str, Any] = {"layouts": ("zero1", "zero3", "ddp"), "modes": ("keep",)}
    plain, kept = (
        {(f.candidate.layout, f.candidate.micro_batch): f for f in rank(subject, where, copies=copies, **ways).found}
        for copies in ("", "rank")
    )
    numel = sum(p.numel() for p in GPT(SHAPE).parameters())
    for key, found in kept.items():
        more = found.peak - plain[key].peak
        least = 0.0 if key[0] == "ddp" else 16 * numel / 8
        assert least <= more <= 1.3 * least and (found.seconds.step > plain[key].seconds.step) == (key[0] != "ddp")
    found = sf.plan.best(GPT(SHAPE), subject.batch, gpus="2xL4", layouts=("zero2",), modes=("keep",), survive="rank")
    assert found.candidate.engine["layout"] == sf.PRESETS["zero2"].replace(copies="rank")
    assert found.candidate.train["elastic"] and "copies='rank'" in found.candidate.unsaid
    exact = replace(found.candidate, exact=True)
    assert exact.table == sf.Runtime(survive="rank", exact=True).in_table(sf.PRESETS["zero2"])
    assert TrainConfig.load(exact.train).exact and "Runtime(exact=True)" in exact.unsaid
    with pytest.raises(ConfigError, match=r"survive= is 'hots': it says who holds.*Did you mean 'host'"):
        sf.plan.best(GPT(SHAPE), subject.batch, gpus="2xL4", survive="hots")


def test_a_deepspeed_config_says_what_it_has_no_words_for() -> None:
    """What it says is read as it was meant; all else is in the sentence beside it."""
    both = Candidate(
        layout="zero2", mode="recompute", micro_batch=3, accumulate=2, division=Division(tensor=2, sequence=2)
    )
    read_back = read(both.deepspeed, world_size=8)
    assert (read_back.sizes.tensor, read_back.sizes.sequence, read_back.stage) == (2, 2, 2)
    assert (read_back.micro_batch, read_back.accumulate) == (3, 2)
    assert both.unsaid.startswith("a DeepSpeed config has no words for activations='recompute' (")
    cut = Candidate(layout="zero1", division=Division(pipeline=4, order="gpipe", expert=2), gather="int8")
    assert set(cut.deepspeed) == set(Candidate(layout="zero1").deepspeed)
    for words in ("pipeline=4 in order gpipe (PipelineModule(num_stages=4))", "MoE(ep_size=2)", "gather int8 ("):
        assert words in cut.unsaid
    assert not Candidate(layout="zero1", division=Division(tensor=2)).unsaid
    for key in ("tensor_parallel", "sequence_parallel_size"):
        assert key not in Candidate(layout="zero1").deepspeed


def test_seconds_grow_with_a_slower_link_and_not_for_one_rank(subject: Subject) -> None:
    """A link bounds a step from below by the bytes of the program; beside streams it hides behind the computation, but
    for what that waits for: units that are not gathered ahead."""
    trace = subject.trace("bf16", "keep", 2)
    slow = DEVICES["2080Ti"]

    def seconds(layout: str, gpus: str, *, overlap: sf.Overlap | None = None, **device: float) -> float:
        where = cluster(gpus)
        setting = subject.setting(
            trace, layout=layout, precision="bf16", mesh=where.mesh, behaviour=GPU, overlap=overlap
        )
        return plan_seconds(setting, plan_memory(setting, trace), replace(where.device, **device)).step

    assert seconds("zero1", "1x2080Ti") < seconds("zero1", "2x2080Ti") < seconds("zero1", "2x1x2080Ti")
    sent = 2 * SHAPE.num_parameters * (4 + 2) / 2  # fp32 gradients to their owners, bf16 parameters back
    assert seconds("zero1", "2x1x2080Ti") > sent / 2 / slow.far.rate
    late, ahead = (
        seconds("zero3", "2x2080Ti", overlap=sf.Overlap(prefetch=n), launch=0.0, operation=0.0) for n in (0, 1)
    )
    assert late > ahead


def test_a_host_without_streams_does_one_thing_after_the_other(subject: Subject) -> None:
    """What each launch, product, operation of the program and format was measured to take comes on top, as often as
    there are some of it; attention goes at its own rate."""
    trace = subject.trace("fp32", "keep", 2)
    layout = sf.PRESETS["zero3"].replace(gather="int8", reduce="int8")
    setting = subject.setting(trace, layout=layout, mesh={"intra": 2})
    plan = plan_memory(setting, trace)
    cpu = replace(DEVICES["L4"], streams=False, launch=0.0)

    def more(**given: Any) -> float:
        return plan_seconds(setting, plan, replace(cpu, **given)).step - plan_seconds(setting, plan, cpu).step

    calls, products = (float(sum(n)) for n in (trace.works.calls, trace.works.product_calls["fp32"]))
    assert more(launch=1.0) == pytest.approx(calls) and 0 < products < calls
    assert more(call={"fp32": 1.0}) == pytest.approx(products, rel=1e-3)
    bound = setting.bound
    ops = [op for name in ("forward", "last", "step") for op in bound.program.section(name)]
    assert more(operation=1.0) == pytest.approx(len(ops))
    assert more(collective=1.0) == pytest.approx(sum(op.verb in COLLECTIVES for op in ops))
    assert more(meeting=1.0) == pytest.approx(3)  # before a pass and the one back end, and at the step
    alone = subject.setting(trace, layout="ddp", mesh={"intra": 2})  # whose forward sends nothing
    walked, sections = plan_memory(alone, trace), map(alone.bound.program.section, ("forward", "last", "step"))
    for field, times in (("meeting", 3), ("operation", sum(map(len, sections)))):
        least, most = (plan_seconds(alone, walked, replace(cpu, **{field: n})).step for n in (0.0, 1.0))
        assert most - least == pytest.approx(times)
    assert more(attention={"fp32": 1.0}) == pytest.approx(trace.attention, rel=1e-3)
    codec = Codec(1.0, 0.0, 0.0, 0.0)
    encoded = sum(
        coding_seconds(
            op, setting.bound.layout, setting.bound.by_name[op.unit], setting.bound.mesh, {"int8/256": codec}
        )
        for op in ops
        if op.verb in COLLECTIVES
    )
    assert more(codecs={"int8/256": list(codec)}) == pytest.approx(encoded) and encoded > SHAPE.num_parameters


def test_an_update_in_host_memory_goes_at_the_hosts_rate(subject: Subject) -> None:
    """30 bytes of each parameter, of fp32 gradients and states and a bf16 copy, wherever the model computes; one on the
    device goes at the rate of its memory, where the copy is a pass of its own that reads 4 more."""
    trace = subject.trace("bf16", "keep", 2)

    def update(layout: str, **given: Any) -> float:
        setting = subject.setting(trace, layout=layout, precision="bf16", mesh={"intra": 1}, behaviour=GPU)
        device = replace(DEVICES["H100"], host=float("inf"), **given)
        return plan_seconds(setting, plan_memory(setting, trace), device).update

    states = 30 * SHAPE.num_parameters
    assert update("offload", update=1e9) == pytest.approx(states / 1e9, rel=1e-2)
    assert update("offload") == pytest.approx(states / HOST_UPDATE, rel=1e-2)
    apart = 34 * SHAPE.num_parameters
    assert update("zero1", update=1e9) == pytest.approx(apart / DEVICES["H100"].bandwidth, rel=1e-2)
    assert update("offload", streams=False, update=1e9) == pytest.approx(states / 1e9, rel=1e-2)
    assert update("zero1", streams=False, update=1e9) == pytest.approx(states / 1e9, rel=1e-2)
    assert update("zero1", streams=False) == pytest.approx(states / DEVICES["H100"].bandwidth, rel=1e-2)


def test_copies_to_the_host_and_back_go_on_at_once(subject: Subject) -> None:
    """Where copies are slow a step takes as long as its gradients take down and its parameters up: of 4 + 2 + 2 bytes
    half go each way. What is updated comes back behind its update."""
    trace = subject.trace("bf16", "keep", 2)

    def seconds(layout: str, **given: Any) -> float:
        setting = subject.setting(trace, layout=layout, precision="bf16", mesh={"intra": 1}, behaviour=GPU)
        device = replace(DEVICES["H100"], launch=0.0, update=1e15, **given)
        return plan_seconds(setting, plan_memory(setting, trace), device).step

    each, params = 1e6, SHAPE.num_parameters
    took = seconds("infinity", host=each)
    assert 6 * params / each < took < 7.5 * params / each  # forward's, backward's beside gradients, new ones
    assert seconds("offload", host=each) == pytest.approx((4 + 2) * params / each, rel=2e-2)


def test_a_device_computes_what_the_host_has_begun(subject: Subject) -> None:
    """Where operations are many and small a step takes what they take the host, where they are large what they take
    the device; never less than either, nor more than both."""
    trace = subject.trace("fp32", "keep", 2)
    slow = replace(DEVICES["L4"], bandwidth=1e9)
    alone = Work(replace(slow, launch=0.0), trace).until[:, 0]
    for launch in (1e-9, 20e-6, 1.0):
        host = np.concatenate(([0.0], (trace.works.calls * launch).cumsum()))
        until = Work(replace(slow, launch=launch), trace).until[:, 0]
        assert (until >= np.maximum(alone, host) * (1 - 1e-9)).all()
        assert (until <= (alone + host) * (1 + 1e-9)).all() and (np.diff(until) >= -1e-12).all()
    assert until[-1] == pytest.approx(host[-1], rel=1e-3)


def test_clusters_are_read_and_refused_in_words(tmp_path: object) -> None:
    """Nodes first; a file that a machine's profile is in; what names nothing says what would."""
    assert (cluster("4x8xH100").nodes, cluster("4x8xH100").per_node, cluster("A100-80GB").size) == (4, 8, 1)
    assert cluster("2xL4", memory="5GiB").device.usable == 5 * 2**30
    for name, reported in (("A100-40G", 39.39), ("A100-80G", 79.14), ("V100-16G", 15.77), ("2080Ti", 10.75)):
        assert cluster(f"1x{name}").device.usable == pytest.approx((reported - 0.75) * 2**30)  # not the maker's number
    with pytest.raises(ConfigError, match="H100"):
        cluster("8xH10")
    path = tmp_path / "here.json"  # type: ignore[operator]
    path.write_text(DEVICES["L4"].text())
    assert read_device(path) == DEVICES["L4"]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a profile"):
        cluster(f"2x{path}")


def test_micro_batches_of_a_step_take_as_long_as_they_are(subject: Subject) -> None:
    """Where nothing is sent, a step of four is four times a micro-batch and one update."""
    where = cluster("1x2080Ti")
    trace = subject.trace("bf16", "keep", 2)

    def seconds(count: int) -> tuple[float, float]:
        setting = subject.setting(
            trace, layout="ddp", precision="bf16", mesh=where.mesh, micro_batches=count, behaviour=GPU
        )
        found = plan_seconds(setting, plan_memory(setting, trace), where.device)
        return found.step - found.update, found.compute

    assert seconds(4)[0] == pytest.approx(4 * seconds(1)[0]) and seconds(4)[0] == pytest.approx(seconds(4)[1])
