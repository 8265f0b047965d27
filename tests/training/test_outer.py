"""Groups of ranks that come together now and then train as a plain loop over as many models does, to 1e-12."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import shardfold as sf
from shardfold.engine._vote import Vote
from shardfold.errors import CollectiveError, ConfigError, LayoutError, NonFiniteError
from shardfold.testing import Ranks, RanksFailed, run_ranks
from tests.support.options import grouped

WIDTH, STEPS = 8, 9
UNITS = [str(i) for i in range(4)]
ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DILOCO = {"every": 3, "optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
STREAMING = {**DILOCO, "every": 4, "fragments": 2, "delay": 2, "alpha": 0.25}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in UNITS)).double()


def batch(step: int) -> Tensor:
    """Of all ranks: the first half is the first group's."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(module: Any, x: Tensor) -> Tensor:
    return (module(x).tanh() - x).square().mean()


class Reference:
    """So many models, each with an optimizer of its own, and what they share."""

    def __init__(self, groups: int, inner: Any, outer: sf.Outer) -> None:
        self.models, self.outer = [model() for _ in range(groups)], outer
        self.inner = [inner(each.parameters()) for each in self.models]
        self.shared = [p.detach().clone() for p in self.models[0].parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.shared]
        self.changes: dict[int, Tensor] = {}

    def fragment(self, number: int) -> range:
        each = len(self.shared) // self.outer.fragments
        return range(number * each, (number + 1) * each)

    @torch.no_grad()
    def send(self, fragment: int) -> None:
        for i in self.fragment(fragment):
            gaps = [self.shared[i] - list(each.parameters())[i] for each in self.models]
            mean = torch.stack(gaps).mean(0)
            self.momentum[i].mul_(self.outer.beta).add_(mean)
            nesterov = mean + self.outer.beta * self.momentum[i] if self.outer.beta else mean
            self.changes[i] = -self.outer.rate * nesterov

    @torch.no_grad()
    def take(self, fragment: int) -> None:
        for i in self.fragment(fragment):
            self.shared[i] += self.changes.pop(i)
            for each in self.models:
                p = list(each.parameters())[i]
                p.copy_(self.outer.stays * p + (1 - self.outer.stays) * self.shared[i])

    def step(self, number: int) -> None:
        for each, optimizer, x in zip(self.models, self.inner, batch(number).chunk(len(self.models)), strict=True):
            optimizer.zero_grad()
            loss_of(each, x).backward()
            optimizer.step()
        for fragment in range(self.outer.fragments):
            shift = fragment * self.outer.every // self.outer.fragments
            for behind, do in ((0, self.send), (self.outer.delay, self.take)):
                since = number + 1 - shift - behind
                if since > 0 and since % self.outer.every == 0:
                    do(fragment)


