"""A rank is killed, and the others go on as if they had been that many from the step that it was in."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.agent.server.api import Worker as Place

import shardfold as sf
from shardfold.checkpoint.held import Held, covering
from shardfold.checkpoint.index import Index, Parameter, Piece
from shardfold.comm.launcher_notes import ELASTIC, FILE, STOPPED
from shardfold.comm.membership import EpochPlace, Member, Membership
from shardfold.comm.mesh import states_come
from shardfold.engine.elastic import once_only
from shardfold.errors import CheckpointError, ConfigError, StepError
from shardfold.launch._mail import ALL, TO, Mail
from shardfold.launch._members import QUEUE, Members
from shardfold.launch._rendezvous import Attempts
from shardfold.launch._spares import Spares
from shardfold.launch._voter import Ballot, Message, Sent, Voter
from shardfold.launch.workers import Outlet, Worker, watch
from shardfold.plan.patience import Patience
from shardfold.testing import Ranks
from tests.launch.epochs import Violation, Walk
from tests.launch.survivors import Plan, changing, held, judged, plain

linux = pytest.mark.skipif(sys.platform != "linux", reason="launchers leave notes for ranks in a memfd")

# -- who is in


def test_every_order_of_three_launchers_and_a_fault_gives_one_record_of_an_epoch() -> None:
    found = Walk(3, 1).run()
    assert found["records"] == 1 and found["states"] > 1000


def test_every_order_of_two_launchers_and_two_faults() -> None:
    assert Walk(2, 2).run()["records"] == 2


def test_every_order_of_two_launchers_two_faults_and_one_that_joins() -> None:
    assert Walk(2, 2, spares=1).run()["records"] == 3


@pytest.mark.soak
def test_every_order_of_three_launchers_a_fault_and_two_that_join() -> None:
    assert Walk(3, 1, spares=2).run()["records"] == 2


@pytest.mark.soak
def test_every_order_of_three_launchers_and_two_faults() -> None:
    assert Walk(3, 2).run()["records"] == 2


def of_any_epoch(voter: Voter, message: Message) -> tuple[Voter, Sent]:
    """Hears ballots of an epoch that is decided."""
    if message.kind in ("PREPARE", "ACCEPT") and message.epoch <= voter.record.epoch:
        message = replace(message, epoch=voter.record.epoch + 1)
    return RECEIVE(voter, message)


def forgets(voter: Voter, message: Message) -> tuple[Voter, Sent]:
    """Proposes its own record, whatever was taken."""
    return HEAR_PROMISE(voter, replace(message, taken=None, record=None))


def takes_all(voter: Voter) -> tuple[Member, ...]:
    """All that wait, whether members are missing or not."""
    spares = [each for message in voter.promises for each in message.spares]
    return tuple([*(each for message in voter.promises for each in message.members), *spares])


def offers_them_again(voter: Voter, record: Membership) -> tuple[Voter, Sent]:
    """A spare that has come in is offered in the next epoch, too."""
    after, sent = TAKE(voter, record)
    return replace(after, spares=voter.spares), sent


RECEIVE, HEAR_PROMISE, TAKE = Voter.receive, Voter._hear_promise, Voter._take
JOINS = {
    "who waits is not let in": (Voter, "_may_grow", property(lambda _: False)),
    "more come in than are missing": (Voter, "_who", takes_all),
    "who has come in comes in again": (Voter, "_take", offers_them_again),
}
FAULTS: dict[str, tuple[type, str, Any, int]] = {
    "fewer than a majority decide": (Membership, "majority", property(lambda _: 1), 2),
    "ballots of other epochs are heard": (Voter, "receive", of_any_epoch, 2),
    "what was taken is not proposed again": (Voter, "_hear_promise", forgets, 2),
    "who suspects tells nobody": (Voter, "_share", lambda voter, _: replace(voter, needed=True), 1),
    "nobody tries again": (Voter, "waits", property(lambda _: False), 1),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.soak] * (each[3] > 1)) for name, each in FAULTS.items()]
)
def test_faults_of_the_protocol_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, broken, faults = FAULTS[fault]
    monkeypatch.setattr(kind, name, broken)
    with pytest.raises(Violation):
        Walk(3, faults).run()


@pytest.mark.parametrize("fault", JOINS)
def test_faults_of_joining_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*JOINS[fault])
    with pytest.raises(Violation):
        Walk(2, 2, spares=2).run()


@linux
@pytest.mark.parametrize("elastic", [False, True])
def test_a_host_whose_only_rank_is_killed_goes_on_if_that_rank_could_have(elastic: bool) -> None:
    """In a run of another kind it is a rank's death as any, which the launcher tells the others of."""
    code = f"import os, signal; os.pwrite(os.open(os.environ[{FILE!r}], os.O_RDWR), b'{elastic:d}', {ELASTIC})"
    command = [sys.executable, "-c", f"{code}; os.kill(os.getpid(), signal.SIGKILL)"]
    store = dist.HashStore()
    store.set(f"{QUEUE}/first", Membership(0, (Member(0, 0), Member(1, 1)), size=2).to_json())
    rank = Worker(0, command, dict(os.environ), (Outlet(), Outlet()))
    watch([rank])
    meeting = Attempts(None, "host", None, None, 60.0, Patience(3.0))  # pyright: ignore[reportArgumentType]
    meeting.node_rank, meeting.num_nodes, meeting.store = 1, 2, store
    members = Members([1], [rank], meeting, lambda: ("127.0.0.1", 1, None))
    try:
        rank._over.wait()
        while members._voter is None:
            members._thread.join(0.01)
        assert members.takes(rank) is elastic
    finally:
        members.close()


