"""What people do to the command line: shared folders, absurd sizes, odd names, closed and narrow terminals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn

import shardfold as sf
from shardfold import launch
from shardfold.errors import ConfigError
from shardfold.plan.layout import Tier
from shardfold.tools import cli
from shardfold.tools.observe import pictures, tables
from shardfold.tools.observe.console import Lenient
from shardfold.tools.observe.metrics import StepMetrics
from shardfold.tools.observe.pictures import loss_picture
from shardfold.tools.observe.progress import Progress
from shardfold.tools.planning.known_models import planned_model
from shardfold.tools.recipes._needed_memory import check_memory, saved_bytes, states_bytes
from shardfold.tools.recipes.folder import CLAIM, claimed, claimed_by_launcher
from shardfold.tools.recipes.gpt import GPT, generate
from shardfold.tools.recipes.lm import Position
from shardfold.tools.recipes.train_config import GPTConfig, TrainConfig

TINY = [
    "--size",
    "tiny",
    "--context",
    "32",
    "--micro-batch",
    "2",
    "--sample",
    "20",
    "--eval-windows",
    "8",
    "--steps",
    "2",
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", CLAIM):
        monkeypatch.delenv(name, raising=False)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    return int(end.value.code or 0)


def some_text(folder: Path) -> Path:
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"{number} and {number} make {number + number}. " * 200)
    return folder


def train(*arguments: str | bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "shardfold", "train", *TINY, *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, timeout=120, env={**os.environ, **environment}
    )  # fmt: skip


def test_runs_that_start_at_one_moment_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """Sixteen claims at the same second: sixteen folders, each new, and the token in each is its own."""
    monkeypatch.setattr("shardfold.tools.recipes.folder.time.strftime", lambda form: "20260101-000000")

    def one(_: int) -> tuple[Path, bool]:
        with claimed(None) as folder:
            marked = (folder / "config.json").is_file()
            (folder / "config.json").write_text("{}")  # as a run that has begun: the folder stays
            return folder, marked

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, range(16)))
    os.environ.pop(CLAIM, None)  # these threads share an environment, as runs do not: one may have put back another's
    assert len({folder for folder, _ in found}) == 16 and all(marked for _, marked in found)
    assert Path("runs/20260101-000000") in {folder for folder, _ in found}


@pytest.mark.parametrize("there_before", [False, True])
def test_a_given_folder_is_one_runs_alone(there_before: bool):
    """The second run is refused while the first has written nothing yet, also where the folder was there and empty."""
    if there_before:
        Path("mine").mkdir()
    with claimed(Path("mine")):
        with pytest.raises(ConfigError, match="'mine' is not empty"), claimed(Path("mine")):
            pass
        assert claimed_by_launcher(Path("mine"))
    assert Path("mine").exists() == there_before
    assert not claimed_by_launcher(Path("mine"))


KILLED = """
import os, signal, sys
from pathlib import Path
from shardfold.tools.recipes.folder import claimed
with claimed(Path("mine")) as folder:
    if sys.argv[1:]:
        (folder / sys.argv[1]).write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("wrote", [None, "config.json", "notes.txt"])
def test_a_folder_of_a_run_that_was_killed_before_it_began_is_free(wrote: str | None):
    """With what the run wrote, or somebody else, it is not."""
    ended = subprocess.run([sys.executable, "-c", KILLED, *([wrote] if wrote else [])], check=False, timeout=100)
    assert ended.returncode == -signal.SIGKILL and Path("mine/run.status").is_file()
    if wrote is None:
        with claimed(Path("mine")) as folder:
            assert sorted(path.name for path in folder.iterdir()) == ["config.json", "run.status"]
    else:
        with pytest.raises(ConfigError, match="'mine' is not empty"), claimed(Path("mine")):
            pass


