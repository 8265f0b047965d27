"""Runs are started, stopped and gone on with, and never notice the board."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardfold as sf
from shardfold.launch.run_records import OwnRecord, note_end, read_records
from shardfold.tools.board._run_control import RunControl
from shardfold.tools.board.known_runs import KnownRuns
from shardfold.tools.observe.run_status import RunStatus
from shardfold.tools.recipes.train_config import TrainConfig
from shardfold.tools.serve.api_refusal import ApiRefusal
from tests.support.clusters import Sshd, lacks
from tests.tools.board.support import SAID, AskedBoard, Client, board_process, made_run, rows

LOOP = """
import sys, time
import shardfold as sf
with sf.observe.Run(sys.argv[1], config={"lr": 1}, steps=10**6) as run:
    for step in range(1, 10**6):
        run.log(step, loss=1.0 / step)
        time.sleep(0.01)
"""
SHORT = {"size": "tiny", "procs": "1", "eval_every": "0", "eval_windows": "8", "sample": "0"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some text to train on."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = " ".join(f"word{(number * each) % 97}" for each in range(400))
        (folder / f"{number}.txt").write_text(words)
    return folder


def kill_runs_below(folder: Path, command: str = "") -> None:
    """Those that a failed test has left, or those of a command."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            is_one = any(str(folder) in word for word in words) and (not command or command in words)
            if is_one and process.pid != os.getpid():
                process.kill()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    kill_runs_below(folder)


def seen(board: AskedBoard, state: str) -> dict[str, Any]:
    """The row of the only run, once it is at that."""
    until = time.monotonic() + 60
    while not ((found := board.get("/api/runs")["runs"]) and found[0]["state"] == state):
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found[0]


@pytest.mark.parametrize("act", ["stop", "stop-now"])
def test_a_loop_of_ones_own_is_stopped(act: str, runs: Path) -> None:
    """A run that no board started: as Ctrl-C stops it."""
    hears = "import signal\nsignal.signal(2, signal.default_int_handler)\n"  # it may be ignored by inheritance
    loop = subprocess.Popen([sys.executable, "-c", hears + LOOP, str(runs / "a")], stderr=subprocess.DEVNULL)
    found = seen(board := AskedBoard(runs), "training")
    assert found["can"] == ["stop", "stop-now"]
    reply = board.ask("POST", f"/api/runs/{found['id']}/{act}", body={})
    assert reply.status_code == 200 and reply.json()["said"], reply.text
    assert loop.wait(30) != 0
    row = board.get("/api/runs")["runs"][0]
    assert row["state"] == "stopped" and row["can"] == [], row
    again = board.ask("POST", f"/api/runs/{row['id']}/{act}", body={})
    assert again.status_code == 409 and "over" in again.json()["error"]["message"]


def test_what_is_left_counts_from_where_a_run_was_resumed(runs: Path) -> None:
    with sf.observe.Run(runs / "a", config={}, steps=1000) as run:
        for step in range(901, 911):
            run.write({"step": step, "seconds": (step - 900) * 2.0, "loss": 1.0})
        (row,) = AskedBoard(runs).get("/api/runs")["runs"]
        assert (row["step"], row["steps"], row["seconds_left"]) == (910, 1000, 180.0)


def test_a_run_that_is_killed_is_seen_as_dead(runs: Path) -> None:
    """By who has looked at it, also where it wrote nothing since."""
    saves = LOOP.replace("time.sleep(0.01)", "during = run.during('saving'); during.__enter__(); time.sleep(1000)")
    loop = subprocess.Popen([sys.executable, "-c", saves, str(runs / "a")])
    row = seen(board := AskedBoard(runs), "saving")
    assert board.get("/api/runs")["runs"][0]["state"] == "saving"
    loop.kill()
    loop.wait()
    for _ in range(2):
        dead = board.get("/api/runs")["runs"][0]
        assert (dead["state"], dead["is_over"], dead["id"]) == ("lost", True, row["id"]) and dead["why"]


