"""The command line: help with examples, one sentence for bad input, no torch before it is needed, and a whole run."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardfold import launch
from shardfold.checkpoint import Checkpoint
from shardfold.tools import cli
from shardfold.tools.observe.metrics import StepMetrics
from shardfold.tools.observe.run_status import RunStatus
from shardfold.tools.recipes.train_config import TrainConfig


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps that a run wrote; a number that was not finite is NaN."""
    optional = ("grad_norm", "held_out_bits_per_byte", "loss_scale", "mfu")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lost = [{name: math.nan for name, value in row.items() if value is None and name not in optional} for row in rows]
    return [StepMetrics(**(row | nan)) for row, nan in zip(rows, lost, strict=True)]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    return int(end.value.code or 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The command lines that ranks would have been started with; nothing is started."""
    calls: list[list[str]] = []

    def note(argv: list[str], num_procs: int, **_: object) -> int:
        calls.append([str(num_procs), *argv])
        return 0

    monkeypatch.setattr(launch, "launch_local", note)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return calls


def settings_of(argv: list[str]) -> TrainConfig:
    """Read a rank's command line as the settings it stands for."""
    pairs = (each.removeprefix("--").split("=", 1) for each in argv[3:] if "=" in each)
    return TrainConfig.load({name.replace("-", "_"): value for name, value in pairs})


@pytest.mark.parametrize("command", [[], ["train"], ["explain"], ["bench"]])
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert call(*command, "--help") == 0
    assert "For example: shardfold" in capsys.readouterr().out


def test_every_setting_has_an_option_with_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "300")
    call("train", "--help")
    help_text = capsys.readouterr().out
    for name, field in TrainConfig.model_fields.items():
        (line,) = [line for line in help_text.splitlines() if re.match(rf"\W+{name.replace('_', '-')}\s", line)]
        assert field.default in (None, False) or f"(default {field.default})" in line


BAD = [
    (["train", "--pipeline", "2", "--order", "zb"], "--order zb is not an order. Did you mean 'zbv'?"),
    (["train", "--pipeline", "2", "--sequence", "2"], "stages do not cut sequences: leave --sequence out"),
    (["train", "--order", "gpipe"], "it is an order of stages, of which there is 1: give --pipeline 2"),
    (["trian"], "Did you mean 'train'?"),
    (["train", "lmm"], "Did you mean 'lm'?"),
    (["train", "--stepz", "3"], "--steps"),
    (["train", "--learning-rate", "0.1"], "(Possible options: --lr)"),
    (["train", "--max_steps", "3"], "(Possible options: --steps)"),
    (["train", "--steps", "many"], "steps is 'many'"),
    (["train", "--steps", "0"], "greater than or equal to 1"),
    (["train", "--lr"], "--lr"),
    (["train", "--lr", "nan"], "lr is 'nan'"),
    (["train", "--size", "dmeo"], "Did you mean 'demo'?"),
    (["train", "--layout", "zero4"], "Did you mean 'zero3'?"),
    (["train", "--precision", "fp61"], "'fp32', 'bf16', 'fp16'"),
    (["train", "--heads", "5"], "5 heads"),
    (["train", "--procs", "0"], "procs is '0', but should be greater than or equal to 1"),
    (["train", "--data", "no/such/text"], "no/such/text"),
    (["bench", "gpt", "--ranks", "0"], "ranks is 0, but must be at least 1"),
    (["ckpt", "import", __file__, "imported"], "is not a file of torch.save"),
    (["train", "--config", "no-such.toml"], "no-such.toml"),
    (["train", "--warmup", "9", "--steps", "5"], "warm up for fewer"),
    (["train", "--matrix-lr", "0.1"], "give --optimizer muon"),
    (["explain", "zero9"], "Did you mean"),
    (["plan", "--exact"], "as it is about ranks that die: give --survive rank, or leave it out"),
    (["plan", "--gpus", "8xA100"], "'A100' is made with more than one memory: write A100-40G or A100-80G."),
    (["explain", "--ranks", "3", "--nodes", "2"], "choose --ranks"),
    (["explain", "--offload", "cpu"], "Did you mean 'host'?"),
]