def test_ctrl_c_while_a_folder_is_claimed_leaves_none(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardfold.tools.recipes.folder.OwnRecord", interrupted)
    with pytest.raises(KeyboardInterrupt), claimed(Path("mine")):
        pass
    assert not Path("mine").exists()


def test_what_a_refused_run_made_is_removed_and_no_more():
    """Parents that the claim made go with it; those that were there, and what a run has written, stay."""
    Path("old").mkdir()
    with claimed(Path("old/new/run")):
        pass
    assert Path("old").is_dir() and not Path("old/new").exists()
    with claimed(Path("old/run")) as folder:
        (folder / "config.json").write_text('{"steps": 3}')
    assert sorted(path.name for path in Path("old/run").iterdir()) == ["config.json", "run.status"]
    for steps in ("", "{}\n"):
        with pytest.raises(ConfigError), claimed(Path("old/refused")) as folder:
            (folder / "config.json").write_text('{"steps": 3}')
            (folder / "metrics.jsonl").write_text(steps)
            raise ConfigError("the data have no rows.")
        assert Path("old/refused").exists() == bool(steps)


@pytest.mark.sampled(17)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--micro-batch", "100000000000", "--size", "tiny"], "a smaller --micro-batch"),
        (["train", "--d-model", "1000000", "--layers", "4000", "--heads", "4"], "a smaller --size"),
        (["train", "--layers", "1000000000"], "layers is '1000000000'"),
        (["train", "--offload", "hots"], "'hots' is not a tier. Did you mean 'host'?"),
        (["train", "--offload", "grad=host"], "names 'grad', which is not a state. Did you mean 'grads'?"),
        (["train", "--offload", "grads=host,optimizer"], "'optimizer' names no tier: write optimizer=host."),
        (["train", "--offload", "grads=host, grads=disk"], "names grads twice"),
        (["train", "--layout", "fsdp2", "--offload", "params=host"], "this table keeps no copy"),
        (["train", "--seed", "99999999999999999999999"], "seed is '99999999999999999999999'"),
        (["train", "--procs", "1.5"], "procs is '1.5', but should be a valid integer."),
        (["train", "--procs", "1000000"], "procs is '1000000'"),
        (["train", "--out", "/proc/foo"], "the run folder '/proc/foo' cannot be made"),
        (["explain", "--params", "inf"], "--params"),
        (["explain", "--params", "nan"], "--params"),
        (["explain", "--config", "deep.json"], "'deep.json' is nested too deeply"),
        (["train", "--config", "deep.json"], "'deep.json' is not valid JSON"),
        (["explain", "--config", "binary.json"], "'binary.json' is not UTF-8 text"),
    ],
)
def test_absurd_values_are_one_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    """Before memory is taken: one line, status 2, and nothing is left behind."""
    Path("deep.json").write_text("[" * 100_000)
    Path("binary.json").write_bytes(bytes(range(256)))
    single = ["--procs", "1"] if arguments[0] == "train" and "--procs" not in arguments else []
    assert call(*arguments, *single) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("Error: ") and error.count("\n") == 1
    assert says in error
    assert not Path("runs").exists()