def engine_of(layout: str, outer: dict[str, Any], inner: Any, ranks: int = 4, **more: Any) -> sf.Engine:
    return sf.Engine(
        model(),
        optimizer=inner,
        **grouped(layout=layout, mesh={"inter": 2, "intra": ranks // 2}, units=UNITS, outer=sf.Outer(**outer), **more),
    )


def train(engine: sf.Engine, steps: range) -> dict[str, Tensor]:
    for number in steps:
        engine.backward(loss_of(engine, batch(number).chunk(engine.data_ranks)[engine.data_rank]))
        engine.step()
    return engine.state_dict()


def _run(layout: str, outer: dict[str, Any], inner: Any, ranks: int = 4) -> dict[str, Tensor]:
    engine = engine_of(layout, outer, inner, ranks)
    state = train(engine, range(STEPS))
    engine.close()
    return state


def expected(outer: dict[str, Any], inner: Any, steps: int = STEPS) -> list[dict[str, Tensor]]:
    reference = Reference(2, inner, sf.Outer(**outer))
    for number in range(steps):
        reference.step(number)
    return [each.state_dict() for each in reference.models]


def assert_near(states: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    each = len(states) // len(wanted)
    for rank, state in enumerate(states):
        for name, value in wanted[rank // each].items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name, r=rank: f"{n} on {r}: {m}"
            )


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("layout", "outer", "inner"),
    [
        ("ddp", {"every": 3, "lr": 0.5, "alpha": 0.25}, SGD),
        ("zero1", DILOCO, ADAMW),
        ("zero2", STREAMING, ADAMW),
        ("zero3", DILOCO, SGD),
        ("zero3", STREAMING, ADAMW),
        ("zero1", {**STREAMING, "delay": 1, "tier": "host"}, SGD),
    ],
)
def test_groups_train_as_models_of_a_plain_loop_do(
    ranks: Ranks, layout: str, outer: dict[str, Any], inner: Any
) -> None:
    """Averaging (half-way, and keeping a part), DiLoCo and Streaming DiLoCo over groups that train by a layout each."""
    assert_near(ranks.run(_run, layout, outer, inner), expected(outer, inner))


def test_fragments_have_nearly_as_many_elements() -> None:
    """They are runs of units, in order, of elements that are nearly as many, and each has some."""
    outer = sf.Outer(every=4, fragments=2)
    for numbers, wanted in (
        ([1, 1, 1, 1], [0, 0, 1, 1]),
        ([9, 1, 1, 9], [0, 0, 1, 1]),
        ([1, 1, 1, 9], [0, 0, 0, 1]),
        ([9, 1, 1, 1], [0, 1, 1, 1]),
    ):
        assert [outer.fragment_of(numbers, i) for i in range(4)] == wanted


@pytest.mark.soak
def test_averaging_in_every_step_is_plain_data_parallelism(ranks: Ranks) -> None:
    """With SGD without momentum the mean of what the groups' updates give is the update by the mean."""
    plain = partial(torch.optim.SGD, lr=0.1)
    reference = Reference(1, plain, sf.Outer(every=STEPS + 1))
    for number in range(STEPS):
        reference.step(number)
    assert_near(ranks.run(_run, "zero3", {"every": 1}, plain), [reference.models[0].state_dict()])


def _measured(layout: str, outer: dict[str, Any]) -> dict[str, Any]:
    """By step: bytes of outer steps as sent and as the program says; and what rests."""
    engine = engine_of(layout, outer, ADAMW)
    sent: list[list[tuple[int, float]]] = []
    for number in range(STEPS):
        train(engine, range(number, number + 1))
        rows = [row for row in engine.traffic().rows if row.purpose == "outer"]
        sent.append([(row.sent, row.program) for row in rows])
        differing = [row for row in engine.traffic().rows if row.sent != row.program]
        assert not differing
    memory = {row.state: (row.table + row.padding, row.held) for row in engine.memory().rows}
    text, length = engine.explain(), sum(s.spec.length for s in engine.sharded.segments())
    engine.close()
    return {"sent": sent, "memory": memory, "text": text, "length": length}


@pytest.mark.soak
def test_what_a_round_sends_and_holds(ranks: Ranks) -> None:
    """Each element is sent to be summed and comes back once in a round, by the group that takes its part, all counted
    by the program; momentum is divided over the groups."""
    outer = {"every": 4, "optimizer": "nesterov", "fragments": 2}
    for seen in ranks.run(_measured, "zero1", outer):
        shard = seen["length"] // 2 * 8  # bytes of this rank's part in its group
        fragment = shard // 2  # two units of four
        one_way = fragment // 2  # to the other of two groups
        due = [number + 1 for number in range(STEPS) if (number + 1) % 2 == 0 and number + 1 >= 4]
        for number, rows in enumerate(seen["sent"], 1):
            assert rows == ([(one_way, one_way)] * 2 if number in due else [])
        assert seen["memory"]["global"] == (shard, shard)
        assert seen["memory"]["momentum"] == (shard // 2, shard // 2)
        assert seen["memory"]["outer"][1] == 0
        assert (
            "outer steps: every 4 steps over inter, nesterov with lr 0.7 and momentum 0.9, in 2 fragments"
            in seen["text"]
        )
        assert "bytes sent by each rank once in 4 steps, in addition:" in seen["text"]
        assert "FRAGMENT 1\n  DIFF 2 fp64\n  PUSH 2 [inter] fp64" in seen["text"]


def _coded(outer: dict[str, Any]) -> tuple[dict[str, Tensor], list[tuple[int, float]]]:
    torch.manual_seed(0)
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in UNITS))
    engine = sf.Engine(
        wide,
        optimizer=ADAMW,
        layout=sf.PRESETS["zero2"].replace(outer=sf.Outer(**outer)),
        parallel={"inter": 2, "intra": 1},
        init=sf.Init(units=UNITS),
    )
    for number in range(outer["every"]):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * engine.rank + number))
        engine.backward(loss_of(engine, x))
        engine.step()
    rows = [(row.sent, row.program) for row in engine.traffic().rows if row.purpose == "outer"]
    state = engine.state_dict()
    engine.close()
    return state, rows