@pytest.mark.sampled(23)
@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[" ".join(each) for each, _ in BAD])
def test_bad_input_is_one_sentence(
    arguments: list[str], says: str, launched: list[list[str]], capsys: pytest.CaptureFixture[str]
):
    """One line on standard error says what, where and how to mend it; nothing is started; the status is 2."""
    assert call(*arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and not launched
    assert error.startswith("Error: ") and error.count("\n") == 1
    assert says in error


def test_debug_shows_the_traceback(launched: list[list[str]], capsys: pytest.CaptureFixture[str]):
    assert call("train", "--size", "dmeo", "--debug") == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    call("train", "--debug")
    assert launched[0][-1] == "--debug"


def test_a_folder_with_something_in_it_is_refused(
    launched: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "old").mkdir()
    assert call("train", "--out", "old") == 0
    (tmp_path / "old" / "summary.json").touch()
    assert call("train", "--out", "old") == 2
    assert "'old' is not empty" in capsys.readouterr().err
    assert len(launched) == 1


def test_without_arguments_the_demo_is_trained_on_two_processes(launched: list[list[str]]):
    assert call("train") == 0
    (argv,) = launched
    assert argv[:3] == ["2", "train", "lm"]
    settings = settings_of(argv)
    assert re.fullmatch(r"runs/\d{8}-\d{6}", str(settings.out))
    assert settings.model_copy(update={"out": None}) == TrainConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.toml", 'lr = 0.5\nsteps = 7\ndata = "."\n'), ("c.json", '{"lr": 0.5, "steps": 7, "data": "."}')],
)
def test_options_win_over_a_config_file(launched: list[list[str]], tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    assert call("train", "--config", name, "--steps", "9", "--out", "here") == 0
    settings = settings_of(launched[0])
    assert (settings.lr, settings.steps, settings.data, settings.out) == (0.5, 9, Path("."), Path("here"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepz = 3", "c.toml: there is no setting 'stepz'. Did you mean 'steps'?"),
        ("steps = -3", "c.toml: steps is -3"),
        ("steps = ", "not valid TOML"),
    ],
)
def test_a_bad_config_file_is_named(
    launched: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
):
    (tmp_path / "c.toml").write_text(text)
    assert call("train", "--config", "c.toml") == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "--size", "x"], ["train", "--data", "x"]]
)
def test_help_and_refusals_do_not_import_torch(arguments: list[str]):
    code = (
        "import sys; from shardfold.tools.cli import main\n"
        f"try: main({arguments!r})\n"
        "finally: print([each for each in ('torch', 'numpy', 'matplotlib') if each in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_command_that_is_made_alone_is_the_one_among_all() -> None:
    """With its options and its own commands; a word that names none has all to be looked for among."""
    every = cli.command_of(cli.app)
    for word, one in every.commands.items():
        alone = cli.command_of(cli.app, word)
        assert list(alone.commands) == [word]
        for made, other in zip(_with_inner(alone.commands[word]), _with_inner(one), strict=True):
            assert [each.opts for each in made.params] == [each.opts for each in other.params]
    assert list(cli.command_of(cli.app, "generat").commands) == list(every.commands)


def _with_inner(one: Any) -> list[Any]:
    return [one, *(inner for each in getattr(one, "commands", {}).values() for inner in _with_inner(each))]


def command(folder: Path, *arguments: str) -> list[str]:
    """Return the command for a small training on text of the test's own."""
    source = folder / "text"
    source.mkdir()
    for number in range(5):
        (source / f"{number}.txt").write_text(f"{number} and {number} make {number + number}. " * 200)
    settings = ["--size", "tiny", "--context", "32", "--micro-batch", "2", "--sample", "20", "--eval-windows", "8"]
    return [
        *(sys.executable, "-m", "shardfold", "train", "--data", str(source), "--out", str(folder / "run")),
        *(*settings, *arguments),
    ]


@pytest.mark.soak
def test_a_runs_own_config_repeats_it_bit_for_bit(tmp_path: Path):
    """The same command twice, the second time from the first one's config.json: every loss is the same number.

    The number of processes is one of the settings: with another one each step would read other text.
    """
    first = command(tmp_path, "--steps", "3", "--procs", "3")
    again = [*first[: first.index("train") + 1], "--config", str(tmp_path / "run" / "config.json")]
    again += ["--out", str(tmp_path / "again")]
    for each in (first, again):
        result = subprocess.run(each, check=False, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "again"))
    assert [step.loss for step in one] == [step.loss for step in two]
    assert (tmp_path / "run" / "sample.txt").read_bytes() == (tmp_path / "again" / "sample.txt").read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "table", [["zero3", "--optimizer", "muon"], ["ddp", "--offload", "optimizer=host, grads=host"]]
)
def test_a_run_leaves_a_complete_folder(tmp_path: Path, table: list[str]):
    """Two ranks train; the folder and the last tables hold what they should, and predicted equals measured."""
    result = subprocess.run(
        command(tmp_path, "--steps", "6", "--accumulate", "2", "--eval-every", "3", "--layout", *table),
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    shown = {"loss.png", "sample.txt", "report.html"}
    names = {"config.json", "metrics.jsonl", "program.txt", "run.status", "summary.json"}
    assert {path.name for path in run.iterdir()} == names | shown
    assert RunStatus.of(run).state == "done"
    assert json.loads((run / "config.json").read_text())["derived"]["world_size"] == 2
    steps = read_metrics(run / "metrics.jsonl")
    assert [each.step for each in steps] == [1, 2, 3, 4, 5, 6]
    assert [each.step for each in steps if each.held_out_bits_per_byte is not None] == [3]
    assert len((run / "sample.txt").read_bytes()) == 21
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["bits_per_byte"]) == {"model", "uniform", "unigram", "bigram"}
    assert 0 < summary["bits_per_byte"]["model"] < 8.5
    for row in summary["memory"]:
        assert row["held"] == round(row["table"] + row["padding"]), row
    for row in summary["traffic"]:
        assert row["sent"] == round(row["program"]), row
    for row in summary["moved"]:
        assert row["moved"] == round(row["program"]) > 0, row
    assert ("; grads, master, moments in host memory\n" in result.stdout) == ("--offload" in table)
    assert {row["tier"] for row in summary["memory"]} == {"device", "host"} if "--offload" in table else {"device"}
    assert ("Bytes moved per rank and step" in result.stdout) == bool(summary["moved"]) == ("--offload" in table)
    assert f"Written to {run}: config.json, loss.png, metrics.jsonl, program.txt, report.html, " in result.stdout
    for heading in ("Bits per byte", "Bytes per rank by state", "Bytes sent per rank", "A sample", str(run)):
        assert heading in result.stdout


