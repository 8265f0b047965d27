"""Groups that are runs of their own: one dies, the others go on, and it comes back. All come to what plain loops over
as many models do, given who was there when."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import shardfold as sf
from shardfold.errors import CollectiveError, ConfigError
from shardfold.launch import die_with_parent, free_port
from shardfold.optim.present_groups import OuterMeeting
from shardfold.testing import Ranks
from tests.training.test_quorum import DILOCO, SGD, batch, came_to, loss_of, model

SAVED, DIES, BACK, MOST = 7, 8, 3, 20000
"""Steps behind which the run saves that dies, and behind which it dies; outer steps that it takes part in behind that;
steps that the others do at most until then."""
LOST = 2
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def outer_of(number: int, count: int, at: str) -> sf.Outer:
    runs = sf.OuterRuns(number=number, count=count, at=at)
    return sf.Outer(**{**DILOCO, "deadline": 20.0, "runs": runs})


def die_amid_swaps(engine: sf.Engine, count: int) -> None:
    """Its process is killed where it would send for the so manieth time from now on."""
    assert engine._rounds is not None and engine._rounds.weights.pairs is not None
    pairs, left = engine._rounds.weights.pairs, [count]
    swap = pairs.swap

    def counted(*given: Any) -> int:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return swap(*given)

    pairs.swap = counted


def train(layout: str, number: int, each: int, at: str, folder: Path, life: int, amid: int) -> None:
    """A rank of a run; writes what it came to, outer step by outer step."""
    torch.set_num_threads(1)
    found, path = folder / f"{number}.{life}.{os.environ['RANK']}", folder / "checkpoint"
    table = sf.PRESETS[layout].with_outer(outer_of(number, 3, at))
    engine = sf.Engine(model(), optimizer=SGD, layout=table, parallel={"inter": 1, "intra": each})
    store = TCPStore("127.0.0.1", int(at.rpartition(":")[2]), is_master=False)
    rounds, met, done = engine._rounds, list[tuple[int, int, OuterMeeting]](), 0
    assert rounds is not None and rounds.quorum is not None
    quorum, settled = rounds.quorum, rounds.quorum.settled

    def noted(meeting: OuterMeeting, *, whole: bool) -> bool:
        if taken := settled(meeting, whole=whole):
            met.append((quorum.version, done, meeting))
            if len(meeting.groups) == 2:
                store.set("alone", "1")
            found.write_bytes(pickle.dumps((met, done, None)))
        return taken

    quorum.settled = noted  # pyright: ignore[reportAttributeAccessIssue]
    if life:
        engine.load(path)
        done = engine.steps
    while done < MOST and engine.max_over_ranks([float(len(met) < BACK if life else not store.check(["over"]))])[0]:
        x = torch.cat([batch(number, each * done + rank) for rank in range(each)])
        mine = x[4 * engine.data_rank : 4 * engine.data_rank + 4]
        engine.backward(loss_of(engine, mine))
        done += 1
        if number == LOST and not life and done == DIES + 1 and amid:
            die_amid_swaps(engine, amid)
        engine.step(tokens=10.0 + number)
        time.sleep(0.005)  # a pace, at which those that wait leave cores to the one that starts again
        if number == LOST and not life and done == SAVED:
            engine.save(path, wait=True)
        if number == LOST and not life and done == DIES and not amid:
            os.kill(os.getpid(), signal.SIGKILL)
    if life:
        store.set("over", "1")
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    found.write_bytes(pickle.dumps((met, done, state)))
    engine.close()


def lives(layout: str, each: int, at: str, ports: list[list[int]], folder: str, amid: int) -> list[int]:
    """How the processes of a rank ended, each a fork of this one; a run that has died is started again once."""
    number, rank = divmod(int(os.environ["RANK"]), each)
    ends: list[int] = []
    for life in range(1 + (number == LOST)):
        if life:  # the others have gone on
            TCPStore("127.0.0.1", int(at.rpartition(":")[2]), is_master=False).wait(["alone"], timedelta(seconds=60))
        if not (pid := os.fork()):
            code = 1
            try:
                die_with_parent()
                mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": each, "LOCAL_WORLD_SIZE": each}
                os.environ.update({name: str(value) for name, value in mine.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[number][life]))
                train(layout, number, each, at, Path(folder), life, amid)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return ends


class Loop:
    """Plain models, with the same outer steps."""

    def __init__(self, each: int) -> None:
        self.each, self.models = each, [model() for _ in range(3)]
        self.optimizers, self.done = [SGD(one.parameters()) for one in self.models], [0] * 3
        self.shared = [[p.detach().clone() for p in one.parameters()] for one in self.models]
        self.momentum = [[torch.zeros_like(p) for p in one] for one in self.shared]
        self.saved: tuple[Any, ...] = ()

    def train(self, group: int, steps: int) -> None:
        while self.done[group] < steps:
            if group == LOST and self.done[group] == SAVED and not self.saved:
                self.save()
            x = torch.cat([batch(group, self.each * self.done[group] + rank) for rank in range(self.each)])
            self.optimizers[group].zero_grad()
            loss_of(self.models[group], x).backward()
            self.optimizers[group].step()
            self.done[group] += 1

    def save(self) -> None:
        one, optimizer = self.models[LOST], self.optimizers[LOST]
        copies = ([each.clone() for each in kept[LOST]] for kept in (self.shared, self.momentum))
        self.saved = pickle.dumps((one.state_dict(), optimizer.state_dict())), *copies

    def load(self) -> None:
        self.train(LOST, DIES)
        text, self.shared[LOST], self.momentum[LOST] = self.saved
        weights, moments = pickle.loads(text)
        self.models[LOST].load_state_dict(weights)
        self.optimizers[LOST].load_state_dict(moments)
        self.done[LOST] = SAVED


def came_of(folder: Path, each: int) -> tuple[list[Any], list[Any]]:
    """What ranks have written: of three runs, the lost one's second life; and of its first."""
    found = [pickle.loads((folder / f"{number}.{number == LOST:d}.0").read_bytes()) for number in range(3)]
    first = pickle.loads((folder / f"{LOST}.0.0").read_bytes())
    for number in range(3):
        for rank in range(1, each):
            met, done, _ = pickle.loads((folder / f"{number}.{number == LOST:d}.{rank}").read_bytes())
            assert (met, done) == found[number][:2]
    return found, first