def test_one_that_is_just_coming_in_does_not_stand_still() -> None:
    """Another thread knows of the record already, and has not made it a rank of this node yet."""
    members = object.__new__(Members)
    members._agent, members._mine = 0, {}
    members._voter = Voter(0, Membership(1, (Member(3, 0),), size=1))
    assert members.standing() == (-1, "")


def test_no_call_waits_in_the_store_for_a_host_that_may_be_gone() -> None:
    """It would keep others from the store, with them the one that finds out that the host is gone."""
    store, looks = dist.HashStore(), list[list[str]]()

    def check(keys: list[str]) -> bool:
        looks.append(keys)
        if len(looks) == 2:
            store.set("first", "record")
        return store.check(keys)

    def multi_get(keys: list[str]) -> list[bytes]:
        assert store.check(keys)
        return store.multi_get(keys)

    members = object.__new__(Members)
    members._store, members._begun, members._over = SimpleNamespace(check=check, multi_get=multi_get), 2, False
    assert members._said(["first"]) == [b"record"] and len(looks) == 2
    members._over = True
    with pytest.raises(RuntimeError):
        members._said(["never"])


def test_stores_that_may_take_the_place_of_one_that_is_gone_are_asked_at_once() -> None:
    members, met = object.__new__(Members), Barrier(3)
    members._agent, members._ready, members._others = 4, "own", {node: ("host", node) for node in range(5)}
    members._joined = lambda place: (met.wait(10.0), place)[1]  # each answers when all have been asked
    found = {node: joined.result() for node, joined in members._stores_behind(0)}
    assert found == {1: ("host", 1), 2: ("host", 2), 3: ("host", 3), 4: "own"}