def test_a_rank_is_at_what_its_process_is_at(runs: Path) -> None:
    """Not at what it said before it was killed; and a launcher ends with its run."""

    def states() -> list[str]:
        return [each["state"] for each in board.get(f"/api/runs/{board.id('a')}")["status"]]

    (runs / "a").mkdir()
    launcher, *ranks = [OwnRecord(runs / "a", rank, max(0, rank + 1)) for rank in (-1, 0, 1)]
    launcher.write(phase="starting")
    for each in ranks:
        each.write(phase="saving", step=3)
    board = AskedBoard(runs)
    assert states() == ["starting", "saving", "saving"]
    ranks[1].close()  # as the system does where a process is killed
    assert states() == ["starting", "saving", "lost"]
    note_end(runs / "a", "failed", 1, "it was killed by SIGKILL")
    launcher.close()
    ranks[0].close()
    assert states() == ["failed", "lost", "lost"]
    assert board.get("/api/runs")["runs"][0]["why"] == "rank 1: it was killed by SIGKILL"
    launcher, rank = OwnRecord(runs / "a", -1, 0), OwnRecord(runs / "a", 0, 1)
    launcher.write(phase="starting")
    rank.write(phase="done")
    launcher.close()
    rank.close()
    assert states() == ["done", "done"]
    rank = OwnRecord(runs / "a", 0, 1)
    rank.write(phase="training")
    rank.close()
    assert states() == ["lost"]