def test_outer_gradients_in_4_bits(ranks: Ranks) -> None:
    """An eighth of the bytes and the scales; the groups are equal to the bit, and within two half steps of what they
    would be without rounding."""
    plain = ranks.run(_coded, {"every": 2}, world_size=2)
    coded = ranks.run(_coded, {"every": 2, "format": "int4/64"}, world_size=2)
    for name, value in coded[0][0].items():
        assert torch.equal(value, coded[1][0][name])
        exact = plain[0][0][name]
        assert 0 < float((value - exact).abs().max()) < 2 * 0.05 / 7  # AdamW moves by 0.02 a step, and a bit more
    for (sent, said), (before, _) in zip(coded[0][1], plain[0][1], strict=True):
        assert sent == said == before * (64 / 2 + 4) / (64 * 4)


def _ahead(folder: str) -> int:
    """The second group begins its third step only when the first has done two; how often this rank stepped."""
    engine = engine_of("zero2", {"every": 3}, SGD)
    group, done = engine.mesh.coords["inter"], Path(folder, f"{engine.rank}")
    train_one = partial(_one_step, engine)
    for number in range(2):
        if group:
            wait_for([Path(folder, "0"), Path(folder, "1")])  # which the first group writes behind both of its steps
        train_one(number)
    if not group:
        done.touch()
    train_one(2)  # where all meet
    steps = engine.steps
    engine.close()
    return steps


def _one_step(engine: sf.Engine, number: int) -> None:
    engine.backward(loss_of(engine, batch(number).chunk(engine.data_ranks)[engine.data_rank]))
    engine.step()


def wait_for(paths: list[Path]) -> None:
    """Returns when the files are there; the run ends by its own time if they never are."""
    while not all(path.exists() for path in paths):
        os.sched_yield()


def test_groups_do_not_wait_for_each_other_between_rounds(ranks: Ranks, tmp_path: Path) -> None:
    """One group may do its steps up to the outer one before the other begins."""
    assert ranks.run(_ahead, str(tmp_path)) == [3] * 4


def test_what_is_wrong_is_said_in_a_sentence() -> None:
    """Values that do not go together, an axis that is not there, and a format that is unknown."""
    for wrong, said in (
        ({"every": 0}, "Outer.every is 0"),
        ({"every": 4, "optimizer": "nestorov"}, "Did you mean 'nesterov'?"),
        ({"every": 4, "momentum": 0.9}, "which has none: take 'nesterov'"),
        ({"every": 4, "fragments": 3}, "their number divides that of the steps"),
        ({"every": 4, "delay": 4}, "so let it be less"),
        ({"every": 4, "alpha": 1.0}, "a number in \\[0, 1\\)"),
        ({"every": 4, "fragmens": 2}, "Did you mean 'fragments'?"),
    ):
        with pytest.raises(ConfigError, match=said):
            sf.Outer(**wrong)
    with pytest.raises(
        LayoutError,
        match=r"Outer\.axis is 'inner', which is not an axis of data of the mesh; these are inter, intra",
    ):
        sf.Engine(model(), optimizer=SGD, layout=sf.PRESETS["zero3"].replace(outer=sf.Outer(every=2, axis="inner")))
    with pytest.raises(LayoutError, match=r"what outer steps send travels as 'bf17'.*Did you mean 'bf16'"):
        sf.Engine(model(), optimizer=SGD, layout=sf.PRESETS["zero3"].replace(outer=sf.Outer(every=2, format="bf17")))


SAVED_AT = 5  # fragment 0 was sent behind step 4 and is to be taken in behind step 6


def _save(folder: str) -> dict[str, Tensor]:
    """Goes on behind a save in the middle of a round, as if it had not been."""
    engine = engine_of("zero2", STREAMING, ADAMW)
    train(engine, range(SAVED_AT))
    engine.save(folder, wait=True)
    state = train(engine, range(SAVED_AT, STEPS))
    engine.close()
    return state


def _resume(folder: str, layout: str, ranks: int) -> dict[str, Tensor]:
    engine = engine_of(layout, STREAMING, ADAMW, ranks)
    report = engine.load(folder)
    assert not [note for note in report.notes if "outer" in note], report.notes
    state = train(engine, range(SAVED_AT, STEPS))
    engine.close()
    return state