@linux
@pytest.mark.parametrize("how", ["KILL", "end"])
def test_a_rank_that_dies_while_others_agree_is_gone_too(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not one that has failed: its launcher sees that it has ended when the others have stopped for another one.
    One that has come to its end then is not waited for."""
    code = f"import os, signal; notes = os.open(os.environ[{FILE!r}], os.O_RDWR); "
    code += "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); "
    stopped = f"os.pwrite(notes, b'%020d' % 9, {STOPPED}); "
    codes = [f"{code}{stopped * (number < 2 or how == 'KILL')}os.pwrite(notes, b'1', {ELASTIC})" for number in range(3)]
    ranks = [
        Worker(number, [sys.executable, "-c", f"{each}; signal.pause()"], dict(os.environ), (Outlet(), Outlet()))
        for number, each in enumerate(codes)
    ]
    watch(ranks)
    deadline = time.monotonic() + 60.0
    while not all(rank.is_elastic for rank in ranks):
        assert time.monotonic() < deadline
    stop = Members._stop

    def stop_late(members: Members) -> None:
        if ranks[2].returncode is None:
            os.kill(ranks[2].process.pid, signal.SIGKILL if how == "KILL" else signal.SIGTERM)
        assert ranks[2]._over.wait(60.0)
        stop(members)

    meeting = Attempts(None, "host", None, None, 60.0, Patience(3.0))  # pyright: ignore[reportArgumentType]
    meeting.store = dist.HashStore()
    members = Members([0, 1, 2], ranks, meeting, lambda: ("127.0.0.1", 1, None))
    try:
        while members._voter is None:
            members._thread.join(0.01)
        monkeypatch.setattr(Members, "_stop", stop_late)
        os.kill(ranks[1].process.pid, signal.SIGKILL)
        assert ranks[1]._over.wait(60.0)
        assert members.takes(ranks[1]) and members.takes(ranks[2]) is (how == "KILL")
        assert [each.uid for each in members._voter.record.members] == [0]
    finally:
        members.close()
        os.kill(ranks[0].process.pid, signal.SIGKILL)
        assert ranks[0]._over.wait(60.0)


@linux
def test_who_has_come_to_its_end_is_missed_once_all_others_have_stopped() -> None:
    said = f"os.pwrite(notes, b'1it missed rank 1. Look', 0); os.pwrite(notes, b'%020d' % 1, {STOPPED}); "
    code = f"import os, signal; notes = os.open(os.environ[{FILE!r}], os.O_RDWR); "
    code += "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); "
    ends = f"os.pwrite(notes, b'1', {ELASTIC}); signal.pause()"
    commands = [[sys.executable, "-c", f"{code}{each}{ends}"] for each in (said, "")]
    ranks = [Worker(number, each, dict(os.environ), (Outlet(), Outlet())) for number, each in enumerate(commands)]
    watch(ranks)
    deadline = time.monotonic() + 60.0
    while not all(rank.is_elastic for rank in ranks):
        assert time.monotonic() < deadline
    meeting = Attempts(None, "host", None, None, 60.0, Patience(3.0))  # pyright: ignore[reportArgumentType]
    meeting.store = dist.HashStore()
    members = Members([0, 1], ranks, meeting, lambda: ("127.0.0.1", 1, None))
    try:
        while members._voter is None:
            members._thread.join(0.01)
        assert members.standing() == (-1, "it missed rank 1")
        ranks[1].send(signal.SIGTERM)
        assert ranks[1]._over.wait(60.0) and members.standing() == (0, "it missed rank 1")
    finally:
        members.close()
        for rank in ranks:
            rank.send(signal.SIGKILL)


def test_records_and_places_are_read_as_they_were_written() -> None:
    members = tuple(Member(uid, uid // 2, uid % 2) for uid in (0, 2, 3, 5))
    record = Membership(3, members, "10.0.0.1", 29501, 6)
    message = Message("PROMISE", 1, 0, 4, Ballot(2, 0), members, record, Ballot(1, 1), "h", 7, frozenset({2}), members)
    assert Message.from_json(message.to_json()) == message
    place = record.place(3)
    assert (place.rank, place.world, place.local_world) == (2, 4, 2)
    assert EpochPlace.from_text(place.to_text()) == place
    assert EpochPlace.from_text(place.to_text()[:-1]) is None and EpochPlace.from_text("") is None


def test_a_record_is_as_long_as_what_has_happened_and_not_as_many_ranks_as_there_are() -> None:
    members = [Member(uid, uid // 8, uid % 8) for uid in range(10000) if uid // 8 != 7 and uid != 100]
    members.insert(100, Member(10001, 12, 8))
    record = Membership(1, tuple(members), "h", 1, 10000)
    assert len(record.to_json()) < 250 and Membership.from_json(record.to_json()) == record


def said(kind: str, source: int, target: int) -> Message:
    return Message(kind, source, target, 1)


def test_what_is_said_to_many_is_written_once_and_read_by_those_that_it_is_for() -> None:
    store = dist.HashStore()
    mails = [Mail(store, node) for node in range(5)]
    before = store.num_keys()
    mails[0].send([said("PREPARE", 0, node) for node in (1, 2, 4)])
    assert store.num_keys() == before + 1
    mails[3].send([said("DECIDED", 3, node) for node in (0, 1)])  # into the next place, as it has not read the first
    assert [[each.kind for each in mail.read()] for mail in mails] == [
        ["DECIDED"],
        ["PREPARE", "DECIDED"],
        ["PREPARE"],
        [],
        ["PREPARE"],
    ]
    assert not any(mail.read() for mail in mails)


def test_who_is_gone_amid_its_words_holds_up_nobody() -> None:
    store = dist.HashStore()
    mails = [Mail(store, node) for node in range(3)]
    number = store.add(f"{TO}/0", 1)  # counted, and not written
    mails[1].send([said("CALL", 1, 0)])
    assert mails[0].read() == [said("CALL", 1, 0)] and mails[0].read() == []
    store.set(f"{TO}/0/{number}", said("PROMISE", 2, 0).to_json())  # it was only slow
    assert mails[0].read() == [said("PROMISE", 2, 0)]
    store.set(f"{ALL}/1", json.dumps([2, 1, [[0, 2]], said("PREPARE", 2, 0).to_json()]))  # written, and not counted
    mails[1].send([said("DECIDED", 1, node) for node in (0, 2)])
    assert [each.kind for each in mails[0].read()] == ["PREPARE", "DECIDED"] and mails[0].read() == []


# -- what is left


def index_of(step: int, *ranges: tuple[int, int]) -> Index:
    """Of a rank that has these elements of a parameter of 8."""
    pieces = [Piece("w", state, "element", "F32", (b - a,), a, b) for a, b in ranges for state in ("weight", "exp_avg")]
    return Index(step=step, parameters=[Parameter("w", (8,), "F32")], pieces=pieces)


def test_the_newest_step_that_is_whole_is_taken() -> None:
    whole, left, right = (0, 8), (0, 4), (4, 8)
    assert covering([index_of(3, whole), index_of(4, whole), index_of(4, whole)]) == [1]
    assert covering([index_of(3, left), index_of(3, right), index_of(4, left)]) == [0, 1]
    assert covering([index_of(4, right), index_of(3, whole), index_of(4, left)]) == [0, 2]
    assert covering([index_of(4, (0, 5)), index_of(4, right)]) == [0, 1]
    assert covering([index_of(4, left), index_of(3, left)]) == [] == covering([index_of(4)])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def test_states_amid_an_update_are_not_taken() -> None:
    with closing(sf.Engine(nn.Linear(4, 4), optimizer=adam, layout="ddp")) as engine:
        engine.sharded.run.spoil("step 1 ended half-way")
        held = Held(engine.sharded, 0)
        try:
            with pytest.raises(StepError, match="is not whole"), held.together(lambda _, text: [text], 0):
                pass
        finally:
            held.drop()


def test_what_is_held_is_what_an_engine_had() -> None:
    with closing(sf.Engine(nn.Linear(4, 4), optimizer=adam, layout="ddp")) as engine:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        held, weights = Held(engine.sharded, 0), engine.state_dict()
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        with held.together(lambda _, text: [text], 0) as folder:
            engine.load(folder)
        held.drop()
        assert engine.steps == 1
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())


def test_of_two_steps_that_a_rank_holds_the_newer_is_taken_where_all_have_it() -> None:
    left, right, whole = (0, 4), (4, 8), (0, 8)
    doubts = [index_of(3, whole), index_of(4, whole)]
    assert covering([*doubts, index_of(4, right)]) == [1]  # the other has come through the vote
    assert covering([*doubts[:1], index_of(3, right)]) == [0]
    assert covering([index_of(3, left), index_of(4, left), index_of(3, right)]) == [0, 2]


def test_a_step_in_doubt_is_held_beside_the_one_before() -> None:
    with closing(sf.Engine(nn.Linear(4, 4), optimizer=adam, layout="ddp")) as engine:
        held = Held(engine.sharded, 0)
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        held.add(engine.sharded)
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        with held.together(lambda _, text: [text], 0) as folder:
            engine.load(folder)
        held.drop()
        assert engine.steps == 1
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())


def refused(ranks: int) -> str:
    with pytest.raises(ConfigError) as told:
        sf.ElasticRun(lambda _: sf.Engine(nn.Linear(4, 4), optimizer=adam, layout="zero3"))
    return str(told.value)


def test_what_would_be_lost_is_refused(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shardfold run" in ranks.run(refused, 2, world_size=2)[0]  # another launcher
    for layout, alone in (("zero3", True), ("zero1", True), ("ddp", False), ("hsdp", True)):
        assert all(ranks.run(is_once_only, layout, world_size=2)) is alone


def is_once_only(layout: str) -> bool:
    with closing(sf.Engine(nn.Linear(4, 4), optimizer=adam, layout=layout)) as engine:
        return bool(once_only(engine.sharded))


def test_nobody_sends_first_values_where_states_come(ranks: Ranks) -> None:
    assert ranks.run(first_values, world_size=2) == [[0.0, 0.0], [1.0, 0.0]]


def first_values() -> list[float]:
    """A weight that is the rank's number at first, in an engine whose states come, and in one that is made then."""
    found: list[float] = []
    for around in (states_come(), nullcontext()):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, dist.get_rank())
        with around, closing(sf.Engine(model, optimizer=adam, layout="ddp")) as engine:
            found.append(engine.state_dict()["weight"].item())
    return found