@pytest.mark.soak
def test_training_is_the_same_on_one_and_two_ranks(tmp_path: Path):
    """With an equal global batch the losses agree, as the ranks only share the work."""
    losses = []
    for procs, accumulate in ((1, 2), (2, 1)):
        folder = tmp_path / str(procs)
        folder.mkdir()
        arguments = ["--steps", "4", "--procs", str(procs), "--accumulate", str(accumulate)]
        result = subprocess.run(command(folder, *arguments), check=False, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        losses.append([each.loss for each in read_metrics(folder / "run" / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.soak
def test_a_run_goes_on_from_its_checkpoint_on_other_ranks(tmp_path: Path):
    """Three steps on two ranks, then the rest on one, under another layout, whose states rest in host memory: the
    losses of a run that was not broken."""
    whole = command(tmp_path, "--steps", "6", "--save-every", "2", "--keep", "3")
    result = subprocess.run(whole, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    checkpoints = tmp_path / "run" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step-000002", "step-000004", "step-000006", "latest"}
    start = whole[: whole.index("train") + 1]
    rest = [
        "--procs",
        "1",
        "--layout",
        "zero1",
        "--offload",
        "host",
        "--micro-batch",
        "4",
        "--out",
        str(tmp_path / "rest"),
    ]
    resumed = subprocess.run(
        [*start, "--resume", str(checkpoints / "step-000002"), *rest],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert "at step 2 of 6" in resumed.stdout
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "rest"))
    assert [step.step for step in two] == [3, 4, 5, 6]
    assert [step.loss for step in two] == pytest.approx([step.loss for step in one[2:]], rel=1e-5)
    done = subprocess.run(
        [*start, "--resume", str(tmp_path / "run"), "--out", str(tmp_path / "more")],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert Checkpoint(tmp_path / "run").path == checkpoints / "step-000006"  # a run folder is its latest checkpoint
    assert "has done 6 steps, and --steps 6, which counts them, leaves none to do: give more than 6." in done.stderr
    assert not (tmp_path / "more").exists()


@pytest.mark.soak
def test_a_loss_that_is_not_finite_stops_with_a_sentence(tmp_path: Path):
    arguments = ["--steps", "50", "--warmup", "0", "--lr", "1e30", "--clip-norm", "0"]
    result = subprocess.run(command(tmp_path, *arguments), check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    (what,) = result.stderr.splitlines()
    assert "is inf or NaN at step" in what and "nothing was updated" in what and "--nonfinite warn" in what


@pytest.mark.soak
def test_fp16_shows_its_loss_scale_and_what_it_skipped(tmp_path: Path):
    """A first rate that is far too high: steps are skipped, the run ends well, and says both."""
    arguments = ["--steps", "4", "--precision", "fp16", "--warmup", "0", "--lr", "1", "--clip-norm", "0"]
    result = subprocess.run(command(tmp_path, *arguments), check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert steps[0].loss_scale == 2.0**16 and steps[-1].skipped > 0
    assert steps[-1].loss_scale == 2.0 ** (16 - steps[-2].skipped)
    skipped = json.loads((tmp_path / "run" / "summary.json").read_text())["skipped_steps"]
    assert skipped == steps[-1].skipped
    assert re.search(rf"step 4/4 .* loss scale {steps[-1].loss_scale:g}, {skipped} steps? skipped", result.stdout)


@pytest.mark.soak
@pytest.mark.parametrize(("procs", "number"), [("1", signal.SIGINT), ("1", signal.SIGTERM), ("2", signal.SIGTERM)])
def test_a_signal_ends_at_a_step_with_all_outputs(tmp_path: Path, procs: str, number: signal.Signals):
    """All ranks stop at the same step, evaluate, write the folder, and the status is the shell's for the signal."""
    arguments = command(tmp_path, "--steps", "1000000", "--procs", procs)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(number)
        out = process.stdout.read()
        assert process.wait(60) == 128 + number
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] and 1 <= summary["steps"] < 1000000
    assert summary["steps"] == len(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert "Stopping after step" in out and "Bits per byte" in out


OUT_OF_TIME = """
from shardfold.tools.entry import main
from shardfold.tools.recipes import lm

lm.GRACE_AFTER_SIGTERM = 0.1
say = lm.Progress.note

def stay(self, text):  # where the run says that it stops, it hangs
    say(self, text)
    while "Stopping" in text:
        pass

lm.Progress.note = stay
main()
"""


@pytest.mark.soak
def test_one_process_that_is_not_done_in_time_after_sigterm_says_so(tmp_path: Path):
    """The end is a sentence and SIGTERM's status, as where a launcher counts the time, and not SIGALRM's."""
    arguments = [sys.executable, "-c", OUT_OF_TIME, *command(tmp_path, "--steps", "1000000", "--procs", "1")[3:]]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert said == "Error: the run did not end within 0.1 s of SIGTERM and was killed.\n"


@pytest.mark.soak
def test_stages_train_as_one_process_does(tmp_path: Path) -> None:
    """A run over two stages, also looped and beside tensor, has the losses of one process, and goes on on one."""
    few = [
        "--steps=6",
        "--layers=2",
        "--context=64",
        "--eval-windows=16",
        "--micro-batch=2",
        "--warmup=1",
        "--accumulate=4",
    ]
    runs = {
        "one": ["--procs=1"],
        "looped": ["--procs=2", "--pipeline=2", "--order=interleaved:2", "--save-every=3"],
        "both": ["--procs=4", "--pipeline=2", "--tensor=2", "--layout=zero2"],
    }
    command = [sys.executable, "-m", "shardfold", "train"]
    for name, options in runs.items():
        subprocess.run([*command, *few, *options, f"--out={tmp_path / name}"], check=True, capture_output=True)
    found = {name: read_metrics(tmp_path / name / "metrics.jsonl") for name in runs}
    for name in ("looped", "both"):
        for mine, plain in zip(found[name], found["one"], strict=True):
            assert mine.loss == pytest.approx(plain.loss, rel=1e-5)
            assert mine.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    again = [
        "--resume",
        str(tmp_path / "looped"),
        "--procs=1",
        "--pipeline=1",
        "--steps=8",
        f"--out={tmp_path / 'again'}",
    ]
    subprocess.run([*command, *again], check=True, capture_output=True)
    assert [each.step for each in read_metrics(tmp_path / "again" / "metrics.jsonl")] == [7, 8]


@pytest.mark.soak
def test_tensor_and_sequence_train_as_one_process_does(tmp_path: Path) -> None:
    """A run whose layers and sequences are cut over four ranks has the losses and norms of one process."""
    few = ["--steps=4", "--layers=2", "--context=64", "--eval-windows=16", "--micro-batch=2", "--warmup=1"]
    runs = {"one": ["--procs=1"], "cut": ["--procs=4", "--tensor=2", "--sequence=2"]}
    for name, options in runs.items():
        command = [sys.executable, "-m", "shardfold", "train", *few, *options, f"--out={tmp_path / name}"]
        subprocess.run(command, check=True, capture_output=True)
    one, cut = (read_metrics(tmp_path / name / "metrics.jsonl") for name in runs)
    for mine, plain in zip(cut, one, strict=True):
        assert mine.loss == pytest.approx(plain.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
