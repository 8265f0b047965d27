"""Figures of a run reach its trackers, each read back by its own reader; a tracker that fails ends nothing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from shardfold.tools.observe import trackers
from shardfold.tools.observe.event_files import EventFile, event_files
from shardfold.tools.observe.run_status import RunStatus
from shardfold.tools.observe.trackers import TRACKERS, TrackedRow
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.train_config import TrainConfig
from tests.support.clients import needs
from tests.tools.tune import support

NAME = "json"
"""A package that is installed everywhere, under whose name tests have trackers of their own."""
ROWS = {step: {"loss": 1 / step, "tokens/s": 10.0 * step} for step in range(1, 8)}


class Kept:
    """Keeps what it is given."""

    made: list[Kept]

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder, self.config = folder, config
        self.rows: list[TrackedRow] = []
        self.closed: list[bool] = []
        self.made.append(self)

    def write(self, rows: Sequence[TrackedRow]) -> None:
        self.rows += rows

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    found: list[Kept] = []
    monkeypatch.setitem(TRACKERS, NAME, type("KeptHere", (Kept,), {"made": found}))
    return found


def logged(folder: str | Path, track: Any, **options: Any) -> None:
    with sf.observe.Run(
        folder, config={"lr": 3e-4, "deep": {"a": [1]}}, track=track, rank=0, ranks=1, **options
    ) as run:
        for step, row in ROWS.items():
            run.log(step, **row, name="words", bad=float("nan"), flag=True)  # pyright: ignore[reportArgumentType]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_numbers_of_each_step_come_in_order_and_the_end_is_told(kept: list[Kept], tmp_path: Path) -> None:
    """Of rank 0; words, truths and what is not finite are left out."""
    logged(tmp_path / "a", [NAME, NAME])
    (only,) = kept
    assert [(row.step, {**row.figures, "seconds": 0}) for row in only.rows] == [
        (step, {**row, "seconds": 0}) for step, row in ROWS.items()
    ]
    assert only.config["lr"] == 3e-4 and only.closed == [False] and only.folder == tmp_path / "a"
    with pytest.raises(ZeroDivisionError), sf.observe.Run(tmp_path / "b", track=NAME, rank=0, ranks=1) as run:
        run.log(1, loss=2.0)
        raise ZeroDivisionError
    assert kept[1].closed == [True]
    with sf.observe.Run(tmp_path / "b", track=NAME, rank=1, ranks=2) as run:
        run.log(1, loss=2.0)
    with sf.observe.Run(tmp_path / "c", track=NAME, rank=0, ranks=1):
        pass  # before the first step a run leaves nothing behind
    assert len(kept) == 2


@pytest.mark.parametrize("when", ["made", "written to", "closed", "left by sys.exit", "waited for", "far behind"])
def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    class Failing:
        def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
            if when == "made":
                raise RuntimeError("no account")

        def write(self, rows: Sequence[TrackedRow]) -> None:
            if when == "written to":
                raise RuntimeError("no account")
            if when == "left by sys.exit":
                raise SystemExit(3)
            if when in ("waited for", "far behind"):
                release.wait(10)  # as long as a run never waits here

        def close(self, *, failed: bool) -> None:
            if when == "closed":
                raise RuntimeError("no account")

    monkeypatch.setitem(TRACKERS, NAME, Failing)
    monkeypatch.setattr(trackers, "PATIENCE", 0.05 if when in ("waited for", "far behind") else 30.0)
    monkeypatch.setattr(trackers, "MOST_ROWS", 3 if when == "far behind" else 100)
    with caplog.at_level(logging.WARNING, logger="shardfold"):
        logged(tmp_path, NAME)
    release.set()
    words = {"left by sys.exit": "SystemExit: 3", "waited for": "within", "far behind": "3 rows behind"}
    (said,) = caplog.messages
    assert NAME in said and words.get(when, "RuntimeError: no account") in said, said
    assert [row["step"] for row in lines(tmp_path)] == list(ROWS)
    assert sf.observe.RunStatus.of(tmp_path).state == "done"


def test_what_cannot_be_tracked_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown name before anything else, with the nearest; one whose package is missing with how to get it, and
    without a folder."""
    for load in (TrainConfig.load, FaceConfig.load):
        with pytest.raises(ConfigError, match=r"no tracker 'wandbb'. Did you mean 'wandb'"):
            load({"track": "tensorboard, wandbb"})
    monkeypatch.setitem(TRACKERS, "no_such_package", Kept)
    sentence = "pip install no_such_package"
    with pytest.raises(ConfigError, match=sentence):
        sf.observe.Run(tmp_path / "a", track="no_such_package", rank=0, ranks=1)
    from shardfold.tools.recipes import lm

    with pytest.raises(ConfigError, match=sentence):
        lm.train(TrainConfig(track="no_such_package", out=tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def _train(out: Path) -> None:
    from shardfold.tools.recipes import lm

    text = out.parent / "text"
    text.mkdir()
    for name in "abc":
        (text / f"{name}.txt").write_text("some words of text\n" * 200)
    shape = {"d_model": 16, "layers": 1, "heads": 1, "context": 16}
    few = {"steps": 2, "sample": 0, "micro_batch": 2, "eval_windows": 2, "warmup": 0}
    lm.train(TrainConfig.load({**shape, **few, "data": text, "track": NAME, "out": out}))


def _train_face(out: Path) -> None:
    from shardfold.tools.recipes.face.train import train

    few = {"identities": 5, "shots": 2, "held_out": 3, "size": "8", "patch": 4, "width": 8, "layers": 1, "heads": 1}
    train(FaceConfig.load({**few, "embedding": 4, "batch": 2, "steps": 2, "warmup": 0, "track": NAME, "out": out}))


def _tune(out: Path) -> None:
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.tuned import tune

    base, rows = support.model_folder(out.parent / "base"), out.parent / "rows.jsonl"
    support.write_rows(rows, support.chats(4))
    settings = {"model": base, "data": str(rows), "cache": out.parent / "cache", "steps": 2, "micro_batch": 1}
    tune(config_class("sft").load({**settings, "track": NAME, "out": out}))


@pytest.mark.parametrize(
    "loop", [_train, _train_face, pytest.param(_tune, marks=[needs("transformers", "peft"), pytest.mark.soak])]
)
def test_each_loop_tells_its_trackers(loop: Callable[[Path], None], ranks: Ranks, tmp_path: Path) -> None:
    told, written = ranks.run(_told, loop, tmp_path / "run", world_size=1)[0]
    assert [step for step, _ in told] == [1, 2]
    assert [figures["loss"] for _, figures in told] == [row["loss"] for row in written]


def _told(loop: Callable[[Path], None], out: Path) -> Any:
    made: list[Kept] = []
    TRACKERS[NAME] = type("KeptHere", (Kept,), {"made": made})
    loop(out)
    (only,) = made
    assert only.closed == [False] and only.config["steps"] == 2
    return [(row.step, row.figures) for row in only.rows], lines(out)


def _tensorboard(folder: Path) -> tuple[list[tuple[int, float]], str]:
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    read = EventAccumulator(str(folder))
    read.Reload()
    config = read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return [(each.step, each.value) for each in read.Scalars("loss")], config


def _wandb(folder: Path) -> tuple[list[tuple[int, float]], str]:
    """Records in the log format of LevelDB, by its own classes: it has no other reader without a server."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    data, at, part, found, config = path.read_bytes(), 7, b"", [], ""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # whole, last
            continue
        record = wandb_internal_pb2.Record()
        record.ParseFromString(part)
        part = b""
        items = {each.key or ".".join(each.nested_key): each.value_json for each in record.history.item}
        if items:
            found.append((int(items["_step"]), float(items["loss"])))
        config += "".join(f"{each.key}: {each.value_json} " for each in record.run.config.update)
    return found, config


def _mlflow(folder: Path) -> tuple[list[tuple[int, float]], str]:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("shardfold")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == folder.name
    history = client.get_metric_history(run.info.run_id, "loss")
    return [(each.step, each.value) for each in history], str(run.data.params)


def _trackio(folder: Path) -> tuple[list[tuple[int, float]], str]:
    from trackio import Api  # pyright: ignore[reportMissingImports]
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    (run,) = Api().runs("shardfold")
    rows = SQLiteStorage.get_logs("shardfold", run.name)
    return [(row["step"], row["loss"]) for row in rows], str(run.config)


SCRIPT = """
import sys
from shardfold.tools.observe import trackers
from tests.tools.test_trackers import logged
trackers.PATIENCE = 120.0
logged(sys.argv[2], sys.argv[1])
"""
READERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


@pytest.mark.filterwarnings("default")  # of other people's packages
@pytest.mark.parametrize("name", sorted(READERS))
def test_each_tracker_reads_back_what_it_was_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name)
    for each in ("WANDB", "MLFLOW", "TRACKIO"):
        for variable in [key for key in os.environ if key.startswith(each)]:
            monkeypatch.delenv(variable)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    subprocess.run([sys.executable, "-c", SCRIPT, name, tmp_path / "a"], check=True, timeout=200)
    found, config = READERS[name](tmp_path / "a")
    assert [step for step, _ in found] == list(ROWS)
    assert [value for _, value in found] == pytest.approx([row["loss"] for row in ROWS.values()], rel=2**-23)
    assert "lr" in config and "0.0003" in config
    if name == "tensorboard":
        (path,) = event_files(tmp_path / "a")
        assert [each.step for each in EventFile(path).scalars() if each.key == "loss"] == list(ROWS)


@pytest.mark.soak
def test_a_trainer_has_a_run_folder_by_the_callback_of_the_docs(tmp_path: Path) -> None:
    """The last program of the page, as it stands there."""
    transformers = pytest.importorskip("transformers")
    import torch

    page = (Path(__file__).parents[2] / "docs/trackers.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {"sf": sf}
    exec(page.rpartition("```python\n")[2].partition("```")[0], space)
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    rows = [{"input_ids": (ids := torch.arange(16) * at % 64), "labels": ids} for at in range(12)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "a"), max_steps=3, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    model = transformers.GPT2LMHeadModel(config)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[space["RunFolder"]()]).train()
    found = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2, 3] and all(row["loss"] > 0 and row["lr"] >= 0 for row in found)
    status = RunStatus.of(tmp_path / "a")
    assert (status.state, status.step, status.steps) == ("done", 3, 3)