def test_what_cannot_go_on_is_refused_on_one_rank() -> None:
    galore = partial(torch.optim.Adagrad, lr=0.1)
    with pytest.raises(ConfigError, match="element by element"):
        sf.ElasticRun(lambda _: sf.Engine(nn.Linear(4, 4), layout="zero2", optimizer=galore))
    with pytest.raises(ConfigError, match="it has to give an Engine"):
        sf.ElasticRun(lambda ranks: ranks)  # pyright: ignore
    with pytest.raises(ConfigError, match="builds a model"):
        sf.ElasticRun(3)  # pyright: ignore


def test_what_fails_on_one_rank_alone_raises_as_it_is() -> None:
    run = sf.ElasticRun(lambda _: sf.Engine(nn.Linear(4, 4), layout="ddp", optimizer=adam))
    with closing(run), pytest.raises(CheckpointError, match="no checkpoint"), run.attempt() as engine:
        engine.load("nowhere")


# -- ranks that are killed


def hold(ranks: Ranks, plans: list[Plan], place: Path) -> None:
    """On a warm process, whose launchers and ranks are forks of it."""
    (wrong,) = ranks.run(held, plans, str(place), world_size=1, distributed=False, timeout=60.0 * len(plans) + 120)
    assert not wrong, "\n".join(wrong)


