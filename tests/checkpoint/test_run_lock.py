"""A folder of checkpoints is one run's: another is refused, and its own restart is not, wherever it begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardfold as sf
from shardfold.checkpoint import run_lock
from shardfold.checkpoint.draft import Draft
from shardfold.checkpoint.folders import INDEX, listed
from shardfold.checkpoint.run_lock import LOCK, Holder
from shardfold.errors import CheckpointError
from tests.support.saving import engine, failing, train


def begun(root: Path, steps: int = 1, **options: object) -> sf.Engine:
    """A run that has saved so many steps."""
    trained = engine("ddp")
    for _ in range(steps):
        train(trained)
        trained.save(root / f"step-{trained.steps}", wait=True, **options)  # type: ignore[arg-type]
    return trained


def names(root: Path) -> list[str]:
    return [path.name for path in listed(root)]


def lock_of(root: Path, pid: int, **other: str) -> None:
    said = {"run": "a", "token": "0" * 12, **Holder.here().to_json(), "pid": pid, "started": run_lock._started(pid)}
    (root / LOCK).write_text(json.dumps(said | other))


def test_a_second_run_that_does_not_resume_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save removes and replaces nothing; under a name of its own, one that removes nothing is written."""
    root = tmp_path / "run"
    begun(root, 3, keep=2).close()
    second = engine("ddp")
    train(second)
    for name in ("step-1", "step-3"):
        with pytest.raises(
            CheckpointError, match=r"checkpoints of another run, step-3 the newest.*a folder of its own"
        ):
            second.save(root / name, keep=2, wait=True)
    assert names(root) == ["step-2", "step-3"] and (root / "latest").read_text() == "step-3"
    second.save(root / "teacher", latest=False, wait=True)
    assert (root / "latest").read_text() == "step-3" and not caplog.text
    second.save(root / "other", wait=True)
    assert (root / "latest").read_text() == "other" and "checkpoints of another run beside other" in caplog.text
    second.save(root / "other", wait=True)
    third = engine("ddp")
    third.save(root / "other", wait=True)  # of the same program
    monkeypatch.setattr(run_lock, "_saves", set[str]())  # another process has none
    with pytest.raises(CheckpointError, match="another run"):
        third.save(root / "step-2", latest=False, wait=True)
    third.close()
    second.close()
    first = engine("ddp")
    first.load(root / "step-3")
    train(first)
    first.save(root / "step-4", keep=1, wait=True)
    first.close()
    assert names(root) == ["teacher", "other", "step-4"]  # keep= counts the run's own


def test_two_at_once_in_one_process(tmp_path: Path) -> None:
    """One that still saves there is in the way of another, and of no one when it is closed or gone."""
    root = tmp_path / "run"
    first, second = begun(root), engine("ddp")
    second.load(root, weights_only=True)  # goes on with nothing
    train(second)
    with pytest.raises(CheckpointError, match="another engine of this process saves"):
        second.save(root / "b", keep=1, wait=True)
    second.load(root)
    train(second)
    second.save(root / "step-2", wait=True)
    train(first)
    with pytest.raises(CheckpointError, match=f"no longer this run's: process {os.getpid()} on this host has gone on"):
        first.save(root / "step-2", wait=True)
    second.close()
    with pytest.raises(CheckpointError, match=r"has step-2, which came after this run had loaded|another run, step-2"):
        first.save(root / "step-2", wait=True)
    first.close()
    assert not (root / LOCK).exists()


def test_a_live_process_of_this_host_is_in_the_way_and_a_dead_one_is_not(tmp_path: Path) -> None:
    """Also one that was not waited for, and one whose id another has now."""
    root = tmp_path / "run"
    begun(root).close()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        lock_of(root, other.pid)
        again = engine("ddp")
        again.load(root)
        train(again)
        with pytest.raises(CheckpointError, match=f"process {other.pid} on this host saves its checkpoints"):
            again.save(root / "step-2", wait=True)
        lock_of(root, other.pid, started="0")
        again.save(root / "step-2", wait=True)
        again.close()
        lock_of(root, other.pid)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        again = engine("ddp")
        again.load(root)
        train(again)
        again.save(root / "step-3", wait=True)
        again.close()
    assert names(root) == ["step-1", "step-2", "step-3"]