@linux
@pytest.mark.parametrize(
    ("layout", "each", "amid"),
    [
        ("ddp", 1, 2),
        pytest.param("ddp", 1, 0, marks=pytest.mark.soak),
        pytest.param("ddp", 1, 4, marks=pytest.mark.soak),
        pytest.param("zero3", 2, 0, marks=pytest.mark.soak),
        pytest.param("zero1", 2, 3, marks=pytest.mark.soak),
    ],
)
def test_a_run_dies_and_comes_back(ranks: Ranks, tmp_path: Path, layout: str, each: int, amid: int) -> None:
    """Between two steps, or (``amid``) where it would send for the so manieth time in an outer step."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = [[free_port(), free_port()] for _ in range(3)]
    at = f"127.0.0.1:{server.port}"
    with nullcontext(ranks) if each == 1 else Ranks(3 * each) as pool:
        more = {"world_size": 3 * each, "timeout": 120.0, "distributed": False}
        ends = pool.run(lives, layout, each, at, ports, str(tmp_path), amid, **more)
    assert ends == [[0]] * 2 * each + [[-signal.SIGKILL, 0]] * each
    found, (first, _, _) = came_of(tmp_path, each)
    loop, outer = Loop(each), sf.Outer(**DILOCO)
    of = {(version, number): (done, met) for number in range(3) for version, done, met in found[number][0]}
    early = {version: (done, met) for version, done, met in first}
    assert {done for done, _ in early.values()} <= {*range(DIES + 1)}
    again = min(version for version, number in of if number == LOST)
    for version in sorted({version for version, _ in of} | set(early)):
        if version == again:
            loop.load()
        there = {number: of[version, number] for number in range(3) if (version, number) in of}
        there |= {LOST: early[version]} if version in early else {}
        (meeting,) = {met for _, met in there.values()}
        assert set(meeting.groups) == set(there)
        for number, (done, _) in there.items():
            loop.train(number, done)
        came_to(loop.models, loop.shared, loop.momentum, meeting, outer)
        first, *others = (loop.shared[number] for number in meeting.groups)
        assert all(torch.equal(x, y) for one in others for x, y in zip(first, one, strict=True))
    assert any(len(met.groups) == 2 for _, met in of.values())
    assert sum(number == LOST for _, number in of) == BACK
    for number in range(3):
        loop.train(number, found[number][1])
        for name, value in loop.models[number].state_dict().items():
            torch.testing.assert_close(found[number][2][name], value, rtol=1e-9, atol=1e-9)


def two_sets(at: str) -> list[tuple[int, OuterMeeting | None, dict[str, torch.Tensor]]]:
    """Of two sets of runs, one behind the other on the same store: what each came to in its first outer step."""
    torch.set_num_threads(1)
    number, found = int(os.environ["RANK"]), list[tuple[int, OuterMeeting | None, dict[str, torch.Tensor]]]()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    store = TCPStore("127.0.0.1", int(at.rpartition(":")[2]), is_master=False)
    for which in range(2):
        table = sf.PRESETS["ddp"].with_outer(outer_of(number, 3, at))
        engine = sf.Engine(model(), optimizer=SGD, layout=table, parallel={"inter": 1, "intra": 1})
        assert engine._rounds is not None and engine._rounds.quorum is not None
        store.set(f"made/{which}/{number}", "")
        store.wait([f"made/{which}/{each}" for each in range(3)])  # all begin together
        for step in range(DILOCO["every"]):
            engine.backward(loss_of(engine, batch(10 * which + number, step)))
            engine.step(tokens=10.0 + number)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        present = engine._rounds.weights.present
        assert present is not None
        found.append((engine.stats().put_off, present.meeting, state))
        engine.close()
    return found


def test_a_new_set_of_runs_begins_anew_on_a_used_store(ranks: Ranks) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = ranks.run(two_sets, f"127.0.0.1:{server.port}", world_size=3, timeout=60.0, distributed=False)
    for which, sets in enumerate(zip(*found, strict=True)):
        models, outer = [model() for _ in range(3)], sf.Outer(**DILOCO)
        shared = [[p.detach().clone() for p in one.parameters()] for one in models]
        for number, one in enumerate(models):
            optimizer = SGD(one.parameters())
            for step in range(DILOCO["every"]):
                optimizer.zero_grad()
                loss_of(one, batch(10 * which + number, step)).backward()
                optimizer.step()
        meeting = sets[0][1]
        assert meeting is not None and meeting.groups == (0, 1, 2) and not meeting.behind
        came_to(models, shared, [[torch.zeros_like(p) for p in one] for one in shared], meeting, outer)
        for one, (put_off, met, state) in zip(models, sets, strict=True):
            assert met == meeting and not put_off
            for name, value in one.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-11)


# -- what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"number": 3}, "which of 3 runs"),
        ({"count": 1}, "2 or more"),
        ({"at": "10.0.0.1"}, "HOST:PORT"),
    ],
)
def test_what_no_run_can_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sf.OuterRuns(**{"number": 0, "count": 3, "at": "10.0.0.1:29600", **given})
    with pytest.raises(ConfigError, match="no quorum="):
        sf.Outer(every=3, runs=sf.OuterRuns(number=0, count=3, at="10.0.0.1:29600"))


def test_runs_that_do_not_go_together_are_told() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    make = partial(sf.Engine, optimizer=SGD, parallel={"inter": 1, "intra": 1})
    first = make(model(), layout=sf.PRESETS["ddp"].with_outer(outer_of(0, 3, f"127.0.0.1:{server.port}")))
    with pytest.raises(ConfigError, match="give all runs the same model"):
        make(model()[0], layout=sf.PRESETS["ddp"].with_outer(outer_of(1, 3, f"127.0.0.1:{server.port}")))
    first.close()


def groups_in_a_run() -> str:
    with pytest.raises(ConfigError) as told:
        table = sf.PRESETS["ddp"].with_outer(outer_of(0, 3, "127.0.0.1:1"))
        sf.Engine(model(), optimizer=SGD, layout=table, parallel={"inter": 2, "intra": 1})
    return str(told.value)


def test_groups_are_not_both_runs_and_ranks_of_one(ranks: Ranks) -> None:
    assert "has 2 ranks in this run" in ranks.run(groups_in_a_run, world_size=2)[0]


def test_a_store_that_is_not_there_is_named() -> None:
    runs = sf.OuterRuns(number=0, count=3, at=f"127.0.0.1:{free_port()}")
    table = sf.PRESETS["ddp"].with_outer(sf.Outer(**{**DILOCO, "runs": runs}))
    with pytest.raises(CollectiveError, match="nobody answers at 127"):
        sf.Engine(model(), optimizer=SGD, layout=table, parallel={"inter": 1, "intra": 1})