def _alone(folder: str) -> tuple[dict[str, Tensor], list[str]]:
    engine = sf.Engine(model(), optimizer=ADAMW, layout="ddp", init=sf.Init(units=UNITS))
    report = engine.load(folder)
    state = engine.state_dict()
    engine.close()
    return state, report.notes


def test_a_round_goes_on_from_its_middle(ranks: Ranks, tmp_path: Path) -> None:
    """Weights and moments of each group, what they share and what is on its way are in a checkpoint: a run goes on from
    it to the bit, and by another layout on fewer ranks of each group; without groups it has the first one's weights."""
    folder = str(tmp_path / "saved")
    through = ranks.run(_save, folder)
    assert_near(through, expected(STREAMING, ADAMW))
    again = ranks.run(_resume, folder, "zero2", 4)
    for mine, theirs in zip(again, through, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    state, notes = ranks.run(_alone, folder, world_size=1)[0]
    assert_near([state], expected(STREAMING, ADAMW, SAVED_AT)[:1])
    assert any("There were 2 groups between outer steps and now there is 1" in note for note in notes)


@pytest.mark.soak
def test_a_round_goes_on_with_other_ranks_in_its_groups(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks.run(_save, folder)
    assert_near(ranks.run(_resume, folder, "zero3", 2, world_size=2), expected(STREAMING, ADAMW))


def _meet(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = engine_of("zero1", {**DILOCO, "every": 50}, ADAMW)
    apart = train(engine, range(steps))
    engine.outer_step()
    together = engine.state_dict()
    engine.close()
    return apart, together


@pytest.mark.soak
def test_groups_come_together_when_they_are_told_to(ranks: Ranks) -> None:
    """``synchronize()`` takes the outer step at once."""
    seen = ranks.run(_meet, 2)
    assert not torch.equal(seen[0][0]["0.weight"], seen[2][0]["0.weight"])
    assert_near([together for _, together in seen], expected({**DILOCO, "every": 2}, ADAMW, 2))


def _meet_twice(outer: dict[str, Any], steps: int) -> list[Tensor]:
    engine = engine_of("zero1", outer, ADAMW)
    seen = [train(engine, range(steps))["0.weight"]]
    for _ in range(2):
        engine.outer_step()
        seen.append(engine.state_dict()["0.weight"])
    engine.close()
    return seen


@pytest.mark.parametrize(("outer", "steps"), [(DILOCO, 6), (STREAMING, 5)])
def test_groups_that_are_together_stay_as_they_are(ranks: Ranks, outer: dict[str, Any], steps: int) -> None:
    """Behind a round that has just ended, and a second time, ``synchronize()`` takes no step by momentum alone; and
    nothing of a group's own weights stays, whatever ``alpha`` is."""
    for before, once, twice in (found := ranks.run(_meet_twice, outer, steps)):
        assert torch.equal(once, twice) and torch.equal(once, found[0][1])
        assert torch.equal(before, once) == (outer is DILOCO)


def _late(folder: str, late: Sequence[int]) -> tuple[dict[str, Tensor], int]:
    """The second group comes to these steps only when the first is behind them, which has put their outer step off."""
    engine = engine_of("ddp", {**DILOCO, "every": 2, "deadline": 0.2, "put_off": 2}, ADAMW, 2)
    for number in range(7):
        passed = Path(folder, f"passed{number}")
        if engine.rank == 1 and number in late:
            passed.read_text()
        _one_step(engine, number)
        if engine.rank == 0 and number in late:
            passed.write_text("")
    state, put_off = engine.state_dict(), engine.stats().put_off
    engine.close()
    return state, put_off


def test_an_outer_step_is_put_off_where_a_group_is_late(ranks: Ranks, tmp_path: Path) -> None:
    """Behind steps 2 and 4 for all alike, and held behind 6, which all wait for: as a round of 6 steps."""
    reference = Reference(2, ADAMW, sf.Outer(**{**DILOCO, "every": STEPS + 1}))
    for number in range(7):
        reference.step(number)
        if number + 1 == 6:
            reference.send(0)
            reference.take(0)
    for number in (1, 3):
        os.mkfifo(tmp_path / f"passed{number}")
    found = ranks.run(_late, str(tmp_path), (1, 3), world_size=2)
    assert [put_off for _, put_off in found] == [2, 2]
    assert_near([state for state, _ in found], [each.state_dict() for each in reference.models])


def test_the_first_decision_of_a_vote_is_that_of_all() -> None:
    """Who comes behind it reads it; with all there the outer step is taken, whatever the deadline."""
    store = HashStore()
    first, second = (Vote(store, 2, deadline) for deadline in (0.01, 100.0))
    assert not first.taken() and not second.taken()  # the second comes later, and does not wait
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(second.taken)
        first._deadline = 100.0
        assert first.taken() and theirs.result()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"deadline": 0}, "a number of seconds"),
        ({"deadline": 1.0, "delay": 1}, "leave one of the two out"),
        ({"put_off": 2}, "Outer.put_off is 2 and there is no deadline="),
    ],
)
def test_a_deadline_that_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sf.Outer(every=4, **given)