def test_the_least_memory_of_a_run_is_counted():
    """States as the table has them, and inputs of each block's products; what fits exactly is let through."""
    shape = GPTConfig(d_model=64, layers=2, heads=2, context=64)
    config = TrainConfig(size="tiny", micro_batch=3, layout="ddp")
    assert states_bytes(config, shape, 4) == 16 * shape.num_parameters  # weights, gradients, two moments in fp32
    zero3 = TrainConfig(size="tiny", micro_batch=3, layout="zero3")
    assert states_bytes(zero3, shape, 4) == 4 * shape.num_parameters
    away = TrainConfig(size="tiny", layout="zero3", offload="grads=host,optimizer=disk")
    found = [states_bytes(away, shape, 4, [tier]) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)]
    assert found == [shape.num_parameters, shape.num_parameters, 3 * shape.num_parameters]
    assert saved_bytes(config, shape) == 3 * 64 * (16 + 4 * 2 * (7 * 64 + 3 * shape.d_ff))
    needed = round(2 * (states_bytes(config, shape, 2) + saved_bytes(config, shape)))
    check_memory(config, ranks=2, sharing=2, available=needed, where="it")
    with pytest.raises(ConfigError, match="a smaller --micro-batch"):
        check_memory(config, ranks=2, sharing=2, available=needed - 1, where="it")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--seed", "7"], "has --seed 0, so it cannot go on with 7: leave out --seed"),
        (["--d-model", "32"], "has --d-model 64, so it cannot go on with 32: leave out --d-model"),
        (["--size", "demo"], "leave out --d-model and --size"),
    ],
)
def test_a_setting_that_cannot_change_is_named_as_it_is_given(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A run that is resumed keeps its seed and its shape; nothing is started and no folder is made."""
    monkeypatch.setattr(launch, "launch_local", lambda *_: pytest.fail("something was started"))
    Path("before").mkdir()
    first = {"size": "tiny", "d_model": 64, "layers": 2, "heads": 2, "context": 64, "steps": 9, "warmup": 0, "procs": 3}
    Path("before/config.json").write_text(json.dumps({**first, "derived": {"d_ff": 192}}))
    assert call("train", "--resume", "before", "--out", "after", *given) == 2
    assert says in capsys.readouterr().err
    assert not Path("after").exists()


def test_another_text_is_refused_in_the_words_of_the_command_line():
    """A checkpoint of a text of other length names --data, one of another seed --seed."""
    import shardfold as sf

    now = Position(sf.Sampler(10, 2, seed=1, rank=0, num_ranks=1), TrainConfig())
    with pytest.raises(ConfigError, match=r"a text of 12 windows, but this one has 10: give --data"):
        now.load_state_dict(sf.Sampler(12, 2, seed=1, rank=0, num_ranks=1).state_dict())
    with pytest.raises(ConfigError, match=r"with --seed 3, so it cannot go on with 1"):
        now.load_state_dict(sf.Sampler(10, 2, seed=3, rank=0, num_ranks=1).state_dict())


@pytest.mark.soak
def test_a_finished_run_ends_well_whatever_it_has_to_print(tmp_path: Path):
    """Markup in names, a terminal of ASCII, names that are no UTF-8, a temperature of almost 0: status 0, all files."""
    text = os.fsencode(some_text(tmp_path / "[b]x"))
    for name in (b"bad\xff.txt", b"binary\xfe"):
        Path(os.fsdecode(text + b"/" + name)).write_bytes(b"x" * 900 + (b"\0" if name.startswith(b"bin") else b""))
    (tmp_path / "[b]x" / "tests").mkdir()
    done = train(
        b"--data=" + text, "--out", "runs/[/b]", "--temperature", "1e-300", PYTHONIOENCODING="ascii", COLUMNS="40"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    said = done.stdout.decode("ascii")
    assert "of " + str(tmp_path / "[b]x") in said and "tests/: folders of this name are left out" in said
    assert "Written to runs/[/b]: config.json, loss.png, metrics.jsonl, program.txt, report.html, sample.txt" in said
    summary = json.loads(Path("runs/[/b]/summary.json").read_text())
    assert len(summary["skipped_files"]) == 2 and summary["steps"] == 2


@pytest.mark.soak
@pytest.mark.parametrize("procs", ["1", pytest.param("2", marks=pytest.mark.soak)])
def test_a_run_whose_reader_has_gone_goes_on(tmp_path: Path, procs: str):
    """`shardfold train | head -1`: the rest is not shown, the run ends well, its folder is whole."""
    arguments = [*TINY, "--data", str(some_text(tmp_path / "text")), "--out", "run", "--procs", procs]
    command = [sys.executable, "-u", "-m", "shardfold", "train", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"GPT tiny")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
    assert {"loss.png", "sample.txt", "summary.json"} <= {path.name for path in Path("run").iterdir()}


@pytest.mark.soak
def test_a_run_without_matplotlib_says_that_there_is_no_picture(tmp_path: Path):
    arguments = ["train", *TINY, "--data", str(some_text(tmp_path / "text")), "--out", "run", "--procs", "1"]
    code = f"import sys; sys.modules['matplotlib'] = None\nfrom shardfold.tools import cli\ncli.main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "There is no picture: loss.png needs matplotlib" in done.stdout and "shardfold[report]" in done.stdout
    assert not Path("run/loss.png").exists() and Path("run/sample.txt").exists()


def test_what_cannot_be_written_is_dropped_and_no_error():
    """A stream that is closed, or in which a letter does not exist, raises nothing."""
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream = Lenient(narrow)
    stream.write("a█")
    stream.flush()
    assert narrow.buffer.getvalue() == b"a?"  # pyright: ignore[reportAttributeAccessIssue]
    narrow.close()
    stream.write("b")
    stream.flush()


def test_notes_are_shown_as_they_are():
    """What looks like markup is text."""
    console = Console(file=io.StringIO(), width=80)
    Progress(1, console=console).note("from [/b] to [red]")
    assert console.file.getvalue() == "from [/b] to [red]\n"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_left_of_a_resumed_run_counts_its_own_steps(is_terminal: bool, monkeypatch: pytest.MonkeyPatch):
    """900 of 1,000 steps were done before: nine in 18 s leave 91 of two seconds."""
    now = [0.0]
    monkeypatch.setattr("shardfold.tools.observe.progress.PLAIN_EVERY", 0.0)
    monkeypatch.setattr("shardfold.tools.observe.progress.DRAW_EVERY", 0.0)
    console = Console(file=io.StringIO(), width=200, force_terminal=is_terminal)
    console.get_time = lambda: now[0]
    with Progress(1000, console=console) as progress:
        for step in range(901, 910):
            known: dict[str, Any] = {"loss": 1.0, "lr": 0.1, "grad_norm": None, "tokens_per_s": 1.0, "memory_bytes": 1}
            now[0] += 2.0
            progress.update(StepMetrics(step=step, seconds=2.0 * (step - 900), **known))
    said = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert ("0:03:02" if is_terminal else "3:02 left") in said


def test_no_figure_of_a_table_is_cut():
    """At 40 columns every number stands whole in its line, as it does at 200."""
    rows = [SimpleNamespace(state=state, tier="device", table=1.7e6, padding=12.0, held=1700012) for state in "abc"]
    lines = []
    for width in (40, 200):
        console = Console(file=io.StringIO(), width=width)
        tables.print_whole(console, tables.memory_table(rows))
        lines.append([line.rstrip() for line in console.file.getvalue().splitlines()])  # pyright: ignore
    assert lines[0] == lines[1] and len(lines[0][3]) > 40 and "…" not in "".join(lines[0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e300])
def test_any_temperature_gives_text(temperature: float):
    """Above 0 it never overflows; next to 0 it is the likeliest byte."""
    model = GPT(GPTConfig(d_model=16, layers=1, heads=2, context=8))
    drawn = generate(model, b"ab", 6, temperature=temperature, seed=2**63 - 1)
    assert len(drawn) == 6
    if temperature < 1:
        assert drawn == generate(model, b"ab", 6, temperature=0)


def test_a_model_of_nan_is_shown_and_ends_its_text(tmp_path: Path):
    """Where training goes on all the same, its report is whole."""
    model = GPT(GPTConfig(d_model=16, layers=1, heads=2, context=8))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    assert generate(model, b"ab", 6) == b""
    console = Console(file=io.StringIO(), width=80)
    tables.print_whole(console, tables.quality_table({"GPT": torch.nan, "bigram": 3.5}))
    assert "nan" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for train in ([(1, torch.nan)], [(1, 8.0), (2, torch.inf)]):
        loss_picture(
            tmp_path / "loss.png", train=train, held_out=[(2, torch.nan)], baselines={"bigram": 3.5}, memory=[],
            title="",
        )  # fmt: skip
        assert (tmp_path / "loss.png").stat().st_size > 1000


@given(values=st.lists(st.floats(-100, 100), max_size=8), gap=st.floats(0.01, 10))
def test_labels_stand_apart_and_in_order(values: list[float], gap: float):
    """Heights are at least `gap` apart, highest first, and a label that has room stands where its value is."""
    heights = pictures.spread(values, gap)
    assert len(heights) == len(values)
    for above, below in pairwise(heights):
        assert above - below >= gap * (1 - 1e-6) - 1e-9
    ordered = sorted(values, reverse=True)
    if all(above - below >= gap for above, below in pairwise(ordered)):
        assert heights == pytest.approx(ordered)


def test_a_picture_of_three_steps_has_whole_steps_only():
    axes = Figure().subplots()
    pictures.draw_loss(axes, [(1, 8.0), (2, 7.9), (3, 7.8)], [(3, 7.9)], {"uniform": 8.0})
    assert all(tick == int(tick) for tick in axes.get_xticks())


@pytest.mark.sampled(30)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--accumulate", "4"], "--accumulate has no effect here"),
        (["--micro-batch", "2", "--batch", "64"], "--batch has no effect here"),
        (["--micro-batch", "2", "--price", "2"], "--price has no effect here"),
        (["--price", "-1"], "give what a device costs an hour"),
        (["--micro-batch", "2", "--order", "gpipe"], "--order has no effect here"),
        (["--micro-batch", "2", "--galore-rank", "4"], "--galore-rank has no effect here"),
        (["--micro-batch", "2", "--optimizer", "galor"], "Did you mean 'galore'?"),
        (["--inference", "--layout", "zero1"], "--layout has no effect here"),
        (["--inference", "--precision", "fp32"], "--precision has no effect here"),
        (
            ["--gpus", "2xL4", "--pipeline", "2", "--order", "1fb1"],
            "--order 1fb1 is not an order. Did you mean '1f1b'?",
        ),
        (["--real", "--gpus", "2xL4", "--pipeline", "2"], "--real does not go with --pipeline"),
        (["--gpus", "8xL4", "--expert", "2", "--micro-batch", "2"], "--expert 2: GPT has no experts that are known"),
        (["--gpus", "8xL4", "--pipeline", "8", "--micro-batch", "2"], "--pipeline 8 makes 8 stages, but the model has"),
        (
            ["--gpus", "8xL4", "--pipeline", "4", "--order", "interleaved", "--micro-batch", "2"],
            "--pipeline 4 --order interleaved makes 8 stages, but the model has 7 pieces",
        ),
        (["--model", "timm:"], "has nothing behind its colon: write timm:NAME"),
        (["--model", ":GPT"], "has nothing before its colon: write module:function"),
        (["--model", "transformers:whisper"], "WhisperForConditionalGeneration takes 'input_features'"),
        (["--model", "transformers:lama"], "transformers has no type of model 'lama'. Did you mean 'llama'?"),
        (["--html", "p.html", "--activations", "disk"], "--html does not follow --activations disk"),
        (["--micro-batch", "2", "--activations", "hots"], "Did you mean 'host'?"),
        (["--length", "99999999999"], "--length"),
        (["--micro-batch", "9" * 20], "from 1 to 1,000,000,000"),
        (["--micro-batch", "2", "--host", "0"], "above 0"),
        (["--model", "shardfold.errors:LIKE"], "name a function that gives a module"),
        (["--model", "shardfold.errors:nearest"], "called without arguments, fails: TypeError"),
        (["--model", "torch.nn:Identity"], "takes no input_ids"),
        (["--model", "torch_not.there:make"], "Python finds no module 'torch_not'. Run the command in the folder"),
        (["--model", "torch.nn:Identical"], "has no attribute 'Identical'. Write it as module:function."),
        (["--model", "tests.tools.test_cli_abuse:rows"], "The command made it by what the model's class"),
        (["--pipeline", "2", "--order", "nonsense"], "--order nonsense is not an order. Known: 1f1b, dualpipev, gpipe"),
        (["--model", "torch.nn:LazyBatchNorm1d"], "gets its shape from the first batch"),
        (["--model", "time:time"], "it is to give a module, or (module, micro-batch)"),
    ],
)
def test_what_a_plan_does_not_take_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, with the status of bad input: an option is followed or refused."""
    assert call("plan", *options) == launch.SAID
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("given", [{"num_hidden_layers": -2}, {"vocab_size": 0}, {"hidden_size": "wide"}])
def test_a_config_with_an_absurd_size_is_refused_by_its_name(
    given: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before transformers makes anything of it."""
    (path := tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **given}))
    assert call("plan", "--model", str(path)) == launch.SAID
    error = capsys.readouterr().err
    ((name, value),) = given.items()
    assert error == f"Error: --model {path}: {name} is {value!r}: it is a number of 1 or more.\n"


@pytest.mark.soak
def test_an_encoder_with_a_decoder_is_planned_as_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Labels are shifted by the token that its configuration may not have; the class is said."""
    given = ["--gpus", "2xL4", "--layout", "zero2", "--activations", "keep", "--micro-batch", "2", "--length", "8"]
    assert call("plan", "--model", "transformers:t5", *given) == 0
    assert "transformers:t5 (T5ForConditionalGeneration): 60,506,624 parameters" in capsys.readouterr().out


class Named(nn.Module):
    """A model as timm makes it."""

    def __init__(self, name: str, *, pretrained: bool) -> None:
        super().__init__()
        assert name == "small" and not pretrained
        self.pretrained_cfg = {"input_size": (3, 8, 8)}
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Linear(16, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def test_models_of_timm_are_planned_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without their weights, on images of their size; a name that is none has the nearest beside it."""
    names = ["small", "large"]
    stand_in = SimpleNamespace(is_model=names.__contains__, list_models=lambda: names, create_model=Named)
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    given = ["--gpus", "2xL4", "--layout", "zero2", "--activations", "keep", "--micro-batch", "4"]
    assert call("plan", "--model", "timm:small", *given) == 0
    assert "timm:small: 3,156 parameters" in capsys.readouterr().out
    assert planned_model("timm:small", samples=2).subject.batch[0].shape == (2, 3, 8, 8)
    assert call("plan", "--model", "timm:smal", *given) == launch.SAID
    assert "timm has no model 'smal'. Did you mean 'small'?" in capsys.readouterr().err
    assert call("plan", "--model", "timm:small", "--length", "8") == launch.SAID
    assert "--length is of tokens, and timm:small takes images" in capsys.readouterr().err


class Rows(nn.Linear):
    """It takes rows, by a name that is of tokens."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)


def rows() -> nn.Module:
    return Rows(4, 4)


@pytest.mark.soak
def test_a_micro_batch_has_the_labels_and_images_that_a_class_of_transformers_takes(tmp_path: Path) -> None:
    """A class or a number of each text; images beside texts, whose loss is asked for."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    name = "BertForSequenceClassification"
    for more, shape in (
        ({}, (2,)),
        ({"id2label": {"0": "score"}}, (2,)),
        ({"problem_type": "multi_label_classification", "id2label": {"0": "a", "1": "b", "2": "c"}}, (2, 3)),
    ):
        path = tmp_path / "bert.json"
        given = {"model_type": "bert", "architectures": [name], "vocab_size": 32, **sizes, **more}
        path.write_text(json.dumps(given))
        planned = planned_model(str(path), length=8, samples=2)
        assert planned.subject.batch["labels"].shape == shape and planned.made
        assert planned.subject.trace("bf16").loss == ""
    both = {"text_config": {**sizes, "vocab_size": 32}, "vision_config": {**sizes, "image_size": 32, "patch_size": 16}}
    path = tmp_path / "clip.json"
    path.write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"], **both}))
    planned = planned_model(str(path), samples=2)
    assert planned.subject.batch["pixel_values"].shape == (2, 3, 32, 32) and planned.length == 77
    assert planned.subject.trace("bf16").loss == ""


def test_of_wires_the_fastest_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each layout and mode, and how many there were; layouts that take no such wire keep their own."""
    given = ["plan", "--model", "tiny", "--gpus", "2x2xL4", "--batch", "8", "--wire", "auto:int8"]
    assert call(*given, "--layout", "zero3", "--layout", "zero1", "--activations", "keep") == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("zero")].count("zero3") == 1
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("zero")].count("zero1") == 1
    assert "ways were looked at, with all wires; each of the 2 lines has the fastest of its own." in printed


@pytest.mark.soak
def test_plans_of_one_device_and_of_no_parameters_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """No ranks are waited for, and what is left of a device is not called all of it."""
    assert call("plan", "--model", "tiny", "--gpus", "1xL4", "--layout", "zero1", "--activations", "keep") == 0
    assert "-0 %" not in capsys.readouterr().out
    assert call("plan", "--model", "tiny", "--gpus", "2xL4", "--inference") == 0
    assert "2 x L4 with 42.56 GiB for serving on all devices together;" in capsys.readouterr().out


def double() -> tuple[nn.Module, torch.Tensor]:
    """A model in fp64, with one parameter that is frozen."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    model[0].bias.requires_grad_(False)
    return model, torch.zeros(2, 8, dtype=torch.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "tiny"], "computed in bf16 with masters kept in fp32 under precision bf16;"),
        (["--model", "tiny", "--precision", "fp32"], "kept in fp32 under precision fp32;"),
        (["--model", "tests.tools.test_cli_abuse:double"], "144 parameters, kept in fp64 under precision bf16;"),
    ],
)
def test_a_plan_says_in_what_parameters_are_kept(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which need not be the dtype that a policy is called by."""
    given = ["--gpus", "2xL4", "--layout", "zero3", "--activations", "keep", "--micro-batch", "2"]
    assert call("plan", *given, *options) == 0
    assert said in capsys.readouterr().out.splitlines()[0]


def test_a_plan_counts_what_the_optimizer_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    """GaLore's moments are of its rank, so that less is at rest than of AdamW's, and the first line names it."""
    given = ["--model", "tiny", "--gpus", "1xL4", "--layout", "ddp", "--activations", "keep", "--micro-batch", "2"]
    rests = []
    for name, called in (("adamw", "AdamW"), ("galore", "GaLore")):
        more = ["--galore-rank", "4"] if name == "galore" else []
        assert call("plan", *given, "--optimizer", name, *more) == 0
        printed = capsys.readouterr().out
        assert f"; {called};" in printed.splitlines()[0]
        row = next(line for line in printed.splitlines() if line.startswith("ddp"))
        number, unit = row.split()[2:4]
        rests.append(float(number) * {"KiB": 2**10, "MiB": 2**20}[unit])
    groups = sf.optim.galore_groups(GPT(GPTConfig.named("tiny")), others=("*head*",), rank=4)
    low = [p for group in groups if "rank" in group for p in group["params"]]
    # Two moments of rank 4 along the longer side in place of whole ones, and a projector of the shorter side.
    saved = sum(8 * (p.numel() - 4 * max(p.shape)) - 16 * min(p.shape) for p in low)
    assert rests[0] - rests[1] == pytest.approx(saved, rel=0.02)


def test_a_plan_of_what_does_not_fit_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Of one micro-batch, of a search, and to serve a model; where one layout fits it is 0."""
    tiny = ["plan", "--model", "tiny", "--gpus", "2xL4", "--layout", "zero3", "--activations", "keep"]
    assert call(*tiny, "--memory", "1MiB", "--micro-batch", "2") == 1
    assert call(*tiny, "--memory", "1MiB") == 1
    assert call(*tiny, "--memory", "1GiB", "--micro-batch", "2") == 0
    assert call(*tiny, "--memory", "1GiB", "--price", "2") == 0
    assert call("plan", "--model", "tiny", "--gpus", "1xL4", "--memory", "1KiB", "--inference") == 1
    printed = capsys.readouterr().out
    assert "too much" in printed and "at 2 an hour" in printed