@linux
def test_survivors_go_on_as_plain_pytorch_does(ranks: Ranks, tmp_path: Path) -> None:
    """Also where a rank does not hear that all have come to the end of an evaluation, of which each has another number
    of batches, or of a save for which one of them finds no room, or dies in one."""
    amid = Plan("hsdp", 4, kills=((2, 4, 0.0),), wholes=True, at="amid")
    hold(ranks, [Plan(wholes=True, at="whole", deaf=2, full=True), amid], tmp_path)


@linux
@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "zero1", "zero3"])
@pytest.mark.parametrize("step", [4, 5])
def test_ranks_die_in_saves_that_fail_or_do_not(layout: str, step: int, ranks: Ranks, tmp_path: Path) -> None:
    survive = None if layout in ("ddp", "hsdp") else "rank"
    plan = Plan(layout, 4, kills=((2, step, 0.0),), wholes=True, full=True, survive=survive)
    drawn = [replace(plan, kills=((3, step, random.Random(seed).uniform(0, 60)),)) for seed in range(3)]
    hold(ranks, [replace(plan, at="amid"), replace(plan, at="whole"), *drawn], tmp_path)


def drawn(seed: int, layout: str, ranks: int) -> Plan:
    """One rank after the other is killed at any moment; under hsdp one, as two may have the same part, and each behind
    the recovery from the one before."""
    dice = random.Random(seed)
    order = dice.sample(range(ranks), 1 if layout == "hsdp" else ranks - 1)
    kills = tuple((uid, 3 * (n + 1), dice.uniform(0.0, 20.0)) for n, uid in enumerate(order))
    return Plan(layout, ranks, 3 * (ranks + 2), kills, rest=0.002, wholes=True)