STRICT = sf.Clip(norm=1e9, error_if_nonfinite=True)
SENTENCE = "the norm of the gradients of rank 2, 3 is nan and Clip(error_if_nonfinite=True): nothing was updated; "


def _strict_step(engine: sf.Engine, number: int, bad: int) -> None:
    """Rank 3, of the second group, has NaN in one step."""
    loss = loss_of(engine, batch(number).chunk(engine.data_ranks)[engine.data_rank])
    engine.backward(loss * (torch.nan if engine.rank == 3 and number == bad else 1.0))
    engine.step()


def _goes_on(bad: int) -> tuple[str, dict[str, Tensor]]:
    engine, said = engine_of("zero2", {"every": 2}, ADAMW, clip=STRICT), ""
    for number in range(5):
        try:
            _strict_step(engine, number, bad)
        except NonFiniteError as error:
            said = str(error)
            engine.zero_grad()
    state = engine.state_dict()
    engine.close()
    return said, state


@pytest.mark.parametrize("bad", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_step_that_raises_in_one_group_counts_in_the_round(ranks: Ranks, bad: int) -> None:
    """Its group goes on as behind a skipped step: outer steps behind the second and fourth step, as if its own model
    had not been updated in that step."""
    reference = Reference(2, ADAMW, sf.Outer(every=2))
    second, step = reference.inner[1], reference.inner[1].step
    for number in range(5):
        second.step = (lambda: None) if number == bad else step
        reference.step(number)
    found = ranks.run(_goes_on, bad)
    assert [said for said, _ in found[:2]] == ["", ""]
    assert all(said.startswith(SENTENCE) for said, _ in found[2:])
    assert_near([state for _, state in found], [each.state_dict() for each in reference.models])


def _raises(layout: str) -> str:
    engine = engine_of(layout, {"every": 2}, ADAMW, clip=STRICT)
    try:
        for number in range(4):
            _strict_step(engine, number, 2)
    except (NonFiniteError, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return ""


def test_groups_are_told_why_another_does_not_come(ranks: Ranks) -> None:
    """The group whose norm is not finite raises in that step, the other where both would meet, with the same words."""
    found = ranks.run(_raises, "zero2")
    assert all(said.startswith(f"NonFiniteError: {SENTENCE}") for said in found[2:])
    for said in found[:2]:
        assert said.startswith("CollectiveError: rank ")
        assert f"ranks 2, 3: raised NonFiniteError in engine.step(): {SENTENCE}" in said


def _dies(folder: str) -> str:
    """Rank 3 is gone in the middle of the second round."""
    engine = engine_of("zero3", {"every": 2}, SGD)
    try:
        for number in range(4):
            if number == 2:
                engine.save(folder, wait=True)
            if engine.rank == 3 and number == 3:
                os._exit(0)
            _one_step(engine, number)
    except CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.soak
def test_a_round_that_lost_a_member_is_repeated(tmp_path: Path) -> None:
    """Every survivor hears of it, those of the other group at the outer step; from the checkpoint of the round's
    beginning the run ends as one that lost nobody."""
    folder = str(tmp_path / "saved")
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_told, 4, folder)
    assert sorted(f.rank for f in failed.value.failures) == [0, 1, 2, 3]
    assert "the outer step behind step 4" in str(failed.value) and "has probably died" in str(failed.value)
    assert_near(run_ranks(_repeats, 4, folder), expected({"every": 2}, SGD, 4))


def _told(folder: str) -> None:
    if said := _dies(folder):
        raise RuntimeError(said)


def _repeats(folder: str) -> dict[str, Tensor]:
    engine = engine_of("zero3", {"every": 2}, SGD)
    engine.load(folder)
    state = train(engine, range(2, 4))
    engine.close()
    return state