def test_what_does_not_hear_is_killed_and_said_to_be_stopped(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfold.tools.board._run_control.GONE", 0.2)
    deaf = "import signal\nfor number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
    loop = subprocess.Popen([sys.executable, "-c", deaf + LOOP, str(runs / "a")])
    row = seen(board := AskedBoard(runs), "training")
    assert board.ask("POST", f"/api/runs/{row['id']}/stop-now", body={}).status_code == 200
    assert loop.wait(10) == -signal.SIGKILL
    row = board.get("/api/runs")["runs"][0]
    assert row["state"] == "stopped" and "asked" in row["why"], row


def test_the_command_is_light_and_ends_by_a_signal(runs: Path) -> None:
    """No PyTorch, less than 80 MiB; what it was asked needs a worker, which ends with it."""
    with board_process(runs) as (process, url):
        client = Client(url)
        assert client.told("/api/runs")["runs"] == [] and len(client.told("/api/forms")["recipes"]) > 5
        own = psutil.Process(process.pid)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps and "numpy" not in maps and own.memory_info().rss < 80 * 2**20
        told = client.told("/api/check", {"recipe": "lm", "settings": {"steps": "x"}})
        assert told["errors"][0]["field"] == "steps"
        (worker,) = own.children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        psutil.wait_procs([worker], 10)
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_what_a_command_would_refuse_is_told_before_a_run_is_made(runs: Path) -> None:
    """And by the name of its field: a start, and the rest of a run that has done all its steps."""
    config = TrainConfig.load({"size": "tiny", "steps": 10, "save_every": 5}).model_dump(mode="json")
    made_run(runs / "a", config=config)
    (runs / "a" / "checkpoints").mkdir()
    (runs / "a" / "checkpoints" / "latest").write_text("step-000010")
    with board_process(runs) as (_, url):
        client = Client(url)
        run = client.told("/api/runs")["runs"][0]["id"]
        more = {"steps": "20"}
        for path, settings, status, field, words in (
            (f"runs/{run}/resume", {}, 409, "steps", "more than 10"),
            (f"runs/{run}/resume", {"steps": "10", "procs": "2"}, 409, "steps", "more than 10"),
            (f"runs/{run}/resume", {**more, "procs": "x"}, 400, "procs", "integer"),
            (f"runs/{run}/resume", {**more, "layout": "zero9"}, 400, "layout", "zero9"),
            ("start", {"steps": "many"}, 400, "steps", "integer"),
        ):
            reply = client.ask(f"/api/{path}", {"recipe": "lm", "settings": settings})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (status, field) and words in error["message"], error
            assert [each.name for each in runs.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("recipe", "template", "files", "chats"),
    [
        ("lm", None, {}, False),
        ("sft", None, {}, False),
        ("pt", "model", {"base/tokenizer_config.json": "{}"}, False),
        ("sft", "chatml", {}, True),
        ("sft", "model", {"base/tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ("sft", None, {"base/chat_template.jinja": "{{ messages }}"}, True),
        ("dpo", None, {"runs/a/adapter/chat_template.jinja": "{{ messages }}"}, True),
        ("reward", "chatml", {}, False),
    ],
)
def test_only_who_knows_conversations_is_chatted_with(
    recipe: str, template: str | None, files: dict[str, str], chats: bool, runs: Path
) -> None:
    """Whose template is named, or comes with a tokenizer; no model of bytes, and none that gives numbers."""
    text = {} if template is None else {"text": {"template": template}}
    made_run(runs / "a", config={"recipe": recipe, "model": str(runs.parent / "base"), **text})
    (runs / "a" / "checkpoints").mkdir()
    (runs / "a" / "checkpoints" / "latest").write_text("step-000010")
    for name, words in files.items():
        (path := runs.parent / name).parent.mkdir(exist_ok=True)
        path.write_text(words)
    can = AskedBoard(runs).get("/api/runs")["runs"][0]["can"]
    assert can == ["resume", "repeat", *["chat"] * chats]


def test_the_rest_of_a_run_is_called_after_it(runs: Path) -> None:
    control = RunControl(runs)
    assert control.rest_name(runs / "one") == "one-rest"
    for name in ("one-rest", "one-rest-2"):
        (runs / name).mkdir()
        assert control.rest_name(runs / "one") == control.rest_name(runs / name) != name
    assert control.rest_name(runs / "one-rest") == "one-rest-3"
    assert len(str(control.rest_name(runs / ("x" * 200)))) < 100 and control.rest_name(runs / "a b") is None


@pytest.mark.parametrize(("is_there", "words"), [(True, "called 'a' already"), (False, "too short")])
def test_who_starts_another_run_of_a_name_at_the_same_time_is_told_so(is_there: bool, words: str, runs: Path) -> None:
    """Not in the words of the command, which names an option that a page lacks."""
    if is_there:  # by now, as the name was free when it was asked for
        (runs / "a").mkdir()
    command = [sys.executable, "-c", "raise SystemExit('Error: too short')"]
    with pytest.raises(ApiRefusal, match=words):
        RunControl(runs)._begin(runs / "a", command, b"", is_here=True)


def test_a_plan_that_nobody_waits_for_ends(runs: Path) -> None:
    """Where who asked goes away."""
    board, ends = AskedBoard(runs), list[str]()
    app: Any = board.app

    async def answers(*given: Any) -> None:
        await app(*given)
        await asyncio.sleep(0)
        ends.append("answered")  # what goes on now ends with the loop

    async def plans(*_: Any, **__: Any) -> dict[str, Any]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        raise AssertionError

    board.app, app._plans.ask = answers, plans  # pyright: ignore[reportAttributeAccessIssue]
    reply = board.ask("POST", "/api/plan", body={"recipe": "lm", "settings": {}}, leaves=True)
    assert reply.status_code == 499 and ends == ["cancelled", "answered"]


@pytest.mark.soak
def test_a_cancelled_plan_measures_no_more_and_leaves_no_file(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(runs.parent / "cache"))
    monkeypatch.setenv("TMPDIR", str(runs.parent))
    with board_process(runs) as (process, url):
        client = Client(url)
        assert client.told("/api/check", {"recipe": "lm", "settings": {}})["measures"]
        body = json.dumps({"recipe": "lm", "settings": {}}).encode()
        with suppress(TimeoutError):
            asked = urllib.request.Request(url + "/api/plan", body, {**SAID, "Content-Type": "application/json"})
            urllib.request.urlopen(asked, timeout=15)
        board, until = psutil.Process(process.pid), time.monotonic() + 30
        while len(board.children(recursive=True)) > 1:  # the one that checks
            assert time.monotonic() < until, board.children(recursive=True)
            time.sleep(0.1)
        assert list((runs.parent / "cache" / "shardfold").iterdir()) == []
        assert not [each for each in runs.parent.iterdir() if each.name.startswith("tmp")]


def test_a_run_that_was_refused_is_no_run_and_its_sentence_is_told(runs: Path) -> None:
    """Whatever is asked of it, also a stop."""
    board = AskedBoard(runs)
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen([sys.executable, "-c", "print('Error: too short')"], stdout=printed)
        board.app._control._started[runs / "a"] = process, printed
        process.wait()
        run = KnownRuns.id_of(runs / "a")
        assert board.get("/api/runs")["runs"] == []
        asked = [("GET", f"/api/runs/{run}{path}", None) for path in ("", "/log", "/samples")]
        asked += [("POST", f"/api/runs/{run}/{act}", {}) for act in ("stop", "stop-now", "resume", "chat")]
        for method, path, body in asked:
            reply = board.ask(method, path, body=body)
            assert reply.status_code == 410 and reply.json()["error"]["message"] == "too short", (path, reply.text)


@pytest.mark.soak
def test_a_run_from_its_form_to_its_end(runs: Path, text: Path) -> None:
    """Start, watch, stop (it saves), resume on other ranks and another layout by another board, to the end."""
    settings = {**SHORT, "data": str(text), "steps": "400", "save_every": "25"}
    with board_process(runs) as (process, url):
        client = Client(url)
        run = client.told("/api/start", {"recipe": "lm", "settings": settings, "name": "one"})["id"]
        client.wait_for(run, lambda row: row["step"] >= 30)
        taken = client.ask("/api/start", {"recipe": "lm", "settings": settings, "name": "one"})
        assert taken.status_code == 400 and "name" in taken.json()["error"]["message"]
        early = client.ask(f"/api/runs/{run}/resume", {})
        assert early.status_code == 409 and "stop" in early.json()["error"]["message"]
        assert client.row(run)["can"] == ["stop", "stop-now"]
        client.told(f"/api/runs/{run}/stop", {})
        row = client.wait_for(run, lambda row: row["is_over"])
        assert row["state"] == "stopped" and row["step"] < 400 and row["can"] == ["resume", "repeat"]
        told = client.told(f"/api/runs/{run}")
        assert told["settings"] == {**{name: _read(value) for name, value in settings.items()}, "data": str(text)}
        assert told["checkpoints"] and told["memory"] and "interrupted" in told["summary"]
        assert "step" in client.told(f"/api/runs/{run}/log")["text"]
        process.kill()
    with board_process(runs) as (process, url):
        client = Client(url)
        assert client.row(run)["state"] == "stopped"
        rest = client.told(f"/api/runs/{run}/resume", {"settings": {"procs": "2", "layout": "zero1"}})["id"]
        process.kill()
    with board_process(runs) as (_, url):
        client = Client(url)
        row = client.wait_for(rest, lambda row: row["is_over"])
        assert (row["state"], row["step"], row["ranks"], row["layout"]) == ("done", 400, 2, "zero1"), row
        told = client.told(f"/api/differences?id={run}&id={rest}")["rows"]
        assert {each["key"]: each["values"] for each in told}["layout"] == ["zero3", "zero1"]
    first = {row["step"] for row in rows(runs / "one" / "metrics.jsonl")}
    last = {row["step"] for row in rows(runs / "one-rest" / "metrics.jsonl")}
    assert first | last == set(range(1, 401)) and len(first & last) == 0


def _read(value: str) -> Any:
    return int(value) if value.isdecimal() else value


@pytest.mark.soak
def test_a_run_on_two_ranks_is_ended_at_once(runs: Path, text: Path) -> None:
    settings = {**SHORT, "procs": "2", "data": str(text), "steps": "100000"}
    with board_process(runs) as (_, url):
        client = Client(url)
        run = client.told("/api/start", {"recipe": "lm", "settings": settings})["id"]
        client.wait_for(run, lambda row: row["step"] >= 3)
        ranks = [each["pid"] for each in client.told(f"/api/runs/{run}")["status"]]
        client.told(f"/api/runs/{run}/stop-now", {})
        row = client.wait_for(run, lambda row: row["is_over"], 10)
        assert row["state"] == "stopped", row
        until = time.monotonic() + 10
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in ranks):
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.soak
@pytest.mark.parametrize("procs", [1, 2])
def test_a_run_that_is_refused_leaves_no_folder(procs: int, runs: Path, tmp_path: Path) -> None:
    """By its settings, at once; or by its ranks, later: its sentence is told all the same."""
    (tmp_path / "short.txt").write_text("too short")
    with board_process(runs) as (_, url):
        client = Client(url)
        for settings, words in (({"steps": "x"}, "steps"), ({"data": str(tmp_path / "short.txt")}, "bytes")):
            given = {"recipe": "lm", "settings": {**SHORT, "procs": str(procs), **settings}, "name": "bad"}
            reply = client.ask("/api/start", given)
            if reply.status_code == 200:
                until = time.monotonic() + 60
                while (told := client.ask(f"/api/runs/{reply.json()['id']}")).status_code == 200:
                    assert time.monotonic() < until
                    time.sleep(0.1)
                assert told.status_code == 410
                reply = told
            assert words in reply.json()["error"]["message"], reply.text
            assert list(runs.iterdir()) == []


@pytest.mark.soak
@pytest.mark.parametrize("procs", [1, 2])
def test_a_board_that_is_killed_changes_no_bit_of_a_run(
    procs: int, tmp_path: Path, text: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times, each while the run goes on and the board is asked for it; the weights are those of a run that had
    none."""
    import torch
    from safetensors.torch import load_file

    from shardfold.checkpoint.folders import resolve

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SHARDFOLD_PATIENCE", "600")  # the run waits while the next board begins
    settings = {**SHORT, "procs": str(procs), "data": str(text)}

    def alone(steps: int) -> float:
        """Seconds of a step."""
        settings.update(steps=str(steps), save_every=str(steps))
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        out = tmp_path / f"alone-{steps}"
        command = [sys.executable, "-m", "shardfold", "train", *options, f"--out={out}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return rows(out / "metrics.jsonl")[-1]["seconds"] / steps

    step = alone(100)
    if (steps := int(20 * 0.3 / step)) > 100:  # so that it goes on for all of the twenty
        alone(steps)
    steps = max(100, steps)
    run, pids = "", list[int]()
    for _ in range(20):
        with board_process(runs) as (process, url):
            client = Client(url)
            if not run:
                run = client.told("/api/start", {"recipe": "lm", "settings": settings, "name": "one"})["id"]
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            before = client.row(run)["step"]
            row = client.wait_for(run, lambda row, before=before: row["step"] > before)
            assert client.told(f"/api/curves?id={run}&key=loss")["series"] and client.told(f"/api/runs/{run}")["status"]
            process.kill()
            assert row["state"] == "training"
            pids = sorted({each.pid for each in read_records(runs / "one")[0]})
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
    assert RunStatus.of(runs / "one").step < steps
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    until = time.monotonic() + 200
    while not (found := RunStatus.of(runs / "one")).is_over:
        assert time.monotonic() < until, found
        time.sleep(0.05)
    assert found.state == "done", found
    both = tmp_path / f"alone-{steps}", runs / "one"
    places = [resolve(each) for each in both]
    names = [sorted(each.name for each in place.glob("*.safetensors")) for place in places]
    assert names[0] == names[1] and names[0]
    for name in names[0]:
        first, second = (load_file(place / name) for place in places)
        # The generators of a process, which nothing here draws from, begin anywhere.
        states = [key for key in first if not key.startswith("rank/rank_state.rng.")]
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in states)
        assert any(key.startswith("weight/") for key in states)
    told = [
        [row["loss"] for row in rows(each / "metrics.jsonl")] for each in (tmp_path / f"alone-{steps}", runs / "one")
    ]
    assert told[0] == told[1] and len(told[0]) == steps


@pytest.mark.soak
def test_a_conversation_outlives_its_board(runs: Path, text: Path) -> None:
    settings = {**SHORT, "data": str(text), "steps": "20", "save_every": "20"}
    with board_process(runs) as (process, url):
        client = Client(url)
        run = client.told("/api/start", {"recipe": "lm", "settings": settings, "name": "one"})["id"]
        client.wait_for(run, lambda row: row["is_over"])
        first = client.told(f"/api/runs/{run}/chat", {})
        process.kill()
    with board_process(runs) as (_, url):
        client = Client(url)
        assert client.told(f"/api/runs/{run}")["chat"] == first == client.told(f"/api/runs/{run}/chat", {})
        body = json.dumps({"model": "one", "prompt": "word1 ", "max_tokens": 4}).encode()
        headers = {"Authorization": "Bearer " + first["key"], "Content-Type": "application/json"}
        asked = urllib.request.Request(first["url"] + "/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            assert json.loads(reply.read())["choices"][0]["text"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(first["url"] + "/v1/models", timeout=60)
        kill_runs_below(runs, "serve")
        until = time.monotonic() + 10
        while client.told(f"/api/runs/{run}")["chat"] is not None:
            assert time.monotonic() < until
            time.sleep(0.05)


ON_HOSTS = """
import json, sys
from pathlib import Path
from tests.tools.board.support import Client, board_process
folder, text = map(Path, sys.argv[1:])
settings = {"size": "tiny", "eval_every": "0", "eval_windows": "8", "save_every": "10", "data": str(text)}
with board_process(folder) as (_, url):
    client = Client(url)
    asked = {"recipe": "lm", "settings": {**settings, "steps": "100000"}, "name": "one", "hostfile": "hosts"}
    run = client.told("/api/start", asked)["id"]
    client.wait_for(run, lambda row: row["step"] >= 12)
    ranks = [[each["rank"], each["host"]] for each in client.told(f"/api/runs/{run}")["status"] if each["rank"] >= 0]
    client.told(f"/api/runs/{run}/stop", {})
    row = client.wait_for(run, lambda row: row["is_over"])
    rest = client.told(f"/api/runs/{run}/resume", {"settings": {"procs": "1", "steps": str(row["step"] + 5)}})["id"]
    last = client.wait_for(rest, lambda row: row["is_over"])
    print(json.dumps([ranks, row["state"], row["ranks"], last["name"], last["state"], last["ranks"]]))
"""


@pytest.mark.soak
def test_a_run_is_started_on_hosts_stopped_and_gone_on_with_here(
    runs: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two network namespaces with ssh daemons; the board is on the first one."""
    if missing := lacks("sshd", "ssh", "ssh-keygen"):
        pytest.skip(missing)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("sf0 slots=1\nsf1 slots=1\n")
    with Sshd(tmp_path / "daemons") as cluster:
        (own := tmp_path / "bin").mkdir()
        (own / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")}{cluster.ssh.removeprefix("ssh")} "$@"\n')
        (own / "ssh").chmod(0o755)
        path = f"{own}{os.pathsep}{os.environ['PATH']}"
        done = cluster.do(0, sys.executable, "-c", ON_HOSTS, str(runs), str(text), PATH=path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[[0, "sf0"], [1, "sf1"]], "stopped", 2, "one-rest", "done", 1], done.stdout