@linux
@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_killed_at_drawn_moments(ranks: Ranks, tmp_path: Path, first: int) -> None:
    plans = [drawn(n, "hsdp" if n % 2 else "ddp", 4 if n % 2 else 3) for n in range(first, first + 10)]
    hold(ranks, plans, tmp_path)


@linux
def test_a_dead_rank_s_part_comes_from_the_copy_of_it(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Plan("zero1", 3, 9, ((0, 4, 0.0),), survive="rank", at="UPDATE 1", doubts=1)], tmp_path)


AT = ("LOG 1 [intra] fp64", "WAIT 1 log", "VOTE", "UPDATE 0", "UPDATE 1", "MIRROR 0", "MIRROR 2")


@linux
@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "fsdp2"])
def test_killed_in_front_of_each_operation_of_a_step(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Another rank each time; and so that the next one, which holds its copy, does not hear what came of the vote."""
    plans = [Plan(layout, 3, 10, ((n % 3, 4, 0.0),), survive="rank", at=at) for n, at in enumerate(AT)]
    doubts = [replace(plan, doubts=(plan.kills[0][0] + 1) % 3) for plan in plans if plan.at in AT[3:]]
    hold(ranks, [*plans, *doubts], tmp_path)


@linux
@pytest.mark.soak
def test_nobody_updates_before_all_have_come_to_the_vote(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over connections a log is between two ranks: one that waits for none of the dead rank's would go on."""
    monkeypatch.setenv("SHARDFOLD_NEAR", "0")
    hold(ranks, [Plan("zero1", 4, 9, ((0, 4, 0.0),), survive="rank", at=AT[0])], tmp_path)


@linux
@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "hpz"])
def test_killed_at_drawn_moments_with_copies(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    plans = [replace(drawn(n, layout, 3 + n % 2), survive="rank") for n in range(10)]
    hold(ranks, plans, tmp_path)


FILED = "optimizer=disk,grads=host"
SLOWER = [("offload", ""), ("infinity", ""), ("zero3", FILED), ("zero2", "moments=disk"), ("zero3", "")]


def slower(number: int, layout: str, offload: str) -> Plan:
    """Of states in host memory and on disk, or of what is frozen."""
    frozen = layout in ("zero3", "infinity")
    return replace(drawn(number, layout, 3 + number % 2), survive="rank", offload=offload, frozen=frozen)


@linux
@pytest.mark.soak
@pytest.mark.parametrize(("layout", "offload"), SLOWER)
def test_killed_with_copies_in_slower_tiers(ranks: Ranks, tmp_path: Path, layout: str, offload: str) -> None:
    hold(ranks, [slower(number, layout, offload) for number in range(8)], tmp_path)


TIERED = (
    "STORE 1 log @host",
    "VOTE",
    "FETCH 2 copies @disk",
    "UPDATE 1 @host",
    "MIRROR 1 @host",
    "STORE 0 copies @disk",
)


@linux
@pytest.mark.soak
def test_killed_in_front_of_each_operation_of_a_step_on_disk(ranks: Ranks, tmp_path: Path) -> None:
    """As above."""
    made = enumerate(TIERED)
    plans = [Plan("zero2", 3, 10, ((n % 3, 4, 0.0),), survive="rank", at=at, offload=FILED) for n, at in made]
    doubts = [replace(plan, doubts=(plan.kills[0][0] + 1) % 3) for plan in plans[2:]]
    hold(ranks, [*plans, *doubts], tmp_path)


@linux
@pytest.mark.soak
def test_copies_on_another_host_outlive_one(ranks: Ranks, tmp_path: Path) -> None:
    plans = [
        Plan("zero3", 4, 12, ((3, 4, 0.0),), hosts=2, survive="host"),
        Plan("zero2", 3, 12, ((-1, 4, 0.0),), hosts=3, patience=3.0, survive="host"),
    ]
    hold(ranks, plans, tmp_path)


@linux
@pytest.mark.soak
def test_three_hundred_steps_while_ranks_become_fewer(ranks: Ranks, tmp_path: Path) -> None:
    dice = random.Random(5)
    kills = [(uid, 40 * (n + 1) + dice.randrange(20), dice.uniform(0.0, 20.0)) for n, uid in enumerate((3, 0, 5, 1, 4))]
    hold(ranks, [Plan("ddp", 6, 300, tuple(kills), accumulate=2)], tmp_path)


@linux
@pytest.mark.soak
def test_what_one_rank_fails_in_while_others_go_on_in_it_ends_the_run(ranks: Ranks, tmp_path: Path) -> None:
    plan = Plan("zero3", 3, 4, (), wholes=True, alone=2, survive="rank", patience=2.0)
    ((came, _),) = ranks.run(judged, plan, str(tmp_path), world_size=1, distributed=False, timeout=180)
    said = "there is no checkpoint .*nowhere; run.whole.. failed so on this rank, while others went on in it; so rank 0"
    assert came.status == [1] and re.match(f"Error: {said}", came.err.splitlines()[-1]), came


@linux
@pytest.mark.soak
def test_a_sample_that_kills_whoever_reads_it_ends_the_run(ranks: Ranks, tmp_path: Path) -> None:
    plan = Plan("ddp", 5, 12, (), deadly=plain(replace(Plan(), ranks=5, steps=3)).samples[2][7])
    ((came, _),) = ranks.run(judged, plan, str(tmp_path), world_size=1, distributed=False, timeout=180)
    said = "killed by SIGKILL, RSS .*, and 3 attempts in a row at step 3 ended because a rank was gone"
    last = came.err.splitlines()[-1]
    assert came.status != [0] and re.match(f"Error: rank . on host .*: {said}", last), came
    assert "20 samples from position 40 of epoch 0" in last


@linux
@pytest.mark.soak
def test_a_second_death_amid_a_recovery(ranks: Ranks, tmp_path: Path) -> None:
    plans = [Plan("ddp", 4, 12, ((1, 4, 0.0), (2, 4, later))) for later in (5.0, 20.0, 60.0, 120.0, 200.0)]
    hold(ranks, plans, tmp_path)


@linux
@pytest.mark.soak
def test_ranks_of_several_launchers(ranks: Ranks, tmp_path: Path) -> None:
    plans = [Plan("ddp", 4, 12, ((3, 4, 0.0),), hosts=2), Plan("ddp", 3, 12, ((2, 4, 0.0),), hosts=3)]
    hold(ranks, plans, tmp_path)


@linux
@pytest.mark.soak
def test_a_majority_of_launchers_goes_on_without_one(ranks: Ranks, tmp_path: Path) -> None:
    plans = [Plan("ddp", 3, 12, ((-1 - node, 4, 0.0),), hosts=3, patience=3.0) for node in range(3)]
    hold(ranks, plans, tmp_path)


@linux
@pytest.mark.soak
def test_two_launchers_of_five_die_each_with_the_store(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Plan("ddp", 5, 16, ((-1, 4, 0.0), (-2, 4, 2000.0)), rest=0.3, hosts=5, patience=3.0)], tmp_path)