def test_a_restart_on_another_host_goes_on_and_the_old_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a job in a new container does that cannot see whether the old one is gone."""
    root = tmp_path / "run"
    old, here = begun(root), run_lock._host()
    monkeypatch.setattr(run_lock, "_host", lambda: f"elsewhere {here}")
    new = engine("ddp")
    new.load(root)
    train(new)
    new.save(root / "step-2", wait=True)
    assert "last saved to by process" in caplog.text
    monkeypatch.setattr(run_lock, "_host", lambda: here)
    train(old)
    with pytest.raises(CheckpointError, match="no longer this run's"):
        old.save(root / "step-2", wait=True)
    new.close()
    with pytest.raises(CheckpointError, match="step-2"):
        old.save(root / "step-2", wait=True)
    old.close()


@pytest.mark.parametrize("done", ["begun", "placed"])
def test_who_is_fenced_in_the_middle_of_a_save_changes_nothing(
    done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is stopped behind its last look at whose the folder is; ranks that were started again elsewhere have
    loaded when it goes on. The renames that are left to it find nothing, and what was placed stays."""
    root, here = tmp_path / "run", run_lock._host()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(run_lock, "_host", lambda: f"elsewhere {here}")
    old = begun(root)
    stopped = Draft(root / "step-2", "0" * 12, lock=old.saver.lock)
    stopped.begin()
    index = (root / "step-1" / INDEX).read_bytes()
    if done == "placed":
        stopped.place(index)
    monkeypatch.setattr(run_lock, "_host", lambda: here)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    new = engine("ddp")
    new.load(root)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(stopped, "_check_own", lambda: None)
        with pytest.raises(OSError):
            stopped.name() if done == "placed" else stopped.commit(index)
    stopped.discard()
    assert names(root) == ["step-1", "step-2"][: 1 + (done == "placed")] and (root / "latest").read_text() == "step-1"
    assert {path.name for path in root.iterdir()} == {*names(root), "latest", LOCK}
    train(new)
    new.save(root / "step-2", wait=True)
    assert (root / "latest").read_text() == "step-2"
    old.close()
    new.close()


@pytest.mark.parametrize("job", ["", "none", "other"])
def test_who_only_loads_takes_over_nothing(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But ranks of the same job that were started again."""
    root, here = tmp_path / "run", run_lock._host()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job.replace("other", "job"))
    monkeypatch.setattr(run_lock, "_host", lambda: f"elsewhere {here}")
    old = begun(root)
    monkeypatch.setattr(run_lock, "_host", lambda: here)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    reader = engine("ddp")
    reader.load(root)
    monkeypatch.setattr(run_lock, "_host", lambda: f"elsewhere {here}")
    train(old)
    old.save(root / "step-2", wait=True)
    assert names(root) == ["step-1", "step-2"]
    for each in (reader, old):
        each.close()


def test_a_claim_that_came_to_nothing_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn file of a killed process, a first save that failed, and one whose process died before it was named."""
    root = tmp_path / "run"
    root.mkdir()
    (root / LOCK).write_text('{"tok')
    first = engine("ddp")
    with failing(root, "ftruncate", 1, 28), pytest.raises(CheckpointError, match="No space left"):
        first.save(root / "step-0", wait=True)
    assert not list(root.iterdir())
    second = engine("ddp")
    second.save(root / "step-0", wait=True)
    for each in (first, second):
        each.close()
    assert [path.name for path in root.iterdir() if path.name != "latest"] == ["step-0"]
    os.replace(root / "latest", root / "step-0" / "latest")
    monkeypatch.setattr(run_lock, "_saves", set[str]())  # another process has none
    third = engine("ddp")
    third.save(root / "step-0", keep=2, wait=True)
    third.close()
    assert names(root) == ["step-0"] and (root / "latest").read_text() == "step-0"


def test_the_last_finite_checkpoint_stays(tmp_path: Path) -> None:
    """However many come behind it whose weights are NaN; loading one of these says which to go back to."""
    root = tmp_path / "run"
    trained = begun(root, 2, keep=1)
    with trained.gathered("norm.bias", write=True) as bias, torch.no_grad():
        bias[3] = float("nan")
    for name in ("bad-1", "bad-2", "bad-3"):
        trained.save(root / name, keep=1, wait=True)
    assert names(root) == ["step-2", "bad-3"]
    assert any("step-2, beside it, is finite" in note for note in trained.load(root).notes)
    trained.load(root / "step-2")
    trained.save(root / "good", keep=1, wait=True)
    assert names(root) == ["good"]
    trained.close()


def test_a_failure_in_the_background_is_raised_by_the_next_save_and_by_close(tmp_path: Path) -> None:
    """Once; so the exit status of a script tells of it. A save that is not begun leaves the one behind it to begin."""
    root = tmp_path / "run"
    trained = begun(root)
    with failing(root, "pwrite", 1, 28):
        trained.save(root / "a")._over.wait()
    train(trained)
    with pytest.raises(
        CheckpointError, match=r"b was not begun, as the save before it failed.*a was not written: No sp"
    ):
        trained.save(root / "b", wait=True)
    trained.save(root / "b", wait=True)
    with failing(root, "pwrite", 1, 28):
        trained.save(root / "c")._over.wait()
    with pytest.raises(CheckpointError, match="c was not written: No space left"):
        trained.close()
    trained.close()
    assert trained.closed and names(root) == ["step-1", "b"]