# -- ranks that take the places of others


class Anybody:
    """Members of whom the first so many ranks have a place."""

    def __init__(self) -> None:
        self.new: list[int] = []

    def are_elastic(self) -> bool:
        return True

    def add(self, uid: int, worker: Any) -> None:
        self.new.append(uid)

    def waits(self, worker: Any) -> bool:
        return worker.waits


def test_as_many_wait_as_shall() -> None:
    """Of node 1 of 2 with two ranks, one that waits, and two that may be started."""
    places, members, said, started = [Place(n, 2 + n, 0, 4, 4) for n in range(2)], Anybody(), list[str](), list[Any]()
    ranks: Any = [SimpleNamespace(returncode=None) for _ in places]

    def start(place: Any) -> Any:
        started.append(SimpleNamespace(local_rank=place.local_rank, returncode=None, why="", waits=True))
        return started[-1]

    spares, among = Spares(1, 2, places, 1, 2, start, said.append), cast(Any, members)
    spares.keep(ranks, among)
    spares.keep(ranks, among)
    assert members.new == [5] and not spares.come_in(among)
    ranks[0].returncode = -9
    spares.keep(ranks, among)
    assert members.new == [5, 7]  # for the rank that was killed
    started[0].waits = False
    assert spares.come_in(among) == [started[0]] and not spares.come_in(among)
    started[1].returncode = -9
    spares.keep([*ranks, started[0]], among)
    spares.keep([*ranks, started[0]], among)
    assert said == ["shardfold run: spare 7 was killed by SIGKILL before it was needed; the ranks go on."]
    assert members.new == [5, 7, 9]
    started[2].returncode = 1
    spares.keep([*ranks, started[0]], among)
    assert len(said) == 2 and members.new == [5, 7, 9]


@linux
def test_a_spare_takes_the_place_of_a_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Of two that wait, and the other one ends well."""
    hold(ranks, [Plan("zero1", 3, 10, ((1, 4, 0.0),), survive="rank", spares=2)], tmp_path)


STRANGE = {
    "layout": Plan("zero1", 3, 12, survive="rank", spares=1),
    "mesh": Plan("hsdp", 3, 12, spares=1),
    "model": Plan("ddp", 3, 12, width=8, spares=1),
    "precision": Plan("ddp", 3, 12, exact=True, spares=1),
    "batch": Plan("ddp", 2, 12, spares=1),
}


@linux
@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=[pytest.mark.soak] * (each != "layout")) for each in STRANGE]
)
def test_a_spare_with_other_settings_is_refused_and_the_others_go_on(ranks: Ranks, tmp_path: Path, what: str) -> None:
    hold(ranks, [Plan(kills=((1, 4, 0.0),), rest=0.02, spares=1, other=STRANGE[what])], tmp_path)


@linux
def test_a_rank_joins_between_two_steps(ranks: Ranks, tmp_path: Path) -> None:
    """Of one that is left, and of two."""
    hold(ranks, [Plan(ranks=n, steps=20, kills=((0, 4, 0.0),), rest=0.02, replace=1) for n in (2, 3)], tmp_path)


@linux
@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "zero1", "zero2", "zero3", "fsdp2", "hpz"])
@pytest.mark.parametrize("spares", [0, 1])
def test_four_become_three_and_four_again(ranks: Ranks, tmp_path: Path, layout: str, spares: int) -> None:
    hold(ranks, [changing(random.Random(0), layout, 4, 3, spares)], tmp_path)


@linux
@pytest.mark.soak
def test_three_hundred_steps_with_thirty_changes(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [changing(random.Random(7), "zero1", 4, 15, every=19)], tmp_path)


@linux
@pytest.mark.soak
def test_one_dies_while_another_joins(ranks: Ranks, tmp_path: Path) -> None:
    plans = [
        *(
            Plan("zero1", 3, 20, ((1, 4, 0.0), (3, 4, later)), survive="rank", rest=0.02, spares=1, replace=3)
            for later in (0.0, 30.0, 60.0, 100.0, 150.0, 250.0)
        ),
        *(Plan("ddp", 3, 24, ((0, 4, 0.0), (1, 4, later)), rest=0.02, replace=2) for later in (50.0, 150.0, 300.0)),
    ]
    hold(ranks, plans, tmp_path)


@linux
@pytest.mark.soak
def test_spares_of_several_launchers(ranks: Ranks, tmp_path: Path) -> None:
    plans = [
        Plan("ddp", 4, 24, ((3, 4, 0.0), (4, 6, 0.0), (5, 4, later)), rest=0.02, hosts=2, spares=1, replace=1)
        for later in (0.0, 50.0, 120.0, 300.0)
    ]
    plans += [Plan("ddp", 3, 30, ((uid, 4, 0.0),), rest=0.02, hosts=3, replace=1) for uid in range(3)]
    hold(ranks, [*plans, Plan("zero3", 4, 20, ((3, 4, 0.0),), rest=0.02, hosts=2, survive="host", replace=1)], tmp_path)


@linux
@pytest.mark.soak
def test_a_spare_that_dies_is_not_missed(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Plan(steps=12, kills=((3, 2, 0.0),), rest=0.02, spares=1)], tmp_path)
